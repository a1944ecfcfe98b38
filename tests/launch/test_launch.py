# SPDX-License-Identifier: Apache-2.0
"""Ranks are started, stopped and mourned for: real processes, with small functions in place of training."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.launch import launch_entries
from tests.processes import LIMIT, forks_processes

from stretto import counters
from stretto.launch import RankFailure, allocator_environment, launcher
from stretto.launch.failures import ERROR_FILE, read_error, seen_file
from stretto.launch.rank import _leave_reporting_to_launcher as leave_reporting
from stretto.launch.supervisor import StopTimeouts, Supervisor
from stretto.launch.watch import describe_saved
from stretto.launch.watching import joining
from stretto.train.config import TrainConfig, make_config
from stretto.train.devices import resolve_device
from stretto.train.job import TrainingJob, launch
from stretto.train.observe.metrics import last_step

QUICK = StopTimeouts(stop=20.0, report=0.3, end=1.0)


@pytest.fixture(autouse=True)
def _starts_quickly(request: pytest.FixtureRequest) -> None:
    """Ranks are forked, but those of exhaustive tests: Python starts them, as users' are."""
    if request.node.get_closest_marker("exhaustive") is None:
        request.getfixturevalue("forks_processes")


def config_for(out: Path, ranks: int, **changes: object) -> TrainConfig:
    values = {
        "out": str(out),
        "grid": {"data": ranks},
        "model": {"layers": 1, "hidden": 4, "heads": 1},
        "data": {"path": "unused"},
        "train": {"steps": 1, "batch": ranks, "seq_len": 4},
    }
    return make_config(values | changes)


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder, beside an empty folder for temporary files."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(joining, "MEMORY", tmp_path / "temporary")
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def pids(out: Path, ranks: int) -> list[int]:
    """Wait until every rank has written its process id."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        found = [file.read_text() for file in out.glob("pid-*")]
        if len(found) == ranks and all(found):
            return [int((out / f"pid-{rank}").read_text()) for rank in range(ranks)]
        time.sleep(0.05)
    raise AssertionError("the ranks did not start")


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def assert_nothing_left(out: Path, processes: list[int]) -> None:
    deadline = time.monotonic() + LIMIT
    while forks_processes() and any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [pid for pid in processes if is_alive(pid)]
    assert not list((out.parent / "temporary").iterdir())


def once_running(out: Path, ranks: int, action: Callable[[list[int]], None]) -> threading.Thread:
    """Do something to the ranks' processes as soon as all are there."""
    thread = threading.Thread(target=lambda: action(pids(out, ranks)))
    thread.start()
    return thread


def signal_launcher(number: signal.Signals) -> Callable[[list[int]], None]:
    return lambda processes: os.kill(os.getpid(), number)


def write_complete_checkpoint(out: Path) -> Path:
    """The smallest folder that counts as a checkpoint: an index of nothing."""
    folder = out / "checkpoints" / "step-00000007"
    folder.mkdir(parents=True)
    index = {"format": 1, "step": 7, "torch": "", "optimizer": "sgd"}
    (folder / "metadata.json").write_text(json.dumps(index | {"model": {}, "run": {}, "data": {}, "tensors": {}}))
    return folder


@pytest.mark.exhaustive
def test_every_rank_gets_torchruns_environment_and_its_share_of_the_cores(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(7)))
    before = dict(os.environ)
    assert launch(launch_entries.write_environment, config_for(out, 2)) is None
    assert (out / "environment-0").read_text() == "0 0 2 3"
    assert (out / "environment-1").read_text() == "1 1 2 3"
    assert dict(os.environ) == before
    assert_nothing_left(out, [])


@pytest.mark.long
def test_out_of_memory_the_kernel_ends_a_rank_before_the_launcher_that_reports_it(out: Path) -> None:
    assert launch(launch_entries.write_memory_score, config_for(out, 2)) is None
    assert int((out / "score-1").read_text()) > int(Path("/proc/self/oom_score_adj").read_text())


