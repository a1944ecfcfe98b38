"""The phase between nodes: the same steps in the sub-groups of all places at once, so that every interface works.

Synchronization: a rank waits for what a step receives before the next step, which may pass it on. Sends are waited for
at the end only: a slot that was sent is not written again in the same collective.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.collectives.two_level.limits import Deadline
from stretto.collectives.two_level.parts import cut_ranges
from stretto.collectives.two_level.reduction import Reduction, accumulate
from stretto.collectives.two_level.steps import Step
from stretto.collectives.two_level.transport import Message, Transfer, Transport, as_bytes


@dataclass(frozen=True)
class SubGroup:
    """The ranks of one place on all nodes: `ranks[node]` is their rank in the whole group; this one is on `node`."""

    ranks: tuple[int, ...]
    node: int
    transport: Transport
    part_bytes: int


def gather_slots(slots: Tensor, steps: Sequence[Step], group: SubGroup, deadline: Deadline) -> None:
    """Fill `slots` [nodes, elements] (contiguous), of which this node's own, slot 0, is there."""
    sent: list[tuple[Transfer, str]] = []
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
    steps: Sequence[Step],
    group: SubGroup,
    reduction: Reduction,
    divisor: int | None,
    deadline: Deadline,
) -> None:
    """Reduce the nodes' `slots` [nodes, elements] (contiguous), so that slot 0 is the whole; the others are used up.

    The order of additions is the steps', the same in each run. Each step rounds to the dtype; the last one divides.
    """
    sent: list[tuple[Transfer, str]] = []
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


def _peers(group: SubGroup, distance: int) -> tuple[int, int]:
    """The nodes `distance` after this one, to send to, and as far before it, to receive from."""
    nodes = len(group.ranks)
    return (group.node + distance) % nodes, (group.node - distance) % nodes


def _ranges(tensor: Tensor, group: SubGroup) -> list[tuple[int, int]]:
    return list(cut_ranges(tensor.numel(), group.part_bytes // tensor.element_size()))


def _messages(tensor: Tensor, peer: int, group: SubGroup) -> list[Message]:
    flat = tensor.view(-1)
    return [Message(as_bytes(flat[begin:end]), peer, part) for part, (begin, end) in enumerate(_ranges(flat, group))]
