# SPDX-License-Identifier: Apache-2.0
"""The operations of torch.distributed, each as a function of a group; what they give can be compared between groups.

Inputs are small whole numbers, so that sums are exact in every order and dtype.
"""

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.collectives import install
from stretto.collectives.algorithms import find

Operation = Callable[[dist.ProcessGroup, torch.dtype, int], list[Tensor]]
INSTALLED = (
    "ring-all-reduce",
    "ring-all-gather",
    "ring-reduce-scatter",
    "direct-all-to-all",
    "binomial-broadcast",
    "binomial-reduce",
)


def install_all(group: dist.ProcessGroup | None, in_place: bool | None = None, **options) -> None:
    """Install a schedule for every collective. in_place: None leaves it to each algorithm."""
    size = dist.get_world_size(group)
    for name in INSTALLED:
        algorithm = find(name)
        choice = {} if in_place is None or name == "direct-all-to-all" else {"in_place": in_place}
        install(algorithm.compile(ranks=size, **choice), group, **options)


def numbers(group: dist.ProcessGroup, dtype: torch.dtype, elements: int, seed: int = 0) -> Tensor:
    """This rank's input: 0 to 3."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank(group))
    return torch.randint(0, 4, (elements,), generator=generator).to(dtype)


def first(group):
    """The group's first rank, as the whole job numbers it."""
    return dist.get_global_rank(group, 0)


def all_reduce(group, dtype, n):
    found = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        tensor = numbers(group, dtype, n)
        dist.all_reduce(tensor, op, group)
        found.append(tensor)
    return found


def all_reduce_shapes(group, dtype, n):
    """No dimension, and more than one."""
    scalar = numbers(group, dtype, 1)[0]
    dist.all_reduce(scalar, group=group)
    cube = numbers(group, dtype, 2 * n).view(2, n, 1)
    dist.all_reduce(cube, group=group)
    assert scalar.shape == ()
    return [scalar, cube]


