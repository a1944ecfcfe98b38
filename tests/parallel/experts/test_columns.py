# SPDX-License-Identifier: Apache-2.0
"""Experts whose columns x divides, with a sharded sequence, by the kernels of tensor-parallel experts, interpreted."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from stretto.models import GPT
from stretto.ops.moe import places
from stretto.parallel import Grid, parallelize
from tests.differences import largest
from tests.ops.confirmed import timed_by
from tests.parallel.experts.training import gpt
from tests.parallel.test_recomputation import gradients
from tests.parallel.training import SEED

CONFIG = gpt(layers=1, hidden=16, heads=2, expert_ffn=32, num_experts=3, balance="none", vocab=31)


def train(grid: Grid, *, is_compiled: bool = False, **options: Any) -> tuple[list[Tensor], list[str]]:
    """The loss and gradients of a step, and what kernels have done, in this order."""
    done: list[str] = []
    torch.manual_seed(SEED)
    model = parallelize(GPT(CONFIG), grid, shard_sequence=True, dtype=torch.bfloat16, **options)
    if is_compiled:
        model.blocks[0].compile(backend="aot_eager", fullgraph=True)
    tokens = torch.randint(CONFIG.vocab, (1, 8), generator=torch.Generator().manual_seed(grid.coordinate("batch")))
    with ExitStack() as stack:
        for name in ("push_tokens", "multiply_leaving"):
            function = getattr(places, name)
            call = mock.patch.object(
                places, name, side_effect=lambda *args, f=function: done.append(f.__name__) or f(*args)
            )
            stack.enter_context(call)
        loss = model(tokens.to(grid.device), tokens.to(grid.device))
        loss.backward()
    return [loss.detach(), *gradients(model).values()], done


def compare(folder: str, sizes: dict[str, int], others: list[dict[str, Any]]) -> Any:
    """How far kernels' results are from the library's, which runs where nothing was timed, what the latter and the
    former did, and of each of the others whether it has the same bits, and what it did."""
    grid = Grid(**sizes)
    with timed_by([1.0, 2.0], Path(folder) / str(dist.get_rank())):
        found, done = train(grid)
        again = [train(grid, **options) for options in others]
    with timed_by(None, Path(folder) / f"empty {dist.get_rank()}", can_time=False):
        expected, by_library = train(grid)
    pairs = zip(found, expected, strict=True)
    distance = largest(float((one - other).norm() / (other.norm() + 1e-6)) for one, other in pairs)
    return distance, by_library, done, [(all(map(torch.equal, found, seen)), calls) for seen, calls in again]


PUSH, SUM = "push_tokens", "multiply_leaving"
STEP = [PUSH, SUM] * 2


@pytest.mark.parametrize(
    ("sizes", "others"),
    [
        ({"x": 2}, [({"recompute": "communication"}, STEP)]),
        pytest.param(
            {"x": 2, "z": 2},
            # Products are kept, and tokens, which weights' gradients need, are not.
            [
                ({"recompute": "products"}, [PUSH, SUM, PUSH, PUSH, SUM]),
                ({"recompute": "full"}, [PUSH, SUM, *STEP]),
                ({"is_compiled": True}, STEP),
            ],
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["x2", "x2-z2"],
)
def test_what_was_timed_to_be_faster_multiplies_and_recomputation_keeps_its_bits(interpret, tmp_path, sizes, others):
    options = [*(option for option, _ in others), {"overlap": False}]
    count = 2 * sizes.get("z", 1)
    for distance, by_library, done, again in interpret(count, compare, str(tmp_path), sizes, options):
        *same, (_, without_overlap) = again
        assert distance < 0.02  # bf16
        assert (by_library, done, without_overlap) == ([], STEP, [])
        assert same == [(True, expected) for _, expected in others]
