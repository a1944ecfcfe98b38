# SPDX-License-Identifier: Apache-2.0
"""Lets a job continue after its ranks were restarted, by Stretto's launcher or by torchrun's agents.

torchrun restarts all ranks when one fails (`--max-restarts`) or when a node joins or leaves (`--nnodes=1:2`), maybe
with another WORLD_SIZE, for which the job must have a grid (`LaunchJob.on_started_ranks`).

Rank 0 leaves a mark in the run's folder once training begins: the job's id (TORCHELASTIC_RUN_ID) and the step after
which it began. A rank that finds its own job's mark resumes the newest checkpoint after that step; older checkpoints
are of an earlier run. TORCHELASTIC_RESTART_COUNT does not suffice: torchrun does not count nodes that come or go, and
a node that is new counts from 0.
"""

import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from stretto.atomic_files import write_atomically
from stretto.cluster.local_ranks import is_rank
from stretto.launch.job import LaunchJob

logger = logging.getLogger(__name__)

MARK = ".job.json"
JOB = "TORCHELASTIC_RUN_ID"
ATTEMPT = "STRETTO_ATTEMPT"  # in the ranks of Stretto's launcher: how often they were started before
CHECKED = "STRETTO_CHECKED"  # where `launch` calls the entry, whose configuration the command has checked
NO_ID = "none"  # torchrun's, without --rdzv-id: not one job's alone


def continues_job(out: Path) -> bool:
    """Check whether an earlier start of this process's job has trained in the run's folder."""
    job = os.environ.get(JOB)
    if not is_rank() or job is None or (mark := _read_mark(out)) is None or mark["job"] != job:
        return False
    return job != NO_ID or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def mark_begun(out: Path, start: int) -> None:
    """Write the job's mark: it trains in this folder, from after step `start` on. For rank 0, once for each start."""
    job = os.environ.get(JOB)
    if job is None or continues_job(out):
        return
    try:
        text = json.dumps({"job": job, "start": start}).encode()
        write_atomically(out / MARK, text)
    except OSError as error:  # a full disk
        logger.warning("%s cannot be written (%s): a restart will begin as this start did", out / MARK, error.strerror)


def mark_ended(out: Path) -> None:
    """Delete the mark of torchrun's job, which has trained all steps. Stretto's launcher deletes its own."""
    if ATTEMPT not in os.environ:
        remove_mark(out)


def remove_mark(out: Path) -> None:
    """Delete the mark of a job that has ended."""
    with suppress(OSError):
        (out / MARK).unlink(missing_ok=True)


def step_of_start(out: Path, job: str | None = None) -> int | None:
    """The step after which the job began to train; None if it has not, or if the mark is not that of `job`."""
    mark = _read_mark(out)
    return None if mark is None or job not in (None, mark["job"]) else int(mark["start"])


def own_checkpoint(job: LaunchJob, checkpoint: Path | None, name: str | None = None) -> Path | None:
    """The checkpoint, if the marked job has written it and not an earlier run. name: the job's id, if it matters."""
    start = step_of_start(job.out, name)
    return checkpoint if checkpoint is not None and start is not None and job.step_of(checkpoint) > start else None


def _read_mark(out: Path) -> dict[str, Any] | None:
    try:
        mark = json.loads((out / MARK).read_text(encoding="utf-8"))
        return mark if isinstance(mark["job"], str) and isinstance(mark["start"], int) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
