"""Finds the checkpoints of a run, and prepares the run's folder for new ones."""

import logging
import os
import re
import shutil
from pathlib import Path

from stretto.train.checkpoint.metadata import read_metadata

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8,})")


def checkpoint_path(out: Path, step: int) -> Path:
    """Where the checkpoint of `step` of the run in `out` lies."""
    return out / "checkpoints" / f"step-{step:08d}"


def find_checkpoint(out: Path, resume: str | Path | None) -> Path | None:
    """The checkpoint that `resume` means: none, the "latest" of the run in `out`, or that of a folder.

    The folder is a checkpoint's, or a run's, whose latest is taken.

    Needs no process group. "latest" is the newest complete one, and None when the run has none yet; one that
    is not complete is reported and passed over. Raises ValueError when a folder that was named has no
    complete checkpoint, and when "latest" finds checkpoints of which none is complete: to train from the beginning
    must be asked for.
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
    """The newest complete checkpoint of the run in `out` (of those older than `before`, if given), or None.

    One that is not complete is reported and passed over.
    """
    for path in reversed(checkpoints_by_step(out)):
        if before is not None and _step_of(path) >= _step_of(before):
            continue
        if fault := _fault(path):
            logger.warning("passing over a checkpoint that cannot be used: %s", fault)
        else:
            return path
    return None


def resolve_checkpoint(folder: Path) -> Path:
    """The checkpoint in `folder`: itself, or where it is a run's folder, the newest complete one of the run.

    Raises ValueError when there is none.
    """
    if not (folder / "checkpoints").is_dir():
        read_metadata(folder)
        return folder
    if (newest := newest_checkpoint(folder)) is None:
        raise ValueError(f"the run in {folder} has no complete checkpoint")
    return newest


def prepare_folder(out: Path, step: int) -> None:
    """Make `out` ready for a run that starts after `step`. For rank 0, before it trains.

    What an interrupted process left half-written or half-deleted goes. Checkpoints of later steps belong to
    an earlier run that this one starts over: they are set aside, so that "latest" means this run's.
    """
    folder = out / "checkpoints"
    if not folder.is_dir():
        return
    for leftover in folder.glob(".step-*"):
        shutil.rmtree(leftover)
    later = [path for path in checkpoints_by_step(out) if _step_of(path) > step]
    if not later:
        return
    number = 1 + sum(1 for _ in folder.glob("earlier-run-*"))
    aside = folder / f"earlier-run-{number}"
    aside.mkdir()
    for path in later:
        path.rename(aside / path.name)
    logger.warning("checkpoints of an earlier run, after step %d, were moved to %s", step, aside)


def checkpoints_by_step(out: Path) -> list[Path]:
    """The checkpoints of the run in `out`, oldest first."""
    found = [path for path in (out / "checkpoints").glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=_step_of)


def _fault(path: Path) -> str | None:
    """Why the checkpoint at `path` cannot be used, if it cannot."""
    try:
        read_metadata(path)
    except ValueError as error:
        return str(error)
    return None


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
