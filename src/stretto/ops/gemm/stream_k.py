# SPDX-License-Identifier: Apache-2.0
"""Stream-K: tiles of the last wave are split over k, and their partial sums are added up by a fix-up.

A last wave of tiles that would leave most programs idle is split by steps over k into work units that are aligned: see
`split_last_wave`. A work unit is a whole tile, or some of a tile's steps.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.ops.gemm.config import Blocks, divide_up, has_power_of_two_columns
from stretto.ops.gemm.tile import halve, multiply_tile, unite

_FIX_UP_STEPS = 20  # over k that a program could multiply in the time of a fix-up
_MAX_SPLITS = 4  # work units of one tile
_MIN_SAVED = 0.05  # of all waves: idle programs leave their power to the others, which then are faster


class StreamK(NamedTuple):
    """How tiles are split into work units: the first `whole_tiles` are a unit each, the others `unit_steps` steps each.

    Steps over k are counted through all tiles, `tile_steps` a tile, the last ones of which may be none. partials,
    arrivals: buffers of the fix-up (see `fix_up`); partials is None where no fix-up is needed, and so is unit_steps
    where all tiles are whole (`DATA_PARALLEL`).
    """

    whole_tiles: Any
    tile_steps: Any
    unit_steps: Any
    partials: Any
    arrivals: Any


DATA_PARALLEL = StreamK(0, 0, None, None, None)
"""Every tile is one work unit."""


def count_splits(count: int, k: int, blocks: Blocks) -> int:
    """The best number of work units for each tile of the last wave of `count` tiles; 1: tiles are not split."""
    splits = min(range(1, _MAX_SPLITS + 1), key=lambda splits: _count_last(count, k, blocks, splits))
    saved = _count_last(count, k, blocks, 1) - _count_last(count, k, blocks, splits)
    return splits if saved > _MIN_SAVED * divide_up(count, blocks.programs) else 1


def count_waves(count: int, k: int, blocks: Blocks) -> float:
    """How long `count` tiles take, in waves of whole tiles."""
    return count // blocks.programs + _count_last(count, k, blocks, count_splits(count, k, blocks))


def _count_last(count: int, k: int, blocks: Blocks, splits: int) -> float:
    steps, waves = divide_up(k, blocks.k), divide_up(count % blocks.programs * splits, blocks.programs)
    return waves * divide_up(steps, splits) / steps + (_FIX_UP_STEPS / steps if splits > 1 else 0)


@lru_cache(maxsize=4096)
def split_last_wave(count: int, k: int, blocks: Blocks, kept: int = 0) -> tuple[StreamK, int]:
    """(how `count` tiles are split, the number of work units); the first `kept` tiles stay whole.

    All units of a wave begin at one of few steps, so that the operands that tiles share are loaded at one time. Units
    that follow each other without gaps, as in the paper, were slower than whole tiles, since each loaded its columns of
    B by itself.
    """
    splits, rest = count_splits(count, k, blocks), count % blocks.programs
    if splits == 1 or not has_power_of_two_columns(blocks) or count - rest < kept:
        return DATA_PARALLEL, count
    unit_steps = divide_up(divide_up(k, blocks.k), splits)
    return StreamK(count - rest, splits * unit_steps, unit_steps, None, None), count - rest + rest * splits


def make_stream_k(count: int, k: int, blocks: Blocks, arrivals: Tensor, kept: int = 0) -> tuple[StreamK, int]:
    """`split_last_wave`, with the buffers of its fix-up; arrivals: int32 zeros on the operands' device."""
    stream_k, units = split_last_wave(count, k, blocks, kept)
    if stream_k is DATA_PARALLEL or units - stream_k.whole_tiles > arrivals.numel():
        return DATA_PARALLEL, count
    places = units - stream_k.whole_tiles + count - stream_k.whole_tiles
    partials = torch.empty(places * blocks.m * blocks.n, dtype=torch.float32, device=arrivals.device)
    return stream_k._replace(partials=partials, arrivals=arrivals), units


@triton.jit
def count_steps(gemm, stream_k):  # type: ignore[no-untyped-def]
    """Steps over k that a tile is counted as."""
    return tl.cdiv(gemm.k, gemm.block_k) if stream_k.unit_steps is None else stream_k.tile_steps


@triton.jit
def count_units(stream_k, count):  # type: ignore[no-untyped-def]
    """The work units of `count` tiles."""
    if stream_k.unit_steps is None:
        units = count
    else:
        splits = stream_k.tile_steps // stream_k.unit_steps
        units = stream_k.whole_tiles + (count - stream_k.whole_tiles) * splits
    return units


