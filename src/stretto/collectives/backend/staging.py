"""From a call's tensors to what an executor takes, and back.

An executor takes flat contiguous tensors: in place one, with the collective's larger buffer; out of place two that
share no memory. A call may bring tensors of any strides, lists of them, and an input that is a part of the output. What
already lies as the executor wants it is used where it is; the rest is copied. A call's input is never changed, but
where it is the output.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from stretto.collectives.backend.calls import Call, Part
from stretto.collectives.schedule import Schedule

Run = Callable[[Tensor, Tensor | None], Tensor]
"""Runs a schedule on (input, None) in place, or on (input, output); returns the output, flat."""


def runs_in_place(schedule: Schedule) -> bool:
    """In place where that saves a copy: a reduce-scatter's, a reduce's and an all-to-all's input is to be kept."""
    if schedule.in_place and schedule.out_of_place:
        return schedule.collective.name not in ("reducescatter", "reduce", "alltoall")
    return schedule.in_place


def require_room(call: Call) -> None:
    """ValueError for an output whose elements share memory (an expanded tensor): torch writes into none."""
    for output in call.outputs:
        if any(size > 1 and stride == 0 for size, stride in zip(output.shape, output.stride(), strict=True)):
            raise ValueError(
                f"an output of shape {list(output.shape)} and strides {list(output.stride())} has one place in memory "
                "for several elements: give one with a place for each (`tensor.contiguous()`)"
            )


def run_staged(part: Part, collective: str, in_place: bool, rank: int, root: int, average: int, run: Run) -> None:
    """Run one collective of a call and leave its output in the part's tensors.

    collective: its name in schedules; rank, root: in the group; average: what sums are divided by, 1 for nothing.
    """
    inputs = tuple(tensor.data for tensor in part.inputs)  # behind autograd's back, as gloo and NCCL write
    outputs = tuple(tensor.data for tensor in part.outputs)
    if in_place:
        result = _run_in_place(inputs, outputs, collective, rank, run)
    else:
        result = _run_out_of_place(inputs, outputs, collective == "reduce" and rank != root, run)
    if collective == "reduce" and rank != root:
        return  # only the root gets it
    if average > 1:
        result.div_(average) if result.is_floating_point() else result.div_(average, rounding_mode="trunc")
    _write(result, outputs)


def _run_in_place(
    inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], collective: str, rank: int, run: Run
) -> Tensor:
    match collective:
        case "reducescatter" | "reduce":  # the input is not to be changed
            return run(_join(inputs).clone(), None)
        case "allgather":
            whole = _as_flat(outputs)
            own = whole[rank * (block := sum(map(torch.numel, inputs))) : (rank + 1) * block]
            given = _join(inputs)
            if given.data_ptr() != own.data_ptr():
                own.copy_(given.clone() if _overlap(given, own) else given)
            return run(whole, None)
        case _:
            whole, given = _as_flat(outputs), _join(inputs)
            if given.data_ptr() != whole.data_ptr():
                whole.copy_(given.clone() if _overlap(given, whole) else given)
            return run(whole, None)


def _run_out_of_place(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], keeps_output: bool, run: Run) -> Tensor:
    given = _join(inputs)
    taken = torch.empty_like(given) if keeps_output else _as_flat(outputs)
    return run(given.clone() if _overlap(given, taken) else given, taken)


def _join(tensors: tuple[Tensor, ...]) -> Tensor:
    """The tensors' elements in a row: a view where there is one contiguous tensor."""
    if len(tensors) == 1:
        return tensors[0].contiguous().view(-1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _as_flat(tensors: tuple[Tensor, ...]) -> Tensor:
    """A flat tensor to write all of these into: a view where there is one contiguous tensor, else a new one."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0].view(-1)
    return tensors[0].new_empty(sum(map(torch.numel, tensors)))


def _write(result: Tensor, outputs: tuple[Tensor, ...]) -> None:
    """Copy the result where it is not yet."""
    if len(outputs) == 1 and outputs[0].is_contiguous() and outputs[0].data_ptr() == result.data_ptr():
        return
    start = 0
    for output in outputs:
        output.copy_(result[start : start + output.numel()].view(output.shape))
        start += output.numel()


def _overlap(first: Tensor, second: Tensor) -> bool:
    return first.data_ptr() < second.data_ptr() + second.nbytes and second.data_ptr() < first.data_ptr() + first.nbytes
