"""`allocate`: symmetric memory for a group, from the backend that its ranks can reach each other by."""

import torch.distributed as dist

from stretto.memory.cuda import CudaMemory
from stretto.memory.host import HostMemory
from stretto.memory.symmetric import MAX_BYTES, MAX_SIGNALS, SymmetricMemory


def allocate(
    size: int,
    group: dist.ProcessGroup | None = None,
    *,
    signals: int = 0,
    timeout: float = 60.0,
    backend: str = "host",
) -> SymmetricMemory:
    """A buffer of `size` bytes on every rank of the group, with `signals` counters for each pair of ranks.

    All ranks of the group call it, with the same sizes; group: None for all ranks; timeout: seconds to wait for the
    others; backend: "host" (shared memory between the processes of one machine) or "cuda" (between the GPUs of one
    machine, the current one of each rank). ValueError for sizes out of bounds,
    that differ between ranks or that do not fit into memory; PeerError for ranks that do not come or cannot be
    reached.
    """
    if backend not in ("host", "cuda"):
        raise ValueError(f'the backends of symmetric memory are "host" and "cuda", not {backend!r}')
    if not 0 <= size <= MAX_BYTES:
        raise ValueError(f"a buffer has 0 to {MAX_BYTES} bytes, not {size}")
    if not 0 <= signals <= MAX_SIGNALS:
        raise ValueError(f"a pair of ranks has 0 to {MAX_SIGNALS} signals, not {signals}")
    kind = HostMemory if backend == "host" else CudaMemory
    return kind.allocate(size, signals, group, timeout)


def allocate_as(what: str, size: int, group: dist.ProcessGroup | None, backend: str, timeout: float) -> SymmetricMemory:
    """As `allocate`, without signals, for `what`, which is the same on all ranks too. ValueError where it differs."""
    kind = HostMemory if backend == "host" else CudaMemory
    return kind.allocate(size, 0, group, timeout, what)
