# SPDX-License-Identifier: Apache-2.0
"""Peers of `python -m lab inference` compute what they should."""

import pytest
import torch
from tests.inference.test_engine import continued, make, prompts

from lab.gpt_fast import PlainDecoder


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
