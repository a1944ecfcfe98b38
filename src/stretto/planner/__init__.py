# SPDX-License-Identifier: Apache-2.0
"""Predicts which grid trains a model fastest and whether it fits into memory. Imports no GPU library; needs no GPU.

Modules, as a plan passes through them:

    architecture_loader, architecture, layers         the sizes of a model, and the layers of its blocks
    search, search_space, grids, workload             `plan`: the grids and options that it compares
    documents                                         which documents sequences pack, and how context shares them
    step                                              the record of a step, and the rules of overlap
    step_recorder                                     makes it, with bytes and seconds of these three:
    communication, collective_times, compute
    cost                                              adds a record up; `stretto.simulator.training` plays it
    memory, activations, optimizer_state              whether the grid fits
    grid_plan, explanation                            the result, and why it has its place in the ranking
    pipeline, experts                                 the same for pipeline stages, and for mixtures of experts
"""

from typing import TYPE_CHECKING

from stretto.lazy import attach

if TYPE_CHECKING:
    from stretto.planner.architecture import Architecture
    from stretto.planner.architecture_loader import read_architecture
    from stretto.planner.grid_plan import GridPlan
    from stretto.planner.layers import Linear
    from stretto.planner.search import plan, predict

__all__ = ["Architecture", "GridPlan", "Linear", "plan", "predict", "read_architecture"]

__getattr__, __dir__ = attach(__name__)
