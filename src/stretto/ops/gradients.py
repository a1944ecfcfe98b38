"""Gradients of the operators: the input's gradient of one is the other, overlapped as well.

C = gather(x) @ W.T: dx is the reduce-scatter of dC @ W, and dW is dC.T @ gather(x).
C = reduce_scatter(x @ W.T): dx is gather(dC) @ W, and dW is gather(dC).T @ x.
"""

from typing import Any

import torch
from torch import Tensor

from stretto.ops.workspace import find_group

_ops = torch.ops.stretto


def save_gather(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, bias, group = inputs
    ctx.group, ctx.has_bias, ctx.is_gathered = group, bias is not None, isinstance(output, tuple)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1] if ctx.is_gathered else x, weight)


def differentiate_gather(
    ctx: Any, grad: Tensor | None, grad_gathered: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    rows, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
    grad_x = grad_weight = grad_bias = None
    if grad is not None:
        grad = grad.contiguous()
        if needs_x:
            grad_x = _ops.matmul_reduce_scatter(grad, weight.t(), None, ctx.group, None)
        if needs_weight:
            gathered = rows if ctx.is_gathered else gather_rows(rows, ctx.group)
            grad_weight = grad.t() @ gathered
        if ctx.has_bias and needs_bias:
            grad_bias = grad.sum(0)
    if grad_gathered is not None and needs_x:
        direct = scatter_sum(grad_gathered.contiguous(), ctx.group)
        grad_x = direct if grad_x is None else grad_x + direct
    return grad_x, grad_weight, grad_bias, None


def save_scatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, group, _ = inputs
    ctx.group, ctx.has_bias = group, bias is not None
    ctx.save_for_backward(x, weight)


def differentiate_scatter(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    grad = grad.contiguous()
    grad_x = grad_weight = None
    if needs_x and needs_weight:
        grad_x, gathered = _ops.all_gather_matmul_gathered(grad, weight.t(), None, ctx.group)
        grad_weight = gathered.t() @ x
    elif needs_x:
        grad_x = _ops.all_gather_matmul(grad, weight.t(), None, ctx.group)
    elif needs_weight:
        grad_weight = gather_rows(grad, ctx.group).t() @ x
    return grad_x, grad_weight, grad.sum(0) if ctx.has_bias and needs_bias else None, None, None


def gather_rows(x: Tensor, group: str) -> Tensor:
    """All ranks' x [rows, k], as [world * rows, k], by the group's own backend."""
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_gather_into_tensor(x, find_group(group).size(), group))


def scatter_sum(x: Tensor, group: str) -> Tensor:
    """This rank's rows of the sum of all ranks' x [m, k], added in fp32 in rank order, by the group's own backend."""
    world = find_group(group).size()
    sizes = [x.shape[0] // world] * world
    functional = torch.ops._c10d_functional
    parts = functional.wait_tensor(functional.all_to_all_single(x, sizes, sizes, group)).view(world, -1, x.shape[1])
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(x.dtype)
