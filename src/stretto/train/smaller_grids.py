# SPDX-License-Identifier: Apache-2.0
"""The grids of `train.grids`, on which a run continues with fewer ranks: checks them, and chooses one.

A list is taken in its order; for `auto` the model's kind chooses the best grid of a number of ranks.
"""

from stretto.quantities import counted
from stretto.train.config import on_grid
from stretto.train.config.options import JobConfig, grid_from_text
from stretto.train.kinds import ChosenGrid, kind_of


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
    check = kind_of(config).grid_checker(config)
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
        return ChosenGrid(on_grid(config, grid), f"the largest of train.grids for {counted(ranks, 'rank')}")
    if named == "auto":
        for fewer in range(ranks, 0, -1):
            if (chosen := kind_of(config).best_grid(config, fewer)) is not None:
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
