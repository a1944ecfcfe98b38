# SPDX-License-Identifier: Apache-2.0
"""The interface between the training loop and a kind of model (`stretto.train.kinds`)."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from stretto.parallel import Grid
from stretto.train.checkpoint.metadata import CheckpointMetadata
from stretto.train.checkpoint.storage import ShardedState
from stretto.train.config import JobConfig
from stretto.train.data.documents import find_changes

logger = logging.getLogger(__name__)

Evaluation = Callable[[], Mapping[str, float | None]]


class TrainTask(ABC):
    """A model, its optimizer and its data. Every rank has one, and all call its collective methods in one order."""

    skips_overflows = False  # whether a step whose gradients are not finite changes nothing

    def __init__(self, config: JobConfig, grid: Grid) -> None:
        self.config, self.grid = config, grid
        self.before_update: Callable[[], None] = lambda: None
        """Called on the stream of a step before any of its kernels changes `state`: a copy of it may not have ended."""

    @abstractmethod
    def step(self, step: int, lr: float) -> tuple[Tensor, Tensor]:
        """Run step `step` (the first is 1). Returns the global mean loss and the gradient's norm, 0-dim, on the device.

        Collective. Does not wait for the device.
        """

    def start(self) -> Path | None:
        """Load the weights that training starts from, where they are not random, and return the file that they are of.

        Not called in a run that resumes.
        """
        return None

    @abstractmethod
    def resume(self, checkpoint: Path) -> int:
        """Load a checkpoint. Returns its step. Collective."""

    @abstractmethod
    def state(self) -> dict[str, ShardedState]:
        """The content of a checkpoint: weights and optimizer state of this rank, `training_state`."""

    @abstractmethod
    def description(self) -> dict[str, Any]:
        """Description of this run for a checkpoint's index: optimizer, model, run and data of CheckpointMetadata."""

    @abstractmethod
    def data_description(self) -> dict[str, Any]:
        """Describe the data and its order. A resumed run with an equal description sees the same batches."""

    @abstractmethod
    def num_parameters(self) -> int:
        """Count the parameters of the whole model."""

    @abstractmethod
    def read_batch(self, step: int) -> dict[str, NDArray[Any]]:
        """Read this rank's part of a step's batch again, as arrays by name, with the indices of its samples."""

    @abstractmethod
    def weights(self) -> Mapping[str, Tensor]:
        """The model's parameters that this rank has, by name."""

    def replicated(self) -> Mapping[str, Tensor]:
        """The parameters of which other ranks may hold the same shards: DTensors, or tensors that all ranks hold."""
        return self.weights()

    def masters(self) -> Mapping[str, Tensor]:
        """This rank's shards of fp32 weights other than those of `replicated`, by name, if they are on the device."""
        return {}

    def full_rate(self) -> float | None:
        """Tokens (or samples) per second if all ranks computed at their peak FLOP/s; None if that is unknown."""
        return None

    def evaluation(self, step: int) -> Evaluation | None:
        """The function that evaluates the model on held-out data, if an evaluation is due after `step`."""
        return None

    def routing(self) -> Tensor | None:
        """Statistics of a mixture of experts' routers in the last step (`observe.experts.pack`), on the device."""
        return None

    def predict(self) -> dict[str, Any] | None:
        """Predict step time, exposed communication and peak memory with the planner, if the run names a cluster."""
        return None

    def count_layers(self) -> int:
        """The model's layers on this rank; 0 for a model without layers of one kind."""
        return 0

    def layout(self) -> str | None:
        """Describe the placement of the model on the ranks for the log, where the grid does not determine it."""
        return None

    def close(self) -> None:
        """Free what must not outlive the process group."""
        return

    def compare_data(self, metadata: CheckpointMetadata) -> None:
        """Warn, on rank 0, if a checkpoint's data is not this run's."""
        if self.grid.coordinate("world") != 0:
            return
        if not metadata.model:
            logger.warning(
                "stretto train has not written the checkpoint: it is continued from step %d%s; data is read from "
                "where this run would be at that step",
                metadata.step,
                f", and the state of {metadata.optimizer}" if metadata.optimizer else ", without an optimizer's state",
            )
            return
        described = self.data_description()
        before, files = metadata.data.get("files"), described.pop("files", None)
        if before and files and metadata.data.get("fingerprint") != described["fingerprint"]:
            for change in find_changes(before, files):
                logger.warning("the data of the checkpoint is not this run's: %s", change)
        for key, now in described.items():
            if metadata.data.get(key) != now:
                logger.warning(
                    "the checkpoint's data had %s=%r, and this run's has %r: the run will not continue with the same "
                    "%s",
                    key,
                    metadata.data.get(key),
                    now,
                    "samples" if self.config.unit == "samples" else "sequences",
                )
