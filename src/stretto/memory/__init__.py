# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory: every rank of a group has a buffer of one size, can access its peers' buffers, and signals them.

Modules: `symmetric` (the interface, `PeerError`), `host` and `cuda` (its two backends), `network` (puts between nodes),
`allocation` (`allocate`, and symmetric tensors), `groups` (rank, time limit and exchanges of a process group),
`failures` (waits on a GPU that timed out), `gpus` (whether a group's GPUs can work together), `shared_gpus` (several
ranks on one GPU, for tests), `pinned` (large allocations of pinned host memory, which are not symmetric).
"""

from stretto.memory import failures, shared_gpus
from stretto.memory.allocation import allocate, empty, find_symmetric, peer_tensor
from stretto.memory.cuda import allocated_bytes
from stretto.memory.groups import (
    exchange,
    find_missing,
    find_own_rank,
    group_timeout,
    is_debugging,
    next_number,
    store_all_gather,
)
from stretto.memory.host import HostMemory, allocate_in_process
from stretto.memory.symmetric import MAX_BYTES, MAX_SIGNALS, Backoff, PeerError, Reach, SymmetricMemory

if shared_gpus.is_enabled():  # before this rank's first collective
    shared_gpus.install()

__all__ = [
    "MAX_BYTES",
    "MAX_SIGNALS",
    "Backoff",
    "HostMemory",
    "PeerError",
    "Reach",
    "SymmetricMemory",
    "allocate",
    "allocate_in_process",
    "allocated_bytes",
    "empty",
    "exchange",
    "failures",
    "find_missing",
    "find_own_rank",
    "find_symmetric",
    "group_timeout",
    "is_debugging",
    "next_number",
    "peer_tensor",
    "store_all_gather",
]
