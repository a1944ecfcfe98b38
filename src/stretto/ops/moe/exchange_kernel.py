# SPDX-License-Identifier: Apache-2.0
"""Kernels of the exchange of tokens: counts to all ranks, and rows straight into the buffers of the ranks they are for.

    exchange_counts     1 program: every rank gets how many pairs and choices every other rank has with each rank
    push_rows           this rank's rows, or sums of them, stored into their ranks' staging buffers, in the order of the
                        receiver's sources; forward for dispatch, transposed for combine

All read all sizes on the device. What a rank receives of a source is contiguous, and signalled in parts, in order: a
consumer may wait for the parts that it needs, or for the kernel's end, when all of them have arrived.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from stretto import tiles


class SummedRows(NamedTuple):
    """Kernel argument: row i that is sent is the sum over slots of weights[i, slot] * rows[positions[i, slot]].

    rows: [., columns]. positions: int64 [., K]. weights: [., K], or None for 1. is_here: uint8 [., K], 0 for slots that
    do not count.
    """

    rows: Any
    positions: Any
    columns: Any
    weights: Any
    is_here: Any


@triton.jit
def exchange_counts(  # type: ignore[no-untyped-def]
    channel, unused, counts, received, table, record, limit, WORDS: tl.constexpr, BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """table [world + 1, WORDS]: the ranks' counts [WORDS], int32, and their sums; begins its call by itself.

    WORDS: of pairs and of choices with each rank. record: None, or int64 [2, world], where ranks with more than `limit`
    choices, and than recorded, are written with their choices and the limit.
    One program. unused: a mapping without signals. received: int32 [2, world, WORDS] in symmetric memory.
    Signals: peer tile 0 at all other ranks, after this rank's words in their `received`.
    Waits: for that signal of all other ranks.
    Reuse: `received` has words for each parity of the call's number. A rank that writes those of call e has ended call
    e - 1, so all ranks had begun that one, and had ended call e - 2, the last to read these words.
    """
    tiles.begin_call(channel, unused, None, None, False, CHANNELS)
    tl.debug_barrier()
    parity = (tiles.call_number(channel) & 1) * channel.world
    at = tl.arange(0, BLOCK)
    mask = at < WORDS
    own = tl.load(counts + at, mask=mask, other=0)
    publishes = tiles.may_publish(channel)
    for distance in tl.static_range(channel.world):
        peer = (channel.rank + distance) % channel.world
        words = tiles.peer_pointer(channel, received, peer) + (parity + channel.rank) * WORDS
        tl.store(words + at, own, mask=mask & publishes)
    tiles.peer_tile_notify(channel, 0, mode="broadcast")
    ready = tiles.peer_tile_wait(channel, 0, mode="broadcast")
    total = tl.zeros([BLOCK], tl.int32)
    for source in tl.static_range(channel.world):
        found = tl.load(received + (parity + source) * WORDS + at + ready, mask=mask, other=0)
        tl.store(table + source * WORDS + at, found, mask=mask)
        total += found
    tl.store(table + channel.world * WORDS + at, total, mask=mask)
    if record is not None:
        place = record + at // 2
        exceeds = mask & (at % 2 == 1) & (total > limit)
        exceeds = exceeds & (total > tl.load(place, mask=exceeds, other=0))
        tl.store(place, total.to(tl.int64), mask=exceeds)
        tl.store(place + channel.world, tl.full([BLOCK], 0, tl.int64) + limit, mask=exceeds)


@triton.jit(do_not_specialize=["known", "capacity"])  # they may change with each call
def push_rows(  # type: ignore[no-untyped-def]
    channel, mapping, pushed, staged, table, known, capacity, BACK: tl.constexpr, WAITS: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Push each of `GivenRows` into its receiver's staged [capacity, columns], which is sorted by sender.

    K: 0, or the slots of `SummedRows`, of which sums are pushed, formed in the order of slots and rounded once, as by
    `sum_rows`.

    known: rows that are pushed; those from it on are NaN, or zeros of integers. capacity: rows from it on are not sent.

    mapping: by `shard_tiles`, a tile for each part of the rows from each rank to each other one; a channel may have
    several. table: int32 [source, destination, 2], numbers of pairs and of choices: as many rows go from each rank to
    each other one. BACK: 0, pairs' rows go to destinations; 1, they return from each destination to its source; 2,
    choices' rows return.
    Order: a part of each receiver's rows in turn, the next rank's first and own ones last, so that no two ranks write
    to one at once, and early parts of all arrive early; of pairs' rows, without WAITS, own ones first, for products
    that begin with them. A program loads ROWS x BLOCK numbers, or sums as many, before it stores them.
    Signals: each part of a receiver's rows once, also an empty one, after its stores ("p2p").
    Waits: with WAITS, at the end, each program for its share of (source, channel) pairs, so staging is complete when
    the kernel has ended. Programs claim parts, so none waits before running programs hold all of them; and the launch
    leaves room for another group's kernels (`limit_waiting`).
    Reuse: of two slots or one, as `begin` was told: staging is written once all ranks have begun this call, or the one
    after the slot's last, and so have read what it held.
    """
    parts: tl.constexpr = mapping.rows
    which: tl.constexpr = 1 if BACK == 2 else 0
    is_back: tl.constexpr = BACK > 0
    unknown: tl.constexpr = float("nan") if pushed.rows.dtype.element_ty.is_floating() else 0
    peers = tl.arange(0, triton.next_power_of_2(channel.world))
    going = _load_numbers(channel, table, channel.rank, which, not is_back)
    task = tiles.claim(channel)
    while task < channel.world * parts:
        following = tiles.claim(channel)
        if WAITS or is_back:
            peer = (channel.rank + 1 + task % channel.world) % channel.world
            part = task // channel.world
        else:
            others: tl.constexpr = max(channel.world - 1, 1)
            other = tl.maximum(task - parts, 0)
            peer = tl.where(task < parts, channel.rank, (channel.rank + 1 + other % others) % channel.world)
            part = tl.where(task < parts, task, other // others)
        coming = _load_numbers(channel, table, peer, which, is_back)
        first = tl.sum(tl.where(peers < peer, going, 0), 0)
        count = tl.sum(tl.where(peers == peer, going, 0), 0)
        base = tl.sum(tl.where(peers < channel.rank, coming, 0), 0)
        size = _part_rows(count, parts, ROWS)
        there = tiles.peer_pointer(channel, staged, peer)
        publishes = tiles.may_publish(channel)  # staging may hold another call's rows after a failed wait
        for start in range(part * size, tl.minimum((part + 1) * size, count), ROWS):
            at = start + tl.arange(0, ROWS)
            row, target = (first + at).to(tl.int64), (base + at).to(tl.int64)
            is_known = (at < count) & (row < known)
            is_stored = (at < count) & (target < capacity) & publishes
            if K == 0 and pushed.positions is not None:
                row = tl.load(pushed.positions + row, mask=is_known, other=0)
            for column in range(0, pushed.columns, BLOCK):
                place = column + tl.arange(0, BLOCK)
                is_column = (place < pushed.columns)[None, :]
                if K == 0:
                    value = tl.load(
                        pushed.rows + row[:, None] * pushed.columns + place[None, :],
                        mask=is_known[:, None] & is_column,
                        other=unknown,
                    )
                else:
                    total = _sum_copies(pushed, row, is_known, place, is_column, K, ROWS, BLOCK)
                    value = tl.where(is_known[:, None], total, unknown).to(pushed.rows.dtype.element_ty)
                tl.store(
                    there + target[:, None] * pushed.columns + place[None, :],
                    value,
                    mask=is_stored[:, None] & is_column,
                )
        tiles.producer_tile_notify(channel, mapping, peer * parts + part, "p2p")
        task = following
    if WAITS:
        for index in range(tl.program_id(0), channel.world * mapping.channels, tl.num_programs(0)):
            source = (channel.rank + 1 + index // mapping.channels) % channel.world
            tile = channel.rank * parts + index % mapping.channels * mapping.channel_rows
            tiles.consumer_tile_wait(channel, mapping, tile, source=source)


@triton.jit
def _sum_copies(  # type: ignore[no-untyped-def]
    pushed, row, is_known, place, is_column, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Columns `place` of the sums `row` [ROWS] of `SummedRows`; loads of several slots are in flight at once."""
    dtype = tl.float64 if pushed.rows.dtype.element_ty == tl.float64 else tl.float32
    total = tl.full([ROWS, BLOCK], -0.0, dtype)  # -0 + x is x, also for -0
    for slot in tl.range(0, K, loop_unroll_factor=K if K < 8 else 8):
        copy = row * K + slot
        there = is_known & (tl.load(pushed.is_here + copy, mask=is_known, other=0) != 0)
        # Also of slots that do not count, so that one load need not wait for the other.
        source = tl.load(pushed.positions + copy, mask=is_known, other=0)[:, None] * pushed.columns + place[None, :]
        value = tl.load(pushed.rows + source, mask=there[:, None] & is_column, other=0.0).to(dtype)
        if pushed.weights is not None:
            value *= tl.load(pushed.weights + copy, mask=there, other=0.0).to(dtype)[:, None]
            value = tl.where(there[:, None], value, 0.0)  # 0 x an infinite weight is NaN
        total += value
    return total


@triton.jit
def _load_numbers(channel, table, rank, WHICH: tl.constexpr, TRANSPOSED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rows from each rank to `rank` of the table, or TRANSPOSED, from `rank` to each; padded to a power of two."""
    peers = tl.arange(0, triton.next_power_of_2(channel.world))
    at = rank * channel.world + peers if TRANSPOSED else peers * channel.world + rank
    return tl.load(table + at * 2 + WHICH, mask=peers < channel.world, other=0)


@triton.jit
def _part_rows(count, parts: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.cdiv(tl.cdiv(count, parts), ROWS) * ROWS
