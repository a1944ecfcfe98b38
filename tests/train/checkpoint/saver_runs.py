# SPDX-License-Identifier: Apache-2.0
"""Functions that ranks run in the tests of saves: in a module, so that a pool can import them."""

import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.processes import LIMIT
from tests.train import runs
from torch import Tensor

from stretto.cluster.host_memory import HostMemoryLimit
from stretto.parallel import gather
from stretto.train.checkpoint import checkpoint_path, load_checkpoint, retention, training_state
from stretto.train.checkpoint import saver as saver_module
from stretto.train.checkpoint.retention import Retention
from stretto.train.checkpoint.saver import AsyncSave, Saver
from stretto.train.checkpoint.writing import CheckpointWriter
from stretto.train.config import TrainConfig
from stretto.train.data import Sampler
from stretto.train.trainer import train

DESCRIPTION = {"optimizer": "adamw", "model": {}, "run": {}, "data": {}}
CPU = torch.device("cpu")


@contextmanager
def writes(around: Callable[[Callable[[], None], Any], None]) -> Iterator[None]:
    """Have `around(write, writer)` called in place of each checkpoint's write, which it calls or not."""
    real = saver_module.write_checkpoint

    def write(state: Any, writer: Any, **rest: Any) -> None:
        around(lambda: real(state, writer, **rest), writer)

    with mock.patch.object(saver_module, "write_checkpoint", write):
        yield


def trained_once(grid: dict[str, int]) -> tuple[Any, Any]:
    """A model and its optimizer after one step, with gradients that are its weights."""
    model, optimizer, _ = runs.sharded(runs.make_gpt, grid, seed=1)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step(0.1)
    return model, optimizer


def whole(model: Any) -> dict[str, Tensor]:
    return {name: gather(parameter).detach().clone() for name, parameter in model.named_parameters()}


def change_while_it_is_written(out: Path, grid: dict[str, int], is_async: AsyncSave) -> dict[str, Any]:
    """Save, change every weight and moment at once, and let the write begin only then. Returns what differs."""
    model, optimizer = trained_once(grid)
    before, changed = whole(model), threading.Event()

    def write_late(write: Callable[[], None], writer: Any) -> None:
        assert changed.wait(LIMIT)
        write()

    with (
        writes(write_late if is_async else lambda write, writer: write()),
        Saver(out, CPU, Retention(), is_async=is_async, writers=2) as saver,
    ):
        state = training_state(model, optimizer)
        saver.prepare(state)
        saver.save(1, state, DESCRIPTION)
        with torch.no_grad():
            for sharded in state.values():
                for box in sharded.boxes:
                    box.values.add_(1)
        changed.set()
    load_checkpoint(checkpoint_path(out, 1), model, optimizer)
    after = whole(model)
    differences = {name: float((after[name] - values).abs().max()) for name, values in before.items()}
    return differences | {"memory of copies": saver.staging.num_bytes}


def save_three_times(out: Path) -> list[str]:
    """Save steps 1 to 3, each of which takes a while to write. Returns what happened, in order."""
    model, optimizer = trained_once({})
    happened = []

    def write_slowly(write: Callable[[], None], writer: Any) -> None:
        happened.append(f"write {writer.final_path.name[-1]}")
        time.sleep(0.2)
        write()
        happened.append(f"done {writer.final_path.name[-1]}")

    with writes(write_slowly), Saver(out, CPU, Retention(5)) as saver:
        saver.prepare(training_state(model, optimizer))
        for step in (1, 2, 3):
            saver.save(step, training_state(model, optimizer), DESCRIPTION, waits=step == 3)
            happened.append(f"returned {step}")
    return happened


def train_until_full(config: TrainConfig, rank: int, step: int) -> tuple[str, str]:
    """Train; from `step` on, a rank's files may not grow beyond 20 kB. Returns the error's kind and text."""
    indices = Sampler.indices
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit_and_draw(sampler: Sampler, number: int) -> Any:
        if number == step - 1 and dist.get_rank() == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        return indices(sampler, number)

    try:
        with mock.patch.object(Sampler, "indices", limit_and_draw):
            train(config, display="none")
    except OSError as error:
        return type(error).__name__, str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "", ""


def save_where_nothing_can_be_deleted(out: Path) -> None:
    """Save three steps, of which one is to be kept, where deleting fails."""
    model, optimizer = trained_once({"data": dist.get_world_size()})
    with (
        mock.patch.object(retention, "remove_folder", side_effect=PermissionError(13, "Permission denied")),
        Saver(out, CPU, Retention(1)) as saver,
    ):
        for step in (1, 2, 3):
            saver.save(step, training_state(model, optimizer), DESCRIPTION)


def save_on_a_disk_of(out: Path, free: int) -> tuple[str, str]:
    """Save where so many bytes are free. Returns the error's kind and text."""
    model, optimizer = trained_once({"data": dist.get_world_size()})
    with mock.patch.object(saver_module, "free_bytes", return_value=free), Saver(out, CPU, Retention()) as saver:
        try:
            saver.save(1, training_state(model, optimizer), DESCRIPTION)
        except OSError as error:
            return type(error).__name__, str(error)
    return "", ""


