# SPDX-License-Identifier: Apache-2.0
"""Merges attention of parts of the keys by log-sum-exp, and adds up gradients of parts, in one pass over each.

Merging two results in separate passes over fp32 costs a quarter of the attention of 16k tokens on 4 ranks (H100).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.ops.attention.kernels import Part
from stretto.ops.attention.plan import Range
from stretto.tiles.launches import launch_cached

_TILE = 4096  # numbers of a part that a program takes at a time


def merge_parts(
    parts: Sequence[Part], length: int, dtype: torch.dtype, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The attention to all keys: out [b, h, length, size] of `dtype`, and its log-sum-exp [b, h, length].

    parts: every row is in one or more. sinks: [h], a logit for each head that the softmax's denominator has in
    addition; the log-sum-exp has it, too. The output is contiguous as [b, length, h, size].
    """
    first = parts[0]
    if len(parts) == 1 and sinks is None and dtype == first.out.dtype:
        return first.out, first.lse
    batch, heads, _, size = first.out.shape
    out = first.out.new_empty(batch, length, heads, size, dtype=dtype).transpose(1, 2)
    lse = first.lse.new_empty(batch, heads, length)
    for rows in _cut([part.rows for part in parts]):
        left, *others = [
            (_take(part.out, part.rows, rows), _take(part.lse, part.rows, rows))
            for part in parts
            if part.rows.start <= rows.start and rows.stop <= part.rows.stop
        ]
        for other in others[:-1]:  # in more precision than the parts have
            wide = left[0].new_empty(left[0].shape, dtype=lse.dtype), torch.empty_like(left[1])
            left = _merge(left, other, None, wide)
        whole = slice(rows.start, rows.stop)
        _merge(left, others[-1] if others else None, sinks, (out[:, :, whole], lse[:, :, whole]))
    return out, lse


def add_parts(parts: Sequence[tuple[Range, Tensor]], target: Tensor) -> None:
    """Write to target [b, h, length, size] the sums of tensors [b, h, rows, size], each at its rows; rounded once.

    Every row of the target is in one or more.
    """
    for rows in _cut([part for part, _ in parts]):
        found = [
            _take(tensor, part, rows) for part, tensor in parts if part.start <= rows.start and rows.stop <= part.stop
        ]
        _add(found, target[:, :, rows.start : rows.stop])


def _add(parts: Sequence[Tensor], target: Tensor) -> None:
    """Write the sum of tensors of the target's shape to it, added in fp32 or wider and rounded once."""
    if len(parts) == 1:
        target.copy_(parts[0])
    elif len(parts) == 2:
        torch.add(*parts, out=target)  # takes the host less than a launch by Triton
    elif target.is_cuda:
        add_on_gpu(parts, target)
    else:
        total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32))
        for other in parts[1:]:
            total = total + other
        target.copy_(total)


def _cut(ranges: Sequence[Range]) -> list[Range]:
    """The union of ranges, cut where one begins or ends."""
    edges = sorted({edge for each in ranges for edge in each})
    return [Range(start, stop) for start, stop in pairwise(edges)]


def _take(tensor: Tensor, part: Range, rows: Range) -> Tensor:
    return tensor[:, :, rows.start - part.start : rows.stop - part.start]


_Result = tuple[Tensor, Tensor]


def _merge(one: _Result, other: _Result | None, sinks: Tensor | None, result: _Result) -> _Result:
    """Merge one or two parts into `result`, (out, lse), all of the same rows."""
    if one[0].is_cuda:
        return merge_on_gpu(one, other, sinks, result)
    lse = one[1] if other is None else torch.logaddexp(one[1], other[1])
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    out = one[0] * (one[1] - lse).exp()[..., None]
    if other is not None:
        out = out + other[0] * (other[1] - lse).exp()[..., None]
    result[0].copy_(out)
    result[1].copy_(lse)
    return result


class MergedRows(NamedTuple):
    """Kernel argument: out and lse of one part, and their strides of sequences, heads and rows."""

    out: Any
    lse: Any
    out_batch: Any
    out_head: Any
    out_row: Any
    lse_batch: Any
    lse_head: Any
    lse_row: Any

    @classmethod
    def of(cls, part: _Result) -> "MergedRows":
        out, lse = part
        return cls(out, lse, *out.stride()[:3], *lse.stride())


