# SPDX-License-Identifier: Apache-2.0
"""Compress and expand on GPUs: dense numbers to those that a mask has left, and back.

A warp takes 1,024 dense numbers, those of a prefix sum. Lane l loads word l of their bitmap and learns how many numbers
are left before it from a scan over the lanes, once for 32 numbers. Then the lanes take rows of eight numbers, 32 rows
at a time, which a lane loads or stores at once. A row's numbers that are left move to the front by four byte
permutations (`prmt`) whose selectors a table has for each of 256 rows: 5 instructions of the integer units a number,
where a copy's bandwidth leaves time for 9 (compiled for sm_90; a number by itself takes 13).
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.tiles.intrinsics import is_cuda
from stretto.tiles.launches import launch_kernel

BLOCK = 1024
"""Dense numbers of a warp, and of one prefix sum."""
WARPS = 1
"""Warps of a program, each with its own block: `python -m lab sparse --variants` times others."""
COMPRESS_TURNS, ADD_TURNS, EXPAND_TURNS = 2, 4, 1
"""Blocks that a warp takes one after another."""


class LeftRange(NamedTuple):
    """Which of the numbers that are left take part: `first` to `last`, in dense blocks from `first_block` on.

    is_part: False if they are all of these blocks' numbers, so that no rank need be compared.
    """

    first: int
    last: int
    first_block: int
    blocks: int
    is_part: bool

    def end(self, dense: Tensor) -> int:
        """The dense place at which the blocks end."""
        return min(dense.numel(), (self.first_block + self.blocks) * BLOCK)


class Bitmap(NamedTuple):
    """Kernel argument: a mask's bits, how many numbers are left before each block, and selectors of rows."""

    bits: Any
    prefix: Any
    selectors: Any


