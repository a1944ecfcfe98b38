# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts as its definition says it: a loop over tokens and their experts, on one process, in fp64."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu


@dataclass
class Layer:
    """What a layer of experts computes with: x [t, h], ids and weights [t, k], gate_up [E, 2F, h], down [E, h, F]."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor


def make_layer(seed: int, tokens: int, k: int, num_experts: int, hidden: int = 6, inner: int = 5) -> Layer:
    """A layer of random numbers in fp64, whose tokens have k different experts each."""
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    ids = [torch.randperm(num_experts, generator=generator)[:k] for _ in range(tokens)]
    return Layer(
        draw(tokens, hidden),
        torch.stack(ids) if ids else torch.empty(0, k, dtype=torch.int64),
        torch.rand(tokens, k, generator=generator, dtype=torch.float64),
        draw(num_experts, 2 * inner, hidden),
        draw(num_experts, hidden, inner),
    )


def run_expert(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One expert's MLP on one token [h]."""
    both = gate_up @ x
    inner = down.shape[1]
    return down @ (silu(both[:inner]) * both[inner:])


def run_dense(layer: Layer) -> Tensor:
    """The layer's output [t, h], token by token."""
    out = []
    for token in range(len(layer.x)):
        total = torch.zeros_like(layer.x[token])
        for slot, expert in enumerate(layer.ids[token].tolist()):
            result = run_expert(layer.x[token], layer.gate_up[expert], layer.down[expert])
            total = total + layer.weights[token, slot] * result
        out.append(total)
    return torch.stack(out) if out else layer.x.new_zeros(0, layer.x.shape[1])


def differentiate_dense(layer: Layer, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(output, gradients of x, weights, gate_up and down), for a gradient of the output."""
    leaves = [one.clone().requires_grad_() for one in (layer.x, layer.weights, layer.gate_up, layer.down)]
    out = run_dense(Layer(leaves[0], layer.ids, *leaves[1:]))
    grads = torch.autograd.grad(out, leaves, grad, allow_unused=True)
    return out.detach(), [
        torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, grads, strict=True)
    ]


def list_rows(ids: list[list[list[int]]], experts: range) -> list[tuple[int, int, int]]:
    """(expert, source rank, token) of each row for these experts, in order, from all ranks' ids [rank][token][slot]."""
    return [
        (expert, rank, token)
        for expert in experts
        for rank, tokens in enumerate(ids)
        for token, chosen in enumerate(tokens)
        for one in chosen
        if one == expert
    ]
