# SPDX-License-Identifier: Apache-2.0
"""The operators of fp8 operands, for inference: products are scaled by a factor of each row of x and of weight.

y[i, j] = x_scale[i] * weight_scale[j] * (x @ weight.T)[i, j]. Tensor cores add up fp8 products with about 14 bits (what
torch calls fast accumulation), which is beyond bf16's 8, and interpreted kernels in fp32.
"""

from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from stretto.ops.all_gather_matmul import launch_gather
from stretto.ops.choices import find_config
from stretto.ops.config import LIBRARY, KernelConfig, encode_implementation
from stretto.ops.gemm import GroupProduct, Scales
from stretto.ops.matmul_all_reduce import launch_all_reduce
from stretto.ops.matmul_reduce_scatter import launch_scatter, require_rows
from stretto.ops.operands import (
    DTYPES,
    FP8,
    describe_tensor,
    divide_first_dim,
    flatten_rows,
    require_like,
    require_matrices,
    require_no_gradients,
    require_out,
    require_place,
    restore_dims,
    show_shape,
    takes_tensors,
)
from stretto.ops.operator import (
    all_reduce,
    copy_to,
    define_operator,
    find_group,
    find_name,
    gather_rows,
    reduce_scatter,
)

_MIN_DEPTH = 32  # the smallest step over k in which tensor cores take fp8
_QUANTIZED = (*DTYPES, torch.float64)
_GRAIN = 16  # bytes: rows of fp8 are multiples of it, as TMA and torch's own products require


