# SPDX-License-Identifier: Apache-2.0
"""The planner's idea of a model against the model itself."""

import json
import re

import pytest
import torch

import stretto
from stretto.axes import GridSizes
from stretto.models import GPT, GPTConfig
from stretto.models.gpt_config import PRESETS
from stretto.parallel import validate
from stretto.planner import read_architecture
from stretto.planner.grids import every_grid, why_impossible
from stretto.planner.memory import local_parameters

SHAPES = {
    "gpt2-like": GPTConfig(layers=3, hidden=48, heads=6, vocab=101, max_seq_len=32),
    "llama-like": GPTConfig(
        layers=2, hidden=64, heads=8, kv_heads=2, ffn=160, vocab=96, positions="rotary", activation="swiglu",
        norm="rmsnorm", bias=False, tie_embeddings=False,
    ),
    "odd": GPTConfig(layers=1, hidden=40, heads=5, vocab=7, ffn=56, norm="rmsnorm"),
}  # fmt: skip


def meta_gpt(config: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_counted_as_the_model_has_them(shape):
    config = SHAPES[shape]
    assert read_architecture(config, 32).parameters == sum(p.numel() for p in meta_gpt(config).parameters())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("GPT2", {"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 64}),
        (
            "Llama",
            {
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "intermediate_size": 160,
                "vocab_size": 128,
            },
        ),
        (
            "Llama",
            {
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "head_dim": 32,
                "intermediate_size": 96,
                "vocab_size": 128,
                "attention_bias": True,
                "mlp_bias": True,
                "tie_word_embeddings": True,
            },
        ),
        (
            "Qwen2",
            {
                "hidden_size": 64,
                "num_hidden_layers": 3,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "intermediate_size": 96,
                "vocab_size": 128,
            },
        ),
        (
            "Mistral",
            {
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "intermediate_size": 96,
                "vocab_size": 128,
            },
        ),
    ],
    ids=["gpt2", "llama", "llama with biases", "qwen2", "mistral"],
)
def test_hugging_face_configurations_are_read_as_the_models_are(tmp_path, kind, options):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(**options)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    expected = sum(parameter.numel() for parameter in model.parameters())
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.to_dict(), default=str))
    for source in (str(file), file, str(tmp_path), tmp_path, model, config):  # tmp_path: a folder with a config.json
        assert read_architecture(source, 64).parameters == expected


TINY = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 128, "pad_token_id": 0}
GROUPED = {**TINY, "num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Llama", {**GROUPED, "attention_bias": True}),
        ("Llama", {**GROUPED, "mlp_bias": True}),
        ("Mistral", {**GROUPED, "attention_bias": True}),  # which it does not know
        ("Qwen2", {**GROUPED, "attention_bias": True}),
        ("Qwen3", GROUPED),
        ("Qwen3", {**GROUPED, "head_dim": 16, "attention_bias": True}),
        ("Gemma", {**GROUPED, "attention_bias": True}),
        ("Gemma", {**TINY, "num_attention_heads": 16}),
        ("Gemma2", {**TINY, "num_attention_heads": 8}),
        ("Phi3", GROUPED),
        ("Olmo", GROUPED),
        ("Olmo2", {**GROUPED, "attention_bias": True}),
        ("Granite", {**GROUPED, "mlp_bias": True}),
        ("Cohere", GROUPED),
        ("Cohere", {**GROUPED, "use_qk_norm": True}),
        ("Glm", {**TINY, "num_attention_heads": 8}),
        ("Glm", {**GROUPED, "attention_bias": False}),
    ],
    ids=str,
)
def test_a_familys_additions_to_llamas_block_are_counted_and_missing_entries_have_its_defaults(kind, options):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(**options)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    expected = sum(parameter.numel() for parameter in model.parameters())
    silent = {**options, "model_type": config.model_type}
    for source in (config, silent):
        architecture = read_architecture(source, 64)
        assert architecture.parameters == expected
        assert local_parameters(architecture, GridSizes(1, 1, 1, 1)) == expected


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', but must be a truth value"),
        ({"attention_bias": 1}, "attention_bias is 1, but must be a truth value"),
        ({"per_layer_config": {"1": {"intermediate_size": 48}}}, "layers of different sizes"),
        ({"add_cross_attention": True}, "cross-attention cannot be planned yet"),
    ],
)
def test_an_option_that_would_be_counted_wrongly_is_refused(option, message):
    with pytest.raises(ValueError, match=message):
        read_architecture({**GROUPED, "model_type": "llama", **option}, 64)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 8, 16, 40])
def test_a_grid_is_possible_for_the_planner_just_when_it_is_for_parallelize(shape, ranks):
    config = SHAPES[shape]
    architecture, model = read_architecture(config, 32), meta_gpt(config)
    for grid in every_grid(ranks):
        try:
            validate(model, grid.sizes())
            refusal = None
        except ValueError as error:
            refusal = str(error)
        found = why_impossible(architecture, grid, batch=ranks)
        assert (found is None) == (refusal is None), f"{grid}: planner says {found}, parallelize says {refusal}"


