# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities have the same bits in every batch, with every chunk, on every grid, and in a trainer's forward
pass."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.conftest import Ranks
from tests.inference.test_engine import make, prompts
from tests.parallel import hugging_face
from torch import Tensor

from stretto.inference import Engine, token_log_probabilities
from stretto.parallel import Grid, parallelize

MakeRanks = Callable[[int], Ranks]
GIVEN = prompts(11, (3, 290, 17, 1, 40))
NEW = 6
MIXES = ((1, 512), (3, 7), (5, 64))
"""(requests at a time, tokens of a chunk)."""

Case = tuple[str, dict[str, int], torch.dtype]


def build(case: Case) -> tuple[Any, Grid]:
    kind, sizes, dtype = case
    grid = Grid(**sizes)
    return parallelize(make(kind).to(dtype), grid, invariant=True), grid


def decode(case: Case, mixes: Any = MIXES) -> list[Any]:
    """The (tokens, log-probabilities) of each prompt in each mix; all ranks of data have all prompts."""
    torch.set_num_threads(1)
    model, grid = build(case)
    found = []
    for batch, chunk in mixes:
        engine = Engine(model, batch, 2048, chunk=chunk, invariant=True)
        requests = [engine.submit(prompt, NEW, log_probabilities=True) for prompt in GIVEN]
        while engine.step():
            pass
        found.append([(request.tokens, request.log_probabilities) for request in requests])
    grid.close()
    return found


def train(case: Case, texts: list[list[int]]) -> list[list[float]]:
    """The log-probabilities of texts' last tokens by a forward pass that a backward pass follows, padded to a batch."""
    torch.set_num_threads(1)
    model, grid = build(case)
    longest = max(map(len, texts))
    ids, mask = (torch.zeros(len(texts), longest, dtype=torch.int64) for _ in range(2))
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = torch.tensor(text), 1
    found = forward(model, ids, mask)
    grid.close()
    return [found[row, len(text) - 1 - NEW : len(text) - 1].tolist() for row, text in enumerate(texts)]


def forward(model: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    model.train()
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    found = token_log_probabilities(logits[:, :-1], ids[:, 1:])
    found.sum().backward()
    return found.detach()


def run(function: Callable[..., Any], cases: list[Any], *arguments: Any) -> list[Any]:
    return [function(case, *arguments) for case in cases]
