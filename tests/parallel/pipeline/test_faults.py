# SPDX-License-Identifier: Apache-2.0
"""Ranks of a pipeline that die, stop or stall while they train: every other rank ends and names them, and no loss that
a rank has seen is wrong."""

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

from stretto.execution import StageOptions
from stretto.memory import PeerError
from stretto.models import GPT
from stretto.parallel import Grid, Pipeline, parallelize
from tests.parallel.pipeline.test_message_failures import run_ranks
from tests.parallel.test_parity import gpt
from tests.parallel.training import my_rows

LIMIT, SLACK = 8.0, 14.0  # seconds; the others may notice a failure so much later, and wait for each other's reports
STEPS = 400
BATCHES = 4

RUNS = (
    ({"pipe": 2}, "1f1b", 1),
    ({"pipe": 4}, "message-driven", 1),
    ({"pipe": 2}, "interleaved", 2),
    ({"pipe": 4}, "zb-h1", 1),
    ({"pipe": 2, "data": 2}, "message-driven", 1),
)
CASES = [
    (number, fault, repeat)
    for number in range(len(RUNS))
    for fault in ("kill", "stop", "stall", "raise")
    for repeat in range(10)
]


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(61, (8, 17), generator=generator) for _ in range(BATCHES)]
    return [(text[:, :-1], text[:, 1:]) for text in texts]


def build(rank: int, world: int, folder: str, run: int) -> tuple[Pipeline, Grid]:
    sizes, schedule, virtual = RUNS[run]
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    grid = Grid(**sizes, timeout=LIMIT)
    torch.manual_seed(0)
    model = parallelize(GPT(gpt(layers=4)), grid, stages=StageOptions(virtual))
    return Pipeline(model, grid, schedule=schedule, micro_batch_size=1), grid


def live(rank: int, world: int, folder: str, run: int, fault: str, culprit: int, seed: int) -> None:
    """Train without an optimizer, so that a batch's loss is the same in each step; writes down what was seen."""
    pipeline, grid = build(rank, world, folder, run)
    model = pipeline.model
    draw = random.Random(f"{seed} {rank}")
    happened = Path(folder, "happened")
    strikes = threading.Event()

    def cause() -> None:
        happened.write_text(str(time.monotonic()))
        if fault in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        strikes.set()

    def compute(*_: object) -> None:
        if strikes.is_set():
            strikes.clear()
            if fault == "raise":
                raise OSError("a disk is full")
            time.sleep(LIMIT + SLACK)

    for module in model.modules():
        if type(module).__name__ == "TransformerBlock":
            module.register_forward_pre_hook(compute)
    seen = []
    error = ""
    rows = my_rows(grid, 8)
    try:
        for step in range(STEPS):
            if rank == culprit and step == 1:
                threading.Timer(draw.random() * 0.3, cause).start()
            tokens, targets = batches()[step % BATCHES]
            seen.append(float(pipeline.step(tokens=tokens[rows], targets=targets[rows])))
            model.zero_grad()
    except (PeerError, RuntimeError, OSError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    seconds = time.monotonic() - float(happened.read_text())
    Path(folder, f"rank-{rank}").write_text("\n".join([f"{seconds:.2f}", repr(seen), error]))


@pytest.mark.exhaustive  # a rank that ends waits for what the others say of it
@pytest.mark.parametrize(("run", "fault", "repeat"), CASES)
def test_the_rank_that_fails_is_named_and_no_loss_is_wrong(run, fault, repeat, pool, tmp_path) -> None:
    sizes, _, _ = RUNS[run]
    world = sizes["pipe"] * sizes.get("data", 1)
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    culprit = random.Random(seed).randrange(world)
    processes = run_ranks(pool, live, world, str(tmp_path), run, fault, culprit, seed)
    deadline = time.monotonic() + 60 + LIMIT + SLACK
    survivors = [rank for rank in range(world) if rank != culprit or fault in ("stall", "raise")]
    try:
        for rank in survivors:
            processes[rank].join(max(0.0, deadline - time.monotonic()))
            assert processes[rank].exitcode == 0, f"rank {rank} hangs or died: {processes[rank].exitcode}"
    finally:
        for process in processes:
            process.kill()
            process.join()
    expected = expected_losses()
    for rank in survivors:
        seconds, seen, *text = Path(tmp_path, f"rank-{rank}").read_text().split("\n")
        assert float(seconds) < LIMIT + SLACK + (LIMIT + SLACK if rank == culprit else 0)
        losses = eval(seen)  # a list of numbers that this test has written
        for step, loss in enumerate(losses):
            assert loss == pytest.approx(expected[step % BATCHES], rel=1e-5)
        if rank != culprit:
            assert f"global rank {culprit})" in "\n".join(text), text


def expected_losses() -> list[float]:
    torch.manual_seed(0)
    model = GPT(gpt(layers=4))
    return [float(model(tokens, targets)) for tokens, targets in batches()]
