# SPDX-License-Identifier: Apache-2.0
"""A run in which a rank is stuck ends within `train.timeout`, and names the rank: real processes, real faults."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launch.watching import fault_runs
from tests.processes import LIMIT, find_free_port
from tests.train import runs

from stretto.launch import RankFailure
from stretto.launch.supervisor import StopTimeouts
from stretto.launch.watching.monitor import Monitor
from stretto.train.job import launch

QUICK = StopTimeouts(stop=20.0, report=0.3, end=1.0)
TIMEOUT = 15.0  # of steps, with what they import, and of making connections: on a busy machine these take seconds
EVALUATES = ("train.evaluate_every=5", "data.evaluation_sequences=16")


@pytest.fixture(autouse=True)
def _starts_quickly(forks_processes: None) -> None:
    """Ranks are forked."""


def fail(out: Path, monkeypatch: pytest.MonkeyPatch, fault: str, *overrides: str, ranks: int = 2) -> RankFailure:
    """Train with a fault until the run ends by itself.

    The launcher finds the stall some seconds before the waiting ranks, whose limit is the same, may give up.
    """
    monkeypatch.setattr(Monitor, "limit", property(lambda monitor: 0.7 * monitor.timeout))
    monkeypatch.setenv(fault_runs.FAULT, fault)
    options = [f"grid.data={ranks}", f"train.timeout={TIMEOUT}", "train.steps=1000", "train.checkpoint_every=6"]
    with pytest.raises(RankFailure) as failed:
        launch(fault_runs.train_with_fault, runs.configure(out, *options, *overrides), QUICK)
    return failed.value


def report_folder(out: Path) -> Path:
    (folder,) = (out / "stalls").iterdir()
    return folder


def test_a_stopped_rank_0_is_named_with_its_state_its_stack_and_what_the_others_wait_in(tmp_path, monkeypatch, caplog):
    out = tmp_path / "out"
    failure = fail(out, monkeypatch, "stop data 0")
    assert (failure.kind, failure.rank) == ("stalled", 0)
    where = r"is stuck in step 4, phase data, at fault_runs\.py:\d+ in strike: its process is stopped by a signal"
    assert re.search(where, failure.reason), failure.reason
    assert re.search(r"rank 1 waits for it in all_reduce number \d+ of group (data|batch)", failure.reason)
    folder = report_folder(out)
    assert f"stacks are in {folder}" in str(failure)
    assert "MainThread" in (folder / "rank-1-stack.txt").read_text()
    assert "strike" in (folder / "rank-0-stack.txt").read_text(), "where it was stopped"
    report = (folder / "report.txt").read_text()
    assert "stopped by a signal" in report
    assert re.search(r"\n1 .* waiting .* all_reduce \d+ of ", report)
    # On a busy machine another rank may be reported before, and go on.
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    reports = [text for text in warnings if text.startswith("rank 0 ") and "reaches the limit" in text]
    assert len(reports) == 1, warnings


@pytest.mark.long
@pytest.mark.parametrize("phase", [pytest.param("data", marks=pytest.mark.exhaustive), "step"])
def test_in_a_pipeline_the_stuck_rank_is_named_and_not_one_that_waits_for_its_messages(tmp_path, monkeypatch, phase):
    overrides = ("grid.data=2", "grid.pipe=2", "train.micro_batch=1")
    failure = fail(tmp_path / "out", monkeypatch, f"loop {phase} 1", *overrides)
    assert (failure.kind, failure.rank) == ("stalled", 1), str(failure)
    assert "ranks 0, 2 and 3 wait for it" in failure.reason, failure.reason


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_async", ["true", pytest.param("false", marks=pytest.mark.exhaustive)])
def test_a_thread_that_writes_and_hangs_is_named_with_its_line(tmp_path, monkeypatch, caplog, is_async):
    failure = fail(tmp_path / "out", monkeypatch, "loop write 1", f"train.async_save={is_async}")
    assert (failure.kind, failure.rank) == ("stalled", 1)
    assert "is stuck in phase save of step 6, in the thread that writes, at fault_runs.py:" in failure.reason
    assert "in spin" in failure.reason
    # Beside a thread that writes, a step goes on, and on a busy machine rank 0 may not have come to wait.
    assert is_async == "true" or "rank 0 waits for it in the save of step 6" in failure.reason + caplog.text


FAULTS = [
    # fault, kind, what the message has
    ("stop start 1", "stalled", "phase start"),
    ("stop build 0", "stalled", "phase build, at fault_runs.py"),
    ("stop step 1", "stalled", "in strike: its process is stopped by a signal"),
    ("stop evaluate 1", "stalled", "step 5, phase evaluate"),
    ("stop save 0", "stalled", "step 6, phase save"),
    ("loop build 1", "stalled", "phase build, at fault_runs.py"),
    ("loop data 1", "stalled", "step 4, phase data, at fault_runs.py"),
    ("loop save 1", "stalled", "step 6, phase save, at fault_runs.py"),
    ("loop evaluate 0", "stalled", "step 5, phase evaluate, at fault_runs.py"),
    ("loop exit 0", "stalled", "phase exit"),
    ("sleep data 0", "stalled", "step 4, phase data, at fault_runs.py"),
    ("c data 1", "stalled", "step 4, phase data, at fault_runs.py"),  # it holds the interpreter lock
    ("regex data 0", "stalled", "step 4, phase data, at __init__.py"),  # so does this: re.match's own frame
    ("kill start 1", "killed", "SIGKILL"),
    ("kill save 0", "killed", "SIGKILL"),
    ("raise data 0", "raised", "RuntimeError: no luck"),
    ("raise save 1", "raised", "RuntimeError: no luck"),
    ("drop step 1", "lost connection", "ranks 0 and 1 lost their connection to each other"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("fault", "kind", "text"), FAULTS, ids=[fault for fault, _, _ in FAULTS])
def test_each_fault_is_named_by_rank_and_kind(tmp_path, monkeypatch, fault, kind, text):
    steps = ("train.steps=4",) if "exit" in fault else EVALUATES
    failure = fail(tmp_path / "out", monkeypatch, fault, *steps)
    rank = 0 if kind == "lost connection" else int(fault.split()[-1])  # with two ranks either may stand for both
    assert (failure.kind, failure.rank) == (kind, rank), str(failure)
    assert text in str(failure)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "grid", [("grid.x=2", "grid.data=1"), ("grid.pipe=2", "grid.data=1"), ("grid.data=2", "grid.z=2")], ids=" ".join
)
def test_every_group_of_a_run_has_the_time_limit(tmp_path, monkeypatch, grid):
    failure = fail(tmp_path / "out", monkeypatch, "limits data 0", *grid)
    limits = dict(text.split("=") for text in failure.reason.partition("RuntimeError: ")[2].split(", "))
    assert len(limits) >= 3
    assert set(limits.values()) == {str(TIMEOUT)}, limits


@pytest.mark.exhaustive
def test_of_four_ranks_the_one_whose_connections_are_cut_is_named(tmp_path, monkeypatch):
    failure = fail(tmp_path / "out", monkeypatch, "drop step 2", ranks=4)
    assert (failure.kind, failure.rank) == ("lost connection", 2)
    assert str(failure).startswith("rank 2 lost its connections to ranks")


@pytest.mark.exhaustive
def test_a_slow_rank_is_reported_and_is_in_the_summary(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(fault_runs.FAULT, "slow data 1")
    options = ["grid.data=2", "train.timeout=20", "train.steps=170"]
    assert launch(fault_runs.train_with_fault, runs.configure(tmp_path / "out", *options), QUICK) is None
    assert "slowest rank 1: " in caplog.text
    assert "x the median for 50 steps" in caplog.text
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["slow_rank"]["rank"] == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("loop data 0", "rank 0 (host"),
        pytest.param("stop step 1", "its process is stopped by a signal", marks=pytest.mark.exhaustive),
        pytest.param("stop data 0", "its process is stopped by a signal", marks=pytest.mark.exhaustive),
        pytest.param("c data 1", "rank 1 (host", marks=pytest.mark.exhaustive),
    ],
)
def test_ranks_that_torchrun_started_end_and_torchrun_names_the_culprit(tmp_path, monkeypatch, fault, text):
    monkeypatch.setenv(fault_runs.FAULT, fault)
    out = tmp_path / "out"
    config = runs.configure(out, "grid.data=2", f"train.timeout={TIMEOUT}", "train.steps=1000")
    runs.write_config(config)
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*started, fault_runs.__file__, str(out / "config.toml")], capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode != 0
    cause = done.stderr.partition("Root Cause")[2]
    assert f"rank      : {fault.split()[-1]} " in cause, done.stderr[-3000:]
    assert text in cause
    assert "no progress for" in cause
    folder = report_folder(out)
    assert {file.name for file in folder.iterdir()} >= {"report.txt", "rank-0-stack.txt", "rank-1-stack.txt"}


@pytest.mark.exhaustive
def test_a_second_training_of_the_same_processes_is_watched_with_its_own_limit(tmp_path, monkeypatch):
    monkeypatch.setenv(fault_runs.FAULT, "loop data 1")
    files = []
    for name, limit, steps in (("first", 600.0, 2), ("second", TIMEOUT, 1000)):
        config = runs.configure(tmp_path / name, "grid.data=2", f"train.timeout={limit}", f"train.steps={steps}")
        runs.write_config(config)
        files.append(str(config.out / "config.toml"))
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*started, fault_runs.__file__, *files], capture_output=True, text=True, timeout=LIMIT)
    assert f"(train.timeout is {TIMEOUT:g} s); rank 0 waits for it" in done.stderr.partition("Root Cause")[2], (
        done.stderr
    )
    assert (report_folder(tmp_path / "second") / "report.txt").exists()


@pytest.mark.exhaustive
def test_of_torchruns_nodes_the_one_with_the_stuck_rank_is_named_on_both(tmp_path, monkeypatch):
    """Each node has a watcher, and they exchange what they see through the job's store."""
    monkeypatch.setenv(fault_runs.FAULT, "loop data 1")
    out = tmp_path / "out"
    config = runs.configure(out, "grid.data=2", f"train.timeout={TIMEOUT}", "train.steps=1000")
    runs.write_config(config)
    port = find_free_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-id=two-nodes"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"]
    command += [fault_runs.__file__, str(out / "config.toml")]
    nodes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    texts = [node.communicate(timeout=LIMIT)[1] for node in nodes]
    assert all(node.returncode != 0 for node in nodes)
    named = [re.search(r"rank 1 \(host .*\) is stuck in step 4, phase data", text) for text in texts]
    assert all(named), "\n----\n".join(text[-3000:] for text in texts)
    assert "rank 0 waits for it in all_reduce number" in "".join(texts)
