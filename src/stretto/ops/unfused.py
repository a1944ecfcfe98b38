# SPDX-License-Identifier: Apache-2.0
"""The unfused implementation of the operators: a library's GEMM, and a collective of the group's backend around it.

Results equal the kernels' up to rounding: products are added in fp32 (fp64 for fp64), and a rank's partial sums are
rounded to the dtype in which they are sent. On CPUs ranks' sums are then added in fp32 in rank order, as in kernels;
NCCL adds in its own order, and rounds at each hop.
"""

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from stretto.ops.gemm.tile import Scales
from stretto.ops.workspace import find_group

_SCALED_GRAIN = 16  # torch's scaled products need columns, and addresses in bytes, that are multiples of this


def all_gather_matmul(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> tuple[Tensor, Tensor]:
    """(product, gathered x)."""
    gathered = gather_rows(x, group)
    return torch.nn.functional.linear(gathered, weight, bias), gathered


def matmul_reduce_scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, reduce_dtype: torch.dtype | None
) -> Tensor:
    """This rank's rows of the sum."""
    dtype = reduce_dtype or x.dtype
    if dtype == x.dtype:
        partial = x @ weight.t()
    elif x.is_cuda:
        partial = torch.mm(x, weight.t(), out_dtype=dtype)
    else:
        partial = x.to(dtype) @ weight.t().to(dtype)
    total = scatter_sum(partial, group) if x.device.type == "cpu" else reduce_scatter(partial, group)
    return (total if bias is None else total + bias.to(dtype)).to(x.dtype)


def matmul_all_reduce(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> Tensor:
    """The sum, on all ranks."""
    total = all_reduce(x @ weight.t(), group)
    return total if bias is None else total + bias


def all_gather_scaled_matmul(
    x: Tensor, weight: Tensor, scales: Scales, bias: Tensor | None, dtype: torch.dtype, group: str
) -> Tensor:
    """The product of fp8 operands."""
    gathered = gather_rows(x.view(torch.uint8), group).view(x.dtype)  # not all backends support fp8
    rows = gather_rows(scales.rows.contiguous(), group)
    return multiply_scaled(gathered, weight, Scales(rows, scales.columns), dtype, bias)


def scaled_matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    scales: Scales,
    bias: Tensor | None,
    dtype: torch.dtype,
    sum_dtype: torch.dtype,
    group: str,
) -> Tensor:
    """This rank's rows of the sum of fp8 operands' products."""
    partial = multiply_scaled(x, weight, scales, sum_dtype)
    total = scatter_sum(partial, group) if x.device.type == "cpu" else reduce_scatter(partial, group)
    return _add(total, None if bias is None else bias.to(sum_dtype)).to(dtype)


def scaled_matmul_all_reduce(
    x: Tensor, weight: Tensor, scales: Scales, bias: Tensor | None, dtype: torch.dtype, group: str
) -> Tensor:
    """The sum of fp8 operands' products, on all ranks."""
    return _add(all_reduce(multiply_scaled(x, weight, scales, dtype), group), bias)


def multiply_scaled(
    x: Tensor, weight: Tensor, scales: Scales, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """x @ weight.T of fp8, times the factors of rows and columns, + bias: by `scaled_mm` where it can, else in fp32."""
    rows, columns = scales
    tensors = [x, weight] if bias is None else [x, weight, bias]
    is_aligned = not any(size % _SCALED_GRAIN for size in (weight.shape[0], *(one.data_ptr() for one in tensors)))
    if is_aligned and x.is_cuda and dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (8, 9):
        if rows.stride(0) == 0 and columns.stride(0) == 0:
            kind, rows, columns = ScalingType.TensorWise, rows[:1], columns[:1]
        else:
            kind, rows, columns = ScalingType.RowWise, _align(rows)[:, None], _align(columns)[None, :]
        weight = weight.t()
        return scaled_mm(x, weight, rows, kind, columns, kind, bias=bias, output_dtype=dtype, use_fast_accum=True)
    product = (x.float() @ weight.float().t()).mul_(rows[:, None]).mul_(columns)
    return _add(product, bias).to(dtype)


def _align(scales: Tensor) -> Tensor:
    scales = scales.contiguous()
    return scales.clone() if scales.data_ptr() % _SCALED_GRAIN else scales


def _add(total: Tensor, bias: Tensor | None) -> Tensor:
    return total if bias is None else total + bias


def gather_rows(x: Tensor, group: str) -> Tensor:
    """All-gather x [rows, k] to [world * rows, k], by the group's own backend."""
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_gather_into_tensor(x, find_group(group).size(), group))


def all_reduce(x: Tensor, group: str) -> Tensor:
    """All-reduce x, by the group's own backend."""
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_reduce(x, "sum", group))


def scatter_sum(x: Tensor, group: str) -> Tensor:
    """Reduce-scatter x [m, k] to this rank's rows, added in fp32 in rank order, by an all-to-all."""
    world = find_group(group).size()
    sizes = [x.shape[0] // world] * world
    functional = torch.ops._c10d_functional
    parts = functional.wait_tensor(functional.all_to_all_single(x, sizes, sizes, group)).view(world, -1, x.shape[1])
    total = parts[0] if x.dtype == torch.float64 else parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(x.dtype)


def reduce_scatter(x: Tensor, group: str) -> Tensor:
    """Reduce-scatter x [m, k] to this rank's rows, by the group's own backend."""
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.reduce_scatter_tensor(x, "sum", find_group(group).size(), group))
