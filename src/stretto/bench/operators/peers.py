# SPDX-License-Identifier: Apache-2.0
"""The peers of `stretto bench ops`: the library's GEMM alone, GEMM and NCCL, torch's async tensor parallelism."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.ops.gemm import Scales
from stretto.ops.scaled import multiply_scaled
from stretto.ops.tuning import GATHERED, RotatingOperands

Runs = dict[str, Callable[[], Tensor]]


def peers(operands: RotatingOperands, m: int) -> Runs:
    """The peers' runs by name; each returns its result. m: rows of the whole."""
    return _scaled_peers(operands, m, *operands.scales) if operands.scales else _peers(operands, m)


def _peers(operands: RotatingOperands, m: int) -> Runs:
    x, name, fused = operands.x, world_name(), torch.ops.symm_mem
    product = x.new_empty(m, operands.weights[0].shape[0])
    whole = x
    if operands.operator in ("all_gather_matmul", GATHERED):
        whole = x.new_empty(m, x.shape[1])
        dist.all_gather_into_tensor(whole, x)

    def gemm() -> Tensor:
        return torch.mm(whole, operands.next_weight().t(), out=product)

    match operands.operator:
        case "all_gather_matmul" | "all_gather_matmul_gathered":

            def gather_and_multiply() -> Tensor:
                dist.all_gather_into_tensor(whole, x)
                return gemm()

            def async_gather() -> Tensor:
                return fused.fused_all_gather_matmul(x, [operands.next_weight().t()], 0, name)[1][0]

            return {"gemm": gemm, "nccl": gather_and_multiply, "async_tp": async_gather}
        case "matmul_reduce_scatter":
            own = x.new_empty(m // dist.get_world_size(), product.shape[1])

            def multiply_and_scatter() -> Tensor:
                dist.reduce_scatter_tensor(own, gemm())
                return own

            def async_scatter() -> Tensor:
                return fused.fused_matmul_reduce_scatter(x, operands.next_weight().t(), "sum", 0, name)

            return {"gemm": gemm, "nccl": multiply_and_scatter, "async_tp": async_scatter}

    def multiply_and_reduce() -> Tensor:
        dist.all_reduce(gemm())
        return product

    return {"gemm": gemm, "nccl": multiply_and_reduce}


def _scaled_peers(operands: RotatingOperands, m: int, x_scale: Tensor, weight_scale: Tensor) -> Runs:
    """Peers for fp8, scaled by rows and columns: torch's scaled product with fast accumulation."""
    x, name, fused, dtype = operands.x, world_name(), torch.ops.symm_mem, torch.bfloat16
    n, world = operands.weights[0].shape[0], dist.get_world_size()
    is_gather = operands.operator == "all_gather_matmul"
    whole = x.repeat(world, 1) if is_gather else x
    scales = Scales(x_scale.repeat(world) if is_gather else x_scale, weight_scale)

    def gemm() -> Tensor:
        return multiply_scaled(whole, operands.next_weight(), scales, dtype)

    match operands.operator:
        case "all_gather_matmul":

            def gather_and_multiply() -> Tensor:
                dist.all_gather_into_tensor(whole.view(torch.uint8), x.view(torch.uint8))
                dist.all_gather_into_tensor(scales.rows, x_scale)
                return gemm()

            def async_gather() -> Tensor:
                weights, columns = [operands.next_weight().t()], [weight_scale[None, :]]
                found = fused.fused_all_gather_scaled_matmul(
                    x, weights, x_scale[:, None], columns, 0, name, [None], [None], [dtype], [True]
                )
                return found[1][0]

            return {"gemm": gemm, "nccl": gather_and_multiply, "async_tp": async_gather}
        case "matmul_reduce_scatter":
            own = x.new_empty(m // world, n, dtype=dtype)

            def multiply_and_scatter() -> Tensor:
                dist.reduce_scatter_tensor(own, gemm())
                return own

            def async_scatter() -> Tensor:
                weight, rows, columns = operands.next_weight().t(), x_scale[:, None], weight_scale[None, :]
                return fused.fused_scaled_matmul_reduce_scatter(
                    x, weight, rows, columns, "sum", 0, 0, name, [m, n], out_dtype=dtype, use_fast_accum=True
                )

            return {"gemm": gemm, "nccl": multiply_and_scatter, "async_tp": async_scatter}

    def multiply_and_reduce() -> Tensor:
        product = gemm()
        dist.all_reduce(product)
        return product

    return {"gemm": gemm, "nccl": multiply_and_reduce}


def world_name() -> str:
    """The name of the group of all ranks."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name
