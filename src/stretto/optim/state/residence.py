# SPDX-License-Identifier: Apache-2.0
"""Residences of optimizer state: where it is stored, and where a bucket is updated.

`HostResidence` (Singh, section 3.3.1) fetches a bucket's state into device buffers, where it is updated, and returns
it. With n sets of buffers, three buckets are in flight:

    host to device   | fetch 0 | fetch 1 | fetch 2 | fetch 3 | ...        its stream
    device                     | step 0  | step 1  | step 2  | ...        the caller's stream
    device to host                       | return 0| return 1| ...        its stream

The paper has one set (n = 1), with which fetch, step and return of neighbouring buckets cannot overlap. Buffers take
n x bucket_size x (bytes of the state of a number).

`HostStepResidence` keeps the state on the host and updates it there: gradients are copied to the host, and weights
back, 2 bytes a number each way.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.optim.state.layout import Bucket, StateLayout

Allocate = Callable[[int], Tensor]
"""Allocates zeroed host memory that copies to and from the device can use: uint8 [n]."""


class FlatWeights:
    """Weights in one flat tensor, of which the model's parameters are views; in the order of a `StateLayout`.

    Buckets are opened, updated and closed in a step. Other storages update them in buffers; `number` is that of a set
    of buffers, of which a residence that has several buckets in flight has several.
    """

    def __init__(self, layout: StateLayout, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self._places = dtype, layout.places
        self.flat = torch.zeros(layout.size, dtype=dtype, device=device)

    def prepare(self, rows: int, sets: int, gradients: Tensor, *, reads: bool) -> None:
        """Allocate buffers for `sets` buckets of `rows` numbers. gradients: flat, of all parameters. reads: an update
        needs the weights as they are."""

    def begin(self, present: Collection[int], skip: Tensor) -> None:
        """Begin updates of these parameters. skip: int32 [1]; while it is not 0, an update writes nothing."""

    def buffer(self, bucket: Bucket, number: int = 0) -> Tensor:
        return self.flat[bucket.start : bucket.stop]

    def open(self, bucket: Bucket, number: int = 0) -> Tensor:
        """The buffer with the weights as they are, if updates read them; ready on the current stream."""
        return self.buffer(bucket, number)

    def close(self, bucket: Bucket, number: int = 0) -> None:
        """The buffer holds the updated weights, in the order of the current stream."""

    def read(self, index: int) -> Tensor:
        """The weights of a parameter, as the store keeps its state: flat."""
        place = self._places[index]
        return self.flat[place.start : place.stop]

    def write(self, index: int, weight: Tensor) -> None:
        self.read(index).copy_(weight)

    def take_gradient(self, index: int, gradient: Tensor, out: Tensor, *, adds: bool) -> None:
        """Write a parameter's gradient to `out`, as the store keeps it; adds: add it."""
        if adds:
            out.add_(gradient)
        else:
            out.copy_(gradient)

    def keep_gradient(self, index: int, gradient: Tensor, out: Tensor, *, adds: bool) -> None:
        """Do so by the next `flush`. out: the parameter's place in the flat gradients."""
        self.take_gradient(index, gradient, out, adds=adds)

    def flush(self) -> None:
        """Write all gradients that are kept."""

    def drop(self) -> None:
        """Forget all gradients that are kept."""


class OpenBucket(NamedTuple):
    """A bucket's weights, gradients and state, flat, on the device on which they are stepped."""

    weight: Tensor
    gradient: Tensor
    state: dict[str, Tensor]


class StateResidence(ABC):
    """The state of all elements, by name: `arrays`, flat tensors of the layout's size, where they are stored.

    `prepare` comes first, with the weights and the flat gradients on the device. step_device: where buckets are
    stepped. weight_buffers: sets of buffers that it opens weights in.
    """

    arrays: dict[str, Tensor]
    step_device: torch.device
    weight_buffers = 1

    def prepare(self, weights: FlatWeights, gradients: Tensor) -> None:
        """Allocate what is not needed before the first step."""
        self.weights, self.gradients = weights, gradients

    @abstractmethod
    def begin(self, order: Sequence[Bucket], *, are_summed: bool) -> None:
        """Begin a step, which opens and closes these buckets in this order.

        are_summed: whether all gradients are summed over ranks by now; otherwise those of a chunk are when its first
        bucket is opened.
        """

    @abstractmethod
    def open(self, bucket: Bucket) -> OpenBucket:
        """The bucket, ready on the current stream, or on the host."""

    @abstractmethod
    def close(self, bucket: Bucket) -> None:
        """The bucket is updated, in the order of the current stream."""

    def finish(self) -> None:
        """End a step: weights are updated, in the order of the current stream."""
        return

    def synchronize(self) -> None:
        """Wait until `arrays` hold what has been returned."""
        return


