# SPDX-License-Identifier: Apache-2.0
"""Predictions are written first and only read by what measures; the comparison says what it should of them."""

import json
from dataclasses import replace

import pytest
from tests.lab.workloads import TINY, WORKLOAD, start_on_pool

from lab.planning import memory, plan
from lab.planning.comparison import compare, rank_correlation, summarize
from lab.planning.memory import KINDS, MemorySetting, choose_runs
from lab.planning.plan import Planned, PlanSetting, read_predictions, write_predictions
from stretto.cluster import Cluster, NodeLink

PLANNED = Planned("tiny", WORKLOAD, 2)
KEY = "tiny, 2 layers, batch 2 x 16 tokens, 2 ranks"


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1),
        ([1, 2, 3, 4], [9, 7, 5, 3], -1),
        ([1, 2, 3, 4], [1, 1000, 2, 3], 0.4),  # ranks 1 4 2 3: 1 - 6 (4 + 1 + 1) / (4 x 15)
        ([1, 2, 3], [5, 5, 8], 1.5 / 3**0.5),  # ranks 1.5 1.5 3
        ([1, 2, 3], [5, 5, 5], None),
        ([1], [1], None),
    ],
)
def test_rank_correlation_is_spearmans(first, second, expected):
    assert rank_correlation(first, second) == (None if expected is None else pytest.approx(expected))


def test_the_summary_judges_the_choice_and_the_worst_errors():
    predicted = [
        {"grid": "z=2", "predicted_milliseconds": 90.0, "predicted_gib": 11.0},
        {"grid": "x=2", "predicted_milliseconds": 100.0, "predicted_gib": 8.0},
        {"grid": "y=2", "predicted_milliseconds": 120.0, "predicted_gib": 10.0},
        {"grid": "data=2", "predicted_milliseconds": 50.0, "predicted_gib": 10.0},
    ]
    measured = [
        {"grid": "x=2", "measured_milliseconds": 100.0, "measured_gib": 10.0, "reason": None},
        {"grid": "z=2", "measured_milliseconds": 102.0, "measured_gib": 10.0, "reason": None},
        {"grid": "y=2", "measured_milliseconds": 100.0 * 1.5, "measured_gib": 10.0, "reason": None},
        {"grid": "data=2", "reason": "CUDA out of memory"},
    ]
    rows = compare("work", predicted, measured)
    assert [row["grid"] for row in rows] == ["x=2", "z=2", "y=2", "data=2"]
    assert (rows[-1]["reason"], rows[-1]["time_ratio"]) == ("CUDA out of memory", None)
    summary = summarize("work", rows)
    assert summary == {
        "workload": "work",
        "grids": 3,
        "rank_correlation": pytest.approx(0.5),
        "predicted_fastest": "z=2",
        "measured_fastest": "x=2",
        "loss_by_choice": pytest.approx(0.02),
        "is_within_3_percent": True,
        "largest_time_error": pytest.approx(0.2),
        "largest_memory_error": pytest.approx(0.2),
    }


def measure(planned, file, out, monkeypatch, **options):
    """Run the bench on these workloads."""
    monkeypatch.setattr(PlanSetting, "workloads", lambda self: planned)
    return plan.BENCH(PlanSetting(ranks=2, predictions=file, **options), out)


def test_a_missing_prediction_is_refused_before_anything_is_measured(tmp_path):
    file = tmp_path / "predictions.json"
    with pytest.raises(ValueError, match=r"there is no file of predictions at .*python -m lab plan --predict"):
        read_predictions(file, [PLANNED])
    write_predictions([PLANNED], Cluster.preset("dgx-h200"), file)
    other = Planned("tiny", replace(WORKLOAD, batch=4), 2)
    with pytest.raises(ValueError, match="has no prediction for 'tiny, 2 layers, batch 4 x 16 tokens, 2 ranks'"):
        read_predictions(file, [PLANNED, other])
    wider = Planned("tiny", replace(WORKLOAD, model=replace(TINY, ffn=64)), 2)
    with pytest.raises(ValueError, match="for a model of other sizes"):
        read_predictions(file, [wider])


