# SPDX-License-Identifier: Apache-2.0
"""An independent count of what is handed to process groups: every c10d call of a region, with its group and sizes.

It shares nothing with Stretto's own counting: it sees torch's collective operators as they are dispatched, refuses to
overlook one that it does not know, and is checked against the groups' own sequence numbers.
"""

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.parallel.comm.rank_order import RankOrder
from stretto.parallel.forward_passes import RowsCheck


@dataclass(frozen=True, order=True)
class Message:
    """One collective: `numel` is the size of the whole thing that is gathered, reduced or scattered."""

    axis: str
    kind: str
    numel: int
    element_size: int


class WireCounter(TorchDispatchMode):
    """Records the collectives of a region on the given groups (by axis name); a group of one rank sends nothing.

    A call on any other group, or of an unknown kind, is an error. A first pass compares nothing between ranks inside,
    so that it sends what every other one does.
    """

    def __init__(self, groups: dict[str, dist.ProcessGroup]) -> None:
        super().__init__()
        self._groups = {name: group for name, group in groups.items() if group.size() > 1}
        self._axis_of_group: dict[str, str] = {}
        for name, group in self._groups.items():
            self._axis_of_group.setdefault(group.group_name, name)
        self._calls: Counter[str] = Counter()
        self.messages: Counter[Message] = Counter()

    def __enter__(self) -> "WireCounter":
        self._start = self._sequence_numbers()
        self._patches = ExitStack()
        self._patches.enter_context(mock.patch.object(RankOrder, "_compare_one"))
        self._patches.enter_context(mock.patch.object(RowsCheck, "__call__", return_value=None))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()
        if error[0] is not None:
            return
        for name, end in self._sequence_numbers().items():
            seen = self._calls[self._axis_of_group[self._groups[name].group_name]]
            made = end - self._start[name]
            assert made == seen, f"the group of {name} made {made} calls, but {seen} were seen"

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # so that its own collectives are dispatched to this mode
        namespace = function.namespace
        if namespace in ("c10d", "_c10d_functional"):
            self._record(function._schema.name.partition("::")[2], args)
        return function(*args, **(kwargs or {}))

    def bytes_by_axis(self) -> dict[str, int]:
        """Return what this rank sends by ring algorithms, in bytes."""
        return bytes_by_axis(self.messages, {name: group.size() for name, group in self._groups.items()})

    def _sequence_numbers(self) -> dict[str, int]:
        return {name: group._get_sequence_number_for_group() for name, group in self._groups.items()}

    def _record(self, name: str, args: tuple[Any, ...]) -> None:
        if name in ("wait_tensor", "_wrap_tensor_autograd"):
            return
        group = _group_of(args)
        if group.size() == 1:
            return
        assert group.group_name in self._axis_of_group, f"{name} on a group of no axis: {group.group_name}"
        axis = self._axis_of_group[group.group_name]
        self._calls[axis] += 1
        for kind, tensor in _payload(name, args, group.size()):
            self.messages[Message(axis, kind, tensor[0], tensor[1])] += 1


def bytes_by_axis(messages: "Counter[Message]", sizes: dict[str, int]) -> dict[str, int]:
    """Bytes a rank sends: (G-1)/G of what it gathers or reduce-scatters, twice that of what it all-reduces."""
    total: Counter[str] = Counter()
    for message, times in messages.items():
        group_size = sizes[message.axis]
        passes = 2 if message.kind == "all-reduce" else 1
        sent, remainder = divmod(passes * (group_size - 1) * message.numel * message.element_size, group_size)
        assert not remainder or message.numel < group_size * 64, f"{message} does not split evenly"
        total[message.axis] += times * sent
    return dict(total)


def _group_of(args: tuple[Any, ...]) -> dist.ProcessGroup:
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg)
    return dist.distributed_c10d._resolve_process_group(next(arg for arg in reversed(args) if isinstance(arg, str)))


def _payload(name: str, args: tuple[Any, ...], group_size: int) -> list[tuple[str, tuple[int, int]]]:
    """(kind, (numel of the whole, element size)) of each tensor that an operator of c10d sends."""
    first = args[0] if isinstance(args[0], list) else [args[0]]
    match name.removesuffix("_"):
        case "allreduce" | "allreduce_coalesced" | "all_reduce" | "all_reduce_coalesced":
            return [("all-reduce", _size(tensor)) for tensor in first]
        case "_allgather_base":  # (output, input, group)
            return [("all-gather", _size(args[0]))]
        case "allgather":  # (outputs of each rank, inputs, group)
            return [("all-gather", _size(tensor, group_size)) for tensor in args[1]]
        case "all_gather_into_tensor" | "all_gather_into_tensor_coalesced":
            return [("all-gather", _size(tensor, group_size)) for tensor in first]
        case "allgather_into_tensor_coalesced":
            return [("all-gather", _size(tensor)) for tensor in args[0]]
        case "_reduce_scatter_base":  # (output, input, group)
            return [("reduce-scatter", _size(args[1]))]
        case "reduce_scatter_tensor" | "reduce_scatter_tensor_coalesced" if name.endswith("coalesced_"):
            return [("reduce-scatter", _size(tensor)) for tensor in args[1]]
        case "reduce_scatter_tensor" | "reduce_scatter_tensor_coalesced":
            return [("reduce-scatter", _size(tensor)) for tensor in first]
        case "alltoall_base":  # (output, input, group): each rank keeps its own part
            return [("reduce-scatter", _size(args[1]))]
        case "all_to_all_single":
            return [("reduce-scatter", _size(tensor)) for tensor in first]
    raise AssertionError(f"{name} is a collective that this count does not know")


def _size(tensor: Tensor, times: int = 1) -> tuple[int, int]:
    return tensor.numel() * times, tensor.element_size()
