# SPDX-License-Identifier: Apache-2.0
"""Gradients that have come together: their norm, what ranks must have in common to sum them, and micro-batches."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, clip_grad_norm_, gather, layout_of, no_sync, parallelize
from tests.differences import largest
from tests.parallel.comm.wire import WireCounter
from tests.parallel.training import Sizes, distance, my_rows

GRIDS = [(2, 1, 1, 2), (1, 2, 2, 1)]


def on_grid(sizes: Sizes) -> Grid:
    return Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))


class MLP(nn.Module):
    """Linear, tanh, linear: one of two of them, as the call says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.ModuleList(nn.Linear(8, 16) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(16, 8) for _ in range(2))

    def forward(self, x: Tensor, which: int = 0) -> Tensor:
        return self.down[which](torch.tanh(self.up[which](x)))


ROLES = {"up.*": "colwise", "down.*": "rowwise"}


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: gather(parameter.grad, layout_of(parameter)).clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def clipped_alone(sizes: Sizes) -> list[float]:
    """Return how far one parameter's gradient, clipped by itself, and its norm are from what they should be."""
    grid = on_grid(sizes)
    model = parallelize(MLP().double(), grid, roles=ROLES)
    model(torch.ones(1, 8 // grid.size("y"), dtype=torch.float64)).square().sum().backward()
    weight = model.up[0].weight
    before = whole_gradients(model)["up.0.weight"]
    norm = clip_grad_norm_(weight, 0.1, grid)
    return [
        distance(norm, before.norm()),
        distance(whole_gradients(model)["up.0.weight"], before * 0.1 / before.norm()),
    ]


@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_one_parameter_may_be_clipped_separately(ranks, sizes):
    for norm, gradient in ranks(4).run(clipped_alone, sizes):
        assert norm < 1e-12
        assert gradient < 1e-5  # the norm's 1e-6


def clipped_in_two_dtypes(sizes: Sizes) -> dict[str, float]:
    """By which factor clipping has scaled each gradient of a model in bf16 and fp32, over the right one, minus 1."""
    grid = on_grid(sizes)
    model = MLP()
    model.up.to(torch.bfloat16)
    model = parallelize(model, grid, roles=ROLES, dtype=torch.float32)
    model(torch.ones(1, 8 // grid.size("y"))).square().sum().backward()
    before = whole_gradients(model)
    norm = torch.stack([gradient.double().norm() for gradient in before.values()]).norm()
    clip_grad_norm_(model.parameters(), 0.3, grid)
    return {
        name: float((gradient.double() * before[name].double()).sum() / before[name].double().square().sum())
        / float(0.3 / norm)
        - 1
        for name, gradient in whole_gradients(model).items()
    }


@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_the_factor_is_not_rounded_to_the_first_gradients_dtype(ranks, sizes):
    for errors in ranks(4).run(clipped_in_two_dtypes, sizes):
        assert all(abs(error) < (1e-3 if "up" in name else 1e-5) for name, error in errors.items()), errors


def refusal_of_a_second_time() -> str:
    model = parallelize(MLP(), grid := Grid(x=2), roles=ROLES)
    with pytest.raises(ValueError, match="on a grid already") as caught:
        parallelize(model, grid, roles=ROLES)
    return str(caught.value)


def test_a_model_is_parallelized_once(ranks):
    assert len(set(ranks(2).run(refusal_of_a_second_time))) == 1


BATCH, SEQ_LEN = 24, 6  # of four ranks each has three micro-batches
SMALL = GPTConfig(layers=2, hidden=16, heads=2, vocab=23, max_seq_len=SEQ_LEN)
LINEARS = 2 * 4  # weights of SMALL's blocks; the embedding, which is the head too, has two gradients


def accumulated(sizes: Sizes) -> dict[tuple[int, bool], tuple[int, int, float]]:
    """By the number of micro-batches and unsharded: reduce-scatters over z of two steps, and how far gradients are from
    those of one rank and the whole batch."""
    grid = on_grid(sizes)
    torch.manual_seed(7)
    plain = GPT(SMALL).double()
    text = torch.randint(SMALL.vocab, (BATCH, SEQ_LEN + 1))
    model = parallelize(deepcopy(plain), grid)
    by_option = parallelize(deepcopy(plain), grid, reshard="gradients_after_step")
    plain(text[:, :-1], text[:, 1:]).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    groups = {axis: grid.group(axis) for axis in ("data", "x", "y", "z", "batch", "world")}
    rows, found = text[my_rows(grid, BATCH)], {}

    def step(model: nn.Module, micro_batches: int, unsharded: bool | None) -> int:
        model.zero_grad()
        *earlier, last = rows.chunk(micro_batches)
        with WireCounter(groups) as wire:
            for part in earlier:
                with no_sync(model, unsharded=unsharded):
                    model(part[:, :-1], part[:, 1:], num_targets=BATCH * SEQ_LEN).backward()
            model(last[:, :-1], last[:, 1:], num_targets=BATCH * SEQ_LEN).backward()
        return sum(times for message, times in wire.messages.items() if message.kind == "reduce-scatter")

    for micro_batches in (1, 3):
        for unsharded in (False, True):
            counts = [step(model, micro_batches, unsharded) for _ in range(2)]
            if unsharded:
                counts[1] = step(by_option, micro_batches, None)
            given = whole_gradients(by_option if unsharded else model)
            error = largest(distance(given[name], expected[name]) for name in expected)
            found[micro_batches, unsharded] = *counts, error
    return found


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 2), (2, 1, 1, 2)], ids=str)
def test_weights_gradients_go_over_z_once_a_micro_batch_or_once_a_step(ranks, sizes):
    for found in ranks(2 * sizes[0]).run(accumulated, sizes):
        for (micro_batches, unsharded), (*counts, error) in found.items():
            expected = (LINEARS + 2) * (1 if unsharded else micro_batches)
            assert counts == [expected] * 2, (micro_batches, unsharded)
            assert error < 1e-12


WHOLE, SHARDED, SYNCED = True, False, None  # a backward pass in no_sync(unsharded=...), and one outside

PASSES = {
    "the last micro-batch has no part of it": [(0, WHOLE), (1, SYNCED)],
    "no micro-batch but the first has a part of it": [(0, WHOLE), (1, WHOLE), (1, SYNCED)],
    "shards, then whole": [(0, SHARDED), (0, WHOLE), (1, WHOLE), (0, SYNCED)],
    "whole, then shards": [(0, WHOLE), (1, WHOLE), (0, SHARDED), (1, SYNCED)],
    "after a gradient that is summed": [(0, SYNCED), (0, SYNCED), (1, WHOLE), (1, SYNCED)],
}
"""Backward passes of one step: the branch that each goes through, and how it accumulates."""


def accumulate_branches() -> tuple[dict[str, float], float, str]:
    """Return how far each step's gradients are from the sums of its passes';
    the same of a step after one that was dropped;
    the refusal of gradients that were written to."""
    grid = Grid(data=2, z=2)
    model = parallelize(MLP().double(), grid, roles=ROLES)
    x = torch.arange(8.0, dtype=torch.float64).view(1, 8) / (1 + grid.coordinate("batch"))

    def run(which: int, unsharded: bool | None) -> None:
        if unsharded is SYNCED:
            model(x, which).square().sum().backward()
        else:
            with no_sync(model, unsharded=unsharded):
                model(x, which).square().sum().backward()

    def gradients(passes: list[tuple[int, bool | None]]) -> dict[str, Tensor]:
        model.zero_grad()
        for which, unsharded in passes:
            run(which, unsharded)
        return whole_gradients(model)

    def difference(found: dict[str, Tensor], passes: list[tuple[int, bool | None]]) -> float:
        counts = [sum(which == branch for which, _ in passes) for branch in range(2)]
        expected = {name: count * one for count, part in zip(counts, each, strict=True) for name, one in part.items()}
        assert all(found[name].any() for name in found)
        return largest(distance(found[name], expected[name]) for name in found)

    each = [gradients([(branch, SYNCED)]) for branch in range(2)]
    differences = {what: difference(gradients(passes), passes) for what, passes in PASSES.items()}
    model.zero_grad()
    run(0, WHOLE)
    dropped = difference(gradients([(0, SYNCED), (1, SYNCED)]), [(0, SYNCED), (1, SYNCED)])
    model.zero_grad()
    run(0, WHOLE)
    model.zero_grad(set_to_none=False)
    with pytest.raises(RuntimeError, match="written to between micro-batches") as refusal:
        run(0, SYNCED)
    return differences, dropped, str(refusal.value)


@pytest.mark.long
def test_micro_batches_may_differ_in_what_they_use_and_in_how_they_accumulate(ranks):
    for differences, dropped, refusal in ranks(4).run(accumulate_branches):
        assert largest(differences.values()) < 1e-12, differences
        assert dropped < 1e-12  # nothing of a step whose gradients were dropped is in the next one
        assert "zero_grad(set_to_none=True)" in refusal
