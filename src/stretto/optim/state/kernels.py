# SPDX-License-Identifier: Apache-2.0
"""AdamW on mixed precision in one kernel (16-bit weight and gradient, fp32 moments and master weight); rounding.

Each operation of an update rounds separately. Of a * b + c * d, the compiler makes one fma with either product, by a
number's place in its thread's vector: a weight's last bit would depend on where its range begins.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from stretto.optim.adamw_kernel import Decays
from stretto.tiles.launches import launch_kernel

BLOCK = 2048


class _Numbers(NamedTuple):
    """Kernel argument: elements of a range. master: fp32 or int16 (`master_weights.split`); of fp32 weights, None."""

    weight: Any
    gradient: Any
    first: Any
    second: Any
    master: Any


class _SGDNumbers(NamedTuple):
    """Kernel argument: the elements of one range for SGD; momentum None without momentum."""

    weight: Any
    gradient: Any
    momentum: Any
    master: Any


@triton.jit
def _load_master(weight, master, at, there, IS_SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    if IS_SPLIT:
        upper = tl.load(weight + at, mask=there, other=0).to(tl.int16, bitcast=True).to(tl.int32) << 16
        wide = (upper + tl.load(master + at, mask=there, other=0).to(tl.int32)).to(tl.float32, bitcast=True)
    elif master is None:
        wide = tl.load(weight + at, mask=there, other=0)
    else:
        wide = tl.load(master + at, mask=there, other=0)
    return wide


@triton.jit
def _store_master(wide, weight, master, at, there, IS_SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round the new fp32 weights to `weight`, and store them, or their lower halves, in `master`."""
    if weight.dtype.element_ty == tl.bfloat16:
        bits = wide.to(tl.int32, bitcast=True)
        is_nan = wide != wide
        # Rounded to the nearest, ties upwards (`master_weights`).
        upper = tl.where(is_nan, 0x7FC0, (bits + 0x8000) >> 16).to(tl.int16)
        tl.store(weight + at, upper.to(tl.bfloat16, bitcast=True), mask=there)
        if IS_SPLIT:
            tl.store(master + at, tl.where(is_nan, 0, bits - (upper.to(tl.int32) << 16)), mask=there)
    else:
        tl.store(weight + at, wide.to(weight.dtype.element_ty), mask=there)
    if not IS_SPLIT and master is not None:
        tl.store(master + at, wide, mask=there)


