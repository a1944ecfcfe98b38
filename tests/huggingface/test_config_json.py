# SPDX-License-Identifier: Apache-2.0
"""Tests of what the planner reads off a Hugging Face configuration, against transformers' models and `parallelize`."""

import json
import warnings
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from typer.testing import CliRunner

import stretto
from stretto.axes import GridSizes
from stretto.cli import app
from stretto.huggingface.families import DECODERS, FAMILIES
from stretto.huggingface.refusals import STYLES
from stretto.parallel import validate
from stretto.planner import read_architecture
from stretto.planner.grids import every_grid, why_impossible
from stretto.planner.memory import local_parameters, memory
from stretto.planner.workload import StepConfig, StepWorkload

SIZES: dict[str, Any] = {
    "vocab_size": 61,  # no axis divides it
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Those whose experts ranks divide are in test_moe_models.py.
DENSE = [kind for kind, decoder in DECODERS.items() if decoder.experts is None]
HEADS = ["CausalLM", "", "SequenceClassification", "TokenClassification", "QuestionAnswering"]
WITHOUT_DROPOUT = {"attention_dropout": 0.0, "attn_pdrop": 0.0, "classifier_dropout": 0.0}


def config_of(kind: str, **options: Any) -> PretrainedConfig:
    return CONFIG_MAPPING[kind](**{**SIZES, **WITHOUT_DROPOUT, **options})


def auto_class(head: str) -> Any:
    return getattr(transformers, f"AutoModelFor{head}" if head else "AutoModel")


def model_of(config: PretrainedConfig, head: str) -> nn.Module:
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return auto_class(head).from_config(config)


@cache
def family(kind: str, head: str) -> tuple[PretrainedConfig, nn.Module]:
    config = config_of(kind, num_labels=7)
    return config, model_of(config, head)


def heads_of(kind: str) -> list[str]:
    found = [head for head in HEADS if CONFIG_MAPPING[kind] in auto_class(head)._model_mapping]
    assert {"CausalLM", ""} <= set(found)
    return found


@pytest.mark.parametrize("kind", DENSE)
def test_parameters_are_those_of_transformers_model_with_its_head(tmp_path, kind):
    for head in heads_of(kind):
        config, model = family(kind, head)
        expected = sum(parameter.numel() for parameter in model.parameters())
        exported = {**config.to_dict(), "architectures": [type(model).__name__]}
        file = tmp_path / f"config{head}.json"
        file.write_text(json.dumps(exported, default=str))
        for source in (model, exported, file):
            architecture = read_architecture(source, 16)
            assert architecture.parameters == expected, head
            assert local_parameters(architecture, GridSizes(1, 1, 1, 1)) == expected, head


def refusal_of(model: nn.Module, sizes: dict[str, int] | None = None, **options: Any) -> str | None:
    try:
        validate(model, {"data": 1, "x": 1, "y": 1, "z": 1} | (sizes or {}), **{"roles": {}} | options)
    except ValueError as error:
        return str(error)
    return None


def notes_of(source: Any) -> list[str]:
    return [note for note in read_architecture(source, 16).notes if "does not split" in note]


@pytest.mark.parametrize("kind", DENSE)
def test_a_model_has_a_note_just_where_parallelize_refuses_its_roles(kind):
    for head in heads_of(kind):
        _, model = family(kind, head)
        refusal, notes = refusal_of(model), notes_of(model)
        assert bool(notes) == (refusal is not None), f"{head}: parallelize says {refusal}, and the planner {notes}"
        assert all(type(model).__name__ in note for note in notes)


@pytest.mark.parametrize("kind", DENSE)
def test_the_styles_that_the_planner_knows_a_family_by_are_those_of_transformers(kind):
    plan = config_of(kind).base_model_tp_plan or {}
    unknown = {at: style for at, style in plan.items() if style not in STYLES}
    assert DECODERS[kind].styles == (unknown if FAMILIES[kind].roles is None else {})


@pytest.mark.parametrize(
    ("kind", "options", "part"),
    [
        ("glm", {}, "'model.layers.*.mlp.gate_up_proj' the style 'colwise_gather_output'"),
        ("olmo", {}, "input_layernorm"),
        ("cohere", {"use_qk_norm": True}, "q_norm"),
        ("llama", {"attention_dropout": 0.1}, "Set attention_dropout=0.0"),
        ("gpt2", {"attn_pdrop": 0.1}, "Set attn_pdrop=0.0"),
    ],
)
def test_the_planner_and_parallelize_name_the_same_reason(kind, options, part):
    config = config_of(kind, **options)
    model = model_of(config, "CausalLM")
    (note,) = notes_of(model)
    assert part in note
    assert part in str(refusal_of(model))


def test_gpt2s_own_attention_dropout_counts_where_its_file_is_silent():
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 61, "n_positions": 32}
    assert "attn_pdrop is 0.1" in notes_of({"model_type": "gpt2", **sizes})[0]
    assert not notes_of({"model_type": "gpt2", "attn_pdrop": 0.0, **sizes})


