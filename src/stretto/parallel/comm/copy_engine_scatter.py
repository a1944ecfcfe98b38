# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatters weight gradients over z by copy engines, with a kernel that reads each rank's part once.

As with gathered weights (`copy_engine_gather`), NCCL's kernels would contend for multiprocessors with the products
beside them. Copy engines send a gradient's parts into a ring of slots that each rank has in symmetric memory, each part
followed by a signal. When the sum is needed, one kernel waits for the signals and adds the parts in fp32 in rank order,
straight into the parameter's dtype.

Each rank numbers its reduce-scatters and signals to the others the number of the last one that it has summed, so that
no slot is overwritten while it is read. Numbers and signals are in device memory and only count up: CUDA graphs replay.
"""

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from stretto.execution import SCATTERS_IN_FLIGHT
from stretto.parallel.comm.collectives import Pending, Started, collective, start_scatter_rows
from stretto.tiles import BlockChannel, copy_engine, rank_copy_data, rank_set_slot
from stretto.tiles.call_state import may_publish
from stretto.tiles.launches import launch_kernel
from stretto.tiles.signals import set_slot
from stretto.tiles.waits import OF_PEER, await_slot

SLOTS = SCATTERS_IN_FLIGHT + 1
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
        """Make the slots large enough for gradients of this shape."""
        self._largest = max(self._largest, -(-rows // self.group.size()) * columns)

    def start(self, gradient: Tensor, local_rows: int, dtype: torch.dtype) -> Pending:
        """Start a reduce-scatter: by copy engines, or through the process group where they do not take the gradient.

        The first call is collective.
        """
        if self._scatter is None:
            if gradient.is_cuda and torch.cuda.is_current_stream_capturing():
                raise ValueError(
                    "the first backward pass allocates memory that all ranks share, which a CUDA graph cannot hold: "
                    "run a step before the graph is captured"
                )
            self._scatter = CopyEngineReduceScatter(self.group, self._largest * gradient.element_size(), self.backend)
        if self._scatter.takes(gradient):
            return self._scatter.start(gradient, local_rows, dtype)
        return start_scatter_rows(gradient, local_rows, self.group)

    def drop(self) -> None:
        """Sum what a backward pass that has raised left in the slots, so that ranks' counts stay alike."""
        if self._scatter is not None:
            self._scatter.drop()


