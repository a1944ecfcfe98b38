"""Outputs that peers store into: a ring in symmetric memory, whose slots are used again when no tensor of them lives.

Which slot a call's output takes is each rank's own affair: it tells its peers where, call by call. A rank none of whose
slots is free takes a spare one, and copies the output out of it.
"""

import sys
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from stretto.ops.embedding.index_errors import IndexErrors
from stretto.ops.workspace import find_group, find_kept, list_kept
from stretto.tiles import BlockChannel

OUTPUTS = 2
"""Outputs of a size and group that can live at once without a copy."""

CHANNELS = 32
"""Groups of slices that a rank signals to another one by one."""

_SMALLEST = 1 << 16
_FINE = 64 << 20  # from here on sizes are rounded to eighths of a power of two, below to powers of two
_ALIGNMENT = 128


class OutputRing:
    """`OUTPUTS` slots and a spare one on every rank, and the signals of calls whose outputs lie in them.

    channel: its buffer begins with `destinations`, int64 [2, world, 2], by the call's parity: where each rank's output
    of the call lies, in units of 16 bytes from `slots` on, and the fingerprint of its placement. tickets: int32 [1],
    how many of a call's tasks are taken. index_errors: what kernels find wrong with their input.
    """

    def __init__(self, channel: BlockChannel, slot_bytes: int, outputs: int) -> None:
        world = channel.world_size
        self.channel = channel
        self.slot_bytes = slot_bytes
        self.outputs = outputs
        head = _round_up(32 * world, _ALIGNMENT)
        self.destinations = channel.tensor((2, world, 2), torch.int64)
        self.slots = channel.tensor((slot_bytes * (outputs + 1),), torch.uint8, offset=head)
        self.tickets = torch.zeros(1, dtype=torch.int32, device=channel.device)
        self.index_errors = IndexErrors(channel.rank, channel.device)
        parts = self.slots.chunk(outputs + 1)
        self._spare = parts[-1]
        self._parts = [_Slot(part) for part in parts[:-1]]
        self._captures: list[int | None] = [None] * outputs

    @classmethod
    def find(cls, group: str, device: torch.device, size: int) -> "OutputRing":
        """The group's ring whose slots hold `size` bytes, or a few more; all ranks call it with the same size."""
        slot_bytes = round_size(size)

        def make() -> OutputRing:
            process_group = find_group(group)
            world = process_group.size()
            channel = BlockChannel.allocate(
                process_group,
                channels=CHANNELS * world,
                peer_tiles=1,
                data_bytes=_round_up(32 * world, _ALIGNMENT) + slot_bytes * (OUTPUTS + 1),
                backend="cuda" if device.type == "cuda" else "host",
            )
            return cls(channel, slot_bytes, OUTPUTS)

        return find_kept(group, device, ("embedding outputs", slot_bytes), make)

    def take(self, shape: tuple[int, int], dtype: torch.dtype) -> tuple[int, Callable[[], Tensor]]:
        """Where the next call's output lies, in bytes from `slots` on; and how to have it when the kernel is launched.

        A slot is taken again when all tensors of its memory are gone. One that a CUDA graph has captured is that
        graph's for good, since its replays write there.
        """
        capture = find_capture(self.channel.device)
        for slot, part in enumerate(self._parts):
            if part.is_unused() and self._captures[slot] in (None, capture):
                self._captures[slot] = capture
                return slot * self.slot_bytes, partial(_view, part.memory, shape, dtype)
        return self.outputs * self.slot_bytes, lambda: _view(self._spare, shape, dtype).clone()


def _view(memory: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The beginning of the memory as a tensor that is no view to torch: one of an operator's output may be changed."""
    place = memory.storage_offset() // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=memory.device).set_(memory.untyped_storage(), place, shape, (shape[1], 1))


def find_output_rings(group: str) -> list[OutputRing]:
    """All rings of a group."""
    return [kept for kept in list_kept(group) if isinstance(kept, OutputRing)]


class _Slot:
    """A slot as a tensor of a storage of its own, of which it is known who else uses it. memory: bytes."""

    def __init__(self, part: Tensor) -> None:
        on_cuda = part.device.type == "cuda"
        self.memory = (
            torch.as_tensor(_CudaMemory(part), device=part.device) if on_cuda else torch.from_numpy(part.numpy())
        )
        self._storage = self.memory.untyped_storage()
        self._unused = self._count_users()

    def is_unused(self) -> bool:
        """Whether nobody else has a tensor of it, or its storage."""
        return self._count_users() == self._unused

    def _count_users(self) -> tuple[int, int]:
        """Tensors; and Python's users of the storage, of which torch gives all the same object, and counts it once."""
        return torch._C._storage_Use_Count(self._storage._cdata), sys.getrefcount(self._storage)


class _CudaMemory:
    """Memory that torch makes a tensor of, and holds on to as long as that tensor's storage lives."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (memory.numel(),),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "strides": None,
            "version": 2,
        }


def round_size(size: int) -> int:
    """The bytes of a slot for `size` bytes: few different ones, so that allocation, which ranks meet in, is rare."""
    power = 1 << max(size - 1, _SMALLEST - 1).bit_length()
    if power <= _FINE:
        return power
    return _round_up(size, power // 16)


def find_capture(device: torch.device) -> int | None:
    """A number of the CUDA graph that is being captured; None where none is, a new number where they are not known."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return None
    try:
        from cuda.bindings import driver
    except ImportError:
        return int(np.random.default_rng().integers(1 << 62))
    found = driver.cuStreamGetCaptureInfo(driver.CUstream(torch.cuda.current_stream(device).cuda_stream))
    return int(found[2])


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step
