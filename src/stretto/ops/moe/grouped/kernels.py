# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMM in Triton, for GPUs with TMA: products of ragged rows with their experts' weights, and both gradients.

`multiply_groups` computes rows' products, also with gate and up in one pass, and the gradient of that; it gathers rows
by index where it is given tokens. `sum_outer_products` computes the weights' gradient. Both are persistent: a program
takes every P-th tile. Programs find the tiles of experts from the offsets, which the host need not know, so CUDA graphs
hold them. Tiles of one expert follow each other, so that its weight stays in the L2 cache. `multiply_groups_in_order`
is `multiply_groups` on tiles in a `TileOrder`, for rows that arrive meanwhile.

An expert's rows begin and end anywhere. Loads of a product may read rows of the next expert, whose results are not
stored. TMA that stores rows, or loads what is summed over rows, has to end at the expert's end: `describe_ragged`.
"""

from math import prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto import tiles
from stretto.ops.gemm import describe_matrix, halve, order_tiles
from stretto.ops.moe.grouped.config import MOST_ROWS, GroupedConfig
from stretto.ops.moe.grouped.tile_order import Arrivals, await_channels
from stretto.tiles.launches import launch_cached

_WRAP = 1 << 34  # times MOST_ROWS and 2 bytes or more: a multiple of 2^64
_LARGEST = 0x7FFF0000
_MANY_EXPERTS = 128  # up to so many, one compiled kernel is for any number

LAST_ROW = tl.constexpr(MOST_ROWS)
CLEARED = tl.constexpr(1024)  # columns of padding at once
CLEARED_ROWS = tl.constexpr(16)  # of padding, that a program claims at once


class GateGradient(NamedTuple):
    """Results of `differentiate_gate`: gradients of inner [n, 2 * F], activated [n, F], and partial products."""

    inner: Tensor
    activated: Tensor
    products: Tensor | None


def multiply(
    config: GroupedConfig,
    rows: Tensor,
    weight: Tensor,
    offsets: Tensor,
    tokens: Tensor | None = None,
    arrivals: Arrivals | None = None,
) -> Tensor:
    """Each expert's rows, or rows[tokens], times its weight's transpose: [n, a], [e, b, a], [e + 1] -> [n, b].

    arrivals: of rows that are on their way, here and below; the result has the same bits.
    """
    n = rows.shape[0] if tokens is None else tokens.shape[0]
    out = rows.new_empty(n, weight.shape[1])
    _launch_product(config, rows, weight, offsets, tokens, out, "none", arrivals=arrivals)
    return out


def multiply_gated(
    config: GroupedConfig,
    rows: Tensor,
    gate_up: Tensor,
    offsets: Tensor,
    tokens: Tensor | None = None,
    *,
    keeps_inner: bool = True,
    arrivals: Arrivals | None = None,
) -> tuple[Tensor, Tensor]:
    """(silu(gate) * up [n, F], gate and up [n, 2 * F]) of rows, or rows[tokens], and gate_up [e, 2 * F, a].

    keeps_inner: if not, gate and up are not stored, and the second is empty.
    """
    n, columns = rows.shape[0] if tokens is None else tokens.shape[0], gate_up.shape[1] // 2
    out, inner = rows.new_empty(n, columns), rows.new_empty(n if keeps_inner else 0, 2 * columns)
    kept = inner if keeps_inner else None
    _launch_product(config, rows, gate_up, offsets, tokens, out, "gate", inner=kept, arrivals=arrivals)
    return out, inner


def differentiate_gate(
    config: GroupedConfig,
    grad: Tensor,
    down: Tensor,
    offsets: Tensor,
    inner: Tensor,
    tokens: Tensor | None = None,
    factors: Tensor | None = None,
    arrivals: Arrivals | None = None,
) -> GateGradient:
    """Gradients of silu(gate) * up @ down.T, of inner [n, 2 * F] = gate and up: grad [n, b], down [e, b, F].

    tokens: grad is [t, b], of which row i is grad[tokens[i]]. factors: fp32 [n]; the product is of rows that were
    multiplied by them, and so is `activated`; `products` [column tiles, n] sum up to the factors' gradient.
    """
    columns = down.shape[2]
    out, activated = torch.empty_like(inner), inner.new_empty(inner.shape[0], columns)
    products = None
    if factors is not None:
        tiles = triton.cdiv(columns, config.blocks.n)
        products = torch.empty(tiles, inner.shape[0], dtype=torch.float32, device=inner.device)
    _launch_product(
        config, grad, down.transpose(1, 2), offsets, tokens, out, "differentiate",
        inner=inner, activated=activated, factors=factors, products=products, arrivals=arrivals,
    )  # fmt: skip
    return GateGradient(out, activated, products)


def multiply_transposed(
    config: GroupedConfig,
    grad: Tensor,
    rows: Tensor,
    offsets: Tensor,
    dtype: torch.dtype | None = None,
    factor: float = 1.0,
) -> Tensor:
    """Each expert's grad.T @ rows times factor: grad [n, b], rows [n, a] -> [e, b, a], of dtype or the operands'."""
    (m, n, k, group_rows, num_warps, num_stages, programs), *_ = config
    experts, b, a = offsets.shape[0] - 1, grad.shape[1], rows.shape[1]
    out = rows.new_empty(experts, b, a, dtype=dtype)
    parts = out.itemsize  # of as many bytes in shared memory for each dtype
    launch_cached(
        sum_outer_products, programs, describe_ragged(grad, (k, m)), describe_ragged(rows, (k, n)),
        offsets.contiguous(), _describe(out, 1, m, n // parts), b, a, experts, group_rows, factor,
        EXPERTS=_round_up(experts), BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, PARTS=parts, num_warps=num_warps,
        num_stages=num_stages,
    )  # fmt: skip
    return out


def _round_up(experts: int) -> int:
    return max(triton.next_power_of_2(experts), _MANY_EXPERTS)


def _launch_product(
    config: GroupedConfig,
    rows: Tensor,
    weight: Tensor,
    offsets: Tensor,
    tokens: Tensor | None,
    out: Tensor,
    epilogue: str,
    *,
    inner: Tensor | None = None,
    activated: Tensor | None = None,
    factors: Tensor | None = None,
    products: Tensor | None = None,
    arrivals: Arrivals | None = None,
) -> None:
    (m, n, k, group_rows, num_warps, num_stages, programs), halves, flattens = config
    experts, depth, offsets = weight.shape[0], weight.shape[2], offsets.contiguous()
    tokens = None if tokens is None else tokens.contiguous()
    is_transposed = not weight[0].is_contiguous()
    stored = weight.transpose(1, 2) if is_transposed else weight
    given = None
    source: Any = rows
    half_rows: Any = rows
    if tokens is None:
        source = _describe(rows, m, k)
        half_rows = _describe(rows, m // 2, k) if halves else None
    if flattens and epilogue != "differentiate":
        given = describe_ragged(out, (m, n // 2))
    described = _describe(stored, 1, *((k, n) if is_transposed else (n, k)))
    results = out, given, inner, activated, factors, products
    sizes = out.shape[0], weight.shape[1] // (2 if epilogue == "gate" else 1), depth, experts, group_rows
    if arrivals is not None and tokens is not None:
        order = arrivals.order(tokens, offsets, m)
        count = order.ends[-1:]  # of the farthest rank's: between nodes the channel has fewer ranks
        operands = order.experts, count, order.claimed, source, tokens, described, offsets, *results
        constants = m, n, k, is_transposed, epilogue, *arrivals.constants
        arguments = arrivals.channel, arrivals.counters, order.mapping, *operands, *sizes, *constants
        key = *map(tiles.kind_of, (arrivals.counters, *operands, *sizes)), *constants, num_warps, num_stages
        options = {"num_warps": num_warps, "num_stages": num_stages}
        arrivals.run(multiply_groups_in_order, key, programs, arguments, options)
        return
    launch_cached(
        multiply_groups, programs, source, half_rows, tokens, described, offsets, *results, *sizes,
        EXPERTS=_round_up(experts), BLOCK_M=m, BLOCK_N=n, BLOCK_K=k,
        TRANSPOSED=is_transposed, EPILOGUE=epilogue, HALVES=halves, FLATTEN=flattens,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip


def _describe(tensor: Tensor, *block: int) -> Any:
    """A TMA descriptor of a tensor, or of some of each expert's rows.

    Dims of size 1 of a contiguous tensor may have any stride, of which TMA takes few.
    """
    strides = tuple(prod(tensor.shape[dim + 1 :]) for dim in range(tensor.dim()))
    return describe_matrix(tensor, block, strides=strides if tensor.is_contiguous() else tensor.stride())


def describe_ragged(matrix: Tensor, block: tuple[int, int]) -> Any:
    """A TMA descriptor of a contiguous matrix, access to which ends at a row that the kernel gives.

    Three coordinates are of rows, and add up: 2^30 * (2^34 - stride) + end * stride + (2^30 - end + row) * stride is
    row * stride, modulo 2^64 bytes. The third dim ends at 2^30, and so does the access at row = end (Triton's own
    `triton.tools.ragged_tma` is the same).
    """
    stride = columns = matrix.shape[1]
    shape, strides = (_LARGEST, _LARGEST, MOST_ROWS, columns), (_WRAP - stride, stride, stride, 1)
    return describe_matrix(matrix, (1, 1, *block), shape, strides)


@triton.jit(do_not_specialize=["n", "experts", "group_rows"])
def multiply_groups(  # type: ignore[no-untyped-def]
    rows, half_rows, tokens, weight, offsets, out, out_tiles, inner, activated, factors, products,
    n, columns, k, experts, group_rows, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr, EPILOGUE: tl.constexpr, HALVES: tl.constexpr,
    FLATTEN: tl.constexpr,
):  # fmt: skip
    """out = each expert's rows @ its weight.T; rows of out [n, .] from offsets[experts] on become zeros. Persistent.

    rows: a descriptor of [n, k] (half_rows: with half of the rows a block), or with tokens int32 [n] a tensor [t, k],
    of which row i is rows[tokens[i]]. weight: a descriptor of [experts, columns, k], or TRANSPOSED of [experts, k,
    columns]. out_tiles: a ragged descriptor of out, or None to store by pointers.

    EPILOGUE: "none"; "gate": weight has 2 * columns, gate and then up, out [n, columns] = silu(gate) * up, and inner
    [n, 2 * columns], if given, is gate and up; "differentiate": the product times factors fp32 [n], if given, is the
    gradient of that result; out [n, 2 * columns] is the gradient of inner, which is read, activated [n, columns] is
    silu(gate) * up * factors, and products fp32 [column tiles, n] is what each tile adds to the factors' gradient.

    EXPERTS: a power of two, experts or more. Order: expert after expert; among its tiles, `order_tiles`. Programs take
    units in turns: a tile, or with HALVES two tiles of half the rows, which take as long, in an expert's last rows.
    Synchronization: none: rows are complete before the kernel begins, and programs own their tiles.
    """
    column_tiles = tl.cdiv(columns, BLOCK_N)
    units = _count_units(offsets, experts, column_tiles, EXPERTS, BLOCK_M, HALVES)
    last_units = tl.cumsum(units)
    results = out, out_tiles, inner, activated, factors, products
    half_results = out, None, inner, activated, factors, products
    sizes = n, columns, k
    for unit in tl.range(tl.program_id(0), tl.sum(units), tl.num_programs(0), flatten=FLATTEN):
        # The experts whose units all come before, and the number of these units, in one sum.
        before = tl.sum(tl.where(last_units <= unit, units.to(tl.int64) + (1 << 32), 0))
        expert, index = (before >> 32).to(tl.int32), unit - before.to(tl.int32)
        begin, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
        row_tiles = _count_row_tiles(end - begin, BLOCK_M, HALVES)
        if HALVES:
            if index < row_tiles * column_tiles:
                row_tile, column_tile = order_tiles(index, row_tiles, column_tiles, group_rows)
                row = begin + row_tile * BLOCK_M
                place = expert, row, end, column_tile * BLOCK_N
                _make_tile(rows, tokens, weight, place, results, sizes, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED, EPILOGUE)
            else:
                row = begin + row_tiles * BLOCK_M
                first = (index - row_tiles * column_tiles) * 2
                for column_tile in range(first, tl.minimum(first + 2, column_tiles)):
                    place = expert, row, end, column_tile * BLOCK_N
                    _make_tile(
                        half_rows, tokens, weight, place, half_results, sizes,
                        BLOCK_M // 2, BLOCK_N, BLOCK_K, TRANSPOSED, EPILOGUE,
                    )  # fmt: skip
        else:
            row_tile, column_tile = order_tiles(index, row_tiles, column_tiles, group_rows)
            row = begin + row_tile * BLOCK_M
            place = expert, row, end, column_tile * BLOCK_N
            _make_tile(rows, tokens, weight, place, results, sizes, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED, EPILOGUE)
    width = columns * 2 if EPILOGUE == "differentiate" else columns
    for padding in range(tl.load(offsets + experts) + tl.program_id(0), n, tl.num_programs(0)):
        for start in range(0, width, CLEARED):
            places = start + tl.arange(0, CLEARED)
            tl.store(out + tl.cast(padding, tl.int64) * width + places, 0.0, mask=places < width)


@triton.jit(do_not_specialize=["n", "experts", "group_rows"])
def multiply_groups_in_order(  # type: ignore[no-untyped-def]
    channel, counters, mapping, tile_experts, count, claims, rows, tokens, weight, offsets, out, out_tiles, inner,
    activated, factors, products, n, columns, k, experts, group_rows, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr, EPILOGUE: tl.constexpr, CHANNELS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Multiply as `multiply_groups`, on the tiles of a `TileOrder`, each as soon as its rows have arrived; persistent.

    mapping, tile_experts: of the order, of tiles of BLOCK_M rows. count: int32 [1], how many tiles there are. rows: a
    tensor, gathered by tokens. claims: int32 [1], 0 before the first of the launches that divide the work. counters,
    CHANNELS, LANES: of `await_channels`.
    Order: the nearest rank's tiles first, in groups of `group_rows` (`order_tiles`). Programs claim them, so that those
    which start later, on multiprocessors that the exchange has left, do fewer.
    Waits: for the channels that signal a tile's rows, before its loads, until all rows of all sources have arrived. The
    exchange that sends them needs no place that a waiting program has: see `Arrivals.run`.
    """
    column_tiles = tl.cdiv(columns, BLOCK_N)
    row_tiles = tl.load(count)
    results = out, out_tiles, inner, activated, factors, products
    sizes = n, columns, k
    ready = row_tiles * 0
    has_all = ready != 0
    unit = tl.atomic_add(claims, 1, sem="relaxed", scope="gpu")
    while unit < row_tiles * column_tiles:
        following = tl.atomic_add(claims, 1, sem="relaxed", scope="gpu")
        tile, column_tile = order_tiles(unit, row_tiles, column_tiles, group_rows)
        row, end = tiles.tile_rows(mapping, tile)
        expert = tl.load(tile_experts + tile)
        if has_all == 0:
            low, high = tiles.tile_channels(mapping, tile)
            zero, has_all = await_channels(channel, counters, low, high, CHANNELS, LANES)
            ready += zero
        place = expert, row, end, column_tile * BLOCK_N
        arrived = rows + ready * 16  # a multiple of 16, so that loads stay wide
        _make_tile(arrived, tokens, weight, place, results, sizes, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED, EPILOGUE)
        unit = following
    width = columns * 2 if EPILOGUE == "differentiate" else columns
    padding = tl.load(offsets + experts) + (unit - row_tiles * column_tiles) * CLEARED_ROWS
    while padding < n:
        for row in range(padding, tl.minimum(padding + CLEARED_ROWS, n)):
            for start in range(0, width, CLEARED):
                places = start + tl.arange(0, CLEARED)
                tl.store(out + tl.cast(row, tl.int64) * width + places, 0.0, mask=places < width)
        unit = tl.atomic_add(claims, 1, sem="relaxed", scope="gpu")
        padding = tl.load(offsets + experts) + (unit - row_tiles * column_tiles) * CLEARED_ROWS


