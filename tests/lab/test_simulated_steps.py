# SPDX-License-Identifier: Apache-2.0
"""The committed comparison of measured and simulated steps: how near it is, and that today's code gives it."""

import json
from pathlib import Path

import pytest

from lab.papers.pipelines import predict_pipeline, simulate_long
from lab.planning import simulated_steps
from stretto.axes import GridSizes

ROOT = Path(__file__).parents[2]
RESULT = json.loads((ROOT / "lab/results/simulated-steps/simulated-steps.json").read_text())


def test_every_measured_step_is_simulated_within_10_percent_in_both_fidelities():
    measured = [
        (row["workload"], row["grid"])
        for folder in ("plan", "plan-2-gpus")
        for row in json.loads((ROOT / f"lab/results/{folder}/plan.json").read_text())["rows"]
        if row.get("measured_milliseconds") is not None
    ]
    assert len(measured) == 54
    assert [(row["workload"], row["grid"]) for row in RESULT["rows"][:54]] == measured
    assert len(RESULT["rows"]) == 54 + 10  # and the overlaps, one after another
    for row in RESULT["rows"]:
        assert abs(row["simulated_error"]) < 0.1, row
        assert abs(row["queued_error"]) < 0.1, row


def test_the_order_of_grids_is_at_least_as_good_as_the_planners():
    for each in RESULT["summaries"][:8]:
        assert each["simulated_correlation"] >= each["planned_correlation"] - 1e-12
        assert each["simulated_loss"] <= each["planned_loss"]


@pytest.mark.long
def test_the_committed_times_are_what_the_simulator_gives(monkeypatch):
    monkeypatch.setattr(simulated_steps, "FIDELITIES", ("closed-form", "closed-form"))
    for folder in ("plan", "plan-2-gpus"):
        committed = {(row["workload"], row["grid"]): row for row in RESULT["rows"]}
        for row in simulated_steps.compare_plans(ROOT / "lab" / "results" / folder):
            known = committed[row["workload"], row["grid"]]
            assert row["simulated_milliseconds"] == pytest.approx(known["simulated_milliseconds"], rel=1e-6)


@pytest.mark.exhaustive
def test_rounds_of_micro_batches_that_are_not_simulated_take_as_long_as_the_last(monkeypatch):
    found = predict_pipeline(12, GridSizes(pipe=4, data=12), 12 * 60, 1)
    part = simulate_long(12, found, 12 * 60, "closed-form")
    monkeypatch.setattr("lab.papers.pipelines.SIMULATED_ROUNDS", 100)
    whole = simulate_long(12, found, 12 * 60, "closed-form")
    assert part.seconds == pytest.approx(whole.seconds, rel=1e-3)
    assert part.phase == pytest.approx(whole.phase, rel=1e-3)
