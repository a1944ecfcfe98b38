# SPDX-License-Identifier: Apache-2.0
"""All-gather + GEMM: the ranks' rows are transferred while a persistent GEMM multiplies those that have arrived.

Flux (sections 3.3, 4.1 and 4.3), in tile-centric primitives (TileLink). The operator, its gradient, and two kernels:
`all_gather_gemm_by_copies`, whose rows copy engines move, and `all_gather_gemm_by_programs`, whose first programs move
them. `gathered_rows` has what both share: the moves, and the products of gathered rows.
"""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, overload

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from stretto import tiles
from stretto.ops import unfused
from stretto.ops.checks import find_name, flatten_rows, require_operands, require_out
from stretto.ops.dispatch import (
    Autograd,
    choose_config,
    copy_to,
    define_operator,
    describe_problem,
    is_traced,
    make_call_key,
    note_write,
    pin_backward,
    recall_config,
    require_no_tangents,
    save_operands,
    without_autocast,
    write_to,
)
from stretto.ops.gathered_rows import (
    GatherShard,
    RowMoves,
    copy_out_gathered,
    count_gathered_bytes,
    count_tiles,
    find_gathered_scales,
    finish_tile,
    locate_direct,
    locate_gathered,
    map_rows,
    multiply_gathered,
    order_rows,
    pull_rows,
    push_rows,
    push_rows_by_copies,
    signal_own_rows,
)
from stretto.ops.gemm.config import (
    LIBRARY,
    KernelConfig,
    divide_up,
    encode_implementation,
    has_power_of_two_columns,
    leave_room_for_copies,
    limit_programs,
)
from stretto.ops.gemm.stream_k import count_steps, count_units, find_unit, make_stream_k, multiply_unit
from stretto.ops.gemm.tile import (
    Scales,
    describe_gemm,
    describe_rows,
    fixed,
    multiply_tile,
    scale_tile,
    specialization_key,
)
from stretto.ops.several_weights import multiply_several, pair_lists
from stretto.ops.workspace import abandon, find_group, find_workspace

_SIGNALLING = tl.constexpr(16)  # programs that signal own rows which copy engines push to others


@overload
def all_gather_matmul(
    x: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | None = None,
    saves_gathered: bool = True,
    out: Tensor | None = None,
    implementation: str | KernelConfig = "auto",
) -> Tensor: ...


@overload
def all_gather_matmul(
    x: Tensor,
    weight: Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    bias: Sequence[Tensor | None] | None = None,
    saves_gathered: bool = True,
    out: Sequence[Tensor] | None = None,
    implementation: str | KernelConfig = "auto",
) -> list[Tensor]: ...


