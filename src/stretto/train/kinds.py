# SPDX-License-Identifier: Apache-2.0
"""The kinds of models that `stretto train` can train, by `model.kind`. A new kind is registered here, in `KINDS`.

A kind builds on training, which finds it by name: it imports modules of `stretto.train`, and none of them imports it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

if TYPE_CHECKING:
    from stretto.parallel import Grid
    from stretto.train.checkpoint.metadata import CheckpointMetadata
    from stretto.train.config.options import JobConfig
    from stretto.train.task import TrainTask

# The homes of a kind's configuration, which is read without torch and numpy, and of its ModelKind.
KINDS = {
    "gpt": ("stretto.train.config.gpt:TrainConfig", "stretto.train.gpt.kind:GPTKind"),
    "dlrm": ("stretto.recommendation.training.config:DLRMTrainConfig", "stretto.recommendation.training.kind:DLRMKind"),
}

Config = TypeVar("Config", bound="JobConfig")


@dataclass(frozen=True)
class ChosenGrid:
    """A run's configuration on some number of ranks, and why this grid was taken."""

    config: "JobConfig"
    why: str


class ModelKind(ABC, Generic[Config]):
    """Functions that training asks of a kind of model before it has a task. Only `make_task` needs torch."""

    @abstractmethod
    def check(self, config: Config) -> "CheckpointMetadata | None":
        """Check what only this kind has. Returns the index of the checkpoint to resume, if any. Raises ValueError."""

    @abstractmethod
    def make_task(self, config: Config, grid: "Grid") -> "TrainTask":
        """Make the model, its optimizers and its data. Collective."""

    @abstractmethod
    def grid_checker(self, config: Config) -> Callable[[Config], None]:
        """Make a function that raises ValueError for `config` on a grid that cannot hold the model."""

    @abstractmethod
    def best_grid(self, config: Config, ranks: int) -> ChosenGrid | None:
        """Choose the best grid of exactly so many ranks that can hold the model, if there is one."""


def config_type(name: str) -> "type[JobConfig]":
    return cast("type[JobConfig]", _load(KINDS[name][0]))


def kind_of(config: "JobConfig") -> ModelKind[Any]:
    """The kind of model that a run trains."""
    return cast(ModelKind[Any], _load(KINDS[config.kind][1])())


def _load(home: str) -> Any:
    module, _, name = home.partition(":")
    return getattr(import_module(module), name)
