# SPDX-License-Identifier: Apache-2.0
"""GEMM and the sum of its products over the ranks in one launch, for few rows (small m), as in decoding.

With few rows a product takes as long as its weight takes to stream from memory. So a tile is as wide as a program's
part of the columns, or programs split tiles over k (stream-K); and whatever follows the last step is latency: partial
sums are sent as packets, which combine data and signal. `matmul_all_reduce` and `matmul_reduce_scatter` launch it.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from stretto import tiles
from stretto.memory.gpus import limit_waiting
from stretto.ops.config import MOSTLY_BUSY, KernelConfig
from stretto.ops.gemm import (
    Blocks,
    GroupProduct,
    StreamK,
    count_column_parts,
    describe_gemm,
    divide_up,
    fixed,
    multiply_columns,
    multiply_unit,
    scale_tile,
    specialization_key,
    tile_width,
)
from stretto.ops.operator import OperatorWorkspace, abandon, find_workspace

_PACKET_BYTES = 4
_STREAMING_BYTES = 200 << 10  # of shared memory
THREADS_OF_A_WARP = 64 if torch.version.hip else 32
_MAX_PACKETS = (1 << 31) - (1 << 20)  # of a rank: with the last chunk's, in 32 bits
_UNEVEN = 1.15  # tiles are split over k if whole ones would take this many times as long


class PacketExchange(NamedTuple):
    """Sending of a call's packets. rows: of out. slot_words: packets between the two slots of the staging buffer.

    Compiled in: form ("one-shot", "two-shot", "scatter", or "push": the next launch adds the packets up); chunk, the
    packets that a program adds up at a time; in_fours, whether a row is a multiple of four packets, which are then sent
    four at a time.
    """

    rows: Any
    slot_words: Any
    form: Any
    chunk: Any
    in_fours: Any


def count_packets(m: int, n: int, dtype: torch.dtype) -> int:
    """The packets of an [m, n] of one rank; a row is a whole number of packets."""
    return m * -(-n * dtype.itemsize // _PACKET_BYTES)


def count_bytes(form: str, m: int, n: int, world: int, dtype: torch.dtype) -> int:
    """The bytes of a slot for the packets of a call; m: of the whole x. ValueError for more than the kernel counts."""
    packets = count_packets(m, n, dtype)
    if packets > _MAX_PACKETS:
        raise ValueError(
            f"a product of {m} x {n} {dtype} makes {packets} packets, and a kernel counts up to {_MAX_PACKETS}: give "
            'implementation="library", or fewer rows at a time'
        )
    match form:
        case "one-shot" | "push":
            return world * packets * _PACKET_BYTES
        case "two-shot":
            return (world + 1) * packets * _PACKET_BYTES
    return packets * _PACKET_BYTES  # "scatter": all ranks' sums of a part of the rows


@lru_cache(maxsize=4096)
def split_steps(m: int, n: int, k: int, blocks: Blocks) -> tuple[int, int]:
    """(steps over k of a work unit, the number of units and programs): whole tiles if these balance well enough."""
    tile_count = divide_up(m, blocks.m) * divide_up(n, blocks.n)
    steps = divide_up(k, blocks.k)
    whole = divide_up(tile_count, blocks.programs)
    even = divide_up(tile_count * steps, blocks.programs)
    is_whole = whole * steps <= _UNEVEN * even or MOSTLY_BUSY * blocks.programs <= tile_count <= blocks.programs
    unit_steps = whole * steps if is_whole or count_column_parts(blocks) > 1 else even
    return unit_steps, min(blocks.programs, divide_up(tile_count * steps, unit_steps))


@lru_cache(maxsize=4096)
def choose_streaming(m: int, n: int, k: int, processors: int) -> Blocks | None:
    """Tiles of a product of few rows of 16 bits, whose programs wait for nothing: each has a tile, and all of k.

    None where tiles of 64 columns fill most of the GPU. With 32 columns twice as many multiprocessors load the weight.
    """
    if divide_up(n, 64) >= MOSTLY_BUSY * processors:
        return None
    rows, count = max(16, triton.next_power_of_2(m)), divide_up(n, 32)
    depth = min(256 if rows <= 32 else 128, k & -k)
    room = _STREAMING_BYTES // min(2, divide_up(count, processors))
    return Blocks(rows, 32, depth, 1, 4, max(2, min(6, room // ((rows + 32) * depth * 2))), count)


@lru_cache(maxsize=4096)
def _limit_blocks(blocks: Blocks, device: torch.device, most: int, *, waits: bool) -> Blocks:
    """The blocks with at most `most` programs, and if they wait no more than may do so at once on the device."""
    programs = limit_waiting(blocks.programs, device) if waits else blocks.programs
    return blocks._replace(programs=min(programs, most))


def launch(
    operator: str,
    form: str,
    config: KernelConfig,
    product: GroupProduct,
    world: int,
) -> OperatorWorkspace:
    """Launch the call's only kernel: x [m, k], weight [n, k]; out [m, n], or of "scatter" [m / world, n].

    Of "push" it is the first of two: out gives shape and dtype of the sums, and the next launch takes the packets from
    the workspace, which this returns, and ends the call. Its programs wait for nothing, so they may be as many as
    the configuration says.
    """
    x, weight, bias, out, group, scales = product
    (m, k), n = x.shape, weight.shape[0]
    workspace = find_workspace(group, x.device, count_bytes(form, m, n, world, out.dtype), "packets")
    assert config.blocks is not None
    blocks = _limit_blocks(config.blocks, x.device, workspace.arrivals.numel(), waits=form != "push")
    unit_steps, programs = split_steps(m, n, k, blocks)
    partials: Any = None
    if unit_steps % divide_up(k, blocks.k):
        places = divide_up(m, blocks.m) * divide_up(n, blocks.n) + programs
        partials = torch.empty(places * blocks.m * blocks.n, dtype=torch.float32, device=x.device)
    packets = count_packets(out.shape[0], n, out.dtype)
    # At least a packet a thread: see `tiles.packets`.
    chunk = max(min(1 << ((packets - 1) // programs).bit_length(), 1024), THREADS_OF_A_WARP * blocks.num_warps)
    gemm, a, b, _ = describe_gemm(x, weight, None, blocks, scales=scales, in_parts=True)
    channel = workspace.channel.enter(operator, "p2p")
    staging = workspace.channel.tensor((workspace.words(2, torch.int32),), torch.int32)
    in_fours = n * out.element_size() % (4 * _PACKET_BYTES) == 0
    slot_words = workspace.words(1, torch.int32)
    exchange = PacketExchange(out.shape[0], slot_words, fixed(form), fixed(chunk), fixed(in_fours))
    stream_k = StreamK(0, divide_up(k, blocks.k), unit_steps, partials, workspace.arrivals)
    try:
        workspace.channel.launch(
            gemm_exchange,
            (operator, form, specialization_key(blocks, x, weight, gemm, bias, out)),
            programs,
            (channel, gemm, stream_k, exchange, a, b, staging, bias, out),
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
        )
    except BaseException:
        abandon(group, workspace.channel)
        raise
    return workspace


@triton.jit
def gemm_exchange(channel, gemm, stream_k, exchange, a, b, staging, bias, out):  # type: ignore[no-untyped-def]
    """out: the sum over all ranks of a @ b.T, + bias: all of it ("one-shot", "two-shot"), or own rows ("scatter").

    Of "push" it sends what "one-shot" sends, and leaves the rest of the call to the next launch. A program then has the
    work unit of its number, as none waits.

    Order: programs claim work units and multiply them, tile after tile; the program that completes a tile sends it, as
    packets: to all ranks, to the owner of the rows, or (two-shot) to the owner of the chunk, which sends back the sum.
    Then programs add up the packets of all ranks, in rank order.
    Signals: none but the packets.
    Waits: for packets, and never for a program that may not be scheduled: work units, and the chunks whose sums peers
    wait for, are claimed, so running programs do all of them before any of them waits for what they produce. A launch
    leaves room for others (`bound_blocks`), so a kernel of another group that a peer waits for finds a place.
    Failure: packets are sent only while no wait of this process has failed, and sums only of packets that all arrived.
    Reuse: two slots, by the call's number; every rank waits for the sums of all ranks' packets: see `call_slot`.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    each: tl.constexpr = 32 // dtype.primitive_bitwidth
    pairs = tl.cdiv(gemm.n, each)
    size = exchange.rows * pairs
    # Where none waits, nobody claims: the atomic would come before the first load.
    unit = tl.program_id(0) if exchange.form == "push" else tiles.claim(channel)
    slot = staging + tiles.call_slot(channel).to(tl.int64) * exchange.slot_words
    publishes = tiles.may_publish(channel)
    units = tl.num_programs(0)  # as many as programs: see `split_steps`
    while unit < units:
        _multiply_unit(channel, gemm, stream_k, exchange, a, b, slot, unit, pairs, publishes, dtype)
        unit = units if exchange.form == "push" else tiles.claim(channel)
    if exchange.form != "push":
        _add_and_store(channel, gemm, exchange, slot, bias, out, size, unit, units, pairs, publishes)
        tiles.end_unsignalled_call(channel)