def all_gather_matmul(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    saves_gathered: bool = True,
    out: Tensor | Sequence[Tensor] | None = None,
    implementation: str | KernelConfig = "auto",
) -> Tensor | list[Tensor]:
    """x, all-gathered over the group along dim 0, times weight's transpose: [m / world, k], [n, k] -> [m, n].

    bf16, fp16 or fp32, all of one dtype; sums are fp32. bias: [n]. group: None for all ranks. x is of one shape on all
    ranks, and contiguous; weight is, or its transpose. x may have more dims, [d / world, ..., k]: the output is
    [d, ..., n], where rank r's part is the r-th of the first dim (rows are the flattened dims before the last one, as
    in Megatron-LM's sequence parallelism, where x is [sequence / world, batch, k]).

    weight may be a list of weights [n_i, k], with a list of biases or None: returns the list of products [m, n_i], with
    one all-gather, which the widest product overlaps; the others are computed after it.

    x's gradient is a `matmul_reduce_scatter` (for a list, products and then one reduce-scatter); weight's needs the
    gathered x, which is kept for it, or, with saves_gathered=False (of one weight), gathered again in the backward
    pass. out: where to write the output, without gradients: of its shape and x's dtype, contiguous; a list for a list.
    implementation: "auto" (the fastest measured, or a default), "kernel" (Stretto's, or it raises), "library" (an
    all-gather, then a GEMM) or a `KernelConfig`. ValueError for other input and for a rank outside of the group;
    PeerError for a rank that does not call. Flux, sections 3.3 and 4.
    """
    name, how = find_name(group), encode_implementation(implementation)
    rows = flatten_rows("all_gather_matmul", x)
    if not isinstance(weight, Tensor):
        weights, biases, outs = pair_lists(rows, weight, bias, out, saves_gathered, how)
        shapes = [_shape_product(x, weight, group) for weight in weights]
        for place, (shape, one) in enumerate(zip(shapes, outs, strict=True)):
            if one is not None:
                require_out("all_gather_matmul", one, shape, x.dtype, x, *weights, *biases, *outs[:place])
        multiply = partial(_multiply_gathered, rows, name, how)
        flat = [None if one is None else one.flatten(0, -2) for one in outs]
        products = multiply_several(multiply, weights, biases, flat)
        if out is not None:
            return [one for one in outs if one is not None]
        return [product.view(shape) for product, shape in zip(products, shapes, strict=True)]
    if not (bias is None or isinstance(bias, Tensor)) or not (out is None or isinstance(out, Tensor)):
        raise ValueError("all_gather_matmul takes a list of biases, and of outputs, only with a list of weights")
    if out is not None:
        require_operands("all_gather_matmul", rows, weight, bias, how)
        require_out("all_gather_matmul", out, _shape_product(x, weight, group), x.dtype, x, weight, bias)
        write_to(out.flatten(0, -2), _plain, _run_into, rows, weight, bias, name, how)
        return out
    if saves_gathered and torch.is_grad_enabled() and weight.requires_grad:
        product = _gathered(rows, weight, bias, name, how)[0]
    else:
        product = _plain(rows, weight, bias, name, how)
    return product if x.dim() == 2 else product.view(_shape_product(x, weight, group))


def all_gather_matmul_gathered(
    x: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | None = None,
    implementation: str | KernelConfig = "auto",
) -> tuple[Tensor, Tensor]:
    """`all_gather_matmul` that also returns the gathered x: ([m, n], [m, k])."""
    how = encode_implementation(implementation)
    rows = flatten_rows("all_gather_matmul", x)
    product, gathered = _gathered(rows, weight, bias, find_name(group), how)
    if x.dim() == 2:
        return product, gathered
    shape = _shape_product(x, weight, group)
    return product.view(shape), gathered.view(*shape[:-1], x.shape[-1])


def _shape_product(x: Tensor, weight: Tensor, group: dist.ProcessGroup | None) -> tuple[int, ...]:
    return x.shape[0] * dist.get_world_size(group), *x.shape[1:-1], weight.shape[0]


