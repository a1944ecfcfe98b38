# SPDX-License-Identifier: Apache-2.0
"""Kernels of attention to a paged cache: single tokens with keys split among programs (flash-decoding), and chunks.

A tile has the queries of one kv head: of a token all heads of the group, one token after another. Scores are in powers
of two (scale times log2 e). A partial result is the sum of weighted values, the largest score and the sum of weights.

Invariant: keys are split at multiples of `SPLIT`, whatever the length. Each split has a partial result of its own, and
these are merged one after another: by `merge_splits` for a single token, in the program of a chunk's tile. Tiles have
one shape, so that a token's sums are the same in both.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.memory.gpus import count_processors
from stretto.ops.gemm import divide_up
from stretto.tiles import INTERPRETED
from stretto.tiles.launches import launch_cached

SPLIT = 256
"""Keys of a split where bits must not depend on anything else."""

_MAX_SPLITS = 64
_LOG2_E = 1.4426950408889634


class PagedConfig(NamedTuple):
    """Tiles of a kernel: rows (of queries; of single tokens at least the heads of a group), keys, warps and stages.

    programs_of_processor: single tokens' keys are split until so many programs run on a multiprocessor.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    programs_of_processor: int = 8


SINGLES = PagedConfig(16, 64, 2, 3, 4)
CHUNKS = PagedConfig(128, 64, 8, 3)
INVARIANT = PagedConfig(64, 64, 4, 2)


class PagedCall(NamedTuple):
    """The operands of a call, and what it computes; offsets: None for one token a sequence. window 0: none."""

    q: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor
    lengths: Tensor
    offsets: Tensor | None
    scale: float
    window: int
    is_invariant: bool


def attend_by_kernels(call: PagedCall, singles: PagedConfig | None = None, chunks: PagedConfig | None = None) -> Tensor:
    """The attention: [tokens, heads, d]. One launch for single tokens, one that merges their splits, one for chunks."""
    q, offsets = call.q, call.offsets
    out = torch.empty_like(q) if offsets is None else torch.zeros_like(q)  # rows behind the last offset are nobody's
    if 0 in q.shape or 0 in call.table.shape:
        return out.zero_()
    default = (INVARIANT, INVARIANT) if call.is_invariant else (SINGLES, CHUNKS)
    _launch_singles(call, out, singles or default[0])
    if offsets is not None:
        _launch_chunks(call, out, chunks or default[1])
    return out


def _describe(call: PagedCall, config: PagedConfig) -> dict[str, object]:
    """The constants that all kernels have."""
    heads, size = call.q.shape[1:]
    exact = torch.get_float32_matmul_precision() == "highest"
    return {
        "GROUP": heads // call.keys.shape[2],
        "SIZE": size,
        "DIMS": max(16, triton.next_power_of_2(size)),
        "PAGE": call.keys.shape[1],
        "WINDOW": call.window,
        "SPLIT": SPLIT if call.is_invariant else 0,
        "PRECISION": "ieee" if exact else "tf32",
        "KEYS": config.keys,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": not call.is_invariant,
    }


