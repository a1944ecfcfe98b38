# SPDX-License-Identifier: Apache-2.0
"""Ranks that die, stop or stall: all others raise in time, name the rank at which it began, and end."""

import multiprocessing
import os
import random
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from stretto.memory import PeerError, failures
from stretto.parallel.pipeline.messages import MessageKey
from tests.parallel.pipeline.test_messages import CARRIERS

LIMIT = 2.0
SLACK = 8.0  # seconds for all reports, on a machine that is busy
MICRO_BATCHES = 4


def run_step(carrier, rank, world, draw, busy):
    """One step of stages that compute all forward passes, then all backward passes, and send to both neighbours."""
    before, behind = rank - 1, rank + 1
    expected = {before: MICRO_BATCHES} if rank else {}
    expected |= {behind: MICRO_BATCHES} if behind < world else {}
    carrier.begin_step(expected)
    for operation, source, to in (("F", before, behind), ("B", behind, before)):
        for micro_batch in range(MICRO_BATCHES):
            if 0 <= source < world:
                carrier.take(MessageKey(operation, rank, micro_batch), source)
            busy()
            if 0 <= to < world:
                size = draw.choice([10, 1000, 300_000])
                carrier.send(to, MessageKey(operation, to, micro_batch), [torch.ones(size), None])
    carrier.end_step()


def live(rank, world, kind, folder, fault, culprit, seed):
    """Run steps until the carrier fails; writes down what was raised, or why that was wrong."""
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    group = dist.new_group(timeout=timedelta(seconds=LIMIT))
    draw = random.Random(f"{seed} {rank}")
    carrier = CARRIERS[kind](group)
    run_step(carrier, rank, world, draw, lambda: None)
    dist.barrier()
    happened = Path(folder, "happened")
    stalls = threading.Event()

    def cause() -> None:
        happened.write_text(str(time.monotonic()))
        if fault == "stall":
            stalls.set()
        else:
            os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)

    def compute() -> None:
        time.sleep(draw.random() * 0.004)
        if stalls.is_set():
            time.sleep(LIMIT + SLACK)
            stalls.clear()

    if rank == culprit:
        threading.Timer(draw.random() * 0.3, cause).start()
    try:
        while True:
            run_step(carrier, rank, world, draw, compute)
    except PeerError as error:
        seconds = time.monotonic() - float(happened.read_text())
        lines = [f"{seconds:.2f}", str(error)]
    again = time.monotonic()
    for call in (carrier.poll, lambda: carrier.begin_step({}), lambda: carrier.take(MessageKey("F", 0, 0))):
        with pytest.raises(PeerError):
            call()
    assert carrier.has_failed
    assert time.monotonic() - again < 1, "a call after the failure waits"
    with pytest.raises(PeerError, match="pipe rank"):
        failures.check()
    carrier.close()
    failures.check()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("stretto-messages")]
    assert not left, left
    Path(folder, f"rank-{rank}").write_text("\n".join(lines))


def run_ranks(target, world, folder, *args):
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=target, args=(rank, world, *args)) for rank in range(world)]
    for process in processes:
        process.start()
    return processes


CASES = [
    (kind, fault, world, repeat)
    for kind in CARRIERS
    for fault in ("kill", "stop", "stall")
    for world in (2, 4)
    for repeat in range(5)
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "fault", "world", "repeat"), CASES)
def test_the_rank_at_which_a_failure_began_is_named_by_all_others(kind, fault, world, repeat, ranks, tmp_path):
    seed = random.randrange(1 << 30)
    culprit = random.Random(seed).randrange(world)
    print("seed", seed, "culprit", culprit)
    ranks(1).run(int)  # the server that processes are forked from is there
    processes = run_ranks(live, world, tmp_path, kind, str(tmp_path), fault, culprit, seed)
    survivors = [rank for rank in range(world) if rank != culprit]
    deadline = time.monotonic() + 60
    for rank in survivors:
        processes[rank].join(max(deadline - time.monotonic(), 0))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    for rank in survivors:
        assert codes[rank] == 0, f"rank {rank} ended with {codes[rank]}"
        seconds, text = (tmp_path / f"rank-{rank}").read_text().split("\n", 1)
        assert float(seconds) < LIMIT + SLACK, text
        assert text.endswith(f"the cause is pipe rank {culprit} (global rank {culprit})"), text
        if fault == "kill":
            assert float(seconds) < LIMIT + 4, text
