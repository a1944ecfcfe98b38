# SPDX-License-Identifier: Apache-2.0
"""Runs whose ranks fail go on by themselves, from their newest checkpoint and on the ranks that are left."""

import errno
import gc
import json
import os
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
from tests.launch import restart_entries
from tests.launch.restart_entries import plan_faults
from tests.launch.test_launch import QUICK
from tests.processes import LIMIT
from tests.train import runs

from stretto.launch import LaunchJob, RankFailure, restarts
from stretto.launch import slots as slots_module
from stretto.launch.failures import Failure
from stretto.launch.restarts import Restarts
from stretto.launch.slots import Slot, Slots
from stretto.launch.watching import joining
from stretto.train.checkpoint.writing import NoSpaceError
from stretto.train.config import TrainConfig
from stretto.train.job import TrainingJob, launch
from stretto.train.observe.metrics import DivergenceError

STEPS = 12  # of which a checkpoint is written after every second


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder, with an empty folder for temporary files beside it."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(joining, "MEMORY", tmp_path / "temporary")
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
    """Each rank's start options, by attempt and rank."""
    found: dict[int, dict[int, dict[str, Any]]] = {}
    for file in out.parent.glob("attempt-*"):
        _, attempt, _, rank = file.name.split("-")
        found.setdefault(int(attempt), {})[int(rank)] = json.loads(file.read_text().splitlines()[0])
    return [found[number] for number in sorted(found)]


def count_listening_sockets() -> int:
    """Those of this process."""
    gc.collect()
    mine = {os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        if (table := Path("/proc/self/net", name)).exists()
        for line in table.read_text().splitlines()[1:]
    ]
    return sum(f"socket:[{line[9]}]" in mine for line in lines if line[3] == "0A")