def _multiply_gathered(
    x: Tensor, group: str, implementation: str, weight: Tensor, bias: Tensor | None, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(product, in `out` if there is one; gathered x)."""
    if out is None or is_traced(x, weight, bias, out):
        product, gathered = _gathered(x, weight, bias, group, implementation)
        return copy_to(out, product), gathered
    require_no_tangents(x, weight, bias)
    results = without_autocast(_run)(x, weight, bias, group, implementation, returns_gathered=True, out=out)
    note_write(out)
    return results


def _run_plain(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, implementation: str) -> Tensor:
    return _run(x, weight, bias, group, implementation, returns_gathered=False)[0]


@without_autocast
def _run_into(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, implementation: str, out: Tensor) -> Tensor:
    return _run(x, weight, bias, group, implementation, returns_gathered=False, out=out)[0]


def _run_gathered(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, implementation: str
) -> tuple[Tensor, Tensor]:
    return _run(x, weight, bias, group, implementation, returns_gathered=True)


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: str,
    implementation: str,
    *,
    returns_gathered: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(product, in `out` if there is one; gathered x, or x itself where that is not returned)."""
    key = make_call_key("all_gather_matmul", x, weight, bias, implementation, "gathered" if returns_gathered else "")
    config = recall_config(group, key)
    if config is None:
        require_operands("all_gather_matmul", x, weight, bias, implementation)
    (rows, k), n, world = x.shape, weight.shape[0], find_group(group).size()
    if config is None:
        problem = describe_problem("all_gather_matmul", rows * world, x, weight, group)
        config = choose_config(problem, x, weight, group, implementation, key)
    if rows == 0 or n == 0 or k == 0:  # nothing to wait for
        product, gathered = x.new_zeros(rows * world, n), x.new_empty(rows * world, k)
        if returns_gathered and n == 0:
            gathered = unfused.gather_rows(x, group)
        return copy_to(out, product if bias is None else product + bias), gathered
    if config == LIBRARY:
        product, gathered = unfused.all_gather_matmul(x, weight, bias, group)
        return copy_to(out, product), gathered
    if returns_gathered:  # the host does not know the slot that programs gather into
        config = config._replace(transfer="copies", direction="push")
    out = x.new_empty(rows * world, n) if out is None else out
    returned = x.new_empty(rows * world, k) if returns_gathered else None
    launch_gather(config, x, weight, bias, out, group, returned=returned)
    return out, x if returned is None else returned


def _fake_plain(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, implementation: str) -> Tensor:
    require_operands("all_gather_matmul", x, weight, bias, implementation)
    return x.new_empty(x.shape[0] * find_group(group).size(), weight.shape[0])


def _fake_gathered(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, implementation: str
) -> tuple[Tensor, Tensor]:
    out = _fake_plain(x, weight, bias, group, implementation)
    return out, x.new_empty(out.shape[0], x.shape[1])


def _count_flops(x: torch.Size, weight: torch.Size, bias: object, group: str, *_: object, **__: object) -> int:
    return 2 * x[0] * find_group(group).size() * prod(weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, bias, group, implementation = inputs
    ctx.group, ctx.has_bias, ctx.is_gathered = group, bias is not None, isinstance(output, tuple)
    ctx.implementation = pin_backward(implementation)
    ctx.set_materialize_grads(False)
    save_operands(ctx, output[1] if ctx.is_gathered else x, weight)


def _differentiate(ctx: Any, grad: Tensor | None, grad_gathered: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """C = gather(x) @ W.T: dx is the reduce-scatter of dC @ W, overlapped as well, and dW is dC.T @ gather(x)."""
    rows, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    grad_x = grad_weight = grad_bias = None
    if grad is not None:
        grad = grad.contiguous()
        if needs_x and grad_gathered is None:
            reduce_scatter = torch.ops.stretto.matmul_reduce_scatter
            grad_x = reduce_scatter(grad, weight.t(), None, ctx.group, None, ctx.implementation)
        if needs_weight:
            gathered = rows if ctx.is_gathered else unfused.gather_rows(rows, ctx.group)
            grad_weight = grad.t() @ gathered
        if ctx.has_bias and needs_bias:
            grad_bias = grad.sum(0)
    if grad_gathered is not None and needs_x:  # one reduce-scatter for both, which this product cannot hide
        total = grad_gathered if grad is None else torch.addmm(grad_gathered, grad, weight)
        grad_x = unfused.scatter_sum(total.contiguous(), ctx.group)
    return grad_x, grad_weight, grad_bias, None, None


_plain, _gathered = (
    define_operator(name, run, fake=fake, count_flops=_count_flops, autograd=Autograd(_save, _differentiate))
    for name, run, fake in (
        ("all_gather_matmul", _run_plain, _fake_plain),
        ("all_gather_matmul_gathered", _run_gathered, _fake_gathered),
    )
)


def launch_gather(
    config: KernelConfig,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    group: str,
    *,
    scales: Scales | None = None,
    returned: Tensor | None = None,
) -> None:
    """Launch the call: out = gather(x) @ weight.T + bias, by the configuration's kernel.

    scales: of own rows of an fp8 x, which are sent with them, and of the weight. returned: gets the gathered x, which
    copy engines alone can give.
    """
    if config.transfer == "programs":
        assert returned is None
        _launch_by_programs(limit_programs(config, x.device), x, weight, bias, out, group, scales)
    else:
        _launch_by_copies(config.with_power_of_two_tiles(), x, weight, bias, out, group, scales, returned)


def _launch_by_copies(
    config: KernelConfig,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    group: str,
    scales: Scales | None,
    returned: Tensor | None,
) -> None:
    """Begin the call, have copy engines push this rank's rows on a side stream, and launch the GEMM."""
    blocks, (rows, k) = config.blocks, x.shape
    assert blocks is not None
    size = count_gathered_bytes(out.shape[0], k, x.dtype, by_programs=False, has_scales=scales is not None)
    workspace = find_workspace(group, x.device, size, "barrier")
    block_channel = workspace.channel
    world = block_channel.world_size
    producer, consumer = map_rows(rows, world, config, k * x.element_size())
    slot = next(workspace.slot_cycle)
    offset = slot * workspace.slot_bytes
    gathered = block_channel.tensor((rows * world, k), x.dtype, offset=offset)
    own_scales = None if scales is None else scales.rows.contiguous()
    if scales is not None:
        scales = Scales(find_gathered_scales(block_channel, rows, k, offset), scales.columns)
    gemm, arriving, b, c = describe_gemm(gathered, weight, out, blocks, scales=scales)
    own = describe_rows(x, gemm)
    is_direct = config.is_shifted and rows % blocks.m == 0 and own is not None
    column_tiles = divide_up(out.shape[1], blocks.n)
    count = divide_up(out.shape[0], blocks.m) * column_tiles
    # Own tiles are multiplied in a separate loop, over whole tiles.
    kept = rows // blocks.m * column_tiles if is_direct else 0
    stream_k, units = make_stream_k(count, k, blocks, workspace.arrivals, kept)
    shard = GatherShard(rows, own_scales, fixed(is_direct), fixed(config.is_shifted))
    block_channel.check()
    try:
        turn = slot if workspace.slots == 2 else None
        channel = block_channel.begin("all_gather_matmul", producer, consumer, "broadcast", slot=turn)
        if not is_direct:
            # On this stream, before the kernel: a copy within a GPU may need a multiprocessor, and none is free once
            # the kernel runs.
            tiles.rank_copy_data(gathered, x, rows=slice(0, rows), to=block_channel.rank * rows)
            if scales is not None and own_scales is not None:
                tiles.rank_copy_data(scales.rows, own_scales, rows=slice(0, rows), to=block_channel.rank * rows)
        with tiles.copy_engine(block_channel):
            push_rows_by_copies(block_channel, producer, x, own_scales, offset)
            if returned is not None:
                copy_out_gathered(block_channel, producer, x, gathered, returned)
    except BaseException:
        abandon(group, block_channel)
        raise
    try:
        block_channel.launch(
            all_gather_gemm_by_copies,
            specialization_key(config, x, weight, gemm, bias, out, own_scales),
            min(leave_room_for_copies(blocks.programs, x.device), max(units, 1)),
            (channel, producer, consumer, gemm, stream_k, shard, own, arriving, b, bias, c),
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
        )
    except BaseException:
        signal_own_rows(block_channel, producer)
        raise
    finally:  # also after a failed launch: the next call's copies must come after these
        tiles.join_copies(block_channel)


def _launch_by_programs(
    config: KernelConfig,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    group: str,
    scales: Scales | None,
) -> None:
    """Launch the call's only kernel, whose first programs move rows before they multiply."""
    blocks, (rows, k) = config.blocks, x.shape
    assert blocks is not None
    size = count_gathered_bytes(out.shape[0], k, x.dtype, by_programs=True, has_scales=scales is not None)
    workspace = find_workspace(group, x.device, size, "double_buffered")
    block_channel = workspace.channel
    world = block_channel.world_size
    producer, consumer = map_rows(rows, world, config, k * x.element_size())
    slot_rows = divide_up(workspace.slot_bytes, k * x.element_size())
    landing = block_channel.tensor((slot_rows + rows * world, k), x.dtype)
    own_scales = None if scales is None else scales.rows.contiguous()
    if scales is not None:
        scales = Scales(find_gathered_scales(block_channel, rows, k, 0), scales.columns)
    in_parts = not has_power_of_two_columns(blocks)
    gemm, arriving, b, c = describe_gemm(landing, weight, out, blocks, scales=scales, in_parts=in_parts)
    own = describe_rows(x, gemm)
    is_direct = config.is_shifted and rows % blocks.m == 0 and own is not None and not in_parts
    count = divide_up(out.shape[0], blocks.m) * divide_up(out.shape[1], blocks.n)
    stream_k, units = make_stream_k(count, k, blocks, workspace.arrivals)
    programs = min(blocks.programs, max(units, config.movers))
    shard = GatherShard(rows, own_scales, fixed(is_direct), fixed(config.is_shifted))
    is_push = config.direction == "push"
    slot_words, movers = workspace.words(1, torch.float32), min(config.movers, programs)
    moves = RowMoves(x, landing, slot_rows, slot_words, movers, fixed(is_push))
    channel = block_channel.enter("all_gather_matmul", "broadcast" if is_push else "local")
    try:
        block_channel.launch(
            all_gather_gemm_by_programs,
            specialization_key(config, x, weight, gemm, bias, out, own_scales),
            programs,
            (channel, producer, consumer, gemm, stream_k, shard, moves, own, arriving, b, bias, c),
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
        )
    except BaseException:
        abandon(group, block_channel)
        raise


@triton.jit
def all_gather_gemm_by_copies(  # type: ignore[no-untyped-def]
    channel, producer, consumer, gemm, stream_k, shard, own, gathered, weight, bias, out
):
    """out [m, n] = gathered @ weight.T + bias, tile after tile as copy engines bring the rows; persistent.

    Order: tiles of this rank's rows first (if is_direct, loaded from x itself, `own`), then the next rank's and so on,
    as rows arrive; or, not is_shifted, rank 0's first on all ranks. Tiles of the last wave may be split (`StreamK`).
    Signals: a copy engine's on its stream, after each piece of a shard. Own rows are in place when the kernel begins;
    its first programs signal them, since a copy within a GPU may need a multiprocessor.
    Waits: for the pieces that hold a tile's rows: by `consumer_tile_wait` at the tile's head, or by
    `consumer_tile_poll` while the tile before it is multiplied, since loops over whole tiles are flattened, and a
    tile's stores and waits overlap with other tiles' products. They depend on copy engines alone.
    Scales of fp8 rows travel before their rows' signals, to gemm.row_scales.
    Reuse: `gathered` is one of two slots, in turn. Peers write to it only when all ranks have begun the call after the
    last one that used it.
    """
    first, direct_tiles = order_rows(channel, gemm, shard)
    row_tiles, column_tiles = count_tiles(channel, gemm, shard)
    count = row_tiles * column_tiles
    direct = direct_tiles * column_tiles
    signalling = tl.minimum(tl.num_programs(0), _SIGNALLING)  # the first programs, which run when any do
    if tl.program_id(0) < signalling:
        own_tiles = tiles.rank_tiles(producer)
        for tile in range(tl.program_id(0), own_tiles, signalling):
            own_tile = channel.rank * own_tiles + tile
            tiles.producer_tile_notify(channel, producer, own_tile, "broadcast", rank=channel.rank)
    if shard.is_direct:
        for tile in tl.range(tl.program_id(0), direct, tl.num_programs(0), flatten=True):
            row, column = locate_direct(gemm, direct_tiles, tile)
            total = multiply_tile(gemm, own, weight, row, column, 0)
            total = scale_tile(gemm, shard.scales, total, row, column, shard.rows)
            finish_tile(channel, gemm, shard, bias, out, total, channel.rank * shard.rows + row, column)
    index = tl.program_id(0)
    index += tl.cdiv(tl.maximum(direct - index, 0), tl.num_programs(0)) * tl.num_programs(0)
    if shard.is_direct and gemm.by_tma and stream_k.unit_steps is None:
        for tile in tl.range(index, count, tl.num_programs(0), flatten=True):
            row_tile, row, column = locate_gathered(gemm, tile, row_tiles, first, direct_tiles)
            ready = tiles.consumer_tile_poll(channel, consumer, row_tile)
            total = multiply_tile(gemm, gathered, weight, row + ready, column, 0)
            total = scale_tile(gemm, gemm.row_scales, total, row + ready, column, shard.rows * channel.world)
            finish_tile(channel, gemm, shard, bias, out, total, row, column)
        tiles.finish_polls(channel, consumer)
    else:
        # A `for`, in which Triton overlaps a tile's stores with the next tile's loads; a work unit is of one tile.
        for unit in range(index, count_units(stream_k, count), tl.num_programs(0)):
            begin, end = find_unit(gemm, stream_k, unit, count)
            tile = begin // count_steps(gemm, stream_k)
            row_tile, row, column = locate_gathered(gemm, tile, row_tiles, first, direct_tiles)
            ready = tiles.consumer_tile_wait(channel, consumer, row_tile, before_tma=gemm.by_tma, producer=producer)
            multiply_gathered(
                channel, gemm, stream_k, shard, gathered, gemm.row_scales, weight, bias, out, (row, column, 0, ready),
                (begin, end)
            )  # fmt: skip


@triton.jit
def all_gather_gemm_by_programs(  # type: ignore[no-untyped-def]
    channel, producer, consumer, gemm, stream_k, shard, moves, own, gathered, weight, bias, out
):
    """out [m, n] = gathered @ weight.T + bias; the first programs move rows before they multiply; persistent.

    Order: as of `all_gather_gemm_by_copies`. Programs claim work units, so those that have moved rows do fewer.
    Signals: the first `movers` programs push rows (or pull them), and signal each piece.
    Waits: for the pieces that hold a tile's rows, at the tile's head. They depend on the launch's first programs on
    each rank, which run when any do, claim what they move, and wait for nothing (pulling: for pieces that those have
    offered). A launch leaves room for another group's (`bound_programs`), so that its first programs find a place
    while this one waits.
    Scales of fp8 rows travel before their rows' signals, to gemm.row_scales.
    Reuse: `gathered` is both of two slots, used in turn by the call's number. Every rank waits for every rank's rows,
    so a slot is free when its turn comes: see `call_slot`.
    """
    slot = tiles.call_slot(channel)
    base = slot * moves.slot_rows
    scales = gemm.row_scales
    if scales is not None:
        scales += slot.to(tl.int64) * moves.slot_words
    if tl.program_id(0) < moves.movers:
        landing = moves.landing + tl.cast(base, tl.int64) * gemm.k
        if moves.is_push:
            push_rows(channel, producer, gemm, shard, moves.x, landing, scales)
        else:
            pull_rows(channel, producer, gemm, shard, moves.x, landing, scales)
    first, direct_tiles = order_rows(channel, gemm, shard)
    row_tiles, column_tiles = count_tiles(channel, gemm, shard)
    count = row_tiles * column_tiles
    direct = direct_tiles * column_tiles
    begin, end = find_unit(gemm, stream_k, tiles.claim(channel), count)
    if shard.is_direct:
        while begin < direct * count_steps(gemm, stream_k):
            row, column = locate_direct(gemm, direct_tiles, begin // count_steps(gemm, stream_k))
            total, is_complete, begin = multiply_unit(gemm, stream_k, own, weight, row, column, 0, begin, end)
            if is_complete:
                total = scale_tile(gemm, shard.scales, total, row, column, shard.rows)
                finish_tile(channel, gemm, shard, bias, out, total, channel.rank * shard.rows + row, column)
            if begin >= end:
                begin, end = find_unit(gemm, stream_k, tiles.claim(channel), count)
    while begin < end:
        tile = begin // count_steps(gemm, stream_k)
        row_tile, row, column = locate_gathered(gemm, tile, row_tiles, first, direct_tiles)
        ready = tiles.consumer_tile_wait(channel, consumer, row_tile, before_tma=gemm.by_tma, producer=producer)
        begin = multiply_gathered(
            channel, gemm, stream_k, shard, gathered, scales, weight, bias, out, (row, column, base, ready),
            (begin, end)
        )  # fmt: skip
        if begin >= end:
            begin, end = find_unit(gemm, stream_k, tiles.claim(channel), count)
    tiles.end_call(channel, producer)
