# SPDX-License-Identifier: Apache-2.0
"""Pipelines on GPUs, also on one that ranks share: losses, norms and weights are those of plain training."""

import itertools
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stretto.models import GPT
from stretto.parallel import Grid, Pipeline, StageOptions, parallelize
from tests.gpu.sharing import sampled
from tests.parallel.pipeline.training import Run, compare, expect
from tests.parallel.test_parity import gpt
from tests.parallel.training import PRECISIONS, Case

RunRanks = Callable[..., list[Any]]

CASE = Case(
    GPT,
    (gpt(layers=4, activation="swiglu", norm="rmsnorm", bias=False, ffn=48),),  # a GPU's fp32 rotary angles differ
    has_ignored_targets=True,
)
GRIDS = ({"pipe": 4}, {"pipe": 2, "z": 2}, {"pipe": 2, "x": 2}, {"pipe": 2, "data": 2})
TRANSPORTS = ("symmetric memory", "gloo")


def run_all(schedule: str, transport: str) -> list[str]:
    """Train on each grid of the ranks, and return what differs from plain training."""
    precision = PRECISIONS["fp64-adamw"]
    expected = expect(CASE, precision)
    found = []
    for sizes in GRIDS:
        assert prod(sizes.values()) == dist.get_world_size()
        run = Run(sizes, schedule, pipeline={"transport": transport})
        far = compare(run, CASE, precision, expected).far
        found += [f"{run}: {name} by {distance}" for name, distance in far.items()]
    return found


@pytest.mark.ranks(4, own=(4,), among=(4,))
@pytest.mark.parametrize(
    ("schedule", "transport"),
    sampled(
        [("message-driven", "gloo"), ("zb-h1", "symmetric memory")],
        list(itertools.product(("1f1b", "message-driven", "zb-h1"), TRANSPORTS)),
    ),
)
def test_training_in_stages_is_plain_training(schedule: str, transport: str, world: int, run_ranks: RunRanks) -> None:
    assert run_ranks(world, run_all, schedule, transport) == [[]] * world


def train_virtual_stages() -> None:
    """Four stages on one rank: the losses of accumulation, and memory that stays flat."""
    device = torch.device("cuda", torch.cuda.current_device())
    config = gpt(layers=4, hidden=64)
    tokens = torch.randint(61, (8, 17), generator=torch.Generator().manual_seed(1)).to(device)
    torch.manual_seed(0)
    plain = GPT(config).to(device)
    wanted = plain(tokens[:, :-1], tokens[:, 1:])
    wanted.backward()
    torch.manual_seed(0)
    model = parallelize(GPT(config), grid := Grid(), stages=StageOptions(virtual_stages=4))
    used = []
    with Pipeline(model, grid, schedule="interleaved", micro_batch_size=1) as pipeline:
        for _ in range(10):
            model.zero_grad(set_to_none=True)
            loss = pipeline.step(tokens=tokens[:, :-1], targets=tokens[:, 1:])
            torch.cuda.synchronize()
            used.append(torch.cuda.memory_allocated())
    torch.testing.assert_close(loss.float(), wanted, rtol=1e-5, atol=1e-6)
    for (name, parameter), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.to_local(), other.grad, rtol=1e-3, atol=1e-5, msg=name)
    assert len(set(used[1:])) == 1, used


@pytest.mark.ranks(1, own=(1,), among=(1,))
def test_virtual_stages_on_one_rank(world: int, run_ranks: RunRanks) -> None:
    run_ranks(world, train_virtual_stages)
