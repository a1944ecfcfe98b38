# SPDX-License-Identifier: Apache-2.0
"""Training that starts from a Hugging Face folder: losses, resumption, and folders that are refused."""

import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cli.test_commands import stretto_command
from tests.conftest import Ranks
from tests.train import model_folders, runs
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from stretto.huggingface.public_models import PUBLIC_MODELS
from stretto.train.checkpoint import checkpoint_path
from stretto.train.checkpoint.export import export_folder
from stretto.train.checkpoint.weights import import_safetensors
from stretto.train.config import ConfigError, TrainConfig
from stretto.train.gpt.model_source import FolderSource
from stretto.train.preflight import preflight

MakeRanks = Callable[[int], Ranks]
SINGLE = "model.safetensors"
X2_Z2 = ("grid.x=2", "grid.z=2")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folders.write_folder(tmp_path_factory.mktemp("gpt2") / "model", kind="gpt2", tied=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "tied", "options"),
    [
        ("llama", False, ["train.micro_batch=2"]),
        ("qwen2", True, ["train.reshard=after_forward"]),
        ("gpt2", True, ["train.recompute=full"]),
        ("granite", False, ["train.micro_batch=2"]),  # scales its logits before the loss
        ("opt", True, ["train.micro_batch=2"]),  # has no roles: sharded by blocks
        ("opt", True, ["train.recompute=full"]),
        ("mistral", False, ["train.shard_sequence=true"]),
        ("qwen3", False, ["train.shard_sequence=true", "train.invariant=true"]),
        ("qwen3", True, []),
        ("gpt_neox", False, []),  # transformers renames its head when it reads the file
        ("gpt_oss", False, ["train.micro_batch=2"]),  # attention sinks, experts
        ("gpt_oss", False, ["train.recompute=full", "train.reshard=after_forward"]),
    ],
)
def test_ten_steps_on_a_grid_are_those_of_plain_pytorch(
    ranks: MakeRanks, tmp_path: Path, kind: str, tied: bool, options: list[str]
) -> None:
    print(f"seed {model_folders.SEED}")
    folder = model_folders.write_folder(tmp_path / "model", kind=kind, tied=tied)
    config = model_folders.configure(tmp_path / "run", folder, *X2_Z2, *options)
    preflight(config)
    model_folders.train_on_grid(ranks, config)
    losses, plain = model_folders.train_plainly(config)
    assert [line["loss"] for line in runs.metrics_of(config.out)] == pytest.approx(losses, abs=1e-5)
    assert losses[0] - losses[-1] > 0.05, "the model does not learn: the comparison says little"
    export_folder(config.out, tmp_path / "tuned")
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    torch.testing.assert_close(model_folders.logits_of(tuned), model_folders.logits_of(plain), atol=1e-5, rtol=0)
    before, after = (set(load_file(path / "model.safetensors")) for path in (folder, tmp_path / "tuned"))
    assert after == before


@pytest.mark.exhaustive
def test_both_matrices_of_a_folder_whose_config_ties_them_are_trained_resumed_and_exported(
    ranks: MakeRanks, tmp_path: Path
) -> None:
    folder = model_folders.write_folder(tmp_path / "model", tied=False)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": True}))
    config = model_folders.configure(tmp_path / "run", folder, *X2_Z2, "train.steps=4", "train.checkpoint_every=2")
    preflight(config)
    model_folders.train_on_grid(ranks, config)
    losses, plain = model_folders.train_plainly(config)
    assert [line["loss"] for line in runs.metrics_of(config.out)] == pytest.approx(losses, abs=1e-5)
    shutil.rmtree(checkpoint_path(config.out, 4))
    resumed = model_folders.configure(config.out, folder, "grid.pipe=2", "train.steps=4", "train.resume=latest")
    preflight(resumed)
    model_folders.train_on_grid(ranks, resumed)
    assert [line["loss"] for line in runs.metrics_of(config.out)] == pytest.approx(losses, abs=1e-5)
    export_folder(config.out, tmp_path / "tuned")
    assert load_file(tmp_path / "tuned" / SINGLE).keys() == load_file(folder / SINGLE).keys()
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    torch.testing.assert_close(model_folders.logits_of(tuned), model_folders.logits_of(plain), atol=1e-5, rtol=0)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "dtype"), [("qwen2", torch.bfloat16), ("gpt2", torch.float32)])
def test_an_export_before_any_training_has_the_logits_of_the_folder_in_bits(
    ranks: MakeRanks, tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    """The learning rate is so small that no weight changes: all that is tried are names, shards and dtypes."""
    folder = model_folders.write_folder(tmp_path / "model", kind=kind, tied=True, dtype=dtype)
    config = model_folders.configure(tmp_path / "run", folder, *X2_Z2, "train.steps=1", "train.lr=1e-30")
    model_folders.train_on_grid(ranks, config)
    files = export_folder(config.out, tmp_path / "exported", max_file_bytes=30_000)
    assert "model.safetensors.index.json" in [file.name for file in files]
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, tmp_path / "exported"))
    assert before.dtype == after.dtype == dtype
    assert torch.equal(model_folders.logits_of(before), model_folders.logits_of(after))
    texts = [AutoTokenizer.from_pretrained(path)(runs.TEXT)["input_ids"] for path in (folder, tmp_path / "exported")]
    assert texts[0] == texts[1]
    names = {file.name for file in folder.iterdir()} - {"model.safetensors"}
    assert names <= {file.name for file in files}
    preflight(model_folders.configure(tmp_path / "again", tmp_path / "exported"))


