# SPDX-License-Identifier: Apache-2.0
"""`stretto simulate step`: what it prints and writes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stretto.cli import app

ROOT = Path(__file__).parents[2]
STEP = ["simulate", "step", "--model", "gpt2-small", "--cluster", "perlmutter", "--batch", "16", "--seq-len", "512"]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*STEP, *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_grid_is_simulated_as_json():
    found = json.loads(run("--grid", "x=2 z=4", "--json"))
    assert found["grid"] == {"pipe": 1, "data": 1, "x": 2, "y": 1, "z": 4}
    assert found["fits"]
    assert found["step_ns"] == pytest.approx(
        found["computation_ns"] + found["exposed_total_ns"] + found["idle_ns"], abs=2
    )
    assert set(found["exposed_ns"]) == {"x", "z"}


def test_without_a_grid_the_planners_best_is_simulated():
    found = json.loads(run("--gpus", "4", "--json"))
    best = json.loads(
        CliRunner().invoke(app, ["plan", *STEP[2:], "--gpus", "4", "--json"], catch_exceptions=False).stdout
    )[0]
    assert found["grid"] == best["grid"]
    assert found["step_ns"] == pytest.approx(best["step_time"] * 1e9, rel=0.1)


def test_overlaps_stragglers_and_fidelity_are_taken():
    plain, none, slow, queued = (
        json.loads(run("--grid", "x=2 z=2", "--json", *more))
        for more in ((), ("--overlap", "none"), ("--stragglers", "fraction:0.25:2"), ("--fidelity", "event-driven"))
    )
    assert none["exposed_total_ns"] > plain["exposed_total_ns"]
    assert slow["step_ns"] > plain["step_ns"]
    assert (slow["simulated_ranks"], plain["simulated_ranks"]) == (4, 1)
    assert queued["fidelity"] == "event-driven"
    assert "busiest_link" in queued


def test_all_changes_are_simulated_and_those_that_cannot_be_are_named():
    found = json.loads(run("--grid", "x=4 z=2", "--what-if", "all", "--json"))
    assert [each["name"] for each in found["what_if"]] == ["nic", "gpu", "link"]
    assert found["impossible"] == {}
    assert "GPUs that compute twice as fast" in run("--grid", "x=4", "--what-if", "gpu")
    on_switch = [word if word != "perlmutter" else "dgx-h100" for word in STEP]
    result = CliRunner().invoke(app, [*on_switch, "--grid", "x=4", "--what-if", "all"])
    assert "not possible: a node of cluster 'dgx-h100' has a switch" in " ".join(result.stdout.split())
    refused = CliRunner().invoke(app, [*on_switch, "--grid", "x=4", "--what-if", "link"])
    assert refused.exit_code == 2


@pytest.mark.long
def test_a_trace_and_a_picture_are_written(tmp_path):
    run("--grid", "pipe=2 x=2", "--schedule", "zb-h1", "--micro-batch", "2", "--trace", str(tmp_path / "step.json"))
    trace = json.loads((tmp_path / "step.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 2}  # one rank of each stage
    run("--grid", "z=4", "--picture", str(tmp_path / "step.png"))
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_a_configuration_is_simulated_on_its_grid():
    result = CliRunner().invoke(
        app, ["simulate", "step", str(ROOT / "src/stretto/configs/demo.toml"), "--cluster", "dgx-h200", "--json"]
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["grid"] == {"pipe": 1, "data": 1, "x": 2, "y": 1, "z": 2}
    assert found["micro_batch"] == 4