@takes_tensors
def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows to fp8: (x in fp8 [..., k], the factor of each row, fp32 [...]).

    The largest number of a row becomes 448, fp8's largest. x: [..., k] of bf16, fp16, fp32 or fp64, of two dims or
    more, in any strides; its fp8 is contiguous. ValueError for others. Products of a row with an infinity or a NaN are
    NaN. Takes a few passes over memory, one under torch.compile; a norm before it may as well write fp8 itself.
    """
    if x.dim() < 2 or x.dtype not in _QUANTIZED:
        names = ", ".join(map(str, _QUANTIZED))
        raise ValueError(
            f"quantize_rows takes [..., k], of two dims or more, of {names}, not {list(x.shape)} of {x.dtype}"
        )
    largest = torch.finfo(FP8).max
    most = x.abs().amax(dim=-1).float() if x.shape[-1] else x.new_zeros(x.shape[:-1], dtype=torch.float32)
    # Not divided: a GPU multiplies by a number's reciprocal, and other devices and kernels shall give the same bits.
    scale = (most * (1 / largest)).clamp(min=torch.finfo(torch.float32).tiny)  # rows of zeros have one, too
    quantized = (x.float() / scale[..., None]).clamp(-largest, largest)
    return quantized.to(FP8, memory_format=torch.contiguous_format), scale


@takes_tensors
def all_gather_scaled_matmul(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    implementation: str | KernelConfig = "auto",
) -> Tensor:
    """`all_gather_matmul` of fp8 operands: [m / world, k], [n, k] -> [m, n] of `out_dtype` (bf16, fp16 or fp32).

    x, weight: torch.float8_e4m3fn (x also torch.float8_e5m2), contiguous; k is a multiple of 16. x_scale: an fp32
    tensor of one number, or of one for each of x's rows, sent with the rows. weight_scale: the same for weight's rows,
    which are the output's columns. bias: [n] of out_dtype, added after the scales. x may have more dims, as in
    `all_gather_matmul`, and x_scale then has x's dims without the last one, or is flat. out: where to write the output,
    contiguous. There are no gradients. ValueError for other input, PeerError for a rank that does not call.
    """
    operands = x, weight, x_scale, weight_scale, bias
    return _call("all_gather_matmul", operands, group, out, out_dtype, None, implementation)


@takes_tensors
def all_gather_scaled_matmul_gathered(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    has_one_scale: bool = False,
    implementation: str | KernelConfig = "auto",
) -> tuple[Tensor, Tensor]:
    """`all_gather_scaled_matmul` of x [m / world, k] that also returns the gathered x: ([m, n], [m, k]).

    has_one_scale: x_scale is one number, the same on all ranks, which a library's product then takes as one.
    """
    how, name = encode_implementation(implementation), find_name(group)
    require_no_gradients("all_gather_scaled_matmul_gathered", x, weight, x_scale, weight_scale)
    return _gathered_matmul(x, weight, x_scale, weight_scale, name, out_dtype, has_one_scale, how)


@takes_tensors
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
    out: Tensor | None = None,
    implementation: str | KernelConfig = "auto",
) -> Tensor:
    """`matmul_reduce_scatter` of fp8 operands: [m, k], [n, k] -> [m / world, n] of `out_dtype`.

    Partial sums are sent in out_dtype, or in fp32 with reduce_dtype=torch.float32.
    Operands, scales and errors are as in `all_gather_scaled_matmul`.
    """
    operands = x, weight, x_scale, weight_scale, bias
    return _call("matmul_reduce_scatter", operands, group, out, out_dtype, reduce_dtype, implementation)


@takes_tensors
def scaled_matmul_all_reduce(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    implementation: str | KernelConfig = "auto",
) -> Tensor:
    """`matmul_all_reduce` of fp8 operands: [m, k], [n, k] -> [m, n] of `out_dtype`, the same bits on all ranks.

    Operands, scales and errors are as in `all_gather_scaled_matmul`.
    """
    operands = x, weight, x_scale, weight_scale, bias
    return _call("matmul_all_reduce", operands, group, out, out_dtype, None, implementation)


_NAMES = {
    "all_gather_matmul": "all_gather_scaled_matmul",
    "matmul_reduce_scatter": "scaled_matmul_reduce_scatter",
    "matmul_all_reduce": "scaled_matmul_all_reduce",
}
"""The name of each operator's fp8 form. Calls are counted and timed under the operator's own name."""


def _call(
    operator: str,
    operands: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    group: dist.ProcessGroup | None,
    out: Tensor | None,
    out_dtype: torch.dtype,
    reduce_dtype: torch.dtype | None,
    implementation: str | KernelConfig,
) -> Tensor:
    """Call the operator. ValueError where gradients would be needed, of which it has none."""
    how, name = encode_implementation(implementation), find_name(group)
    x, weight, x_scale, weight_scale, bias = operands
    require_no_gradients(_NAMES[operator], *operands)
    rows, first = flatten_rows(_NAMES[operator], x), 0
    if x.dim() > 2 or out is not None:
        first = _count_first_dim(operator, x, dist.get_world_size(group))
    if x.dim() > 2 and x_scale.shape in (x.shape[:-1], (*x.shape[:-1], 1)):
        x_scale = x_scale.flatten()
    inputs = operator, rows, weight, x_scale, weight_scale, bias, name, out_dtype, reduce_dtype, how
    if out is not None:
        require_scaled(_NAMES[operator], rows, weight, bias, out_dtype)
        find_scales(_NAMES[operator], rows, weight, x_scale, weight_scale)
        require_out(_NAMES[operator], out, (first, *x.shape[1:-1], weight.shape[0]), out_dtype, *operands)
        _scaled_matmul(*inputs, out=out.flatten(0, -2))
        return out
    return restore_dims(_scaled_matmul(*inputs), x, first)


def _count_first_dim(operator: str, x: Tensor, world: int) -> int:
    """The output's first dim."""
    if operator == "matmul_reduce_scatter":
        return divide_first_dim(_NAMES[operator], x, world)
    return x.shape[0] * (world if operator == "all_gather_matmul" else 1)


def _run(
    operator: str,
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    group: str,
    out_dtype: torch.dtype,
    reduce_dtype: torch.dtype | None,
    implementation: str,
    out: Tensor | None = None,
) -> Tensor:
    """The output, in `out` if there is one; operator: by the name of its form for other dtypes."""

    def compute(config: KernelConfig, out: Tensor | None = None) -> Tensor:
        if config.blocks is not None and config.blocks.k < _MIN_DEPTH:
            raise ValueError(f"k of blocks for fp8 must be {_MIN_DEPTH} or more, not {config.blocks.k}")
        scales = find_scales(_NAMES[operator], x, weight, x_scale, weight_scale)
        rows, n = _count_first_dim(operator, x, find_group(group).size()), weight.shape[0]
        sum_dtype = reduce_dtype or out_dtype
        if 0 in (rows, n, x.shape[1]):  # nothing to wait for
            zeros = x.new_zeros(rows, n, dtype=out_dtype)
            return copy_to(out, zeros if bias is None else zeros + bias)
        if config == LIBRARY:
            if operator == "all_gather_matmul":
                total, _ = _gather_and_multiply(x, weight, scales, bias, group, out_dtype, has_one_scale=False)
            elif operator == "matmul_all_reduce":
                total = _add(all_reduce(multiply_scaled(x, weight, scales, out_dtype), group), bias)
            else:
                total = reduce_scatter(multiply_scaled(x, weight, scales, sum_dtype), group)
                total = _add(total, None if bias is None else bias.to(sum_dtype)).to(out_dtype)
            return copy_to(out, total)
        out = x.new_empty(rows, n, dtype=out_dtype) if out is None else out
        product = GroupProduct(x, weight, bias, out, group, scales)
        if operator == "all_gather_matmul":
            launch_gather(config, product)
        elif operator == "matmul_all_reduce":
            launch_all_reduce(config, product)
        else:
            launch_scatter(config, product, sum_dtype)
        return out

    config = find_config(
        operator, x, weight, bias, group, implementation, out_dtype, reduce_dtype, run=compute,
        check=lambda: _require(operator, x, weight, x_scale, weight_scale, bias, group, out_dtype, reduce_dtype),
    )  # fmt: skip
    return compute(config, out)


