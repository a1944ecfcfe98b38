"""The phase between nodes: the same steps in the sub-groups of all places at once, so that every interface works.

Synchronization: a rank waits for what a step receives before the next step, which may pass it on. Sends are waited for
at the end only: a slot that was sent is not written again in the same collective.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.collectives.two_level.buffers import Reduction, accumulate, as_bytes, cut_ranges
from stretto.collectives.two_level.work import Deadline, MessageWork

InterNodeAlgorithm = Literal["ring", "recursive"]


@dataclass(frozen=True)
class InterNodeStep:
    """One step of an all-gather on node n of N.

    Slots `source` to `source + blocks - 1` go to node n - distance, and as many from node n + distance come into
    `target` and following. In a reduce-scatter, `target` and following go to node n + distance, and what comes from
    node n - distance is added into `source` and following.
    """

    distance: int
    source: int
    target: int
    blocks: int


def all_gather_steps(algorithm: InterNodeAlgorithm, nodes: int) -> tuple[InterNodeStep, ...]:
    """The steps of an all-gather of one slot a node; before it, a node has its slot 0, after it all of them.

    ring: N - 1 steps of one slot. recursive: ceil(log2 N) steps, which double what a node has until it has all:
    recursive doubling (Singh, section 6.2.3). That pairs nodes that differ in one bit of their number, and so
    needs N to be a power of two; here each step's partners lie `distance` apart on a ring (Bruck et al., "Efficient
    algorithms for all-to-all communications in multiport message-passing systems", 1997), which takes as many steps
    and bytes then, and works for every N, with N - 1 slots sent by each node in any case.
    """
    return tuple(_ring(nodes) if algorithm == "ring" else _recursive(nodes))


def reduce_scatter_steps(algorithm: InterNodeAlgorithm, nodes: int) -> tuple[InterNodeStep, ...]:
    """The steps of a reduce-scatter, after which slot 0 of a node is the sum of all nodes' slots for it.

    recursive: recursive halving (section 6.2.3), for every N as `all_gather_steps`.
    """
    return all_gather_steps(algorithm, nodes)[::-1]


def _ring(nodes: int) -> Iterator[InterNodeStep]:
    for slot in range(nodes - 1):
        yield InterNodeStep(distance=1, source=slot, target=slot + 1, blocks=1)


def _recursive(nodes: int) -> Iterator[InterNodeStep]:
    held = 1
    while held < nodes:
        blocks = min(held, nodes - held)
        yield InterNodeStep(distance=held, source=0, target=held, blocks=blocks)
        held += blocks


@dataclass(frozen=True)
class Message:
    """Bytes (a flat uint8 tensor) to or from a rank of the sub-group; `tag` tells a step's parts apart."""

    data: Tensor
    peer: int
    tag: int = 0


class Transport(Protocol):
    """What carries messages between the ranks of a group."""

    def start(
        self, outgoing: Sequence[Message], incoming: Sequence[Message]
    ) -> tuple[Sequence[MessageWork], Sequence[MessageWork]]:
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
    ) -> tuple[Sequence[MessageWork], Sequence[MessageWork]]:
        """Start them all; see `MessageWork.wait` for what waiting means."""
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
    """All of a batch, which NCCL runs as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True


@dataclass(frozen=True)
class InterNodeGroup:
    """The ranks of one place on all nodes: `ranks[node]` is their rank in the whole group; this one is on `node`."""

    ranks: tuple[int, ...]
    node: int
    transport: Transport
    part_bytes: int


def gather_slots(slots: Tensor, steps: Sequence[InterNodeStep], group: InterNodeGroup, deadline: Deadline) -> None:
    """Fill `slots` [nodes, elements] (contiguous), of which this node's own, slot 0, is there."""
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


def reduce_slots(
    slots: Tensor,
    steps: Sequence[InterNodeStep],
    group: InterNodeGroup,
    reduction: Reduction,
    divisor: int | None,
    deadline: Deadline,
) -> None:
    """Reduce the nodes' `slots` [nodes, elements] (contiguous), so that slot 0 is the whole; the others are used up.

    The order of additions is the steps', the same in each run. Each step rounds to the dtype; the last one divides.
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
    """The nodes `distance` after this one, to send to, and as far before it, to receive from."""
    nodes = len(group.ranks)
    return (group.node + distance) % nodes, (group.node - distance) % nodes


def _ranges(tensor: Tensor, group: InterNodeGroup) -> list[tuple[int, int]]:
    return list(cut_ranges(tensor.numel(), group.part_bytes // tensor.element_size()))


def _messages(tensor: Tensor, peer: int, group: InterNodeGroup) -> list[Message]:
    flat = tensor.view(-1)
    return [Message(as_bytes(flat[begin:end]), peer, part) for part, (begin, end) in enumerate(_ranges(flat, group))]
