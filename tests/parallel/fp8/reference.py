# SPDX-License-Identifier: Apache-2.0
"""float8 training on one rank, written from the definition: operands are quantized by the largest magnitudes of what
shares a scale, and products are made of the dequantized numbers in fp32. No code of Stretto's."""

from typing import Any

import torch
from torch import Tensor, nn

RANGES = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def quantize(x: Tensor, dims: tuple[int, ...] | None, dtype: torch.dtype, *, power: bool) -> Tensor:
    """x as fp8 holds it, in fp32: one scale for the numbers along `dims` (None: for all)."""
    wide = x.float()
    largest = wide.abs().amax() if dims is None else wide.abs().amax(dims, keepdim=True)
    scale = (largest * (1 / RANGES[dtype])).clamp(min=2.0**-126)
    if power:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    found = (wide * (1 / scale)).clamp(-RANGES[dtype], RANGES[dtype]).to(dtype)
    return found.float() * scale


class _Product(torch.autograd.Function):
    """x [m, in] @ weight [out, in].T; gradients of bf16 results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe, power = recipe, recipe == "rowwise"
        rows = (1,) if power else None
        e4m3 = torch.float8_e4m3fn
        return (quantize(x, rows, e4m3, power=power) @ quantize(weight, rows, e4m3, power=power).t()).bfloat16()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), power = ctx.saved_tensors, ctx.recipe == "rowwise"
        rows, columns = ((1,), (0,)) if power else (None, None)
        e4m3, of_gradient = torch.float8_e4m3fn, torch.float8_e4m3fn if power else torch.float8_e5m2
        sent = quantize(weight, rows, e4m3, power=power)  # the weight is gathered in fp8, and not again
        again = quantize(sent, columns, e4m3, power=True) if power else sent
        of_x = quantize(gradient, rows, of_gradient, power=power) @ again
        of_weight = quantize(gradient, columns, of_gradient, power=power).t() @ quantize(x, columns, e4m3, power=power)
        return of_x.bfloat16(), of_weight.to(weight.dtype), None


class Fp8Linear(nn.Module):
    """An nn.Linear in fp8, of bf16 activations."""

    def __init__(self, linear: nn.Linear, recipe: str) -> None:
        super().__init__()
        self.weight, self.bias, self.recipe = linear.weight, linear.bias, recipe

    def forward(self, x: Tensor) -> Tensor:
        y = _Product.apply(x.flatten(0, -2).bfloat16(), self.weight.bfloat16(), self.recipe)
        y = y.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias.bfloat16()
