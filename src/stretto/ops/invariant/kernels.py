# SPDX-License-Identifier: Apache-2.0
"""The product of a tile whose k is cut into leaves, added by a binary tree; stored, or sent as packets of fp32.

All tiles have the same order of additions: tensor cores add up each element's products along k, 16 at a time or so, in
one order for every height and width of a tile. So sizes of tiles are free, and their speed decides. A tile's left
operand has at least 64 rows, since a smaller one takes other instructions, which add in another order.

Few rows are the right operand: a tile is weight @ x.T, of 64 columns of the output and 16 to 64 rows. Its shared memory
and its loads are the weight's: with 64 rows of x on the left most of both would be padding.
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
    order_tiles,
    specialization_key,
    takes_tma,
)
from stretto.ops.moe.grouped.config import GroupedConfig, choose_config
from stretto.ops.moe.grouped.kernels import multiply
from stretto.ops.operator import abandon, find_group, find_workspace
from stretto.ops.prediction import FEW_ROWS
from stretto.ops.row_sums.kernel import NO_NORM, SumOperands, launch_sums
from stretto.ops.row_sums.norm import Norm
from stretto.ops.small_m import PacketExchange, choose_streaming, count_bytes, send_tile
from stretto.tiles.launches import Launches, count_shared_bytes, find_launches

_MIN_DEPTH = 16  # of a step over k
_STAGE_BYTES = 160 << 10  # of shared memory for stages, at most
_OTHER_BYTES = 16 << 10  # of shared memory, for what is not a stage
_HOPPER_BYTES = 227 << 10  # that a block may have
_BUSY = 0.7  # the part of the multiprocessors that should have a tile of few rows
_DEEPEST = 12  # stages of a tile of few rows
_BARRIER_BYTES = 8 << 10  # of shared memory, beside the stages of a tile of few rows
_LIBRARY_ROWS = 1024  # of whose multiples it is tried whether the library's products have the same bits
_HAS_BITS: dict[tuple[Any, ...], bool] = {}


class Leaves(NamedTuple):
    """A program's leaves: steps over k of each, and (compiled in) their number, the programs that share the leaves of a
    tile, and whether x is the right operand."""

    steps: Any
    count: Any
    parts: Any = fixed(1)
    is_turned: Any = fixed(False)


class Tile(NamedTuple):
    """A way to compute a product: sizes of tiles, programs that share the leaves of one, and the place of x.

    parts > 1: each program stores a sum of its own, [parts, m, n], which the next launch adds up by the tree.
    """

    blocks: Blocks
    parts: int = 1
    is_turned: bool = False


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


def choose_tile(
    m: int, n: int, leaf: int, leaves: int, itemsize: int, processors: int, *, takes_parts: bool, shared: int
) -> Tile:
    """The tile of a product [m, n] with so many leaves of `leaf` numbers. takes_parts: whether there may be parts."""
    if not processors or m > FEW_ROWS:
        blocks = choose_blocks(m, n, leaf, itemsize, processors, has_one_leaf=leaves == 1, shared=shared)
        if blocks.n == 256:  # by TMA, two programs a multiprocessor are faster than a wider tile
            blocks = blocks._replace(n=128, num_warps=4, num_stages=3)
        return Tile(blocks)
    height, count, parts = max(16, triton.next_power_of_2(m)), divide_up(n, 64), 1
    while takes_parts and parts < leaves and parts * count <= processors:
        parts *= 2
    width = 128 if divide_up(n, 128) >= processors else 64
    # Measured on an H200 (the decision has times): alone on its multiprocessor, a program loads deep stages.
    is_alone = parts * count <= processors
    deep = min(max(_MIN_DEPTH, leaf & -leaf), (512 if is_alone and height <= 32 else 256) // itemsize)
    room = shared - _BARRIER_BYTES
    while 2 * (height + width) * deep * itemsize > room and deep > _MIN_DEPTH:
        deep //= 2
    stage, programs = (height + width) * deep * itemsize, 1 if is_alone else 3 if parts > 1 else 2
    while programs > 1 and room // programs < 3 * stage:
        programs -= 1
    stages = max(2, min(_DEEPEST, room // programs // stage))
    return Tile(Blocks(height, width, deep, 1, 4, stages, 0), parts, is_turned=True)


def pad_leaves(x: Tensor, weight: Tensor, leaves: int) -> tuple[Tensor, Tensor]:
    """x and weight with a whole number of the shortest steps in each leaf: themselves, or copies with zeros."""
    missing = -(x.shape[1] // leaves) % _MIN_DEPTH
    if not missing:
        return x, weight
    padded = [functional.pad(one.unflatten(1, (leaves, -1)), (0, missing)).flatten(1) for one in (x, weight)]
    return padded[0], padded[1]


def is_for_streaming(x: Tensor, weight: Tensor, leaves: int = 1) -> bool:
    """True if a product of few rows takes as long as its weight takes to stream, which this kernel does fastest.

    Of 16-bit dtypes, from Hopper on, where TMA loads the weight.
    """
    (m, k), is_half = x.shape, x.is_cuda and x.element_size() == 2 and x.dtype == weight.dtype
    return is_half and 0 < m <= FEW_ROWS and k % (leaves * 128) == 0 and takes_tma(x) and takes_tma(weight)


def multiply_leaves(
    x: Tensor, weight: Tensor, bias: Tensor | None, leaves: int, dtype: torch.dtype, tile: Tile | None = None
) -> Tensor:
    """[m, n] of dtype: this rank's product, + bias."""
    if tile is None and leaves == 1 and bias is None and dtype == x.dtype:
        config = find_wide(x, weight)
        if config is not None:
            if _library_has_bits(config, x, weight):
                return functional.linear(x, weight)
            return _multiply_wide(config, x, weight)
    x, weight = pad_leaves(x, weight, leaves)
    return _multiply(x, weight, bias, leaves, dtype, tile or _find_tile(x, weight, leaves, takes_parts=False))


