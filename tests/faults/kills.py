# SPDX-License-Identifier: Apache-2.0
"""Kill -9 at random moments of asynchronous saves, on processes of the CPU; every checkpoint that is left is compared.

A run saves every two steps and deletes all but two checkpoints. At a random moment of a save, all of its ranks are
killed, or one of them, whose peers then end by themselves. Every checkpoint under its final name must have, bit for
bit, the tensors of an undisturbed run of the same grid, and no older one may have been deleted before a newer one was
there. The run is then resumed, until it has ended with the undisturbed run's losses; then another one begins.
"""

import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from stretto.train.checkpoint.folders import checkpoints_by_step, step_of
from stretto.train.checkpoint.metadata import METADATA_FILE, read_metadata
from stretto.train.checkpoint.storage import read_tensor
from stretto.train.config import JobConfig, job_from_json, make_config

EVERY, KEPT = 2, 2
AFTER = 1.5
"""Kills happen within this multiple of a write's duration, from its start: a write is followed by deletions."""
LONGEST = 120.0  # seconds, until a save begins or a run ends
LONGEST_END = 10.0  # seconds, for ranks whose peer was killed
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 40


@dataclass(frozen=True)
class Kill:
    """One kill: the save that it interrupted, seconds after the save's start, the killed ranks, and the state left.

    left: other files next to the checkpoints. broken: number of checkpoints that differ from an undisturbed run's.
    lost: steps from the last checkpoint to the last step that was logged.
    """

    save: int
    seconds: float
    victims: tuple[int, ...]
    left: str
    broken: int
    lost: int


