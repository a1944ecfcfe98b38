# SPDX-License-Identifier: Apache-2.0
"""Families of transformers, found by walking its registry, train in pipeline stages as in one process."""

import re
import warnings
from collections.abc import Callable
from functools import partial
from math import prod

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification

from stretto.parallel import Grid, Pipeline, parallelize
from tests.parallel import hugging_face, zoo
from tests.parallel.training import my_rows

TOLERANCE = 1e-5
ROUGH = {"cpmant": 1e-3, "gemma4_unified_text": 1e-4}  # their training is unstable

# Their code uses what no stage can send, or modules that it has not; each error says what.
REFUSED = {
    "albert": "the model has 1 blocks, and each stage needs one; pipe=1 would do",
    "big_bird": "uses 'set_attention_type' of a BigBirdLayer that another pipeline stage has",
    "flaubert": "takes a module out of a ModuleList that another pipeline stage has",
    "hrm_text": "has parameters of its own .* in addition to its blocks",
    "inkling2_text": "a connection skips the cut before that block",
    "prophetnet": "uses '_forward' of a ProphetNetPositionalEmbeddings that another pipeline stage has",
    "xlm": "takes a module out of a ModuleList that another pipeline stage has",
    "xlnet": "has parameters of its own .* in addition to its blocks",
}


def train_in_stages(sizes: dict[str, int], family: str, task: str) -> float | str:
    """The largest relative difference in five losses from one process's, or what was raised."""
    grid, model, batch = Grid(**sizes), zoo.build(family, task), make_batch(task)
    mine = {key: value[my_rows(grid, zoo.BATCH)] for key, value in batch.items()}
    expected = torch.tensor(zoo.train(zoo.build(family, task), batch), dtype=torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses = torch.tensor(_train(parallelize(model, grid), grid, mine), dtype=torch.float64)
    except Exception as error:  # noqa: BLE001 - the test reads it
        return f"{type(error).__name__}: {error}".split("\n")[0]
    return float(((losses - expected) / expected).abs().max())


def make_batch(task: str) -> dict[str, torch.Tensor]:
    """Inputs of a step; rows have different numbers of labels that count."""
    batch = zoo.make_batch(task)
    for row in range(zoo.BATCH):
        batch["labels"][row, : 3 * row] = -100
    return batch


def _train(model: torch.nn.Module, grid: Grid, batch: dict[str, torch.Tensor], steps: int = 5) -> list[float]:
    """The losses of some steps with SGD, in micro-batches of a row."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    with Pipeline(model, grid, schedule="1f1b", micro_batch_size=1) as pipeline:
        for _ in range(steps):
            losses.append(float(pipeline.step(**batch)))
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("family", "task"), zoo.list_families())
@pytest.mark.parametrize("sizes", [{"pipe": 2}, {"pipe": 2, "x": 2}, {"pipe": 2, "z": 2}], ids=str)
def test_families_train_in_stages_as_in_one_process_or_raise_with_the_reason(ranks, sizes, family, task):
    found = ranks(prod(sizes.values())).run(train_in_stages, sizes, family, task)
    for outcome in found:
        if isinstance(outcome, str):
            assert re.search(REFUSED.get(family, "no refusal"), outcome)
        else:
            assert outcome <= ROUGH.get(family, TOLERANCE)


def losses_without_targets(family: str) -> tuple[float, float]:
    """One step's loss in one process, and in stages, where a micro-batch has no target that counts."""
    grid, batch = Grid(pipe=2), make_batch("causal")
    batch["labels"][1] = -100
    plain = zoo.build(family, "causal")(**batch).loss.item()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plain, _train(parallelize(zoo.build(family, "causal"), grid), grid, batch, steps=1)[0]


@pytest.mark.parametrize("family", ["codegen", "opt"], ids=["by blocks", "by roles"])
def test_a_micro_batch_without_targets_adds_nothing_to_the_loss(ranks, family):
    for plain, found in ranks(2).run(losses_without_targets, family):
        assert found == pytest.approx(plain, rel=1e-5)


# Inputs beside tokens.


def make_vision_model() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(ViTConfig(**sizes, **dropout, image_size=8, patch_size=4, num_labels=5))


def make_classifier() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**sizes, **dropout, vocab_size=zoo.VOCAB, num_labels=3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": partial(hugging_face.causal_lm, "llama", num_hidden_layers=3),
    "gpt_neox": partial(hugging_face.causal_lm, "gpt_neox", num_hidden_layers=3, hidden_dropout=0.0),
    "qwen2": partial(hugging_face.causal_lm, "qwen2", num_hidden_layers=3),
    "bloom": partial(zoo.build, "bloom", "causal"),
    "opt": partial(zoo.build, "opt", "causal"),
    "classifier": make_classifier,
    "vision": make_vision_model,
}


def inputs_of(name: str, positions: str) -> dict[str, torch.Tensor]:
    """Rows of different lengths, padded at the left: masks and positions say so."""
    generator = torch.Generator().manual_seed(11)
    rows = zoo.BATCH
    if name == "vision":
        return {"pixel_values": torch.randn(rows, 3, 8, 8, generator=generator), "labels": torch.arange(rows) % 5}
    tokens = torch.randint(4, 60, (rows, zoo.SEQ_LEN), generator=generator)
    mask = torch.ones_like(tokens)
    for row in range(rows):
        mask[row, : 3 * row] = 0
    batch = {"input_ids": tokens, "attention_mask": mask}
    if name == "classifier":
        return batch | {"labels": torch.arange(rows) % 3}
    if positions == "of each row":
        batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    elif positions == "of all rows":
        batch["position_ids"] = torch.arange(zoo.SEQ_LEN)[None].flip(1)
    return batch | {"labels": tokens.masked_fill(mask == 0, -100)}


def losses_with_inputs(sizes: dict[str, int], name: str, positions: str) -> float:
    """The largest relative difference in five losses from one process's."""
    grid = Grid(**sizes)
    losses = []
    for is_plain in (True, False):
        torch.manual_seed(0)
        model, batch = MODELS[name]().train(), inputs_of(name, positions)
        if is_plain:
            losses.append(zoo.train(model, batch))
            continue
        mine = {key: value[my_rows(grid, zoo.BATCH)] if len(value) > 1 else value for key, value in batch.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses.append(_train(parallelize(model, grid), grid, mine))
    plain, ours = torch.tensor(losses, dtype=torch.float64)
    return float(((ours - plain) / plain).abs().max())


def inputs_cases() -> list[tuple[str, str]]:
    """(model, what position_ids are)."""
    without = [(name, "not given") for name in MODELS]
    return without + [(name, how) for name in ("llama", "gpt_neox", "qwen2") for how in ("of each row", "of all rows")]


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "positions"), inputs_cases())
@pytest.mark.parametrize("sizes", [{"pipe": 2}, {"pipe": 3}, {"pipe": 2, "x": 2}, {"pipe": 2, "data": 2}], ids=str)
def test_masks_positions_and_pictures_reach_the_stages_that_need_them(ranks, sizes, name, positions):
    if sizes["pipe"] == 3 and name in ("bloom", "opt"):
        sizes = {"pipe": 2}  # two blocks
    for far in ranks(prod(sizes.values())).run(losses_with_inputs, sizes, name, positions):
        assert far < TOLERANCE