@triton.jit
def _add_and_store(  # type: ignore[no-untyped-def]
    channel, gemm, exchange, slot, bias, out, size, unit, units, pairs, publishes
):
    """The second half of `gemm_exchange`: add up the packets of all ranks. unit: the first claim behind the units."""
    dtype: tl.constexpr = out.dtype.element_ty
    each: tl.constexpr = 32 // dtype.primitive_bitwidth
    chunks = tl.cdiv(size, exchange.chunk)
    sums = slot + tl.cast(size, tl.int64) * channel.world
    if exchange.form == "two-shot":
        # Own chunks are claimed, too: what peers wait for must not depend on a program that is not scheduled.
        chunk = channel.rank + (unit - units) * channel.world
        while chunk < chunks:
            index = chunk * exchange.chunk + tl.arange(0, exchange.chunk)
            mask = index < size
            data, are_there = _add_chunk(channel, gemm, slot, bias, size, pairs, index, mask, chunk, dtype)
            for distance in tl.static_range(1, channel.world):
                peer = (channel.rank + distance) % channel.world
                tiles.push_packets(
                    channel, sums, index, data, mask & are_there, rank=peer, in_fours=exchange.in_fours,
                    publishes=publishes
                )  # fmt: skip
            _store_packets(out, index, data, mask, gemm.n, pairs, each, exchange.in_fours)
            chunk = channel.rank + (tiles.claim(channel) - units) * channel.world
    else:
        for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
            index = chunk * exchange.chunk + tl.arange(0, exchange.chunk)
            mask = index < size
            data, _ = _add_chunk(channel, gemm, slot, bias, size, pairs, index, mask, chunk, dtype)
            _store_packets(out, index, data, mask, gemm.n, pairs, each, exchange.in_fours)
    if exchange.form == "two-shot":
        others: tl.constexpr = channel.world - 1
        # Counted without own chunks, so that all programs have as many.
        for other in range(tl.program_id(0), tl.cdiv(chunks, channel.world) * others, tl.num_programs(0)):
            owner = other % others + (other % others >= channel.rank).to(tl.int32)
            chunk = other // others * channel.world + owner
            index = chunk * exchange.chunk + tl.arange(0, exchange.chunk)
            mask = index < size
            data = tiles.take_packets(channel, sums + index, mask, chunk, owner)
            _store_packets(out, index, data, mask, gemm.n, pairs, each, exchange.in_fours)