class DeviceResidence(StateResidence):
    """State on the device itself. early: the slots that are allocated immediately; `prepare` allocates the others."""

    def __init__(
        self, slots: Mapping[str, torch.dtype], size: int, device: torch.device, *, early: Sequence[str] = ()
    ) -> None:
        self.step_device = device
        self._late = {name: dtype for name, dtype in slots.items() if name not in early}
        self._size = size
        self.arrays = {name: torch.zeros(size, dtype=slots[name], device=device) for name in early if name in slots}

    def prepare(self, weights: FlatWeights, gradients: Tensor) -> None:
        super().prepare(weights, gradients)
        self.arrays |= {
            name: torch.zeros(self._size, dtype=dtype, device=self.step_device) for name, dtype in self._late.items()
        }

    def begin(self, order: Sequence[Bucket], *, are_summed: bool) -> None:
        return

    def open(self, bucket: Bucket) -> OpenBucket:
        part = slice(bucket.start, bucket.stop)
        state = {name: array[part] for name, array in self.arrays.items()}
        return OpenBucket(self.weights.open(bucket), self.gradients[part], state)

    def close(self, bucket: Bucket) -> None:
        self.weights.close(bucket)


class _HostArrays(StateResidence):
    """State in one allocation of host memory, and the streams by which buckets come and go."""

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
        self.device, self.step_device = device, device
        self.slots, self.allocate = slots, allocate
        self.rows, self.buffer_sets = min(bucket_size, size), buffer_sets
        host = allocate(sum(size * dtype.itemsize for dtype in slots.values()))
        self.arrays, offset = {}, 0
        for name, dtype in sorted(slots.items(), key=lambda slot: -slot[1].itemsize):  # wide ones first: aligned
            self.arrays[name] = host[offset : offset + size * dtype.itemsize].view(dtype)
            offset += size * dtype.itemsize
        self._order: Sequence[Bucket] = ()
        self._fetched = 0  # of the order
        self._are_summed = False
        self._places: dict[int, int] = {}  # of the order, by a bucket's index
        self.is_cuda = device.type == "cuda"
        if self.is_cuda:
            self.to_device, self.to_host = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self.is_there = [torch.cuda.Event() for _ in range(buffer_sets)]
            self.is_returned = [torch.cuda.Event() for _ in range(buffer_sets)]

    def begin(self, order: Sequence[Bucket], *, are_summed: bool) -> None:
        self._order, self._fetched, self._are_summed = order, 0, are_summed
        self._places = {bucket.index: place for place, bucket in enumerate(order)}

    def number_of(self, bucket: Bucket) -> int:
        """Number of the set of buffers that a bucket has."""
        return self._places[bucket.index] % self.buffer_sets

    def next_to_fetch(self) -> tuple[Bucket, int, bool] | None:
        """The next bucket of the order, its buffers, and whether another bucket has had them before."""
        if self._fetched == len(self._order):
            return None
        bucket, is_reused = self._order[self._fetched], self._fetched >= self.buffer_sets
        self._fetched += 1
        return bucket, self.number_of(bucket), is_reused

    def on(self, name: str) -> Any:
        """A context in which copies are enqueued on one of the two streams."""
        return torch.cuda.stream(getattr(self, name) if self.is_cuda else None)


