# SPDX-License-Identifier: Apache-2.0
"""Routers on a grid: what they count is of all ranks and counted once, and their parameters' gradients are whole."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from stretto.models import GPT
from stretto.models.moe import Experts, RoutingStatistics, routers, update_biases
from stretto.parallel import Grid, Pipeline, count_collectives, gather, layout_of, parallelize
from stretto.parallel.comm.collectives import Pending
from tests.differences import largest
from tests.parallel.experts.training import EXACT, gpt, gradient_distances
from tests.parallel.experts.training import Run as Training
from tests.parallel.training import SEED, Case, batches, build, distance, my_rows, plain_loss
from tests.processes import LIMIT

FULL = Case(GPT, (gpt(balance="bias", balance_loss=0.1, bias_rate=0.01, capacity_factor=0.75),))
BIAS = Case(GPT, (gpt(balance="bias", bias_rate=0.01, capacity_factor=0.75),))
SWITCH = Case(GPT, (gpt(balance="switch", balance_loss=0.5, z_loss=0.1, capacity_factor=0.75),))
SWITCH_ALONE = Case(GPT, (gpt(balance="switch", balance_loss=0.5, z_loss=0.1),))

ALONE = Case(GPT, (gpt(balance="none"),))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("sizes", "options", "case"),
    [
        ({"data": 2, "z": 2, "expert": 2}, {"recompute": "full"}, FULL),
        ({"data": 2, "x": 2, "expert": 2}, {"shard_sequence": True, "recompute": "communication"}, SWITCH),
        ({"x": 2, "y": 2}, {}, SWITCH),
    ],
    ids=["z", "sequence", "y"],
)
def test_losses_and_capacity_see_the_tokens_of_all_ranks(ranks, sizes, options, case):
    print(f"seed {SEED}")
    for found in ranks(4).run(gradient_distances, Training(sizes, options), case):
        assert largest(found.values()) < 1e-11, found


def statistics(sizes: dict[str, Any], options: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], dict[str, int]]:
    """Counts and biases of two steps, and the all-reduces of the second."""
    grid = Grid(**sizes)
    model = parallelize(build(BIAS, EXACT), grid, **options)
    counts, biases = [], []
    for _, (tokens, targets) in zip(range(2), batches(BIAS), strict=False):
        rows = my_rows(grid, BIAS.batch)
        with count_collectives(grid) as calls:
            model(tokens[rows], targets[rows]).backward()
        found = update_biases(model)
        counts += [found.counts, found.dropped]
        biases.append(found.biases)
    kinds = [call.kind for call in calls.calls if call.axis == "batch" and call.bytes_sent < 200]
    return counts, biases, {kind: kinds.count(kind) for kind in set(kinds)}


@pytest.mark.parametrize("case", [FULL, SWITCH], ids=["bias", "switch"])
def test_routers_of_a_model_that_is_sharded_by_blocks_see_the_tokens_of_all_ranks(ranks, case):
    print(f"seed {SEED}")
    options = {"blocks": ["blocks.*"]}
    for found in ranks(2).run(gradient_distances, Training({"z": 2}, options), case):
        del found["loss"]  # of each rank's own rows
        assert largest(found.values()) < 1e-11, found
    ((counts, biases, _),) = ranks(1).run(statistics, {}, {})
    for found_counts, found_biases, _ in ranks(2).run(statistics, {"data": 2}, options):
        torch.testing.assert_close(found_counts, counts)
        torch.testing.assert_close(found_biases, biases)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("recompute", ["none", "full", "communication"])
def test_choices_are_counted_once_over_all_ranks_whatever_is_recomputed(ranks, recompute):
    plain = build(BIAS, EXACT)
    expected, of_bias = [], []
    for _, (tokens, targets) in zip(range(2), batches(BIAS), strict=False):
        plain_loss(BIAS, plain, tokens, targets).backward()
        found = update_biases(plain)
        expected += [found.counts, found.dropped]
        of_bias.append(found.biases)
    assert expected[1].sum() > 0
    sent = {}
    for sizes, options in (
        ({"data": 2, "x": 2, "expert": 2}, {}),
        ({"x": 2, "z": 2, "expert": 2}, {"shard_sequence": True}),
    ):
        for counts, biases, calls in ranks(4).run(statistics, sizes, options | {"recompute": recompute}):
            assert all(map(torch.equal, counts, expected))
            assert all(map(torch.equal, biases, of_bias))
            sent = calls
    # Of each of two blocks: choices for the loss and capacity, summed, and those of earlier ranks, gathered.
    passes = 2 if recompute == "full" else 1
    assert sent["all_gather"] == 2 * passes


def compute_before_the_other_rank(folder: Path) -> dict[str, int]:
    """Rank 1 begins its forward pass when that of rank 0 has ended. Returns the all-reduces of both passes' counts."""
    grid = Grid(data=2)
    model = parallelize(build(SWITCH_ALONE, EXACT), grid, recompute="full")
    tokens, _ = next(iter(batches(SWITCH_ALONE)))
    has_ended, deadline = folder / "ended", time.monotonic() + LIMIT
    while grid.coordinate("data") == 1 and not has_ended.exists():
        assert time.monotonic() < deadline, "rank 0 waits in its forward pass"
        time.sleep(0.01)
    sent = []
    for step in ("forward", "backward"):
        with count_collectives(grid) as calls:
            if step == "forward":
                logits = model(tokens[my_rows(grid, SWITCH_ALONE.batch)])
            else:
                logits.square().sum().backward()
        sent.append(sum(call.kind == "all_reduce" and call.bytes_sent == 8 * 8 for call in calls.calls))
        has_ended.touch()
    return dict(zip(("forward", "backward"), sent, strict=True))


