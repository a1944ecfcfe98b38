"""Symmetric tensors: a tensor of one shape and dtype on every rank of a group, each of which reaches its peers'."""

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


_memories = WeakTensorKeyDictionary()
"""Each tensor's `_Allocation`, as long as the tensor lives."""
_counts: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""How many each group has made; not by its name, which a group of other ranks may get when it is gone."""


class _Allocation(NamedTuple):
    """What `empty` knows of a tensor that it made: where it began, since others may be put into its place (`.data`)."""

    memory: SymmetricMemory
    number: int
    start: int
    num_bytes: int


class SymmetricLocation(NamedTuple):
    """Where a tensor lies: the memory, how many tensors its group had made before, and bytes from the beginning."""

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
    """A tensor on this rank that its peers reach with `peer_tensor`, and it theirs: for copies that need no staging.

    All ranks of the group (None: all ranks) call it, with the same shape, dtype and device type; dtype, device: torch's
    defaults where None; timeout: seconds to wait for the others, on a CPU (on GPUs the group's own limit counts). It
    holds zeros. On a CPU it is shared memory between the processes of one machine, on GPUs (each rank's current one)
    torch's symmetric memory.

    It is freed when the tensor dies and the peers have let go of theirs, on each rank by itself; on GPUs torch then
    waits for the device, so let none die while a CUDA graph is captured. ValueError for shapes or dtypes that differ
    between ranks or are out of bounds, for a rank that is not in the group, and for another kind of device; PeerError
    for ranks that do not come.
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    device = torch.get_default_device() if device is None else torch.device(device)
    sizes = tuple(int(size) for size in shape)
    if min(sizes, default=0) < 0:
        raise ValueError(f"a tensor has no negative sizes: {list(sizes)}")
    size = math.prod(sizes) * dtype.itemsize
    if size > MAX_BYTES:
        raise ValueError(f"a symmetric tensor has up to {MAX_BYTES} bytes, and {list(sizes)} of {dtype} has {size}")
    memory = allocate_as(f"{dtype} {list(sizes)}", size, group, _find_backend(device), timeout)
    made = _view(memory, None, dtype, sizes)
    group = dist.group.WORLD if group is None else group
    number = 0  # without a group there is nobody to agree with
    if group is not None:
        number = _counts.get(group, 0)
        _counts[group] = number + 1  # all ranks have made it
    _memories[made] = _Allocation(memory, number, made.data_ptr(), made.nbytes)
    return made


def peer_tensor(tensor: Tensor, rank: int) -> Tensor:
    """That rank's tensor of those that `empty` made with this one, of its shape and dtype; rank: in the group.

    Who writes to it orders writes and reads: by a barrier, say. It is good as long as `tensor` lives. ValueError for a
    tensor that `empty` did not make (a view of one, say), and for a rank that there is not.
    """
    made = _memories.get(tensor)
    if made is None:
        raise ValueError(
            "a peer's tensor is found by the very tensor that stretto.memory.empty returned: take views after"
        )
    memory: SymmetricMemory = made.memory
    if not 0 <= rank < memory.world_size:
        raise ValueError(f"the group has ranks 0 to {memory.world_size - 1}, not {rank}")
    return tensor if rank == memory.rank else _view(memory, rank, tensor.dtype, tuple(tensor.shape))


def find_symmetric(tensor: Tensor) -> SymmetricLocation | None:
    """Where a contiguous tensor lies in one that `empty` made and that lives; None for all others."""
    if _memories:
        start = tensor.data_ptr()
        for memory, number, begin, num_bytes in _memories.values():
            # GPUs of one process and its CPU have addresses of their own.
            if 0 <= start - begin <= num_bytes - tensor.nbytes:
                return SymmetricLocation(memory, number, start - begin)
    return None


def _view(memory: SymmetricMemory, rank: int | None, dtype: torch.dtype, sizes: tuple[int, ...]) -> Tensor:
    return memory.buffer(rank).view(dtype).view(sizes)


def _find_backend(device: torch.device) -> str:
    match device.type:
        case "cpu":
            return "host"
        case "cuda":
            if device.index is not None and device.index != (current := torch.cuda.current_device()):
                raise ValueError(
                    f"symmetric tensors lie on each rank's current GPU, {current}, not on {device}: call "
                    "torch.cuda.set_device first"
                )
            return "cuda"
        case other:
            raise ValueError(f"symmetric tensors lie on devices of type cpu or cuda, not {other}")
