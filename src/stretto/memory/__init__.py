"""Symmetric memory: every rank of a group has a buffer of one size, reaches its peers', and signals them."""

from stretto.deprecated import alias
from stretto.memory import failures, shared_gpus
from stretto.memory.allocation import allocate, empty, find_symmetric, peer_tensor
from stretto.memory.cuda import allocated_bytes
from stretto.memory.groups import exchange, find_own_rank, group_timeout, is_debugging, store_all_gather
from stretto.memory.host import HostMemory, allocate_in_process
from stretto.memory.symmetric import MAX_BYTES, MAX_SIGNALS, Backoff, PeerError, SymmetricMemory

if shared_gpus.is_enabled():  # before any rank's first collective
    shared_gpus.install()

__all__ = [
    "MAX_BYTES",
    "MAX_SIGNALS",
    "Backoff",
    "HostMemory",
    "PeerError",
    "SymmetricMemory",
    "allocate",
    "allocate_in_process",
    "allocated_bytes",
    "empty",
    "exchange",
    "failures",
    "find_own_rank",
    "find_symmetric",
    "group_timeout",
    "is_debugging",
    "peer_tensor",
    "store_all_gather",
]

__getattr__ = alias(__name__, {"tell": "store_all_gather"})
