"""GEMM + reduce-scatter in one launch: tiles of partial sums go to the rank that owns their rows, which adds them up.

Flux (paper 000, sections 3.2, 4.1 and 4.2), in tile-centric primitives (paper 004).
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto import tiles
from stretto.ops import few_rows
from stretto.ops.gemm import Blocks, describe_gemm, halve, load_bias, multiply_tile, order_tiles
from stretto.ops.plans import Plan
from stretto.ops.shares import WHOLE, count_steps, find_share, multiply_part, share_tiles
from stretto.ops.workspace import CHANNELS, Workspace, count_bytes, find_group, find_workspace

_FEW_WAVES = 4
"""Up to so many tiles a program, the others wait for a tile that is signalled a whole tile later."""

_TWO_SLOTS_BYTES = 64 << 20
"""Calls with more to send use one slot and meet first, which then takes less time than memory."""


@lru_cache(maxsize=4096)
def map_tiles(rows: int, n: int, world: int, blocks: Blocks) -> tiles.StaticMapping:
    """Signals of the tiles that make up each rank's rows: the mapping's "rows" are tiles, in the order of computing.

    So a channel is of tiles that are computed one after another, whatever rows and columns they have.
    """
    count = triton.cdiv(rows, blocks.m) * triton.cdiv(n, blocks.n)
    return tiles.shard_tiles(count, world, 1, channels=min(triton.next_power_of_2(count), CHANNELS))


def launch_scatter(
    plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, dtype: torch.dtype, group: str
) -> None:
    """The call, in its only launch, or its second where more is sent than two slots are kept for."""
    blocks, (rows, n), world = plan.blocks, out.shape, find_group(group).size()
    assert blocks is not None
    if plan.exchange == "packets" and dtype == out.dtype:
        size = few_rows.count_bytes("scatter", x.shape[0], n, world, x.dtype)
        workspace = find_workspace(group, x.device, size, "packets")
        few_rows.launch("matmul_reduce_scatter", "scatter", workspace, x, weight, bias, out, blocks)
        return
    partials = map_tiles(rows, n, world, blocks)
    size = count_bytes(tiles.count_tiles(partials), blocks.m, blocks.n, dtype=dtype)
    workspace = find_workspace(group, x.device, size, "slots" if size <= _TWO_SLOTS_BYTES else "met")
    launch(workspace, plan, partials, x, weight, bias, out, dtype)


def launch(
    workspace: Workspace,
    plan: Plan,
    partials: tiles.StaticMapping,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    dtype: torch.dtype,
) -> None:
    """Begin the call and launch the kernel, on no more programs than there are tiles."""
    blocks, block_channel = plan.blocks, workspace.channel
    assert blocks is not None
    if workspace.slots == 1:
        channel = block_channel.begin("matmul_reduce_scatter", partials, partials, "p2p")
    else:
        channel = block_channel.enter("matmul_reduce_scatter", "p2p")
    gemm, a, b, _ = describe_gemm(x, weight, None, blocks)
    count = tiles.count_tiles(partials)
    shares, units = share_tiles(count, x.shape[1], blocks, workspace.arrivals)
    gemm_reduce_scatter[(min(blocks.programs, units),)](
        channel,
        partials,
        gemm,
        shares,
        a,
        b,
        block_channel.tensor((workspace.words(workspace.slots, dtype),), dtype),
        out,
        bias,
        out.shape[0],
        workspace.words(1, dtype),
        SHIFTED=plan.is_shifted,
        FLATTENED=plan.is_flattened and shares is WHOLE,
        DEFERS=count > _FEW_WAVES * blocks.programs,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )


@triton.jit
def gemm_reduce_scatter(  # type: ignore[no-untyped-def]
    channel, partials, gemm, shares, a, b, staging, out, bias, rows, half, SHIFTED: tl.constexpr,
    FLATTENED: tl.constexpr, DEFERS: tl.constexpr,
):  # fmt: skip
    """out [rows, n]: this rank's rows of the sum over all ranks of a @ b.T, + bias; persistent.

    Order: tiles of the next rank's rows first, then of the one after, own last, so that no two ranks write to one at
    once; who has time claims the next. The others' sums of an own tile are added to it while it is in registers. The
    last tiles may be cut into shares: whoever completes one goes on with it. FLATTENED: others' tiles are claimed in
    runs, half of what is left to a program at a time, and multiplied in a flattened loop, whose loads go on beside the
    stores; it may hold no signal.
    Signals: a tile that was stored into its owner's staging, at its channel there ("p2p"). DEFERS: when the program's
    next tile is multiplied: by then the stores have arrived, and nobody waits for them. With few tiles a program its
    owner would wait for that, which takes longer than the stores. Of a run: at its end.
    Waits: for the others' sums of an own tile. Tiles of other ranks come before own ones in every rank's order, no
    program waits before it has signalled its own, and claimed tiles are held by programs that run: no cycle.
    Reuse: two slots, by the call's number; every rank waits for every other rank's tiles, so see `call_slot`. Or one
    slot, which is written over only when all ranks have begun the call, and so ended the one before.
    """
    count = tl.cdiv(rows, gemm.block_m) * tl.cdiv(gemm.n, gemm.block_n)
    if channel.inside:
        staging += tiles.call_slot(channel).to(tl.int64) * half
    others = count * (channel.world - 1)
    stored = -1  # the tile that is stored and not signalled
    first, size = _claim_run(channel, others, FLATTENED)
    if FLATTENED:
        programs = tl.num_programs(0)
        while first < others:
            for index in tl.range(first, first + size * programs, programs, flatten=True):
                owner, tile, row, column = _locate(channel, gemm, rows, index, SHIFTED)
                total = multiply_tile(gemm, a, b, owner * rows + row, column, 0)
                _push_tile(channel, gemm, staging, channel.rank * count + tile, total, owner, rows - row)
            for index in range(first, first + size * programs, programs):
                owner, tile, _, _ = _locate(channel, gemm, rows, index, SHIFTED)
                tiles.producer_tile_notify(channel, partials, owner * count + tile, "p2p")
            first, size = _claim_run(channel, others, FLATTENED)
    begin, end = find_share(gemm, shares, first, others + count)
    while begin < end:
        index = begin // count_steps(gemm, shares)
        owner, tile, row, column = _locate(channel, gemm, rows, index, SHIFTED)
        total, is_complete, begin = multiply_part(gemm, shares, a, b, owner * rows + row, column, 0, begin, end)
        if DEFERS and stored >= 0:
            tiles.producer_tile_notify(channel, partials, stored, "p2p")
            stored = -1
        if is_complete:
            if owner == channel.rank:
                _add_others(channel, partials, gemm, staging, out, bias, total, count, tile, row, column, rows)
            else:
                _push_tile(channel, gemm, staging, channel.rank * count + tile, total, owner, rows - row)
            stored = owner * count + tile
            if not DEFERS:
                tiles.producer_tile_notify(channel, partials, stored, "p2p")
        if begin >= end:
            first, _ = _claim_run(channel, others, FLATTENED)
            begin, end = find_share(gemm, shares, first, others + count)
    if DEFERS and stored >= 0:
        tiles.producer_tile_notify(channel, partials, stored, "p2p")
    if channel.inside:
        tiles.end_call(channel, partials)


@triton.jit
def _claim_run(channel, others, FLATTENED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(first, how many) of the tiles that this program does next, each so many after the last as there are programs.

    FLATTENED: of the first `others` tiles half of what is left to a program at a time. No run has tiles of both kinds,
    so that no program holds another rank's tiles while it waits for its own.
    """
    first = tiles.claim(channel)
    size = 1
    if FLATTENED:
        programs = tl.num_programs(0)
        turn = first // programs
        left = others // programs
        size = (left + 1) // 2
        start = 0
        while (turn > 0) & (left > 0):
            start += size
            left -= size
            size = (left + 1) // 2
            turn -= 1
        # What does not come out even follows one by one, and so do own tiles.
        first = (start + turn) * programs + first % programs
        size = tl.maximum(size, 1)
    return first, size


