# SPDX-License-Identifier: Apache-2.0
"""The grids of `train.grids`, on which a run continues with fewer ranks: checks them, and chooses one.

A list is taken in its order; of `auto` the planner predicts every legal grid with the run's own options, and the
fastest that fits into a GPU's memory is taken. Where it cannot predict (CPUs without `cluster`, unknown models), that
is the grid with the most parts of the batch, whose ranks communicate least.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from stretto.axes import EXPERT, NAMES, GridSizes, check_sizes
from stretto.cluster import Cluster
from stretto.planner.grids import grids_of_stages
from stretto.train.config import DLRMTrainConfig, GridConfig, TrainConfig, on_grid
from stretto.train.config.options import JobConfig, grid_from_text
from stretto.train.dlrm.preflight import check_memory
from stretto.train.gpt.model_source import ModelSource
from stretto.train.gpt.preflight import build_source, check_built, check_placement, open_data, open_folder, plan_of_run


@dataclass(frozen=True)
class ChosenGrid:
    """A run's configuration on some number of ranks, and why this grid was taken."""

    config: JobConfig
    why: str


def check_smaller_grids(config: JobConfig) -> None:
    """Check each grid of `train.grids` as the run's own is checked. Raises ValueError that names the grid."""
    named = config.train.grids
    if named is None:
        return
    if named == "auto":
        if config.ranks > 1 and choose_grid(config, config.ranks - 1) is None:
            raise ValueError(
                f"train.grids is 'auto', but no grid of fewer than {config.ranks} ranks can train this run; "
                "train.grids=none would do"
            )
        return
    check = _checker(config)
    for text in named:
        grid = grid_from_text(text)
        if grid.ranks >= config.ranks:
            raise ValueError(
                f"train.grids has the grid {text}, of {grid.ranks} ranks, but must have fewer than the run's "
                f"{config.ranks}"
            )
        try:
            check(on_grid(config, grid))
        except ValueError as error:
            raise ValueError(f"train.grids has the grid {text}, with which {error}") from error


def choose_grid(config: JobConfig, ranks: int) -> ChosenGrid | None:
    """The configuration on the largest grid for at most so many ranks: the run's own, or of `train.grids`."""
    if ranks >= config.ranks:
        return ChosenGrid(config, "the run's grid")
    named = config.train.grids
    if isinstance(named, list):
        fitting = [grid for grid in map(grid_from_text, named) if grid.ranks <= ranks]
        if not fitting:
            return None
        grid = max(fitting, key=lambda each: each.ranks)  # the first of those with as many
        return ChosenGrid(on_grid(config, grid), f"the largest of train.grids for {_ranks(ranks)}")
    if named == "auto":
        for fewer in range(ranks, 0, -1):
            if (chosen := _choose_automatically(config, fewer)) is not None:
                return chosen
    return None


def choose_grid_of(config: JobConfig, ranks: int) -> ChosenGrid | None:
    """The configuration on the first grid of exactly so many ranks: the run's own, or of `train.grids`."""
    if ranks == config.ranks:
        return ChosenGrid(config, "the run's grid")
    if ranks > config.ranks or config.train.grids is None:
        return None
    chosen = choose_grid(config, ranks)
    return chosen if chosen is not None and chosen.config.ranks == ranks else None


def _ranks(number: int) -> str:
    return f"{number} rank{'' if number == 1 else 's'}"


def _checker(config: JobConfig) -> Callable[[Any], None]:
    """A function that raises ValueError for a configuration whose grid cannot hold the model."""
    match config:
        case TrainConfig():
            source, model = _source(config), None

            def check(other: TrainConfig) -> None:
                nonlocal model
                check_placement(other, source)
                model = source.build() if model is None else model
                check_built(other, source, model)

            return check
        case DLRMTrainConfig():
            return lambda other: check_memory(other, other.model.to_dlrm())
    raise TypeError(f"there is nothing to train a {type(config).__name__} with")


def _source(config: TrainConfig) -> ModelSource:
    return build_source(config, open_data(config), open_folder(config))


def _choose_automatically(config: JobConfig, ranks: int) -> ChosenGrid | None:
    """The best legal grid of exactly so many ranks."""
    if isinstance(config, DLRMTrainConfig):
        with suppress(ValueError):
            of_data = on_grid(config, GridConfig(data=ranks))
            check_memory(of_data, of_data.model.to_dlrm())
            return ChosenGrid(of_data, "data is a DLRM's only axis")
        return None
    assert isinstance(config, TrainConfig)
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


def _candidates(config: TrainConfig, ranks: int) -> Iterator[GridSizes]:
    """Every grid of so many ranks, with the run's pipeline stages where they divide the ranks, and its experts'."""
    pipe = config.grid.pipe if ranks % config.grid.pipe == 0 else 1
    of_experts = {name: size for name, size in config.grid.sizes().items() if name not in NAMES}
    for sizes in grids_of_stages(ranks, pipe):
        plain = {axis: sizes[axis] for axis in NAMES}
        for more in (of_experts, {EXPERT: 1}) if config.grid.expert > 1 else ({},):
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
