# SPDX-License-Identifier: Apache-2.0
"""A model with experts trained on a grid is the model trained on one rank: every loss, gradient norm and weight."""

import pytest

from tests.differences import largest
from tests.parallel.experts.training import Run, case_of, disagreements, every_run, expected_of, gradient_distances
from tests.parallel.training import SEED

CHOSEN = [
    Run({}),
    pytest.param(Run({"data": 4, "x": 2, "expert": 4}), marks=pytest.mark.long),  # figure 7.7's layout, scaled down
    pytest.param(
        Run({"x": 2, "z": 2, "expert": 2, "expert_tensor": "fold"}, case="top-1 on alternate layers"),
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(Run({"pipe": 2, "z": 2, "expert": 2}, case="top-2 in micro-batches"), marks=pytest.mark.long),
    pytest.param(
        Run({"pipe": 2, "x": 2, "data": 2, "expert": 2}, {"drop_duplicates": False}, "top-2 in micro-batches"),
        marks=pytest.mark.exhaustive,
    ),
]


GRADIENTS = [
    Run({"z": 2, "expert": 2}),
    Run({"x": 2, "z": 2, "expert": 2}),
    Run({"data": 2, "y": 2, "expert": 2}),
    Run({"x": 2, "y": 2}),
    Run({"data": 2, "x": 2, "expert": 2}, {"expert_rows": 256}),
    Run({"x": 2, "z": 2, "expert": 4, "expert_tensor": "fold"}, {"expert_rows": 256}),
    Run({"data": 2, "x": 2, "expert": 2}, {"expert_rows": 256, "expert_reduce": "choice"}),
    Run({"x": 2}, {"shard_sequence": True, "expert_reduce": "choice"}),
    # Three experts a rank: z gathers their weights by rows.
    Run({"data": 2, "z": 2, "expert": 2}, {"reshard": "after_forward"}, case="6 experts"),
    Run({"data": 2, "x": 2, "expert": 2}, {"shard_sequence": True}),
    Run({"data": 2, "x": 2, "expert": 4, "expert_tensor": "fold"}, {"shard_sequence": True}),
]
ODD = [
    Run({"data": 2, "y": 2, "z": 2, "expert": 2}, case="6 experts"),
    Run({"data": 2, "x": 2, "z": 2, "expert": 2}, {"recompute": "communication"}, case="6 experts"),
    Run({"x": 2, "z": 4}, case="6 experts"),
]


SCHEDULES = [
    Run({"pipe": 2, "data": 2, "x": 2, "expert": 2}, case="top-2 in micro-batches", schedule="zb-h1"),
    Run({"pipe": 2, "x": 2, "z": 2, "expert": 2}, case="top-1 on alternate layers", schedule="zb-v"),
    Run({"pipe": 2, "z": 2, "expert": 2}, {"recompute": "communication"}, "top-1 on alternate layers", "interleaved"),
    Run({"pipe": 2, "data": 2, "expert": 2}, case="top-1 on alternate layers", schedule="dualpipe-v"),
]


MANY = [pytest.param(run, marks=pytest.mark.exhaustive) for run in (*SCHEDULES, *ODD, *every_run(8))]


@pytest.mark.parametrize("run", [*CHOSEN, *MANY], ids=str)
def test_five_steps_equal_those_of_one_rank(ranks, run):
    print(f"seed {SEED}")
    assert ranks(run.ranks).run(disagreements, run, case_of(run), expected_of(run)) == [{}] * run.ranks


@pytest.mark.sampled(2)
@pytest.mark.parametrize("run", GRADIENTS, ids=str)
def test_the_gradients_of_a_step_are_those_of_one_rank(ranks, run):
    print(f"seed {SEED}")
    for found in ranks(run.ranks).run(gradient_distances, run, case_of(run)):
        assert largest(found.values()) < 1e-12, found
