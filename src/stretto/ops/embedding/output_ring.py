# SPDX-License-Identifier: Apache-2.0
"""Outputs into which peers store: a ring of slots in symmetric memory, each reused once no tensor of it is alive.

Each rank selects the slot of its own output and sends it to its peers in each call (`begin_pooling`). Three calls in a
row on one rank, with slots A, B and a spare:

    call                     e               e + 1                      e + 2
    slot that is taken       A               A if the output of e is    A or B, whichever is free; if neither is, the
                                             gone, else B               spare, and the output is a copy of it
    `destinations` words     parity 0        parity 1: readers of e     parity 0 again: this rank has ended e + 1, in
    of this rank, which                      may still read parity 0    which it received what each reader sent then, so
    begin_pooling writes                                                all readers have ended e

    peers store into it      from the call's begin_pooling here, which follows on this rank's stream whatever read the
                             slot's old output, until they have signalled their slices
    the output is complete   when the call's pool_and_send has ended here: it has waited for all peers' slices
    the slot is free again   when the last tensor of its memory is gone, views included

A slot that a CUDA graph has captured belongs to that graph for good, since its replays write there.
"""

import sys
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from stretto.memory import MAX_SIGNALS
from stretto.ops.embedding.index_errors import IndexErrors
from stretto.ops.operator import find_group, find_kept, list_kept, list_node_groups
from stretto.tiles import BlockChannel

OUTPUTS = 2
"""Outputs of one group and size class that can be alive at once without a copy."""

CHANNELS = 32
"""The most signals from each rank to each other one: a rank's tables are divided among them."""

_SMALLEST = 1 << 16
_FINE = 64 << 20  # bytes; larger sizes are rounded up to eighths of a power of two, smaller ones to powers of two
_ALIGNMENT = 128


class OutputRing:
    """`OUTPUTS` slots and a spare one on every rank, and the channel that signals calls with outputs in them.

    channel: its buffer holds `destinations` and then `slots`. destinations: int64 [2, world, 2], by the call's parity
    and the rank: the position of that rank's output, in units of 16 bytes from `slots` on, and the fingerprint of its
    placement. tickets: int32 [1], how many of a call's tasks are taken. index_errors: bad input that kernels found.
    """

    def __init__(self, channel: BlockChannel, slot_bytes: int, outputs: int, rank: int) -> None:
        world = channel.world_size
        self.channel = channel
        self.slot_bytes = slot_bytes
        self.outputs = outputs
        head = _round_up(32 * world, _ALIGNMENT)
        self.destinations = channel.tensor((2, world, 2), torch.int64)
        self.slots = channel.tensor((slot_bytes * (outputs + 1),), torch.uint8, offset=head)
        self.tickets = torch.zeros(1, dtype=torch.int32, device=channel.device)
        self.index_errors = IndexErrors(rank, channel.device)
        *slots, self._spare = self.slots.chunk(outputs + 1)
        self._slots = [_Slot(slot) for slot in slots]
        self._captures: list[int | None] = [None] * outputs

    @classmethod
    def find(
        cls, group: str, device: torch.device, size: int, *, rank: int | None = None, of_schedule: str = ""
    ) -> "OutputRing":
        """Find or make the group's ring whose slots hold `size` bytes; all ranks call it with the same size.

        rank: by which errors name this one; None: that in the group, which may have the ranks of one node alone.
        of_schedule: one slot, for the moves of calls by this schedule, and for no outputs.
        """
        slot_bytes = round_size(size)
        outputs = 0 if of_schedule else OUTPUTS

        def make() -> OutputRing:
            process_group = find_group(group)
            world = process_group.size()
            channel = BlockChannel.allocate(
                process_group,
                channels=limit_channels(world, CHANNELS) * world,
                peer_tiles=1,
                data_bytes=_round_up(32 * world, _ALIGNMENT) + slot_bytes * (outputs + 1),
                backend="cuda" if device.type == "cuda" else "host",
            )
            return cls(channel, slot_bytes, outputs, channel.rank if rank is None else rank)

        return find_kept(group, device, ("embedding outputs", slot_bytes, of_schedule), make)

    def take(self, shape: tuple[int, int], dtype: torch.dtype) -> tuple[int, Callable[[], Tensor]]:
        """Take the slot of the next call's output.

        Returns (its first byte, counted from `slots`; a function that makes the output once the kernel is launched).
        """
        capture = find_capture(self.channel.device)
        for number, slot in enumerate(self._slots):
            if slot.is_free() and self._captures[number] in (None, capture):
                self._captures[number] = capture
                return number * self.slot_bytes, partial(_make_tensor, slot.memory, shape, dtype)
        return self.outputs * self.slot_bytes, lambda: _make_tensor(self._spare, shape, dtype).clone()


def _make_tensor(memory: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Make a tensor of the memory's beginning that torch does not take for a view, so that users may change it."""
    place = memory.storage_offset() // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=memory.device).set_(memory.untyped_storage(), place, shape, (shape[1], 1))


def find_output_rings(group: str) -> list[OutputRing]:
    """Return all rings of a group, and of this node's ranks in it."""
    groups = group, *list_node_groups(group)
    return [kept for one in groups for kept in list_kept(one) if isinstance(kept, OutputRing)]


class _Slot:
    """A slot as a tensor with its own storage, whose other users can be counted. memory: uint8, the slot."""

    def __init__(self, slot: Tensor) -> None:
        on_cuda = slot.device.type == "cuda"
        self.memory = (
            torch.as_tensor(_CudaMemory(slot), device=slot.device) if on_cuda else torch.from_numpy(slot.numpy())
        )
        self._storage = self.memory.untyped_storage()
        self._users_when_free = self._count_users()

    def is_free(self) -> bool:
        """Return whether there are no other references to a tensor of the slot, or to its storage."""
        return self._count_users() == self._users_when_free

    def _count_users(self) -> tuple[int, int]:
        """Return the tensors of the storage, and Python's references to it, which torch counts as one of them."""
        return torch._C._storage_Use_Count(self._storage._cdata), sys.getrefcount(self._storage)


class _CudaMemory:
    """CUDA memory as `torch.as_tensor` takes it; torch keeps this object alive while the tensor's storage is alive."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (memory.numel(),),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "strides": None,
            "version": 2,
        }


def limit_channels(world: int, most: int) -> int:
    """Return how many signals each of `world` ranks may have at each other one: a power of two, up to `most`.

    Each rank has a counter for every channel of every pair of ranks, and a channel's memory holds `MAX_SIGNALS`: 32
    each from 2 to 180 ranks, 16 up to 255, and so on.
    """
    fitting = (MAX_SIGNALS // world - 2) // world  # beside a peer tile, and the slot of the channel's own
    return min(most, 1 << max(fitting.bit_length() - 1, 0))


def round_size(size: int) -> int:
    """Round a size in bytes up to one of a few, so that allocation, which is collective, is rare."""
    power = 1 << max(size - 1, _SMALLEST - 1).bit_length()
    if power <= _FINE:
        return power
    return _round_up(size, power // 16)


def find_capture(device: torch.device) -> int | None:
    """Return the number of the CUDA graph that is being captured, None if none is.

    Without the package cuda-bindings graphs cannot be distinguished, and each captured call gets a new number.
    """
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
