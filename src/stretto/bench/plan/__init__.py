# SPDX-License-Identifier: Apache-2.0
"""`stretto bench plan` and `published`: the planner's predictions compared with measured and published step times."""