@triton.jit
def merge_rows(  # type: ignore[no-untyped-def]
    one, other, sinks, result, heads, rows, size,
    HAS_OTHER: tl.constexpr, HAS_SINKS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """result = the attention of two parts of the keys (or of one), with sinks [heads] in the denominator.

    A program has ROWS rows of one head of one sequence, of BLOCK >= size numbers each, whose last stride is 1. Bytes:
    each part is read and the result written once. Synchronization: none: programs own their rows.
    """
    tiles = tl.cdiv(rows, ROWS)
    sequence = tl.program_id(0) // tiles
    batch, head = (sequence // heads).to(tl.int64), (sequence % heads).to(tl.int64)
    row = (tl.program_id(0) % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    first = tl.load(_find_sums(one, batch, head, row), mask=there, other=0.0)
    biggest = first
    if HAS_OTHER:
        second = tl.load(_find_sums(other, batch, head, row), mask=there, other=0.0)
        biggest = tl.maximum(first, second)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(first.dtype)
        biggest = tl.maximum(biggest, sink)
    total = tl.exp(first - biggest)
    if HAS_OTHER:
        total += tl.exp(second - biggest)
    if HAS_SINKS:
        total += tl.exp(sink - biggest)
    whole = biggest + tl.log(total)
    column = tl.arange(0, BLOCK)[None, :]
    inside = there[:, None] & (column < size)
    value = tl.load(_find_rows(one, batch, head, row) + column, mask=inside, other=0.0).to(first.dtype)
    value *= tl.exp(first - whole)[:, None]
    if HAS_OTHER:
        added = tl.load(_find_rows(other, batch, head, row) + column, mask=inside, other=0.0).to(first.dtype)
        value += added * tl.exp(second - whole)[:, None]
    tl.store(_find_rows(result, batch, head, row) + column, value.to(result.out.dtype.element_ty), mask=inside)
    tl.store(_find_sums(result, batch, head, row), whole, mask=there)


@triton.jit
def _find_rows(part, batch, head, row):  # type: ignore[no-untyped-def]
    """Pointers to the first numbers of rows of out, [ROWS, 1]."""
    return (part.out + batch * part.out_batch + head * part.out_head + row * part.out_row)[:, None]


@triton.jit
def _find_sums(part, batch, head, row):  # type: ignore[no-untyped-def]
    """Pointers to rows of lse."""
    return part.lse + batch * part.lse_batch + head * part.lse_head + row * part.lse_row


def merge_on_gpu(one: _Result, other: _Result | None, sinks: Tensor | None, result: _Result) -> _Result:
    batch, heads, rows, size = result[0].shape
    block = triton.next_power_of_2(size)
    tile = max(1, _TILE // block)
    first, second, target = map(MergedRows.of, (one, one if other is None else other, result))
    with torch.cuda.device_of(result[0]):
        launch_cached(
            merge_rows, triton.cdiv(rows, tile) * batch * heads,
            first, second, target.lse if sinks is None else sinks, target, heads, rows, size,
            HAS_OTHER=other is not None, HAS_SINKS=sinks is not None, ROWS=tile, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return result


class AddedRows(NamedTuple):
    """Kernel argument: a tensor [b, h, rows, size], and its strides of sequences, heads and rows."""

    out: Any
    out_batch: Any
    out_head: Any
    out_row: Any

    @classmethod
    def of(cls, tensor: Tensor) -> "AddedRows":
        return cls(tensor, *tensor.stride()[:3])


@triton.jit
def add_rows(  # type: ignore[no-untyped-def]
    parts, result, heads, rows, size, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """result = the sum of a tuple of parts, in their order, added as WIDE and rounded once.

    A program has ROWS rows of one head of one sequence, of BLOCK >= size numbers each, whose last stride is 1. Bytes:
    each part is read and the result written once. Synchronization: none: programs own their rows.
    """
    tiles = tl.cdiv(rows, ROWS)
    sequence = tl.program_id(0) // tiles
    batch, head = (sequence // heads).to(tl.int64), (sequence % heads).to(tl.int64)
    row = (tl.program_id(0) % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows)[:, None] & (column < size)
    total = tl.zeros((ROWS, BLOCK), dtype=WIDE)
    for number in tl.static_range(len(parts)):
        total += tl.load(_find_rows(parts[number], batch, head, row) + column, mask=inside, other=0.0).to(WIDE)
    tl.store(_find_rows(result, batch, head, row) + column, total.to(result.out.dtype.element_ty), mask=inside)


def add_on_gpu(parts: Sequence[Tensor], target: Tensor) -> None:
    batch, heads, rows, size = target.shape
    block = triton.next_power_of_2(size)
    tile = max(1, _TILE // block)
    wide = tl.float64 if target.dtype == torch.float64 else tl.float32
    parts = [part if part.stride(-1) == 1 else part.contiguous() for part in parts]
    with torch.cuda.device_of(target):
        launch_cached(
            add_rows, triton.cdiv(rows, tile) * batch * heads, tuple(map(AddedRows.of, parts)), AddedRows.of(target),
            heads, rows, size, WIDE=wide, ROWS=tile, BLOCK=block, num_warps=4,
        )  # fmt: skip
