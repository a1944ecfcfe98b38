# SPDX-License-Identifier: Apache-2.0
"""Kernels of attention to a paged cache: single tokens with keys split among programs (flash-decoding), and chunks.

A tile has the queries of one kv head: of a token all heads of the group, one token after another. Scores are in powers
of two (scale times log2 e). A partial result is the sum of weighted values, the largest score and the sum of weights.

Invariant: keys are split at multiples of `SPLIT`, whatever the length. Each split has a partial result of its own, and
these are merged one after another, from the first to the last: those of a single token by the program that ends last,
those of a chunk's tile by its program. All tiles have as many keys, and weights are added up as integers, so that a
token's sums are the same in both. A single token's tile is turned (keys @ queries.T, values.T @ weights.T): Hopper's
tensor cores take 64 rows on the left, and add up products along k in one order on either side.

For an engine one launch does all that attention of a decoding step is (`attend_new_tokens`): queries and keys are
rotated as they are read, and the new keys and values stored.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.memory.gpus import count_processors
from stretto.ops.gemm import divide_up, fixed
from stretto.tiles import INTERPRETED, kind_of
from stretto.tiles.launches import count_shared_bytes, find_launches

SPLIT = 256
"""Keys of a split where bits must not depend on anything else."""

_MAX_SPLITS = 64
_LOG2_E = 1.4426950408889634


class PagedConfig(NamedTuple):
    """Tiles of a kernel: rows (of queries; of single tokens at least the heads of a group), keys, warps and stages.

    programs_of_processor: single tokens' keys are divided until so many programs run on a multiprocessor. is_turned:
    keys and values are the products' left operands.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    programs_of_processor: int = 8
    is_turned: bool = False


SINGLES = PagedConfig(16, 64, 2, 3, 4)
CHUNKS = PagedConfig(128, 64, 8, 3)
INVARIANT_SINGLES = PagedConfig(16, 64, 4, 5, 4, is_turned=True)
INVARIANT_CHUNKS = PagedConfig(64, 64, 4, 2)
_LEAST = 16  # rows and keys that tensor cores take
_MERGED = tl.constexpr(1024)  # numbers of a partial result of which eight are loaded at a time
_INTERPRETED = 6  # multiprocessors where there are none


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
    """The attention: [tokens, heads, d]. One launch for single tokens, one for chunks."""
    q, offsets = call.q, call.offsets
    out = torch.empty_like(q) if offsets is None else torch.zeros_like(q)  # rows behind the last offset are nobody's
    if 0 in q.shape or 0 in call.table.shape:
        return out.zero_()
    _launch_singles(call, out, find_tiles(call, singles or choose_singles(call)))
    if offsets is not None:
        _launch_chunks(call, out, find_tiles(call, chunks or (INVARIANT_CHUNKS if call.is_invariant else CHUNKS)))
    return out


def choose_singles(call: PagedCall) -> PagedConfig:
    """The config of single tokens. Of fp32, values cannot be a left operand."""
    if call.is_invariant and (INTERPRETED.value or call.q.itemsize > 2):
        return INVARIANT_SINGLES._replace(rows=64, is_turned=False)
    return INVARIANT_SINGLES if call.is_invariant else SINGLES


