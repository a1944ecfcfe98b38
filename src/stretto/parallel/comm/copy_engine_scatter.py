# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatters weight gradients over z by copy engines, with a kernel that reads each rank's part once.

As with gathered weights (`copy_engine_gather`), NCCL's kernels would contend for multiprocessors with the products
beside them. Copy engines send a gradient's parts into a ring buffer that each rank has in symmetric memory, one for
each other rank, each part followed by a signal. When the sum is needed, one kernel waits for the signals, adds the
parts in fp32 in rank order, and multiplies the sum by the factor of an average, straight into the parameter's dtype.

Each rank numbers its reduce-scatters and signals to the others the number of the last one that it has summed, so that
no part is overwritten while it is read. Numbers and signals are in device memory and only count up: CUDA graphs replay.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from stretto.execution import SCATTER_RING_BYTES, SCATTERS_IN_FLIGHT
from stretto.memory.copy_engine import DriverEvent, find_driver, find_handle
from stretto.parallel.comm.collectives import Pending, Started, collective, start_scatter_rows
from stretto.tiles import BlockChannel, CopyList, copy_engine, find_copies, kind_of
from stretto.tiles.call_state import may_publish
from stretto.tiles.signals import set_slot
from stretto.tiles.waits import OF_PEER, await_slot

MAX_STARTED = SCATTERS_IN_FLIGHT + 1
OPERATOR = "the reduce-scatter of gradients over z"
# What a peer's signals say: the number of the last reduce-scatter whose part has arrived here, and of the last one that
# was summed there.
ARRIVED = tl.constexpr(0)
RELEASED = tl.constexpr(1)
_WORK = Started(dist.Work(), "reduce_scatter", -1, 0)  # stands for a collective that no process group runs
_BLOCK = 2048
_PROGRAMS = 512


