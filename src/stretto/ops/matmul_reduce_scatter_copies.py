# SPDX-License-Identifier: Apache-2.0
"""GEMM + reduce-scatter whose tiles copy engines push, while a kernel that stores locally multiplies the next tiles.

Like `gemm_reduce_scatter`, but no multiprocessor stores to another rank: those stores, all at the end of a tile,
delayed the next tile (docs/decisions/010). Three streams: the caller's has the product; a side stream the beginning of
the call and the copies; another one the sums, by small kernels, each as soon as its tiles have arrived.

`schedule_copies` says in which pieces tiles are pushed, and when; it depends on sizes alone, so that it is computed
once for them. The kernel (`_count_tile`) computes each tile's piece and counter from the same sizes, and
both must find the same numbers. An example: 2 ranks, 5 tiles per owner, 4 programs (a wave is 4 tiles), pieces of 2
tiles, owners in the order of ranks (is_shifted False). PieceSizes.number is 4: 3 pieces of up to 2 tiles, and one more
for the last wave.

    index                 0  1  2  3 |  4  5  6  7 |  8  9
    wave                  0  0  0  0 |  1  1  1  1 |  2  2    index // programs
    position              0  0  0  0    0  1  1  1    1  1    index // tiles_per_owner: of the owner, here its rank
    tile                  0  1  2  3    4  0  1  2    3  4    index % tiles_per_owner
    piece                 0  0  1  1    2  0  0  1    2  2    the last wave begins a new one
    counter on rank 0     0  0  1  1    2  4  4  5    6  6    position * number + piece
    counter on rank 1     0  0  1  1    2  4  4  5    -  -    own tiles of the last wave are not counted

Rank 0 pushes tiles 0-1, 2 and 3-4 to rank 1, when counters 4, 5 and 6 reach 2, 1 and 2 (times PieceSizes.threads), and
adds up its own tiles 0-1, 2-3 and 4 by counters 0, 1 and 2. Rank 1 pushes tiles 0-1, 2-3 and 4 to rank 0 by counters 0,
1 and 2, and adds up its own tiles 0-1 and 2 by counters 4 and 5; tiles 3 and 4 when the kernel has ended.
"""

import itertools
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto import tiles
from stretto.memory.gpus import leave_room_for_copies
from stretto.ops.config import KernelConfig
from stretto.ops.gemm import (
    TMA_BYTES,
    Blocks,
    GroupProduct,
    describe_gemm,
    describe_matrix,
    divide_up,
    halve,
    load_bias,
    multiply_tile,
    order_tiles,
    scale_tile,
    specialization_key,
    store_tile,
)
from stretto.ops.operator import CHANNELS, abandon, count_bytes, find_workspace
from stretto.ops.prediction import MAX_PIECES

_CONVERTED_BYTES = tl.constexpr(64 << 10)  # of shared memory, that a store by pointers takes to convert a tile's layout
_SHARED_BYTES = 224 << 10  # of a multiprocessor of sm_90, less what barriers take
_ADDED_ELEMENTS = tl.constexpr(2048)  # of each rank's sums, that a program loads at once
_ADDING_PROGRAMS = 2  # on a multiprocessor, beside one that multiplies
_ADDING = 1  # the index of the side stream of sums


def launch_scatter_by_copies(config: KernelConfig, product: GroupProduct, dtype: torch.dtype, world: int) -> None:
    """Multiply, push each piece as it is stored, and add up each piece of own tiles; partial sums are of `dtype`."""
    call = _CopyEngineScatter(config, product, dtype, world)
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
            tiles.rank_reset_counts(call.counters, world * call.pieces.number)
    except BaseException:
        abandon(product.group, channel)
        raise
    finally:  # also after a failed launch: the next call's copies must come after these
        tiles.join_copies(channel)
    if added < call.tiles_per_owner:
        call.add(added, call.tiles_per_owner)


def can_copy(world: int) -> bool:
    """True if there is anything to send, and a channel for each rank that receives."""
    return 1 < world <= CHANNELS


@lru_cache(maxsize=4096)
def map_owners(world: int) -> tiles.StaticMapping:
    """A channel of each rank for each owner, signalled when all tiles for that owner are pushed."""
    return tiles.shard_tiles(world, world, 1, channels=world)


