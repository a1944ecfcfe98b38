# SPDX-License-Identifier: Apache-2.0
"""MLPs of experts: of rows that are sorted by expert, and of tokens with the routing and the weighted sum.

On Hopper both are one operator for bf16 and fp16 with SiLU gates. It saves the tokens and gate and up of each row (the
inner activations before the gate), which is SonicMoE's formula (Guo et al., 2025): no permuted copy of the tokens, no
activated rows and no output rows. The backward pass gathers tokens and their gradients inside its products' loads, and
applies the routers' weights to activated rows, of which there are fewer numbers than of outputs as a rule.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor

from stretto.ops.moe.activation import (
    Activation,
    differentiate_silu,
    differentiate_weighed,
    find_activation,
    gated_activation,
    has_gate,
    is_silu,
)
from stretto.ops.moe.grouped import kernels
from stretto.ops.moe.grouped.config import choose_config, require_implementation
from stretto.ops.moe.grouped.matmul import (
    compute_product,
    compute_weight_gradient,
    grouped_matmul,
    require_operands,
    require_places,
)
from stretto.ops.moe.grouped.tile_order import Arrivals
from stretto.ops.moe.permutation import (
    permute,
    require_tokens,
    require_weighted,
    sort_by_expert,
    sum_copies,
    sum_dtype,
    unpermute,
)
from stretto.ops.operands import needs_gradients, takes_tensors
from stretto.ops.operator import Autograd, define_operator, is_traced, without_autocast


@takes_tensors
def experts_mlp(
    rows: Tensor,
    offsets: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation = "silu",
    *,
    implementation: str = "auto",
) -> Tensor:
    """Each expert's MLP on its rows: rows [n, h], gate_up [e, 2 * F, h], down [e, h, F] -> [n, h].

    rows and offsets are those of `Dispatched`. down[i] @ (activation(gate) * up), where gate and up are the first and
    the last F columns of rows @ gate_up[i].T; with an up projection [e, F, h] in gate_up's place, which has no gate,
    down[i] @ activation(rows @ up[i].T). All of one dtype. `gated_activation` says what activation may be;
    implementation and errors are those of `grouped_matmul`, and ValueError for projections that do not fit each other.
    """
    is_gated = has_gate("experts_mlp", gate_up, down)
    require_implementation(implementation)
    function = find_activation(activation)
    if is_gated and is_silu(function):
        require_operands("experts_mlp", rows, gate_up, offsets)
        require_places("experts_mlp", offsets, None, rows)
        require_operands("experts_mlp", rows.new_empty(rows.shape[0], down.shape[-1]), down, offsets)
        keeps_inner = needs_gradients(rows, gate_up, down)
        return _multiply_experts(rows, offsets, gate_up, down, None, None, None, keeps_inner, implementation)[0]
    hidden = grouped_matmul(rows, gate_up, offsets, implementation=implementation)
    hidden = gated_activation(hidden, activation) if is_gated else function(hidden)
    return grouped_matmul(hidden, down, offsets, implementation=implementation)


@takes_tensors
def routed_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation = "silu",
    *,
    implementation: str = "auto",
) -> Tensor:
    """The weighted sum of each token's experts, all on this rank: x [t, h], topk_ids and topk_weights [t, k] -> [t, h].

    gate_up, down and implementation are those of `experts_mlp`, whose outputs are added in the order of topk_ids, as by
    `unpermute`. ids are from 0 to e - 1. ValueError as by `permute`, `experts_mlp` and `unpermute`.
    """
    is_gated, experts = has_gate("routed_experts", gate_up, down), gate_up.shape[0]
    require_tokens("routed_experts", x, topk_ids, experts)
    require_implementation(implementation)
    if not is_gated or not is_silu(find_activation(activation)):
        rows, offsets, positions = permute(x, topk_ids, experts)
        rows = experts_mlp(rows, offsets, gate_up, down, activation, implementation=implementation)
        return unpermute(rows, positions, topk_weights)
    _, tokens, positions, offsets = sort_by_expert(topk_ids, experts)
    require_operands("routed_experts", x, gate_up, offsets)
    require_operands("routed_experts", x.new_empty(0, down.shape[2]), down, offsets)
    require_weighted("routed_experts", x, topk_weights, positions.shape)
    keeps_inner = needs_gradients(x, topk_weights, gate_up, down)
    results = _multiply_experts(x, offsets, gate_up, down, tokens, positions, topk_weights, keeps_inner, implementation)
    return results[0]


def _run(
    rows: Tensor,
    offsets: Tensor,
    gate_up: Tensor,
    down: Tensor,
    tokens: Tensor | None,
    positions: Tensor | None,
    weights: Tensor | None,
    keeps_inner: bool,
    implementation: str,
) -> tuple[Tensor, Tensor]:
    """(rows' outputs [n, h], or their weighted sums [t, h]; gate and up [n, 2 * F], or none of them)."""
    gated, inner = _gate(rows, gate_up, offsets, tokens, keeps_inner, implementation)
    out = compute_product(gated, down, offsets, None, implementation)
    if positions is not None:
        out = sum_copies(out, positions, weights)
    return out, inner


def _gate(
    rows: Tensor,
    gate_up: Tensor,
    offsets: Tensor,
    tokens: Tensor | None,
    keeps_inner: bool,
    implementation: str,
    arrivals: Arrivals | None = None,
) -> tuple[Tensor, Tensor]:
    """(silu(gate) * up [n, F], gate and up [n, 2 * F] if kept) of rows, or rows[tokens]."""
    n = (rows if tokens is None else tokens).shape[0]
    if n and gate_up.numel():
        rows, gate_up = rows.contiguous(), gate_up.contiguous()
        config = choose_config(implementation, "gate", n, gate_up.shape[0], (rows, gate_up))
        if config is not None:
            with torch.cuda.device_of(rows):
                return kernels.multiply_gated(
                    config, rows, gate_up, offsets, tokens, keeps_inner=keeps_inner, arrivals=arrivals
                )
    inner = compute_product(rows, gate_up, offsets, tokens, implementation, arrivals)
    return gated_activation(inner), inner if keeps_inner else inner.new_empty(0, inner.shape[1])


def _run_gradient(
    grad: Tensor,
    rows: Tensor,
    offsets: Tensor,
    gate_up: Tensor,
    down: Tensor,
    inner: Tensor,
    tokens: Tensor | None,
    positions: Tensor | None,
    weights: Tensor | None,
    needed: list[bool],
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of rows, gate_up, down and weights; what is not needed is empty."""
    grad, factors = grad.contiguous(), None
    if weights is not None and positions is not None:
        factors = torch.empty(positions.numel(), dtype=sum_dtype(rows.dtype), device=rows.device)
        factors.scatter_(0, positions.reshape(-1), weights.reshape(-1).to(factors.dtype))
    of_inner, gated, products = _differentiate_gate(grad, down, offsets, inner, tokens, factors, implementation)
    needs_rows, needs_gate_up, needs_down, needs_weights = needed
    none = rows.new_empty(0)
    of_rows = of_gate_up = of_down = of_weights = none
    if needs_down:
        of_down = compute_weight_gradient(grad, gated, offsets, tokens, None, implementation)
    if needs_gate_up:
        of_gate_up = compute_weight_gradient(of_inner, rows, offsets, None, tokens, implementation)
    if needs_rows:
        of_rows = compute_product(of_inner, gate_up.transpose(1, 2), offsets, None, implementation)
        of_rows = of_rows if positions is None else sum_copies(of_rows, positions)
    if needs_weights and weights is not None and positions is not None and products is not None:
        of_weights = products.index_select(0, positions.reshape(-1)).view_as(weights).to(weights.dtype)
    return of_rows, of_gate_up, of_down, of_weights


def _differentiate_gate(
    grad: Tensor,
    down: Tensor,
    offsets: Tensor,
    inner: Tensor,
    tokens: Tensor | None,
    factors: Tensor | None,
    implementation: str,
    arrivals: Arrivals | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(the gradient of inner, silu(gate) * up times factors, the gradient of factors)."""
    n = inner.shape[0]
    if n and down.numel():
        down = down.contiguous()
        config = choose_config(implementation, "gate gradient", n, down.shape[0], (grad, down, inner))
        if config is not None:
            with torch.cuda.device_of(grad):
                found = kernels.differentiate_gate(config, grad, down, offsets, inner, tokens, factors, arrivals)
            return found.inner, found.activated, None if found.products is None else found.products.sum(0)
    of_gated = compute_product(grad, down.transpose(1, 2), offsets, tokens, implementation, arrivals)
    if factors is not None:
        return differentiate_weighed(inner, of_gated, factors)
    return differentiate_silu(inner, of_gated), gated_activation(inner), None


def _fake(
    rows: Tensor, gate_up: Tensor, down: Tensor, tokens: Tensor | None, keeps_inner: bool
) -> tuple[Tensor, Tensor]:
    n = (rows if tokens is None else tokens).shape[0] if keeps_inner else 0
    return rows.new_empty(rows.shape[0], down.shape[1]), rows.new_empty(n, gate_up.shape[1])


def _fake_gradient(
    rows: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor | None, needed: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_rows, of_gate_up, of_down, of_weights = (
        one.new_empty(one.shape) if needs and one is not None else rows.new_empty(0)
        for one, needs in zip((rows, gate_up, down, weights), needed, strict=True)
    )
    return of_rows, of_gate_up, of_down, of_weights


def _count_flops(rows: torch.Size, gate_up: torch.Size, down: torch.Size, tokens: torch.Size | None) -> int:
    return 2 * (rows if tokens is None else tokens)[0] * (prod(gate_up[1:]) + prod(down[1:]))


def _count_gradient_flops(gate_up: torch.Size, down: torch.Size, inner: torch.Size, needed: list[bool]) -> int:
    needs_rows, needs_gate_up, needs_down, _needs_weights = needed
    of_gate_up, of_down = (2 * inner[0] * prod(one[1:]) for one in (gate_up, down))
    return of_gate_up * (needs_rows + needs_gate_up) + of_down * (1 + needs_down)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, _keeps_inner, ctx.implementation = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[1])


def _differentiate(ctx: Any, grad: Tensor | None, _of_inner: Tensor | None) -> tuple[Tensor | None, ...]:
    rows, offsets, gate_up, down, tokens, positions, weights, inner = ctx.saved_tensors
    needed = [ctx.needs_input_grad[place] for place in (0, 2, 3, 6)]
    if grad is None or not any(needed):
        return (None,) * 9
    found = _multiply_experts_gradient(
        grad, rows, offsets, gate_up, down, inner, tokens, positions, weights, needed, ctx.implementation
    )
    of_rows, of_gate_up, of_down, of_weights = (
        one if needs else None for one, needs in zip(found, needed, strict=True)
    )
    return of_rows, None, of_gate_up, of_down, None, None, of_weights, None, None


_multiply_experts = define_operator(
    "experts_mlp", _run, fake=_fake, count_flops=_count_flops, autograd=Autograd(_save, _differentiate)
)
_multiply_experts_gradient = define_operator(
    "experts_mlp_gradient", _run_gradient, fake=_fake_gradient, count_flops=_count_gradient_flops
)


# The first product and its gradient alone: layers with a backward pass of their own gather weights between products.


def _run_gate(
    rows: Tensor, gate_up: Tensor, offsets: Tensor, tokens: Tensor, keeps_inner: bool
) -> tuple[Tensor, Tensor]:
    return _gate(rows, gate_up, offsets, tokens, keeps_inner, "auto")


def _fake_gate(rows: Tensor, gate_up: Tensor, tokens: Tensor, keeps_inner: bool) -> tuple[Tensor, Tensor]:
    n, columns = tokens.shape[0], gate_up.shape[1]
    return rows.new_empty(n, columns // 2), rows.new_empty(n if keeps_inner else 0, columns)


def _run_gate_gradient(
    grad: Tensor, down: Tensor, offsets: Tensor, inner: Tensor, tokens: Tensor, factors: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    of_inner, gated, products = _differentiate_gate(grad, down, offsets, inner, tokens, factors, "auto")
    assert products is not None
    return of_inner, gated, products


def _fake_gate_gradient(inner: Tensor, factors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gated = inner.new_empty(inner.shape[0], inner.shape[1] // 2)
    return inner.new_empty(inner.shape), gated, factors.new_empty(factors.shape)


_gate_tokens = define_operator(
    "experts_gate", _run_gate, fake=_fake_gate, count_flops=lambda gate_up, tokens: 2 * tokens[0] * prod(gate_up[1:])
)
_differentiate_tokens = define_operator(
    "experts_gate_gradient",
    _run_gate_gradient,
    fake=_fake_gate_gradient,
    count_flops=lambda down, inner: 2 * inner[0] * prod(down[1:]),
)


def gate_tokens(
    rows: Tensor, gate_up: Tensor, offsets: Tensor, tokens: Tensor, keeps_inner: bool, arrivals: Arrivals | None = None
) -> tuple[Tensor, Tensor]:
    """(silu(gate) * up [n, F], gate and up [n, 2 * F], or none if not kept) of rows[tokens] and gate_up [e, 2 * F, h].

    arrivals: of rows that are on their way, and are multiplied as they arrive. It has no gradient.
    """
    if arrivals is None or _must_wait(arrivals, rows, gate_up):
        return _gate_tokens(rows, gate_up, offsets, tokens, keeps_inner)
    return without_autocast(_gate)(rows, gate_up, offsets, tokens, keeps_inner, "auto", arrivals)


def differentiate_gate(
    grad: Tensor,
    down: Tensor,
    offsets: Tensor,
    inner: Tensor,
    tokens: Tensor,
    factors: Tensor,
    arrivals: Arrivals | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(the gradient of inner [n, 2 * F], silu(gate) * up times factors, the gradient of factors [n]) of grad [t, h].

    inner: gate and up of `gate_tokens`, whose activations times factors, times down [e, h, F], give results of which
    row i has the gradient grad[tokens[i]]. arrivals: of grad, as of rows there. It has no gradient.
    """
    if arrivals is None or _must_wait(arrivals, grad, down):
        return _differentiate_tokens(grad, down, offsets, inner, tokens, factors)
    run = without_autocast(_differentiate_gate)
    of_inner, gated, products = run(grad, down, offsets, inner, tokens, factors, "auto", arrivals)
    assert products is not None
    return of_inner, gated, products


def _must_wait(arrivals: Arrivals, *operands: Tensor) -> bool:
    """True, after a wait for all rows, where torch must see the product, whose schema has no arrivals."""
    if not is_traced(*operands):
        return False
    arrivals.wait()
    return True
