# SPDX-License-Identifier: Apache-2.0
"""Each Hugging Face family of the table trains on grids, with no roles given, as the plain model does on one rank."""

import re
import warnings
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from stretto.huggingface.families import FAMILIES
from stretto.parallel import Grid, gather, mean_over_batch, parallelize, validate
from tests.parallel import moe_families
from tests.parallel.training import IGNORED, my_rows

SEED = 41
WITH_ROLES = {kind for kind, family in FAMILIES.items() if family.roles is not None}
BATCH = 4
SEQ_LEN = 10
STEPS = 5
VOCAB = 61

_SHAPE: dict[str, Any] = {"vocab_size": VOCAB, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
_SHAPE |= {"intermediate_size": 48, "max_position_embeddings": 32, "pad_token_id": 0}
_SHAPE |= {"bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0}
_GROUPED = {"num_key_value_heads": 2}
_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_BLOOM = {"n_layer": 2, "n_head": 4, "hidden_dropout": 0.0}
_FALCON = {"hidden_dropout": 0.0, "alibi": False, "bias": True}
_GEMMA = _GROUPED | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}
_GPT_OSS = _GROUPED | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}
_GPT_OSS |= {"attention_bias": True}
_T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}

X2, X2_Z2, DATA2_X2, Y2, X2_Y2 = (1, 2, 1, 1), (1, 2, 1, 2), (2, 2, 1, 1), (1, 1, 2, 1), (1, 2, 2, 1)
DATA2_Z2, X4 = (2, 1, 1, 2), (1, 4, 1, 1)  # x=4: KV heads that are fewer are copied
GRIDS_WITHOUT_Y = (X2, X2_Z2, DATA2_X2)


@dataclass(frozen=True)
class Family:
    """A tiny model: its type, options of its configuration, and the grids that it trains on."""

    model_type: str
    config: dict[str, Any]
    grids: tuple[tuple[int, int, int, int], ...]
    kind: str = "AutoModelForCausalLM"
    options: dict[str, Any] = field(default_factory=dict)  # of parallelize


ALL = (*GRIDS_WITHOUT_Y, Y2, X2_Y2)
UNLESS_BOTH = (*GRIDS_WITHOUT_Y, Y2)  # attention is replicated on x > 1, which needs y=1
CASES = {
    "gemma 2": Family("gemma2", _GEMMA | {"final_logit_softcapping": 30.0}, ALL, options={"sharded_loss": False}),
    "gemma 3": Family("gemma3_text", _GEMMA, ALL),
    "olmo 2": Family("olmo2", _GROUPED, (*ALL, X4)),
    "phi 3": Family("phi3", _GROUPED, UNLESS_BOTH),
    "opt": Family("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}, GRIDS_WITHOUT_Y),
    "bloom": Family("bloom", _BLOOM, UNLESS_BOTH),
    "falcon": Family("falcon", _FALCON | {"multi_query": False}, ALL),
    "falcon, one key": Family("falcon", _FALCON | {"multi_query": True}, UNLESS_BOTH),
    "falcon, grouped": Family("falcon", _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}, (*ALL, X4)),
    "falcon, alibi": Family("falcon", _FALCON | {"alibi": True, "multi_query": False}, UNLESS_BOTH),
    "t5": Family("t5", _T5, GRIDS_WITHOUT_Y, "AutoModelForSeq2SeqLM"),
    "t5, gated": Family("t5", _T5 | {"feed_forward_proj": "gated-gelu"}, GRIDS_WITHOUT_Y, "AutoModelForSeq2SeqLM"),
    "bert": Family("bert", _BERT, GRIDS_WITHOUT_Y, "AutoModelForMaskedLM"),
    "roberta": Family("roberta", _BERT, GRIDS_WITHOUT_Y, "AutoModelForMaskedLM"),
    "vit": Family(
        "vit", {"image_size": 8, "patch_size": 4, "num_labels": 5}, GRIDS_WITHOUT_Y, "AutoModelForImageClassification"
    ),
    "stablelm": Family("stablelm", _GROUPED, (*ALL, X4)),
    "stablelm, norms of heads": Family("stablelm", _GROUPED | {"qk_layernorm": True}, GRIDS_WITHOUT_Y),
    "gpt-oss": Family("gpt_oss", _GPT_OSS, (X2_Z2, X2_Y2, DATA2_X2, DATA2_Z2, Y2, X4)),
    "gpt-j": Family("gptj", {"rotary_dim": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}, ALL),
}


