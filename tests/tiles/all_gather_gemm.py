"""All-gather + GEMM, written only with the primitives: the example of docs/tiles.md."""

import triton
import triton.language as tl

from stretto import tiles
from stretto.tiles import consumer_tile_wait, producer_tile_notify, rank_tiles, tile_column, tile_push_data, tile_rows


@triton.jit
def all_gather_gemm(
    channel, producer, consumer, x, gathered, weight, out, n, k, PUSHES: tl.constexpr, TILES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out [m, n] = gathered @ weight.T. Programs below PUSHES push this rank's x to all ranks, the others multiply.

    Signals: a pushed tile's channel, at all ranks. Waits: an output tile for the channels of its rows.
    Reuse: `gathered` is written over only when all ranks have begun the call (begin).
    """
    program = tl.program_id(0)
    if program < PUSHES:
        own = rank_tiles(producer)
        for index in range(program, own, PUSHES):
            tile = channel.rank * own + index
            low, high = tile_rows(producer, tile)
            rows = low + tl.arange(0, producer.tile_rows)[:, None]
            for start in range(0, k, BK):
                columns = start + tl.arange(0, BK)[None, :]
                inside = (rows < high) & (columns < k)
                value = tl.load(x + (rows - channel.rank * producer.rows) * k + columns, mask=inside)
                tile_push_data(channel, gathered, rows * k + columns, value, mask=inside, mode="broadcast")
            producer_tile_notify(channel, producer, tile, "broadcast")
    else:
        for index in range(program - PUSHES, TILES, tl.num_programs(0) - PUSHES):
            tile = (index + channel.rank * (TILES // channel.world)) % TILES  # own rows first: they come first
            low, high = tile_rows(consumer, tile)
            ready = consumer_tile_wait(channel, consumer, tile)
            rows = low + tl.arange(0, BM)[:, None]
            columns = tile_column(consumer, tile) * BN + tl.arange(0, BN)
            total = tl.zeros((BM, BN), tl.float32)
            for start in range(0, k, BK):
                ks = start + tl.arange(0, BK)
                a = tl.load(gathered + ready + rows * k + ks[None, :], mask=(rows < high) & (ks[None, :] < k), other=0)
                inside = (columns[None, :] < n) & (ks[:, None] < k)
                b = tl.load(weight + columns[None, :] * k + ks[:, None], mask=inside, other=0)
                total = tl.dot(a, b, total)
            to = rows * n + columns[None, :]
            tl.store(out + to, total.to(out.dtype.element_ty), mask=(rows < high) & (columns[None, :] < n))


def launch(block_channel, x, gathered, weight, out, *, pushes=2, multiplies=6, push_rows=16, bm=32, bn=32, bk=32):
    """Gather the ranks' x [m / world, k] into `gathered` [m, k], symmetric, and multiply by weight [n, k]."""
    world, (rows, k), n = block_channel.world_size, x.shape, weight.shape[0]
    producer = tiles.shard_tiles(rows, world, push_rows, channels=2)
    consumer = tiles.whole_tiles(
        rows, world, bm, columns=triton.cdiv(n, bn), channels=2, channel_rows=producer.channel_rows
    )
    channel = block_channel.begin("all_gather_gemm", producer, consumer, "broadcast")
    count = tiles.count_tiles(consumer)
    all_gather_gemm[(pushes + multiplies,)](
        channel, producer, consumer, x, gathered, weight, out, n, k, pushes, count, bm, bn, bk
    )
