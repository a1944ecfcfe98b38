# SPDX-License-Identifier: Apache-2.0
"""The phase between nodes: ring or recursive algorithm over messages, in all inter-node groups concurrently.

An algorithm is a list of `InterNodeStep`s over N slots of one buffer, N nodes. On node n, slot i belongs to node (n +
i) mod N. With the slots rotated like that, every step is the same on every node, and the slots of a message are
contiguous; the shuffle, which is needed anyway, undoes the rotation.

One list describes two collectives, since a reduce-scatter is an all-gather backwards: where the all-gather sends a slot
and receives another, the reduce-scatter sends the latter and adds what arrives into the former. For 4 nodes, on node n:

    ring         1: slot 0 to n-1, slot 1 from n+1  2: slot 1 to n-1, slot 2 from n+1  3: slot 2 to n-1, slot 3 from n+1
    recursive    1: slot 0 to n-1, slot 1 from n+1  2: slots 0, 1 to n-2, slots 2, 3 from n+2

Synchronization: a rank waits for what a step receives before the next step, which may forward it. It waits for its
sends only at the end, because no slot that was sent is written again in the same collective.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.cluster.two_level import InterNodeAlgorithm, InterNodeStep, all_gather_steps
from stretto.collectives.two_level.buffers import Reduction, accumulate, as_bytes, split_range
from stretto.collectives.two_level.work import Deadline, MessageWork
from stretto.memory import shared_gpus


def reduce_scatter_steps(algorithm: InterNodeAlgorithm, nodes: int) -> tuple[InterNodeStep, ...]:
    """The steps of a reduce-scatter, after which slot 0 of a node is the sum of all nodes' slots for it.

    recursive: recursive halving (section 6.2.3), for every N as in `all_gather_steps`.
    """
    return all_gather_steps(algorithm, nodes)[::-1]


@dataclass(frozen=True)
class Message:
    """Bytes (a flat uint8 tensor) to or from a rank of the inter-node group; `tag` numbers the parts of a step."""

    data: Tensor
    peer: int
    tag: int = 0


class NodeTransport(Protocol):
    """Interface of transports between nodes, which send messages between the ranks of an inter-node group."""

    def start(
        self, outgoing: Sequence[Message], incoming: Sequence[Message]
    ) -> tuple[Sequence[MessageWork], Sequence[MessageWork]]:
        """Start to send and to receive; return a handle for each message. Messages of a pair of ranks are ordered."""
        ...


class GroupTransport:
    """Point-to-point operations of a process group: one by one on gloo (of GPUs that ranks share, too), in one batch on
    NCCL.

    NCCL runs a send and a receive that are issued separately one after the other, so two ranks that send to each other
    would deadlock; only in a batch do they run together. NCCL has no tags and keeps the order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def start(
        self, outgoing: Sequence[Message], incoming: Sequence[Message]
    ) -> tuple[Sequence[MessageWork], Sequence[MessageWork]]:
        """Start all of them; `MessageWork.wait` says what waiting means."""
        messages = [*incoming, *outgoing]
        if messages and messages[0].data.is_cuda and not shared_gpus.is_enabled():
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
    ) -> tuple[Sequence[MessageWork], Sequence[MessageWork]]:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(operation, message.data, group=self._group, group_peer=message.peer)
                for operation, messages in ((dist.isend, outgoing), (dist.irecv, incoming))
                for message in messages
            ]
        )
        batch = _BatchWork(works)
        return [batch] * len(outgoing), [batch] * len(incoming)


class _BatchWork:
    """Handle of a whole batch, which NCCL runs as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True


@dataclass(frozen=True)
class InterNodeGroup:
    """The ranks of one place on all nodes: `ranks[node]` is the rank in the whole group; this rank is on `node`."""

    ranks: tuple[int, ...]
    node: int
    transport: NodeTransport
    part_bytes: int

    def member(self, node: int) -> int:
        """The number of a node's rank in the inter-node group, which torch numbers in the order of ranks."""
        return sorted(self.ranks).index(self.ranks[node])


def inter_node_all_gather(
    slots: Tensor, steps: Sequence[InterNodeStep], group: InterNodeGroup, deadline: Deadline
) -> None:
    """Fill `slots` [nodes, elements] (contiguous), of which only this node's own, slot 0, is there before."""
    sent: list[tuple[MessageWork, str]] = []
    for number, step in enumerate(steps, 1):
        to, source = _peers(group, -step.distance)
        doing = f"phase between nodes, step {number} of {len(steps)}"
        outgoing = _messages(slots[step.source : step.source + step.blocks], to, group)
        incoming = _messages(slots[step.target : step.target + step.blocks], source, group)
        with deadline.watch(f"{doing}, to rank {group.ranks[to]} and from rank {group.ranks[source]}"):
            sends, receives = group.transport.start(outgoing, incoming)
        sent += [(send, f"{doing}, sending to rank {group.ranks[to]}") for send in sends]
        for receive in receives:
            deadline.wait(receive, f"{doing}, receiving from rank {group.ranks[source]}")
    for send, doing in sent:
        deadline.wait(send, doing)


def inter_node_reduce_scatter(
    slots: Tensor,
    steps: Sequence[InterNodeStep],
    group: InterNodeGroup,
    reduction: Reduction,
    divisor: int | None,
    deadline: Deadline,
) -> None:
    """Reduce the nodes' `slots` [nodes, elements] (contiguous) into slot 0; the other slots are overwritten.

    The steps fix the order of additions, the same in each run. Each step rounds to the dtype; the last one divides.
    """
    sent: list[tuple[MessageWork, str]] = []
    elements = slots.shape[1]
    scratch = torch.empty(max(step.blocks for step in steps) * elements, dtype=slots.dtype, device=slots.device)
    for number, step in enumerate(steps, 1):
        to, source = _peers(group, step.distance)
        doing = f"phase between nodes, step {number} of {len(steps)}"
        outgoing = _messages(slots[step.target : step.target + step.blocks], to, group)
        arriving = scratch[: step.blocks * elements]
        total = slots[step.source : step.source + step.blocks].view(-1)
        with deadline.watch(f"{doing}, to rank {group.ranks[to]} and from rank {group.ranks[source]}"):
            sends, receives = group.transport.start(outgoing, _messages(arriving, source, group))
        sent += [(send, f"{doing}, sending to rank {group.ranks[to]}") for send in sends]
        for (begin, end), receive in zip(_ranges(arriving, group), receives, strict=True):
            deadline.wait(receive, f"{doing}, receiving from rank {group.ranks[source]}")
            accumulate(total[begin:end], arriving[begin:end], reduction, divisor if number == len(steps) else None)
    for send, doing in sent:
        deadline.wait(send, doing)


def _peers(group: InterNodeGroup, distance: int) -> tuple[int, int]:
    """The node `distance` after this one, to send to, and the node as far before it, to receive from."""
    nodes = len(group.ranks)
    return (group.node + distance) % nodes, (group.node - distance) % nodes


def _ranges(tensor: Tensor, group: InterNodeGroup) -> list[tuple[int, int]]:
    return list(split_range(tensor.numel(), group.part_bytes // tensor.element_size()))


def _messages(tensor: Tensor, peer: int, group: InterNodeGroup) -> list[Message]:
    flat = tensor.view(-1)
    member = group.member(peer)
    return [Message(as_bytes(flat[begin:end]), member, part) for part, (begin, end) in enumerate(_ranges(flat, group))]
