# SPDX-License-Identifier: Apache-2.0
"""Stages calls that no schedule runs on the host, for tests in which ranks share GPUs (stretto.memory.shared_gpus)."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from stretto.collectives.backend.dispatcher import Dispatcher
from stretto.collectives.backend.runner import Member
from stretto.memory.shared_gpus import SWITCH

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, Work

_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}

_Arguments = Callable[[list[Tensor], list[Tensor]], tuple[Any, ...]]
_CALLS: dict[str, tuple[type, _Arguments]] = {
    "allreduce": (c10d.AllreduceOptions, lambda _, inputs: (inputs,)),
    "allreduce_coalesced": (c10d.AllreduceCoalescedOptions, lambda _, inputs: (inputs,)),
    "broadcast": (c10d.BroadcastOptions, lambda _, inputs: (inputs,)),
    "reduce": (c10d.ReduceOptions, lambda _, inputs: (inputs,)),
    "allgather": (c10d.AllgatherOptions, lambda outputs, inputs: ([outputs], inputs)),
    "_allgather_base": (c10d.AllgatherOptions, lambda outputs, inputs: (outputs[0], inputs[0])),
    "allgather_into_tensor_coalesced": (c10d.AllgatherOptions, lambda outputs, inputs: (outputs, inputs)),
    "reduce_scatter": (c10d.ReduceScatterOptions, lambda outputs, inputs: (outputs, [inputs])),
    "_reduce_scatter_base": (c10d.ReduceScatterOptions, lambda outputs, inputs: (outputs[0], inputs[0])),
    "reduce_scatter_tensor_coalesced": (c10d.ReduceScatterOptions, lambda outputs, inputs: (outputs, inputs)),
    "alltoall_base": (c10d.AllToAllOptions, lambda outputs, inputs: (outputs[0], inputs[0], [], [])),
    "alltoall": (c10d.AllToAllOptions, lambda outputs, inputs: (outputs, inputs)),
}
"""By operation, c10d's options, and the arguments before them of a group's method of that name."""


class HostFallback:
    """Asks the dispatcher first; calls that it leaves to the inner backend run through gloo instead of NCCL.

    The backend holds it as its dispatcher. gloo: the inner backend for CPU tensors. device_type: whose calls it runs.
    """

    def __init__(
        self, dispatcher: Dispatcher, gloo: Any, store: "Store", member: Member, device_type: str = "cuda"
    ) -> None:
        self._dispatcher = dispatcher
        self._device_type = device_type
        # A group with gloo alone, whose calls the kernels of shared_gpus stage on the host.
        self._group: Any = dist.ProcessGroup(store, member.rank, member.size)
        for device in ("cpu", "cuda"):
            self._group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, gloo)

    def __call__(
        self,
        operation: str,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        reduction: str,
        root: int,
        milliseconds: int,
        note: str,
        is_async: bool = False,
    ) -> "Work | None":
        """Run a call as `Dispatcher.__call__`; RuntimeError for what gloo cannot do, or c10d hands over in part."""
        work = self._dispatcher(operation, outputs, inputs, reduction, root, milliseconds, note, is_async)
        if work is not None or not any(tensor.device.type == self._device_type for tensor in (*outputs, *inputs)):
            return work
        return self._run(operation, list(outputs), list(inputs), reduction, root, note)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dispatcher, name)

    def _run(
        self, operation: str, outputs: list[Tensor], inputs: list[Tensor], reduction: str, root: int, note: str
    ) -> "Work":
        is_partial = (
            (operation == "allgather" and not outputs)
            or (operation == "reduce_scatter" and not inputs)
            or (operation == "alltoall_base" and note == "uneven sizes")
        )
        if operation not in _CALLS or is_partial:
            raise RuntimeError(
                f"{operation}{f' ({note})' if note else ''} on GPUs is not among what the backend stretto can do while "
                f"{SWITCH} is set: use the backend cpu:gloo,cuda:gloo, or a GPU a rank"
            )
        kind, arguments = _CALLS[operation]
        options: Any = kind()
        if hasattr(options, "reduceOp"):
            if reduction not in _REDUCTIONS:
                raise RuntimeError(f"the reduction {reduction!r} cannot go by way of the host, which {SWITCH} asks for")
            options.reduceOp = _REDUCTIONS[reduction]
        if hasattr(options, "rootRank"):
            options.rootRank = root
        return getattr(self._group, operation)(*arguments(outputs, inputs), options)
