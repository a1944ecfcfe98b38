# SPDX-License-Identifier: Apache-2.0
"""Compress and expand on GPUs: dense numbers to those that a mask has left, and back.

A program of the bitmap's kernels takes a block of BLOCK dense numbers: one byte of the bitmap is one row of eight. The
rank of a number, its place among those that are left, is the block's prefix sum, plus those in the rows before its own
(a scan over the block), plus those before it in its row (a scan within a thread). No program waits for another.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from stretto.tiles.launches import launch_kernel

BLOCK = 4096
"""Dense numbers of a program, and of one prefix sum: rows of eight."""
WARPS = 4
POSITIONS = 1024
"""Numbers of a program of the int32 index's kernels."""


class Range(NamedTuple):
    """Which of the numbers that are left take part: `first` to `last`, in dense blocks from `first_block` on.

    is_part: False if they are all, so that no rank need be compared. block: dense numbers of a prefix sum.
    """

    first: int
    last: int
    first_block: int
    blocks: int
    is_part: bool
    block: int = BLOCK


@triton.jit
def _ranks(bits, prefix, block, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of a block [ROWS, 8]: the places of its numbers, which are left (0 or 1), and the ranks of these.

    Synchronization: none; bitmap and prefix sums are read only.
    """
    rows = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    packed = tl.load(bits + rows).to(tl.int32)
    is_left = (packed[:, None] >> tl.arange(0, 8)[None, :]) & 1
    of_rows = tl.sum(is_left, axis=1)
    before = tl.load(prefix + block) + tl.cumsum(of_rows, axis=0) - of_rows
    ranks = before[:, None] + tl.cumsum(is_left, axis=1) - is_left
    places = rows[:, None] * 8 + tl.arange(0, 8)[None, :]
    return places, is_left != 0, ranks


@triton.jit
def _compress(  # type: ignore[no-untyped-def]
    dense,
    bits,
    prefix,
    out,
    size,
    first,
    last,
    first_block,
    ADDS: tl.constexpr,
    IS_PART: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the numbers of one block that are left to `out`, or add them to it.

    Synchronization: none. Each number of `out` is written by one program; the next kernel of the stream reads it.
    """
    places, there, ranks = _ranks(bits, prefix, first_block + tl.program_id(0), ROWS)
    # All are read, in order and 16 bytes at a time: of 16 neighbours, one memory sector, some number is left.
    values = tl.load(dense + places, mask=places < size, other=0)
    if IS_PART:
        there &= (ranks >= first) & (ranks < last)
        ranks -= first
    if ADDS:
        sums = values.to(tl.float32) + tl.load(out + ranks, mask=there, other=0).to(tl.float32)
        tl.store(out + ranks, sums.to(out.dtype.element_ty), mask=there)
    else:
        tl.store(out + ranks, values.to(out.dtype.element_ty), mask=there)


@triton.jit
def _expand(  # type: ignore[no-untyped-def]
    left,
    bits,
    prefix,
    dense,
    skip,
    failed,
    size,
    first,
    last,
    first_block,
    IS_PART: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write one block of dense numbers: those that are left, and zeros between them.

    Whole sectors are written: numbers one by one would have the memory read what lies between them first. While `skip`
    or `failed` is not 0, nothing is written.

    Synchronization: none. Each dense number is written by one program; the next kernel of the stream reads it.
    """
    places, is_left, ranks = _ranks(bits, prefix, first_block + tl.program_id(0), ROWS)
    there = places < size
    if IS_PART:
        is_asked = (ranks >= first) & (ranks < last)
        there &= is_asked | ~is_left
        is_left &= is_asked
        ranks -= first
    if skip is not None:
        there &= tl.load(skip) == 0
    if failed is not None:
        there &= tl.load(failed) == 0
    values = tl.load(left + ranks, mask=is_left & there, other=0)
    tl.store(dense + places, values.to(dense.dtype.element_ty), mask=there)


@triton.jit
def _compress_positions(dense, index, out, count, ADDS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the dense numbers at `index` to `out`, or add them to it.

    Synchronization: none. Each number of `out` is written by one program.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    values = tl.load(dense + tl.load(index + at, mask=there, other=0), mask=there, other=0)
    if ADDS:
        sums = values.to(tl.float32) + tl.load(out + at, mask=there, other=0).to(tl.float32)
        tl.store(out + at, sums.to(out.dtype.element_ty), mask=there)
    else:
        tl.store(out + at, values.to(out.dtype.element_ty), mask=there)


@triton.jit
def _expand_positions(left, index, dense, skip, failed, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the numbers that are left to their dense places. While `skip` or `failed` is not 0, nothing is written.

    Synchronization: none. Positions differ, so each dense number is written by at most one program.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    if skip is not None:
        there &= tl.load(skip) == 0
    if failed is not None:
        there &= tl.load(failed) == 0
    values = tl.load(left + at, mask=there, other=0)
    tl.store(dense + tl.load(index + at, mask=there, other=0), values.to(dense.dtype.element_ty), mask=there)


def launch_compress(
    dense: Tensor, bits: Tensor, prefix: Tensor, out: Tensor, part: Range, *, adds: bool, warps: int = WARPS
) -> None:
    """Compress `dense` [size] to `out` [part.last - part.first] by a bitmap with prefix sums; adds: to what it has."""
    if part.last == part.first:
        return
    launch_kernel(
        _compress,
        part.blocks,
        dense,
        bits,
        prefix,
        out,
        dense.numel(),
        part.first,
        part.last,
        part.first_block,
        ADDS=adds,
        IS_PART=part.is_part,
        ROWS=part.block // 8,
        num_warps=warps,
    )


def launch_expand(
    left: Tensor,
    bits: Tensor,
    prefix: Tensor,
    dense: Tensor,
    part: Range,
    *,
    skip: Tensor | None,
    failed: Tensor | None,
    warps: int = WARPS,
) -> None:
    """Expand `left` [part.last - part.first] into `dense` [size]. skip, failed: int32 [1], or None."""
    if not part.blocks:
        return
    launch_kernel(
        _expand,
        part.blocks,
        left,
        bits,
        prefix,
        dense,
        skip,
        failed,
        dense.numel(),
        part.first,
        part.last,
        part.first_block,
        IS_PART=part.is_part,
        ROWS=part.block // 8,
        num_warps=warps,
    )


def launch_compress_positions(dense: Tensor, index: Tensor, out: Tensor, *, adds: bool) -> None:
    """Compress `dense` to `out` by int32 positions, of as many numbers."""
    count = index.numel()
    if count:
        launch_kernel(
            _compress_positions, triton.cdiv(count, POSITIONS), dense, index, out, count, ADDS=adds, BLOCK=POSITIONS
        )


def launch_expand_positions(
    left: Tensor, index: Tensor, dense: Tensor, *, skip: Tensor | None, failed: Tensor | None
) -> None:
    """Write `left` to the int32 positions `index` of `dense`; all else of it is left as it is."""
    count = index.numel()
    if count:
        launch_kernel(
            _expand_positions,
            triton.cdiv(count, POSITIONS),
            left,
            index,
            dense,
            skip,
            failed,
            count,
            BLOCK=POSITIONS,
        )
