"""Launching the fused kernel: placement, ring, signals' counts, and the kernel's arguments."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stretto import tiles
from stretto.ops.embedding.faults import Faults
from stretto.ops.embedding.forward_kernel import UNIT, begin_pooling, pool_alone, pool_and_send
from stretto.ops.embedding.placement import Placement
from stretto.ops.embedding.ring import CHANNELS, OutputRing
from stretto.ops.embedding.table_set import TableSet, find_tables
from stretto.ops.embedding.tuned import find_tuned
from stretto.ops.embedding.ways import (
    Shape,
    Way,
    choose_way,
    count_multiprocessors,
    describe_pooling,
    describe_tables,
    find_kind,
    round_up_to_power,
)
from stretto.ops.gemm.tile import limit_waiting
from stretto.ops.workspace import find_kept


class _Launch(NamedTuple):
    """What all calls of a placement are launched with. counts, unused: see `_count`. mapping: of the signals."""

    ring: OutputRing
    slots: Tensor
    counts: Tensor
    unused: tiles.DynamicMapping
    mapping: tiles.StaticMapping
    first_column: int

    @classmethod
    def find(cls, group: str, device: torch.device, placement: Placement) -> "_Launch":
        """The group's. Its ring is that of all placements whose outputs have about this size."""

        def make() -> _Launch:
            ring = OutputRing.find(group, device, placement.local_batch * placement.width * placement.dtype.itemsize)
            channels = count_channels(placement)
            mapping = tiles.shard_tiles(channels, placement.world_size, 1, channels=channels, fixed=True)
            slots = ring.slots.view(placement.dtype)
            return cls(ring, slots, *_count(placement, device), mapping, placement.first_column(placement.rank))

        return find_kept(group, device, ("embedding launch", placement), make)


def look_up_and_send(
    indices: Tensor,
    offsets: Tensor,
    tables: TableSet,
    weights: Tensor | None,
    placement: Placement,
    group: str,
    mode: str,
    *,
    checks: bool = True,
    way: Way | None = None,
    trace: Tensor | None = None,
) -> Tensor:
    """This rank's [batch / world, width], of all ranks' tables; all ranks call it.

    way: None for `choose_way`; each rank may take its own. trace: int64 [`count_trace`, 4], filled with clocks; for
    benches.
    """
    device = offsets.device
    shape = (placement.local_batch, placement.width)
    if shape[0] * shape[1] == 0:
        return torch.empty(shape, dtype=placement.dtype, device=device)
    launch = _Launch.find(group, device, placement)
    ring = launch.ring
    ring.faults.check()
    count, total = len(tables.dims), indices.shape[0]
    way = find_way(placement, count, total, device) if way is None else way.check()
    channel = ring.channel.begin(
        "embedding_all_to_all", launch.unused, launch.unused, "p2p", counts=launch.counts, meets=False, launches=False
    )
    offset, finish = ring.take(shape, placement.dtype)
    unit, block = offset // UNIT.value, round_up_to_power(ring.channel.channels)
    ring.channel.launch(
        begin_pooling,
        (placement, tiles.kind_of(unit)),
        1,
        (channel, launch.unused, launch.counts, ring.destinations, ring.tickets, unit, placement.fingerprint, block),
        num_warps=4,
    )
    lookup = describe_tables(tables, launch.first_column, placement.local_batch, placement.width, total)
    programs = count_programs(way, placement, count, device)
    waiters = limit_waiting(programs, device)
    arguments = (
        channel,
        launch.mapping,
        lookup,
        describe_pooling(way, mode, checks),
        indices,
        offsets,
        weights,
        launch.slots,
        ring.destinations,
        ring.tickets,
        placement.fingerprint,
        ring.faults.report(),
        trace,
        waiters,
        way.order,
    )
    ring.channel.launch(
        pool_and_send,
        (
            placement,
            way,
            mode,
            checks,
            find_kind(lookup),
            *map(tiles.kind_of, (indices, offsets, weights, trace, waiters)),
        ),
        programs,
        arguments,
        num_warps=way.num_warps,
        num_stages=1,
    )
    out = finish()
    if device.type == "cpu":  # the kernel is through: what it has found is raised by this call, not by the next one
        ring.faults.check()
    return out


