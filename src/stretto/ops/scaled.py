"""The operators of fp8 operands, for inference: products are scaled by a factor of each row of x and of weight.

y[i, j] = x_scale[i] * weight_scale[j] * (x @ weight.T)[i, j]. Tensor cores add up fp8 products with about 14 bits (what
torch calls fast accumulation), which is beyond bf16's 8, and interpreted kernels in fp32.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.ops import library
from stretto.ops.checks import DTYPES, find_name, find_scales, require_scaled
from stretto.ops.choosing import choose, describe_call, identify, recall
from stretto.ops.eager import is_traced, needs_gradients, outside_autocast, require_no_tangents
from stretto.ops.gather_gemm import launch_gather
from stretto.ops.gemm import FP8, Scales
from stretto.ops.gemm_scatter import launch_scatter
from stretto.ops.matmul_all_reduce import run_kernel
from stretto.ops.matmul_reduce_scatter import require_rows
from stretto.ops.plans import LIBRARY, Plan, name_implementation
from stretto.ops.workspace import find_group

_LEAST_DEPTH = 32  # of a step over k, in which tensor cores take fp8
_QUANTIZED = (*DTYPES, torch.float64)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x in fp8 [., k], the factor of each row, fp32 [.]): the largest number of a row becomes 448, fp8's largest.

    x: [., k] of bf16, fp16, fp32 or fp64, in any strides; its fp8 is contiguous. ValueError for others. Products of a
    row with an infinity or a NaN are NaN. A few passes over memory, one under torch.compile; a norm before it may as
    well write fp8 itself.
    """
    if x.dim() != 2 or x.dtype not in _QUANTIZED:
        names = ", ".join(map(str, _QUANTIZED))
        raise ValueError(f"quantize_rows takes [rows, k] of {names}, not {list(x.shape)} of {x.dtype}")
    largest = torch.finfo(FP8).max
    most = x.abs().amax(dim=1).float() if x.shape[1] else x.new_zeros(x.shape[0], dtype=torch.float32)
    scale = (most / largest).clamp(min=torch.finfo(torch.float32).tiny)  # rows of zeros have one, too
    quantized = (x.float() / scale[:, None]).clamp(-largest, largest)
    return quantized.to(FP8, memory_format=torch.contiguous_format), scale


def all_gather_scaled_matmul(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    implementation: str | Plan = "auto",
) -> Tensor:
    """As `all_gather_matmul`, of fp8: [m / world, k], [n, k] -> [m, n] of `out_dtype` (bf16, fp16 or fp32).

    x, weight: torch.float8_e4m3fn, contiguous; k is a multiple of 16. x_scale: an fp32 tensor of one number, or of one
    for each of x's rows; they travel with the rows. weight_scale: the like for weight's rows, which are the output's
    columns. bias: [n] of out_dtype, added after the scales. There are no gradients. ValueError for other input,
    PeerError for a rank that does not come.
    """
    how = name_implementation(implementation)
    return _gather(x, weight, x_scale, weight_scale, bias, find_name(group), out_dtype, how)


def scaled_matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    reduce_dtype: torch.dtype | None = None,
    implementation: str | Plan = "auto",
) -> Tensor:
    """As `matmul_reduce_scatter`, of fp8: [m, k], [n, k] -> [m / world, n] of `out_dtype`; partial sums travel in it.

    Or in fp32 with reduce_dtype=torch.float32. Operands, scales and errors: see `all_gather_scaled_matmul`.
    """
    how = name_implementation(implementation)
    return _scatter(x, weight, x_scale, weight_scale, bias, find_name(group), out_dtype, reduce_dtype, how)


def scaled_matmul_all_reduce(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    implementation: str | Plan = "auto",
) -> Tensor:
    """As `matmul_all_reduce`, of fp8: [m, k], [n, k] -> [m, n] of `out_dtype`, the same bits on all ranks.

    Operands, scales and errors: see `all_gather_scaled_matmul`.
    """
    how = name_implementation(implementation)
    return _reduce(x, weight, x_scale, weight_scale, bias, find_name(group), out_dtype, how)


@outside_autocast
def _run_gather(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    group: str,
    out_dtype: torch.dtype,
    implementation: str,
) -> Tensor:
    plan, scales = _prepare(
        "all_gather_matmul", x, weight, x_scale, weight_scale, bias, group, implementation, out_dtype
    )
    m, n = x.shape[0] * find_group(group).size(), weight.shape[0]
    if 0 in (m, n, x.shape[1]):  # nothing to wait for
        return _fill(x, (m, n), bias, out_dtype)
    if plan == LIBRARY:
        return library.all_gather_scaled_matmul(x, weight, scales, bias, out_dtype, group)
    out = x.new_empty(m, n, dtype=out_dtype)
    launch_gather(plan, x, weight, bias, out, group, scales=scales)
    return out


