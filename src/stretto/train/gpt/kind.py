# SPDX-License-Identifier: Apache-2.0
"""GPTs and Hugging Face models as a kind of model that `stretto train` trains, and the choice of their grids."""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from stretto.axes import EXPERT, NAMES, GridSizes, check_sizes
from stretto.cluster import Cluster
from stretto.planner.grids import divisors, every_grid
from stretto.train.config import GridConfig, TrainConfig, on_grid
from stretto.train.gpt.model_source import ModelSource
from stretto.train.gpt.preflight import (
    build_source,
    check_built,
    check_gpt,
    check_placement,
    open_data,
    open_folder,
    plan_of_run,
)
from stretto.train.kinds import ChosenGrid, ModelKind

if TYPE_CHECKING:
    from stretto.parallel import Grid
    from stretto.train.checkpoint.metadata import CheckpointMetadata
    from stretto.train.task import TrainTask


class GPTKind(ModelKind[TrainConfig]):
    """Models on a grid of all axes."""

    def check(self, config: TrainConfig) -> "CheckpointMetadata | None":
        return check_gpt(config)

    def make_task(self, config: TrainConfig, grid: "Grid") -> "TrainTask":
        from stretto.train.gpt.task import GPTTask

        return GPTTask(config, grid)

    def grid_checker(self, config: TrainConfig) -> Callable[[TrainConfig], None]:
        source, model = _source(config), None

        def check(other: TrainConfig) -> None:
            nonlocal model
            check_placement(other, source)
            model = source.build() if model is None else model
            check_built(other, source, model)

        return check

    def best_grid(self, config: TrainConfig, ranks: int) -> ChosenGrid | None:
        """Choose, of the grids that can hold the model, the one that the planner predicts to be the fastest.

        Where it cannot predict (CPUs without `cluster`, unknown models), the grid with the most parts of the batch,
        whose ranks communicate least.
        """
        source, legal = _source(config), list[TrainConfig]()
        for sizes in _candidates(config, ranks):
            with suppress(ValueError):
                smaller = on_grid(config, GridConfig(**sizes.sizes()))
                check_placement(smaller, source)
                legal.append(smaller)
        for refused, (best, seconds) in enumerate(_by_preference(legal, source)):
            with suppress(ValueError):
                check_built(best, source, source.build())
                return ChosenGrid(best, _explain(len(legal) - refused, seconds))
        return None


def _source(config: TrainConfig) -> ModelSource:
    return build_source(config, open_data(config), open_folder(config))


def _candidates(config: TrainConfig, ranks: int) -> Iterator[GridSizes]:
    """Every grid of so many ranks, with the run's pipeline stages where they divide the ranks, its experts', and parts
    of its context."""
    pipe = config.grid.pipe if ranks % config.grid.pipe == 0 else 1
    words = {name: size for name, size in config.grid.sizes().items() if name not in NAMES}
    for sizes in every_grid(ranks, pipe, divisors(config.grid.context)):
        plain = {axis: sizes[axis] for axis in NAMES}
        for more in (words, words | {EXPERT: 1, "expert_tensor": "cut"}):
            with suppress(ValueError):
                yield check_sizes({**plain, **more})
                break


def _explain(count: int, seconds: float | None) -> str:
    """Say why the best of `count` grids is the best. seconds: that the planner predicts for a step, if it can."""
    if count == 1:
        return "the only one that can hold the model"
    if seconds is None:
        return f"the most parts of the batch of {count} that can hold the model"
    return f"predicted to be the fastest of {count}, {seconds * 1e3:,.3g} ms a step"


def _by_preference(legal: list[TrainConfig], source: ModelSource) -> list[tuple[TrainConfig, float | None]]:
    """The configurations from the best to the worst, each with the predicted seconds of a step where that is known."""
    if len(legal) == 1:
        return [(legal[0], None)]
    with suppress(ValueError):  # a model or machine of which the planner knows too little
        predicted = [(plan_of_run(each, source, _cluster_of(each)), each) for each in legal]
        predicted = [(plan, each) for plan, each in predicted if plan.fits] or predicted
        predicted.sort(key=lambda pair: pair[0].step_time)
        return [(each, plan.step_time) for plan, each in predicted]
    return [(each, None) for each in sorted(legal, key=_distance)]


def _distance(config: TrainConfig) -> tuple[float, ...]:
    """Orders grids without a prediction: the most parts of the batch, data before z, no needless axis."""
    grid = config.grid
    return (-grid.batch_parts, -grid.data, *(math.log2(size) for size in (grid.pipe, grid.y, grid.x)))


def _cluster_of(config: TrainConfig) -> Cluster:
    """The run's cluster, or this machine where it has GPUs. Raises ValueError on CPUs without `cluster`."""
    if config.cluster is not None:
        return Cluster.find(config.cluster)
    if config.device != "cuda":
        raise ValueError("the run is on CPUs and names no cluster")
    return Cluster.detect()
