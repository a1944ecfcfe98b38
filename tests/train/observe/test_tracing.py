# SPDX-License-Identifier: Apache-2.0
"""Traced runs: what the trace shows of overlap, and that tracing changes nothing else."""

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Ranks
from tests.train import runs
from typer.testing import CliRunner

from stretto.cli import app
from stretto.parallel import Overlap
from stretto.train.config import config_to_toml
from stretto.train.observe.metrics import DivergenceError
from stretto.train.observe.timeline import Span, Timeline, read_timeline
from stretto.train.observe.tracing import steps_to_trace

MakeRanks = Callable[[int], Ranks]

PRODUCTS = {"aten::linear", "aten::matmul", "aten::mm", "aten::addmm", "aten::bmm"}
# Wider than other tests' models: a collective should take longer than the way from its issue to the next product.
SIZES = ["model.hidden=64", "train.seq_len=64"]
OFF = [f"overlap.{field.name}=false" for field in fields(Overlap)]


def trace(ranks: MakeRanks, out: Path, *overrides: str) -> Timeline:
    """Train with tracing on. Returns the timeline of what was traced."""
    config = runs.configure(out, "train.trace=true", *SIZES, *overrides)
    ranks(config.ranks).run(runs.train_quietly, config, timeout=120)
    return read_timeline(out / "trace.json")


def under_products(timeline: Timeline, axis: str) -> list[Span]:
    """The axis's collectives during which a product of matrices begins."""
    products = [span.start for span in timeline.spans if span.name in PRODUCTS]
    assert len(products) > 20
    collectives = [span for span in timeline.spans if span.row == axis]
    assert len(collectives) > 10
    return [span for span in collectives if any(span.start < product < span.end for product in products)]


@pytest.mark.long
def test_with_overlap_collectives_run_while_products_do_and_without_it_none_does(
    ranks: MakeRanks, tmp_path: Path
) -> None:
    grid = ["grid.x=2", "grid.z=2", "train.steps=3", "train.batch=32"]
    exposed = trace(ranks, tmp_path / "off", *grid, *OFF)
    assert exposed.layers == 2
    for axis in ("x", "z"):
        assert under_products(exposed, axis) == []
    # A thread that gets no core in time sends nothing meanwhile, and a run has few collectives: hence several runs.
    seen: set[tuple[str, str]] = set()
    for run in range(5):
        hidden = trace(ranks, tmp_path / f"on-{run}", *grid)
        seen |= {(axis, span.name) for axis in ("x", "z") for span in under_products(hidden, axis)}
        if {("x", "all_reduce"), ("z", "all_gather")} <= seen:
            return
    pytest.fail(f"no collective of one of the axes ran under a product, only {seen}")


@pytest.mark.exhaustive
def test_a_trace_names_each_axis_that_communicates(ranks: MakeRanks, tmp_path: Path) -> None:
    timeline = trace(ranks, tmp_path / "z", "grid.x=2", "grid.z=2", "train.steps=1")
    assert timeline.rows == ("compute", "x", "z", "other")
    timeline = trace(ranks, tmp_path / "data", "grid.y=2", "grid.data=2", "train.steps=1")
    assert timeline.rows == ("compute", "y", "data", "other")
    assert timeline.grid == {"pipe": 1, "data": 2, "x": 1, "y": 2, "z": 1}
    assert timeline.rank == 0
    assert "x" not in trace(ranks, tmp_path / "alone", "train.steps=1").rows


@pytest.mark.long
def test_a_trace_is_json_in_chromes_format_and_the_summary_has_its_numbers(ranks: MakeRanks, tmp_path: Path) -> None:
    timeline = trace(ranks, tmp_path, "grid.x=2")
    content = json.loads((tmp_path / "trace.json").read_text())
    assert {event["ph"] for event in content["traceEvents"]} >= {"X", "M"}
    assert all(event["dur"] >= 0 for event in content["traceEvents"] if event["ph"] == "X")
    assert "x" in content["stretto"]["groups"].values()
    measured = json.loads((tmp_path / "summary.json").read_text())["measured"]
    assert measured == timeline.summary()
    assert measured["traced_steps"] == [4, 5]
    assert measured["exposed"].keys() >= {"data", "x", "y", "z"}
    assert 0 < measured["exposed"]["x"] <= measured["communication"]["x"] < measured["traced_step_time"]
    assert measured["exposed"]["z"] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("checkpoints", "metrics.jsonl", "summary.json", "trace.json")
    ]


@pytest.mark.exhaustive
def test_a_pipelines_bubbles_and_messages_are_rows_of_the_timeline(ranks: MakeRanks, tmp_path: Path) -> None:
    """The first of two stages waits for each gradient: the second stage computes meanwhile."""
    stages = ["grid.pipe=2", "train.steps=3", "train.micro_batch=2", "pipeline.schedule=gpipe"]
    timeline = trace(ranks, tmp_path / "run", *stages)
    assert {"bubble", "pipe"} <= set(timeline.rows)
    assert 0 < timeline.bubble < timeline.step_time
    assert timeline.communication["pipe"] > 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["measured"]["bubble"] == pytest.approx(timeline.bubble)
    micro_batches, hidden, tokens = 4, 64, 2 * 64
    sent = micro_batches * tokens * hidden * 4
    tied = 2 * (2 - 1) / 2 * 256 * hidden * 4  # the embedding's gradient, summed over both ends
    assert summary["bytes_sent"]["pipe"] == pytest.approx(sent + tied, rel=0.05)


