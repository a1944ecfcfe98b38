# SPDX-License-Identifier: Apache-2.0
"""Random paged caches: of the same seed the same numbers, whatever the dtype."""

from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """Sequences: their new tokens, their lengths with these, and the shape of heads and pages."""

    counts: list[int]
    lengths: list[int]
    heads: int = 4
    kv_heads: int = 2
    size: int = 16
    page: int = 16
    window: int | None = None


class PagedOperands(NamedTuple):
    """operands: q, key_cache, value_cache, block_table, lengths. offsets: None for one token a sequence."""

    operands: tuple[Tensor, ...]
    offsets: Tensor | None


def make_batch(
    batch: Batch, dtype: torch.dtype, device: str = "cpu", *, wide: bool = False, seed: int = 0
) -> PagedOperands:
    """wide: the same numbers, rounded to dtype, in fp32. Pages that belong to no sequence are NaN."""
    generator = torch.Generator().manual_seed(seed)
    counts, lengths, heads, kv_heads, size, page, _ = batch
    width = max(-(-length // page) for length in lengths) + 1
    used = [-(-length // page) for length in lengths]
    pages = sum(used) + 3
    order = torch.randperm(pages, generator=generator).tolist()
    keys, values = (torch.full((pages, page, kv_heads, size), torch.nan) for _ in range(2))
    table = torch.full((len(lengths), width), -1, dtype=torch.int32)
    for number, (count, length) in enumerate(zip(used, lengths, strict=True)):
        own = [order.pop() for _ in range(count)]
        table[number, :count] = torch.tensor(own, dtype=torch.int32)
        for cache in (keys, values):
            rows = torch.randn(length, kv_heads, size, generator=generator)
            filled = torch.full((count * page, kv_heads, size), torch.nan)
            filled[:length] = rows
            cache[own] = filled.view(count, page, kv_heads, size)
    q = torch.randn(sum(counts), heads, size, generator=generator)
    given = [one.to(dtype).to(torch.float32 if wide else dtype) for one in (q, keys, values)]
    tensors = *given, table, torch.tensor(lengths, dtype=torch.int32)
    offsets = None if counts == [1] * len(counts) else torch.tensor([0, *counts]).cumsum(0).int().to(device)
    return PagedOperands(tuple(one.to(device) for one in tensors), offsets)
