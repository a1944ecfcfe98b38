# SPDX-License-Identifier: Apache-2.0
"""Small kernels, each about one primitive or two; interpreted by ranks and compiled for their machine code."""

import triton
import triton.language as tl

from stretto.tiles import (
    call_slot,
    consumer_tile_wait,
    end_call,
    end_unsignalled_call,
    peer_tile_notify,
    peer_tile_wait,
    producer_tile_notify,
    push_packets,
    rank_tiles,
    sum_packets,
    take_packets,
    tile_pull_data,
    tile_push_data,
    tile_rank,
    tile_rows,
)


@triton.jit
def push_tiles(channel, producer, x, buffer, columns, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """Push this rank's tiles of x [rows, columns] to all ranks' buffer [world * rows, columns]: mode "broadcast"."""
    own = rank_tiles(producer)
    for index in range(tl.program_id(0), own, PROGRAMS):
        tile = channel.rank * own + index
        low, high = tile_rows(producer, tile)
        rows = low + tl.arange(0, producer.tile_rows)[:, None]
        at = tl.arange(0, BLOCK)[None, :]
        mask = (rows < high) & (at < columns)
        value = tl.load(x + (rows - channel.rank * producer.rows) * columns + at, mask=mask)
        tile_push_data(channel, buffer, rows * columns + at, value, mask=mask, mode="broadcast")
        producer_tile_notify(channel, producer, tile, "broadcast")


@triton.jit
def pull_tiles(
    channel, producer, buffer, gathered, columns, TILES: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr
):
    """Pull all ranks' tiles from their buffers [rows, columns] into gathered [world * rows, columns]: mode "local"."""
    for index in range(tl.program_id(0), TILES, PROGRAMS):
        tile = (index + channel.rank * (TILES // channel.world)) % TILES
        low, high = tile_rows(producer, tile)
        owner = tile_rank(producer, tile)
        rows = low + tl.arange(0, producer.tile_rows)[:, None]
        at = tl.arange(0, BLOCK)[None, :]
        mask = (rows < high) & (at < columns)
        there = (rows - owner * producer.rows) * columns + at
        value = tile_pull_data(channel, buffer, there, owner, mask=mask)
        tl.store(gathered + rows * columns + at, value, mask=mask)
        producer_tile_notify(channel, producer, tile, "local")


@triton.jit
def copy_tiles(channel, consumer, gathered, out, columns, TILES: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr):
    """out = gathered, tile by tile of the consumer's mapping, each as soon as it is there. One program a tile."""
    tile = TILES - 1 - tl.program_id(0)
    ready = consumer_tile_wait(channel, consumer, tile)
    low, high = tile_rows(consumer, tile)
    rows = low + tl.arange(0, BM)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    mask = (rows < high) & (at < columns)
    tl.store(out + rows * columns + at, tl.load(gathered + ready + rows * columns + at, mask=mask), mask=mask)


@triton.jit
def scatter_tiles(channel, producer, x, staging, columns, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """Push all tiles of x [world * rows, columns] to their owners' staging [world, rows, columns]: mode "p2p"."""
    tile = (tl.program_id(0) + (channel.rank + 1) * (TILES // channel.world)) % TILES
    low, high = tile_rows(producer, tile)
    owner = tile_rank(producer, tile)
    rows = low + tl.arange(0, producer.tile_rows)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    mask = (rows < high) & (at < columns)
    value = tl.load(x + rows * columns + at, mask=mask)
    there = (channel.rank * producer.rows + rows - owner * producer.rows) * columns + at
    tile_push_data(channel, staging, there, value, rank=owner, mask=mask)
    producer_tile_notify(channel, producer, tile, "p2p")


@triton.jit
def add_tiles(channel, consumer, staging, out, columns, OWN: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr):
    """out [rows, columns] = the sum of what all ranks have scattered here, added in rank order as it comes."""
    tile = channel.rank * OWN + tl.program_id(0)
    low, high = tile_rows(consumer, tile)
    rows = low + tl.arange(0, BM)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    mask = (rows < high) & (at < columns)
    rows -= channel.rank * consumer.rows
    total = tl.zeros((BM, BLOCK), tl.float32)
    for source in tl.static_range(channel.world):
        ready = consumer_tile_wait(channel, consumer, tile, source=source)
        from_source = (source * consumer.rows + rows) * columns + at
        total += tl.load(staging + ready + from_source, mask=mask, other=0)
    tl.store(out + rows * columns + at, total, mask=mask)


@triton.jit
def move_rows(channel, producer, x, buffer, columns, MODE: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr):
    """Push tile after tile, row by row, to wherever the tables say: rows row_low to row_high - 1 of x."""
    tile = tl.program_id(0)
    low, high = tile_rows(producer, tile)
    rows = low + tl.arange(0, BM)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    mask = (rows < high) & (at < columns)
    value = tl.load(x + rows * columns + at, mask=mask)
    if MODE == "p2p":
        tile_push_data(channel, buffer, rows * columns + at, value, rank=tile_rank(producer, tile), mask=mask)
    else:
        tile_push_data(channel, buffer, rows * columns + at, value, mask=mask, mode="broadcast")
    producer_tile_notify(channel, producer, tile, MODE)


@triton.jit
def pass_around(channel, x, buffer, out, columns, BLOCK: tl.constexpr):
    """Sum x [columns] around the ring of ranks, twice: step s is tile s, and goes from each rank to the one before."""
    at = tl.arange(0, BLOCK)
    mask = at < columns
    own = tl.load(x + at, mask=mask)
    total = own
    to = (channel.rank + channel.world - 1) % channel.world
    origin = (channel.rank + 1) % channel.world
    for step in range(channel.world - 1):
        tile_push_data(channel, buffer, step * columns + at, total, rank=to, mask=mask)
        peer_tile_notify(channel, step, rank=to)
        ready = peer_tile_wait(channel, step, rank=origin)
        total = own + tl.load(buffer + ready + step * columns + at, mask=mask)
    tl.store(out + at, total, mask=mask)


@triton.jit
def exchange_all(channel, x, buffer, out, columns, BLOCK: tl.constexpr):
    """out [world, columns]: every rank's x, pushed to all and announced by one broadcast between peers."""
    at = tl.arange(0, BLOCK)
    mask = at < columns
    tile_push_data(
        channel, buffer, channel.rank * columns + at, tl.load(x + at, mask=mask), mask=mask, mode="broadcast"
    )
    peer_tile_notify(channel, 0, mode="broadcast")
    ready = peer_tile_wait(channel, 0, mode="broadcast")
    for rank in range(channel.world):
        value = tl.load(buffer + ready + rank * columns + at, mask=mask)
        tl.store(out + rank * columns + at, value, mask=mask)


@triton.jit
def multiply_as_it_comes(
    channel, consumer, a, b, out, k, ADDS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """out [BM, BN] = a [BM, k] @ b [k, BN]; step t of k waits for tile t, inside the pipelined loop."""
    rows, columns = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(0, k, BK):
        ready = consumer_tile_wait(channel, consumer, step // BK)
        if not ADDS:
            ready = 0
        ks = step + tl.arange(0, BK)
        total = tl.dot(tl.load(a + ready + rows * k + ks[None, :]), tl.load(b + ks[:, None] * BN + columns), total)
    tl.store(out + rows * BN + columns, total.to(out.dtype.element_ty))


@triton.jit
def store_by_descriptor(channel, producer, source, target, ORDERS: tl.constexpr, BM: tl.constexpr):
    """A tile from one descriptor's memory to another's, then its notify."""
    tile = tl.program_id(0)
    target.store([tile * BM, 0], source.load([tile * BM, 0]))
    producer_tile_notify(channel, producer, tile, "broadcast", after_tma=ORDERS)


@triton.jit
def load_by_descriptor(channel, consumer, source, target, ORDERS: tl.constexpr, BM: tl.constexpr):
    """A wait, then the tile from one descriptor's memory to another's."""
    tile = tl.program_id(0)
    ready = consumer_tile_wait(channel, consumer, tile, before_tma=ORDERS)
    target.store([tile * BM, 0], source.load([tile * BM + ready, 0]))


@triton.jit
def notify_peer(channel, tile, rank):
    """One notify between peers, and nothing else."""
    peer_tile_notify(channel, tile, rank=rank)


@triton.jit
def push_16(channel, target, rank):
    """16 numbers to a rank."""
    at = tl.arange(0, 16)
    tile_push_data(channel, target, at, at, rank=rank)


@triton.jit
def pull_16(channel, source, rank):
    """16 numbers from a rank, for nothing."""
    tile_pull_data(channel, source, tl.arange(0, 16), rank)


@triton.jit
def push_packets_16(channel, target, ranks):
    """16 packets, each to a rank of its own."""
    at = tl.arange(0, 16)
    push_packets(channel, target, at, at, at < 16, ranks=tl.load(ranks + at))


@triton.jit
def notify_tile(channel, producer, tile):
    """One notify, and nothing else."""
    producer_tile_notify(channel, producer, tile, "p2p")


@triton.jit
def wait_for_tile(channel, consumer, tile, source, producer):
    """One wait, and nothing else."""
    consumer_tile_wait(channel, consumer, tile, source=source, producer=producer)


@triton.jit
def end(channel, producer):
    """The end of a call, and nothing else."""
    end_call(channel, producer)


@triton.jit
def exchange_packets(channel, x, packets, out, BM: tl.constexpr, BN: tl.constexpr):
    """Program p sends int32 x [BM, BN] to rank p, as packets, and takes that rank's: out [world, BM, BN]."""
    at = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    mask = at < BM * BN
    packets += call_slot(channel) * channel.world * BM * BN
    push_packets(channel, packets, channel.rank * BM * BN + at, tl.load(x + at), mask, rank=tl.program_id(0))
    places = tl.program_id(0) * BM * BN + at
    tl.store(out + places, take_packets(channel, packets + places, mask, 0, tl.program_id(0)))
    end_unsignalled_call(channel)


@triton.jit
def sum_packets_apart(channel, packets, out, stride):
    """16 numbers of each rank, whose packets lie `stride` apart."""
    at = tl.arange(0, 16)
    low, _, _ = sum_packets(channel, packets, stride, at, at < 16, 0, tl.float32)
    tl.store(out + at, low)