def _gather_and_multiply(
    x: Tensor, weight: Tensor, scales: Scales, bias: Tensor | None, group: str, dtype: torch.dtype, has_one_scale: bool
) -> tuple[Tensor, Tensor]:
    """The product and the gathered x, by a library."""
    gathered = gather_rows(x.view(torch.uint8), group).view(x.dtype)  # not all backends support fp8
    rows = scales.rows[:1].expand(len(gathered)) if has_one_scale else gather_rows(scales.rows.contiguous(), group)
    return multiply_scaled(gathered, weight, Scales(rows, scales.columns), dtype, bias), gathered


def _run_gathered(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    group: str,
    out_dtype: torch.dtype,
    has_one_scale: bool,
    implementation: str,
) -> tuple[Tensor, Tensor]:
    operator = "all_gather_matmul"

    def compute(config: KernelConfig) -> tuple[Tensor, Tensor]:
        scales = find_scales(_NAMES[operator], x, weight, x_scale, weight_scale)
        if config == LIBRARY or 0 in (*x.shape, weight.shape[0]):
            return _gather_and_multiply(x, weight, scales, None, group, out_dtype, has_one_scale)
        rows = _count_first_dim(operator, x, find_group(group).size())
        out, returned = x.new_empty(rows, weight.shape[0], dtype=out_dtype), x.new_empty(rows, x.shape[1])
        launch_gather(config, GroupProduct(x, weight, None, out, group, scales), returned)
        return out, returned

    config = find_config(
        operator, x, weight, None, group, implementation, out_dtype, has_one_scale, run=compute, returns_gathered=True,
        check=lambda: _require(operator, x, weight, x_scale, weight_scale, None, group, out_dtype, None),
    )  # fmt: skip
    return compute(config)


def _fake_gathered(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, group: str, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    _require("all_gather_matmul", x, weight, x_scale, weight_scale, None, group, out_dtype, None)
    rows = _count_first_dim("all_gather_matmul", x, find_group(group).size())
    return x.new_empty(rows, weight.shape[0], dtype=out_dtype), x.new_empty(rows, x.shape[1])


def multiply_scaled(
    x: Tensor, weight: Tensor, scales: Scales, dtype: torch.dtype, bias: Tensor | None = None, *, is_fast: bool = True
) -> Tensor:
    """x @ weight.T of fp8, times the factors of rows and columns, + bias: by `scaled_mm` where it can, else in fp32.

    is_fast: sum with the tensor cores' precision alone.
    """
    rows, columns = scales
    tensors = [x, weight] if bias is None else [x, weight, bias]
    # What torch's products take.
    is_aligned = not any(size % _GRAIN for size in (*weight.shape, *(one.data_ptr() for one in tensors)))
    is_aligned = is_aligned and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 9)
    is_tensorwise = all(len(factors) == 1 or factors.stride(0) == 0 for factors in scales)
    if is_aligned and dtype in (torch.bfloat16, torch.float32):
        if is_tensorwise:
            kind, rows, columns = ScalingType.TensorWise, align_scales(rows[:1]), align_scales(columns[:1])
        else:
            kind, rows, columns = ScalingType.RowWise, align_scales(rows)[:, None], align_scales(columns)[None, :]
        writes_all = bias is None and (is_tensorwise or _has_library_by_rows(x.device))
        out_dtype = dtype if writes_all else torch.bfloat16
        return scaled_mm(
            x, weight.t(), rows, kind, columns, kind, bias=bias, output_dtype=out_dtype, use_fast_accum=is_fast
        ).to(dtype)
    product = (x.float() @ weight.float().t()).mul_(rows[:, None]).mul_(columns)
    return _add(product, bias).to(dtype)


