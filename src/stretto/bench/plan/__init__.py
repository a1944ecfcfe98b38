# SPDX-License-Identifier: Apache-2.0
"""`stretto bench plan` and `published`: the planner's predictions beside measured and published step times."""
