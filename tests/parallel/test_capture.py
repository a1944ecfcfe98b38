# SPDX-License-Identifier: Apache-2.0
"""Tests of what can be tested of a captured step without a GPU; tests/gpu/test_trainer.py runs them."""

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from stretto.memory import failures
from stretto.models import GPT, GPTConfig
from stretto.parallel import CapturedStep, Grid, capture, forward_passes, no_sync, parallelize


def test_a_captured_step_without_a_gpu_raises():
    with pytest.raises(ValueError, match="a CUDA graph needs a GPU, and there is none"):
        CapturedStep(lambda: ())


def replay_after_changes() -> None:
    """A step is captured, with a graph that replays nothing, and called after its model was changed."""
    model = parallelize(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Grid())

    def step() -> tuple[()]:
        for number in range(2):
            with no_sync(model) if number == 0 else nullcontext():
                model(torch.ones(1, 2)).sum().backward()
        return ()

    cuda = {"is_available": lambda: True, "stream": lambda _: nullcontext()}
    cuda |= {"graph": lambda *_, **__: nullcontext(), "is_current_stream_capturing": lambda: False}
    fakes = {name: mock.MagicMock() for name in ("Stream", "current_stream", "CUDAGraph", "synchronize")} | cuda
    clears = mock.patch.object(torch._C, "_cuda_clearCublasWorkspaces", create=True)
    with mock.patch.multiple(torch.cuda, **fakes), mock.patch.object(failures, "check"), clears:
        captured = CapturedStep(step, warm_up=1)
        for _ in range(3):
            captured()
        model[1].bias.requires_grad_(False)
        with pytest.raises(ValueError, match=r"1\.bias was changed after the step was captured"):
            captured()
        model[1].bias.requires_grad_(True)
        with no_sync(model), pytest.raises(ValueError, match="no_sync was changed after"):
            captured()
        model.eval()
        with pytest.raises(ValueError, match="training was changed after"):
            captured()
        model.train()
        captured()
        captured.close()
        waiting = CapturedStep(wait_for_the_gpu, warm_up=0)
        with pytest.raises(RuntimeError, match=r"makes the host wait for the GPU .* when stream is capturing"):
            waiting()


def wait_for_the_gpu() -> tuple[()]:
    """As `.item()` raises in a capture."""
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def test_a_captured_step_notices_that_its_model_was_frozen_or_switched(ranks):
    ranks(1).run(replay_after_changes)


def find_kept_nodes(dtype: torch.dtype | None) -> list[str]:
    """The parameters whose nodes, on which autograd accumulates, are those of the stream before, in a pass on another.

    A captured step's stream waits for no other: the backward pass of its graph would fail.
    """
    model = parallelize(GPT(GPTConfig(layers=1, hidden=8, heads=2, vocab=16, max_seq_len=4)), Grid(), dtype=dtype)
    tokens = torch.arange(4)[None]
    model(tokens, tokens).backward()

    def node_of(parameter: nn.Parameter) -> Any:
        return torch.autograd.graph.get_gradient_edge(parameter).node

    for parameter in model.parameters():
        node_of(parameter).metadata["stream"] = 0  # lost with the node, if nothing keeps it
    before = [name for name, parameter in model.named_parameters() if "stream" in node_of(parameter).metadata]
    assert len(before) > 0
    with mock.patch.object(forward_passes, "current_stream", return_value=mock.Mock(cuda_stream=1)):
        model(tokens, tokens).backward()
    return [name for name, parameter in model.named_parameters() if "stream" in node_of(parameter).metadata]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_autograds_nodes_are_made_anew_on_a_captured_steps_stream(ranks, dtype):
    assert ranks(1).run(find_kept_nodes, dtype) == [[]]


def fail(first: Exception) -> None:
    """As torch does where a step raises while it is captured: the end of the capture raises another error over it."""
    small = mock.patch.multiple(torch.cuda, graph=lambda *_, **__: nullcontext(), CUDAGraph=mock.MagicMock())
    with small, capture._explaining_failures(mock.MagicMock()):
        try:
            raise first
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


def test_a_failed_capture_names_the_first_error():
    with pytest.raises(RuntimeError, match=r"cannot be captured .*operation not permitted when stream is capturing"):
        fail(RuntimeError("operation not permitted when stream is capturing"))
    with pytest.raises(KeyError, match="tokens"):  # nothing that a capture forbids
        fail(KeyError("tokens"))
