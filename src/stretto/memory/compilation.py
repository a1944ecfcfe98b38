# SPDX-License-Identifier: Apache-2.0
"""Longer waits for peers that may be compiling: time limits of calls that follow the loading of a kernel.

All ranks run the same program, so they load a kernel at the same place, but a rank that finds it in its cache on disk
waits for those that compile it. Each process counts the kernels that it has loaded, from the cache or compiled, and the
first call of each workspace and group after one may wait `ALLOWANCE` seconds longer. One call is enough: it ends when
the other ranks of the group have got there, past their compilations.
"""

import ctypes
import weakref

import torch
import torch.distributed as dist

ALLOWANCE = 600.0
"""Seconds that a wait may take in addition to the group's limit while a peer may be compiling."""

_loaded = ctypes.c_int64(0)  # the kernels that this process has loaded
_seen_by_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, int]" = weakref.WeakKeyDictionary()


def note_loaded_kernel() -> None:
    """Count a kernel that this process has compiled or read from a cache, before its first launch."""
    _loaded.value += 1


def loaded_kernels_address() -> int:
    """The address of the number of kernels that were loaded, an int64 that never moves."""
    return ctypes.addressof(_loaded)


def is_capturing() -> bool:
    """Check whether the current stream is being captured in a CUDA graph; False where there is no CUDA."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class CallLimit:
    """The time limit of a workspace's waits, for each of its calls.

    seconds: the group's limit, which may be changed. All ranks have met when the workspace is made, so the kernels that
    were loaded before do not count. loads_first: the first call has the longer limit in any case, as where ranks run
    different programs.
    """

    def __init__(self, seconds: float, *, loads_first: bool = False) -> None:
        self.seconds = seconds
        self._seen = -1 if loads_first else _loaded.value

    def of_call(self) -> float:
        """The limit in seconds of the call that begins now; the group's in a CUDA graph, which is replayed later."""
        if self._seen == _loaded.value or is_capturing():
            return self.seconds
        self._seen = _loaded.value
        return self.while_loading()

    def while_loading(self) -> float:
        """The limit in seconds of a call that loads a kernel."""
        return self.seconds + ALLOWANCE


def limit_of_meeting(group: dist.ProcessGroup | None, seconds: float) -> float:
    """The limit in seconds of an exchange between the hosts of a group (None: all ranks), whose limit is `seconds`."""
    found = dist.group.WORLD if group is None else group
    assert found is not None
    if _seen_by_groups.get(found, 0) == _loaded.value:
        return seconds
    _seen_by_groups[found] = _loaded.value
    return seconds + ALLOWANCE