def count_splits(call: PagedCall, config: PagedConfig) -> int:
    """In how many parts a single token's keys are split: what fills the GPU, or all fixed splits that may be there."""
    most = call.table.shape[1] * call.keys.shape[1]
    if call.is_invariant:
        return divide_up(most, SPLIT)
    if call.q.device.type == "cpu":  # interpreted
        return min(2, divide_up(most, config.keys))
    wanted = config.programs_of_processor * count_processors(call.q.device.index)
    pairs = call.lengths.shape[0] * call.keys.shape[2]
    return max(1, min(wanted // pairs, _MAX_SPLITS, divide_up(most, config.keys)))


def _launch_singles(call: PagedCall, out: Tensor, config: PagedConfig) -> None:
    sequences, kv_heads, (heads, size) = call.lengths.shape[0], call.keys.shape[2], call.q.shape[1:]
    splits, common = count_splits(call, config), _describe(call, config)
    rows = max(config.rows, 16, triton.next_power_of_2(heads // kv_heads))
    sums = stats = None
    if splits > 1:
        sums = out.new_empty(sequences, heads, splits, size, dtype=torch.float32)
        stats = out.new_empty(sequences, heads, splits, 2, dtype=torch.float32)
    arguments = (
        call.q, call.keys, call.values, call.table, call.lengths, call.offsets, out, sums, stats, kv_heads,
        call.table.shape[1], *call.keys.stride()[:3], splits, call.scale * _LOG2_E,
    )  # fmt: skip
    launch_cached(attend_singles, sequences * kv_heads * splits, *arguments, ROWS=rows, **common)
    if sums is not None:
        merged = sums, stats, call.lengths, call.offsets, out, heads, splits
        launch_cached(
            merge_splits, sequences * heads, *merged, WINDOW=call.window, SPLIT=common["SPLIT"], KEYS=config.keys,
            SIZE=size, DIMS=common["DIMS"], num_warps=1 if size <= 128 else 4,
            enable_fp_fusion=common["enable_fp_fusion"],
        )  # fmt: skip


def _launch_chunks(call: PagedCall, out: Tensor, config: PagedConfig) -> None:
    tokens, heads, _ = call.q.shape
    sequences, kv_heads = call.lengths.shape[0], call.keys.shape[2]
    rows = max(16 if INTERPRETED.value else config.rows, triton.next_power_of_2(heads // kv_heads))
    each = rows // (heads // kv_heads)
    tiles = tokens // each + sequences
    arguments = (
        call.q, call.keys, call.values, call.table, call.lengths, call.offsets, out, kv_heads, call.table.shape[1],
        *call.keys.stride()[:3], sequences, call.scale * _LOG2_E,
    )  # fmt: skip
    launch_cached(
        attend_chunks, tiles * kv_heads, *arguments, ROWS=rows, SEQUENCES=triton.next_power_of_2(sequences),
        **_describe(call, config),
    )  # fmt: skip


@triton.jit
def _attend_keys(  # type: ignore[no-untyped-def]
    q, keys, values, pages, position, kv_head, page_stride, slot_stride, head_stride, begin, end, scale,
    most, total, out,
    SIZE: tl.constexpr, DIMS: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Go on with a partial result (out [rows, DIMS], most, total [rows]) by the keys from begin to end - 1.

    position: [rows], each query's. pages: pointer to the sequence's pages.
    """
    dims = tl.arange(0, DIMS)
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        there = key < end
        page = tl.load(pages + key // PAGE, mask=there, other=0).to(tl.int64)
        place = page * page_stride + (key % PAGE) * slot_stride + kv_head * head_stride
        if SIZE == DIMS:
            k = tl.load(keys + place[None, :] + dims[:, None], mask=there[None, :], other=0)
            v = tl.load(values + place[:, None] + dims[None, :], mask=there[:, None], other=0)
        else:
            inside = dims < SIZE
            k = tl.load(keys + place[None, :] + dims[:, None], mask=there[None, :] & inside[:, None], other=0)
            v = tl.load(values + place[:, None] + dims[None, :], mask=there[:, None] & inside[None, :], other=0)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        seen = there[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(most - base)
        total = total * shrink + tl.sum(weights, 1)
        out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None], input_precision=PRECISION)
        most = larger
    return most, total, out


@triton.jit
def _merge(most, total, out, other_most, other_total, other_out):  # type: ignore[no-untyped-def]
    """The partial result of both: (most, total, out)."""
    larger = tl.maximum(most, other_most)
    base = tl.where(larger == float("-inf"), 0.0, larger)
    first, second = tl.exp2(most - base), tl.exp2(other_most - base)
    total = total * first + other_total * second
    out = out * tl.expand_dims(first, len(first.shape)) + other_out * tl.expand_dims(second, len(second.shape))
    return larger, total, out


@triton.jit
def _count_tokens(offsets, sequence):  # type: ignore[no-untyped-def]
    """(the first of a sequence's new tokens in q, their number)."""
    if offsets is None:
        first = sequence
        count = sequence * 0 + 1
    else:
        first = tl.load(offsets + sequence)
        count = tl.load(offsets + sequence + 1) - first
    return first, count


@triton.jit
def _find_split(length, index, splits, WINDOW: tl.constexpr, KEYS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(begin, end) of the index-th of the equal parts of the keys that a sequence's last token sees."""
    low = length * 0
    if WINDOW > 0:
        low = tl.maximum(length - WINDOW, 0) // KEYS * KEYS
    part = tl.cdiv(tl.cdiv(length - low, KEYS), splits) * KEYS
    begin = low + index * part
    return begin, tl.minimum(begin + part, length)


@triton.jit
def attend_singles(  # type: ignore[no-untyped-def]
    q, keys, values, table, lengths, offsets, out, sums, stats, kv_heads, width, page_stride, slot_stride, head_stride,
    splits, scale,
    ROWS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, DIMS: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A split of the attention of a sequence's only new token, for the heads of one kv head.

    Of one split: into out; else a partial result into sums [sequences, heads, splits, SIZE] and stats [.., 2]. Programs
    of sequences with other numbers of new tokens, and of splits without keys, do nothing. Bytes: keys and values are
    read once. Synchronization: none: programs own their splits, which `merge_splits` reads in the next launch.
    """
    program = tl.program_id(0)
    split = program % splits
    kv_head = program // splits % kv_heads
    sequence = program // splits // kv_heads
    first, count = _count_tokens(offsets, sequence)
    length = tl.load(lengths + sequence)
    if SPLIT > 0:
        begin = split * SPLIT
        end = tl.minimum(begin + SPLIT, length)
        if WINDOW > 0:
            end = tl.where(end <= length - WINDOW, begin, end)
    else:
        begin, end = _find_split(length, split, splits, WINDOW, KEYS)
    if (count == 1) & ((begin < end) | ((splits == 1) & (length == 0))):
        row = tl.arange(0, ROWS)
        dims = tl.arange(0, DIMS)
        head = kv_head * GROUP + row
        heads = kv_heads * GROUP
        inside = (row < GROUP)[:, None] & (dims < SIZE)[None, :]
        at = (first.to(tl.int64) * heads + head)[:, None] * SIZE + dims[None, :]
        queries = tl.load(q + at, mask=inside, other=0)
        most = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        result = tl.zeros((ROWS, DIMS), tl.float32)
        position = row * 0 + length - 1
        pages = table + sequence.to(tl.int64) * width
        most, total, result = _attend_keys(
            queries, keys, values, pages, position, kv_head, page_stride, slot_stride, head_stride, begin, end, scale,
            most, total, result, SIZE, DIMS, PAGE, WINDOW, PRECISION, KEYS,
        )  # fmt: skip
        if sums is None:
            result = result / tl.where(total == 0, 1.0, total)[:, None]
            tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
        else:
            place = (sequence.to(tl.int64) * heads + head) * splits + split
            tl.store(sums + place[:, None] * SIZE + dims[None, :], result, mask=inside)
            tl.store(stats + place * 2, most, mask=row < GROUP)
            tl.store(stats + place * 2 + 1, total, mask=row < GROUP)


@triton.jit
def merge_splits(  # type: ignore[no-untyped-def]
    sums, stats, lengths, offsets, out, heads, splits,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of a single token's head, from the first split to the last.

    Synchronization: none: the launch before has written the partial results. Programs of sequences with other numbers
    of new tokens do nothing.
    """
    program = tl.program_id(0)
    sequence = program // heads
    head = program % heads
    first, count = _count_tokens(offsets, sequence)
    length = tl.load(lengths + sequence)
    if count == 1:
        low = length * 0
        if WINDOW > 0:
            low = tl.maximum(length - WINDOW, 0)
        if SPLIT > 0:
            begin = low // SPLIT
            end = tl.cdiv(length, SPLIT)
        else:
            low = low // KEYS * KEYS if WINDOW > 0 else low
            part = tl.cdiv(tl.cdiv(length - low, KEYS), splits) * KEYS
            begin = 0
            end = tl.cdiv(length - low, tl.maximum(part, 1))
        dims = tl.arange(0, DIMS)
        most = tl.full((1,), float("-inf"), tl.float32)
        total = tl.zeros((1,), tl.float32)
        result = tl.zeros((1, DIMS), tl.float32)
        base = (sequence.to(tl.int64) * heads + head) * splits
        one = tl.arange(0, 1)
        for split in range(begin, end):
            place = base + split + one
            other = tl.load(sums + place[:, None] * SIZE + dims[None, :], mask=(dims < SIZE)[None, :], other=0.0)
            most, total, result = _merge(
                most, total, result, tl.load(stats + place * 2), tl.load(stats + place * 2 + 1), other
            )
        result = result / tl.where(total == 0, 1.0, total)[:, None]
        at = (first.to(tl.int64) * heads + head + one)[:, None] * SIZE + dims[None, :]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=(dims < SIZE)[None, :])


@triton.jit
def attend_chunks(  # type: ignore[no-untyped-def]
    q, keys, values, table, lengths, offsets, out, kv_heads, width, page_stride, slot_stride, head_stride,
    sequences, scale,
    ROWS: tl.constexpr, SEQUENCES: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, DIMS: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The attention of a tile of a chunk's tokens, for the heads of one kv head; single tokens are left out.

    A sequence's tiles begin at number offsets // tokens of a tile + sequence, so that the host needs no lengths; there
    are programs without a tile. Those with many keys, the last of a chunk, begin first. Synchronization: none.
    """
    EACH: tl.constexpr = ROWS // GROUP
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = program % kv_heads
    tile = program // kv_heads
    every = tl.arange(0, SEQUENCES)
    starts = tl.load(offsets + every, mask=every < sequences, other=0) // EACH + every
    sequence = tl.sum(((starts <= tile) & (every < sequences)).to(tl.int32), 0) - 1
    first, count = _count_tokens(offsets, sequence)
    token = (tile - first // EACH - sequence) * EACH
    if (count > 1) & (token < count):
        length = tl.load(lengths + sequence)
        row = tl.arange(0, ROWS)
        dims = tl.arange(0, DIMS)
        own = token + row // GROUP
        head = kv_head * GROUP + row % GROUP
        used = (row < EACH * GROUP) & (own < count)
        inside = used[:, None] & (dims < SIZE)[None, :]
        at = ((first + own).to(tl.int64) * (kv_heads * GROUP) + head)[:, None] * SIZE + dims[None, :]
        queries = tl.load(q + at, mask=inside, other=0)
        position = length - count + own
        low = length * 0
        if WINDOW > 0:
            low = tl.maximum(length - count + token - WINDOW + 1, 0) // KEYS * KEYS
        end = tl.minimum(length - count + token + EACH, length)
        most = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        result = tl.zeros((ROWS, DIMS), tl.float32)
        pages = table + sequence.to(tl.int64) * width
        if SPLIT > 0:
            for split in range(low // SPLIT, tl.cdiv(end, SPLIT)):
                begin = split * SPLIT
                split_most, split_total, split_result = _attend_keys(
                    queries, keys, values, pages, position, kv_head, page_stride, slot_stride, head_stride,
                    begin, tl.minimum(begin + SPLIT, end), scale,
                    tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32),
                    tl.zeros((ROWS, DIMS), tl.float32), SIZE, DIMS, PAGE, WINDOW, PRECISION, KEYS,
                )  # fmt: skip
                most, total, result = _merge(most, total, result, split_most, split_total, split_result)
        else:
            most, total, result = _attend_keys(
                queries, keys, values, pages, position, kv_head, page_stride, slot_stride, head_stride, low, end, scale,
                most, total, result, SIZE, DIMS, PAGE, WINDOW, PRECISION, KEYS,
            )  # fmt: skip
        result = result / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