class _CopyEngineScatter:
    """One call: its operands and sizes, and its steps, which `launch_scatter_by_copies` puts on streams.

    partials: what the kernel stores and counts, tiles [world * tiles_per_owner, block_m, block_n] by owner in the
    schedule's order. received_at: offset of the buffer that peers push to, in bytes.
    """

    begun: tiles.Channel

    def __init__(self, config: KernelConfig, product: GroupProduct, dtype: torch.dtype, world: int) -> None:
        x, weight, bias, out, group, scales = product
        assert config.blocks is not None
        self.config, self.blocks, self.world = config, config.blocks, world
        self.bias, self.out, (rows, n) = bias, out, out.shape
        sizes = self.blocks.m, self.blocks.n
        self.tiles_per_owner = divide_up(rows, sizes[0]) * divide_up(n, sizes[1])
        size = count_bytes((world - 1) * self.tiles_per_owner, *sizes, dtype=dtype)
        workspace = find_workspace(group, x.device, size, "scattered copies")
        self.channel = workspace.channel
        self.received_at, self.slot = workspace.take_slot()
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
        self.own_partials = self.partials[self.schedule.own * self.tiles_per_owner :]

    def begin(self) -> None:
        """Begin the call; from then on peers may push to the receive buffer."""
        owners = map_owners(self.world)
        self.begun = self.channel.begin("matmul_reduce_scatter", owners, owners, "broadcast", slot=self.slot)

    def multiply(self) -> None:
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
        is_shifted, shape = self.config.is_shifted, self.partials.shape
        key = shape, self.partials.dtype, self.received_at, self.programs, self.pieces, is_shifted
        tiles.find_copies(self.channel, key, self._list_pushes).run(self.channel, self.partials)

    def _list_pushes(self) -> tiles.CopyList:
        rank, copies = self.channel.rank, tiles.CopyList(self.partials)
        for owner, position, pieces in self.schedule.push_order:
            here, there = position * self.tiles_per_owner, find_place(rank, owner, self.world) * self.tiles_per_owner
            received = self.find_received(owner)
            for piece in pieces:
                copies.await_count(self.counters, piece.counter, piece.target)
                rows = slice(here + piece.start, here + piece.stop)
                copies.copy(received, self.partials, rows=rows, to=there + piece.start)
            copies.notify(self.channel, rank * self.world + owner, owner)
        return copies

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
                self.own_partials,
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


class PieceSizes(NamedTuple):
    """Sizes of the pieces in which an owner's tiles are pushed or added up: `size` tiles each, up to `number` of them.

    The last wave of tiles begins a new piece, so that the tiles before it need not wait for it. threads: that count a
    tile.
    """

    number: Any
    size: Any
    threads: Any


