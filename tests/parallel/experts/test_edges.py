# SPDX-License-Identifier: Apache-2.0
"""Experts where routing is uneven, tokens are few, or choices are dropped; pipelines; products that are skipped."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.execution import StageOptions
from stretto.models import GPT
from stretto.parallel import Grid, gather, layout_of, parallelize
from stretto.parallel.pipeline.cutting import find_stages
from tests.differences import largest
from tests.parallel.experts.training import EXACT, gpt
from tests.parallel.training import SEED, Case, batches, build, distance, my_rows, plain_loss

CASE = Case(GPT, (gpt(layers=1, balance="none"),))


class Chosen:
    """Gives each token the experts that a table has at its place in the batch, whatever its scores are."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def __call__(self, scores: Tensor) -> Tensor:
        assert scores.shape[0] == self.table.shape[0]
        return self.table


def route(model: nn.Module, table: Tensor) -> nn.Module:
    for block in model.blocks:
        block.mlp.router._choose = Chosen(table)
    return model


def routings(tokens: int) -> dict[str, Tensor]:
    """Numbers of two experts for each token [tokens, 2], of 8."""
    rows = torch.arange(tokens)
    return {
        "all to one expert and another": torch.tensor([5, 2]).repeat(tokens, 1),
        "none to the first rank's experts": torch.stack((4 + rows % 4, 4 + (rows + 1) % 4), 1),
        "none to expert 3": torch.stack((rows % 3, 4 + rows % 4), 1),
        "one token for the last expert": torch.stack((rows % 7, torch.where(rows == 3, 7, (rows + 1) % 7)), 1),
    }


def distances(sizes: dict[str, Any], counts: list[int], options: dict[str, Any]) -> dict[str, float]:
    """Return how far loss and gradients are from one rank's, for each routing; counts:
    the rows of each rank of the batch.
    """
    grid, place = Grid(**sizes), 0
    place = grid.coordinate("batch")
    tokens, targets = next(batches(CASE))
    starts = [16 * sum(counts[:rank]) for rank in range(len(counts))]
    own = slice(starts[place], starts[place] + 16 * counts[place])
    part = own
    if options.get("shard_sequence"):
        length = 16 * counts[place] // grid.size("x")
        part = slice(own.start + grid.coordinate("x") * length, own.start + (grid.coordinate("x") + 1) * length)
    found = {}
    for name, table in routings(tokens.numel()).items():
        plain = route(build(CASE, EXACT), table)
        loss = plain_loss(CASE, plain, tokens, targets)
        loss.backward()
        model = route(parallelize(build(CASE, EXACT), grid, **options), table[part])
        mine = model(tokens.split(counts)[place], targets.split(counts)[place])
        mine.backward()
        found[name] = distance(mine.detach(), loss.detach())
        for (key, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            ours = gather(parameter.grad, layout_of(parameter))
            error = float((ours - expected.grad).norm() / expected.grad.norm().clamp(min=1e-3))
            found[f"{name}: {key}"] = error
    return found


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("sizes", "counts", "options"),
    [
        ({"data": 2, "expert": 2}, [4, 4], {}),
        ({"data": 2, "x": 2, "expert": 2}, [3, 5], {}),
        ({"data": 2, "x": 2, "expert": 2}, [0, 8], {"drop_duplicates": False}),
        ({"data": 2, "x": 2, "expert": 4, "expert_tensor": "fold"}, [8, 0], {}),
        ({"z": 2, "x": 2, "expert": 2}, [2, 6], {"shard_sequence": True, "recompute": "communication"}),
        ({"data": 2, "z": 2, "expert": 4}, [0, 3, 5, 0], {}),
    ],
    ids=str,
)
def test_uneven_routing_and_ranks_without_tokens_give_one_ranks_gradients(ranks, sizes, counts, options):
    for found in ranks(len(counts) * sizes.get("x", 1)).run(distances, sizes, counts, options):
        assert largest(found.values()) < 1e-11, {name: value for name, value in found.items() if not value < 1e-11}


class CountProducts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "stretto":
            self.counts[func._schema.name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))


