# SPDX-License-Identifier: Apache-2.0
"""The ranks of a job with faults: they train as `stretto.train.trainer.train` does, until a fault is due.

`train_with_faults` is the entry function. It wraps methods of the task and of the checkpoint's writer, in this process
alone, and reads the plan from the job's folder, which the environment names. Before a fault happens, the file
fired-NUMBER.json is written: it happens once, whatever the number of attempts.
"""

import functools
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from stretto.train.checkpoint.folders import checkpoints_by_step, step_of
from stretto.train.checkpoint.writing import CheckpointWriter
from stretto.train.config.options import JobConfig
from stretto.train.data import Sampler
from stretto.train.gpt.task import GPTTask
from stretto.train.trainer import train
from tests.faults.plan import STARTING, Fault, Job, message_of
from tests.faults.sockets import descriptors_to_peer

FOLDER = "STRETTO_FAULTS"  # the environment variable that names the job's folder, in all of its processes
PLAN_FILE, CONFIG_FILE, BALLAST_FILE = "plan.json", "config.json", "ballast"
EVENTS_FILE, ENDED_FILE = "events.jsonl", "ended.jsonl"


class InjectedFault(RuntimeError):
    """The exception that a fault of the kind `exception` raises."""


def train_with_faults(config: JobConfig) -> None:
    """Train on this rank, with the faults of the job's plan."""
    injector = Injector(Path(os.environ[FOLDER]), int(os.environ["RANK"]), config.out)
    injector.reach("start")
    injector.wrap_training()
    train(config, display="none")
    injector.reach("exit")


class Injector:
    """Makes the faults of one rank happen when it reaches their places."""

    def __init__(self, folder: Path, rank: int, out: Path) -> None:
        self._folder, self._rank, self._out = folder, rank, out
        self._faults = Job.of_json(json.loads((folder / PLAN_FILE).read_text())).faults
        self._attempt = name_attempt(os.getppid(), os.environ)
        self._step = 0
        self._is_first_step = True
        (folder / f"rank-{rank}.pid").write_text(str(os.getpid()))
        self._log("started")

    def wrap_training(self) -> None:
        """Wrap the functions that training calls, so that each call triggers the faults planned for its place."""
        for owner, name, place in (
            (GPTTask, "__init__", "build"),
            (GPTTask, "start", "load"),
            (GPTTask, "resume", "load"),
            (Sampler, "indices", "data"),
            (GPTTask, "_compute_loss", "forward"),
            (GPTTask, "_arguments", "forward"),
            (GPTTask, "_update", "update"),
            (GPTTask, "evaluate", "evaluate"),
            (CheckpointWriter, "write_data", "save"),
            (CheckpointWriter, "finish", "commit"),
        ):
            setattr(owner, name, self._reaching(place, getattr(owner, name)))
        GPTTask.step = self._counting(GPTTask.step)  # type: ignore[method-assign]

    def _reaching(self, place: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.reach(place)
            return function(*args, **kwargs)

        return call

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def step(task: GPTTask, number: int, lr: float) -> Any:
            self._step = number
            if self._is_first_step and self._rank == 0:
                self._log("first step", left=self._list_leftovers())
            self._is_first_step = False
            result = function(task, number, lr)
            if self._rank == 0:
                self._log("step")
            return result

        return step

    def _list_leftovers(self) -> list[str]:
        """Files of attempts before this one that are still there when its first step begins."""
        partial = [path.name for path in (self._out / "checkpoints").glob(".*")]
        return partial + [path.name for path in self._out.glob(".*.writing")]

    def reach(self, place: str) -> None:
        """Make the fault happen that is planned for this rank, place and step, once those before it have happened."""
        for fault in self._faults:
            if not self._has_fired(fault):
                is_due = fault.step is None or self._step >= fault.step
                if fault.place in STARTING and has_failed(self._folder, fault, self._attempt):
                    return
                if fault.rank == self._rank and fault.place == place and is_due:
                    self._start(fault)
                return

    def _has_fired(self, fault: Fault) -> bool:
        return (self._folder / f"fired-{fault.number}.json").exists()

    def _start(self, fault: Fault) -> None:
        match fault.kind:
            case "kill" | "stop" if fault.place == "exit":  # the process would not wait for a thread
                self._act_later(fault)
            case "kill" | "stop" | "connection":
                threading.Thread(target=self._act_later, args=(fault,), daemon=True).start()
            case "disk":
                self._fire(fault)
                ballast = Ballast(self._folder / "disk", fault.room)
                threading.Thread(target=ballast.keep_full, daemon=True).start()
            case "exception":
                self._fire(fault)
                raise InjectedFault(message_of(fault))
            case "loop":
                self._fire(fault)
                loop(fault.variant)

    def _act_later(self, fault: Fault) -> None:
        """Inject the fault after its delay, wherever the rank is then."""
        time.sleep(fault.delay)
        if self._has_fired(fault):  # the place was reached again meanwhile
            return
        if fault.kind == "connection":
            assert fault.peer is not None
            peer = int((self._folder / f"rank-{fault.peer}.pid").read_text())
            self._fire(fault, connections=drop_connections(peer))
            return
        self._fire(fault)
        os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)

    def _fire(self, fault: Fault, **about: Any) -> None:
        write_fired(self._folder, fault, self._out, self._attempt, step=self._step, **about)

    def _log(self, event: str, **about: Any) -> None:
        line = {"time": time.monotonic(), "event": event, "rank": self._rank, "pid": os.getpid(), "step": self._step}
        with open(self._folder / EVENTS_FILE, "a", encoding="utf-8") as file:
            file.write(json.dumps(line | about) + "\n")


