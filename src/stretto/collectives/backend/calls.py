# SPDX-License-Identifier: Apache-2.0
"""A call of the backend: as torch.distributed made it, whether schedules can run it, and its tensors as flat buffers.

`run_staged` converts tensors. An executor takes flat contiguous tensors: in place one, with the collective's larger
buffer; out of place two that share no memory. A call may have tensors of any strides, lists of them, and an input that
is a part of the output. Tensors that already have the executor's layout are used where they are; the rest is copied.
The input of a call never changes, unless it is the output.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.collectives.executor.layout import overlap
from stretto.collectives.schedule import Schedule

COLLECTIVES = {
    "allreduce": "allreduce",
    "allreduce_coalesced": "allreduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "allgather",
    "_allgather_base": "allgather",
    "allgather_into_tensor_coalesced": "allgather",
    "reduce_scatter": "reducescatter",
    "_reduce_scatter_base": "reducescatter",
    "reduce_scatter_tensor_coalesced": "reducescatter",
    "alltoall_base": "alltoall",
    "alltoall": "alltoall",
}
"""The operations of c10d that a schedule can run, each with its collective's name in schedules."""
NON_COLLECTIVE = {"send", "recv", "recv_anysource", "monitored_barrier"}
"""The operations that not all ranks of the group call, or not alike."""
_TITLES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "_all_gather_base",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "alltoall_base": "all_to_all",
    "alltoall": "all_to_all",
}
"""The names of operations in profiles of c10d's backends, where they differ."""
_PAIRWISE = {"allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"}
# c10d takes several tensors as those of a rank's devices: an all-reduce adds them too, a broadcast fills them all.
_OF_ONE_TENSOR = {"allreduce", "broadcast", "reduce"}


