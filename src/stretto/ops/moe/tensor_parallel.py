# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel experts: all-gather + grouped GEMM, and grouped GEMM + weighted top-k sum + reduce-scatter.

Each rank has columns of every expert, and its own rows of a sequence. TileLink (section 5, AllGather + MoE; section
7.2, the two halves of a MoE layer). Nothing waits for the host: all ranks have equally many tokens, so sizes are known
before the routing is. Ranks gather the ids, which are small, and each sorts all of them alike.

From top to bottom: the operators; the routing; the two products, which are each other's transposes, with their
gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.ops import choices
from stretto.ops.choices import find_agreed
from stretto.ops.config import LIBRARY, GemmProblem, KernelConfig, decode
from stretto.ops.gemm import align
from stretto.ops.moe.activation import Activation, find_activation, gated_activation, has_gate
from stretto.ops.moe.grouped.config import GroupedConfig, choose_config, require_implementation
from stretto.ops.moe.grouped.matmul import compute_product, grouped_weight_gradient, require_operands, take_rows
from stretto.ops.moe.permutation import (
    require_tokens,
    require_weighted,
    sort_by_expert,
    spread_tokens,
    sum_copies,
    sum_dtype,
    weigh_and_multiply,
)
from stretto.ops.moe.tensor_parallel_kernels import Routed, exchange, multiply_arriving, multiply_leaving
from stretto.ops.operands import needs_gradients, takes_tensors
from stretto.ops.operator import (
    Autograd,
    define_operator,
    find_group,
    find_name,
    gather_rows,
    reduce_scatter,
    require_agreement,
)


@dataclass(frozen=True)
class GatheredRows:
    """Rows of all ranks' tokens, sorted by expert, then source rank, then token: what `all_gather_moe` returns.

    rows: [n, f], n = ranks * t * k. offsets: int32 [experts + 1], on the device; expert e's rows are offsets[e] to
    offsets[e + 1]. handle: for `moe_reduce_scatter`.
    """

    rows: Tensor
    handle: Routed

    @property
    def offsets(self) -> Tensor:
        return self.handle.offsets


@takes_tensors
def all_gather_moe(
    x: Tensor, weight: Tensor, topk_ids: Tensor, group: dist.ProcessGroup | None = None, *, implementation: str = "auto"
) -> GatheredRows:
    """Gather all ranks' tokens, and multiply each by its experts: x [t, h], weight [e, f, h], topk_ids [t, k].

    Row i of the result's rows [ranks * t * k, f] is weight[expert] @ token, in the order of `GatheredRows`. weight:
    this rank's f columns of every expert. x is bf16, fp16, fp32 or fp64, and weight of its dtype; ids are int64 or
    int32, 0 to e - 1, checked on CPUs. group: None for all ranks; all give as many tokens, which may be 0. The host
    waits for nothing.

    x's gradient is the transposed pair, a grouped product and a reduce-scatter, with the sums of `moe_reduce_scatter`;
    weight's needs the gathered tokens [ranks * t, h], which are kept for it. implementation: "library" gathers by the
    group's backend, then multiplies as `grouped_matmul`; "kernel" multiplies tokens as they arrive, for what
    `grouped_matmul`'s kernels take, between ranks of one machine; "auto" is the faster one where `ops.tune` or a first
    call has timed both, and else the library. ValueError for other shapes and dtypes, where no kernel can run, and if
    ranks make different calls. TileLink, section 5.
    """
    name = find_name(group)
    require_implementation(implementation)
    require_tokens("all_gather_moe", x, topk_ids, weight.shape[0] if weight.dim() == 3 else 1)
    routed = Routed(*gather_routing(topk_ids, weight.shape[0], name, implementation))
    require_operands("all_gather_moe", x, weight, routed.offsets)
    rows, _ = gather_multiply(x, weight, *routed, name, implementation, needs_gradients(weight))
    return GatheredRows(rows, routed)


