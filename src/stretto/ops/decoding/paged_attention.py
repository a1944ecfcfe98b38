# SPDX-License-Identifier: Apache-2.0
"""Attention of new tokens to a paged cache of keys and values: single tokens and chunks of prompts in one call."""

import importlib.util

import torch
from torch import Tensor

from stretto.memory.groups import is_debugging
from stretto.ops.config import IMPLEMENTATIONS
from stretto.ops.decoding.paged_kernels import SPLIT, PagedCall, attend_by_kernels, choose_singles, find_tiles
from stretto.ops.operands import (
    DTYPES,
    describe_tensor,
    require_device,
    require_no_gradients,
    show_shape,
    takes_tensors,
)
from stretto.ops.operator import define_operator
from stretto.quantities import to_whole
from stretto.tiles import INTERPRETED

MAX_SIZE = 256
"""The largest size of a head: a program keeps its queries' results in registers."""

FLASH_PAGE = 256
"""flash-attn's pages are multiples of it."""


@takes_tensors
def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    query_offsets: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    invariant: bool = False,
    implementation: str = "auto",
) -> Tensor:
    """Causal attention of each sequence's last tokens to all of its tokens, whose keys lie in pages: [tokens, h, d].

    q: [tokens, heads, d]: the sequences' new tokens, one sequence after another. query_offsets: int32 [sequences + 1],
    where each sequence's tokens begin in q, and the end of the last; None: one token a sequence. key_cache,
    value_cache: [pages, page size, kv heads, d], already with the new tokens' own; heads are a multiple of kv heads,
    and head i reads kv head i // (heads / kv heads). block_table: int32 [sequences, most pages]: the page of each page
    size's tokens of a sequence; entries behind a sequence's last page are not read. lengths: int32 [sequences]: tokens
    of each sequence with the new ones, so that its last new token is at position length - 1; a sequence of length 0 has
    zeros. Rows of q behind the last offset are zeros or garbage of no one: they are not read, and their output is 0.
    scale: of scores, by default 1 / sqrt(d). window: a token attends to itself and the window - 1 tokens before it.

    The host reads none of the tensors (with STRETTO_DEBUG=1 it checks pages, lengths and offsets, outside of captures):
    calls are captured in CUDA graphs, and lengths and tables may then change in place. bf16, fp16 or fp32, all of one
    dtype; scores and sums are fp32.

    invariant: a token's bits depend on its sequence alone: neither on the other sequences, nor on the chunk that it
    comes in, nor on the number of heads here; keys are split at fixed positions. implementation: "auto", "kernel" or
    "library" (flash-attn, if installed and able, else torch). There are no gradients. ValueError for other input.
    """
    require_no_gradients("paged_attention", q, key_cache, value_cache)
    window = to_whole(window)
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"paged_attention: window must be a number of tokens from 1 on, or None, not {window!r}")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, not {implementation!r}")
    scale = max(q.shape[-1:].numel(), 1) ** -0.5 if scale is None else float(scale)
    inputs = q, key_cache, value_cache, block_table, lengths, query_offsets
    return _call(*inputs, scale, window or 0, invariant, implementation)


def _run(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    query_offsets: Tensor | None,
    scale: float,
    window: int,
    invariant: bool,
    implementation: str,
) -> Tensor:
    call = PagedCall(
        q, key_cache, value_cache, block_table, lengths, query_offsets, scale, window, is_invariant=invariant
    )
    _require(call)
    if is_debugging() and not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        _require_places(call)
    obstacle = find_obstacle(call)
    if implementation == "library" or (implementation == "auto" and obstacle):
        return _attend_by_library(call)
    if obstacle:
        raise ValueError(f'paged_attention: no kernel can run: {obstacle}; implementation="library" can')
    return attend_by_kernels(call)


def find_obstacle(call: PagedCall) -> str:
    """Say why the kernels cannot run this call; "" if they can."""
    if call.q.device.type == "cpu" and not INTERPRETED.value:
        return "on CPUs kernels are interpreted, which takes TRITON_INTERPRET=1 before anything imports triton"
    if call.q.shape[2] > MAX_SIZE:
        return f"heads have up to {MAX_SIZE} numbers, not {call.q.shape[2]}"
    if call.keys.stride() != call.values.stride():
        return f"the caches have different strides, {call.keys.stride()} and {call.values.stride()}"
    try:
        find_tiles(call, choose_singles(call))
    except ValueError as error:
        return str(error)
    return ""


