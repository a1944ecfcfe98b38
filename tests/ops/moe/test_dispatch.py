# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine between real processes, against a loop over tokens in fp64."""

import pytest
import torch
import torch.distributed as dist
from tests.ops.moe.oracle import differentiate_dense, make_layer

from stretto.ops import moe


def share(layer, tokens, rank, experts_rank, experts_ranks):
    """This rank's leaves: its tokens, and its experts' weights."""
    begin = sum(tokens[:rank])
    mine = slice(begin, begin + tokens[rank])
    local = len(layer.gate_up) // experts_ranks
    held = slice(experts_rank * local, (experts_rank + 1) * local)
    parts = layer.x[mine], layer.weights[mine], layer.gate_up[held], layer.down[held]
    return mine, held, [one.clone().requires_grad_() for one in parts]


def run_layer(layer, tokens, grad, max_rows=None, group_size=None):
    """(whether output and gradients are the oracle's, largest differences)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    out, expected = differentiate_dense(layer, grad)
    mine, held, leaves = share(layer, tokens, rank, rank, world)
    x, weights, gate_up, down = leaves
    sent = moe.dispatch(x, layer.ids[mine], len(layer.gate_up), dist.group.WORLD, max_rows=max_rows)
    rows = moe.experts_mlp(sent.rows, sent.offsets, gate_up, down)
    result = moe.combine(rows, sent.handle, weights, dist.group.WORLD)
    grads = torch.autograd.grad(result, leaves, grad[mine])
    differences = [result - out[mine]]
    for one, whole, part in zip(grads, expected, (mine, mine, held, held), strict=True):
        differences.append(one - whole[part])
    return [one.abs().max().item() if one.numel() else 0.0 for one in differences]


@pytest.mark.parametrize(("tokens", "k"), [((5, 3), 2), ((4, 0, 7), 3), ((1, 2, 3, 4), 1), ((3, 3, 3, 3), 4)])
def test_output_and_gradients_are_those_of_a_loop_over_tokens(ranks, tokens, k):
    layer = make_layer(7, sum(tokens), k, 4 * len(tokens) if len(tokens) != 3 else 6)
    grad = torch.randn(layer.x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    for differences in ranks(len(tokens)).run(run_layer, layer, tokens, grad):
        assert max(differences) < 1e-12


@pytest.mark.parametrize(("tokens", "k"), [((4, 4), 2), ((3, 3, 3), 3)])
def test_fixed(ranks, tokens, k):
    layer = make_layer(7, sum(tokens), k, 2 * len(tokens))
    grad = torch.randn(layer.x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    for differences in ranks(len(tokens)).run(run_layer, layer, tokens, grad, sum(tokens) * k):
        assert max(differences) < 1e-12