@dataclass(frozen=True)
class CollectiveTensors:
    """One collective: input and output are each the concatenation of these tensors' elements, in this order."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    @property
    def input_elements(self) -> int:
        return sum(tensor.numel() for tensor in self.inputs)

    @property
    def output_elements(self) -> int:
        return sum(tensor.numel() for tensor in self.outputs)


@dataclass(frozen=True)
class BackendCall:
    """One call of an operation on this rank.

    operation: c10d's name; outputs, inputs: its tensors, the same ones for an operation in place; reduction: "sum",
    "avg", "prod", "min", "max", "another", or "" for an operation without one; root: a rank of the group; timeout: in
    seconds; note: "coalescing" (one of several that NCCL is to start together), "even sizes" or "uneven sizes" (an
    all-to-all with explicit sizes of its parts, or with lists), "cuda" (where no tensor shows it), "root tensor" (a
    broadcast or a reduce whose root's tensor is not the first of its list), or ""; is_async: whether it was made with
    async_op=True; is_own: whether the operation is a collective of the user's own, which only an
    installed schedule runs (`run_collective`).
    """

    operation: str
    outputs: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    reduction: str
    root: int
    timeout: float
    note: str = ""
    is_async: bool = False
    is_own: bool = False

    @property
    def collective(self) -> str | None:
        """The collective's name in schedules; None for an operation that no schedule runs."""
        return self.operation if self.is_own else COLLECTIVES.get(self.operation)

    @property
    def title(self) -> str:
        """The operation's name in profiles, as c10d's backends show it."""
        return _TITLES.get(self.operation, self.operation)

    @property
    def device_type(self) -> str:
        """The device type of its tensors; "cpu" if it has none and the note does not say otherwise."""
        for tensor in (*self.inputs, *self.outputs):
            return tensor.device.type
        return "cuda" if self.note == "cuda" else "cpu"

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of its tensors; None if they differ, or if there are none."""
        found = {tensor.dtype for tensor in (*self.inputs, *self.outputs)}
        return found.pop() if len(found) == 1 else None

    @property
    def bytes(self) -> int:
        """The bytes of the larger one of input and output, all tensors together; of sparse ones, if they were dense."""
        sides = self.inputs, self.outputs
        return max(sum(tensor.numel() * tensor.element_size() for tensor in side) for side in sides)

    def collectives(self) -> Iterator[CollectiveTensors]:
        """The collectives that it consists of: several for a coalesced call."""
        if self.operation in _PAIRWISE:
            for input, output in zip(self.inputs, self.outputs, strict=True):
                yield CollectiveTensors((input,), (output,))
        else:
            yield CollectiveTensors(self.inputs, self.outputs)

    def describe(self) -> str:
        """One line for people."""
        dtype = "elements" if not self.inputs else "several dtypes" if self.dtype is None else str(self.dtype)[6:]
        reduction = f" {self.reduction}" if self.reduction else ""
        return f"{self.operation}{reduction} of {self._sizes()} {dtype} ({self.bytes} bytes) on {self.device_type}"

    def describe_sizes(self) -> str:
        """The elements of each input tensor, shortened; differs between calls if any tensor's does."""
        sizes = str([tensor.numel() for tensor in self.inputs]).encode()
        return f"{self._sizes()} ({len(self.inputs)} tensors, {hashlib.sha256(sizes).hexdigest()[:8]})"

    def _sizes(self) -> str:
        sizes = [str(tensor.numel()) for tensor in self.inputs] or ["0"]
        return "+".join(sizes[:4]) + ("+..." if sizes[4:] else "")


def find_obstacle(call: BackendCall, ranks: int) -> str | None:
    """Say why no schedule can run this call, whichever is installed; None if one could. The same on all ranks."""
    if call.collective is None:
        return "no schedule does this operation"
    if call.note == "coalescing":
        return "it is coalesced"
    if not call.inputs or not call.outputs:
        return "it has no tensors, or tensors for several devices"
    if call.operation in _PAIRWISE and len(call.inputs) != len(call.outputs):
        return "its numbers of inputs and outputs differ"
    if call.dtype is None:
        return "its tensors' dtypes differ"
    if call.reduction == "another":
        return "no schedule does its reduction"
    if call.note == "root tensor":
        return "its root's tensor is not the first of its list"
    for tensor in (*call.inputs, *call.outputs):
        if tensor.layout is not torch.strided:
            return "a tensor is not dense"
        if tensor.device.type != call.device_type:
            return "its tensors are on several devices"
    if (of_lists := _find_obstacle_in_lists(call, ranks)) is not None:
        return of_lists
    if call.note == "uneven sizes":
        return None  # other ranks cannot know: `even_sizes` promised otherwise, so all ranks raise later
    if call.is_own:
        return None  # the schedule says how input and output are divided
    factors = {"allgather": (ranks, 1), "reducescatter": (1, ranks)}
    of_input, of_output = factors.get(call.collective, (1, 1))
    if any(part.input_elements * of_input != part.output_elements * of_output for part in call.collectives()):
        return "its input does not fit its output"
    return None


def _find_obstacle_in_lists(call: BackendCall, ranks: int) -> str | None:
    """Say why its lists are not those of one collective: c10d gives such lists another meaning, or refuses them."""
    if call.operation in _OF_ONE_TENSOR:
        return "it has several tensors" if len(call.inputs) > 1 else None
    match call.operation:
        case "allgather":
            parts, others = call.outputs, call.inputs
        case "reduce_scatter":
            parts, others = call.inputs, call.outputs
        case "alltoall" if call.note == "uneven sizes":
            return None
        case "alltoall":
            return (
                None
                if len(call.inputs) == len(call.outputs) == ranks
                else "its lists have not one tensor for each rank"
            )
        case _:
            return None
    if len(parts) != ranks or len(others) != 1:
        return "its list has not one tensor for each rank"
    if any(part.shape != others[0].shape for part in parts):
        return "its tensors' shapes differ"
    return None


RunCollective = Callable[[Tensor, Tensor | None], Tensor]
"""Runs a schedule on (input, None) in place, or on (input, output); returns the output, flat."""


def runs_in_place(schedule: Schedule) -> bool:
    """Check whether a schedule runs in place, which saves a copy. All other collectives must keep their input."""
    if schedule.in_place and schedule.out_of_place:
        return schedule.collective.name in ("allreduce", "allgather", "broadcast")
    return schedule.in_place


def require_room(call: BackendCall) -> None:
    """ValueError for an output whose elements share memory (an expanded tensor), which torch does not write either."""
    for output in call.outputs:
        if any(size > 1 and stride == 0 for size, stride in zip(output.shape, output.stride(), strict=True)):
            raise ValueError(
                f"an output of shape {list(output.shape)} and strides {list(output.stride())} has one place in memory "
                "for several elements: give one with a place for each (`tensor.contiguous()`)"
            )


def run_staged(
    part: CollectiveTensors, collective: str, in_place: bool, rank: int, root: int, average: int, run: RunCollective
) -> None:
    """Run one collective of a call, and copy its output into the call's tensors where it is not there yet.

    collective: its name in schedules; rank, root: in the group; average: the divisor of sums, 1 for none.
    """
    inputs = tuple(tensor.data for tensor in part.inputs)  # hidden from autograd, as gloo's and NCCL's writes are
    outputs = tuple(tensor.data for tensor in part.outputs)
    if in_place:
        result = _run_in_place(inputs, outputs, collective, rank, run)
    else:
        result = _run_out_of_place(inputs, outputs, collective == "reduce" and rank != root, run)
    if collective == "reduce" and rank != root:
        return  # only the root has the result
    if average > 1:
        result.div_(average) if result.is_floating_point() else result.div_(average, rounding_mode="trunc")
    _write(result, outputs)


def _run_in_place(
    inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], collective: str, rank: int, run: RunCollective
) -> Tensor:
    match collective:
        case "reducescatter" | "reduce":  # the input must not change
            return run(_join(inputs).clone(), None)
        case "allgather":
            whole = _as_flat(outputs)
            own = whole[rank * (block := sum(map(torch.numel, inputs))) : (rank + 1) * block]
            flat_input = _join(inputs)
            if flat_input.data_ptr() != own.data_ptr():
                own.copy_(flat_input.clone() if overlap(flat_input, own) else flat_input)
            return run(whole, None)
        case _:
            whole, flat_input = _as_flat(outputs), _join(inputs)
            if flat_input.data_ptr() != whole.data_ptr():
                whole.copy_(flat_input.clone() if overlap(flat_input, whole) else flat_input)
            return run(whole, None)


def _run_out_of_place(
    inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], keeps_output: bool, run: RunCollective
) -> Tensor:
    flat_input = _join(inputs)
    flat_output = torch.empty_like(flat_input) if keeps_output else _as_flat(outputs)
    return run(flat_input.clone() if overlap(flat_input, flat_output) else flat_input, flat_output)


def _join(tensors: tuple[Tensor, ...]) -> Tensor:
    """The tensors' elements, concatenated: a view of a single contiguous tensor."""
    if len(tensors) == 1:
        return tensors[0].contiguous().view(-1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _as_flat(tensors: tuple[Tensor, ...]) -> Tensor:
    """A flat tensor for the contents of all of these: a view of a single contiguous one, else a new tensor."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0].view(-1)
    return tensors[0].new_empty(sum(map(torch.numel, tensors)))


def _write(result: Tensor, outputs: tuple[Tensor, ...]) -> None:
    """Copy the result into the outputs, unless it is there already."""
    if len(outputs) == 1 and outputs[0].is_contiguous() and outputs[0].data_ptr() == result.data_ptr():
        return
    start = 0
    for output in outputs:
        output.copy_(result[start : start + output.numel()].view(output.shape))
        start += output.numel()
