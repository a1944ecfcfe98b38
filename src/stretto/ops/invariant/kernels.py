# SPDX-License-Identifier: Apache-2.0
"""The product of a tile whose k is cut into leaves, added by a binary tree; stored, or sent as packets of fp32.

All tiles have the same order of additions: tensor cores add up each element's products along k, 16 at a time or so, in
one order for every height and width of a tile. So sizes of tiles are free, and their speed decides. Tiles have at least
64 rows, since smaller ones take other instructions, which add in another order.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from stretto import tiles
from stretto.memory.gpus import count_processors
from stretto.ops.gemm import (
    Blocks,
    describe_gemm,
    divide_up,
    fixed,
    load_bias,
    multiply_tile,
    order_tiles,
    specialization_key,
)
from stretto.ops.operator import OperatorWorkspace, abandon, find_group, find_workspace
from stretto.ops.row_sums.kernel import NO_NORM, SumOperands, launch_sums
from stretto.ops.row_sums.norm import Norm
from stretto.ops.small_m import PacketExchange, count_bytes, send_tile
from stretto.tiles.launches import Launches, count_shared_bytes

_MIN_DEPTH = 16  # of a step over k
_STAGE_BYTES = 160 << 10  # of shared memory for stages, at most
_OTHER_BYTES = 16 << 10  # of shared memory, for what is not a stage
_HOPPER_BYTES = 227 << 10  # that a block may have
_BUSY = 0.7  # the part of the multiprocessors that should have a tile of few rows


class Leaves(NamedTuple):
    """A tile's leaves: steps over k of each, and (compiled in) their number."""

    steps: Any
    count: Any


