# SPDX-License-Identifier: Apache-2.0
"""Runs one job with faults, and records its output and events: `python -m tests.faults.watch FOLDER`.

It is started in a mount namespace of its own (`isolation`): the job's disk, /dev/shm and folder for temporary files are
private. It starts the training command again whenever it ends before the last step, which a command that restarts by
itself never does. The records are written to recorded.json.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from stretto.train.config import make_config
from stretto.train.config.options import RunOptions
from tests.faults.inject import (
    BALLAST_FILE,
    CONFIG_FILE,
    ENDED_FILE,
    EVENTS_FILE,
    FOLDER,
    PLAN_FILE,
    has_failed,
    name_attempt,
    write_fired,
)
from tests.faults.plan import CHECKPOINT_EVERY, EVALUATE_EVERY, Fault, Job
from tests.faults.sockets import children_of, processes_of, read_environment

RECORDED_FILE = "recorded.json"
DISK_BYTES = 128 << 20
POLL = 0.02  # seconds
PATIENCE = 90.0  # seconds over the time limit after which a job without output or progress is given up
MAX_COMMANDS = 30  # of a job: more would not get it any further
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. "


@cache
def isolation() -> tuple[str, ...]:
    """The beginning of commands that run in a mount namespace of their own, in which they may mount file systems.

    Raises ValueError where this user may not have one.
    """
    why = ""
    for options in ((), ("--user", "--map-root-user")):  # root needs no user namespace, and may not be allowed one
        command = ("unshare", *options, "--mount", "--")
        try:
            tried = subprocess.run(
                [*command, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True, text=True
            )
        except FileNotFoundError:
            why = "there is no command unshare"
            break
        if not tried.returncode:
            return command
        why = tried.stderr.strip()
    raise ValueError(
        "each job gets a disk and /dev/shm of its own, for which processes must be root's, or be allowed to make user "
        f"namespaces: {why}"
    )


def write_job(folder: Path, job: Job, timeout: float) -> None:
    """Write the plan of a job, its configuration and its data into its folder."""
    (folder / PLAN_FILE).write_text(json.dumps(job.as_json()))
    (folder / "text.txt").write_text(TEXT * 200)
    options: dict[str, Any] = {
        "steps": job.steps, "batch": 8, "seq_len": 64, "lr": 3e-3, "warmup_steps": 4, "seed": 7, "micro_batch": 2,
        "checkpoint_every": CHECKPOINT_EVERY, "evaluate_every": EVALUATE_EVERY, "timeout": timeout,
    }  # fmt: skip
    if "max_restarts" in RunOptions.model_fields:
        options["max_restarts"] = 10
    if "async_save" in RunOptions.model_fields and not job.asynchronous:
        options["async_save"] = False
    config = make_config(
        {
            "out": str(folder / "disk" / "run"),
            "device": "cpu",
            "grid": job.grid,
            "model": {"layers": 2, "hidden": 128, "heads": 8},
            "data": {"path": str(folder / "text.txt"), "tokenizer": "bytes", "evaluation_sequences": 8},
            "train": options,
        },
        [],
    )
    (folder / CONFIG_FILE).write_text(config.model_dump_json(), encoding="utf-8")


class _Lines:
    """The lines that are appended to a file, each with the time at which it was first seen."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self.lines: list[tuple[float, str]] = []

    def poll(self) -> bool:
        """Read whole lines that are new; whether there were any."""
        with suppress(FileNotFoundError):
            if self._path.stat().st_size > self._read:
                with open(self._path, "rb") as file:
                    file.seek(self._read)
                    whole, end, _ = file.read().rpartition(b"\n")
                self._read += len(whole) + len(end)
                now = time.monotonic()
                self.lines += [(now, line) for line in whole.decode(errors="replace").split("\n") if end]
                return bool(end)
        return False


class _Journal(_Lines):
    """The lines of restarts.jsonl, which is replaced when one is added, or changed: each as it was last."""

    _seen: tuple[int, int] | None = None

    def poll(self) -> bool:
        """Read the file if it was replaced; whether there are new lines."""
        with suppress(FileNotFoundError):
            status = self._path.stat()
            if self._seen != (status.st_ino, status.st_mtime_ns):
                self._seen = (status.st_ino, status.st_mtime_ns)
                now, before = time.monotonic(), len(self.lines)
                times = [at for at, _ in self.lines]
                lines = self._path.read_text(encoding="utf-8").splitlines()
                self.lines = list(zip([*times, *[now] * (len(lines) - before)], lines, strict=True))
                return len(lines) > before
        return False


