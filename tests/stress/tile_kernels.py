# SPDX-License-Identifier: Apache-2.0
"""Small kernels, each about one tile primitive or two, for the stress of `stretto.tiles`.

All move int32 rows of BLOCK numbers, in tiles of `tile_rows` rows that divide a rank's rows.
"""

import triton
import triton.language as tl

from stretto import tiles


@triton.jit
def find_places(low, count: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Offsets [count, BLOCK] of `count` rows from row `low` on."""
    return (low + tl.arange(0, count))[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def push_tiles(channel, producer, x, buffer, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Push this rank's tiles of x to all ranks' buffers [world * rows, BLOCK]. Signals: each tile, by broadcast."""
    own = tiles.rank_tiles(producer)
    for index in range(tl.program_id(0), own, tl.num_programs(0)):
        tile = channel.rank * own + index
        low, _ = tiles.tile_rows(producer, tile)
        value = tl.load(x + find_places(low - channel.rank * producer.rows, producer.tile_rows, BLOCK))
        tiles.tile_push_data(channel, buffer, find_places(low, producer.tile_rows, BLOCK), value, mode="broadcast")
        tiles.producer_tile_notify(channel, producer, tile, "broadcast")


@triton.jit
def copy_tiles(channel, consumer, gathered, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out = gathered, each tile as soon as it has arrived; a program a tile, the last one first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    ready = tiles.consumer_tile_wait(channel, consumer, tile)
    low, _ = tiles.tile_rows(consumer, tile)
    at = find_places(low, consumer.tile_rows, BLOCK)
    tl.store(out + at, tl.load(gathered + ready + at))


@triton.jit
def gather_by_one_kernel(channel, producer, x, buffer, half, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """`push_tiles` and `copy_tiles` in one launch, by a call that began by `enter`; half: numbers of a slot.

    Waits: for tiles of programs that push before they wait. Reuse: two slots, by the call's number.
    """
    slot = buffer + tiles.call_slot(channel) * half
    push_tiles(channel, producer, x, slot, BLOCK)
    count = tiles.rank_tiles(producer) * channel.world
    tile = tiles.claim(channel)
    while tile < count:
        ready = tiles.consumer_tile_wait(channel, producer, tile, producer=producer)
        low, _ = tiles.tile_rows(producer, tile)
        at = find_places(low, producer.tile_rows, BLOCK)
        tl.store(out + at, tl.load(slot + ready + at))
        tile = tiles.claim(channel)
    tiles.end_call(channel, producer)


@triton.jit
def pull_tiles(channel, producer, buffer, gathered, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pull all ranks' tiles from their buffers [rows, BLOCK] into gathered [world * rows, BLOCK]. Signals: here."""
    own = tiles.rank_tiles(producer)
    count = own * channel.world
    for index in range(tl.program_id(0), count, tl.num_programs(0)):
        tile = (index + channel.rank * own) % count
        low, _ = tiles.tile_rows(producer, tile)
        owner = tiles.tile_rank(producer, tile)
        there = find_places(low - owner * producer.rows, producer.tile_rows, BLOCK)
        value = tiles.tile_pull_data(channel, buffer, there, owner)
        tl.store(gathered + find_places(low, producer.tile_rows, BLOCK), value)
        tiles.producer_tile_notify(channel, producer, tile, "local")


@triton.jit
def scatter_tiles(channel, producer, x, staging, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Push tiles of x [world * rows, BLOCK] to their owners' staging [world, rows, BLOCK]. Signals: the owner."""
    own = tiles.rank_tiles(producer)
    count = own * channel.world
    for index in range(tl.program_id(0), count, tl.num_programs(0)):
        tile = (index + (channel.rank + 1) * own) % count
        low, _ = tiles.tile_rows(producer, tile)
        owner = tiles.tile_rank(producer, tile)
        value = tl.load(x + find_places(low, producer.tile_rows, BLOCK))
        row = (channel.rank - owner) * producer.rows + low
        at = find_places(row, producer.tile_rows, BLOCK)
        tiles.tile_push_data(channel, staging, at, value, rank=owner)
        tiles.producer_tile_notify(channel, producer, tile, "p2p")


@triton.jit
def add_tiles(channel, consumer, staging, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out [rows, BLOCK] = the sum of all ranks' scattered tiles, each added once it arrives; a program a tile."""
    tile = channel.rank * tl.num_programs(0) + tl.program_id(0)
    low, _ = tiles.tile_rows(consumer, tile)
    low -= channel.rank * consumer.rows
    total = tl.zeros((consumer.tile_rows, BLOCK), tl.int32)
    for source in tl.static_range(channel.world):
        ready = tiles.consumer_tile_wait(channel, consumer, tile, source=source)
        total += tl.load(staging + ready + find_places(source * consumer.rows + low, consumer.tile_rows, BLOCK))
    tl.store(out + find_places(low, consumer.tile_rows, BLOCK), total)


@triton.jit
def route_tiles(channel, producer, x, buffer, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Push tile after tile of x to the rank that a table names, to this rank's place there; a program a tile."""
    tile = tl.program_id(0)
    low, _ = tiles.tile_rows(producer, tile)
    value = tl.load(x + find_places(low, ROWS, BLOCK))
    at = find_places(channel.rank * ROWS, ROWS, BLOCK)
    tiles.tile_push_data(channel, buffer, at, value, rank=tiles.tile_rank(producer, tile))
    tiles.producer_tile_notify(channel, producer, tile, "p2p")


@triton.jit
def take_routed(channel, consumer, buffer, out, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out = the tiles that all ranks have routed here; a program waits for all ranks, and copies one rank's."""
    ready = tiles.consumer_tile_wait(channel, consumer, 0)
    at = find_places(tl.program_id(0) * ROWS, ROWS, BLOCK)
    tl.store(out + at, tl.load(buffer + ready + at))


@triton.jit
def pass_around(channel, x, buffer, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out = the sum of all ranks' x [BLOCK], by a ring: step s is tile s between peers, from each to the one before."""
    at = tl.arange(0, BLOCK)
    own = tl.load(x + at)
    total = own
    to = (channel.rank + channel.world - 1) % channel.world
    origin = (channel.rank + 1) % channel.world
    for step in range(channel.world - 1):
        tiles.tile_push_data(channel, buffer, step * BLOCK + at, total, rank=to)
        tiles.peer_tile_notify(channel, step, rank=to)
        ready = tiles.peer_tile_wait(channel, step, rank=origin)
        total = own + tl.load(buffer + ready + step * BLOCK + at)
    tl.store(out + at, total)


@triton.jit
def exchange_all(channel, x, buffer, half, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out [world, BLOCK]: every rank's x, pushed to all and announced by one broadcast between peers.

    A call that began by `enter`. Reuse: two slots, by the call's number; every rank waits for every rank.
    """
    at = tl.arange(0, BLOCK)
    slot = buffer + tiles.call_slot(channel) * half
    tiles.tile_push_data(channel, slot, channel.rank * BLOCK + at, tl.load(x + at), mode="broadcast")
    tiles.peer_tile_notify(channel, 0, mode="broadcast")
    ready = tiles.peer_tile_wait(channel, 0, mode="broadcast")
    for rank in range(channel.world):
        tl.store(out + rank * BLOCK + at, tl.load(slot + ready + rank * BLOCK + at))
    tiles.end_unsignalled_call(channel)


@triton.jit
def exchange_packets(channel, x, packets, half, out, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program p sends x [ROWS, BLOCK] to rank p as packets, and receives that rank's into out [world, ROWS, BLOCK]."""
    at = find_places(0, ROWS, BLOCK)
    mask = at < ROWS * BLOCK
    peer = tl.program_id(0)
    slot = packets + tiles.call_slot(channel) * half
    own = channel.rank * ROWS * BLOCK + at
    tiles.push_packets(channel, slot, own, tl.load(x + at), mask, rank=peer)
    places = peer * ROWS * BLOCK + at
    tl.store(out + places, tiles.take_packets(channel, slot + places, mask, 0, peer))
    tiles.end_unsignalled_call(channel)


@triton.jit
def sum_by_packets(channel, x, packets, half, out, FOURS: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out = the sum over all ranks of x, numbers of 16 or 32 bits, in chunks of CHUNK packets; a program a chunk."""
    dtype: tl.constexpr = x.dtype.element_ty
    each: tl.constexpr = 32 // dtype.primitive_bitwidth
    count = tl.num_programs(0) * CHUNK
    index = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    mask = index < count
    slot = packets + tiles.call_slot(channel) * half
    low, high = tl.load(x + index * each).to(tl.float32), tl.load(x + index * each + each - 1).to(tl.float32)
    data = tiles.pack(low, high, dtype)
    for distance in tl.static_range(1, channel.world + 1):
        peer = (channel.rank + distance) % channel.world
        tiles.push_packets(channel, slot, channel.rank * count + index, data, mask, rank=peer, in_fours=FOURS)
    low, high, _ = tiles.sum_packets(channel, slot, count, index, mask, tl.program_id(0), dtype)
    tl.store(out + index * each, low.to(dtype))
    if each == 2:
        tl.store(out + index * each + 1, high.to(dtype))
    tiles.end_unsignalled_call(channel)


@triton.jit
def store_by_descriptor(channel, producer, source, target, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """This rank's tiles from one descriptor's memory to another's, then their notifies; a program a tile."""
    tile = tl.program_id(0)
    target.store([tile * ROWS, 0], source.load([tile * ROWS, 0]))
    own = channel.rank * tl.num_programs(0) + tile
    tiles.producer_tile_notify(channel, producer, own, "broadcast", after_tma=True)


@triton.jit
def pull_when_ready(channel, consumer, buffer, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out = all ranks' buffers [rows, BLOCK], each tile pulled when its owner has stored it; a program a tile."""
    tile = (tl.program_id(0) + channel.rank * tiles.rank_tiles(consumer)) % tl.num_programs(0)
    ready = tiles.consumer_tile_wait(channel, consumer, tile)
    low, _ = tiles.tile_rows(consumer, tile)
    owner = tiles.tile_rank(consumer, tile)
    there = find_places(low - owner * consumer.rows, consumer.tile_rows, BLOCK) + ready
    value = tiles.tile_pull_data(channel, buffer, there, owner)
    tl.store(out + find_places(low, consumer.tile_rows, BLOCK), value)


@triton.jit
def load_by_descriptor(channel, consumer, source, target, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy each tile between two descriptors' memory as soon as it has arrived; a program a tile."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    ready = tiles.consumer_tile_wait(channel, consumer, tile, before_tma=True)
    target.store([tile * ROWS, 0], source.load([tile * ROWS + ready, 0]))


@triton.jit
def load_by_polls(channel, consumer, source, target, count, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `load_by_descriptor`, tile after tile, each waited for by a poll."""
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        ready = tiles.consumer_tile_poll(channel, consumer, tile)
        target.store([tile * ROWS, 0], source.load([tile * ROWS + ready, 0]))
    tiles.finish_polls(channel, consumer)


@triton.jit
def store_and_count(x, stored, counter, threads, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """stored = x, tile after tile; every thread increments the tile's counter after its stores; a program a tile."""
    at = find_places(tl.program_id(0) * ROWS, ROWS, BLOCK)
    tl.store(stored + at, tl.load(x + at))
    tiles.producer_tile_count(counter, 1, threads)
