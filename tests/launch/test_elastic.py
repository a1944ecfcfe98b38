# SPDX-License-Identifier: Apache-2.0
"""Jobs that torchrun has started again: on as many ranks as there are now, from the job's own newest checkpoint."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.launch.test_restarts import losses, write_checkpoint
from tests.processes import LIMIT, find_free_port
from tests.train import runs

from stretto.launch import leftovers
from stretto.launch.elastic import continues_job, mark_begun, mark_ended
from stretto.launch.leftovers import list_segments, remove_orphans, remove_partial_files
from stretto.launch.run_lock import training_lock
from stretto.launch.slots import probe_gpus
from stretto.train.config import TrainConfig
from stretto.train.job import TrainingJob, fit_started_ranks, resume_job


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of a rank that torchrun has started, one of two, for the first time."""
    monkeypatch.delenv("STRETTO_ATTEMPT", raising=False)
    variables = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "job-1", "TORCHELASTIC_RESTART_COUNT": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def configure(tmp_path: Path, *overrides: str) -> TrainConfig:
    config = runs.configure(tmp_path / "out", "grid={data=2, x=2}", *overrides)
    config.out.mkdir(exist_ok=True)
    return config


def test_the_world_size_decides_on_the_grid(tmp_path: Path, torchrun: pytest.MonkeyPatch) -> None:
    config = configure(tmp_path, "train.grids=[{data=2}, {x=2}, {data=1}]")
    for size, grid in (("4", "data=2 x=2 y=1 z=1"), ("2", "data=2 x=1 y=1 z=1"), ("1", "data=1 x=1 y=1 z=1")):
        torchrun.setenv("WORLD_SIZE", size)
        fitted = fit_started_ranks(config)
        assert (str(fitted.grid), fitted.ranks) == (grid, int(size))
        assert fit_started_ranks(fitted) == fitted
    torchrun.setenv("WORLD_SIZE", "3")
    message = "ranks is 4, but torchrun started 3, for which train.grids has no grid; ranks=3 would do"
    with pytest.raises(ValueError, match=message):
        fit_started_ranks(config)
    torchrun.delenv("WORLD_SIZE")
    assert fit_started_ranks(config) == config


def test_ranks_that_were_started_again_resume_the_checkpoint_of_their_job(
    tmp_path: Path, torchrun: pytest.MonkeyPatch
) -> None:
    config = configure(tmp_path, "train.resume=none")
    write_checkpoint(config.out, 4)  # of an earlier run
    assert resume_job(config) == config
    mark_begun(config.out, 4)
    assert resume_job(config) == config  # it has begun, and has no checkpoint yet
    write_checkpoint(config.out, 6)
    assert resume_job(config).train.resume == "latest"
    mark_begun(config.out, 6)  # after a restart: the job began at 4 all the same
    write_checkpoint(config.out, 5)
    assert resume_job(config).train.resume == "latest"
    torchrun.setenv("TORCHELASTIC_RUN_ID", "job-2")
    assert resume_job(config) == config
    torchrun.setenv("TORCHELASTIC_RUN_ID", "job-1")
    mark_ended(config.out)
    assert resume_job(config) == config
    assert not list(config.out.glob(".*"))


def test_without_an_id_the_number_of_restarts_tells(tmp_path: Path, torchrun: pytest.MonkeyPatch) -> None:
    config = configure(tmp_path)
    torchrun.setenv("TORCHELASTIC_RUN_ID", "none")
    mark_begun(config.out, 0)
    assert not continues_job(config.out)
    torchrun.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert continues_job(config.out)
    for damaged in ("", "{", "[]", '{"job": 2, "start": 0}', '{"job": "none"}'):
        (config.out / ".job.json").write_text(damaged)
        assert not continues_job(config.out)


def test_segments_that_no_process_has_are_removed_and_others_stay(tmp_path: Path) -> None:
    (tmp_path / "nccl-earlier").touch()
    before = list_segments(tmp_path)
    for name in ("nccl-orphan", "torch_orphan", "another", "nccl-open", "nccl-mapped"):
        (tmp_path / name).write_bytes(bytes(4096))
    with open(tmp_path / "nccl-open") as held:
        script = (
            "import mmap, sys, time; file = open(sys.argv[1], 'r+b'); memory = mmap.mmap(file.fileno(), 0); "
            "file.close(); print('mapped', flush=True); time.sleep(60)"
        )
        holder = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "nccl-mapped")], stdout=subprocess.PIPE, text=True
        )
        assert holder.stdout is not None
        assert holder.stdout.readline() == "mapped\n"
        assert remove_orphans(before, tmp_path) == {"nccl-orphan", "torch_orphan"}
        assert not held.closed
        holder.kill()
        holder.wait()
        holder.stdout.close()
    assert {path.name for path in tmp_path.iterdir()} == {"nccl-earlier", "another", "nccl-open", "nccl-mapped"}


