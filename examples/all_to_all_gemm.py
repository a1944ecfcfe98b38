# SPDX-License-Identifier: Apache-2.0
"""All-to-all + GEMM in one kernel, written with the tile-centric primitives (docs/tiles.md names the design).

Each rank has rows for every rank, as a mixture of experts has tokens, and multiplies the rows that it receives by its
own weight.

On GPUs:       torchrun --nproc-per-node 2 examples/all_to_all_gemm.py
Without them:  TRITON_INTERPRET=1 torchrun --nproc-per-node 2 examples/all_to_all_gemm.py
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from stretto import tiles


@triton.jit
def all_to_all_gemm(
    channel, sent, x, received, weight, out, rows, n, k, half,
    PUSHES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out [world * rows, n] = received @ weight.T, where received[r] are rank r's rows for this rank.

    Programs below PUSHES push x[r] to rank r, at index [this rank]. The others multiply rows in the order of their
    arrival: those of the previous rank first.
    Signals: a pushed tile of rows signals the rank that receives it. Waits: an output tile waits for its sender's rows.
    Reuse: two slots alternate by the call's number; every rank waits for rows of every other one (see `call_slot`).
    """
    received += tiles.call_slot(channel).to(tl.int64) * half
    row_tiles = tiles.rank_tiles(sent)  # of the rows from one rank to another
    if tl.program_id(0) < PUSHES:
        for index in range(tl.program_id(0), row_tiles * channel.world, PUSHES):
            to = (channel.rank + 1 + index // row_tiles) % channel.world
            tile = to * row_tiles + index % row_tiles
            low, high = tiles.tile_rows(sent, tile)
            at = low + tl.arange(0, BM)[:, None]
            place = (channel.rank - to) * rows + at  # rows of `to` become rows of this rank
            for start in range(0, k, BK):
                columns = start + tl.arange(0, BK)[None, :]
                inside = (at < high) & (columns < k)
                value = tl.load(x + at * k + columns, mask=inside)
                tiles.tile_push_data(channel, received, place * k + columns, value, rank=to, mask=inside)
            tiles.producer_tile_notify(channel, sent, tile, "p2p")
    else:
        columns_of_tiles = tl.cdiv(n, BN)
        for index in range(tl.program_id(0) - PUSHES, channel.world * row_tiles * columns_of_tiles,
                           tl.num_programs(0) - PUSHES):  # fmt: skip
            sender = (channel.rank + channel.world - 1 - index // (row_tiles * columns_of_tiles)) % channel.world
            row_tile = index // columns_of_tiles % row_tiles
            ready = tiles.consumer_tile_wait(channel, sent, channel.rank * row_tiles + row_tile, sender, producer=sent)
            at = row_tile * BM + tl.arange(0, BM)[:, None]
            columns = index % columns_of_tiles * BN + tl.arange(0, BN)[None, :]
            total = tl.zeros((BM, BN), tl.float32)
            for start in range(0, k, BK):
                ks = start + tl.arange(0, BK)
                offsets = (sender * rows + at) * k + ks[None, :] + ready
                a = tl.load(received + offsets, mask=(at < rows) & (ks[None, :] < k), other=0)
                b = tl.load(weight + columns * k + ks[:, None], mask=(columns < n) & (ks[:, None] < k), other=0)
                total = tl.dot(a, b, total)
            inside = (at < rows) & (columns < n)
            tl.store(out + (sender * rows + at) * n + columns, total.to(out.dtype.element_ty), mask=inside)
    tiles.end_call(channel, sent)


def launch(block_channel, x, received, weight, out, *, pushes=2, multiplies=6, bm=32, bn=32, bk=32):
    """Send x [world, rows, k] to the ranks, and multiply; received: symmetric, [2 slots, world, rows, k]."""
    world, rows, k = x.shape
    sent = tiles.shard_tiles(rows, world, bm, channels=2)
    channel = block_channel.enter("all_to_all_gemm", "p2p")
    sizes = (rows, weight.shape[0], k, received.numel() // 2, pushes, bm, bn, bk)
    all_to_all_gemm[(pushes + multiplies,)](channel, sent, x, received, weight, out, *sizes)


def main() -> None:
    on_gpu = not tiles.INTERPRETED.value
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    rows, n, k = (1024, 2048, 1024) if on_gpu else (40, 48, 32)
    device, dtype = (torch.device("cuda", rank), torch.bfloat16) if on_gpu else (torch.device("cpu"), torch.float32)
    if on_gpu:
        torch.cuda.set_device(device)
    weight = torch.randn(n, k, device=device, dtype=dtype)
    out = torch.empty(world * rows, n, device=device, dtype=dtype)
    sizes = {"pushes": 16, "multiplies": 116, "bm": 128, "bn": 128, "bk": 64} if on_gpu else {}
    with tiles.BlockChannel.allocate(
        channels=2 * world, data_bytes=2 * world * rows * k * dtype.itemsize, backend="cuda" if on_gpu else "host"
    ) as channel:
        received = channel.tensor((2, world, rows, k), dtype)
        for _ in range(3):
            x = torch.randn(world, rows, k, device=device, dtype=dtype)
            launch(channel, x, received, weight, out, **sizes)
        everyone = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(everyone, x)
        if on_gpu:
            torch.cuda.synchronize()
        channel.check()
        expected = torch.cat([other[rank] for other in everyone])
        error = (out.float() - (expected @ weight.T).float()).norm() / out.float().norm()
        print(f"rank {rank} of {world}: relative error {error.item():.1e}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