@outside_autocast
def _run_scatter(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    group: str,
    out_dtype: torch.dtype,
    reduce_dtype: torch.dtype | None,
    implementation: str,
) -> Tensor:
    plan, scales = _prepare(
        "matmul_reduce_scatter", x, weight, x_scale, weight_scale, bias, group, implementation, out_dtype, reduce_dtype
    )
    rows, sum_dtype = x.shape[0] // find_group(group).size(), reduce_dtype or out_dtype
    if 0 in (rows, *weight.shape):  # nothing to wait for
        return _fill(x, (rows, weight.shape[0]), bias, out_dtype)
    if plan == LIBRARY:
        return library.scaled_matmul_reduce_scatter(x, weight, scales, bias, out_dtype, sum_dtype, group)
    out = x.new_empty(rows, weight.shape[0], dtype=out_dtype)
    launch_scatter(plan, x, weight, bias, out, sum_dtype, group, scales)
    return out


@outside_autocast
def _run_reduce(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    group: str,
    out_dtype: torch.dtype,
    implementation: str,
) -> Tensor:
    plan, scales = _prepare(
        "matmul_all_reduce", x, weight, x_scale, weight_scale, bias, group, implementation, out_dtype
    )
    if 0 in (x.shape[0], *weight.shape):  # nothing to wait for
        return _fill(x, (x.shape[0], weight.shape[0]), bias, out_dtype)
    if plan == LIBRARY:
        return library.scaled_matmul_all_reduce(x, weight, scales, bias, out_dtype, group)
    return run_kernel(plan, x, weight, bias, out_dtype, group, scales)


_NAMES = {
    "all_gather_matmul": "all_gather_scaled_matmul",
    "matmul_reduce_scatter": "scaled_matmul_reduce_scatter",
    "matmul_all_reduce": "scaled_matmul_all_reduce",
}


def _prepare(
    operator: str,
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    group: str,
    implementation: str,
    out_dtype: torch.dtype,
    reduce_dtype: torch.dtype | None = None,
) -> tuple[Plan, Scales]:
    """What a call is done by, counted and timed as the operator of other dtypes; and its scales."""
    key = identify(operator, x, weight, bias, implementation, out_dtype, reduce_dtype)
    plan = recall(group, key)
    if plan is None:
        _require(operator, x, weight, bias, group, out_dtype, reduce_dtype)
    scales = find_scales(_NAMES[operator], x, weight, x_scale, weight_scale)
    if plan is None:
        m = x.shape[0] * (find_group(group).size() if operator == "all_gather_matmul" else 1)
        plan = choose(describe_call(operator, m, x, weight, group), x, weight, group, implementation, key)
    if plan.blocks is not None and plan.blocks.k < _LEAST_DEPTH:
        raise ValueError(f"k of blocks for fp8 is {_LEAST_DEPTH} or more, not {plan.blocks.k}")
    return plan, scales


def _require(
    operator: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: str,
    out_dtype: torch.dtype,
    reduce_dtype: torch.dtype | None = None,
) -> None:
    name = _NAMES[operator]
    require_scaled(name, x, weight, bias, out_dtype)
    if operator == "matmul_reduce_scatter":
        require_rows(name, x, out_dtype, reduce_dtype, group)


def _fill(x: Tensor, shape: tuple[int, int], bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    zeros = x.new_zeros(shape, dtype=dtype)
    return zeros if bias is None else zeros + bias


def _shorten(name: str, run: Callable[..., Tensor]) -> tuple[Any, Callable[..., Tensor]]:
    """The operator of that name, and a function that goes past torch.library where torch only runs it."""
    custom = torch.library.custom_op(f"stretto::{name}", run, mutates_args=())
    operator = getattr(torch.ops.stretto, name)

    def call(*inputs: Any) -> Tensor:
        tensors = inputs[:5]
        if needs_gradients(*tensors):
            raise ValueError(f"{name} has no gradients: call it under torch.no_grad(), or detach its operands")
        require_no_tangents(*tensors)
        result: Tensor = operator(*inputs) if is_traced(*tensors) else run(*inputs)
        return result

    return custom, call


_all_gather, _gather = _shorten("all_gather_scaled_matmul", _run_gather)
_reduce_scatter, _scatter = _shorten("scaled_matmul_reduce_scatter", _run_scatter)
_all_reduce, _reduce = _shorten("scaled_matmul_all_reduce", _run_reduce)


@_all_gather.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    group: str,
    out_dtype: torch.dtype,
    implementation: str,
) -> Tensor:
    _require("all_gather_matmul", x, weight, bias, group, out_dtype)
    find_scales("all_gather_scaled_matmul", x, weight, x_scale, weight_scale)
    return x.new_empty(x.shape[0] * find_group(group).size(), weight.shape[0], dtype=out_dtype)


@_reduce_scatter.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    group: str,
    out_dtype: torch.dtype,
    reduce_dtype: torch.dtype | None,
    implementation: str,
) -> Tensor:
    _require("matmul_reduce_scatter", x, weight, bias, group, out_dtype, reduce_dtype)
    find_scales("scaled_matmul_reduce_scatter", x, weight, x_scale, weight_scale)
    return x.new_empty(x.shape[0] // find_group(group).size(), weight.shape[0], dtype=out_dtype)


@_all_reduce.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    group: str,
    out_dtype: torch.dtype,
    implementation: str,
) -> Tensor:
    _require("matmul_all_reduce", x, weight, bias, group, out_dtype)
    find_scales("scaled_matmul_all_reduce", x, weight, x_scale, weight_scale)
    return x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype)