@triton.jit
def _count_units(offsets, experts, column_tiles, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, HALVES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count each expert's units of work: [EXPERTS], zeros from `experts` on."""
    at = tl.arange(0, EXPERTS)
    begins = tl.load(offsets + at, mask=at < experts, other=0)
    rows = tl.load(offsets + at + 1, mask=at < experts, other=0) - begins
    row_tiles = _count_row_tiles(rows, BLOCK_M, HALVES)
    units = row_tiles * column_tiles
    if HALVES:
        units += tl.where(rows > row_tiles * BLOCK_M, tl.cdiv(column_tiles, 2), 0)
    return units


@triton.jit
def _count_row_tiles(rows, BLOCK_M: tl.constexpr, HALVES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count an expert's tiles of BLOCK_M rows; with HALVES, without a last one that half of the rows suffice for."""
    return (rows + (BLOCK_M // 2 if HALVES else BLOCK_M) - 1) // BLOCK_M


@triton.jit
def _make_tile(  # type: ignore[no-untyped-def]
    rows, tokens, weight, place, results, sizes, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """Multiply a tile, and store its rows before `end` as the epilogue says."""
    expert, row, end, column = place
    out, out_tiles, inner, _, _, _ = results
    _, columns, k = sizes
    dtype: tl.constexpr = out.dtype.element_ty
    at, steps = row + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    is_row = at < end
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = total
    places = rows
    if tokens is not None:
        k = k // 8 * 8  # shows Triton that rows begin at multiples of 16 bytes
        token = tl.load(tokens + at, mask=is_row, other=0).to(tl.int64)
        places = rows + token[:, None] * k + steps[None, :]
    for start in range(0, k, BLOCK_K):
        if tokens is not None:
            x = tl.load(places + start, mask=is_row[:, None] & (steps[None, :] < k - start), other=0)
        else:
            x = rows.load([row, start])
        total = tl.dot(x, _load_weight(weight, expert, column, start, BLOCK_N, BLOCK_K, TRANSPOSED), total)
        if EPILOGUE == "gate":
            up = tl.dot(x, _load_weight(weight, expert, columns + column, start, BLOCK_N, BLOCK_K, TRANSPOSED), up)
    if EPILOGUE == "differentiate":
        left, right = halve(total)
        _differentiate(halve(left) + halve(right), place, results, sizes, BLOCK_M, BLOCK_N)
    else:
        # 64 bits for where the tile begins, 32 bits for offsets in it: fewer registers.
        column_steps = tl.arange(0, BLOCK_N)[None, :]
        row_steps = tl.arange(0, BLOCK_M)[:, None]
        mask = (row_steps < end - row) & (column_steps < columns - column)
        if EPILOGUE == "gate":
            if inner is not None:
                gates = inner + tl.cast(row, tl.int64) * (2 * columns) + column
                places = row_steps * (2 * columns) + column_steps
                tl.store(gates + places, total.to(dtype), mask=mask)
                tl.store(gates + columns + places, up.to(dtype), mask=mask)
            # Rounded as they are saved: the gradient computes the same activation again.
            gate = total.to(dtype).to(tl.float32)
            total = gate / (1 + tl.exp(-gate)) * up.to(dtype).to(tl.float32)
        if out_tiles is not None:
            left, right = halve(total)
            _store_ragged(out_tiles, left.to(dtype), row, end, column)
            _store_ragged(out_tiles, right.to(dtype), row, end, column + BLOCK_N // 2)
        else:
            begin = out + tl.cast(row, tl.int64) * columns + column
            tl.store(begin + (row_steps * columns + column_steps), total.to(dtype), mask=mask)


@triton.jit
def _differentiate(quarters, place, results, sizes, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the gradients of gate and up, and the activation, for a tile of its gradient in quarters of its columns.

    In quarters, since a whole tile's operands do not fit into registers.
    """
    _, row, end, column = place
    out, _, inner, activated, factors, products = results
    n, columns, _ = sizes
    dtype: tl.constexpr = out.dtype.element_ty
    width: tl.constexpr = BLOCK_N // 4
    rows = tl.arange(0, BLOCK_M)
    is_row = rows < end - row
    product = tl.zeros((BLOCK_M,), tl.float32)
    factor = product
    if factors is not None:
        factor = tl.load(factors + row + rows, mask=is_row, other=0)
    narrow_places = rows[:, None] * columns + tl.arange(0, width)[None, :]
    wide_places = rows[:, None] * (2 * columns) + tl.arange(0, width)[None, :]
    for quarter in tl.static_range(4):
        total = quarters[quarter]
        at = column + quarter * width
        mask = is_row[:, None] & (tl.arange(0, width) < columns - at)[None, :]
        wide = tl.cast(row, tl.int64) * (2 * columns) + at
        gate = tl.load(inner + wide + wide_places, mask=mask, other=0).to(tl.float32)
        up = tl.load(inner + wide + columns + wide_places, mask=mask, other=0).to(tl.float32)
        share = 1 / (1 + tl.exp(-gate))
        gated = gate * share * up
        if factors is not None:
            product += tl.sum(total * gated, axis=1)
            total *= factor[:, None]
            gated *= factor[:, None]
        narrow = tl.cast(row, tl.int64) * columns + at
        tl.store(activated + narrow + narrow_places, gated.to(dtype), mask=mask)
        of_gate = total * up * (share * (1 + gate * (1 - share)))
        tl.store(out + wide + wide_places, of_gate.to(dtype), mask=mask)
        tl.store(out + wide + columns + wide_places, (total * (gate * share)).to(dtype), mask=mask)
    if factors is not None:
        tl.store(products + tl.cast(column // BLOCK_N, tl.int64) * n + row + rows, product, mask=is_row)


@triton.jit
def _load_weight(  # type: ignore[no-untyped-def]
    weight, expert, column, start, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """Load [BLOCK_K, BLOCK_N] of an expert's weight, transposed; zeros outside of it."""
    if TRANSPOSED:
        block = tl.reshape(weight.load([expert, start, column]), (BLOCK_K, BLOCK_N))
    else:
        block = tl.reshape(weight.load([expert, column, start]), (BLOCK_N, BLOCK_K)).T
    return block


@triton.jit
def _store_ragged(matrix, block, row, end, column):  # type: ignore[no-untyped-def]
    """Store the rows of a block that come before `end`."""
    rows: tl.constexpr = block.shape[0]
    columns: tl.constexpr = block.shape[1]
    matrix.store([LAST_ROW, end, LAST_ROW - (end - row), column], tl.reshape(block, (1, 1, rows, columns)))


@triton.jit(do_not_specialize=["experts", "group_rows", "factor"])
def sum_outer_products(  # type: ignore[no-untyped-def]
    grad, rows, offsets, out, b, a, experts, group_rows, factor, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """out [experts, b, a] = each expert's grad.T @ rows times factor, zeros without rows. Persistent.

    grad, rows: ragged descriptors of [n, b] and [n, a]. out: a descriptor, of a tile's columns in PARTS parts, 2 or 4.
    A tile is BLOCK_M x BLOCK_N of an expert's, and sums BLOCK_K rows a step, in one step at least. EXPERTS: a power of
    two, experts or more. Order: expert after
    expert; programs take tiles in turns. Synchronization: none: programs own their tiles.

    One loop has the steps of all of a program's tiles, so that a tile's loads begin before the last one's stores:
    Triton joins loops by itself only where the inner one's length is the same for all tiles. It is pipelined because
    what the next step's loads need is known before this step's product. On H200 whole tiles in one store are no faster,
    and warp specialization by Triton 3.6 (`tl.range(warp_specialize=True)`) gives wrong results, no sooner.
    """
    row_tiles, column_tiles = tl.cdiv(b, BLOCK_M), tl.cdiv(a, BLOCK_N)
    expert_tiles, programs = row_tiles * column_tiles, tl.num_programs(0)
    at = tl.arange(0, EXPERTS)
    begins = tl.load(offsets + at, mask=at < experts, other=0)
    steps = tl.cdiv(tl.load(offsets + at + 1, mask=at < experts, other=0) - begins, BLOCK_K)
    steps = tl.where(at < experts, tl.maximum(steps, 1), 0)
    ahead = programs - 1 - tl.program_id(0)
    own_tiles = ((at + 1) * expert_tiles + ahead) // programs - (at * expert_tiles + ahead) // programs
    tile = tl.program_id(0) - programs
    expert, first_row, first_column, row, end = 0, 0, 0, 0, 0
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in tl.range(0, tl.sum(own_tiles * steps)):
        row += BLOCK_K
        if row >= end:
            tile += programs
            expert = tile // expert_tiles
            row_tile, column_tile = order_tiles(tile % expert_tiles, row_tiles, column_tiles, group_rows)
            first_row, first_column = row_tile * BLOCK_M, column_tile * BLOCK_N
            row, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
        left = _load_ragged(grad, row, end, first_row, BLOCK_K, BLOCK_M)
        right = _load_ragged(rows, row, end, first_column, BLOCK_K, BLOCK_N)
        total = tl.dot(left.T, right, total)
        if row + BLOCK_K >= end:
            left_half, right_half = halve(total * factor)
            parts = (left_half, right_half) if PARTS == 2 else halve(left_half) + halve(right_half)
            width: tl.constexpr = BLOCK_N // PARTS
            for part in tl.static_range(PARTS):
                values = tl.reshape(parts[part].to(out.dtype), (1, BLOCK_M, width))
                out.store([expert, first_row, first_column + part * width], values)
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)


@triton.jit
def _load_ragged(matrix, row, end, column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a block of a ragged descriptor; zeros from row `end` on."""
    return tl.reshape(matrix.load([LAST_ROW, end, LAST_ROW - (end - row), column]), (BLOCK_M, BLOCK_N))
