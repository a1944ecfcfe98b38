# SPDX-License-Identifier: Apache-2.0
"""`python -m lab precision` compares runs that differ in their numbers' types alone."""

from pathlib import Path

import pytest

from lab.training.curves import make_run
from lab.training.precision import BF16, MODELS, RUNS, name_run


@pytest.mark.parametrize("model", MODELS)
def test_runs_of_a_model_differ_in_their_types_alone(model: str, tmp_path: Path) -> None:
    base, *others = (make_run(name_run(model, name), 500, tmp_path) for name in (BF16, *list(RUNS)[1:]))
    for run in others:
        assert (run.model, run.data, run.grid) == (base.model, base.data, base.grid)
        assert {key for key, value in run.train if value != getattr(base.train, key)} <= {"dtype", "fp8_recipe"}
        assert run.train.dtype == "fp8"
    assert [run.train.fp8_recipe for run in others] == ["tensorwise", "rowwise"]
