# SPDX-License-Identifier: Apache-2.0
"""Host side of the fused look-up: launches `begin_pooling` and `pool_and_send`, or `pool_alone` for benches.

find_launch_config      how the kernel is launched: measured, or chosen by a table
_ForwardLaunch.find     what all calls of a placement share: ring, signal counts, mapping (made once, by all ranks)
look_up_and_send        a call: begin it on the channel, take an output slot, launch the two kernels
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stretto import tiles
from stretto.memory import PeerError
from stretto.memory.gpus import count_multiprocessors, limit_waiting
from stretto.ops.embedding.autotune import find_tuned_config
from stretto.ops.embedding.forward_kernel import (
    UNIT,
    PooledVectors,
    RingPointers,
    begin_pooling,
    pool_alone,
    pool_and_send,
)
from stretto.ops.embedding.index_errors import IndexErrors
from stretto.ops.embedding.launch_config import (
    LaunchConfig,
    LookupSize,
    choose_launch_config,
    describe_pooling,
    describe_tables,
    find_kind,
    round_up_to_power,
)
from stretto.ops.embedding.output_ring import CHANNELS, OutputRing, find_capture, limit_channels
from stretto.ops.embedding.placement import EmbeddingPlacement, find_permit
from stretto.ops.embedding.pooling_kernel import Bags, PoolingConfig
from stretto.ops.embedding.scheduled import ScheduledMoves, find_way
from stretto.ops.embedding.table_set import TableSet, find_tables
from stretto.ops.operator import find_kept
from stretto.tiles.launches import launch_kernel


class _ForwardLaunch(NamedTuple):
    """Launch parameters that all calls of a placement share.

    pointers: of the ring, its slots in the tables' dtype, and the permit (see `find_permit`). counts: how often each
    channel is signalled in a call; see `_count_signals`. mapping: from (destination, channel) to the signal.
    first_column: of this rank's tables in the output. moves: of the exchange by a schedule.
    """

    ring: OutputRing
    pointers: RingPointers
    counts: Tensor
    mapping: tiles.Mapping
    first_column: int
    moves: ScheduledMoves | None = None

    @classmethod
    def find(
        cls, group: str, device: torch.device, placement: EmbeddingPlacement, schedule: str = ""
    ) -> "_ForwardLaunch":
        """Find or make the group's; all ranks call it. Placements whose outputs have about one size share a ring.

        schedule: of the exchange, by the name that operators know, if any.
        """

        def make() -> _ForwardLaunch:
            moves: ScheduledMoves | None = None
            mapping: tiles.Mapping
            if by := find_way(group, device, schedule):
                moves = ScheduledMoves.make(group, device, placement, by)
                ring, counts, mapping = moves.ring, moves.tables.counts, moves.tables.destinations
            else:
                size = placement.local_batch * placement.width * placement.dtype.itemsize
                ring, counts = OutputRing.find(group, device, size), _count_signals(placement, device)
                channels = count_channels(placement)
                mapping = tiles.shard_tiles(channels, placement.world_size, 1, channels=channels, fixed=True)
            slots, permit = ring.slots.view(placement.dtype), find_permit(group, device, placement)
            pointers = RingPointers(slots, ring.destinations, ring.tickets, permit)
            for argument in (pointers, *pointers, counts, ring.index_errors.report):
                ring.channel.launch.remember(argument)
            return cls(ring, pointers, counts, mapping, placement.first_column(placement.rank), moves)

        return find_kept(group, device, ("embedding launch", placement, schedule), make)


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
    needs_grad: bool = False,
    call_permit: Tensor | None = None,
    schedule: str = "",
) -> Tensor:
    """Pool this rank's tables for the global batch and exchange the vectors; all ranks call it.

    Returns this rank's samples' vectors of all ranks' tables, [batch / world, width], in memory that peers stored into.
    config: None for `find_launch_config`; each rank may take its own. needs_grad: whether this rank makes a backward
    pass if tables get gradients. call_permit: int32 [1], which gets what this call permits that pass
    (`placement.AGREED`). schedule: of the exchange, if not the kernel's own; the output is then memory of its own.

    Bad indices of an earlier call raise an error in this one, which all ranks then end without storing anything, and
    of which the others raise an error, too: no rank waits in this call for the rank that has raised.
    """
    device = offsets.device
    shape = (placement.local_batch, placement.width)
    if shape[0] * shape[1] == 0:
        return torch.empty(shape, dtype=placement.dtype, device=device)
    launch = _ForwardLaunch.find(group, device, placement, schedule)
    ring = launch.ring
    found = ring.index_errors.take()
    if found is not None:
        if found.is_own and find_capture(device) is None:
            with contextlib.suppress(PeerError):  # a wait has failed, so the others do not continue either
                _begin(launch, placement, 0, placement.announce(needs_grad=needs_grad, refuses=True), None)
        raise found.error
    count, total = len(tables.dims), indices.shape[0]
    config = find_launch_config(placement, count, total, device) if config is None else config.check()
    announced, pooling = placement.announce(needs_grad=needs_grad), describe_pooling(config, mode, checks)
    bags = Bags(indices, offsets, weights)
    if launch.moves is not None:
        channel = _begin(launch, placement, 0, announced, call_permit)
        return _pool_and_move(launch, launch.moves, channel, tables, placement, bags, pooling, config)
    offset, finish = ring.take(shape, placement.dtype)
    channel = _begin(launch, placement, offset // UNIT.value, announced, call_permit)
    kernel_tables = describe_tables(tables, launch.first_column, placement.local_batch, placement.width, total)
    programs = count_programs(config, placement, count, device)
    waiters = limit_waiting(programs, device)
    arguments = (
        channel,
        launch.mapping,
        kernel_tables,
        pooling,
        bags,
        launch.pointers,
        ring.index_errors.report,
        None,  # trace: python -m lab embedding-figures puts its own here
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
            find_kind(kernel_tables),
            *map(tiles.kind_of, (*bags, waiters)),
        ),
        programs,
        arguments,
        num_warps=config.num_warps,
        num_stages=1,
    )
    out = finish()
    if device.type == "cpu":  # the kernel has ended: this call raises its errors, not the next one
        ring.index_errors.check()
    return out


def _pool_and_move(
    launch: _ForwardLaunch,
    moves: ScheduledMoves,
    channel: tiles.Channel,
    tables: TableSet,
    placement: EmbeddingPlacement,
    bags: Bags,
    pooling: PoolingConfig,
    config: LaunchConfig,
) -> Tensor:
    """Pool in the order of `remote_first`, while the schedule's messages send what is pooled.

    The messages are launched first, so that the pooling, which fills the GPU, leaves them multiprocessors; but not
    before a kernel for which they wait is loaded: CUDA may let its loading wait for all that runs.
    """
    ring, width = launch.ring, placement.widths[placement.rank]
    pooled = bags.offsets.new_empty(placement.world_size, placement.local_batch * width or 1, dtype=placement.dtype)
    pooled = pooled if width else pooled[..., :0]
    kernel_tables = describe_tables(tables, 0, placement.local_batch, width, bags.indices.shape[0])
    device, own = pooled.device, moves.find_own(placement)

    def move() -> None:
        with tiles.copy_engine(ring.channel):
            moves.launch(channel, pooled, launch.pointers.permit)

    made = moves.tables.made
    assert made is not None
    key = (
        placement,
        config,
        pooling,
        find_kind(kernel_tables),
        *map(tiles.kind_of, (*bags, pooled, own, made.channels.count)),
    )
    is_loaded = ring.channel.launch.knows(pool_alone, key)  # never if interpreted: those run one after another
    if is_loaded:
        move()
    ring.channel.launch(
        pool_alone,
        key,
        count_programs(config, placement, len(tables.dims), device),
        (channel, *made, kernel_tables, pooling, bags, PooledVectors(pooled, own), launch.pointers,
         ring.index_errors.report, placement.world_size, placement.rank, "remote_first"),
        num_warps=config.num_warps,
        num_stages=1,
    )  # fmt: skip
    if not is_loaded:
        move()
    tiles.join_copies(ring.channel)
    out = moves.collect(placement)
    if device.type == "cpu":
        ring.index_errors.check()
    return out


def _begin(
    launch: _ForwardLaunch, placement: EmbeddingPlacement, unit: int, announced: int, call_permit: Tensor | None
) -> tiles.Channel:
    """Begin a call, and return the argument of its kernels. PeerError if a wait has failed before."""
    ring = launch.ring
    channel = ring.channel.begin(
        "embedding_all_to_all",
        launch.mapping,
        launch.mapping,
        "p2p",
        counts=launch.counts,
        with_barrier=False,
        launches=False,
    )
    words = launch.mapping, launch.counts, launch.pointers, call_permit
    everyones = None
    if launch.moves is not None and launch.moves.puts is not None:
        own = torch.full((1,), announced, dtype=torch.int64, device=ring.channel.device)
        everyones = own.new_empty(placement.world_size)
        launch.moves.puts.all_gather(own, everyones)
    rest = everyones, placement.world_size, round_up_to_power(ring.channel.channels)
    ring.channel.launch(
        begin_pooling,
        (placement, tiles.kind_of(unit), tiles.kind_of(call_permit), everyones is None),
        1,
        (channel, *words, ring.index_errors.report, unit, announced, *rest),
        num_warps=4,
    )
    return channel


def find_shape(placement: EmbeddingPlacement, tables: int, total: int) -> LookupSize:
    """Return the size of this rank's look-up of `total` indices in so many tables."""
    block = round_up_to_power(placement.longest)
    return LookupSize(placement.world_size, block * placement.dtype.itemsize, max(tables, 1), placement.batch, total)