def test_ranks_import_nothing_from_the_working_directory(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user may start the command in a folder that others write."""
    (out / "tests").mkdir()
    (out / "tests" / "__init__.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(out)
    assert launch(launch_entries.write_pid, config_for(out, 2)) is None


@pytest.mark.long
def test_a_failure_is_named_though_the_launchers_folder_was_removed(out: Path) -> None:
    with pytest.raises(RankFailure, match="rank 0 of 2 failed: it was killed by SIGKILL"):
        launch(launch_entries.remove_folder_and_die, config_for(out, 2), QUICK)


@pytest.mark.long
def test_the_rank_that_raised_is_named_and_not_the_one_that_waited_for_it(out: Path) -> None:
    checkpoint = write_complete_checkpoint(out)
    with pytest.raises(RankFailure) as failed:
        launch(launch_entries.fail_on_last_rank, config_for(out, 2), QUICK)
    assert (failed.value.rank, failed.value.reason) == (1, "RuntimeError: the loss is gone")
    assert failed.value.checkpoint == checkpoint
    assert "rank 1 of 2 failed: RuntimeError: the loss is gone" in str(failed.value)
    assert f"the last checkpoint is {checkpoint}" in str(failed.value)
    assert "and with it a second line" in (out / "rank-1-error.txt").read_text()
    assert_nothing_left(out, pids(out, 2))


@pytest.mark.long
def test_a_rank_killed_in_mid_step_ends_the_job_with_its_name_and_signal(out: Path) -> None:
    killer = once_running(out, 2, lambda processes: os.kill(processes[1], signal.SIGKILL))
    with pytest.raises(RankFailure, match="rank 1 of 2 failed: it was killed by SIGKILL") as failed:
        launch(launch_entries.sum_until_stopped, config_for(out, 2), QUICK)
    killer.join()
    assert failed.value.checkpoint is None
    assert "there is no checkpoint" in str(failed.value)
    assert_nothing_left(out, pids(out, 2))


@pytest.mark.exhaustive
def test_a_survivor_that_is_deaf_to_sigterm_is_killed(out: Path) -> None:
    with pytest.raises(RankFailure, match="rank 0 of 2 failed: it exited with status 3"):
        launch(launch_entries.exit_on_rank_0, config_for(out, 2), QUICK)
    assert_nothing_left(out, pids(out, 2))


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (launch_entries.fail_on_last_rank, "rank 1 of 2 failed: RuntimeError: the loss is gone"),
        (launch_entries.exit_on_rank_0, "rank 0 of 2 failed: it exited with status 3"),  # the other is deaf to SIGTERM
        (launch_entries.exit_together, "rank 0 of 2 failed: it exited with status 3"),
    ],
)
def test_a_rank_that_fails_just_after_it_was_polled_fails_the_job(
    out: Path, monkeypatch: pytest.MonkeyPatch, entry: Callable[[TrainConfig], None], reason: str
) -> None:
    check, looks = Supervisor.check, []

    def look_too_early(supervisor: Supervisor) -> None:
        looks.append(True)
        if len(looks) > 1:
            check(supervisor)
        else:  # at ranks that all run, and return when one has failed
            deadline = time.monotonic() + LIMIT
            while not any(rank.has_failed() for rank in supervisor._ranks.values()):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(0.5)

    monkeypatch.setattr(Supervisor, "check", look_too_early)
    with pytest.raises(RankFailure, match=reason):
        launch(entry, config_for(out, 2), QUICK)
    assert_nothing_left(out, pids(out, 2))


@pytest.mark.long
def test_the_failure_is_reported_though_a_rank_cannot_be_killed(
    out: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that waits in the driver of a GPU that is lost. It is left behind, and the log says so."""
    with monkeypatch.context() as patched:
        patched.setattr(os, "killpg", lambda *_: None)
        timeouts = StopTimeouts(report=0.1, end=0.1, kill=0.3)
        with pytest.raises(RankFailure, match="rank 0 of 2 failed: it exited with status 3"):
            launch(launch_entries.exit_on_rank_0, config_for(out, 2), timeouts)
    ended, left = pids(out, 2)
    assert not is_alive(ended)
    assert is_alive(left)
    os.kill(left, signal.SIGKILL)
    assert re.search(r"after SIGKILL: rank 1 \(pid \d+\): it runs; they are left behind", caplog.text)


def test_ranks_do_not_outlive_one_that_could_not_be_started(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if "env" in kwargs and kwargs["env"].get("RANK") == "1":
                raise BlockingIOError(errno.EAGAIN, "no more processes")
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(launcher.subprocess, "Popen", Popen)
    with pytest.raises(BlockingIOError):
        launch(launch_entries.ignore_sigterm, config_for(out, 2), QUICK)
    assert len(started) == 2, "the guard, and rank 0"
    assert not [process.pid for process in started if is_alive(process.pid)]
    assert list(out.iterdir()) == []


def test_a_signal_is_passed_on_and_the_ranks_end_by_themselves(out: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    sender = once_running(out, 2, signal_launcher(signal.SIGINT))
    assert launch(launch_entries.sum_until_stopped, config_for(out, 2), QUICK) == signal.SIGINT
    sender.join()
    assert {file.name for file in out.glob("stopped-*")} == {"stopped-0", "stopped-1"}
    assert signal.getsignal(signal.SIGINT) == before
    assert_nothing_left(out, pids(out, 2))


def test_a_run_that_fails_while_it_stops_is_not_started_again(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sender = once_running(out, 2, signal_launcher(signal.SIGINT))
    train = {"steps": 1, "batch": 2, "seq_len": 4, "max_restarts": 3}
    with pytest.raises(RankFailure, match="no space for the last checkpoint"):
        launch(launch_entries.fail_to_stop, config_for(out, 2, train=train), QUICK)
    sender.join()
    assert capsys.readouterr().out == "no restart: SIGINT has asked the run to stop\n"
    (line,) = (out / "restarts.jsonl").read_text().splitlines()
    assert json.loads(line)["restarted"] is False


@pytest.mark.long
def test_a_signal_before_the_ranks_are_started_stops_them(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = launcher._start_ranks

    def signal_and_start(*args: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        start(*args)

    monkeypatch.setattr(launcher, "_start_ranks", signal_and_start)
    assert launch(launch_entries.sum_until_stopped, config_for(out, 2), QUICK) == signal.SIGINT
    assert not list(Path(tempfile.gettempdir()).iterdir())


@pytest.mark.exhaustive
def test_ranks_that_do_not_stop_in_time_are_killed(out: Path) -> None:
    sender = once_running(out, 2, signal_launcher(signal.SIGTERM))
    timeouts = StopTimeouts(stop=0.5, report=0.1, end=1.0)
    assert launch(launch_entries.ignore_sigterm, config_for(out, 2), timeouts) == signal.SIGTERM
    sender.join()
    assert_nothing_left(out, pids(out, 2))


@pytest.mark.exhaustive
def test_ranks_stop_when_the_launcher_is_killed(out: Path) -> None:
    script = (
        "from tests.launch import test_launch, launch_entries; from pathlib import Path; "
        f"test_launch.launch(launch_entries.sum_until_stopped, test_launch.config_for(Path({str(out)!r}), 2))"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": tempfile.gettempdir()},
    )
    processes = pids(out, 2)
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + LIMIT
    while any(is_alive(pid) for pid in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert {file.name for file in out.glob("stopped-*")} == {"stopped-0", "stopped-1"}
    assert not [pid for pid in processes if is_alive(pid)]


def test_one_rank_runs_in_this_process(out: Path) -> None:
    assert launch(launch_entries.write_pid, config_for(out, 1)) is None
    assert pids(out, 1) == [os.getpid()]


def test_a_signal_that_one_rank_handles_itself_is_returned(out: Path) -> None:
    assert launch(launch_entries.stop_in_process, config_for(out, 1)) == signal.SIGTERM


def test_an_exception_in_this_process_is_reported_as_that_of_another(out: Path) -> None:
    checkpoint = write_complete_checkpoint(out)
    with pytest.raises(RankFailure, match="rank 0 of 1 failed: RuntimeError: no luck\n") as failed:
        launch(launch_entries.raise_in_process, config_for(out, 1))
    assert failed.value.checkpoint == checkpoint
    assert f"the last checkpoint is {checkpoint}: continue with --set train.resume=latest" in str(failed.value)
    assert "raise_in_process" in (out / "rank-0-error.txt").read_text()


def test_the_newest_checkpoint_is_not_advised_where_training_has_diverged(out: Path) -> None:
    write_complete_checkpoint(out)
    with pytest.raises(
        RankFailure, match="DivergenceError: the loss is nan in step 4; the last checkpoint whose"
    ) as failed:
        launch(launch_entries.diverge, config_for(out, 1))
    assert "train.resume=latest" not in str(failed.value)


def test_a_rank_with_corrupted_weights_is_named_though_all_ranks_raise(out: Path) -> None:
    checkpoint = write_complete_checkpoint(out)
    with pytest.raises(RankFailure) as failed:
        launch(launch_entries.find_corruption, config_for(out, 3), QUICK)
    assert failed.value.rank == 1
    first, then, *_ = str(failed.value).splitlines()
    assert first == "rank 1 (host node7) holds other weights than ranks 0 and 2: norm.weight after step 35"
    assert f"the last checkpoint is {checkpoint}" in then


@pytest.mark.long
def test_the_rank_that_could_not_write_is_named_though_all_ranks_raise(out: Path) -> None:
    with pytest.raises(RankFailure) as failed:
        launch(launch_entries.fail_to_write, config_for(out, 3), QUICK)
    assert failed.value.rank == 1
    line = str(failed.value).splitlines()[0]
    assert line.startswith("rank 1 of 3 failed: WriteError: the checkpoint ")
    assert line.endswith(" could not be written: on rank 1, RuntimeError: no luck")


@pytest.mark.long
def test_of_a_full_disk_the_file_that_did_not_fit_is_named_and_no_other_rank(out: Path) -> None:
    with pytest.raises(RankFailure) as failed:
        launch(launch_entries.find_a_full_disk, config_for(out, 2), QUICK)
    assert failed.value.rank == 1
    line = str(failed.value).splitlines()[0]
    assert line.startswith("no space left for a checkpoint in ")
    assert line.endswith("(rank 1: No space left on device)")


def test_a_full_disk_costs_the_traceback_and_not_the_message(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write_complete_checkpoint(out)

    def write_nothing(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", write_nothing)
    with pytest.raises(RankFailure, match="rank 0 of 1 failed: RuntimeError: no luck") as failed:
        launch(launch_entries.raise_in_process, config_for(out, 1))
    assert failed.value.checkpoint == checkpoint
    assert "traceback" not in str(failed.value)


def test_after_a_checkpoint_that_cannot_be_read_the_one_before_it_is_named(out: Path) -> None:
    older = write_complete_checkpoint(out)
    shutil.copytree(older, newest := older.with_name("step-00000008"))

    def damaged(config: TrainConfig) -> None:
        raise ValueError(f"the checkpoint {newest} cannot be read: on rank 0, UnpicklingError: no")

    with pytest.raises(RankFailure) as failed:
        launch(damaged, config_for(out, 1))
    assert failed.value.checkpoint == older
    assert f"continue with --set train.resume={older}" in str(failed.value)
    assert "resume=latest" not in str(failed.value)


def test_a_rank_of_torchrun_runs_in_its_process(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    launch(launch_entries.write_pid, config_for(out, 2))
    assert (out / "pid-1").read_text() == str(os.getpid())


@pytest.mark.parametrize(("gpus", "ranks", "device"), [(0, 1, "cpu"), (3, 4, "cpu"), (4, 4, "cuda"), (8, 2, "cuda")])
def test_auto_takes_cuda_where_there_is_a_gpu_for_each_rank(
    monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert resolve_device(config_for(Path("unused"), ranks)).device == device


def test_auto_takes_cuda_under_srun_where_each_node_has_gpus_for_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_NODEID", "1")
    for tasks, device in (("4(x2)", "cuda"), ("3,5", "cpu"), ("?", "cuda")):  # the last one: nobody knows
        monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", tasks)
        assert resolve_device(config_for(Path("unused"), 8)).device == device


def test_ranks_that_may_share_gpus_need_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_SHARE_GPUS", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for device in ("auto", "cuda"):
        assert resolve_device(config_for(Path("unused"), 4, device=device)).device == "cuda"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert resolve_device(config_for(Path("unused"), 4)).device == "cpu"
    with pytest.raises(ValueError, match="needs a GPU for each of 4 ranks, but there are 0"):
        resolve_device(config_for(Path("unused"), 4, device="cuda"))


def test_cuda_with_too_few_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="needs a GPU for each of 4 ranks, but there are 2; ranks=2 or device='cpu'"):
        resolve_device(config_for(Path("unused"), 4, device="cuda"))


def test_segments_grow_and_nccl_is_configured_unless_the_user_has_set_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_GRAPH_REGISTER"):
        monkeypatch.delenv(name, raising=False)
    grows = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert allocator_environment() == grows | {"NCCL_GRAPH_REGISTER": "0"}
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")
    assert allocator_environment() == grows
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    assert allocator_environment() == {}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["time limit", pytest.param("second signal", marks=pytest.mark.exhaustive)])
def test_ctrl_c_with_a_stuck_rank_reports_which_one_and_what_is_not_saved(
    out: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    (out.parent / "text.txt").write_text("It was a bright cold day in April. " * 40)
    config = config_for(out, 2, data={"path": str(out.parent / "text.txt")}, device="cpu")
    options = {"steps": 9, "batch": 4, "seq_len": 4, "checkpoint_every": 2, "timeout": 600.0, "keep_checkpoints": 1}
    config = make_config(config.model_dump(mode="json") | {"train": options})

    def stop(processes: list[int]) -> None:
        deadline = time.monotonic() + LIMIT
        while last_step(out) != 5 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)
        if kind == "second signal":
            time.sleep(4)
            os.kill(os.getpid(), signal.SIGINT)

    sender = once_running(out, 2, stop)
    timeouts = StopTimeouts(stop=4.0 if kind == "time limit" else 60.0, report=0.1, end=1.0)
    assert launch(launch_entries.train_with_stuck_rank, config, timeouts) == signal.SIGINT
    sender.join()
    (message,) = [record.getMessage() for record in caplog.records if "did not stop" in record.getMessage()]
    assert message.startswith("rank 1 did not stop within 4 s (step 6, phase data; rank 0 waits for it"), message
    assert message.endswith("the last checkpoint is step 4: step 5 is not saved")
    assert_nothing_left(out, pids(out, 2))


def test_saved_progress_is_derived_from_the_checkpoints_and_the_metrics(out: Path) -> None:
    job = TrainingJob(config_for(out, 1))
    assert describe_saved(job) == "there is no checkpoint: no finished step is lost"
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, 32)]
    (out / "metrics.jsonl").write_text("".join(lines) + '{"step": 32, "lo')
    assert describe_saved(job) == "there is no checkpoint: steps 1 to 31 are not saved"
    write_complete_checkpoint(out)
    assert describe_saved(job) == "the last checkpoint is step 7: steps 8 to 31 are not saved"
    (out / "metrics.jsonl").write_text("".join(lines[:7]))
    assert describe_saved(job) == "the last checkpoint is step 7: no finished step is lost"


@pytest.mark.parametrize(("error", "waited"), [("Timed out waiting 15000ms for recv", True), ("no such layer", False)])
def test_a_rank_that_has_given_up_waiting_tells_its_watcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, waited: bool
) -> None:
    file, marked = tmp_path / "error.json", []
    seen_file(file).touch()
    monkeypatch.setenv(ERROR_FILE, str(file))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(counters, "mark_failed", lambda: marked.append(not file.exists()))
    leave_reporting(RuntimeError, RuntimeError(error), None)
    assert read_error(file).is_consequence == waited
    assert marked == [True] * waited  # before the launcher can read the error
