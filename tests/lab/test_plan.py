# SPDX-License-Identifier: Apache-2.0
"""What is said of predictions and measurements: of the order of grids, and of memory, run by run."""

import json

import pytest

from lab.planning import memory
from lab.planning.comparison import compare, rank_correlation, summarize
from lab.planning.memory import KINDS, MemorySetting, choose_runs
from stretto.cluster import Cluster


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
