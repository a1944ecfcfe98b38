# SPDX-License-Identifier: Apache-2.0
"""Where optimizer state lies, and how a bucket's comes to the device for its step.

On the host (Singh, section 3.3.1), a bucket's state is fetched into device buffers, updated there, and returned. With
`n` sets of buffers, three buckets are under way at once:

    host to device   | fetch 0 | fetch 1 | fetch 2 | fetch 3 | ...        its stream
    device                     | step 0  | step 1  | step 2  | ...        the caller's stream
    device to host                       | return 0| return 1| ...        its stream

The paper has one set (n = 1), with which fetch, step and return of neighbouring buckets cannot overlap. Buffers take
n x bucket_size x (bytes of the state of a number).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.optim.state.layout import Bucket

Allocate = Callable[[int], Tensor]
"""Allocates bytes of host memory that copies to and from the device can use: uint8 [n]."""


class StateResidence(ABC):
    """The state of all numbers, by name: `arrays`, flat tensors of the layout's size, where they lie."""

    arrays: dict[str, Tensor]

    @abstractmethod
    def begin(self, order: Sequence[Bucket]) -> None:
        """Begin a step, which opens and closes these buckets in this order."""

    @abstractmethod
    def open(self, bucket: Bucket) -> dict[str, Tensor]:
        """The bucket's state on the device, ready on the current stream."""

    @abstractmethod
    def close(self, bucket: Bucket) -> None:
        """The bucket's state is updated, in the order of the current stream."""

    def synchronize(self) -> None:
        """Wait until `arrays` hold what has been returned."""
        return


class DeviceResidence(StateResidence):
    """State on the device itself."""

    def __init__(self, slots: Mapping[str, torch.dtype], size: int, device: torch.device) -> None:
        self.arrays = {name: torch.zeros(size, dtype=dtype, device=device) for name, dtype in slots.items()}

    def begin(self, order: Sequence[Bucket]) -> None:
        return

    def open(self, bucket: Bucket) -> dict[str, Tensor]:
        return {name: array[bucket.start : bucket.stop] for name, array in self.arrays.items()}

    def close(self, bucket: Bucket) -> None:
        return


class HostResidence(StateResidence):
    """State in host memory, of which `buffer_sets` buckets are on the device at once.

    allocate: of host memory; what it returns is zeroed here.
    """

    def __init__(
        self,
        slots: Mapping[str, torch.dtype],
        size: int,
        device: torch.device,
        *,
        bucket_size: int,
        buffer_sets: int,
        allocate: Allocate,
    ) -> None:
        if buffer_sets < 1:
            raise ValueError(f"the state of {buffer_sets} buckets fits on the device at once, but at least 1 must")
        self.device = device
        self._host = allocate(sum(size * dtype.itemsize for dtype in slots.values()))
        self.arrays, offset = {}, 0
        for name, dtype in sorted(slots.items(), key=lambda slot: -slot[1].itemsize):  # wide ones first: aligned
            self.arrays[name] = self._host[offset : offset + size * dtype.itemsize].view(dtype)
            offset += size * dtype.itemsize
        for array in self.arrays.values():
            array.zero_()
        rows = min(bucket_size, size)
        self._sets = [
            {name: torch.empty(rows, dtype=dtype, device=device) for name, dtype in slots.items()}
            for _ in range(buffer_sets)
        ]
        self._order: Sequence[Bucket] = ()
        self._fetched = 0  # of the order
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            self._to_device, self._to_host = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self._is_there = [torch.cuda.Event() for _ in self._sets]
            self._is_returned = [torch.cuda.Event() for _ in self._sets]
        self._places: dict[int, int] = {}  # of the order, by a bucket's index

    def begin(self, order: Sequence[Bucket]) -> None:
        self._order, self._fetched = order, 0
        self._places = {bucket.index: place for place, bucket in enumerate(order)}
        if self._is_cuda:
            self._to_device.wait_stream(self._to_host)  # what the last step returned
        for _ in self._sets:
            self._fetch_next()

    def open(self, bucket: Bucket) -> dict[str, Tensor]:
        number = self._places[bucket.index] % len(self._sets)
        if self._is_cuda:
            torch.cuda.current_stream(self.device).wait_event(self._is_there[number])
        return {name: buffer[: bucket.size] for name, buffer in self._sets[number].items()}

    def close(self, bucket: Bucket) -> None:
        number = self._places[bucket.index] % len(self._sets)
        if self._is_cuda:
            self._to_host.wait_stream(torch.cuda.current_stream(self.device))
        with self._on(self._to_host if self._is_cuda else None):
            for name, array in self.arrays.items():
                array[bucket.start : bucket.stop].copy_(self._sets[number][name][: bucket.size], non_blocking=True)
            if self._is_cuda:
                self._is_returned[number].record(self._to_host)
        self._fetch_next()

    def synchronize(self) -> None:
        if self._is_cuda:
            self._to_host.synchronize()

    def _fetch_next(self) -> None:
        """Fetch the next bucket of the order into the buffers that are free after the bucket before it is returned."""
        if self._fetched == len(self._order):
            return
        bucket, number = self._order[self._fetched], self._fetched % len(self._sets)
        if self._is_cuda and self._fetched >= len(self._sets):
            self._to_device.wait_event(self._is_returned[number])
        with self._on(self._to_device if self._is_cuda else None):
            for name, array in self.arrays.items():
                self._sets[number][name][: bucket.size].copy_(array[bucket.start : bucket.stop], non_blocking=True)
            if self._is_cuda:
                self._is_there[number].record(self._to_device)
        self._fetched += 1

    def _on(self, stream: Any) -> Any:
        return torch.cuda.stream(stream)  # None: a context that does nothing