def find_shape(placement: Placement, tables: int, total: int) -> Shape:
    """The shape of this rank's look-ups in so many tables, with so many indices."""
    block = round_up_to_power(placement.longest)
    return Shape(placement.world_size, block * placement.dtype.itemsize, max(tables, 1), placement.batch, total)


def find_way(placement: Placement, tables: int, total: int, device: torch.device) -> Way:
    """The way of this rank's so many tables: the fastest that `tune_embedding` has measured, else by `choose_way`."""
    shape = find_shape(placement, tables, total)
    return find_tuned(shape, device) or choose_way(shape, device)


def count_programs(way: Way, placement: Placement, tables: int, device: torch.device) -> int:
    """No more than there are tasks, and enough to wait for all other ranks' channels if there are none."""
    tasks = placement.world_size * tables * -(-placement.local_batch // way.slice)
    waits = (placement.world_size - 1) * count_channels(placement)
    return max(min(way.programs * count_multiprocessors(device), max(tasks, waits)), 1)


def count_trace(way: Way, placement: Placement, tables: int, device: torch.device) -> int:
    """Rows of a trace: of tasks, then of programs."""
    tasks = placement.world_size * tables * -(-placement.local_batch // way.slice)
    return tasks + count_programs(way, placement, tables, device)


@functools.lru_cache(maxsize=256)
def count_channels(placement: Placement) -> int:
    """Groups of tables that a rank signals to another one by one."""
    return min(round_up_to_power(max(len(dims) for dims in placement.dims)), CHANNELS)


def _count(placement: Placement, device: torch.device) -> tuple[Tensor, tiles.DynamicMapping]:
    """How much channels are counted up by in a call, and a mapping that says no more than that counts do."""
    rank, world, channels = placement.rank, placement.world_size, count_channels(placement)
    counts = torch.zeros(2, world, world * CHANNELS, dtype=torch.int32)
    for peer in range(world):
        if peer != rank:
            for source, reader, direction in ((peer, rank, 0), (rank, peer, 1)):
                for table in range(len(placement.dims[source])):
                    counts[direction, peer, reader * channels + table % channels] += placement.local_batch
    tables = torch.zeros(1, dtype=torch.int32, device=device)
    return counts.to(device), tiles.look_up_tiles(*[tables] * 5)


def look_up_alone(
    indices: Tensor,
    offsets: Tensor,
    tables: Sequence[Tensor],
    weights: Tensor | None,
    world: int,
    mode: str,
    out: Tensor,
    faults: Faults,
    *,
    checks: bool = True,
    way: Way | None = None,
) -> Tensor:
    """The same look-up with no exchange: out [world, batch / world, sum of the tables' dims], in one launch."""
    device = offsets.device
    _, local_batch, width = out.shape
    lookup = describe_tables(find_tables(tables, device), 0, local_batch, width, indices.numel())
    if way is None:
        block_bytes = lookup.block.value * tables[0].element_size()
        shape = Shape(world, block_bytes, len(tables), world * local_batch, indices.numel())
        way = find_tuned(shape, device) or choose_way(shape, device)
    tasks = world * len(tables) * -(-local_batch // way.slice)
    programs = max(min(way.programs * count_multiprocessors(device), tasks), 1)
    pool_alone[(programs,)](
        lookup,
        describe_pooling(way.check(), mode, checks),
        indices,
        offsets,
        weights,
        out,
        torch.zeros(1, dtype=torch.int32, device=device),
        faults.report(),
        world,
        ORDER=way.order,
        num_warps=way.num_warps,
        num_stages=1,
    )
    return out