class Watcher:
    """Runs the commands of one job under observation."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._job = Job.of_json(json.loads((folder / PLAN_FILE).read_text()))
        self._config = json.loads((folder / CONFIG_FILE).read_text())
        self._out = Path(self._config["out"])
        self._screen = _Lines(folder / "screen.txt")
        self._restarts = _Journal(self._out / "restarts.jsonl")
        self._events = _Lines(folder / EVENTS_FILE)
        self._ended = _Lines(folder / ENDED_FILE)
        self._seen: set[int] = set()  # processes of ranks
        # A rank that gets a signal while it starts: the fault, its process, the attempt, and when.
        self._starting: tuple[Fault, int, str, float] | None = None
        self._shm_before: set[str] = set()
        self._gave_up: list[float] = []
        self._looked_at = 0  # how many events
        self._stale: list[tuple[float, str]] = []
        self._filled: float | None = None  # when the disk was filled

    def run(self) -> dict[str, Any]:
        """Run the job to its end, and return the records."""
        self._isolate()
        for _ in range(MAX_COMMANDS):
            if self._run_command() == 0:
                break
        return {
            "screen": self._screen.lines,
            "restarts": self._restarts.lines,
            "events": [json.loads(line) for _, line in self._events.lines],
            "ended": [json.loads(line) for _, line in self._ended.lines],
            "gave_up": self._gave_up,
            "stale": self._stale,
            "fired": [json.loads(path.read_text()) for path in sorted(self._folder.glob("fired-*.json"))],
            "metrics": _read_losses(self._out / "metrics.jsonl"),
            "stalls": self._list_stalls(),
            "left": self._list_leftovers(),
        }

    def _isolate(self) -> None:
        """Mount the job's own disk and /dev/shm."""
        disk = self._folder / "disk"
        for path, size in ((disk, DISK_BYTES), (Path("/dev/shm"), DISK_BYTES)):
            path.mkdir(exist_ok=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True)
        self._shm_before = set(os.listdir("/dev/shm"))
        for name in ("tmp", "here"):
            (self._folder / name).mkdir(exist_ok=True)

    def _run_command(self) -> int:
        """Run the training command once, until it ends or nothing happens any more. Returns its exit status."""
        environment = os.environ | {FOLDER: str(self._folder), "TMPDIR": str(self._folder / "tmp")}
        with open(self._folder / "screen.txt", "ab") as screen:
            command = subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.faults", str(self._folder)],
                stdin=subprocess.DEVNULL, stdout=screen, stderr=screen, env=environment, cwd=self._folder / "here",
            )  # fmt: skip
        last = time.monotonic()
        while command.poll() is None:
            time.sleep(POLL)
            if self._poll():
                last = time.monotonic()
            self._find_stale_ranks()
            self._signal_starting_rank(command.pid)
            self._make_room()
            if time.monotonic() - last > self._config["train"]["timeout"] + PATIENCE:
                self._gave_up.append(time.monotonic())
                self._save_stacks()
                for process in processes_of(FOLDER, str(self._folder)):
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
        self._poll()
        self._make_room(at_once=True)
        return command.wait()

    def _poll(self) -> bool:
        """Read the job's new output. Returns whether there was any."""
        found = [stream.poll() for stream in (self._screen, self._restarts, self._events, self._ended)]
        return any(found)

    def _find_stale_ranks(self) -> None:
        """Note which processes of earlier attempts still run, when an attempt begins its first step."""
        for at, line in self._events.lines[self._looked_at :]:
            self._looked_at += 1
            if '"first step"' in line:
                current = {path.read_text() for path in self._folder.glob("rank-*.pid")}
                processes = processes_of(FOLDER, str(self._folder)).items()
                stale = [f"rank {e['RANK']}" for process, e in processes if "RANK" in e and str(process) not in current]
                if stale:
                    self._stale.append((at, ", ".join(stale)))

    def _next_fault(self) -> Fault | None:
        """The first fault that has not happened yet."""
        for fault in self._job.faults:
            if not (self._folder / f"fired-{fault.number}.json").exists():
                return fault
        return None

    def _signal_starting_rank(self, command: int) -> None:
        """Signal a rank while its process starts, if that is the next fault."""
        new = [process for process in children_of(command) if process not in self._seen]
        fault = self._next_fault()
        for process in new:
            environment = read_environment(process)
            rank, attempt = environment.get("RANK"), name_attempt(command, environment)
            if rank is None:
                continue  # it has not been executed yet, or is no rank
            self._seen.add(process)
            if fault is None or fault.place != "import" or self._starting is not None:
                continue
            if rank == str(fault.rank) and not has_failed(self._folder, fault, attempt):
                self._starting = (fault, process, attempt, time.monotonic() + fault.delay)
        if self._starting is not None and time.monotonic() >= self._starting[3]:
            fault, process, attempt, _ = self._starting
            self._starting = None
            write_fired(self._folder, fault, self._out, attempt, step=0)
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)

    def _make_room(self, *, at_once: bool = False) -> None:
        """Empty the disk again when the failure has been named, on the screen or by the end of the command."""
        ballast = self._folder / "disk" / BALLAST_FILE
        if not ballast.exists():
            self._filled = None
            return
        now = time.monotonic()
        self._filled = self._filled or now
        printed = [line for at, line in self._screen.lines if at > self._filled]
        has_named = any("no space left" in line.lower() for line in printed)
        if at_once or has_named or now - self._filled > self._config["train"]["timeout"]:
            ballast.unlink()

    def _save_stacks(self) -> None:
        """Write the stacks of the processes of a job that hangs."""
        with open(self._folder / "hung.txt", "a", encoding="utf-8") as file:
            for process, environment in processes_of(FOLDER, str(self._folder)).items():
                status = Path(f"/proc/{process}/status")
                with suppress(OSError):
                    state = status.read_text().split("State:", 1)[1].split("\n", 1)[0].strip()
                    file.write(f"process {process}, rank {environment.get('RANK')}: {state}\n")

    def _list_stalls(self) -> list[dict[str, Any]]:
        """The folders of evidence on ranks that were stuck: when each was made, and its files that are not empty."""
        offset = time.monotonic() - time.time()
        return [
            {
                "time": folder.stat().st_mtime + offset,
                "files": sorted(path.name for path in folder.iterdir() if path.stat().st_size),
            }
            for folder in sorted((self._out / "stalls").glob("*/"))
        ]

    def _list_leftovers(self) -> dict[str, list[str]]:
        """List what the job left behind: processes, files in /dev/shm, temporary and partial files."""
        time.sleep(0.5)
        processes = processes_of(FOLDER, str(self._folder))
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        hidden = [path.name for path in (self._out / "checkpoints").glob(".*")]
        hidden += [path.name for path in self._out.glob(".*")]
        return {
            "processes": [f"rank {environment.get('RANK')}" for environment in processes.values()],
            "shared memory": sorted(set(os.listdir("/dev/shm")) - self._shm_before),
            "temporary files": sorted(os.listdir(self._folder / "tmp")) + sorted(os.listdir(self._folder / "here")),
            "partial files": sorted(hidden),
        }

    def keep_records(self) -> None:
        """Copy the run's small files out of the job's disk, which ends with this process."""
        kept = self._folder / "kept"
        for path in self._out.rglob("*"):
            is_small = path.is_file() and path.stat().st_size < 1 << 20 and "checkpoints" not in path.parts
            if is_small:
                (kept / path.relative_to(self._out)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, kept / path.relative_to(self._out))


def _read_losses(path: Path) -> list[dict[str, Any]]:
    """Step, loss and gradient norm of each line of a metrics.jsonl."""
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: line.get(name) for name in ("step", "loss", "grad_norm", "evaluation_loss")} for line in lines]


def main(folder: Path) -> None:
    watcher = Watcher(folder)
    recorded = watcher.run()
    watcher.keep_records()
    (folder / RECORDED_FILE).write_text(json.dumps(recorded))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