@pytest.mark.parametrize(
    ("start", "end", "traced"),
    [(0, 1, [1]), (0, 2, [2]), (0, 3, [2, 3]), (0, 4, [3, 4]), (0, 5, [4, 5]), (0, 100, [4, 5]), (90, 100, [94, 95])],
)
def test_the_fourth_and_fifth_step_are_traced_or_the_last_ones(start: int, end: int, traced: Sequence[int]) -> None:
    assert list(steps_to_trace(start, end)) == traced


@pytest.mark.exhaustive
def test_tracing_changes_no_bit(ranks: MakeRanks, tmp_path: Path) -> None:
    numbers = []
    for name in ("true", "false"):
        config = runs.configure(tmp_path / name, "grid.x=2", "grid.z=2", "model.dropout=0.1", f"train.trace={name}")
        ranks(4).run(runs.train_quietly, config)
        numbers.append([(line["loss"], line["grad_norm"]) for line in runs.metrics_of(config.out)])
    assert numbers[0] == numbers[1]


@pytest.mark.long
def test_a_run_without_tracing_leaves_no_trace_of_the_one_before(ranks: MakeRanks, tmp_path: Path) -> None:
    trace(ranks, tmp_path, "train.steps=1")
    ranks(1).run(runs.train_quietly, runs.configure(tmp_path, "train.steps=1"))
    assert not (tmp_path / "trace.json").exists()
    assert "measured" not in json.loads((tmp_path / "summary.json").read_text())


@pytest.mark.exhaustive
def test_a_run_that_is_stopped_between_traced_steps_has_a_trace_of_one(ranks: MakeRanks, tmp_path: Path) -> None:
    config = runs.configure(tmp_path, "grid.x=2", "train.trace=true")
    ranks(2).run(runs.train_and_stop, config, step=3, rank=1)  # which stops after step 4
    assert [step.number for step in read_timeline(tmp_path / "trace.json").steps] == [4]


def train_twice(first: Any, then: Any) -> None:
    """A run that fails while it is traced, and another in the same process."""
    with pytest.raises(DivergenceError):
        runs.train_quietly(first)
    runs.train_quietly(then)


@pytest.mark.long
def test_a_traced_step_that_fails_leaves_no_profiler_behind(ranks: MakeRanks, tmp_path: Path) -> None:
    fails = ["train.lr=1e300", "train.warmup_steps=0", "train.clip=none", "train.dtype=fp64", "train.optimizer=sgd"]
    first = runs.configure(tmp_path / "first", "train.trace=true", "train.steps=2", *fails)
    then = runs.configure(tmp_path / "then", "train.trace=true", "train.steps=2")
    ranks(1).run(train_twice, first, then)
    assert not (tmp_path / "first" / "trace.json").exists()
    assert (tmp_path / "then" / "trace.json").exists()


@pytest.mark.long
def test_the_command_line_draws_the_timeline(tmp_path: Path) -> None:
    config = runs.configure(tmp_path / "run", "train.steps=2")
    (tmp_path / "run.toml").write_text(config_to_toml(config))
    result = CliRunner().invoke(app, ["train", str(tmp_path / "run.toml"), "--trace"])
    assert result.exit_code == 0, result.output
    assert "traced step 2:" in result.output
    assert (tmp_path / "run" / "timeline.png").stat().st_size > 0
    assert "](timeline.png)" in (tmp_path / "run" / "summary.md").read_text()


def test_what_copy_engines_send_for_attention_over_context_is_in_its_row() -> None:
    def event(name: str, category: str, start: float, operator: int) -> dict[str, Any]:
        about = {"External id": operator, "stream": 7 if category == "gpu_memcpy" else 3}
        return {"name": name, "cat": category, "ts": start, "dur": 2.0, "tid": 1, "args": about}

    events = [
        {"name": "stretto step 1", "cat": "user_annotation", "ts": 0.0, "dur": 100.0, "tid": 1},
        event("_ContextAttentionBackward", "cpu_op", 10.0, 5),
        event("aten::empty", "cpu_op", 11.0, 6),
        event("aten::mm", "cpu_op", 20.0, 8),
        event("Memcpy PtoP (Device -> Device)", "gpu_memcpy", 30.0, 5),
        event("wait_for_all", "kernel", 40.0, 6),
        event("wait_for_all", "kernel", 50.0, 8),
        event("flash", "kernel", 60.0, 5),
    ]
    about = {"groups": {}, "rank": 0, "grid": {"context": 2, "z": 2}}
    found = read_timeline({"stretto": about, "traceEvents": events})
    rows = ("context", "context", "z", "compute")
    assert [(span.row, round(span.start * 1e6)) for span in found.spans] == list(
        zip(rows, (30, 40, 50, 60), strict=True)
    )
