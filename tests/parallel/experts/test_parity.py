# SPDX-License-Identifier: Apache-2.0
"""A model with experts trained on a grid is the model trained on one rank: every loss, gradient norm and weight."""

import pytest

from tests.parallel.experts.training import CASES, Run, disagreements, every_run, expected_of, gradient_distances
from tests.parallel.training import SEED

CHOSEN = [
    Run({}),
    Run({"data": 2, "expert": 2}),
    Run({"data": 2, "x": 2}),
    Run({"data": 4, "x": 2, "expert": 4}),  # figure 7.7's layout, scaled down
    Run({"data": 4, "x": 2, "expert": 4}, {"drop_duplicates": False}),
    Run({"data": 2, "x": 2, "z": 2, "expert": 2, "expert_tensor": "fold"}, case="top-1 on alternate layers"),
]


@pytest.mark.parametrize("run", CHOSEN, ids=str)
def test_five_steps_equal_those_of_one_rank(ranks, run):
    print(f"seed {SEED}")
    assert ranks(run.ranks).run(disagreements, run, CASES[run.case], expected_of(run)) == [{}] * run.ranks


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", every_run(8), ids=str)
def test_five_steps_on_every_grid_of_8_equal_those_of_one_rank(ranks, run):
    print(f"seed {SEED}")
    assert ranks(8).run(disagreements, run, CASES[run.case], expected_of(run)) == [{}] * 8


GRADIENTS = [
    Run({"z": 2, "expert": 2}),
    Run({"x": 2, "z": 2, "expert": 2}),
    Run({"data": 2, "y": 2, "expert": 2}),
    Run({"x": 2, "y": 2}),
    Run({"data": 2, "x": 2, "expert": 2}, {"shard_sequence": True}),
    Run({"data": 2, "x": 2, "expert": 4, "expert_tensor": "fold"}, {"shard_sequence": True}),
]


@pytest.mark.parametrize("run", GRADIENTS, ids=str)
def test_the_gradients_of_a_step_are_those_of_one_rank(ranks, run):
    print(f"seed {SEED}")
    for found in ranks(run.ranks).run(gradient_distances, run, CASES[run.case]):
        assert max(found.values()) < 1e-12, found
