# SPDX-License-Identifier: Apache-2.0
"""The phase inside a node, by the library's collectives, and the shuffle into rank order; also the flat collectives.

Slots are rotated as in `inter_node`: on node n, slot i belongs to node (n + i) mod N. All ranks of a node have the same
rotation, so the collective inside the node need not know it; the shuffle does. A group of one node that holds all ranks
gives the library's own, flat collective.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.collectives.two_level.buffers import (
    Reduction,
    as_bytes,
    library_op,
    library_reduces,
    reduce_rows,
    split_range,
    split_slots,
)
from stretto.collectives.two_level.nodes import Nodes
from stretto.collectives.two_level.work import Deadline

# torch 2.13 renamed these two, and the old names warn at each call.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_MAX_NAMED = 16


@dataclass(frozen=True)
class IntraNodeGroup:
    """The ranks of this rank's `node`, in the order of their places; `group` is None if there is only one."""

    nodes: Nodes
    node: int
    place: int
    group: dist.ProcessGroup | None
    part_bytes: int

    @property
    def phase(self) -> str:
        """The phase and the peers, for error messages."""
        ranks = self.nodes.ranks[self.node]
        others = [str(rank) for place, rank in enumerate(ranks) if place != self.place]
        named = ", ".join(others[:_MAX_NAMED]) + (", ..." if len(others) > _MAX_NAMED else "")
        name = "the library's collective" if self.nodes.count == 1 else "phase inside the node"
        return f"{name}, step 1 of 1, with rank {named}"


def intra_node_all_gather(output: Tensor, slots: Tensor, node: IntraNodeGroup, deadline: Deadline) -> None:
    """Fill `output` [world, elements] from every place's `slots` [nodes, elements]; all are contiguous."""
    nodes, elements = slots.shape
    size, limit = node.nodes.size, node.part_bytes // slots.element_size()
    if nodes == 1 and node.nodes.is_consecutive and output.numel() <= limit and node.group is not None:
        _run(_all_gather, as_bytes(output), as_bytes(slots), node=node, deadline=deadline)
        return
    for piece in split_slots(nodes, elements, max(1, limit // size)):
        part = slots[piece.first : piece.last, piece.begin : piece.end].contiguous()
        gathered = part.unsqueeze(0)
        if node.group is not None:
            gathered = part.new_empty(size, piece.slots, piece.elements)
            _run(_all_gather, as_bytes(gathered), as_bytes(part), node=node, deadline=deadline)
        for ranks, begin, end in _owners(node, piece.first, piece.last):
            target = output[:, piece.begin : piece.end]
            rows = gathered[:, begin - piece.first : end - piece.first].transpose(0, 1)
            if isinstance(ranks, slice):
                target[ranks].view(end - begin, size, -1).copy_(rows)
            else:
                target[ranks] = rows.reshape(-1, piece.elements)


def intra_node_reduce_scatter(
    slots: Tensor, input: Tensor, node: IntraNodeGroup, reduction: Reduction, divisor: int | None, deadline: Deadline
) -> None:
    """Fill `slots` [nodes, elements] with the node's sums of this place's part of `input` [world, elements].

    On a GPU the library reduces the dtypes that it supports; otherwise the ranks exchange their parts, and each adds up
    its own in the order of places, in fp32 where the dtype is narrow.
    """
    nodes, elements = slots.shape
    size, limit = node.nodes.size, node.part_bytes // slots.element_size()
    for piece in split_slots(nodes, elements, max(1, limit // size)):
        staging = input.new_empty(size, piece.slots, piece.elements)
        for ranks, begin, end in _owners(node, piece.first, piece.last):
            source = input[:, piece.begin : piece.end]
            rows = source[ranks].reshape(end - begin, size, piece.elements)
            staging[:, begin - piece.first : end - piece.first].copy_(rows.transpose(0, 1))
        target = slots[piece.first : piece.last, piece.begin : piece.end]
        if node.group is None:
            reduce_rows(staging, target, reduction, divisor)
        elif input.is_cuda and library_reduces(input.dtype):
            part = torch.empty_like(staging[0])
            arguments = part.view(-1), staging.view(-1), library_op(reduction)
            _run(_reduce_scatter, *arguments, node=node, deadline=deadline)
            target.copy_(part if divisor is None else part / divisor)
        else:
            _all_to_all_and_reduce(target, staging, node, reduction, divisor, deadline)


def flat_reduce_scatter(
    output: Tensor, input: Tensor, node: IntraNodeGroup, reduction: Reduction, divisor: int | None, deadline: Deadline
) -> None:
    """Reduce-scatter `input` [world, elements] into `output` [elements] by the library, on a group of all ranks."""
    elements, world = output.numel(), input.shape[0]
    limit = node.part_bytes // output.element_size()
    for begin, end in split_range(elements, limit // world):
        whole = end - begin == elements
        staging = input if whole else input[:, begin:end].contiguous()
        part = output if whole else output[begin:end]
        if library_reduces(input.dtype):
            _run(_reduce_scatter, part, staging.view(-1), library_op(reduction), node=node, deadline=deadline)
            if divisor is not None:
                part.div_(divisor)
        else:
            _all_to_all_and_reduce(part, staging.unsqueeze(1), node, reduction, divisor, deadline)


def flat_all_reduce(
    flat: Tensor, node: IntraNodeGroup, reduction: Reduction, divisor: int | None, deadline: Deadline
) -> None:
    """All-reduce a `flat` tensor in place by the library, on a group of all ranks, for a dtype that it supports."""
    for begin, end in split_range(flat.numel(), node.part_bytes // flat.element_size()):
        _run(dist.all_reduce, flat[begin:end], library_op(reduction), node=node, deadline=deadline)
    if divisor is not None:
        flat.div_(divisor)


def _all_to_all_and_reduce(
    target: Tensor, staging: Tensor, node: IntraNodeGroup, reduction: Reduction, divisor: int | None, deadline: Deadline
) -> None:
    """Exchange `staging` [ranks, slots, elements], a part for each rank, and sum what arrives into `target`."""
    received = torch.empty_like(staging, memory_format=torch.contiguous_format)
    _run(dist.all_to_all_single, as_bytes(received), as_bytes(staging.contiguous()), node=node, deadline=deadline)
    reduce_rows(received.view(received.shape[0], *target.shape), target, reduction, divisor)


def _owners(node: IntraNodeGroup, first: int, last: int) -> list[tuple[slice | Tensor, int, int]]:
    """(ranks, begin, end): slots `begin` to `end` belong to nodes with these ranks.

    Splits where the rotation wraps around. Ranks are listed node by node, in the order of their places: as a slice
    where they are consecutive.
    """
    nodes = node.nodes
    split = min(max(nodes.count - node.node, first), last)
    found: list[tuple[slice | Tensor, int, int]] = []
    for begin, end in ((first, split), (split, last)):
        if begin == end:
            continue
        owner = (node.node + begin) % nodes.count
        if nodes.is_consecutive:
            found.append((slice(owner * nodes.size, (owner + end - begin) * nodes.size), begin, end))
        else:
            ranks = [rank for ranks in nodes.ranks[owner : owner + end - begin] for rank in ranks]
            found.append((torch.tensor(ranks, device="cpu"), begin, end))
    return found


def _run(collective: Callable[..., Any], *arguments: Any, node: IntraNodeGroup, deadline: Deadline) -> None:
    """Start a collective of the library in the node's group and wait for it."""
    with deadline.watch(node.phase):
        work: dist.Work = collective(*arguments, group=node.group, async_op=True)
    deadline.wait(work, node.phase)