def assert_nothing_left(out: Path) -> None:
    for file in out.parent.glob("attempt-*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text().splitlines()[1]), 0)
    assert not list((out.parent / "temporary").iterdir())
    assert not [path.name for path in out.iterdir() if path.name.startswith(".") or path.name.endswith(".partial")]
    assert not list((out / "checkpoints").glob(".*"))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("forks_processes")
def test_a_restart_gives_the_bits_of_an_undisturbed_run(out: Path) -> None:
    plan_faults(out, {"attempt": 0, "slot": 1, "step": 6, "how": "killed"})
    config = configure(out, 2, "train.max_restarts=1", "train.dtype=fp32")
    assert launch(restart_entries.train_with_faults, config, QUICK) is None
    calm = configure(out.parent / "calm" / "out", 2, "train.dtype=fp32")
    assert launch(runs.train_quietly, calm, QUICK) is None
    assert losses(out) == losses(calm.out)
    assert [attempt[0]["resume"] for attempt in attempts(out)] == [None, "latest"]
    assert_nothing_left(out)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("forks_processes")
def test_a_run_goes_from_4_to_2_ranks_and_back_to_4_automatically(
    out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEP_SECONDS", "0.1")
    plan_faults(
        out,
        {"attempt": 0, "slot": 1, "step": 4, "how": "killed"},
        {"attempt": 1, "slot": 1, "step": 4, "how": "raised"},
    )
    config = configure(out, 4, "train.max_restarts=2", 'train.grids=["data=2"]', "train.retry_after=0.2")
    sockets = count_listening_sockets()
    assert launch(restart_entries.train_with_faults, config, QUICK) is None
    assert count_listening_sockets() == sockets
    assert losses(out) == pytest.approx(undisturbed(out), abs=1e-6)
    started = attempts(out)
    assert [len(ranks) for ranks in started] == [4, 4, 2, 4]
    assert [ranks[1]["slot"] for ranks in started] == [1, 1, 2, 1]
    assert [ranks[0]["resume"] for ranks in started] == [None, "latest", "latest", "latest"]
    first, second = journal(out)
    assert (first["kind"], first["rank"], first["slot"]) == ("killed", 1, 1)
    assert (second["kind"], second["rank"], second["reason"]) == ("raised", 1, "RuntimeError: no luck")
    assert [failure["grid"]["data"] for failure in (first, second)] == [4, 2]
    for failure in (first, second):
        assert failure["step_resumed"] == 2
        assert failure["steps_lost"] == failure["step_reached"] - 2 <= 1
    assert second["seconds_until_training"] >= second["seconds_until_named"] >= 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("restart 1: rank 1 of 4 failed: it was killed by SIGKILL")
    assert "it goes on after step 2 on 4 ranks (data=4 x=1 y=1 z=1)" in lines[0]
    (smaller,) = [line for line in lines if line.startswith("restart 2: ")]
    assert "on 2 ranks (data=2 x=1 y=1 z=1)" in smaller
    assert "slot 1 is set aside" in smaller
    assert any(line.startswith("grid: from 2 ranks") and "to 4 ranks" in line for line in lines)
    assert any(line.startswith("training again ") for line in lines)
    assert_nothing_left(out)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("forks_processes")
def test_a_run_of_one_rank_is_restarted_too(out: Path) -> None:
    plan_faults(out, {"attempt": 0, "slot": 0, "step": 5, "how": "killed"})
    assert launch(restart_entries.train_with_faults, configure(out, 1, "train.max_restarts=1"), QUICK) is None
    assert losses(out) == undisturbed(out)
    assert_nothing_left(out)


# Without processes: attempts that write a run's files and fail as the test says.


class Attempts:
    """Stands for the launcher's attempts: each is a function, which gets the configuration and the test's files."""

    def __init__(self, config: TrainConfig, *played: Callable[["Attempts"], signal.Signals | None]) -> None:
        self.config, self._played = config, list(played)
        self.configs: list[TrainConfig] = []
        self.environments: list[dict[str, str]] = []
        self.slots = Slots([Slot(number) for number in range(config.ranks)], config.train.retry_after)

    def __call__(
        self, job: LaunchJob, run_id: str, environment: dict[str, str], wants_stop: Callable[[], bool]
    ) -> signal.Signals | None:
        self.run_id, self.wants_stop = run_id, wants_stop
        self.configs.append(job.argument)
        self.environments.append(environment)
        return self._played.pop(0)(self)

    def run(self) -> signal.Signals | None:
        return Restarts(self, TrainingJob(self.config), QUICK, self.slots).run()

    @property
    def ranks(self) -> list[int]:
        return [config.ranks for config in self.configs]

    @property
    def resumed(self) -> list[str | None]:
        return [config.train.resume for config in self.configs]

    def train(self, start: int, last: int, checkpoint: int | None = None) -> None:
        """Leave what rank 0 does that trains the steps from start + 1 to last, and saves the checkpoint of one."""
        mark = self.config.out / ".job.json"
        if not mark.exists():
            mark.write_text(json.dumps({"job": self.run_id, "start": start}))
        lines = [{"step": step, "loss": 1.0, "tokens_per_second": 1.0} for step in range(1, last + 1)]
        (self.config.out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if checkpoint is not None:
            write_checkpoint(self.config.out, checkpoint)


def write_checkpoint(out: Path, step: int) -> Path:
    """The smallest folder that counts as a checkpoint: an index of nothing."""
    folder = out / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    index = {"format": 1, "step": step, "torch": "", "optimizer": "sgd"}
    (folder / "metadata.json").write_text(json.dumps(index | {"model": {}, "run": {}, "data": {}, "tensors": {}}))
    return folder


NO_LUCK = RuntimeError("no luck")


def fail(rank: int, error: Exception = NO_LUCK) -> Callable[[Attempts], None]:
    """An attempt whose rank fails before anything was trained."""

    def play(attempts: Attempts) -> None:
        raise RankFailure(Failure.of_error(rank, error), TrainingJob(attempts.config), None)

    return play


def train_and_fail(
    start: int, last: int, checkpoint: int | None, rank: int = 0, error: Exception = NO_LUCK
) -> Callable[[Attempts], None]:
    def play(attempts: Attempts) -> None:
        attempts.train(start, last, checkpoint)
        fail(rank, error)(attempts)

    return play


def finish(attempts: Attempts) -> None:
    attempts.train(0, STEPS, STEPS)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between attempts, which take no time."""
    found: list[float] = []
    monkeypatch.setattr(Restarts, "_wait", lambda restarts, seconds: found.append(seconds))
    return found


def test_a_run_ends_after_so_many_failures_in_a_row_without_a_new_checkpoint(out: Path, pauses: list[float]) -> None:
    config = configure(out, 2, "train.max_restarts=3")
    attempts = Attempts(
        config,
        train_and_fail(0, 3, 2, rank=0),
        train_and_fail(2, 3, None, rank=1),
        train_and_fail(2, 5, 4, rank=0),  # a new checkpoint: counted from 1 again
        train_and_fail(4, 5, 4, rank=1, error=RuntimeError("gloo: connection closed by peer")),
        train_and_fail(4, 5, 4, rank=0),
        train_and_fail(4, 5, 4, rank=1),
    )
    with pytest.raises(RankFailure):
        attempts.run()
    assert pauses == [0.0, 1.0, 0.0, 1.0, 2.0]
    assert attempts.resumed == [None, "latest", "latest", "latest", "latest", "latest"]
    lines = journal(out)
    assert [line["restarted"] for line in lines] == [True] * 5 + [False]
    assert [line.get("step_resumed") for line in lines] == [2, 2, 4, 4, 4, None]
    assert [line.get("steps_lost") for line in lines] == [1, 1, 1, 1, 1, None]
    assert [line["kind"] for line in lines] == ["raised"] * 3 + ["lost connection"] + ["raised"] * 2


def test_pauses_double_up_to_a_minute(out: Path, pauses: list[float]) -> None:
    attempts = Attempts(configure(out, 2, "train.max_restarts=8"), *[fail(0)] * 9)
    with pytest.raises(RankFailure):
        attempts.run()
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60]
    assert attempts.resumed == [None] * 9


def test_the_pause_is_a_minute_however_many_failures_there_were(out: Path, pauses: list[float]) -> None:
    attempts = Attempts(configure(out, 2, "train.max_restarts=5000"), fail(0), finish)
    loop = Restarts(attempts, TrainingJob(attempts.config), QUICK, attempts.slots)
    loop._failures = 4000  # 2 to this power is no floating-point number
    loop.run()
    assert pauses == [60]


@pytest.mark.parametrize(
    "error", [DivergenceError("the loss is nan in step 3"), ValueError("data.path is 'x', but there is no such file")]
)
def test_failures_that_would_recur_are_not_restarted(
    out: Path, error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    attempts = Attempts(configure(out, 2, "train.max_restarts=5"), train_and_fail(0, 3, 2, error=error))
    with pytest.raises(RankFailure, match=type(error).__name__):
        attempts.run()
    assert capsys.readouterr().out == "no restart: the same run would fail again\n"
    (line,) = journal(out)
    assert line["restarted"] is False


def test_a_damaged_checkpoint_is_passed_over(out: Path, pauses: list[float]) -> None:
    config = configure(out, 2, "train.max_restarts=2")
    damaged = out / "checkpoints" / "step-00000004"
    error = ValueError(f"the checkpoint {damaged} cannot be read: on rank 0, UnpicklingError: no")

    def train_and_damage(attempts: Attempts) -> None:
        attempts.train(0, 2, 2)
        train_and_fail(0, 5, 4)(attempts)

    attempts = Attempts(config, train_and_damage, fail(0, error), finish)
    attempts.run()
    assert attempts.resumed == [None, "latest", str(out / "checkpoints" / "step-00000002")]


def test_a_checkpoint_of_an_earlier_run_is_not_taken_for_this_ones(out: Path, pauses: list[float]) -> None:
    config = configure(out, 2, "train.max_restarts=2", "train.resume=none")
    write_checkpoint(out, 8)
    attempts = Attempts(config, fail(0), fail(1), finish)
    attempts.run()
    assert attempts.resumed == [None, None, None]
    other = configure(out.parent / "other" / "out", 2, "train.max_restarts=2", f"train.resume={out}")
    write_checkpoint(other.out, 3)  # of an earlier run, before the step at which this one begins
    attempts = Attempts(other, train_and_fail(8, 9, None), train_and_fail(8, 11, 10), finish)
    attempts.run()
    assert attempts.resumed == [str(out), str(out), "latest"]
    assert [line["step_resumed"] for line in journal(other.out)] == [8, 10]


def test_a_signal_in_the_pause_ends_the_run_at_once(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = Attempts(configure(out, 2, "train.max_restarts=9"), fail(0), fail(1), finish)
    naps: list[float] = []

    def nap(seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():  # a watchdog of an earlier test
            threading.Event().wait(seconds)
            return
        naps.append(seconds)
        assert len(naps) < 100
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(restarts.time, "sleep", nap)
    before = signal.getsignal(signal.SIGTERM)
    assert attempts.run() == signal.SIGTERM
    assert naps == [restarts.PAUSE_POLL]
    assert [line["restarted"] for line in journal(out)] == [True, False]
    assert len(attempts.configs) == 2
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_before_an_attempts_handlers_stops_it_and_ends_the_run(out: Path) -> None:
    def train_unless_stopped(attempts: Attempts) -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # this attempt has no handlers of its own
        assert attempts.wants_stop()

    attempts = Attempts(configure(out, 2, "train.max_restarts=9"), train_unless_stopped)
    assert attempts.run() == signal.SIGTERM


def test_a_journal_that_is_no_text_is_kept_and_does_not_end_the_run(out: Path, pauses: list[float]) -> None:
    """As a crash of the machine may leave it."""
    out.mkdir(exist_ok=True)
    (out / "restarts.jsonl").write_bytes(b'{"step": 1}\n\0\xff\xfe')
    attempts = Attempts(configure(out, 2, "train.max_restarts=2"), fail(0), finish)
    attempts.run()
    *earlier, line, end = (out / "restarts.jsonl").read_bytes().split(b"\n")
    assert (earlier, end) == ([b'{"step": 1}', b"\0\xff\xfe"], b"")
    assert json.loads(line)["kind"] == "raised"


def test_the_seconds_until_training_do_not_depend_on_the_systems_clock(
    out: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def set_clock_and_finish(attempts: Attempts) -> None:
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 3600)
        finish(attempts)

    Attempts(configure(out, 2, "train.max_restarts=2"), fail(0), set_clock_and_finish).run()
    (line,) = journal(out)
    assert 0 <= line["seconds_until_training"] < 60


def test_a_signal_that_stopped_an_attempt_ends_the_run(out: Path) -> None:
    attempts = Attempts(configure(out, 2, "train.max_restarts=9"), lambda attempts: signal.SIGINT)
    assert attempts.run() == signal.SIGINT
    assert not (out / "restarts.jsonl").exists()


def test_a_slot_that_fails_twice_without_a_checkpoint_is_set_aside(out: Path, pauses: list[float]) -> None:
    config = configure(out, 4, "train.max_restarts=9", 'train.grids=["data=2", "data=1"]')
    attempts = Attempts(
        config,
        train_and_fail(0, 3, 2, rank=1),
        train_and_fail(2, 5, 4, rank=1),  # a checkpoint in between: its first failure again
        train_and_fail(4, 5, 4, rank=3),
        train_and_fail(4, 5, 4, rank=1),
        train_and_fail(4, 5, 4, rank=1),  # on two ranks, of slot 2: slot 3 has failed once
        finish,
    )
    attempts.run()
    assert attempts.ranks == [4, 4, 4, 4, 2, 2]
    slots = [environment["STRETTO_SLOTS"] for environment in attempts.environments]
    assert slots == ["0,1,2,3"] * 4 + ["0,2", "0,2"]
    assert [environment["STRETTO_ATTEMPT"] for environment in attempts.environments] == list("012345")


def test_no_slot_is_blamed_for_a_full_disk(out: Path, pauses: list[float]) -> None:
    config = configure(out, 2, "train.max_restarts=9", 'train.grids=["data=1"]')
    error = NoSpaceError("no space left for a checkpoint in runs/x: it needs 9 bytes, and 8 bytes are free")
    attempts = Attempts(config, *[fail(1, error)] * 3, finish)
    attempts.run()
    assert attempts.ranks == [2] * 4


def test_steps_are_counted_as_lost_once(out: Path, pauses: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    config = configure(out, 2, "train.max_restarts=9")
    attempts = Attempts(config, train_and_fail(0, 5, 2), fail(1), train_and_fail(2, 3, None), fail(0), finish)
    attempts.run()
    assert [line["step_reached"] for line in journal(out)] == [5, 2, 3, 2]
    assert [line["steps_lost"] for line in journal(out)] == [3, 0, 1, 0]
    assert "; step 2 was reached, 0 steps are to repeat; it goes on after step 2 " in capsys.readouterr().out


def test_a_lost_connection_is_the_fault_of_neither_slot(out: Path, pauses: list[float]) -> None:
    lost = RuntimeError("gloo: Connection closed by peer")
    attempts = Attempts(configure(out, 2, "train.max_restarts=4", "train.grids=auto"), *[fail(1, lost)] * 4, finish)
    attempts.run()
    assert attempts.ranks == [2] * 5


def test_slots_that_have_not_failed_come_first(out: Path, pauses: list[float]) -> None:
    config = configure(out, 4, "train.max_restarts=4", "train.grids=data=2")
    attempts = Attempts(config, fail(0), fail(3), fail(3), finish)
    attempts.run()
    assert [each["STRETTO_SLOTS"] for each in attempts.environments] == ["0,1,2,3"] * 3 + ["1,2"]


def test_without_smaller_grids_the_whole_grid_is_tried_again(out: Path, pauses: list[float]) -> None:
    attempts = Attempts(configure(out, 2, "train.max_restarts=4"), *[fail(1)] * 4, finish)
    attempts.run()
    assert attempts.ranks == [2] * 5


def test_a_gpu_that_does_not_answer_is_set_aside_at_once_and_a_spare_one_taken(out: Path, pauses: list[float]) -> None:
    config = configure(out, 2, "train.max_restarts=4", "train.grids=auto")
    attempts = Attempts(config, fail(1), fail(1), fail(1), finish)
    answering = {"a", "b", "c"}
    attempts.slots = Slots(
        [Slot(number, gpu) for number, gpu in enumerate("abc")], 600.0, probe=lambda gpus: answering & set(gpus)
    )
    answering.remove("b")
    attempts.run()
    assert attempts.ranks == [2, 2, 2, 1]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in attempts.environments] == ["a,b", "a,c", "a,c", "a"]


def test_no_grid_for_the_gpus_that_answer_ends_the_run(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attempts = Attempts(configure(out, 2, "train.max_restarts=4"), fail(1))
    attempts.slots = Slots([Slot(0, "a"), Slot(1, "b")], 600.0, probe=lambda gpus: {"a"})
    with pytest.raises(RankFailure):
        attempts.run()
    assert capsys.readouterr().out == (
        "no restart: GPU b does not answer, and train.grids has no grid for fewer ranks\n"
    )


@pytest.mark.long
def test_all_ranks_are_tried_again_later_and_later_while_a_slot_goes_on_failing(
    out: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "WATCH", 0.0)
    clock = [0.0]
    waited: list[float] = []

    def train_until_asked(attempts: Attempts) -> None:
        """Two ranks train, a second a look, until they are asked to stop."""
        start = 2 if not waited else 6
        attempts.train(start, start + 1, None)
        began = clock[0]
        while not attempts.wants_stop():
            time.sleep(0.01)
            clock[0] += 1.0
            assert clock[0] - began < 1000
        waited.append(clock[0])
        attempts.train(start, start + 4, start + 4)

    config = configure(out, 4, "train.max_restarts=9", "train.grids=[{data=2}]", "train.retry_after=100")
    attempts = Attempts(
        config,
        train_and_fail(0, 3, 2, rank=3),
        fail(3),
        train_until_asked,
        fail(3),  # once is enough now
        train_until_asked,
        finish,
    )
    attempts.slots = Slots([Slot(number) for number in range(4)], 100.0, clock=lambda: clock[0])
    attempts.run()
    assert attempts.ranks == [4, 4, 2, 4, 2, 4]
    first, second = waited[0], waited[1] - waited[0]
    assert 100 <= first < 200 <= second < 400


def test_an_answer_after_the_end_of_an_attempt_excludes_no_slot() -> None:
    """All slots may have been taken back meanwhile, and the next attempt uses them."""
    may_answer = threading.Event()

    def answer_late(gpus: list[str]) -> set[str]:
        may_answer.wait(LIMIT)
        return set()

    slots = Slots([Slot(0, "a"), Slot(1, "b")], 0.0, probe=answer_late)
    for _ in range(2):
        slots.blame(slots.all[1])
    probe = restarts._BackgroundProbe(slots, slots.due())
    slots.readmit_all()
    may_answer.set()
    deadline = time.monotonic() + LIMIT
    while probe.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert probe.silent == [slots.all[1]]
    assert slots.usable() == slots.all


def test_a_machine_that_can_start_no_process_blames_no_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(slots_module.subprocess, "Popen", refuse)
    assert slots_module.probe_gpus(["0", "1"]) == {"0", "1"}
    assert "GPU 1 is not probed" in caplog.text


@pytest.mark.long
def test_a_probe_exits_if_no_process_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its GPU does not answer, and the launcher was killed."""
    probe = slots_module.PROBE.replace("import torch", "import time; time.sleep(60)")
    alarm = f"signal.alarm({slots_module.PROBE_TIMEOUT:.0f} + 10)"
    assert alarm in probe
    ended = subprocess.run([sys.executable, "-c", probe.replace(alarm, "signal.alarm(1)")], timeout=LIMIT)
    assert ended.returncode == -signal.SIGALRM


def test_a_run_that_was_done_when_it_was_asked_to_stop_is_not_started_again(out: Path, pauses: list[float]) -> None:
    def train_to_the_end(attempts: Attempts) -> None:
        attempts.train(2, 3, None)
        deadline = time.monotonic() + LIMIT
        while not attempts.wants_stop():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        finish(attempts)

    config = configure(out, 4, "train.max_restarts=9", "train.grids=[{data=2}]", "train.retry_after=0")
    attempts = Attempts(config, train_and_fail(0, 3, 2, rank=3), fail(3), train_to_the_end)
    assert attempts.run() is None
    assert attempts.ranks == [4, 4, 2]