def _attend_by_library(call: PagedCall) -> Tensor:
    """Attend by flash-attn, where it is installed and takes the call, else by torch."""
    if call.is_invariant:
        return attend_to_splits(call)
    if call.offsets is not None or not call.q.is_cuda or call.q.dtype == torch.float32:
        return attend_by_torch(call)
    if call.keys.shape[1] % FLASH_PAGE or importlib.util.find_spec("flash_attn") is None:
        return attend_by_torch(call)
    from flash_attn import flash_attn_with_kvcache

    return flash_attn_with_kvcache(
        call.q[:, None], call.keys, call.values, cache_seqlens=call.lengths, block_table=call.table,
        softmax_scale=call.scale, causal=True, window_size=(call.window - 1 if call.window else -1, -1),
    )[:, 0]  # fmt: skip


def attend_by_torch(call: PagedCall) -> Tensor:
    """The attention by torch's operators, without reading a tensor on the host: each token with a row of all keys."""
    q, key_cache, value_cache, block_table, _, _, scale, window, _ = call
    tokens, heads, size = q.shape
    page_size, kv_heads = key_cache.shape[1:3]
    sequences, most = block_table.shape[0], block_table.shape[1] * page_size
    sequence, position = _place_tokens(call)
    is_there = position >= 0
    key_index = torch.arange(most, device=q.device)
    is_seen = (key_index <= position[:, None]) & is_there[:, None]
    if window:
        is_seen &= key_index > position[:, None] - window
    pages = block_table.long().clamp(0, key_cache.shape[0] - 1)
    keys, values = (cache[pages].reshape(sequences, most, kv_heads, size).float() for cache in (key_cache, value_cache))
    grouped = q.view(tokens, kv_heads, heads // kv_heads, size).float()
    out = torch.empty_like(q)
    step = max(1, (1 << 24) // max(1, most * kv_heads * size))
    for first in range(0, tokens, step):
        part = slice(first, first + step)
        scores = torch.einsum("tkgd,tskd->tkgs", grouped[part], keys[sequence[part]]) * scale
        seen = is_seen[part, None, None]
        weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1).masked_fill(~seen, 0)
        values_seen = values[sequence[part]].masked_fill(~is_seen[part, :, None, None], 0)
        out[part] = torch.einsum("tkgs,tskd->tkgd", weights, values_seen).flatten(1, 2).to(q.dtype)
    return out


def attend_to_splits(call: PagedCall) -> Tensor:
    """The invariant attention by torch: fixed splits of the keys, with partial results that are merged in order.

    Products are elementwise, and are added up along contiguous rows of one length, for which torch has one order.
    """
    (tokens, heads, size), kv_heads = call.q.shape, call.keys.shape[2]
    sequence, position = _place_tokens(call)
    keys, values = (
        cache[call.table.long().clamp(0, cache.shape[0] - 1)].flatten(1, 2) for cache in (call.keys, call.values)
    )
    out = torch.zeros_like(call.q)
    step = max(1, (1 << 22) // (heads * SPLIT * size))
    for first in range(0, tokens, step):
        part = slice(first, first + step)
        places, numbers = position[part], sequence[part]
        query = call.q[part].view(-1, kv_heads, heads // kv_heads, 1, size).float()
        most = query.new_full((*query.shape[:3], 1), -torch.inf)
        total, result = torch.zeros_like(most), query.new_zeros(*query.shape[:3], size)
        for begin in range(0, int(places.max()) + 1, SPLIT):
            index = torch.arange(begin, begin + SPLIT, device=query.device)
            seen = (index <= places[:, None]) & (index < keys.shape[1])
            if call.window:
                seen &= index > places[:, None] - call.window
            index, there = index.clamp(max=keys.shape[1] - 1), seen[:, None, None]
            key, value = (
                each[numbers[:, None], index].masked_fill(~seen[..., None, None], 0).movedim(1, 2).float()
                for each in (keys, values)
            )
            key = key.contiguous().unsqueeze(2)
            value = value.transpose(-1, -2).contiguous().unsqueeze(2)
            scores = ((query * key).sum(-1).contiguous() * call.scale).masked_fill(~there, -torch.inf)
            larger = torch.maximum(most, scores.amax(-1, keepdim=True))
            base = larger.masked_fill(larger == -torch.inf, 0)
            weights, shrink = _exponential(scores - base), _exponential(most - base)
            total = total * shrink + weights.sum(-1, keepdim=True)
            rounded = weights.to(call.q.dtype).float()
            result = result * shrink + (rounded.unsqueeze(-2) * value).sum(-1)
            most = larger
        out[part] = (result / total.masked_fill(total == 0, 1)).flatten(1, 2).to(out.dtype)
    return out


def _exponential(x: Tensor) -> Tensor:
    """e^x, rounded from fp64: on CPUs fp32 has other instructions for a tensor's last elements."""
    return x.double().exp().float()


def _place_tokens(call: PagedCall) -> tuple[Tensor, Tensor]:
    """(the sequence, the position in it, or -1) of each token, int64 [tokens]."""
    lengths, index = call.lengths.long(), torch.arange(call.q.shape[0], device=call.q.device)
    if call.offsets is None:
        return index, lengths - 1
    offsets = call.offsets.long()
    sequence = torch.searchsorted(offsets, index, right=True) - 1
    is_there = (sequence >= 0) & (sequence < len(lengths))
    sequence = sequence.clamp(0, len(lengths) - 1)
    return sequence, torch.where(is_there, lengths[sequence] - offsets[sequence + 1] + index, -1)


def _require(call: PagedCall) -> None:
    """ValueError for tensors that do not go together."""
    q, key_cache, value_cache, block_table, lengths, query_offsets, *_ = call
    if q.dim() != 3 or key_cache.dim() != 4 or key_cache.shape != value_cache.shape:
        raise ValueError(
            "paged_attention takes q [tokens, heads, d] and caches [pages, page size, kv heads, d] of one shape, not "
            f"{show_shape(q)}, {show_shape(key_cache)} and {show_shape(value_cache)}"
        )
    heads, size = q.shape[1:]
    kv_heads = key_cache.shape[2]
    if key_cache.shape[3] != size or heads % kv_heads:
        raise ValueError(
            f"paged_attention: q has {heads} heads of {size} and the cache {kv_heads} of {key_cache.shape[3]}: the "
            "sizes are equal, and the heads a multiple of the cache's"
        )
    for name, one in (("key_cache", key_cache), ("value_cache", value_cache)):
        if one.dtype != q.dtype or one.device != q.device:
            raise ValueError(f"paged_attention: {name} must be of {q.dtype} on {q.device}, not {describe_tensor(one)}")
        if one.stride(3) != 1:
            raise ValueError(f"paged_attention: the last dim of {name} is contiguous, not of strides {one.stride()}")
    if q.dtype not in DTYPES or not q.is_contiguous():
        kinds = ", ".join(map(str, DTYPES))
        raise ValueError(f"paged_attention takes a contiguous q of {kinds}, not {describe_tensor(q)}")
    require_device("paged_attention", "q is", q)
    sequences = lengths.shape[0] if lengths.dim() == 1 else -1
    most = block_table.shape[-1:].numel()
    shapes = {"block_table": (block_table, (sequences, most)), "lengths": (lengths, (sequences,))}
    if query_offsets is not None:
        shapes["query_offsets"] = query_offsets, (sequences + 1,)
    elif sequences != q.shape[0]:
        raise ValueError(
            f"paged_attention: {q.shape[0]} tokens of {sequences} sequences: without query_offsets each has one token"
        )
    for name, (one, shape) in shapes.items():
        if one.shape != shape or one.dtype != torch.int32 or one.device != q.device or not one.is_contiguous():
            wanted = f"int32 {list(shape)} on {q.device}, contiguous"
            raise ValueError(f"paged_attention: {name} must be {wanted}, not {describe_tensor(one)}")


def _require_places(call: PagedCall) -> None:
    """ValueError for lengths, pages and offsets that lie outside of the table, the cache and the tokens."""
    page, width = call.keys.shape[1], call.table.shape[1]
    is_used = torch.arange(width, device=call.table.device) * page < call.lengths[:, None]
    ranges = {"lengths": (call.lengths, width * page), "pages": (call.table[is_used], call.keys.shape[0] - 1)}
    if call.offsets is not None:
        ranges["query_offsets"] = call.offsets, call.q.shape[0]
        if (call.offsets.diff() < 0).any():
            raise ValueError(f"paged_attention: query_offsets fall, but are to grow: {call.offsets.tolist()}")
    for name, (numbers, most) in ranges.items():
        low, high = (int(one) for one in torch.aminmax(numbers)) if numbers.numel() else (0, 0)
        if low < 0 or high > most:
            raise ValueError(f"paged_attention: {name} are from 0 to {most} here, not from {low} to {high}")


def _fake(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, lengths: Tensor, query_offsets: Tensor
) -> Tensor:
    _require(PagedCall(q, key_cache, value_cache, block_table, lengths, query_offsets, 1.0, 0, is_invariant=False))
    return torch.empty_like(q)


_call = define_operator("paged_attention", _run, fake=_fake)
