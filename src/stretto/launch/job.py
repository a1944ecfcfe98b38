# SPDX-License-Identifier: Apache-2.0
"""Describes a job to `launch`, which starts, watches and restarts ranks of any kind: see `stretto.train.job`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class LaunchJob(Protocol):
    """A job of several ranks: how it is started, and, by its methods, what of it lies on the disk.

    argument: what each rank's entry is called with. loader: the function ("module:function") that makes it of `text` in
    a rank's process. timeout: seconds without progress until a rank is stuck. steps: the last one to train.
    steps_file: gets a line for each step, and is replaced when ranks begin. grid: sizes of its axes.
    """

    argument: Any
    loader: str
    text: str
    out: Path
    steps_file: Path
    ranks: int
    grid: Mapping[str, int]
    steps: int
    timeout: float
    max_restarts: int
    retry_after: float

    def uses_gpus(self) -> bool:
        """Check whether each rank needs a GPU."""

    def on_started_ranks(self) -> "LaunchJob":
        """The job on as many ranks as another launcher has started, from the job's own newest checkpoint."""

    def on_slots(self, slots: int) -> "tuple[LaunchJob, str] | None":
        """The job on the largest grid for so many ranks, and why that was taken; None if there is none."""

    def resuming(self, checkpoint: Path | None) -> "LaunchJob":
        """The job from a checkpoint: the one named, or the newest that can be loaded (None)."""

    def newest_checkpoint(self, before: Path | None = None) -> Path | None:
        """The newest complete checkpoint, older than `before` if that is given."""

    def step_of(self, checkpoint: Path) -> int:
        """The step after which a checkpoint was written."""

    def last_step(self) -> int | None:
        """The last step in `steps_file`; None without one."""

    def where_to_continue(self, reason: str) -> tuple[Path | None, str]:
        """The newest checkpoint that can be loaded, if a failure's reason says that one cannot, and how to use it."""

    def remove_leftovers(self) -> None:
        """Delete what killed ranks have left half-written. Only where no rank is writing."""

    def report(self, text: str) -> None:
        """Show the user a line."""