@triton.jit
def _adamw_mixed(  # type: ignore[no-untyped-def]
    numbers, corrections, scale, skip, failed, size, decays, IS_SPLIT: tl.constexpr, BLOCK: tl.constexpr
):
    """Update BLOCK numbers, each read and written once. The arguments are those of `launch`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    there = mask & (tl.load(skip) == 0)
    if failed is not None:  # after a failed wait for another rank, gradients are wrong: update nothing
        there &= tl.load(failed) == 0
    gradient = tl.load(numbers.gradient + at, mask=there, other=0).to(tl.float32) * tl.load(scale)
    first = decays.beta1 * tl.load(numbers.first + at, mask=there, other=0) + decays.rest1 * gradient
    second = decays.beta2 * tl.load(numbers.second + at, mask=there, other=0) + decays.rest2 * gradient * gradient
    step_size, root_scale, keep = tl.load(corrections), tl.load(corrections + 1), tl.load(corrections + 2)
    master = _load_master(numbers.weight, numbers.master, at, there, IS_SPLIT)
    master *= keep
    master -= step_size * first / (tl.sqrt(second) * root_scale + decays.eps)
    tl.store(numbers.first + at, first, mask=there)
    tl.store(numbers.second + at, second, mask=there)
    _store_master(master, numbers.weight, numbers.master, at, there, IS_SPLIT)


def launch(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    master: Tensor | None,
    *,
    corrections: Tensor,
    scale: Tensor,
    skip: Tensor,
    failed: Tensor | None,
    options: Mapping[str, Any],
) -> None:
    """Update `weight` and its state in place; all tensors are contiguous and of one size, on one GPU.

    weight: bf16, fp16 or fp32. gradient: 16 bits or fp32. first, second: fp32 moments. master: fp32; int16, the lower
    halves of `master_weights.split`; or None for fp32 weights. corrections: fp32 [3], lr / (1 - beta1^t),
    1 / sqrt(1 - beta2^t) and 1 - lr x decay. scale: fp32, of the gradient. skip, failed: int32 [1]; while one is not 0,
    nothing is updated. options: betas and eps.
    """
    beta1, beta2 = options["betas"]
    decays = Decays(beta1, 1 - beta1, beta2, 1 - beta2, options["eps"])
    numbers = _Numbers(weight, gradient, first, second, master)
    _launch_update(_adamw_mixed, numbers, corrections, scale, skip, failed, weight.numel(), decays)


def _launch_update(kernel: Any, numbers: _Numbers | _SGDNumbers, *arguments: Any) -> None:
    blocks, master = triton.cdiv(numbers.weight.numel(), BLOCK), numbers.master
    is_split = master is not None and master.element_size() == 2
    launch_kernel(kernel, blocks, numbers, *arguments, IS_SPLIT=is_split, BLOCK=BLOCK, enable_fp_fusion=False)


@triton.jit
def _sgd_mixed(  # type: ignore[no-untyped-def]
    buffers, lr, scale, skip, failed, size, momentum, decay, IS_SPLIT: tl.constexpr, BLOCK: tl.constexpr
):
    """Update BLOCK numbers, each read and written once. The arguments are those of `launch_sgd`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = (at < size) & (tl.load(skip) == 0)
    if failed is not None:
        there &= tl.load(failed) == 0
    master = _load_master(buffers.weight, buffers.master, at, there, IS_SPLIT)
    change = tl.load(buffers.gradient + at, mask=there, other=0).to(tl.float32) * tl.load(scale) + decay * master
    if buffers.momentum is not None:
        change += momentum * tl.load(buffers.momentum + at, mask=there, other=0)
        tl.store(buffers.momentum + at, change, mask=there)
    _store_master(master - tl.load(lr) * change, buffers.weight, buffers.master, at, there, IS_SPLIT)


def launch_sgd(
    weight: Tensor,
    gradient: Tensor,
    buffer: Tensor | None,
    master: Tensor | None,
    *,
    lr: Tensor,
    scale: Tensor,
    skip: Tensor,
    failed: Tensor | None,
    options: tuple[float, float],
) -> None:
    """Update `weight` and its momentum in place by SGD (as torch's, without dampening), as `launch` does by AdamW.

    buffer: fp32 momentum, None without. lr: fp32, 0-dim. options: momentum, and weight decay, which is added to the
    gradient.
    """
    numbers = _SGDNumbers(weight, gradient, buffer, master)
    _launch_update(_sgd_mixed, numbers, lr, scale, skip, failed, weight.numel(), *options)


@triton.jit
def _round(master, weight, low, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    _store_master(tl.load(master + at, mask=mask, other=0), weight, low, at, mask, low is not None)


@triton.jit
def _join(weight, low, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    tl.store(out + at, _load_master(weight, low, at, mask, True), mask=mask)


@triton.jit
def _scale(gradient, scale, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    tl.store(out + at, tl.load(gradient + at, mask=mask, other=0).to(tl.float32) * tl.load(scale), mask=mask)


def launch_scale(gradient: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write `gradient`, of any dtype, times `scale` (fp32, 0-dim) to fp32 `out`."""
    launch_kernel(_scale, triton.cdiv(gradient.numel(), BLOCK), gradient, scale, out, gradient.numel(), BLOCK=BLOCK)


def launch_round(master: Tensor, weight: Tensor, low: Tensor | None) -> None:
    """Round fp32 `master` to bf16 `weight`, and keep the rest in int16 `low` if it is not None (`split`)."""
    launch_kernel(_round, triton.cdiv(master.numel(), BLOCK), master, weight, low, master.numel(), BLOCK=BLOCK)


def launch_join(weight: Tensor, low: Tensor, out: Tensor) -> None:
    """Join bf16 `weight` and int16 `low` to fp32 `out`."""
    launch_kernel(_join, triton.cdiv(weight.numel(), BLOCK), weight, low, out, weight.numel(), BLOCK=BLOCK)
