# SPDX-License-Identifier: Apache-2.0
"""A GPT's model FLOPs are those of the products that torch counts."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stretto.models import GPT, GPTConfig

SHAPES = {
    "GPT-2": {},
    "Llama": {
        "kv_heads": 2, "ffn": 88, "positions": "rotary", "activation": "swiglu", "norm": "rmsnorm", "bias": False,
        "tie_embeddings": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_model_flops_are_three_times_those_of_the_forward_pass(shape: str) -> None:
    config = GPTConfig(3, 64, 4, vocab=100, max_seq_len=32, **SHAPES[shape])
    model = GPT(config)
    # As two products, since torch counts no attention kernel of CPUs.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(2, 24, dtype=torch.int64))
    assert config.flops_per_token(24) * 2 * 24 == 3 * counter.get_total_flops()
