# SPDX-License-Identifier: Apache-2.0
"""On GPUs: the preflight names a slow GPU and a slow link, over NCCL, and nothing else; packed documents on a grid."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stretto.launch.preflight import PreflightReport, check_machines
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, gather, parallelize

RunRanks = Callable[..., list[Any]]
SLEEP = int(2e9 * 0.02)  # cycles of about 20 ms


def check(world: int, folder: Path, slow_rank: int | None, slow_link: tuple[int, int] | None) -> PreflightReport:
    """Measure with a rank that computes each product twice, and a link that takes 20 ms more for a message."""
    grid = Grid(data=world)

    def multiply(a: torch.Tensor, b: torch.Tensor) -> None:
        for _ in range(2 if dist.get_rank() == slow_rank else 1):
            torch.mm(a, b)

    def send(tensor: torch.Tensor, to: int, group: Any) -> None:
        if (dist.get_rank(), to) == slow_link:
            torch.cuda._sleep(SLEEP)
        dist.send(tensor, to, group)

    return check_machines(grid.device, folder=folder, multiply=multiply, send=send)


@pytest.mark.ranks(2, 4, own=(2, 4, 8), among=(2,))
@pytest.mark.own_gpus("ranks of one GPU share its rate")
def test_a_slow_gpu_and_a_slow_link_are_named(run_ranks: RunRanks, world: int, tmp_path: Path) -> None:
    fair = run_ranks(world, check, world, tmp_path, None, None)[0]
    assert fair.faults == []
    assert fair.seconds < 60
    assert min(fair.products) > 50e12
    found = run_ranks(world, check, world, tmp_path, None, (1, 0))[0]
    assert [(fault.kind, fault.where.split(" on ")[0]) for fault in found.faults] == [("link", "from rank 1")]
    if world > 2:  # of two rates neither is the median
        found = run_ranks(world, check, world, tmp_path, world - 1, None)[0]
        assert [(fault.kind, fault.where.split(" on ")[0]) for fault in found.faults] == [
            ("GPU", f"of rank {world - 1}")
        ]


def attend_within_documents(world: int, sizes: dict[str, int]) -> None:
    """A GPT's gradients of packed rows on a grid are those of one process that sees a document at a time."""
    grid = Grid(**sizes)
    config = GPTConfig(layers=2, hidden=256, heads=4, vocab=512, max_seq_len=256, positions="rotary")
    torch.manual_seed(1)
    tokens, targets = torch.randint(512, (2, 4, 256)).unbind()
    lengths = [[100, 56, 100], [256], [1, 255], [64, 64, 128]]
    places = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    with torch.device("meta"):
        model = parallelize(GPT(config), grid, dtype=torch.bfloat16, seed=3)
    weights = {name: gather(parameter).float().cpu() for name, parameter in model.named_parameters()}
    plain = GPT(config)
    plain.load_state_dict(weights | {"head.weight": weights["embedding.weight"]})
    rows = slice(
        4 * grid.coordinate("batch") // grid.size("batch"), 4 * (1 + grid.coordinate("batch")) // grid.size("batch")
    )
    mine = (each[rows].to(grid.device) for each in (tokens, targets))
    loss = model(*mine, num_targets=targets.numel(), documents=places[rows].to(grid.device))
    loss.backward()
    expected = torch.zeros(())
    for row, of_row in enumerate(lengths):
        start = 0
        for length in of_row:
            part = slice(start, start + length)
            expected = expected + plain(tokens[None, row, part], targets[None, row, part], targets.numel())
            start += length
    expected.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found, wanted = gather(parameter.grad).float().cpu(), plain.get_parameter(name).grad
        assert wanted is not None
        assert (found - wanted).norm() < 0.15 * wanted.norm(), name  # of bf16


@pytest.mark.ranks(2, own=(2,), among=(2,))
@pytest.mark.parametrize("axis", ["z", "x", "context"])
def test_documents_are_kept_apart(run_ranks: RunRanks, world: int, axis: str) -> None:
    run_ranks(world, attend_within_documents, world, {axis: world})
