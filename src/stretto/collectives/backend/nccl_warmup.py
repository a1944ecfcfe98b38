"""NCCL's communicator of a group, made while all ranks of it are there."""

import socket
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from stretto.collectives.backend.runner import Member


class NcclWarmup:
    """Has NCCL connect a group's ranks when they first come together.

    NCCL connects in the first call that it is given, to which all ranks have to come; from then on some of them may
    exchange messages among themselves (`batch_isend_irecv`). Where schedules run the calls before, those messages would
    be NCCL's first, and would wait for the other ranks for good.
    """

    def __init__(self, nccl: Any, member: Member) -> None:
        self._nccl = nccl
        self._member = member
        self._is_warm = False

    def warm_up(self, device: torch.device) -> None:
        """Connect this GPU with the other ranks'. All ranks are here; at once but for the first time.

        While a CUDA graph is captured nothing can be connected, and the next call does.
        """
        if self._is_warm or torch.cuda.is_current_stream_capturing():
            return
        self._is_warm = True
        self._nccl.allreduce([torch.zeros(1, device=device)]).wait()

    def warm_up_if_ready(self) -> None:
        """As `warm_up`, if each rank has a GPU of its own that it uses already. All ranks are here, at a barrier."""
        if self._is_warm or self._member.size < 2:
            return
        mine = None
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            mine = socket.gethostname(), str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        group = c10d._resolve_process_group(self._member.name)  # type: ignore[arg-type]  # a GroupName, which is a str
        everyone: list[tuple[str, str] | None] = [mine] * self._member.size
        dist.all_gather_object(everyone, mine, group=group)
        if None not in everyone and len(set(everyone)) == len(everyone):
            self.warm_up(torch.device("cuda", torch.cuda.current_device()))
