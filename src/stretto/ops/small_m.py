"""GEMM and the sum of its products over the ranks in one launch, for few rows: what decoding needs.

With few rows a product takes as long as its weight takes to stream from memory. So every program has a tile of as many
columns as are its share, or tiles are shared by steps over k; and what comes after the last step is latency: sums
travel as packets, which are signals themselves.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto import tiles
from stretto.ops.gemm.config import MOSTLY_BUSY
from stretto.ops.gemm.stream_k import StreamK, multiply_unit
from stretto.ops.gemm.tile import (
    Blocks,
    Scales,
    count_parts,
    describe_gemm,
    divide_up,
    limit_waiting,
    multiply_columns,
    scale_tile,
    specialization_key,
    tile_width,
)
from stretto.ops.workspace import OperatorWorkspace, abandon

_PACKET_BYTES = 4
_THREADS_OF_A_WARP = 64 if torch.version.hip else 32
_MOST_PACKETS = (1 << 31) - (1 << 20)  # of a rank: with the last chunk's, in 32 bits
_UNEVEN = 1.15  # programs share tiles if whole ones would take this many times as long


def count_packets(m: int, n: int, dtype: torch.dtype) -> int:
    """The packets of an [m, n] of one rank: rows are whole packets."""
    return m * -(-n * dtype.itemsize // _PACKET_BYTES)


def count_bytes(form: str, m: int, n: int, world: int, dtype: torch.dtype) -> int:
    """The bytes of a slot for the packets of a call; m: of the whole x. ValueError for more than the kernel counts."""
    packets = count_packets(m, n, dtype)
    if packets > _MOST_PACKETS:
        raise ValueError(
            f"a product of {m} x {n} {dtype} makes {packets} packets, and a kernel counts up to {_MOST_PACKETS}: give "
            'implementation="library", or fewer rows at a time'
        )
    match form:
        case "one-shot":
            return world * packets * _PACKET_BYTES
        case "two-shot":
            return (world + 1) * packets * _PACKET_BYTES
    return packets * _PACKET_BYTES  # "scatter": all ranks' sums of a part of the rows


@lru_cache(maxsize=4096)
def split_steps(m: int, n: int, k: int, blocks: Blocks) -> tuple[int, int]:
    """(steps over k of a share; how many shares, and programs): whole tiles if they come out even."""
    tile_count = divide_up(m, blocks.m) * divide_up(n, blocks.n)
    steps = divide_up(k, blocks.k)
    whole = divide_up(tile_count, blocks.programs)
    even = divide_up(tile_count * steps, blocks.programs)
    is_whole = whole * steps <= _UNEVEN * even or MOSTLY_BUSY * blocks.programs <= tile_count <= blocks.programs
    share = whole * steps if is_whole or count_parts(blocks) > 1 else even
    return share, min(blocks.programs, divide_up(tile_count * steps, share))


def launch(
    operator: str,
    form: str,
    workspace: OperatorWorkspace,
    group: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    blocks: Blocks,
    scales: Scales | None = None,
) -> None:
    """Launch the call's only kernel: x [m, k], weight [n, k]; out [m, n], or of "scatter" [m / world, n].

    scales: of fp8 x and weight.
    """
    (m, k), n = x.shape, weight.shape[0]
    most = min(limit_waiting(blocks.programs, x.device), workspace.arrivals.numel())
    blocks = blocks._replace(programs=most)
    share, programs = split_steps(m, n, k, blocks)
    sums: Any = None
    if share % -(-k // blocks.k):
        places = divide_up(m, blocks.m) * divide_up(n, blocks.n) + programs
        sums = torch.empty(places * blocks.m * blocks.n, dtype=torch.float32, device=x.device)
    packets = count_packets(out.shape[0], n, out.dtype)
    # At least a packet a thread: see `tiles.packets`.
    chunk = max(min(1 << ((packets - 1) // programs).bit_length(), 1024), _THREADS_OF_A_WARP * blocks.num_warps)
    gemm, a, b, _ = describe_gemm(x, weight, None, blocks, scales=scales, in_parts=True)
    channel = workspace.channel.enter(operator, "p2p")
    staging = workspace.channel.tensor((workspace.words(2, torch.int32),), torch.int32)
    arguments = (
        channel,
        gemm,
        StreamK(0, divide_up(k, blocks.k), share, sums, workspace.arrivals),
        a,
        b,
        staging,
        out,
        bias,
        out.shape[0],
        workspace.words(1, torch.int32),
        form,
        chunk,
        n * out.element_size() % (4 * _PACKET_BYTES) == 0,
    )
    try:
        workspace.channel.launch(
            gemm_exchange,
            (operator, form, specialization_key(blocks, x, weight, gemm, bias, out)),
            programs,
            arguments,
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
        )
    except BaseException:
        abandon(group, workspace.channel)
        raise


@triton.jit
def gemm_exchange(  # type: ignore[no-untyped-def]
    channel,
    gemm,
    shares,
    a,
    b,
    staging,
    out,
    bias,
    rows,
    half,
    FORM: tl.constexpr,
    CHUNK: tl.constexpr,
    FOURS: tl.constexpr,
):
    """out: the sum over all ranks of a @ b.T, + bias: all of it ("one-shot", "two-shot"), or own rows ("scatter").

    Order: programs claim shares of steps and multiply them, tile after tile; who completes a tile sends it, as packets:
    to all ranks, to the owner of the rows, or (two-shot) to the owner of the chunk, which sends back the sum. Then
    programs add up what has come, in rank order.
    Signals: none but the packets.
    Waits: for packets, and never for a program that may have no place on the GPU: shares, and the chunks whose sums
    peers wait for, are claimed, so programs that run do all of them before any waits for what is made of them. A launch
    leaves room for others (`bound_programs`), so a kernel of another group that a peer waits for finds a place.
    Failure: packets are sent only while no wait of this process has failed, and sums only of packets that all came.
    FOURS: a row is a multiple of four packets, so packets travel four at a time, and whole packets are stored.
    Reuse: two slots, by the call's number; every rank waits for what is made of all ranks' packets: see `call_slot`.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    each: tl.constexpr = 32 // dtype.primitive_bitwidth
    pairs = tl.cdiv(gemm.n, each)
    size = rows * pairs
    unit = tiles.claim(channel)
    slot = staging + tiles.call_slot(channel).to(tl.int64) * half
    publishes = tiles.may_publish(channel)
    units = tl.num_programs(0)  # shares: see `split_steps`
    while unit < units:
        _multiply_share(channel, gemm, shares, a, b, slot, unit, rows, pairs, publishes, dtype, FORM, CHUNK, FOURS)
        unit = tiles.claim(channel)
    chunks = tl.cdiv(size, CHUNK)
    sums = slot + tl.cast(size, tl.int64) * channel.world
    if FORM == "two-shot":
        # Own chunks are claimed, too: what peers wait for must not depend on a program that has no place yet.
        chunk = channel.rank + (unit - units) * channel.world
        while chunk < chunks:
            index = chunk * CHUNK + tl.arange(0, CHUNK)
            inside = index < size
            data, are_there = _add_chunk(channel, gemm, slot, bias, size, pairs, index, inside, chunk, dtype)
            for distance in tl.static_range(1, channel.world):
                peer = (channel.rank + distance) % channel.world
                tiles.push_packets(
                    channel, sums, index, data, inside & are_there, rank=peer, in_fours=FOURS, publishes=publishes
                )
            _store_packets(out, index, data, inside, gemm.n, pairs, each, FOURS)
            chunk = channel.rank + (tiles.claim(channel) - units) * channel.world
    else:
        for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
            index = chunk * CHUNK + tl.arange(0, CHUNK)
            inside = index < size
            data, _ = _add_chunk(channel, gemm, slot, bias, size, pairs, index, inside, chunk, dtype)
            _store_packets(out, index, data, inside, gemm.n, pairs, each, FOURS)
    if FORM == "two-shot":
        others: tl.constexpr = channel.world - 1
        # Counted without own chunks, so that all programs have as many.
        for other in range(tl.program_id(0), tl.cdiv(chunks, channel.world) * others, tl.num_programs(0)):
            owner = other % others + (other % others >= channel.rank).to(tl.int32)
            chunk = other // others * channel.world + owner
            index = chunk * CHUNK + tl.arange(0, CHUNK)
            inside = index < size
            data = tiles.take_packets(channel, sums + index, inside, chunk, owner)
            _store_packets(out, index, data, inside, gemm.n, pairs, each, FOURS)
    tiles.end_unsignalled_call(channel)