def _multiply_wide(config: GroupedConfig, x: Tensor, weight: Tensor) -> Tensor:
    """Multiply by the kernel of grouped products, as one group: the same order of additions, and faster."""
    offsets = torch.arange(0, len(x) + 1, len(x), dtype=torch.int32, device=x.device)
    return multiply(config, x, weight[None], offsets)


def _library_has_bits(config: GroupedConfig, x: Tensor, weight: Tensor) -> bool:
    """True if the library's product of these sizes has the kernel's bits: one order of additions along k. It is faster.

    Tried once a process, with random rows, where the host may wait: of some 10^7 results another order changes most,
    and thousands after they are rounded. What is chosen changes no bit, so ranks need not agree on it.
    """
    library, matmul = torch.backends.cuda.preferred_blas_library(), torch.backends.cuda.matmul
    reduced = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    settings = library, *reduced, matmul.allow_fp16_accumulation
    sizes = len(x), *weight.shape, weight.stride(), x.dtype, x.device, *settings
    if len(x) % _LIBRARY_ROWS or torch.is_autocast_enabled(x.device.type):  # which would cast
        return False
    if torch.are_deterministic_algorithms_enabled():  # torch refuses cuBLAS then, without CUBLAS_WORKSPACE_CONFIG
        return False
    if sizes not in _HAS_BITS and not torch.cuda.is_current_stream_capturing():
        rows = torch.randn(x.shape, generator=torch.Generator(x.device).manual_seed(0), dtype=x.dtype, device=x.device)
        shows_order = int(weight.count_nonzero()) > weight.numel() // 2
        same = shows_order and torch.equal(_multiply_wide(config, rows, weight), functional.linear(rows, weight))
        _HAS_BITS[sizes] = same
    return _HAS_BITS.get(sizes, False)


def find_wide(x: Tensor, weight: Tensor) -> GroupedConfig | None:
    """The configuration of wide tiles that keep all multiprocessors busy, where a kernel takes them; else None."""
    if not x.is_cuda or len(x) <= FEW_ROWS:
        return None
    config = choose_config("auto", "product", len(x), 1, (x, weight[None]))
    tiles = 0 if config is None else divide_up(len(x), config.blocks.m) * divide_up(len(weight), config.blocks.n)
    return config if config is not None and tiles >= config.blocks.programs else None


