# SPDX-License-Identifier: Apache-2.0
"""Kernels of rotary position embedding, which read and write each head once.

They compute in fp32 (fp64 for fp64), and round once. `split_heads` and `join_heads` are of one tensor with queries,
keys and values, for `stretto.parallel.layers.fused`; `turn_heads` of queries and keys apart, as transformers has them.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.ops.operator import Autograd, define_operator
from stretto.tiles.launches import launch_cached

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_TILE = 2048  # elements of each half of heads in a program
TURNED = tl.constexpr(_TILE)


@triton.jit
def _find_heads(groups, QUERIES: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, HEADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Find the first halves of this program's HEADS heads, and their token.

    Returns the token, and [HEADS, LANES] each: offsets in the linear's output, in queries, and in keys and values; and
    which of the heads are queries, keys and values. A group has QUERIES queries, a key and a value.
    """
    heads = groups * (QUERIES + 2)
    parts = tl.cdiv(heads, HEADS)
    token = (tl.program_id(0) // parts).to(tl.int64)
    head = tl.program_id(0) % parts * HEADS + tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    there = (head < heads) & (lane < HALF)
    group, place = token * groups + head // (QUERIES + 2), head % (QUERIES + 2)
    at = (token * heads + head) * 2 * HALF + lane
    of_query, of_group = (group * QUERIES + place) * 2 * HALF + lane, group * 2 * HALF + lane
    return (
        token,
        at,
        of_query,
        of_group,
        there & (place < QUERIES),
        there & (place == QUERIES),
        there & (place > QUERIES),
    )


@triton.jit
def _load_angles(cos, sin, token, seq_len, HALF: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cosines and sines of a token's position, [1, LANES]."""
    lane = tl.arange(0, LANES)[None, :]
    at = token % seq_len * HALF + lane
    return tl.load(cos + at, mask=lane < HALF, other=0.0), tl.load(sin + at, mask=lane < HALF, other=0.0)


@triton.jit
def _load_one(query, key, value, is_query, is_key, is_value):  # type: ignore[no-untyped-def]
    """The element at one of three addresses each."""
    of_query, of_key = tl.load(query, mask=is_query, other=0.0), tl.load(key, mask=is_key, other=0.0)
    return tl.where(is_query, of_query, tl.where(is_key, of_key, tl.load(value, mask=is_value, other=0.0)))


@triton.jit
def split_heads(  # type: ignore[no-untyped-def]
    qkv, cos, sin, queries, keys, values, seq_len, groups,
    QUERIES: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """queries, keys, values = the parts of qkv [tokens, groups, QUERIES + 2, 2 * HALF], the first two rotated.

    A program has HEADS heads of one token, and LANES >= HALF features of each half. Bytes: all of qkv is read and
    written once. Synchronization: none: programs own their heads.
    """
    dtype = tl.float64 if qkv.dtype.element_ty == tl.float64 else tl.float32
    token, at, of_query, of_group, is_query, is_key, is_value = _find_heads(groups, QUERIES, HALF, LANES, HEADS)
    c, s = _load_angles(cos, sin, token, seq_len, HALF, LANES)
    c, s = c.to(dtype), s.to(dtype)
    first = tl.load(qkv + at, mask=is_query | is_key | is_value, other=0.0).to(dtype)
    second = tl.load(qkv + at + HALF, mask=is_query | is_key | is_value, other=0.0).to(dtype)
    rotated = (first * c - second * s).to(qkv.dtype.element_ty)
    other = (first * s + second * c).to(qkv.dtype.element_ty)
    tl.store(queries + of_query, rotated, mask=is_query)
    tl.store(queries + of_query + HALF, other, mask=is_query)
    tl.store(keys + of_group, rotated, mask=is_key)
    tl.store(keys + of_group + HALF, other, mask=is_key)
    tl.store(values + of_group, first.to(qkv.dtype.element_ty), mask=is_value)
    tl.store(values + of_group + HALF, second.to(qkv.dtype.element_ty), mask=is_value)


@triton.jit
def join_heads(  # type: ignore[no-untyped-def]
    qkv, cos, sin, queries, keys, values, seq_len, groups,
    QUERIES: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """qkv = queries and keys, rotated by the negative angles, and values: the inverse of `split_heads`.

    A program has HEADS heads of one token, and LANES >= HALF features of each half. Bytes: all heads are read and
    written once. Synchronization: none: programs own their heads.
    """
    dtype = tl.float64 if qkv.dtype.element_ty == tl.float64 else tl.float32
    token, at, of_query, of_group, is_query, is_key, is_value = _find_heads(groups, QUERIES, HALF, LANES, HEADS)
    c, s = _load_angles(cos, sin, token, seq_len, HALF, LANES)
    c, s = c.to(dtype), s.to(dtype)
    first = _load_one(queries + of_query, keys + of_group, values + of_group, is_query, is_key, is_value).to(dtype)
    of_query, of_group = of_query + HALF, of_group + HALF
    second = _load_one(queries + of_query, keys + of_group, values + of_group, is_query, is_key, is_value).to(dtype)
    rotated = tl.where(is_value, first, first * c + second * s)
    other = tl.where(is_value, second, second * c - first * s)
    tl.store(qkv + at, rotated.to(qkv.dtype.element_ty), mask=is_query | is_key | is_value)
    tl.store(qkv + at + HALF, other.to(qkv.dtype.element_ty), mask=is_query | is_key | is_value)


def rotate_and_split(qkv: Tensor, cos: Tensor, sin: Tensor, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """`stretto.parallel.layers.fused.rotate_heads` of a tensor [batch, seq, groups, queries + 2, head_dim] on a GPU."""
    batch, seq_len, groups, _, head_dim = qkv.shape
    heads = (
        qkv.new_empty(batch, seq_len, groups * queries, head_dim),
        qkv.new_empty(batch, seq_len, groups, head_dim),
        qkv.new_empty(batch, seq_len, groups, head_dim),
    )
    _launch(split_heads, qkv.contiguous(), cos, sin, heads, queries)
    return heads


def rotate_back_and_join(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of `rotate_and_split`'s input, for gradients of its results."""
    batch, seq_len, groups, head_dim = key.shape
    queries = query.shape[2] // groups
    qkv = query.new_empty(batch, seq_len, groups, queries + 2, head_dim)
    _launch(join_heads, qkv, cos, sin, (query.contiguous(), key.contiguous(), value.contiguous()), queries)
    return qkv


def _launch(kernel: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: tuple[Tensor, ...], queries: int) -> None:
    batch, seq_len, groups, _, head_dim = qkv.shape
    if not qkv.numel():
        return
    lanes = triton.next_power_of_2(head_dim // 2)
    block = min(triton.next_power_of_2(groups * (queries + 2)), max(1, _TILE // lanes))
    with torch.cuda.device_of(qkv):
        launch_cached(
            kernel, batch * seq_len * triton.cdiv(groups * (queries + 2), block),
            qkv, cos.contiguous(), sin.contiguous(), *heads, seq_len, groups,
            QUERIES=queries, HALF=head_dim // 2, LANES=lanes, HEADS=block,
        )  # fmt: skip


@triton.jit
def turn_heads(  # type: ignore[no-untyped-def]
    queries, keys, cos, sin, new_queries, new_keys, angles, of_query, of_key,
    BACK: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """new = heads * cos + (-second halves, first halves) * sin; of the gradient of that, if BACK.

    queries and keys [tokens, of_query or of_key heads, 2 * HALF]; cos and sin [angles, 2 * HALF]: of each token, or of
    each position, where all sequences have the same. A program has TURNED / LANES heads of one token, and
    LANES >= HALF features of each half. Bytes: all heads are read and written once. Synchronization: none: programs own
    their heads.
    """
    dtype = tl.float64 if queries.dtype.element_ty == tl.float64 else tl.float32
    HEADS: tl.constexpr = TURNED // LANES
    heads = of_query + of_key
    parts = tl.cdiv(heads, HEADS)
    token = (tl.program_id(0) // parts).to(tl.int64)
    head = tl.program_id(0) % parts * HEADS + tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    is_query, is_key = (head < of_query) & (lane < HALF), (head >= of_query) & (head < heads) & (lane < HALF)
    at_query = (token * of_query + head) * 2 * HALF + lane
    at_key = (token * of_key + head - of_query) * 2 * HALF + lane
    angle = token % angles * 2 * HALF + lane
    c, s = tl.load(cos + angle, mask=lane < HALF, other=0.0), tl.load(sin + angle, mask=lane < HALF, other=0.0)
    angle += HALF
    other_c, other_s = (
        tl.load(cos + angle, mask=lane < HALF, other=0.0),
        tl.load(sin + angle, mask=lane < HALF, other=0.0),
    )
    first = tl.load(queries + at_query, mask=is_query, other=0.0).to(dtype)
    first += tl.load(keys + at_key, mask=is_key, other=0.0).to(dtype)
    second = tl.load(queries + at_query + HALF, mask=is_query, other=0.0).to(dtype)
    second += tl.load(keys + at_key + HALF, mask=is_key, other=0.0).to(dtype)
    if BACK:
        turned = first * c.to(dtype) + second * other_s.to(dtype)
        other = second * other_c.to(dtype) - first * s.to(dtype)
    else:
        turned = tl.fma(first, c.to(dtype), -(second * s.to(dtype)))  # as the kernels of decoding
        other = tl.fma(second, other_c.to(dtype), first * other_s.to(dtype))
    turned, other = turned.to(queries.dtype.element_ty), other.to(queries.dtype.element_ty)
    tl.store(new_queries + at_query, turned, mask=is_query)
    tl.store(new_queries + at_query + HALF, other, mask=is_query)
    tl.store(new_keys + at_key, turned, mask=is_key)
    tl.store(new_keys + at_key + HALF, other, mask=is_key)


def _turn(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, is_back: bool) -> tuple[Tensor, Tensor]:
    batch, _, seq_len, head_dim = query.shape
    old = [heads.transpose(1, 2).contiguous() for heads in (query, key)]
    new = [torch.empty_like(heads) for heads in old]
    lanes, of_query, of_key = triton.next_power_of_2(head_dim // 2), query.shape[1], key.shape[1]
    with torch.cuda.device_of(query):
        launch_cached(
            turn_heads, batch * seq_len * triton.cdiv(of_query + of_key, TURNED.value // lanes),
            *old, cos.contiguous(), sin.contiguous(), *new, cos.shape[0] * seq_len, of_query, of_key,
            BACK=is_back, HALF=head_dim // 2, LANES=lanes,
        )  # fmt: skip
    return new[0].transpose(1, 2), new[1].transpose(1, 2)


def _fake_turn(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    query, key = (
        torch.empty_like(heads.transpose(1, 2), memory_format=torch.contiguous_format) for heads in (query, key)
    )
    return query.transpose(1, 2), key.transpose(1, 2)


def _save_angles(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, cos, sin, ctx.is_back = inputs
    ctx.save_for_backward(cos, sin)


def _turn_gradients(ctx: Any, query: Tensor, key: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    return *turn_on_gpu(query, key, cos, sin, not ctx.is_back), None, None, None


turn_on_gpu = define_operator("rotary", _turn, fake=_fake_turn, autograd=Autograd(_save_angles, _turn_gradients))


def rotate_halves(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """heads * cos + (-second halves, first halves) * sin, of queries and keys as `suits_kernel` describes them.

    On a GPU it is one kernel forward and one backward, which compute in fp32 for 16-bit dtypes and round once.
    """
    if query.is_cuda:
        return turn_on_gpu(query, key, cos, sin, False)
    wide = [angle.to(torch.float64 if query.dtype == torch.float64 else torch.float32)[:, None] for angle in (cos, sin)]
    rotated = []
    for heads in (query, key):
        exact = heads.to(wide[0].dtype)
        first, second = exact.chunk(2, -1)
        rotated.append((exact * wide[0] + torch.cat((-second, first), -1) * wide[1]).to(heads.dtype))
    return rotated[0], rotated[1]


def suits_kernel(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """True if `rotate_halves` takes these: queries and keys [batch, heads, seq, head_dim], angles [batch or 1, seq,
    head_dim], of one dtype; an even number of features a head, and no gradients of the angles.
    """
    batch, _, seq_len, head_dim = query.shape
    return (
        query.dtype in _DTYPES
        and {query.dtype} == {key.dtype, cos.dtype, sin.dtype}
        and head_dim % 2 == 0
        and head_dim <= 2 * TURNED.value
        and key.shape == (batch, key.shape[1], seq_len, head_dim)
        and cos.shape == sin.shape
        and cos.shape in ((1, seq_len, head_dim), (batch, seq_len, head_dim))
        and not (cos.requires_grad or sin.requires_grad)
        and query.numel() > 0
    )
