# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel experts by kernels: products whose tokens arrive meanwhile, and products whose sums leave meanwhile.

`push_tokens` has copy engines push this rank's tokens to all others, and products of the experts multiply tiles of rows
as the tokens that they gather arrive (`multiply_arriving`). `multiply_leaving` is one kernel, `multiply_and_send`:
grouped GEMM, weighted top-k sums, their stores to the ranks that own the tokens, and the sums over ranks. Both find
their tiles in a `TileOrder`, a dynamic mapping that is filled on the device from the routing (TileLink, section 4.1).
`exchange` moves what is small.
"""

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto import tiles
from stretto.memory.gpus import leave_room_for_copies, limit_waiting
from stretto.ops.gemm import order_tiles
from stretto.ops.joint.launch import find_landing
from stretto.ops.moe.grouped.config import GroupedConfig
from stretto.ops.moe.grouped.kernels import _describe, _make_tile, multiply
from stretto.ops.moe.grouped.tile_order import Arrivals, TileOrder, find_tile_order
from stretto.ops.operator import abandon, count_bytes, find_group
from stretto.tiles.intrinsics import opaque_zero

_PARTS = 8  # of a rank's tokens, that are signalled separately
_TOKENS = 16  # of a unit of sums
_ROWS = tl.constexpr(8)  # of these, that are summed at once
_COLUMNS = 1024


class Routed(NamedTuple):
    """The rows of all ranks' tokens, which are numbered over the ranks: rank r's begin at r * t.

    tokens: int32 [n], of each row. positions: int64 [ranks * t, k], the row of each token's copy. offsets: int32
    [experts + 1].
    """

    tokens: Tensor
    positions: Tensor
    offsets: Tensor

    def order(self, rank: int, ranks: int, block_rows: int) -> TileOrder:
        """The order of tiles of so many rows: those of this rank's tokens alone first."""
        each = self.positions.shape[0] // ranks
        table = torch.full((ranks, ranks, 2), each, dtype=torch.int32, device=self.tokens.device)
        return find_tile_order(
            self.tokens, self.offsets, table, rank, channels=1, parts=1, part_rows=1, block_rows=block_rows
        )


class _CopiedTokens(Arrivals):
    """Tokens that copy engines push, which need no multiprocessor: the consumer may fill the GPU."""

    group = ""
    kept: Tensor | None = None  # where copy engines put all tokens

    def run(
        self, kernel: Any, key: Hashable, programs: int, arguments: tuple[Any, ...], options: dict[str, int]
    ) -> None:
        """Launch a persistent kernel whose programs claim tiles, and wait for their rows."""
        programs = leave_room_for_copies(programs, self._block_channel.device)
        try:
            self._block_channel.launch(kernel, key, programs, arguments, **options)
        except BaseException:
            abandon(self.group, self._block_channel)
            raise
        finally:  # also after an error: the next call's copies must come after these
            self._join()
        self._copy()

    def copy_to(self, memory: Tensor) -> None:
        if memory is not self.kept:
            super().copy_to(memory)


def push_tokens(x: Tensor, group: str, kept: Tensor | None = None) -> Arrivals:
    """Have copy engines push x [t, h] to all ranks, which have as many tokens; kept: to which all are copied, too."""
    t, h = x.shape
    ranks_tokens = find_group(group).size() * t
    block_channel, offset, slot, _ = find_landing(group, x.device, count_bytes(ranks_tokens, h, dtype=x.dtype))
    block_channel.check()
    rank, ranks = block_channel.rank, block_channel.world_size
    parts = min(_PARTS, t)
    size = triton.cdiv(t, parts)  # as `find_tile_order` cuts them
    mapping = tiles.shard_tiles(parts, ranks, 1, channels=parts, fixed=True)
    gathered = block_channel.tensor((ranks_tokens, h), x.dtype, offset=offset)
    table = torch.full((ranks, ranks, 2), t, dtype=torch.int32, device=x.device)
    try:
        channel = block_channel.begin("all_gather_moe", mapping, mapping, "p2p", slot=slot)
        # On this stream, before the product: a copy within a GPU may need a multiprocessor.
        tiles.rank_copy_data(gathered, x, rows=slice(0, t), to=rank * t)
        block_channel.launch(signal_own_parts, parts, 1, (channel, mapping), num_warps=1)
        with tiles.copy_engine(block_channel):
            for distance in range(1, ranks):
                peer = (rank - distance) % ranks  # so that each rank gets its next rank's tokens first
                there = block_channel.tensor((ranks_tokens, h), x.dtype, offset=offset, rank=peer)
                for part in range(parts):
                    start = min(part * size, t)
                    sent = slice(start, min(start + size, t))
                    tiles.rank_copy_data(there, x, rows=sent, to=rank * t + start)
                    tiles.rank_notify(block_channel, peer * parts + part, peer)
            if kept is not None:
                tiles.rank_copy_data(kept, x, rows=slice(0, t), to=rank * t)
                for distance in range(1, ranks):
                    source = (rank + distance) % ranks
                    tiles.rank_wait(block_channel, rank * parts + parts - 1, source)
                    tiles.rank_copy_data(kept, gathered, rows=slice(source * t, (source + 1) * t), to=source * t)
        block_channel.is_open = True
    except BaseException:
        abandon(group, block_channel)
        raise
    arrivals = _CopiedTokens(gathered, block_channel, channel, mapping, 1, table, x)
    arrivals.group, arrivals.kept = group, kept
    return arrivals