class HostResidence(_HostArrays):
    """State in host memory, of which up to `buffer_sets` buckets are on the device; steps run on the device."""

    def prepare(self, weights: FlatWeights, gradients: Tensor) -> None:
        super().prepare(weights, gradients)
        self._sets = [
            {name: torch.empty(self.rows, dtype=dtype, device=self.device) for name, dtype in self.slots.items()}
            for _ in range(self.buffer_sets)
        ]

    def begin(self, order: Sequence[Bucket], *, are_summed: bool) -> None:
        super().begin(order, are_summed=are_summed)
        if self.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a CUDA graph cannot hold steps of optimizer state on the host: keep it on the device")
        if self.is_cuda:
            self.to_device.wait_stream(self.to_host)  # the result of the last step
            self.to_device.wait_stream(torch.cuda.current_stream(self.device))  # which has made the buffers
        for _ in self._sets:
            self._fetch_next()

    def open(self, bucket: Bucket) -> OpenBucket:
        number, part = self.number_of(bucket), slice(bucket.start, bucket.stop)
        if self.is_cuda:
            torch.cuda.current_stream(self.device).wait_event(self.is_there[number])
        state = {name: buffer[: bucket.size] for name, buffer in self._sets[number].items()}
        return OpenBucket(self.weights.open(bucket), self.gradients[part], state)

    def close(self, bucket: Bucket) -> None:
        self.weights.close(bucket)
        number = self.number_of(bucket)
        if self.is_cuda:
            self.to_host.wait_stream(torch.cuda.current_stream(self.device))
        with self.on("to_host"):
            for name, array in self.arrays.items():
                array[bucket.start : bucket.stop].copy_(self._sets[number][name][: bucket.size], non_blocking=True)
            if self.is_cuda:
                self.is_returned[number].record(self.to_host)
        self._fetch_next()

    def synchronize(self) -> None:
        if self.is_cuda:
            self.to_host.synchronize()

    def _fetch_next(self) -> None:
        """Fetch the next bucket of the order into buffers that are free once the bucket before it is returned."""
        if (found := self.next_to_fetch()) is None:
            return
        bucket, number, is_reused = found
        if self.is_cuda and is_reused:
            self.to_device.wait_event(self.is_returned[number])
        with self.on("to_device"):
            for name, array in self.arrays.items():
                self._sets[number][name][: bucket.size].copy_(array[bucket.start : bucket.stop], non_blocking=True)
            if self.is_cuda:
                self.is_there[number].record(self.to_device)


class HostStepResidence(_HostArrays):
    """State in host memory, which is updated there; gradients are copied to the host, and weights back.

    A bucket's gradients are fetched when it is opened, and those of the bucket after it at the same time: the host
    updates one bucket while the next one's gradients are copied.
    """

    def prepare(self, weights: FlatWeights, gradients: Tensor) -> None:
        super().prepare(weights, gradients)
        self.step_device = torch.device("cpu")
        self.weight_buffers = self.buffer_sets
        self._staged = []
        for _ in range(self.buffer_sets):
            sizes = [self.rows * flat.dtype.itemsize for flat in (weights, gradients)]
            memory = self.allocate(sum(sizes)).split(sizes)
            self._staged.append((memory[0].view(weights.dtype), memory[1].view(gradients.dtype)))

    def open(self, bucket: Bucket) -> OpenBucket:
        last = self._places[bucket.index] + self.buffer_sets
        while self._fetched < min(last, len(self._order)) and self._can_fetch(self._order[self._fetched], bucket):
            self._fetch_next()
        number = self.number_of(bucket)
        if self.is_cuda:
            self.is_there[number].synchronize()
        weight, gradient = (staged[: bucket.size] for staged in self._staged[number])
        part = slice(bucket.start, bucket.stop)
        return OpenBucket(weight, gradient, {name: array[part] for name, array in self.arrays.items()})

    def close(self, bucket: Bucket) -> None:
        number = self.number_of(bucket)
        with self.on("to_device"):
            buffer = self.weights.buffer(bucket, number)
            buffer.copy_(self._staged[number][0][: bucket.size], non_blocking=True)
            self.weights.close(bucket, number)
            if self.is_cuda:
                self.is_returned[number].record(self.to_device)

    def finish(self) -> None:
        if self.is_cuda:
            torch.cuda.current_stream(self.device).wait_stream(self.to_device)

    def _can_fetch(self, bucket: Bucket, opened: Bucket) -> bool:
        return self._are_summed or bucket.chunk == opened.chunk

    def _fetch_next(self) -> None:
        found = self.next_to_fetch()
        assert found is not None
        bucket, number, is_reused = found
        part = slice(bucket.start, bucket.stop)
        if self.is_cuda:
            self.to_host.wait_stream(torch.cuda.current_stream(self.device))
            if is_reused:
                self.is_returned[number].synchronize()
        with self.on("to_host"):
            # The weights, too: where a step is skipped, or a parameter has no gradient, they go back as they are.
            sources = self.weights.open(bucket, number), self.gradients[part]
            for staged, source in zip(self._staged[number], sources, strict=True):
                staged[: bucket.size].copy_(source, non_blocking=True)
            if self.is_cuda:
                self.is_there[number].record(self.to_host)
