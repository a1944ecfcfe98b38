# SPDX-License-Identifier: Apache-2.0
"""Resumes a run from its newest checkpoint that is whole: all ranks take the same, and pass over damaged ones together.

That a checkpoint's bytes are those that were written shows when they are read, each piece by the ranks that need it.
"""

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from stretto.memory import exchange, group_timeout
from stretto.train.checkpoint.folders import (
    advise_checkpoint_before,
    checkpoint_before,
    find_checkpoint,
    unreadable,
    warn_once,
)
from stretto.train.checkpoint.integrity import DamagedCheckpointError, DamagedError
from stretto.train.checkpoint.torch_format import read_index

T = TypeVar("T")
_ERRORS = {kind.__name__: kind for kind in (ValueError, DamagedError)}


def start_from_newest(out: Path, resume: str | Path | None, start: Callable[[Path | None], T]) -> tuple[Path | None, T]:
    """Call `start` with the checkpoint that `train.resume` names, or with None. Returns the checkpoint and the result.

    start: loads the checkpoint, or raises DamagedCheckpointError on all ranks; it is then called again. With "latest",
    a damaged checkpoint is passed over, with one warning, and the one before is taken. One that is named is refused,
    and the error names the one before. Collective if there is a process group.
    """
    checkpoint = _agree(partial(find_checkpoint, out, resume))
    while checkpoint is not None:
        try:
            _require_index(checkpoint)
            return checkpoint, start(checkpoint)
        except DamagedCheckpointError as error:
            message = str(error)
            before = _agree(partial(checkpoint_before, checkpoint))
            if resume != "latest" or before is None:
                raise DamagedCheckpointError(f"{message}; {advise_checkpoint_before(before)}", checkpoint) from error
        if not dist.is_initialized() or dist.get_rank() == 0:
            warn_once(f"passing over a checkpoint that is damaged, and taking {before}: {message}")
        checkpoint = before
        gc.collect()  # what was made for the damaged one may fill a device's memory
    return None, start(None)


def _agree(decide: Callable[[], Path | None]) -> Path | None:
    """Rank 0's decision, or its error, on all ranks: folders that are read over a network may differ for a while."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return decide()
    path, kind, message = "", "", ""
    if dist.get_rank() == 0:
        try:
            path = str(decide() or "")
        except ValueError as error:
            kind, message = type(error).__name__, str(error)
    path, kind, message = exchange((path, kind, message), None, group_timeout(None), tuple[str, str, str])[0]
    if message:
        raise _ERRORS.get(kind, ValueError)(message)
    return Path(path) if path else None


def _require_index(path: Path) -> None:
    """Read the index on each rank; an error of any is raised on all, so that none waits for another while it loads."""
    kind = message = ""
    try:
        read_index(path)
    except ValueError as error:
        kind, message = type(error).__name__, str(error)
    found = [(kind, message)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        found = exchange((kind, message), None, group_timeout(None), tuple[str, str])
    for rank, (kind, message) in enumerate(found):
        if kind == DamagedError.__name__:
            raise DamagedCheckpointError(f"{unreadable(path)}: on rank {rank}, {message}", path)
        if message:
            raise ValueError(message)
