# SPDX-License-Identifier: Apache-2.0
"""On GPUs: Muon's hidden exchange changes no bit, in CUDA graphs neither, and the host waits for nothing."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from stretto.memory import shared_gpus
from stretto.models import GPT, GPTConfig
from stretto.optim import Muon, hidden_matrices
from stretto.parallel import CapturedStep, Grid, gather, parallelize

pytestmark = pytest.mark.ranks(2, own=(2, 4))
STEPS = 8
CONFIG = GPTConfig(layers=3, hidden=512, heads=8, vocab=512, max_seq_len=128)


def train(axis: str, *, hides: bool = True, is_captured: bool = False, scale: float | None = None) -> list[Any]:
    """Whole weights and momenta after a few steps, of which the fifth is skipped."""
    grid = Grid(**{axis: dist.get_world_size()}, device="cuda")
    torch.manual_seed(0)
    model = parallelize(GPT(CONFIG), grid, dtype=torch.bfloat16)
    matrices = hidden_matrices(model)
    others = [parameter for name, parameter in model.named_parameters() if name not in matrices]
    groups = [{"params": list(matrices.values()), "use_muon": True}, {"params": others}]
    lr, factor = torch.full((), 0.02, device=grid.device), torch.full((), scale or 1.0, device=grid.device)
    optimizer = Muon(groups, lr=lr, grid=grid)
    if hides:
        optimizer.overlap_with(model)

    def run(tokens: torch.Tensor, skip: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.step(scale=None if scale is None else factor, skip=skip)
        optimizer.zero_grad()
        return (loss.detach(),)

    step = CapturedStep(run) if is_captured else run
    generator = torch.Generator().manual_seed(grid.coordinate("batch"))
    for number in range(STEPS):
        tokens = torch.randint(512, (2, 128), generator=generator).to(grid.device)
        skip = torch.full((), number == 4, device=grid.device)
        lr.fill_(0.02 / (1 + number))
        # Gloo, over which ranks share a GPU, waits on the host.
        is_watched = number > 4 and not is_captured and not shared_gpus.is_enabled()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if is_watched else "default")
        step(tokens, skip)
        torch.cuda.set_sync_debug_mode("default")
    found = [gather(parameter) for parameter in model.parameters()]
    found += [gather(optimizer.state[matrix]["momentum_buffer"]) for matrix in matrices.values()]
    if isinstance(step, CapturedStep):
        step.close()
    return found


def compare_all(axis: str) -> None:
    for scale in (None, 0.5):
        exposed = train(axis, hides=False, scale=scale)
        for is_captured in (False,) if shared_gpus.is_enabled() else (False, True):
            hidden = train(axis, is_captured=is_captured, scale=scale)
            different = [
                number for number, pair in enumerate(zip(exposed, hidden, strict=True)) if not torch.equal(*pair)
            ]
            assert different == [], (scale, is_captured)


@pytest.mark.parametrize("axis", ["z", "data"])
def test_a_hidden_exchange_changes_no_bits_and_has_the_host_wait_for_nothing(
    run_ranks: Any, world: int, axis: str
) -> None:
    run_ranks(world, compare_all, axis)
