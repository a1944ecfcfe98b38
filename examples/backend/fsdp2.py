# SPDX-License-Identifier: Apache-2.0
"""FSDP2 (fully_shard) on the backend stretto.

torchrun --nproc-per-node 2 examples/backend/fsdp2.py [BACKEND]
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import stretto  # noqa: F401  (makes the backend's name known where Stretto is not installed)
from schedules import install_schedules
from stretto.collectives import call_counts


def train(steps: int = 5) -> list[float]:
    """Train a small model with the process group at hand; returns each step's loss over all ranks."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(32, 5))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        inputs = torch.randn(16, 32, generator=generator)
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :5].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


if __name__ == "__main__":
    backend = sys.argv[1] if len(sys.argv) > 1 else "stretto"
    dist.init_process_group(backend)
    if backend == "stretto":
        install_schedules()
    losses = train()
    if dist.get_rank() == 0:
        print(losses)
        print(dict(call_counts()) if backend == "stretto" else backend)
    dist.destroy_process_group()
