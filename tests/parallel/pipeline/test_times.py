# SPDX-License-Identifier: Apache-2.0
"""Figures of the papers, on CPU ranks: the order in time of a small schedule, and the losses of GPT-2 small's shape."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lab.training.pipeline import Case, prepare_pipeline
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, Pipeline, parallelize
from stretto.schedules import StageCosts, build_schedule, simulate
from tests.pool import Pool

pytestmark = pytest.mark.exhaustive  # timed, or large

FORWARD = 0.02  # seconds; a backward pass takes twice as long


def times_of_a_step(micro_batches: int, steps: int) -> list[tuple[float, float, float]]:
    """Of each step: when this rank's first action began, when its last one ended, and the seconds that it computed."""
    grid = Grid(pipe=3)
    found = []
    with prepare_pipeline(Case("1f1b", "1f1b"), grid, FORWARD, latency=0.0) as pipeline:
        for _ in range(steps):
            pipeline.step(torch.zeros(micro_batches, 8))
            done = pipeline.computed
            busy = sum(each.end - each.start - each.waited for each in done)
            found.append((done[0].start + done[0].waited, done[-1].end, busy))
    return found


def test_three_stages_and_five_micro_batches_take_21_units_of_which_each_idles_6(ranks):
    """Figure 4.3, with a backward pass of two forward passes. The quietest of some steps counts."""
    schedule = build_schedule("1f1b", 3, 5)
    assert simulate(schedule, StageCosts.uniform(3, forward=1, backward=2)).makespan == 21
    by_rank = ranks(3).run(times_of_a_step, 5, 25)
    steps = []
    for step in list(zip(*by_rank, strict=True))[1:]:
        makespan = (max(end for _, end, _ in step) - min(start for start, _, _ in step)) / FORWARD
        idle = [makespan - busy / FORWARD for _, _, busy in step]
        steps.append((makespan, idle))
    makespan, idle = min(steps)
    assert makespan == pytest.approx(21, rel=0.05)
    assert idle == pytest.approx([6, 6, 6], abs=0.05 * 21)


SMALL = {"layers": 12, "hidden": 768, "heads": 12, "max_seq_len": 1024, "vocab": 50257}
ROWS, SEQ_LEN, STEPS = 12, 16, 3


def losses_of_gpt2_small(sizes: dict[str, int], schedule: str) -> list[float]:
    """The losses of some steps with SGD."""
    grid = Grid(**sizes)
    with torch.device("meta"):
        model = GPT(GPTConfig(**SMALL))
    model = parallelize(model, grid, seed=3)
    shards = [nn.Parameter(parameter.to_local().detach()) for parameter in model.parameters()]
    optimizer = torch.optim.SGD(shards, lr=0.1)
    losses = []
    with Pipeline(model, grid, schedule=schedule, micro_batch_size=1) as pipeline:
        for tokens in _texts():
            rows = tokens.chunk(grid.size("batch"))[grid.coordinate("batch")]
            losses.append(float(pipeline.step(tokens=rows[:, :-1], targets=rows[:, 1:])))
            for shard, parameter in zip(shards, model.parameters(), strict=True):
                shard.grad = parameter.grad.to_local()
            optimizer.step()
            model.zero_grad()
    return losses


def _texts() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(SMALL["vocab"], (ROWS, SEQ_LEN + 1), generator=generator)
    for _ in range(STEPS):
        yield text


def test_twelve_ranks_train_gpt2_smalls_shape_as_one_does():
    """Figure 3.8."""
    pool = Pool(12)
    try:
        (expected,) = pool.run(1, losses_of_gpt2_small, {}, "1f1b", timeout=600)
        by_rank = pool.run(12, losses_of_gpt2_small, {"pipe": 2, "data": 6}, "message-driven", timeout=600)
    finally:
        pool.close()
    assert expected[-1] < expected[0] - 0.1
    for losses in by_rank:
        assert losses == pytest.approx(expected, rel=1e-5)