def multiply_arriving(
    config: GroupedConfig, x: Tensor, weight: Tensor, routed: Routed, group: str, *, keeps_gathered: bool
) -> tuple[Tensor, Tensor]:
    """(rows [n, f], gathered tokens [ranks * t, h] or none): x [t, h], weight [e, f, h] or the transpose of one."""
    kept = x.new_empty(routed.positions.shape[0] if keeps_gathered else 0, x.shape[1])
    arrivals = push_tokens(x, group, kept if keeps_gathered else None)
    return multiply(config, arrivals.rows, weight, routed.offsets, routed.tokens, arrivals), kept


@triton.jit
def signal_own_parts(channel, mapping):  # type: ignore[no-untyped-def]
    """Signal this rank that its own parts are in place, as what came before on its stream has put them. One program."""
    for part in tl.static_range(mapping.channels):
        tiles.producer_tile_notify(channel, mapping, channel.rank * mapping.channels + part, "p2p")


def multiply_leaving(
    config: GroupedConfig, rows: Tensor, weight: Tensor, weights: Tensor | None, routed: Routed, group: str
) -> Tensor:
    """This rank's tokens [t, h] of the ranks' sums: rows [n, f], weight [e, h, f] or the transpose of one.

    weights: of all ranks' tokens, [ranks * t, k], or None for 1.
    """
    (m, n, k, group_rows, num_warps, num_stages, programs), *_ = config
    h, inner = weight.shape[1:]
    tokens, choices = routed.positions.shape
    is_transposed = not weight.is_contiguous()
    stored = weight.transpose(1, 2) if is_transposed else weight
    block_channel, offset, slot, _ = find_landing(group, rows.device, count_bytes(tokens, h, dtype=rows.dtype))
    block_channel.check()
    rank, ranks = block_channel.rank, block_channel.world_size
    t = tokens // ranks
    units = triton.cdiv(t, _TOKENS)
    mapping = tiles.shard_tiles(units, ranks, 1, channels=min(_PARTS, units))
    staging = block_channel.tensor((tokens, h), rows.dtype, offset=offset)
    products, out = rows.new_empty(rows.shape[0], h), rows.new_empty(t, h)
    order = routed.order(rank, ranks, m)
    done = torch.zeros(ranks, dtype=torch.int32, device=rows.device)
    described = _describe(rows, m, k), _describe(stored, 1, *((k, n) if is_transposed else (n, k)))
    constants = (
        m, n, k, is_transposed, choices, _TOKENS, min(_COLUMNS, triton.next_power_of_2(h)),
    )  # fmt: skip
    waiting = limit_waiting(programs, rows.device) if rows.is_cuda else programs
    operands = (
        order.experts, order.ends, done, *described, products, routed.positions, weights, staging, out,
        rows.shape[0], h, inner, t, units, group_rows, waiting,
    )  # fmt: skip
    try:
        channel = block_channel.begin("moe_reduce_scatter", mapping, mapping, "p2p", slot=slot)
        kinds = map(tiles.kind_of, (*operands, mapping.channel_rows))
        key = *kinds, mapping.channels.value, *constants, num_warps, num_stages
        block_channel.launch(
            multiply_and_send, key, programs, (channel, mapping, order.mapping, *operands, *constants),
            num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=False,
        )  # fmt: skip
    except BaseException:
        abandon(group, block_channel)
        raise
    return out


