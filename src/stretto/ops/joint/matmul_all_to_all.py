# SPDX-License-Identifier: Apache-2.0
"""`matmul_all_to_all`: a GEMM whose rows go to the ranks of their samples (Punniyamurthy et al., section 3.5).

It has no kernel of its own: an all-to-all's schedule joins the GEMM's tiles (`kernel`), whose rows leave once they are
multiplied.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.collectives.schedule import Schedule
from stretto.ops.choices import find_config
from stretto.ops.config import LIBRARY, KernelConfig, encode_implementation
from stretto.ops.gemm import GroupProduct
from stretto.ops.joint.launch import launch_joint
from stretto.ops.joint.registry import encode_schedule
from stretto.ops.operands import divide_first_dim, require_operands, takes_tensors
from stretto.ops.operator import (
    Autograd,
    count_product_flops,
    define_operator,
    differentiate_product,
    exchange_rows,
    find_group,
    find_name,
    save_operands,
)

_OPERATOR = "matmul_all_to_all"


@takes_tensors
def matmul_all_to_all(
    x: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | None = None,
    implementation: str | KernelConfig = "auto",
    schedule: str | Schedule | None = None,
) -> Tensor:
    """x times weight's transpose, whose rows an all-to-all exchanges: [m, k], [n, k] -> [m, n].

    Block s of the output's rows, m / world each, is this rank's block of rank s's product: of a layer over the global
    batch, each rank gets the vectors of its samples from all ranks' layers, which may differ.

    bf16, fp16 or fp32, all of one dtype and shape on all ranks; rows travel in it. bias: [n], this rank's own. group:
    None for all ranks. x is contiguous; weight is, or its transpose. Gradients return by the group's own all-to-all.
    implementation: "auto" and "library" (a GEMM, then an all-to-all; a kernel was not measured to be faster), "kernel"
    (by the schedule "direct-all-to-all") or a `KernelConfig`. schedule: an all-to-all's algorithm by name, or any
    verified `Schedule` of one, which runs in the GEMM's kernel. ValueError for other input (m that the group does not
    divide, say); PeerError for a rank that does not call.
    """
    how, name = encode_implementation(implementation), find_name(group)
    if schedule is None and how not in ("auto", "library"):
        schedule = "direct-all-to-all"
    if schedule is not None:
        how = encode_schedule(_OPERATOR, schedule, how, name)
    return _call(x, weight, bias, name, "library" if how == "auto" else how)


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, implementation: str) -> Tensor:
    def compute(config: KernelConfig) -> Tensor:
        if config == LIBRARY:
            product = x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())
            return exchange_rows(product, group).flatten(0, 1)
        out = x.new_empty(x.shape[0], weight.shape[0])
        launch_joint(_OPERATOR, config, GroupProduct(x, weight, bias, out, group), x.dtype)
        return out

    return compute(
        find_config(
            _OPERATOR, x, weight, bias, group, implementation, run=compute,
            check=lambda: _require(x, weight, bias, group, implementation),
        )
    )  # fmt: skip


def _require(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, implementation: str) -> None:
    require_operands(_OPERATOR, x, weight, bias, implementation)
    divide_first_dim(_OPERATOR, x, find_group(group).size())


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, implementation: str) -> Tensor:
    _require(x, weight, bias, group, implementation)
    return x.new_empty(x.shape[0], weight.shape[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.group, _ = inputs
    ctx.has_bias, ctx.is_replicated = bias is not None, False
    save_operands(ctx, x, weight)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """C = all_to_all(x @ W.T): with dP = all_to_all(dC), dx is dP @ W, and dW is dP.T @ x."""
    if torch.is_grad_enabled() and grad.requires_grad:
        raise NotImplementedError(f"{_OPERATOR} has no second derivatives")
    arrived = exchange_rows(grad.contiguous(), ctx.group).flatten(0, 1)
    return *differentiate_product(ctx, arrived, None), None, None


_call = define_operator(
    _OPERATOR, _run, fake=_fake, count_flops=count_product_flops, autograd=Autograd(_save, _differentiate)
)
