# SPDX-License-Identifier: Apache-2.0
"""Counts what collectives send, at the dispatcher: also those of other libraries, and inside autograd functions."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.axes import DERIVED_GROUPS, EXPERT, EXPERT_AXES, NAMES, SHARDS, STAGE
from stretto.parallel.comm.autograd import SelectiveMode
from stretto.parallel.grid import Grid
from stretto.suggestions import require_type


@dataclass(frozen=True)
class CollectiveCall:
    """One call: its kind, the axis, the ranks along it, and the bytes that this rank sends with a ring algorithm."""

    kind: str
    axis: str
    ranks: int
    bytes_sent: int


@dataclass
class CollectiveCounts:
    """The calls that were counted, in order."""

    calls: list[CollectiveCall] = field(default_factory=list)

    def bytes_by_axis(self) -> dict[str, int]:
        """Bytes that this rank sent, by grid axis ("batch", "world" and "other" groups too)."""
        total: Counter[str] = Counter()
        for call in self.calls:
            total[call.axis] += call.bytes_sent
        return dict(total)

    def bytes_by_kind(self) -> dict[tuple[str, str], int]:
        """Bytes that this rank sent, by (axis, kind of collective)."""
        total: Counter[tuple[str, str]] = Counter()
        for call in self.calls:
            total[call.axis, call.kind] += call.bytes_sent
        return dict(total)


# Where each op's payload stands among its arguments, and how many times it crosses a rank's link in a ring of n ranks
# (Thakur et al., as in Singh's dissertation, equations 5.1 to 5.5): payload x factor(n).
_RINGS = {
    op: (kind, payload, factor)
    for kind, payload, factor, ops in (
        ("all_reduce", 0, lambda n: 2 * (n - 1) / n, "allreduce_ allreduce_coalesced_ all_reduce all_reduce_"),
        ("all_reduce", 0, lambda n: 2 * (n - 1) / n, "all_reduce_coalesced all_reduce_coalesced_"),
        ("all_gather", 1, lambda n: n - 1, "_allgather_base_ allgather_ allgather_coalesced_"),
        ("all_gather", 1, lambda n: n - 1, "allgather_into_tensor_coalesced_"),
        ("all_gather", 0, lambda n: n - 1, "all_gather_into_tensor all_gather_into_tensor_out"),
        ("all_gather", 0, lambda n: n - 1, "all_gather_into_tensor_coalesced"),
        ("reduce_scatter", 1, lambda n: (n - 1) / n, "_reduce_scatter_base_ reduce_scatter_"),
        ("reduce_scatter", 1, lambda n: (n - 1) / n, "reduce_scatter_tensor_coalesced_"),
        ("reduce_scatter", 0, lambda n: (n - 1) / n, "reduce_scatter_tensor reduce_scatter_tensor_out"),
        ("reduce_scatter", 0, lambda n: (n - 1) / n, "reduce_scatter_tensor_coalesced"),
        ("all_to_all", 1, lambda n: (n - 1) / n, "alltoall_base_ alltoall_"),
        ("all_to_all", 0, lambda n: (n - 1) / n, "all_to_all_single"),
        ("broadcast", 0, lambda n: (n - 1) / n, "broadcast_ broadcast"),
        ("reduce", 0, lambda n: (n - 1) / n, "reduce_"),
        ("gather", 1, lambda n: (n - 1) / n, "gather_"),
        ("scatter", 0, lambda n: (n - 1) / n, "scatter_"),
        ("send", 0, lambda n: 1, "send"),
    )
    for op in ops.split()
}


class _Counter(SelectiveMode):
    def __init__(
        self, grid: Grid, counts: CollectiveCounts, before: Callable[[CollectiveCall], None] | None = None
    ) -> None:
        super().__init__()
        self.counts = counts
        self.before = before
        self.axes = axes_of_groups(grid)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and not _hidden:
            self._record(func._schema.name.split("::")[1], args)
        return func(*args, **(kwargs or {}))

    def _record(self, name: str, args: Any) -> None:
        if name not in _RINGS:
            return
        kind, payload, factor = _RINGS[name]
        group = _group_of(args)
        sent = sum(t.numel() * t.element_size() for t in _tensors(args[payload])) * factor(group.size())
        if name == "all_to_all_single" or (name == "alltoall_base_" and args[4]):  # of uneven parts
            rows, counts = (args[0], args[2]) if name == "all_to_all_single" else (args[1], args[4])
            sent = rows[:1].numel() * rows.element_size() * (sum(counts) - counts[group.rank()])
        call = CollectiveCall(kind, self.axes.get(group.group_name, "other"), group.size(), round(sent))
        self.counts.calls.append(call)
        if self.before is not None:
            self.before(call)


def axes_of_groups(grid: Grid) -> dict[str, str]:
    """The axis that a process group is ("batch", "stage" and "world" too), by the group's name.

    Groups of one rank send nothing, so their names need not be distinguished.
    """
    of_experts = EXPERT_AXES if grid.size(EXPERT) > 1 else ()
    found = {
        grid.group(axis).group_name: axis
        for axis in (*of_experts, STAGE, "world", SHARDS, *reversed([*DERIVED_GROUPS]), *NAMES)  # of one group the last
        if grid.size(axis) > 1
    }
    return found | grid.other_groups


def _group_of(args: Any) -> dist.ProcessGroup:
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(arg)
            except RuntimeError:  # a ReduceOp, not a group
                continue
        if isinstance(arg, dist.ProcessGroup):
            return arg
    names = [arg for arg in args if isinstance(arg, str)]
    return dist.distributed_c10d._resolve_process_group(names[-1])  # type: ignore[arg-type]


def _tensors(payload: Any) -> list[Tensor]:
    if isinstance(payload, Tensor):
        return [payload]
    return [tensor for item in payload for tensor in _tensors(item)]


_running: list[_Counter] = []  # the innermost last
_hidden: list[bool] = []  # not empty in `not_counted`


@contextmanager
def not_counted() -> Iterator[None]:
    """Count nothing inside the context: collectives of a check that a first pass makes, and no later one."""
    _hidden.append(True)
    try:
        yield
    finally:
        _hidden.pop()


def count_message(tensors: Sequence[Tensor | None]) -> None:
    """Count a message of a pipeline, which no operator of torch.distributed sends."""
    sent = sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
    for counter in _running:
        counter.counts.calls.append(CollectiveCall("message", "pipe", 2, sent))


@contextmanager
def count_collectives(
    grid: Grid, *, before: Callable[[CollectiveCall], None] | None = None
) -> Iterator[CollectiveCounts]:
    """Count the collectives that this process issues inside the context, forward and backward passes alike.

    Messages between pipeline stages count as "message", over pipe. What the first pass alone sends, to compare ranks'
    rows and the order of their modules, is not counted.

    before: called with each before it is issued. It slows every operation a little: count one step, not a whole run.
    """
    require_type(grid, Grid, "grid")
    counts = CollectiveCounts()
    counter = _Counter(grid, counts, before)
    _running.append(counter)
    try:
        with counter:
            yield counts
    finally:
        _running.remove(counter)
