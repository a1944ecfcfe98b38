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

    threads: that count up a tile's signal.
    """

    number: Any
    tiles: Any
    threads: Any

    def map_signals(self, world: int) -> tiles.StaticMapping:
        """A channel for each piece for each other rank, in the order they are multiplied; signalled by each thread."""
        others = world - 1
        rows = others * self.number * self.tiles * self.threads
        return tiles.shard_tiles(rows, world, 1, channels=others * self.number, channel_rows=self.tiles * self.threads)


@lru_cache(maxsize=4096)
def cut_pieces(count: int, world: int, tile_bytes: int, plan: Plan) -> Pieces:
    """How `count` tiles for each owner are pushed, in pieces of about the plan's piece_bytes."""
    assert plan.blocks is not None
    most = min(_MOST_PIECES, CHANNELS // (world - 1), count)
    size = triton.cdiv(count, max(1, min(count * tile_bytes // plan.piece_bytes, most)))
    threads = 1 if tiles.INTERPRETED.value else 32 * plan.blocks.num_warps
    return Pieces(triton.cdiv(count, size), size, threads)


def takes_copies(world: int) -> bool:
    """Whether there are signals for so many ranks, and anything to send."""
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
    pieces = cut_pieces(count, world, count_bytes(blocks.m, blocks.n, dtype=dtype), plan)
    signals = pieces.map_signals(world)
    stored = torch.empty(world * count, blocks.m, blocks.n, dtype=dtype, device=x.device)
    gemm, a, b, _ = describe_gemm(x, weight, None, blocks)
    parts = count_store_parts(blocks, x.element_size(), dtype.itemsize)
    target: Any = stored
    if gemm.by_tma.value and parts:
        gemm = gemm._replace(stores_by_tma=tl.constexpr(True), out_parts=tl.constexpr(parts))
        target = TensorDescriptor.from_tensor(stored.view(-1, blocks.n), [blocks.m, blocks.n // parts])
    try:
        with tiles.copy_engine(block_channel):
            turn = slot if workspace.slots == 2 else None
            channel = block_channel.begin("matmul_reduce_scatter", signals, signals, "broadcast", slot=turn)
        # A multiprocessor is left to the kernels that wait for pieces.
        programs = max(1, min(blocks.programs - 1, world * count))
        multiply_tiles[(programs,)](
            channel,
            signals,
            pieces,
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
            _push(workspace, slot, pieces, stored, count, plan.is_shifted)
    finally:  # also of a kernel that cannot be launched: the next call's copies come after these
        tiles.join_copies(block_channel)
    pushed = block_channel.tensor(((world - 1) * count, blocks.m, blocks.n), dtype, offset=slot * workspace.slot_bytes)
    adding = triton.cdiv(count * blocks.m * blocks.n, _ADDED_ELEMENTS.value)
    adding = min(adding, (1 if tiles.INTERPRETED.value else _ADDING_PROGRAMS) * blocks.programs)
    add_tiles[(adding,)](
        channel, signals, pieces, gemm, stored, pushed, out, bias, rows, SHIFTED=plan.is_shifted, num_warps=4
    )


def _push(workspace: Workspace, slot: int, pieces: Pieces, stored: Tensor, count: int, is_shifted: bool) -> None:
    """Push the tiles for each other rank, piece by piece as the kernel has stored them, and tell it at the end of all.

    In the order in which they are multiplied, on one stream: several copies at once are slower.
    """
    channel = workspace.channel
    rank, world = channel.rank, channel.world_size
    first = rank * (world - 1) * pieces.number
    for number in range(world - 1):
        owner = (rank + 1 + number) % world if is_shifted else number + (number >= rank)
        position = number if is_shifted else owner
        place = number if is_shifted else rank - (rank > owner)
        there = channel.tensor(
            (world - 1, count, *stored.shape[1:]), stored.dtype, offset=slot * workspace.slot_bytes, rank=owner
        )[place]
        here = stored[position * count : (position + 1) * count]
        for piece in range(pieces.number):
            index = first + number * pieces.number + piece
            part = slice(piece * pieces.tiles, (piece + 1) * pieces.tiles)
            tiles.rank_wait(channel, index, rank)
            tiles.rank_copy_data(there[part], here[part])
        tiles.rank_notify(channel, index, owner)


@triton.jit
def multiply_tiles(channel, signals, pieces, gemm, a, b, stored, rows, SHIFTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """stored [world * count, block_m, block_n] = tiles of a @ b.T, those of rank + 1 first, own ones last; persistent.

    Signals: each thread counts up the piece of a tile for another rank, when the tile after it is multiplied: its own
    stores are long done then, and a loop without barriers is flattened.
    Waits: for nothing, so a program without a place on the GPU delays, and no more.
    Reuse: `stored` is this call's own; the copies from it come before whatever follows on the caller's stream.
    """
    count = tl.cdiv(rows, gemm.block_m) * tl.cdiv(gemm.n, gemm.block_n)
    for index in tl.range(tl.program_id(0), channel.world * count, tl.num_programs(0), flatten=True):
        owner, _, row, column = locate_owned(channel, gemm, rows, index, SHIFTED)
        total = multiply_tile(gemm, a, b, owner * rows + row, column, 0)
        _count_tile(channel, signals, pieces, gemm, index - tl.num_programs(0), count, SHIFTED)
        if gemm.stores_by_tma:
            store_tile(gemm, stored, total, index * gemm.block_m, 0, 0)
        else:
            offsets = tl.arange(0, gemm.block_m)[:, None] * gemm.block_n + tl.arange(0, gemm.block_n)[None, :]
            start = stored + tl.cast(index, tl.int64) * (gemm.block_m * gemm.block_n)
            tl.store(start + offsets, total.to(stored.dtype.element_ty))
    last = channel.world * count - 1 - tl.program_id(0)
    last = tl.program_id(0) + last // tl.num_programs(0) * tl.num_programs(0)
    _count_tile(channel, signals, pieces, gemm, last, count, SHIFTED)


@triton.jit
def _count_tile(channel, signals, pieces, gemm, index, count, SHIFTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Signal the index-th tile, if there is one and it is for another rank; an owner's last stands for missing ones."""
    position = tl.maximum(index, 0) // count
    tile = tl.maximum(index, 0) - position * count
    own = channel.world - 1 if SHIFTED else channel.rank
    number = position - tl.cast(position > own, tl.int32)
    is_sent = (index >= 0) & (position != own)
    size = pieces.number * pieces.tiles
    times = tl.where(tile == count - 1, size - tile, 1)
    place = (channel.rank * (channel.world - 1) + tl.where(is_sent, number, 0)) * size + tile
    tiles.producer_tile_count(
        channel, signals, place * pieces.threads, tl.where(is_sent, times, 0), pieces.threads, gemm.stores_by_tma
    )


@triton.jit
def add_tiles(channel, signals, pieces, gemm, stored, pushed, out, bias, rows, SHIFTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """out [rows, n] = the sums, in rank order, of own tiles and what others have pushed, + bias.

    stored: as `multiply_tiles` has left it. pushed: [world - 1, count, block_m, block_n].

    Waits: for the last piece of each other rank, which copy engines push that wait for kernels before this one.
    Reuse: `pushed` is one of two slots, in turn, or the only one. Ranks push there only when all ranks have begun the
    call after the last one that used it, and so have ended that one (`begin`).
    """
    width: tl.constexpr = gemm.block_n
    height: tl.constexpr = max(1, min(gemm.block_m, _ADDED_ELEMENTS // width))
    parts: tl.constexpr = gemm.block_m // height
    row_tiles, column_tiles = tl.cdiv(rows, gemm.block_m), tl.cdiv(gemm.n, width)
    count = row_tiles * column_tiles
    size = pieces.number * pieces.tiles * pieces.threads
    ready = count * 0
    for distance in tl.static_range(1, channel.world):
        other = (channel.rank + distance) % channel.world
        number = _find_number(channel, other, channel.rank, SHIFTED)
        end = (other * (channel.world - 1) + number + 1) * size
        ready += tiles.consumer_tile_wait(channel, signals, end - 1)
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
    place = _find_number(channel, source, owner, SHIFTED) if SHIFTED else source - tl.cast(source > owner, tl.int32)
    return place
