# SPDX-License-Identifier: Apache-2.0
"""The collectives that layers use, on plain tensors: each is issued and marked here. One rank costs nothing.

The functions that start a collective return a `Pending`: NCCL runs it on its own stream, gloo in its own thread.

Whatever communicates inside a layer, in autograd functions too, does so inside `collective(kind)`: the functions here
enter it, and so do the gathers and scatters by copy engines and the callers of fused operators of `stretto.ops`.
`running_collective` then returns, for any dispatched operator, its collective: a policy of selective
activation checkpointing can spare it from being recomputed, and a trace names it (`COLLECTIVE_MARK`).
"""

import os
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function
from torch.utils._python_dispatch import _get_current_dispatch_mode

from stretto import counters

if TYPE_CHECKING:
    from stretto.collectives.two_level import Work
    from stretto.parallel.comm.two_level import TwoLevels

    AnyWork: TypeAlias = dist.Work | Work

# torch 2.13 renamed these two, and warns at each call of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# What a collective is called in a trace: this, and its kind.
COLLECTIVE_MARK = "stretto collective "

EXPERTS_MARK = "stretto experts"  # in traces, around what experts do


def mark_experts() -> AbstractContextManager[object]:
    """Mark what a `with` statement runs as work of experts, in traces."""
    is_marked = not torch.compiler.is_compiling() and torch.autograd._profiler_enabled()
    return record_function(EXPERTS_MARK) if is_marked else nullcontext()


class _Running(threading.local):
    kind: str | None = None


_running = _Running()


class collective:
    """Marks what a `with` statement issues as a collective of this kind: "all_reduce", say.

    group: counts it among the group's, in this rank's counters; what blocks in the statement waits for that group.
    """

    __slots__ = ("_before", "_group", "_kind", "_number", "_record", "_wait")

    def __init__(self, kind: str, group: dist.ProcessGroup | None = None) -> None:
        self._kind = kind
        self._group = -1 if group is None else _index_of(group)

    def __enter__(self) -> "collective":
        self._before, _running.kind = _running.kind, self._kind
        self._number = counters.enter_collective(self._group)
        self._wait = counters.begin_wait(self._kind, self._group, self._number)
        # Only under a profiler: without one a record would cost the host several microseconds at each call.
        self._record = record_function(COLLECTIVE_MARK + self._kind) if torch.autograd._profiler_enabled() else None
        if self._record is not None:
            self._record.__enter__()
        return self

    def watch(self, work: "AnyWork | None", tensor: Tensor) -> "Started | None":
        """The collective's work on a tensor, whose wait is in this rank's counters. For an `async_op=True` in the
        statement."""
        if work is None:
            return None
        return Started(work, self._kind, self._group, self._number, waits_on_host=not tensor.is_cuda)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._record is not None:
            self._record.__exit__(kind, error, where)
        counters.end_wait(self._wait)
        _running.kind = self._before


def _index_of(group: dist.ProcessGroup) -> int:
    """The index of a group in this rank's counters."""
    index = _indices.get(group)  # its name takes 16 us
    if index is None:
        name = group.group_name
        label = "world" if group.group_desc == "default_pg" else group.group_desc.removeprefix("mesh_")
        index = _indices[group] = counters.group_index(name, label or name, dist.get_process_group_ranks(group))
    return index


_indices: "weakref.WeakKeyDictionary[dist.ProcessGroup, int]" = weakref.WeakKeyDictionary()


class SlowWaitCheck(Protocol):
    """Knows what other ranks do."""

    def look(self) -> None:
        """Raise RuntimeError if a rank does something for which this one would wait in vain."""


slow_waits: "weakref.WeakSet[SlowWaitCheck]" = weakref.WeakSet()
"""Those that look once a rank has waited for a collective on its host for a second, and each second after it."""
LOOKS_EVERY = 1.0  # seconds


def look_at_others() -> None:
    """Raise RuntimeError if a rank does something for which this one waits in vain."""
    for check in list(slow_waits):
        check.look()


class _Waiter:
    """A thread that waits for reduce-scatters of gloo."""

    _waits: "queue.SimpleQueue[tuple[AnyWork, threading.Event] | None] | None" = None

    def forget(self) -> None:
        """Clear, in a forked process, what belongs to threads that it does not have."""
        self._waits = None

    def wait_for(self, work: "AnyWork") -> threading.Event:
        """The event that is set once the work has ended or failed."""
        if self._waits is None:
            self._waits = queue.SimpleQueue()
            threading.Thread(target=_wait_for_each, args=(self._waits,), name="stretto-waits", daemon=True).start()
        ended = threading.Event()
        self._waits.put((work, ended))
        return ended

    def leave(self) -> None:
        """Leave the thread to a wait that may never end; the next wait gets another one."""
        if self._waits is not None:
            self._waits.put(None)
            self._waits = None