def multiply_streaming(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[m, n] of x's dtype: the product of what `is_for_streaming` takes, whose bits depend on the number of rows."""
    blocks = choose_streaming(len(x), *weight.shape, count_processors(x.device.index))
    return multiply_leaves(x, weight, bias, 1, x.dtype, None if blocks is None else Tile(blocks))


def multiply_in_parts(x: Tensor, weight: Tensor, leaves: int, tile: Tile | None = None) -> Tensor:
    """fp32 [parts, m, n]: sums of so many parts of the leaves, which the tree adds up: 1, 2, 4 or 8, by the sizes."""
    x, weight = pad_leaves(x, weight, leaves)
    tile = tile or _find_tile(x, weight, leaves, takes_parts=True)
    return _multiply(x, weight, None, leaves, torch.float32, tile).view(tile.parts, x.shape[0], -1)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, leaves: int, dtype: torch.dtype, tile: Tile) -> Tensor:
    out = x.new_empty(tile.parts * x.shape[0], weight.shape[0], dtype=dtype)
    if out.numel():
        launch = find_launches(x.device)
        exchange = PacketExchange(0, 0, fixed("none"), fixed(0), fixed(False))
        _launch(launch, None, exchange, x, weight, leaves, None, bias, out, tile)
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
        staging = workspace.channel.tensor((workspace.words(2, torch.int32),), torch.int32)
        flags = fixed(form), fixed(0), fixed(n % 4 == 0)
        exchange = PacketExchange(sums.added.shape[0], workspace.words(1, torch.int32), *flags)
        x, weight = pad_leaves(x, weight, leaves)
        tile = _find_tile(x, weight, leaves, takes_parts=False)
        _launch(workspace.channel.launch, channel, exchange, x, weight, leaves, staging, None, None, tile)
        return launch_sums(workspace, channel, None, sums, torch.float32, by_tree=True, norm=norm)
    except BaseException:
        abandon(group, workspace.channel)
        raise


def _find_tile(x: Tensor, weight: Tensor, leaves: int, *, takes_parts: bool) -> Tile:
    (m, k), n = x.shape, weight.shape[0]
    return _choose_tile(m, n, k // leaves, leaves, x.element_size(), x.device, takes_parts)


@lru_cache(maxsize=4096)
def _choose_tile(
    m: int, n: int, leaf: int, leaves: int, itemsize: int, device: torch.device, takes_parts: bool
) -> Tile:
    processors = count_processors(device.index) if device.type == "cuda" else 0
    shared = count_shared_bytes(device)
    return choose_tile(m, n, leaf, leaves, itemsize, processors, takes_parts=takes_parts, shared=shared)


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
    tile: Tile,
) -> None:
    (m, k), n, blocks = x.shape, weight.shape[0], tile.blocks
    gemm, a, b, _ = describe_gemm(x, weight, None, blocks)
    tree = Leaves(k // leaves // blocks.k, fixed(leaves // tile.parts), fixed(tile.parts), fixed(tile.is_turned))
    launch(
        sum_leaves,
        (exchange.form.value, leaves, specialization_key(tile, x, weight, gemm, bias, out)),
        divide_up(m, blocks.m) * divide_up(n, blocks.n) * tile.parts,
        (channel, gemm, tree, exchange, a, b, staging, bias, out),
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        enable_fp_fusion=False,
    )


@triton.jit
def sum_leaves(channel, gemm, leaves, exchange, a, b, staging, bias, out):  # type: ignore[no-untyped-def]
    """A tile of a @ b.T, by a tree over the leaves of k: stored with its bias, or sent ("push", "scatter").

    Of several parts each program has some neighbouring leaves, and stores their sum: parts of a tile come one after
    another, so that they run at one time.
    Signals: none but the packets, of fp32, to all ranks or to the rows' owner.
    Waits: none; the next launch of the call waits for the packets (`sum_and_normalize`), and ends the call.
    Failure: packets are sent only while no wait of this process has failed.
    Reuse: two slots, by the call's number: see `call_slot`.
    """
    row_tiles = tl.cdiv(gemm.m, gemm.block_m)
    index = tl.program_id(0) // leaves.parts
    part = tl.program_id(0) % leaves.parts
    row_tile, column_tile = order_tiles(index, row_tiles, tl.cdiv(gemm.n, gemm.block_n), gemm.group_rows)
    row, column = row_tile * gemm.block_m, column_tile * gemm.block_n
    total = _multiply_tree(gemm, leaves, a, b, row, column, part * (leaves.steps * leaves.count))
    if exchange.form == "none":
        if bias is not None:
            total += load_bias(bias, column, gemm.n, gemm.block_n)
        rows = (row + tl.arange(0, gemm.block_m))[:, None]
        columns = (column + tl.arange(0, gemm.block_n))[None, :]
        mask = (rows < gemm.m) & (columns < gemm.n)
        place = (part * gemm.m + rows).to(tl.int64) * gemm.n + columns
        tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)
    else:
        slot = staging + tiles.call_slot(channel).to(tl.int64) * exchange.slot_words
        publishes = tiles.may_publish(channel)
        send_tile(channel, gemm, exchange, slot, total, row, column, gemm.n, publishes, tl.float32)


