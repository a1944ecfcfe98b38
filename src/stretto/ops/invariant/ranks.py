# SPDX-License-Identifier: Apache-2.0
"""Sums over ranks by the binary tree that continues the tree of a rank's leaves, in fp32."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from stretto.ops.operator import find_group, gather_rows


def add_by_tree(parts: Sequence[Tensor]) -> Tensor:
    """The parts' sum: neighbours first, then sums of neighbours, and so on. Their number is a power of two."""
    while len(parts) > 1:
        parts = [first + second for first, second in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def scatter_by_tree(partial: Tensor, group: str) -> Tensor:
    """This rank's rows [m / world, n] of the sum of all ranks' fp32 [m, n], by an all-to-all."""
    world = find_group(group).size()
    if world == 1:
        return partial
    sizes = [partial.shape[0] // world] * world
    functional_ops = torch.ops._c10d_functional
    received = functional_ops.wait_tensor(functional_ops.all_to_all_single(partial, sizes, sizes, group))
    return add_by_tree(received.unflatten(0, (world, sizes[0])).unbind())


def reduce_by_tree(partial: Tensor, bias: Tensor | None, dtype: torch.dtype, group: str) -> Tensor:
    """The sum of all ranks' fp32 [m, n], + bias, rounded to dtype, on all ranks; each adds up some rows."""
    world, rows = find_group(group).size(), partial.shape[0]
    if world == 1:
        return round_sum(partial, bias, dtype)
    padded = functional.pad(partial, (0, 0, 0, -rows % world))
    return gather_rows(round_sum(scatter_by_tree(padded, group), bias, dtype), group)[:rows]


def round_sum(total: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The fp32 sum, + bias, rounded to dtype."""
    return (total if bias is None else total + bias.float()).to(dtype)
