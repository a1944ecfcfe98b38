# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders: finds the checkpoints of a run, and prepares the run's folder for new ones."""

import logging
import os
import zlib
from pathlib import Path

from stretto.atomic_files import delete_tree, hide_folder
from stretto.train.checkpoint.integrity import DamagedError
from stretto.train.checkpoint.metadata import is_checkpoint_name, read_metadata
from stretto.train.checkpoint.torch_format import read_index

logger = logging.getLogger(__name__)

_EARLIER = "earlier-run-"  # folders of checkpoints that another run has written
# Environment variable with checksums of the messages already printed about checkpoints; child processes inherit it.
_PRINTED = "STRETTO_PRINTED_CHECKPOINTS"


def checkpoint_path(out: Path, step: int) -> Path:
    """The folder of the checkpoint of `step`, of the run in `out`."""
    return out / "checkpoints" / f"step-{step:08d}"


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

    Incomplete checkpoints are reported and skipped; each is reported once by a command, whichever of its processes
    finds it.
    """
    for path in reversed(checkpoints_by_step(out)):
        if before is not None and step_of(path) >= step_of(before):
            continue
        if fault := _fault(path):
            warn_once(f"passing over a checkpoint that cannot be used: {fault}")
        else:
            return path
    return None


def checkpoint_before(path: Path) -> Path | None:
    """Find the newest complete checkpoint of the same run that is older than the one at `path`, or None."""
    if not is_checkpoint_name(path.name) or path.parent.name != "checkpoints":
        return None
    return newest_checkpoint(path.parent.parent, before=path)


def advise_checkpoint_before(before: Path | None) -> str:
    """Say what to do about a damaged checkpoint, of which `before` is the one before."""
    if before is None:
        return "there is no checkpoint before it; train.resume='none' starts anew, and sets it aside"
    return f"the checkpoint before it is {before}: continue with --set train.resume={before}"


def warn_once(text: str) -> None:
    """Log a warning about a checkpoint, on rank 0, unless this process or one that has started it has logged it."""
    key, printed = f"{zlib.crc32(text.encode(errors='surrogateescape')):08x}", os.environ.get(_PRINTED, "").split()
    if key not in printed and os.environ.get("RANK", "0") == "0":
        logger.warning("%s", text)
        os.environ[_PRINTED] = " ".join([*printed, key])


def resolve_checkpoint(folder: Path) -> Path:
    """Find the checkpoint that a folder means: itself, or the newest complete one if it is a run's folder.

    Raises ValueError when there is none. Of a damaged checkpoint, the error names the one before.
    """
    if not (folder / "checkpoints").is_dir():
        try:
            read_index(folder)
        except DamagedError as error:
            if (before := checkpoint_before(folder)) is None:
                raise
            raise DamagedError(f"{error}; {advise_checkpoint_before(before)}") from error
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
    numbers = [path.name.removeprefix(_EARLIER) for path in folder.glob(f"{_EARLIER}*")]
    number = 1 + max((int(each) for each in numbers if each.isascii() and each.isdecimal()), default=0)
    aside = folder / f"{_EARLIER}{number}"
    aside.mkdir()
    for path in later:
        path.rename(aside / path.name)
    logger.warning("checkpoints of an earlier run, after step %d, were moved to %s", step, aside)


def remove_leftovers(out: Path) -> None:
    """Delete what interrupted processes left half-written or half-deleted. Only where no process is writing.

    Logs a warning for what cannot be deleted, such as files that another machine has open on NFS.
    """
    for leftover in (out / "checkpoints").glob(".step-*"):
        try:
            delete_tree(leftover)
        except OSError as error:
            logger.warning("%s, which an interrupted process has left, cannot be deleted: %s", leftover, error)


def remove_folder(path: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that an incomplete one never has its name."""
    if (doomed := hide_folder(path)) is not None:
        delete_tree(doomed)


def checkpoints_by_step(out: Path) -> list[Path]:
    """List the checkpoints of the run in `out`, complete or not, oldest first."""
    found = [path for path in (out / "checkpoints").glob("step-*") if is_checkpoint_name(path.name)]
    return sorted(found, key=step_of)


def _fault(path: Path) -> str | None:
    """Say why the checkpoint at `path` cannot be used; None if it can."""
    try:
        read_metadata(path)
    except ValueError as error:
        return str(error)
    return None


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
