# SPDX-License-Identifier: Apache-2.0
"""Kernels of `dispatch_few` and `combine_few`: few tokens to their experts' ranks and back, a launch each, by packets.

    dispatch_tokens     counts of each expert's tokens, choices and rows to all ranks; there a row for each choice
    combine_sums        weighted sums of each token's rows to its rank; there sums over the ranks

Each token has its place in the memory of each rank, whether the rank has experts of it or not, so nothing is counted
before it is sent. A source counts its own choices: it sends how many each expert has, and with each choice how many of
its expert's stand before it. From these a receiver finds the row of a choice, without a further exchange.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from stretto import tiles
from stretto.tiles.call_state import load_groups_limit

CHUNK = tl.constexpr(128)  # choices that others are compared with at once
COUNTED = tl.constexpr(1024)  # choices counted at once: at least one a thread, since each copy of one would count
_FP8_LARGEST = tl.constexpr(448.0)
_FP8_UNIT = tl.constexpr(1 / 448)
_FP32_TINY = tl.constexpr(2.0**-126)


class FewLayout(NamedTuple):
    """Kernel argument, compiled in: the memory of one of two slots, and the sizes of a call.

    numbered words (int64): [ranks, local + 1], how many choices each rank has with each expert here, then its tokens;
    from `begun` on [ranks], written when a rank has begun to combine; from `choices` on [ranks, tokens, 4, width],
    where width is a power of two, k or more: for each choice its expert here plus 1 and, in 16 bits, how many of its
    source's choices of that expert stand before it (0: the expert is elsewhere); then weights; then the scale of a row
    in fp8. packets (int32), from `packets` on: [ranks, tokens, row]. slot: int64 words of a slot. words: packets of a
    row that is sent, at most `row`. rows, block: tokens and packets of a unit of work; places: a power of two, ranks *
    (local + 1) or more, and bins, local + 1 or more; threads: of a program. is_dependent: the kernel is launched while
    the one before it on the stream ends, and waits for that (programmatic dependent launch, sm_90).
    """

    slot: Any
    begun: Any
    choices: Any
    packets: Any
    tokens: Any
    k: Any
    local: Any
    row: Any
    words: Any
    rows: Any
    block: Any
    places: Any
    bins: Any
    threads: Any
    is_dependent: Any


class SentChoices(NamedTuple):
    """Kernel argument: what combine_sums needs of dispatch_tokens, in this rank's own memory.

    positions: int32 [ranks * tokens, k], the row of each choice of each source's token here, or -1. weights: fp32, as
    positions. counts: int32 [ranks], tokens of each source. holders: int32 [tokens], for each of this rank's tokens a
    bit for each rank that has an expert of it.
    """

    positions: Any
    weights: Any
    counts: Any
    holders: Any


class ReceivedRows(NamedTuple):
    """Kernel argument: tokens of this rank's experts, by expert, source rank and token.

    rows: [capacity, columns]. offsets: int32 [local + 1], the first row of each expert, and their number.
    """

    rows: Any
    offsets: Any
    capacity: Any


@triton.jit(do_not_specialize=["t"])
def dispatch_tokens(  # type: ignore[no-untyped-def]
    channel, layout, choices, numbered, packets, received, x, ids, weights, t, FP8: tl.constexpr
):
    """Send each token to the ranks of its experts, and write what comes from all ranks to `ReceivedRows`.

    x: [t, columns]. ids: [t, k]; those that are no experts belong to no rank. FP8: rows travel as e4m3 with one fp32
    scale, as `quantize_rows` makes them, and are multiplied out in fp32 and rounded to x's dtype.
    Order: programs claim units: the counts for each rank, then for some tokens their choices, then parts of their rows,
    to all ranks that have experts of them. Then programs share out what arrives, units of a source's tokens and a part
    of their rows.
    Signals: none but the packets and numbered words.
    Waits: each program for all ranks' counts, and for the choices and packets of its units. Units to be sent are
    claimed, so running programs send all of them before any of them waits; and a launch leaves room for others
    (`limit_waiting`).
    Failure: nothing is sent after a failed wait; words that did not arrive count as none, and rows stay within bounds.
    Reuse: two slots, by the call's number; every rank waits for the counts of all ranks: see `call_slot`. Each packet
    is taken by one program, in the call that sends it.
    """
    world: tl.constexpr = channel.world
    if layout.is_dependent:
        tl.extra.cuda.gdc_wait()
    slot = tiles.call_slot(channel).to(tl.int64)
    numbered += slot * layout.slot
    packets += slot * (2 * layout.slot) + layout.packets
    publishes = tiles.may_publish(channel)
    limit = load_groups_limit(channel)
    parts: tl.constexpr = (layout.words + layout.block - 1) // layout.block
    units = world + tl.cdiv(t, layout.rows) * (parts + 1)
    unit = tiles.claim(channel)
    while unit < units:
        if unit < world:
            _send_counts(channel, layout, numbered, ids, t, (channel.rank + 1 + unit) % world, publishes)
        else:
            first = (unit - world) // (parts + 1) * layout.rows
            part = (unit - world) % (parts + 1)
            if part == 0:
                _send_choices(channel, layout, choices, numbered, ids, weights, first, t, publishes)
            else:
                _send_rows(channel, layout, numbered, packets, x, ids, first, part - 1, t, publishes, FP8)
        unit = tiles.claim(channel)  # not earlier: all threads wait for a claim, and what is sent would wait with them

    at = tl.arange(0, layout.places)
    expert, source = at // world, at % world
    is_known = at < world * (layout.local + 1)
    counts = tiles.await_numbered(
        channel, numbered + source * (layout.local + 1) + expert, is_known, 0, source.to(tl.int32)
    )
    is_count = at < world * layout.local
    number = tl.where(is_count, counts, 0)
    before = tl.cumsum(number, 0) - number
    tokens = tl.where(is_count, 0, tl.minimum(counts, layout.tokens))
    if tl.program_id(0) == 0:
        tl.store(received.offsets + expert, before, mask=(source == 0) & is_known)
        tl.store(choices.counts + source, tokens, mask=is_known & (is_count == 0))
    units = tl.cdiv(tl.max(tokens, 0), layout.rows) * (parts * world)
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        peer = (channel.rank + 1 + unit % world) % world
        part = unit // world % parts
        first = unit // (world * parts) * layout.rows
        known = tl.sum(tl.where(at == world * layout.local + peer, tokens, 0), 0)
        if first < known:
            unit_of = peer, first, part, known
            _receive_rows(channel, layout, choices, numbered, packets, received, x, before, unit_of, FP8)
    tiles.end_unsignalled_call(channel, limit)


@triton.jit
def _load_choices(layout, ids, first, t, world: tl.constexpr):  # type: ignore[no-untyped-def]
    """(number of each choice of this unit's tokens, the ids, ranks and experts there, -1 where there is none)."""
    width: tl.constexpr = triton.next_power_of_2(layout.k)
    index = tl.arange(0, layout.rows * width)
    token, slot = first + index // width, index % width
    is_choice = (token < t) & (slot < layout.k)
    choice = token * layout.k + slot
    found = tl.load(ids + choice, mask=is_choice, other=-1)
    is_expert = (found >= 0) & (found < layout.local * world)
    expert = tl.where(is_expert, found, -1).to(tl.int32)
    owner = tl.where(is_expert, expert // layout.local, -1)
    return choice, is_choice, expert, owner


@triton.jit
def _find_holders(layout, owner, world: tl.constexpr):  # type: ignore[no-untyped-def]
    """int32 [rows]: a bit for each rank that has an expert of a token."""
    width: tl.constexpr = triton.next_power_of_2(layout.k)
    holders = tl.zeros([layout.rows], tl.int32)
    for rank in tl.static_range(world):
        hits = tl.reshape((owner == rank).to(tl.int32), (layout.rows, width))
        holders |= tl.max(hits, 1) << rank
    return holders


@triton.jit
def _send_counts(channel, layout, numbered, ids, t, peer, publishes):  # type: ignore[no-untyped-def]
    """Send a rank how many choices each of its experts has here, and how many tokens there are."""
    bins = tl.arange(0, layout.bins)
    counts = tl.zeros([layout.bins], tl.int32)
    for begin in range(0, t * layout.k, COUNTED):
        at = begin + tl.arange(0, COUNTED)
        expert = tl.load(ids + at, mask=at < t * layout.k, other=-1).to(tl.int64) - peer * layout.local
        is_there = (expert >= 0) & (expert < layout.local)
        counts += tl.histogram(tl.where(is_there, expert, layout.local).to(tl.int32), layout.bins)
    data = tl.where(bins == layout.local, t, counts)
    own = numbered + channel.rank * (layout.local + 1)
    tiles.push_numbered(channel, own, bins, data, (bins <= layout.local) & publishes, peer)


@triton.jit
def _send_choices(channel, layout, choices, numbered, ids, weights, first, t, publishes):  # type: ignore[no-untyped-def]
    """Send all ranks some tokens' choices and weights, and keep which ranks have experts of them."""
    world: tl.constexpr = channel.world
    width: tl.constexpr = triton.next_power_of_2(layout.k)
    choice, is_choice, expert, owner = _load_choices(layout, ids, first, t, world)
    bits = tl.load(weights + choice, mask=is_choice, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
    is_earlier = tl.zeros([layout.rows * width, CHUNK], tl.int32)
    # Loads of several turns are in flight at once.
    for begin in tl.range(0, tl.minimum(first + layout.rows, t) * layout.k, CHUNK, loop_unroll_factor=4):
        at = begin + tl.arange(0, CHUNK)
        other = tl.load(ids + at, mask=at < t * layout.k, other=-1)
        is_same = (other[None, :] == expert[:, None]) & (at[None, :] < choice[:, None])
        is_earlier += is_same.to(tl.int32)
    word = ((expert - owner * layout.local + 1) << 16) | tl.sum(is_earlier, 1)
    own = numbered + layout.choices + channel.rank * (layout.tokens * 4 * width)
    place = choice // layout.k * (4 * width) + choice % layout.k
    for distance in tl.static_range(1, world + 1):
        peer = (channel.rank + distance) % world
        tiles.push_numbered(channel, own, place, tl.where(owner == peer, word, 0), is_choice & publishes, peer)
        tiles.push_numbered(channel, own, place + width, bits, is_choice & publishes, peer)
    token = first + tl.arange(0, layout.rows)
    tl.store(choices.holders + token, _find_holders(layout, owner, world), mask=token < t)


@triton.jit
def _send_rows(  # type: ignore[no-untyped-def]
    channel, layout, numbered, packets, x, ids, first, part, t, publishes, FP8: tl.constexpr
):
    """Send a part of some tokens' rows to the other ranks with experts of them; with the first one, scales to all.

    FP8: to this rank, too.
    """
    world: tl.constexpr = channel.world
    token = first + tl.arange(0, layout.rows)
    word = part * layout.block + tl.arange(0, layout.block)
    mask = (token < t)[:, None] & (word < layout.words)[None, :]
    if FP8:
        columns: tl.constexpr = 4 * layout.words
        scale = _find_scales(layout, x, token, t)
        column = part * (4 * layout.block) + tl.arange(0, 4 * layout.block)
        is_number = (token < t)[:, None] & (column < columns)[None, :]
        value = tl.load(x + (token * columns)[:, None] + column[None, :], mask=is_number, other=0.0).to(tl.float32)
        value = tl.div_rn(value, tl.broadcast_to(scale[:, None], value.shape))
        value = tl.minimum(tl.maximum(value, -_FP8_LARGEST), _FP8_LARGEST)
        byte = value.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
        byte = tl.reshape(byte, (layout.rows, layout.block, 4))
        data = tl.sum(byte << (8 * tl.arange(0, 4))[None, None, :], 2)  # no two share a bit
    else:
        scale = token
        words = x.to(tl.pointer_type(tl.int32), bitcast=True)
        data = tl.load(words + (token * layout.words)[:, None] + word[None, :], mask=mask, other=0)
    # After the rows are under way: sums over choices wait for the ids.
    _, _, _, owner = _load_choices(layout, ids, first, t, world)
    holders = _find_holders(layout, owner, world)
    place = ((channel.rank * layout.tokens + token) * layout.row)[:, None] + word[None, :]
    width: tl.constexpr = triton.next_power_of_2(layout.k)
    scale_place = (channel.rank * layout.tokens + token) * (4 * width) + 2 * width
    others: tl.constexpr = world + 1 if FP8 else world  # rows that are not rounded need no way to this rank itself
    for distance in tl.static_range(1, others):
        peer = (channel.rank + distance) % world
        is_there = (holders >> peer) & 1 != 0
        if FP8:
            is_scale = (token < t) & (part == 0) & publishes
            bits = scale.to(tl.int32, bitcast=True)
            tiles.push_numbered(channel, numbered + layout.choices, scale_place, bits, is_scale, peer)
        tiles.push_packets(
            channel, packets, place, data, mask & is_there[:, None], rank=peer, in_fours=True, publishes=publishes
        )


@triton.jit
def _find_scales(layout, x, token, t):  # type: ignore[no-untyped-def]
    """fp32 [rows]: those of `quantize_rows`; NaN for a row with an infinity or a NaN."""
    columns: tl.constexpr = 4 * layout.words
    most = tl.zeros([layout.rows], tl.float32)
    for begin in range(0, columns, 4 * layout.block):
        column = begin + tl.arange(0, 4 * layout.block)
        mask = (token < t)[:, None] & (column < columns)[None, :]
        value = tl.load(x + (token * columns)[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.max(tl.where(value == value, tl.abs(value), float("inf")), 1))
    scale = tl.maximum(most * _FP8_UNIT, _FP32_TINY)
    return tl.where(most < float("inf"), scale, float("nan"))


@triton.jit
def _receive_rows(  # type: ignore[no-untyped-def]
    channel, layout, choices, numbered, packets, received, x, before, unit_of, FP8: tl.constexpr
):
    """Take a part of some rows of a peer's tokens, or of own ones in `x`, and store them at their choices' positions.

    unit_of: peer, first token, part of the rows, and how many tokens the peer has.
    """
    world: tl.constexpr = channel.world
    peer, first, part, known = unit_of
    width: tl.constexpr = triton.next_power_of_2(layout.k)
    awaited: tl.constexpr = layout.rows * 4 * width
    size: tl.constexpr = awaited if awaited > layout.threads else layout.threads
    index = tl.arange(0, size)
    row, slot = first + index // (4 * width), index % (4 * width)
    is_word = (slot % width < layout.k) & (slot < 2 * width)
    if FP8:
        is_word = is_word | (slot == 2 * width)
    is_word = is_word & (index < awaited) & (row < known)
    place = layout.choices + (peer * layout.tokens + row) * (4 * width) + slot
    found = tiles.await_numbered(channel, numbered + place, is_word, first, index * 0 + peer)

    # Words that a program waits for are one a thread or more; the reductions here pick single ones out of zeros.
    token = first + tl.arange(0, layout.rows)
    word = part * layout.block + tl.arange(0, layout.block)
    places = ((peer * layout.tokens + token) * layout.row)[:, None] + word[None, :]
    is_part = (word < layout.words)[None, :]
    seen = tiles.look_for_packets(packets + places, (token < known)[:, None] & is_part)
    found = tl.sum(tl.reshape(found, (size // awaited, awaited)), 0)
    found = tl.reshape(found, (layout.rows, 4, width))
    kind = tl.arange(0, 4)[None, :, None]
    choice = tl.reshape(tl.sum(tl.where(kind == 0, found, 0), 1), (layout.rows * width,))
    expert = (choice >> 16) - 1
    is_base = (expert * world + peer)[:, None] == tl.arange(0, layout.places)[None, :]
    position = tl.sum(tl.where(is_base, before[None, :], 0), 1) + (choice & 0xFFFF)
    position = tl.where((choice != 0) & (position < received.capacity), position, -1)
    positions = tl.reshape(position, (layout.rows, width))
    slots = tl.arange(0, width)[None, :]
    if part == 0:
        weight = tl.sum(tl.where(kind == 1, found, 0), 1).to(tl.float32, bitcast=True)
        kept = ((peer * layout.tokens + token) * layout.k)[:, None] + slots
        is_choice = (token < known)[:, None] & (slots < layout.k)
        tl.store(choices.positions + kept, positions, mask=is_choice)
        tl.store(choices.weights + kept, weight, mask=is_choice)

    is_sent = tl.max(positions, 1) >= 0
    mask = is_sent[:, None] & is_part
    if FP8:
        data = tiles.take_packets(channel, packets + places, mask, first, peer, seen)
    elif peer == channel.rank:
        words = x.to(tl.pointer_type(tl.int32), bitcast=True)
        data = tl.load(words + (token * layout.words)[:, None] + word[None, :], mask=mask, other=0)
    else:
        data = tiles.take_packets(channel, packets + places, mask, first, peer, seen)
    columns: tl.constexpr = 4 * layout.words  # of fp8
    column = part * (4 * layout.block) + tl.arange(0, 4 * layout.block)
    if FP8:
        scale = tl.sum(tl.sum(tl.where(kind == 2, found, 0), 1), 1).to(tl.float32, bitcast=True)
        values = _unpack_fp8(layout, data, scale).to(received.rows.dtype.element_ty)
    for number in tl.static_range(layout.k):
        target = tl.sum(tl.where(slots == number, positions, 0), 1)
        is_here = target >= 0
        if FP8:
            is_stored = (is_sent & is_here)[:, None] & (column < columns)[None, :]
            tl.store(received.rows + (target.to(tl.int64) * columns)[:, None] + column[None, :], values, mask=is_stored)
        else:
            copies = received.rows.to(tl.pointer_type(tl.int32), bitcast=True)
            there = copies + (target.to(tl.int64) * layout.words)[:, None] + word[None, :]
            tl.store(there, data, mask=mask & is_here[:, None])


@triton.jit
def _unpack_fp8(layout, data, scale):  # type: ignore[no-untyped-def]
    """fp32 [rows, 4 * block]: the numbers of packets [rows, block], times their rows' scales."""
    bits = (data[:, :, None] >> (8 * tl.arange(0, 4))[None, None, :]) & 0xFF
    values = bits.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return tl.reshape(values, (layout.rows, 4 * layout.block)) * scale[:, None]


@triton.jit(do_not_specialize=["t"])
def combine_sums(channel, layout, choices, numbered, packets, rows, out, t):  # type: ignore[no-untyped-def]
    """out [t, columns]: each token's sum over the ranks that have experts of it, in rank order.

    rows: [., columns], in the order of dispatch_tokens. A rank's part is the sum of weight times row over its experts'
    choices, in their order, in fp32, rounded once; these are added in fp32 and rounded once.
    Order: programs claim units, some tokens of another source and a part of their sums, and send them. Then they share
    out their own tokens, and form this rank's part of their sums there.
    Signals: none but the packets, and a numbered word that tells each rank that this one has begun the call.
    Waits: for the packets of all ranks that have experts of a token; at the end for all ranks' word. Units to be sent
    are claimed, as in dispatch_tokens.
    Failure: nothing is sent after a failed wait.
    Reuse: two slots, by the call's number; every rank waits for a word of all ranks: see `call_slot`.
    """
    world: tl.constexpr = channel.world
    dtype: tl.constexpr = rows.dtype.element_ty
    if layout.is_dependent:
        tl.extra.cuda.gdc_wait()
    slot = tiles.call_slot(channel).to(tl.int64)
    numbered += slot * layout.slot
    packets += slot * (2 * layout.slot) + layout.packets
    publishes = tiles.may_publish(channel)
    limit = load_groups_limit(channel)
    parts: tl.constexpr = (layout.words + layout.block - 1) // layout.block
    peers = tl.arange(0, layout.threads)
    counts = tl.load(choices.counts + peers, mask=peers < world, other=0)
    others: tl.constexpr = world - 1
    units = 1 + tl.cdiv(tl.max(counts, 0), layout.rows) * (parts * others)
    unit = tiles.claim(channel)
    while unit < units:
        if unit == 0:
            for distance in tl.static_range(1, world + 1):
                peer = (channel.rank + distance) % world
                begun = tl.zeros([layout.threads], tl.int32)
                begin = numbered + layout.begun + channel.rank
                tiles.push_numbered(channel, begin, peers, begun, (peers == 0) & publishes, peer)
        else:
            peer = (channel.rank + 1 + (unit - 1) % others) % world
            part = (unit - 1) // others % parts
            first = (unit - 1) // (others * parts) * layout.rows
            known = tl.sum(tl.where(peers == peer, counts, 0), 0)
            _send_sums(channel, layout, choices, packets, rows, peer, first, part, known, publishes)
        unit = tiles.claim(channel)

    token = tl.arange(0, layout.rows)
    word = tl.arange(0, layout.block)
    for unit in range(tl.program_id(0), tl.cdiv(t, layout.rows) * parts, tl.num_programs(0)):
        row = unit // parts * layout.rows + token
        column = unit % parts * layout.block + word
        holders = tl.load(choices.holders + row, mask=row < t, other=0)
        own, _ = _sum_choices(layout, choices, rows, channel.rank * layout.tokens + row, row < t, column)
        mask = (row < t)[:, None] & (column < layout.words)[None, :]
        places = (row * layout.row)[:, None] + column[None, :]
        stride = layout.tokens * layout.row
        low, high, _ = tiles.sum_packets(channel, packets, stride, places, mask, unit, dtype, holders[:, None], own=own)
        target = out.to(tl.pointer_type(tl.int32), bitcast=True) + (row * layout.words)[:, None] + column[None, :]
        tl.store(target, tiles.pack(low, high, dtype), mask=mask)
    if tl.program_id(0) == 0:
        tiles.await_numbered(channel, numbered + layout.begun + peers, peers < world, 0, peers)
    tiles.end_unsignalled_call(channel, limit)


@triton.jit
def _send_sums(channel, layout, choices, packets, rows, peer, first, part, known, publishes):  # type: ignore[no-untyped-def]
    """Send a part of the weighted sums of some of `peer`'s tokens."""
    token = first + tl.arange(0, layout.rows)
    word = part * layout.block + tl.arange(0, layout.block)
    data, is_sent = _sum_choices(layout, choices, rows, peer * layout.tokens + token, token < known, word)
    places = ((channel.rank * layout.tokens + token) * layout.row)[:, None] + word[None, :]
    mask = is_sent[:, None] & (word < layout.words)[None, :]
    tiles.push_packets(channel, packets, places, data, mask, rank=peer, in_fours=True, publishes=publishes)


@triton.jit
def _sum_choices(layout, choices, rows, token, is_token, word):  # type: ignore[no-untyped-def]
    """(the packets `word` of weighted sums of some tokens' rows here, whether there are any): [rows, block], [rows].

    token: numbered over the sources.
    """
    dtype: tl.constexpr = rows.dtype.element_ty
    is_word = (word < layout.words)[None, :]
    copies = rows.to(tl.pointer_type(tl.int32), bitcast=True)
    low = tl.zeros([layout.rows, layout.block], tl.float32)
    high = tl.zeros([layout.rows, layout.block], tl.float32)
    is_sent = tl.zeros([layout.rows], tl.int1)
    for number in tl.static_range(layout.k):
        choice = token * layout.k + number
        position = tl.load(choices.positions + choice, mask=is_token, other=-1)
        is_here = position >= 0
        weight = tl.load(choices.weights + choice, mask=is_here, other=0.0)[:, None]
        place = copies + (position.to(tl.int64) * layout.words)[:, None] + word[None, :]
        first_half, second_half = tiles.unpack(tl.load(place, mask=is_here[:, None] & is_word, other=0), dtype)
        low += first_half * weight
        high += second_half * weight
        is_sent = is_sent | is_here
    return tiles.pack(low, high, dtype), is_sent
