# SPDX-License-Identifier: Apache-2.0
"""The limit on rows of calls of `dispatch` with `max_rows`: recorded on the device, raised when the host next looks.

Synchronization: each call with a limit updates a record on the device, on the call's stream, and copies it to pinned
memory. The host reads that memory without waiting, and so sees the records of calls that the device has finished.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.ops.operator import find_group, find_known, find_name, is_kept, require_no_capture

_KEY = "moe rows"


class _Record:
    """For each rank of a group, the most rows that it needed in a call whose limit was lower, and that limit."""

    def __init__(self, ranks: int, device: torch.device) -> None:
        self._state = torch.zeros(2, ranks, dtype=torch.int64, device=device)
        self._seen = torch.zeros(2, ranks, dtype=torch.int64, pin_memory=device.type == "cuda")

    def update(self, needed: Tensor, max_rows: int) -> None:
        """Record a call's needs, int64 [ranks]."""
        exceeds = (needed > max_rows) & (needed > self._state[0])
        now = torch.stack((needed, torch.full_like(needed, max_rows)))
        torch.where(exceeds, now, self._state, out=self._state)
        self._seen.copy_(self._state, non_blocking=True)

    def check(self, group: dist.ProcessGroup) -> None:
        """ValueError for the first rank whose record the host can see, once."""
        needed, limits = self._seen.numpy()
        ranks = needed.nonzero()[0]
        if not len(ranks):
            return
        if self._state.is_cuda:
            torch.cuda.synchronize(self._state.device)  # no copy of an earlier call may come after the reset
        rank, most = int(ranks[0]), int(needed.max())
        message = (
            f"dispatch: rank {rank} of the group (rank {dist.get_global_rank(group, rank)} of all) needs {needed[rank]}"
            f" rows, more than max_rows={limits[rank]}: give max_rows={most} or more, or None. The output of that call "
            "is NaN"
        )
        self._state.zero_()
        self._seen.zero_()
        raise ValueError(message)


def check_rows(group: dist.ProcessGroup) -> None:
    """Raise for calls of `dispatch` with max_rows on this group that needed more rows; the host waits for the device.

    ValueError that names the rank and the number of rows that it needs; once. All ranks of the group raise it. Call it
    before results leave the training step for good: before an optimizer's step, say, or before a checkpoint.
    """
    devices = [torch.device("cpu")]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
        torch.cuda.synchronize()
    for device in devices:
        look_for_errors(group, device)


def record_rows(group: dist.ProcessGroup, needed: Tensor, max_rows: int) -> None:
    """Record, on the device, that a call on the group needs so many rows on each of its ranks: int64 [ranks]."""
    find_record(group, needed.device).update(needed, max_rows)


def look_for_errors(group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise the error of a call that the device has finished, if there is one. Nothing is waited for."""
    if is_kept(find_name(group), device, _KEY):
        find_record(group, device).check(group)


def find_record(group: dist.ProcessGroup, device: torch.device) -> _Record:
    """The group's record, made at its first call. ValueError for a first call while a CUDA graph is captured."""
    name = find_name(group)

    def make() -> _Record:
        require_no_capture(device)
        return _Record(find_group(name).size(), device)

    record: _Record = find_known(name, device, _KEY, make)
    return record