def find_launch_config(placement: EmbeddingPlacement, tables: int, total: int, device: torch.device) -> LaunchConfig:
    """Select this rank's launch config: the fastest that `tune_embedding` has measured, else a table's choice."""
    shape = find_shape(placement, tables, total)
    return find_tuned_config(shape, device) or choose_launch_config(shape, device)


def count_programs(config: LaunchConfig, placement: EmbeddingPlacement, tables: int, device: torch.device) -> int:
    """Return how many programs to launch: at most one a task, or one a channel to wait for if there are more."""
    tasks = placement.world_size * tables * -(-placement.local_batch // config.slice)
    waits = (placement.world_size - 1) * count_channels(placement)
    return max(min(config.programs * count_multiprocessors(device), max(tasks, waits)), 1)


@functools.lru_cache(maxsize=256)
def count_channels(placement: EmbeddingPlacement) -> int:
    """Return how many channels a rank has at each other rank: groups of its tables, each with its own signal."""
    most = limit_channels(placement.world_size, CHANNELS)
    return min(round_up_to_power(max(len(dims) for dims in placement.dims)), most)


def _count_signals(placement: EmbeddingPlacement, device: torch.device) -> Tensor:
    """Return how much each channel's counter grows in a call (`BlockChannel.begin`'s counts)."""
    rank, world, channels = placement.rank, placement.world_size, count_channels(placement)
    counts = torch.zeros(2, world, world * limit_channels(world, CHANNELS), dtype=torch.int32, device="cpu")
    for peer in range(world):
        if peer != rank:
            for source, reader, direction in ((peer, rank, 0), (rank, peer, 1)):
                for table in range(len(placement.dims[source])):
                    counts[direction, peer, reader * channels + table % channels] += placement.local_batch
    return counts.to(device)


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
    config: LaunchConfig | None = None,
) -> Tensor:
    """Pool without an exchange, for benches, into out [world, batch / world, sum of the tables' dims]; one launch."""
    device = offsets.device
    _, local_batch, width = out.shape
    kernel_tables = describe_tables(find_tables(tables, device), 0, local_batch, width, indices.numel())
    if config is None:
        block_bytes = kernel_tables.block.value * tables[0].element_size()
        shape = LookupSize(world, block_bytes, len(tables), world * local_batch, indices.numel())
        config = find_tuned_config(shape, device) or choose_launch_config(shape, device)
    tasks = world * len(tables) * -(-local_batch // config.slice)
    programs = max(min(config.programs * count_multiprocessors(device), tasks), 1)
    launch_kernel(
        pool_alone,
        programs,
        *[None] * 3,
        kernel_tables,
        describe_pooling(config.check(), mode, True),
        Bags(indices, offsets, weights),
        PooledVectors(out),
        RingPointers(None, None, torch.zeros(1, dtype=torch.int32, device=device), None),
        index_errors.report,
        world,
        0,
        ORDER=config.order,
        num_warps=config.num_warps,
        num_stages=1,
    )
    return out
