# SPDX-License-Identifier: Apache-2.0
"""Copies a training state to host memory, from which a thread writes it while training continues.

Of a tensor that several ranks hold alike, one of them copies and writes each box (`Ownership`), so that the copies of
all ranks together take as much memory as the checkpoint.

On a GPU the copies run on a side stream, into pinned memory that all saves use again:

    compute stream | step n | forward, backward of n + 1 | waits | update of n + 1 | ...
    side stream    |        | copy of the state after n          |
    writer thread  |                                             | write to the disk | ...

The wait is an event on the device: the host does not wait. On a CPU the copy has ended when `copy` returns.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.memory.pinned import allocate_pinned
from stretto.train.checkpoint.storage import LazyBox, LocalBox, ShardedState

MAX_ALLOCATED = 32 << 30
"""Bytes of one allocation of pinned memory, unless a box is larger; no copy crosses two."""
ALIGNMENT = 512  # bytes, of a box in it
PIECE = 256 << 20
"""Bytes of one copy. Between two the copy engine serves other streams, such as the one that brings a step's loss.

A stream takes about a thousand copies ahead, and then the host waits: with pieces of 64 MiB, a state of 80.9 GB had
1,350, and the host's call took 0.36 s.
"""


class Key(NamedTuple):
    """A box of a training state: the tensor's name, and the box's offsets in it."""

    name: str
    offsets: tuple[int, ...]


def sizes_of(state: Mapping[str, ShardedState]) -> dict[Key, int]:
    """Bytes of each box that this rank holds."""
    return {
        Key(name, box.offsets): box.values.numel() * box.values.element_size()
        for name, whole in state.items()
        for box in whole.boxes
    }


def digest_of(sizes: Mapping[Key, int]) -> str:
    """A hash of a rank's state, which changes with it."""
    return hashlib.sha256(repr(sorted(sizes.items())).encode()).hexdigest()


class Ownership:
    """Chooses the rank that writes each box: among its holders the one with the fewest bytes so far, largest box first.

    held: bytes of each box, of every rank, in rank order. All ranks that make it of the same lists agree.
    """

    def __init__(self, held: list[dict[Key, int]]) -> None:
        holders: dict[Key, list[int]] = {}
        for rank, sizes in enumerate(held):
            for key in sizes:
                holders.setdefault(key, []).append(rank)
        self.bytes_of_ranks = [0] * len(held)
        self.owners: dict[Key, int] = {}
        for key in sorted(holders, key=lambda key: (-held[holders[key][0]][key], key)):
            owner = min(holders[key], key=lambda rank: (self.bytes_of_ranks[rank], rank))
            self.owners[key] = owner
            self.bytes_of_ranks[owner] += held[owner][key]

    def part_of(self, rank: int, state: Mapping[str, ShardedState]) -> dict[str, ShardedState]:
        parts = {}
        for name, whole in state.items():
            boxes = tuple(box for box in whole.boxes if self.owners[Key(name, box.offsets)] == rank)
            if boxes:
                parts[name] = ShardedState(whole.shape, boxes)
        return parts


class Staging:
    """Host memory for a rank's part of the training state, and the copies into it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[Key, Tensor] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None

    @property
    def num_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._buffers.values())

    def reserve(self, state: Mapping[str, ShardedState]) -> None:
        """Allocate memory for the boxes of a state that have none yet. Raises as `allocate_pinned` does.

        Pinning takes seconds (3.8 s for 80.9 GB with 16 cores), so it is done before the first save. Memory of boxes
        that the state no longer has is freed.
        """
        sizes = sizes_of(state)
        self._buffers = {key: buffer for key, buffer in self._buffers.items() if sizes.get(key) == buffer.numel()}
        missing = [key for key in sizes if key not in self._buffers]
        for group in _in_groups(missing, sizes):
            memory = allocate_pinned(sum(_aligned(sizes[key]) for key in group), self.device)
            start = 0
            for key in group:
                self._buffers[key] = _slice(memory, start, sizes[key])
                start += _aligned(sizes[key])

    def copy(self, state: Mapping[str, ShardedState]) -> dict[str, ShardedState]:
        """Copy a state into the memory reserved for it, in the order of the current stream. Returns the copy.

        Its values are there after `wait_on_host`. The state may be changed by kernels that follow `wait_on_device`, and
        by the host at once.
        """
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            self._copied = torch.cuda.Event(blocking=True)
        copies: dict[Key, LocalBox] = {}
        on_host = []
        for name, whole in state.items():
            for box in whole.boxes:
                key = Key(name, box.offsets)
                target = self._buffers[key].view(box.values.dtype).view(box.values.shape)
                copies[key] = LocalBox(box.offsets, target)
                # Boxes on the device first: the host copies its own during these transfers.
                if box.values.device.type == "cuda" or (isinstance(box, LazyBox) and self._stream is not None):
                    self._enqueue(box, target)
                else:
                    on_host.append((box, target))
        if self._copied is not None and self._stream is not None:
            self._copied.record(self._stream)
        for box, target in on_host:
            target.copy_(box.read())
        return {
            name: ShardedState(whole.shape, tuple(copies[Key(name, box.offsets)] for box in whole.boxes))
            for name, whole in state.items()
        }

    def _enqueue(self, box: LocalBox, target: Tensor) -> None:
        """Copy a box on the side stream. What a lazy box makes is freed in that stream's order, and may be on either
        side."""
        with torch.cuda.stream(self._stream):
            values = box.read()
            if not values.is_contiguous():
                target.copy_(values, non_blocking=True)
                return
            count = max(1, PIECE // max(1, values.element_size()))
            flat, into = values.reshape(-1), target.view(-1)
            for start in range(0, flat.numel(), count):
                into[start : start + count].copy_(flat[start : start + count], non_blocking=True)

    def wait_on_device(self) -> None:
        """Let the current stream wait for the last copy, before kernels that change the state. The host does not wait.

        Does nothing while a CUDA graph is captured: its replays wait because the stream that calls them does.
        """
        if self._copied is not None and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self.device).wait_event(self._copied)

    def wait_on_host(self) -> None:
        """Wait until the values of the last copy are there. Any thread may call it."""
        if self._copied is not None:
            self._copied.synchronize()


def _in_groups(keys: Iterable[Key], sizes: Mapping[Key, int]) -> Iterable[list[Key]]:
    """Group boxes into allocations of at most MAX_ALLOCATED bytes, or one box."""
    group: list[Key] = []
    filled = 0
    for key in keys:
        if group and filled + _aligned(sizes[key]) > MAX_ALLOCATED:
            yield group
            group, filled = [], 0
        group.append(key)
        filled += _aligned(sizes[key])
    if group:
        yield group


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _slice(memory: Tensor, start: int, size: int) -> Tensor:
    """Bytes of an allocation, as a tensor that has the whole storage: torch.save writes storages, and would first
    copy a tensor that has only a part of one."""
    storage: Any = memory.untyped_storage()[start : start + size]
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (size,), (1,))
