# SPDX-License-Identifier: Apache-2.0
"""Gated activations of experts: activation(gate) * up, by one kernel for SiLU on GPUs, and rows' weights behind it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional

from stretto.ops.mlp import ACTIVATIONS
from stretto.ops.moe.permutation import DTYPES, choose_block, find_block
from stretto.ops.operands import needs_gradients, takes_tensors
from stretto.ops.operator import Autograd, define_operator
from stretto.tiles.launches import launch_cached

Activation = str | Callable[[Tensor], Tensor]

_ROW_BLOCK = 1024  # columns of a row that a program has at once
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@takes_tensors
def gated_activation(x: Tensor, activation: Activation = "silu") -> Tensor:
    """activation(gate) * up, of x [n, 2 * F] whose first F columns are the gate, and the others up: [n, F].

    activation: a function of a tensor, or a name: "gelu", "gelu-tanh", "silu", "relu" or "relu-squared". Of x's dtype.
    ValueError for an odd number of columns and for an unknown name. Shazeer, GLU Variants Improve Transformer.

    SiLU of a [n, 2 * F] on a GPU is one kernel forward and one backward: "silu", `torch.nn.functional.silu`, and
    `torch.nn.SiLU` or transformers' `SiLUActivation` without hooks. It computes in fp32 for 16-bit dtypes and rounds
    once, where torch's two operators, which all else takes, round silu(gate) as well: its error is the smaller one, and
    its bits differ from theirs.
    """
    if x.dim() < 1 or x.shape[-1] % 2 or not x.is_floating_point():
        raise ValueError(
            f"gated_activation takes x [n, 2 * F], not {list(x.shape)} of {x.dtype}: gate columns first, then up, of a "
            "floating-point dtype"
        )
    function = find_activation(activation)
    if suits_kernel(x) and is_silu(function):
        return gate_on_gpu(x)
    gate, up = x.chunk(2, -1)
    activated = function(gate)
    if activated.shape != gate.shape:
        raise ValueError(
            f"an activation keeps a tensor's shape, but made {list(activated.shape)} of {list(gate.shape)}"
        )
    return activated * up


def has_gate(operator: str, gate_up: Tensor, down: Tensor) -> bool:
    """True for gate and up projections, False for an up projection alone. ValueError where they do not fit `down`."""
    if gate_up.dim() != 3 or down.dim() != 3 or gate_up.shape[1] not in (down.shape[2], 2 * down.shape[2]):
        raise ValueError(
            f"{operator} takes gate_up [e, 2 * f, h], or [e, f, h] without a gate, and down [e, h, f], not "
            f"{list(gate_up.shape)} and {list(down.shape)}"
        )
    return gate_up.shape[1] != down.shape[2]


def find_activation(activation: Activation) -> Callable[[Tensor], Tensor]:
    """The function that an activation is, or names. ValueError for an unknown name."""
    if not isinstance(activation, str):
        return activation
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be a function or one of {', '.join(ACTIVATIONS)}, not {activation!r}")
    return ACTIVATIONS[activation]


def is_silu(function: Callable[[Tensor], Tensor]) -> bool:
    """True if a function is known to be exactly SiLU.

    Modules are known by their very class, since a subclass may compute something else, and so may one whose `forward`
    was replaced. transformers is not imported: its class is known by its name.
    """
    if function is functional.silu:
        return True
    if not isinstance(function, nn.Module) or "forward" in function.__dict__:
        return False
    kind = type(function)
    is_torch = kind is nn.SiLU and not function.inplace
    is_transformers = (kind.__module__, kind.__qualname__) == ("transformers.activations", "SiLUActivation")
    return (is_torch or is_transformers) and not has_hooks(function)


def has_hooks(module: nn.Module) -> bool:
    """True if a module has hooks, which may change what it takes, what it returns, or the gradients of these."""
    return any(getattr(module, hooks) for hooks in _HOOKS)


def suits_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dim() == 2 and x.dtype in DTYPES


@triton.jit
def gate_by_silu(gates, ups, out, stride, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out [n, columns] = silu(gates) * ups, rounded once. stride: from a row of gates, and of ups, to the next.

    A program has BLOCK columns of one row. Bytes: 2 * columns numbers a row are read and `columns` written.
    Synchronization: none: programs own their part of out.
    """
    dtype = tl.float64 if gates.dtype.element_ty == tl.float64 else tl.float32
    row, at, mask = find_block(columns, BLOCK)
    gate = tl.load(gates + row * stride + at, mask=mask, other=0.0).to(dtype)
    up = tl.load(ups + row * stride + at, mask=mask, other=0.0).to(dtype)
    gated = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + row * columns + at, gated.to(out.dtype.element_ty), mask=mask)


