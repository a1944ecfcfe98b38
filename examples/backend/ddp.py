# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel on the backend stretto.

torchrun --nproc-per-node 2 examples/backend/ddp.py [BACKEND]
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stretto  # noqa: F401  (makes the backend's name known where Stretto is not installed)
from schedules import install_schedules
from stretto.collectives import call_counts


def train(steps: int = 5) -> list[float]:
    """Train a small model with the process group at hand; returns each step's loss over all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 7))
    model = DistributedDataParallel(model, bucket_cap_mb=0.005, gradient_as_bucket_view=True)  # several buckets
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        inputs = torch.randn(16, 33, generator=generator)
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :7].argmax(1))
        optimizer.zero_grad()
        loss.backward()
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
