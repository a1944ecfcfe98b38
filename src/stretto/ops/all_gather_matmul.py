"""All-gather + GEMM as an operator; `gather_gemm` has its kernel."""

from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from stretto import tiles
from stretto.ops import row_transfer, unfused
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
from stretto.ops.gemm.config import LIBRARY, KernelConfig, encode_implementation, limit_programs
from stretto.ops.gemm.stream_k import count_steps, count_units, find_unit, make_stream_k, multiply_unit
from stretto.ops.gemm.tile import (
    Scales,
    describe_gemm,
    describe_rows,
    divide_up,
    is_even,
    load_bias,
    multiply_columns,
    multiply_tile,
    order_tiles,
    scale_tile,
    specialization_key,
    store_tile,
    tile_width,
)
from stretto.ops.workspace import PEER_TILES, abandon, find_group, find_workspace

_operators = torch.ops.stretto


def all_gather_matmul(
    x: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | None = None,
    saves_gathered: bool = True,
    implementation: str | KernelConfig = "auto",
) -> Tensor:
    """The group's x, gathered along dim 0, times weight's transpose: [m / world, k], [n, k] -> [m, n].

    bf16, fp16 or fp32, all of one dtype; sums are fp32. bias: [n]. group: None for all ranks. x is of one shape on all
    ranks, and contiguous; weight is, or its transpose. x's gradient is a `matmul_reduce_scatter`; weight's needs the
    gathered x, which is kept for it, or, with saves_gathered=False, gathered again in the backward pass.
    implementation: "auto" (what was measured to be the fastest, or a default), "kernel" (ours, or it raises), "library"
    (an all-gather, then a GEMM) or a `KernelConfig`. ValueError for other input and for a rank outside of the group;
    PeerError for a rank that does not come. Flux, sections 3.3 and 4.
    """
    name, how = find_name(group), encode_implementation(implementation)
    if saves_gathered and torch.is_grad_enabled() and weight.requires_grad:
        return _gathered(x, weight, bias, name, how)[0]
    return _plain(x, weight, bias, name, how)


def all_gather_matmul_gathered(
    x: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | None = None,
    implementation: str | KernelConfig = "auto",
) -> tuple[Tensor, Tensor]:
    """As `all_gather_matmul`; returns [m, n] and the gathered x [m, k] too."""
    how = encode_implementation(implementation)
    return _gathered(x, weight, bias, find_name(group), how)


def _run_plain(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, implementation: str) -> Tensor:
    return _run(x, weight, bias, group, implementation, returns_gathered=False)[0]


def _run_gathered(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, implementation: str
) -> tuple[Tensor, Tensor]:
    return _run(x, weight, bias, group, implementation, returns_gathered=True)


def save_gather(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, bias, group, implementation = inputs
    ctx.group, ctx.has_bias, ctx.is_gathered = group, bias is not None, isinstance(output, tuple)
    ctx.implementation = pin_backward(implementation)
    ctx.set_materialize_grads(False)
    save_operands(ctx, output[1] if ctx.is_gathered else x, weight)


@without_autocast
def differentiate_gather(
    ctx: Any, grad: Tensor | None, grad_gathered: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    rows, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    grad_x = grad_weight = grad_bias = None
    if grad is not None:
        grad = grad.contiguous()
        if needs_x:
            grad_x = torch.ops.stretto.matmul_reduce_scatter(
                grad, weight.t(), None, ctx.group, None, ctx.implementation
            )
        if needs_weight:
            gathered = rows if ctx.is_gathered else unfused.gather_rows(rows, ctx.group)
            grad_weight = grad.t() @ gathered
        if ctx.has_bias and needs_bias:
            grad_bias = grad.sum(0)
    if grad_gathered is not None and needs_x:
        direct = unfused.scatter_sum(grad_gathered.contiguous(), ctx.group)
        grad_x = direct if grad_x is None else grad_x + direct
    return grad_x, grad_weight, grad_bias, None, None


_all_gather_matmul = torch.library.custom_op("stretto::all_gather_matmul", _run_plain, mutates_args=())
_all_gather_matmul_gathered = torch.library.custom_op(
    "stretto::all_gather_matmul_gathered", _run_gathered, mutates_args=()
)
_plain, _gathered = (
    eager_fast_path(name, run, operator, save_gather, differentiate_gather)
    for name, run, operator in (
        ("AllGatherMatmul", _run_plain, torch.ops.stretto.all_gather_matmul),
        ("AllGatherMatmulGathered", _run_gathered, torch.ops.stretto.all_gather_matmul_gathered),
    )
)


@_all_gather_matmul.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, implementation: str) -> Tensor:
    require_operands("all_gather_matmul", x, weight, bias, implementation)
    return x.new_empty(x.shape[0] * find_group(group).size(), weight.shape[0])


@_all_gather_matmul_gathered.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, implementation: str) -> tuple[Tensor, Tensor]:
    require_operands("all_gather_matmul", x, weight, bias, implementation)
    rows = x.shape[0] * find_group(group).size()
    return x.new_empty(rows, weight.shape[0]), x.new_empty(rows, x.shape[1])