@triton.jit
def find_unit(gemm, stream_k, index, count):  # type: ignore[no-untyped-def]
    """(begin, end) of the index-th work unit, in steps over k of `count` tiles; empty behind the last one."""
    steps = count_steps(gemm, stream_k)
    begin = index * steps
    end = begin + steps
    if stream_k.unit_steps is not None:
        behind = index - stream_k.whole_tiles
        begin = tl.where(behind < 0, begin, stream_k.whole_tiles * steps + behind * stream_k.unit_steps)
        end = begin + tl.where(behind < 0, steps, stream_k.unit_steps)
    return begin, tl.minimum(end, count * steps)


@triton.jit
def multiply_unit(gemm, stream_k, a, b, row, column, ready, begin, end):  # type: ignore[no-untyped-def]
    """Multiply the steps from `begin` to `end` that belong to begin's tile; no program waits for another.

    Returns (the tile, as `multiply_tile` has it; whether this program finishes the tile; where its next tile begins).
    Of the programs that share a tile, the one that arrives last adds up the partial sums and finishes it.
    """
    steps = count_steps(gemm, stream_k)
    if stream_k.partials is None:
        total = multiply_tile(gemm, a, b, row, column, ready)
        is_mine = True
        begin += steps
    else:
        tile = begin // steps
        first = begin - tile * steps
        last = tl.minimum(first + end - begin, steps)
        total = multiply_tile(gemm, a, b, row, column, ready, first, last)
        is_mine = last - first == steps
        if not is_mine:
            rest = tile - stream_k.whole_tiles
            low = rest * steps // stream_k.unit_steps
            high = ((rest + 1) * steps - 1) // stream_k.unit_steps
            own = (begin - stream_k.whole_tiles * steps) // stream_k.unit_steps
            # A unit and the next one have at most one tile in common: the two numbers add up to a unique place.
            total, is_mine = fix_up(
                gemm, stream_k.partials, stream_k.arrivals + low, total, rest + low, rest + own, rest + high
            )
        begin += last - first
    return total, is_mine, begin


@triton.jit
def fix_up(gemm, partials, arrivals, total, first, own, last):  # type: ignore[no-untyped-def]
    """Add up the partial sums of a tile: (the sum, True) for the program that arrives last, (any, False) for others.

    partials: fp32 [places, block_m, block_n]. This program's partial sum goes to place `own`, and those from `first` to
    `last` are added in that order, so that the result does not depend on which program arrives last. arrivals: a
    counter, 0 before and after.
    """
    _store_sum(gemm, partials, total, own)
    tl.debug_barrier()
    is_last = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == last - first
    if is_last:
        total = _add_sums(gemm, partials, first, last)
        tl.store(arrivals, 0)
    return total, is_last


@triton.jit
def _store_sum(gemm, partials, total, place):  # type: ignore[no-untyped-def]
    # In quarters, as in `_add_sums`: a whole wide tile would take its size again of registers.
    if gemm.block_n >= 128:
        left, right = halve(total)
        quarters = halve(left) + halve(right)
        for quarter in tl.static_range(4):
            tl.store(partials + _find_slice(gemm, place, quarter, 4), quarters[quarter])
    else:
        tl.store(partials + _find_slice(gemm, place, 0, 1), total)


@triton.jit
def _add_sums(gemm, partials, first, last):  # type: ignore[no-untyped-def]
    if gemm.block_n >= 128:
        left = unite(_add_slice(gemm, partials, first, last, 0, 4), _add_slice(gemm, partials, first, last, 1, 4))
        right = unite(_add_slice(gemm, partials, first, last, 2, 4), _add_slice(gemm, partials, first, last, 3, 4))
        total = unite(left, right)
    else:
        total = _add_slice(gemm, partials, first, last, 0, 1)
    return total


@triton.jit
def _add_slice(gemm, partials, first, last, index: tl.constexpr, slices: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros((gemm.block_m, gemm.block_n // slices), tl.float32)
    for place in range(first, last + 1):
        total += tl.load(partials + _find_slice(gemm, place, index, slices))
    return total


@triton.jit
def _find_slice(gemm, place, index: tl.constexpr, slices: tl.constexpr):  # type: ignore[no-untyped-def]
    """Addresses of the index-th of `slices` groups of columns of a place: one slice after another."""
    columns: tl.constexpr = gemm.block_n // slices
    start = (tl.cast(place, tl.int64) * slices + index) * (gemm.block_m * columns)
    return start + tl.arange(0, gemm.block_m)[:, None] * columns + tl.arange(0, columns)[None, :]
