# SPDX-License-Identifier: Apache-2.0
"""Stages calls that no schedule runs on the host, for tests in which ranks share GPUs (stretto.memory.shared_gpus)."""

from collections.abc import Sequence
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
        """As `Dispatcher.__call__`; RuntimeError for calls whose arguments the backend does not pass completely."""
        work = self._dispatcher(operation, outputs, inputs, reduction, root, milliseconds, note, is_async)
        if work is not None or not any(tensor.device.type == self._device_type for tensor in (*outputs, *inputs)):
            return work
        return self._run(operation, list(outputs), list(inputs), reduction, root, note)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dispatcher, name)

    def _run(
        self, operation: str, outputs: list[Tensor], inputs: list[Tensor], reduction: str, root: int, note: str
    ) -> "Work":
        group = self._group
        match operation:
            case "allreduce":
                return group.allreduce(inputs, _reducing(c10d.AllreduceOptions(), reduction))
            case "allreduce_coalesced":
                return group.allreduce_coalesced(inputs, _reducing(c10d.AllreduceCoalescedOptions(), reduction))
            case "broadcast":
                options = c10d.BroadcastOptions()
                options.rootRank = root
                return group.broadcast(inputs, options)
            case "reduce":
                options = _reducing(c10d.ReduceOptions(), reduction)
                options.rootRank = root
                return group.reduce(inputs, options)
            case "allgather" if outputs:
                return group.allgather([outputs], inputs, c10d.AllgatherOptions())
            case "_allgather_base":
                return group._allgather_base(outputs[0], inputs[0], c10d.AllgatherOptions())
            case "allgather_into_tensor_coalesced":
                return group.allgather_into_tensor_coalesced(outputs, inputs, c10d.AllgatherOptions())
            case "reduce_scatter" if inputs:
                return group.reduce_scatter(outputs, [inputs], _reducing(c10d.ReduceScatterOptions(), reduction))
            case "_reduce_scatter_base":
                options = _reducing(c10d.ReduceScatterOptions(), reduction)
                return group._reduce_scatter_base(outputs[0], inputs[0], options)
            case "reduce_scatter_tensor_coalesced":
                options = _reducing(c10d.ReduceScatterOptions(), reduction)
                return group.reduce_scatter_tensor_coalesced(outputs, inputs, options)
            case "alltoall_base" if note != "uneven sizes":
                return group.alltoall_base(outputs[0], inputs[0], [], [], c10d.AllToAllOptions())
            case "alltoall":
                return group.alltoall(outputs, inputs, c10d.AllToAllOptions())
        raise RuntimeError(
            f"{operation}{f' ({note})' if note else ''} on GPUs is not among what the backend stretto can do while "
            f"{SWITCH} is set: use the backend cpu:gloo,cuda:gloo, or a GPU a rank"
        )


def _reducing(options: Any, reduction: str) -> Any:
    """The options with the reduction of that name. RuntimeError for a reduction that gloo lacks."""
    if reduction not in _REDUCTIONS:
        raise RuntimeError(f"the reduction {reduction!r} cannot go by way of the host, which {SWITCH} asks for")
    options.reduceOp = _REDUCTIONS[reduction]
    return options