def test_table_5_1s_models_have_about_the_parameters_in_their_names():
    for name in PRESETS:
        if name != "gpt2-small":
            billions = float(name.removeprefix("gpt-").removesuffix("b"))
            assert read_architecture(name, 2048).parameters / 1e9 == pytest.approx(billions, rel=0.08)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nlayers = 2\nhidden = 64\nheads = 4\n", "model.vocab is missing"),
        ("[model]\nlayers = -2\nhidden = 64\nheads = 4\nvocab = 9\n", "model.layers is -2"),
        ("[model]\nlayers = true\nhidden = 64\nheads = 4\nvocab = 9\n", "model.layers is True"),
        ("[model]\nlayer = 2\n", "did you mean 'layers'"),
        ('[model]\nname = "gpt-20"\n', "did you mean 'gpt-20b'"),
        ('[model]\nname = "gpt-5b"\nactivation = "relu"\n', "must be one of 'gelu', 'swiglu'"),
        ('[model]\nname = "gpt-5b"\nbias = 1\n', "truth value"),
        ("model = 3\n", "must be a table"),
        ("[model\n", "Expected"),
    ],
)
def test_a_bad_toml_is_refused_with_its_name_and_the_rule(tmp_path, text, message):
    file = tmp_path / "model.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_architecture(str(file), 64)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{}", "model_type is None"),
        ("[1, 2]", "no table"),
        ("{", "Expecting"),
        ("[" * 100_000, "recursion|nested|depth"),
        ('{"model_type": "bert"}', "'bert', which the planner does not support"),
        ('{"model_type": "jamba", "num_local_experts": 8}', "mixture of experts"),
        (
            '{"model_type": "gpt2", "n_embd": 10, "n_head": 3, "n_layer": 1, "vocab_size": 5, "n_positions": 4}',
            "divide",
        ),
        ('{"model_type": "gpt2", "n_embd": 1e400, "n_head": 3}', "whole number"),
        ('{"model_type": "llama", "hidden_size": "64"}', "hidden_size is '64'"),
    ],
)
def test_a_bad_config_json_is_refused_with_the_reason(tmp_path, config, message):
    file = tmp_path / "config.json"
    file.write_text(config)
    with pytest.raises(ValueError, match=message):
        stretto.plan(str(file), "perlmutter", gpus=4, batch=4, seq_len=64)


def test_a_file_that_is_absent_or_too_large_is_refused(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        read_architecture(str(tmp_path / "absent.json"), 64)
    large = tmp_path / "large.json"
    large.write_text(" " * (1 << 20) + "{}")
    with pytest.raises(
        ValueError, match=r"large\.json: is larger than 1048576 bytes, the most a model's configuration may have"
    ):
        read_architecture(str(large), 64)


def test_a_bare_name_that_is_also_a_folder_is_a_name(tmp_path, monkeypatch):
    for folder in ("gpt3", "gpt2-small"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)
    assert read_architecture("gpt2-small", 64).name == "gpt2-small"
    with pytest.raises(ValueError, match="no model is named 'gpt3'"):
        read_architecture("gpt3", 64)


@pytest.mark.parametrize(("gpus", "nearest"), [(1000, 1024), (700, 784), (99, 98), (37, 32)])
def test_the_number_of_gpus_that_would_do_is_the_nearest(gpus, nearest):
    with pytest.raises(ValueError, match=f"; {nearest} GPUs would do"):
        stretto.plan("gpt-20b", "perlmutter", gpus=gpus, batch=1024, seq_len=64)
    architecture, distance = read_architecture("gpt-20b", 64), abs(nearest - gpus)
    nearer = range(gpus - distance + 1, gpus + distance)
    assert all(why_impossible(architecture, grid, 1024) for n in nearer for grid in every_grid(n))


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{"micro_batch": 4}, {"shard_sequence": True, "seq_len": 1}, {"batch": 6}], ids=str)
def test_the_number_of_gpus_that_would_do_does_with_the_same_options(options):
    """Of every number up to 40, as plans of all numbers say."""
    model = GPTConfig(layers=1, hidden=24, heads=6, kv_heads=3, vocab=32)
    works, named = set(), {}
    for gpus in range(1, 70):
        try:
            stretto.plan(model, "dgx-h200", **{"gpus": gpus, "batch": 8, "seq_len": 3} | options)
            works.add(gpus)
        except ValueError as error:
            named[gpus] = int(re.search(r"; (\d+) GPUs would do", str(error))[1])
    assert {gpus: number for gpus, number in named.items() if gpus < 40} == {
        gpus: min(works, key=lambda number, gpus=gpus: (abs(number - gpus), -number)) for gpus in named if gpus < 40
    }


def test_if_no_number_of_gpus_would_do_the_error_says_so():
    with pytest.raises(ValueError, match=r"a micro-batch of 3 does not divide the 8 .*; no number of GPUs would do"):
        stretto.plan("gpt-20b", "perlmutter", gpus=8, batch=8, seq_len=64, micro_batch=3)
