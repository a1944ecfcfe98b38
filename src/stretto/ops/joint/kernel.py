# SPDX-License-Identifier: Apache-2.0
"""The kernels of a joint schedule: GEMMs beside copy engines, GEMMs whose first programs run a rank's moves, and sums.

`launch` has what the host makes for them.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from stretto import tiles
from stretto.collectives.joint.schedule import INPUT, NOWHERE, OUTPUT
from stretto.ops.gemm import (
    count_steps,
    count_units,
    find_unit,
    finish_tile,
    load_bias,
    multiply_tile,
    multiply_unit,
    order_tiles,
    scale_tile,
    store_tile,
)

MOVED_AT_ONCE = tl.constexpr(256 if tiles.INTERPRETED.value else 8192)  # elements that a program adds and stores
ADDED_AT_ONCE = tl.constexpr(256 if tiles.INTERPRETED.value else 2048)  # few registers: sums run beside a product
PUT = NOWHERE + 1
"""The area of a destination at a rank of another node."""
_INPUT = tl.constexpr(INPUT)
_OUTPUT = tl.constexpr(OUTPUT)
_PUT_AREA = tl.constexpr(PUT)


class CopiedTiles(NamedTuple):
    """The tiles of a rank's product whose rows, or sums, copy engines move.

    row_tiles: how many rows of tiles there are. own_tiles: how many of them, the first ones, have this rank's rows of
    x, the first of which is the product's row first_row. bias_start, bias_stop: the rows of the product that get the
    bias. counters: int32, one for each channel, of the threads that have stored a tile; threads: of a program.
    own_scales: of fp8, the factors of x's rows, or None. Compiled in: is_gather; is_whole: no tile but the last of the
    product has fewer rows than block_m, and TMA stores them.
    """

    row_tiles: Any
    own_tiles: Any
    first_row: Any
    bias_start: Any
    bias_stop: Any
    counters: Any
    threads: Any
    own_scales: Any
    is_gather: Any
    is_whole: Any


class MoveTables(NamedTuple):
    """A rank's moves as a kernel reads them: int32 tables. Sources' and destinations' rows, ranks and channels are
    dynamic mappings beside it.

    first_source, first_destination: [moves + 1], of each move; source_areas, destination_areas: of each of those.
    moves, receives, row_tiles: how many there are; movers: programs that run moves; width: elements of a row;
    bias_start, bias_stop: the rows of the product that get the bias. is_gather: compiled in.

    Between nodes receives follow the moves, each with a source, the sender, and a destination. Of what is put, the
    rows are the numbers of slices: the first one of this move, among those of the two ranks in this call.
    """

    first_source: Any
    first_destination: Any
    source_areas: Any
    destination_areas: Any
    moves: Any
    receives: Any
    row_tiles: Any
    movers: Any
    width: Any
    bias_start: Any
    bias_stop: Any
    is_gather: Any


class MovedRows(NamedTuple):
    """Rows that moves read and write: inputs (x, or the product), what moves have brought, and the output."""

    inputs: Any
    landed: Any
    out: Any


@triton.jit
def joint_gemm(  # type: ignore[no-untyped-def]
    channel, puts, row_tiles, sources, destinations, tables, gemm, a, b, moved, bias
):
    """C [m, n] = a @ b.T, + bias, while the first `movers` programs run the schedule's moves; persistent.

    A gather's tiles multiply rows of `landed` (a), and are stored in `out`. Others multiply x (a) and are stored in
    `inputs`, the product, which moves add up and send; `out` gets the sums.
    Order: tiles in the order of `row_tiles`, as programs claim them; moves in their order, of which each mover does a
    part of the elements.
    Signals: each mover signals every destination once its part is stored (p2p); tiles of a product signal their chunk
    on this rank.
    Waits: movers for the sources of a move, which are moves of others that come before it in one order of all ranks'
    moves, or tiles, which other programs multiply; a gather's tiles for moves. Movers are a launch's first programs,
    which run when any do, and a product's tiles wait for nothing, so there is no cycle (`verify_joint`).
    Reuse: `landed` is one of two slots, in turn. Peers write to it only when all ranks have begun the call after the
    last one that used it.

    Between nodes (puts is not None; the channel is then of this rank's node): a mover puts its part of a move to
    another node's rank in slices, through slots of its own, each after its credit. The next `movers` programs receive:
    the p-th what each rank's p-th mover has put, slice after slice, which it stores in its place and releases; then it
    signals this rank, as a mover of this node would. A receiver waits for slices alone, in one order of all ranks'
    moves, so every put finds a slot, however few there are. Only this rank writes to its `landed` what was put.
    """
    if tl.program_id(0) < tables.movers:
        for move in range(tables.moves):
            run_move(channel, puts, sources, destinations, tables, moved, move)
    if puts is not None:  # noqa: SIM102  (a constant, and a number of the device)
        if (tl.program_id(0) >= tables.movers) & (tl.program_id(0) < 2 * tables.movers):
            for number in range(tables.moves, tables.moves + tables.receives):
                receive_move(channel, puts, sources, destinations, tables, moved.landed, number)
    count = tables.row_tiles * tl.cdiv(gemm.n, gemm.block_n)
    tile = tiles.claim(channel)
    while tile < count:
        _make_tile(channel, row_tiles, tables, gemm, a, b, moved, bias, tile)
        tile = tiles.claim(channel)


@triton.jit
def _make_tile(channel, row_tiles, tables, gemm, a, b, moved, bias, tile):  # type: ignore[no-untyped-def]
    """Multiply a tile, once its rows are there, and store it."""
    row_tile, column_tile = order_tiles(tile, tables.row_tiles, tl.cdiv(gemm.n, gemm.block_n), gemm.group_rows)
    low, high = tiles.tile_rows(row_tiles, row_tile)
    column = column_tile * gemm.block_n
    if tables.is_gather:
        ready = tiles.consumer_tile_wait(channel, row_tiles, row_tile, before_tma=gemm.by_tma)
        total = multiply_tile(gemm, a, b, low + ready, column, 0)
    else:
        total = multiply_tile(gemm, a, b, low, column, 0)
        total = scale_tile(gemm, gemm.row_scales, total, low, column, gemm.m)
    total = _add_bias(gemm, tables, bias, total, low, column)
    if tables.is_gather:
        store_tile(gemm, moved.out, total, low, column, high)
    else:
        store_tile(gemm, moved.inputs, total, low, column, high)
        tiles.producer_tile_notify(channel, row_tiles, row_tile, "p2p")


@triton.jit
def _add_bias(gemm, rows, bias, total, low, column):  # type: ignore[no-untyped-def]
    """Add the bias to those of a tile's rows, from `low` on, that get it."""
    if bias is not None:
        at = low + tl.arange(0, gemm.block_m)
        has_bias = (at >= rows.bias_start) & (at < rows.bias_stop)
        total += tl.where(has_bias[:, None], load_bias(bias, column, gemm.n, gemm.block_n), 0.0)
    return total


@triton.jit
def joint_gemm_by_copies(  # type: ignore[no-untyped-def]
    channel, row_tiles, order, gemm, stream_k, own, a, b, stored, bias
):
    """stored [m, n] = a @ b.T, + bias, while copy engines make the schedule's moves; persistent.

    A gather's tiles multiply rows of `a` as they come, own ones of x (`own`) first. A reduction's are stored in the
    product, which copy engines send and `add_rows` adds up. fp8 has factors: a gather's of rows that come precede them.
    Order: tiles in the order of `row_tiles`, each program every P-th. Those of the last wave may be split over k
    (`StreamK`); they, and then all that a gather awaits, are multiplied in a loop that is not flattened.
    Signals: a reduction's thread counts a tile in its channel's counter, without a barrier, so that the loop is
    flattened: when the next tile has been multiplied, since its stores are done by then, but in the last two waves at
    once. Tiles without a channel are complete when the kernel ends.
    Waits: a gather's, for the chunk of a tile, by polls in a flattened loop (see `consumer_tile_poll`); they depend on
    copy engines, and on kernels of moves that pass something on, which a launch leaves room for. A reduction's: none.
    Reuse: `a` of a gather is one of two slots, in turn. Peers write to it only when all ranks have begun the call after
    the last one that used it. `stored` is this call's own.
    """
    column_tiles = tl.cdiv(gemm.n, gemm.block_n)
    count = order.row_tiles * column_tiles
    programs = tl.num_programs(0)
    first = tl.program_id(0)
    if order.is_gather:
        if own is not None:
            direct = order.own_tiles * column_tiles
            for tile in tl.range(first, direct, programs, flatten=order.is_whole):
                row_tile, column_tile = order_tiles(tile, order.own_tiles, column_tiles, gemm.group_rows)
                low, high = tiles.tile_rows(row_tiles, row_tile)
                column = column_tile * gemm.block_n
                total = multiply_tile(gemm, own, b, low - order.first_row, column, 0)
                finish_tile(gemm, order.own_scales, bias, stored, total, low - order.first_row, low, high, column)
            first += tl.cdiv(tl.maximum(direct - first, 0), programs) * programs
        if order.is_whole and stream_k.unit_steps is None:
            for tile in tl.range(first, count, programs, flatten=True):
                row_tile, column_tile = _find_tile(order, gemm, tile, order.own_tiles)
                low, high = tiles.tile_rows(row_tiles, row_tile)
                ready = tiles.consumer_tile_poll(channel, row_tiles, row_tile)
                column = column_tile * gemm.block_n
                total = multiply_tile(gemm, a, b, low + ready, column, 0)
                finish_tile(gemm, gemm.row_scales, bias, stored, total, low + ready, low, high, column)
            tiles.finish_polls(channel, row_tiles)
        else:
            for unit in range(first, count_units(stream_k, count), programs):
                begin, end = find_unit(gemm, stream_k, unit, count)
                row_tile, column_tile = _find_tile(order, gemm, begin // count_steps(gemm, stream_k), order.own_tiles)
                low, high = tiles.tile_rows(row_tiles, row_tile)
                column = column_tile * gemm.block_n
                ready = tiles.consumer_tile_wait(channel, row_tiles, row_tile, before_tma=gemm.by_tma)
                total, is_complete, _ = multiply_unit(gemm, stream_k, a, b, low + ready, column, 0, begin, end)
                if is_complete:
                    finish_tile(gemm, gemm.row_scales, bias, stored, total, low + ready, low, high, column)
    else:
        whole = count if stream_k.unit_steps is None else stream_k.whole_tiles
        for tile in tl.range(first, whole, programs, flatten=order.is_whole):
            row_tile, column_tile = _find_tile(order, gemm, tile, 0)
            low, high = tiles.tile_rows(row_tiles, row_tile)
            column = column_tile * gemm.block_n
            total = multiply_tile(gemm, a, b, low, column, 0)
            total = scale_tile(gemm, gemm.row_scales, total, low, column, gemm.m)
            total = _add_bias(gemm, order, bias, total, low, column)
            before = tile - programs
            _count_tile(row_tiles, order, gemm, before, (before >= 0) & (before + 2 * programs < whole))
            store_tile(gemm, stored, total, low, column, high)
            _count_tile(row_tiles, order, gemm, tile, tile + 2 * programs >= whole)
        if stream_k.unit_steps is not None:
            for unit in range(whole + first, count_units(stream_k, count), programs):
                begin, end = find_unit(gemm, stream_k, unit, count)
                tile = begin // count_steps(gemm, stream_k)
                row_tile, column_tile = _find_tile(order, gemm, tile, 0)
                low, high = tiles.tile_rows(row_tiles, row_tile)
                column = column_tile * gemm.block_n
                total, is_complete, _ = multiply_unit(gemm, stream_k, a, b, low, column, 0, begin, end)
                if is_complete:
                    total = scale_tile(gemm, gemm.row_scales, total, low, column, gemm.m)
                    store_tile(gemm, stored, _add_bias(gemm, order, bias, total, low, column), low, column, high)
                    _count_tile(row_tiles, order, gemm, tile, True)


@triton.jit
def _find_tile(order, gemm, tile, behind):  # type: ignore[no-untyped-def]
    """(row of tiles, column of tiles) of a tile; behind: rows of tiles before it, in an order of their own."""
    column_tiles = tl.cdiv(gemm.n, gemm.block_n)
    tile -= behind * column_tiles
    row_tile, column_tile = order_tiles(tile, order.row_tiles - behind, column_tiles, gemm.group_rows)
    return row_tile + behind, column_tile


@triton.jit
def _count_tile(row_tiles, order, gemm, tile, should_count):  # type: ignore[no-untyped-def]
    """Count a stored tile in its channel's counter, if it has one, and if `should_count`."""
    row_tile, _ = _find_tile(order, gemm, tl.maximum(tile, 0), 0)
    first, last = tiles.tile_channels(row_tiles, row_tile)
    times = tl.cast(should_count & (last > first), tl.int32)
    tiles.producer_tile_count(order.counters + first, times, order.threads, after_tma=gemm.stores_by_tma)


@triton.jit
def run_move(channel, puts, sources, destinations, tables, moved, move):  # type: ignore[no-untyped-def]
    """Wait for a move's sources, add up this program's part of them, store it to all destinations, and signal."""
    first, last = tl.load(tables.first_source + move), tl.load(tables.first_source + move + 1)
    first_to, last_to = tl.load(tables.first_destination + move), tl.load(tables.first_destination + move + 1)
    ready = first * 0
    for source in range(first, last):
        ready += tiles.consumer_tile_wait(channel, sources, source)
    low, high = tiles.tile_rows(sources, first)
    size = (high - low) * tables.width
    ends = first, last, first_to, last_to
    if puts is None:
        for start in range(tl.program_id(0) * MOVED_AT_ONCE, size, tables.movers * MOVED_AT_ONCE):
            _move_some(channel, puts, sources, destinations, tables, moved, ends, ready, start, start, size)
    else:
        of_slice = _find_slice(puts, tables, size)
        for start in range(tl.program_id(0) * of_slice, size, tables.movers * of_slice):
            for at in range(start, tl.minimum(start + of_slice, size), MOVED_AT_ONCE):
                _move_some(channel, puts, sources, destinations, tables, moved, ends, ready, start, at, size)
    for to in range(first_to, last_to):
        low, high = tiles.tile_channels(destinations, to)
        if high > low:
            tiles.producer_tile_notify(channel, destinations, to, "p2p")
    tl.debug_barrier()  # a later move of this program may read, by other threads, what this one has stored here


@triton.jit
def _move_some(channel, puts, sources, destinations, tables, moved, ends, ready, start, at, size):  # type: ignore[no-untyped-def]
    """Add up MOVED_AT_ONCE of a move's `size` elements, from `at` on, and store or put them.

    start: of the slice that they are put in. ends: first and last source, and destination.
    """
    first, last, first_to, last_to = ends
    inputs, landed, out = moved.inputs, moved.landed, moved.out
    offsets = at + tl.arange(0, MOVED_AT_ONCE)
    mask = offsets < size
    total = _add_up(sources, tables, inputs, landed, first, last, ready, offsets, mask)
    for to in range(first_to, last_to):
        low, _ = tiles.tile_rows(destinations, to)
        begin = tl.cast(low, tl.int64) * tables.width
        area, peer = tl.load(tables.destination_areas + to), tiles.tile_rank(destinations, to)
        if area == _OUTPUT:
            tl.store(out + begin + offsets, total.to(out.dtype.element_ty), mask=mask)
        elif puts is None:
            value = total.to(landed.dtype.element_ty)
            tiles.tile_push_data(channel, landed + begin, offsets, value, rank=peer, mask=mask)
        elif area == _PUT_AREA:
            _put_some(puts, tables, low, start, at, size, total.to(landed.dtype.element_ty), peer, mask)
        else:
            value = total.to(landed.dtype.element_ty)
            tiles.tile_push_data(channel, landed + begin, offsets, value, rank=peer, mask=mask)


@triton.jit
def _put_some(puts, tables, first, start, at, size, value, peer, mask):  # type: ignore[no-untyped-def]
    """Store elements of a slice, from `at` on, into its slot: the first ones after its credit; the last ones put it.

    first: the number of the first slice of the move, of `size`; start: the slice's first element.
    """
    of_slice = _find_slice(puts, tables, size)
    slot = _find_slot(puts, tables, tl.program_id(0), first, start, of_slice)
    zero = at * 0
    if at == start:
        zero = tiles.await_credit(puts, slot, peer)
    place = tiles.outgoing_slice(puts, slot, peer).to(tl.pointer_type(value.dtype)) + (at - start) + zero
    tl.store(tl.multiple_of(place, 16) + tl.arange(0, MOVED_AT_ONCE), value, mask=mask)
    end = tl.minimum(start + of_slice, size)
    if at + MOVED_AT_ONCE >= end:
        tiles.put_slice(puts, slot, (end - start) * (value.dtype.primitive_bitwidth // 8), peer, slot)


@triton.jit
def receive_move(channel, puts, sources, destinations, tables, landed, number):  # type: ignore[no-untyped-def]
    """Store this program's part of what a rank of another node has put in its place, and signal this rank."""
    source, to = tl.load(tables.first_source + number), tl.load(tables.first_destination + number)
    peer, program = tiles.tile_rank(sources, source), tl.program_id(0) - tables.movers
    first, _ = tiles.tile_rows(sources, source)
    low, high = tiles.tile_rows(destinations, to)
    begin, size = tl.cast(low, tl.int64) * tables.width, (high - low) * tables.width
    of_slice = _find_slice(puts, tables, size)
    for start in range(program * of_slice, size, tables.movers * of_slice):
        slot = _find_slot(puts, tables, program, first, start, of_slice)
        zero = tiles.wait_slice(puts, peer, slot)
        place = tiles.arrived_slice(puts, slot, peer).to(tl.pointer_type(landed.dtype.element_ty))
        end = tl.minimum(start + of_slice, size)
        for at in range(start, end, MOVED_AT_ONCE):
            index = tl.arange(0, MOVED_AT_ONCE)
            mask = at + index < end
            value = tl.load(tl.multiple_of(place + (at - start) + zero, 16) + index, mask=mask)
            tl.store(landed + begin + at + index, value, mask=mask & tiles.may_publish(channel))
        tiles.release_slice(puts, slot, peer, slot)
    tiles.producer_tile_notify(channel, destinations, to, "p2p")


@triton.jit
def _find_slice(puts, tables, size):  # type: ignore[no-untyped-def]
    """The elements of a slice of a move of `size`: those that a slot holds, but no more than a mover's share."""
    share = tl.cdiv(tl.cdiv(size, tables.movers), MOVED_AT_ONCE) * MOVED_AT_ONCE
    return tl.minimum(tl.maximum(share, MOVED_AT_ONCE), puts.slot_bytes // 4)


@triton.jit
def _find_slot(puts, tables, program, first, start, of_slice):  # type: ignore[no-untyped-def]
    """The slot, which is also the signal, of the slice of a mover's elements from `start` on: its own, in turn."""
    own = puts.slots // tables.movers
    return program * own + (first + start // (tables.movers * of_slice)) % own


@triton.jit
def add_rows(sources, totals, bias, columns, size):  # type: ignore[no-untyped-def]
    """Store the sum of `sources`, tuples of pointers to `size` elements, in all `totals`: in fp32, from the first on.

    bias: added to each row of so many columns, or None.
    Synchronization: none. The stream of the launch has waited for the sources before it, and sends totals after it.
    Programs share the elements.
    """
    for start in range(tl.program_id(0) * ADDED_AT_ONCE, size, tl.num_programs(0) * ADDED_AT_ONCE):
        offsets = start + tl.arange(0, ADDED_AT_ONCE)
        mask = offsets < size
        total = tl.zeros((ADDED_AT_ONCE,), tl.float32)
        for source in tl.static_range(len(sources)):
            total += tl.load(sources[source] + offsets, mask=mask).to(tl.float32)
        if bias is not None:
            total += tl.load(bias + offsets % columns, mask=mask).to(tl.float32)
        for place in tl.static_range(len(totals)):
            tl.store(totals[place] + offsets, total.to(totals[place].dtype.element_ty), mask=mask)


@triton.jit
def _add_up(sources, tables, inputs, landed, first, last, ready, offsets, mask):  # type: ignore[no-untyped-def]
    """The sum in fp32 of these elements of a move's sources, first to last - 1. ready: what waits for them returned."""
    total = tl.zeros((MOVED_AT_ONCE,), tl.float32)
    for source in range(first, last):
        low, _ = tiles.tile_rows(sources, source)
        begin = tl.cast(low, tl.int64) * tables.width + ready
        if tl.load(tables.source_areas + source) == _INPUT:
            value = tl.load(inputs + begin + offsets, mask=mask)
        else:
            value = tl.load(landed + begin + offsets, mask=mask)
        total += value.to(tl.float32)
    return total