@triton.jit
def _add_chunk(channel, gemm, slot, bias, size, pairs, index, inside, chunk, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """(packets of the sum over ranks of a chunk, + bias; whether all of its packets came)."""
    each: tl.constexpr = 32 // dtype.primitive_bitwidth
    low, high, are_there = tiles.sum_packets(channel, slot, size, index, inside, chunk, dtype)
    if bias is not None:
        column = index % pairs * each
        low += tl.load(bias + column, mask=inside, other=0).to(tl.float32)
        high += tl.load(bias + column + each - 1, mask=inside & (column + each <= gemm.n), other=0).to(tl.float32)
    return tiles.pack(low, high, dtype), are_there


@triton.jit
def _multiply_share(  # type: ignore[no-untyped-def]
    channel, gemm, shares, a, b, slot, unit, rows, pairs, publishes, dtype: tl.constexpr, FORM: tl.constexpr,
    CHUNK: tl.constexpr, FOURS: tl.constexpr,
):  # fmt: skip
    """Do the unit-th share of all tiles' steps over k, and send the tiles that it completes."""
    steps = tl.cdiv(gemm.k, gemm.block_k)
    row_tiles = tl.cdiv(gemm.m, gemm.block_m)
    begin = unit * shares.steps
    width = tile_width(gemm)
    end = min(begin + shares.steps, row_tiles * tl.cdiv(gemm.n, width) * steps)
    while begin < end:
        tile = begin // steps  # tiles of the same columns, which share the weight, come one after another
        row, column = tile % row_tiles * gemm.block_m, tile // row_tiles * width
        if gemm.parts == 1:
            total, is_complete, begin = multiply_unit(gemm, shares, a, b, row, column, 0, begin, end)
            if is_complete:
                _send_tile(channel, gemm, slot, total, row, column, rows, pairs, publishes, dtype, FORM, CHUNK, FOURS)
        else:
            totals = multiply_columns(gemm, a, b, row, column)
            begin += steps
            for part in tl.static_range(gemm.parts):
                at = column + part * gemm.block_n
                _send_tile(
                    channel, gemm, slot, totals[part], row, at, rows, pairs, publishes, dtype, FORM, CHUNK, FOURS
                )


@triton.jit
def _send_tile(  # type: ignore[no-untyped-def]
    channel, gemm, slot, total, row, column, rows, pairs, publishes, dtype: tl.constexpr, FORM: tl.constexpr,
    CHUNK: tl.constexpr, FOURS: tl.constexpr,
):  # fmt: skip
    """Put a tile's packets where they are added up, at place [this rank, row, pair of columns]."""
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
    inside = (at < gemm.m) & (pair < pairs) & publishes
    own = slot + tl.cast(channel.rank, tl.int64) * (rows * pairs)
    if FORM == "one-shot":
        for distance in tl.static_range(1, channel.world + 1):
            peer = (channel.rank + distance) % channel.world
            tiles.push_packets(channel, own, at * pairs + pair, data, inside, rank=peer, in_fours=FOURS, publishes=True)
    elif FORM == "two-shot":
        index = at * pairs + pair
        owner = index // CHUNK % channel.world
        tiles.push_packets(channel, own, index, data, inside, ranks=owner, in_fours=FOURS, publishes=True)
    else:
        owner = at // rows + pair * 0
        index = (at - owner * rows) * pairs + pair
        tiles.push_packets(channel, own, index, data, inside, ranks=owner, in_fours=FOURS, publishes=True)


@triton.jit
def _store_packets(  # type: ignore[no-untyped-def]
    out, index, data, inside, n, pairs, each: tl.constexpr, FOURS: tl.constexpr
):
    """Store the numbers of packets, which are counted through [rows, pairs], into out [rows, n]."""
    dtype: tl.constexpr = out.dtype.element_ty
    if FOURS:  # out is of whole packets, one after another
        tl.store(out.to(tl.pointer_type(tl.int32), bitcast=True) + index, data, mask=inside)
    else:
        row = index // pairs
        column = (index - row * pairs) * each
        low, high = tiles.unpack(data, dtype)
        place = out + row.to(tl.int64) * n + column
        tl.store(place, low.to(dtype), mask=inside)
        if each == 2:
            tl.store(place + 1, high.to(dtype), mask=inside & (column + 1 < n))
