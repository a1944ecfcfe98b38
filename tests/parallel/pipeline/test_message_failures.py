# SPDX-License-Identifier: Apache-2.0
"""Ranks that die, stop or stall: all others raise in time, name the rank at which it began, and end."""

import contextlib
import functools
import math
import multiprocessing
import os
import random
import signal
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist

from stretto.memory import PeerError, failures
from stretto.memory.groups import set_timeout
from stretto.parallel.pipeline.messages import MessageKey
from tests.parallel.pipeline.test_messages import TRANSPORTS
from tests.processes import LIMIT as LONG

LIMIT = 10.0  # of a step, in which no rank but the one that fails may be so late
MICRO_BATCHES = 4


def run_step(transport, rank, world, draw, compute):
    """One step of stages that compute all forward passes, then all backward passes, and send to both neighbours."""
    before, behind = rank - 1, rank + 1
    expected = {before: MICRO_BATCHES} if rank else {}
    expected |= {behind: MICRO_BATCHES} if behind < world else {}
    transport.begin_step(expected)
    for operation, source, to in (("F", before, behind), ("B", behind, before)):
        for micro_batch in range(MICRO_BATCHES):
            if 0 <= source < world:
                transport.take(MessageKey(operation, rank, micro_batch), source)
            compute()
            if 0 <= to < world:
                size = draw.choice([10, 1000, 300_000])
                transport.send(to, MessageKey(operation, to, micro_batch), [torch.ones(size), None])
    transport.end_step()


def live(rank, world, kind, folder, fault, culprit, seed):
    """Run steps until the transport fails; writes down what was raised, or why that was wrong."""
    try:
        text = run_until_failure(rank, world, kind, folder, fault, culprit, seed)
    except BaseException:
        Path(folder, f"rank-{rank}").write_text(f"wrong\n{traceback.format_exc()}")
        raise
    Path(folder, f"rank-{rank}").write_text(text)


def run_until_failure(rank, world, kind, folder, fault, culprit, seed):
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=LONG))
    group = dist.new_group(timeout=timedelta(seconds=LONG))
    draw = random.Random(f"{seed} {rank}")
    transport = TRANSPORTS[kind](group)
    run_step(transport, rank, world, draw, lambda: None)
    dist.barrier()
    set_timeout(group, timedelta(seconds=LIMIT))  # the transport asks at each step
    stalls = threading.Event()

    def cause() -> None:
        if fault == "stall":
            stalls.set()
        else:
            os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)

    def compute() -> None:
        time.sleep(draw.random() * 0.004)
        if stalls.is_set():
            time.sleep(LONG)  # until it is killed

    if rank == culprit:
        threading.Timer(draw.random() * 0.3, cause).start()
    try:
        while True:
            run_step(transport, rank, world, draw, compute)
    except PeerError as error:
        text = str(error)
    again = time.monotonic()
    for call in (transport.poll, lambda: transport.begin_step({}), lambda: transport.take(MessageKey("F", 0, 0))):
        with pytest.raises(PeerError):
            call()
    assert transport.has_failed
    assert time.monotonic() - again < LIMIT, "a call after the failure waits"
    with pytest.raises(PeerError, match="pipe rank"):
        failures.check()
    transport.close()
    failures.check()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("stretto-messages")]
    assert not left, left
    return text


def run_ranks(pool, target, world, *args):
    """Processes of their own, which may be killed, forked from the server of the pool's."""
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=target, args=(rank, world, *args)) for rank in range(world)]
    with pool._forking():
        for process in processes:
            process.start()
    return processes


CASES = [
    (kind, fault, world, repeat)
    for kind in TRANSPORTS
    for fault in ("kill", "stop", "stall")
    for world in (2, 4)
    for repeat in range(5)
]


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "fault", "world", "repeat"), CASES)
def test_the_rank_at_which_a_failure_began_is_named_by_all_others(kind, fault, world, repeat, pool, tmp_path):
    seed = random.randrange(1 << 30)
    culprit = random.Random(seed).randrange(world)
    print("seed", seed, "culprit", culprit)
    processes = run_ranks(pool, live, world, kind, str(tmp_path), fault, culprit, seed)
    survivors = [rank for rank in range(world) if rank != culprit]
    deadline = time.monotonic() + LONG
    for rank in survivors:
        processes[rank].join(max(deadline - time.monotonic(), 0))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    for rank in survivors:
        path = tmp_path / f"rank-{rank}"
        text = path.read_text() if path.exists() else "it wrote nothing"
        assert codes[rank] == 0, f"rank {rank} ended with {codes[rank]}: {text}"
        assert text.endswith(f"the cause is pipe rank {culprit} (global rank {culprit})"), text