def count_products(sizes: dict[str, Any], options: dict[str, Any]) -> tuple[int, int]:
    model = parallelize(build(CASE, EXACT), Grid(**sizes), **options)
    tokens = next(batches(CASE))[0][:2]
    with CountProducts() as products:
        model(tokens, tokens).backward()
    of_rows = "grouped_matmul", "experts_gate", "experts_gate_gradient"
    return sum(products.counts[name] for name in of_rows), products.counts["grouped_matmul_weight_gradient"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("sizes", "options", "products"),
    [
        # Two products in the forward pass, two in the backward pass, and those that are computed again.
        ({"data": 2, "expert": 2}, {"recompute": "none"}, 4),
        ({"data": 2, "expert": 2}, {"recompute": "full"}, 6),
        ({"data": 2, "expert": 2}, {"recompute": "communication"}, 6),  # of the rows, whose weights have gradients
        ({"data": 2, "expert": 2}, {"recompute": "communication", "expert_reduce": "choice"}, 5),
        ({"data": 2, "expert": 2}, {"recompute": "products"}, 4),
        ({"data": 2, "x": 2, "expert": 2}, {"recompute": "communication"}, 6),
        ({"data": 2, "x": 2, "expert": 2}, {"recompute": "communication", "drop_duplicates": False}, 5),
        ({"data": 2, "y": 2, "expert": 2}, {"recompute": "communication"}, 5),
        ({"x": 2}, {"recompute": "communication", "shard_sequence": True}, 6),
        ({"data": 2, "expert": 2}, {"recompute": "communication", "expert_rows": 128}, 6),
    ],
    ids=str,
)
def test_a_product_whose_sum_or_exchange_was_kept_is_not_computed_again(ranks, sizes, options, products):
    count = sizes.get("data", 1) * sizes.get("x", 1) * sizes.get("y", 1)
    assert ranks(count).run(count_products, sizes, options) == [(products, 2)] * count


def saved_by_experts(sizes: dict[str, Any]) -> list[tuple[int, ...]]:
    """Shapes of what a call of experts saves, but for weights and what is no floating numbers.

    Each of 24 tokens has an expert of each half.
    """
    experts: Any = parallelize(GPT(gpt(layers=1, balance="none")), Grid(**sizes)).blocks[0].mlp.experts
    numbers = torch.arange(24) % 4
    x, weights = torch.randn(24, 32, requires_grad=True), torch.rand(24, 2, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None):
        experts(x, torch.stack((numbers, numbers + 4), 1), weights)
    return sorted(tuple(one.shape) for one in saved if one is not None and one.is_floating_point() and one.dim() == 2)


@pytest.mark.parametrize("sizes", [{}, {"data": 2, "expert": 2}], ids=str)
def test_experts_save_tokens_once_and_gate_and_up_alone(ranks, sizes):
    tokens = 24 * sizes.get("data", 1)  # that have an expert here; each has two rows on one rank, one on two
    assert ranks(tokens // 24).run(saved_by_experts, sizes) == [[(tokens, 2), (tokens, 32), (48, 48)]] * (tokens // 24)


def test_pipelines_are_cut_by_the_weights_that_a_token_is_multiplied_with(ranks):
    assert ranks(2).run(cuts) == [(2, 2)] * 2


def cuts() -> tuple[int, int]:
    """Where two stages meet: of 8 experts a token passes one, so that a block with them is as costly as one without."""
    torch.manual_seed(SEED)
    config = gpt(layers=4, vocab=2, ffn=64, expert_ffn=64, moe_layers=(0, 1), experts_per_token=1, balance="none")
    dense = gpt(layers=4, vocab=2, ffn=64, expert_ffn=None, num_experts=None)
    grid = Grid(pipe=2)
    found = (find_stages(GPT(each), grid, StageOptions()).cuts for each in (config, dense))
    first, second = (each[1] for each in found)
    return first, second


def change_activations(model: nn.Module, *, hooks: bool) -> nn.Module:
    for block in model.blocks:
        experts = block.mlp.experts
        if hooks:
            experts.act_fn.register_forward_hook(lambda _module, _inputs, output: 2 * output)
        else:
            experts.act_fn = nn.Tanh()
    return model


def losses_of_other_activations(sizes: dict[str, Any], hooks: bool) -> tuple[float, float]:
    grid = Grid(**sizes)
    tokens, targets = next(batches(CASE))
    model = change_activations(parallelize(build(CASE, EXACT), grid), hooks=hooks)
    rows = my_rows(grid, len(tokens))
    loss = plain_loss(CASE, change_activations(build(CASE, EXACT), hooks=hooks), tokens, targets)
    return float(model(tokens[rows], targets[rows])), float(loss)


@pytest.mark.parametrize("hooks", [True, False])
@pytest.mark.parametrize("sizes", [{"data": 2, "expert": 2}, {"x": 2}], ids=str)
def test_an_activation_that_is_replaced_or_hooked_after_parallelize_is_the_one_that_runs(ranks, sizes, hooks):
    for found, expected in ranks(2).run(losses_of_other_activations, sizes, hooks):
        assert found == pytest.approx(expected, rel=1e-12)