def test_a_quantized_checkpoint_is_planned_with_a_note():
    config = {**config_of("llama").to_dict(), "quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert "quantization_config" in notes_of(config)[0]


ROLES = {
    "SequenceClassification": {"score": "head"},
    "TokenClassification": {"score": "head", "dropout": "dropout"},
    "QuestionAnswering": {"qa_outputs": "head"},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("kind", "head"), [(kind, head) for kind in ("gpt2", "llama", "qwen2", "qwen3") for head in HEADS]
)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 12])
def test_a_grid_is_possible_just_when_it_is_for_parallelize_that_knows_the_head(kind, head, ranks):
    _, model = family(kind, head)
    roles = ROLES.get(head, {})
    if kind == "gpt2" and head == "TokenClassification":
        roles = {"classifier": "head", "dropout": "dropout"}
    architecture = read_architecture(model, 16)
    assert not roles or str(roles) in notes_of(model)[0]
    architecture = replace(architecture, is_sharded_by_blocks=False)  # as it is with these roles
    for grid in every_grid(ranks):
        refusal, found = refusal_of(model, grid.sizes(), roles=roles), why_impossible(architecture, grid, batch=ranks)
        assert (found is None) == (refusal is None), f"{grid}: planner says {found}, parallelize says {refusal}"


@pytest.mark.parametrize(
    ("change", "labels"),
    [
        ({}, 2),
        ({"num_labels": 3}, 3),
        ({"id2label": {"0": "a", "1": "b", "2": "c", "3": "d"}}, 4),
        ({"num_labels": 5, "id2label": {"0": "a"}}, 5),
        ({"id2label": None}, 2),
    ],
)
def test_labels_are_counted_as_transformers_counts_them(change, labels):
    config = {**SIZES, "model_type": "llama", "architectures": ["LlamaForSequenceClassification"], **change}
    assert read_architecture(config, 16).labels == labels == CONFIG_MAPPING["llama"](**{**SIZES, **change}).num_labels


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForMultipleChoice"]}, "the head of 'LlamaForMultipleChoice' is not known"),
        ({"architectures": ["LlamaForCausalLM", "LlamaModel"]}, "head of 'LlamaForCausalLM', 'LlamaModel'"),
        ({"architectures": ["GPT2Model"]}, "known: ...ForCausalLM.* and LlamaModel"),
        ({"architectures": "LlamaForCausalLM"}, "must be a list of names"),
        ({"architectures": [3]}, "must be a list of names"),
        ({"architectures": ["\x1b[2JForCausalLM"]}, r"the head of '\\x1b\[2JForCausalLM' is not known"),
        ({"architectures": ["LlamaForTokenClassification"], "num_labels": 0}, "num_labels is 0"),
        ({"architectures": ["LlamaForTokenClassification"], "num_labels": "4"}, "num_labels is '4'"),
        ({"architectures": ["LlamaForTokenClassification"], "id2label": ["a", "b"]}, "id2label is"),
        ({"architectures": ["LlamaForTokenClassification"], "token_classification_bias": 1}, "truth value"),
    ],
)
def test_a_head_that_cannot_be_counted_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        read_architecture({**SIZES, "model_type": "llama", **change}, 16)


def test_a_multimodal_model_raises_with_the_hint_that_its_text_model_may_be_planned():
    config = {"model_type": "llava", "text_config": {**SIZES, "model_type": "llama"}, "vision_config": {}}
    with pytest.raises(
        ValueError, match=r"'llava', which the planner does not support.*; its text_config, saved as a file"
    ):
        read_architecture(config, 16)


@pytest.mark.parametrize("model_type", [None, 3, ["llama"], {"llama": 1}])
def test_a_model_type_that_is_no_name_is_refused(model_type):
    with pytest.raises(ValueError, match="which the planner does not support"):
        read_architecture({**SIZES, "model_type": model_type}, 16)