def find_tiles(call: PagedCall, config: PagedConfig) -> PagedConfig:
    """The tiles of a call's kernel: with rows for a group's heads, and smaller where the GPU's shared memory is short.

    ValueError where not even the smallest fit.
    """
    (heads, size), q = call.q.shape[1:], call.q
    group = max(_LEAST, triton.next_power_of_2(heads // call.keys.shape[2]))
    config = config._replace(rows=max(_LEAST if INTERPRETED.value else config.rows, group))
    return fit_tiles(config, group, max(_LEAST, triton.next_power_of_2(size)), q.itemsize, count_shared_bytes(q.device))


@lru_cache(maxsize=256)
def fit_tiles(config: PagedConfig, group: int, dims: int, itemsize: int, limit: int) -> PagedConfig:
    """The config with fewer stages, then rows, then keys, until a block takes at most `limit` bytes of shared memory.

    Invariant tiles of single tokens and of chunks have as many keys. ValueError if nothing fits.
    """
    while (needed := _estimate_bytes(config, dims, itemsize)) > limit:
        if config.num_stages > 1:
            config = config._replace(num_stages=config.num_stages - 1)
        elif config.rows > group:
            config = config._replace(rows=config.rows // 2)
        elif config.keys > _LEAST:
            config = config._replace(keys=config.keys // 2)
        else:
            raise ValueError(
                f"a tile of {config.rows} queries with {dims} numbers of {itemsize} bytes takes {needed} bytes of "
                f"shared memory, and a block here has {limit}"
            )
    return config


def _estimate_bytes(config: PagedConfig, dims: int, itemsize: int) -> int:
    """At least the shared memory of a block: queries, stages of keys and values, weights on their way to a product."""
    tiles = 1 if config.num_stages == 1 else max(2, config.num_stages - 1)
    weights = config.rows * config.keys * 4
    return (config.rows + 2 * tiles * config.keys) * dims * itemsize + weights + 2048


class NewTokens(NamedTuple):
    """A decoding step's keys and values [tokens, kv heads, d], which are not in the cache yet, and all tokens' angles.

    cos, sin: [tokens, d], contiguous. A token's heads are contiguous; strides: elements from a token to the next of
    queries, keys and values.
    """

    key: Any
    value: Any
    cos: Any
    sin: Any
    query_stride: Any
    key_stride: Any
    value_stride: Any


def attend_new_tokens(
    call: PagedCall, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, arrivals: Tensor
) -> Tensor:
    """`rotate_and_store`, then the attention of one token a sequence, in one launch: [tokens, heads, d].

    call: its q is not rotated, and its lengths (at least 1) count the tokens whose key and value are given here; they
    are stored at their place. The caches are contiguous. arrivals: int32 [tokens * kv heads at least], 0 between calls,
    of calls on one stream. As `rotate_and_store`, it takes heads of an even size.
    """
    out = torch.empty(call.q.shape, dtype=call.q.dtype, device=call.q.device)
    strides = call.q.stride(0), key.stride(0), value.stride(0)
    config = find_tiles(call, choose_singles(call))
    _launch_singles(call, out, config, NewTokens(key, value, cos, sin, *strides), arrivals)
    return out


class PagedCache(NamedTuple):
    """The cache and its sequences as kernels take them; width: of the table; strides in elements."""

    key_cache: Any
    value_cache: Any
    table: Any
    lengths: Any
    offsets: Any
    kv_heads: Any
    width: Any
    page_stride: Any
    slot_stride: Any
    head_stride: Any


class PagedTiles(NamedTuple):
    """Sizes that kernels are compiled for: rows and keys of a tile, the heads of a group, the numbers of a head and the
    power of two that holds them, tokens of a page, window and fixed split (0: none), precision of fp32, and the powers
    of two that hold the sequences and the heads of a group.
    """

    rows: Any
    keys: Any
    group: Any
    size: Any
    dims: Any
    page: Any
    window: Any
    split: Any
    precision: Any
    sequences: Any
    heads: Any
    is_turned: Any


def describe_tiles(call: PagedCall, config: PagedConfig) -> PagedTiles:
    """The constants of a call's kernels."""
    heads, size = call.q.shape[1:]
    exact = torch.get_float32_matmul_precision() == "highest"
    constants = (
        config.rows, config.keys, heads // call.keys.shape[2], size, max(_LEAST, triton.next_power_of_2(size)),
        call.keys.shape[1], call.window, SPLIT if call.is_invariant else 0, "ieee" if exact else "tf32",
        triton.next_power_of_2(call.lengths.shape[0]), triton.next_power_of_2(heads // call.keys.shape[2]),
        config.is_turned,
    )  # fmt: skip
    return PagedTiles(*map(fixed, constants))


def _launch(
    kernel: Any, programs: int, call: PagedCall, shape: PagedTiles, config: PagedConfig, *arguments: Any
) -> None:
    """Launch a kernel of a call; arguments: after the cache and the shape."""
    cache = PagedCache(
        call.keys, call.values, call.table, call.lengths, call.offsets, call.keys.shape[2], call.table.shape[1],
        *call.keys.stride()[:3],
    )  # fmt: skip
    launch = find_launches(call.q.device)
    flat = [each for one in arguments for each in (one if isinstance(one, NewTokens) else (one,))]
    kinds = [float if isinstance(one, float) else kind_of(one) for one in (*cache, *flat)]
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    key = *(one.value for one in shape), *kinds, *options.values()
    launch(kernel, key, programs, (cache, shape, *arguments), **options, enable_fp_fusion=not call.is_invariant)


def divide_keys(call: PagedCall, config: PagedConfig) -> tuple[int, int]:
    """(splits of a single token's keys at most, programs that share them): what fills the GPU, or fixed splits."""
    most, pairs = call.table.shape[1] * call.keys.shape[1], call.lengths.shape[0] * call.keys.shape[2]
    processors = count_processors(call.q.device.index) if call.q.is_cuda else _INTERPRETED
    programs = max(1, config.programs_of_processor * processors // pairs)
    if call.is_invariant:
        splits = divide_up(most, SPLIT)
        return splits, min(programs, splits)
    splits = min(programs, _MAX_SPLITS, divide_up(most, config.keys))
    return splits, splits


def _launch_singles(
    call: PagedCall, out: Tensor, config: PagedConfig, new: NewTokens | None = None, arrivals: Tensor | None = None
) -> None:
    sequences, kv_heads, (heads, size) = call.lengths.shape[0], call.keys.shape[2], call.q.shape[1:]
    splits, parts = divide_keys(call, config)
    sums = stats = None
    if parts > 1:
        sums = out.new_empty(sequences, heads, splits, size, dtype=torch.float32)
        stats = out.new_empty(sequences, heads, splits, 2, dtype=torch.float32)
        arrivals = out.new_zeros(sequences * kv_heads, dtype=torch.int32) if arrivals is None else arrivals
    arguments = call.q, out, sums, stats, splits, parts, call.scale * _LOG2_E, new, arrivals
    _launch(attend_singles, sequences * kv_heads * parts, call, describe_tiles(call, config), config, *arguments)


def _launch_chunks(call: PagedCall, out: Tensor, config: PagedConfig) -> None:
    tokens, heads, _ = call.q.shape
    sequences, kv_heads = call.lengths.shape[0], call.keys.shape[2]
    tiles = tokens // (config.rows // (heads // kv_heads)) + sequences
    arguments = call.q, out, sequences, call.scale * _LOG2_E
    shape = describe_tiles(call, config)
    _launch(attend_chunks, tiles * kv_heads, call, shape, config, *arguments)


@triton.jit
def _attend_keys(cache, shape, q, pages, position, kv_head, begin, end, whole, scale, state):  # type: ignore[no-untyped-def]
    """Go on with a partial result, the state (most, total [rows], out [rows, dims]), by the keys from begin to end - 1.

    position: [rows], each query's. pages: pointer to the sequence's pages. whole: None, or all queries see the keys
    before it, whose tiles take no masks; masks that hide nothing change no bit.
    """
    middle = begin
    if whole is not None:  # noqa: SIM102 - known when it is compiled
        if shape.window == 0:
            middle = begin + tl.maximum(tl.minimum(whole, end) - begin, 0) // shape.keys * shape.keys
            for start in range(begin, middle, shape.keys):
                state = _attend_tile(cache, shape, q, pages, position, kv_head, start, end, scale, state, False)
    for start in range(middle, end, shape.keys):
        state = _attend_tile(cache, shape, q, pages, position, kv_head, start, end, scale, state, True)
    return state


@triton.jit
def _attend_tile(  # type: ignore[no-untyped-def]
    cache, shape, q, pages, position, kv_head, start, end, scale, state, HIDES: tl.constexpr
):
    """Go on with a partial result by one tile of keys. HIDES: some lie behind the end, or are not seen by a query.

    Of a turned tile all tensors are transposed, q among them.
    """
    most, total, out = state
    axis: tl.constexpr = 1 if shape.is_turned else 0  # of queries in scores and the result
    dims = tl.arange(0, shape.dims)
    key = start + tl.arange(0, shape.keys)
    there = key < end
    if HIDES:
        page = tl.load(pages + key // shape.page, mask=there, other=0).to(tl.int64)
    else:
        page = tl.load(pages + key // shape.page).to(tl.int64)
    place = page * cache.page_stride + (key % shape.page) * cache.slot_stride + kv_head * cache.head_stride
    k_place = cache.key_cache + tl.expand_dims(place, axis) + tl.expand_dims(dims, 1 - axis)
    v_place = cache.value_cache + tl.expand_dims(place, 1 - axis) + tl.expand_dims(dims, axis)
    if shape.size == shape.dims and not HIDES:
        k = tl.load(k_place)
        v = tl.load(v_place)
    elif shape.size == shape.dims:
        k = tl.load(k_place, mask=tl.expand_dims(there, axis), other=0)
        v = tl.load(v_place, mask=tl.expand_dims(there, 1 - axis), other=0)
    else:
        inside = dims < shape.size
        k = tl.load(k_place, mask=tl.expand_dims(there, axis) & tl.expand_dims(inside, 1 - axis), other=0)
        v = tl.load(v_place, mask=tl.expand_dims(there, 1 - axis) & tl.expand_dims(inside, axis), other=0)
    if shape.is_turned:
        scores = tl.dot(k, q, input_precision=shape.precision) * scale
    else:
        scores = tl.dot(q, k, input_precision=shape.precision) * scale
    if HIDES:
        keys, positions = tl.expand_dims(key, axis), tl.expand_dims(position, 1 - axis)
        seen = tl.expand_dims(there, axis) & (keys <= positions)
        if shape.window > 0:
            seen = seen & (keys > positions - shape.window)
        scores = tl.where(seen, scores, float("-inf"))
    top = tl.max(scores, 1 - axis)
    larger = tl.maximum(most, top)
    base = tl.where(larger == float("-inf"), 0.0, larger)
    weights = tl.exp2(scores - tl.expand_dims(base, 1 - axis))
    shrink = tl.exp2(most - base)
    if shape.split > 0:
        # Integers have one sum, however a layout adds them up. The tile's largest weight has 23 bits or so; added to
        # 2^23 they are a number's last, and no slow conversion is needed.
        bits = 23.0 - tl.maximum(tl.ceil(top - base), -64.0)
        units = tl.fma(weights, tl.expand_dims(tl.exp2(bits), 1 - axis), 8388608.0).to(tl.int32, bitcast=True)
        total = total * shrink + tl.sum(units - 0x4B000000, 1 - axis).to(tl.float32) * tl.exp2(-bits)
    else:
        total = total * shrink + tl.sum(weights, 1 - axis)
    out = out * tl.expand_dims(shrink, 1 - axis)
    if shape.is_turned:
        out = tl.dot(v, weights.to(v.dtype), out, input_precision=shape.precision)
    else:
        out = tl.dot(weights.to(v.dtype), v, out, input_precision=shape.precision)
    return larger, total, out


@triton.jit
def _merge(one, other, IS_TURNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The partial result of both: (most, total, out). IS_TURNED: out has its rows in the last dim."""
    axis: tl.constexpr = 0 if IS_TURNED else len(one[0].shape)
    larger = tl.maximum(one[0], other[0])
    base = tl.where(larger == float("-inf"), 0.0, larger)
    first, second = tl.exp2(one[0] - base), tl.exp2(other[0] - base)
    total = one[1] * first + other[1] * second
    out = tl.fma(one[2], tl.expand_dims(first, axis), other[2] * tl.expand_dims(second, axis))
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
def _rotate(row, dims, inside, cos, sin, shape):  # type: ignore[no-untyped-def]
    """heads * cos + (-second halves, first halves) * sin, of heads at pointers `row`: fp32 [., dims]."""
    half: tl.constexpr = shape.size // 2
    there = dims < shape.size
    other = tl.where(dims < half, dims + half, dims - half)
    c = tl.load(cos + dims, mask=there, other=0).to(tl.float32)
    s = tl.load(sin + dims, mask=there, other=0).to(tl.float32)
    head = tl.load(row + dims[None, :], mask=inside, other=0).to(tl.float32)
    turned = tl.load(row + other[None, :], mask=inside, other=0).to(tl.float32)
    return tl.fma(head, c[None, :], turned * tl.where(dims < half, -s, s)[None, :])  # as other kernels of rotations


@triton.jit
def _store_new(cache, shape, new, pages, sequence, kv_head, key, dims):  # type: ignore[no-untyped-def]
    """Store a sequence's new key, rotated, and value of a kv head at their place, that of token `key`."""
    one = tl.arange(0, 1)
    inside = (one == 0)[:, None] & (dims < shape.size)[None, :]
    page = tl.load(pages + key // shape.page).to(tl.int64)
    place = page * cache.page_stride + (key % shape.page) * cache.slot_stride + kv_head * cache.head_stride
    at = place + one[:, None] + dims[None, :]
    row = new.key + sequence.to(tl.int64) * new.key_stride + kv_head * shape.size + one[:, None]
    angle = sequence.to(tl.int64) * shape.size
    rotated = _rotate(row, dims, inside, new.cos + angle, new.sin + angle, shape)
    tl.store(cache.key_cache + at, rotated.to(cache.key_cache.dtype.element_ty), mask=inside)
    row = new.value + sequence.to(tl.int64) * new.value_stride + kv_head * shape.size + one[:, None]
    tl.store(cache.value_cache + at, tl.load(row + dims[None, :], mask=inside, other=0), mask=inside)


@triton.jit
def attend_singles(cache, shape, q, out, sums, stats, splits, parts, scale, new, arrivals):  # type: ignore[no-untyped-def]
    """The attention of a sequence's only new token, for the heads of one kv head: every `parts`-th split of the keys.

    Of one part: into out; else partial results into sums [sequences, heads, splits, d] and stats [.., 2]. Programs of
    sequences with other numbers of new tokens, and of splits without keys, do nothing. new: None, or what is to be
    rotated and stored: by the program whose split has the new token, and read by it alone, after a barrier. Bytes: keys
    and values are read once.
    Synchronization: arrivals, a counter for each sequence and kv head, 0 before and after: partial results, a barrier
    of the block, an addition of their number (acquire and release, of the GPU's scope); the program that arrives last
    reads and merges all, from the first split to the last, and sets the counter back. No program waits.
    """
    program = tl.program_id(0)
    part = program % parts
    kv_head = program // parts % cache.kv_heads
    sequence = program // parts // cache.kv_heads
    first, count = _count_tokens(cache.offsets, sequence)
    length = tl.load(cache.lengths + sequence)
    pages = cache.table + sequence.to(tl.int64) * cache.width
    # Adds 0, as no page is negative: the first pages are on their way while the length is.
    length += ((tl.load(pages) < 0) & (length > 0)).to(tl.int32)
    low, high = _find_used(shape, length, splits)
    own = low + part
    if (count == 1) & ((own < high) | ((part == 0) & (low >= high))):
        row = tl.arange(0, shape.rows)
        dims = tl.arange(0, shape.dims)
        head = kv_head * shape.group + row
        heads = cache.kv_heads * shape.group
        inside = (row < shape.group)[:, None] & (dims < shape.size)[None, :]
        at = (first.to(tl.int64) * heads + head)[:, None] * shape.size + dims[None, :]
        if new is None:
            queries = tl.load(q + at, mask=inside, other=0)
        else:
            angle = first.to(tl.int64) * shape.size
            rows = q + first.to(tl.int64) * new.query_stride + head[:, None] * shape.size
            queries = _rotate(rows, dims, inside, new.cos + angle, new.sin + angle, shape).to(q.dtype.element_ty)
            if part == (high - 1 - low) % parts:
                _store_new(cache, shape, new, pages, sequence, kv_head, length - 1, dims)
                tl.debug_barrier()
        if shape.is_turned:
            queries = tl.trans(queries)
        position = row * 0 + length - 1
        place = 0 if sums is None else (sequence.to(tl.int64) * heads + head) * splits
        if shape.split > 0:
            state = _attend_splits(
                cache, shape, queries, pages, position, kv_head, (own, high, parts), length, None, scale,
                None if sums is None else (sums, stats, place, inside),
            )  # fmt: skip
        else:
            begin, end = _find_split(length, own, splits, shape.window, shape.keys)
            state = _attend_keys(
                cache, shape, queries, pages, position, kv_head, begin, end, None, scale, _begin(shape)
            )
        if sums is None:
            tl.store(out + at, _finish(state, shape).to(out.dtype.element_ty), mask=inside)
        else:
            if shape.split == 0:
                _store_partial(shape, sums, stats, place + own, inside, state)
            tl.debug_barrier()
            counter = arrivals + sequence * cache.kv_heads + kv_head
            done = tl.maximum(tl.cdiv(high - own, parts), 0)
            if tl.atomic_add(counter, done, sem="acq_rel", scope="gpu") + done == tl.maximum(high - low, 0):
                _merge_rows(shape, out, sums, stats, sequence, first, kv_head, heads, splits, low, high)
                tl.store(counter, 0)


@triton.jit
def _begin(shape):  # type: ignore[no-untyped-def]
    """(most, total, result) of no keys."""
    return (
        tl.full((shape.rows,), float("-inf"), tl.float32),
        tl.zeros((shape.rows,), tl.float32),
        tl.zeros((shape.dims, shape.rows) if shape.is_turned else (shape.rows, shape.dims), tl.float32),
    )


@triton.jit
def _attend_splits(cache, shape, queries, pages, position, kv_head, splits, end, whole, scale, partials):  # type: ignore[no-untyped-def]
    """The partial result of the fixed splits first, first + parts, ... below high, merged from the first to the last.

    splits: (first, high, parts). end: behind the last key. partials: None, or (sums, stats, place, inside) by which
    each split's partial result is stored, at place + split. One loop over all tiles, so that loads go on from split to
    split; see `_attend_keys`.
    """
    first, high, parts = splits
    each: tl.constexpr = shape.split // shape.keys
    count = tl.cdiv(tl.maximum(high - first, 0), parts)
    last = (first + (count - 1) * parts) * shape.split
    tiles = (count - 1) * each + tl.cdiv(tl.minimum(end - last, shape.split), shape.keys)
    state = _begin(shape)
    merged = _begin(shape)
    middle = tiles * 0
    if whole is not None:  # noqa: SIM102 - known when it is compiled
        if shape.window == 0:
            middle = tl.minimum(tl.maximum(whole // shape.keys - first * each, 0), tiles)
            for tile in range(middle):
                start = first * shape.split + tile * shape.keys
                state = _attend_tile(cache, shape, queries, pages, position, kv_head, start, end, scale, state, False)
                if tile % each == each - 1:
                    merged = _merge(merged, state, shape.is_turned)
                    state = _begin(shape)
    for tile in range(middle, tiles):
        split = first + tile // each * parts
        start = split * shape.split + tile % each * shape.keys
        state = _attend_tile(cache, shape, queries, pages, position, kv_head, start, end, scale, state, True)
        if (tile % each == each - 1) | (tile == tiles - 1):
            if partials is None:
                merged = _merge(merged, state, shape.is_turned)
            else:
                sums, stats, place, inside = partials
                _store_partial(shape, sums, stats, place + split, inside, state)
            state = _begin(shape)
    return _merge(merged, state, shape.is_turned)  # where no split was left for the second loop


@triton.jit
def _store_partial(shape, sums, stats, place, inside, state):  # type: ignore[no-untyped-def]
    """Store a partial result of the rows at `place`."""
    most, total, result = state
    dims = tl.arange(0, shape.dims)
    used = tl.arange(0, shape.rows) < shape.group
    result = tl.trans(result) if shape.is_turned else result
    tl.store(sums + place[:, None] * shape.size + dims[None, :], result, mask=inside)
    tl.store(stats + place * 2, most, mask=used)
    tl.store(stats + place * 2 + 1, total, mask=used)


@triton.jit
def _finish(state, shape):  # type: ignore[no-untyped-def]
    """fp32 [rows, dims]: the result of a partial result that is whole."""
    _most, total, result = state
    result = tl.trans(result) if shape.is_turned else result
    return result / tl.where(total == 0, 1.0, total)[:, None]


@triton.jit
def _find_used(shape, length, splits):  # type: ignore[no-untyped-def]
    """(the first split that has keys, the last one + 1)."""
    low = length * 0
    if shape.window > 0:
        low = tl.maximum(length - shape.window, 0)
    if shape.split > 0:
        begin = low // shape.split
        end = tl.cdiv(length, shape.split)
    else:
        low = low // shape.keys * shape.keys if shape.window > 0 else low
        part = tl.cdiv(tl.cdiv(length - low, shape.keys), splits) * shape.keys
        begin = length * 0
        end = tl.cdiv(length - low, tl.maximum(part, 1))
    return begin, end


@triton.jit
def _merge_rows(shape, out, sums, stats, sequence, first, kv_head, heads, splits, begin, end):  # type: ignore[no-untyped-def]
    """Merge the partial results of a kv head's heads of a single token, from the first split to the last, into out.

    Some splits' loads are on their way at a time: one after another, they would take a latency each.
    """
    row = tl.arange(0, shape.heads)
    dims = tl.arange(0, shape.dims)
    there = row < shape.group
    head = kv_head * shape.group + row
    inside = there[:, None] & (dims < shape.size)[None, :]
    state = (
        tl.full((shape.heads,), float("-inf"), tl.float32),
        tl.zeros((shape.heads,), tl.float32),
        tl.zeros((shape.heads, shape.dims), tl.float32),
    )
    base = (sequence.to(tl.int64) * heads + head) * splits
    count: tl.constexpr = 8 if shape.heads * shape.dims <= _MERGED else 2
    for start in range(begin, end, count):
        results = ()
        mosts = ()
        totals = ()
        for index in tl.static_range(count):
            place = base + start + index
            is_used = start + index < end
            one = tl.load(sums + place[:, None] * shape.size + dims[None, :], mask=inside & is_used, other=0.0)
            results = results + (one,)  # noqa: RUF005 - Triton takes no starred ones
            mosts = mosts + (tl.load(stats + place * 2, mask=there & is_used, other=float("-inf")),)  # noqa: RUF005
            totals = totals + (tl.load(stats + place * 2 + 1, mask=there & is_used, other=0.0),)  # noqa: RUF005
        for index in tl.static_range(count):
            if start + index < end:
                state = _merge(state, (mosts[index], totals[index], results[index]), False)
    result = state[2] / tl.where(state[1] == 0, 1.0, state[1])[:, None]
    at = (first.to(tl.int64) * heads + head)[:, None] * shape.size + dims[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def attend_chunks(cache, shape, q, out, sequences, scale):  # type: ignore[no-untyped-def]
    """The attention of a tile of a chunk's tokens, for the heads of one kv head; single tokens are left out.

    A sequence's tiles begin at number offsets // tokens of a tile + sequence, so that the host needs no lengths; there
    are programs without a tile. Those with many keys, the last of a chunk, begin first. Synchronization: none.
    """
    each: tl.constexpr = shape.rows // shape.group
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = program % cache.kv_heads
    tile = program // cache.kv_heads
    every = tl.arange(0, shape.sequences)
    starts = tl.load(cache.offsets + every, mask=every < sequences, other=0) // each + every
    sequence = tl.sum(((starts <= tile) & (every < sequences)).to(tl.int32), 0) - 1
    first, count = _count_tokens(cache.offsets, sequence)
    token = (tile - first // each - sequence) * each
    if (count > 1) & (token < count):
        length = tl.load(cache.lengths + sequence)
        row = tl.arange(0, shape.rows)
        dims = tl.arange(0, shape.dims)
        own = token + row // shape.group
        head = kv_head * shape.group + row % shape.group
        used = (row < each * shape.group) & (own < count)
        inside = used[:, None] & (dims < shape.size)[None, :]
        at = ((first + own).to(tl.int64) * (cache.kv_heads * shape.group) + head)[:, None] * shape.size + dims[None, :]
        queries = tl.load(q + at, mask=inside, other=0)
        position = length - count + own
        low = length * 0
        if shape.window > 0:
            low = tl.maximum(length - count + token - shape.window + 1, 0) // shape.keys * shape.keys
        end = tl.minimum(length - count + token + each, length)
        pages = cache.table + sequence.to(tl.int64) * cache.width
        if shape.split > 0:
            state = _attend_splits(
                cache, shape, queries, pages, position, kv_head, (low // shape.split, tl.cdiv(end, shape.split), 1),
                end, length - count + token + 1, scale, None,
            )  # fmt: skip
        else:
            state = _attend_keys(
                cache, shape, queries, pages, position, kv_head, low, end, length - count + token + 1, scale,
                _begin(shape),
            )  # fmt: skip
        tl.store(out + at, _finish(state, shape).to(out.dtype.element_ty), mask=inside)
