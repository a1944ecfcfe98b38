# SPDX-License-Identifier: Apache-2.0
"""Kernels of cross-entropy on logits, of which a rank has some columns: statistics of rows, and their gradients.

Written with torch's operators, the loss reads and writes fp32 logits several times, 52 bytes for each 16-bit logit.
These kernels read 16-bit logits twice and write them once, 6 bytes, and compute in fp32 registers. Between the two, the
caller combines the statistics of the ranks that have the other columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.tiles.launches import launch_cached

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_BLOCK = 4096
_WARPS = 8


def suits_kernels(logits: Tensor) -> bool:
    """True if the kernels take these logits, or the operands of the product that makes them."""
    return logits.is_cuda and logits.dtype in DTYPES


def read_statistics(logits: Tensor, targets: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Read rows of logits once: the greatest, the sum of exp(logit - greatest), and the logit of the target; fp32 [t].

    logits [t, c], contiguous, of which the first `columns` count; targets int64 [t], which name a column here, or have
    0 as their logit. A row without columns has -inf and 0.
    """
    greatest, sums, of_targets = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(3))
    if len(logits):
        arguments = logits, targets, greatest, sums, of_targets, columns, logits.shape[1]
        with torch.cuda.device_of(logits):
            launch_cached(reduce_rows, len(logits), *arguments, BLOCK=_BLOCK, num_warps=_WARPS)
    return greatest, sums, of_targets


def write_gradients(
    logits: Tensor,
    targets: Tensor,
    greatest: Tensor,
    sums: Tensor,
    scale: Tensor,
    columns: int,
    out: Tensor | None = None,
) -> None:
    """Replace each logit by scale * (softmax - [it is the target's]), and columns that do not count by zeros.

    logits, targets and columns are those of `read_statistics`; greatest, sums and scale are fp32 [t]: of the whole row,
    whichever rank has its columns, and the factor of the row's loss. Rounded once, to logits' dtype. out: of logits'
    shape and dtype, is written in their place.
    """
    if logits.numel():
        arguments = logits, logits if out is None else out, targets, greatest, sums, scale, columns, logits.shape[1]
        with torch.cuda.device_of(logits):
            launch_cached(differentiate_rows, len(logits), *arguments, BLOCK=_BLOCK, num_warps=_WARPS)


@triton.jit
def reduce_rows(  # type: ignore[no-untyped-def]
    logits, targets, greatest, sums, of_targets, columns, stride, BLOCK: tl.constexpr
):
    """The statistics of `read_statistics`, of one row a program.

    Each lane keeps those of its own columns until the end. Synchronization: none, since programs own their rows.
    """
    row = tl.program_id(0).to(tl.int64)
    highest = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, columns, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        value = tl.load(logits + row * stride + at, mask=at < columns, other=-float("inf")).to(tl.float32)
        # NaN where the logit is, as it must: it is in the sum, whatever the greatest is.
        risen = tl.maximum(highest, value)
        base = tl.where(risen == -float("inf"), 0.0, risen)
        total = total * tl.exp(highest - base) + tl.exp(value - base)
        highest = risen
    top = tl.max(highest, 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    tl.store(greatest + row, top)
    tl.store(sums + row, tl.sum(total * tl.exp(highest - base), 0))
    target = tl.load(targets + row)
    is_here = (target >= 0) & (target < columns)
    tl.store(of_targets + row, tl.load(logits + row * stride + target, mask=is_here, other=0.0).to(tl.float32))


@triton.jit
def differentiate_rows(  # type: ignore[no-untyped-def]
    logits, gradients, targets, greatest, sums, scale, columns, stride, BLOCK: tl.constexpr
):
    """The gradients of `write_gradients`, of one row a program. Synchronization: none: programs own their rows."""
    row = tl.program_id(0).to(tl.int64)
    target, top = tl.load(targets + row), tl.load(greatest + row)
    factor = tl.load(scale + row)
    softmax = factor / tl.load(sums + row)
    for begin in range(0, stride, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        value = tl.load(logits + row * stride + at, mask=at < columns, other=-float("inf")).to(tl.float32)
        gradient = tl.exp(value - top) * softmax - tl.where(at == target, factor, 0.0)
        gradient = tl.where(at < columns, gradient, 0.0)
        tl.store(gradients + row * stride + at, gradient.to(logits.dtype.element_ty), mask=at < stride)
