# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of stalls: they train, and one of them gets a fault. Imported by name."""

import os
import signal
import sys
import time
from typing import Any
from unittest import mock

from stretto.train.config import TrainConfig, load_config
from stretto.train.data import Sampler
from stretto.train.trainer import train

FAULT = "STRETTO_TEST_FAULT"  # "KIND RANK": the fault, and the rank that gets it in step 4


def spin() -> None:
    while True:
        pass


def strike(kind: str) -> None:
    """Do to this process what the fault does."""
    match kind:
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "loop":
            spin()
        case "sleep":
            time.sleep(600)
        case "raise":
            raise RuntimeError("no luck")
        case _:
            raise ValueError(kind)


def train_with_fault(config: TrainConfig) -> None:
    kind, rank = os.environ[FAULT].split()
    indices = Sampler.indices

    def indices_and_fault(sampler: Sampler, number: int) -> Any:
        if number == 3 and os.environ.get("RANK") == rank:
            (config.out / "fault-at").write_text(str(time.time()))
            strike(kind)
        return indices(sampler, number)

    with mock.patch.object(Sampler, "indices", indices_and_fault):
        train(config, display="none")


if __name__ == "__main__":  # started by torchrun
    train_with_fault(load_config(sys.argv[1]))
