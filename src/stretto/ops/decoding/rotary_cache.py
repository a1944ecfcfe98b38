# SPDX-License-Identifier: Apache-2.0
"""Rotary positions of queries and keys, and the cache's new keys and values, in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.tiles import INTERPRETED
from stretto.tiles.launches import launch_cached

_TILE = 1024  # elements of each half of heads in a program
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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
    as `stretto.ops.rotary.rotate_halves`. `suits_kernel` says what it takes. There are no gradients.
    """
    (tokens, heads, size), kv_heads = query.shape, key.shape[1]
    out = query.new_empty(tokens, heads, size)
    lanes = triton.next_power_of_2(size // 2)
    with torch.cuda.device_of(query):
        launch_cached(
            rotate_and_store_heads, tokens * triton.cdiv(heads + 2 * kv_heads, max(1, _TILE // lanes)),
            query, key, value, cos, sin, out, key_cache, value_cache, places, query.stride(0), key.stride(0),
            value.stride(0), heads, kv_heads, HALF=size // 2, LANES=lanes, HEADS=max(1, _TILE // lanes),
        )  # fmt: skip
    return out


@triton.jit
def rotate_and_store_heads(  # type: ignore[no-untyped-def]
    queries, keys, values, cos, sin, out, key_cache, value_cache, places, query_stride, key_stride, value_stride,
    of_query, of_key, HALF: tl.constexpr, LANES: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """out, key_cache = rotated queries and keys; value_cache = values; the last two at the token's place.

    A program has HEADS of one token's heads, queries first, then keys and values, and LANES >= HALF features of each
    half. Bytes: all heads are read and written once. Synchronization: none: programs own their heads, and tokens have
    places of their own.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    heads = of_query + 2 * of_key
    parts = tl.cdiv(heads, HEADS)
    token = (tl.program_id(0) // parts).to(tl.int64)
    head = tl.program_id(0) % parts * HEADS + tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    there = lane < HALF
    is_query = (head < of_query) & there
    is_key = (head >= of_query) & (head < of_query + of_key) & there
    is_value = (head >= of_query + of_key) & (head < heads) & there
    query = queries + token * query_stride + head * 2 * HALF + lane
    key = keys + token * key_stride + (head - of_query) * 2 * HALF + lane
    value = values + token * value_stride + (head - of_query - of_key) * 2 * HALF + lane
    angle = token * 2 * HALF + lane
    c, s = tl.load(cos + angle, mask=there, other=0.0), tl.load(sin + angle, mask=there, other=0.0)
    other_c = tl.load(cos + angle + HALF, mask=there, other=0.0)
    other_s = tl.load(sin + angle + HALF, mask=there, other=0.0)
    first = tl.load(query, mask=is_query, other=0.0).to(tl.float32)
    first += tl.load(key, mask=is_key, other=0.0).to(tl.float32)
    second = tl.load(query + HALF, mask=is_query, other=0.0).to(tl.float32)
    second += tl.load(key + HALF, mask=is_key, other=0.0).to(tl.float32)
    turned = (first * c.to(tl.float32) - second * s.to(tl.float32)).to(dtype)
    other = (second * other_c.to(tl.float32) + first * other_s.to(tl.float32)).to(dtype)
    at = out + (token * of_query + head) * 2 * HALF + lane
    tl.store(at, turned, mask=is_query)
    tl.store(at + HALF, other, mask=is_query)
    row = tl.load(places + token) * of_key
    at = key_cache + (row + head - of_query) * 2 * HALF + lane
    tl.store(at, turned, mask=is_key)
    tl.store(at + HALF, other, mask=is_key)
    at = value_cache + (row + head - of_query - of_key) * 2 * HALF + lane
    tl.store(at, tl.load(value, mask=is_value, other=0.0), mask=is_value)
    tl.store(at + HALF, tl.load(value + HALF, mask=is_value, other=0.0), mask=is_value)
