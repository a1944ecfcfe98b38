"""What the training loop asks of a model: `train.gpt.task` and `train.dlrm.task` answer."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from stretto.parallel import Grid
from stretto.train.checkpoint.metadata import CheckpointMetadata
from stretto.train.config.options import JobConfig

logger = logging.getLogger(__name__)

Evaluation = Callable[[], Mapping[str, float | None]]


class TrainTask(ABC):
    """What a step needs, on this rank. Every rank has one, and calls what is collective in the same order."""

    def __init__(self, config: JobConfig, grid: Grid) -> None:
        self.config, self.grid = config, grid

    @abstractmethod
    def step(self, step: int, lr: float) -> tuple[Tensor, Tensor]:
        """Step `step` (1 is the first): the global mean loss and the gradient's norm, 0-dim, on the device."""

    @abstractmethod
    def resume(self, checkpoint: Path) -> int:
        """Load a checkpoint. Returns its step."""

    @abstractmethod
    def save(self, step: int) -> None:
        """Write the checkpoint of `step`."""

    @abstractmethod
    def data_description(self) -> dict[str, Any]:
        """What a resumed run must share to be trained on the same in the same order."""

    @abstractmethod
    def parameters(self) -> int:
        """How many numbers the whole model has."""

    def evaluation(self, step: int) -> Evaluation | None:
        """What to measure on data that is not trained on, if it is due after `step`."""
        return None

    def predict(self) -> dict[str, Any] | None:
        """What the planner expects of the run, if it is asked."""
        return None

    def layout(self) -> str | None:
        """What lies on which rank, for the log, where the grid does not say it."""
        return None

    def close(self) -> None:
        """Let go of what would outlive the process group."""
        return

    def compare_data(self, metadata: CheckpointMetadata) -> None:
        """Warn where a checkpoint's data is not this run's."""
        if self.grid.coordinate("world") != 0:
            return
        for key, now in self.data_description().items():
            if metadata.data.get(key) != now:
                logger.warning(
                    "the checkpoint's data had %s=%r, and this run's has %r: it will not see the "
                    "%s that it would have seen",
                    key,
                    metadata.data.get(key),
                    now,
                    "samples" if self.config.unit == "samples" else "sequences",
                )
