# SPDX-License-Identifier: Apache-2.0
"""Kernels of the embedding backward pass: push gradients to the tables' owners, sort lookups, reduce them by row.

(The paper leaves the backward pass for later.) A lookup is the position of an index. Sorted by (table, row), the
lookups of one row are a segment. Its gradients are added in the order of positions, so the same input gives the same
bits. Segments are cut into chunks at every multiple of LIMIT sorted lookups, so that no program adds for long;
`combine_chunks` adds the partial sums of a cut segment, in order.

Worked example: ten lookups of 3 samples in table 0 (3 rows) and table 1 (4 rows), both of dim 4, with LIMIT = 4. A row
of the gradient has 8 columns, which are 2 QUANTUMs: sample s has its gradient for table t at place 2 s + t.

    position      0  1  2  3  4  5  6  7  8  9
    table         0  0  0  0  0  1  1  1  1  1
    sample        0  0  1  2  2  0  1  1  2  2
    indices       2  0  2  2  0  1  1  3  3  1
    keys          2  0  2  2  0  4  4  6  6  4     find_keys: the index plus the table's base (0 and 3)
    places        0  0  2  4  4  1  3  3  5  5     find_keys: position of the lookup's gradient

    sorted keys   0  0 |2  2 :2 |4  4  4 |6  6     torch.sort, stable; a | begins a segment, a : just a chunk (LIMIT)
    order         1  4  0  2  3  5  6  9  7  8     torch.sort: the position of each sorted lookup
    places        0  4  0  2  4  1  3  5  3  5     place_chunks: places[order]

    chunk            0       1       2       3       4
    starts           0       2       4       5       8     and the end, 10
    numbers          0       1       1       2       3     the segment of each chunk; uniques are keys 0, 2, 4, 6
    tables           0       0       0       1       1
    sum of places    0, 4    0, 2    4       1, 3, 5 3, 5  reduce_chunks
    goes to          row 0   partial partial row 1   row 3
                     of 0    (1, 0)  (1, 1)  of 1    of 1

    combine_chunks, cut 1: row 2 of table 0 gets partial (1, 0) + partial (1, 1)

An index that is out of range keeps the key 7, the number of all rows: it sorts last and belongs to no segment.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from stretto import tiles
from stretto.ops.embedding.pooling_kernel import META, read_bags

QUANTUM = tl.constexpr(4)
"""Elements. Every dim is a multiple of it; places in the gradient count it, so that most fit into 32 bits."""

ACTIONS = ("store", "sgd", "adagrad", "full-adagrad", "adam")
"""What `reduce_chunks` does with a row's sum: store a gradient, or make a step of an optimizer on the table's row."""

TARGET_META = tl.constexpr(9)  # words of `Target.meta` for each table
SETTINGS = tl.constexpr(6)  # numbers of `Target.settings` for each table


class LookupKeys(NamedTuple):
    """Kernel argument: what `find_keys` writes for each lookup, before the sort. All are [total].

    keys: int32 or int64, a row's number among the rows of all tables. places: int32 or int64, where the lookup's
    gradient lies, in QUANTUMs. scales: fp32, the factor of its gradient; None for 1.
    """

    keys: Any
    places: Any
    scales: Any


class Segments(NamedTuple):
    """Kernel argument: the sorted lookups and their chunks.

    keys, places, scales: [total], as in `LookupKeys`, but sorted by key; a lookup without a row has the key `rows`.
    Of each chunk, so that its reduction begins with one load of each: starts: int32 or int64, its first lookup, then
    the end of the last chunk. numbers: int32, its segment. tables: int32, twice its table, plus 1 where it begins a
    segment; after the last chunk's, 1. chunk_keys, chunk_places: its key, and its first lookup's place.
    totals: int64 [2], the number of chunks and of segments. total: of lookups. rows: of all tables. quanta: QUANTUMs of
    a row of the gradient.
    """

    keys: Any
    places: Any
    scales: Any
    starts: Any
    numbers: Any
    tables: Any
    chunk_keys: Any
    chunk_places: Any
    totals: Any
    total: Any
    rows: Any
    quanta: Any


class Target(NamedTuple):
    """Kernel argument: where the segments' sums go.

    meta: int64 [tables, 9]: address, first key, dim, address of the table's state (fp32 [rows], or [rows, dim]
    unless it is adagrad's; with by_number instead the number of the table's first segment), address of its second
    state, what of which table it is: number, first row, first column, and the address of its `CachedRows.slots`, or
    0. tables_of: int32, the table of each QUANTUM of columns. settings: fp32 [2], learning rate and epsilon, or
    [tables, 6]: also weight decay, the largest norm of a row's gradient, and how fast adam's means forget (1 -
    beta). corrections: fp32 [tables, 2], 1 - beta ** steps, for adam. clock: int64 [2], steps before this one and
    the seed of stochastic rounding, or None to round to the nearest. failed: int32 [1], the process's failure flag,
    for optimizers: while it is set, nothing is updated. permit: int32 [1], 0 for a look-up that ranks did not make
    together, whose backward pass stores and updates nothing; or None.
    Compiled in: action, one of `ACTIONS`; by_number: a target's rows are segments (sparse gradients), not the
    table's rows; by_table: settings are [tables, 6]; is_cached: some tables are caches, whose rows are found by
    slots; dim, if all tables have the same one, else 0; block, the power of two that holds every dim; multiple, which
    divides every dim and every address (in elements), also those of states [rows, dim].
    """

    meta: Any
    tables_of: Any
    settings: Any
    corrections: Any
    clock: Any
    failed: Any
    permit: Any
    action: Any
    by_number: Any
    by_table: Any
    dim: Any
    block: Any
    multiple: Any
    is_cached: Any


@triton.jit
def begin_push(channel, mapping, counts, permit, need, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Begin the call of `push_gradients`, if the look-up permits it; one program, in a launch before.

    counts: as of `begin_call`. permit: int32 [1], the look-up's, which is the same on all ranks; need: the bits that a
    push takes. A rank without tables does not know on the host whether the others' tables get gradients, and a rank may
    not know yet that the look-up was refused: then all ranks skip the push.
    """
    if (tl.load(permit) & need) == need:
        tiles.begin_call(channel, mapping, counts, None, True, BLOCK)


