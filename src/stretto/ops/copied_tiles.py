"""GEMM + reduce-scatter whose tiles are pushed by copy engines, while a kernel that stores locally multiplies the next.

As `gemm_scatter`, but no multiprocessor stores to another rank: those stores, all at the end of a tile, held the next
tile's back (docs/decisions/010). On three streams: the product; the beginning of the call and the copies; and the sums,
by small kernels, each as soon as there is what it adds up.
"""

import itertools
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from stretto import tiles
from stretto.ops.gemm import (
    count_store_parts,
    describe_gemm,
    describe_kind,
    divide_up,
    multiply_tile,
    order_tiles,
    store_tile,
)
from stretto.ops.partial_sums import find_rows, locate_owned, store_rows
from stretto.ops.plans import Plan
from stretto.ops.workspace import CHANNELS, count_bytes, find_workspace

_MOST_PIECES = 8  # that an owner's tiles are cut into, but for the last round
_ADDED_ELEMENTS = tl.constexpr(2048)  # of each rank's sums, that a program loads at once
_ADDING_PROGRAMS = 2  # on a multiprocessor, beside one that multiplies
_ADDING = 1  # the side stream of sums


class Pieces(NamedTuple):
    """How an owner's tiles are pushed or added up: in pieces of `size` tiles, up to `number` of them.

    A new one begins with the last round of tiles, so that the others need not wait for that. threads: that count a
    tile.
    """

    number: Any
    size: Any
    threads: Any