@functools.cache
def find_selectors(device: torch.device) -> tuple[Tensor, Tensor]:
    """The selectors that compress and that expand a row, by its byte of the bitmap: int64 [256], 32 bits each half row.

    Selectors of a half row are those of `_permute`. Its numbers that are left come first; an expanded number that is
    not left is a copy of the fourth, which is zero then.
    """
    packing, unpacking = [], []
    for nibble in range(16):
        left = [place for place in range(4) if nibble >> place & 1]
        packing.append([*left, 3, 3, 3, 3][:4])
        unpacking.append([left.index(place) if place in left else 3 for place in range(4)])
    words = [
        [sum(0x10 + 0x22 * of << 8 * to for to, of in enumerate(row)) for row in half] for half in (packing, unpacking)
    ]
    rows = torch.tensor(
        [[half[byte % 16] + (half[byte // 16] << 32) for byte in range(256)] for half in words], device="cpu"
    )
    packs, unpacks = rows.to(device).unbind()
    return packs, unpacks


@triton.jit
def _count_bits(word):  # type: ignore[no-untyped-def]
    """The number of bits of an int32 that are 1."""
    if is_cuda():
        count = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1)
    else:
        count = word - ((word >> 1) & 0x55555555)
        count = (count & 0x33333333) + ((count >> 2) & 0x33333333)
        count = (((count + (count >> 4)) & 0x0F0F0F0F) * 0x01010101 >> 24) & 63
    return count


@triton.jit
def _cast(c, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bits of four numbers as another type."""
    c0, c1, c2, c3 = c
    return (
        c0.to(dtype, bitcast=True),
        c1.to(dtype, bitcast=True),
        c2.to(dtype, bitcast=True),
        c3.to(dtype, bitcast=True),
    )


@triton.jit
def _permute(c, selector):  # type: ignore[no-untyped-def]
    """Four numbers, each one of those in `c`: byte k of the int32 selector has 0x10 + 0x22 times the place of number k.

    These are the bytes of 16-bit numbers, of which PTX permutes eight at once.
    """
    if c[0].dtype.primitive_bitwidth == 16 and is_cuda():
        result = _cast(
            tl.inline_asm_elementwise(
                """{
                .reg .b32 low, high, other;
                mov.b32 low, {$4, $5};
                mov.b32 high, {$6, $7};
                shr.u32 other, $8, 16;
                prmt.b32 other, low, high, other;
                prmt.b32 low, low, high, $8;
                mov.b32 {$0, $1}, low;
                mov.b32 {$2, $3}, other;
                }""",
                "=h,=h,=h,=h,h,h,h,h,r",
                _cast(c, tl.int16) + (selector,),  # noqa: RUF005  (Triton does not unpack)
                dtype=(tl.int16, tl.int16, tl.int16, tl.int16),
                is_pure=True,
                pack=1,
            ),
            c[0].dtype,
        )
    else:
        result = (_pick(c, selector >> 1), _pick(c, selector >> 9), _pick(c, selector >> 17), _pick(c, selector >> 25))
    return result


@triton.jit
def _pick(c, place):  # type: ignore[no-untyped-def]
    """The number of `c` at the place that the lowest two bits have."""
    is_odd = (place & 1) != 0
    return tl.where((place & 2) != 0, tl.where(is_odd, c[3], c[2]), tl.where(is_odd, c[1], c[0]))


@triton.jit
def _scan_words(index, block, size, WARPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers that are left before each word of 32, [WARPS, 32], and each lane's words of its four rows.

    Synchronization: none between warps; bitmap and prefix sums are read only.
    """
    warp, lane = tl.arange(0, WARPS), tl.arange(0, 32)[None, :]
    words = index.bits.to(tl.pointer_type(tl.int32)) + block * 32
    at = warp[:, None] * 32 + lane
    count = _count_bits(tl.load(words + at, mask=at * 32 < size, other=0))
    before = tl.load(index.prefix + block + warp, mask=warp * 1024 < size, other=0)
    at = warp[:, None] * 32 + lane // 4
    of_rows = ()
    for number in tl.static_range(4):
        of_rows += (tl.load(words + at + 8 * number, mask=at * 32 + 256 * number < size, other=0),)  # type: ignore[assignment]
    return before[:, None] + tl.cumsum(count, axis=1) - count, of_rows


@triton.jit
def _find_row(word, before, selectors, NUMBER: tl.constexpr, WARPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each lane's row of those from 32 NUMBER on: its selectors, its bits, the rank of the first number that is left,
    and how many are left in each half."""
    lane = tl.broadcast_to(tl.arange(0, 32)[None, :], (WARPS, 32))
    shift = lane % 4 * 8
    byte = (word >> shift) & 0xFF
    rank = tl.gather(before, NUMBER * 8 + lane // 4, axis=1) + _count_bits(word & ((1 << shift) - 1))
    return tl.load(selectors + byte), byte, rank, _count_bits(byte & 15), _count_bits(byte >> 4)


@triton.jit
def _split_columns(values, WARPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The halves of [WARPS, 32, 8], four columns each, which the lane that has a row has in its registers."""
    even, odd = tl.split(values.reshape(WARPS, 32, 4, 2))
    of_0_4, of_2_6 = tl.split(even.reshape(WARPS, 32, 2, 2))
    of_1_5, of_3_7 = tl.split(odd.reshape(WARPS, 32, 2, 2))
    c0, c4 = tl.split(of_0_4)
    c1, c5 = tl.split(of_1_5)
    c2, c6 = tl.split(of_2_6)
    c3, c7 = tl.split(of_3_7)
    return (c0, c1, c2, c3), (c4, c5, c6, c7)


@triton.jit
def _join_columns(low, high, WARPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The reverse of `_split_columns`."""
    even = tl.join(tl.join(low[0], high[0]), tl.join(low[2], high[2]))
    odd = tl.join(tl.join(low[1], high[1]), tl.join(low[3], high[3]))
    return tl.join(even.reshape(WARPS, 32, 4), odd.reshape(WARPS, 32, 4)).reshape(WARPS, 32, 8)


@triton.jit
def _is_there(K: tl.constexpr, rank, count, first, last, IS_PART: tl.constexpr):  # type: ignore[no-untyped-def]
    """True where a half row has a K-th number that is left, and of the part."""
    there = count > K
    if IS_PART:
        there &= (rank + K >= first) & (rank + K < last)
    return there


@triton.jit
def _load_half(at, rank, count, first, last, IS_PART: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers of each half row that are left, and zeros after them."""
    loaded = ()
    for k in tl.static_range(4):
        loaded += (tl.load(at + k, mask=_is_there(k, rank, count, first, last, IS_PART), other=0),)  # type: ignore[assignment]
    return loaded


@triton.jit
def _load_row(row, left, first, last, IS_PART: tl.constexpr):  # type: ignore[no-untyped-def]
    _, _, rank, low, high = row
    at = left + (rank - first)
    return _load_half(at, rank, low, first, last, IS_PART), _load_half(at + low, rank + low, high, first, last, IS_PART)


@triton.jit
def _store_half(at, c, sums, rank, count, first, last, IS_PART: tl.constexpr):  # type: ignore[no-untyped-def]
    for k in tl.static_range(4):
        value = c[k] if sums is None else c[k].to(tl.float32) + sums[k].to(tl.float32)
        tl.store(at + k, value.to(at.dtype.element_ty), mask=_is_there(k, rank, count, first, last, IS_PART))


@triton.jit
def _pack_row(values, row, sums, out, first, last, IS_PART: tl.constexpr, WARPS: tl.constexpr):  # type: ignore[no-untyped-def]
    selectors, _, rank, low, high = row
    left_half, right_half = _split_columns(values, WARPS)
    at, of_low, of_high = out + (rank - first), None if sums is None else sums[0], None if sums is None else sums[1]
    _store_half(at, _permute(left_half, selectors.to(tl.int32)), of_low, rank, low, first, last, IS_PART)
    right_half = _permute(right_half, (selectors >> 32).to(tl.int32))
    _store_half(at + low, right_half, of_high, rank + low, high, first, last, IS_PART)


@triton.jit
def _place(WARPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The places of each warp's first 32 rows in the dense numbers of a program: [WARPS, 32, 8]."""
    row = (tl.arange(0, WARPS) * 1024)[:, None] + (tl.arange(0, 32) * 8)[None, :]
    return row[:, :, None] + tl.arange(0, 8)[None, None, :]


@triton.jit(do_not_specialize=["first", "last", "first_block"])
def _compress(  # type: ignore[no-untyped-def]
    dense, index, out, size, first, last, first_block,
    ADDS: tl.constexpr, IS_PART: tl.constexpr, WARPS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Write the numbers of WARPS * TURNS blocks that are left to `out`, or add them to it.

    Synchronization: none. Each number of `out` is written by one program; the next kernel of the stream reads it.
    """
    places = _place(WARPS)
    for turn in range(TURNS):
        block = (first_block + (tl.program_id(0) * TURNS + turn) * WARPS).to(tl.int64)
        here = tl.minimum(size - block * 1024, WARPS * 1024).to(tl.int32)
        at = dense + block * 1024 + places
        # All are read, in order and 16 bytes at a time: of 16 neighbours, one memory sector, some number is left. And
        # all are loaded before any is stored, or each load would wait for the store before it.
        values, rows, sums = (), (), ()
        for number in tl.static_range(4):
            values += (tl.load(at + 256 * number, mask=places + 256 * number < here, other=0),)  # type: ignore[assignment]
        before, words = _scan_words(index, block, here, WARPS)
        for number in tl.static_range(4):
            rows += (_find_row(words[number], before, index.selectors, number, WARPS),)  # type: ignore[assignment]
            if ADDS:
                sums += (_load_row(rows[number], out, first, last, IS_PART),)  # type: ignore[assignment]
        for number in tl.static_range(4):
            added = sums[number] if ADDS else None
            _pack_row(values[number], rows[number], added, out, first, last, IS_PART, WARPS)


@triton.jit
def _unpack_row(loaded, row, at, mask, first, last, IS_PART: tl.constexpr, WARPS: tl.constexpr):  # type: ignore[no-untyped-def]
    low, high = _permute(loaded[0], row[0].to(tl.int32)), _permute(loaded[1], (row[0] >> 32).to(tl.int32))
    if IS_PART:  # other numbers of the row that are left may be another part's
        column = tl.arange(0, 8)[None, None, :]
        byte = row[1][:, :, None]
        rank = row[2][:, :, None] + _count_bits(byte & ((1 << column) - 1))
        mask &= ((byte >> column & 1) == 0) | ((rank >= first) & (rank < last))
    tl.store(at, _join_columns(low, high, WARPS), mask=mask)


@triton.jit(do_not_specialize=["first", "last", "first_block"])
def _expand(  # type: ignore[no-untyped-def]
    left, index, dense, skip, failed, size, first, last, first_block,
    IS_PART: tl.constexpr, WARPS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Write WARPS * TURNS blocks of dense numbers: those that are left, and zeros between them.

    Whole sectors are written: numbers one by one would have the memory read what lies between them first. While `skip`
    or `failed` is not 0, nothing is written.

    Synchronization: none. Each dense number is written by one program; the next kernel of the stream reads it.
    """
    places = _place(WARPS)
    writes = True
    if skip is not None:
        writes = tl.load(skip) == 0
    if failed is not None:
        writes &= tl.load(failed) == 0
    for turn in range(TURNS):
        block = (first_block + (tl.program_id(0) * TURNS + turn) * WARPS).to(tl.int64)
        here = tl.minimum(size - block * 1024, WARPS * 1024).to(tl.int32)
        before, words = _scan_words(index, block, here, WARPS)
        at = dense + block * 1024 + places
        rows, loaded = (), ()
        for number in tl.static_range(4):
            rows += (_find_row(words[number], before, index.selectors, number, WARPS),)  # type: ignore[assignment]
            loaded += (_load_row(rows[number], left, first, last, IS_PART),)  # type: ignore[assignment]
        for number in tl.static_range(4):
            mask = writes & (places + 256 * number < here)
            _unpack_row(loaded[number], rows[number], at + 256 * number, mask, first, last, IS_PART, WARPS)


@triton.jit
def _select_bit(word, rank):  # type: ignore[no-untyped-def]
    """The place of the bit of an int32 that is 1 and has `rank` such bits below it."""
    place = tl.zeros_like(rank)
    for step in tl.static_range(5):
        count = _count_bits(word & ((1 << (16 >> step)) - 1))
        is_above = rank >= count
        shift = tl.where(is_above, 16 >> step, 0)
        rank -= tl.where(is_above, count, 0)
        word >>= shift
        place += shift
    return place


@triton.jit
def _prefetch(at):  # type: ignore[no-untyped-def]
    """Have the L2 cache fetch the lines of these addresses."""
    if is_cuda():
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit(do_not_specialize=["first", "last", "first_block"])
def _add_selected(  # type: ignore[no-untyped-def]
    dense, index, out, size, first, last, first_block,
    ADDS: tl.constexpr, PREFETCHES: tl.constexpr, SLOTS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Add the numbers of TURNS blocks that are left to those of `out`, each of which finds its own.

    Neighbouring lanes have neighbouring numbers of `out`, which are so loaded and stored by few instructions: by rows
    of dense numbers it takes 64 of them a block, and their sums are loaded only once their places are known. A lane
    finds its word of the bitmap by bisecting how many numbers are left before each of the block's 32, and its bit by
    counting bits.

    Synchronization: none. Each number of `out` is read and written by one warp.
    """
    lane = tl.arange(0, 32)
    for turn in range(TURNS):
        block = (first_block + tl.program_id(0) * TURNS + turn).to(tl.int64)
        if block * 1024 < size:
            if PREFETCHES:  # 64 bytes a lane or more; they are loaded once their places are known
                _prefetch(dense + tl.minimum(block * 1024 + lane * 32, size - 1))
            before = tl.load(index.prefix + block)
            end = tl.load(index.prefix + block + 1, mask=(block + 1) * 1024 < size, other=last)
            begin, end = tl.maximum(before, first), tl.minimum(end, last)
            words = tl.load(index.bits.to(tl.pointer_type(tl.int32)) + block * 32 + lane)
            count = _count_bits(words)
            before_words = tl.cumsum(count, axis=0) - count
            for start in range((begin - before).to(tl.int32), (end - before).to(tl.int32), SLOTS):
                number = start + tl.arange(0, SLOTS)
                is_there = number < end - before
                at = out + (before - first) + number
                if ADDS:
                    added = tl.load(at, mask=is_there, other=0)
                word = tl.zeros_like(number)
                for step in tl.static_range(5):
                    further = word + (16 >> step)
                    word = tl.where(tl.gather(before_words, further, axis=0) <= number, further, word)
                place = _select_bit(tl.gather(words, word, axis=0), number - tl.gather(before_words, word, axis=0))
                own = tl.load(dense + block * 1024 + (word * 32 + place), mask=is_there, other=0)
                if ADDS:
                    own = (own.to(tl.float32) + added.to(tl.float32)).to(out.dtype.element_ty)
                tl.store(at, own, mask=is_there)


@triton.jit(do_not_specialize=["first", "last", "first_block"])
def _add_staged(  # type: ignore[no-untyped-def]
    dense, index, staged, out, size, first, last, first_block, SLOTS: tl.constexpr, TURNS: tl.constexpr
):  # fmt: skip
    """The same as `_add_selected`: rows are compressed to `staged` [last - first], in order, and added from there.

    Synchronization: a barrier of the program, of one warp, between its stores to `staged` and its loads.
    """
    places = _place(1)
    for turn in range(TURNS):
        block = (first_block + tl.program_id(0) * TURNS + turn).to(tl.int64)
        if block * 1024 < size:
            here = tl.minimum(size - block * 1024, 1024).to(tl.int32)
            at = dense + block * 1024 + places
            values, rows = (), ()
            for number in tl.static_range(4):
                values += (tl.load(at + 256 * number, mask=places + 256 * number < here, other=0),)  # type: ignore[assignment]
            begin = tl.maximum(tl.load(index.prefix + block), first) - first
            end = tl.load(index.prefix + block + 1, mask=(block + 1) * 1024 < size, other=last)
            end = tl.minimum(end, last) - first
            slots = begin + tl.arange(0, SLOTS)
            added = tl.load(out + slots, mask=slots < end, other=0)
            before, words = _scan_words(index, block, here, 1)
            for number in tl.static_range(4):
                rows += (_find_row(words[number], before, index.selectors, number, 1),)  # type: ignore[assignment]
            for number in tl.static_range(4):
                _pack_row(values[number], rows[number], None, staged, first, last, True, 1)
            tl.debug_barrier()
            own = tl.load(staged + slots, mask=slots < end, other=0)
            tl.store(out + slots, (own.to(tl.float32) + added.to(tl.float32)).to(out.dtype.element_ty), mask=slots < end)
            for start in range((begin + SLOTS).to(tl.int32), end.to(tl.int32), SLOTS):
                others = start + tl.arange(0, SLOTS)
                own = tl.load(staged + others, mask=others < end, other=0)
                added = tl.load(out + others, mask=others < end, other=0)
                total = own.to(tl.float32) + added.to(tl.float32)
                tl.store(out + others, total.to(out.dtype.element_ty), mask=others < end)


def launch_staged(
    dense: Tensor, bits: Tensor, prefix: Tensor, out: Tensor, part: LeftRange, *, slots: int = 128, turns: int = 1
) -> None:
    launch_kernel(
        _add_staged, triton.cdiv(part.blocks, turns), dense, Bitmap(bits, prefix, find_selectors(dense.device)[0]),
        torch.empty_like(out), out, part.end(dense), part.first, part.last, part.first_block,
        SLOTS=slots, TURNS=turns, num_warps=1,
    )  # fmt: skip


def launch_add(
    dense: Tensor, bits: Tensor, prefix: Tensor, out: Tensor, part: LeftRange, *, adds: bool = True,
    prefetches: bool = True, slots: int = 128, turns: int = 1,
) -> None:  # fmt: skip
    """Add what is left of `dense` [size], by a bitmap with prefix sums, to `out` [part.last - part.first].

    part: whose blocks may have other numbers, too, at both ends.
    """
    launch_kernel(
        _add_selected, triton.cdiv(part.blocks, turns), dense, Bitmap(bits, prefix, prefix), out,
        part.end(dense), part.first, part.last, part.first_block,
        ADDS=adds, PREFETCHES=prefetches, SLOTS=slots, TURNS=turns, num_warps=1,
    )  # fmt: skip


def launch_compress(
    dense: Tensor, bits: Tensor, prefix: Tensor, out: Tensor, part: LeftRange, *, adds: bool, warps: int = WARPS,
    turns: int | None = None,
) -> None:  # fmt: skip
    """Compress `dense` [size] to `out` [part.last - part.first] by a bitmap with prefix sums; adds: to what it has.

    warps, turns: of a program, which takes as many blocks as their product.
    """
    index = Bitmap(bits, prefix, find_selectors(dense.device)[0])
    turns = turns or (ADD_TURNS if adds else COMPRESS_TURNS)
    launch_kernel(
        _compress, triton.cdiv(part.blocks, warps * turns), dense, index, out,
        part.end(dense), part.first, part.last, part.first_block,
        ADDS=adds, IS_PART=part.is_part, WARPS=warps, TURNS=turns, num_warps=warps,
    )  # fmt: skip


def launch_expand(
    left: Tensor, bits: Tensor, prefix: Tensor, dense: Tensor, part: LeftRange, flags: Sequence[Tensor], *,
    warps: int = WARPS, turns: int = EXPAND_TURNS,
) -> None:  # fmt: skip
    """Expand `left` [part.last - part.first] into `dense` [size]. flags: at most two, int32 [1], of which one that is
    not 0 has nothing written. Others: as `launch_compress`."""
    index = Bitmap(bits, prefix, find_selectors(dense.device)[1])
    launch_kernel(
        _expand, triton.cdiv(part.blocks, warps * turns), left, index, dense,
        *flags, *[None] * (2 - len(flags)), part.end(dense), part.first, part.last, part.first_block,
        IS_PART=part.is_part, WARPS=warps, TURNS=turns, num_warps=warps,
    )  # fmt: skip