def name_attempt(command: int, environment: Mapping[str, str]) -> str:
    """Name a start of the ranks by the process that has started them and the number in their environment."""
    return f"{command} {environment.get('STRETTO_ATTEMPT', '')}"


def has_failed(folder: Path, fault: Fault, attempt: str) -> bool:
    """True if the fault before this one has happened in the same attempt, which another one must not join."""
    before = folder / f"fired-{fault.number - 1}.json"
    return bool(fault.number) and json.loads(before.read_text())["attempt"] == attempt


def write_fired(folder: Path, fault: Fault, out: Path, attempt: str, **about: Any) -> None:
    """Note that a fault happens now, in which attempt, and which checkpoints there are."""
    checkpoints = [step_of(path) for path in checkpoints_by_step(out)]
    line = {
        "time": time.monotonic(),
        "number": fault.number,
        "checkpoints": checkpoints,
        "pid": os.getpid(),
        "attempt": attempt,
    }
    path = folder / f"fired-{fault.number}.json"
    hidden = path.with_suffix(".writing")
    hidden.write_text(json.dumps(line | about))
    hidden.rename(path)


class Ballast:
    """A file that fills the file system of the job's disk, but for `room` bytes, while this process lives.

    It grows again when space gets free, as when an older checkpoint is deleted.
    """

    def __init__(self, disk: Path, room: int) -> None:
        self._disk, self._room = disk, room
        self._file = open(disk / BALLAST_FILE, "wb")  # noqa: SIM115  (until the process ends)
        self._fill()

    def _fill(self) -> None:
        status = os.statvfs(self._disk)
        surplus = status.f_bavail * status.f_frsize - self._room
        if surplus > 0:
            with suppress(OSError):  # another process has written meanwhile
                os.posix_fallocate(self._file.fileno(), os.fstat(self._file.fileno()).st_size, surplus)

    def keep_full(self) -> None:
        """Fill space as it becomes free, until the process ends."""
        while True:
            self._fill()
            time.sleep(0.002)


def loop(variant: str) -> None:
    """Make no progress until the process is killed."""
    match variant:
        case "python":
            while True:
                pass
        case "holds the interpreter lock":  # no other thread of this process runs: a regular expression of 2^n steps
            re.match(r"(a|a)+$", "a" * 200 + "b")
        case "blocked read":
            os.read(os.pipe()[0], 1)
        case _:
            raise ValueError(f"there is no loop {variant!r}")


def drop_connections(peer: int) -> int:
    """Shut down every TCP connection of this process with another one of this machine. Returns their number."""
    count = 0
    for descriptor in descriptors_to_peer(os.getpid(), peer):
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # it was closed meanwhile
                continue
            count += 1
    return count
