# SPDX-License-Identifier: Apache-2.0
"""Reads a BlockMask of torch's flex_attention as causal, window and documents, and checks that it is just that."""

import weakref
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

_CHECKED_AT_ONCE = 256  # blocks on the mask's edge


class MaskOptions(TypedDict):
    """Options of `context_attention` that are its mask."""

    causal: bool
    window: int | None
    documents: Tensor | None


_known: "weakref.WeakKeyDictionary[BlockMask, MaskOptions]" = weakref.WeakKeyDictionary()


def read_block_mask(mask: BlockMask) -> MaskOptions:
    """Options of `context_attention` that are the same mask, of the global sequence. ValueError if it is another mask.

    mask_mod is evaluated where the mask could begin or end, and in all blocks on its edges; blocks that it calls full
    or empty must be so. What was read is kept with the mask.
    """
    found = _known.get(mask)
    if found is None:
        found = _known[mask] = _read(mask)
    return found


def _read(mask: BlockMask) -> MaskOptions:
    length, keys = mask.seq_lengths
    if length != keys:
        raise ValueError(
            f"context attention takes a block_mask of as many queries as keys, not {length} and {keys}: create it for "
            "the global sequence"
        )
    if mask.kv_num_blocks.shape[:2].numel() != 1:
        raise ValueError(
            f"context attention takes a block_mask of all rows and heads, not of {list(mask.kv_num_blocks.shape[:2])}: "
            "create it with B=None and H=None"
        )
    device = mask.kv_num_blocks.device
    zero = torch.zeros((), dtype=torch.int32, device=device)

    def sees(query: Tensor, key: Tensor) -> Tensor:
        if not len(query):  # with which vmap fails in arithmetic
            return query.bool()
        return torch.vmap(mask.mask_mod, in_dims=(None, None, 0, 0))(zero, zero, query, key)

    positions = torch.arange(length, dtype=torch.int32, device=device)
    begins = torch.cat((positions.new_ones(1, dtype=torch.bool), ~sees(positions[1:], positions[:-1])))
    starts = torch.cat((begins.nonzero().flatten(), torch.tensor([length], device=device)))
    causal = not bool(sees(positions[:-1], positions[1:]).any())
    counts = starts.diff()
    longest = int(counts.argmax())
    first, stop = starts[longest : longest + 2].tolist()
    row = positions[first:stop]
    seen = int(sees(torch.full_like(row, stop - 1), row).sum())
    window = seen if causal and 0 < seen < stop - first else None
    documents = starts.to("cpu", torch.int32) if len(starts) > 2 else None
    first_seen, end_seen = _bounds(positions, starts, causal, window)
    _require_same(mask, sees, first_seen, end_seen)
    return {"causal": causal, "window": window, "documents": documents}


def _bounds(positions: Tensor, starts: Tensor, causal: bool, window: int | None) -> tuple[Tensor, Tensor]:
    """Return for each position the first key that it sees, and the first after these that it does not see."""
    document = torch.searchsorted(starts, positions, right=True) - 1
    first, end = starts[document], positions + 1 if causal else starts[document + 1]
    return first if window is None else torch.maximum(first, positions - window + 1), end


def _require_same(mask: BlockMask, sees: Any, first: Tensor, end: Tensor) -> None:
    """ValueError unless each position sees the keys from `first` to `end` alone."""
    (rows, columns), length = mask.BLOCK_SIZE, len(first)
    offsets = torch.arange(rows, device=first.device)
    partial = _list_blocks(mask.kv_num_blocks, mask.kv_indices)
    full = torch.zeros_like(partial)
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        full = _list_blocks(mask.full_kv_num_blocks, mask.full_kv_indices)
    for number in range(partial.shape[0]):  # a row of blocks
        queries = (number * rows + offsets)[number * rows + offsets < length]
        key = torch.arange(columns, device=first.device)
        for_row = torch.arange(partial.shape[1], device=first.device)[:, None] * columns + key
        low, high = first[queries], end[queries]
        begins, stops = for_row[:, 0], (for_row[:, -1] + 1).clamp(max=length)
        is_full = (low.max() <= begins) & (high.min() >= stops)
        is_empty = (high.max() <= begins) | (low.min() >= stops)
        here = partial[number]
        if bool((full[number] & ~is_full).any()) or bool((~full[number] & ~here & ~is_empty).any()):
            _refuse(number * rows)
        for some in here.nonzero().flatten().split(_CHECKED_AT_ONCE):
            keys = for_row[some].flatten()
            keys = keys[keys < length]
            query, key_of = (each.flatten() for each in torch.meshgrid(queries, keys, indexing="ij"))
            expected = (key_of >= first[query]) & (key_of < end[query])
            wrong = sees(query.int(), key_of.int()) != expected
            if bool(wrong.any()):
                _refuse(int(query[wrong][0]), int(key_of[wrong][0]))


def _list_blocks(counts: Tensor, indices: Tensor) -> Tensor:
    """Bool [rows of blocks, blocks]: those that are listed."""
    counts, indices = counts.flatten(0, 2), indices.flatten(0, 2)
    listed = torch.zeros(len(counts), indices.shape[1], dtype=torch.bool, device=counts.device)
    is_used = torch.arange(indices.shape[1], device=counts.device) < counts[:, None]
    row = torch.arange(len(counts), device=counts.device)[:, None].expand_as(indices)
    listed[row[is_used], indices[is_used].long()] = True
    return listed


def _refuse(query: int, key: int | None = None) -> None:
    place = f"position {query}" if key is None else f"position {query} and key {key}"
    raise ValueError(
        "context attention takes a block_mask that is causal, a causal window, documents one after the other, or these "
        f"documents with either; this one is none of them at {place}: give another, or use "
        "torch.nn.attention.flex_attention on gathered keys"
    )
