# SPDX-License-Identifier: Apache-2.0
"""An Accelerator that follows a grid clips unscaled gradients by any norm, and refuses to write shards."""

from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from stretto.huggingface import follow_grid
from stretto.parallel import Grid, gather, parallelize
from tests.conftest import Ranks
from tests.huggingface import loops


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def step_with_a_scale(norm_type: float, folder: Path) -> tuple[float, list[torch.Tensor]]:
    """Returns the norm before clipping, and the weights after a step of SGD."""
    with loops.launched():
        accelerator = Accelerator(cpu=True)
        model, grid = make_model(), Grid(z=2)
        follow_grid(accelerator, parallelize(model, grid), grid)
        # Accelerate makes a scaler on GPUs alone.
        accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu", init_scale=1024.0), True
        accelerator.state._mixed_precision = "fp16"
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), 0.5))
        rows = torch.arange(16.0).view(4, 4).chunk(2)[grid.coordinate("batch")]
        accelerator.backward(model(rows).square().mean())
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.1, norm_type)
        optimizer.step()
        for call in (accelerator.save_state, accelerator.load_state, accelerator.save_model):
            with pytest.raises(ValueError, match=r"one rank's shards.*torch.distributed.checkpoint"):
                call(str(folder))
        return float(norm), [gather(parameter).detach() for parameter in model.parameters()]


@pytest.mark.parametrize("norm_type", [2.0, inf])
def test_an_accelerator_clips_unscaled_gradients_and_refuses_to_write_shards(
    norm_type: float, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    model = make_model()
    model(torch.arange(16.0).view(4, 4)).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
    torch.optim.SGD(model.parameters(), 0.5).step()
    for found, weights in ranks(2).run(step_with_a_scale, norm_type, tmp_path):
        assert found == pytest.approx(float(norm), rel=1e-5)
        torch.testing.assert_close(weights, [parameter.detach() for parameter in model.parameters()])
    assert not [*tmp_path.iterdir()]
