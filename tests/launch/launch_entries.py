# SPDX-License-Identifier: Apache-2.0
"""Ranks' functions in the tests of `launch`, small ones in place of training, imported by name."""

import errno
import os
import shutil
import signal
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from stretto.train.checkpoint import writing
from stretto.train.config import TrainConfig
from stretto.train.data import Sampler
from stretto.train.gpt.task import GPTTask
from stretto.train.observe.metrics import CorruptionError, DivergenceError
from stretto.train.optimizer import local_shard
from stretto.train.trainer import train


def write_environment(config: TrainConfig) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    text = " ".join(os.environ[name] for name in names)
    (config.out / f"environment-{os.environ['RANK']}").write_text(text)


def write_pid(config: TrainConfig) -> None:
    (config.out / f"pid-{os.environ.get('RANK', '0')}").write_text(str(os.getpid()))


def write_memory_score(config: TrainConfig) -> None:
    (config.out / f"score-{os.environ['RANK']}").write_text(Path("/proc/self/oom_score_adj").read_text())


def remove_folder_and_die(config: TrainConfig) -> None:
    """Remove the launcher's folder, as a cleaner of temporary files does, and end."""
    if os.environ["RANK"] == "0":
        shutil.rmtree(Path(os.environ["STRETTO_ERROR_FILE"]).parent)
        os.kill(os.getpid(), signal.SIGKILL)


def sum_until_stopped(config: TrainConfig) -> None:
    """All ranks add a number, again and again; all end after the same step once one got SIGTERM."""
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    write_pid(config)
    total = torch.zeros(1)
    while not total:
        total = torch.tensor([float(bool(asked))])
        dist.all_reduce(total)
        time.sleep(0.01)
    (config.out / f"stopped-{dist.get_rank()}").touch()
    dist.destroy_process_group()


def fail_on_last_rank(config: TrainConfig) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    write_pid(config)
    if dist.get_rank() == config.ranks - 1:
        raise RuntimeError("the loss is gone\nand with it a second line")
    dist.all_reduce(torch.zeros(1))


def exit_on_rank_0(config: TrainConfig) -> None:
    """Rank 0 leaves without an exception; the other waits deaf to SIGTERM, as one stuck in a kernel would."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    write_pid(config)
    if os.environ["RANK"] == "0":
        while not (config.out / "pid-1").exists():
            time.sleep(0.01)
        os._exit(3)
    time.sleep(120)


def exit_together(config: TrainConfig) -> None:
    """Both ranks leave without an exception, once both have written who they are."""
    write_pid(config)
    while len([file for file in config.out.glob("pid-*") if file.read_text()]) < 2:
        time.sleep(0.01)
    os._exit(3)


def ignore_sigterm(config: TrainConfig) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    write_pid(config)
    time.sleep(120)


def fail_to_stop(config: TrainConfig) -> None:
    """As where there is no room for the last checkpoint."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space for the last checkpoint")

    signal.signal(signal.SIGTERM, refuse)
    write_pid(config)
    time.sleep(120)


def stop_in_process(config: TrainConfig) -> None:
    """As the trainer does: handle the signal, end normally, put the handler back."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    os.kill(os.getpid(), signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)


def diverge(config: TrainConfig) -> None:
    raise DivergenceError("the loss is nan in step 4; the last checkpoint whose weights had a finite loss is another")


def find_corruption(config: TrainConfig) -> None:
    """Every rank finds that rank 1 differs."""
    write_pid(config)
    raise CorruptionError("rank 1 (host node7) holds other weights than ranks 0 and 2: norm.weight after step 35", [1])


def fail_to_write(config: TrainConfig) -> None:
    """Rank 1 cannot write its part of a checkpoint: all ranks raise that, rank 1 last."""
    if os.environ["RANK"] == "1":
        time.sleep(0.1)
    failures = {1: (RuntimeError("no luck"), traceback.StackSummary())}
    raise writing._explain(dcp.CheckpointException("write", failures), config.out / "checkpoints" / "step-4", 9, 9)


def find_a_full_disk(config: TrainConfig) -> None:
    if os.environ["RANK"] == "1":
        time.sleep(0.1)
    failures = {1: (OSError(errno.ENOSPC, "no space"), traceback.StackSummary())}
    raise writing._explain(dcp.CheckpointException("write", failures), config.out / "checkpoints" / "step-4", 9, 9)


def raise_in_process(config: TrainConfig) -> None:
    raise RuntimeError("no luck")


def train_with_stuck_rank(config: TrainConfig) -> None:
    """Train; rank 1 never reads the data of step 6."""
    indices = Sampler.indices

    def choose(sampler: Sampler, number: int) -> Any:
        while number == 5 and dist.get_rank() == 1:
            time.sleep(0.01)
        return indices(sampler, number)

    write_pid(config)
    with mock.patch.object(Sampler, "indices", choose):
        train(config, display="none")


def train_with_corruption(config: TrainConfig) -> None:
    """Train; a bit of rank 2's weight flips after step 5, in the first start of the job."""
    step = GPTTask.step

    def flip_after(task: GPTTask, number: int, lr: float) -> Any:
        result = step(task, number, lr)
        if number == 5 and dist.get_rank() == 2 and os.environ["STRETTO_ATTEMPT"] == "0":
            local_shard(task.model.get_parameter("norm.weight")).view(torch.uint8)[2] ^= 4
        return result

    with mock.patch.object(GPTTask, "step", flip_after):
        train(config, display="none")
