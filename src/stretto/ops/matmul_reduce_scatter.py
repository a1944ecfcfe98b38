"""GEMM + reduce-scatter as an operator; `gemm_scatter` has its kernel."""

from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula
from triton.tools.tensor_descriptor import TensorDescriptor

from stretto import tiles
from stretto.ops import small_m, unfused
from stretto.ops.checks import find_name, require_operands
from stretto.ops.dispatch import (
    choose_config,
    describe_problem,
    eager_fast_path,
    make_call_key,
    pin_backward,
    recall_config,
    save_operands,
    without_autocast,
)
from stretto.ops.gemm.config import LIBRARY, KernelConfig, encode_implementation
from stretto.ops.gemm.partial_sums import load_rows, locate_owned, store_rows
from stretto.ops.gemm.stream_k import StreamK, count_steps, count_units, find_unit, split_last_round
from stretto.ops.gemm.tile import (
    Blocks,
    Gemm,
    Scales,
    count_store_parts,
    describe_gemm,
    divide_up,
    goes_in_halves,
    halve,
    limit_waiting,
    multiply_tile,
    order_tiles,
    scale_tile,
    specialization_key,
    store_tile,
)
from stretto.ops.matmul_reduce_scatter_copies import can_copy, launch_scatter_by_copies
from stretto.ops.workspace import TWO_SLOTS_BYTES, OperatorWorkspace, abandon, count_bytes, find_group, find_workspace

_operators = torch.ops.stretto


def matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | None = None,
    reduce_dtype: torch.dtype | None = None,
    implementation: str | KernelConfig = "auto",
) -> Tensor:
    """x times weight's transpose, summed over the group; this rank's rows of it: [m, k], [n, k] -> [m / world, n].

    bf16, fp16 or fp32, all of one dtype. A rank's partial sums are fp32, travel in x's dtype or, if reduce_dtype is
    torch.float32, in that, are added in fp32 in rank order, and rounded. bias: [n], added once, by the row's owner; its
    gradient is of these rows. group: None for all ranks. x is contiguous; weight is, or its transpose. x's gradient is
    an `all_gather_matmul`, which gathers what weight's gradient needs. implementation: "auto" (what was measured to be
    the fastest, or a default), "kernel" (ours, or it raises), "library" (a GEMM, then a reduce-scatter) or a
    `KernelConfig`.
    ValueError for other input (m that the group does not divide, say) and for a rank outside of the group; PeerError
    for a rank that does not come. Flux, sections 3.2 and 4.
    """
    how = encode_implementation(implementation)
    return _call(x, weight, bias, find_name(group), reduce_dtype, how)


@without_autocast
def _run(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, reduce_dtype: torch.dtype | None, implementation: str
) -> Tensor:
    key = make_call_key("matmul_reduce_scatter", x, weight, bias, implementation, reduce_dtype)
    plan = recall_config(group, key)
    if plan is None:
        _require(x, weight, bias, group, reduce_dtype, implementation)
    rows, (n, k) = x.shape[0] // find_group(group).size(), weight.shape
    if plan is None:
        call = describe_problem("matmul_reduce_scatter", x.shape[0], x, weight, group)
        plan = choose_config(call, x, weight, group, implementation, key)
    if rows == 0 or n == 0 or k == 0:  # nothing to wait for
        return x.new_zeros(rows, n) if bias is None else x.new_zeros(rows, n) + bias
    if plan == LIBRARY:
        return unfused.matmul_reduce_scatter(x, weight, bias, group, reduce_dtype)
    out, dtype = x.new_empty(rows, n), reduce_dtype or x.dtype
    launch_scatter(plan, x, weight, bias, out, dtype, group)
    return out


def save_scatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, group, _, implementation = inputs
    ctx.group, ctx.has_bias, ctx.implementation = group, bias is not None, pin_backward(implementation)
    save_operands(ctx, x, weight)