@triton.jit
def differentiate_silu_gate(  # type: ignore[no-untyped-def]
    gates, ups, grad, of_gates, of_ups, stride, columns, BLOCK: tl.constexpr
):
    """of_gates, of_ups = the gradients of `gate_by_silu`, for a gradient [n, columns] of its result.

    stride: from a row of gates, ups, and their gradients to the next. With s = 1 / (1 + exp(-gate)), silu(gate) is
    gate * s, and its derivative s * (1 + gate * (1 - s)). A program has BLOCK columns of one row. Bytes: 3 * columns
    numbers a row are read and 2 * columns written. Synchronization: none: programs own their parts of the gradients.
    """
    dtype = tl.float64 if gates.dtype.element_ty == tl.float64 else tl.float32
    row, at, mask = find_block(columns, BLOCK)
    gate = tl.load(gates + row * stride + at, mask=mask, other=0.0).to(dtype)
    up = tl.load(ups + row * stride + at, mask=mask, other=0.0).to(dtype)
    of_out = tl.load(grad + row * columns + at, mask=mask, other=0.0).to(dtype)
    share = 1 / (1 + tl.exp(-gate))
    of_gate = of_out * up * (share * (1 + gate * (1 - share)))
    tl.store(of_gates + row * stride + at, of_gate.to(of_gates.dtype.element_ty), mask=mask)
    tl.store(of_ups + row * stride + at, (of_out * (gate * share)).to(of_ups.dtype.element_ty), mask=mask)


