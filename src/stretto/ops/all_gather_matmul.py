"""All-gather + GEMM in one pass: copy engines push the ranks' rows while a persistent GEMM multiplies what is there.

Flux (paper 000, sections 3.3, 4.1 and 4.3), in tile-centric primitives (paper 004).
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from stretto import tiles
from stretto.ops.checks import find_name, require_operands
from stretto.ops.gemm import Blocks, choose_blocks, describe_gemm, load_bias, multiply_tile, order_tiles, store_tile
from stretto.ops.gradients import differentiate_gather, save_gather
from stretto.ops.workspace import count_bytes, find_group, find_workspace

PIECE_BYTES = 2 << 20
"""What a copy engine moves before it signals: small enough for first rows to come early, large enough to be fast."""

_MOST_PIECES = 8


def all_gather_matmul(
    x: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | None = None,
    saves_gathered: bool = True,
) -> Tensor:
    """The group's x, gathered along dim 0, times weight's transpose: [m / world, k], [n, k] -> [m, n].

    bf16, fp16 or fp32, all of one dtype; sums are fp32. bias: [n]. group: None for all ranks. x is of one shape on all
    ranks, and contiguous; weight is, or its transpose. x's gradient is a `matmul_reduce_scatter`; weight's needs the
    gathered x, which is kept for it, or, with saves_gathered=False, gathered again in the backward pass. ValueError
    for other input and for a rank outside of the group; PeerError for a rank that does not come.
    """
    name = find_name(group)
    if saves_gathered and torch.is_grad_enabled() and weight.requires_grad:
        return torch.ops.stretto.all_gather_matmul_gathered(x, weight, bias, name)[0]
    return torch.ops.stretto.all_gather_matmul(x, weight, bias, name)


def all_gather_matmul_gathered(
    x: Tensor, weight: Tensor, group: dist.ProcessGroup | None = None, *, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `all_gather_matmul`; returns [m, n] and the gathered x [m, k] too."""
    return torch.ops.stretto.all_gather_matmul_gathered(x, weight, bias, find_name(group))