@triton.jit
def push_gradients(  # type: ignore[no-untyped-def]
    channel, mapping, grad, columns, staging, batch, width, permit, need, STEPS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """Push each rank's columns of grad [batch, width] into its staging [world * batch, that rank's columns].

    columns: int64 [world + 1], where each rank's begin. permit, need: as in `begin_push`.
    Order: the next rank's columns first, own ones last.
    Signals: after the stores of STEPS x ROWS rows, their channel at the columns' owner ("p2p").
    Waits: at the end, each program for its share of (source, channel) pairs, so staging is complete when the kernel has
    ended. Programs claim rows, so none waits before running programs hold all rows; and the launch leaves room for
    another group's kernels (`bound_blocks`).
    Reuse: staging is written only once all ranks have begun this call, and so have ended the previous one.
    """
    groups = tl.where((tl.load(permit) & need) == need, tl.cdiv(batch, STEPS * ROWS), 0)
    index = tiles.claim(channel)
    while index < channel.world * groups:
        following = tiles.claim(channel)  # before the copy, which takes longer
        owner = (channel.rank + 1 + index // groups) % channel.world
        group = index % groups
        first = tl.multiple_of(tl.load(columns + owner), QUANTUM)
        count = tl.multiple_of(tl.load(columns + owner + 1), QUANTUM) - first
        there = tiles.peer_pointer(channel, staging, owner)
        for step in range(STEPS):
            row = (group * STEPS + step) * ROWS + tl.arange(0, ROWS)
            source = tl.multiple_of(row.to(tl.int64) * width, QUANTUM) + first
            target = tl.multiple_of((channel.rank * batch + row).to(tl.int64) * count, QUANTUM)
            for start in range(0, count, BLOCK):
                at = start + tl.arange(0, BLOCK)
                mask = (row < batch)[:, None] & (at < count)[None, :]
                values = tl.load(grad + (source[:, None] + at[None, :]), mask=mask)
                tl.store(there + (target[:, None] + at[None, :]), values, mask=mask)
        tiles.producer_tile_notify(channel, mapping, owner * groups + group, "p2p")
        index = following
    for index in range(tl.program_id(0), channel.world * mapping.channels, tl.num_programs(0)):
        source_rank = (channel.rank + 1 + index // mapping.channels) % channel.world
        tile = channel.rank * groups + index % mapping.channels * (mapping.channel_rows)
        if index % mapping.channels * mapping.channel_rows < groups:
            tiles.consumer_tile_wait(channel, mapping, tile, source=source_rank)


@triton.jit
def find_keys(tables, pooling, bags, bases, found, world, rows, report, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the key, place and scale of every lookup; keys of lookups without a row are not changed.

    bases: int64 [tables], each table's first key. found: the `LookupKeys` that are written.
    """
    count = tables.batch * world
    quanta = tables.width // QUANTUM
    steps = tl.arange(0, STEPS)
    groups = tl.cdiv(count, pooling.bags)
    for index in range(tl.program_id(0), tables.count * groups, tl.num_programs(0)):
        table = index // groups
        sample = index % groups * pooling.bags + tl.arange(0, pooling.bags)
        sample_mask = sample < count
        start, end = read_bags(tables, pooling, bags, table, world, sample, sample_mask, report)
        here, column = tl.load(tables.meta + table * META + 1), tl.load(tables.meta + table * META + 3)
        key = tl.load(bases + table)
        place = (sample.to(tl.int64) * quanta + column // QUANTUM).to(found.places.dtype.element_ty)
        scale = tl.full((pooling.bags,), 1.0, tl.float32)
        if pooling.is_mean:
            scale = 1.0 / tl.maximum(end - start, 1).to(tl.float32)
        for step in range(0, tl.max(end - start, 0), STEPS):
            at = start[:, None] + step + steps[None, :]
            mask = at < end[:, None]
            row = tl.load(bags.indices + at, mask=mask, other=0)
            known = mask & (row >= 0) & (row < here)
            tl.store(found.keys + at, (row + key).to(found.keys.dtype.element_ty), mask=known)
            tl.store(found.places + at, tl.broadcast_to(place[:, None], (pooling.bags, STEPS)), mask=mask)
            if found.scales is not None:
                factor = tl.broadcast_to(scale[:, None], (pooling.bags, STEPS))
                if bags.weights is not None:
                    factor *= tl.load(bags.weights + at, mask=mask, other=0.0).to(tl.float32)
                tl.store(found.scales + at, factor, mask=mask)


@triton.jit
def _find_boundaries(keys, total, rows, at, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return, for sorted lookups: key, whether a segment begins, a chunk begins, and whether lookups with rows end."""
    mask = at < total
    key = tl.load(keys + at, mask=mask, other=0)
    before = tl.load(keys + at - 1, mask=mask & (at > 0), other=-1)
    is_new = key != before
    is_known = mask & (key < rows)
    begins = is_known & is_new
    is_end = mask & (key == rows) & is_new
    return key, begins, begins | (is_known & (at % LIMIT == 0)), is_end


@triton.jit
def count_chunks(keys, counts, total, rows, LIMIT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count the chunks, then the segments, that begin in each block of sorted lookups: counts [2 * blocks].

    One program for each block.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _, begins, chunk, _ = _find_boundaries(keys, total, rows, at, LIMIT)
    counts += tl.program_id(0)
    tl.store(counts, tl.sum(chunk.to(tl.int32), 0).to(tl.int64))
    tl.store(counts + tl.num_programs(0), tl.sum(begins.to(tl.int32), 0).to(tl.int64))


@triton.jit
def place_chunks(  # type: ignore[no-untyped-def]
    keys, order, places, scales, tables_of, sums, segments, uniques, LIMIT: tl.constexpr, BLOCK: tl.constexpr
):
    """Fill `segments`: chunks, and the place and scale of each sorted lookup.

    keys, order: sorted keys and their positions. places, scales: by position (`LookupKeys`). sums [2 * blocks]: the
    inclusive prefix sum of `count_chunks`' counts. uniques: gets each segment's key. Loads that depend on a position
    are made here, where nothing waits for them, and not where gradients are added up.
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
    tl.store(segments.tables + after - 1, table * 2 + segments_here, mask=chunk)
    tl.store(segments.chunk_keys + after - 1, key, mask=chunk)
    tl.store(segments.chunk_places + after - 1, place, mask=chunk)
    tl.store(uniques + number, key, mask=begins)
    is_last = (at == total - 1) & (key < rows)
    tl.store(segments.starts + after, tl.where(is_last, at + 1, at), mask=is_end | is_last)
    tl.store(segments.tables + after, 1, mask=is_end | is_last)


@triton.jit
def reduce_chunks(segments, target, staging, partials, LIMIT: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add up each chunk's gradients; whole segments go to the target, parts of cut ones to partials [cuts, 2, block].

    Sums and partials are fp32. A tile is CHUNKS chunks, and ROWS gradients of each are loaded at once. A part that
    begins at cut m is partial (m, 1); a part that ends at cut m, and does not begin at a cut, is partial (m, 0).
    """
    index = segments.starts.dtype.element_ty
    chunks = tl.load(segments.totals).to(index)
    columns = tl.arange(0, target.block)
    steps = tl.arange(0, ROWS)
    chunk = tl.cast(tl.program_id(0), index) * CHUNKS + tl.arange(0, CHUNKS)
    start, end, word, key, place, number = _read_chunks(segments, chunk, chunks)
    for tile in range(tl.program_id(0), tl.cdiv(chunks, CHUNKS), tl.num_programs(0)):
        # A tile ahead are chunks; then come at once their targets' rows and their first gradients, which are all of
        # most; then places and gradients of the others.
        chunk = tl.cast(tile, index) * CHUNKS + tl.arange(0, CHUNKS)
        segment_mask = chunk < chunks
        offset = tl.multiple_of(place.to(tl.int64) * QUANTUM, target.multiple)
        table = word >> 2
        row, slot, pointers, column_mask, state, dim = _locate(target, staging, table, key, number, segment_mask)
        total = tl.load(staging + (offset[:, None] + columns[None, :]), mask=column_mask, other=0.0).to(tl.float32)
        held, first, second = _read(target, pointers, column_mask, slot, table, state, dim, segment_mask)
        following = chunk + tl.num_programs(0) * CHUNKS
        next_start, next_end, next_word, next_key, next_place, next_number = _read_chunks(segments, following, chunks)
        if segments.scales is not None:
            total *= tl.load(segments.scales + start, mask=segment_mask, other=0.0)[:, None]
        # Loaded again: of `start` and `end`, which the loop carries, Triton (3.6, 3.7) takes the maximum just once.
        lengths = tl.load(segments.starts + chunk + 1, mask=segment_mask, other=0)
        lengths -= tl.load(segments.starts + chunk, mask=segment_mask, other=0)
        at = start[:, None] + 1 + steps[None, :]
        for _ in range(1, tl.max(lengths, 0), ROWS):
            known = at < end[:, None]
            others = tl.load(segments.places + at, mask=known, other=0).to(tl.int64) * QUANTUM
            others = tl.multiple_of(others, (target.multiple, target.multiple))
            mask = known[:, :, None] & (columns[None, None, :] < dim[:, None, None])
            values = tl.load(staging + (others[:, :, None] + columns[None, None, :]), mask=mask, other=0.0)
            values = values.to(tl.float32)
            if segments.scales is not None:
                values *= tl.load(segments.scales + at, mask=known, other=0.0)[:, :, None]
            total += tl.sum(values, 1)
            at += ROWS
        whole = segment_mask & ((word & 3) == 3)
        mask = column_mask & whole[:, None]
        _apply(target, pointers, mask, (row, slot), table, state, dim, held, first, second, total, whole)
        part = tl.where(start % LIMIT == 0, start // LIMIT * 2 + 1, end // LIMIT * 2).to(tl.int64)
        pointers = partials + (part * target.block)[:, None] + columns[None, :]
        tl.store(pointers, total, mask=(segment_mask & (whole == 0))[:, None])
        start, end, word, key, place, number = next_start, next_end, next_word, next_key, next_place, next_number


@triton.jit
def _read_chunks(segments, chunk, chunks):  # type: ignore[no-untyped-def]
    """Return chunks' first lookups, their ends, words, keys, first places and segments.

    A word is four times the table, plus 2 where a segment begins, plus 1 where it ends with the chunk.
    """
    mask = chunk < chunks
    start = tl.load(segments.starts + chunk, mask=mask, other=0)
    end = tl.load(segments.starts + chunk + 1, mask=mask, other=0)
    word = tl.load(segments.tables + chunk, mask=mask, other=0) * 2
    word += tl.load(segments.tables + chunk + 1, mask=mask, other=0) & 1
    key = tl.load(segments.chunk_keys + chunk, mask=mask, other=0)
    place = tl.load(segments.chunk_places + chunk, mask=mask, other=0)
    return start, end, word, key, place, tl.load(segments.numbers + chunk, mask=mask, other=0)


@triton.jit
def combine_chunks(segments, target, staging, partials, LIMIT: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add up the parts of a cut segment, in order. One program a cut; that of the segment's first cut adds."""
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
        # Apply it as a tile of one segment. Any of its lookups gives its table, so take the one at the cut.
        one = tl.zeros((1,), tl.int64) + cut * LIMIT
        segment_mask = one >= 0
        table = tl.load(target.tables_of + tl.load(segments.places + one) % segments.quanta)
        number = tl.zeros((1,), tl.int32)
        if target.by_number:
            number = tl.load(segments.numbers + _find_chunk(segments, one))
        row, slot, pointers, mask, state, dim = _locate(
            target, staging, table, tl.load(segments.keys + one), number, segment_mask
        )
        held, first, second = _read(target, pointers, mask, slot, table, state, dim, segment_mask)
        _apply(
            target, pointers, mask, (row, slot), table, state, dim, held, first, second, total[None, :], segment_mask
        )


@triton.jit
def _find_chunk(segments, lookup):  # type: ignore[no-untyped-def]
    """Return the chunk that begins at a sorted lookup, by binary search."""
    low = lookup * 0
    high = low + tl.load(segments.totals)
    for _ in range(40):
        middle = (low + high) // 2
        is_later = tl.load(segments.starts + middle) <= lookup
        low = tl.where(is_later, middle, low)
        high = tl.where(is_later, high, middle)
    return low


@triton.jit
def _locate(target, staging, table, key, number, segment_mask):  # type: ignore[no-untyped-def]
    """Return, for segments' targets: row, where it is (its slot, if the table is a cache), pointers to it [segments,
    block], their mask, fourth word of meta, dim."""
    words = target.meta + table * TARGET_META
    dim = tl.full(table.shape, target.dim, tl.int64)
    if target.dim == 0:
        dim = tl.multiple_of(tl.load(words + 2, mask=segment_mask, other=0), target.multiple)
    row = key.to(tl.int64) - tl.load(words + 1, mask=segment_mask, other=0)
    last = tl.load(words + 3, mask=segment_mask, other=0)
    if target.by_number:
        row = number.to(tl.int64) - last
    columns = tl.arange(0, target.block)
    mask = segment_mask[:, None]
    if target.dim != target.block:
        mask = mask & (columns[None, :] < dim[:, None])
    alignment: tl.constexpr = target.multiple * staging.dtype.element_ty.primitive_bitwidth // 8
    base = tl.multiple_of(tl.load(words, mask=segment_mask, other=0), alignment).to(staging.dtype)
    base = tl.multiple_of(base, alignment)
    slot = row
    if target.is_cached:
        slots = tl.load(words + 8, mask=segment_mask, other=0)
        here = tl.load(slots.to(tl.pointer_type(tl.int32)) + row, mask=segment_mask & (slots != 0), other=0)
        slot = tl.where(slots != 0, tl.maximum(here, 1).to(tl.int64) - 1, row)
    offset = tl.multiple_of(slot * dim, target.multiple)
    return row, slot, (base + offset)[:, None] + columns[None, :], mask, last, dim


@triton.jit
def _point_at_states(target, address, row, dim):  # type: ignore[no-untyped-def]
    """Return pointers to rows of a state [rows, dim], fp32: [segments, block]."""
    base = tl.multiple_of(address, target.multiple * 4).to(tl.pointer_type(tl.float32))
    offset = tl.multiple_of(row * dim, target.multiple)
    return (base + offset)[:, None] + tl.arange(0, target.block)[None, :]


@triton.jit
def _find_second(target, table, segment_mask):  # type: ignore[no-untyped-def]
    """Return the addresses of the tables' second states."""
    return tl.load(target.meta + table * TARGET_META + 4, mask=segment_mask, other=0)


@triton.jit
def _read(target, pointers, mask, slot, table, state, dim, segment_mask):  # type: ignore[no-untyped-def]
    """Return what the target's rows and their states [rows, dim] hold, in fp32; zeros for what the action does not
    take."""
    held = tl.zeros(pointers.shape, tl.float32)
    first = held
    second = held
    if target.action != "store":
        held = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    if (target.action == "full-adagrad") | (target.action == "adam"):
        first = tl.load(_point_at_states(target, state, slot, dim), mask=mask, other=0.0)
    if target.action == "adam":
        address = _find_second(target, table, segment_mask)
        second = tl.load(_point_at_states(target, address, slot, dim), mask=mask, other=0.0)
    return held, first, second


@triton.jit
def _apply(target, pointers, mask, places, table, state, dim, held, first, second, total, segment_mask):  # type: ignore[no-untyped-def]
    """Store segments' sums, fp32 [segments, block], or make a step of an optimizer on their rows.

    places: row and slot, as `_locate` returned them: states are at the slot, random bits are the row's. state: the
    address of the table's state; held, first, second: what `_read` returned.
    """
    row, slot = places
    if target.permit is not None:
        agrees = tl.load(target.permit) != 0
        mask = mask & agrees
        segment_mask = segment_mask & agrees
    if target.action == "store":
        tl.store(pointers, total.to(pointers.dtype.element_ty), mask=mask)
    else:
        # After a failed wait, gradients are wrong: leave tables and their state as they are.
        updates = tl.load(target.failed) == 0
        mask = mask & updates
        segment_mask = segment_mask & updates
        settings = target.settings + table * 0
        if target.by_table:
            settings = target.settings + table * SETTINGS
            squares = tl.sum(tl.where(mask, total * total, 0.0), 1)
            longest = tl.load(settings + 3, mask=segment_mask, other=0.0)
            norm = tl.sqrt_rn(squares)
            total *= tl.where(norm > longest, longest / tl.where(norm == 0.0, 1.0, norm), 1.0)[:, None]
            total += held * tl.load(settings + 2, mask=segment_mask, other=0.0)[:, None]
        step = total * tl.load(settings, mask=segment_mask, other=0.0)[:, None]
        if target.action != "sgd":
            epsilon = tl.load(settings + 1, mask=segment_mask, other=0.0)[:, None]
        if target.action == "adagrad":
            squares_at = state.to(tl.pointer_type(tl.float32)) + slot
            squares = tl.load(squares_at, mask=segment_mask, other=0.0)
            tl.debug_barrier()  # each warp loads a row's one state, and one warp stores it
            squares += tl.sum(tl.where(mask, total * total, 0.0), 1) / tl.maximum(dim, 1).to(tl.float32)
            tl.store(squares_at, squares, mask=segment_mask)
            step = _divide(step, tl.sqrt_rn(squares)[:, None] + epsilon)
        if target.action == "full-adagrad":
            first += total * total
            tl.store(_point_at_states(target, state, slot, dim), first, mask=mask)
            step = _divide(step, tl.sqrt_rn(first) + epsilon)
        if target.action == "adam":
            first += (total - first) * tl.load(settings + 4, mask=segment_mask, other=0.0)[:, None]
            second += (total * total - second) * tl.load(settings + 5, mask=segment_mask, other=0.0)[:, None]
            tl.store(_point_at_states(target, state, slot, dim), first, mask=mask)
            address = _find_second(target, table, segment_mask)
            tl.store(_point_at_states(target, address, slot, dim), second, mask=mask)
            corrections = target.corrections + table * 2
            rate = tl.load(settings, mask=segment_mask, other=0.0) / tl.load(corrections, mask=segment_mask, other=1.0)
            root = tl.sqrt_rn(tl.load(corrections + 1, mask=segment_mask, other=1.0))
            step = _divide(first * rate[:, None], tl.sqrt_rn(second) / root[:, None] + epsilon)
        updated = held - step
        if target.clock is not None:
            updated = _round_at_random(updated, _draw_bits(target, table, row, segment_mask), pointers)
        tl.store(pointers, updated.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def _divide(step, divisor):  # type: ignore[no-untyped-def]
    """Return the quotient; without an epsilon, what has got only gradients of zeros is not changed."""
    return step / tl.where(divisor == 0.0, 1.0, divisor)


@triton.jit
def _mix(word):  # type: ignore[no-untyped-def]
    """Hash 32 bits to 32 bits, as `stretto.optim.row_update` does."""
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def _draw_bits(target, table, row, segment_mask):  # type: ignore[no-untyped-def]
    """Return 32 random bits for each number of segments' rows, uint32 [segments, block].

    A hash of seed, step, and the number's table, row and column in the whole table: the same on every placement.
    """
    words = target.meta + table * TARGET_META
    number = tl.load(words + 5, mask=segment_mask, other=0)
    row += tl.load(words + 6, mask=segment_mask, other=0)
    column = tl.load(words + 7, mask=segment_mask, other=0)[:, None] + tl.arange(0, target.block)[None, :]
    key = _mix((number * 0 + tl.load(target.clock + 1)).to(tl.uint32))
    key = _mix(key ^ tl.load(target.clock).to(tl.uint32))
    key = _mix(key ^ number.to(tl.uint32))
    key = _mix(key ^ row.to(tl.uint32))
    key = _mix(key ^ (row >> 32).to(tl.uint32))
    return _mix(key[:, None] ^ (column.to(tl.uint32) * 0x9E3779B9))


@triton.jit
def _round_at_random(value, bits, pointers):  # type: ignore[no-untyped-def]
    """Round fp32 to a neighbour in the pointers' dtype, fp16 or bf16, the nearer the likelier; returned as fp32."""
    is_half: tl.constexpr = pointers.dtype.element_ty == tl.float16
    dropped: tl.constexpr = 0x1FFF if is_half else 0xFFFF
    word = value.to(tl.uint32, bitcast=True) + (bits & dropped)
    rounded = (word & (0xFFFFFFFF ^ dropped)).to(tl.float32, bitcast=True)
    size = tl.abs(value)
    if is_half:  # below 2 ** -14 its numbers are multiples of 2 ** -24
        units = size * 16777216.0
        low = tl.floor(units)
        low += ((bits >> 8).to(tl.float32) * 5.9604644775390625e-08 < units - low).to(tl.float32)
        small = low * 5.9604644775390625e-08
        rounded = tl.where(size < 6.103515625e-05, tl.where(value < 0.0, -small, small), rounded)
    return tl.where(size < float("inf"), rounded, value)
