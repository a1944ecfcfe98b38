# SPDX-License-Identifier: Apache-2.0
"""Compress and expand on GPUs: dense numbers to those that a mask has left, and back.

A warp takes 1,024 dense numbers, those of a prefix sum. Lane l loads word l of their bitmap and learns how many numbers
are left before it from a scan over the lanes, once for 32 numbers.

To compress, lanes take the numbers that are left, and find the place of each in the dense block. To expand, they take
rows of eight dense numbers, 32 rows at a time, which a lane stores at once. A row's numbers that are left move to their
places by four byte permutations (`prmt`) whose selectors a table has for each of 256 rows: 5 instructions of the
integer units a number, where a copy's bandwidth leaves time for 9 (compiled for sm_90; a number by itself takes 13).
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.tiles.intrinsics import is_cuda
from stretto.tiles.launches import launch_cached

BLOCK = 1024
"""Dense numbers of a warp, which is a program, and of one prefix sum."""
COMPRESS_TURNS, EXPAND_TURNS = 2, 1
"""Blocks that a warp takes one after another: `python -m lab sparse --variants` times others."""
NOTED = 32
"""Addresses that one launch notes."""
ABSENT = 1 << 62
"""The address of a tensor that takes no part: of 64 bits, as others are, so that Triton compiles one kernel."""


class LeftRange(NamedTuple):
    """The numbers that are left which take part: `first` to `last`, in dense blocks from `first_block` on.

    is_part: False if they are all of these blocks' numbers, so that no rank need be compared. first_tensor,
    last_tensor: where several are taken, those that have these blocks.
    """

    first: int
    last: int
    first_block: int
    blocks: int
    is_part: bool
    first_tensor: int = 0
    last_tensor: int = 0

    def arguments(self, dense: Tensor | None) -> tuple[int, ...]:
        """The kernels' arguments, the first of which is the dense place at which the blocks end."""
        end = (self.first_block + self.blocks) * BLOCK
        end = end if dense is None else min(dense.numel(), end)
        return end, self.first, self.last, self.first_block, self.first_tensor, self.last_tensor


class TensorPlaces(NamedTuple):
    """Several dense tensors, in the order of their blocks, which one launch takes: int64, one of each.

    first_blocks: of each; ends: dense numbers of all blocks before its end; addresses: as if each began with block 0.
    """

    first_blocks: Any
    ends: Any
    addresses: Any


class Bitmap(NamedTuple):
    """Kernel argument: a mask's bits, how many numbers are left before each block, selectors of rows, and the places of
    the tensors if there are several."""

    bits: Any
    prefix: Any
    selectors: Any
    tensors: TensorPlaces | None