@takes_tensors
def moe_reduce_scatter(
    rows: Tensor,
    weight: Tensor,
    handle: Routed,
    topk_weights: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    implementation: str = "auto",
) -> Tensor:
    """Multiply each expert's rows, and sum each token's at its rank: rows [n, f], weight [e, h, f] -> [t, h].

    rows: in the order of `all_gather_moe`, whose handle it is. weight: of every expert, what multiplies this rank's f
    columns. topk_weights [t, k], of x's or another floating dtype, are those of this rank's tokens, and gathered here.

    Sums, in order: a row's product, in fp32, rounded to rows' dtype; a token's k rows, weighted, in fp32 in the order
    of its ids, rounded; the ranks' sums of a token, which travel in rows' dtype, in fp32 in the order of ranks,
    rounded. With implementation="library" on GPUs the last one is the group's reduce-scatter, in its own order (fp64
    stays fp64 throughout). The gradients of rows and weight need one all-gather of the result's, which is multiplied as
    in `all_gather_moe`. ValueError as there, and for rows that are not the handle's.
    """
    name = find_name(group)
    require_implementation(implementation)
    require_operands("moe_reduce_scatter", rows, weight, handle.offsets)
    tokens, k = handle.positions.shape
    if rows.shape[0] != handle.tokens.shape[0]:
        raise ValueError(
            f"moe_reduce_scatter: the handle is of {handle.tokens.shape[0]} rows, and rows is {list(rows.shape)}: give "
            "what was computed from the rows that came with it"
        )
    require_weighted("moe_reduce_scatter", rows, topk_weights, (tokens // dist.get_world_size(group), k))
    out, _ = multiply_scatter(rows, weight, topk_weights, *handle, name, implementation)
    return out


@takes_tensors
def moe_mlp(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    activation: Activation = "silu",
    implementation: str = "auto",
) -> Tensor:
    """The weighted sum of each token's experts, of which each rank has columns: x [t, h], topk_ids [t, k] -> [t, h].

    gate_up: [e, 2 * f, h], this rank's columns of every expert's gate, then those of its up projection; or [e, f, h]
    without a gate. down: [e, h, f]. It is `all_gather_moe`, the activation, and `moe_reduce_scatter`, whose arguments
    and errors these are; activation is that of `gated_activation`. ValueError too for weights that do not fit.
    """
    is_gated = has_gate("moe_mlp", gate_up, down)
    require_weighted("moe_mlp", x, topk_weights, topk_ids.shape)
    function = find_activation(activation)
    found = all_gather_moe(x, gate_up, topk_ids, group, implementation=implementation)
    rows = gated_activation(found.rows, activation) if is_gated else function(found.rows)
    return moe_reduce_scatter(rows, down, found.handle, topk_weights, group, implementation=implementation)


# The routing.


def _run_routing(topk_ids: Tensor, experts: int, group: str, implementation: str) -> tuple[Tensor, Tensor, Tensor]:
    (t, k), device = topk_ids.shape, topk_ids.device
    _require_agreement(f"routing of [{t}, {k}] {topk_ids.dtype}, {experts} experts, {implementation}", group, device)
    if obstacle := _find_obstacle(implementation, group, device):
        raise ValueError(obstacle)
    _, tokens, positions, offsets = sort_by_expert(_gather(topk_ids, group, implementation), experts)
    return tokens, positions, offsets


def _fake_routing(topk_ids: Tensor, experts: int, group: str) -> tuple[Tensor, Tensor, Tensor]:
    (t, k), ranks = topk_ids.shape, find_group(group).size()
    return (
        topk_ids.new_empty(ranks * t * k, dtype=torch.int32),
        topk_ids.new_empty(ranks * t, k, dtype=torch.int64),
        topk_ids.new_empty(experts + 1, dtype=torch.int32),
    )


gather_routing = define_operator("moe_gather_routing", _run_routing, fake=_fake_routing)


def _require_agreement(call: str, group: str, device: torch.device, *, is_ready: bool = True) -> bool:
    """True if the call is_ready on all ranks. ValueError if they make different calls."""
    if find_group(group).size() == 1:
        return is_ready
    return require_agreement(f"tensor-parallel experts: {call}", is_ready, group, device).by_tma


def _find_config(
    call: str, implementation: str, n: int, operands: tuple[Tensor, ...], group: str
) -> GroupedConfig | None:
    """The kernel's configuration of a product, None for the library. ValueError where "kernel" is asked for in vain."""
    device, config = operands[0].device, None
    obstacle = _find_obstacle(implementation, group, device) if n else ""
    if implementation != "library" and find_group(group).size() > 1 and n and not obstacle:
        try:
            config = find_tiles(implementation, operands, n)
        except ValueError as error:  # which other ranks need not have
            obstacle = str(error)
    is_ready = _require_agreement(f"{call}, {implementation}", group, device, is_ready=not obstacle)
    if obstacle or not is_ready:
        raise ValueError(obstacle or "no kernel can run, since another rank's operands do not suit any")
    return config


def find_tiles(implementation: str, operands: tuple[Tensor, ...], n: int) -> GroupedConfig:
    """The tiles of a product of n rows, of "kernel" or an encoded configuration. ValueError where none can run."""
    found = choose_config("kernel", "product", n, len(operands[1]), operands)
    assert found is not None
    blocks = None if implementation == "kernel" else decode(implementation).blocks
    return found if blocks is None else GroupedConfig(blocks)


def choose_implementation(
    operator: str,
    like: Tensor,
    weight: torch.Size,
    positions: Tensor,
    group: str,
    run: Callable[[KernelConfig], object],
    *options: object,
    is_transposed: bool,
) -> str:
    """Find what "auto" is for a call, on all ranks alike: "library", or a configuration as text. Counts the call.

    like: of the operands' dtype and device. weight: [e, f, h] of all experts here. positions: [ranks * t, k], of the
    routing. run: computes the call, to time it.
    """
    if find_group(group).size() == 1 or not positions.shape[0] or not weight.numel():
        return LIBRARY.encode()
    problem = describe_product(operator, like.dtype, weight, positions, group, is_transposed=is_transposed)
    return choices.choose_config(problem, like, None, group, "auto", *options, run=run).encode()


def describe_product(
    operator: str, dtype: torch.dtype, weight: torch.Size, positions: Tensor, group: str, *, is_transposed: bool
) -> GemmProblem:
    """The problem that a call computes; positions: [ranks * t, k]."""
    (tokens, k), (experts, n, inner), ranks = positions.shape, weight, find_group(group).size()
    return GemmProblem(operator, tokens, n, inner, dtype, is_transposed, ranks, experts=experts, top_k=k)


def _find_obstacle(implementation: str, group: str, device: torch.device) -> str:
    """Say why the group's ranks cannot run kernels that were asked for, "" if they can."""
    obstacle = ""
    if implementation not in ("auto", "library") and find_group(group).size() > 1:
        obstacle = find_agreed(group, device).obstacle
    return obstacle and f'no kernel can run: {obstacle}; implementation="library" will do'


def _gather(rows: Tensor, group: str, implementation: str = "library") -> Tensor:
    """All ranks' rows, in their order, in memory of their own."""
    ranks = find_group(group).size()
    if not rows.numel() or ranks == 1:
        return rows.repeat(ranks, 1)
    if implementation == "kernel":
        return exchange(rows.expand(ranks, *rows.shape), group).flatten(0, 1)
    return gather_rows(rows.contiguous(), group)


def _scatter(sums: Tensor, group: str) -> Tensor:
    """This rank's rows of the sum over ranks: on CPUs in the order of ranks, on GPUs by the group's reduce-scatter."""
    ranks = find_group(group).size()
    if not sums.numel() or ranks == 1:
        return sums[: sums.shape[0] // ranks].clone()
    return reduce_scatter(sums, group)


# All-gather + grouped product.


def _run_gather(
    x: Tensor,
    weight: Tensor,
    tokens: Tensor,
    positions: Tensor,
    offsets: Tensor,
    group: str,
    implementation: str,
    keeps_gathered: bool,
) -> tuple[Tensor, Tensor]:
    """(rows [n, f], gathered tokens [ranks * t, h] if they are kept, else none)."""
    x, weight = align(x.contiguous()), _orient(weight)
    if implementation == "auto":
        implementation = choose_implementation(
            "all_gather_moe", x, weight.shape, positions, group,
            lambda how: _run_gather(x, weight, tokens, positions, offsets, group, how.encode(), keeps_gathered),
            keeps_gathered, is_transposed=not weight.is_contiguous(),
        )  # fmt: skip
    config = _find_config(
        f"all-gather of [{x.shape[0]}, {x.shape[1]}] {x.dtype}", implementation, tokens.shape[0], (x, weight), group
    )  # fmt: skip
    if config is not None and weight.numel():
        routed = Routed(tokens, positions, offsets)
        return multiply_arriving(config, x, weight, routed, group, keeps_gathered=keeps_gathered)
    gathered = _gather(x, group, implementation)
    rows = compute_product(gathered, weight, offsets, tokens, "auto")
    return rows, gathered if keeps_gathered else x.new_empty(0, x.shape[1])


def _orient(weight: Tensor) -> Tensor:
    """The weight, contiguous or the transpose of what is."""
    return align(weight if weight.is_contiguous() or weight.mT.is_contiguous() else weight.contiguous())


def _fake_gather(
    x: Tensor, weight: Tensor, tokens: Tensor, positions: Tensor, keeps_gathered: bool
) -> tuple[Tensor, Tensor]:
    kept = positions.shape[0] if keeps_gathered else 0
    return x.new_empty(tokens.shape[0], weight.shape[1]), x.new_empty(kept, x.shape[1])


def _save_gather(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, weight, *routing, ctx.group, ctx.implementation, _keeps_gathered = inputs
    needs_x, needs_weight, *_ = ctx.needs_input_grad
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(weight if needs_x else None, output[1] if needs_weight else None, *routing)


def _differentiate_gather(ctx: Any, grad: Tensor | None, _of_gathered: Tensor | None) -> tuple[Tensor | None, ...]:
    """C = gather(x)[tokens] @ W.T: dx is the reduce-scatter of each token's rows of dC @ W; dW is dC.T @ those rows."""
    weight, gathered, tokens, positions, offsets = ctx.saved_tensors
    of_x = of_weight = None
    if grad is not None:
        grad = grad.contiguous()
        if weight is not None:
            transposed = weight.transpose(1, 2)
            of_x, _ = multiply_scatter(
                grad, transposed, None, tokens, positions, offsets, ctx.group, ctx.implementation
            )
        if gathered is not None:
            of_weight = grouped_weight_gradient(grad, gathered, offsets, tokens=tokens)
    return of_x, of_weight, None, None, None, None, None, None


# Grouped product + weighted sum + reduce-scatter.


def _run_scatter(
    rows: Tensor,
    weight: Tensor,
    topk_weights: Tensor | None,
    tokens: Tensor,
    positions: Tensor,
    offsets: Tensor,
    group: str,
    implementation: str,
) -> tuple[Tensor, Tensor]:
    """(this rank's tokens [t, h], all ranks' weights [ranks * t, k], of no elements without weights)."""
    rows, weight = align(rows.contiguous()), _orient(weight)
    weighted = "unweighted" if topk_weights is None else topk_weights.dtype
    if implementation == "auto":
        implementation = choose_implementation(
            "moe_reduce_scatter", rows, weight.shape, positions, group,
            lambda how: _run_scatter(rows, weight, topk_weights, tokens, positions, offsets, group, how.encode()),
            weighted, is_transposed=not weight.is_contiguous(),
        )  # fmt: skip
    config = _find_config(
        f"reduce-scatter of [{positions.shape[0]}, {weight.shape[1]}] {rows.dtype}, {weighted}", implementation,
        rows.shape[0], (rows, weight), group,
    )  # fmt: skip
    everyones = None if topk_weights is None else _gather(topk_weights, group, implementation)
    if config is not None and weight.numel():
        out = multiply_leaving(config, rows, weight, everyones, Routed(tokens, positions, offsets), group)
    else:
        products = compute_product(rows, weight, offsets, None, "auto")
        out = _scatter(sum_copies(products, positions, everyones), group)
    return out, rows.new_empty(0) if everyones is None else everyones


def _fake_scatter(
    rows: Tensor, weight: Tensor, topk_weights: Tensor | None, positions: Tensor, group: str
) -> tuple[Tensor, Tensor]:
    everyones = rows.new_empty(0) if topk_weights is None else topk_weights.new_empty(positions.shape)
    return rows.new_empty(positions.shape[0] // find_group(group).size(), weight.shape[1]), everyones


def _save_scatter(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, weight, topk_weights, *routing, ctx.group, ctx.implementation = inputs
    _, needs_weight, needs_topk_weights, *_ = ctx.needs_input_grad
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        rows if needs_weight or needs_topk_weights else None,
        weight,
        None if topk_weights is None else output[1],
        *routing,
    )


def _differentiate_scatter(ctx: Any, grad: Tensor | None, _of_weights: Tensor | None) -> tuple[Tensor | None, ...]:
    """One gather of the gradient, times W for each row; the routers' weights' are products of f numbers, not of h."""
    rows, weight, everyones, tokens, positions, offsets = ctx.saved_tensors
    needs_rows, needs_weight, needs_topk_weights, *_ = ctx.needs_input_grad
    of_weight = of_topk_weights = factors = None
    if grad is None:
        return (None,) * 8
    of_rows, gathered = gather_multiply(
        grad.contiguous(), weight.transpose(1, 2), tokens, positions, offsets, ctx.group, ctx.implementation,
        needs_weight,
    )  # fmt: skip
    numbers = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
    if everyones is not None:
        factors = torch.empty(numbers.shape, dtype=sum_dtype(grad.dtype), device=grad.device)
        factors.view(-1).scatter_(0, positions.reshape(-1), everyones.reshape(-1).to(factors.dtype))
        if needs_topk_weights:
            of_rows, products = weigh_and_multiply(of_rows, rows, numbers, factors)
            products = products.view(-1).index_select(0, positions.reshape(-1)).view(positions.shape)
            of_topk_weights = _scatter_products(products, ctx.group, ctx.implementation).to(everyones.dtype)
        elif needs_rows:
            of_rows = spread_tokens(of_rows, numbers, factors)
    if needs_weight:
        weighed = rows if factors is None else spread_tokens(rows, numbers, factors)
        of_weight = grouped_weight_gradient(take_rows(gathered, tokens), weighed, offsets)
    return of_rows if needs_rows else None, of_weight, of_topk_weights, None, None, None, None, None


def _run_products(products: Tensor, group: str, implementation: str) -> Tensor:
    """This rank's [t, k] of the sum over ranks of products [ranks * t, k]."""
    ranks = find_group(group).size()
    if implementation != "kernel" or ranks == 1 or not products.numel():
        return _scatter(products, group)
    first, *others = exchange(products.view(ranks, -1, products.shape[1]), group)
    for other in others:
        first = first + other
    return first


def _fake_products(products: Tensor, group: str) -> Tensor:
    return products.new_empty(products.shape[0] // find_group(group).size(), products.shape[1])


gather_multiply = define_operator(
    "all_gather_moe",
    _run_gather,
    fake=_fake_gather,
    count_flops=lambda tokens, weight: 2 * tokens[0] * prod(weight[1:]),
    autograd=Autograd(_save_gather, _differentiate_gather),
)
multiply_scatter = define_operator(
    "moe_reduce_scatter",
    _run_scatter,
    fake=_fake_scatter,
    count_flops=lambda rows, weight: 2 * rows[0] * prod(weight[1:]),
    autograd=Autograd(_save_scatter, _differentiate_scatter),
)
_scatter_products = define_operator("moe_scatter_products", _run_products, fake=_fake_products)
