# SPDX-License-Identifier: Apache-2.0
"""Runs a group's calls in two levels, between nodes and inside them (`stretto.collectives.two_level`)."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stretto.cluster.two_level import Collective
from stretto.collectives.backend.calls import BackendCall
from stretto.collectives.backend.host_runner import Worker
from stretto.collectives.backend.native import make_enqueued_work, make_work
from stretto.collectives.backend.runner import Member
from stretto.collectives.two_level import TwoLevelGroup
from stretto.collectives.two_level.buffers import REDUCTIONS, check_reduction

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work

_COLLECTIVES: dict[str, Collective] = {
    "_allgather_base": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "allreduce": "all_reduce",
}


class TwoLevelRunner:
    """Runs calls of one group, whose ranks are on several nodes, where `TwoLevelGroup` does not choose the library.

    On CPUs a thread of the group runs them in order, on GPUs the current stream waits for them, or, of a call with
    async_op=True, a stream of their own.
    """

    def __init__(self, member: Member, two: TwoLevelGroup) -> None:
        self._member = member
        self._two = two
        self._worker = Worker(f"stretto two levels, group {member.name}")
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def find_algorithm(self, call: BackendCall) -> tuple[str, str]:
        """Select what runs a call: "ring" or "recursive" between nodes, or "" for the inner backend; and why."""
        collective = _COLLECTIVES.get(call.operation)
        if collective is None or call.dtype is None:
            return "", "two levels are for all-reduces, and all-gathers and reduce-scatters of single tensors"
        if not all(tensor.is_contiguous() for tensor in (*call.inputs, *call.outputs)):
            return "", "two levels take contiguous tensors"
        if call.reduction:
            if call.reduction not in REDUCTIONS:
                return "", f"two levels have no {call.reduction}"
            try:
                check_reduction(call.reduction, call.dtype)
            except ValueError as error:
                return "", str(error)
        measured = call.outputs[0] if collective == "reduce_scatter" else call.inputs[0]
        algorithm = self._two.choose(collective, measured)
        if algorithm == "flat":
            return "", "the model of both levels predicts the library's own to be faster"
        return algorithm, "the ranks are on several nodes"

    def start(self, call: BackendCall) -> "Work":
        run = self._bind(call)
        if not call.inputs[0].is_cuda:
            work = make_work(self._member.rank, call.title, call.outputs, call.inputs)
            return self._worker.submit_work(work, run)
        device, tensors = call.inputs[0].device, (*call.inputs, *call.outputs)
        if not call.is_async:
            run()
            return make_enqueued_work(self._member.rank, call.title, call.outputs)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            run()
            return make_enqueued_work(self._member.rank, call.title, call.outputs, tensors)

    def close(self, seconds: float) -> None:
        """Accept no more calls, and wait up to `seconds` for those that have started."""
        if self._worker.close(seconds):
            self._two.close()  # or it would wait for a peer as long as the call that has not ended

    def _bind(self, call: BackendCall) -> Callable[[], object]:
        output: Tensor = call.outputs[0]
        input: Tensor = call.inputs[0]
        match _COLLECTIVES[call.operation]:
            case "all_gather":
                return lambda: self._two.all_gather(output, input)
            case "reduce_scatter":
                return lambda: self._two.reduce_scatter(output, input, call.reduction)
            case "all_reduce":
                return lambda: self._two.all_reduce(input, call.reduction)
