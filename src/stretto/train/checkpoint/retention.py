# SPDX-License-Identifier: Apache-2.0
"""Choice of the checkpoints to keep: the newest, one every so many steps, the best by evaluation loss. No torch."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stretto.train.checkpoint.folders import checkpoints_by_step, remove_folder, step_of
from stretto.train.checkpoint.metadata import read_metadata
from stretto.train.config.options import RunOptions

logger = logging.getLogger(__name__)
LOSS = "evaluation_loss"
"""The entry of a checkpoint's `evaluation` by which the best are kept; lower is better."""


@dataclass(frozen=True)
class Retention:
    """A checkpoint is kept if any of the three rules applies.

    newest: how many of the newest are kept, at least 1. every: those of multiples of so many steps are always kept
    (None: none is). best: how many of those with the lowest evaluation loss are kept.
    """

    newest: int = 2
    every: int | None = None
    best: int = 0

    @classmethod
    def of(cls, options: RunOptions) -> "Retention":
        """The rule that a run's options state."""
        return cls(options.keep_checkpoints, options.keep_every, options.keep_best)

    def surplus(self, losses: Mapping[int, float | None]) -> list[int]:
        """List the steps whose checkpoints are not kept, oldest first.

        losses: the evaluation loss of each checkpoint, by step; None for one that was not evaluated, which is never
        among the best. Of equal losses the earlier step is the better.
        """
        steps = sorted(losses)
        kept = set(steps[-self.newest :])
        kept |= {step for step in steps if self.every is not None and step % self.every == 0}
        evaluated = [(loss, step) for step in steps if (loss := losses[step]) is not None]
        kept |= {step for _, step in sorted(evaluated)[: self.best]}
        return [step for step in steps if step not in kept]


def remove_surplus(out: Path, retention: Retention) -> None:
    """Delete the checkpoints of the run in `out` that `retention` does not keep. Call it when a new one is whole."""
    paths = {step_of(path): path for path in checkpoints_by_step(out)}
    losses = {step: evaluation_loss(path) if retention.best else None for step, path in paths.items()}
    for step in retention.surplus(losses):
        remove_folder(paths[step])


def evaluation_loss(path: Path) -> float | None:
    """The evaluation loss that a checkpoint's index states; None if it states none, or cannot be read."""
    try:
        return read_metadata(path).evaluation.get(LOSS)
    except ValueError as error:
        logger.debug("%s has no evaluation: %s", path, error)
        return None
