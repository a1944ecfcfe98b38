# SPDX-License-Identifier: Apache-2.0
"""Predict which grid of GPUs trains a model fastest and fits in memory. Imports no GPU library, needs no GPU."""

from stretto.deprecated import alias
from stretto.planner.architecture import Architecture
from stretto.planner.architecture_loader import read_architecture
from stretto.planner.layers import Linear
from stretto.planner.search import GridPlan, plan, predict

__all__ = ["Architecture", "GridPlan", "Linear", "plan", "predict", "read_architecture"]

__getattr__ = alias(__name__, {"Plan": "GridPlan"})