def fail_otherwise(kind, how):
    """Return what is wrong in a program, rather than with a rank: every rank raises, and says what."""
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=LONG))
    transport = TRANSPORTS[kind](group)
    dist.barrier()
    # The others are noticed before any wait has reached its limit.
    set_timeout(group, timedelta(seconds={"deadlock": 4, "twice": 3}.get(how, LONG)))
    began = time.monotonic()
    room = contextlib.ExitStack()
    if how == "memory" and rank == 1:
        patch = room.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(torch, "empty", functools.partial(refuse_to_allocate, torch.zeros))
        patch.setattr(numpy, "empty", functools.partial(refuse_to_allocate, numpy.zeros))
    transport.begin_step({1 - rank: 1})
    match how:
        case "deadlock":
            expected = r"pipe rank 0 .*global rank 0\) and pipe rank 1 .*global rank 1\) wait for each other"
            with pytest.raises(PeerError, match=expected):
                transport.take(MessageKey("F", 2, 7 + rank))
        case "left":
            transport.send(1 - rank, MessageKey("F", 2, 7), [])
            assert transport.wait_any() == MessageKey("F", 2, 7)
            if rank == 1:
                transport.take(MessageKey("F", 2, 7))
            dist.barrier()
            if rank == 0:
                with pytest.raises(RuntimeError, match="not been taken: the activation for the forward of stage 2, mi"):
                    transport.end_step()
            else:
                with pytest.raises(PeerError, match=r"not been taken.*the cause is pipe rank 0 \(global rank 0\)$"):
                    take_in_the_next_step(transport)
        case "missing":
            if rank == 0:
                transport.take(MessageKey("F", 2, 7))
                dist.barrier()
            else:
                transport.send(0, MessageKey("F", 2, 7), [torch.ones(1 << 20)])
                dist.barrier()
                with pytest.raises(RuntimeError, match="not been taken: 1 messages of pipe rank"):
                    transport.end_step()
            dist.barrier()
        case "twice":
            for _ in range(2):
                transport.send(1 - rank, MessageKey("B", 2, 7), [])
            transport.take(MessageKey("B", 2, 7))
            expected = "(sent|taken) the gradient for the backward of stage 2, micro-batch 7 (in step 1|within 3 s)"
            with pytest.raises(PeerError, match=expected):
                take_in_the_next_step(transport)
        case "memory":
            if rank == 0:
                transport.send(1, MessageKey("F", 2, 7), [torch.ones(100_000)])
                with pytest.raises(PeerError, match=r"no room.*the cause is pipe rank 1 \(global rank 1\)$"):
                    transport.take(MessageKey("F", 0, 0))
            else:
                with room, pytest.raises(PeerError, match="no room"):
                    transport.take(MessageKey("F", 2, 7))
        case "closed":
            if rank == 0:
                transport.close()
            else:
                expected = r"closed its transport of messages in the middle of a step.*the cause is pipe rank 0"
                with pytest.raises(PeerError, match=expected):
                    transport.take(MessageKey("F", 0, 0))
    assert time.monotonic() - began < LONG / 2
    transport.close()
    failures.check()
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("stretto-messages")]


def refuse_to_allocate(allocate, *sizes, **options):
    if math.prod(sizes[0] if isinstance(sizes[0], tuple) else sizes) >= 100_000:
        raise MemoryError("no room")
    return allocate(*sizes, **options)


def take_in_the_next_step(transport):
    transport.end_step()
    transport.begin_step({1 - transport.rank: 1})
    transport.take(MessageKey("F", 0, 0))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", TRANSPORTS)
@pytest.mark.parametrize("how", ["deadlock", "left", "missing", "twice", "memory", "closed"])
def test_errors_of_a_schedule_are_distinguished_from_dead_ranks(kind, how, ranks):
    assert ranks(2).run(fail_otherwise, kind, how, timeout=90) == [[], []]


def wait_beside_a_stopped_store(rank, world, kind, folder):
    """The store is a process's that stops, so it does not answer; rank 1 gives up in time all the same."""
    port = Path(folder, "port")
    if rank == 0:
        store = dist.TCPStore("localhost", 0, world, is_master=True, wait_for_workers=False)
        port.with_suffix(".new").write_text(str(store.port))
        port.with_suffix(".new").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = dist.TCPStore("localhost", int(port.read_text()), world, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=LONG))
    transport = TRANSPORTS[kind](dist.new_group(timeout=timedelta(seconds=LIMIT)))
    transport.begin_step({0: 1} if rank else {})
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        transport.take(MessageKey("F", 1, 0))
    except PeerError as error:
        transport.close()
        Path(folder, "rank-1").write_text(str(error))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_store_that_stops_causes_only_a_short_delay(kind, pool, tmp_path):
    processes = run_ranks(pool, wait_beside_a_stopped_store, 2, kind, str(tmp_path))
    processes[1].join(LONG)
    code = processes[1].exitcode
    for process in processes:
        process.kill()
        process.join()
    assert code == 0
    text = (tmp_path / "rank-1").read_text()
    assert "pipe rank 0 (global rank 0) has not sent the activation for the forward of stage 1, micro-batch 0" in text
    assert text.endswith("The store does not answer")
