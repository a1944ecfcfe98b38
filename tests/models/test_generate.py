# SPDX-License-Identifier: Apache-2.0
"""Text from a model: drawn as the model says, and the same from the same seed."""

import pytest
import torch
from tests.train import runs

from stretto.models import GPT
from stretto.models.gpt import generate


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    model = GPT(runs.GPT_CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    return model


def test_at_temperature_zero_each_token_is_the_likeliest(model: GPT) -> None:
    tokens = generate(model, [1, 2, 3], 8, temperature=0.0)
    assert tokens[:3] == [1, 2, 3]
    assert len(tokens) == 11
    for length in range(3, 11):
        assert tokens[length] == model(torch.tensor([tokens[:length]]))[0, -1].argmax().item()


def test_the_seed_decides_what_is_drawn(model: GPT) -> None:
    draws = [generate(model, [1], 12, temperature=1.5, seed=seed) for seed in (0, 0, 1)]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]


def test_a_low_temperature_comes_close_to_the_likeliest(model: GPT) -> None:
    assert generate(model, [1], 8, temperature=1e-4) == generate(model, [1], 8, temperature=0.0)


def test_text_may_be_longer_than_the_model_sees(model: GPT) -> None:
    tokens = generate(model, list(range(16)), 3, temperature=0.0)
    assert len(tokens) == 19
    assert tokens[-1] == model(torch.tensor([tokens[2:18]]))[0, -1].argmax().item()


def test_the_model_stays_in_training_mode(model: GPT) -> None:
    model.train()
    generate(model, [1], 1)
    assert model.training


def test_an_empty_prompt_and_a_negative_temperature_are_refused(model: GPT) -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        generate(model, [], 1)
    for temperature in (-1, float("nan")):
        with pytest.raises(ValueError, match=f"the temperature is {temperature}, but must be at least 0"):
            generate(model, [1], 1, temperature=temperature)
