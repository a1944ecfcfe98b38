# SPDX-License-Identifier: Apache-2.0
"""float8 training on one rank, written from the definition: operands are quantized by the largest magnitudes of what
shares a scale, and products are made of the dequantized numbers in fp32."""

from typing import Any

import torch
from torch import Tensor, nn

from stretto.models.moe import Experts

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


class _ExpertProduct(torch.autograd.Function):
    """The same of one expert's tokens: these are scaled by rows or columns, by powers of two, in e4m3."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.power = recipe == "rowwise"
        rows, e4m3 = (1,) if ctx.power else None, torch.float8_e4m3fn
        return (quantize(x, (1,), e4m3, power=True) @ quantize(weight, rows, e4m3, power=ctx.power).t()).bfloat16()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), e4m3 = ctx.saved_tensors, torch.float8_e4m3fn
        sent = quantize(weight, (1,) if ctx.power else None, e4m3, power=ctx.power)
        again = quantize(sent, (0,), e4m3, power=True) if ctx.power else sent
        of_x = (quantize(gradient, (1,), e4m3, power=True) @ again).bfloat16()
        of_weight = quantize(gradient, (0,), e4m3, power=True).t() @ quantize(x, (0,), e4m3, power=True)
        return of_x, of_weight.bfloat16(), None


class Fp8Experts(Experts):
    """Experts in fp8; put in place of others by their class, with the attribute `recipe`."""

    recipe: str

    def _compute(self, expert: int, x: Tensor) -> Tensor:
        if x.shape[0] == 0:
            return x
        gate, up = _ExpertProduct.apply(x, self.gate_up_proj[expert], self.recipe).chunk(2, dim=-1)
        return _ExpertProduct.apply(self.act_fn(gate) * up, self.down_proj[expert], self.recipe)


class Fp8Linear(nn.Module):
    """An nn.Linear in fp8, of bf16 activations."""

    def __init__(self, linear: nn.Linear, recipe: str) -> None:
        super().__init__()
        self.weight, self.bias, self.recipe = linear.weight, linear.bias, recipe

    def forward(self, x: Tensor) -> Tensor:
        y = _Product.apply(x.flatten(0, -2).bfloat16(), self.weight.bfloat16(), self.recipe)
        y = y.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias.bfloat16()