@triton.jit(do_not_specialize=["n", "tokens", "units", "group_rows", "reducers"])
def multiply_and_send(  # type: ignore[no-untyped-def]
    channel, mapping, order, tile_experts, ends, done, rows, weight, products, positions, weights, staging, out,
    n, columns, k, tokens, units, group_rows, reducers, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out [tokens, columns] = the ranks' sums of weights * products of this rank's tokens; persistent.

    products [n, columns] = each expert's rows @ its weight.T, memory of this rank. positions, weights: [ranks * tokens,
    K], of all ranks' tokens; weights may be None. staging: [ranks * tokens, columns] in symmetric memory, what each
    rank sends for this one's tokens. order, tile_experts, ends: of a `TileOrder`.

    Order: tiles of the farthest rank's tokens first, own ones last. Programs claim units of work: a group of tiles, by
    the farthest rank whose rows they have, then the sums of the group before it, TOKENS tokens a unit, which so are
    sent while the next group is multiplied. At last `reducers` programs add the ranks' sums of own tokens, in fp32 in
    the order of ranks; those that end earlier make room for other kernels.
    Signals: on this GPU, done[distance] += 1 after a tile's stores (release). To a unit's owner, after its stores
    ("p2p").
    Waits: a unit of sums, for all tiles that have its rows: running programs have claimed them, which wait for no
    peer. A unit of the sum over ranks, for that unit of all ranks. No program waits for a peer before all units are
    claimed by running programs, and those that wait leave room for another group's kernels (`limit_waiting`).
    Reuse: of two slots or one, as `begin` was told.
    """
    column_tiles = tl.cdiv(columns, BLOCK_N)
    results = products, None, None, None, None, None
    sizes = n, columns, k
    begin = tl.program_id(0) * 0
    unit = tiles.claim(channel)
    for step in range(channel.world + 1):
        distance = channel.world - 1 - step
        first, count = _find_group(ends, distance)
        multiplied = begin + count * column_tiles
        while unit < multiplied:
            following = tiles.claim(channel)
            tile, column_tile = order_tiles(unit - begin, count, column_tiles, group_rows)
            row, end = tiles.tile_rows(order, first + tile)
            place = tl.load(tile_experts + first + tile), row, end, column_tile * BLOCK_N
            _make_tile(rows, None, weight, place, results, sizes, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED, "none")
            tl.debug_barrier()
            tl.atomic_add(done + distance, 1, sem="release", scope="gpu")
            unit = following
        begin = multiplied + tl.where(step > 0, units, 0)
        while unit < begin:
            following = tiles.claim(channel)
            ready = _await_tiles(ends, done, distance + 1, channel.world, column_tiles)
            owner = (channel.rank + distance + 1) % channel.world
            _send_sums(
                channel, products + ready, positions, weights, staging, columns, tokens, owner, unit - multiplied,
                K, TOKENS, COLUMNS,
            )  # fmt: skip
            tiles.producer_tile_notify(channel, mapping, owner * units + unit - multiplied, "p2p")
            unit = following
    reducer = tiles.arrive_produced(channel) - (tl.num_programs(0) - reducers)
    if reducer >= 0:
        for own in range(reducer, units, reducers):
            ready = own * 0
            for source in tl.static_range(channel.world):
                ready += tiles.consumer_tile_wait(channel, mapping, channel.rank * units + own, source=source)
            _add_ranks(channel, staging + ready, out, columns, tokens, own, TOKENS, COLUMNS)


@triton.jit
def _find_group(ends, distance):  # type: ignore[no-untyped-def]
    """(first tile, number of tiles) of those whose farthest rank is at this distance; none at distance -1."""
    first = tl.load(ends + distance - 1, mask=distance > 0, other=0)
    return first, tl.load(ends + distance, mask=distance >= 0, other=0) - first


@triton.jit
def _await_tiles(ends, done, distance, world, column_tiles):  # type: ignore[no-untyped-def]
    """Wait until all tiles of ranks from this distance on are stored; an int32 0 for the offset of what is loaded."""
    ready = column_tiles * 0
    for other in range(distance, world):
        _, count = _find_group(ends, other)
        target = count * column_tiles
        seen = tl.atomic_add(done + other, 0, sem="acquire", scope="gpu")
        while seen < target:
            seen = tl.atomic_add(done + other, 0, sem="acquire", scope="gpu")
        ready += opaque_zero(seen, False)
    return ready * 16


@triton.jit
def _send_sums(  # type: ignore[no-untyped-def]
    channel, products, positions, weights, staging, columns, tokens, owner, unit, K: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the weighted sums of a unit's tokens to the owner, in this rank's place there."""
    publishes = tiles.may_publish(channel)
    there = tiles.peer_pointer(channel, staging, owner)
    for start in range(0, TOKENS, _ROWS):
        token = unit * TOKENS + start + tl.arange(0, _ROWS)
        is_token = token < tokens
        copy = (owner * tokens + token).to(tl.int64) * K
        target = (channel.rank * tokens + token).to(tl.int64) * columns
        for column in range(0, columns, COLUMNS):
            at = column + tl.arange(0, COLUMNS)
            mask = is_token[:, None] & (at < columns)[None, :]
            total = tl.full((_ROWS, COLUMNS), -0.0, tl.float32)  # -0 + x is x, also for -0
            for slot in tl.static_range(K):
                row = tl.load(positions + copy + slot, mask=is_token, other=0) * columns
                value = tl.load(products + row[:, None] + at[None, :], mask=mask, other=0.0).to(tl.float32)
                if weights is not None:
                    value *= tl.load(weights + copy + slot, mask=is_token, other=0.0).to(tl.float32)[:, None]
                total += value
            sums = total.to(products.dtype.element_ty)
            tl.store(there + target[:, None] + at[None, :], sums, mask=mask & publishes)


