# SPDX-License-Identifier: Apache-2.0
"""GEMM + reduce-scatter: tiles of partial sums go to the rank that owns their rows, which adds them up.

Flux (sections 3.2, 4.1 and 4.2), in tile-centric primitives (TileLink). From top to bottom: the operator; its run, by
the library or by a kernel; the kernel that does all of it in one launch; its launch; the gradient.
By copy engines it is a direct algorithm's joint schedule (`joint`); `small_m` has the variant for few rows.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from stretto import tiles
from stretto.collectives.schedule import Schedule
from stretto.execution import TWO_SLOTS_BYTES
from stretto.memory.gpus import limit_waiting
from stretto.ops import small_m
from stretto.ops.choices import find_config
from stretto.ops.config import LIBRARY, KernelConfig, encode_implementation, pin_backward
from stretto.ops.gemm import (
    SHARED_BYTES,
    Blocks,
    Gemm,
    GroupProduct,
    count_steps,
    count_store_parts,
    count_units,
    describe_gemm,
    divide_up,
    find_unit,
    fixed,
    halve,
    load_bias,
    multiply_tile,
    order_tiles,
    scale_tile,
    specialization_key,
    split_last_wave,
    store_tile,
)
from stretto.ops.invariant.matmul import multiply_reduce_scatter, require_plain
from stretto.ops.joint.launch import launch_joint
from stretto.ops.joint.registry import encode_schedule
from stretto.ops.operator import (
    CHANNELS,
    Autograd,
    abandon,
    copy_to,
    count_bytes,
    count_product_flops,
    define_operator,
    divide_first_dim,
    find_group,
    find_name,
    find_workspace,
    flatten_rows,
    gather_rows,
    reduce_scatter,
    require_operands,
    require_out,
    restore_dims,
    save_operands,
    takes_tensors,
)

_CONVERTED_BYTES = tl.constexpr(64 << 10)  # of shared memory, that a store by pointers takes to convert a tile's layout
_ADDED_ELEMENTS = tl.constexpr(8192)  # of each rank's sums, that a program loads at once


@takes_tensors
def matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | None = None,
    reduce_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    invariant: bool = False,
    implementation: str | KernelConfig = "auto",
    schedule: str | Schedule | None = None,
) -> Tensor:
    """x times weight's transpose, reduce-scattered over the group: [m, k], [n, k] -> [m / world, n].

    x may have more dims, [d, ..., k]: the output is [d / world, ..., n], rank r's part of the first dim (rows are the
    flattened dims before the last one, as in Megatron-LM's sequence parallelism, where x is [sequence, batch, k]).
    out: where to write the output, without gradients: of its shape and x's dtype, contiguous.

    bf16, fp16 or fp32, all of one dtype. A rank's partial sums are computed in fp32, sent in x's dtype (in fp32 if
    reduce_dtype is torch.float32), added in fp32 in rank order, and rounded. bias: [n], added once, by the row's owner;
    its gradient is of these rows. group: None for all ranks. x is contiguous; weight is, or its transpose. x's gradient
    is an `all_gather_matmul`, which gathers what weight's gradient needs. implementation: "auto" (the fastest measured,
    or a default), "kernel" (Stretto's, or it raises), "library" (a GEMM, then a reduce-scatter) or a `KernelConfig`.
    schedule: how sums travel: a reduce-scatter's algorithm by name, or any verified `Schedule` of one, which says in
    what order they are added, and rounded at each hop (docs/tutorial-kernel.md). invariant: the bits of a row depend
    neither on the other rows nor on the number of ranks, as in `matmul_all_reduce`. ValueError for other input (m that
    the group does not divide, say) and for a rank outside of the group; PeerError for a rank that does not call. Flux,
    sections 3.2 and 4.
    """
    how, name = encode_implementation(implementation), find_name(group)
    if schedule is not None:
        how = encode_schedule("matmul_reduce_scatter", schedule, how, name)
    rows, world = flatten_rows("matmul_reduce_scatter", x), dist.get_world_size(group)
    if invariant:
        require_plain("matmul_reduce_scatter", how, out, schedule)
        first = divide_first_dim("matmul_reduce_scatter", x, world)
        return restore_dims(multiply_reduce_scatter(rows, weight, bias, name, how), x, first)
    first = divide_first_dim("matmul_reduce_scatter", x, world) if x.dim() > 2 or out is not None else 0
    if out is not None:
        require_operands("matmul_reduce_scatter", rows, weight, bias, how)
        shape = first, *x.shape[1:-1], weight.shape[0]
        require_out("matmul_reduce_scatter", out, shape, x.dtype, x, weight, bias)
        _call(rows, weight, bias, name, reduce_dtype, how, out=out.flatten(0, -2))
        return out
    return restore_dims(_call(rows, weight, bias, name, reduce_dtype, how), x, first)


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: str,
    reduce_dtype: torch.dtype | None,
    implementation: str,
    out: Tensor | None = None,
) -> Tensor:
    """The output, in `out` if there is one."""

    def compute(config: KernelConfig, out: Tensor | None = None) -> Tensor:
        rows, (n, k) = x.shape[0] // find_group(group).size(), weight.shape
        if rows == 0 or n == 0 or k == 0:  # nothing to wait for
            return copy_to(out, x.new_zeros(rows, n) if bias is None else x.new_zeros(rows, n) + bias)
        dtype = reduce_dtype or x.dtype
        if config == LIBRARY:
            return copy_to(out, _run_library(x, weight, bias, group, dtype))
        out = x.new_empty(rows, n) if out is None else out
        product = GroupProduct(x, weight, bias, out, group)
        if config.schedule:
            launch_joint("matmul_reduce_scatter", config, product, dtype)
        else:
            launch_scatter(config, product, dtype)
        return out

    config = find_config(
        "matmul_reduce_scatter", x, weight, bias, group, implementation, reduce_dtype, run=compute,
        check=lambda: _require(x, weight, bias, group, reduce_dtype, implementation),
    )  # fmt: skip
    return compute(config, out)


def _run_library(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, dtype: torch.dtype) -> Tensor:
    """By a library's GEMM and the group's backend; partial sums, which are added as in kernels, travel in `dtype`.

    Results equal the kernels' up to rounding. On CPUs the ranks' sums are added in fp32 in rank order, as in kernels;
    NCCL adds in its own order, and rounds at each hop.
    """
    if dtype == x.dtype:
        partial = x @ weight.t()
    elif x.is_cuda:
        partial = torch.mm(x, weight.t(), out_dtype=dtype)
    else:
        partial = x.to(dtype) @ weight.t().to(dtype)
    total = reduce_scatter(partial, group)
    return (total if bias is None else total + bias.to(dtype)).to(x.dtype)


class StagedSums(NamedTuple):
    """Where ranks store tiles for their owners: a buffer of two slots, or one.

    buffer: pointer to the first slot; slot_words: numbers a slot holds. first_row: the row that the buffer begins at in
    the TMA descriptor of all ranks' buffers.
    """

    buffer: Any
    slot_words: Any
    first_row: Any


class OwnedRows(NamedTuple):
    """A rank's part of the output. rows: its number of rows. reducers: programs that add up its tiles.

    is_shifted, compiled in: tiles are multiplied beginning with the next rank's, else with rank 0's.
    """

    rows: Any
    reducers: Any
    is_shifted: Any


@triton.jit
def gemm_reduce_scatter(  # type: ignore[no-untyped-def]
    channel, queues, gemm, stream_k, owned, a, b, staging, pushed, bias, out
):
    """out [rows, n]: this rank's rows of the sum over all ranks of a @ b.T, + bias; persistent.

    First all tiles are multiplied, and stored into their owner's staging buffer, own tiles as well. They are split into
    queues, as many as there are programs, of every so many-th tile each; a program that has time claims the next queue.
    Then the last `reducers` programs add up the owner's rows, in rank order; those that end earlier make room for other
    kernels.
    Order: tiles of the next rank's rows first, then of the one after, own last, so that no two ranks write to one at
    once, and tiles are sent while later ones are multiplied. Tiles of the last wave may be split over k; their parts
    are partial sums like those of other ranks. A queue's loop is flattened, so that a tile's stores overlap with the
    next tile's loads.
    Signals: of a queue to all ranks, once all its tiles are stored ("broadcast"): earlier signals would not help,
    and a barrier in the loop would stop its pipeline.
    Waits: for all queues of all ranks, before the first sum. No program waits before all queues are claimed by running
    programs, so nothing waits for a program that is not scheduled; and a launch's waiting programs leave room for
    another group's (`bound_blocks`): no cycle.
    Reuse: two slots, by the call's number; every rank waits for every other rank's tiles, so see `call_slot`. Or one
    slot, which is overwritten only when all ranks have begun the call, and so ended the one before.
    """
    count = tl.cdiv(owned.rows, gemm.block_m) * tl.cdiv(gemm.n, gemm.block_n)
    buffer = staging.buffer
    first_row = staging.first_row
    if channel.begun_in_kernel:
        first = tiles.call_slot(channel).to(tl.int64) * staging.slot_words
        buffer += first
        first_row += (first // gemm.block_n).to(tl.int32)
    programs = tl.num_programs(0)
    queue = tiles.claim(channel)
    while queue < programs:
        for unit in tl.range(queue, count_units(stream_k, channel.world * count), programs, flatten=True):
            begin, end = find_unit(gemm, stream_k, unit, channel.world * count)
            index = begin // count_steps(gemm, stream_k)
            owner, tile, row, column = locate_owned(
                channel.rank, channel.world, gemm, owned.rows, index, owned.is_shifted
            )
            slot = channel.rank * count + tile
            if stream_k.unit_steps is None:
                total = multiply_tile(gemm, a, b, owner * owned.rows + row, column, 0)
            else:
                begin -= index * stream_k.tile_steps
                end -= index * stream_k.tile_steps
                total = multiply_tile(gemm, a, b, owner * owned.rows + row, column, 0, begin, end)
                part = begin // stream_k.unit_steps
                slot = tl.where(part == 0, slot, _part_slot(channel, stream_k, count, channel.rank, index, part))
            total = scale_tile(gemm, gemm.row_scales, total, owner * owned.rows + row, column, gemm.m)
            _push_tile(channel, gemm, buffer, pushed, first_row, slot, total, owner)
        done = channel.rank * programs + queue
        tiles.producer_tile_notify(channel, queues, done, "broadcast", after_tma=gemm.stores_by_tma)
        queue = tiles.claim(channel)
    reducer = tiles.arrive_produced(channel) - (programs - owned.reducers)
    if reducer >= 0:
        ready = queue * 0
        for source in tl.static_range(channel.world):
            ready += tiles.consumer_tile_wait(channel, queues, source * programs, producer=queues)
        _add_partials(channel, gemm, stream_k, owned, buffer + ready, bias, out, count, reducer)
    if channel.begun_in_kernel:
        tiles.end_call(channel, queues)


@triton.jit
def _push_tile(channel, gemm, buffer, pushed, first_row, slot, total, owner):  # type: ignore[no-untyped-def]
    """Store a tile into slot [block_m, block_n] of its owner's staging buffer."""
    if pushed is not None:
        row = first_row + tiles.peer_rows(channel, buffer, gemm.block_n, owner) + slot * gemm.block_m
        store_tile(gemm, pushed, total, row, 0, 0)
    else:
        start = buffer + slot.to(tl.int64) * (gemm.block_m * gemm.block_n)
        if goes_in_halves(gemm, buffer.dtype.element_ty):
            left, right = halve(total)
            _push_columns(channel, gemm, start, left, owner)
            _push_columns(channel, gemm, start + gemm.block_n // 2, right, owner)
        else:
            _push_columns(channel, gemm, start, total, owner)


@triton.jit
def _push_columns(channel, gemm, start, columns, owner):  # type: ignore[no-untyped-def]
    """Store some columns of a tile, the first of them at `start`, into its owner's staging buffer."""
    offsets = tl.arange(0, gemm.block_m)[:, None] * gemm.block_n + tl.arange(0, columns.shape[1])[None, :]
    tiles.tile_push_data(channel, start, offsets, columns.to(start.dtype.element_ty), rank=owner)


@triton.jit
def _part_slot(channel, stream_k, count, source, index, part):  # type: ignore[no-untyped-def]
    """The slot of the part-th part, except the first, of the index-th tile of a rank's order: behind all tiles."""
    others = stream_k.tile_steps // stream_k.unit_steps - 1
    split = channel.world * count - stream_k.whole_tiles
    return channel.world * count + (source * split + index - stream_k.whole_tiles) * others + part - 1


@triton.jit
def _add_partials(channel, gemm, stream_k, owned, buffer, bias, out, count, reducer):  # type: ignore[no-untyped-def]
    """Add up own tiles as all ranks have stored them, a few rows of a tile at a time, and store the sums.

    This program is number `reducer` of those that share the work.
    """
    width: tl.constexpr = gemm.block_n
    height: tl.constexpr = max(1, min(gemm.block_m, _ADDED_ELEMENTS // width))
    pieces: tl.constexpr = gemm.block_m // height
    row_tiles, column_tiles = tl.cdiv(owned.rows, gemm.block_m), tl.cdiv(gemm.n, width)
    offsets = tl.arange(0, height)[:, None] * width + tl.arange(0, width)[None, :]
    for piece in range(reducer, count * pieces, owned.reducers):
        tile, within = piece // pieces, piece % pieces * height
        total = tl.zeros((height, width), tl.float32)
        for source in tl.static_range(channel.world):
            slot = source * count + tile
            total += load_rows(gemm, buffer, slot, within, offsets)
            if stream_k.unit_steps is not None:
                if owned.is_shifted:
                    distance = (channel.rank + channel.world - 1 - source) % channel.world
                else:
                    distance = channel.rank
                index = distance * count + tile
                if index >= stream_k.whole_tiles:
                    for part in range(1, stream_k.tile_steps // stream_k.unit_steps):
                        slot = _part_slot(channel, stream_k, count, source, index, part)
                        total += load_rows(gemm, buffer, slot, within, offsets)
        row_tile, column_tile = order_tiles(tile, row_tiles, column_tiles, gemm.group_rows)
        row, column = row_tile * gemm.block_m + within, column_tile * width
        store_rows(gemm, out, bias, total, row, column, owned.rows)


@triton.jit
def goes_in_halves(gemm, dtype):  # type: ignore[no-untyped-def]
    """True if a store by pointers is split into halves, so that its buffer fits besides the loads' stages."""
    return gemm.block_m * gemm.block_n * dtype.primitive_bitwidth > 8 * _CONVERTED_BYTES


@triton.jit
def locate_owned(rank, world, gemm, rows, index, SHIFTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(owner, tile, row, column) of the index-th tile of partial sums: tile and place count among the owner's."""
    row_tiles, column_tiles = tl.cdiv(rows, gemm.block_m), tl.cdiv(gemm.n, gemm.block_n)
    owner = index // (row_tiles * column_tiles)
    if SHIFTED:
        owner = (rank + 1 + owner) % world
    tile = index % (row_tiles * column_tiles)
    row_tile, column_tile = order_tiles(tile, row_tiles, column_tiles, gemm.group_rows)
    return owner, tile, row_tile * gemm.block_m, column_tile * gemm.block_n


@triton.jit
def find_rows(gemm, staging, slot, within):  # type: ignore[no-untyped-def]
    """The address of row `within` of a staged tile, slot [block_m, block_n]."""
    return staging + (tl.cast(slot, tl.int64) * gemm.block_m + within) * gemm.block_n


@triton.jit
def load_rows(gemm, staging, slot, within, offsets):  # type: ignore[no-untyped-def]
    """Load rows of a staged tile from row `within` on, as fp32."""
    return tl.load(find_rows(gemm, staging, slot, within) + offsets).to(tl.float32)


@triton.jit
def store_rows(gemm, out, bias, total, row, column, rows):  # type: ignore[no-untyped-def]
    """Add the bias to sums of a tile's rows, and store those inside of out [rows, n]."""
    if bias is not None:
        total += load_bias(bias, column, gemm.n, gemm.block_n)
    rows_at = (row + tl.arange(0, total.shape[0]))[:, None]
    columns = (column + tl.arange(0, gemm.block_n))[None, :]
    mask = (rows_at < rows) & (columns < gemm.n)
    tl.store(out + rows_at.to(tl.int64) * gemm.n + columns, total.to(out.dtype.element_ty), mask=mask)


def launch_scatter(config: KernelConfig, product: GroupProduct, dtype: torch.dtype) -> None:
    """Launch the call by packets, by a direct schedule's copies, or by the kernel here; sums are sent in `dtype`.

    The kernel here is all of the call or, if the call needs more than two slots hold, its second launch.
    """
    x, weight, bias, out, group, scales = product
    (rows, n), world = out.shape, find_group(group).size()
    if config.exchange == "packets" and dtype == out.dtype:
        small_m.launch("matmul_reduce_scatter", "scatter", config, product, world)
        return
    config = config.with_power_of_two_tiles()
    blocks = config.blocks
    assert blocks is not None
    if config.transfer == "copies" and 1 < world <= CHANNELS:  # where there is a channel for each rank
        launch_joint("matmul_reduce_scatter", config, product, dtype)
        return
    count = world * divide_up(rows, blocks.m) * divide_up(n, blocks.n)
    stream_k, units = split_last_wave(count, x.shape[1], blocks)
    size = count_bytes(count + world * (units - count), blocks.m, blocks.n, dtype=dtype)
    workspace = find_workspace(group, x.device, size, "double_buffered" if size <= TWO_SLOTS_BYTES else "barrier")
    block_channel, programs = workspace.channel, min(blocks.programs, units)
    block_channel.check()
    try:
        queues = map_queues(world, programs)
        if workspace.slots == 1:
            channel = block_channel.begin("matmul_reduce_scatter", queues, queues, "broadcast")
        else:
            channel = block_channel.enter("matmul_reduce_scatter", "broadcast")
        gemm, a, b, _ = describe_gemm(x, weight, None, blocks, scales=scales)
        buffer = block_channel.tensor((workspace.words(workspace.slots, dtype),), dtype)
        gemm, pushed, first_row, stages = describe_push(block_channel, gemm, blocks, x.element_size(), buffer)
        staging = StagedSums(buffer, workspace.words(1, dtype), first_row)
        owned = OwnedRows(rows, limit_waiting(programs, x.device), fixed(config.is_shifted))
        block_channel.launch(
            gemm_reduce_scatter,
            (dtype, specialization_key(config, x, weight, gemm, bias, out)),
            programs,
            (channel, queues, gemm, stream_k, owned, a, b, staging, pushed, bias, out),
            num_warps=blocks.num_warps,
            num_stages=stages,
        )
    except BaseException:
        abandon(group, block_channel)
        raise


def fit_stages(blocks: Blocks, loaded_size: int, stored_size: int) -> int:
    """The stages of TMA loads that fit besides a store by pointers, which converts a tile, or half of a large one.

    At most the stages of `blocks`, and at least one. Sizes are an element's, in bytes.
    """
    converted = blocks.m * blocks.n * stored_size
    if converted > _CONVERTED_BYTES.value:  # as `goes_in_halves`
        converted //= 2
    most = (SHARED_BYTES - converted) // ((blocks.m + blocks.n) * blocks.k * loaded_size)
    return max(1, min(blocks.num_stages, most))


@lru_cache(maxsize=4096)
def map_queues(world: int, programs: int) -> tiles.StaticMapping:
    """Each rank's queues of tiles; a queue is signalled once, when all of its tiles are stored."""
    return tiles.shard_tiles(programs, world, 1)


def describe_push(
    block_channel: tiles.BlockChannel, gemm: Gemm, blocks: Blocks, loaded_size: int, buffer: Tensor
) -> tuple[Gemm, TensorDescriptor | None, int, int]:
    """(the product, a TMA descriptor of all ranks' buffers, the row of it that this rank's begins at, stages of loads).

    One descriptor for all ranks: rows of block_n numbers from the lowest of their addresses on, all memory between the
    buffers included. None if TMA does not support it: for distances between buffers that are too large, or not a
    multiple of a row. Stores by pointers need more shared memory, and may leave room for fewer stages.
    """
    row_bytes = blocks.n * buffer.element_size()
    distances = block_channel.distances
    lowest = min(distances)
    rows = (max(distances) - lowest + buffer.nbytes) // row_bytes
    parts = count_store_parts(blocks, loaded_size, buffer.element_size())
    if not gemm.by_tma.value or not parts or rows >= 1 << 31 or any(step % row_bytes for step in distances):
        fits = fit_stages(blocks, loaded_size, buffer.element_size())
        return gemm, None, 0, fits if gemm.by_tma.value else blocks.num_stages
    base = block_channel.tensor((1,), buffer.dtype, rank=distances.index(lowest))
    pushed = TensorDescriptor(base, [rows, blocks.n], [blocks.n, 1], [blocks.m, blocks.n // parts])
    gemm = gemm._replace(stores_by_tma=tl.constexpr(True), out_parts=tl.constexpr(parts))
    return gemm, pushed, -lowest // row_bytes, blocks.num_stages


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, reduce_dtype: torch.dtype | None, implementation: str
) -> Tensor:
    return x.new_empty(_require(x, weight, bias, group, reduce_dtype, implementation), weight.shape[0])


def _require(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, reduce_dtype: torch.dtype | None, implementation: str
) -> int:
    """This rank's number of rows. ValueError for arguments that the operator does not take."""
    require_operands("matmul_reduce_scatter", x, weight, bias, implementation)
    return require_rows("matmul_reduce_scatter", x, x.dtype, reduce_dtype, group)


def require_rows(operator: str, x: Tensor, dtype: torch.dtype, reduce_dtype: torch.dtype | None, group: str) -> int:
    """This rank's number of x's rows. ValueError unless ranks divide them, and sums of `dtype` can be sent."""
    rows = divide_first_dim(operator, x, find_group(group).size())
    if reduce_dtype not in (None, dtype, torch.float32):
        raise ValueError(f"{operator}: partial sums of {dtype} travel in {dtype} or torch.float32, not {reduce_dtype}")
    return rows


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, group, _, implementation = inputs
    ctx.group, ctx.has_bias, ctx.implementation = group, bias is not None, pin_backward(implementation)
    save_operands(ctx, x, weight)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """C = reduce_scatter(x @ W.T): dx is gather(dC) @ W, overlapped as well, and dW is gather(dC).T @ x."""
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    operators = torch.ops.stretto
    grad = grad.contiguous()
    grad_x = grad_weight = None
    if needs_x and needs_weight:
        grad_x, gathered = operators.all_gather_matmul_gathered(grad, weight.t(), None, ctx.group, ctx.implementation)
        grad_weight = gathered.t() @ x
    elif needs_x:
        grad_x = operators.all_gather_matmul(grad, weight.t(), None, ctx.group, ctx.implementation)
    elif needs_weight:
        grad_weight = gather_rows(grad, ctx.group).t() @ x
    return grad_x, grad_weight, grad.sum(0) if ctx.has_bias and needs_bias else None, None, None, None


_call = define_operator(
    "matmul_reduce_scatter", _run, fake=_fake, count_flops=count_product_flops, autograd=Autograd(_save, _differentiate)
)
