# SPDX-License-Identifier: Apache-2.0
"""Functions for use between calls of operators: check for failed waits, and list or free workspaces."""

from typing import NamedTuple

import torch
import torch.distributed as dist

from stretto.memory import failures, store_all_gather
from stretto.ops.embedding.output_ring import find_output_rings
from stretto.ops.operator import close_workspaces, find_group, find_name, list_channels, list_groups


class Workspace(NamedTuple):
    """Symmetric memory that operators keep for later calls, on this rank.

    group: the group's `group_name`. purpose: what it is used for, such as "packets". num_bytes: this rank's part.
    device: where it lies. `free_workspaces` frees it.
    """

    group: str
    purpose: str
    num_bytes: int
    device: torch.device


def check() -> None:
    """Wait for everything that was launched on the current device, and raise `PeerError` if a group has failed.

    A kernel whose wait for another rank times out cannot raise an error: it ends, and its output is wrong. The next
    call of an operator raises `PeerError`; this function raises it without another call. Call it before you use results
    outside of Stretto (for example save or send them), and after replays of a CUDA graph. The host waits for the
    current GPU; on CPUs kernels have ended when a call returns. ValueError while a CUDA graph is captured.
    """
    _require_no_capture("check() waits for the device")
    failures.synchronize(_current_device())


def workspaces(group: dist.ProcessGroup | None = None) -> list[Workspace]:
    """The workspaces of a group, or, with None, of all groups that this process is in. Not a collective."""
    found = []
    for name in list_groups() if group is None else [find_name(group)]:
        for purpose, channel in list_channels(name):
            found.append(Workspace(name, purpose, channel.num_bytes, channel.device))
    return found


def free_workspaces(group: dist.ProcessGroup | None = None) -> int:
    """Free the workspaces of a group (None: the group of all ranks); returns the bytes freed on this rank.

    Collective: all ranks of the group must call it, between the same two calls of operators. It waits for the device
    and for all ranks. The next call of each operator and size allocates new workspaces, which is also a collective.
    Outputs of embedding operators that are still referenced keep their memory.

    CUDA graphs that were captured before contain addresses of freed memory: do not replay them; capture them again,
    after a call. ValueError while a CUDA graph is captured, and for a rank outside of the group; `PeerError`, and
    nothing is freed, if a wait has failed or a rank does not call within the group's time limit.
    """
    name = find_name(group)
    _require_no_capture("free_workspaces() waits for the device, and a graph would hold the freed addresses")
    channels = [channel for _, channel in list_channels(name)]
    for device in {channel.device for channel in channels} | {_current_device()}:
        failures.synchronize(device)
    # A rank's kernels and copies, also those into other ranks' memory, have ended when it comes.
    store_all_gather("free_workspaces", find_group(name), "stretto ops free")
    rings = find_output_rings(name)
    freed = sum(channel.num_bytes for channel in channels)
    close_workspaces(name)
    for ring in rings:
        ring.index_errors.check()  # what kernels have found is not lost with the ring
    return freed


def _current_device() -> torch.device:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _require_no_capture(why: str) -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise ValueError(f"{why}: do it before or after the CUDA graph is captured")
