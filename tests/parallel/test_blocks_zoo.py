# SPDX-License-Identifier: Apache-2.0
"""Families of transformers, found by walking its registry, train on a grid as in one process, with no roles given."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stretto.parallel import Grid, gather, parallelize
from stretto.parallel.resolve import resolve
from stretto.parallel.roles.plan import ShardingPlan
from tests.parallel import zoo
from tests.parallel.training import Sizes, my_rows

TOLERANCE = 1e-5
# Their training is unstable: a difference of 1e-10 after the first step is ten times as large after each further one.
ROUGH = {"cpmant": 1e-3, "gemma4_unified_text": 1e-4}
BATCHES = 60  # of families, a test each


def train_on(sizes: Sizes, families: list[tuple[str, str]]) -> dict[str, Any]:
    """Each family's largest relative difference in five losses from one process's, or what was raised."""
    found: dict[str, Any] = {}
    for family, task in families:
        model, batch, grid = zoo.build(family, task), zoo.make_batch(task), Grid(*sizes)
        mine = {key: value[my_rows(grid, zoo.BATCH)] for key, value in batch.items()}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                parallelize(model, grid)
                losses = torch.tensor(zoo.train(model, mine), dtype=torch.float64)
        except Exception as error:  # noqa: BLE001 - the test shows it
            found[family] = f"{type(error).__name__}: {error}".split("\n")[0][:160]
            dist.barrier()
            continue
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
        expected = torch.tensor(zoo.train(zoo.build(family, task), batch), dtype=torch.float64)
        found[family] = float(((losses - expected) / expected).abs().max())
    return found


def families_of(number: int) -> list[tuple[str, str]]:
    """The families of one of the tests, in turns: neighbours in the alphabet are often alike."""
    return zoo.list_families()[number::BATCHES]


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", range(BATCHES))
@pytest.mark.parametrize("sizes", [(2, 1, 1, 2), (1, 2, 1, 2)], ids=["data2z2", "x2z2"])
def test_families_train_on_a_grid_as_in_one_process(ranks, sizes, number):
    found = ranks(4).run(train_on, sizes, families_of(number), timeout=300)[0]
    limits = {family: ROUGH.get(family, TOLERANCE) for family in found}
    wrong = {
        family: outcome
        for family, outcome in found.items()
        if isinstance(outcome, str) or not outcome <= limits[family]
    }
    assert found
    assert wrong == {}


def accumulate_with_counts(family: str, task: str) -> tuple[list[float], list[float]]:
    """Norms of gradients over two micro-batches with different numbers of labels, plain and on data=2 z=2."""
    batch, found = zoo.make_batch(task), []
    batch["labels"][0, :9] = batch["labels"][3, :4] = -100
    count = int((batch["labels"][:, 1:] != -100).sum())
    for grid in (None, Grid(data=2, z=2)):
        model = zoo.build(family, task)
        parts = [batch]
        if grid is not None:
            parallelize(model, grid)
            parts = [{key: value[my_rows(grid, zoo.BATCH)] for key, value in batch.items()}]
        for part in parts:
            model(**part, num_items_in_batch=torch.tensor(count)).loss.backward()
        found.append([float(gather(p.grad).norm()) for p in model.parameters() if p.grad is not None])
    return found[0], found[1]


@pytest.mark.parametrize("family", ["codegen", "opt"], ids=["by blocks", "by roles"])
def test_a_count_of_labels_is_that_of_the_whole_batch(ranks, family):
    for plain, found in ranks(4).run(accumulate_with_counts, family, "causal"):
        assert found == pytest.approx(plain, rel=1e-4, abs=1e-9)  # keys' biases have no gradient but rounding


def replicated_share(family: str, task: str) -> float:
    """The part of a family's parameters that each rank of x computes whole on x=2, z=2."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = zoo.build(family, task)
    plan = resolve(model, {"data": 1, "x": 2, "y": 1, "z": 2})
    if not isinstance(plan, ShardingPlan):
        return 1.0
    counts = [model.get_parameter(name).numel() for part in plan.replicated for name in part.parameters]
    return sum(counts) / sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.exhaustive
def test_at_least_39_families_are_split_over_x_with_no_roles_given():
    """Those that train in the test above; what ranks of x compute whole of BERT and RoBERTa are positions and the
    pooler."""
    shares = {family: replicated_share(family, task) for family, task in zoo.list_families()}
    assert len([family for family, share in shares.items() if share == 0]) >= 39
    assert {family for family, share in shares.items() if 0 < share < 1} == {
        "bert", "bloom", "falcon", "opt", "phi3", "roberta", "t5",
    }  # fmt: skip
