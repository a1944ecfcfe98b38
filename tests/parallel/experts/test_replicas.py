# SPDX-License-Identifier: Apache-2.0
"""Training with replicas of hot experts is training without them."""

import copy
from contextlib import nullcontext
from functools import partial
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch

from stretto.models import GPT, GPTConfig
from stretto.ops.moe.replicas import hold_replicas, send_replicas
from stretto.optim import AdamW
from stretto.parallel import Grid, balance_experts, no_sync, parallelize
from stretto.parallel.experts import replicas as replicas_module
from stretto.parallel.experts.module import ParallelExperts
from stretto.parallel.layout import local
from tests.differences import largest
from tests.parallel.experts.training import gpt
from tests.parallel.training import SEED

STEPS, EXACT = 4, 1e-11
OPTIMIZERS = {"SGD": partial(torch.optim.SGD, lr=0.3), "torch": partial(torch.optim.AdamW, lr=0.01)}
OPTIMIZERS["stretto"] = partial(AdamW, lr=0.01)


def train(
    config: GPTConfig, grid: Grid, options: dict[str, Any], replicas: int, optimizer: str, passes: int
) -> tuple[list[float], list[Any], int]:
    """Losses, this rank's parameters, and how many replicas ranks held in the last step, of each module.

    Steps are of so many passes. A second one has replicas that are placed before the first one's backward pass. In the
    middle, a model that has never had any loads what was saved, and so does the optimizer.
    """
    torch.manual_seed(SEED)
    model = parallelize(GPT(config).double(), grid, **options)
    stepper = OPTIMIZERS[optimizer](model.parameters())
    generator, losses = torch.Generator().manual_seed(100 + grid.coordinate("batch")), []
    for step in range(STEPS):
        losses_of_step = []
        for number in range(passes):
            # Few words, and so few experts: others in each step.
            tokens = torch.randint(config.vocab, (2, 16), generator=generator) // 3 + 13 * step
            with no_sync(model) if number < passes - 1 else nullcontext():
                losses_of_step.append(model(tokens, tokens))
                balance_experts(model, replicas)
                losses_of_step[-1].backward()
        stepper.step()
        stepper.zero_grad()
        losses += [loss.item() for loss in losses_of_step]
        if step == STEPS // 2 - 1:
            saved = copy.deepcopy((model.state_dict(), stepper.state_dict()))
            model = parallelize(GPT(config).double(), grid, **options)
            model.load_state_dict(saved[0])
            stepper = OPTIMIZERS[optimizer](model.parameters())
            stepper.load_state_dict(saved[1])
    modules = [module for module in model.modules() if isinstance(module, ParallelExperts)]
    held = [0 if each.replicas.placed is None else sum(map(len, each.replicas.placed.replicas)) for each in modules]
    return losses, [local(parameter).detach() for parameter in model.parameters()], min(held)


def compare(sizes: dict[str, int], options: dict[str, Any], config: GPTConfig, *how: Any) -> tuple[float, int]:
    """The largest difference of losses and parameters from those without replicas; the fewest replicas of a module."""
    grid = Grid(**sizes)
    expected, right, none = train(config, grid, options, 0, *how)
    losses, found, held = train(config, grid, options, 2, *how)
    assert none == 0
    pairs = [*zip(map(torch.tensor, losses), map(torch.tensor, expected), strict=True), *zip(found, right, strict=True)]
    return largest((one - other).abs().max().item() for one, other in pairs if one.numel()), held


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "options", "optimizer", "passes"),
    [
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ({"z": 2, "expert": 2}, {"recompute": "communication"}, "torch", 2),
                ({"z": 2, "expert": 2}, {"recompute": "products"}, "stretto", 2),
                ({"z": 4, "expert": 2}, {"recompute": "full"}, "stretto", 2),
                ({"data": 2, "x": 2, "expert": 2}, {"shard_sequence": True}, "SGD", 1),
                ({"data": 2, "y": 2, "expert": 2}, {"expert_reduce": "choice"}, "SGD", 1),
            )
        ),
        pytest.param(
            {"x": 2, "z": 2, "expert": 4, "expert_tensor": "fold"}, {"expert_rows": 256}, "SGD", 2,
            marks=pytest.mark.long,
        ),
    ],
    ids=str,
)  # fmt: skip
def test_losses_and_weights_are_those_without_replicas(ranks, sizes, options, optimizer, passes):
    count = prod(size for axis, size in sizes.items() if not axis.startswith("expert"))
    for difference, held in ranks(count).run(compare, sizes, options, gpt(balance="none"), optimizer, passes):
        assert difference < EXACT
        assert held > 0


