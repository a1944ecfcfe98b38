# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding and SwiGLU by one kernel each on a GPU: beside fp64, in graphs, and in a whole model."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from stretto.models import GPT, GPTConfig
from stretto.parallel.comm.autograd import SelectiveMode
from stretto.parallel.layers import fused
from tests.differences import largest
from tests.gpu.test_moe import no_host_waits, poison
from tests.parallel.layers.test_fused import expect_heads, far_from

pytestmark = pytest.mark.ranks(1, own=(1,), among=(1,))
SHAPES = [(2, 4096, 8, 4, 128), (3, 1000, 5, 1, 80), (1, 1, 1, 7, 6)]
"""Of (batch, seq, groups, queries of a group, head_dim)."""


def draw(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


def measure_errors(dtype: torch.dtype) -> list[float]:
    """Errors of results and gradients, in units of what a rounding allows."""
    errors = []
    for batch, seq, groups, queries, dim in SHAPES:
        angles = fused.rotary_angles(torch.arange(seq, device="cuda"), dim)
        qkv = draw(1, batch, seq, groups, queries + 2, dim, dtype=dtype).requires_grad_()
        wide = qkv.detach().double().requires_grad_()
        expected = expect_heads(wide, angles, queries)
        grads = [draw(seed, *one.shape, dtype=dtype) for seed, one in enumerate(expected)]
        (right,) = torch.autograd.grad(expected, wide, [one.double() for one in grads])
        fused.rotate_heads(qkv, angles, queries)
        with no_host_waits():
            found = fused.rotate_heads(qkv, angles, queries)
            (of_qkv,) = torch.autograd.grad(found, qkv, grads)
        errors += [far_from(one, other, 16.0) for one, other in zip((*found, of_qkv), (*expected, right), strict=True)]
        columns = queries * dim * 7
        gate, up, grad = (draw(seed, batch, seq, columns, dtype=dtype).requires_grad_() for seed in range(3))
        wides = [one.detach().double().requires_grad_() for one in (gate, up)]
        product = wides[0] * wides[0].sigmoid() * wides[1]
        rights = torch.autograd.grad(product, wides, grad.detach().double())
        out = fused.swiglu(gate, up)
        results = out, *torch.autograd.grad(out, (gate, up), grad.detach())
        errors += [far_from(one, other, 32.0) for one, other in zip(results, (product, *rights), strict=True)]
    return errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_kernels_round_once(run_ranks: Callable[..., list[Any]], world: int, dtype: torch.dtype) -> None:
    (errors,) = run_ranks(world, measure_errors, dtype)
    assert len(errors) == 7 * len(SHAPES)
    assert largest(errors) <= 1.0, errors


def train() -> list[list[float]]:
    """Losses of five steps in bf16, twice by kernels, once of them counted, and once by PyTorch's operators."""
    config = GPTConfig(
        layers=2, hidden=512, heads=8, kv_heads=2, vocab=500, max_seq_len=128, positions="rotary",
        activation="swiglu", norm="rmsnorm",
    )  # fmt: skip
    tokens = torch.randint(500, (4, 129), device="cuda", generator=torch.Generator("cuda").manual_seed(1))

    def run() -> list[float]:
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = GPT(config).bfloat16()
        losses = []
        for _ in range(5):
            poison()
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
            losses.append(loss.item())
        return losses

    with SelectiveMode():  # as a step that is counted
        counted = run()
    twice = [run(), counted]
    with mock.patch.object(fused, "_needs_operators", return_value=True):
        return [*twice, run()]


def test_a_model_trains_as_with_the_operators(run_ranks: Callable[..., list[Any]], world: int) -> None:
    ((first, second, operators),) = run_ranks(world, train)
    assert first == second
    assert first == pytest.approx(operators, abs=0.02)
    assert first[-1] < first[0]


def replay() -> bool:
    """True if a captured graph gives the bits of a call that is not captured, for new inputs."""
    angles = fused.rotary_angles(torch.arange(64, device="cuda"), 128)
    qkv = draw(1, 2, 64, 2, 6, 128, dtype=torch.bfloat16).requires_grad_()
    gate, up = (draw(seed, 300, 1408, dtype=torch.bfloat16).requires_grad_() for seed in (2, 3))

    def call() -> list[Tensor]:
        outputs = *fused.rotate_heads(qkv, angles, 4), fused.swiglu(gate, up)
        return [*outputs, *torch.autograd.grad(outputs, (qkv, gate, up), [one.detach() for one in outputs])]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    with torch.no_grad():
        for seed, tensor in enumerate((qkv, gate, up)):
            tensor.copy_(draw(seed + 9, *tensor.shape, dtype=torch.bfloat16))
    graph.replay()
    return all(torch.equal(one, other) for one, other in zip(captured, call(), strict=True))


def test_a_captured_graph_replays_the_kernels(run_ranks: Callable[..., list[Any]], world: int) -> None:
    assert run_ranks(world, replay) == [True]