def _wait_for_each(waits: "queue.SimpleQueue[tuple[AnyWork, threading.Event] | None]") -> None:
    while (wait := waits.get()) is not None:
        with suppress(Exception):  # who waits for it waits again, and raises
            wait[0].wait()
        wait[1].set()
        wait = None


_waiter = _Waiter()
os.register_at_fork(after_in_child=_waiter.forget)


class Started:
    """A collective that was issued, and whose `wait` is in this rank's counters."""

    __slots__ = ("_group", "_kind", "_number", "_waits_on_host", "work")

    def __init__(self, work: "AnyWork", kind: str, group: int, number: int, *, waits_on_host: bool = False) -> None:
        self.work, self._kind, self._group, self._number = work, kind, group, number
        self._waits_on_host = waits_on_host

    def wait(self) -> None:
        before = counters.begin_wait(self._kind, self._group, self._number)
        try:
            if self._waits_on_host:
                self._wait_and_look()
            try:
                self.work.wait()
            except RuntimeError as error:
                look_at_others()  # which may know why
                error.add_note(
                    f"this rank waited in {self._kind} number {self._number} of "
                    f"{counters.describe_group(self._group)}: another of these ranks has ended or failed, or did not "
                    "make that call within the time limit, as where ranks take different numbers of steps or passes"
                )
                raise
        finally:
            counters.end_wait(before)

    def _wait_and_look(self) -> None:
        """Wait until the collective has ended or failed; `slow_waits` look once a second."""
        if self._kind == "reduce_scatter":  # gloo's ends within its `wait` alone, which ignores a limit
            ended = _waiter.wait_for(self.work)
            try:
                while not ended.wait(LOOKS_EVERY):
                    look_at_others()
            except RuntimeError:
                _waiter.leave()
                raise
            return
        # No `is_completed` here: it waits for the Work's lock while it has the interpreter's, and under a profiler the
        # thread that ends the Work takes them the other way round.
        while True:
            began = time.monotonic()
            try:
                self.work.wait(timedelta(seconds=LOOKS_EVERY))
            except RuntimeError:
                if time.monotonic() - began >= 0.9 * LOOKS_EVERY:  # else it has failed, which the caller's wait raises
                    look_at_others()
                    continue
            return


def running_collective() -> str | None:
    """The kind of the collective that this thread is issuing; None outside of any."""
    return _running.kind


@dataclass(frozen=True)
class Pending:
    """A started collective. `result` is valid once `wait` has returned, on the stream that waited.

    factor: by which the caller still has to multiply the result of a scaled reduction. fp8_scale: of numbers in fp8.
    """

    result: Tensor
    work: Started | None = None
    source: Tensor | None = None  # what is being sent, which must live until then
    factor: float = 1.0
    fp8_scale: Tensor | None = field(default=None, kw_only=True)

    def wait(self) -> Tensor:
        """The result. On a GPU the current stream waits for it, and the host does not."""
        if self.work is not None:
            self.work.wait()
        return self.result


@dataclass(frozen=True)
class PendingSum(Pending):
    """Parts of all ranks on their way, in a narrower dtype than that of their sum or average [rows, ...], which `wait`
    returns."""

    rows: int = 0
    ranks: int = 1
    dtype: torch.dtype | None = None
    averages: bool = False

    def wait(self) -> Tensor:
        parts = super().wait().unflatten(0, (self.ranks, -1))[:, : self.rows]
        return parts.mean(0, dtype=self.dtype) if self.averages else parts.sum(0, dtype=self.dtype)


class _NoGroup:
    """Stands for a process group where ranks compute the same and nothing is sent."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


NO_GROUP = cast(dist.ProcessGroup, _NoGroup())


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce `tensor` over the group in place, and return it."""
    if group.size() > 1:
        with collective("all_reduce", group) as issued:
            work = issued.watch(dist.all_reduce(tensor, op=op, group=group, async_op=True), tensor)
        if work is not None:
            work.wait()
    return tensor


def find_spread(numbers: Tensor, *groups: dist.ProcessGroup) -> Tensor:
    """The largest of each number minus the smallest, over the ranks of all these groups."""
    both = torch.stack((numbers, -numbers))
    for group in groups:
        all_reduce(both, group, dist.ReduceOp.MAX)
    return both.sum(0)


def broadcast(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Overwrite `tensor` with that of the group's first rank, and return it."""
    if group.size() > 1:
        with collective("broadcast", group) as issued:
            work = issued.watch(dist.broadcast(tensor, group=group, group_src=0, async_op=True), tensor)
        if work is not None:
            work.wait()
    return tensor


def own(product: Tensor) -> Tensor:
    """A product that may be overwritten: a copy where a dispatch mode is on, which may have kept the product.

    Selective activation checkpointing keeps it, and returns it when the block is recomputed, to be summed again.
    """
    return product if _get_current_dispatch_mode() is None else product.clone()


def start_all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    levels: "TwoLevels | None" = None,
) -> Pending:
    """Begin to reduce `tensor` over the group in place. levels: of a group on several nodes, here and below."""
    if group.size() == 1:
        return Pending(tensor)
    with collective("all_reduce", group) as issued:
        work = None if levels is None else levels.all_reduce(tensor, group, op)
        work = work or dist.all_reduce(tensor, op=op, group=group, async_op=True)
        return Pending(tensor, issued.watch(work, tensor))