@without_autocast
def differentiate_scatter(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    grad = grad.contiguous()
    grad_x = grad_weight = None
    if needs_x and needs_weight:
        grad_x, gathered = _operators.all_gather_matmul_gathered(grad, weight.t(), None, ctx.group, ctx.implementation)
        grad_weight = gathered.t() @ x
    elif needs_x:
        grad_x = _operators.all_gather_matmul(grad, weight.t(), None, ctx.group, ctx.implementation)
    elif needs_weight:
        grad_weight = unfused.gather_rows(grad, ctx.group).t() @ x
    return grad_x, grad_weight, grad.sum(0) if ctx.has_bias and needs_bias else None, None, None, None


_matmul_reduce_scatter = torch.library.custom_op("stretto::matmul_reduce_scatter", _run, mutates_args=())
_call = eager_fast_path(
    "MatmulReduceScatter", _run, torch.ops.stretto.matmul_reduce_scatter, save_scatter, differentiate_scatter
)


@_matmul_reduce_scatter.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, reduce_dtype: torch.dtype | None, implementation: str
) -> Tensor:
    return x.new_empty(_require(x, weight, bias, group, reduce_dtype, implementation), weight.shape[0])


_matmul_reduce_scatter.register_autograd(differentiate_scatter, setup_context=save_scatter)


@register_flop_formula(torch.ops.stretto.matmul_reduce_scatter)
def _(x: torch.Size, weight: torch.Size, *_: object, **__: object) -> int:
    return 2 * x[0] * prod(weight)


def _require(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, reduce_dtype: torch.dtype | None, implementation: str
) -> int:
    """This rank's number of rows. ValueError for what cannot be computed."""
    require_operands("matmul_reduce_scatter", x, weight, bias, implementation)
    return require_rows("matmul_reduce_scatter", x, x.dtype, reduce_dtype, group)


def require_rows(operator: str, x: Tensor, dtype: torch.dtype, reduce_dtype: torch.dtype | None, group: str) -> int:
    """This rank's number of x's rows. ValueError unless ranks divide them, and sums of `dtype` travel in a dtype."""
    world = find_group(group).size()
    if x.shape[0] % world:
        more = divide_up(x.shape[0], world) * world
        raise ValueError(f"{operator}: {world} ranks do not divide x's {x.shape[0]} rows: {more} rows will do")
    if reduce_dtype not in (None, dtype, torch.float32):
        raise ValueError(f"{operator}: partial sums of {dtype} travel in {dtype} or torch.float32, not {reduce_dtype}")
    return x.shape[0] // world


_ADDED_ELEMENTS = tl.constexpr(8192)  # of each rank's sums, that a program loads at once


@lru_cache(maxsize=4096)
def map_queues(world: int, programs: int) -> tiles.StaticMapping:
    """Each rank's lanes of tiles, which are signalled when all of a lane's tiles are stored."""
    return tiles.shard_tiles(programs, world, 1)


def launch_scatter(
    plan: KernelConfig,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    dtype: torch.dtype,
    group: str,
    scales: Scales | None = None,
) -> None:
    """The call, by packets, by copy engines, or by the kernel here, which is all of it or, of more than two slots hold,
    its second launch."""
    (rows, n), world = out.shape, find_group(group).size()
    if plan.exchange == "packets" and dtype == out.dtype:
        assert plan.blocks is not None
        size = small_m.count_bytes("scatter", x.shape[0], n, world, dtype)
        workspace = find_workspace(group, x.device, size, "packets")
        small_m.launch("matmul_reduce_scatter", "scatter", workspace, group, x, weight, bias, out, plan.blocks, scales)
        return
    plan = plan.with_even_tiles()
    assert plan.blocks is not None
    blocks = plan.blocks
    if plan.transfer == "copies" and can_copy(world):
        launch_scatter_by_copies(plan, x, weight, bias, out, dtype, group, world, scales)
        return
    count = world * divide_up(rows, blocks.m) * divide_up(n, blocks.n)
    shares, units = split_last_round(count, x.shape[1], blocks)
    size = count_bytes(count + world * (units - count), blocks.m, blocks.n, dtype=dtype)
    workspace = find_workspace(group, x.device, size, "slots" if size <= TWO_SLOTS_BYTES else "met")
    workspace.channel.check()
    try:
        launch(workspace, plan, shares, units, x, weight, bias, out, dtype, scales)
    except BaseException:
        abandon(group, workspace.channel)
        raise


