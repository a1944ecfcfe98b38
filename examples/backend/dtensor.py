# SPDX-License-Identifier: Apache-2.0
"""DTensor (tensor parallelism, and redistribution) on the backend stretto.

torchrun --nproc-per-node 2 examples/backend/dtensor.py [BACKEND]
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import stretto  # noqa: F401  (makes the backend's name known where Stretto is not installed)
from schedules import install_schedules
from stretto.collectives import call_counts


def train(steps: int = 5) -> list[float]:
    """Train a tensor-parallel model with the process group at hand; returns each step's loss."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24), nn.Linear(24, 4))
    plan = {
        "0": ColwiseParallel(input_layouts=Shard(0)),
        "2": RowwiseParallel(output_layouts=Shard(0)),
        "3": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)  # the same batch everywhere
    losses = []
    for _ in range(steps):
        whole = torch.randn(8 * dist.get_world_size(), 24, generator=generator)
        inputs = distribute_tensor(whole, mesh, [Shard(0)]).to_local()
        loss = nn.functional.cross_entropy(model(inputs), whole[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    turned = distribute_tensor(whole, mesh, [Shard(0)]).redistribute(mesh, [Shard(1)])
    return [*losses, turned.sum().full_tensor().item()]


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
