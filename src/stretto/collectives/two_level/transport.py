"""Messages between the ranks of a sub-group, carried by the group's own backend."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Message:
    """Bytes (a flat uint8 tensor) to or from a rank of the sub-group; `tag` tells a step's parts apart."""

    data: Tensor
    peer: int
    tag: int = 0


class Transfer(Protocol):
    """A message on its way, as torch.distributed's Work."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Wait until it has been received, or its buffer may be used again. RuntimeError where it is not, in time.

        On a GPU the current stream waits, and the host only where there is a limit other than 0.
        """
        ...


class Transport(Protocol):
    """What carries messages between the ranks of a group."""

    def start(
        self, outgoing: Sequence[Message], incoming: Sequence[Message]
    ) -> tuple[Sequence[Transfer], Sequence[Transfer]]:
        """Start to send and to receive, and return one transfer for each; messages between two ranks keep order."""
        ...


class GroupTransport:
    """Point-to-point operations of a process group: one by one on gloo, in one batch on NCCL.

    NCCL runs a send and a receive that were issued one after the other one after the other, and two ranks that send to
    each other would wait for ever: only in a batch do they run together. It knows no tags and keeps the order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def start(
        self, outgoing: Sequence[Message], incoming: Sequence[Message]
    ) -> tuple[Sequence[Transfer], Sequence[Transfer]]:
        """Start them all; see `Transfer.wait` for what waiting means."""
        messages = [*incoming, *outgoing]
        if messages and messages[0].data.is_cuda:
            return self._start_batch(outgoing, incoming)
        received = [
            dist.irecv(message.data, group=self._group, group_src=message.peer, tag=message.tag) for message in incoming
        ]
        sent = [
            dist.isend(message.data, group=self._group, group_dst=message.peer, tag=message.tag) for message in outgoing
        ]
        return [work for work in sent if work is not None], [work for work in received if work is not None]

    def _start_batch(
        self, outgoing: Sequence[Message], incoming: Sequence[Message]
    ) -> tuple[Sequence[Transfer], Sequence[Transfer]]:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(operation, message.data, group=self._group, group_peer=message.peer)
                for operation, messages in ((dist.isend, outgoing), (dist.irecv, incoming))
                for message in messages
            ]
        )
        batch = _Batch(works)
        return [batch] * len(outgoing), [batch] * len(incoming)


class _Batch:
    """All of a batch, which NCCL runs as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, flat, as a view: backends carry every dtype so."""
    return tensor.view(-1).view(torch.uint8)