@triton.jit
def _multiply_tree(gemm, leaves, a, b, row, column, begin):  # type: ignore[no-untyped-def]
    """fp32 [block_m, block_n]: each leaf's sum, added to its neighbour's, and so on. begin: the first step over k.

    Of 8 leaves in two loops: registers hold what waits for its neighbour in a loop over 4.
    """
    if leaves.count == 8:
        first = _multiply_leaves(gemm, leaves, a, b, row, column, begin, 4)
        total = first + _multiply_leaves(gemm, leaves, a, b, row, column, begin + leaves.steps * 4, 4)
    else:
        total = _multiply_leaves(gemm, leaves, a, b, row, column, begin, leaves.count)
    return total.T if leaves.is_turned else total


@triton.jit
def _multiply_leaves(gemm, leaves, a, b, row, column, begin, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tree's sum over 1, 2 or 4 leaves; one loop, so that loads go on."""
    if leaves.is_turned:
        total = tl.zeros((gemm.block_n, gemm.block_m), tl.float32)
    else:
        total = tl.zeros((gemm.block_m, gemm.block_n), tl.float32)
    one = total
    two = total
    rows = tl.arange(0, gemm.block_m)[:, None]
    columns = tl.arange(0, gemm.block_n)[None, :]
    depth = tl.arange(0, gemm.block_k)
    k = gemm.k // gemm.grain * gemm.grain
    n = gemm.n // gemm.grain * gemm.grain if gemm.transposed else gemm.n
    missing = leaves.steps  # of the leaf
    leaf = missing * 0
    for step in range(leaves.steps * COUNT):
        start = (begin + step) * gemm.block_k
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
        if leaves.is_turned:
            total = tl.dot(y.T, x.T, total, input_precision=gemm.precision)
        else:
            total = tl.dot(x, y, total, input_precision=gemm.precision)
        if COUNT > 1:
            missing -= 1
            if missing == 0:
                one, two, _ = add_leaf(COUNT, leaf, total, one, two, total)
                total = tl.zeros(total.shape, tl.float32)
                missing = leaves.steps
                leaf += 1
    return two if COUNT > 1 else total


@triton.jit
def add_leaf(COUNT: tl.constexpr, leaf, total, one, two, four):  # type: ignore[no-untyped-def]
    """(one, two, four) after a leaf's total: sums of so many leaves that wait for their neighbours, or zeros.

    After the last one the tree's sum over up to 4 leaves is in two, over 8 in four.
    """
    one += total
    ends = leaf % 2 == 1
    two = tl.where(ends, two + one, two)
    one = tl.where(ends, 0.0, one)
    if COUNT == 8:
        ends = leaf % 4 == 3
        four = tl.where(ends, four + two, four)
        two = tl.where(ends, 0.0, two)
    return one, two, four