def test_a_forward_pass_does_not_wait_for_other_ranks_choices(ranks, tmp_path):
    for sent in ranks(2).run(compute_before_the_other_rank, tmp_path):
        assert sent == {"forward": 2, "backward": 0}  # one of each block, though blocks are computed again


def count_waits(overlap: bool) -> int:
    """Return how often a forward pass waits for a router's choices."""
    grid = Grid(data=2)
    model = parallelize(build(SWITCH_ALONE, EXACT), grid, overlap=overlap)
    with mock.patch.object(Pending, "wait", autospec=True, side_effect=Pending.wait) as wait:
        model(next(batches(SWITCH_ALONE))[0][my_rows(grid, SWITCH_ALONE.batch)])
    return sum(call.args[0].result.shape == (8,) for call in wait.mock_calls)


def test_without_overlap_a_forward_pass_waits_for_each_sum(ranks):
    assert ranks(2).run(count_waits, True) == [0, 0]
    assert ranks(2).run(count_waits, False) == [2, 2]


def read_on_one_rank(sizes: dict[str, int]) -> RoutingStatistics:
    """Statistics of a step in which the first rank has read its own between the passes."""
    grid = Grid(**sizes)
    model = parallelize(build(SWITCH_ALONE, EXACT), grid, shard_sequence=True)
    tokens, targets = (each[my_rows(grid, SWITCH_ALONE.batch)] for each in next(batches(SWITCH_ALONE)))
    loss = model(tokens, targets)
    if grid.coordinate("stage") == 0:
        assert all(router.statistics is not None for _, router in routers(model))
    loss.backward()
    return update_biases(model)


@pytest.mark.parametrize("sizes", [{"data": 2, "x": 2}, {"x": 2, "y": 2}], ids=str)
def test_a_rank_may_read_its_statistics_alone(ranks, sizes):
    plain = build(SWITCH_ALONE, EXACT)
    plain_loss(SWITCH_ALONE, plain, *next(batches(SWITCH_ALONE)))
    expected = update_biases(plain)
    for found in ranks(4).run(read_on_one_rank, sizes):
        assert torch.equal(found.counts, expected.counts)
        torch.testing.assert_close(found.losses, expected.losses, rtol=1e-11, atol=0.0)


def run_passes_of_all_kinds() -> RoutingStatistics:
    """Statistics of four forward passes: without gradients, dropped, and two that have three backward passes."""
    grid = Grid(data=2)
    model = parallelize(build(SWITCH_ALONE, EXACT), grid)
    tokens = next(batches(SWITCH_ALONE))[0][my_rows(grid, SWITCH_ALONE.batch)]
    with torch.no_grad():
        model(tokens)
    with mock.patch("stretto.models.router.MAX_WAITING", 2):
        first, second, _ = (model(tokens).square().mean() for _ in range(3))
    second.backward(retain_graph=True)
    first.backward()
    second.backward()
    return update_biases(model)


def test_a_forward_pass_is_counted_once_whatever_becomes_of_it(ranks):
    plain = build(SWITCH_ALONE, EXACT)
    plain(next(batches(SWITCH_ALONE))[0])
    expected = update_biases(plain)
    for found in ranks(2).run(run_passes_of_all_kinds):
        assert torch.equal(found.counts, 4 * expected.counts)
        torch.testing.assert_close(found.losses, expected.losses, rtol=1e-11, atol=0.0)


