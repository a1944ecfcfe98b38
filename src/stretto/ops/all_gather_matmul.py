# SPDX-License-Identifier: Apache-2.0
"""All-gather + GEMM: the ranks' rows are transferred while a persistent GEMM multiplies those that have arrived.

Flux (sections 3.3, 4.1 and 4.3), in tile-centric primitives (TileLink). From top to bottom: the operator; its run, by
the library or by a kernel; the kernel for few rows, whose first programs push them; its launch; the gradient. Of more
rows it is a joint schedule (`joint`), by default a direct algorithm's.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, overload

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from stretto import tiles
from stretto.collectives.schedule import Schedule
from stretto.memory.gpus import limit_waiting
from stretto.ops.choices import find_config
from stretto.ops.config import LIBRARY, KernelConfig, encode_implementation, pin_backward
from stretto.ops.gemm import (
    GroupProduct,
    Scales,
    count_steps,
    describe_gemm,
    divide_up,
    find_unit,
    finish_tile,
    has_power_of_two_columns,
    make_stream_k,
    multiply_columns,
    multiply_unit,
    order_tiles,
    specialization_key,
    tile_width,
)
from stretto.ops.joint.launch import launch_joint
from stretto.ops.joint.registry import encode_schedule
from stretto.ops.operands import flatten_rows, require_operands, require_out, takes_tensors
from stretto.ops.operator import (
    Autograd,
    abandon,
    copy_to,
    count_bytes,
    define_operator,
    find_group,
    find_name,
    find_workspace,
    gather_rows,
    save_operands,
    scatter_sum,
)

_MOVED_BYTES = 256 << 10  # that a program moves at a time, at most
_ALIGNMENT = 128  # bytes: tensors in a workspace begin at multiples of it
_SCALES_AT_ONCE = tl.constexpr(256)
_MOVED_AT_ONCE = tl.constexpr(256 if tiles.INTERPRETED.value else 16384)  # elements that a program loads and stores


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
    schedule: str | Schedule | None = None,
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
    schedule: str | Schedule | None = None,
) -> list[Tensor]: ...


@takes_tensors
def all_gather_matmul(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    saves_gathered: bool = True,
    out: Tensor | Sequence[Tensor] | None = None,
    implementation: str | KernelConfig = "auto",
    schedule: str | Schedule | None = None,
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
    all-gather, then a GEMM) or a `KernelConfig`. schedule: how rows are gathered: an all-gather's algorithm by name, or
    any verified `Schedule` of one (docs/tutorial-kernel.md). ValueError for other input and for a rank outside of the
    group; PeerError for a rank that does not call. Flux, sections 3.3 and 4.
    """
    name, how = find_name(group), encode_implementation(implementation)
    if schedule is not None:
        how = encode_schedule("all_gather_matmul", schedule, how, name)
    if not isinstance(weight, Tensor):
        return _multiply_several(x, weight, bias, out, group, saves_gathered, how)
    rows = flatten_rows("all_gather_matmul", x)
    if not (bias is None or isinstance(bias, Tensor)) or not (out is None or isinstance(out, Tensor)):
        raise ValueError("all_gather_matmul takes a list of biases, and of outputs, only with a list of weights")
    if out is not None:
        require_operands("all_gather_matmul", rows, weight, bias, how)
        require_out("all_gather_matmul", out, _shape_product(x, weight, group), x.dtype, x, weight, bias)
        _plain(rows, weight, bias, name, how, out=out.flatten(0, -2))
        return out
    if saves_gathered and torch.is_grad_enabled() and weight.requires_grad:
        product = _gathered(rows, weight, bias, name, how)[0]
    else:
        product = _plain(rows, weight, bias, name, how)
    return product if x.dim() == 2 else product.view(_shape_product(x, weight, group))


@takes_tensors
def all_gather_matmul_gathered(
    x: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | None = None,
    implementation: str | KernelConfig = "auto",
) -> tuple[Tensor, Tensor]:
    """`all_gather_matmul` of one weight, with its arguments and errors, that also returns the gathered x, which linears
    of a sharded sequence save for the weight's gradient: ([m, n], [m, k])."""
    how = encode_implementation(implementation)
    rows = flatten_rows("all_gather_matmul", x)
    product, gathered = _gathered(rows, weight, bias, find_name(group), how)
    if x.dim() == 2:
        return product, gathered
    shape = _shape_product(x, weight, group)
    return product.view(shape), gathered.view(*shape[:-1], x.shape[-1])


def _shape_product(x: Tensor, weight: Tensor, group: dist.ProcessGroup | None) -> tuple[int, ...]:
    return x.shape[0] * dist.get_world_size(group), *x.shape[1:-1], weight.shape[0]


