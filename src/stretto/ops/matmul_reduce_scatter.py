"""GEMM + reduce-scatter in one launch: tiles of partial sums go to the rank that owns their rows, which adds them up.

Flux (paper 000, sections 3.2, 4.1 and 4.2), in tile-centric primitives (paper 004).
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from stretto import tiles
from stretto.ops.checks import find_name, require_operands
from stretto.ops.gemm import Blocks, choose_blocks, describe_gemm, load_bias, multiply_tile, order_tiles
from stretto.ops.gradients import differentiate_scatter, save_scatter
from stretto.ops.workspace import CHANNELS, count_bytes, find_group, find_workspace

_PART_ELEMENTS = 8192  # of a tile, that a program adds up at once


def matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    """x times weight's transpose, summed over the group; this rank's rows of it: [m, k], [n, k] -> [m / world, n].

    bf16, fp16 or fp32, all of one dtype. A rank's partial sums are fp32, travel in x's dtype or, if reduce_dtype is
    torch.float32, in that, are added in fp32 in rank order, and rounded. bias: [n], added once, by the row's owner; its
    gradient is of these rows. group: None for all ranks. x is contiguous; weight is, or its transpose. x's gradient is
    an `all_gather_matmul`, which gathers what weight's gradient needs. ValueError for other input (m that the group
    does not divide, say) and for a rank outside of the group; PeerError for a rank that does not come.
    """
    return torch.ops.stretto.matmul_reduce_scatter(x, weight, bias, find_name(group), reduce_dtype)


@torch.library.custom_op("stretto::matmul_reduce_scatter", mutates_args=())
def _matmul_reduce_scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, reduce_dtype: torch.dtype | None
) -> Tensor:
    rows, n, world = _require(x, weight, bias, group, reduce_dtype), weight.shape[0], find_group(group).size()
    out = x.new_empty(rows, n)
    if out.numel() == 0:
        return out
    blocks = choose_blocks(rows, x, weight, shards=world)
    dtype = reduce_dtype or x.dtype
    partials = map_tiles(rows, n, world, blocks)
    shape = (world, tiles.count_tiles(partials) // world, blocks.m * blocks.n)
    block_channel = find_workspace(group, x.device, count_bytes(*shape, dtype=dtype))
    channel = block_channel.begin("matmul_reduce_scatter", partials, partials, "p2p")
    launch(channel, partials, x, weight, bias, block_channel.tensor(shape, dtype), out, blocks)
    return out


@_matmul_reduce_scatter.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, reduce_dtype: torch.dtype | None) -> Tensor:
    return x.new_empty(_require(x, weight, bias, group, reduce_dtype), weight.shape[0])


_matmul_reduce_scatter.register_autograd(differentiate_scatter, setup_context=save_scatter)


def _require(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, reduce_dtype: torch.dtype | None) -> int:
    """This rank's number of rows. ValueError for what cannot be computed."""
    require_operands("matmul_reduce_scatter", x, weight, bias)
    world = find_group(group).size()
    if x.shape[0] % world:
        more = triton.cdiv(x.shape[0], world) * world
        raise ValueError(
            f"matmul_reduce_scatter: {world} ranks do not divide x's {x.shape[0]} rows: {more} rows will do"
        )
    if reduce_dtype not in (None, x.dtype, torch.float32):
        raise ValueError(
            f"matmul_reduce_scatter: partial sums of {x.dtype} travel in {x.dtype} or torch.float32, not {reduce_dtype}"
        )
    return x.shape[0] // world


def map_tiles(rows: int, n: int, world: int, blocks: Blocks) -> tiles.StaticMapping:
    """Signals of the tiles that make up each rank's rows: the mapping's "rows" are tiles, in the order of computing.

    So a channel is of tiles that are computed one after another, whatever rows and columns they have.
    """
    count = triton.cdiv(rows, blocks.m) * triton.cdiv(n, blocks.n)
    return tiles.shard_tiles(count, world, 1, channels=min(count, CHANNELS))