def test_segments_stay_where_processes_that_may_have_them_are_invisible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container with the machine's shared memory, and with process numbers of its own."""
    (tmp_path / "nccl-of-another-container").touch()
    own = {name: (Path("/proc/self/ns") / name).stat().st_ino for name in ("ipc", "pid")}
    for is_machines_ipc, is_machines_pid, removes in ((True, False, False), (True, True, True), (False, False, True)):
        monkeypatch.setattr(leftovers, "FIRST_IPC", own["ipc"] if is_machines_ipc else 0)
        monkeypatch.setattr(leftovers, "FIRST_PID", own["pid"] if is_machines_pid else 0)
        (tmp_path / "nccl-of-another-container").touch()
        assert bool(remove_orphans(set(), tmp_path)) == removes
        assert (tmp_path / "nccl-of-another-container").exists() != removes


def test_half_written_files_go_unless_another_run_trains_there(tmp_path: Path) -> None:
    job = TrainingJob(configure(tmp_path).model_copy(update={"out": tmp_path}))
    half = tmp_path / "checkpoints" / ".step-00000002.writing"
    half.mkdir(parents=True)
    (metrics := tmp_path / "metrics.jsonl.0123.partial").touch()
    for name in (".job.json.0123.partial", "restarts.jsonl.0123.partial", "mine.partial"):
        (tmp_path / name).touch()
    whole = write_checkpoint(tmp_path, 1)
    with training_lock(tmp_path):
        remove_partial_files(job)
    assert half.is_dir()
    remove_partial_files(job)
    assert not half.exists()
    assert not metrics.exists()
    assert [path.name for path in tmp_path.glob("*.partial")] == ["mine.partial"]
    assert whole.is_dir()


@pytest.mark.exhaustive  # it waits for the one that hangs
def test_a_probe_that_fails_or_hangs_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import os, time\nmatch os.environ['CUDA_VISIBLE_DEVICES']:\n"
        " case '1': raise RuntimeError\n case '2': time.sleep(60)\n case '3': os.kill(os.getpid(), 9)\n"
    )
    monkeypatch.setattr("stretto.launch.slots.PROBE", script)
    monkeypatch.setattr("stretto.launch.slots.PROBE_TIMEOUT", 5.0)
    assert probe_gpus(["0", "1", "2", "3"]) == {"0"}


def agent(tmp_path: Path, port: int) -> "subprocess.Popen[bytes]":
    """torchrun's agent for one of at most two nodes, with a rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=elastic", "--max-restarts=9"]
    command += ["--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"]
    command += [str(Path(__file__).with_name("elastic_run.py")), str(tmp_path / "run.toml")]
    with open(tmp_path / f"agent-{time.time()}.txt", "wb") as output:
        return subprocess.Popen(
            command,
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join(sys.path),
                "OMP_NUM_THREADS": "1",
                # torch 2.13's rank 0 tells a node that comes later nothing of a store that it shares with its ranks.
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            },
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def wait_for(tmp_path: Path, *, step: int | None = None, started: str | None = None) -> None:
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        time.sleep(0.1)
        metrics = tmp_path / "out" / "metrics.jsonl"
        lines = metrics.read_bytes().splitlines() if metrics.is_file() else []
        if (step is None or len(lines) >= step) and (started is None or (tmp_path / started).exists()):
            return
    outputs = "\n".join(file.read_text()[-3000:] for file in tmp_path.glob("agent-*.txt"))
    raise AssertionError(f"step {step}, {started}: not reached\n{outputs}")


@pytest.mark.exhaustive
def test_torchruns_nodes_join_and_leave(tmp_path: Path) -> None:
    """Two nodes of a rank each; one is lost, and the other goes on alone; another one comes, and both go on."""
    options = ["train.steps=40", "train.checkpoint_every=2", "train.dtype=fp64", "grid.data=2", "train.grids=data=1"]
    config = runs.configure(tmp_path / "out", *options, "model={layers=1, hidden=16, heads=2}")
    runs.write_config(config)
    (config.out / "config.toml").rename(tmp_path / "run.toml")
    port = find_free_port()
    agents = [agent(tmp_path, port)]  # it has the store
    time.sleep(2.0)
    agents.append(agent(tmp_path, port))
    try:
        wait_for(tmp_path, step=5, started="pid-1-of-2")
        lost = next(
            int((tmp_path / f"pid-{rank}-of-2").read_text()) for rank in (0, 1) if is_child(tmp_path, rank, agents[1])
        )
        os.killpg(agents[1].pid, signal.SIGKILL)
        os.kill(lost, signal.SIGKILL)
        wait_for(tmp_path, started="pid-0-of-1")
        (tmp_path / "pid-1-of-2").unlink()
        wait_for(tmp_path, step=12)
        agents.append(agent(tmp_path, port))
        wait_for(tmp_path, started="pid-1-of-2")
        for process in (agents[0], agents[2]):
            assert process.wait(timeout=150) == 0
    finally:
        for process in agents:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(timeout=60)
    steps = losses(config.out)
    options = [*options[:3], "grid.data=1", "model={layers=1, hidden=16, heads=2}"]
    alone = runs.configure(tmp_path / "alone" / "out", *options)
    runs.train_quietly(alone)
    assert len(steps) == 40
    assert steps == pytest.approx(losses(alone.out), abs=1e-6)
    assert json.loads((config.out / "summary.json").read_text())["ranks"] == 2
    assert not list(config.out.glob(".*"))


def is_child(tmp_path: Path, rank: int, parent: "subprocess.Popen[bytes]") -> bool:
    pid = int((tmp_path / f"pid-{rank}-of-2").read_text())
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == parent.pid