def build(family: Family) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # token ids, rope parameters: nothing that a tiny model minds
        config = CONFIG_MAPPING[family.model_type](**{**_SHAPE, **family.config})
        torch.manual_seed(SEED)
        model = getattr(transformers, family.kind).from_config(config).train()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms start alike, and show no mistake
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


def inputs_of(family: Family) -> dict[str, Tensor]:
    """The batch by the names of the model's arguments; the labels of some tokens are ignored."""
    generator = torch.Generator().manual_seed(SEED)
    if family.kind == "AutoModelForImageClassification":
        pixels = torch.randn(BATCH, 3, 8, 8, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(5, (BATCH,), generator=generator)}
    tokens = torch.randint(3, VOCAB, (BATCH, SEQ_LEN), generator=generator)
    labels = torch.randint(3, VOCAB, (BATCH, SEQ_LEN), generator=generator)
    labels = tokens.clone() if family.kind == "AutoModelForCausalLM" else labels
    for row in range(BATCH):
        labels[row, : 2 * row] = IGNORED
    return {"input_ids": tokens, "labels": labels}


@cache
def trained_plainly(case: str) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of five steps of plain transformers, and the weights after them."""
    model, inputs = build(CASES[case]), inputs_of(CASES[case])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def trained_on_grid(sizes: tuple[int, int, int, int], case: str) -> tuple[list[float], dict[str, Tensor]]:
    family = CASES[case]
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is sharded only over z")
        model = parallelize(build(family), grid, **family.options)
    check_is_split(model, grid)
    rows = my_rows(grid, BATCH)
    inputs = {name: value[rows] for name, value in inputs_of(family).items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        if "pixel_values" in inputs:
            logits = model(pixel_values=inputs["pixel_values"]).logits
            total = nn.functional.cross_entropy(logits, inputs["labels"], reduction="sum")
            loss = mean_over_batch(total, len(logits), grid)
        else:
            loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: gather(parameter).detach() for name, parameter in model.named_parameters()}


def check_is_split(model: nn.Module, grid: Grid) -> None:
    """Every block has weights of which each rank holds 1 / (x y z) alone."""
    parts = prod(grid.sizes[axis] for axis in "xyz")
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outermost = [lists[name] for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    for block in (block for blocks in outermost for block in blocks):
        held = [
            parameter.to_local().numel() * parts == parameter.numel()
            for parameter in block.parameters()
            if isinstance(parameter, DTensor) and parameter.ndim == 2
        ]
        assert any(held)


def check(ranks: Any, case: str, sizes: tuple[int, int, int, int]) -> None:
    print(f"seed {SEED}")
    losses, weights = trained_plainly(case)
    assert losses[-1] < losses[0]
    for found, found_weights in ranks(prod(sizes)).run(trained_on_grid, sizes, case):
        assert found == pytest.approx(losses, rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(found_weights[name], weight, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: n + m)


ONE_GRID = [(case, family.grids[index % len(family.grids)]) for index, (case, family) in enumerate(CASES.items())]
OTHER_GRIDS = [
    (case, sizes) for case, family in CASES.items() for sizes in family.grids if (case, sizes) not in ONE_GRID
]


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("case", "sizes"), ONE_GRID)
def test_a_family_trains_on_a_grid_as_on_one_rank(ranks, case, sizes):
    check(ranks, case, sizes)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("case", "sizes"), OTHER_GRIDS)
def test_a_family_trains_on_its_other_grids_as_on_one_rank(ranks, case, sizes):
    check(ranks, case, sizes)


def warnings_of(case: str, sizes: tuple[int, int, int, int]) -> list[str]:
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize(build(CASES[case]), grid, **CASES[case].options)
    return [str(each.message) for each in caught]


@pytest.mark.long
def test_computation_on_every_rank_of_x_warns_with_its_cost(ranks):
    found, others = ranks(4).run(warnings_of, "phi 3", X2_Z2)[:2]
    assert others == []
    (message,) = [each for each in found if "of the parameters of" in each]
    part = r"model\.layers\.\*\.self_attn"
    assert re.match(rf"\d\d% of the parameters of \w+ are split neither over x nor over y \({part}\): ", message)
    assert "each of the x * y = 2 ranks that share a batch computes all of them" in message
    assert not any("of the parameters" in each for each in ranks(4).run(warnings_of, "olmo 2", X2_Z2)[0])


def numbers_here(case: str, sizes: tuple[int, int, int, int], part: str) -> tuple[int, int]:
    """Return how many numbers this rank holds of a part of the model, and how many that has."""
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = parallelize(build(CASES[case]), grid)
    found = [parameter for name, parameter in model.named_parameters() if part in name]
    return sum(parameter.to_local().numel() for parameter in found), sum(parameter.numel() for parameter in found)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("case", "part"),
    [
        ("phi 3", ".self_attn."),
        ("bloom", ".self_attention."),
        ("falcon, alibi", ".self_attention."),
        ("stablelm, norms of heads", ".self_attn."),
    ],
)
def test_z_shards_what_every_rank_of_x_computes(ranks, case, part):
    held = ranks(4).run(numbers_here, case, X2_Z2, part)
    whole = held[0][1]
    assert held[0] == held[1]  # neighbours along x
    assert held[0][0] + held[2][0] == whole > 1000


@pytest.mark.parametrize("sizes", [Y2, X2_Y2])
def test_a_grid_that_replicated_parts_do_not_allow_shards_by_blocks(ranks, sizes):
    found = ranks(prod(sizes)).run(warnings_of, "opt", sizes)[0]
    assert "sharded only over z (model.decoder.embed_positions has the role 'replicated'" in found[0]


def refusal_of(case: str, sizes: dict[str, int], **options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        validate(build(CASES[case]), sizes, **options)
    return str(caught.value)


def test_heads_that_x_does_not_divide_are_refused_with_the_roles_that_were_tried():
    refusal = refusal_of("olmo 2", {"x": 3})
    assert "4 attention heads cannot be split over x=3" in refusal
    assert "'model.layers.*.self_attn.k_proj': 'colwise'" in refusal


def test_sinks_go_with_heads():
    by_features = dict.fromkeys((f"model.layers.*.self_attn.{part}_proj" for part in "qkv"), "colwise")
    refusal = refusal_of("gpt-oss", {"x": 8}, roles=by_features)
    assert "sinks: 4 attention heads cannot be split over x=8; the nearest number of attention heads that" in refusal
    assert "'model.layers.*.self_attn.sinks': 'inner_parameter'" in refusal


def balanced() -> nn.Module:
    model: Any = build(CASES["gpt-oss"])
    model.router_aux_loss_coef = 0.7
    return model


def balanced_loss(sizes: tuple[int, int, int, int]) -> float:
    """The loss of labels and of balance, by an option of the configuration or of the call."""
    family = CASES["gpt-oss"]
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = parallelize(balanced(), grid)
    rows = {name: value[my_rows(grid, BATCH)] for name, value in inputs_of(family).items()}
    by_call = float(model(**rows, output_router_logits=True).loss.detach())
    model.config.output_router_logits = True
    assert float(model(**rows).loss.detach()) == by_call
    return by_call


@pytest.mark.long
def test_a_load_balancing_loss_of_gathered_routers_is_that_of_the_global_batch(ranks):
    """A product of means: the mean of what ranks with other rows have is another number."""
    plain = balanced()
    expected = float(plain(**inputs_of(CASES["gpt-oss"]), output_router_logits=True).loss.detach())
    assert expected > float(plain(**inputs_of(CASES["gpt-oss"])).loss.detach()) + 0.1
    for sizes in ((1, 1, 1, 2), X2_Z2):
        for found in ranks(prod(sizes)).run(balanced_loss, sizes):
            assert found == pytest.approx(expected, rel=1e-5)


def test_roles_that_the_user_gives_win_over_the_familys():
    roles = dict.fromkeys((f"model.decoder.layers.*.self_attn.{part}_proj" for part in "qkv"), "colwise")
    roles = {pattern: {"role": role, "unit": 32, "unit_name": "whole attentions"} for pattern, role in roles.items()}
    assert "1 whole attentions cannot be split over x=2" in refusal_of("opt", {"x": 2}, roles=roles)


def test_attention_that_the_user_splits_is_not_replicated():
    roles = {"transformer.h.*.self_attention.query_key_value": {"role": "colwise", "unit": 24}}
    roles |= {"transformer.h.*.self_attention.dense": "rowwise"}
    assert "ALiBi" in refusal_of("bloom", {"x": 2}, roles=roles)


def test_every_family_of_the_table_is_tested_here_or_among_models_with_a_plan():
    elsewhere = {"gpt2", "olmo3", *moe_families.FAMILIES}  # test_moe_families.py has those of experts
    assert {family.model_type for family in CASES.values()} | elsewhere >= WITH_ROLES


def test_the_documentation_lists_the_families_of_the_table():
    page = (Path(__file__).parents[2] / "docs" / "hugging-face.md").read_text()
    listed = page.partition("by `config.model_type`: ")[2].partition(". ")[0]
    assert listed == ", ".join(f"`{family}`" for family in sorted(WITH_ROLES))