for _operator in (_all_gather_matmul, _all_gather_matmul_gathered):
    _operator.register_autograd(differentiate_gather, setup_context=save_gather)


@register_flop_formula([torch.ops.stretto.all_gather_matmul, torch.ops.stretto.all_gather_matmul_gathered])
def _(x: torch.Size, weight: torch.Size, bias: object, group: str, *_: object, **__: object) -> int:
    return 2 * x[0] * find_group(group).size() * prod(weight)


@without_autocast
def _run(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, implementation: str, *, returns_gathered: bool
) -> tuple[Tensor, Tensor]:
    """(product, gathered x); the latter is x where it was not asked for."""
    key = make_call_key("all_gather_matmul", x, weight, bias, implementation, "gathered" if returns_gathered else "")
    plan = recall_config(group, key)
    if plan is None:
        require_operands("all_gather_matmul", x, weight, bias, implementation)
    (rows, k), n, world = x.shape, weight.shape[0], find_group(group).size()
    if plan is None:
        call = describe_problem("all_gather_matmul", rows * world, x, weight, group)
        plan = choose_config(call, x, weight, group, implementation, key)
    if rows == 0 or n == 0 or k == 0:  # nothing to wait for
        out, gathered = x.new_zeros(rows * world, n), x.new_empty(rows * world, k)
        if returns_gathered and n == 0:
            gathered = unfused.gather_rows(x, group)
        return out if bias is None else out + bias, gathered
    if plan == LIBRARY:
        return unfused.all_gather_matmul(x, weight, bias, group)
    if returns_gathered:  # a program cannot tell the host which slot it has gathered into
        plan = plan._replace(transfer="copies", direction="push")
    out = x.new_empty(rows * world, n)
    returned = x.new_empty(rows * world, k) if returns_gathered else None
    launch_gather(plan, x, weight, bias, out, group, returned=returned)
    return out, x if returned is None else returned


_MOST_PIECES = 8
_MOVED_BYTES = 256 << 10  # that a program moves at a time, at most
_SIGNALLING = tl.constexpr(16)  # programs that signal own rows which copy engines push to others