def can_average(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """True if the group's backend averages as it sums, without a pass over the numbers: NCCL, on GPUs."""
    if not tensor.is_cuda:
        return False
    found = _averages.get(group)
    if found is None:
        found = _averages[group] = group._get_backend(tensor.device).name() == "nccl"
    return found


_averages: "weakref.WeakKeyDictionary[dist.ProcessGroup, bool]" = weakref.WeakKeyDictionary()


def gather_rows(shard: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
    """All-gather dim 0: this rank's part [about rows / size, ...] becomes [rows, ...].

    The parts are those of torch.chunk; short ones are padded, so the result may be a view of a longer buffer.
    """
    return start_gather_rows(shard, rows, group).wait()


def start_gather_rows(shard: Tensor, rows: int, group: dist.ProcessGroup, levels: "TwoLevels | None" = None) -> Pending:
    size = group.size()
    if size == 1:
        return Pending(shard)
    chunk = -(-rows // size)
    whole = shard.new_empty(chunk * size, *shard.shape[1:])
    source = _padded(shard, chunk)
    with collective("all_gather", group) as issued:
        work = None if levels is None else levels.all_gather(whole, source, group)
        work = work or _all_gather(whole, source, group=group, async_op=True)
        found = whole if chunk * size == rows else whole[:rows]
        return Pending(found, issued.watch(work, whole), source)


def scatter_rows(whole: Tensor, local_rows: int, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter dim 0, the reverse of `gather_rows`: [rows, ...] is summed, and this rank keeps its part."""
    return start_scatter_rows(whole, local_rows, group).wait()


def start_scatter_rows(
    whole: Tensor, local_rows: int, group: dist.ProcessGroup, factor: float = 1.0, levels: "TwoLevels | None" = None
) -> Pending:
    """Begin `scatter_rows`, times a factor. The backend multiplies if the result is an average and it can average; else
    `Pending.factor` is left to the caller."""
    size = group.size()
    if size == 1:
        return Pending(whole, factor=factor)
    chunk = -(-whole.shape[0] // size)
    part = whole.new_empty(chunk, *whole.shape[1:])
    source = _padded(whole, chunk * size)
    op = dist.ReduceOp.SUM
    if factor == 1 / size and can_average(whole, group):
        op, factor = dist.ReduceOp.AVG, 1.0
    with collective("reduce_scatter", group) as issued:
        work = None if levels is None else levels.reduce_scatter(part, source, group, op)
        work = work or _reduce_scatter(part, source, op=op, group=group, async_op=True)
        own = part if chunk == local_rows else part[:local_rows]
        return Pending(own, issued.watch(work, part), source, factor)


def start_scatter_narrow_rows(
    whole: Tensor, local_rows: int, group: dist.ProcessGroup, dtype: torch.dtype, factor: float = 1.0
) -> Pending:
    """Begin `scatter_rows` of numbers that are summed in a wider dtype, but sent as they are: by an all-to-all.

    An average takes no pass of its own; other factors are left to the caller, as `Pending.factor`.
    """
    size = group.size()
    averages = factor == 1 / size
    source = _padded(whole, -(-whole.shape[0] // size) * size)
    received = torch.empty_like(source)
    with collective("all_to_all", group) as issued:
        work = issued.watch(dist.all_to_all_single(received, source, group=group, async_op=True), received)
        factor = 1.0 if averages else factor
        return PendingSum(received, work, source, factor, rows=local_rows, ranks=size, dtype=dtype, averages=averages)


def all_to_all(
    received: Tensor, sent: Tensor, receives: Sequence[int], sends: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Send `sends[rank]` numbers of `sent` to each rank, in order; receive `receives[rank]` of each in `received`."""
    with collective("all_to_all", group):
        dist.all_to_all_single(received, sent, list(receives), list(sends), group=group)
    return received


def start_all_to_all(
    received: Tensor, sent: Tensor, receives: Sequence[int], sends: Sequence[int], group: dist.ProcessGroup
) -> Pending:
    with collective("all_to_all", group) as issued:
        run = dist.all_to_all_single(received, sent, list(receives), list(sends), group=group, async_op=True)
        return Pending(received, issued.watch(run, received), sent)


def _padded(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - tensor.shape[0]
    if missing:
        return torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:])))
    return tensor.contiguous()
