# SPDX-License-Identifier: Apache-2.0
"""Products of one gather with several weights: queries, keys and values, or gate and up.

The widest weight's product is multiplied as rows come, and hides the gather; it also returns the gathered rows, which
the library then multiplies by the other weights. No weight is copied, and all products are contiguous. Gradients of the
gathered rows are added up by autograd, so that the backward pass has one reduce-scatter.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stretto.ops.checks import require_operands

Multiply = Callable[[Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor]]
"""(weight, bias, out) -> (product with the gathered x, in `out` if there is one; gathered x)."""


def pair_lists(
    x: Tensor, weights: Any, biases: Any, outs: Any, saves_gathered: bool, implementation: str
) -> tuple[list[Tensor], list[Tensor | None], list[Tensor | None]]:
    """(weights, a bias or None for each, an output or None for each). ValueError for what cannot be multiplied."""
    name = "all_gather_matmul"
    if not isinstance(weights, Sequence) or not weights or not all(isinstance(one, Tensor) for one in weights):
        raise ValueError(f"{name}: weight is a tensor or a list of one or more tensors, not {weights!r}")
    for what, given in (("bias", biases), ("out", outs)):
        if given is not None and (not isinstance(given, Sequence) or len(given) != len(weights)):
            count = len(given) if isinstance(given, Sequence) else type(given).__name__
            raise ValueError(f"{name}: {what} for a list of {len(weights)} weights is as long a list, not {count}")
    if not saves_gathered:
        raise ValueError(
            f"{name}: saves_gathered=False is for one weight: torch.cat the weights, or checkpoint the call "
            "(torch.utils.checkpoint)"
        )
    nothing = [None] * len(weights)
    paired_biases, paired_outs = list(biases or nothing), list(outs or nothing)
    for weight, bias in zip(weights, paired_biases, strict=True):
        require_operands(name, x, weight, bias, implementation)
    return list(weights), paired_biases, paired_outs


def multiply_several(
    multiply: Multiply, weights: Sequence[Tensor], biases: Sequence[Tensor | None], outs: Sequence[Tensor | None]
) -> list[Tensor]:
    """The products, each in its `out` if there is one."""
    columns = [weight.shape[0] for weight in weights]
    widest = columns.index(max(columns))
    product, gathered = multiply(weights[widest], biases[widest], outs[widest])
    products = []
    with torch.autocast(gathered.device.type, enabled=False):  # as in the first product
        for number, (weight, bias, out) in enumerate(zip(weights, biases, outs, strict=True)):
            if number == widest:
                products.append(product)
            elif out is None:
                products.append(functional.linear(gathered, weight, bias))
            elif bias is None:
                products.append(torch.mm(gathered, weight.t(), out=out))
            else:
                products.append(torch.addmm(bias, gathered, weight.t(), out=out))
    return products