def _has_library_by_rows(device: torch.device) -> bool:
    """True if cuBLAS multiplies by rows; torch's own kernels, elsewhere, write bf16 alone."""
    version = tuple(int(part) for part in (torch.version.cuda or "0").split("."))
    return torch.cuda.get_device_capability(device) == (9, 0) and version >= (12, 9)


def align_scales(scales: Tensor) -> Tensor:
    """Scales as libraries take them: contiguous, at a multiple of 16 bytes, also where there is one.

    cuBLASLt refuses a product by the algorithm that its heuristic has chosen (CUBLAS_STATUS_NOT_SUPPORTED) if the
    algorithm loads scales in vectors and their address is none: the heuristic is not asked with addresses.
    """
    scales = scales.contiguous()
    return scales.clone() if scales.data_ptr() % _GRAIN else scales


def _add(total: Tensor, bias: Tensor | None) -> Tensor:
    return total if bias is None else total + bias


def _require(
    operator: str,
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    group: str,
    out_dtype: torch.dtype,
    reduce_dtype: torch.dtype | None,
) -> None:
    require_scaled(_NAMES[operator], x, weight, bias, out_dtype)
    if operator == "matmul_reduce_scatter":
        require_rows(_NAMES[operator], x, out_dtype, reduce_dtype, group)
    find_scales(_NAMES[operator], x, weight, x_scale, weight_scale)


def require_scaled(operator: str, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
    """ValueError unless x [., k] and weight [n, k] are fp8 and contiguous, and bias [n] is of `dtype`, the output's."""
    require_matrices(operator, x, weight)
    for name, one in (("x", x), ("weight", weight)):
        if one.dtype != FP8 and not (name == "x" and one.dtype == torch.float8_e5m2):
            raise ValueError(f"{operator}: {name} must be of {FP8}, not {one.dtype}: see quantize_rows")
    if dtype not in DTYPES:
        raise ValueError(f"{operator} returns {', '.join(map(str, DTYPES))}, not {dtype}")
    if x.shape[1] % _GRAIN:
        raise ValueError(f"{operator}: k of fp8 operands must be a multiple of {_GRAIN}, not {x.shape[1]}: pad both")
    if not weight.is_contiguous():
        raise ValueError(
            f"{operator} takes a contiguous fp8 weight [n, k], not strides {weight.stride()}: tensor cores require "
            "fp8 operands to be contiguous along k"
        )
    require_like(operator, "weight", weight, weight.shape, FP8, x.device)
    if bias is not None:
        require_like(operator, "bias", bias, weight.shape[:1], dtype, x.device)
    require_place(operator, x)


def find_scales(operator: str, x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Scales:
    """The factors of x's rows [m] and of weight's rows [n]. ValueError unless there is one for each, or one for all."""
    return Scales(
        _find_factors(operator, "x_scale", x_scale, x), _find_factors(operator, "weight_scale", weight_scale, weight)
    )


def _find_factors(operator: str, name: str, scale: Tensor, matrix: Tensor) -> Tensor:
    rows = matrix.shape[0]
    if scale.numel() not in (1, rows) or sum(size != 1 for size in scale.shape) > 1:
        raise ValueError(
            f"{operator}: {name} must be one number, or one for each of {rows} rows, not {show_shape(scale)}: there "
            "are no scales of smaller blocks"
        )
    if scale.dtype != torch.float32 or scale.device != matrix.device:
        raise ValueError(f"{operator}: {name} must be torch.float32 on {matrix.device}, not {describe_tensor(scale)}")
    factors = scale.reshape(-1).expand(rows)
    # Kernels compute offsets into the factors in 32 bits.
    return factors if rows * factors.stride(0) < 1 << 31 else factors.contiguous()


def _fake(
    operator: str,
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    group: str,
    out_dtype: torch.dtype,
    reduce_dtype: torch.dtype | None,
) -> Tensor:
    _require(operator, x, weight, x_scale, weight_scale, bias, group, out_dtype, reduce_dtype)
    rows = _count_first_dim(operator, x, find_group(group).size())
    return x.new_empty(rows, weight.shape[0], dtype=out_dtype)


def _count_flops(operator: str, x: torch.Size, weight: torch.Size, out_shape: torch.Size) -> int:
    rows = out_shape[0] if operator == "all_gather_matmul" else x[0]
    return 2 * rows * prod(weight)


_gathered_matmul = define_operator(
    "scaled_matmul_gathered",
    _run_gathered,
    fake=_fake_gathered,
    count_flops=lambda weight, out_shape: 2 * out_shape[0][0] * prod(weight),
)
_scaled_matmul = define_operator("scaled_matmul", _run, fake=_fake, count_flops=_count_flops)
