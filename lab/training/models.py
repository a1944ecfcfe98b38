# SPDX-License-Identifier: Apache-2.0
"""Models and grids of the benches of training, by name."""

import re
from dataclasses import replace
from math import prod
from typing import Any

from stretto.axes import check_sizes, name_grid
from stretto.bench.training.settings import PADDED_VOCAB
from stretto.models import GPTConfig

# The 7.24 billion parameters of a Llama-3-8B with Llama-2's vocabulary.
LLAMA_7B = GPTConfig(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    ffn=14336,
    vocab=32_000,
    max_seq_len=4096,
    positions="rotary",
    activation="swiglu",
    norm="rmsnorm",
    bias=False,
    tie_embeddings=False,
)


def model_config(name: str, layers: int | None, seq_len: int) -> GPTConfig:
    """The configuration of llama-7b, or of a preset with its vocabulary padded. ValueError for another name."""
    if name == "llama-7b":
        config = replace(LLAMA_7B, max_seq_len=seq_len)
        return config if layers is None else replace(config, layers=layers)
    overrides: dict[str, Any] = {} if layers is None else {"layers": layers}
    return GPTConfig.preset(name, max_seq_len=seq_len, vocab=PADDED_VOCAB, **overrides)


def parse_grids(text: str, ranks: int) -> list[dict[str, int]]:
    """Parse grids written as "z=4, x=2 z=2". Raises ValueError for an invalid grid of that many ranks."""
    grids = []
    for part in text.split(","):
        fields = re.split(r"[\s]+", part.strip())
        pairs = [re.fullmatch(r"(data|context|x|y|z)=(\d+)", field) for field in fields]
        if not all(pairs):
            raise ValueError(f"{part.strip()!r} is not a grid; write grids as 'z=4, x=2 z=2'")
        sizes = check_sizes({pair[1]: int(pair[2]) for pair in pairs if pair}).sizes()
        if prod(sizes.values()) != ranks:
            raise ValueError(f"the grid {name_grid(sizes)} has {prod(sizes.values())} ranks, but {ranks} are used")
        grids.append(sizes)
    return grids