def kill_runs(count: int, ranks: int, seed: int, *, hidden: int = 512, steps: int = 40) -> tuple[list[Kill], int]:
    """Kill runs so often; returns the kills, and how many runs ended. Raises RuntimeError for other losses."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="stretto-kills-") as temporary:
        folder = Path(temporary)
        undisturbed = _configure(folder / "undisturbed", ranks, hidden, steps, kept=steps)
        with _started(undisturbed, ranks) as processes:
            duration = _time_saves(undisturbed.out, steps, processes)
            _finish(processes)
        digests = {step_of(path): _digest(path) for path in checkpoints_by_step(undisturbed.out)}
        losses = _losses(undisturbed.out)
        if sorted(digests) != list(range(EVERY, steps + 1, EVERY)) or None in digests.values():
            raise RuntimeError(f"the undisturbed run has checkpoints of steps {sorted(digests)}")
        shutil.rmtree(undisturbed.out)
        kills: list[Kill] = []
        runs = 0
        while len(kills) < count:
            runs += 1
            config = _configure(folder / f"run-{runs}", ranks, hidden, steps, kept=KEPT)
            while len(kills) < count:
                kill = _kill_one(config, ranks, draw, duration, digests)
                if kill is None:  # the run ended before the moment
                    break
                kills.append(kill)
                print(f"kill {len(kills)}: {kill}", file=sys.stderr, flush=True)
            with _started(config, ranks) as processes:
                _finish(processes)
            if (found := _losses(config.out)) != losses:
                different = [step for step in losses if found.get(step) != losses[step]]
                raise RuntimeError(f"seed {seed}: run {runs} has other losses in steps {different}")
            shutil.rmtree(config.out)
    return kills, runs


def _kill_one(
    config: JobConfig, ranks: int, draw: random.Random, duration: float, digests: dict[int, str | None]
) -> Kill | None:
    """Start or resume the run, and kill it at a random moment of one of its next saves."""
    before = max(map(step_of, checkpoints_by_step(config.out)), default=0)
    nth, part, hits_all, victim = draw.randint(1, 3), draw.random(), draw.random() < 0.5, draw.randrange(ranks)
    save = before + nth * EVERY
    with _started(config, ranks) as processes:
        if not _await_save(config.out, save, processes):
            _finish(processes)
            return None
        seconds = part * AFTER * duration
        time.sleep(seconds)
        victims = tuple(range(ranks)) if hits_all else (victim,)
        for number in victims:
            with suppress(ProcessLookupError):
                os.kill(processes[number].pid or 0, signal.SIGKILL)
        deadline = time.monotonic() + LONGEST_END
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    found = {step_of(path): _digest(path) for path in checkpoints_by_step(config.out)}
    newest = max(found, default=0)
    broken = sum(digest is None or digest != digests[step] for step, digest in found.items())
    broken += newest < before  # one was deleted before a newer one was there
    reached = max(_losses(config.out), default=0)
    return Kill(save, seconds, victims, _find_leftovers(config.out), broken, max(0, reached - newest))


def _time_saves(out: Path, steps: int, processes: Sequence[BaseProcess]) -> float:
    """The median duration of a run's writes, from the folder's beginning until it is final, in seconds."""
    durations = []
    for step in range(EVERY, steps + 1, EVERY):
        _await_save(out, step, processes)
        began = time.perf_counter()
        while not (out / "checkpoints" / f"step-{step:08d}").exists() and any(p.is_alive() for p in processes):
            time.sleep(0.001)
        durations.append(time.perf_counter() - began)
    return statistics.median(durations)


def _await_save(out: Path, step: int, processes: Sequence[BaseProcess]) -> bool:
    """Wait until the save of a step has begun. False if the run has ended first."""
    working, final = (out / "checkpoints" / name for name in (f".step-{step:08d}.writing", f"step-{step:08d}"))
    deadline = time.monotonic() + LONGEST
    while time.monotonic() < deadline:
        if working.exists() or final.exists():
            return True
        if not any(process.is_alive() for process in processes):
            return False
        time.sleep(0.001)
    raise RuntimeError(f"the run in {out} has not saved step {step} within {LONGEST:g} s")


def _find_leftovers(out: Path) -> str:
    folders = list((out / "checkpoints").glob(".step-*"))
    if any(folder.name.endswith(".writing") and (folder / METADATA_FILE).exists() for folder in folders):
        return "an index that was not final"
    if any(folder.name.endswith(".writing") for folder in folders):
        return "a partial folder"
    return "a folder that was being deleted" if folders else "nothing beside checkpoints"


def _digest(path: Path) -> str | None:
    """A hash of all tensors of a checkpoint; None if it cannot be read."""
    found = hashlib.sha256()
    try:
        for name, entry in sorted(read_metadata(path).tensors.items()):
            found.update(name.encode())
            found.update(read_tensor(path, entry).numpy().tobytes())
    except (ValueError, OSError):
        return None
    return found.hexdigest()


def _losses(out: Path) -> dict[int, float]:
    """The loss of each logged step. Ignores a line that a kill has cut short."""
    losses = {}
    with suppress(FileNotFoundError):
        for line in (out / "metrics.jsonl").read_text().splitlines():
            with suppress(ValueError):
                content = json.loads(line)
                losses[content["step"]] = content["loss"]
    return losses


# --- ranks


def _configure(out: Path, ranks: int, hidden: int, steps: int, *, kept: int) -> JobConfig:
    text = out.parent / "text.txt"
    text.write_text(TEXT)
    return make_config(
        {
            "out": str(out),
            "device": "cpu",
            "grid": {"data": ranks},
            "data": {"path": str(text)},
            "model": {"layers": 2, "hidden": hidden, "heads": hidden // 64},
            "train": {"steps": steps, "batch": 2 * ranks, "seq_len": 16, "lr": 1e-3, "resume": "latest"}
            | {"checkpoint_every": EVERY, "keep_checkpoints": kept, "async_save": True, "timeout": 60.0},
        },
        [],
    )


@contextmanager
def _started(config: JobConfig, ranks: int) -> Iterator[list[BaseProcess]]:
    """Fork the ranks from a process with the modules imported, and stop them after the block."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["stretto.train.trainer", "stretto.train.gpt.task", "stretto.parallel.builder", __name__]
    )
    # FileStore wants a name at which there is no file.
    store = tempfile.mktemp(prefix="store-", dir=config.out.parent)
    arguments = (config.model_dump_json(), ranks, store)
    processes: list[BaseProcess] = [context.Process(target=_train, args=(rank, *arguments)) for rank in range(ranks)]
    try:
        for process in processes:
            process.start()
        yield processes
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()


def _finish(processes: Sequence[BaseProcess]) -> None:
    """Wait for ranks to exit by themselves. Raises RuntimeError if they do not, or fail."""
    deadline = time.monotonic() + LONGEST
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    if any(process.exitcode for process in processes) or any(process.is_alive() for process in processes):
        raise RuntimeError(f"ranks have ended with {[process.exitcode for process in processes]}")


def _train(rank: int, config: str, ranks: int, store: str) -> None:
    """One rank of a run."""
    from stretto.train.trainer import train

    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # ranks whose peer was killed print long tracebacks
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    train(job_from_json(config), display="none")
    dist.barrier()
    dist.destroy_process_group()