@triton.jit
def _add_ranks(  # type: ignore[no-untyped-def]
    channel, staging, out, columns, tokens, unit, TOKENS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Add up what the ranks have sent for a unit's tokens, in their order, and store the sums."""
    for start in range(0, TOKENS, _ROWS):
        token = (unit * TOKENS + start + tl.arange(0, _ROWS)).to(tl.int64)
        for column in range(0, columns, COLUMNS):
            at = column + tl.arange(0, COLUMNS)
            mask = (token < tokens)[:, None] & (at < columns)[None, :]
            places = token[:, None] * columns + at[None, :]
            total = tl.full((_ROWS, COLUMNS), -0.0, tl.float32)
            for source in tl.static_range(channel.world):
                rank_rows = staging + tl.cast(source * tokens, tl.int64) * columns
                total += tl.load(rank_rows + places, mask=mask, other=0.0).to(tl.float32)
            tl.store(out + places, total.to(out.dtype.element_ty), mask=mask)


def exchange(parts: Tensor, group: str) -> Tensor:
    """Send parts[r] to rank r by copy engines: [ranks, ...], the same on all ranks -> [ranks, ...], by source.

    For what is small: the stream waits until all of it has arrived.
    """
    parts = parts.contiguous()
    block_channel, offset, slot, _ = find_landing(group, parts.device, parts.nbytes)
    block_channel.check()
    rank, ranks = block_channel.rank, block_channel.world_size
    mapping = tiles.shard_tiles(1, ranks, 1)
    received = block_channel.tensor(tuple(parts.shape), parts.dtype, offset=offset)
    try:
        block_channel.begin("moe exchange", mapping, mapping, "p2p", slot=slot)
        with tiles.copy_engine(block_channel):
            for distance in range(1, ranks):
                peer = (rank - distance) % ranks
                there = block_channel.tensor(tuple(parts.shape), parts.dtype, offset=offset, rank=peer)
                tiles.rank_copy_data(there, parts, rows=slice(peer, peer + 1), to=rank)
                tiles.rank_notify(block_channel, peer, peer)
        tiles.rank_notify(block_channel, rank, rank)
        tiles.rank_wait_all(block_channel, rank, 0)
        found = received.clone()
        found[rank] = parts[rank]
    except BaseException:
        abandon(group, block_channel)
        raise
    finally:
        tiles.join_copies(block_channel)
    return found