@lru_cache(maxsize=4096)
def map_rows(
    rows: int, world: int, plan: KernelConfig, row_bytes: int
) -> tuple[tiles.StaticMapping, tiles.StaticMapping]:
    """Who sends what, in pieces of about `piece_bytes`, one a channel; and the rows of the GEMM's tiles.

    Programs move many small tiles a piece, so that all of them have some.
    """
    assert plan.blocks is not None
    # Powers of two, since a kernel is compiled for each of these numbers.
    pieces = max(1, min(rows * row_bytes // plan.piece_bytes, divide_up(rows, plan.blocks.m), _MOST_PIECES))
    pieces = 1 << (pieces.bit_length() - 1)
    moved = plan.blocks.m
    if plan.transfer == "programs":
        moved = max(1, min(rows * world // plan.movers, _MOVED_BYTES // row_bytes))
        moved = max(1 << (moved.bit_length() - 1), triton.next_power_of_2(divide_up(rows, PEER_TILES)))
    producer = tiles.shard_tiles(rows, world, moved, channels=pieces)
    channel_rows = producer.channel_rows
    return producer, tiles.whole_tiles(rows, world, plan.blocks.m, channels=pieces, channel_rows=channel_rows)


def launch_gather(
    plan: KernelConfig,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    group: str,
    *,
    scales: Scales | None = None,
    returned: Tensor | None = None,
) -> None:
    """Begin the call, have copy engines move rows if they are to, and launch the GEMM; `returned` gets the gathered x.

    scales: of own rows of an fp8 x, which travel with them, and of the weight's. Rows of this rank are taken from x
    itself, if no tile has others too.
    """
    by_programs = plan.transfer == "programs"
    plan = limit_programs(plan, x.device) if by_programs else plan.with_even_tiles()
    blocks, (rows, k), has_scales = plan.blocks, x.shape, scales is not None
    assert blocks is not None
    size = row_transfer.count_gathered_bytes(out.shape[0], k, x.dtype, by_programs=by_programs, has_scales=has_scales)
    workspace = find_workspace(group, x.device, size, "slots" if by_programs else "met")
    block_channel = workspace.channel
    world = block_channel.world_size
    producer, consumer = map_rows(rows, world, plan, k * x.element_size())
    slot_rows = -(-workspace.slot_bytes // (k * x.element_size())) if by_programs else 0
    slot = 0 if by_programs else next(workspace.turns)
    offset = slot * workspace.slot_bytes
    gathered = block_channel.tensor((slot_rows + rows * world, k), x.dtype, offset=offset)
    odd = by_programs and not is_even(blocks)
    own_scales = None if scales is None else scales.rows.contiguous()
    if scales is not None:
        scales = Scales(row_transfer.find_gathered_scales(block_channel, rows, k, offset), scales.columns)
    gemm, rows_there, b, c = describe_gemm(gathered, weight, out, blocks, scales=scales, in_parts=odd)
    own = describe_rows(x, gemm)
    direct = plan.is_shifted and rows % blocks.m == 0 and own is not None and not odd
    column_tiles = -(-out.shape[1] // blocks.n)
    count = -(-out.shape[0] // blocks.m) * column_tiles
    # By copies, own tiles are multiplied in a loop that has no place for shares.
    kept = rows // blocks.m * column_tiles if direct and not by_programs else 0
    shares, units = make_stream_k(count, k, blocks, workspace.arrivals, kept)
    programs = min(blocks.programs, max(units, plan.movers if by_programs else 1))
    if by_programs:
        mode = "broadcast" if plan.direction == "push" else "local"
        channel = block_channel.enter("all_gather_matmul", mode)
    else:
        turn = slot if workspace.slots == 2 else None
        block_channel.check()
        try:
            channel = block_channel.begin("all_gather_matmul", producer, consumer, "broadcast", slot=turn)
            if not direct:
                # On this stream, before the kernel: a copy within a GPU may need a multiprocessor, and there is none
                # free once the kernel runs.
                tiles.rank_copy_data(gathered, x, rows=slice(0, rows), to=block_channel.rank * rows)
                if scales is not None and own_scales is not None:
                    tiles.rank_copy_data(scales.rows, own_scales, rows=slice(0, rows), to=block_channel.rank * rows)
            with tiles.copy_engine(block_channel):
                row_transfer.push_rows_by_copies(block_channel, producer, x, own_scales, offset)
                if returned is not None:
                    row_transfer.copy_out_gathered(block_channel, producer, x, gathered, returned)
        except BaseException:
            abandon(group, block_channel)
            raise
    try:
        arguments = (
            channel, producer, consumer, gemm, shares, own, rows_there, b, c, bias, x, gathered, own_scales, rows,
            slot_rows, workspace.words(1, torch.float32), min(plan.movers, programs), direct,
            plan.direction if by_programs else "", plan.is_shifted,
        )  # fmt: skip
        block_channel.launch(
            all_gather_gemm,
            specialization_key(plan, x, weight, gemm, bias, out, own_scales),
            programs,
            arguments,
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
        )
    except BaseException:
        if by_programs:
            abandon(group, block_channel)
        else:  # the kernel would have signalled own rows, for which the call has been begun
            row_transfer.signal_own_rows(block_channel, producer)
        raise
    finally:  # also of a kernel that cannot be launched: the next call's copies come after these
        if not by_programs:
            tiles.join_copies(block_channel)


@triton.jit
def all_gather_gemm(  # type: ignore[no-untyped-def]
    channel, producer, consumer, gemm, shares, own, gathered, weight, out, bias, x, landing, own_scales, rows,
    slot_rows, slot_words, movers, DIRECT: tl.constexpr, MOVES: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """out [m, n] = gathered @ weight.T + bias, tile after tile as the gathered rows come; persistent.

    Order: tiles of this rank's rows first (DIRECT: from x itself, where no tile has others' rows too), then the next
    rank's and so on, as rows come; or, not SHIFTED, rank 0's first on all ranks. The last may be cut into shares.
    Signals: after each piece of a shard, a copy engine's on its stream, or a program's: the first `movers` of them push
    (or pull) rows before they multiply. Copies within a GPU may need a multiprocessor, so of a rank's own rows, which
    are in place when the kernel begins, programs tell in any case.
    Waits: for the pieces that hold a tile's rows, at its head, or by polls, while the tile before it is multiplied:
    loops over whole tiles are flattened, and a tile's stores and waits go on beside other tiles' products. They depend
    on copy engines, or on the launch's first programs on each rank, which run when any do, claim what they move, and
    wait for nothing (who pulls: for pieces that those have offered). By programs, a launch leaves room for another
    group's (`bound_programs`), so that its first programs find a place while this one waits.
    Scales of fp8 rows: own_scales [rows], which travel before their rows' signals, to gemm.row_scales.
    Reuse: by copies, `gathered` is one of two slots, in turn, and is written over only when all ranks have begun the
    call after the last one that used it. By programs it is both, by the call's number; every rank waits for every
    rank's rows, so see `call_slot`.
    """
    row_tiles = tl.cdiv(rows * channel.world, gemm.block_m)
    column_tiles = tl.cdiv(gemm.n, tile_width(gemm))
    count = row_tiles * column_tiles
    base = 0
    scales = gemm.row_scales
    if MOVES != "":
        slot = tiles.call_slot(channel)
        base = slot * slot_rows
        if scales is not None:
            scales += slot.to(tl.int64) * slot_words
        if tl.program_id(0) < movers:
            place = landing + tl.cast(base, tl.int64) * gemm.k
            if MOVES == "push":
                row_transfer.push_rows(channel, producer, gemm, x, place, own_scales, scales, DIRECT)
            else:
                row_transfer.pull_rows(channel, producer, gemm, x, place, own_scales, scales)
    direct_tiles = rows // gemm.block_m if DIRECT else 0  # rows of tiles that are taken from x itself
    direct = direct_tiles * column_tiles
    first = tl.cdiv(channel.rank * rows, gemm.block_m) if SHIFTED else 0  # a tile of two ranks' is the earlier one's
    first += direct_tiles
    if MOVES == "":
        # Own rows are where they are read from. The first programs say so, which run when any do.
        signalling = tl.minimum(tl.num_programs(0), _SIGNALLING)
        if tl.program_id(0) < signalling:
            own_tiles = tiles.rank_tiles(producer)
            for tile in range(tl.program_id(0), own_tiles, signalling):
                own_tile = channel.rank * own_tiles + tile
                tiles.producer_tile_notify(channel, producer, own_tile, "broadcast", rank=channel.rank)
        if DIRECT:
            for tile in tl.range(tl.program_id(0), direct, tl.num_programs(0), flatten=True):
                row, column = _locate(gemm, direct_tiles, tile)
                total = multiply_tile(gemm, own, weight, row, column, 0)
                total = scale_tile(gemm, own_scales, total, row, column, rows)
                _finish_tile(channel, gemm, out, bias, total, channel.rank * rows + row, column, rows)
        index = tl.program_id(0)
        index += tl.cdiv(tl.maximum(direct - index, 0), tl.num_programs(0)) * tl.num_programs(0)
        if DIRECT and gemm.by_tma and shares.steps is None:
            for tile in tl.range(index, count, tl.num_programs(0), flatten=True):
                row_tile, row, column = _locate_gathered(gemm, tile, row_tiles, first, direct_tiles)
                ready = tiles.consumer_tile_poll(channel, consumer, row_tile)
                total = multiply_tile(gemm, gathered, weight, row + ready, column, 0)
                total = scale_tile(gemm, scales, total, row + ready, column, rows * channel.world)
                _finish_tile(channel, gemm, out, bias, total, row, column, rows)
            tiles.finish_polls(channel, consumer)
        else:
            # A `for`, in which Triton has a tile's stores go on beside the next one's loads; a share is of one tile.
            for share in range(index, count_units(shares, count), tl.num_programs(0)):
                begin, end = find_unit(gemm, shares, share, count)
                _multiply_gathered(
                    channel, producer, consumer, gemm, shares, gathered, scales, weight, out, bias, rows, base, first,
                    direct_tiles, begin, end
                )  # fmt: skip
    else:  # programs that have moved rows come later, and do fewer
        begin, end = find_unit(gemm, shares, tiles.claim(channel), count)
        if DIRECT:
            while begin < direct * count_steps(gemm, shares):
                row, column = _locate(gemm, direct_tiles, begin // count_steps(gemm, shares))
                total, is_complete, begin = multiply_unit(gemm, shares, own, weight, row, column, 0, begin, end)
                if is_complete:
                    total = scale_tile(gemm, own_scales, total, row, column, rows)
                    _finish_tile(channel, gemm, out, bias, total, channel.rank * rows + row, column, rows)
                if begin >= end:
                    begin, end = find_unit(gemm, shares, tiles.claim(channel), count)
        while begin < end:
            begin = _multiply_gathered(
                channel, producer, consumer, gemm, shares, gathered, scales, weight, out, bias, rows, base, first,
                direct_tiles, begin, end
            )  # fmt: skip
            if begin >= end:
                begin, end = find_unit(gemm, shares, tiles.claim(channel), count)
        tiles.end_call(channel, producer)


@triton.jit
def _locate(gemm, row_tiles, tile):  # type: ignore[no-untyped-def]
    """Row and column where a tile begins, of so many rows of tiles."""
    row_tile, column_tile = order_tiles(tile, row_tiles, tl.cdiv(gemm.n, tile_width(gemm)), gemm.group_rows)
    return row_tile * gemm.block_m, column_tile * tile_width(gemm)


@triton.jit
def _locate_gathered(gemm, tile, row_tiles, first, direct_tiles):  # type: ignore[no-untyped-def]
    """(row of tiles, row, column) of the tile-th tile, the direct ones counted; first: the row of tiles after those."""
    column_tiles = tl.cdiv(gemm.n, tile_width(gemm))
    tile -= direct_tiles * column_tiles
    row_tile, column_tile = order_tiles(tile, row_tiles - direct_tiles, column_tiles, gemm.group_rows)
    row_tile = (row_tile + first) % row_tiles
    return row_tile, row_tile * gemm.block_m, column_tile * tile_width(gemm)


@triton.jit
def _multiply_gathered(  # type: ignore[no-untyped-def]
    channel, producer, consumer, gemm, shares, gathered, scales, weight, out, bias, rows, base, first, direct_tiles,
    begin, end,
):  # fmt: skip
    """A share's steps of one tile of all rows but the direct ones, once its rows are there; where its next one begins.

    first: the row of tiles that comes first.
    """
    row_tiles = tl.cdiv(rows * channel.world, gemm.block_m)
    tile = begin // count_steps(gemm, shares)
    row_tile, row, column = _locate_gathered(gemm, tile, row_tiles, first, direct_tiles)
    ready = tiles.consumer_tile_wait(channel, consumer, row_tile, before_tma=gemm.by_tma, producer=producer)
    row_there = base + row + ready
    count = rows * channel.world
    if gemm.parts == 1:
        total, is_complete, begin = multiply_unit(gemm, shares, gathered, weight, row_there, column, 0, begin, end)
        if is_complete:
            total = scale_tile(gemm, scales, total, row + ready, column, count)
            _finish_tile(channel, gemm, out, bias, total, row, column, rows)
    else:
        totals = multiply_columns(gemm, gathered, weight, row_there, column)
        begin = end  # such tiles are whole shares
        for part in tl.static_range(gemm.parts):
            at = column + part * gemm.block_n
            total = scale_tile(gemm, scales, totals[part], row + ready, at, count)
            _finish_tile(channel, gemm, out, bias, total, row, at, rows)
    return begin


@triton.jit
def _finish_tile(channel, gemm, out, bias, total, row, column, rows):  # type: ignore[no-untyped-def]
    """Add the bias, and store."""
    if bias is not None:
        total += load_bias(bias, column, gemm.n, gemm.block_n)
    store_tile(gemm, out, total, row, column, rows * channel.world)
