# SPDX-License-Identifier: Apache-2.0
"""`python -m lab curves` compares runs that differ in their grid alone."""

from pathlib import Path

import pytest

from lab.training.curves import ACCUMULATED, ONE, RUNS, make_run, name_run


@pytest.mark.parametrize("model", RUNS)
def test_runs_of_a_model_differ_in_their_grids_and_micro_batches_alone(model: str, tmp_path: Path) -> None:
    runs = {name: make_run(name_run(model, name), 1000, tmp_path) for name in RUNS[model]}
    ranks = {name: run.grid.ranks for name, run in runs.items()}
    expected = {"pipe=2": 2, "x=2 z=2": 4, "data=2 expert=2": 2}
    assert ranks == {name: expected.get(name, 1) for name in RUNS[model]}
    one = runs[ONE]
    for name, run in runs.items():
        assert (run.model, run.data) == (one.model, one.data)
        assert {key for key, value in run.train if value != getattr(one.train, key)} <= {"micro_batch"}
        assert (run.train.micro_batch is None) == (name not in (ACCUMULATED, "pipe=2"))