@lru_cache(maxsize=4096)
def cut_pieces(count: int, tile_bytes: int, plan: Plan) -> Pieces:
    """How `count` tiles for each owner are pushed and added up, in pieces of about the plan's piece_bytes."""
    assert plan.blocks is not None
    size = divide_up(count, max(1, min(count * tile_bytes // plan.piece_bytes, _MOST_PIECES, count)))
    threads = 1 if tiles.INTERPRETED.value else 32 * plan.blocks.num_warps
    return Pieces(divide_up(count, size) + 1, size, threads)


@lru_cache(maxsize=4096)
def map_owners(world: int) -> tiles.StaticMapping:
    """A channel of each rank for each owner, which is signalled when all tiles for it are pushed."""
    return tiles.shard_tiles(world, world, 1, channels=world)


def takes_copies(world: int) -> bool:
    """Whether there is anything to send, and a channel for each who gets it."""
    return 1 < world <= CHANNELS


def launch_copied(
    plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, dtype: torch.dtype, group: str, world: int
) -> None:
    """Multiply, push each piece as it is stored, and add up each piece of own tiles; partial sums are of `dtype`."""
    blocks, (rows, n) = plan.blocks, out.shape
    assert blocks is not None
    count = divide_up(rows, blocks.m) * divide_up(n, blocks.n)
    size = count_bytes((world - 1) * count, blocks.m, blocks.n, dtype=dtype)
    workspace = find_workspace(group, x.device, size, "copied")
    channel, slot = workspace.channel, next(workspace.turns)
    pieces, owners = cut_pieces(count, count_bytes(blocks.m, blocks.n, dtype=dtype), plan), map_owners(world)
    stored = torch.empty(world, count, blocks.m, blocks.n, dtype=dtype, device=x.device)
    pushed = channel.tensor((world - 1, count, blocks.m, blocks.n), dtype, offset=slot * workspace.slot_bytes)
    gemm, a, b, _ = describe_gemm(x, weight, None, blocks)
    parts = count_store_parts(blocks, x.element_size(), dtype.itemsize)
    target: Any = stored
    if gemm.by_tma.value and parts:
        gemm = gemm._replace(stores_by_tma=tl.constexpr(True), out_parts=tl.constexpr(parts))
        target = TensorDescriptor.from_tensor(stored.view(-1, blocks.n), [blocks.m, blocks.n // parts])
    programs = min(blocks.programs, world * count)
    order = _Order(channel.rank, world, plan.is_shifted)
    own = order.position(channel.rank)
    work = _Work(pieces, workspace.arrivals, stored, (world * count - 1) // programs * programs, own)
    split = work.split(own)

    kind = dtype, describe_kind(plan, x, weight, gemm, bias, out)

    def add(part: slice) -> None:
        height = max(1, _ADDED_ELEMENTS.value // blocks.n)
        most = blocks.programs * (1 if tiles.INTERPRETED.value else _ADDING_PROGRAMS)
        programs, waits = min(divide_up((part.stop - part.start) * blocks.m, height), most), part.start == 0
        arguments = begun, owners, gemm, stored[own], pushed, out, bias, rows, part.start, part.stop, waits
        channel.launch(add_tiles, (waits, kind), programs, arguments, num_warps=4)

    try:
        with tiles.copy_engine(channel):
            turn = slot if workspace.slots == 2 else None
            begun = channel.begin("matmul_reduce_scatter", owners, owners, "broadcast", slot=turn)
        arguments = (
            channel.rank,
            pieces,
            workspace.arrivals,
            gemm,
            a,
            b,
            target,
            rows,
            world,
            plan.is_shifted,
        )
        channel.launch(
            multiply_tiles,
            kind,
            programs,
            arguments,
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
        )
        with tiles.copy_engine(channel, opens=False):
            _push(channel, order, work, slot * workspace.slot_bytes)
            tiles.open_lane(channel, _ADDING)
        with tiles.copy_engine(channel, lane=_ADDING, opens=False):
            for part in work.await_pieces(order.position(channel.rank)):
                add(part)
    finally:  # also of a kernel that cannot be launched: the next call's copies come after these
        tiles.join_copies(channel)
    if split < count:
        add(slice(split, count))


class _Order(NamedTuple):
    """In which order a rank multiplies the owners' tiles: from the next rank's on, own ones last, or by rank."""

    rank: int
    world: int
    is_shifted: bool

    def position(self, owner: int) -> int:
        """Which of all it is."""
        return (owner - self.rank - 1) % self.world if self.is_shifted else owner

    def others(self) -> Iterator[tuple[int, int]]:
        """(owner, which of its places is this rank's) of all others, in order."""
        for position in range(self.world):
            owner = (self.rank + 1 + position) % self.world if self.is_shifted else position
            if owner != self.rank:
                yield owner, find_place(self.rank, owner, self.world)


def find_place(source: int, owner: int, world: int) -> int:
    """Which of an owner's places for what others push is the source's."""
    return (owner - source - 1) % world


class _Work(NamedTuple):
    """What the kernel stores and counts: tiles [world, count, block_m, block_n], by owner in the order it has.

    last_round: the first tile of all of it. own: which owner's tiles are this rank's; those of the last round are not
    counted, since the kernel's end tells of them.
    """

    pieces: Pieces
    counters: Tensor
    stored: Tensor
    last_round: int
    own: int

    def split(self, position: int) -> int:
        """How many of an owner's tiles are not in the last round."""
        return min(max(self.last_round - position * self.stored.shape[1], 0), self.stored.shape[1])

    def await_pieces(self, position: int) -> Iterator[slice]:
        """Each piece's tiles that are counted, once the current stream waits until they are stored."""
        count, split = self.stored.shape[1], self.split(position)
        starts = [*range(0, split, self.pieces.size), split]
        if split < count and position != self.own:
            starts.append(count)
        for piece, (start, stop) in enumerate(itertools.pairwise(starts)):
            index = position * self.pieces.number + piece
            counter = self.counters[index : index + 1]
            tiles.rank_await_count(counter, (stop - start) * self.pieces.threads)
            yield slice(start, stop)


def _push(channel: tiles.BlockChannel, order: _Order, work: _Work, offset: int) -> None:
    """Push the tiles for each other rank, piece by piece as the kernel has stored them, and tell it at the end of all.

    In the order in which they are multiplied, on one stream: several copies at once are slower.
    """
    rank, (world, *sizes) = channel.rank, work.stored.shape
    for owner, place in order.others():
        there = channel.tensor((world - 1, *sizes), work.stored.dtype, offset=offset, rank=owner)[place]
        here = work.stored[order.position(owner)]
        for part in work.await_pieces(order.position(owner)):
            tiles.rank_copy_data(there[part], here[part])
        tiles.rank_notify(channel, rank * world + owner, owner)


@triton.jit
def multiply_tiles(  # type: ignore[no-untyped-def]
    rank, pieces, counters, gemm, a, b, stored, rows, WORLD: tl.constexpr, SHIFTED: tl.constexpr
):
    """stored [world, count, block_m, block_n] = tiles of a @ b.T, those of rank + 1 first, own ones last; persistent.

    Signals: each thread counts a tile, without a barrier, so that the loop is flattened: when the tile after it has
    been multiplied, since its stores are done by then, but in the last two rounds at once.
    Waits: for nothing, so a program without a place on the GPU delays, and no more.
    Reuse: `stored` is this call's own; what copies and adds it comes before whatever follows on the caller's stream.
    """
    count = tl.cdiv(rows, gemm.block_m) * tl.cdiv(gemm.n, gemm.block_n)
    programs = tl.num_programs(0)
    own = WORLD - 1 if SHIFTED else rank
    for index in tl.range(tl.program_id(0), WORLD * count, programs, flatten=True):
        owner, _, row, column = locate_owned(rank, WORLD, gemm, rows, index, SHIFTED)
        total = multiply_tile(gemm, a, b, owner * rows + row, column, 0)
        before = index - programs
        is_early = (before >= 0) & (before + 2 * programs < WORLD * count)
        _count_tile(pieces, counters, gemm, before, is_early, count, own, WORLD)
        if gemm.stores_by_tma:
            store_tile(gemm, stored, total, index * gemm.block_m, 0, 0)
        else:
            offsets = tl.arange(0, gemm.block_m)[:, None] * gemm.block_n + tl.arange(0, gemm.block_n)[None, :]
            start = stored + tl.cast(index, tl.int64) * (gemm.block_m * gemm.block_n)
            tl.store(start + offsets, total.to(stored.dtype.element_ty))
        _count_tile(pieces, counters, gemm, index, index + 2 * programs >= WORLD * count, count, own, WORLD)


@triton.jit
def _count_tile(pieces, counters, gemm, index, counts, count, own, WORLD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count the index-th tile, if `counts`, in its piece: see `_Work`."""
    index = tl.maximum(index, 0)
    position = index // count
    tile = index - position * count
    last_round = (WORLD * count - 1) // tl.num_programs(0) * tl.num_programs(0)
    split = tl.minimum(tl.maximum(last_round - position * count, 0), count)
    counts = counts & ((position != own) | (tile < split))
    piece = tl.where(tile < split, tile // pieces.size, tl.cdiv(split, pieces.size))
    counter = counters + position * pieces.number + piece
    tiles.producer_tile_count(counter, tl.cast(counts, tl.int32), pieces.threads, after_tma=gemm.stores_by_tma)


@triton.jit(do_not_specialize=["first", "last"])
def add_tiles(  # type: ignore[no-untyped-def]
    channel, owners, gemm, stored, pushed, out, bias, rows, first, last, WAITS: tl.constexpr
):
    """out [rows, n], of own tiles `first` to `last` - 1: the sums over the ranks, in their order, + bias.

    stored: own partial sums [count, block_m, block_n]; pushed: the others' [world - 1, count, block_m, block_n].
    Waits: the first of a call's, for all that others push. This rank has pushed all by then, or waits for no SM to do
    so, so nobody waits for who waits for it.
    Reuse: `pushed` is one of two slots, in turn, or the only one. Ranks push there only when all ranks have begun the
    call after the last one that used it, and so have ended that one (`begin`).
    """
    width: tl.constexpr = gemm.block_n
    height: tl.constexpr = max(1, min(gemm.block_m, _ADDED_ELEMENTS // width))
    parts: tl.constexpr = gemm.block_m // height
    row_tiles, column_tiles = tl.cdiv(rows, gemm.block_m), tl.cdiv(gemm.n, width)
    count = row_tiles * column_tiles
    offsets = tl.arange(0, height)[:, None] * width + tl.arange(0, width)[None, :]
    ready = count * 0
    if WAITS:
        for distance in tl.static_range(1, channel.world):
            other = (channel.rank + distance) % channel.world
            ready += tiles.consumer_tile_wait(channel, owners, other * channel.world + channel.rank)
    for part in range(first * parts + tl.program_id(0), last * parts, tl.num_programs(0)):
        tile, within = part // parts, part % parts * height
        total = tl.zeros((height, width), tl.float32)
        for source in tl.static_range(channel.world):
            place = (channel.rank + channel.world - 1 - source) % channel.world  # of an own one too large, and not used
            there = find_rows(gemm, pushed + ready, place * count + tile, within)
            start = tl.where(source == channel.rank, find_rows(gemm, stored, tile, within), there)
            total += tl.load(start + offsets).to(tl.float32)
        row_tile, column_tile = order_tiles(tile, row_tiles, column_tiles, gemm.group_rows)
        row, column = row_tile * gemm.block_m + within, column_tile * width
        store_rows(gemm, out, bias, total, row, column, rows)