def compare_bits() -> tuple[bool, list[str], int]:
    """Whether a step with replicas has the loss of one without, in bits, and whose gradients differ; replicas."""
    grid = Grid(z=2, expert=2)
    torch.manual_seed(SEED)
    model = parallelize(GPT(gpt(balance="none")).bfloat16(), grid, expert_reduce="choice")
    tokens = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(grid.coordinate("batch"))) // 3
    losses, gradients = [], []
    for _ in range(2):
        balance_experts(model, 2)
        losses.append(model(tokens, tokens))
        model.zero_grad()
        losses[-1].backward()
        gradients.append({name: each.grad.to_local().clone() for name, each in model.named_parameters()})
    one, other = gradients
    different = [name for name in one if not torch.equal(one[name], other[name])]
    placed = [each.replicas.placed for each in model.modules() if isinstance(each, ParallelExperts)]
    return torch.equal(*losses), different, sum(len(held) for each in placed for held in each.replicas)


def test_with_sums_in_the_order_of_choices_only_the_experts_gradients_are_rounded_otherwise(ranks):
    for is_same, different, held in ranks(2).run(compare_bits):
        assert is_same
        assert all(".experts." in name for name in different)
        assert held > 0


def balance_early() -> list[dict[str, float]]:
    """What the first two calls return, and one that ends it, of a model that has run in between."""
    model = parallelize(GPT(gpt(balance="none")).double(), Grid(data=2, expert=2))
    tokens, found = torch.zeros(2, 16, dtype=torch.int64), [dict(balance_experts(model))]
    for replicas in (1, 0):
        model(tokens, tokens).backward()
        found.append(dict(balance_experts(model, replicas)))
    for wrong in (-1, 1.0):
        with pytest.raises(ValueError, match=f"0 or more replicas, not {wrong}"):
            balance_experts(model, wrong)
    whole = parallelize(GPT(gpt(balance="none")), Grid(data=2))
    assert balance_experts(whole, 0) == {}
    with pytest.raises(ValueError, match=r"all experts of blocks\.0\.mlp\.experts: replicas need a grid of expert > 1"):
        balance_experts(whole)
    return found


def test_loads_are_evened_out_from_the_second_call_on(ranks):
    for nothing, busiest, ended in ranks(2).run(balance_early):
        assert nothing == ended == {}
        assert list(busiest) == ["blocks.0.mlp.experts", "blocks.1.mlp.experts"]
        assert all(1 <= load < 1.1 for load in busiest.values())


def order_of_weights() -> list[str]:
    """When replicas' weights begin to travel in a forward pass, when they must have come, and when layers attend."""
    model = parallelize(GPT(gpt(balance="none")).double(), Grid(data=2, expert=2))
    tokens, events = torch.zeros(2, 16, dtype=torch.int64), []
    balance_experts(model)
    model(tokens, tokens).backward()
    balance_experts(model)
    for number, block in enumerate(model.blocks):
        block.attention.register_forward_pre_hook(lambda *_, number=number: events.append(f"attention {number}"))
    with (
        mock.patch.object(
            replicas_module, "send_replicas", lambda *args: events.append("send") or send_replicas(*args)
        ),
        mock.patch.object(
            replicas_module, "hold_replicas", lambda *args: events.append("hold") or hold_replicas(*args)
        ),
    ):
        model(tokens, tokens)
        down = model.blocks[1].mlp.experts.down_proj
        model.blocks[1].attention.register_forward_pre_hook(lambda *_: down.data.mul_(2).numel() and None)  # once sent
        model(tokens, tokens)
    return events


def test_weights_travel_under_the_attention_before_their_experts(ranks):
    first = ["attention 0", "send", "hold", "send", "send", "hold", "send", "attention 1", "hold", "hold"]
    for events in ranks(2).run(order_of_weights):
        assert events == [*first, *first[:-1], "send", "hold"]