def all_reduce_async(group, dtype, n):
    tensors = [numbers(group, dtype, n + extra, extra) for extra in range(5)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for work in works:
        assert work.wait()
        assert work.is_completed()
    return tensors


def all_reduce_coalesced(group, dtype, n):
    tensors = [numbers(group, dtype, n + extra, extra) for extra in range(3)]
    with dist._coalescing_manager(group=group, async_ops=True) as coalesced:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    coalesced.wait()
    return tensors


def broadcast(group, dtype, n):
    tensor = numbers(group, dtype, n)
    dist.broadcast(tensor, first(group), group)
    return [tensor]


def reduce(group, dtype, n):
    tensor = numbers(group, dtype, n)
    dist.reduce(tensor, first(group), group=group)
    return [tensor] if dist.get_rank(group) == 0 else []


def all_gather(group, dtype, n):
    given = numbers(group, dtype, n)
    taken = [torch.full_like(given, 9) for _ in range(dist.get_world_size(group))]
    dist.all_gather(taken, given, group)
    return [given, *taken]


def all_gather_into_tensor(group, dtype, n):
    given = numbers(group, dtype, n)
    taken = given.new_full((dist.get_world_size(group) * n,), 9)
    dist.all_gather_into_tensor(taken, given, group)
    return [given, taken]


def all_gather_into_own_part(group, dtype, n):
    """As FSDP does: the input is a part of the output."""
    rank = dist.get_rank(group)
    whole = torch.full((dist.get_world_size(group) * n,), 9).to(dtype)
    own = whole[rank * n : (rank + 1) * n]
    own.copy_(numbers(group, dtype, n))
    dist.all_gather_into_tensor(whole, own, group)
    return [whole]


def all_gather_coalesced(group, dtype, n):
    given = [numbers(group, dtype, n + extra, extra) for extra in range(3)]
    taken = [tensor.new_full((dist.get_world_size(group) * len(tensor),), 9) for tensor in given]
    with dist._coalescing_manager(group=group):
        for output, input in zip(taken, given, strict=True):
            dist.all_gather_into_tensor(output, input, group)
    return [*given, *taken]


def reduce_scatter(group, dtype, n):
    given = [numbers(group, dtype, n, seed) for seed in range(dist.get_world_size(group))]
    taken = torch.full_like(given[0], 9)
    dist.reduce_scatter(taken, given, group=group)
    return [*given, taken]


def reduce_scatter_tensor(group, dtype, n):
    given = numbers(group, dtype, dist.get_world_size(group) * n)
    taken = given.new_full((n,), 9)
    dist.reduce_scatter_tensor(taken, given, dist.ReduceOp.MAX, group)
    return [given, taken]


def reduce_scatter_coalesced(group, dtype, n):
    given = [numbers(group, dtype, dist.get_world_size(group) * (n + extra), extra) for extra in range(3)]
    taken = [tensor.new_full((n + extra,), 9) for extra, tensor in enumerate(given)]
    with dist._coalescing_manager(group=group):
        for output, input in zip(taken, given, strict=True):
            dist.reduce_scatter_tensor(output, input, group=group)
    return [*given, *taken]


def all_to_all_single(group, dtype, n):
    given = numbers(group, dtype, dist.get_world_size(group) * n)
    taken = torch.full_like(given, 9)
    dist.all_to_all_single(taken, given, group=group)
    return [given, taken]


def all_to_all_with_sizes(group, dtype, n):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    given_sizes, taken_sizes = [n + peer for peer in range(size)], [n + rank] * size
    given = numbers(group, dtype, sum(given_sizes))
    taken = given.new_full((sum(taken_sizes),), 9)
    dist.all_to_all_single(taken, given, taken_sizes, given_sizes, group)
    return [given, taken]


def gather_and_scatter(group, dtype, n):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    given = numbers(group, dtype, n)
    gathered = [torch.empty_like(given) for _ in range(size)] if rank == 0 else None
    dist.gather(given, gathered, first(group), group)
    own = torch.empty_like(given)
    dist.scatter(own, gathered, first(group), group)
    return [own]


def send_and_receive(group, dtype, n):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    given = numbers(group, dtype, n)
    taken, next_one = torch.empty_like(given), dist.get_global_rank(group, (rank + 1) % size)
    work = dist.isend(given, next_one, group)
    dist.recv(taken, dist.get_global_rank(group, (rank - 1) % size), group)
    work.wait()
    batch = [
        dist.P2POp(dist.isend, taken, next_one, group),
        dist.P2POp(dist.irecv, given, dist.get_global_rank(group, (rank - 1) % size), group),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return [given, taken]


def barrier_and_objects(group, dtype, n):
    dist.barrier(group)
    group.monitored_barrier(timedelta(seconds=30))  # torch.distributed allows its own function to gloo by name only
    objects = [None] * dist.get_world_size(group)
    dist.all_gather_object(objects, ("rank", dist.get_rank(group)), group)
    objects_sent = [n if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(objects_sent, first(group), group)
    return [torch.tensor([rank for _, rank in objects]), torch.tensor(objects_sent)]


SCHEDULED: tuple[tuple[Operation, str, int], ...] = (
    (all_reduce, "allreduce", 4),
    (all_reduce_shapes, "allreduce", 2),
    (all_reduce_async, "allreduce", 5),
    (all_reduce_coalesced, "allreduce_coalesced", 1),
    (broadcast, "broadcast", 1),
    (reduce, "reduce", 1),
    (all_gather, "allgather", 1),
    (all_gather_into_tensor, "_allgather_base", 1),
    (all_gather_into_own_part, "_allgather_base", 1),
    (all_gather_coalesced, "allgather_into_tensor_coalesced", 1),
    (reduce_scatter, "reduce_scatter", 1),
    (reduce_scatter_tensor, "_reduce_scatter_base", 1),
    (reduce_scatter_coalesced, "reduce_scatter_tensor_coalesced", 1),
    (all_to_all_single, "alltoall_base", 1),
)
"""Each with the operation of c10d that it must reach, and how often."""
OTHERS: tuple[tuple[Operation, dict[str, int]], ...] = (
    (all_to_all_with_sizes, {"alltoall_base": 1}),
    (gather_and_scatter, {"gather": 1, "scatter": 1}),
    (send_and_receive, {"send": 2, "recv": 2}),
)
"""Calls that no schedule does, with the operations of c10d."""
