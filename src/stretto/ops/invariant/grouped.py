# SPDX-License-Identifier: Apache-2.0
"""Each expert's rows times its own weight, by the tree over the leaves of k: for experts whose bits must not depend on
the other rows, nor on the number of ranks."""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.memory.gpus import count_processors
from stretto.ops.gemm import divide_up, fixed
from stretto.ops.invariant.kernels import Leaves, add_leaf, choose_blocks, pad_leaves
from stretto.ops.invariant.matmul import multiply_by_torch, reduce_by_tree, round_sum
from stretto.tiles import INTERPRETED
from stretto.tiles.launches import count_shared_bytes, find_launches, kind_of


class ExpertTiles(NamedTuple):
    """Rows, columns and k, the weight's strides by expert, output and input, and (compiled in) the sizes of tiles, the
    power of two that holds the experts, and the precision of fp32."""

    n: Any
    k: Any
    experts: Any
    expert_stride: Any
    n_stride: Any
    k_stride: Any
    block_m: Any
    block_n: Any
    block_k: Any
    places: Any
    precision: Any


def multiply_groups(rows: Tensor, weight: Tensor, offsets: Tensor, leaves: int, group: str = "") -> Tensor:
    """rows [m, k], weight [experts, n, k], offsets int32 [experts + 1] -> [m, n] of rows' dtype; padding has zeros.

    leaves: of the k here. group: the ranks that have the other leaves ("": none), over which sums are added.
    """
    dtype = torch.float32 if group else rows.dtype
    if rows.is_cuda or INTERPRETED.value:
        product = _launch(rows.contiguous(), weight, offsets, leaves, dtype)
    else:
        product = rows.new_zeros(rows.shape[0], weight.shape[1], dtype=dtype)
        for expert, (start, end) in enumerate(pairwise(offsets.tolist())):
            part = multiply_by_torch(rows[start:end], weight[expert], leaves)
            product[start:end] = round_sum(part, None, dtype)
    return reduce_by_tree(product, None, rows.dtype, group) if group else product


def _launch(rows: Tensor, weight: Tensor, offsets: Tensor, leaves: int, dtype: torch.dtype) -> Tensor:
    experts, n, k = weight.shape
    out = rows.new_zeros(rows.shape[0], n, dtype=dtype)
    if not (out.numel() and k):
        return out
    if -(k // leaves) % 16:
        rows, flat = pad_leaves(rows, weight.reshape(-1, k), leaves)
        weight = flat.view(experts, n, -1)
        k = weight.shape[2]
    processors = count_processors(rows.device.index) if rows.is_cuda else 0
    # As many rows as an expert has on average: others take more tiles, of the same bits.
    size = divide_up(rows.shape[0], experts)
    shared = count_shared_bytes(rows.device)
    blocks = choose_blocks(
        size, n, k // leaves, rows.element_size(), processors, has_one_leaf=leaves == 1, shared=shared
    )
    exact = torch.get_float32_matmul_precision() == "highest"
    constants = blocks.m, blocks.n, blocks.k, triton.next_power_of_2(experts), "ieee" if exact else "tf32"
    tiles = ExpertTiles(n, k, experts, *weight.stride(), *map(fixed, constants))
    options = {"num_warps": blocks.num_warps, "num_stages": min(blocks.num_stages, 4)}
    launch = find_launches(rows.device)
    row_tiles = rows.shape[0] // blocks.m + experts
    launch(
        sum_expert_leaves,
        (constants, leaves, dtype, n, k, experts, weight.stride(), kind_of(rows), kind_of(weight)),
        row_tiles * divide_up(n, blocks.n),
        (tiles, Leaves(k // leaves // blocks.k, fixed(leaves)), rows, weight, offsets, out),
        **options,
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def sum_expert_leaves(tiles, leaves, a, b, offsets, out):  # type: ignore[no-untyped-def]
    """A tile of an expert's rows of a times its weight's transpose, by a tree over the leaves of k.

    An expert's tiles begin at number offsets // rows of a tile + expert, so that the host needs no counts; there are
    programs without a tile. Synchronization: none: programs own their tiles.
    """
    column_tiles = tl.cdiv(tiles.n, tiles.block_n)
    tile = tl.program_id(0) // column_tiles
    column = tl.program_id(0) % column_tiles * tiles.block_n
    every = tl.arange(0, tiles.places)
    starts = tl.load(offsets + every, mask=every < tiles.experts, other=0)
    expert = tl.sum(((starts // tiles.block_m + every <= tile) & (every < tiles.experts)).to(tl.int32), 0) - 1
    first = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    row = first + (tile - first // tiles.block_m - expert) * tiles.block_m
    if row < end:
        rows = row + tl.arange(0, tiles.block_m)[:, None]
        columns = column + tl.arange(0, tiles.block_n)[None, :]
        depth = tl.arange(0, tiles.block_k)
        left = a + rows.to(tl.int64) * tiles.k + depth[None, :]
        right = b + tl.cast(expert, tl.int64) * tiles.expert_stride
        right += columns.to(tl.int64) * tiles.n_stride + depth[:, None].to(tl.int64) * tiles.k_stride
        total = tl.zeros((tiles.block_m, tiles.block_n), tl.float32)
        one = tl.zeros((tiles.block_m, tiles.block_n), tl.float32)
        two = one
        four = one
        for step in range(leaves.steps * leaves.count):
            x = tl.load(left + step * tiles.block_k, mask=rows < end, other=0)
            y = tl.load(
                right + tl.cast(step * tiles.block_k, tl.int64) * tiles.k_stride, mask=columns < tiles.n, other=0
            )
            total = tl.dot(x, y, total, input_precision=tiles.precision)
            if leaves.count > 1:  # noqa: SIM102 - known when it is compiled
                if step % leaves.steps == leaves.steps - 1:
                    one, two, four = add_leaf(leaves.count, step // leaves.steps, total, one, two, four)
                    total = tl.zeros((tiles.block_m, tiles.block_n), tl.float32)
        if leaves.count > 1:
            total = four if leaves.count == 8 else two
        place = rows.to(tl.int64) * tiles.n + columns
        tl.store(out + place, total.to(out.dtype.element_ty), mask=(rows < end) & (columns < tiles.n))
