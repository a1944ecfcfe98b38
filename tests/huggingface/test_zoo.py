# SPDX-License-Identifier: Apache-2.0
"""Other Hugging Face models with a tensor-parallel plan: equal to the plain model or refused, never silently wrong."""

import re
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.parallel import Grid, gather, parallelize
from tests.parallel.hugging_face import VOCAB, Fp32IsFp64, causal_lm
from tests.parallel.training import IGNORED, Sizes, distance, my_rows

SEED = 77
BATCH = 4
SEQ_LEN = 12
TOLERANCE = 1e-9

# A sharded loss, out of the box.
MUST_RUN = [
    "arcee",
    "cwm",
    "ernie4_5",
    "exaone4",
    "gemma",
    "gemma3_text",
    "gpt_neox",
    "helium",
    "jais2",
    "ministral",
    "ministral3",
    "mistral",
    "olmo2",
    "phi",
    "qwen3",
    "seed_oss",
    "smollm3",
    "starcoder2",
]
# They scale or cap their logits between head and loss.
MUST_RUN_WITH_WHOLE_LOSS = ["cohere", "cohere2", "gemma2", "granite", "hyperclovax"]
MAY_BE_REFUSED = [
    "apertus",
    "beam",
    "doge",
    "flint",
    "gemma4_unified_text",
    "glm",
    "glm4",
    "granite_swa",
    "hrm_text",
    "nanochat",
    "nemotron",
    "olmo",
    "olmo3",
    "olmo_hybrid",
    "phi3",
    "vaultgemma",
]
# Mixtures of experts, state spaces, and models that publish no plan, so they have no roles.
# Without attention's own dropout. (Mixtures of experts take no fp64; tests/parallel/test_blocks_zoo.py has them.)
WITHOUT_ROLES: dict[str, dict[str, Any]] = {
    "gpt_neo": {
        "attention_types": [[["global"], 2]],
        "attention_dropout": 0.0,
        "resid_dropout": 0.0,
        "embed_dropout": 0.0,
    },
    "gpt_bigcode": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "mamba": {"state_size": 8},
}


@dataclass(frozen=True)
class Expected:
    """Results of the plain model for the whole batch."""

    loss: Tensor
    logits: Tensor
    gradients: dict[str, Tensor]


def build(model_type: str, **options: Any) -> nn.Module:
    torch.manual_seed(SEED)
    model = causal_lm(model_type, **options).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=torch.float64), alpha=0.1)
    return model


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(3, VOCAB, (BATCH, SEQ_LEN), generator=generator)
    labels = tokens.clone()
    for row in range(BATCH):
        labels[row, : 3 * row] = IGNORED
    return tokens, labels


@cache
def expected_of(model_type: str) -> Expected:
    tokens, labels = batch()
    with Fp32IsFp64():
        model = build(model_type, **WITHOUT_ROLES.get(model_type, {}))
        logits = model(input_ids=tokens, use_cache=False).logits.detach()
        loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
        loss.backward()
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }
    return Expected(loss.detach(), logits, gradients)


def try_on_grid(sizes: Sizes, model_type: str, expected: Expected, **options: Any) -> str | dict[str, float]:
    """The ValueError's text where the model is refused; otherwise what differs from the plain model, and how far."""
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))
    rows = my_rows(grid, BATCH)
    tokens, labels = batch()
    with Fp32IsFp64():
        try:
            model = parallelize(build(model_type, **WITHOUT_ROLES.get(model_type, {})), grid, **options)
            loss = model(input_ids=tokens[rows], labels=labels[rows], use_cache=False).loss
        except ValueError as error:
            return str(error)
        with torch.no_grad():
            logits = model(input_ids=tokens[rows], use_cache=False).logits
        loss.backward()
    differences = {"loss": distance(loss.detach(), expected.loss), "logits": distance(logits, expected.logits[rows])}
    whole = torch.stack([gradient.norm() for gradient in expected.gradients.values()]).norm()
    for name, parameter in model.named_parameters():
        gradient = whole_gradient(parameter)
        if gradient.shape != expected.gradients[name].shape:
            differences[name] = float("inf")
        else:  # a gradient may be zero but for rounding: a key's bias, for one
            scale = max(expected.gradients[name].norm(), 1e-6 * whole)
            differences[name] = ((gradient - expected.gradients[name]).norm() / scale).item()
    return {name: value for name, value in differences.items() if not value <= TOLERANCE}


def whole_gradient(parameter: nn.Parameter) -> Tensor:
    """A parameter's gradient, gathered as its parameter is."""
    with torch.no_grad():
        mine = parameter.to_local()
        mine.zero_() if parameter.grad is None else mine.copy_(parameter.grad.to_local())
        return gather(parameter).detach()


GRIDS = pytest.mark.parametrize("sizes", [(1, 2, 2, 1), (1, 1, 1, 2)], ids=str)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("model_type", "sizes"), [(each, ((1, 2, 2, 1), (1, 1, 1, 2))[turn % 2]) for turn, each in enumerate(MUST_RUN)]
)
def test_a_model_with_a_plan_equals_the_plain_model(ranks, model_type, sizes):
    print(f"seed {SEED}")
    expected = expected_of(model_type)
    count = prod(sizes)
    assert ranks(count).run(try_on_grid, sizes, model_type, expected) == [{}] * count


@pytest.mark.long
@pytest.mark.sampled(1)
@GRIDS
@pytest.mark.parametrize("model_type", MUST_RUN_WITH_WHOLE_LOSS)
def test_a_model_that_changes_its_logits_is_given_whole_ones(ranks, model_type, sizes):
    print(f"seed {SEED}")
    expected = expected_of(model_type)
    count = prod(sizes)
    assert ranks(count).run(try_on_grid, sizes, model_type, expected) == [{}] * count


@pytest.mark.sampled(2)
@GRIDS
@pytest.mark.parametrize("model_type", MAY_BE_REFUSED)
def test_any_other_model_with_a_plan_equals_the_plain_model_or_is_refused_by_name(ranks, model_type, sizes):
    print(f"seed {SEED}")
    count = prod(sizes)
    outcomes = ranks(count).run(try_on_grid, sizes, model_type, expected_of(model_type))
    if outcomes != [{}] * count:
        for refusal in outcomes:
            assert_names_a_part(refusal, build(model_type))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sizes", [(2, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 1)], ids=str)
@pytest.mark.parametrize("model_type", list(WITHOUT_ROLES))
@pytest.mark.filterwarnings("ignore:.*is sharded only over z")
def test_a_model_without_roles_is_sharded_by_blocks(ranks, model_type, sizes):
    print(f"seed {SEED}")
    count = prod(sizes)
    assert ranks(count).run(try_on_grid, sizes, model_type, expected_of(model_type)) == [{}] * count


def assert_names_a_part(refusal: str | dict[str, float], model: nn.Module) -> None:
    """The refusal is a text that names a submodule of the model or an entry of its configuration."""
    assert isinstance(refusal, str), f"silently wrong: {refusal}"
    submodules = {name.rpartition(".")[2] for name, _ in model.named_modules()} - {""}
    words = set(re.split(r"[^A-Za-z0-9_]+", refusal))
    assert words & (submodules | set(model.config.to_dict())), refusal