@functools.cache
def find_selectors(device: torch.device) -> Tensor:
    """The selectors that expand a row, by its byte of the bitmap: int64 [256], 32 bits each half row.

    Selectors of a half row are those of `_permute`. A number that is not left is a copy of the fourth, which is zero
    then.
    """
    half = []
    for nibble in range(16):
        left = [place for place in range(4) if nibble >> place & 1]
        of = [left.index(place) if place in left else 3 for place in range(4)]
        half.append(sum(0x10 + 0x22 * number << 8 * to for to, number in enumerate(of)))
    rows = [half[byte % 16] + (half[byte // 16] << 32) for byte in range(256)]
    return torch.tensor(rows, device="cpu").to(device)


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


@triton.jit(do_not_specialize=["first", "values"])
def _note_addresses(addresses, first, values, NUMBER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write addresses, which a launch has as numbers, to `addresses` from `first` on: graphs replay it.

    Synchronization: none. The next kernels of the stream read them.
    """
    for number in tl.static_range(NUMBER):
        tl.store(addresses + first + number, values[number])


@triton.jit
def _find_tensor(tensors, first, last, block):  # type: ignore[no-untyped-def]
    """The tensor that has a block, of those from `first` to `last`: where block 0 would be, and its end (0 if it takes
    no part).

    Synchronization: none; `_note_addresses` came before this kernel, or the host has written the addresses.
    """
    lane = tl.arange(0, 32)
    number = first - 1
    for start in range(first, last, 32):
        begins = tl.load(tensors.first_blocks + start + lane, mask=start + lane < last, other=block + 1)
        number += tl.sum((begins <= block).to(tl.int32), axis=0)
    address = tl.load(tensors.addresses + number)
    end = tl.where(address >> 62 == 0, tl.load(tensors.ends + number), 0)
    return address, end


@triton.jit
def _scan_words(index, block):  # type: ignore[no-untyped-def]
    """Each lane's word of a block's bitmap, and how many of the block's numbers are left before it: int32 [32].

    Synchronization: none; bitmap and prefix sums are read only.
    """
    words = tl.load(index.bits.to(tl.pointer_type(tl.int32)) + block * 32 + tl.arange(0, 32))
    count = _count_bits(words)
    return words, tl.cumsum(count, axis=0) - count


@triton.jit
def _find_row(words, before, index, block, NUMBER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each lane's row of those from 32 NUMBER on: its selectors, its bits, the rank of the first number that is left,
    and how many are left in each half."""
    lane = tl.arange(0, 32)
    at, shift = NUMBER * 8 + lane // 4, lane % 4 * 8
    word = tl.gather(words, at, axis=0)
    byte = (word >> shift) & 0xFF
    rank = tl.load(index.prefix + block) + tl.gather(before, at, axis=0) + _count_bits(word & ((1 << shift) - 1))
    return tl.load(index.selectors + byte), byte, rank, _count_bits(byte & 15), _count_bits(byte >> 4)


@triton.jit
def _join_columns(low, high):  # type: ignore[no-untyped-def]
    """[32, 8], of four columns in each half, which the lane that has a row has in its registers."""
    even = tl.join(tl.join(low[0], high[0]), tl.join(low[2], high[2]))
    odd = tl.join(tl.join(low[1], high[1]), tl.join(low[3], high[3]))
    return tl.join(even.reshape(32, 4), odd.reshape(32, 4)).reshape(32, 8)


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


@triton.jit(do_not_specialize=["first", "last", "first_block", "first_tensor", "last_tensor"])
def _expand(  # type: ignore[no-untyped-def]
    left, index, dense, flags, size, first, last, first_block, first_tensor, last_tensor,
    IS_PART: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Write TURNS blocks of dense numbers: those that are left, and zeros between them.

    Whole sectors are written: numbers one by one would have the memory read what lies between them first. While one of
    two `flags` is not 0, nothing is written.

    Synchronization: none. Each dense number is written by one program; the next kernel of the stream reads it.
    """
    column = tl.arange(0, 8)[None, :]
    places = tl.arange(0, 32)[:, None] * 8 + column
    writes = True
    for number in tl.static_range(2):
        if flags[number] is not None:
            writes &= tl.load(flags[number]) == 0
    for turn in range(TURNS):
        block = (first_block + tl.program_id(0) * TURNS + turn).to(tl.int64)
        target, end = dense + block * 1024, size
        if index.tensors is not None:
            address, end = _find_tensor(index.tensors, first_tensor, last_tensor, block)
            target = tl.multiple_of(address.to(dense.dtype) + block * 1024, 16)
            end = tl.minimum(end, size)
        if block * 1024 < end:
            here = tl.minimum(end - block * 1024, 1024).to(tl.int32)
            words, before = _scan_words(index, block)
            rows, loaded = (), ()
            for number in tl.static_range(4):
                rows += (_find_row(words, before, index, block, number),)  # type: ignore[assignment]
                _, _, rank, low, high = rows[number]  # type: ignore[var-annotated]
                at = left + (rank - first)
                left_half = _load_half(at, rank, low, first, last, IS_PART)
                loaded += ((left_half, _load_half(at + low, rank + low, high, first, last, IS_PART)),)  # type: ignore[assignment]
            for number in tl.static_range(4):
                selectors, byte, rank, _, _ = rows[number]  # type: ignore[var-annotated]
                left_half = _permute(loaded[number][0], selectors.to(tl.int32))
                right_half = _permute(loaded[number][1], (selectors >> 32).to(tl.int32))
                row, at = _join_columns(left_half, right_half), target + places + 256 * number
                mask = writes & (places + 256 * number < here)
                if IS_PART:  # other numbers of the row that are left may be another part's
                    rank = rank[:, None] + _count_bits(byte[:, None] & ((1 << column) - 1))
                    mask &= ((byte[:, None] >> column & 1) == 0) | ((rank >= first) & (rank < last))
                    tl.store(at, row, mask=mask)
                elif index.tensors is None:
                    tl.store(at, row, mask=mask)
                elif here == 1024:  # a lane stores 16 bytes at once; .wb, the default, keeps Triton from merging both
                    tl.store(at, row, mask=writes, cache_modifier=".wb")
                else:
                    tl.store(at, row, mask=mask)


@triton.jit
def _select_bit(word, rank):  # type: ignore[no-untyped-def]
    """The place of the bit of an int32 that is 1 and has `rank` such bits below it."""
    above = tl.full(rank.shape, 32, tl.int32)
    for step in tl.static_range(5):
        next_above = above - (16 >> step)
        above = tl.where(_count_bits(word << next_above) <= rank, next_above, above)
    return 32 - above


@triton.jit
def _prefetch(at):  # type: ignore[no-untyped-def]
    """Have the L2 cache fetch the lines of these addresses."""
    if is_cuda():
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit(do_not_specialize=["first", "last", "first_block", "first_tensor", "last_tensor"])
def _compress(  # type: ignore[no-untyped-def]
    dense, index, out, size, first, last, first_block, first_tensor, last_tensor,
    ADDS: tl.constexpr, SLOTS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Write the numbers of TURNS blocks that are left to `out`, SLOTS at a time, or add them.

    Neighbouring lanes have neighbouring numbers of `out`, which take 12 loads and stores a block at 90%; by rows of
    dense numbers it took 64, and their sums were loaded only once their places were known. A lane finds its word of the
    bitmap by bisecting how many numbers are left before each of the block's 32, and its bit by counting bits.

    Synchronization: none. Each number of `out` is read and written by one warp.
    """
    for turn in range(TURNS):
        block = (first_block + tl.program_id(0) * TURNS + turn).to(tl.int64)
        source, end = dense, size
        if index.tensors is not None:
            address, end = _find_tensor(index.tensors, first_tensor, last_tensor, block)
            source, end = address.to(dense.dtype), tl.minimum(end, size)
        if block * 1024 < end:
            # 64 bytes a lane, or more; they are loaded once their places are known.
            _prefetch(source + tl.minimum(block * 1024 + tl.arange(0, 32) * 32, end - 1))
            words, before = _scan_words(index, block)
            begin = tl.load(index.prefix + block)
            count = tl.sum(_count_bits(words), axis=0)
            stop = tl.minimum(count, last - begin).to(tl.int32)
            for start in range((tl.maximum(begin, first) - begin).to(tl.int32), stop, SLOTS):
                number = start + tl.arange(0, SLOTS)
                at = out + (begin - first) + number
                if ADDS:
                    before_it = tl.load(at, mask=number < stop).to(tl.float32)
                word = tl.zeros_like(number)
                for step in tl.static_range(5):
                    further = word + (16 >> step)
                    word = tl.where(tl.gather(before, further, axis=0) <= number, further, word)
                place = _select_bit(tl.gather(words, word, axis=0), number - tl.gather(before, word, axis=0))
                value = tl.load(source + block * 1024 + (word * 32 + place), mask=number < stop)
                if ADDS:
                    value = before_it + value.to(tl.float32)
                tl.store(at, value.to(out.dtype.element_ty), mask=number < stop)


def note_addresses(addresses: Tensor, first: int, values: Sequence[int]) -> None:
    """Write at most `NOTED` addresses to `addresses` from `first` on, in the order of the current stream; and `ABSENT`
    after them, up to `NOTED`."""
    values = (*values, *[ABSENT] * (NOTED - len(values)))
    launch_cached(_note_addresses, 1, addresses, first, values, NUMBER=NOTED, num_warps=1)


def launch_compress(
    dense: Tensor, bits: Tensor, prefix: Tensor, out: Tensor, part: LeftRange, *, adds: bool,
    turns: int = COMPRESS_TURNS, tensors: TensorPlaces | None = None,
) -> None:  # fmt: skip
    """Compress `dense` [size] to `out` [part.last - part.first] by a bitmap with prefix sums, or add it there.

    The blocks may be others' in part. turns: blocks of a program. tensors: those that are compressed in place of
    `dense`, which has their dtype.
    """
    launch_cached(
        _compress, -(-part.blocks // turns), dense, Bitmap(bits, prefix, None, tensors), out,
        *part.arguments(None if tensors else dense), ADDS=adds, SLOTS=128, TURNS=turns, num_warps=1,
    )  # fmt: skip


def launch_expand(
    left: Tensor, bits: Tensor, prefix: Tensor, dense: Tensor, part: LeftRange, flags: Sequence[Tensor], *,
    turns: int = EXPAND_TURNS, tensors: TensorPlaces | None = None,
) -> None:  # fmt: skip
    """Expand `left` [part.last - part.first] into `dense` [size]. flags: at most two, int32 [1], of which one that is
    not 0 has nothing written. Others: as `launch_compress`; several tensors begin at multiples of 16 bytes."""
    index = Bitmap(bits, prefix, find_selectors(dense.device), tensors)
    launch_cached(
        _expand, -(-part.blocks // turns), left, index, dense,
        (*flags, *[None] * (2 - len(flags))), *part.arguments(None if tensors else dense),
        IS_PART=part.is_part, TURNS=turns, num_warps=1,
    )  # fmt: skip
