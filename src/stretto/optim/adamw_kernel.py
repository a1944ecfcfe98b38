# SPDX-License-Identifier: Apache-2.0
"""The kernel of `AdamW` (Loshchilov and Hutter 2019, algorithm 2)."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from stretto.tiles.launches import launch_kernel

BLOCK = 2048


class _Moments(NamedTuple):
    """Kernel argument: one parameter with its gradient and its first and second moments; fp32, of one size."""

    parameter: Any
    gradient: Any
    first: Any
    second: Any


class Decays(NamedTuple):
    """Kernel argument: beta1, 1 - beta1, beta2, 1 - beta2 and eps."""

    beta1: Any
    rest1: Any
    beta2: Any
    rest2: Any
    eps: Any


@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    moments, corrections, scale, failed, copies, numbers, decays, HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr
):
    """Update BLOCK elements of a parameter, each read and written once. The arguments are those of `launch`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numbers
    # After a failed wait for another rank, or in a step that is skipped, gradients are wrong: update nothing.
    there = mask if failed is None else mask & (tl.load(failed) == 0)
    gradient = tl.load(moments.gradient + at, mask=there)
    if HAS_SCALE:
        gradient *= tl.load(scale)
    first = decays.beta1 * tl.load(moments.first + at, mask=there) + decays.rest1 * gradient
    second = decays.beta2 * tl.load(moments.second + at, mask=there) + decays.rest2 * gradient * gradient
    step_size, root_scale, keep = tl.load(corrections), tl.load(corrections + 1), tl.load(corrections + 2)
    before = tl.load(moments.parameter + at, mask=mask)
    parameter = before * keep - step_size * first / (tl.sqrt(second) * root_scale + decays.eps)
    tl.store(moments.parameter + at, parameter, mask=there)
    if copies is not None:  # written in any case: the host counts the copy as current
        tl.store(copies + at, tl.where(there, parameter, before).to(copies.dtype.element_ty), mask=mask)
    tl.store(moments.first + at, first, mask=there)
    tl.store(moments.second + at, second, mask=there)


def launch(
    parameter: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    corrections: Tensor,
    scale: Tensor | None,
    failed: Tensor | None,
    copy: Tensor | None,
    options: Mapping[str, Any],
) -> None:
    """Update one parameter and its moments in place; parameter, gradient and moments are fp32 and contiguous.

    corrections: fp32 [3], lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t) and 1 - lr x decay. scale: fp32, 0-dim, or None.
    failed: int32 [1] or None; while it is not 0, nothing is updated (`stretto.memory.failures`, and steps that are
    skipped). copy: contiguous, gets the parameter, updated or not, in its own dtype; or None. options: a parameter
    group's betas and eps.
    """
    numbers = parameter.numel()
    if not numbers:
        return
    beta1, beta2 = options["betas"]
    launch_kernel(
        _adamw,
        triton.cdiv(numbers, BLOCK),
        _Moments(parameter, gradient, first, second),
        corrections,
        corrections if scale is None else scale,
        failed,
        copy,
        numbers,
        Decays(beta1, 1 - beta1, beta2, 1 - beta2, options["eps"]),
        HAS_SCALE=scale is not None,
        BLOCK=BLOCK,
        enable_fp_fusion=False,  # as `state.kernels`
    )