def choose_blocks(
    m: int,
    n: int,
    leaf: int,
    itemsize: int,
    processors: int,
    *,
    has_one_leaf: bool = False,
    shared: int = _HOPPER_BYTES,
) -> Blocks:
    """Tile sizes for a product; a step over k divides the leaf. processors: 0 where kernels are interpreted.

    has_one_leaf: no other sums have to be kept in registers, so that a tile may be wider. shared: bytes of a block's
    shared memory.
    """
    most = max(_MIN_DEPTH, leaf & -leaf)
    if not processors:
        return Blocks(16, 32, min(most, 32), 2, 4, 2, 0)
    if m <= 64:
        widths = [width for width in (128, 64, 32) if divide_up(n, width) >= _BUSY * processors] or [16]
        blocks = Blocks(64, max(widths), min(most, 256 // itemsize), 1, 4, 0, 0)
    elif (
        has_one_leaf
        and itemsize <= 2
        and shared >= _HOPPER_BYTES
        and divide_up(m, 128) * divide_up(n, 256) >= processors
    ):
        return Blocks(128, 256, min(most, 64), 8, 8, 4, 0)
    else:
        blocks = Blocks(128, 128, min(most, 128 // itemsize), 8, 8, 0, 0)
    most, stage = min(_STAGE_BYTES, shared - _OTHER_BYTES), (blocks.m + blocks.n) * itemsize
    while 2 * stage * blocks.k > most and blocks.k > _MIN_DEPTH:
        blocks = blocks._replace(k=blocks.k // 2)
    return blocks._replace(num_stages=max(2, min(6, most // (stage * blocks.k))))


def pad_leaves(x: Tensor, weight: Tensor, leaves: int) -> tuple[Tensor, Tensor]:
    """x and weight with a whole number of the shortest steps in each leaf: themselves, or copies with zeros."""
    missing = -(x.shape[1] // leaves) % _MIN_DEPTH
    if not missing:
        return x, weight
    padded = [functional.pad(one.unflatten(1, (leaves, -1)), (0, missing)).flatten(1) for one in (x, weight)]
    return padded[0], padded[1]


def multiply_leaves(
    x: Tensor, weight: Tensor, bias: Tensor | None, leaves: int, dtype: torch.dtype, blocks: Blocks | None = None
) -> Tensor:
    """[m, n] of dtype: this rank's product, + bias."""
    out = x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)
    if out.numel():
        launch = _launches.setdefault(x.device, Launches())
        exchange = PacketExchange(0, 0, fixed("none"), fixed(0), fixed(False))
        _launch(launch, None, exchange, x, weight, leaves, None, bias, out, blocks)
    return out


def multiply_and_sum(
    operator: str,
    form: str,
    x: Tensor,
    weight: Tensor,
    leaves: int,
    sums: SumOperands,
    group: str,
    norm: Norm = NO_NORM,
) -> tuple[Tensor, Tensor]:
    """The sums of all ranks' products by packets, as `launch_sums` returns them: of all rows ("push"), or own."""
    (m, _), n, world = x.shape, weight.shape[0], find_group(group).size()
    workspace = find_workspace(group, x.device, count_bytes(form, m, n, world, torch.float32), "packets")
    channel = workspace.channel.enter(operator, "p2p")
    try:
        _send(workspace, channel, form, x, weight, leaves, sums.added.shape[0])
        return launch_sums(workspace, channel, None, sums, torch.float32, by_tree=True, norm=norm)
    except BaseException:
        abandon(group, workspace.channel)
        raise


def _send(
    workspace: OperatorWorkspace, channel: Any, form: str, x: Tensor, weight: Tensor, leaves: int, rows: int
) -> None:
    staging = workspace.channel.tensor((workspace.words(2, torch.int32),), torch.int32)
    in_fours = weight.shape[0] % 4 == 0
    exchange = PacketExchange(rows, workspace.words(1, torch.int32), fixed(form), fixed(0), fixed(in_fours))
    _launch(workspace.channel.launch, channel, exchange, x, weight, leaves, staging, None, None, None)


_launches: dict[torch.device, Launches] = {}


@lru_cache(maxsize=4096)
def _find_blocks(m: int, n: int, k: int, leaves: int, itemsize: int, device: torch.device) -> Blocks:
    processors = count_processors(device.index) if device.type == "cuda" else 0
    shared = count_shared_bytes(device)
    return choose_blocks(m, n, k // leaves, itemsize, processors, has_one_leaf=leaves == 1, shared=shared)


def _launch(
    launch: Launches,
    channel: Any,
    exchange: PacketExchange,
    x: Tensor,
    weight: Tensor,
    leaves: int,
    staging: Tensor | None,
    bias: Tensor | None,
    out: Tensor | None,
    blocks: Blocks | None,
) -> None:
    x, weight = pad_leaves(x, weight, leaves)
    (m, k), n = x.shape, weight.shape[0]
    blocks = blocks or _find_blocks(m, n, k, leaves, x.element_size(), x.device)
    gemm, a, b, _ = describe_gemm(x, weight, None, blocks)
    tree = Leaves(k // leaves // blocks.k, fixed(leaves))
    launch(
        sum_leaves,
        (exchange.form.value, leaves, specialization_key(blocks, x, weight, gemm, bias, out)),
        divide_up(m, blocks.m) * divide_up(n, blocks.n),
        (channel, gemm, tree, exchange, a, b, staging, bias, out),
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        enable_fp_fusion=False,
    )


@triton.jit
def sum_leaves(channel, gemm, leaves, exchange, a, b, staging, bias, out):  # type: ignore[no-untyped-def]
    """A tile of a @ b.T, by a tree over the leaves of k: stored with its bias, or sent ("push", "scatter").

    Signals: none but the packets, of fp32, to all ranks or to the rows' owner.
    Waits: none; the next launch of the call waits for the packets (`sum_and_normalize`), and ends the call.
    Failure: packets are sent only while no wait of this process has failed.
    Reuse: two slots, by the call's number: see `call_slot`.
    """
    row_tiles = tl.cdiv(gemm.m, gemm.block_m)
    row_tile, column_tile = order_tiles(tl.program_id(0), row_tiles, tl.cdiv(gemm.n, gemm.block_n), gemm.group_rows)
    row, column = row_tile * gemm.block_m, column_tile * gemm.block_n
    if leaves.count == 1:
        total = multiply_tile(gemm, a, b, row, column, 0)
    else:
        total = _multiply_tree(gemm, leaves, a, b, row, column)
    if exchange.form == "none":
        if bias is not None:
            total += load_bias(bias, column, gemm.n, gemm.block_n)
        rows = (row + tl.arange(0, gemm.block_m))[:, None]
        columns = (column + tl.arange(0, gemm.block_n))[None, :]
        mask = (rows < gemm.m) & (columns < gemm.n)
        tl.store(out + rows.to(tl.int64) * gemm.n + columns, total.to(out.dtype.element_ty), mask=mask)
    else:
        slot = staging + tiles.call_slot(channel).to(tl.int64) * exchange.slot_words
        publishes = tiles.may_publish(channel)
        send_tile(channel, gemm, exchange, slot, total, row, column, gemm.n, publishes, tl.float32)


@triton.jit
def _multiply_tree(gemm, leaves, a, b, row, column):  # type: ignore[no-untyped-def]
    """fp32 [block_m, block_n]: each leaf's sum, added to its neighbour's, and so on; one loop, so that loads go on.

    first, second, third: sums of 1, 2 and 4 leaves that wait for their neighbours.
    """
    total = tl.zeros((gemm.block_m, gemm.block_n), tl.float32)
    first = tl.zeros((gemm.block_m, gemm.block_n), tl.float32)
    second = first
    third = first
    rows = tl.arange(0, gemm.block_m)[:, None]
    columns = tl.arange(0, gemm.block_n)[None, :]
    depth = tl.arange(0, gemm.block_k)
    k = gemm.k // gemm.grain * gemm.grain
    n = gemm.n // gemm.grain * gemm.grain if gemm.transposed else gemm.n
    for step in range(leaves.steps * leaves.count):
        start = step * gemm.block_k
        if gemm.by_tma:
            x = a.load([row, start])
            y = b.load([start, column]) if gemm.transposed else b.load([column, start]).T
        else:
            left = a + tl.cast(row, tl.int64) * k + start
            x = tl.load(left + (rows * k + depth[None, :]), mask=rows < gemm.m - row, other=0)
            if gemm.transposed:
                right = b + column + tl.cast(start, tl.int64) * n
                y = tl.load(right + (depth[:, None] * n + columns), mask=columns < n - column, other=0)
            else:
                right = b + tl.cast(column, tl.int64) * k + start
                y = tl.load(right + (columns * k + depth[:, None]), mask=columns < gemm.n - column, other=0)
        total = tl.dot(x, y, total, input_precision=gemm.precision)
        if step % leaves.steps == leaves.steps - 1:
            first, second, third = add_leaf(leaves, step // leaves.steps, total, first, second, third)
            total = tl.zeros((gemm.block_m, gemm.block_n), tl.float32)
    return first


@triton.jit
def add_leaf(leaves, leaf, total, first, second, third):  # type: ignore[no-untyped-def]
    """(first, second, third) after a leaf's total: first is the tree's sum after the last one."""
    two = first + total
    if leaves.count == 2:
        first = tl.where(leaf == 1, two, total)
    else:
        four = second + two
        second = tl.where(leaf % 4 == 1, two, second)
        if leaves.count == 4:
            first = tl.where(leaf == 3, four, total)
        else:
            eight = third + four
            third = tl.where(leaf == 3, four, third)
            first = tl.where(leaf == 7, eight, total)
    return first, second, third
