# SPDX-License-Identifier: Apache-2.0
"""A parallelized model under the other ways of asking autograd for gradients."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, parallelize
from tests.differences import largest
from tests.parallel.training import Sizes, distance

CONFIG = GPTConfig(layers=2, hidden=16, heads=2, vocab=23, max_seq_len=8, tie_embeddings=False)
GRIDS = [(2, 1, 1, 2), (1, 2, 2, 1)]


def on_grid(sizes: Sizes) -> Grid:
    return Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))


def gpt() -> GPT:
    torch.manual_seed(5)
    return GPT(CONFIG).double()


def with_gradient(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.grad is not None]


def asked_for_less(sizes: Sizes, shards_sequence: bool) -> dict[str, object]:
    """Return what has a gradient where autograd was asked for that of an activation, of a norm, and of two weights."""
    grid = on_grid(sizes)
    plain, model = gpt(), parallelize(gpt(), grid, shard_sequence=shards_sequence)
    tokens = torch.arange(16).view(2, 8) % 23

    def by_activation(gpt: nn.Module) -> Tensor:
        kept: list[Tensor] = []
        handle = gpt.blocks[0].register_forward_hook(lambda *call: kept.append(call[-1]))
        loss = gpt(tokens, tokens)
        handle.remove()
        return torch.autograd.grad(loss, kept)[0]

    mine, whole = by_activation(model), by_activation(plain)
    if shards_sequence:
        whole = whole.flatten(0, 1).chunk(grid.size("x"))[grid.coordinate("x")].unsqueeze(0)
    whole = whole.chunk(grid.size("y"), -1)[grid.coordinate("y")]
    seen: dict[str, object] = {"of an activation": with_gradient(model)}
    seen["distance"] = distance(mine, whole)
    model(tokens, tokens).backward(inputs=[model.norm.weight])
    seen["of a norm"] = with_gradient(model)
    model.zero_grad()
    two = [model.blocks[1].attention.qkv.weight, model.head.weight]
    model(tokens, tokens).backward(inputs=two)
    seen["of two weights"] = with_gradient(model)
    with pytest.raises(RuntimeError, match=r"autograd\.grad was called for a parameter"):
        torch.autograd.grad(model(tokens, tokens), two)
    return seen


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("sizes", "shards_sequence"), [*((sizes, False) for sizes in GRIDS), ((1, 2, 2, 1), True)])
def test_weights_that_autograd_was_not_asked_for_get_no_gradient(ranks, sizes, shards_sequence):
    for seen in ranks(4).run(asked_for_less, sizes, shards_sequence):
        assert seen.pop("distance") < 1e-12
        assert seen == {
            "of an activation": [],
            "of a norm": ["norm.weight"],
            "of two weights": ["blocks.1.attention.qkv.weight", "head.weight"],
        }


def gradient_penalty(sizes: Sizes) -> str:
    """The errors of a penalty on the gradient by the input of two linears, and of a norm."""
    grid, messages = on_grid(sizes), []
    x = torch.ones(4, 8 // grid.size("y"))
    for roles in ({"0": "colwise", "2": "rowwise"}, {"0": "norm"}):
        torch.manual_seed(5)
        modules = [nn.LayerNorm(8)] if "norm" in roles.values() else [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)]
        model = parallelize(nn.Sequential(*modules), grid, roles=roles)
        again = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(again).square().sum(), again, create_graph=True)
        with pytest.raises(RuntimeError) as caught:
            gradient.square().sum().backward()
        messages.append(str(caught.value))
    return " ".join(messages)


def test_gradients_of_gradients_are_refused_for_parts_of_them_would_be_missing(ranks):
    assert all(message.count("differentiate twice") == 2 for message in ranks(4).run(gradient_penalty, (1, 2, 2, 1)))


def keep_products(context: object, operator: object, *args: object, **options: object) -> CheckpointPolicy:
    is_product = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def selectively_checkpointed(sizes: Sizes, shards_sequence: bool) -> float:
    """Return how far gradients are from those without checkpointing, where blocks keep their products only."""
    grid = on_grid(sizes)
    tokens = torch.arange(16).view(2, 8) % 23
    gradients = []
    for is_checkpointed in (False, True):
        model = parallelize(gpt(), grid, shard_sequence=shards_sequence)
        for block in model.blocks if is_checkpointed else []:
            contexts = partial(create_selective_checkpoint_contexts, keep_products)
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
        model(tokens, tokens).backward()
        gradients.append([parameter.grad.to_local() for parameter in model.parameters()])
    return largest(float((ours - plain).abs().max()) for plain, ours in zip(*gradients, strict=True))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shards_sequence", [False, True])
def test_blocks_may_keep_their_products_and_run_the_rest_again(ranks, shards_sequence):
    assert largest(ranks(4).run(selectively_checkpointed, (1, 2, 2, 1), shards_sequence)) < 1e-12