@lru_cache(maxsize=4096)
def size_pieces(tiles_per_owner: int, tile_bytes: int, config: KernelConfig) -> PieceSizes:
    """The sizes of the pieces of `tiles_per_owner` tiles for each owner: of about the configuration's piece_bytes."""
    assert config.blocks is not None
    size = divide_up(
        tiles_per_owner, max(1, min(tiles_per_owner * tile_bytes // config.piece_bytes, MAX_PIECES, tiles_per_owner))
    )
    threads = 1 if tiles.INTERPRETED.value else 32 * config.blocks.num_warps
    return PieceSizes(divide_up(tiles_per_owner, size) + 1, size, threads)


class CopyPiece(NamedTuple):
    """Tiles `start` to `stop` - 1 of an owner, which are stored once counter number `counter` reaches `target`."""

    start: int
    stop: int
    counter: int
    target: int


class CopySchedule(NamedTuple):
    """The order in which pieces are pushed and added up.

    own: this rank's position in the order in which owners' tiles are multiplied. push_order: (owner, its position, its
    pieces) in that order. adds: pieces of own tiles, without those of the last wave, which are complete when the kernel
    ends.
    """

    own: int
    push_order: tuple[tuple[int, int, tuple[CopyPiece, ...]], ...]
    adds: tuple[CopyPiece, ...]


@lru_cache(maxsize=4096)
def schedule_copies(
    rank: int, world: int, tiles_per_owner: int, programs: int, pieces: PieceSizes, is_shifted: bool
) -> CopySchedule:
    """The schedule of a call with `tiles_per_owner` tiles for each owner, multiplied by so many programs."""

    def find_position(owner: int) -> int:
        return (owner - rank - 1) % world if is_shifted else owner

    def split_tiles(position: int) -> tuple[CopyPiece, ...]:
        last_wave = (world * tiles_per_owner - 1) // programs * programs
        split = min(max(last_wave - position * tiles_per_owner, 0), tiles_per_owner)
        starts = [*range(0, split, pieces.size), split]
        if split < tiles_per_owner and position != find_position(rank):
            starts.append(tiles_per_owner)
        return tuple(
            CopyPiece(start, stop, position * pieces.number + piece, (stop - start) * pieces.threads)
            for piece, (start, stop) in enumerate(itertools.pairwise(starts))
        )

    others = sorted(set(range(world)) - {rank}, key=find_position)
    push_order = tuple((owner, find_position(owner), split_tiles(find_position(owner))) for owner in others)
    return CopySchedule(find_position(rank), push_order, split_tiles(find_position(rank)))


def find_place(source: int, owner: int, world: int) -> int:
    """The source's place in an owner's receive buffer."""
    return (owner - source - 1) % world


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

    Pieces and counters are those of `schedule_copies`: the head of this file has a table of an example.
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


def count_store_parts(blocks: Blocks, loaded_size: int, stored_size: int) -> int:
    """The number of parts in which TMA stores a tile's columns, so that one fits besides the loads; 0: none.

    A part waits until TMA has read the part before it, so one part is the fastest. Sizes are an element's, in bytes.
    Blocks of up to four warps are made for two programs on a multiprocessor.
    """
    held = _SHARED_BYTES if blocks.num_warps > 4 else _SHARED_BYTES // 2
    loads = blocks.num_stages * (blocks.m + blocks.n) * blocks.k * loaded_size
    for parts in (1, 2, 4):  # four: of fp32 sums beside 16-bit operands
        fits = loads + blocks.m * blocks.n * stored_size // parts <= held
        if fits and blocks.n // parts * stored_size >= TMA_BYTES:
            return parts
    return 0


def fit_stages(blocks: Blocks, loaded_size: int, stored_size: int) -> int:
    """The stages of TMA loads that fit besides a store by pointers, which converts a tile, or half of a large one.

    At most the stages of `blocks`, and at least one. Sizes are an element's, in bytes.
    """
    converted = blocks.m * blocks.n * stored_size
    if converted > _CONVERTED_BYTES.value:  # as `goes_in_halves`
        converted //= 2
    most = (_SHARED_BYTES - converted) // ((blocks.m + blocks.n) * blocks.k * loaded_size)
    return max(1, min(blocks.num_stages, most))


@triton.jit
def goes_in_halves(gemm, dtype):  # type: ignore[no-untyped-def]
    """True if a store by pointers is split into halves, so that its buffer fits besides the loads' stages."""
    return gemm.block_m * gemm.block_n * dtype.primitive_bitwidth > 8 * _CONVERTED_BYTES


@triton.jit
def locate_owned(rank, world, gemm, rows, index, SHIFTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(owner, tile, row, column) of the index-th tile of partial sums: tile and place count among the owner's."""
    row_tiles, column_tiles = tl.cdiv(rows, gemm.block_m), tl.cdiv(gemm.n, gemm.block_n)
    owner = index // (row_tiles * column_tiles)
    if SHIFTED:
        owner = (rank + 1 + owner) % world
    tile = index % (row_tiles * column_tiles)
    row_tile, column_tile = order_tiles(tile, row_tiles, column_tiles, gemm.group_rows)
    return owner, tile, row_tile * gemm.block_m, column_tile * gemm.block_n


@triton.jit
def find_rows(gemm, staging, slot, within):  # type: ignore[no-untyped-def]
    """The address of row `within` of a staged tile, slot [block_m, block_n]."""
    return staging + (tl.cast(slot, tl.int64) * gemm.block_m + within) * gemm.block_n


@triton.jit
def load_rows(gemm, staging, slot, within, offsets):  # type: ignore[no-untyped-def]
    """Load rows of a staged tile from row `within` on, as fp32."""
    return tl.load(find_rows(gemm, staging, slot, within) + offsets).to(tl.float32)


@triton.jit
def store_rows(gemm, out, bias, total, row, column, rows):  # type: ignore[no-untyped-def]
    """Add the bias to sums of a tile's rows, and store those inside of out [rows, n]."""
    if bias is not None:
        total += load_bias(bias, column, gemm.n, gemm.block_n)
    rows_at = (row + tl.arange(0, total.shape[0]))[:, None]
    columns = (column + tl.arange(0, gemm.block_n))[None, :]
    mask = (rows_at < rows) & (columns < gemm.n)
    tl.store(out + rows_at.to(tl.int64) * gemm.n + columns, total.to(out.dtype.element_ty), mask=mask)