def prepare_with_memory(out: Path, left: int, is_async: AsyncSave) -> tuple[bool, list[str], str]:
    """Prepare saves where rank 1's machine has so much memory left. Returns the decision, the log, and the error."""
    model, optimizer = trained_once({"data": dist.get_world_size()})
    logged: list[str] = []
    own = left if dist.get_rank() == 1 else 1 << 40
    with (
        mock.patch.object(saver_module, "host_memory_available", return_value=HostMemoryLimit(own, "a test")),
        mock.patch.object(saver_module.socket, "gethostname", return_value=f"node{dist.get_rank()}"),
        Saver(out, CPU, Retention(), is_async=is_async, log=logged.append) as saver,
    ):
        state = training_state(model, optimizer)
        try:
            saver.prepare(state)
        except ValueError as error:
            return saver.is_async, logged, str(error)
        saver.save(1, state, DESCRIPTION, waits=True)
        return saver.is_async, logged, ""


def fail_while_it_is_written(out: Path, kind: type[Exception]) -> bool:
    """Raise in the block of a saver while its write has not begun. Returns whether the write was let end."""
    model, optimizer = trained_once({})
    begin = threading.Event()
    threading.Timer(0.3, begin.set).start()
    with mock.patch.object(saver_module, "MAX_END", 0.1):
        try:
            with writes(lambda write, writer: begin.wait() and write()), Saver(out, CPU, Retention()) as saver:
                saver.prepare(training_state(model, optimizer))
                saver.save(1, training_state(model, optimizer), DESCRIPTION)
                raise kind("something else")
        except kind:
            pass
        thread = saver._thread
        assert thread is not None
        was_alive = thread.is_alive()
        thread.join()
    return not was_alive


def raise_while_it_is_written(config: TrainConfig) -> None:
    """Train; the first write takes long, and meanwhile rank 1 raises."""

    def fail() -> None:
        raise RuntimeError("rank 1 has had enough")

    _train_while_it_is_written(config, 1, fail)


def die_while_it_is_written(config: TrainConfig) -> None:
    """Train; the first write takes long, and meanwhile rank 0 is killed, which alone may delete what is written."""
    _train_while_it_is_written(config, 0, lambda: os.kill(os.getpid(), signal.SIGKILL))


def _train_while_it_is_written(config: TrainConfig, rank: int, fail: Callable[[], None]) -> None:
    indices = Sampler.indices

    def raise_or_draw(sampler: Sampler, number: int) -> Any:
        if number == 3 and dist.get_rank() == rank:
            deadline = time.monotonic() + LIMIT
            while not list(config.out.glob("checkpoints/.step-*.writing")):
                if time.monotonic() > deadline:  # the write has failed: its error is raised in the next step
                    return indices(sampler, number)
                time.sleep(0.01)
            fail()
        return indices(sampler, number)

    finish = CheckpointWriter.finish

    def finish_late(writer: CheckpointWriter, *results: Any, **named: Any) -> None:
        time.sleep(30)
        finish(writer, *results, **named)

    with (
        mock.patch.object(saver_module, "MAX_END", 0.2),
        mock.patch.object(CheckpointWriter, "finish", finish_late),
        mock.patch.object(Sampler, "indices", raise_or_draw),
    ):
        train(config, display="none")


def grow(out: Path) -> list[str]:
    """Save a state that has more tensors each time, on every rank or on one. Returns the names in each checkpoint."""
    from stretto.train.checkpoint.metadata import read_metadata
    from stretto.train.checkpoint.storage import LocalBox, ShardedState

    rank = dist.get_rank()
    state = {f"model.own{rank}": ShardedState((3,), (LocalBox((0,), torch.full((3,), float(rank))),))}
    names = []
    with Saver(out, CPU, Retention(5)) as saver:
        saver.prepare(state)
        for step in (1, 2, 3):
            if step == 2 and rank == 1:
                state["model.late"] = ShardedState((2, 2), (LocalBox((0, 0), torch.ones(2, 2)),))
            if step == 3:
                state["model.both"] = ShardedState((2,), (LocalBox((0,), torch.ones(2)),))
            saver.save(step, state, DESCRIPTION, waits=True)
            names.append(" ".join(sorted(read_metadata(checkpoint_path(out, step)).tensors)))
            dist.barrier()
    return names


def save_where_the_folder_is_removed(out: Path) -> list[str]:
    """Save three times, and remove the checkpoints' folder after the first. Returns the log's lines."""
    model, optimizer = trained_once({})
    lines: list[str] = []
    with Saver(out, CPU, Retention(), is_async=False, log=lines.append) as saver:
        for step in (1, 2, 3):
            saver.save(step, training_state(model, optimizer), DESCRIPTION)
            if step == 1:
                shutil.rmtree(out / "checkpoints")
    return lines
