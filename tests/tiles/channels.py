# SPDX-License-Identifier: Apache-2.0
"""Collectives on one channel between interpreted ranks; each returns whether its result is right."""

import time

import torch
import torch.distributed as dist
from tests.ops.operands import random_of
from tests.processes import LIMIT
from tests.tiles import kernels

from stretto import tiles

COLUMNS, BLOCK = 24, 32

HALF = 1 << 15


def make_channel(timeout=LIMIT, group=None, channels=None):
    return tiles.BlockChannel.allocate(
        group,
        channels=channels or 3 * dist.get_world_size(group),
        peer_tiles=8,
        data_bytes=2 * HALF,
        timeout=timeout,
        backend="host",
    )


def map_gather(rows, world, *, fixed=False, whole=False, channels=2):
    """Producer's tiles of 8 rows, consumer's of 16, either cut at ranks or not."""
    producer = tiles.shard_tiles(rows, world, 8, channels=channels, fixed=fixed)
    channel_rows = producer.channel_rows.value if fixed else producer.channel_rows
    make = tiles.whole_tiles if whole else tiles.shard_tiles
    return producer, make(rows, world, 16, channels=channels, channel_rows=channel_rows, fixed=fixed)


def gather(channel, rows, push, call, pause=0.0, **mapping):
    """All-gather [rows, COLUMNS] of every rank, by push or pull, and copy it tile by tile; whether that is right."""
    rank, world = channel.rank, channel.world_size
    shards = [random_of(peer, rows, COLUMNS, seed=call) for peer in range(world)]
    producer, consumer = map_gather(rows, world, **mapping)
    pieces, count = tiles.count_tiles(producer), tiles.count_tiles(consumer)
    out = torch.full((rows * world, COLUMNS), float("nan"))
    if push:
        gathered = channel.tensor((rows * world, COLUMNS), torch.float32)
        device = channel.begin("gather by push", producer, consumer, "broadcast")
        gathered[rank * rows : (rank + 1) * rows] = float("nan")  # nobody else writes here: poison
        time.sleep(pause)
        kernels.push_tiles[(2,)](device, producer, shards[rank], gathered, COLUMNS, 2, BLOCK)
    else:
        # Whoever begins call n has pulled all of call n - 1: two buffers in turn need one meeting a call.
        own = channel.tensor((rows, COLUMNS), torch.float32, offset=call % 2 * HALF)
        own.copy_(shards[rank])
        time.sleep(pause)
        device = channel.begin("gather by pull", producer, consumer, "local")
        gathered = torch.full((rows * world, COLUMNS), float("nan"))
        kernels.pull_tiles[(2,)](device, producer, own, gathered, COLUMNS, pieces, 2, BLOCK)
    kernels.copy_tiles[(count,)](device, consumer, gathered, out, COLUMNS, count, 16, BLOCK)
    return torch.equal(out, torch.cat(shards))


def scatter(channel, rows, call, pause=0.0):
    """Reduce-scatter [world * rows, COLUMNS], added in rank order; whether every bit is that of the sum in order."""
    rank, world = channel.rank, channel.world_size
    inputs = [random_of(peer, world * rows, COLUMNS, seed=call) for peer in range(world)]
    producer = tiles.shard_tiles(rows, world, 8, channels=2)
    consumer = tiles.shard_tiles(rows, world, 16, channels=2, channel_rows=producer.channel_rows)
    staging = channel.tensor((world, rows, COLUMNS), torch.float32)
    out = torch.full((rows, COLUMNS), float("nan"))
    device = channel.begin("scatter", producer, consumer, "p2p")
    staging[rank] = float("nan")
    time.sleep(pause)
    kernels.scatter_tiles[(tiles.count_tiles(producer),)](
        device, producer, inputs[rank], staging, COLUMNS, tiles.count_tiles(producer), BLOCK
    )
    own = tiles.count_tiles(consumer) // world
    kernels.add_tiles[(own,)](device, consumer, staging, out, COLUMNS, own, 16, BLOCK)
    expected = torch.zeros(rows, COLUMNS)
    for values in inputs:
        expected += values[rank * rows : (rank + 1) * rows]
    return torch.equal(out, expected)


def sum_around(channel, call, pause=0.0):
    """The ring of `pass_around`; whether every rank has the sum."""
    world = channel.world_size
    values = [random_of(peer, COLUMNS, seed=call).mul(16).round() for peer in range(world)]
    out = torch.full((COLUMNS,), float("nan"))
    mapping = map_gather(8, world)
    device = channel.begin("ring", *mapping, "broadcast", with_barrier=True)
    skip_producers(channel)
    time.sleep(pause)
    buffer = channel.tensor((world, COLUMNS), torch.float32)
    kernels.pass_around[(1,)](device, values[channel.rank], buffer, out, COLUMNS, BLOCK)
    return torch.equal(out, sum(values))


def exchange(channel, call, pause=0.0):
    """`exchange_all`; whether every rank has all."""
    world = channel.world_size
    values = [random_of(peer, COLUMNS, seed=call) for peer in range(world)]
    out = torch.full((world, COLUMNS), float("nan"))
    device = channel.begin("exchange", *map_gather(8, world), "broadcast")
    skip_producers(channel)
    buffer = channel.tensor((world, COLUMNS), torch.float32)
    buffer[channel.rank] = float("nan")
    time.sleep(pause)
    kernels.exchange_all[(1,)](device, values[channel.rank], buffer, out, COLUMNS, BLOCK)
    return torch.equal(out, torch.stack(values))


def skip_producers(channel):
    """Signal all tiles of a call that has no producers, so that the counters agree with the targets."""
    for rank in range(channel.world_size):
        for index in range(2 * channel.rank, 2 * channel.rank + 2):
            tiles.rank_notify(channel, index, rank)
