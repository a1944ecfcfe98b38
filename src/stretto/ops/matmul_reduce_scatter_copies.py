# SPDX-License-Identifier: Apache-2.0
"""GEMM + reduce-scatter whose tiles copy engines push, while a kernel that stores locally multiplies the next tiles.

Like `gemm_reduce_scatter`, but no multiprocessor stores to another rank: those stores, all at the end of a tile,
delayed the next tile (docs/decisions/010). Three streams: the caller's has the product; a side stream the beginning of
the call and the copies; another one the sums, by small kernels, each as soon as its tiles have arrived.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto import tiles
from stretto.ops.copy_schedule import find_place, schedule_copies, size_pieces
from stretto.ops.gemm.config import KernelConfig, divide_up, leave_room_for_copies
from stretto.ops.gemm.tile import (
    Scales,
    count_store_parts,
    describe_gemm,
    describe_matrix,
    find_rows,
    goes_in_halves,
    halve,
    locate_owned,
    multiply_tile,
    order_tiles,
    scale_tile,
    specialization_key,
    store_rows,
    store_tile,
)
from stretto.ops.workspace import CHANNELS, abandon, count_bytes, find_workspace

_ADDED_ELEMENTS = tl.constexpr(2048)  # of each rank's sums, that a program loads at once
_ADDING_PROGRAMS = 2  # on a multiprocessor, beside one that multiplies
_ADDING = 1  # the index of the side stream of sums


@lru_cache(maxsize=4096)
def map_owners(world: int) -> tiles.StaticMapping:
    """A channel of each rank for each owner, signalled when all tiles for that owner are pushed."""
    return tiles.shard_tiles(world, world, 1, channels=world)


def can_copy(world: int) -> bool:
    """Whether there is anything to send, and a channel for each rank that receives."""
    return 1 < world <= CHANNELS


def launch_scatter_by_copies(
    config: KernelConfig,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    dtype: torch.dtype,
    group: str,
    world: int,
    scales: Scales | None = None,
) -> None:
    """Multiply, push each piece as it is stored, and add up each piece of own tiles; partial sums are of `dtype`.

    scales: of fp8 x and weight.
    """
    call = _CopyEngineScatter(config, x, weight, bias, out, dtype, group, world, scales)
    channel, added = call.channel, 0
    channel.check()
    try:
        with tiles.copy_engine(channel):
            call.begin()
        call.multiply()
        with tiles.copy_engine(channel, forks=False):
            call.push()
            tiles.open_side_stream(channel, _ADDING)
        with tiles.copy_engine(channel, stream_index=_ADDING, forks=False):
            for piece in call.schedule.adds:
                tiles.rank_await_count(call.counters, piece.counter, piece.target)
                call.add(piece.start, piece.stop)
                added = piece.stop
    except BaseException:
        abandon(group, channel)
        raise
    finally:  # also after a failed launch: the next call's copies must come after these
        tiles.join_copies(channel)
    if added < call.tiles_per_owner:
        call.add(added, call.tiles_per_owner)


class _CopyEngineScatter:
    """One call: its operands and sizes, and its steps, which `launch_scatter_by_copies` puts on streams.

    partials: what the kernel stores and counts, tiles [world * tiles_per_owner, block_m, block_n] by owner in the
    schedule's order. received_at: offset of the buffer that peers push to, in bytes.
    """

    begun: tiles.Channel

    def __init__(
        self,
        config: KernelConfig,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor,
        dtype: torch.dtype,
        group: str,
        world: int,
        scales: Scales | None,
    ) -> None:
        assert config.blocks is not None
        self.config, self.blocks, self.world = config, config.blocks, world
        self.bias, self.out, (rows, n) = bias, out, out.shape
        sizes = self.blocks.m, self.blocks.n
        self.tiles_per_owner = divide_up(rows, sizes[0]) * divide_up(n, sizes[1])
        size = count_bytes((world - 1) * self.tiles_per_owner, *sizes, dtype=dtype)
        workspace = find_workspace(group, x.device, size, "copy_engine")
        self.channel, slot = workspace.channel, next(workspace.slot_cycle)
        self.slot = slot if workspace.slots == 2 else None
        self.received_at = slot * workspace.slot_bytes
        self.pieces = size_pieces(self.tiles_per_owner, count_bytes(*sizes, dtype=dtype), config)
        self.counters = workspace.arrivals
        self.partials = torch.empty(world * self.tiles_per_owner, *sizes, dtype=dtype, device=x.device)
        self.gemm, self.a, self.b, _ = describe_gemm(x, weight, None, self.blocks, scales=scales)
        parts = count_store_parts(self.blocks, x.element_size(), dtype.itemsize)
        self.target: Any = self.partials
        if self.gemm.by_tma.value and parts:
            self.gemm = self.gemm._replace(stores_by_tma=tl.constexpr(True), out_parts=tl.constexpr(parts))
            self.target = describe_matrix(self.partials.view(-1, sizes[1]), (sizes[0], sizes[1] // parts))
        self.key = dtype, specialization_key(config, x, weight, self.gemm, bias, out)
        self.programs = min(self.blocks.programs, world * self.tiles_per_owner)
        rank, is_shifted = self.channel.rank, config.is_shifted
        self.schedule = schedule_copies(rank, world, self.tiles_per_owner, self.programs, self.pieces, is_shifted)

    def begin(self) -> None:
        """Begin the call; from then on peers may push to the receive buffer."""
        owners = map_owners(self.world)
        self.begun = self.channel.begin("matmul_reduce_scatter", owners, owners, "broadcast", slot=self.slot)

    def multiply(self) -> None:
        """Launch the product."""
        operands = self.gemm, self.a, self.b, self.target
        rank, rows, is_shifted = self.channel.rank, self.out.shape[0], self.config.is_shifted
        self.channel.launch(
            multiply_tiles,
            self.key,
            self.programs,
            (rank, self.pieces, self.counters, *operands, rows, self.world, is_shifted),
            num_warps=self.blocks.num_warps,
            num_stages=self.blocks.num_stages,
        )

    def push(self) -> None:
        """Push the tiles for each other rank, piece by piece as the kernel stores them; signal each rank at its end.

        In the order in which they are multiplied, on one stream: concurrent copies are slower.
        """
        rank = self.channel.rank
        for owner, position, pieces in self.schedule.push_order:
            here, there = position * self.tiles_per_owner, find_place(rank, owner, self.world) * self.tiles_per_owner
            received = self.find_received(owner)
            for piece in pieces:
                tiles.rank_await_count(self.counters, piece.counter, piece.target)
                rows = slice(here + piece.start, here + piece.stop)
                tiles.rank_copy_data(received, self.partials, rows=rows, to=there + piece.start)
            tiles.rank_notify(self.channel, rank * self.world + owner, owner)

    def add(self, start: int, stop: int) -> None:
        """Launch the sums of own tiles `start` to `stop` - 1; the first launch waits for the other ranks' pushes."""
        height = max(1, _ADDED_ELEMENTS.value // self.blocks.n)
        most = self.blocks.programs * (1 if tiles.INTERPRETED.value else _ADDING_PROGRAMS)
        most, waits = leave_room_for_copies(most, self.out.device), start == 0
        programs = min(divide_up((stop - start) * self.blocks.m, height), most)
        self.channel.launch(
            add_tiles,
            (waits, self.key),
            programs,
            (
                self.begun,
                map_owners(self.world),
                self.gemm,
                self.partials[self.schedule.own * self.tiles_per_owner :],
                self.find_received(),
                self.out,
                self.bias,
                self.out.shape[0],
                start,
                stop,
                waits,
            ),
            num_warps=4,
        )

    def find_received(self, rank: int | None = None) -> Tensor:
        """A rank's (by default this one's) receive buffer: [(world - 1) * tiles_per_owner, block_m, block_n]."""
        sizes = (self.world - 1) * self.tiles_per_owner, *self.partials.shape[1:]
        return self.channel.tensor(sizes, self.partials.dtype, offset=self.received_at, rank=rank)


@triton.jit
def multiply_tiles(  # type: ignore[no-untyped-def]
    rank, pieces, counters, gemm, a, b, stored, rows, WORLD: tl.constexpr, SHIFTED: tl.constexpr
):
    """stored [world, tiles_per_owner, block_m, block_n] = tiles of a @ b.T, rank + 1's first, own last; persistent.

    Signals: each thread counts a tile, without a barrier, so that the loop is flattened: when the tile after it has
    been multiplied, since its stores are done by then, but in the last two waves at once.
    Waits: none, so a program that is not yet scheduled delays the call, and no more.
    Reuse: `stored` is this call's own; copies and sums read it before whatever follows on the caller's stream.
    """
    tiles_per_owner = tl.cdiv(rows, gemm.block_m) * tl.cdiv(gemm.n, gemm.block_n)
    programs = tl.num_programs(0)
    own = WORLD - 1 if SHIFTED else rank
    for index in tl.range(tl.program_id(0), WORLD * tiles_per_owner, programs, flatten=True):
        owner, _, row, column = locate_owned(rank, WORLD, gemm, rows, index, SHIFTED)
        total = multiply_tile(gemm, a, b, owner * rows + row, column, 0)
        total = scale_tile(gemm, gemm.row_scales, total, owner * rows + row, column, gemm.m)
        before = index - programs
        is_early = (before >= 0) & (before + 2 * programs < WORLD * tiles_per_owner)
        _count_tile(pieces, counters, gemm, before, is_early, tiles_per_owner, own, WORLD)
        if gemm.stores_by_tma:
            store_tile(gemm, stored, total, index * gemm.block_m, 0, 0)
        else:
            start = stored + tl.cast(index, tl.int64) * (gemm.block_m * gemm.block_n)
            if goes_in_halves(gemm, stored.dtype.element_ty):
                left, right = halve(total)
                _store_columns(gemm, start, left)
                _store_columns(gemm, start + gemm.block_n // 2, right)
            else:
                _store_columns(gemm, start, total)
        _count_tile(
            pieces, counters, gemm, index, index + 2 * programs >= WORLD * tiles_per_owner, tiles_per_owner, own, WORLD
        )


@triton.jit
def _store_columns(gemm, start, columns):  # type: ignore[no-untyped-def]
    """Store some columns of a tile, the first of them at `start`."""
    offsets = tl.arange(0, gemm.block_m)[:, None] * gemm.block_n + tl.arange(0, columns.shape[1])[None, :]
    tl.store(start + offsets, columns.to(start.dtype.element_ty))


@triton.jit
def _count_tile(pieces, counters, gemm, index, should_count, tiles_per_owner, own, WORLD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count the index-th tile in its piece's counter, if `should_count`.

    Pieces and counters are those of `schedule_copies`: the head of copy_schedule.py has a table of an example.
    """
    index = tl.maximum(index, 0)
    position = index // tiles_per_owner
    tile = index - position * tiles_per_owner
    last_wave = (WORLD * tiles_per_owner - 1) // tl.num_programs(0) * tl.num_programs(0)
    split = tl.minimum(tl.maximum(last_wave - position * tiles_per_owner, 0), tiles_per_owner)
    should_count = should_count & ((position != own) | (tile < split))
    piece = tl.where(tile < split, tile // pieces.size, tl.cdiv(split, pieces.size))
    counter = counters + position * pieces.number + piece
    tiles.producer_tile_count(counter, tl.cast(should_count, tl.int32), pieces.threads, after_tma=gemm.stores_by_tma)


@triton.jit(do_not_specialize=["first", "last"])
def add_tiles(  # type: ignore[no-untyped-def]
    channel, owners, gemm, stored, received, out, bias, rows, first, last, WAITS: tl.constexpr
):
    """out [rows, n], of own tiles `first` to `last` - 1: the sums over the ranks, in their order, + bias.

    stored: own partial sums [tiles_per_owner, block_m, block_n]; received: the others' [world - 1, tiles_per_owner,
    block_m, block_n].
    Waits: the first launch of a call, for all tiles that others push. It is launched when this rank has pushed all of
    its own, so ranks do not wait for each other in a cycle.
    Reuse: `received` is one of two slots, in turn, or the only one. Ranks push there only when all ranks have begun the
    call after the last one that used it, and so have ended that one (`begin`).
    """
    width: tl.constexpr = gemm.block_n
    height: tl.constexpr = max(1, min(gemm.block_m, _ADDED_ELEMENTS // width))
    parts: tl.constexpr = gemm.block_m // height
    row_tiles, column_tiles = tl.cdiv(rows, gemm.block_m), tl.cdiv(gemm.n, width)
    tiles_per_owner = row_tiles * column_tiles
    offsets = tl.arange(0, height)[:, None] * width + tl.arange(0, width)[None, :]
    ready = tiles_per_owner * 0
    if WAITS:
        for distance in tl.static_range(1, channel.world):
            other = (channel.rank + distance) % channel.world
            ready += tiles.consumer_tile_wait(channel, owners, other * channel.world + channel.rank)
    for part in range(first * parts + tl.program_id(0), last * parts, tl.num_programs(0)):
        tile, within = part // parts, part % parts * height
        total = tl.zeros((height, width), tl.float32)
        for source in tl.static_range(channel.world):
            place = (channel.rank + channel.world - 1 - source) % channel.world  # unused if source is rank
            there = find_rows(gemm, received + ready, place * tiles_per_owner + tile, within)
            start = tl.where(source == channel.rank, find_rows(gemm, stored, tile, within), there)
            total += tl.load(start + offsets).to(tl.float32)
        row_tile, column_tile = order_tiles(tile, row_tiles, column_tiles, gemm.group_rows)
        row, column = row_tile * gemm.block_m + within, column_tile * width
        store_rows(gemm, out, bias, total, row, column, rows)
