# SPDX-License-Identifier: Apache-2.0
"""Optimizers' steps on rows of embedding tables by PyTorch's functions: the same as `stretto.ops`' fused update.

update_rows        sgd, row-wise Adagrad, full Adagrad or Adam, with clipping by a row's norm and weight decay
round_at_random    stochastic rounding, by bits that `draw_bits` hashes from what names a number on every placement
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

RowOptimizer = Literal["sgd", "rowwise-adagrad", "full-adagrad", "adam"]

STATE_NAMES: dict[RowOptimizer, tuple[str, ...]] = {
    "sgd": (),
    "rowwise-adagrad": ("sum",),
    "full-adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq"),
}
"""The names of each optimizer's states of a table; they are [rows, dim], row-wise Adagrad's [rows]."""

_WORD = 0xFFFFFFFF


def update_rows(
    kind: RowOptimizer, held: Tensor, gradient: Tensor, states: Sequence[Tensor], settings: Tensor, steps: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Return rows and states after a step. Changes nothing in place.

    held, gradient: [rows, dim], fp32 or fp64. states: of these rows, by `STATE_NAMES`. settings: [6], in their dtype:
    learning rate, epsilon, weight decay, largest norm of a row's gradient, and 1 - beta of Adam's two means. steps:
    int64 [], steps made before. The gradient is clipped first, and weight decay added to it, as torch.optim does.
    """
    lr, epsilon, decay, longest, first, second = settings.unbind()
    norms = gradient.square().sum(1).sqrt()
    gradient = gradient * torch.where(norms > longest, longest / norms, 1.0).unsqueeze(1) + held * decay
    match kind:
        case "sgd":
            return held - gradient * lr, []
        case "rowwise-adagrad":
            sums = states[0] + gradient.square().mean(1)
            return held - _divide(gradient * lr, (sums.sqrt() + epsilon).unsqueeze(1)), [sums]
        case "full-adagrad":
            sums = states[0] + gradient.square()
            return held - _divide(gradient * lr, sums.sqrt() + epsilon), [sums]
        case "adam":
            mean = states[0] + (gradient - states[0]) * first
            square = states[1] + (gradient.square() - states[1]) * second
            # In fp64: 1 - 0.999 in fp32 is wrong by 2e-5 of it.
            corrections = -torch.expm1(torch.log1p(-settings[4:].double()) * (steps + 1))
            of_mean, of_square = corrections.to(held.dtype).unbind()
            return held - _divide(mean * (lr / of_mean), square.sqrt() / of_square.sqrt() + epsilon), [mean, square]


def _divide(step: Tensor, divisor: Tensor) -> Tensor:
    """Return the quotient; without an epsilon, what has got only gradients of zeros is not changed."""
    return step / divisor.masked_fill(divisor == 0, 1.0)


def draw_bits(clock: Tensor, table: int, rows: Tensor, first_column: int, columns: int) -> Tensor:
    """Return 32 random bits, int64 [rows, columns], for numbers of a table: a hash of seed, step and place.

    clock: int64 [2], steps and seed. rows: int64, and first_column: in the whole table `table`. The bits are those of
    the fused update's kernel.
    """
    key = _mix(_mix(clock[1] & _WORD) ^ (clock[0] & _WORD))
    key = _mix(_mix(_mix(key ^ table) ^ (rows & _WORD)) ^ ((rows >> 32) & _WORD))
    column = torch.arange(first_column, first_column + columns, device=rows.device)
    return _mix(key.unsqueeze(1) ^ ((column * 0x9E3779B9) & _WORD))


def _mix(word: Tensor) -> Tensor:
    """Hash 32 bits to 32 bits; of products that overflow 64 bits the lower 32 are right."""
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & _WORD
    word = ((word ^ (word >> 15)) * 0x846CA68B) & _WORD
    return word ^ (word >> 16)


def round_at_random(values: Tensor, bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 to one of its two neighbours in fp16 or bf16, so that the mean is the number. bits: `draw_bits`'."""
    dropped = 0x1FFF if dtype == torch.float16 else 0xFFFF
    words = (values.view(torch.int32).to(torch.int64) & _WORD) + (bits & dropped)
    words &= _WORD ^ dropped
    rounded = torch.where(words > 0x7FFFFFFF, words - (1 << 32), words).to(torch.int32).view(torch.float32)
    if dtype == torch.float16:  # below 2 ** -14 its numbers are multiples of 2 ** -24
        units = values.abs() * 2.0**24
        low = units.floor()
        low = (low + ((bits >> 8).float() * 2.0**-24 < units - low)) * 2.0**-24
        rounded = torch.where(values.abs() < 2.0**-14, low.copysign(values), rounded)
    return torch.where(values.isfinite(), rounded, values).to(dtype)
