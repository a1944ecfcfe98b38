"""Which grid is fastest and fits, before there is a machine. No GPU library is imported."""

from stretto.planner.architecture import Architecture, Linear
from stretto.planner.reading import read_architecture
from stretto.planner.search import Plan, plan, predict

__all__ = ["Architecture", "Linear", "Plan", "plan", "predict", "read_architecture"]