def launch(
    channel: tiles.Channel,
    partials: tiles.StaticMapping,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    staging: Tensor,
    out: Tensor,
    blocks: Blocks,
) -> None:
    """Launch the kernel of a call that has begun, on no more programs than there are tiles."""
    gemm, a, b, _ = describe_gemm(x, weight, None, blocks)
    programs = min(blocks.programs, tiles.count_tiles(partials))
    part_rows = max(1, min(blocks.m, _PART_ELEMENTS // blocks.n))
    gemm_reduce_scatter[(programs,)](
        channel,
        partials,
        gemm,
        a,
        b,
        staging,
        out,
        bias,
        out.shape[0],
        part_rows,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )


@triton.jit
def gemm_reduce_scatter(channel, partials, gemm, a, b, staging, out, bias, rows, PART_ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """out [rows, n]: this rank's rows of the sum over all ranks of a @ b.T, + bias; persistent.

    Order: tiles of the next rank's rows first, then of the one after, own last, so that no two ranks write to one at
    once; a program that has none left adds up parts of this rank's tiles, in rank order.
    Signals: after a tile's stores into its owner's staging, its channel at the owner ("p2p").
    Waits: before a rank's partial sums are added, for that rank's tiles of the channel. No program waits before it has
    stored and signalled all its tiles, and all of a launch are resident, so waits form no cycle.
    Reuse: staging is written over only when all ranks have begun the next call, and so ended this one.
    """
    column_tiles = tl.cdiv(gemm.n, gemm.block_n)
    row_tiles = tl.cdiv(rows, gemm.block_m)
    count = row_tiles * column_tiles
    for index in range(tl.program_id(0), count * channel.world, tl.num_programs(0)):
        owner = (channel.rank + 1 + index // count) % channel.world
        tile = index % count
        row_tile, column_tile = order_tiles(tile, row_tiles, column_tiles, gemm.group_rows)
        total = multiply_tile(gemm, a, b, owner * rows + row_tile * gemm.block_m, column_tile * gemm.block_n, 0)
        _push_tile(channel, gemm, staging, channel.rank * count + tile, total, owner, rows - row_tile * gemm.block_m)
        tiles.producer_tile_notify(channel, partials, owner * count + tile, "p2p")
    parts: tl.constexpr = gemm.block_m // PART_ROWS
    for index in range(tl.program_id(0), count * parts, tl.num_programs(0)):
        tile = index // parts
        row_tile, column_tile = order_tiles(tile, row_tiles, column_tiles, gemm.group_rows)
        within = index % parts * PART_ROWS
        if row_tile * gemm.block_m + within < rows:
            total = _add_part(channel, partials, gemm, staging, count, tile, within, PART_ROWS)
            if bias is not None:
                total += load_bias(bias, column_tile * gemm.block_n, gemm.n, gemm.block_n)
            at = (row_tile * gemm.block_m + within + tl.arange(0, PART_ROWS))[:, None]
            columns = (column_tile * gemm.block_n + tl.arange(0, gemm.block_n))[None, :]
            inside = (at < rows) & (columns < gemm.n)
            tl.store(out + at.to(tl.int64) * gemm.n + columns, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _push_tile(channel, gemm, staging, slot, total, owner, rows):  # type: ignore[no-untyped-def]
    """Store the first `rows` rows of a tile into slot [block_m, block_n] of its owner's staging."""
    at = tl.arange(0, gemm.block_m)[:, None]
    offsets = at * gemm.block_n + tl.arange(0, gemm.block_n)[None, :]
    start = staging + slot.to(tl.int64) * (gemm.block_m * gemm.block_n)
    value = total.to(staging.dtype.element_ty)
    tiles.tile_push_data(channel, start, offsets, value, rank=owner, mask=at < rows)


@triton.jit
def _add_part(channel, partials, gemm, staging, count, tile, within, PART_ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 [PART_ROWS, block_n]: the sum over the ranks, in their order, of rows from `within` on of an own tile."""
    total = tl.zeros((PART_ROWS, gemm.block_n), tl.float32)
    offsets = (within + tl.arange(0, PART_ROWS))[:, None] * gemm.block_n + tl.arange(0, gemm.block_n)[None, :]
    for source in range(channel.world):
        ready = tiles.consumer_tile_wait(channel, partials, channel.rank * count + tile, source=source)
        start = staging + (source * count + tile).to(tl.int64) * (gemm.block_m * gemm.block_n)
        total += tl.load(start + ready + offsets).to(tl.float32)
    return total