def launch(
    workspace: OperatorWorkspace,
    plan: KernelConfig,
    shares: StreamK,
    units: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    dtype: torch.dtype,
    scales: Scales | None,
) -> None:
    """Begin the call and launch the kernel, on no more programs than there are shares: `units`."""
    blocks, block_channel = plan.blocks, workspace.channel
    assert blocks is not None
    programs = min(blocks.programs, units)
    lanes = map_queues(block_channel.world_size, programs)
    if workspace.slots == 1:
        channel = block_channel.begin("matmul_reduce_scatter", lanes, lanes, "broadcast")
    else:
        channel = block_channel.enter("matmul_reduce_scatter", "broadcast")
    gemm, a, b, _ = describe_gemm(x, weight, None, blocks, scales=scales)
    staging = block_channel.tensor((workspace.words(workspace.slots, dtype),), dtype)
    gemm, pushed, origin = describe_push(block_channel, gemm, blocks, x.element_size(), staging)
    arguments = (
        channel,
        lanes,
        gemm,
        shares,
        a,
        b,
        staging,
        pushed,
        origin,
        out,
        bias,
        out.shape[0],
        workspace.words(1, dtype),
        limit_waiting(programs, x.device),
        plan.is_shifted,
    )
    block_channel.launch(
        gemm_reduce_scatter,
        (dtype, specialization_key(plan, x, weight, gemm, bias, out)),
        programs,
        arguments,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )


def describe_push(
    block_channel: tiles.BlockChannel, gemm: Gemm, blocks: Blocks, loaded_size: int, staging: Tensor
) -> tuple[Gemm, TensorDescriptor | None, int]:
    """(the product, how all ranks' staging is stored to by TMA, the row of this descriptor that staging begins at).

    One descriptor for all ranks: rows of block_n numbers from the lowest of their addresses on, all that lies between
    them included. None where TMA does not take it.
    """
    row_bytes = blocks.n * staging.element_size()
    distances = block_channel.distances
    lowest = min(distances)
    rows = (max(distances) - lowest + staging.nbytes) // row_bytes
    parts = count_store_parts(blocks, loaded_size, staging.element_size())
    if not gemm.by_tma.value or not parts or rows >= 1 << 31 or any(step % row_bytes for step in distances):
        return gemm, None, 0
    base = block_channel.tensor((1,), staging.dtype, rank=distances.index(lowest))
    pushed = TensorDescriptor(base, [rows, blocks.n], [blocks.n, 1], [blocks.m, blocks.n // parts])
    gemm = gemm._replace(stores_by_tma=tl.constexpr(True), out_parts=tl.constexpr(parts))
    return gemm, pushed, -lowest // row_bytes


@triton.jit
def gemm_reduce_scatter(  # type: ignore[no-untyped-def]
    channel, lanes, gemm, shares, a, b, staging, pushed, origin, out, bias, rows, half, adders, SHIFTED: tl.constexpr,
):  # fmt: skip
    """out [rows, n]: this rank's rows of the sum over all ranks of a @ b.T, + bias; persistent.

    First all tiles are multiplied, and stored where their owner has its staging, own ones as well. They are dealt out
    in lanes, as many as there are programs, each of every so many-th tile; who has time claims the next lane. Then the
    last `adders` programs add up the owner's rows, in rank order; those that end earlier make room for other kernels.
    Order: tiles of the next rank's rows first, then of the one after, own last, so that no two ranks write to one at
    once, and what travels does so while later tiles are multiplied. The last tiles may be cut into parts, which are
    sums like those of other ranks. A lane's loop is flattened, so that a tile's stores go on beside the next one's
    loads.
    Signals: of a lane to all ranks, once all its tiles are stored ("broadcast"): nobody could use earlier ones, and a
    barrier in the loop would take its pipeline.
    Waits: for all lanes of all ranks, before the first sum. No program waits before all lanes are claimed by programs
    that run, so nothing waits for one that has no place on the GPU; and a launch's waiting programs leave room for
    another group's (`bound_programs`): no cycle.
    Reuse: two slots, by the call's number; every rank waits for every other rank's tiles, so see `call_slot`. Or one
    slot, which is written over only when all ranks have begun the call, and so ended the one before.
    """
    count = tl.cdiv(rows, gemm.block_m) * tl.cdiv(gemm.n, gemm.block_n)
    if channel.inside:
        first = tiles.call_slot(channel).to(tl.int64) * half
        staging += first
        origin += (first // gemm.block_n).to(tl.int32)
    programs = tl.num_programs(0)
    lane = tiles.claim(channel)
    while lane < programs:
        for share in tl.range(lane, count_units(shares, channel.world * count), programs, flatten=True):
            begin, end = find_unit(gemm, shares, share, channel.world * count)
            index = begin // count_steps(gemm, shares)
            owner, tile, row, column = locate_owned(channel.rank, channel.world, gemm, rows, index, SHIFTED)
            slot = channel.rank * count + tile
            if shares.steps is None:
                total = multiply_tile(gemm, a, b, owner * rows + row, column, 0)
            else:
                begin -= index * shares.tile
                end -= index * shares.tile
                total = multiply_tile(gemm, a, b, owner * rows + row, column, 0, begin, end)
                part = begin // shares.steps
                slot = tl.where(part == 0, slot, _part_slot(channel, shares, count, channel.rank, index, part))
            total = scale_tile(gemm, gemm.row_scales, total, owner * rows + row, column, gemm.m)
            _push_tile(channel, gemm, staging, pushed, origin, slot, total, owner)
        done = channel.rank * programs + lane
        tiles.producer_tile_notify(channel, lanes, done, "broadcast", after_tma=gemm.stores_by_tma)
        lane = tiles.claim(channel)
    adder = tiles.arrive_produced(channel) - (programs - adders)
    if adder >= 0:
        ready = lane * 0
        for source in tl.static_range(channel.world):
            ready += tiles.consumer_tile_wait(channel, lanes, source * programs, producer=lanes)
        _add_partials(channel, gemm, shares, staging + ready, out, bias, count, rows, adder, adders, SHIFTED)
    if channel.inside:
        tiles.end_call(channel, lanes)


@triton.jit
def _push_tile(channel, gemm, staging, pushed, origin, slot, total, owner):  # type: ignore[no-untyped-def]
    """Store a tile into slot [block_m, block_n] of its owner's staging."""
    if pushed is not None:
        row = origin + tiles.peer_rows(channel, staging, gemm.block_n, owner) + slot * gemm.block_m
        store_tile(gemm, pushed, total, row, 0, 0)
    else:
        start = staging + slot.to(tl.int64) * (gemm.block_m * gemm.block_n)
        if goes_in_halves(gemm, staging.dtype.element_ty):
            left, right = halve(total)
            _push_columns(channel, gemm, start, left, owner)
            _push_columns(channel, gemm, start + gemm.block_n // 2, right, owner)
        else:
            _push_columns(channel, gemm, start, total, owner)


@triton.jit
def _push_columns(channel, gemm, start, columns, owner):  # type: ignore[no-untyped-def]
    """Store some columns of a tile, the first of them at `start`, of its owner's staging."""
    offsets = tl.arange(0, gemm.block_m)[:, None] * gemm.block_n + tl.arange(0, columns.shape[1])[None, :]
    tiles.tile_push_data(channel, start, offsets, columns.to(start.dtype.element_ty), rank=owner)


@triton.jit
def _part_slot(channel, shares, count, source, index, part):  # type: ignore[no-untyped-def]
    """Where the part-th part, but the first, of the index-th tile of a rank's order lies: behind all tiles."""
    others = shares.tile // shares.steps - 1
    cut = channel.world * count - shares.whole
    return channel.world * count + (source * cut + index - shares.whole) * others + part - 1


@triton.jit
def _add_partials(  # type: ignore[no-untyped-def]
    channel, gemm, shares, staging, out, bias, count, rows, adder, adders, SHIFTED: tl.constexpr
):
    """Add up own tiles as all ranks have stored them, a few rows of a tile at a time, and store the sums.

    This program is number `adder` of `adders` that share the work.
    """
    width: tl.constexpr = gemm.block_n
    height: tl.constexpr = max(1, min(gemm.block_m, _ADDED_ELEMENTS // width))
    pieces: tl.constexpr = gemm.block_m // height
    row_tiles, column_tiles = tl.cdiv(rows, gemm.block_m), tl.cdiv(gemm.n, width)
    offsets = tl.arange(0, height)[:, None] * width + tl.arange(0, width)[None, :]
    for piece in range(adder, count * pieces, adders):
        tile, within = piece // pieces, piece % pieces * height
        total = tl.zeros((height, width), tl.float32)
        for source in tl.static_range(channel.world):
            slot = source * count + tile
            total += load_rows(gemm, staging, slot, within, offsets)
            if shares.steps is not None:
                distance = (channel.rank + channel.world - 1 - source) % channel.world if SHIFTED else channel.rank
                index = distance * count + tile
                if index >= shares.whole:
                    for part in range(1, shares.tile // shares.steps):
                        slot = _part_slot(channel, shares, count, source, index, part)
                        total += load_rows(gemm, staging, slot, within, offsets)
        row_tile, column_tile = order_tiles(tile, row_tiles, column_tiles, gemm.group_rows)
        row, column = row_tile * gemm.block_m + within, column_tile * width
        store_rows(gemm, out, bias, total, row, column, rows)
