# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT on a grid, in plain PyTorch plus five lines.

torchrun --nproc-per-node 4 examples/train_on_a_grid.py
"""

import torch
import torch.distributed as dist

from stretto import Grid, parallelize
from stretto.models import GPT, GPTConfig
from stretto.parallel import clip_grad_norm_

BATCH, SEQ_LEN, STEPS = 8, 64, 20


def main() -> None:
    grid = Grid(data=1, x=2, y=1, z=2)
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=2, hidden=64, heads=4, vocab=256, max_seq_len=SEQ_LEN))
    model = parallelize(model, grid, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.frombuffer(bytearray((__doc__ or "").encode() * 100), dtype=torch.uint8).long()
    part, parts = grid.coordinate("batch"), grid.size("batch")
    for step in range(STEPS):
        starts = torch.randint(0, len(text) - SEQ_LEN - 1, (BATCH,), generator=torch.Generator().manual_seed(step))
        rows = torch.stack([text[start : start + SEQ_LEN + 1] for start in starts]).chunk(parts)[part].to(grid.device)
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0, grid)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}, gradient norm {norm.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
