# SPDX-License-Identifier: Apache-2.0
"""Ranks' functions in the tests of stalls: they train, and one of them gets a fault. Imported by name."""

import ctypes
import os
import re
import signal
import socket
import stat
import sys
import time
from typing import Any
from unittest import mock

import torch.distributed as dist

from stretto.memory import group_timeout
from stretto.train.checkpoint.saver import Saver
from stretto.train.checkpoint.writing import CheckpointWriter
from stretto.train.config import TrainConfig, load_config
from stretto.train.data import Sampler
from stretto.train.gpt.kind import GPTKind
from stretto.train.gpt.task import GPTTask
from stretto.train.trainer import train

FAULT = "STRETTO_TEST_FAULT"  # "KIND PHASE RANK": the fault, the phase in which it comes (of step 4), and the rank
STEP = 4
PLACES: dict[str, tuple[Any, str]] = {
    "build": (GPTKind, "make_task"),
    "data": (Sampler, "indices"),
    "step": (GPTTask, "_update"),
    "evaluate": (GPTTask, "evaluate"),
    "save": (Saver, "save"),
    "write": (CheckpointWriter, "write_data"),
}


def spin() -> None:
    """Never end, and use a fifth of a core, which is more than a rank uses that waits."""
    while True:
        until = time.perf_counter() + 0.002
        while time.perf_counter() < until:
            pass
        time.sleep(0.008)


def drop_connections() -> None:
    """Cut this rank's TCP connections to other ranks, those of gloo: not that to the job's store."""
    store = int(os.environ["MASTER_PORT"])
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        try:
            is_socket = stat.S_ISSOCK(os.fstat(number).st_mode)
        except OSError:  # the listing itself
            continue
        if not is_socket:
            continue
        with socket.socket(fileno=os.dup(number)) as each:
            try:
                peer = each.getpeername()
            except OSError:
                continue
            if isinstance(peer, tuple) and store not in (peer[1], each.getsockname()[1]):
                each.shutdown(socket.SHUT_RDWR)


def strike(kind: str) -> None:
    match kind:
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "loop":
            spin()
        case "regex":  # an endless computation in C, which holds the interpreter lock
            re.match(r"(a|a)*b", "a" * 60)
        case "c":  # C code that sleeps and holds the interpreter lock
            ctypes.PyDLL(None).sleep(600)
        case "sleep":
            time.sleep(600)
        case "drop":
            time.sleep(2.5)  # the launcher has counted connections by then
            drop_connections()
        case "raise":
            raise RuntimeError("no luck")
        case "limits":  # the time limits of all groups, in place of "no luck"
            groups = dist.distributed_c10d._world.pg_map
            raise RuntimeError(", ".join(f"{group.group_desc}={group_timeout(group)}" for group in groups))
        case "slow":
            time.sleep(0.2)
        case _:
            raise ValueError(kind)


def train_with_fault(config: TrainConfig) -> None:
    kind, phase, rank = os.environ[FAULT].split()
    is_here, calls = os.environ.get("RANK") == rank, 0

    def strike_now() -> None:
        if kind != "slow":
            config.out.mkdir(parents=True, exist_ok=True)
            (config.out / "fault-at").write_text(str(time.time()))
        strike(kind)

    if phase == "start" and is_here:
        strike_now()
    if phase in PLACES:
        owner, name = PLACES[phase]
        original = getattr(owner, name)

        def call_with_fault(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            due = kind == "slow" or calls == (STEP if phase in ("data", "step") else 1)
            if due and is_here:
                strike_now()
            return original(*arguments, **options)

        with mock.patch.object(owner, name, call_with_fault):
            train(config, display="none")
    else:
        train(config, display="none")
    if phase == "exit" and is_here:
        strike_now()


if __name__ == "__main__":  # started by torchrun
    for file in sys.argv[1:-1]:  # trained before, without a fault
        train(load_config(file), display="none")
    train_with_fault(load_config(sys.argv[-1]))
    assert not dist.is_initialized()
