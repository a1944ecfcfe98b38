# SPDX-License-Identifier: Apache-2.0
"""Starts a training's ranks: `launch(entry, config)`. TrainingJob tells `stretto.launch` what it asks of a job."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from stretto.cluster.local_ranks import is_rank
from stretto.launch.elastic import continues_job, own_checkpoint
from stretto.launch.job import LaunchJob
from stretto.train.checkpoint import newest_checkpoint, unreadable
from stretto.train.checkpoint.folders import remove_leftovers, step_of
from stretto.train.config.gpt import TrainConfig
from stretto.train.config.options import AnyConfig, JobConfig
from stretto.train.config.rules import nearest_grid
from stretto.train.devices import resolve_device
from stretto.train.observe.metrics import METRICS_FILE, SUMMARY_FILE, last_step
from stretto.train.observe.progress import print_line

if TYPE_CHECKING:
    from stretto.launch.supervisor import StopTimeouts


def launch(
    entry: Callable[[JobConfig], None], config: JobConfig, timeouts: "StopTimeouts | None" = None
) -> signal.Signals | None:
    """Call `entry(config)` on every rank, as `stretto.launch.launch_job` does.

    Raises ValueError if torchrun started another number of ranks than `config.ranks` or a grid of `train.grids` has.
    """
    from stretto.launch.launcher import launch_job  # imports torch, which refusals need not

    return launch_job(entry, TrainingJob(config), timeouts)


class TrainingJob(LaunchJob):
    """A training, as `stretto.launch` sees it."""

    loader = "stretto.train.config:job_from_json"

    def __init__(self, config: JobConfig) -> None:
        self.argument, self.text = config, config.model_dump_json()
        self.out, self.steps_file = config.out, config.out / METRICS_FILE
        self.ranks, self.grid = config.ranks, config.grid.sizes()
        self.steps, self.timeout = config.train.steps, config.train.timeout
        self.max_restarts, self.retry_after = config.train.max_restarts, config.train.retry_after

    def uses_gpus(self) -> bool:
        return resolve_device(self.argument).device == "cuda"

    def on_started_ranks(self) -> "TrainingJob":
        return TrainingJob(resume_job(fit_started_ranks(self.argument)))

    def on_slots(self, slots: int) -> "tuple[TrainingJob, str] | None":
        from stretto.train.smaller_grids import choose_grid

        chosen = choose_grid(self.argument, slots)
        return None if chosen is None else (TrainingJob(chosen.config), chosen.why)

    def resuming(self, checkpoint: Path | None) -> "TrainingJob":
        return TrainingJob(resume_from(self.argument, "latest" if checkpoint is None else str(checkpoint)))

    def newest_checkpoint(self, before: Path | None = None) -> Path | None:
        return newest_checkpoint(self.out, before=before)

    def step_of(self, checkpoint: Path) -> int:
        return step_of(checkpoint)

    def last_step(self) -> int | None:
        return last_step(self.out)

    def where_to_continue(self, reason: str) -> tuple[Path | None, str]:
        newest = self.newest_checkpoint()
        if newest is None:
            return None, "there is no checkpoint to continue from"
        if unreadable(newest) not in reason:
            return newest, f"the last checkpoint is {newest}: continue with --set train.resume=latest"
        if (older := self.newest_checkpoint(before=newest)) is None:
            return None, "there is no checkpoint to continue from"
        return older, f"the checkpoint before it is {older}: continue with --set train.resume={older}"

    def remove_leftovers(self) -> None:
        remove_leftovers(self.out)
        for name in (METRICS_FILE, SUMMARY_FILE):
            for partial in self.out.glob(f"{name}.*.partial"):
                partial.unlink(missing_ok=True)

    def report(self, text: str) -> None:
        print_line(text)


def fit_started_ranks(config: AnyConfig) -> AnyConfig:
    """The configuration on the grid for as many ranks as torchrun has started: its own, or one of `train.grids`.

    torchrun restarts all ranks when one fails (`--max-restarts`) or when a node joins or leaves (`--nnodes=1:2`), maybe
    with another WORLD_SIZE.

    Raises ValueError if there is none for that number. Returns it as it is in a process that is no rank.
    """
    if not is_rank() or (started := int(os.environ["WORLD_SIZE"])) == config.ranks:
        return config
    if config.train.grids is not None:
        from stretto.train.smaller_grids import choose_grid_of  # it may have to open the data

        if (chosen := choose_grid_of(config, started)) is not None:
            return cast(AnyConfig, chosen.config)  # a copy of `config`
    grid = f", and a grid such as {nearest_grid(config.grid, started)}" if isinstance(config, TrainConfig) else ""
    named = "" if config.train.grids is None else ", for which train.grids has no grid"
    raise ValueError(f"ranks is {config.ranks}, but torchrun started {started}{named}; ranks={started} would do{grid}")


def resume_job(config: AnyConfig) -> AnyConfig:
    """The configuration that resumes the newest checkpoint of this job, if torchrun has started its ranks before."""
    if continues_job(config.out) and own_checkpoint(TrainingJob(config), newest_checkpoint(config.out)) is not None:
        return resume_from(config, "latest")
    return config


def resume_from(config: AnyConfig, resume: str | None) -> AnyConfig:
    return config.model_copy(update={"train": config.train.model_copy(update={"resume": resume})})
