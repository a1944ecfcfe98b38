# SPDX-License-Identifier: Apache-2.0
"""Peers of `python -m lab inference` compute what they should."""

from collections.abc import Callable

import pytest
import torch
from tests.conftest import Ranks
from tests.inference.test_engine import continued, make, prompts

from lab.gpt_fast import PlainDecoder
from lab.inference import SumsByLibrary
from stretto.inference import Engine
from stretto.parallel import Grid, parallelize


@torch.no_grad()
def test_gpt_fasts_recipe_has_the_tokens_of_transformers() -> None:
    plain = make("llama")
    (prompt,) = prompts(3, (9,))
    decoder, positions = PlainDecoder(plain, 1, 32), torch.arange(9)
    ids, found = torch.tensor([prompt]), []
    for place in range(9, 15):
        ids = decoder(ids, positions)
        found.append(ids.item())
        positions = torch.tensor([place])
    assert found == continued(plain, prompt, 6)
    with pytest.raises(ValueError, match="of Llama's form, not Qwen3ForCausalLM"):
        PlainDecoder(make("qwen3"), 1, 8)


def decode_by_library() -> list[list[int]]:
    with SumsByLibrary("nccl", 64), Engine(parallelize(make("llama"), Grid(x=2)), 2, 320, divide_from=None) as engine:
        return engine.generate(prompts(3, (9, 3)), 6)


def test_an_engine_whose_sums_are_a_librarys_has_the_tokens_of_transformers(ranks: Callable[[int], Ranks]) -> None:
    plain = make("llama")
    assert ranks(2).run(decode_by_library)[0] == [continued(plain, prompt, 6) for prompt in prompts(3, (9, 3))]
