# SPDX-License-Identifier: Apache-2.0
"""Ranks' and launchers' functions in the tests of what outlives them. Imported by name, or run as a program."""

import os
import signal
import sys
import threading
from pathlib import Path
from unittest import mock

from stretto.launch.supervisor import StopTimeouts
from stretto.train.config import TrainConfig, load_config
from stretto.train.gpt.task import GPTTask
from stretto.train.job import launch
from stretto.train.trainer import train


def train_and_note_threads(config: TrainConfig) -> None:
    """Train; each rank leaves its process id after step 3, and then the names of its Python threads."""
    step = GPTTask.step

    def step_and_note(task: GPTTask, number: int, lr: float) -> object:
        result = step(task, number, lr)
        if number == 3:
            names = sorted(thread.name for thread in threading.enumerate())
            hidden = config.out / f".threads-{os.environ['RANK']}"
            hidden.write_text("\n".join(names))
            hidden.rename(config.out / f"threads-{os.environ['RANK']}")
            (config.out / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
        return result

    with mock.patch.object(GPTTask, "step", step_and_note):
        train(config, display="none")


def train_deaf(config: TrainConfig) -> None:
    """Rank 0 trains; rank 1 blocks SIGTERM and never comes to its step: as one that is deadlocked."""
    (config.out / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    if os.environ["RANK"] == "1":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Event().wait()
    train(config, display="none")


if __name__ == "__main__":
    entry, file = sys.argv[1:]
    config = load_config(file)
    if "RANK" in os.environ:  # torchrun's
        globals()[entry](config)
    else:
        from tests.launch import orphan_entries

        sys.executable = os.environ["PYTHON_EXEC"]  # the ranks', as torchrun has it
        launch(getattr(orphan_entries, entry), config, StopTimeouts(stop=5.0, report=0.3, end=1.0))
    Path(config.out / "ended").touch()
