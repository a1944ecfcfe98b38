# SPDX-License-Identifier: Apache-2.0
"""All-gather + GEMM in one kernel, written with the tile-centric primitives (docs/tiles.md explains it).

On GPUs:       torchrun --nproc-per-node 2 examples/all_gather_gemm.py
Without them:  TRITON_INTERPRET=1 torchrun --nproc-per-node 2 examples/all_gather_gemm.py
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from stretto import tiles


@triton.jit
def all_gather_gemm(
    channel, producer, consumer, x, gathered, weight, out, n, k, PUSHES: tl.constexpr, TILES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out [m, n] = gathered @ weight.T. Programs below PUSHES push this rank's x to all ranks, the others multiply.

    Signals: a pushed tile signals its channel at all ranks. Waits: an output tile waits for the channels of its rows.
    Reuse: `gathered` is overwritten only when all ranks have begun this call, and so have ended the previous one.
    """
    program = tl.program_id(0)
    if program < PUSHES:
        own = tiles.rank_tiles(producer)
        for index in range(program, own, PUSHES):
            tile = channel.rank * own + index
            low, high = tiles.tile_rows(producer, tile)
            rows = low + tl.arange(0, producer.tile_rows)[:, None]
            for start in range(0, k, BK):
                columns = start + tl.arange(0, BK)[None, :]
                inside = (rows < high) & (columns < k)
                value = tl.load(x + (rows - channel.rank * producer.rows) * k + columns, mask=inside)
                tiles.tile_push_data(channel, gathered, rows * k + columns, value, mask=inside, mode="broadcast")
            tiles.producer_tile_notify(channel, producer, tile, "broadcast")
    else:
        for index in range(program - PUSHES, TILES, tl.num_programs(0) - PUSHES):
            tile = (index + channel.rank * (TILES // channel.world)) % TILES  # own rows first: they arrive first
            low, high = tiles.tile_rows(consumer, tile)
            ready = tiles.consumer_tile_wait(channel, consumer, tile)
            rows = low + tl.arange(0, BM)[:, None]
            columns = tiles.tile_column(consumer, tile) * BN + tl.arange(0, BN)
            total = tl.zeros((BM, BN), tl.float32)
            for start in range(0, k, BK):
                ks = start + tl.arange(0, BK)
                a = tl.load(gathered + ready + rows * k + ks[None, :], mask=(rows < high) & (ks[None, :] < k), other=0)
                inside = (columns[None, :] < n) & (ks[:, None] < k)
                b = tl.load(weight + columns[None, :] * k + ks[:, None], mask=inside, other=0)
                total = tl.dot(a, b, total)
            inside = (rows < high) & (columns[None, :] < n)
            tl.store(out + rows * n + columns[None, :], total.to(out.dtype.element_ty), mask=inside)


def launch(block_channel, x, gathered, weight, out, *, pushes=2, multiplies=6, push_rows=16, bm=32, bn=32, bk=32):
    """Gather the ranks' x [m / world, k] into the symmetric tensor `gathered` [m, k], and multiply by weight [n, k]."""
    world, (rows, k), n = block_channel.world_size, x.shape, weight.shape[0]
    producer = tiles.shard_tiles(rows, world, push_rows, channels=2)
    columns = triton.cdiv(n, bn)
    consumer = tiles.whole_tiles(rows, world, bm, columns=columns, channels=2, channel_rows=producer.channel_rows)
    channel = block_channel.begin("all_gather_gemm", producer, consumer, "broadcast")
    sizes = (n, k, pushes, tiles.count_tiles(consumer), bm, bn, bk)
    all_gather_gemm[(pushes + multiplies,)](channel, producer, consumer, x, gathered, weight, out, *sizes)


def main() -> None:
    on_gpu = not tiles.INTERPRETED.value
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    rows, n, k = (1024, 2048, 1024) if on_gpu else (40, 48, 32)
    device, dtype = (torch.device("cuda", rank), torch.bfloat16) if on_gpu else (torch.device("cpu"), torch.float32)
    if on_gpu:
        torch.cuda.set_device(device)
    x, weight = torch.randn(rows, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
    out = torch.empty(rows * world, n, device=device, dtype=dtype)
    sizes = {"pushes": 16, "multiplies": 116, "push_rows": 64, "bm": 128, "bn": 128, "bk": 64} if on_gpu else {}
    with tiles.BlockChannel.allocate(
        channels=2 * world, data_bytes=rows * world * k * dtype.itemsize, backend="cuda" if on_gpu else "host"
    ) as channel:
        for _ in range(3):
            launch(channel, x, channel.tensor((rows * world, k), dtype), weight, out, **sizes)
        expected = torch.empty(rows * world, k, device=device, dtype=dtype)
        dist.all_gather(list(expected.chunk(world)), x)
        if on_gpu:
            torch.cuda.synchronize()
        channel.check()
        error = (out.float() - (expected @ weight.T).float()).norm() / out.float().norm()
        print(f"rank {rank} of {world}: relative error {error.item():.1e}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
