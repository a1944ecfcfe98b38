"""The kernel of `AdamW` (Loshchilov and Hutter 2019, algorithm 2)."""

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    parameters,
    gradients,
    firsts,
    seconds,
    corrections,
    scale,
    failed,
    copies,
    numbers,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    HAS_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    # Gradients that came after a wait had failed are wrong: nothing is updated.
    there = inside if failed is None else inside & (tl.load(failed) == 0)
    gradient = tl.load(gradients + at, mask=there)
    if HAS_SCALE:
        gradient *= tl.load(scale)
    first = beta1 * tl.load(firsts + at, mask=there) + rest1 * gradient
    second = beta2 * tl.load(seconds + at, mask=there) + rest2 * gradient * gradient
    step_size, root_scale, keep = tl.load(corrections), tl.load(corrections + 1), tl.load(corrections + 2)
    parameter = tl.load(parameters + at, mask=there) * keep
    parameter -= step_size * first / (tl.sqrt(second) * root_scale + eps)
    tl.store(parameters + at, parameter, mask=there)
    if copies is not None:
        tl.store(copies + at, parameter.to(copies.dtype.element_ty), mask=there)
    tl.store(firsts + at, first, mask=there)
    tl.store(seconds + at, second, mask=there)


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
    """Update one parameter, fp32 and contiguous as are its gradient and both moments, all in place.

    corrections: fp32 [3], lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t) and 1 - lr x decay. scale: fp32, 0-dim, or None.
    failed: int32 [1] or None; while it is not 0, nothing is updated (`stretto.memory.failures`). copy: gets the new
    parameter in its own dtype; contiguous, or None. options: a group's betas and eps.
    """
    numbers = parameter.numel()
    if not numbers:
        return
    beta1, beta2 = options["betas"]
    _adamw[(triton.cdiv(numbers, BLOCK),)](
        parameter,
        gradient,
        first,
        second,
        corrections,
        corrections if scale is None else scale,
        failed,
        copy,
        numbers,
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        options["eps"],
        HAS_SCALE=scale is not None,
        BLOCK=BLOCK,
    )
