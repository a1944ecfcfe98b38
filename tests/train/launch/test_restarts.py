# SPDX-License-Identifier: Apache-2.0
"""Runs whose ranks fail go on by themselves, from their newest checkpoint and on the ranks that are left."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from tests.train import runs
from tests.train.launch import restart_entries
from tests.train.launch.restart_entries import plan_faults
from tests.train.launch.test_launch import QUICK

from stretto.train.config import TrainConfig
from stretto.train.launch import launch

STEPS = 12


@pytest.fixture(autouse=True)
def _starts_quickly(forks_processes: None) -> None:
    """Ranks are forked from a server."""


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder, with an empty folder for temporary files beside it."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "out"


def configure(out: Path, ranks: int, *overrides: str) -> TrainConfig:
    options = [f"train.steps={STEPS}", "train.dtype=fp64", "model={layers=1, hidden=16, heads=2}"]
    options += ["train.batch=4", "train.seq_len=8", "train.checkpoint_every=2"]
    config = runs.configure(out, *options, f"grid.data={ranks}", *overrides)
    config.out.mkdir(parents=True, exist_ok=True)
    return config


def losses(out: Path) -> list[float]:
    steps = runs.metrics_of(out)
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    return [line["loss"] for line in steps]


def undisturbed(out: Path) -> list[float]:
    """The losses of the same run without faults, on one rank in this process."""
    config = configure(out.parent / "undisturbed", 1)
    runs.train_quietly(config)
    return losses(config.out)


def journal(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "restarts.jsonl").read_text().splitlines()]


def attempts(out: Path) -> list[dict[int, dict[str, Any]]]:
    """What each rank was told, by attempt and rank."""
    found: dict[int, dict[int, dict[str, Any]]] = {}
    for file in out.parent.glob("attempt-*"):
        _, attempt, _, rank = file.name.split("-")
        found.setdefault(int(attempt), {})[int(rank)] = json.loads(file.read_text().splitlines()[0])
    return [found[number] for number in sorted(found)]


def assert_nothing_left(out: Path) -> None:
    for file in out.parent.glob("attempt-*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text().splitlines()[1]), 0)
    assert not list((out.parent / "temporary").iterdir())
    assert not [path.name for path in out.iterdir() if path.name.startswith(".") or path.name.endswith(".partial")]
    assert not list((out / "checkpoints").glob(".*"))


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_faults(out, {"attempt": 0, "slot": 1, "step": 6, "how": "killed"})
    assert launch(restart_entries.train_with_faults, configure(out, 2, "train.max_restarts=1"), QUICK) is None
    assert losses(out) == pytest.approx(undisturbed(out), abs=1e-12)
    (failure,) = journal(out)
    assert (failure["kind"], failure["rank"], failure["step_resumed"]) == ("killed", 1, 4)
    assert "SIGKILL" in failure["reason"]
    assert failure["step_reached"] - failure["step_resumed"] == failure["steps_lost"] in (0, 1)
    assert failure["seconds_until_training"] > failure["seconds_until_named"] >= 0
    assert [told[0]["resume"] for told in attempts(out)] == [None, "latest"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("restart 1: rank 1 of 2 failed: it was killed by SIGKILL")
    assert "it goes on after step 4 on 2 ranks (data=2 x=1 y=1 z=1)" in lines[0]
    assert lines[1].startswith("training again ")
    assert_nothing_left(out)


def test_a_run_goes_from_4_to_2_ranks_and_back_to_4_by_itself(
    out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEP_SECONDS", "0.15")
    plan_faults(
        out,
        {"attempt": 0, "slot": 1, "step": 4, "how": "killed"},
        {"attempt": 1, "slot": 1, "step": 4, "how": "raised"},
    )
    config = configure(out, 4, "train.max_restarts=2", 'train.grids=["data=2"]', "train.retry_after=0.3")
    assert launch(restart_entries.train_with_faults, config, QUICK) is None
    assert losses(out) == pytest.approx(undisturbed(out), abs=1e-6)
    told = attempts(out)
    assert [len(ranks) for ranks in told] == [4, 4, 2, 4]
    assert [ranks[1]["slot"] for ranks in told] == [1, 1, 2, 1]
    assert [failure["kind"] for failure in journal(out)] == ["killed", "raised"]
    assert [failure["grid"]["data"] for failure in journal(out)] == [4, 2]
    lines = capsys.readouterr().out.splitlines()
    assert any("slot 1 set aside" in line for line in lines)
    assert any(line.startswith("grid: from 2 ranks") and "to 4 ranks" in line for line in lines)
    assert_nothing_left(out)