class ScatterRing:
    """Allocates a model's `CopyEngineReduceScatter` at its first gradient, sized for the largest one registered."""

    def __init__(self, group: dist.ProcessGroup, backend: str = "cuda") -> None:
        self.group = group
        self.backend = backend
        self._largest = 0
        self._scatter: CopyEngineReduceScatter | None = None

    def register(self, rows: int, columns: int) -> None:
        """Make the ring large enough for gradients of this shape."""
        self._largest = max(self._largest, -(-rows // self.group.size()) * columns)

    def is_full(self, gradient: Tensor, dtype: torch.dtype) -> bool:
        """True if the ring has no room for the gradient, in `dtype`, until earlier ones of this pass are summed."""
        return self._scatter is not None and self._scatter.is_full(gradient, dtype.itemsize)

    def has_room(self) -> bool:
        """True if the ring has room for the largest gradient, and so for any, before another one is summed."""
        return self._scatter is None or self._scatter.has_room()

    def start(self, gradient: Tensor, local_rows: int, dtype: torch.dtype, factor: float = 1.0) -> Pending:
        """Start a reduce-scatter: by copy engines, or through the process group where they do not take the gradient.

        Its result is multiplied by `factor`, but for `Pending.factor`. The first call is collective.
        """
        if self._scatter is None:
            if gradient.is_cuda and torch.cuda.is_current_stream_capturing():
                raise ValueError(
                    "the first backward pass allocates memory that all ranks share, which a CUDA graph cannot hold: "
                    "run a step before the graph is captured"
                )
            part = self._largest * gradient.element_size()
            ring = min(MAX_STARTED * part, max(3 * part, SCATTER_RING_BYTES // self.group.size()))
            self._scatter = CopyEngineReduceScatter(self.group, part, ring, self.backend)
        if self._scatter.takes(gradient):
            return self._scatter.start(gradient, local_rows, dtype, factor)
        return start_scatter_rows(gradient, local_rows, self.group, factor)

    def drop(self) -> None:
        """Sum what a backward pass that has raised left in the ring, so that ranks' counts stay alike."""
        if self._scatter is not None:
            self._scatter.drop()


class CopyEngineReduceScatter:
    """Reduce-scatters one model's weight gradients over one group, up to `part` bytes to each rank.

    Gradients are summed in the order in which their reduce-scatters were started. All ranks start the same ones, in the
    same order. ring: how many bytes to each rank may be on their way at once.
    """

    def __init__(self, group: dist.ProcessGroup, part: int, ring: int, backend: str = "cuda") -> None:
        self.group = group
        world = group.size()
        self._part, self._ring = _align(part), _align(max(part, ring))
        self._channel = BlockChannel.allocate(
            group, channels=1, peer_tiles=2, data_bytes=(world - 1) * self._ring, backend=backend
        )
        device = self._channel.device
        self._description = self._channel.describe(OPERATOR)
        self._started = torch.zeros(1, dtype=torch.int32, device=device)
        # Numbers of started reduce-scatters, and events after their copies.
        self._words = torch.zeros(MAX_STARTED, dtype=torch.int32, device=device).split(1)
        self._pushed = [DriverEvent() for _ in self._words] if device.type == "cuda" else []
        self._tickets = torch.zeros(1, dtype=torch.int32, device=device)
        self._outstanding: deque[PendingReduceScatter] = deque()
        # Since none was outstanding: how many were started, and the last ones' bytes of the ring, from where to where.
        self._count = 0
        self._pieces: deque[tuple[int, int]] = deque(maxlen=MAX_STARTED)
        self._task = -1

    def takes(self, gradient: Tensor) -> bool:
        """True if `start` takes this gradient: the ring has room, and no other backward pass uses it."""
        size = self._size(gradient, gradient.element_size())
        return size <= self._part and self._is_alone() and self.has_room(size)

    def is_full(self, gradient: Tensor, element: int) -> bool:
        """True if `start` takes this gradient, of `element` bytes a number, only once earlier ones have been summed."""
        size = self._size(gradient, element)
        return size <= self._part and self._is_alone() and not self.has_room(size)

    def has_room(self, size: int | None = None) -> bool:
        """True if parts of so many bytes, by default of the largest gradient, can begin before another sum."""
        if not self._outstanding:
            return True
        size = self._part if size is None else size
        count, begin = len(self._outstanding), self._find_place(size)
        in_use = islice(self._pieces, max(len(self._pieces) - count, 0), None)
        return count < MAX_STARTED and not _overlap(in_use, begin, begin + size)

    def _is_alone(self) -> bool:
        return not self._outstanding or self._task == torch._C._current_graph_task_id()

    def _size(self, gradient: Tensor, element: int) -> int:
        """The bytes of a rank's part of a gradient in the ring."""
        rows, *others = gradient.shape
        return _align(-(-rows // self.group.size()) * math.prod(others) * element)

    def _find_place(self, size: int) -> int:
        """Find where the next part begins in the ring: after the last one, or at the beginning."""
        end = self._pieces[-1][1] if self._pieces else 0
        return end if end + size <= self._ring else 0

    def start(self, gradient: Tensor, local_rows: int, dtype: torch.dtype, factor: float = 1.0) -> Pending:
        """Begin to sum the whole gradient [rows, ...]; the result is this rank's local_rows of it, in `dtype`.

        factor: multiplies the sum (in fp64: is left to the caller). PeerError if a wait of an earlier reduce-scatter
        has timed out.
        """
        channel, world, rank = self._channel, self.group.size(), self.group.rank()
        channel.check()
        if not self._outstanding:
            channel.limit.begin_call()
            self._count, self._task = 0, torch._C._current_graph_task_id()
            self._pieces.clear()
        size = self._size(gradient, gradient.element_size())
        begin = self._find_place(size)
        while _overlap(self._pieces, begin, begin + size):
            self._pieces.popleft()
        lag = len(self._pieces)  # all before these have to be summed everywhere
        self._pieces.append((begin, begin + size))
        number = self._count % MAX_STARTED
        self._count += 1
        gradient = gradient.contiguous()
        chunk = -(-gradient.shape[0] // world)
        word = self._words[number]
        begins = self._description, self._started, word, lag
        channel.launch(begin_scatter, (number, lag), 1, begins, kept=self._description, num_warps=1)

        def list_copies() -> CopyList:
            copies = CopyList(gradient)
            for distance in range(1, world):
                peer = (rank - distance) % world
                part = gradient[peer * chunk : (peer + 1) * chunk]
                copies.copy(self._place(begin, rank, part, peer), part)
                copies.set_slot(channel, ARRIVED.value, peer, word)
            return copies

        pushed = None
        with collective("reduce_scatter"), copy_engine(channel):
            find_copies(channel, (number, begin, gradient.shape, gradient.dtype), list_copies).run(channel, gradient)
            if (side := channel.side_stream()) is not None:
                pushed = self._pushed[number].record(side.stream)
        own = gradient[rank * chunk : rank * chunk + local_rows]
        result = torch.empty_like(own, dtype=dtype)
        left = factor if own.dtype == torch.float64 else 1.0  # kernels take fp32 numbers
        pending = PendingReduceScatter(result, _WORK, gradient, left, self, factor / left, begin, word, own, pushed)
        self._outstanding.append(pending)
        return pending

    def drop(self) -> None:
        """Sum what a backward pass that has raised left in the ring, so that ranks' counts stay alike."""
        while self._outstanding:
            self._outstanding[0].wait()

    def finish(self, pending: "PendingReduceScatter") -> None:
        """Enqueue the sum of the oldest outstanding reduce-scatter, which must be `pending`."""
        oldest = self._outstanding.popleft()
        assert oldest is pending, "gradients are summed in the order in which they were started"
        own, count = pending.own, pending.own.numel()
        first = self._place(pending.begin, 0, own)
        if pending.pushed is not None:
            find_driver().follow(find_handle(own.device), pending.pushed)
        programs = max(1, min(triton.cdiv(count, _BLOCK), _PROGRAMS))
        moving = pending.word, own, first, pending.result, count, self._ring // own.element_size()
        word, *others = moving
        arguments = self._description, word, self._tickets, *others, pending.scale, _BLOCK
        key = kind_of(word), kind_of(own), own.shape, kind_of(pending.result)  # `first` is aligned, and sizes as shapes
        self._channel.launch(sum_parts, key, programs, arguments, kept=self._description, num_warps=8)

    def _place(self, begin: int, source: int, like: Tensor, rank: int | None = None) -> Tensor:
        """The place of `source`'s part in the ring that this rank, or another one, has for it."""
        reader = self.group.rank() if rank is None else rank
        offset = (source - (source > reader)) * self._ring + begin
        return self._channel.tensor(tuple(like.shape), like.dtype, offset=offset, rank=rank)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // 128) * 128


def _overlap(pieces: Iterable[tuple[int, int]], begin: int, end: int) -> bool:
    """True if any of the pieces has bytes from `begin` to `end`."""
    for start, stop in pieces:  # noqa: SIM110  (`any` made most of the calls that a gradient took)
        if start < end and begin < stop:
            return True
    return False


@dataclass(frozen=True, eq=False)
class PendingReduceScatter(Pending):
    """A reduce-scatter whose parts are on their way. `wait` enqueues the kernel that sums them, once.

    scale: multiplies the sum. begin: of the parts in the ring. word: the number of this reduce-scatter.
    """

    scatter: CopyEngineReduceScatter | None = None
    scale: float = 1.0
    begin: int = 0
    word: Tensor = None  # type: ignore[assignment]
    own: Tensor = None  # type: ignore[assignment]
    pushed: int | None = None

    def wait(self) -> Tensor:
        """The result; the current stream waits for its sum, and the host does not."""
        if self.scatter is not None and any(self is other for other in self.scatter._outstanding):
            self.scatter.finish(self)
        return self.result


@triton.jit
def begin_scatter(channel, started, word, lag):  # type: ignore[no-untyped-def]
    """Number a reduce-scatter, and wait until its part of the ring is free at all other ranks. One program.

    Signals: none here; a copy engine signals `word` after it. Waits: for the others' sums of all but the last `lag`
    reduce-scatters, each of which is enqueued there before this one is. Reuse: this wait allows it.
    After a failed wait, `word` keeps an old number, so that peers do not take what is copied then for this
    reduce-scatter's parts.
    """
    tick = (tl.load(started).to(tl.int64) + 1).to(tl.int32)
    tl.debug_barrier()
    tl.store(started, tick)
    for distance in tl.static_range(1, channel.world):
        peer = (channel.rank + distance) % channel.world
        await_slot(channel, peer, RELEASED, tick - 1 - lag, OF_PEER, False)
    tl.store(word, tick, mask=may_publish(channel))


@triton.jit
def sum_parts(channel, word, tickets, own, parts, out, count, stride, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out [count] = scale x the sum over ranks, in their order, of `own` and the others' parts [world - 1, stride].

    Waits: for all others' copies of this reduce-scatter, which depend on copy engines and on what those ranks had
    enqueued before. Signals: when its last program is done, that the parts may be overwritten.
    """
    tick = tl.load(word)
    ready = tick * 0
    for distance in tl.static_range(1, channel.world):
        peer = (channel.rank + distance) % channel.world
        ready += await_slot(channel, peer, ARRIVED, tick, OF_PEER, False)
    exact: tl.constexpr = tl.float64 if own.dtype.element_ty == tl.float64 else tl.float32
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        total = tl.zeros((BLOCK,), exact)
        for source in tl.static_range(channel.world):
            if source == channel.rank:
                part = tl.load(own + at, mask=inside, other=0)
            else:
                place = source - tl.where(source > channel.rank, 1, 0)
                theirs = parts + place.to(tl.int64) * stride + ready * 16
                part = tl.load(theirs + at, mask=inside, other=0)
            total += part.to(exact)
        tl.store(out + at, (total * scale).to(out.dtype.element_ty), mask=inside)
    tl.debug_barrier()
    if tl.atomic_add(tickets, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(tickets, 0)
        publishes = may_publish(channel)
        for distance in tl.static_range(1, channel.world):
            set_slot(channel, (channel.rank + distance) % channel.world, RELEASED, tick, publishes)
