"""Gradients of the operators: the input's gradient of one is the other, overlapped as well.

C = gather(x) @ W.T: dx is the reduce-scatter of dC @ W, and dW is dC.T @ gather(x).
C = reduce_scatter(x @ W.T): dx is gather(dC) @ W, and dW is gather(dC).T @ x.
Only what these take is saved: beside a frozen weight no activations are.
"""

from typing import Any

import torch
from torch import Tensor

from stretto.ops.eager import outside_autocast
from stretto.ops.library import all_reduce, gather_rows, scatter_sum
from stretto.ops.plans import decode

_ops = torch.ops.stretto


def save_gather(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, bias, group, implementation = inputs
    ctx.group, ctx.has_bias, ctx.is_gathered = group, bias is not None, isinstance(output, tuple)
    ctx.implementation = _pin(implementation)
    ctx.set_materialize_grads(False)
    _save(ctx, output[1] if ctx.is_gathered else x, weight)


@outside_autocast
def differentiate_gather(
    ctx: Any, grad: Tensor | None, grad_gathered: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    rows, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    grad_x = grad_weight = grad_bias = None
    if grad is not None:
        grad = grad.contiguous()
        if needs_x:
            grad_x = _ops.matmul_reduce_scatter(grad, weight.t(), None, ctx.group, None, ctx.implementation)
        if needs_weight:
            gathered = rows if ctx.is_gathered else gather_rows(rows, ctx.group)
            grad_weight = grad.t() @ gathered
        if ctx.has_bias and needs_bias:
            grad_bias = grad.sum(0)
    if grad_gathered is not None and needs_x:
        direct = scatter_sum(grad_gathered.contiguous(), ctx.group)
        grad_x = direct if grad_x is None else grad_x + direct
    return grad_x, grad_weight, grad_bias, None, None


def save_scatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, group, _, implementation = inputs
    ctx.group, ctx.has_bias, ctx.implementation = group, bias is not None, _pin(implementation)
    _save(ctx, x, weight)


@outside_autocast
def differentiate_scatter(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    grad = grad.contiguous()
    grad_x = grad_weight = None
    if needs_x and needs_weight:
        grad_x, gathered = _ops.all_gather_matmul_gathered(grad, weight.t(), None, ctx.group, ctx.implementation)
        grad_weight = gathered.t() @ x
    elif needs_x:
        grad_x = _ops.all_gather_matmul(grad, weight.t(), None, ctx.group, ctx.implementation)
    elif needs_weight:
        grad_weight = gather_rows(grad, ctx.group).t() @ x
    return grad_x, grad_weight, grad.sum(0) if ctx.has_bias and needs_bias else None, None, None, None


def save_all_reduce(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, group, _ = inputs
    ctx.group, ctx.has_bias = group, bias is not None
    _save(ctx, x, weight)


@outside_autocast
def differentiate_all_reduce(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Each rank's sums are in all ranks' outputs, and so are its gradients in all of theirs."""
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    grad = grad.contiguous()
    total = all_reduce(grad, ctx.group) if needs_x or needs_weight else grad
    grad_bias = grad.sum(0) if ctx.has_bias and needs_bias else None
    return total @ weight if needs_x else None, total.t() @ x if needs_weight else None, grad_bias, None, None


def _save(ctx: Any, rows: Tensor, weight: Tensor) -> None:
    """The weight for x's gradient, and the rows for the weight's."""
    needs_x, needs_weight, *_ = ctx.needs_input_grad
    ctx.save_for_backward(rows if needs_weight else None, weight if needs_x else None)


def _pin(implementation: str) -> str:
    """What the other operator of a backward pass is to be done by: a plan is of one operator and its shapes alone."""
    if implementation in ("auto", "kernel", "library"):
        return implementation
    return decode(implementation).implementation
