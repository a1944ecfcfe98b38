# SPDX-License-Identifier: Apache-2.0
"""Rotary positions of queries and keys, and the cache's new keys and values, in one kernel."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.ops.gemm import fixed
from stretto.tiles import INTERPRETED, kind_of
from stretto.tiles.launches import find_launches

_TILE = 1024  # elements of each half of heads in a program
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class HeadTensors(NamedTuple):
    """The tensors of a call as the kernel takes them, and elements from a token's queries, keys, values to the next."""

    query: Any
    key: Any
    value: Any
    cos: Any
    sin: Any
    out: Any
    key_cache: Any
    value_cache: Any
    places: Any
    query_stride: Any
    key_stride: Any
    value_stride: Any


class HeadTiles(NamedTuple):
    """Sizes that the kernel is compiled for: queries and KV heads of a token, features of half a head and the power of
    two that holds them, and heads of a program."""

    queries: Any
    keys: Any
    half: Any
    lanes: Any
    heads: Any


def suits_kernel(query: Tensor, key: Tensor, value: Tensor, cos: Tensor) -> bool:
    """True if `rotate_and_store` runs here and takes these: heads of one even size and dtype, of contiguous numbers."""
    sizes = {query.shape[-1], key.shape[-1], value.shape[-1], cos.shape[-1]}
    is_alike = {query.dtype} == {key.dtype, value.dtype, cos.dtype} and len(sizes) == 1
    is_placed = all(each.stride(-1) == 1 and each.stride(-2) == each.shape[-1] for each in (query, key, value))
    fits = query.shape[-1] % 2 == 0 and query.shape[-1] <= 2 * _TILE and query.dtype in _DTYPES and query.numel() > 0
    return (query.is_cuda or INTERPRETED.value) and is_alike and is_placed and fits


def rotate_and_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    places: Tensor,
) -> Tensor:
    """Rotated queries [tokens, heads, d], contiguous; rotated keys, and values, are written to their places.

    query [tokens, heads, d], key and value [tokens, kv heads, d]: a token's heads are contiguous, tokens lie anywhere.
    cos, sin: [tokens, d], contiguous. The caches are [pages, page, kv heads, d], contiguous, and places int64 [tokens],
    their rows, each at most once. Rotated: heads * cos + (-second halves, first halves) * sin, in fp32, rounded once,
    with the bits of `stretto.ops.rotary.rotate_halves`. `suits_kernel` says what it takes. There are no gradients.
    """
    (tokens, heads, size), kv_heads = query.shape, key.shape[1]
    out = query.new_empty(tokens, heads, size)
    lanes = triton.next_power_of_2(size // 2)
    sizes = heads, kv_heads, size // 2, lanes, max(1, _TILE // lanes)
    operands = query, key, value, cos, sin, out, key_cache, value_cache, places
    tensors = HeadTensors(*operands, query.stride(0), key.stride(0), value.stride(0))
    programs = tokens * triton.cdiv(heads + 2 * kv_heads, sizes[-1])
    launch = find_launches(query.device)
    launch(
        rotate_and_store_heads,
        (sizes, *map(kind_of, tensors)),
        programs,
        (tensors, HeadTiles(*map(fixed, sizes))),
        num_warps=4,
    )
    return out


@triton.jit
def rotate_and_store_heads(tensors, tiles):  # type: ignore[no-untyped-def]
    """out, key_cache = rotated queries and keys; value_cache = values; the last two at the token's place.

    A program has some heads of one token, queries first, then keys and values, and all features of each half. Bytes:
    all heads are read and written once. Synchronization: none: programs own their heads, and tokens have places of
    their own.
    """
    dtype: tl.constexpr = tensors.out.dtype.element_ty
    heads = tiles.queries + 2 * tiles.keys
    parts = tl.cdiv(heads, tiles.heads)
    token = (tl.program_id(0) // parts).to(tl.int64)
    head = tl.program_id(0) % parts * tiles.heads + tl.arange(0, tiles.heads)[:, None]
    lane = tl.arange(0, tiles.lanes)[None, :]
    there = lane < tiles.half
    is_query = (head < tiles.queries) & there
    is_key = (head >= tiles.queries) & (head < tiles.queries + tiles.keys) & there
    is_value = (head >= tiles.queries + tiles.keys) & (head < heads) & there
    query = tensors.query + token * tensors.query_stride + head * 2 * tiles.half + lane
    key = tensors.key + token * tensors.key_stride + (head - tiles.queries) * 2 * tiles.half + lane
    value = tensors.value + token * tensors.value_stride + (head - tiles.queries - tiles.keys) * 2 * tiles.half + lane
    angle = token * 2 * tiles.half + lane
    c, s = tl.load(tensors.cos + angle, mask=there, other=0.0), tl.load(tensors.sin + angle, mask=there, other=0.0)
    other_c = tl.load(tensors.cos + angle + tiles.half, mask=there, other=0.0)
    other_s = tl.load(tensors.sin + angle + tiles.half, mask=there, other=0.0)
    first = tl.load(query, mask=is_query, other=0.0).to(tl.float32)
    first += tl.load(key, mask=is_key, other=0.0).to(tl.float32)
    second = tl.load(query + tiles.half, mask=is_query, other=0.0).to(tl.float32)
    second += tl.load(key + tiles.half, mask=is_key, other=0.0).to(tl.float32)
    turned = tl.fma(first, c.to(tl.float32), -(second * s.to(tl.float32))).to(dtype)
    other = tl.fma(second, other_c.to(tl.float32), first * other_s.to(tl.float32)).to(dtype)
    at = tensors.out + (token * tiles.queries + head) * 2 * tiles.half + lane
    tl.store(at, turned, mask=is_query)
    tl.store(at + tiles.half, other, mask=is_query)
    row = tl.load(tensors.places + token) * tiles.keys
    at = tensors.key_cache + (row + head - tiles.queries) * 2 * tiles.half + lane
    tl.store(at, turned, mask=is_key)
    tl.store(at + tiles.half, other, mask=is_key)
    at = tensors.value_cache + (row + head - tiles.queries - tiles.keys) * 2 * tiles.half + lane
    tl.store(at, tl.load(value, mask=is_value, other=0.0), mask=is_value)
    tl.store(at + tiles.half, tl.load(value + tiles.half, mask=is_value, other=0.0), mask=is_value)
