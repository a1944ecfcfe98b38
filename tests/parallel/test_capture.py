# SPDX-License-Identifier: Apache-2.0
"""Tests of what can be tested of a captured step without a GPU; tests/gpu/test_trainer.py runs them."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import nn

from stretto.memory import failures
from stretto.parallel import CapturedStep, Grid, no_sync, parallelize


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