@pytest.fixture(scope="module")
def tuned(pool: Any, gpt2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has ended."""
    out = tmp_path_factory.mktemp("tuned") / "run"
    config = model_folders.configure(out, gpt2, "train.steps=1", "grid.x=2", "train.batch=2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRETTO_CACHE", str(out.parent / "cache"))
        model_folders.train_on_grid(lambda count: Ranks(pool, count), config)
    return out


@pytest.mark.long
def test_the_command_exports_a_folder_in_another_dtype_and_with_the_tokenizer_of_a_copy(
    tuned: Path, gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = shutil.copytree(gpt2, tmp_path / "moved")
    run = shutil.copytree(tuned, tmp_path / "run")
    runs.edit_index(checkpoint_path(run, 1), lambda index: index["model"].update(path="/nowhere/model"))
    command = ("export", run, "--to", tmp_path / "new" / "tuned-1.5", "--dtype", "bfloat16")
    status, text = stretto_command(*command)
    assert (status, "/nowhere/model is not the Hugging Face folder" in text) == (2, True)
    status, text = stretto_command(*command, "--pretrained", moved, "--json")
    assert status == 0, text
    assert {Path(file).name for file in json.loads(text)["files"]} == {path.name for path in gpt2.iterdir()}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["tuned-1.5"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "tuned-1.5").dtype == torch.bfloat16
    status, text = stretto_command(*command, "--pretrained", moved)
    assert (status, "exists and is not an empty folder" in text) == (2, True)
    status, text = stretto_command("export", run, "--to", tmp_path / "weights.safetensors", "--dtype", "float16")
    assert status == 0, text
    assert {weight.dtype for weight in load_file(tmp_path / "weights.safetensors").values()} == {torch.float16}


def test_a_run_that_starts_from_a_folder_is_planned_by_its_config(gpt2: Path, tmp_path: Path) -> None:
    config = model_folders.configure(tmp_path / "run", gpt2, "ranks=4", "grid.x=4")
    runs.write_config(config)
    options = ("--cluster", "perlmutter", "--json")
    status, text = stretto_command("plan", config.out / "config.toml", *options)
    assert status == 0, text
    by_hand = ("--model", gpt2, "--gpus", 4, "--batch", 8, "--seq-len", 16, "--dtype", "fp32")
    assert text == stretto_command("plan", *by_hand, *options)[1]


SMALL: dict[str, Any] = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 16}
SMALL |= {"num_experts": 4, "num_experts_per_tok": 2}


def train_by_name(config: TrainConfig, cache: str) -> None:
    """Train a small model in the place of a public one, which has its name."""
    small = {name: about | SMALL for name, about in PUBLIC_MODELS.items()}
    with mock.patch.dict(PUBLIC_MODELS, small), mock.patch.dict(os.environ, {"STRETTO_CACHE": cache}):
        preflight(config)
        runs.train_quietly(config)


@pytest.mark.exhaustive
def test_a_public_model_is_trained_by_its_name_from_one_seed_on_every_grid_and_is_transformers(
    ranks: MakeRanks, tmp_path: Path
) -> None:
    losses = []
    for number, grid in enumerate([(), X2_Z2]):
        values = {"name": "qwen3-30b-a3b"}
        config = model_folders.configure(tmp_path / f"run{number}", Path("unused"), *grid, "train.steps=3", **values)
        ranks(config.ranks).run(train_by_name, config, os.environ["STRETTO_CACHE"], timeout=120)
        losses.append([line["loss"] for line in runs.metrics_of(config.out)])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert losses[0][0] == pytest.approx(math.log(256), abs=0.2)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    model_folders.write_tokenizer(folder)
    (folder / "config.json").write_text("{}")
    export_folder(tmp_path / "run0", tmp_path / "tuned", pretrained=folder)
    tuned, about = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", output_loading_info=True)
    assert type(tuned).__name__ == "Qwen3MoeForCausalLM"
    assert not any(about[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with pytest.raises(ConfigError, match=r"a public model, and model\.layers=2 would change it"):
        model_folders.configure(tmp_path / "run", Path("unused"), name="llama-3-8b", layers=2)


def test_a_gpt_is_not_exported_as_a_folder(tmp_path: Path, ranks: MakeRanks) -> None:
    config = runs.configure(tmp_path / "run", "train.steps=1")
    ranks(1).run(runs.train_quietly, config)
    with pytest.raises(ValueError, match=r"is not of a Hugging Face model, .*--to gpt\.safetensors would do"):
        export_folder(config.out, tmp_path / "gpt")


@pytest.mark.exhaustive
def test_the_loss_of_conversations_is_the_mean_over_the_assistants_messages_on_any_grid(
    ranks: MakeRanks, tmp_path: Path
) -> None:
    """Each step's batch has another number of targets, and so has each rank's part of it."""
    folder = model_folders.write_folder(tmp_path / "model")
    words = runs.TEXT.split()
    chat = model_folders.write_chat(
        tmp_path / "chat.jsonl", [("Go on:", " ".join(words[start : start + 1 + start % 5])) for start in range(20)]
    )
    options = (f"data.path={chat}", "train.micro_batch=2", "train.steps=3", "train.seq_len=32")
    config = model_folders.configure(tmp_path / "run", folder, *X2_Z2, *options)
    preflight(config)
    model_folders.train_on_grid(ranks, config)
    losses, _ = model_folders.train_plainly(config)
    assert [line["loss"] for line in runs.metrics_of(config.out)] == pytest.approx(losses, abs=1e-5)


def test_a_run_is_resumed_only_with_its_own_model(tuned: Path, tmp_path: Path) -> None:
    resume = ("train.steps=2", "grid.y=2", f"train.resume={checkpoint_path(tuned, 1)}")
    other = model_folders.write_folder(tmp_path / "other", kind="gpt2", tied=True, layer_norm_epsilon=1e-3)
    message = r"is of another model: layer_norm_epsilon of its config\.json is 1e-05 there and"
    with pytest.raises(ValueError, match=message):
        preflight(model_folders.configure(tmp_path / "another", other, *resume))
    with pytest.raises(ValueError, match="is of kind 'huggingface' there and 'gpt' here"):
        preflight(runs.configure(tmp_path / "gpt", *resume))


@pytest.mark.long
def test_sinks_and_experts_resume_on_another_grid_and_are_exported_whole(ranks: MakeRanks, tmp_path: Path) -> None:
    folder = model_folders.write_folder(tmp_path / "model", kind="gpt_oss")
    options = ("train.steps=4", "train.checkpoint_every=2")
    whole = model_folders.configure(tmp_path / "whole", folder, *X2_Z2, *options)
    model_folders.train_on_grid(ranks, whole)
    middle = checkpoint_path(whole.out, 2)
    resumed = model_folders.configure(tmp_path / "resumed", folder, "grid.data=2", *options, f"train.resume={middle}")
    preflight(resumed)
    model_folders.train_on_grid(ranks, resumed)
    losses = [line["loss"] for line in runs.metrics_of(resumed.out)]
    assert losses == pytest.approx([line["loss"] for line in runs.metrics_of(whole.out)[2:]], abs=1e-5)
    for run in (whole, resumed):
        export_folder(run.out, run.out.parent / f"{run.out.name}-exported")
    start, one, other = (
        load_file(tmp_path / name / SINGLE) for name in ("model", "whole-exported", "resumed-exported")
    )
    assert one.keys() == other.keys() == start.keys()
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: name + text)
    for name in (f"model.layers.{layer}.self_attn.sinks" for layer in range(2)):
        assert one[name].shape == (8,)
        assert bool((one[name] != start[name]).all()), "a head's sink was not trained"


def edit_config(folder: Path, **entries: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_weights_of_the_model_without_its_head_and_what_the_class_ignores_are_taken(gpt2: Path, tmp_path: Path) -> None:
    """As GPT-2 was published: no prefix, and masks of attention beside the weights."""
    published = shutil.copytree(gpt2, tmp_path / "model")
    weights = {name.removeprefix("transformer."): weight for name, weight in load_file(gpt2 / SINGLE).items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 32, 32) for layer in range(2)}
    save_file(weights | masks, published / SINGLE)
    model = GPT2LMHeadModel(GPT2Config.from_pretrained(gpt2))
    import_safetensors(model, published / SINGLE)
    expected = GPT2LMHeadModel.from_pretrained(gpt2)
    for (name, weight), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(weight, other), name


def test_dropout_can_be_switched_off(gpt2: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(gpt2, tmp_path / "model")
    edit_config(folder, attn_pdrop=0.1, resid_pdrop=0.2)
    with pytest.raises(ValueError, match=r"config\.attn_pdrop is 0\.1: .*, or set model\.dropout=0"):
        preflight(model_folders.configure(tmp_path / "run", folder))
    preflight(model_folders.configure(tmp_path / "run", folder, "model.dropout=0"))
    model = FolderSource(str(folder), without_dropout=True).build()
    assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {0.0}


def break_weights(folder: Path) -> None:
    weights = load_file(folder / SINGLE)
    del weights["transformer.ln_f.bias"]
    save_file(weights, folder / SINGLE)


@pytest.mark.parametrize(
    ("break_folder", "options", "message"),
    [
        (lambda folder: None, ["train.seq_len=64"], "is made for at most 32 tokens; train.seq_len=32 would do"),
        (lambda folder: None, ["grid.x=3", "train.batch=9"], "x=3 does not divide 8 heads?; .* would do"),
        (lambda folder: None, ["train.shard_sequence=true", "grid.pipe=2"], "2 pipeline stages would divide"),
        (lambda folder: None, ["cluster=perlmuter"], "did you mean 'perlmutter'"),
        (shutil.rmtree, [], "there is no such folder"),
        (lambda folder: (folder / "config.json").unlink(), [], "it has no config.json"),
        (lambda folder: (folder / "config.json").write_text("[]"), [], "it has no text model_type"),
        (lambda folder: edit_config(folder, model_type="vit"), [], "transformers builds no causal language model"),
        (lambda folder: edit_config(folder, vocab_size=299), [], "vocab=299 is less than the 300 ids of tokenizer"),
        (lambda folder: edit_config(folder, n_inner=64), [], "is of another model: transformer.h.0.mlp.c_fc"),
        (break_weights, [], "is of another model: transformer.ln_f.bias is missing"),
        (lambda folder: (folder / SINGLE).rename(folder / "pytorch_model.bin"), [], "pytorch_model.bin is a pickle"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), [], "transformers loads no tokenizer from"),
    ],
)  # fmt: skip
def test_a_folder_that_cannot_be_trained_is_refused_before_anything_starts(
    gpt2: Path, tmp_path: Path, break_folder: Callable[[Path], object], options: list[str], message: str
) -> None:
    folder = shutil.copytree(gpt2, tmp_path / "model")
    break_folder(folder)
    with pytest.raises(ValueError, match=message):
        preflight(model_folders.configure(tmp_path / "run", folder, *options))


def test_without_transformers_the_message_names_what_to_install(
    gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"model\.path is .* pip install 'stretto\[huggingface\]'"):
        preflight(model_folders.configure(tmp_path / "run", gpt2))


@pytest.mark.parametrize("option", ["model.layers=2", "model.name=gpt2-small", "model.dropout=0.1"])
def test_a_folder_and_a_shape_exclude_each_other(gpt2: Path, tmp_path: Path, option: str) -> None:
    with pytest.raises(ConfigError, match=f"whose config.json describes the model, and {option[:10]}"):
        model_folders.configure(tmp_path / "run", gpt2, option)
