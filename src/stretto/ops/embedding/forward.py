"""Launching the fused kernel: placement, ring, signals' counts, and the kernel's arguments."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stretto import tiles
from stretto.ops.embedding.autotune import find_tuned_config
from stretto.ops.embedding.forward_kernel import UNIT, begin_pooling, pool_alone, pool_and_send
from stretto.ops.embedding.index_errors import IndexErrors
from stretto.ops.embedding.launch_config import (
    LaunchConfig,
    LookupSize,
    choose_launch_config,
    count_multiprocessors,
    describe_pooling,
    describe_tables,
    find_kind,
    round_up_to_power,
)
from stretto.ops.embedding.output_ring import CHANNELS, OutputRing
from stretto.ops.embedding.placement import EmbeddingPlacement
from stretto.ops.embedding.table_set import TableSet, find_tables
from stretto.ops.gemm.tile import limit_waiting
from stretto.ops.workspace import find_kept


class _ForwardLaunch(NamedTuple):
    """What all calls of a placement are launched with. counts, unused: see `_count`. mapping: of the signals."""

    ring: OutputRing
    slots: Tensor
    counts: Tensor
    unused: tiles.DynamicMapping
    mapping: tiles.StaticMapping
    first_column: int

    @classmethod
    def find(cls, group: str, device: torch.device, placement: EmbeddingPlacement) -> "_ForwardLaunch":
        """The group's. Its ring is that of all placements whose outputs have about this size."""

        def make() -> _ForwardLaunch:
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
    placement: EmbeddingPlacement,
    group: str,
    mode: str,
    *,
    checks: bool = True,
    config: LaunchConfig | None = None,
    trace: Tensor | None = None,
) -> Tensor:
    """This rank's [batch / world, width], of all ranks' tables; all ranks call it.

    config: None for `find_launch_config`; each rank may take its own. trace: int64 [`count_trace`, 4], which the kernel
    fills with clocks, for benches.
    """
    device = offsets.device
    shape = (placement.local_batch, placement.width)
    if shape[0] * shape[1] == 0:
        return torch.empty(shape, dtype=placement.dtype, device=device)
    launch = _ForwardLaunch.find(group, device, placement)
    ring = launch.ring
    ring.index_errors.check()
    count, total = len(tables.dims), indices.shape[0]
    config = find_launch_config(placement, count, total, device) if config is None else config.check()
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
    programs = count_programs(config, placement, count, device)
    waiters = limit_waiting(programs, device)
    arguments = (
        channel,
        launch.mapping,
        lookup,
        describe_pooling(config, mode, checks),
        indices,
        offsets,
        weights,
        launch.slots,
        ring.destinations,
        ring.tickets,
        placement.fingerprint,
        ring.index_errors.report(),
        trace,
        waiters,
        config.order,
    )
    ring.channel.launch(
        pool_and_send,
        (
            placement,
            config,
            mode,
            checks,
            find_kind(lookup),
            *map(tiles.kind_of, (indices, offsets, weights, trace, waiters)),
        ),
        programs,
        arguments,
        num_warps=config.num_warps,
        num_stages=1,
    )
    out = finish()
    if device.type == "cpu":  # the kernel is through: what it has found is raised by this call, not by the next one
        ring.index_errors.check()
    return out


def find_shape(placement: EmbeddingPlacement, tables: int, total: int) -> LookupSize:
    """The shape of this rank's look-ups in so many tables, with so many indices."""
    block = round_up_to_power(placement.longest)
    return LookupSize(placement.world_size, block * placement.dtype.itemsize, max(tables, 1), placement.batch, total)


def find_launch_config(placement: EmbeddingPlacement, tables: int, total: int, device: torch.device) -> LaunchConfig:
    """This rank's launch config: the fastest that `tune_embedding` has measured, else `choose_launch_config`'s."""
    shape = find_shape(placement, tables, total)
    return find_tuned_config(shape, device) or choose_launch_config(shape, device)


def count_programs(config: LaunchConfig, placement: EmbeddingPlacement, tables: int, device: torch.device) -> int:
    """No more than there are tasks, and enough to wait for all other ranks' channels if there are none."""
    tasks = placement.world_size * tables * -(-placement.local_batch // config.slice)
    waits = (placement.world_size - 1) * count_channels(placement)
    return max(min(config.programs * count_multiprocessors(device), max(tasks, waits)), 1)


def count_trace(config: LaunchConfig, placement: EmbeddingPlacement, tables: int, device: torch.device) -> int:
    """Rows of a trace: of tasks, then of programs."""
    tasks = placement.world_size * tables * -(-placement.local_batch // config.slice)
    return tasks + count_programs(config, placement, tables, device)


@functools.lru_cache(maxsize=256)
def count_channels(placement: EmbeddingPlacement) -> int:
    """Groups of tables that a rank signals to another one by one."""
    return min(round_up_to_power(max(len(dims) for dims in placement.dims)), CHANNELS)


def _count(placement: EmbeddingPlacement, device: torch.device) -> tuple[Tensor, tiles.DynamicMapping]:
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
    index_errors: IndexErrors,
    *,
    checks: bool = True,
    config: LaunchConfig | None = None,
) -> Tensor:
    """The same look-up with no exchange: out [world, batch / world, sum of the tables' dims], in one launch."""
    device = offsets.device
    _, local_batch, width = out.shape
    lookup = describe_tables(find_tables(tables, device), 0, local_batch, width, indices.numel())
    if config is None:
        block_bytes = lookup.block.value * tables[0].element_size()
        shape = LookupSize(world, block_bytes, len(tables), world * local_batch, indices.numel())
        config = find_tuned_config(shape, device) or choose_launch_config(shape, device)
    tasks = world * len(tables) * -(-local_batch // config.slice)
    programs = max(min(config.programs * count_multiprocessors(device), tasks), 1)
    pool_alone[(programs,)](
        lookup,
        describe_pooling(config.check(), mode, checks),
        indices,
        offsets,
        weights,
        out,
        torch.zeros(1, dtype=torch.int32, device=device),
        index_errors.report(),
        world,
        ORDER=config.order,
        num_warps=config.num_warps,
        num_stages=1,
    )
    return out
