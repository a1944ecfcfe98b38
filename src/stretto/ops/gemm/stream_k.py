"""How tiles are dealt out to programs, and how those that share a tile of the last round add up what they have.

Stream-K's idea (a last round of tiles that would leave most programs without work is shared by steps over k), with
parts that are aligned: see `make_stream_k`.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.ops.gemm.tile import Blocks, divide_up, halve, is_even, multiply_tile, unite

_JOIN_STEPS = 20  # over k that a program could do while it joins its part of a tile with others'
_MOST_PARTS = 4  # that a tile of the last round is cut into
_LEAST_SAVED = 0.05  # of all rounds: programs without work leave their power to the others, which then are faster


class StreamK(NamedTuple):
    """How work is dealt out: the first `whole` tiles one by one, of the rest the steps over k in equal shares.

    Whole tiles in the last round would leave many programs without work. Steps are counted through all tiles, each of
    which has `tile` of them, the last ones of which may be none; a share is `steps`. sums, arrivals: see `fix_up`;
    sums is None where no parts are joined, and steps as well where all tiles are dealt out one by one.
    """

    whole: Any
    tile: Any
    steps: Any
    sums: Any
    arrivals: Any


DATA_PARALLEL = StreamK(0, 0, None, None, None)


def count_parts(count: int, k: int, blocks: Blocks) -> int:
    """Into how many parts, by steps over k, the tiles of the last round of `count` tiles are best cut; 1: into none."""
    parts = min(range(1, _MOST_PARTS + 1), key=lambda parts: _count_last(count, k, blocks, parts))
    saved = _count_last(count, k, blocks, 1) - _count_last(count, k, blocks, parts)
    return parts if saved > _LEAST_SAVED * divide_up(count, blocks.programs) else 1


def count_rounds(count: int, k: int, blocks: Blocks) -> float:
    """How long `count` tiles take, in rounds of whole ones."""
    return count // blocks.programs + _count_last(count, k, blocks, count_parts(count, k, blocks))


def _count_last(count: int, k: int, blocks: Blocks, parts: int) -> float:
    steps, rounds = divide_up(k, blocks.k), divide_up(count % blocks.programs * parts, blocks.programs)
    return rounds * divide_up(steps, parts) / steps + (_JOIN_STEPS / steps if parts > 1 else 0)


@lru_cache(maxsize=4096)
def split_last_round(count: int, k: int, blocks: Blocks, kept: int = 0) -> tuple[StreamK, int]:
    """How `count` tiles are dealt out, and in how many shares; the first `kept` stay whole.

    All parts of a round begin at one of few steps, so that what tiles have in common is loaded at one time: shares that
    follow each other without gaps were slower than whole tiles, since each loaded its columns of B by itself.
    """
    parts, rest = count_parts(count, k, blocks), count % blocks.programs
    if parts == 1 or not is_even(blocks) or count - rest < kept:
        return DATA_PARALLEL, count
    share = divide_up(divide_up(k, blocks.k), parts)
    return StreamK(count - rest, parts * share, share, None, None), count - rest + rest * parts


def make_stream_k(count: int, k: int, blocks: Blocks, arrivals: Tensor, kept: int = 0) -> tuple[StreamK, int]:
    """`split_last_round`, with the buffers of its fix-up; arrivals: int32 zeros on the operands' device."""
    shares, units = split_last_round(count, k, blocks, kept)
    if shares is DATA_PARALLEL or units - shares.whole > arrivals.numel():
        return DATA_PARALLEL, count
    places = units - shares.whole + count - shares.whole
    sums = torch.empty(places * blocks.m * blocks.n, dtype=torch.float32, device=arrivals.device)
    return shares._replace(sums=sums, arrivals=arrivals), units


@triton.jit
def count_steps(gemm, shares):  # type: ignore[no-untyped-def]
    """Steps over k that a tile is counted as."""
    return tl.cdiv(gemm.k, gemm.block_k) if shares.steps is None else shares.tile


