# SPDX-License-Identifier: Apache-2.0
"""The peers of `stretto bench ops`: the library's GEMM alone, GEMM and NCCL, torch's async tensor parallelism."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # which defines the operators of async tensor parallelism
from torch import Tensor

from stretto.ops.gemm import Scales
from stretto.ops.scaled import multiply_scaled
from stretto.ops.tuning import GATHERED, RotatingOperands

Runs = dict[str, Callable[[], Tensor]]


def peers(operands: RotatingOperands, m: int) -> Runs:
    """The peers' runs by name; each returns its result. m: rows of the whole.

    For fp8, scaled by rows and columns, torch's scaled product with fast accumulation multiplies.
    """
    x, name, fused, world = operands.x, world_name(), torch.ops.symm_mem, dist.get_world_size()
    is_gather = operands.operator in ("all_gather_matmul", GATHERED)
    whole = x.repeat(world, 1) if is_gather else x
    moved = [(whole, x)]  # by the gather
    n = operands.weights[0].shape[0]
    if operands.scales:
        dtype = torch.bfloat16
        rows, columns = operands.scales[0][:, None], operands.scales[1][None, :]
        scales = Scales(rows.view(-1).repeat(world if is_gather else 1), columns.view(-1))
        moved = [(whole.view(torch.uint8), x.view(torch.uint8)), (scales.rows, rows.view(-1))]
    else:
        dtype = x.dtype
        product = x.new_empty(m, n)

    def gemm() -> Tensor:
        if operands.scales:
            return multiply_scaled(whole, operands.next_weight(), scales, dtype)
        return torch.mm(whole, operands.next_weight().t(), out=product)

    def gather_and_multiply() -> Tensor:
        for gathered, own in moved:
            dist.all_gather_into_tensor(gathered, own)
        return gemm()

    def async_gather() -> Tensor:
        weights = [operands.next_weight().t()]
        if operands.scales:
            options: list[Any] = [[columns], 0, name, [None], [None], [dtype], [True]]
            return fused.fused_all_gather_scaled_matmul(x, weights, rows, *options)[1][0]
        return fused.fused_all_gather_matmul(x, weights, 0, name)[1][0]

    if is_gather:
        return {"gemm": gemm, "nccl": gather_and_multiply, "async_tp": async_gather}

    def multiply_and_reduce() -> Tensor:
        total = gemm()
        dist.all_reduce(total)
        return total

    if operands.operator != "matmul_reduce_scatter":
        return {"gemm": gemm, "nccl": multiply_and_reduce}
    scattered = x.new_empty(m // world, n, dtype=dtype)

    def multiply_and_scatter() -> Tensor:
        dist.reduce_scatter_tensor(scattered, gemm())
        return scattered

    def async_scatter() -> Tensor:
        weight = operands.next_weight().t()
        if operands.scales:
            return fused.fused_scaled_matmul_reduce_scatter(
                x, weight, rows, columns, "sum", 0, 0, name, [m, n], out_dtype=dtype, use_fast_accum=True
            )
        return fused.fused_matmul_reduce_scatter(x, weight, "sum", 0, name)

    return {"gemm": gemm, "nccl": multiply_and_scatter, "async_tp": async_scatter}


def world_name() -> str:
    """The name of the group of all ranks."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name
