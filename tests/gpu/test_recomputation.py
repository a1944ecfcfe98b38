# SPDX-License-Identifier: Apache-2.0
"""On GPUs: modes of recomputation train the same, and inputs that wait in host memory leave the GPU."""

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, parallelize
from tests.gpu.sharing import GpuRanks

MODES = ("none", "full", "every:2", "products", "communication", "host")
BATCH, SEQ_LEN = 4, 256
CONFIG = GPTConfig(layers=8, hidden=256, heads=8, vocab=1003, max_seq_len=SEQ_LEN, positions="rotary", dropout=0.1)
pytestmark = pytest.mark.ranks(2, own=(1, 2, 4), among=(1, 2))


def train(sizes: dict[str, int], recompute: str, options: dict[str, Any]) -> dict[str, Any]:
    """Losses of three steps, and bytes that are allocated between the passes beyond what was before."""
    gc.collect()  # the model before this one, whose modules refer to each other, must not be freed meanwhile
    grid = Grid(**sizes)
    torch.manual_seed(0)
    model = parallelize(GPT(CONFIG), grid, dtype=torch.bfloat16, recompute=recompute, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    text = torch.randint(CONFIG.vocab, (BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1))
    text = text.chunk(grid.size("batch"))[grid.coordinate("batch")].to(grid.device)
    losses = []
    for _ in range(3):
        before = torch.cuda.memory_allocated()
        loss = model(text[:, :-1], text[:, 1:])
        torch.cuda.synchronize()
        torch.empty(1, device="cuda")  # the allocator now takes back what the side stream has copied
        kept = torch.cuda.memory_allocated() - before
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "kept": kept}


def train_in_all_modes() -> dict[str, dict[str, Any]]:
    world = dist.get_world_size() if dist.is_initialized() else 1
    cases: list[tuple[dict[str, int], dict[str, Any]]] = [({"z": world}, {})]
    if world > 1:
        cases.append(({"x": world}, {"shard_sequence": True}))
    return {f"{sizes} {options} {mode}": train(sizes, mode, options) for sizes, options in cases for mode in MODES}


def test_modes_train_the_same_and_host_keeps_least(gpu_pool: GpuRanks, world: int) -> None:
    for found in gpu_pool.run(world, train_in_all_modes, timeout=150):
        cases = {name.removesuffix(" none") for name in found if name.endswith(" none")}
        for case in cases:
            of_mode = {mode: found[f"{case} {mode}"] for mode in MODES}
            for mode in MODES:
                assert of_mode[mode]["losses"] == pytest.approx(of_mode["none"]["losses"], rel=1e-3), (case, mode)
            kept = {mode: of_mode[mode]["kept"] for mode in MODES}
            assert kept["host"] < kept["every:2"] < kept["full"] <= kept["communication"], case
            assert kept["full"] < kept["products"], case
            assert max(kept[mode] for mode in MODES[1:]) < kept["none"], case
