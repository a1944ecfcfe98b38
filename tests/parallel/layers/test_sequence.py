# SPDX-License-Identifier: Apache-2.0
"""Activations that are sharded by tokens over x between blocks: the same training, and other messages."""

from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, checkpoint_activations, parallelize
from tests.differences import largest
from tests.parallel.comm.wire import Message, WireCounter
from tests.parallel.test_parity import VARIANTS, gpt
from tests.parallel.training import (
    PRECISIONS,
    SEED,
    Case,
    Precision,
    batches,
    build,
    disagreements,
    distance,
    logits_of,
    train_plainly,
)

GRIDS = [(1, 2, 1, 1), (1, 4, 1, 1), (2, 2, 1, 1), (1, 2, 1, 2), (1, 2, 2, 2), (1, 4, 2, 1), (1, 8, 1, 1)]
BATCH, SEQ_LEN = 2, 6


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("sizes", GRIDS, ids=str)
@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_five_steps_equal_those_of_one_rank(ranks, sizes, precision):
    print(f"seed {SEED}")
    names = [name for name, case in VARIANTS.items() if case.model_args[0].num_kv_heads % sizes[1] == 0]
    name = names[(GRIDS.index(sizes) + 3 * list(PRECISIONS).index(precision)) % len(names)]
    chosen = PRECISIONS[precision]
    expected = train_plainly(VARIANTS[name], chosen)
    case = replace(VARIANTS[name], shards_sequence=True)
    assert ranks(prod(sizes)).run(disagreements, sizes, case, chosen, expected) == [{}] * prod(sizes)


def logits_distance(case: Case, precision: Precision, expected: torch.Tensor) -> float:
    """Return how far whole logits are from the reference's: of the whole batch,
    and then of a batch of another shape, whose tensors count no writes.
    """
    model = parallelize(build(case, precision), Grid(x=4), shard_sequence=True)
    tokens, _ = next(batches(case))
    apart = []
    for mode, rows, length in ((torch.no_grad, None, None), (torch.inference_mode, 3, 8)):
        with mode():
            apart.append(distance(logits_of(case, model, tokens[:rows, :length]), expected[:rows, :length]))
    return largest(apart)


def test_every_rank_gets_whole_logits_of_batches_of_any_shape(ranks):
    case, precision = VARIANTS["llama-like"], PRECISIONS["fp64-adamw"]
    tokens, _ = next(batches(case))
    with torch.no_grad():
        expected = build(case, precision)(tokens)
    assert largest(ranks(4).run(logits_distance, case, precision, expected)) < 1e-12


def messages_over_x(config: GPTConfig, is_sharded: bool) -> Counter[Message]:
    grid = Grid(x=2)
    torch.manual_seed(SEED)
    model = parallelize(GPT(config), grid, shard_sequence=is_sharded)
    text = torch.randint(config.vocab, (BATCH, SEQ_LEN + 1))
    with WireCounter({"x": grid.group("x")}) as wire:
        model(text[:, :-1], text[:, 1:]).backward()
    return wire.messages


def test_gathers_and_scatters_of_hidden_activations_take_the_place_of_all_reduces(ranks):
    config = gpt(activation="swiglu", norm="rmsnorm", bias=False, hidden=40)
    hidden = BATCH * SEQ_LEN * config.hidden
    for messages in ranks(2).run(messages_over_x, config, True):
        of_hidden = Counter({m.kind: times for m, times in messages.items() if m.numel == hidden})
        # Of a block: gathered for qkv and for up (which gate shares), and both outputs' gradients; scattered: both
        # outputs, and the gradients of three inputs. Besides, the embedding's sum and its gradient, and the head's
        # input; the gradient by that is the one sum that is left.
        assert of_hidden == {
            "all-gather": config.layers * 4 + 2,
            "reduce-scatter": config.layers * 5 + 1,
            "all-reduce": 1,
        }
    for messages in ranks(2).run(messages_over_x, config, False):
        assert {m.kind for m in messages if m.numel == hidden} == {"all-reduce"}


def losses_with_dropout(sizes: dict[str, int], is_sharded: bool, is_checkpointed: bool) -> float:
    config = GPTConfig(layers=2, hidden=32, heads=4, vocab=61, max_seq_len=16, dropout=0.3)
    grid = Grid(**sizes)
    torch.manual_seed(0)
    model = parallelize(GPT(config).double(), grid, shard_sequence=is_sharded)
    if is_checkpointed:
        checkpoint_activations(model)
    tokens = torch.arange(8 * 16).view(8, 16) % 61
    rows = tokens.chunk(grid.size("batch"))[grid.coordinate("batch")]
    torch.manual_seed(1)
    loss = model(rows, rows)
    loss.backward()
    return loss.item() + sum(p.grad.full_tensor().square().sum().item() for p in model.parameters())


def all_losses_with_dropout() -> list[float]:
    return [
        losses_with_dropout(sizes, True, is_checkpointed)
        for sizes, is_checkpointed in (({"x": 4}, False), ({"x": 2, "y": 2}, False), ({"x": 2, "z": 2}, True))
    ]


@pytest.mark.long
def test_the_same_elements_are_dropped(ranks):
    (expected,) = ranks(1).run(losses_with_dropout, {}, False, False)
    for losses in ranks(4).run(all_losses_with_dropout):
        assert losses == pytest.approx([expected] * 3, rel=1e-9)


class NoGradient(torch.autograd.Function):
    """The identity, which has no gradient: not even zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


def largest_gradients() -> tuple[float, float]:
    """Of a linear that gathers tokens, behind which the gradient is cut off; and of the one before."""
    grid = Grid(x=2)
    torch.manual_seed(SEED)
    model = parallelize(GPT(gpt(activation="gelu")), grid, shard_sequence=True)
    linears = [module for name, module in model.named_modules() if name.endswith("qkv")]
    linears[-1].register_forward_hook(lambda _module, _args, y: NoGradient.apply(y))
    text = torch.randint(gpt().vocab, (BATCH, SEQ_LEN + 1))
    model(text[:, :-1], text[:, 1:]).backward()
    last, before = (float(linear.weight.grad.to_local().abs().max()) for linear in (linears[-1], linears[0]))
    return last, before


def test_an_output_without_a_gradient_has_zeros(ranks):
    for last, before in ranks(2).run(largest_gradients):
        assert last == 0
        assert before > 0


def refusals() -> list[str]:
    """The errors for a model that does not support it, for tokens that cannot be split, and for a block by itself."""
    grid = Grid(x=2)
    torch.manual_seed(SEED)
    messages = []
    model = parallelize(GPT(gpt()), grid, shard_sequence=True)
    tokens = torch.zeros(1, 5, dtype=torch.long)
    for call in (
        lambda: parallelize(nn.Sequential(nn.Linear(8, 8)), grid, roles={"0": "colwise"}, shard_sequence=True),
        lambda: model(tokens),
        lambda: model.blocks[0].mlp(torch.zeros(1, 7, 32)),
    ):
        try:
            call()
            messages.append("nothing")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_modules_that_cannot_be_sharded_raise(ranks):
    for of_model, of_tokens, of_block in ranks(2).run(refusals):
        assert "Sequential does not declare that it supports sequence sharding" in of_model
        assert "x=2: the 5 tokens of a batch [1, 5] cannot be shared equally; 4 could" in of_tokens
        assert "14 tokens are not those of the last batch" in of_block