@triton.jit
def differentiate_weighed_rows(  # type: ignore[no-untyped-def]
    first, second, grad, factors, of_first, of_second, weighed, products, stride, columns, BLOCK: tl.constexpr
):
    """The gradients of rows [n, columns] times factors [n], for a gradient [n, columns] of the weighed rows.

    The rows are `first`, or if `second` is no None silu(first) * second, rounded as `gate_by_silu` does. weighed: the
    rows times their factors; products: those of rows and grad, summed, the gradient of factors; of_first, of_second:
    the gradients of first and second. stride: from a row of first, second and their gradients to the next. All is
    rounded where separate passes would round it. A program has one row. Bytes: with `second`, 3 * columns numbers a row
    are read and 3 * columns written, else 2 and 2. Synchronization: none: programs own their rows.
    """
    dtype = tl.float64 if first.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factors + row).to(dtype)
    total = tl.zeros([BLOCK], dtype)
    for begin in range(0, columns, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        mask = at < columns
        value = tl.load(first + row * stride + at, mask=mask, other=0.0).to(dtype)
        given = tl.load(grad + row * columns + at, mask=mask, other=0.0).to(dtype)
        scaled = (given * factor).to(grad.dtype.element_ty).to(dtype)
        if second is None:
            tl.store(of_first + row * stride + at, scaled.to(of_first.dtype.element_ty), mask=mask)
        else:
            up = tl.load(second + row * stride + at, mask=mask, other=0.0).to(dtype)
            share = 1 / (1 + tl.exp(-value))
            of_gate = scaled * up * (share * (1 + value * (1 - share)))
            tl.store(of_first + row * stride + at, of_gate.to(of_first.dtype.element_ty), mask=mask)
            of_up = scaled * (value * share)
            tl.store(of_second + row * stride + at, of_up.to(of_second.dtype.element_ty), mask=mask)
            value = (value / (1 + tl.exp(-value)) * up).to(weighed.dtype.element_ty).to(dtype)
        tl.store(weighed + row * columns + at, (value * factor).to(weighed.dtype.element_ty), mask=mask)
        total += value * given
    tl.store(products + row, tl.sum(total, axis=0))


class WeighedGradients(NamedTuple):
    """of_rows: the gradient of rows, or of their gate and up [n, 2 * F]. weighed: [n, F], the rows times their factors.

    products: [n], the gradient of the factors, of `sum_dtype`.
    """

    of_rows: Tensor
    weighed: Tensor
    products: Tensor


def differentiate_weighed(rows: Tensor, grad: Tensor, factors: Tensor) -> WeighedGradients:
    """The gradients of rows [n, F] times factors [n], for a gradient [n, F]; it has no gradient itself.

    rows of twice as many columns as grad are gates, then ups: the rows are silu(gate) * up then. On GPUs it is one
    pass over memory, where torch's operators would be ten. factors: of `sum_dtype`.
    """
    if suits_kernel(rows):
        return differentiate_weighed_by_kernel(rows, grad, factors)
    is_gated = rows.shape[1] != grad.shape[1]
    values = gated_activation(rows) if is_gated else rows
    wide, factors = values.to(factors.dtype), factors[:, None]
    of_values = (grad.to(factors.dtype) * factors).to(grad.dtype)
    return WeighedGradients(
        differentiate_silu(rows, of_values) if is_gated else of_values,
        (wide * factors).to(values.dtype),
        (grad.to(factors.dtype) * wide).sum(1),
    )


def differentiate_weighed_by_kernel(rows: Tensor, grad: Tensor, factors: Tensor) -> WeighedGradients:
    rows, grad, (n, columns) = rows.contiguous(), grad.contiguous(), grad.shape
    of_rows, weighed, products = torch.empty_like(rows), torch.empty_like(grad), torch.empty_like(factors)
    halves, of_halves = ((one, None) if one.shape == grad.shape else one.chunk(2, 1) for one in (rows, of_rows))
    if n:
        block = max(min(triton.next_power_of_2(columns), _ROW_BLOCK), 16)
        arguments = *halves, grad, factors.contiguous(), *of_halves, weighed, products, rows.shape[1], columns
        with torch.cuda.device_of(rows):
            launch_cached(differentiate_weighed_rows, n, *arguments, BLOCK=block, num_warps=4, enable_fp_fusion=False)
    return WeighedGradients(of_rows, weighed, products)


def multiply_by_silu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of two CUDA tensors of one shape and dtype, as `gated_activation` computes it."""
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    rows = out.view(gate.shape[:-1].numel(), gate.shape[-1])
    _launch(gate_by_silu, rows, gate.contiguous(), up.contiguous(), rows, rows.shape[1])
    return out


def differentiate_swiglu(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `multiply_by_silu`'s arguments, for a gradient of its result."""
    of_gate, of_up = (torch.empty_like(gate, memory_format=torch.contiguous_format) for _ in range(2))
    rows = of_gate.view(gate.shape[:-1].numel(), gate.shape[-1])
    whole = gate.contiguous(), up.contiguous(), grad.contiguous()
    _launch(differentiate_silu_gate, rows, *whole, of_gate, of_up, rows.shape[1])
    return of_gate, of_up


def _run(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    x = x.contiguous()
    _launch(gate_by_silu, out, *x.chunk(2, 1), out, x.shape[1])
    return out


def _run_gradient(x: Tensor, grad: Tensor) -> Tensor:
    out = x.new_empty(x.shape)
    x, grad = x.contiguous(), grad.contiguous()
    _launch(differentiate_silu_gate, grad, *x.chunk(2, 1), grad, *out.chunk(2, 1), x.shape[1])
    return out


def _launch(kernel: Any, result: Tensor, *arguments: Tensor | int) -> None:
    """Launch a kernel on the parts of a result [n, F]."""
    n, columns = result.shape
    if result.numel():
        block, warps = choose_block(columns)
        if block < columns and warps == 1:  # too few loads would be in flight: a multiprocessor runs 32 programs
            block, warps = 2 * block, 2
        with torch.cuda.device_of(result):
            launch_cached(kernel, n * triton.cdiv(columns, block), *arguments, columns, BLOCK=block, num_warps=warps)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    if not needs_gradients(x, grad):
        return gate_gradient_on_gpu(x, grad)
    return _differentiate_plainly(x, grad)  # for gradients of gradients


def differentiate_silu(x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of x [n, 2 * F], for a gradient [n, F] of silu(gate) * up; it has no gradient itself."""
    return _run_gradient(x, grad) if suits_kernel(x) else _differentiate_plainly(x, grad)


def _differentiate_plainly(x: Tensor, grad: Tensor) -> Tensor:
    gate, up = x.chunk(2, 1)
    share = gate.sigmoid()
    return torch.cat((grad * up * (share * (1 + gate * (1 - share))), grad * (gate * share)), 1)


gate_gradient_on_gpu = define_operator("gated_silu_gradient", _run_gradient, fake=lambda x: x.new_empty(x.shape))
gate_on_gpu = define_operator(
    "gated_silu",
    _run,
    fake=lambda x: x.new_empty(x.shape[0], x.shape[1] // 2),
    autograd=Autograd(_save, _differentiate),
)