@triton.jit
def count_units(shares, count):  # type: ignore[no-untyped-def]
    """In how many shares `make_stream_k` deals out `count` tiles."""
    return count if shares.steps is None else shares.whole + (count - shares.whole) * (shares.tile // shares.steps)


@triton.jit
def find_unit(gemm, shares, index, count):  # type: ignore[no-untyped-def]
    """(begin, end) of the index-th share of `count` tiles' steps over k; nothing behind the last one."""
    steps = count_steps(gemm, shares)
    begin = index * steps
    end = begin + steps
    if shares.steps is not None:
        behind = index - shares.whole
        begin = tl.where(behind < 0, begin, shares.whole * steps + behind * shares.steps)
        end = begin + tl.where(behind < 0, steps, shares.steps)
    return begin, tl.minimum(end, count * steps)


@triton.jit
def multiply_unit(gemm, shares, a, b, row, column, ready, begin, end):  # type: ignore[no-untyped-def]
    """(the tile, as `multiply_tile` has it; whether this program goes on with it; where the share's next tile begins).

    The steps from `begin` on that are of its tile, up to `end`. Of the programs that have steps of a tile the one that
    ends last goes on with it. Nobody waits for another.
    """
    steps = count_steps(gemm, shares)
    if shares.sums is None:
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
            rest = tile - shares.whole
            low = rest * steps // shares.steps
            high = ((rest + 1) * steps - 1) // shares.steps
            own = (begin - shares.whole * steps) // shares.steps
            # A share and the next one have one tile in common at most: a tile's and a share's numbers make a place.
            total, is_mine = fix_up(
                gemm, shares.sums, shares.arrivals + low, total, rest + low, rest + own, rest + high
            )
        begin += last - first
    return total, is_mine, begin


@triton.jit
def fix_up(gemm, sums, arrivals, total, first, own, last):  # type: ignore[no-untyped-def]
    """Add up what the programs that share a tile have: (the sum, True) to whichever comes last, (any, False) to others.

    sums: fp32 [places, block_m, block_n]; this program's part goes to place `own`, and all from `first` to `last` are
    added in that order, so that bits do not depend on who comes last. arrivals: a counter, 0 before and after.
    """
    _store_sum(gemm, sums, total, own)
    tl.debug_barrier()
    is_last = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == last - first
    if is_last:
        total = _add_sums(gemm, sums, first, last)
        tl.store(arrivals, 0)
    return total, is_last


@triton.jit
def _store_sum(gemm, sums, total, place):  # type: ignore[no-untyped-def]
    # In quarters, as in `_add_sums`: a whole wide tile would take its size again of registers.
    if gemm.block_n >= 128:
        left, right = halve(total)
        quarters = halve(left) + halve(right)
        for quarter in tl.static_range(4):
            tl.store(sums + _find_slice(gemm, place, quarter, 4), quarters[quarter])
    else:
        tl.store(sums + _find_slice(gemm, place, 0, 1), total)


@triton.jit
def _add_sums(gemm, sums, first, last):  # type: ignore[no-untyped-def]
    if gemm.block_n >= 128:
        left = unite(_add_slice(gemm, sums, first, last, 0, 4), _add_slice(gemm, sums, first, last, 1, 4))
        right = unite(_add_slice(gemm, sums, first, last, 2, 4), _add_slice(gemm, sums, first, last, 3, 4))
        total = unite(left, right)
    else:
        total = _add_slice(gemm, sums, first, last, 0, 1)
    return total


@triton.jit
def _add_slice(gemm, sums, first, last, index: tl.constexpr, slices: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros((gemm.block_m, gemm.block_n // slices), tl.float32)
    for place in range(first, last + 1):
        total += tl.load(sums + _find_slice(gemm, place, index, slices))
    return total


@triton.jit
def _find_slice(gemm, place, index: tl.constexpr, slices: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the index-th of `slices` parts of a place's columns stands: one slice after another."""
    columns: tl.constexpr = gemm.block_n // slices
    start = (tl.cast(place, tl.int64) * slices + index) * (gemm.block_m * columns)
    return start + tl.arange(0, gemm.block_m)[:, None] * columns + tl.arange(0, columns)[None, :]
