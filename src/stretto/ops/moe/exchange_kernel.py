# SPDX-License-Identifier: Apache-2.0
"""Kernels of the exchange of tokens: counts to all ranks, and rows straight into the buffers of the ranks they are for.

    exchange_counts     1 program: every rank gets how many pairs and choices every other rank has with each rank
    push_rows           sums of this rank's rows, or copies of them, stored into their ranks' staging buffers, in the
                        order of the receiver's sources; forward for dispatch, transposed for combine

Both read all sizes on the device. What a rank receives of a source is contiguous, and signalled in `CHUNKS` parts, in
order: a consumer may wait for the parts that it needs, or for the kernel's end, when all of them have arrived.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from stretto import tiles

CHUNKS = 32
"""Parts of the rows from one rank to another that are signalled separately."""


class PushedRows(NamedTuple):
    """Kernel argument: the rows that a rank pushes, sorted by receiver.

    Row i is the sum over slots of weights[i, slot] * rows[positions[i, slot]]. rows: [., columns]. positions: int64
    [known, k]; weights, is_valid: [known, k] or None, for 1 and for True; rows that are not valid are not read. words:
    int32 [known, words] or None, sent beside the rows. Rows from `known` on are NaN.
    """

    rows: Any
    positions: Any
    weights: Any
    is_valid: Any
    words: Any
    columns: Any
    known: Any


class StagedRows(NamedTuple):
    """Kernel argument: what a rank receives, sorted by sender: rows [capacity, columns] and words [capacity, words].

    Both are symmetric memory; rows from `capacity` on are not sent.
    """

    rows: Any
    words: Any
    capacity: Any


@triton.jit
def exchange_counts(  # type: ignore[no-untyped-def]
    channel, unused, counts, received, table, WORDS: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr
):
    """table [world, WORDS]: the ranks' counts [WORDS], int32; begins its call by itself.

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
    for source in tl.static_range(channel.world):
        found = tl.load(received + (parity + source) * WORDS + at + ready, mask=mask, other=0)
        tl.store(table + source * WORDS + at, found, mask=mask)


@triton.jit
def push_rows(  # type: ignore[no-untyped-def]
    channel, mapping, pushed, staged, table,
    WHICH: tl.constexpr, TRANSPOSED: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    """Push each of `PushedRows`, added in the order of slots and rounded once, into its receiver's `StagedRows`.

    table: int32 [source, destination, 2], numbers of pairs and of choices: number WHICH says how many rows go from each
    rank to each other one; TRANSPOSED: from each destination back to its source. WORLD: a power of two.
    Order: a part of each receiver's rows in turn, the next rank's first and own ones last, so that no two ranks write
    to one at once, and early parts of all arrive early.
    Signals: each of the `CHUNKS` parts of a receiver's rows once, also an empty one, after its stores ("p2p").
    Waits: at the end, each program for its share of (source, part) pairs, so staging is complete when the kernel has
    ended. Programs claim parts, so none waits before running programs hold all of them; and the launch leaves room for
    another group's kernels (`limit_waiting`).
    Reuse: of two slots or one, as `begin` was told: staging is written once all ranks have begun this call, or the one
    after the slot's last, and so have read what it held.
    """
    dtype = tl.float64 if pushed.rows.dtype.element_ty == tl.float64 else tl.float32
    chunks: tl.constexpr = mapping.channels
    peers = tl.arange(0, WORLD)
    is_peer = peers < channel.world
    task = tiles.claim(channel)
    while task < channel.world * chunks:
        following = tiles.claim(channel)
        peer = (channel.rank + 1 + task % channel.world) % channel.world
        chunk = task // channel.world
        if TRANSPOSED:
            going = tl.load(table + (peers * channel.world + channel.rank) * 2 + WHICH, mask=is_peer, other=0)
            coming = tl.load(table + (peer * channel.world + peers) * 2 + WHICH, mask=is_peer, other=0)
        else:
            going = tl.load(table + (channel.rank * channel.world + peers) * 2 + WHICH, mask=is_peer, other=0)
            coming = tl.load(table + (peers * channel.world + peer) * 2 + WHICH, mask=is_peer, other=0)
        first = tl.sum(tl.where(peers < peer, going, 0), 0)
        count = tl.sum(tl.where(peers == peer, going, 0), 0)
        base = tl.sum(tl.where(peers < channel.rank, coming, 0), 0)
        part = tl.cdiv(tl.cdiv(count, chunks), ROWS) * ROWS
        there = tiles.peer_pointer(channel, staged.rows, peer)
        publishes = tiles.may_publish(channel)  # staging may hold another call's rows after a failed wait
        for start in range(chunk * part, tl.minimum((chunk + 1) * part, count), ROWS):
            at = start + tl.arange(0, ROWS)
            row, target = (first + at).to(tl.int64), (base + at).to(tl.int64)
            is_known = (at < count) & (row < pushed.known)
            is_stored = (at < count) & (target < staged.capacity) & publishes
            for column in range(0, pushed.columns, BLOCK):
                place = column + tl.arange(0, BLOCK)
                is_column = (place < pushed.columns)[None, :]
                total = tl.full([ROWS, BLOCK], -0.0, dtype)  # -0 + x is x, also for -0
                for slot in tl.static_range(K):
                    is_read = is_known
                    if pushed.is_valid is not None:
                        is_read = is_read & (tl.load(pushed.is_valid + row * K + slot, mask=is_known, other=0) != 0)
                    position = tl.load(pushed.positions + row * K + slot, mask=is_read, other=0) * pushed.columns
                    mask = is_read[:, None] & is_column
                    value = tl.load(pushed.rows + position[:, None] + place[None, :], mask=mask, other=0.0).to(dtype)
                    if pushed.weights is not None:
                        value *= tl.load(pushed.weights + row * K + slot, mask=is_read, other=0.0).to(dtype)[:, None]
                    total += value
                total = tl.where(is_known[:, None], total, float("nan"))
                mask = is_stored[:, None] & is_column
                tl.store(
                    there + target[:, None] * pushed.columns + place[None, :],
                    total.to(pushed.rows.dtype.element_ty),
                    mask=mask,
                )
            if pushed.words is not None:
                word = tl.arange(0, triton.next_power_of_2(WORDS))
                mask = (word < WORDS)[None, :]
                sent = tl.load(
                    pushed.words + row[:, None] * WORDS + word[None, :], mask=is_known[:, None] & mask, other=0
                )
                words_there = tiles.peer_pointer(channel, staged.words, peer)
                tl.store(words_there + target[:, None] * WORDS + word[None, :], sent, mask=is_stored[:, None] & mask)
        tiles.producer_tile_notify(channel, mapping, peer * chunks + chunk, "p2p")
        task = following
    for index in range(tl.program_id(0), channel.world * chunks, tl.num_programs(0)):
        source = (channel.rank + 1 + index // chunks) % channel.world
        tile = channel.rank * chunks + index % chunks
        tiles.consumer_tile_wait(channel, mapping, tile, source=source)