@triton.jit
def _add_chunk(channel, gemm, slot, bias, size, pairs, index, mask, chunk, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """(packets of the sum over ranks of a chunk, + bias; whether all of its packets arrived)."""
    each: tl.constexpr = 32 // dtype.primitive_bitwidth
    low, high, are_there = tiles.sum_packets(channel, slot, size, index, mask, chunk, dtype)
    if bias is not None:
        column = index % pairs * each
        low += tl.load(bias + column, mask=mask, other=0).to(tl.float32)
        high += tl.load(bias + column + each - 1, mask=mask & (column + each <= gemm.n), other=0).to(tl.float32)
    return tiles.pack(low, high, dtype), are_there


@triton.jit
def _multiply_unit(  # type: ignore[no-untyped-def]
    channel, gemm, stream_k, exchange, a, b, slot, unit, pairs, publishes, dtype: tl.constexpr
):
    """Multiply the unit-th work unit's steps of all tiles, and send the tiles that this completes."""
    steps = tl.cdiv(gemm.k, gemm.block_k)
    row_tiles = tl.cdiv(gemm.m, gemm.block_m)
    begin = unit * stream_k.unit_steps
    width = tile_width(gemm)
    end = min(begin + stream_k.unit_steps, row_tiles * tl.cdiv(gemm.n, width) * steps)
    while begin < end:
        tile = begin // steps  # tiles of the same columns, which share the weight, come one after another
        row, column = tile % row_tiles * gemm.block_m, tile // row_tiles * width
        if gemm.parts == 1:
            total, is_complete, begin = multiply_unit(gemm, stream_k, a, b, row, column, 0, begin, end)
            if is_complete:
                send_tile(channel, gemm, exchange, slot, total, row, column, pairs, publishes, dtype)
        else:
            totals = multiply_columns(gemm, a, b, row, column)
            begin += steps
            for part in tl.static_range(gemm.parts):
                at = column + part * gemm.block_n
                send_tile(channel, gemm, exchange, slot, totals[part], row, at, pairs, publishes, dtype)


@triton.jit
def send_tile(  # type: ignore[no-untyped-def]
    channel, gemm, exchange, slot, total, row, column, pairs, publishes, dtype: tl.constexpr
):
    """Send a tile's packets to where they are added up, at place [this rank, row, pair of columns]."""
    each: tl.constexpr = 32 // dtype.primitive_bitwidth
    total = scale_tile(gemm, gemm.row_scales, total, row, column, gemm.m)
    if each == 2:
        low, high = tl.split(tl.reshape(total, (gemm.block_m, gemm.block_n // 2, 2)))
    else:
        low = total
        high = total
    data = tiles.pack(low, high, dtype)
    at = row + tl.arange(0, gemm.block_m)[:, None]
    pair = column // each + tl.arange(0, gemm.block_n // each)[None, :]
    mask = (at < gemm.m) & (pair < pairs) & publishes
    own = slot + tl.cast(channel.rank, tl.int64) * (exchange.rows * pairs)
    fours: tl.constexpr = exchange.in_fours
    if exchange.form == "one-shot" or exchange.form == "push":
        for distance in tl.static_range(1, channel.world + 1):
            peer = (channel.rank + distance) % channel.world
            tiles.push_packets(channel, own, at * pairs + pair, data, mask, rank=peer, in_fours=fours, publishes=True)
    elif exchange.form == "two-shot":
        index = at * pairs + pair
        owner = index // exchange.chunk % channel.world
        tiles.push_packets(channel, own, index, data, mask, ranks=owner, in_fours=fours, publishes=True)
    else:
        owner = at // exchange.rows + pair * 0
        index = (at - owner * exchange.rows) * pairs + pair
        tiles.push_packets(channel, own, index, data, mask, ranks=owner, in_fours=fours, publishes=True)


@triton.jit
def _store_packets(  # type: ignore[no-untyped-def]
    out, index, data, mask, n, pairs, each: tl.constexpr, FOURS: tl.constexpr
):
    """Store the values of packets, which are numbered over [rows, pairs], into out [rows, n]."""
    dtype: tl.constexpr = out.dtype.element_ty
    if FOURS:  # out is of whole packets, one after another
        tl.store(out.to(tl.pointer_type(tl.int32), bitcast=True) + index, data, mask=mask)
    else:
        row = index // pairs
        column = (index - row * pairs) * each
        low, high = tiles.unpack(data, dtype)
        place = out + row.to(tl.int64) * n + column
        tl.store(place, low.to(dtype), mask=mask)
        if each == 2:
            tl.store(place + 1, high.to(dtype), mask=mask & (column + 1 < n))