@torch.library.custom_op("stretto::all_gather_matmul", mutates_args=())
def _all_gather_matmul(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> Tensor:
    return _run(x, weight, bias, group, None)


@torch.library.custom_op("stretto::all_gather_matmul_gathered", mutates_args=())
def _all_gather_matmul_gathered(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> tuple[Tensor, Tensor]:
    gathered = x.new_empty(x.shape[0] * find_group(group).size(), x.shape[1])
    return _run(x, weight, bias, group, gathered), gathered


@_all_gather_matmul.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> Tensor:
    require_operands("all_gather_matmul", x, weight, bias)
    return x.new_empty(x.shape[0] * find_group(group).size(), weight.shape[0])


@_all_gather_matmul_gathered.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> tuple[Tensor, Tensor]:
    require_operands("all_gather_matmul", x, weight, bias)
    rows = x.shape[0] * find_group(group).size()
    return x.new_empty(rows, weight.shape[0]), x.new_empty(rows, x.shape[1])


for _operator in (_all_gather_matmul, _all_gather_matmul_gathered):
    _operator.register_autograd(differentiate_gather, setup_context=save_gather)


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, returned: Tensor | None) -> Tensor:
    """The product; `returned` [m, k] gets the gathered x."""
    require_operands("all_gather_matmul", x, weight, bias)
    (rows, k), n, world = x.shape, weight.shape[0], find_group(group).size()
    out = x.new_empty(rows * world, n)
    if rows == 0:
        return out
    blocks = choose_blocks(rows * world, x, weight)
    block_channel = find_workspace(group, x.device, count_bytes(rows * world, k, dtype=x.dtype))
    producer, consumer = map_rows(rows, world, blocks.m, x.stride(0) * x.element_size())
    channel = block_channel.begin("all_gather_matmul", producer, consumer, "broadcast")
    with tiles.copy_engine(block_channel):
        _push(block_channel, producer, x)
        if returned is not None:
            _copy_gathered(block_channel, producer, x, returned)
    gathered = block_channel.tensor((rows * world, k), x.dtype)
    launch(channel, consumer, gathered, weight, bias, out, blocks)
    tiles.join_copies(block_channel)
    return out


def map_rows(rows: int, world: int, block_m: int, row_bytes: int) -> tuple[tiles.StaticMapping, tiles.StaticMapping]:
    """Who pushes what, in pieces of about `PIECE_BYTES`, one a channel; and the rows of the GEMM's tiles."""
    pieces = max(1, min(rows * row_bytes // PIECE_BYTES, triton.cdiv(rows, block_m), _MOST_PIECES))
    producer = tiles.shard_tiles(rows, world, block_m, channels=pieces)
    return producer, tiles.whole_tiles(rows, world, block_m, channels=pieces, channel_rows=producer.channel_rows)


def _push(block_channel: tiles.BlockChannel, producer: tiles.StaticMapping, x: Tensor) -> None:
    """Push x to this rank, then to the one before it, and so on: each rank gets its next one's rows first.

    At any time every rank pushes to another one, and rows come in the order that tiles are multiplied in.
    """
    rank, world, (rows, k) = block_channel.rank, block_channel.world_size, x.shape
    for distance in range(world):
        peer = (rank - distance) % world
        there = block_channel.tensor((world, rows, k), x.dtype, rank=peer)[rank]
        for piece, start in enumerate(range(0, rows, producer.channel_rows)):
            part = slice(start, start + producer.channel_rows)
            tiles.rank_copy_data(there[part], x[part])
            tiles.rank_notify(block_channel, rank * producer.channels.value + piece, peer)


def _copy_gathered(
    block_channel: tiles.BlockChannel, producer: tiles.StaticMapping, x: Tensor, returned: Tensor
) -> None:
    """Copy the gathered rows out of the workspace, which the next call writes over, beside the GEMM.

    A rank's pieces come in stream order, so the signal of its last one stands for all.
    """
    rank, world, (rows, k) = block_channel.rank, block_channel.world_size, x.shape
    shards = block_channel.tensor((world, rows, k), x.dtype)
    tiles.rank_copy_data(returned[rank * rows : (rank + 1) * rows], x)
    last = triton.cdiv(rows, producer.channel_rows) - 1
    for distance in range(1, world):
        peer = (rank + distance) % world
        tiles.rank_wait(block_channel, peer * producer.channels.value + last, peer)
        tiles.rank_copy_data(returned[peer * rows : (peer + 1) * rows], shards[peer])


def launch(
    channel: tiles.Channel,
    consumer: tiles.StaticMapping,
    gathered: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    blocks: Blocks,
) -> None:
    """Launch the GEMM of a call that has begun, on no more programs than there are tiles."""
    operands = describe_gemm(gathered, weight, out, blocks)
    count = triton.cdiv(out.shape[0], blocks.m) * triton.cdiv(out.shape[1], blocks.n)
    all_gather_gemm[(max(1, min(blocks.programs, count)),)](
        channel, consumer, *operands, bias, num_warps=blocks.num_warps, num_stages=blocks.num_stages
    )


@triton.jit
def all_gather_gemm(channel, consumer, gemm, gathered, weight, out, bias):  # type: ignore[no-untyped-def]
    """out [m, n] = gathered @ weight.T + bias, tile after tile as the gathered rows come; persistent.

    Order: tiles of this rank's rows first, then the next rank's and so on, as copy engines push them.
    Signals: none here; a copy engine's, after each piece of a shard, on its stream.
    Waits: at a tile's head, for the pieces that hold its rows. They depend on copy engines alone.
    Reuse: `gathered` is written over only when all ranks have begun the next call, and so ended this one.
    """
    row_tiles = tl.cdiv(gemm.m, gemm.block_m)
    column_tiles = tl.cdiv(gemm.n, gemm.block_n)
    first = tl.cdiv(channel.rank * consumer.rows, gemm.block_m)  # a tile with rows of two ranks is the earlier one's
    for index in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row_tile, column_tile = order_tiles(index, row_tiles, column_tiles, gemm.group_rows)
        row_tile = (row_tile + first) % row_tiles
        ready = tiles.consumer_tile_wait(channel, consumer, row_tile, before_tma=gemm.by_tma)
        row, column = row_tile * gemm.block_m, column_tile * gemm.block_n
        total = multiply_tile(gemm, gathered, weight, row, column, ready)
        if bias is not None:
            total += load_bias(bias, column, gemm.n, gemm.block_n)
        store_tile(gemm, out, total, row, column)
