# SPDX-License-Identifier: Apache-2.0
"""A run in which a rank is stuck ends within `train.timeout`, and names the rank: real processes, real faults."""

import json
from pathlib import Path

import pytest
from tests.train import runs
from tests.train.health import fault_runs

from stretto.train.launch import RankFailure, launch
from stretto.train.launch.supervisor import StopTimeouts

QUICK = StopTimeouts(stop=20.0, report=0.3, end=1.0)


@pytest.fixture(autouse=True)
def _starts_quickly(request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("forks_processes")


def fail(out: Path, monkeypatch: pytest.MonkeyPatch, fault: str, *overrides: str, ranks: int = 2) -> RankFailure:
    """Train with a fault until the run ends by itself."""
    monkeypatch.setenv(fault_runs.FAULT, fault)
    options = [f"grid.data={ranks}", "train.timeout=4", "train.steps=1000", *overrides]
    with pytest.raises(RankFailure) as failed:
        launch(fault_runs.train_with_fault, runs.configure(out, *options), QUICK)
    return failed.value


def report_folder(out: Path) -> Path:
    (folder,) = (out / "stalls").iterdir()
    return folder


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named_with_its_state_and_what_the_others_wait_in(tmp_path, monkeypatch, rank):
    failure = fail(tmp_path / "out", monkeypatch, f"stop {rank}")
    assert (failure.kind, failure.rank) == ("silent", rank)
    assert "is silent in step 4, phase data: its process is stopped by a signal" in failure.reason
    assert f"rank {1 - rank} waits for it in all_reduce number" in failure.reason
    folder = report_folder(tmp_path / "out")
    assert f"stacks are in {folder}" in str(failure)
    assert "all_reduce" in (folder / f"rank-{1 - rank}-stack.txt").read_text()
    assert "in strike" in (folder / f"rank-{rank}-stack.txt").read_text(), "where it was stopped"
    recorded = json.loads((folder / f"rank-{1 - rank}-flight.json").read_text())
    assert recorded["gloo"]["entries"][-1]["retired"] is False
    assert "stopped by a signal" in (folder / "report.txt").read_text()


def test_a_rank_in_an_endless_loop_is_named_with_the_line_that_it_is_at(tmp_path, monkeypatch):
    failure = fail(tmp_path / "out", monkeypatch, "loop 1")
    assert (failure.kind, failure.rank) == ("stalled", 1)
    assert "is stuck in step 4, phase data, at fault_runs.py:" in failure.reason
    assert "in spin" in failure.reason
    assert "fault_runs.py" in (report_folder(tmp_path / "out") / "rank-1-stack.txt").read_text()
