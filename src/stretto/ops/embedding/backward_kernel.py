"""The backward pass on the device: gradients to the owners of the tables, and row by row into them.

The paper leaves it for later. A lookup is an index's position; sorted by (table, row), positions with one row are a
segment, whose gradients are added in the order of positions: the same input gives the same bits. Segments are cut at
every multiple of LIMIT sorted positions, into chunks, so that no program adds up for long; what a cut segment's chunks
give is added by `combine_chunks`, in order.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from stretto import tiles
from stretto.ops.embedding.pooling_kernel import META, read_bags

QUANTUM = tl.constexpr(4)
"""Dims are multiples of this many elements; places in the gradient are counted in them, and most fit into 32 bits."""

ACTIONS = ("store", "sgd", "adagrad")


class Segments(NamedTuple):
    """Sorted lookups, as kernels take them; one argument.

    keys: [total], a row's number among the rows of all tables, sorted; `rows`, the number of them all, for a lookup
    that has none. places: int32 or int64 [total], where each sorted lookup's bag has its gradient. scales: fp32
    [total], its factor; None for 1. starts: int64, the first lookup of each chunk, and the end of the last one.
    numbers, tables: int32, each chunk's segment and its table. totals: int64 [2], chunks, segments. total: of
    lookups. quanta: of a row of the gradient.
    """

    keys: Any
    places: Any
    scales: Any
    starts: Any
    numbers: Any
    tables: Any
    totals: Any
    total: Any
    rows: Any
    quanta: Any


class Target(NamedTuple):
    """Where a segment's sum goes: one argument.

    meta: int64 [tables, 4]: address, first key, dim, address of the table's state (fp32 [rows]), or with by_number the
    number of its first segment. tables_of: int32, the table of each QUANTUM of columns. action: one of `ACTIONS`.
    by_number: rows are segments' numbers (sparse gradients), not tables' rows. settings: fp32 [2], learning rate and
    epsilon. failed: int32 [1], the process's failure flag, for actions of optimizers: while it is set nothing is
    updated. multiple: every dim and every address, in elements, is one.
    """

    meta: Any
    tables_of: Any
    settings: Any
    failed: Any
    action: Any
    by_number: Any
    block: Any
    multiple: Any


@triton.jit
def push_gradients(channel, mapping, grad, columns, staging, batch, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each rank's columns of grad [batch, width] into its owner's staging [world * batch, the owner's columns].

    columns: int64 [world + 1], where each rank's begin.
    Order: the next rank's first, own ones last. Signals: after some rows' stores, their channel at the owner ("p2p").
    Waits: at the end, each program for its share of (source, channel), so that when the kernel has ended, staging is
    complete. Rows are claimed, so no program waits before programs that run have all rows; and a launch leaves room for
    another group's (`bound_programs`).
    Reuse: staging is stored to only when all ranks have begun this call, and so ended the one before.
    """
    groups = tl.cdiv(batch, ROWS)
    index = tiles.claim(channel)
    while index < channel.world * groups:
        following = tiles.claim(channel)  # before the copy, which takes longer
        owner = (channel.rank + 1 + index // groups) % channel.world
        group = index % groups
        row = group * ROWS + tl.arange(0, ROWS)
        first = tl.multiple_of(tl.load(columns + owner), QUANTUM)
        count = tl.multiple_of(tl.load(columns + owner + 1), QUANTUM) - first
        there = tiles.peer_pointer(channel, staging, owner)
        source = tl.multiple_of(row.to(tl.int64) * width, QUANTUM) + first
        target = tl.multiple_of((channel.rank * batch + row).to(tl.int64) * count, QUANTUM)
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = (row < batch)[:, None] & (at < count)[None, :]
            values = tl.load(grad + (source[:, None] + at[None, :]), mask=inside)
            tl.store(there + (target[:, None] + at[None, :]), values, mask=inside)
        tiles.producer_tile_notify(channel, mapping, owner * groups + group, "p2p")
        index = following
    for index in range(tl.program_id(0), channel.world * mapping.channels, tl.num_programs(0)):
        source_rank = (channel.rank + 1 + index // mapping.channels) % channel.world
        tile = channel.rank * groups + index % mapping.channels * (mapping.channel_rows)
        if index % mapping.channels * mapping.channel_rows < groups:
            tiles.consumer_tile_wait(channel, mapping, tile, source=source_rank)


@triton.jit
def find_keys(  # type: ignore[no-untyped-def]
    lookup, pooling, indices, offsets, weights, bases, keys, places, scales, world, rows, report, STEPS: tl.constexpr
):
    """The key, place and scale of every lookup; those without a row keep what keys had before.

    bases: int64 [tables], each table's first key.
    """
    count = lookup.batch * world
    quanta = lookup.width // QUANTUM
    steps = tl.arange(0, STEPS)
    groups = tl.cdiv(count, pooling.bags)
    for index in range(tl.program_id(0), lookup.tables * groups, tl.num_programs(0)):
        table = index // groups
        sample = index % groups * pooling.bags + tl.arange(0, pooling.bags)
        inside = sample < count
        start, end = read_bags(lookup, pooling, offsets, table, world, sample, inside, report)
        here, column = tl.load(lookup.meta + table * META + 1), tl.load(lookup.meta + table * META + 3)
        key = tl.load(bases + table)
        place = (sample.to(tl.int64) * quanta + column // QUANTUM).to(places.dtype.element_ty)
        scale = tl.full((pooling.bags,), 1.0, tl.float32)
        if pooling.is_mean:
            scale = 1.0 / tl.maximum(end - start, 1).to(tl.float32)
        for step in range(0, tl.max(end - start, 0), STEPS):
            at = start[:, None] + step + steps[None, :]
            mask = at < end[:, None]
            row = tl.load(indices + at, mask=mask, other=0)
            known = mask & (row >= 0) & (row < here)
            tl.store(keys + at, (row + key).to(keys.dtype.element_ty), mask=known)
            tl.store(places + at, tl.broadcast_to(place[:, None], (pooling.bags, STEPS)), mask=mask)
            if scales is not None:
                factor = tl.broadcast_to(scale[:, None], (pooling.bags, STEPS))
                if weights is not None:
                    factor *= tl.load(weights + at, mask=mask, other=0.0).to(tl.float32)
                tl.store(scales + at, factor, mask=mask)


@triton.jit
def _find_boundaries(keys, total, rows, at, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """(key, whether a segment begins, whether a chunk does, whether lookups with rows end) at sorted lookups."""
    inside = at < total
    key = tl.load(keys + at, mask=inside, other=0)
    before = tl.load(keys + at - 1, mask=inside & (at > 0), other=-1)
    is_new = key != before
    is_known = inside & (key < rows)
    begins = is_known & is_new
    is_end = inside & (key == rows) & is_new
    return key, begins, begins | (is_known & (at % LIMIT == 0)), is_end


@triton.jit
def count_chunks(keys, counts, total, rows, LIMIT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """counts [2 * blocks]: how many chunks, then segments, begin in each block of sorted lookups. A program a block."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _, begins, chunk, _ = _find_boundaries(keys, total, rows, at, LIMIT)
    counts += tl.program_id(0)
    tl.store(counts, tl.sum(chunk.to(tl.int32), 0).to(tl.int64))
    tl.store(counts + tl.num_programs(0), tl.sum(begins.to(tl.int32), 0).to(tl.int64))


@triton.jit
def place_chunks(  # type: ignore[no-untyped-def]
    keys, order, places, scales, tables_of, sums, segments, uniques, LIMIT: tl.constexpr, BLOCK: tl.constexpr
):
    """Write down where chunks begin, which segment and which table they are of, and what each sorted lookup adds.

    keys, order: sorted, and each one's position; places, scales: by position. sums [2 * blocks]: counts, each with
    all before it. What hangs on a position is loaded here, where nothing waits for it, and not where gradients are
    added up.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total, rows = segments.total, segments.rows
    key, begins, chunk, is_end = _find_boundaries(keys, total, rows, at, LIMIT)
    position = tl.load(order + at, mask=at < total, other=0)
    place = tl.load(places + position, mask=at < total, other=0)
    tl.store(segments.places + at, place, mask=at < total)
    if scales is not None:
        tl.store(segments.scales + at, tl.load(scales + position, mask=at < total, other=0), mask=at < total)
    chunks_here, segments_here = chunk.to(tl.int32), begins.to(tl.int32)
    block, blocks = tl.program_id(0), tl.num_programs(0)
    chunks = tl.load(sums + blocks - 1)
    chunks_so_far, segments_so_far = tl.load(sums + block), tl.load(sums + blocks + block) - chunks
    if block == blocks - 1:
        tl.store(segments.totals, chunks_so_far)
        tl.store(segments.totals + 1, segments_so_far)
    after = chunks_so_far - tl.sum(chunks_here, 0) + tl.cumsum(chunks_here, 0)
    number = segments_so_far - tl.sum(segments_here, 0) + tl.cumsum(segments_here, 0) - 1
    tl.store(segments.starts + after - 1, at, mask=chunk)
    tl.store(segments.numbers + after - 1, number.to(tl.int32), mask=chunk)
    table = tl.load(tables_of + place % segments.quanta, mask=chunk, other=0)
    tl.store(segments.tables + after - 1, table, mask=chunk)
    tl.store(uniques + number, key, mask=begins)
    tl.store(segments.starts + after, at, mask=is_end)
    tl.store(segments.starts + after, at + 1, mask=(at == total - 1) & (key < rows))


@triton.jit
def reduce_chunks(segments, target, staging, partials, LIMIT: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add up chunks' gradients; whole segments go to the target, parts of others to partials [cuts, 2, block] (fp32).

    A tile is CHUNKS chunks, of each of which ROWS gradients are in flight. The part that begins at cut m is partial
    (m, 1), the one that ends there and does not begin at a cut is (m, 0).
    """
    chunks = tl.load(segments.totals)
    columns = tl.arange(0, target.block)
    steps = tl.arange(0, ROWS)
    for tile in range(tl.program_id(0), tl.cdiv(chunks, CHUNKS), tl.num_programs(0)):
        # Loads that hang on each other are three deep: chunks, then keys and places, then gradients and target rows.
        chunk = tl.cast(tile, tl.int64) * CHUNKS + tl.arange(0, CHUNKS)
        inside = chunk < chunks
        start = tl.load(segments.starts + chunk, mask=inside, other=0)
        end = tl.load(segments.starts + chunk + 1, mask=inside, other=0)
        table = tl.load(segments.tables + chunk, mask=inside, other=0)
        number = tl.load(segments.numbers + chunk, mask=inside, other=0)
        key = tl.load(segments.keys + start, mask=inside, other=0)
        begins = tl.load(segments.keys + start - 1, mask=inside & (start > 0), other=-1) != key
        ends = tl.load(segments.keys + end, mask=inside & (end < segments.total), other=-1) != key
        row, pointers, columns_inside, state, dim = _locate(target, staging, table, key, number, inside)
        held = _read(target, pointers, columns_inside)
        total = tl.zeros((CHUNKS, target.block), tl.float32)
        at = start[:, None] + steps[None, :]
        place = tl.load(segments.places + at, mask=at < end[:, None], other=0)
        for _ in range(0, tl.max(end - start, 0), ROWS):
            known = at < end[:, None]
            next_place = tl.load(segments.places + at + ROWS, mask=at + ROWS < end[:, None], other=0)
            offset = tl.multiple_of(place.to(tl.int64) * QUANTUM, (target.multiple, target.multiple))
            mask = known[:, :, None] & (columns[None, None, :] < dim[:, None, None])
            values = tl.load(staging + (offset[:, :, None] + columns[None, None, :]), mask=mask, other=0.0)
            values = values.to(tl.float32)
            if segments.scales is not None:
                values *= tl.load(segments.scales + at, mask=known, other=0.0)[:, :, None]
            total += tl.sum(values, 1)
            at += ROWS
            place = next_place
        whole = inside & begins & ends
        _apply(target, pointers, columns_inside & whole[:, None], row, state, dim, held, total, whole)
        part = tl.where(start % LIMIT == 0, start // LIMIT * 2 + 1, end // LIMIT * 2)
        pointers = partials + (part * target.block)[:, None] + columns[None, :]
        tl.store(pointers, total, mask=(inside & ((begins & ends) == 0))[:, None])


@triton.jit
def combine_chunks(segments, target, staging, partials, LIMIT: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add up the parts of a segment that is cut, in order. A program a cut: the segment's first one does it."""
    cut = tl.program_id(0).to(tl.int64) + 1
    key = tl.load(segments.keys + cut * LIMIT)
    before = tl.load(segments.keys + cut * LIMIT - 1)
    earlier = tl.load(segments.keys + (cut - 1) * LIMIT)
    is_cut = (key == before) & (key < segments.rows)
    starts_at_cut = tl.load(segments.keys + (cut - 1) * LIMIT - 1, mask=cut > 1, other=-1) != key
    if is_cut & ((earlier != key) | starts_at_cut):
        columns = tl.arange(0, target.block)
        first = tl.where(earlier != key, cut * 2, (cut - 1) * 2 + 1)
        total = tl.load(partials + first * target.block + columns)
        follows = True
        step = cut * 0
        while follows:
            at = cut + step + tl.arange(0, ROWS)
            is_part = at * LIMIT < segments.total
            is_part = is_part & (tl.load(segments.keys + at * LIMIT, mask=is_part, other=-1) == key)
            parts = partials + ((at * 2 + 1) * target.block)[:, None] + columns[None, :]
            total += tl.sum(tl.load(parts, mask=is_part[:, None], other=0.0), 0)
            follows = tl.sum(is_part.to(tl.int32), 0) == ROWS
            step += ROWS
        # As a tile of one segment. Any of its lookups says which table it is of: the one at the cut, say.
        one = tl.zeros((1,), tl.int64) + cut * LIMIT
        inside = one >= 0
        table = tl.load(target.tables_of + tl.load(segments.places + one) % segments.quanta)
        number = tl.zeros((1,), tl.int32)
        if target.by_number:
            number = tl.load(segments.numbers + _find_chunk(segments, one))
        row, pointers, mask, state, dim = _locate(target, staging, table, tl.load(segments.keys + one), number, inside)
        held = _read(target, pointers, mask)
        _apply(target, pointers, mask, row, state, dim, held, total[None, :], inside)


@triton.jit
def _find_chunk(segments, lookup):  # type: ignore[no-untyped-def]
    """The chunk that begins at a sorted lookup, by halving."""
    low = lookup * 0
    high = low + tl.load(segments.totals)
    for _ in range(40):
        middle = (low + high) // 2
        is_later = tl.load(segments.starts + middle) <= lookup
        low = tl.where(is_later, middle, low)
        high = tl.where(is_later, high, middle)
    return low


@triton.jit
def _locate(target, staging, table, key, number, inside):  # type: ignore[no-untyped-def]
    """(row, pointers to it [segments, block], which of them are inside, last word, dim) of segments' targets."""
    words = target.meta + table * META
    dim = tl.multiple_of(tl.load(words + 2, mask=inside, other=0), target.multiple)
    row = key.to(tl.int64) - tl.load(words + 1, mask=inside, other=0)
    last = tl.load(words + 3, mask=inside, other=0)
    if target.by_number:
        row = number.to(tl.int64) - last
    columns = tl.arange(0, target.block)
    mask = inside[:, None] & (columns[None, :] < dim[:, None])
    alignment: tl.constexpr = target.multiple * staging.dtype.element_ty.primitive_bitwidth // 8
    base = tl.multiple_of(tl.load(words, mask=inside, other=0), alignment).to(staging.dtype)
    base = tl.multiple_of(base, alignment)
    offset = tl.multiple_of(row * dim, target.multiple)
    return row, (base + offset)[:, None] + columns[None, :], mask, last, dim


@triton.jit
def _read(target, pointers, mask):  # type: ignore[no-untyped-def]
    """What the target's rows hold; of one that is only stored to, nothing."""
    held = tl.zeros(pointers.shape, tl.float32)
    if target.action != "store":
        held = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    return held


@triton.jit
def _apply(target, pointers, mask, row, state, dim, held, total, inside):  # type: ignore[no-untyped-def]
    """What becomes of segments' sums, fp32 [segments, block]: stored, or a step of an optimizer on their rows.

    state: the address of the table's state; held: what `_read` has read.
    """
    if target.action == "store":
        tl.store(pointers, total.to(pointers.dtype.element_ty), mask=mask)
    else:
        # Gradients that came after a wait had failed are wrong: tables and their state stay as they are.
        updates = tl.load(target.failed) == 0
        mask = mask & updates
        inside = inside & updates
        step = total * tl.load(target.settings)
        if target.action == "adagrad":
            squares_at = state.to(tl.pointer_type(tl.float32)) + row
            squares = tl.sum(tl.where(mask, total * total, 0.0), 1) / tl.maximum(dim, 1).to(tl.float32)
            squares += tl.load(squares_at, mask=inside, other=0.0)
            tl.store(squares_at, squares, mask=inside)
            step = step / (tl.sqrt_rn(squares) + tl.load(target.settings + 1))[:, None]
        tl.store(pointers, (held - step).to(pointers.dtype.element_ty), mask=mask)
