# SPDX-License-Identifier: Apache-2.0
"""DLRMs as a kind of model that `stretto train` trains."""

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from stretto.recommendation.training.config import DLRMTrainConfig
from stretto.recommendation.training.preflight import check_dlrm, check_memory
from stretto.train.config import GridConfig, on_grid
from stretto.train.kinds import ChosenGrid, ModelKind

if TYPE_CHECKING:
    from stretto.parallel import Grid
    from stretto.train.checkpoint.metadata import CheckpointMetadata
    from stretto.train.task import TrainTask


class DLRMKind(ModelKind[DLRMTrainConfig]):
    """Models whose tables are distributed over the only axis, data."""

    def check(self, config: DLRMTrainConfig) -> "CheckpointMetadata | None":
        return check_dlrm(config)

    def make_task(self, config: DLRMTrainConfig, grid: "Grid") -> "TrainTask":
        from stretto.recommendation.training.task import DLRMTask

        return DLRMTask(config, grid)

    def grid_checker(self, config: DLRMTrainConfig) -> Callable[[DLRMTrainConfig], None]:
        return check_memory

    def best_grid(self, config: DLRMTrainConfig, ranks: int) -> ChosenGrid | None:
        with suppress(ValueError):
            of_data = on_grid(config, GridConfig(data=ranks))
            check_memory(of_data)
            return ChosenGrid(of_data, "data is a DLRM's only axis")
        return None
