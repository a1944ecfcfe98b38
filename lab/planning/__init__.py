# SPDX-License-Identifier: Apache-2.0
"""`python -m lab plan` and `published`: the planner's predictions compared with measured and published step times."""
