# SPDX-License-Identifier: Apache-2.0
"""Launches of the kernels of inference, to compile them without a GPU: (kernel, arguments, options) by name."""

import torch
import triton.language as tl
from tests.tiles.machine_code import make_channel

from stretto.ops.decoding import best_tokens, rotary_cache
from stretto.ops.decoding import paged_kernels as paged
from stretto.ops.gemm import describe_gemm, fixed
from stretto.ops.invariant import grouped
from stretto.ops.invariant import kernels as invariant
from stretto.ops.row_sums import kernel as row_sums
from stretto.ops.row_sums import norm
from stretto.ops.small_m import PacketExchange

HALF = torch.zeros(256, dtype=torch.bfloat16)
FLOATS = torch.zeros(256)
WORDS = torch.zeros(256, dtype=torch.int32)
LONGS = torch.zeros(64, dtype=torch.int64)
RMS = norm.Norm("rms", 1e-5)


def describe_new(size, heads=32, kv_heads=8):
    row = (heads + 2 * kv_heads) * size
    return paged.NewTokens(*(HALF.clone() for _ in range(4)), row, row, row)


def launch_paged(name, config, *, is_invariant=False, size=128, group=4, dtype=torch.bfloat16, new=False):
    one, other = (torch.zeros(256, dtype=dtype) for _ in range(2))
    split = paged.SPLIT if is_invariant else 0
    dims = max(16, 1 << (size - 1).bit_length())
    heads = 1 << (group - 1).bit_length()
    constants = config.rows, config.keys, group, size, dims, 16, 0, split, "tf32", 64, heads, config.is_turned
    cache = paged.PagedCache(one.clone(), other.clone(), WORDS, WORDS, WORDS, 8, 64, 16 * 8 * size, 8 * size, size)
    arguments = {
        "attend_singles": (
            one,
            other,
            FLOATS,
            FLOATS,
            4,
            4,
            0.1,
            describe_new(size) if new else None,
            WORDS,
        ),
        "attend_chunks": (one, other, 64, 0.1),
    }[name]
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": not is_invariant}
    return getattr(paged, name), (cache, paged.PagedTiles(*map(fixed, constants)), *arguments), options


def launch_add_and_normalize(*, is_exact=False):
    rows, block, num_warps = norm.find_tile(4096)
    form = norm.describe_norm(RMS._replace(is_exact=is_exact), rows, block)
    tensors = norm.NormRows(None, HALF.clone(), FLOATS, None, HALF.clone(), HALF.clone())
    return norm.add_and_normalize, (form, tensors, HALF.clone(), 64, 4096), {"num_warps": num_warps}


def launch_sums(*, wire=tl.bfloat16, by_tree=False, sends=True):
    channel = make_channel("p2p")._replace(begun_in_kernel=tl.constexpr(True))
    constants = wire, by_tree, True, sends and not by_tree, 4096 * wire.primitive_bitwidth // 32
    packets = row_sums.PacketRows(1 << 20, *map(fixed, constants))
    form = norm.describe_norm(RMS._replace(is_exact=by_tree), 1, 4096)
    tensors = norm.NormRows(None, HALF.clone(), FLOATS, None, HALF.clone(), HALF.clone())
    arguments = channel, packets, form, WORDS, HALF.clone() if sends else None, tensors, 64, 4096
    return row_sums.sum_and_normalize, arguments, {"num_warps": 8}


def launch_leaves(m, n, k, leaves, form="none", *, transposed=False, tile=None):
    given = {"takes_parts": form == "none", "shared": 227 << 10}
    blocks, parts, is_turned = tile or invariant.choose_tile(m, n, k // leaves, leaves, 2, 132, **given)
    x = torch.empty(m, k, dtype=torch.bfloat16)
    weight = torch.empty(k, n, dtype=torch.bfloat16).t() if transposed else torch.empty(n, k, dtype=torch.bfloat16)
    gemm, a, b, _ = describe_gemm(x, weight, None, blocks)
    tree = invariant.Leaves(k // leaves // blocks.k, fixed(leaves // parts), fixed(parts), fixed(is_turned))
    exchange = PacketExchange(m, 1 << 20, fixed(form), fixed(0), fixed(True))
    channel = None if form == "none" else make_channel("p2p")._replace(begun_in_kernel=tl.constexpr(True))
    out = torch.empty(parts * m, n, dtype=torch.bfloat16) if form == "none" else None
    arguments = channel, gemm, tree, exchange, a, b, None if form == "none" else WORDS, None, out
    options = {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages, "enable_fp_fusion": False}
    return invariant.sum_leaves, arguments, options


def launch_rotation(*, heads=32, kv_heads=8, size=128):
    row = (heads + 2 * kv_heads) * size
    tensors = (*(HALF.clone() for _ in range(8)), torch.zeros(64, dtype=torch.int64), row, row, row)
    tiles = rotary_cache.HeadTiles(*map(fixed, (heads, kv_heads, size // 2, size // 2, 2048 // size)))
    return rotary_cache.rotate_and_store_heads, (rotary_cache.HeadTensors(*tensors), tiles), {"num_warps": 4}


def launch_expert_leaves(n, k, leaves, experts=8, rows=64):
    blocks = invariant.choose_blocks(rows, n, k // leaves, 2, 132, has_one_leaf=leaves == 1)
    constants = blocks.m, blocks.n, blocks.k, experts, "tf32"
    tiles = grouped.ExpertTiles(n, k, experts, n * k, k, 1, *map(fixed, constants))
    tree = invariant.Leaves(k // leaves // blocks.k, fixed(leaves))
    out = FLOATS if leaves > 1 else HALF.clone()
    arguments = tiles, tree, HALF, HALF.clone(), WORDS, out
    options = {"num_warps": blocks.num_warps, "num_stages": min(blocks.num_stages, 4), "enable_fp_fusion": False}
    return grouped.sum_expert_leaves, arguments, options


def launch_find_parts(dtype=torch.bfloat16):
    return best_tokens.find_parts, (torch.zeros(256, dtype=dtype), FLOATS, 0, 64128, 32, 2048), {"num_warps": 8}


def launch_merge_parts(*, sends=True):
    return best_tokens.merge_parts, (FLOATS, FLOATS.clone() if sends else None, LONGS, 32, 2, 4, 32), {"num_warps": 1}


LAUNCHES = {
    "ops.decoding.best_tokens.find_parts": launch_find_parts,
    "ops.decoding.best_tokens.merge_parts": launch_merge_parts,
    "ops.decoding.paged_kernels.attend_chunks": lambda: launch_paged("attend_chunks", paged.CHUNKS),
    "ops.decoding.paged_kernels.attend_singles": lambda: launch_paged("attend_singles", paged.SINGLES, new=True),
    "ops.decoding.rotary_cache.rotate_and_store_heads": launch_rotation,
    "ops.invariant.grouped.sum_expert_leaves": lambda: launch_expert_leaves(4096, 4096, 8),
    "ops.invariant.kernels.sum_leaves": lambda: launch_leaves(64, 4096, 4096, 8, "push"),
    "ops.row_sums.kernel.sum_and_normalize": launch_sums,
    "ops.row_sums.norm.add_and_normalize": launch_add_and_normalize,
}