def train_by_messages(expected: dict[str, Tensor]) -> list[float]:
    """Return how far gradients are from the expected ones where gradients reach the ranks of data at different
    times.
    """
    grid = Grid(data=2, pipe=2, expert=2)
    model = parallelize(build(ALONE, EXACT), grid)
    if grid.coordinate("pipe") == 0 and grid.coordinate("data") == 1:
        model.blocks[0].register_forward_hook(lambda *_: time.sleep(0.1))
    tokens, targets = (each[my_rows(grid, ALONE.batch)] for each in next(batches(ALONE)))
    with Pipeline(model, grid, schedule="message-driven", micro_batch_size=1, limit=3) as pipeline:
        pipeline.step(tokens=tokens, targets=targets)
    own = {name: gather(each.grad, layout_of(each)) for name, each in model.named_parameters() if each.numel()}
    return [distance(gradient, expected[name]) for name, gradient in own.items()]


@pytest.mark.long
def test_message_driven_ranks_of_data_agree_on_what_experts_compute(ranks):
    plain = build(ALONE, EXACT)
    plain_loss(ALONE, plain, *next(batches(ALONE))).backward()
    for found in ranks(4).run(train_by_messages, {name: each.grad for name, each in plain.named_parameters()}):
        assert found
        assert largest(found) < 1e-11


class Counting(nn.Linear):
    """A user's own router, which counts the tokens of all ranks, and has no other hook."""

    def __init__(self) -> None:
        super().__init__(16, 1)
        self.sum_over_ranks: Callable[[Tensor], Tensor] = torch.clone
        self.total = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.sum_over_ranks(torch.tensor(x.flatten(0, -2).shape[0]))
        return super().forward(x)


def count_tokens(sizes: dict[str, int]) -> int:
    grid, model = Grid(**sizes), Gated()
    model.gate = Counting()
    model = parallelize(model, grid, roles=ROLES)
    model(torch.arange(24).view(4, 6)[my_rows(grid, 4)])
    return int(model.gate.total)


def test_a_router_of_ones_own_needs_no_hook_but_one(ranks):
    assert ranks(2).run(count_tokens, {"data": 2}) == [24, 24]


class Gated(nn.Module):
    """An MLP of which a linear's sigmoid takes a part, as of a shared expert."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 16)
        self.up, self.down, self.gate = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 1)
        self.head = nn.Linear(16, 61)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.down(torch.relu(self.up(x))) * self.gate(x).sigmoid())


ROLES = {"embedding": "embedding", "up": "colwise", "down": "rowwise", "gate": "router", "head": "head"}


def gate_gradients(sizes: dict[str, int]) -> dict[str, float]:
    torch.manual_seed(SEED)
    plain, tokens = Gated().double(), torch.arange(24).view(4, 6)
    model = Gated().double()
    model.load_state_dict(plain.state_dict())
    model = parallelize(model, Grid(**sizes), roles=ROLES)
    for each in (plain, model):
        each(tokens).square().sum().backward()
    pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
    return {name: float((gather(ours.grad) - theirs.grad).norm()) for (name, ours), theirs in pairs}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sizes", [{}, {"x": 2}, {"y": 2}, {"x": 2, "y": 2}], ids=str)
def test_a_linear_that_scales_features_has_its_whole_gradient(ranks, sizes):
    count = sizes.get("x", 1) * sizes.get("y", 1)
    for found in ranks(count).run(gate_gradients, sizes):
        assert largest(found.values()) < 1e-10, found


class Own(nn.Module):
    """A mixture of experts of a user's own: a linear scores experts, and the model's code chooses two."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(61, 16), nn.LayerNorm(16)
        self.scores = nn.Linear(16, 4)
        self.experts = Experts(16, 8, 4, is_gated=False)
        self.head = nn.Linear(16, 61)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens))
        weights, ids = self.scores(x).flatten(0, -2).softmax(-1).topk(2)
        return self.head(x + self.experts(x.flatten(0, -2), ids, weights).view(x.shape))


OWN_ROLES = {"embedding": "embedding", "norm": "norm", "scores": "router", "experts": "experts", "head": "head"}


def own_gradients(sizes: dict[str, int]) -> dict[str, float]:
    torch.manual_seed(SEED)
    plain, tokens = Own().double(), torch.arange(48).view(8, 6)
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.5)
    model = Own().double()
    model.load_state_dict(plain.state_dict())
    grid = Grid(**sizes)
    model = parallelize(model, grid, roles=OWN_ROLES, gradients="sum")
    plain(tokens).square().sum().backward()
    model(tokens[my_rows(grid, 8)]).square().sum().backward()
    pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
    return {n: float((gather(p.grad, layout_of(p)) - o.grad).norm() / o.grad.norm()) for (n, p), o in pairs}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sizes", [{"data": 2, "x": 2, "expert": 2}, {"y": 2, "z": 2, "expert": 2}], ids=str)
def test_a_model_of_ones_own_needs_two_roles(ranks, sizes):
    for found in ranks(4).run(own_gradients, sizes):
        assert largest(found.values()) < 1e-11, found
