# SPDX-License-Identifier: Apache-2.0
"""One rank's operands that take gradients, and a product without what is returned beside it."""

import torch.distributed as dist
from tests.ops.operands import random_of

from stretto import ops

OPERATORS = (ops.all_gather_matmul, ops.all_gather_matmul_gathered, ops.matmul_reduce_scatter, ops.matmul_all_reduce)


def multiply(operator, *operands, **options):
    """An operator's product, without the gathered x that one of them returns as well."""
    out = operator(*operands, **options)
    return out[0] if isinstance(out, tuple) else out


def make_leaves(needs="xwb", rows=4, n=6, k=8):
    """This rank's x, weight and bias, of whole numbers, of which those in `needs` take gradients."""
    rank = dist.get_rank()
    sizes = {"x": (rows, k), "w": (n, k), "b": (n,)}
    return [
        random_of(10 * place + rank, *size).round().requires_grad_(name in needs)
        for place, (name, size) in enumerate(sizes.items())
    ]
