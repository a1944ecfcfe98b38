"""GEMM + reduce-scatter whose tiles are pushed by copy engines, while a kernel that stores locally multiplies the next.

As `gemm_scatter`, but no multiprocessor stores to another rank: those stores, all at the end of a tile, held the next
tile's back (docs/decisions/010). On three streams: the product; the beginning of the call and the copies; and the sums,
by small kernels, each as soon as there is what it adds up.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto import tiles
from stretto.ops.copy_schedule import find_place, schedule_copies, size_pieces
from stretto.ops.gemm.config import KernelConfig
from stretto.ops.gemm.partial_sums import find_rows, locate_owned, store_rows
from stretto.ops.gemm.tile import (
    Scales,
    count_store_parts,
    describe_gemm,
    describe_matrix,
    divide_up,
    goes_in_halves,
    halve,
    multiply_tile,
    order_tiles,
    scale_tile,
    specialization_key,
    store_tile,
)
from stretto.ops.workspace import CHANNELS, abandon, count_bytes, find_workspace

_ADDED_ELEMENTS = tl.constexpr(2048)  # of each rank's sums, that a program loads at once
_ADDING_PROGRAMS = 2  # on a multiprocessor, beside one that multiplies
_ADDING = 1  # the side stream of sums


@lru_cache(maxsize=4096)
def map_owners(world: int) -> tiles.StaticMapping:
    """A channel of each rank for each owner, which is signalled when all tiles for it are pushed."""
    return tiles.shard_tiles(world, world, 1, channels=world)


def can_copy(world: int) -> bool:
    """Whether there is anything to send, and a channel for each who gets it."""
    return 1 < world <= CHANNELS


def launch_scatter_by_copies(
    plan: KernelConfig,
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
    call = _CopyEngineScatter(plan, x, weight, bias, out, dtype, group, world, scales)
    channel, added = call.channel, 0
    channel.check()
    try:
        with tiles.copy_engine(channel):
            call.begin()
        call.multiply()
        with tiles.copy_engine(channel, opens=False):
            call.push()
            tiles.open_lane(channel, _ADDING)
        with tiles.copy_engine(channel, lane=_ADDING, opens=False):
            for part in call.course.adds:
                tiles.rank_await_count(call.counters, part.counter, part.target)
                call.add(part.start, part.stop)
                added = part.stop
    except BaseException:
        abandon(group, channel)
        raise
    finally:  # also of a kernel that cannot be launched: the next call's copies come after these
        tiles.join_copies(channel)
    if added < call.count:
        call.add(added, call.count)


class _CopyEngineScatter:
    """A call's operands and sizes, and its steps.

    count: tiles of an owner. stored: what the kernel stores and counts, tiles [world * count, block_m, block_n] by
    owner in the course's order. pushed_at: where peers push to, in bytes from the buffer's beginning.
    """

    begun: tiles.Channel

    def __init__(
        self,
        plan: KernelConfig,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor,
        dtype: torch.dtype,
        group: str,
        world: int,
        scales: Scales | None,
    ) -> None:
        assert plan.blocks is not None
        self.plan, self.blocks, self.world = plan, plan.blocks, world
        self.bias, self.out, (rows, n) = bias, out, out.shape
        sizes = self.blocks.m, self.blocks.n
        self.count = divide_up(rows, sizes[0]) * divide_up(n, sizes[1])
        size = count_bytes((world - 1) * self.count, *sizes, dtype=dtype)
        workspace = find_workspace(group, x.device, size, "copied")
        self.channel, slot = workspace.channel, next(workspace.turns)
        self.slot = slot if workspace.slots == 2 else None
        self.pushed_at = slot * workspace.slot_bytes
        self.pieces = size_pieces(self.count, count_bytes(*sizes, dtype=dtype), plan)
        self.counters = workspace.arrivals
        self.stored = torch.empty(world * self.count, *sizes, dtype=dtype, device=x.device)
        self.gemm, self.a, self.b, _ = describe_gemm(x, weight, None, self.blocks, scales=scales)
        parts = count_store_parts(self.blocks, x.element_size(), dtype.itemsize)
        self.target: Any = self.stored
        if self.gemm.by_tma.value and parts:
            self.gemm = self.gemm._replace(stores_by_tma=tl.constexpr(True), out_parts=tl.constexpr(parts))
            self.target = describe_matrix(self.stored.view(-1, sizes[1]), (sizes[0], sizes[1] // parts))
        self.kind = dtype, specialization_key(plan, x, weight, self.gemm, bias, out)
        self.programs = min(self.blocks.programs, world * self.count)
        self.course = schedule_copies(self.channel.rank, world, self.count, self.programs, self.pieces, plan.is_shifted)

    def begin(self) -> None:
        """Begin the call; where peers push to is free from then on."""
        owners = map_owners(self.world)
        self.begun = self.channel.begin("matmul_reduce_scatter", owners, owners, "broadcast", slot=self.slot)

    def multiply(self) -> None:
        """Launch the product."""
        operands = self.gemm, self.a, self.b, self.target
        self.channel.launch(
            multiply_tiles,
            self.kind,
            self.programs,
            (
                self.channel.rank,
                self.pieces,
                self.counters,
                *operands,
                self.out.shape[0],
                self.world,
                self.plan.is_shifted,
            ),
            num_warps=self.blocks.num_warps,
            num_stages=self.blocks.num_stages,
        )

    def push(self) -> None:
        """Push the tiles for each other rank, piece by piece as the kernel has stored them, and tell it after the last.

        In the order in which they are multiplied, on one stream: several copies at once are slower.
        """
        rank = self.channel.rank
        for owner, position, parts in self.course.pushes:
            here, there = position * self.count, find_place(rank, owner, self.world) * self.count
            pushed = self.find_pushed(owner)
            for part in parts:
                tiles.rank_await_count(self.counters, part.counter, part.target)
                rows = slice(here + part.start, here + part.stop)
                tiles.rank_copy_data(pushed, self.stored, rows=rows, to=there + part.start)
            tiles.rank_notify(self.channel, rank * self.world + owner, owner)

    def add(self, start: int, stop: int) -> None:
        """Add up own tiles `start` to `stop` - 1; the first time, wait for what the others push."""
        height = max(1, _ADDED_ELEMENTS.value // self.blocks.n)
        most = self.blocks.programs * (1 if tiles.INTERPRETED.value else _ADDING_PROGRAMS)
        programs, waits = min(divide_up((stop - start) * self.blocks.m, height), most), start == 0
        self.channel.launch(
            add_tiles,
            (waits, self.kind),
            programs,
            (
                self.begun,
                map_owners(self.world),
                self.gemm,
                self.stored[self.course.own * self.count :],
                self.find_pushed(),
                self.out,
                self.bias,
                self.out.shape[0],
                start,
                stop,
                waits,
            ),
            num_warps=4,
        )

    def find_pushed(self, rank: int | None = None) -> Tensor:
        """Where others push to, at a rank, by default this one: [(world - 1) * count, block_m, block_n]."""
        sizes = (self.world - 1) * self.count, *self.stored.shape[1:]
        return self.channel.tensor(sizes, self.stored.dtype, offset=self.pushed_at, rank=rank)


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
        total = scale_tile(gemm, gemm.row_scales, total, owner * rows + row, column, gemm.m)
        before = index - programs
        is_early = (before >= 0) & (before + 2 * programs < WORLD * count)
        _count_tile(pieces, counters, gemm, before, is_early, count, own, WORLD)
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
        _count_tile(pieces, counters, gemm, index, index + 2 * programs >= WORLD * count, count, own, WORLD)


@triton.jit
def _store_columns(gemm, start, columns):  # type: ignore[no-untyped-def]
    """Store some columns of a tile, the first of them at `start`."""
    offsets = tl.arange(0, gemm.block_m)[:, None] * gemm.block_n + tl.arange(0, columns.shape[1])[None, :]
    tl.store(start + offsets, columns.to(start.dtype.element_ty))


@triton.jit
def _count_tile(pieces, counters, gemm, index, counts, count, own, WORLD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count the index-th tile, if `counts`, in its piece: see `schedule_copies`."""
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
    Waits: the first of a call's, for all that others push. It is launched when this rank has pushed all, so nobody
    waits for who waits for it.
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
