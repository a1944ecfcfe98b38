"""GEMM + reduce-scatter whose tiles are pushed by copy engines, while a kernel that stores locally multiplies the next.

As `gemm_scatter`, but no multiprocessor stores to another rank: those stores, all at the end of a tile, held the next
tile's back (docs/decisions/010). Three kernels: one begins the call, beside the product; the product; and the sums.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from stretto import tiles
from stretto.ops.gemm import count_store_parts, describe_gemm, multiply_tile, order_tiles, store_tile
from stretto.ops.partial_sums import find_rows, locate_owned, store_rows
from stretto.ops.plans import Plan
from stretto.ops.workspace import CHANNELS, Workspace, count_bytes, find_workspace

_MOST_PIECES = 8  # that an owner's tiles are pushed in
_ADDED_ELEMENTS = tl.constexpr(2048)  # of each rank's sums, that a program loads at once
_ADDING_PROGRAMS = 4  # on a multiprocessor


class Pieces(NamedTuple):
    """How a rank's tiles for one other rank are pushed: `number` pieces of `tiles` tiles, the last perhaps smaller.

    threads: that count a tile.
    """

    number: Any
    tiles: Any
    threads: Any


@lru_cache(maxsize=4096)
def cut_pieces(count: int, tile_bytes: int, plan: Plan) -> Pieces:
    """How `count` tiles for each owner are pushed, in pieces of about the plan's piece_bytes."""
    assert plan.blocks is not None
    size = triton.cdiv(count, max(1, min(count * tile_bytes // plan.piece_bytes, _MOST_PIECES, count)))
    threads = 1 if tiles.INTERPRETED.value else 32 * plan.blocks.num_warps
    return Pieces(triton.cdiv(count, size), size, threads)


@lru_cache(maxsize=4096)
def map_owners(world: int) -> tiles.StaticMapping:
    """A channel for each other rank, which is signalled when all tiles for it are pushed."""
    return tiles.shard_tiles(world - 1, world, 1, channels=world - 1)


def takes_copies(world: int) -> bool:
    """Whether there is anything to send, and a channel for each who gets it."""
    return 1 < world <= CHANNELS + 1


def launch_copied(
    plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, dtype: torch.dtype, group: str, world: int
) -> None:
    """Begin the call beside the product, push each piece as it is stored, and add up; partial sums are of `dtype`."""
    blocks, (rows, n) = plan.blocks, out.shape
    assert blocks is not None
    count = triton.cdiv(rows, blocks.m) * triton.cdiv(n, blocks.n)
    size = count_bytes((world - 1) * count, blocks.m, blocks.n, dtype=dtype)
    workspace = find_workspace(group, x.device, size, "copied")
    block_channel, slot = workspace.channel, next(workspace.turns)
    pieces, owners = cut_pieces(count, count_bytes(blocks.m, blocks.n, dtype=dtype), plan), map_owners(world)
    stored = torch.empty(world, count, blocks.m, blocks.n, dtype=dtype, device=x.device)
    counters = workspace.arrivals
    gemm, a, b, _ = describe_gemm(x, weight, None, blocks)
    parts = count_store_parts(blocks, x.element_size(), dtype.itemsize)
    target: Any = stored
    if gemm.by_tma.value and parts:
        gemm = gemm._replace(stores_by_tma=tl.constexpr(True), out_parts=tl.constexpr(parts))
        target = TensorDescriptor.from_tensor(stored.view(-1, blocks.n), [blocks.m, blocks.n // parts])
    try:
        with tiles.copy_engine(block_channel):
            turn = slot if workspace.slots == 2 else None
            channel = block_channel.begin("matmul_reduce_scatter", owners, owners, "broadcast", slot=turn)
        multiply_tiles[(min(blocks.programs, world * count),)](
            channel,
            pieces,
            counters,
            gemm,
            a,
            b,
            target,
            rows,
            SHIFTED=plan.is_shifted,
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
        )
        with tiles.copy_engine(block_channel, follows=False):
            _push(workspace, slot, pieces, counters, stored, plan.is_shifted)
    finally:  # also of a kernel that cannot be launched: the next call's copies come after these
        tiles.join_copies(block_channel)
    pushed = block_channel.tensor(((world - 1) * count, blocks.m, blocks.n), dtype, offset=slot * workspace.slot_bytes)
    adding = triton.cdiv(count * blocks.m * blocks.n, _ADDED_ELEMENTS.value)
    adding = min(adding, (1 if tiles.INTERPRETED.value else _ADDING_PROGRAMS) * blocks.programs)
    add_tiles[(adding,)](channel, owners, gemm, stored, pushed, out, bias, rows, SHIFTED=plan.is_shifted, num_warps=4)


def _push(workspace: Workspace, slot: int, pieces: Pieces, counters: Tensor, stored: Tensor, is_shifted: bool) -> None:
    """Push the tiles for each other rank, piece by piece as the kernel has stored them, and tell it at the end of all.

    In the order in which they are multiplied, on one stream: several copies at once are slower.
    """
    channel, (_, count, *sizes) = workspace.channel, stored.shape
    rank, world = channel.rank, channel.world_size
    for number in range(world - 1):
        owner = (rank + 1 + number) % world if is_shifted else number + (number >= rank)
        position = number if is_shifted else owner
        place = number if is_shifted else rank - (rank > owner)
        offset = slot * workspace.slot_bytes
        there = channel.tensor((world - 1, count, *sizes), stored.dtype, offset=offset, rank=owner)[place]
        for piece in range(pieces.number):
            part = slice(piece * pieces.tiles, min((piece + 1) * pieces.tiles, count))
            index = number * pieces.number + piece
            tiles.rank_await_count(counters[index : index + 1], (part.stop - part.start) * pieces.threads)
            tiles.rank_copy_data(there[part], stored[position, part])
        tiles.rank_notify(channel, rank * (world - 1) + number, owner)


@triton.jit
def multiply_tiles(channel, pieces, counters, gemm, a, b, stored, rows, SHIFTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """stored [world, count, block_m, block_n] = tiles of a @ b.T, those of rank + 1 first, own ones last; persistent.

    Signals: each thread counts a tile for another rank, without a barrier, so that the loop is flattened: when the tile
    after it has been multiplied, since its stores are done by then, but in the last two rounds at once.
    Waits: for nothing, so a program without a place on the GPU delays, and no more.
    Reuse: `stored` is this call's own; the copies from it come before whatever follows on the caller's stream.
    """
    count = tl.cdiv(rows, gemm.block_m) * tl.cdiv(gemm.n, gemm.block_n)
    total_tiles = channel.world * count
    programs = tl.num_programs(0)
    for index in tl.range(tl.program_id(0), total_tiles, programs, flatten=True):
        owner, _, row, column = locate_owned(channel, gemm, rows, index, SHIFTED)
        total = multiply_tile(gemm, a, b, owner * rows + row, column, 0)
        before = index - programs
        is_early = (before >= 0) & (before + 2 * programs < total_tiles)
        _count_tile(channel, pieces, counters, gemm, before, is_early, count, SHIFTED)
        if gemm.stores_by_tma:
            store_tile(gemm, stored, total, index * gemm.block_m, 0, 0)
        else:
            offsets = tl.arange(0, gemm.block_m)[:, None] * gemm.block_n + tl.arange(0, gemm.block_n)[None, :]
            start = stored + tl.cast(index, tl.int64) * (gemm.block_m * gemm.block_n)
            tl.store(start + offsets, total.to(stored.dtype.element_ty))
        _count_tile(channel, pieces, counters, gemm, index, index + 2 * programs >= total_tiles, count, SHIFTED)


@triton.jit
def _count_tile(channel, pieces, counters, gemm, index, counts, count, SHIFTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count the index-th tile, if `counts` and it is for another rank."""
    position = tl.maximum(index, 0) // count
    tile = tl.maximum(index, 0) - position * count
    own = channel.world - 1 if SHIFTED else channel.rank
    piece = (position - tl.cast(position > own, tl.int32)) * pieces.number + tile // pieces.tiles
    times = tl.cast(counts & (position != own), tl.int32)
    tiles.producer_tile_count(counters + piece * times, times, pieces.threads, after_tma=gemm.stores_by_tma)


@triton.jit
def add_tiles(channel, owners, gemm, stored, pushed, out, bias, rows, SHIFTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """out [rows, n] = the sums, in rank order, of own tiles and what others have pushed, + bias.

    stored: as `multiply_tiles` has left it. pushed: [world - 1, count, block_m, block_n].

    Waits: for all tiles of each other rank, which copy engines push that wait for kernels before this one.
    Reuse: `pushed` is one of two slots, in turn, or the only one. Ranks push there only when all ranks have begun the
    call after the last one that used it, and so have ended that one (`begin`).
    """
    width: tl.constexpr = gemm.block_n
    height: tl.constexpr = max(1, min(gemm.block_m, _ADDED_ELEMENTS // width))
    parts: tl.constexpr = gemm.block_m // height
    row_tiles, column_tiles = tl.cdiv(rows, gemm.block_m), tl.cdiv(gemm.n, width)
    count = row_tiles * column_tiles
    ready = count * 0
    for distance in tl.static_range(1, channel.world):
        other = (channel.rank + distance) % channel.world
        number = _find_number(channel, other, channel.rank, SHIFTED)
        ready += tiles.consumer_tile_wait(channel, owners, other * (channel.world - 1) + number)
    offsets = tl.arange(0, height)[:, None] * width + tl.arange(0, width)[None, :]
    own = (channel.world - 1 if SHIFTED else channel.rank) * count
    for part in range(tl.program_id(0), count * parts, tl.num_programs(0)):
        tile, within = part // parts, part % parts * height
        total = tl.zeros((height, width), tl.float32)
        for source in tl.static_range(channel.world):
            place = _find_place(channel, source, channel.rank, SHIFTED)  # too large for an own one, and not used
            there = find_rows(gemm, pushed + ready, place * count + tile, within)
            start = tl.where(source == channel.rank, find_rows(gemm, stored, own + tile, within), there)
            total += tl.load(start + offsets).to(tl.float32)
        row_tile, column_tile = order_tiles(tile, row_tiles, column_tiles, gemm.group_rows)
        row, column = row_tile * gemm.block_m + within, column_tile * width
        store_rows(gemm, out, bias, total, row, column, rows)


@triton.jit
def _find_number(channel, source, owner, SHIFTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which of the other ranks, in the source's order, the owner is."""
    if SHIFTED:
        number = (owner + channel.world - 1 - source) % channel.world
    else:
        number = owner - tl.cast(owner > source, tl.int32)
    return number


@triton.jit
def _find_place(channel, source, owner, SHIFTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the owner has what the source pushes: each other rank at a place of its own."""
    return _find_number(channel, source, owner, SHIFTED) if SHIFTED else source - tl.cast(source > owner, tl.int32)