def _multiply_several(
    x: Tensor, weights: Any, biases: Any, outs: Any, group: dist.ProcessGroup | None, saves_gathered: bool, how: str
) -> list[Tensor]:
    """Products of one gather with several weights: queries, keys and values, or gate and up.

    The widest weight's product is multiplied as rows come, and hides the gather; it also returns the gathered rows,
    which the library then multiplies by the other weights. No weight is copied, and all products are contiguous.
    Gradients of the gathered rows are added up by autograd, so that the backward pass has one reduce-scatter.
    """
    operator, rows = "all_gather_matmul", flatten_rows("all_gather_matmul", x)
    if not weights:
        raise ValueError(f"{operator}: weight must be a tensor or a list of one or more tensors, not {weights!r}")
    for what, given in (("bias", biases), ("out", outs)):
        if given is not None and (not isinstance(given, Sequence) or len(given) != len(weights)):
            count = len(given) if isinstance(given, Sequence) else type(given).__name__
            raise ValueError(f"{operator}: {what} of {len(weights)} weights must be as long a list, not {count}")
    if not saves_gathered:
        raise ValueError(
            f"{operator}: saves_gathered=False is for one weight: torch.cat the weights, or checkpoint the call "
            "(torch.utils.checkpoint)"
        )
    biases, outs = (list(given or [None] * len(weights)) for given in (biases, outs))
    for weight, bias in zip(weights, biases, strict=True):
        require_operands(operator, rows, weight, bias, how)
    shapes = [_shape_product(x, weight, group) for weight in weights]
    for place, (shape, out) in enumerate(zip(shapes, outs, strict=True)):
        if out is not None:
            require_out(operator, out, shape, x.dtype, x, *weights, *biases, *outs[:place])
    products: list[Any] = [None if out is None else out.flatten(0, -2) for out in outs]
    columns = [weight.shape[0] for weight in weights]
    widest = columns.index(max(columns))
    first = rows, weights[widest], biases[widest], find_name(group), how
    products[widest], gathered = _gathered(*first, out=products[widest])
    with torch.autocast(gathered.device.type, enabled=False):  # as in the first product
        for place, (weight, bias, out) in enumerate(zip(weights, biases, products, strict=True)):
            if place == widest:
                continue
            if out is None:
                products[place] = functional.linear(gathered, weight, bias)
            elif bias is None:
                torch.mm(gathered, weight.t(), out=out)
            else:
                torch.addmm(bias, gathered, weight.t(), out=out)
    return [
        product.view(shape) if out is None else out for product, shape, out in zip(products, shapes, outs, strict=True)
    ]


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: str,
    implementation: str,
    out: Tensor | None,
    *,
    returns_gathered: bool,
) -> tuple[Tensor, Tensor]:
    """(product, in `out` if there is one; gathered x, or x itself where that is not returned)."""

    def compute(config: KernelConfig, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        (rows, k), n, world = x.shape, weight.shape[0], find_group(group).size()
        if rows == 0 or n == 0 or k == 0:  # nothing to wait for
            product, gathered = x.new_zeros(rows * world, n), x.new_empty(rows * world, k)
            if returns_gathered and n == 0:
                gathered = gather_rows(x, group)
            return copy_to(out, product if bias is None else product + bias), gathered
        if config == LIBRARY:
            gathered = gather_rows(x, group)
            return copy_to(out, functional.linear(gathered, weight, bias)), gathered
        out = x.new_empty(rows * world, n) if out is None else out
        returned = x.new_empty(rows * world, k) if returns_gathered else None
        launch_gather(config, GroupProduct(x, weight, bias, out, group), returned)
        return out, x if returned is None else returned

    config = find_config(
        "all_gather_matmul", x, weight, bias, group, implementation, returns_gathered=returns_gathered, run=compute,
        check=lambda: require_operands("all_gather_matmul", x, weight, bias, implementation),
    )  # fmt: skip
    return compute(config, out)


def _run_plain(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, implementation: str, out: Tensor | None = None
) -> Tensor:
    return _run(x, weight, bias, group, implementation, out, returns_gathered=False)[0]


def _run_gathered(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, implementation: str, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return _run(x, weight, bias, group, implementation, out, returns_gathered=True)


class PushedRows(NamedTuple):
    """This rank's rows x [rows, k], as the kernel pushes them: its first `movers` programs do.

    scales: factors [rows] of fp8 rows, or None. landing: both slots of the gathered rows, slot_rows rows apart; slots
    of scales are slot_words apart.
    """

    x: Any
    scales: Any
    rows: Any
    landing: Any
    slot_rows: Any
    slot_words: Any
    movers: Any


@triton.jit
def all_gather_gemm_by_programs(  # type: ignore[no-untyped-def]
    channel, producer, consumer, gemm, stream_k, pushed, gathered, weight, bias, out
):
    """out [m, n] = gathered @ weight.T + bias; the first programs push rows before they multiply; persistent.

    Order: by rows, of which there are few: those of all ranks arrive at about one time. Tiles of the last wave may be
    split (`StreamK`). Programs claim work units, so those that have pushed rows do fewer.
    Signals: the first `movers` programs push rows; those of a rank are one piece, which is signalled.
    Waits: for the ranks that have a tile's rows, at the tile's head. They depend on the launch's first programs on
    each rank, which run when any do, claim what they push, and wait for nothing. A launch leaves room for another
    group's (`bound_blocks`), so that its first programs find a place while this one waits.
    Scales of fp8 rows travel before their rows' signals, to gemm.row_scales.
    Reuse: `gathered` is both of two slots, used in turn by the call's number. Every rank waits for every rank's rows,
    so a slot is free when its turn comes: see `call_slot`.
    """
    slot = tiles.call_slot(channel)
    base = slot * pushed.slot_rows
    scales = gemm.row_scales
    if scales is not None:
        scales += slot.to(tl.int64) * pushed.slot_words
    if tl.program_id(0) < pushed.movers:
        push_rows(channel, producer, gemm, pushed, pushed.landing + tl.cast(base, tl.int64) * gemm.k, scales)
    rows = pushed.rows * channel.world
    row_tiles, column_tiles = tl.cdiv(rows, gemm.block_m), tl.cdiv(gemm.n, tile_width(gemm))
    begin, end = find_unit(gemm, stream_k, tiles.claim(channel), row_tiles * column_tiles)
    while begin < end:
        tile = begin // count_steps(gemm, stream_k)
        row_tile, column_tile = order_tiles(tile, row_tiles, column_tiles, gemm.group_rows)
        row, column = row_tile * gemm.block_m, column_tile * tile_width(gemm)
        ready = tiles.consumer_tile_wait(channel, consumer, row_tile, before_tma=gemm.by_tma, producer=producer)
        row_there = base + row + ready
        if gemm.parts == 1:
            total, is_complete, begin = multiply_unit(
                gemm, stream_k, gathered, weight, row_there, column, 0, begin, end
            )
            if is_complete:
                finish_tile(gemm, scales, bias, out, total, row + ready, row, rows, column)
        else:
            totals = multiply_columns(gemm, gathered, weight, row_there, column)
            begin = end  # such tiles are whole units
            for part in tl.static_range(gemm.parts):
                at = column + part * gemm.block_n
                finish_tile(gemm, scales, bias, out, totals[part], row + ready, row, rows, at)
        if begin >= end:
            begin, end = find_unit(gemm, stream_k, tiles.claim(channel), row_tiles * column_tiles)
    tiles.end_call(channel, producer)


@triton.jit
def push_rows(channel, producer, gemm, pushed, landing, scales_landing):  # type: ignore[no-untyped-def]
    """Push tiles of x to all ranks: to the rank before this one first, to this rank last.

    They are claimed: running programs push all of them, whichever of a launch's programs are scheduled.
    """
    pieces = tiles.rank_tiles(producer)
    job = tiles.claim_move(channel)
    while job < pieces * channel.world:
        following = tiles.claim_move(channel)  # before the copy, which takes longer
        peer = (channel.rank + channel.world - 1 - job // pieces) % channel.world
        tile = channel.rank * pieces + job % pieces
        there = tiles.peer_pointer(channel, landing, peer)
        _copy_rows(producer, gemm.k, tile, pushed.x, channel.rank * producer.rows, there, _MOVED_AT_ONCE)
        if pushed.scales is not None:
            there = tiles.peer_pointer(channel, scales_landing, peer)
            _copy_rows(producer, 1, tile, pushed.scales, channel.rank * producer.rows, there, _SCALES_AT_ONCE)
        tiles.producer_tile_notify(channel, producer, tile, "broadcast", rank=peer)
        job = following


@triton.jit
def _copy_rows(producer, k, tile, source, first, destination, AT_ONCE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy a tile's rows of k elements; `source` begins with row `first`, `destination` with row 0."""
    low, high = tiles.tile_rows(producer, tile)
    source += tl.cast(low - first, tl.int64) * k
    destination += tl.cast(low, tl.int64) * k
    size = (high - low) * k
    for start in range(0, size, AT_ONCE):
        offsets = start + tl.arange(0, AT_ONCE)
        value = tl.load(source + offsets, mask=offsets < size)
        tl.store(destination + offsets, value, mask=offsets < size)


def launch_gather(config: KernelConfig, product: GroupProduct, returned: Tensor | None = None) -> None:
    """Launch the call: out = gather(x) @ weight.T + bias, by a schedule, or by the kernel here.

    Scales of own rows of an fp8 x are sent with them. returned: gets the gathered x, which the kernel here cannot give.
    """
    if config.schedule or config.transfer == "copies":
        launch_joint("all_gather_matmul", config, product, product.x.dtype, returned)
    else:
        assert returned is None
        _launch_by_programs(config, product)


def _launch_by_programs(config: KernelConfig, product: GroupProduct) -> None:
    """Launch the call's only kernel, whose first programs move rows before they multiply."""
    x, weight, bias, out, group, scales = product
    assert config.blocks is not None
    blocks = config.blocks._replace(programs=limit_waiting(config.blocks.programs, x.device))
    config = config._replace(blocks=blocks, movers=min(config.movers, blocks.programs))
    (rows, k), count = x.shape, out.shape[0]
    scales_start = divide_up((count + 1) * k, _ALIGNMENT) * _ALIGNMENT  # of fp8's, behind the rows
    # One row more than there are: slots begin at multiples of a row, so that one descriptor covers both.
    size = count_bytes(count + 1, k, dtype=x.dtype)
    if scales is not None:
        size = scales_start + count_bytes(count, dtype=torch.float32)
    workspace = find_workspace(group, x.device, size, "double_buffered")
    block_channel = workspace.channel
    world = block_channel.world_size
    producer, consumer = map_rows(rows, world, config.movers, blocks.m, k * x.element_size())
    slot_rows = divide_up(workspace.slot_bytes, k * x.element_size())
    landing = block_channel.tensor((slot_rows + rows * world, k), x.dtype)
    own_scales = None if scales is None else scales.rows.contiguous()
    if scales is not None:
        scales = Scales(block_channel.tensor((count,), torch.float32, offset=scales_start), scales.columns)
    in_parts = not has_power_of_two_columns(blocks)
    gemm, arriving, b, c = describe_gemm(landing, weight, out, blocks, scales=scales, in_parts=in_parts)
    count = divide_up(count, blocks.m) * divide_up(out.shape[1], blocks.n)
    stream_k, units = make_stream_k(count, k, blocks, workspace.arrivals)
    programs = min(blocks.programs, max(units, config.movers))
    slot_words, movers = workspace.words(1, torch.float32), min(config.movers, programs)
    pushed = PushedRows(x, own_scales, rows, landing, slot_rows, slot_words, movers)
    channel = block_channel.enter("all_gather_matmul", "broadcast")
    try:
        block_channel.launch(
            all_gather_gemm_by_programs,
            specialization_key(config, x, weight, gemm, bias, out, own_scales),
            programs,
            (channel, producer, consumer, gemm, stream_k, pushed, arriving, b, bias, c),
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
        )
    except BaseException:
        abandon(group, block_channel)
        raise


@lru_cache(maxsize=4096)
def map_rows(
    rows: int, world: int, movers: int, block_rows: int, row_bytes: int
) -> tuple[tiles.StaticMapping, tiles.StaticMapping]:
    """(the mapping of rows to signals as they are sent, the mapping of the GEMM's tiles to the signals they wait for).

    A rank's rows are signalled together. They are sent in small tiles, so that all programs have some to push.
    """
    moved = max(1, min(rows * world // movers, _MOVED_BYTES // row_bytes))
    producer = tiles.shard_tiles(rows, world, 1 << (moved.bit_length() - 1))  # a kernel is compiled for each number
    return producer, tiles.whole_tiles(rows, world, block_rows, channel_rows=producer.channel_rows)


def _fake_plain(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, implementation: str) -> Tensor:
    require_operands("all_gather_matmul", x, weight, bias, implementation)
    return x.new_empty(x.shape[0] * find_group(group).size(), weight.shape[0])


def _fake_gathered(x: Tensor, weight: Tensor, bias: Any, group: str, implementation: str) -> tuple[Tensor, Tensor]:
    out = _fake_plain(x, weight, bias, group, implementation)
    return out, x.new_empty(out.shape[0], x.shape[1])


def _count_flops(x: torch.Size, weight: torch.Size, group: str) -> int:
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
            gathered = rows if ctx.is_gathered else gather_rows(rows, ctx.group)
            grad_weight = grad.t() @ gathered
        if ctx.has_bias and needs_bias:
            grad_bias = grad.sum(0)
    if grad_gathered is not None and needs_x:  # one reduce-scatter for both, which this product cannot hide
        total = grad_gathered if grad is None else torch.addmm(grad_gathered, grad, weight)
        grad_x = scatter_sum(total.contiguous(), ctx.group)
    return grad_x, grad_weight, grad_bias, None, None


_plain = define_operator(
    "all_gather_matmul",
    _run_plain,
    fake=_fake_plain,
    count_flops=_count_flops,
    autograd=Autograd(_save, _differentiate),
)
_gathered = define_operator(
    "all_gather_matmul_gathered",
    _run_gathered,
    fake=_fake_gathered,
    count_flops=_count_flops,
    autograd=Autograd(_save, _differentiate),
)