class CopyEngineReduceScatter:
    """Reduce-scatters one model's weight gradients over one group, up to `part` bytes to each rank.

    Gradients are summed in the order in which their reduce-scatters were started. All ranks start the same ones, in the
    same order.
    """

    def __init__(self, group: dist.ProcessGroup, part: int, backend: str = "cuda") -> None:
        self.group = group
        world = group.size()
        self._part = -(-part // 128) * 128
        self._channel = BlockChannel.allocate(
            group,
            channels=1,
            peer_tiles=2,
            data_bytes=SLOTS * world * self._part,
            backend=backend,
        )
        device = self._channel.device
        self._description = self._channel.describe(OPERATOR)
        self._started = torch.zeros(1, dtype=torch.int32, device=device)
        self._words = torch.zeros(
            SLOTS, dtype=torch.int32, device=device
        )  # the number of the reduce-scatter in each slot
        self._tickets = torch.zeros(1, dtype=torch.int32, device=device)
        self._outstanding: deque[PendingReduceScatter] = deque()
        self._count = 0  # reduce-scatters started since none was outstanding
        self._task = -1

    def takes(self, gradient: Tensor) -> bool:
        """True if `start` takes this gradient: it fits, a slot is free, and no other backward pass uses the ring."""
        world = self.group.size()
        part = -(-gradient.shape[0] // world) * gradient[:1].numel() * gradient.element_size()
        is_alone = not self._outstanding or self._task == torch._C._current_graph_task_id()
        return part <= self._part and is_alone and len(self._outstanding) < SLOTS

    def start(self, gradient: Tensor, local_rows: int, dtype: torch.dtype) -> Pending:
        """Begin to sum the whole gradient [rows, ...]; the result is this rank's local_rows of it, in `dtype`.

        PeerError if a wait of an earlier reduce-scatter has timed out.
        """
        channel, world, rank = self._channel, self.group.size(), self.group.rank()
        channel.check()
        if not self._outstanding:
            channel.limit.begin_call()
            self._count, self._task = 0, torch._C._current_graph_task_id()
        slot, lag = self._count % SLOTS, min(self._count, SLOTS - 1)
        self._count += 1
        gradient = gradient.contiguous()
        chunk = -(-gradient.shape[0] // world)
        word = self._words[slot : slot + 1]
        on_load = channel.limit.allow_loading
        launch_kernel(begin_scatter, 1, self._description, self._started, word, lag, on_load=on_load, num_warps=1)
        with collective("reduce_scatter"), copy_engine(channel):
            for distance in range(1, world):
                peer = (rank - distance) % world
                part = gradient[peer * chunk : (peer + 1) * chunk]
                rank_copy_data(self._place(slot, rank, part, peer), part)
                rank_set_slot(channel, ARRIVED.value, peer, word)
            side = channel.side_stream()
            pushed = None if side is None else side.stream.record_event()
        own = gradient[rank * chunk : rank * chunk + local_rows]
        result = torch.empty_like(own, dtype=dtype)
        pending = PendingReduceScatter(result, _WORK, gradient, self, slot, own, pushed)
        self._outstanding.append(pending)
        return pending

    def drop(self) -> None:
        """Sum what a backward pass that has raised left in the slots, so that ranks' counts stay alike."""
        while self._outstanding:
            self._outstanding[0].wait()

    def finish(self, pending: "PendingReduceScatter") -> None:
        """Enqueue the sum of the oldest outstanding reduce-scatter, which must be `pending`."""
        assert self._outstanding.popleft() is pending, "gradients are summed in the order in which they were started"
        own, count = pending.own, pending.own.numel()
        first = self._place(pending.slot, 0, own)
        if pending.pushed is not None:
            torch.cuda.current_stream(own.device).wait_event(pending.pushed)
        programs = max(1, min(triton.cdiv(count, _BLOCK), _PROGRAMS))
        launch_kernel(
            sum_parts,
            programs,
            self._description,
            self._words[pending.slot : pending.slot + 1],
            self._tickets,
            own,
            first,
            pending.result,
            count,
            self._part // own.element_size(),
            BLOCK=_BLOCK,
            on_load=self._channel.limit.allow_loading,
            num_warps=8,
        )

    def _place(self, slot: int, source: int, like: Tensor, rank: int | None = None) -> Tensor:
        """The place of `source`'s part in a slot of this rank, or of another one."""
        offset = (slot * self.group.size() + source) * self._part
        return self._channel.tensor(tuple(like.shape), like.dtype, offset=offset, rank=rank)


@dataclass(frozen=True, eq=False)
class PendingReduceScatter(Pending):
    """A reduce-scatter whose parts are on their way. `wait` enqueues the kernel that sums them, once."""

    scatter: CopyEngineReduceScatter | None = None
    slot: int = 0
    own: Tensor = None  # type: ignore[assignment]
    pushed: torch.cuda.Event | None = None

    def wait(self) -> Tensor:
        """The result; the current stream waits for its sum, and the host does not."""
        if self.scatter is not None and any(self is other for other in self.scatter._outstanding):
            self.scatter.finish(self)
        return self.result


@triton.jit
def begin_scatter(channel, started, word, lag):  # type: ignore[no-untyped-def]
    """Number a reduce-scatter, and wait until its slot is free at all other ranks. One program.

    Signals: none here; a copy engine signals `word` after it. Waits: for the others' sums of all but the last `lag`
    reduce-scatters, each of which is enqueued there before this one is. Reuse: this wait is what allows a slot's reuse.
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
def sum_parts(channel, word, tickets, own, parts, out, count, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out [count] = the sum over ranks, in their order, of their parts [world, stride], of which `own` is this rank's.

    Waits: for all others' copies of this reduce-scatter, which depend on copy engines and on what those ranks had
    enqueued before. Signals: when its last program is done, that the slot may be overwritten.
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
                theirs = parts + source * stride.to(tl.int64) + ready * 16
                part = tl.load(theirs + at, mask=inside, other=0)
            total += part.to(exact)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
    tl.debug_barrier()
    if tl.atomic_add(tickets, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(tickets, 0)
        publishes = may_publish(channel)
        for distance in tl.static_range(1, channel.world):
            set_slot(channel, (channel.rank + distance) % channel.world, RELEASED, tick, publishes)
