# SPDX-License-Identifier: Apache-2.0
"""Has NCCL connect a group's ranks while all of them are in one call."""

import socket
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from stretto.collectives.backend.runner import Member
from stretto.memory.plain_data import all_gather_data


class NcclWarmup:
    """Makes NCCL's communicator of a group when its ranks first make a call together.

    NCCL connects in its first call, in which all ranks must participate; after that some of them may
    exchange messages (`batch_isend_irecv`). If schedules run the earlier calls, such messages would be NCCL's first
    call, and would wait for the other ranks forever.
    """

    def __init__(self, nccl: Any, member: Member) -> None:
        self._nccl = nccl
        self._member = member
        self._is_warm = False

    def warm_up(self, device: torch.device) -> None:
        """Connect this GPU with the other ranks', all of which call it. Does nothing after the first time.

        Nothing can be connected while a CUDA graph is captured; the next call does it then.
        """
        if self._is_warm or torch.cuda.is_current_stream_capturing():
            return
        self._is_warm = True
        self._nccl.allreduce([torch.zeros(1, device=device)]).wait()

    def warm_up_if_ready(self) -> None:
        """Like `warm_up`, if each rank already uses its own GPU. All ranks call it, at a barrier."""
        if self._is_warm or self._member.size < 2:
            return
        mine = None
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            mine = socket.gethostname(), str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        group = c10d._resolve_process_group(self._member.name)  # type: ignore[arg-type]  # a GroupName, which is a str
        everyone = all_gather_data(mine, group, tuple[str, str] | None)
        if None not in everyone and len(set(everyone)) == len(everyone):
            self.warm_up(torch.device("cuda", torch.cuda.current_device()))