def test_a_model_is_known_by_the_class_that_it_is_derived_from_and_one_of_another_head_is_refused():
    class Mine(transformers.LlamaForSequenceClassification):
        pass

    config = config_of("llama", architectures=["LlamaForCausalLM"])
    with torch.device("meta"):
        assert read_architecture(Mine(config), 16).labels == 2
        two_heads = transformers.GPT2DoubleHeadsModel(config_of("gpt2"))
    with pytest.raises(ValueError, match="'GPT2DoubleHeadsModel' is not known"):
        read_architecture(two_heads, 16)


def logits_bytes(kind: str, class_name: str, *, is_sharded_by_blocks: bool = False, **options: Any) -> float:
    """Of 4 sequences of 16 tokens on one rank, in bf16."""
    config = {**config_of(kind, **options).to_dict(), "architectures": [class_name]}
    model = replace(read_architecture(config, 16), is_sharded_by_blocks=is_sharded_by_blocks)
    workload = StepWorkload(model, 4, 16)
    return memory(workload, StepConfig(GridSizes(1, 1, 1, 1), 4))["logits"]


def test_logits_take_the_memory_of_their_own_head():
    tokens, hidden = 4 * 16, 32
    sliced = logits_bytes("llama", "LlamaForCausalLM", vocab_size=5000)
    # The head's weight, its gradient summed in fp32, and the logits; 5000 rows are padded, which replaces the weight.
    assert sliced == 5000 * (hidden * (4 + 2) + tokens * 2)
    whole = logits_bytes("granite", "GraniteForCausalLM", vocab_size=5000)  # divides them, so nothing is sliced
    assert whole == 5000 * (tokens * (2 + 3 * 4) + hidden * 2 * 2)
    of_tokens = logits_bytes("llama", "LlamaForTokenClassification", vocab_size=5000, num_labels=3000)
    assert of_tokens == 3000 * (tokens * (2 + 3 * 4) + hidden * 2 * 2)
    pooled = logits_bytes("llama", "LlamaForSequenceClassification", num_labels=20000)
    assert pooled == 20000 * (tokens * 2 * 2 + hidden * 2 * 2)
    # Without roles a model's own code makes whole logits, and the head's weight is one of the gathered ones.
    for kind, name in (("llama", "LlamaForCausalLM"), ("granite", "GraniteForCausalLM")):
        assert logits_bytes(kind, name, is_sharded_by_blocks=True, vocab_size=5000) == 5000 * tokens * (2 + 3 * 4)


def test_the_command_notes_that_parallelize_does_not_support_a_model_and_still_ranks_it(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**config_of("glm").to_dict(), "architectures": ["GlmForCausalLM"]}))
    arguments = ["plan", "--model", str(file), "--cluster", "perlmutter", "--gpus", "4", "--batch", "4"]
    arguments += ["--seq-len", "16"]
    text = CliRunner().invoke(app, arguments)
    assert text.exit_code == 0
    assert "Note: parallelize does not split GlmForCausalLM over x and y" in text.output
    plans = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert len(plans) == 10
    assert all("does not split GlmForCausalLM" in plan["notes"][0] for plan in plans)


def test_a_sequence_longer_than_the_learned_positions_is_noted():
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 61, "n_positions": 32, "attn_pdrop": 0.0}
    config = {"model_type": "gpt2", **sizes}
    short, long = (
        stretto.plan(config, "perlmutter", gpus=4, batch=4, seq_len=seq_len)[0].notes for seq_len in (32, 33)
    )
    assert short == ()
    assert "32 positions, fewer than a sequence's 33 tokens" in long[0]


def test_recomputation_leaves_out_a_last_linear_that_neither_a_norm_nor_dropout_follows():
    """Gemma2 and OLMo2 have a norm after the MLP. GPT-2 drops a tenth of its output by default."""
    silent = {key: value for key, value in config_of("gpt2").to_dict().items() if key != "resid_pdrop"}
    for source, ends in (
        (config_of("llama"), True),
        (config_of("cohere"), True),
        (config_of("gpt2", resid_pdrop=0.0), True),
        (config_of("gpt2", resid_pdrop=0.1), False),
        (silent, False),
        (config_of("gemma2"), False),
        (config_of("olmo2"), False),
    ):
        assert read_architecture(source, 16).ends_with_linear == ends, source