@triton.jit
def _locate(channel, gemm, rows, index, SHIFTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(owner, tile, row, column) of the index-th tile: whose it is, which of its tiles, and where in its rows."""
    row_tiles, column_tiles = tl.cdiv(rows, gemm.block_m), tl.cdiv(gemm.n, gemm.block_n)
    owner = index // (row_tiles * column_tiles)
    if SHIFTED:
        owner = (channel.rank + 1 + owner) % channel.world
    else:  # rank 0's rows first on all ranks, but own ones last
        owner = tl.where(owner == channel.world - 1, channel.rank, owner + (owner >= channel.rank).to(tl.int32))
    tile = index % (row_tiles * column_tiles)
    row_tile, column_tile = order_tiles(tile, row_tiles, column_tiles, gemm.group_rows)
    return owner, tile, row_tile * gemm.block_m, column_tile * gemm.block_n


@triton.jit
def _push_tile(channel, gemm, staging, slot, total, owner, rows):  # type: ignore[no-untyped-def]
    """Store the first `rows` rows of a tile into slot [block_m, block_n] of its owner's staging."""
    at = tl.arange(0, gemm.block_m)[:, None]
    offsets = at * gemm.block_n + tl.arange(0, gemm.block_n)[None, :]
    start = staging + slot.to(tl.int64) * (gemm.block_m * gemm.block_n)
    value = total.to(staging.dtype.element_ty)
    tiles.tile_push_data(channel, start, offsets, value, rank=owner, mask=at < rows)


@triton.jit
def _add_others(channel, partials, gemm, staging, out, bias, total, count, tile, row, column, rows):  # type: ignore[no-untyped-def]
    """Add up an own tile, as it was multiplied and as the others have sent it, in rank order; store it."""
    ready = tile * 0
    for source in tl.static_range(channel.world):
        if source != channel.rank:
            own = channel.rank * count + tile
            ready += tiles.consumer_tile_wait(channel, partials, own, source=source, producer=partials)
    # In quarters: sums of a whole wide tile would take as many registers again as the tile has.
    left, right = halve(total)
    width: tl.constexpr = gemm.block_n // 4
    quarters = halve(left) + halve(right)
    for quarter in tl.static_range(4):
        start = staging + quarter * width + ready
        part = _add_in_order(channel, gemm, start, quarters[quarter], count, tile)
        at = column + quarter * width
        if bias is not None:
            part += load_bias(bias, at, gemm.n, width)
        rows_at = (row + tl.arange(0, gemm.block_m))[:, None]
        columns = (at + tl.arange(0, width))[None, :]
        inside = (rows_at < rows) & (columns < gemm.n)
        tl.store(out + rows_at.to(tl.int64) * gemm.n + columns, part.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_in_order(channel, gemm, start, own, count, tile):  # type: ignore[no-untyped-def]
    """fp32: the sum over the ranks, in their order, of part of a tile: `own`, and from `start` in each other's slot."""
    shape: tl.constexpr = own.shape
    total = tl.zeros(shape, tl.float32)
    offsets = tl.arange(0, shape[0])[:, None] * gemm.block_n + tl.arange(0, shape[1])[None, :]
    for source in tl.static_range(channel.world):
        # Loads that are left out, not branches: all of them are on their way at once.
        slot = (source * count + tile).to(tl.int64)
        others = (offsets >= 0) & (source != channel.rank)
        value = tl.load(start + slot * (gemm.block_m * gemm.block_n) + offsets, mask=others, other=0)
        value = tl.where(others, value, own.to(start.dtype.element_ty))  # its own as it would have travelled
        total += value.to(tl.float32)
    return total
