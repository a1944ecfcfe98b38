# SPDX-License-Identifier: Apache-2.0
"""The highest of each row's numbers, of which each rank has a part of the columns: in two launches, four of several
ranks."""

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from stretto.ops.row_sums.kernel import sum_rows
from stretto.tiles import INTERPRETED
from stretto.tiles.launches import launch_cached

_PART = 2048  # columns of a program
_MOST = 1 << 24  # columns that fp32 numbers without a gap


def suits_kernels(scores: Tensor, columns: int) -> bool:
    """True if `find_best` runs here and takes these. columns: of all ranks, so that ranks decide alike."""
    runs = scores.is_cuda or INTERPRETED.value
    return runs and scores.dtype in (torch.bfloat16, torch.float16, torch.float32) and columns <= _MOST


def find_best(scores: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
    """The column of each row's highest number, of all ranks' columns, the first of equal ones: int64 [rows].

    scores: [rows, columns here], contiguous, of which this rank's begin at `first`; a row with NaN, or with nothing
    above -inf, has -1. Ranks send each other pairs of a number and a column, in fp32, by a sum to which each adds its
    own (`sum_rows`). Collective.
    """
    (rows, columns), world = scores.shape, group.size()
    parts = max(1, -(-columns // _PART))
    pairs = scores.new_empty(rows, 2 * parts, dtype=torch.float32)
    launch_cached(find_parts, rows * parts, scores, pairs, first, columns, parts, BLOCK=_PART, num_warps=8)
    best = torch.empty(rows, dtype=torch.int64, device=scores.device)
    if world > 1:
        sent = torch.empty(rows, 2 * world, dtype=torch.float32, device=scores.device)
        launch_cached(
            merge_parts, rows, pairs, sent, best, parts, group.rank(), world, BLOCK=_block_of(parts, world), num_warps=1
        )
        pairs, parts = sum_rows(sent, group.group_name), world
    launch_cached(merge_parts, rows, pairs, None, best, parts, 0, 1, BLOCK=_block_of(parts, 1), num_warps=1)
    return best


def _block_of(parts: int, world: int) -> int:
    return max(32, triton.next_power_of_2(max(parts, world)))


@triton.jit
def find_parts(scores, pairs, first, columns, parts, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """pairs[row, part] = (the highest number of a part of a row, its column), or (inf, -1) of one with NaN, before
    all others. Bytes: scores are read once.

    Synchronization: none: programs own their pairs.
    """
    row, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    column = part * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(scores + row * columns + column, mask=column < columns, other=float("-inf")).to(tl.float32)
    has_nan = tl.max((value != value).to(tl.int32), 0) != 0
    best = tl.where(has_nan, float("inf"), tl.max(value, 0))
    at = tl.min(tl.where(value == best, column, part * BLOCK + BLOCK), 0)
    place = pairs + (row * parts + part) * 2
    tl.store(place, best)
    tl.store(place + 1, tl.where(has_nan, -1.0, (first + at).to(tl.float32)))


@triton.jit
def merge_parts(pairs, sent, best, parts, rank, world, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """best[row] = the column of the highest of a row's pairs; with `sent`, the pair alone, at this rank's place of it.

    Other ranks' places get 0. Synchronization: none: programs own their rows.
    """
    row, index = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there = index < parts
    place = pairs + (row * parts + index) * 2
    value = tl.load(place, mask=there, other=float("-inf"))
    column = tl.load(place + 1, mask=there, other=float("inf"))
    highest = tl.max(value, 0)
    found = tl.min(tl.where(value == highest, column, float("inf")), 0)
    if sent is None:
        tl.store(best + row, tl.where(highest == float("-inf"), -1.0, found).to(tl.int64))
    else:
        is_own = index == rank
        target = sent + (row * world + index) * 2
        tl.store(target, tl.where(is_own, highest, 0.0), mask=index < world)
        tl.store(target + 1, tl.where(is_own, found, 0.0), mask=index < world)
