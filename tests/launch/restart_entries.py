# SPDX-License-Identifier: Apache-2.0
"""Ranks' functions in the tests of restarts: they train, and some fail at a step that a file beside `out` names."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from stretto.train.config import TrainConfig
from stretto.train.data import Sampler
from stretto.train.observe.metrics import DivergenceError
from stretto.train.trainer import train


def faults_file(out: Path) -> Path:
    return out.parent / "faults.json"


def plan_faults(out: Path, *faults: dict[str, Any]) -> None:
    """Each fault is {"attempt", "slot", "step", "how"}: killed, raised, refused, diverged."""
    faults_file(out).write_text(json.dumps(faults))


def train_with_faults(config: TrainConfig) -> None:
    """Train; a fault of this attempt and slot comes when its step is read from the data."""
    attempt, rank = int(os.environ["STRETTO_ATTEMPT"]), int(os.environ["RANK"])
    slot = int(os.environ["STRETTO_SLOTS"].split(",")[rank])
    (config.out.parent / f"attempt-{attempt}-rank-{rank}").write_text(
        json.dumps({"slot": slot, "ranks": int(os.environ["WORLD_SIZE"]), "resume": config.train.resume})
        + f"\n{os.getpid()}"
    )
    planned = [fault for fault in json.loads(faults_file(config.out).read_text()) if fault["slot"] == slot]
    indices = Sampler.indices

    def fail_or_read(sampler: Sampler, number: int) -> Any:
        for fault in planned:
            if fault["attempt"] == attempt and fault["step"] == number + 1:
                _fail(fault["how"])
        return indices(sampler, number)

    for fault in planned:
        if fault["attempt"] == attempt and fault["step"] == 0:
            _fail(fault["how"])
    pace = float(os.environ.get("STEP_SECONDS", "0"))

    def slowly(sampler: Sampler, number: int) -> Any:
        time.sleep(pace)
        return fail_or_read(sampler, number)

    with mock.patch.object(Sampler, "indices", slowly):
        train(config, display="none")


def _fail(how: str) -> None:
    match how:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raised":
            raise RuntimeError("no luck")
        case "refused":
            raise ValueError("train.lr is no good")
        case "diverged":
            raise DivergenceError("the loss is nan in step 4")
    raise AssertionError(how)


def fail_at_once(config: TrainConfig) -> None:
    """Every rank exits before it has trained."""
    (config.out.parent / f"attempt-{os.environ['STRETTO_ATTEMPT']}-rank-{os.environ['RANK']}").touch()
    torch.zeros(1)
    os._exit(3)
