# SPDX-License-Identifier: Apache-2.0
"""Has NCCL connect a group's ranks while all of them are in one call."""

import socket
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from stretto.collectives.backend.runner import Member
from stretto.memory import PeerError, find_missing
from stretto.memory.plain_data import all_gather_data


class NcclWarmup:
    """Makes NCCL's communicator of a group when its ranks first make a call together.

    NCCL connects in its first call, in which all ranks must participate; after that some of them may
    exchange messages (`batch_isend_irecv`). If schedules or gloo run the earlier calls, such messages would be NCCL's
    first call, and would wait for the other ranks forever.
    """

    def __init__(self, nccl: Any, member: Member) -> None:
        self._nccl = nccl
        self._member = member
        self.is_warm = False
        """True once NCCL has connected the group's ranks, or does so in a call that has begun."""

    def warm_up(self, device: torch.device) -> None:
        """Connect this GPU with the other ranks', all of which call it. Does nothing after the first time.

        Nothing can be connected while a CUDA graph is captured; the next call does it then.
        """
        if self.is_warm or torch.cuda.is_current_stream_capturing():
            return
        self.is_warm = True
        self._nccl.allreduce([torch.zeros(1, device=device)]).wait()

    def warm_up_if_ready(self) -> None:
        """Like `warm_up`, where each rank has a GPU of its own. All ranks call it, at a barrier.

        This is the GPU that it uses; or, if ranks have chosen none yet, the one that NCCL's barriers would take: that
        with the rank's number, by the number of GPUs here.
        """
        if self.is_warm or self._member.size < 2:
            return
        is_used = torch.cuda.is_initialized()
        likely = dist.get_rank() % torch.cuda.device_count()
        used = torch.cuda.current_device() if is_used else likely
        mine = None
        if not (is_used and torch.cuda.is_current_stream_capturing()):
            host = socket.gethostname()
            mine = host, *(str(torch.cuda.get_device_properties(index).uuid) for index in (used, likely))
        everyone = all_gather_data(mine, self._group(), tuple[str, str, str] | None)
        known = [each for each in everyone if each is not None]
        for place, index in enumerate((used, likely), 1):
            if len({(each[0], each[place]) for each in known}) == len(everyone):
                self.warm_up(torch.device("cuda", index))

    def require_all(self, timeout: float) -> None:
        """Before messages of a batch: wait until all ranks send some, if NCCL is to connect in them.

        PeerError names the ranks that do not within `timeout` seconds, for which NCCL would wait without a word.
        """
        # A group that was made for one device has been connected by torch.
        if self.is_warm or self._member.size < 2 or self._nccl.bound_device_id is not None:
            return
        if missing := find_missing(self._group(), "stretto first messages", timeout):
            raise PeerError(
                f"rank {self._member.rank} of {self._member.size} sends or receives a batch of messages, and rank "
                f"{', '.join(map(str, missing))} has not within {timeout:g} s. NCCL connects a group in its first "
                "call, in which all ranks take part: call torch.distributed.barrier(), or a collective on CUDA "
                "tensors, on all ranks before some of them exchange messages"
            )
        self.is_warm = True

    def _group(self) -> dist.ProcessGroup:
        return c10d._resolve_process_group(self._member.name)  # type: ignore[arg-type]  # a GroupName, which is a str
