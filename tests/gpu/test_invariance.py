# SPDX-License-Identifier: Apache-2.0
"""On GPUs: log-probabilities of the same bits in every batch and graph, on every grid, and in a trainer; the kernel
that rotates and stores; few tokens to experts by graphs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from stretto.inference import Engine
from stretto.memory import shared_gpus
from stretto.parallel import Grid, parallelize
from tests.inference.test_engine import continued, make, prompts
from tests.inference.test_invariance import FEW, MANY, MIXES, compare, two_hundred
from tests.ops.decoding.test_rotary_cache import CASES, NEW, attend, rotate

pytestmark = pytest.mark.ranks(2, own=(2, 4, 8), among=(2, 4, 8))
USUAL = {("llama", torch.bfloat16), ("qwen3_moe", torch.float32)}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(kind, dtype, marks=[] if (kind, dtype) in USUAL else [pytest.mark.exhaustive])
        for kind in ("llama", "qwen3", "qwen3_moe", "gpt2")
        for dtype in (torch.bfloat16, torch.float32)
    ],
    ids=str,
)
def test_bits_on_gpus(run_ranks: Callable[..., list[Any]], world: int, kind: str, dtype: torch.dtype) -> None:
    def on(*all_sizes: dict[str, Any]) -> list[Any]:
        return [(kind, sizes | {"device": "cuda"}, dtype) for sizes in all_sizes]

    (reference,), others = on({"data": world}), on({"x": world})
    trainers = on({"x": 2, "z": world // 2}, {"z": world})
    if kind == "qwen3_moe":
        others += on({"data": world, "expert": 2})
    given, mixes = (FEW, MIXES) if (kind, dtype) in USUAL else (MANY, (*MIXES, (5, 7)))
    for wrong in run_ranks(world, compare, reference, others, trainers, given, mixes):
        assert wrong == []


@pytest.mark.exhaustive
@pytest.mark.ranks(2, own=(2, 4), among=(2, 8))
def test_bits_of_two_hundred_requests_on_gpus(run_ranks: Callable[..., list[Any]], world: int) -> None:
    """In twenty mixes, and in two of them where eight ranks share a GPU.

    Steps of one token take as long here as those of hundreds: CPUs run them.
    """
    requests, mixes = two_hundred(chunks=(16, 40, 100, 400))
    reference, other, *trainers = (
        ("llama", sizes | {"device": "cuda"}, torch.bfloat16)
        for sizes in ({"data": world}, {"x": world}, {"z": world}, {"x": 2, "z": world // 2})
    )
    mixes = mixes if world < 8 else mixes[::19]
    for wrong in run_ranks(world, compare, reference, [other], trainers, requests, mixes):
        assert wrong == []


@pytest.mark.ranks(1, own=(1,), among=(1,))
def test_the_kernels_that_rotate_and_store(run_ranks: Callable[..., list[Any]], world: int) -> None:
    large = [*CASES, (64, 32, 8, 128, torch.bfloat16), (300, 8, 1, 96, torch.bfloat16)]
    for error, others in run_ranks(world, rotate, large, "cuda"):
        assert error <= 1
        assert all(others)
    steps = [*NEW, (32, 8, 128, torch.bfloat16, None), (28, 4, 80, torch.float16, 300)]
    for error, same in run_ranks(world, attend, steps, (1, 4000, 17, 64, 1025, 2), "cuda"):
        assert error <= 8
        assert all(same)


def decode_experts() -> tuple[list[list[int]], bool]:
    world = torch.distributed.get_world_size()
    grid = Grid(data=world, expert=world, device="cuda")
    given = prompts(9, (5, 40, 3, 1, 7, 12, 2, 30))[grid.coordinate("data")]
    with Engine(parallelize(make("qwen3_moe"), grid), 4, 320) as engine:
        texts = [engine.generate([given], 12)[0] for _ in range(2)]  # captured, then replayed
        return texts, bool(engine._runner._graphs) or shared_gpus.is_enabled()


def test_experts_decode_by_graphs(run_ranks: Callable[..., list[Any]], world: int) -> None:
    plain = make("qwen3_moe")
    expected = [continued(plain, prompt, 12) for prompt in prompts(9, (5, 40, 3, 1, 7, 12, 2, 30))[:world]]
    for text, (texts, is_captured) in zip(expected, run_ranks(world, decode_experts), strict=True):
        assert texts == [text, text]
        assert is_captured
