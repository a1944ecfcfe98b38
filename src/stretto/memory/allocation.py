# SPDX-License-Identifier: Apache-2.0
"""Allocates symmetric memory, and symmetric tensors: one of a shape on every rank, which all ranks access."""

import math
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from stretto.memory.cuda import CudaMemory
from stretto.memory.host import HostMemory
from stretto.memory.symmetric import MAX_BYTES, MAX_SIGNALS, SymmetricMemory
from stretto.quantities import to_whole

_memories = WeakTensorKeyDictionary()
"""The `_Allocation` of each tensor that is alive."""
_counts: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""Number of tensors that each group has made; by group, since a later group may get the name of a destroyed one."""


def allocate(
    size: int, group: dist.ProcessGroup | None = None, *, signals: int = 0, timeout: float = 60.0, backend: str = "host"
) -> SymmetricMemory:
    """Allocate a buffer of `size` bytes on every rank of the group, with `signals` counters for each pair of ranks.

    All ranks of the group call it, with the same sizes. group: None for all ranks; timeout: seconds to wait for the
    other ranks; backend: "host" (shared memory between the processes of one machine) or "cuda" (between the GPUs of one
    machine, each rank's current one). ValueError for sizes that are out of bounds, that differ between ranks or that
    exceed the free memory; PeerError for ranks that do not arrive or cannot be reached.
    """
    if backend not in ("host", "cuda"):
        raise ValueError(f'the backends of symmetric memory are "host" and "cuda", not {backend!r}')
    size, signals = to_whole(size), to_whole(signals)
    if not (isinstance(size, int) and 0 <= size <= MAX_BYTES):
        raise ValueError(f"a buffer has 0 to {MAX_BYTES} bytes, not {size}")
    if not (isinstance(signals, int) and 0 <= signals <= MAX_SIGNALS):
        raise ValueError(f"a pair of ranks has 0 to {MAX_SIGNALS} signals, not {signals}")
    kind = HostMemory if backend == "host" else CudaMemory
    return kind.allocate(size, signals, group, timeout)


class _Allocation(NamedTuple):
    """Record that `empty` keeps of a tensor: where its storage began, since `.data` may replace it."""

    memory: SymmetricMemory
    number: int
    start: int
    num_bytes: int


class SymmetricLocation(NamedTuple):
    """The location of a tensor: the memory, the number of earlier tensors of its group, and the offset in bytes."""

    memory: SymmetricMemory
    number: int
    offset: int


def empty(
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
    timeout: float = 60.0,
) -> Tensor:
    """Allocate a symmetric tensor, which peers access with `peer_tensor`, for copies that need no staging buffer.

    All ranks of the group (None: all ranks) call it, with the same shape, dtype and device type. dtype, device: torch's
    defaults where None. timeout: seconds to wait for the others, on a CPU; on GPUs the group's own limit applies. The
    tensor holds zeros. On a CPU it is shared memory between the processes of one machine, on GPUs (each rank's current
    one) torch's symmetric memory.

    Each rank frees its own part when the tensor has died and the peers have dropped theirs. On GPUs torch waits for the
    device at that point, so none may die while a CUDA graph is captured. ValueError for shapes or dtypes that differ
    between ranks or are out of bounds, for a rank that is not in the group, and for another kind of device; PeerError
    for ranks that do not arrive.
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    device = torch.get_default_device() if device is None else torch.device(device)
    sizes = tuple(int(size) for size in shape)
    if min(sizes, default=0) < 0:
        raise ValueError(f"a tensor has no negative sizes: {list(sizes)}")
    size = math.prod(sizes) * dtype.itemsize
    if size > MAX_BYTES:
        raise ValueError(f"a symmetric tensor has up to {MAX_BYTES} bytes, and {list(sizes)} of {dtype} has {size}")
    memory = _find_kind(device).allocate(size, 0, group, timeout, f"{dtype} {list(sizes)}")
    tensor = _view(memory, None, dtype, sizes)
    group = dist.group.WORLD if group is None else group
    number = 0  # without a group there are no peers
    if group is not None:
        number = _counts.get(group, 0)
        _counts[group] = number + 1  # in step on all ranks, which have all made it
    _memories[tensor] = _Allocation(memory, number, tensor.data_ptr(), tensor.nbytes)
    return tensor


def peer_tensor(tensor: Tensor, rank: int) -> Tensor:
    """A peer's tensor that the same call of `empty` made, with the same shape and dtype; rank: in the group.

    The caller orders writes and reads, by a barrier for example. It is valid while `tensor` lives. ValueError for
    a tensor that `empty` did not make (a view of one, for example), and for a rank that the group does not have.
    """
    allocation = _memories.get(tensor)
    if allocation is None:
        raise ValueError(
            "a peer's tensor is found by the very tensor that stretto.memory.empty returned: take views after"
        )
    memory: SymmetricMemory = allocation.memory
    if not 0 <= rank < memory.world_size:
        raise ValueError(f"the group has ranks 0 to {memory.world_size - 1}, not {rank}")
    return tensor if rank == memory.rank else _view(memory, rank, tensor.dtype, tuple(tensor.shape))


def find_symmetric(tensor: Tensor) -> SymmetricLocation | None:
    """The location of a contiguous tensor within a live tensor that `empty` made; None for all others."""
    if _memories:
        start = tensor.data_ptr()
        for memory, number, begin, num_bytes in _memories.values():
            # The address ranges of a process's GPUs and CPU do not overlap.
            if 0 <= start - begin <= num_bytes - tensor.nbytes:
                return SymmetricLocation(memory, number, start - begin)
    return None


def _view(memory: SymmetricMemory, rank: int | None, dtype: torch.dtype, sizes: tuple[int, ...]) -> Tensor:
    return memory.buffer(rank).view(dtype).view(sizes)


def _find_kind(device: torch.device) -> type[HostMemory] | type[CudaMemory]:
    match device.type:
        case "cpu":
            return HostMemory
        case "cuda":
            if device.index is not None and device.index != (current := torch.cuda.current_device()):
                raise ValueError(
                    f"symmetric tensors lie on each rank's current GPU, {current}, not on {device}: call "
                    "torch.cuda.set_device first"
                )
            return CudaMemory
        case other:
            raise ValueError(f"symmetric tensors lie on devices of type cpu or cuda, not {other}")
