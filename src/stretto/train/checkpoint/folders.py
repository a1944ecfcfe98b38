# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders: finds the checkpoints of a run, and prepares the run's folder for new ones."""

import logging
import os
import re
import shutil
from pathlib import Path

from stretto.train.checkpoint.metadata import read_metadata
from stretto.train.checkpoint.torch_format import read_index

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8,})")


def checkpoint_path(out: Path, step: int) -> Path:
    """The folder of the checkpoint of `step`, of the run in `out`."""
    return out / "checkpoints" / f"step-{step:08d}"


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder's name is that of a checkpoint of a run."""
    return _NAME.fullmatch(name) is not None


def unreadable(path: Path) -> str:
    """The beginning of the error message when the contents of a checkpoint are damaged."""
    return f"the checkpoint {path} cannot be read"


def find_checkpoint(out: Path, resume: str | Path | None) -> Path | None:
    """Find the checkpoint that the option `train.resume` names. Needs no process group.

    resume: None for none; "latest" for the newest complete checkpoint of the run in `out`, or None if the run has no
    checkpoint yet; otherwise the folder of a checkpoint, or of a run whose newest one is taken. Incomplete checkpoints
    are reported and skipped. Raises ValueError if a named folder has no complete checkpoint, and if "latest" finds only
    incomplete ones: starting over must be asked for.
    """
    if resume is None:
        return None
    if resume != "latest":
        return resolve_checkpoint(Path(os.path.expanduser(resume)))
    if (newest := newest_checkpoint(out)) is None and (unusable := checkpoints_by_step(out)):
        raise ValueError(
            f"train.resume is 'latest', but none of the {len(unusable)} checkpoints in {out / 'checkpoints'} can be "
            f"used: {_fault(unusable[-1])}; train.resume='none' starts anew, and sets them aside"
        )
    return newest


def newest_checkpoint(out: Path, *, before: Path | None = None) -> Path | None:
    """Find the newest complete checkpoint of the run in `out`, older than `before` if that is given, or None.

    Incomplete checkpoints are reported and skipped.
    """
    for path in reversed(checkpoints_by_step(out)):
        if before is not None and step_of(path) >= step_of(before):
            continue
        if fault := _fault(path):
            logger.warning("passing over a checkpoint that cannot be used: %s", fault)
        else:
            return path
    return None


def resolve_checkpoint(folder: Path) -> Path:
    """Find the checkpoint that a folder means: itself, or the newest complete one if it is a run's folder.

    Raises ValueError when there is none.
    """
    if not (folder / "checkpoints").is_dir():
        read_index(folder)
        return folder
    if (newest := newest_checkpoint(folder)) is None:
        raise ValueError(f"the run in {folder} has no complete checkpoint")
    return newest


def prepare_folder(out: Path, step: int) -> None:
    """Prepare `out` for a run that starts after `step`. For rank 0, before it trains.

    Deletes what an interrupted process left half-written or half-deleted. Checkpoints of later steps belong to an
    earlier run that this one restarts: they are moved to another folder, so that "latest" finds this run's.
    """
    folder = out / "checkpoints"
    if not folder.is_dir():
        return
    remove_leftovers(out)
    later = [path for path in checkpoints_by_step(out) if step_of(path) > step]
    if not later:
        return
    number = 1 + sum(1 for _ in folder.glob("earlier-run-*"))
    aside = folder / f"earlier-run-{number}"
    aside.mkdir()
    for path in later:
        path.rename(aside / path.name)
    logger.warning("checkpoints of an earlier run, after step %d, were moved to %s", step, aside)


def remove_leftovers(out: Path) -> None:
    """Delete what interrupted processes left half-written or half-deleted. Only where no process is writing."""
    for leftover in (out / "checkpoints").glob(".step-*"):
        shutil.rmtree(leftover)


def remove_folder(path: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that an incomplete one never has its name."""
    if not path.exists():
        return
    doomed = path.with_name(f".{path.name}.deleting")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


def checkpoints_by_step(out: Path) -> list[Path]:
    """List the checkpoints of the run in `out`, complete or not, oldest first."""
    found = [path for path in (out / "checkpoints").glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=step_of)


def _fault(path: Path) -> str | None:
    """Say why the checkpoint at `path` cannot be used; None if it can."""
    try:
        read_metadata(path)
    except ValueError as error:
        return str(error)
    return None


def step_of(path: Path) -> int:
    """The step of a checkpoint's folder."""
    return int(path.name.removeprefix("step-"))
