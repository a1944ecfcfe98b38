# SPDX-License-Identifier: Apache-2.0
"""Compress and expand on GPUs: dense numbers to those that a mask has left, and back.

A program of the bitmap's kernels takes a block of BLOCK dense numbers: one byte of the bitmap is one row of eight. The
rank of a number, its place among those that are left, is the block's prefix sum, plus those in the rows before its own
(a scan over the block), plus those before it in its row: all eight of these by one multiplication of nibbles. A thread
has one whole row, so that no number goes through shared memory and each costs about ten instructions, for which a
copy's bandwidth leaves time.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from stretto.tiles.launches import launch_kernel

BLOCK = 1024
"""Dense numbers of a program, and of one prefix sum: a row of eight for each of 128 threads."""
POSITIONS = 1024
"""Numbers of a program of the int32 index's kernels."""


class LeftRange(NamedTuple):
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
    """Of a block's rows: which of their eight numbers are left, the rank of the first of these, and how many of these
    are before each; the first and the last in eight nibbles of an int32.

    Synchronization: none; bitmap and prefix sums are read only.
    """
    is_left = tl.load(bits + block * ROWS + tl.arange(0, ROWS)).to(tl.int32)
    is_left = (is_left | (is_left << 12)) & 0x000F000F  # spread: bit j to nibble j
    is_left = (is_left | (is_left << 6)) & 0x03030303
    is_left = (is_left | (is_left << 3)) & 0x11111111
    before = is_left * 0x11111110  # nibble j of the product is the sum of those below it
    count = ((before >> 28) & 15) + ((is_left >> 28) & 1)
    first = tl.load(prefix + block) + tl.cumsum(count, axis=0) - count
    return is_left, first, before


@triton.jit
def _split_columns(values, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The eight columns of [ROWS, 8], which the thread that has a row has in its registers."""
    even, odd = tl.split(values.reshape(ROWS, 4, 2))
    of_0_4, of_2_6 = tl.split(even.reshape(ROWS, 2, 2))
    of_1_5, of_3_7 = tl.split(odd.reshape(ROWS, 2, 2))
    c0, c4 = tl.split(of_0_4)
    c1, c5 = tl.split(of_1_5)
    c2, c6 = tl.split(of_2_6)
    c3, c7 = tl.split(of_3_7)
    return c0, c1, c2, c3, c4, c5, c6, c7


@triton.jit
def _load_column(left, is_left, ranks, before, first, last, K: tl.constexpr, IS_PART: tl.constexpr):  # type: ignore[no-untyped-def]
    """What is left of number K of each row, and zeros."""
    there = ((is_left >> (4 * K)) & 1) != 0
    rank = ranks + ((before >> (4 * K)) & 15)
    if IS_PART:
        there &= (rank >= first) & (rank < last)
        rank -= first
    return tl.load(left + rank, mask=there, other=0)


@triton.jit
def _join_columns(first, last, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The reverse of `_split_columns`, of columns 0 to 3 and 4 to 7."""
    even = tl.join(tl.join(first[0], last[0]), tl.join(first[2], last[2]))
    odd = tl.join(tl.join(first[1], last[1]), tl.join(first[3], last[3]))
    return tl.join(even.reshape(ROWS, 4), odd.reshape(ROWS, 4)).reshape(ROWS, 8)


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
    block = (first_block + tl.program_id(0)).to(tl.int64)
    places = (block * ROWS + tl.arange(0, ROWS))[:, None] * 8 + tl.arange(0, 8)[None, :]
    # All are read, in order and 16 bytes at a time: of 16 neighbours, one memory sector, some number is left.
    values = tl.load(dense + places, mask=places < size, other=0)
    is_left, ranks, before = _ranks(bits, prefix, block, ROWS)
    columns = _split_columns(values, ROWS)
    if ADDS:  # all are loaded before any is stored, or each load would wait for the store before it
        sums = (
            _load_column(out, is_left, ranks, before, first, last, 0, IS_PART).to(tl.float32),
            _load_column(out, is_left, ranks, before, first, last, 1, IS_PART).to(tl.float32),
            _load_column(out, is_left, ranks, before, first, last, 2, IS_PART).to(tl.float32),
            _load_column(out, is_left, ranks, before, first, last, 3, IS_PART).to(tl.float32),
            _load_column(out, is_left, ranks, before, first, last, 4, IS_PART).to(tl.float32),
            _load_column(out, is_left, ranks, before, first, last, 5, IS_PART).to(tl.float32),
            _load_column(out, is_left, ranks, before, first, last, 6, IS_PART).to(tl.float32),
            _load_column(out, is_left, ranks, before, first, last, 7, IS_PART).to(tl.float32),
        )
    for k in tl.static_range(8):
        there = ((is_left >> (4 * k)) & 1) != 0
        rank = ranks + ((before >> (4 * k)) & 15)
        if IS_PART:
            there &= (rank >= first) & (rank < last)
            rank -= first
        value = columns[k]
        if ADDS:
            value = value.to(tl.float32) + sums[k]
        tl.store(out + rank, value.to(out.dtype.element_ty), mask=there)


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
    block = (first_block + tl.program_id(0)).to(tl.int64)
    is_left, ranks, before = _ranks(bits, prefix, block, ROWS)
    first_four = (
        _load_column(left, is_left, ranks, before, first, last, 0, IS_PART),
        _load_column(left, is_left, ranks, before, first, last, 1, IS_PART),
        _load_column(left, is_left, ranks, before, first, last, 2, IS_PART),
        _load_column(left, is_left, ranks, before, first, last, 3, IS_PART),
    )
    last_four = (
        _load_column(left, is_left, ranks, before, first, last, 4, IS_PART),
        _load_column(left, is_left, ranks, before, first, last, 5, IS_PART),
        _load_column(left, is_left, ranks, before, first, last, 6, IS_PART),
        _load_column(left, is_left, ranks, before, first, last, 7, IS_PART),
    )
    values = _join_columns(first_four, last_four, ROWS)
    places = (block * ROWS + tl.arange(0, ROWS))[:, None] * 8 + tl.arange(0, 8)[None, :]
    writes = places < size
    if IS_PART:  # other numbers of the block that are left may be another part's
        shift = 4 * tl.arange(0, 8)[None, :]
        all_ranks = ranks[:, None] + ((before[:, None] >> shift) & 15)
        writes &= (((is_left[:, None] >> shift) & 1) == 0) | ((all_ranks >= first) & (all_ranks < last))
    if skip is not None:
        writes &= tl.load(skip) == 0
    if failed is not None:
        writes &= tl.load(failed) == 0
    tl.store(dense + places, values.to(dense.dtype.element_ty), mask=writes)


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


def launch_compress(dense: Tensor, bits: Tensor, prefix: Tensor, out: Tensor, part: LeftRange, *, adds: bool) -> None:
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
        num_warps=part.block // 256,
    )


def launch_expand(
    left: Tensor,
    bits: Tensor,
    prefix: Tensor,
    dense: Tensor,
    part: LeftRange,
    *,
    skip: Tensor | None,
    failed: Tensor | None,
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
        num_warps=part.block // 256,
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
