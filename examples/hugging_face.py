# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model on a grid. Built from a configuration here; `from_pretrained` works the same way.

torchrun --nproc-per-node 4 examples/hugging_face.py
"""

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from stretto import Grid, parallelize
from stretto.parallel import count_collectives


def main() -> None:
    grid = Grid(x=2, z=2)
    torch.manual_seed(0)  # every rank builds the same weights
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=8, num_key_value_heads=4
    )
    model = parallelize(LlamaForCausalLM(config), grid)
    ids = torch.randint(0, config.vocab_size, (4, 32), generator=torch.Generator().manual_seed(0))
    mine = ids.chunk(grid.size("batch"))[grid.coordinate("batch")].to(grid.device)
    with count_collectives(grid) as counts:
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
    if dist.get_rank() == 0:
        print(f"loss over the global batch: {loss.item():.4f}")
        print(f"bytes this rank sent, by axis: {counts.bytes_by_axis()}")
    with torch.no_grad():
        logits = model(input_ids=mine).logits
    if dist.get_rank() == 0:
        print(f"whole logits on every rank: {tuple(logits.shape)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
