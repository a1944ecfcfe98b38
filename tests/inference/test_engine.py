# SPDX-License-Identifier: Apache-2.0
"""An engine on ranks gives the tokens and logits of transformers' own models, whatever the grid, the chunks and the
company of a request."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.inference import Engine, Request
from stretto.parallel import Grid, parallelize
from tests.conftest import Ranks
from tests.parallel import hugging_face

MakeRanks = Callable[[int], Ranks]
NEW = 64
LENGTHS = (1, 2, 37, 300)
Case = tuple[str, dict[str, Any]]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "mistral": {"sliding_window": 24, "num_attention_heads": 8, "num_key_value_heads": 4},
    "gpt2": {"num_attention_heads": 8, "tie_word_embeddings": True, "attn_pdrop": 0.0},
    "qwen3": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_attention_heads": 8},
}


def make(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = hugging_face.causal_lm(kind, **{"max_position_embeddings": 400, **FAMILIES[kind], **options})
    with torch.no_grad():
        for parameter in model.parameters():  # so that logits differ by more than a rounding
            parameter.normal_(0, 0.3 if parameter.dim() > 1 else 1.0)
    model.generation_config.eos_token_id = None
    return model


def prompts(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(hugging_face.VOCAB) for _ in range(length)] for length in lengths]


def continued(model: Any, prompt: list[int], new: int = NEW) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)[0, len(prompt) :].tolist()


def run_case(kind: str, sizes: dict[str, int], chunks: tuple[int, ...], given: list[list[int]]) -> list[Any]:
    """Tokens of each chunk size, and the log-probabilities of those of requests that join one after another."""
    grid = Grid(**sizes)
    model = parallelize(make(kind), grid)
    part = given[grid.coordinate("data") :: grid.size("data")]
    found: list[Any] = []
    for chunk in chunks:
        engine = Engine(model, max_batch=3, cache_tokens=1600, chunk=chunk)
        found.append(engine.generate(part, NEW))
    engine = Engine(model, max_batch=3, cache_tokens=1600, chunk=50)
    requests: list[Request] = []
    while len(requests) < len(part) or engine.step():
        if len(requests) < len(part):
            requests.append(engine.submit(part[len(requests)], NEW, log_probabilities=True))
            engine.step()
            engine.step()
    grid.close()
    return [*found, [request.tokens for request in requests], [request.log_probabilities for request in requests]]


def run_cases(cases: list[Any]) -> list[list[Any]]:
    torch.set_num_threads(1)
    return [run_case(*case) for case in cases]


def log_probabilities(model: nn.Module, prompt: list[int], tokens: list[int]) -> Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def check(by_rank: list[list[list[Any]]], cases: list[Any]) -> None:
    for number, (kind, sizes, _, given) in enumerate(cases):
        plain = make(kind)
        expected = [continued(plain, prompt) for prompt in given]
        logs = [log_probabilities(plain, *each) for each in zip(given, expected, strict=True)]
        data, x = sizes.get("data", 1), sizes.get("x", 1)
        for rank, of_rank in enumerate(by_rank):
            *tokens, found = of_rank[number]
            first = rank // x % data
            for each in tokens:
                assert each == expected[first::data], (kind, sizes, rank)
            for ours, theirs in zip(found, logs[first::data], strict=True):
                torch.testing.assert_close(torch.tensor(ours), theirs, rtol=0, atol=1e-5)


ON_TWO = [
    ("llama", {"x": 2}, (7,), prompts()),
    ("gpt2", {"x": 2}, (64,), prompts()),
    ("qwen3_moe", {"data": 2, "expert": 2}, (33,), prompts()),
]


def test_tokens_and_log_probabilities_are_those_of_transformers(ranks: MakeRanks) -> None:
    check(ranks(2).run(run_cases, ON_TWO, timeout=300), ON_TWO)
