# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts as its definition says it: a loop over tokens and their experts, on one process, in fp64."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu


@dataclass
class Layer:
    """Operands of a layer: x [t, h], ids and weights [t, k], gate_up [E, 2F, h], down [E, h, F]."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        """Tensors that have gradients."""
        return [self.x, self.weights, self.gate_up, self.down]


def draw(seed: int, *shape: int) -> Tensor:
    """Random numbers in fp64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_layer(
    seed: int, tokens: int, k: int, num_experts: int, *, chosen: range | None = None, hidden: int = 6, ffn: int = 5
) -> Layer:
    """A layer of random numbers, whose tokens have k different experts each, of those in `chosen` (None: of all)."""
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    experts = torch.tensor(list(chosen or range(num_experts)))
    ids = [experts[torch.randperm(len(experts), generator=generator)[:k]] for _ in range(tokens)]
    return Layer(
        draw(seed + 1, tokens, hidden),
        torch.stack(ids) if ids else torch.empty(0, k, dtype=torch.int64),
        draw(seed + 2, tokens, k).abs(),
        draw(seed + 3, num_experts, 2 * ffn, hidden),
        draw(seed + 4, num_experts, hidden, ffn),
    )


def run_dense(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The layer's output [t, h], token by token."""
    out, inner = [torch.zeros_like(token) for token in x], down.shape[2]
    for token, experts in enumerate(ids.tolist()):
        for slot, expert in enumerate(experts):
            both = gate_up[expert] @ x[token]
            out[token] = out[token] + weights[token, slot] * (down[expert] @ (silu(both[:inner]) * both[inner:]))
    return torch.stack(out) if out else x.clone()


def differentiate_dense(layer: Layer, grad: Tensor) -> list[Tensor]:
    """The output, then the gradients of x, weights, gate_up and down, for a gradient of the output."""
    x, weights, gate_up, down = (one.clone().requires_grad_() for one in layer.leaves)
    out = run_dense(x, layer.ids, weights, gate_up, down)
    (out * grad).sum().backward()
    return [
        out.detach(),
        *(torch.zeros_like(one) if one.grad is None else one.grad for one in (x, weights, gate_up, down)),
    ]


def list_rows(ids: list[list[list[int]]], experts: range) -> tuple[list[tuple[int, int]], list[int]]:
    """((rank, token) of each row for these experts, offsets), from ids [rank][token][slot] of all ranks in order."""
    rows, offsets = [], [0]
    for expert in experts:
        for rank, tokens in enumerate(ids):
            rows += [(rank, token) for token, chosen in enumerate(tokens) for one in chosen if one == expert]
        offsets.append(len(rows))
    return rows, offsets