@pytest.mark.exhaustive
def test_every_grid_is_measured_or_has_a_reason_and_kept_rows_are_not_measured_again(ranks, tmp_path, monkeypatch):
    calls = start_on_pool(monkeypatch, plan, ranks)
    file = tmp_path / "predictions.json"
    odd = Planned("odd", replace(WORKLOAD, batch=1), 2)
    predictions = write_predictions([PLANNED, odd], Cluster.preset("dgx-h200"), file)
    predicted = {row["grid"]: row for row in predictions["workloads"][0]["grids"]}

    result = measure([PLANNED], file, tmp_path, monkeypatch)
    rows = {row["grid"]: row for row in result["rows"]}
    assert set(rows) == {"data=2", "x=2", "y=2", "z=2"}
    for grid, row in rows.items():
        assert row["workload"] == KEY
        assert row["predicted_milliseconds"] == predicted[grid]["predicted_milliseconds"] > 0
        assert row["time_ratio"] == pytest.approx(row["predicted_milliseconds"] / row["measured_milliseconds"])
        assert row["memory_ratio"] is None  # a CPU has no peak
    assert result["summaries"][0]["grids"] == 4
    assert -1 <= result["summaries"][0]["rank_correlation"] <= 1

    both = measure([PLANNED, odd], file, tmp_path, monkeypatch)
    assert len(calls) == 2
    assert [row for row in both["rows"] if row["workload"] == KEY] == result["rows"]
    reasons = {row["grid"]: row["reason"] for row in both["rows"] if row["workload"] == odd.key}
    assert (reasons["x=2"], reasons["y=2"]) == (None, None)
    assert "data x z = 2 does not divide a batch of 1" in reasons["z=2"]
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["rows"] == json.loads(json.dumps(both["rows"]))
    assert written["predictions"]["cluster"] == "dgx-h200"
    assert (tmp_path / "plan.png").stat().st_size > 1000

    measure([PLANNED], file, tmp_path, monkeypatch, again=True)
    assert len(calls) == 3


@pytest.mark.long
def test_grids_with_sharded_tokens_are_predicted_on_demand_and_measured_where_they_were(ranks, tmp_path, monkeypatch):
    start_on_pool(monkeypatch, plan, ranks)
    file = tmp_path / "predictions.json"
    # Without NVLink: workspaces of operators, of 1 MiB and more, would take more than these activations.
    cluster = replace(Cluster.preset("dgx-h200"), in_node=NodeLink(bandwidth=50e9))
    without = write_predictions([PLANNED], cluster, file)["workloads"][0]["grids"]
    written = write_predictions([PLANNED], cluster, file, shards_sequence=True)
    predicted = {row["grid"]: row for row in written["workloads"][0]["grids"]}
    assert set(predicted) - {row["grid"] for row in without} == {"x=2, sequence sharded"}
    assert predicted["x=2, sequence sharded"]["predicted_gib"] < predicted["x=2"]["predicted_gib"]

    rows = {row["grid"]: row for row in measure([PLANNED], file, tmp_path, monkeypatch)["rows"]}
    assert set(rows) == {"data=2", "x=2", "y=2", "z=2", "x=2, sequence sharded"}
    assert all(row["measured_milliseconds"] > 0 for row in rows.values())
    assert rows["x=2, sequence sharded"]["loss"] == pytest.approx(rows["x=2"]["loss"], rel=1e-3)


@pytest.mark.exhaustive
def test_runs_to_measure_the_memory_of_are_spread_over_the_range_and_over_all_kinds():
    cluster = Cluster.find("dgx-h100")
    runs = choose_runs(MemorySetting(runs=12, smallest=60, largest=98), KINDS, cluster)
    shares = [run.predicted / cluster.require("gpu.memory") for run in runs]
    assert shares == pytest.approx([0.6 + 0.38 * number / 11 for number in range(12)], abs=0.03)
    assert {run.name.split(", ")[0] for run in runs} == {kind.name.split(", ")[0] for kind in KINDS}
    assert len({run.name for run in runs}) == 12


def test_memory_is_compared_run_by_run_with_what_was_measured_or_why_it_was_not(tmp_path, monkeypatch):
    measured = [{"allocated_gib": 0.03, "reserved_gib": 0.04, "outside_gib": 0.5}, {"reason": "out of memory"}]
    monkeypatch.setattr(memory, "run_ranks", lambda *given: measured)
    first, second = memory.BENCH(MemorySetting(on_cpu=True), tmp_path)["rows"]
    assert first["reserved_ratio"] == pytest.approx(first["predicted_reserved_gib"] / 0.04)
    assert first["allocated_ratio"] == pytest.approx(first["predicted_allocated_gib"] / 0.03)
    assert (first["is_predicted_to_fit"], second["is_predicted_to_fit"]) == ("yes", "no")
    assert (second["reason"], second["allocated_ratio"]) == ("out of memory", None)
    assert json.loads((tmp_path / "memory.json").read_text())["rows"] == [first, second]
