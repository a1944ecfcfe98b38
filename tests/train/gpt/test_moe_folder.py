# SPDX-License-Identifier: Apache-2.0
"""Training that starts from a Hugging Face folder of a mixture of experts, and what is exported afterwards."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import Ranks
from tests.parallel import moe_families
from tests.train import model_folders, runs
from tests.train.checkpoint.test_expert_files import SINGLE, edit, quantize_folder
from torch import Tensor
from transformers import AutoModelForCausalLM

from stretto.train.checkpoint import checkpoint_path
from stretto.train.checkpoint.export import export_folder
from stretto.train.checkpoint.metadata import saved_tensors
from stretto.train.preflight import preflight

MakeRanks = Callable[[int], Ranks]
X2_EXPERT2 = ("grid.data=2", "grid.x=2", "grid.expert=2")
NO_CHANGE = ("train.steps=1", "train.lr=1e-30")
IN_THE_DEFAULT_SUITE = "deepseek_v3"
EACH_FAMILY = [
    pytest.param(family, marks=() if family == IN_THE_DEFAULT_SUITE else pytest.mark.exhaustive)
    for family in moe_families.FAMILIES
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))


def write_folder(folder: Path, family: str, **options: Any) -> Path:
    moe_families.write_folder(folder, family, vocab_size=301, **options)
    model_folders.write_tokenizer(folder)
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Parameters and buffers as transformers reads them."""
    return saved_tensors(AutoModelForCausalLM.from_pretrained(folder))


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", [*X2_EXPERT2, "train.micro_batch=2"]),
        pytest.param("qwen3_moe", ["grid.z=2", "grid.expert=2", "train.recompute=full"], marks=pytest.mark.exhaustive),
        pytest.param("qwen2_moe", ["grid.y=2", "train.reshard=after_forward"], marks=pytest.mark.exhaustive),
        pytest.param("deepseek_v3", [*X2_EXPERT2, "train.recompute=communication"], marks=pytest.mark.exhaustive),
        pytest.param("olmoe", ["grid.pipe=2", "grid.data=2", "grid.expert=2"], marks=pytest.mark.exhaustive),
        pytest.param("mixtral", ["grid.x=2", "grid.expert=2", "grid.expert_tensor=fold"], marks=pytest.mark.exhaustive),
        pytest.param("gpt_oss", [*X2_EXPERT2, "train.recompute=communication"], marks=pytest.mark.exhaustive),
        pytest.param("granitemoe", ["grid.z=2", "grid.expert=2", "train.recompute=full"], marks=pytest.mark.exhaustive),
        pytest.param(
            "llama4_text", ["grid.data=2", "grid.expert=2", "train.micro_batch=1"], marks=pytest.mark.exhaustive
        ),
    ],
)
def test_ten_steps_with_divided_experts_are_those_of_plain_pytorch_and_are_exported(
    ranks: MakeRanks, tmp_path: Path, family: str, options: list[str]
) -> None:
    print(f"seed {moe_families.SEED}")
    folder = write_folder(tmp_path / "model", family)
    config = model_folders.configure(tmp_path / "run", folder, *options)
    preflight(config)
    model_folders.train_on_grid(ranks, config)
    losses, plain = model_folders.train_plainly(config)
    assert [line["loss"] for line in runs.metrics_of(config.out)] == pytest.approx(losses, abs=1e-5)
    assert losses[0] - losses[-1] > 0.05, "the model does not learn: the comparison says little"
    export_folder(config.out, tmp_path / "tuned")
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    torch.testing.assert_close(model_folders.logits_of(tuned), model_folders.logits_of(plain), atol=2e-5, rtol=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", EACH_FAMILY)
def test_an_export_before_any_training_has_the_tensors_of_the_folder_in_bits(
    ranks: MakeRanks, tmp_path: Path, family: str
) -> None:
    """The learning rate is so small that no weight changes: all that is tried are names, shards and dtypes."""
    folder = write_folder(tmp_path / "model", family, dtype=torch.bfloat16)
    config = model_folders.configure(tmp_path / "run", folder, *X2_EXPERT2, *NO_CHANGE)
    preflight(config)
    model_folders.train_on_grid(ranks, config)
    files = export_folder(config.out, tmp_path / "exported", max_file_bytes=30_000)
    exported: dict[str, Tensor] = {}
    for file in files:
        exported |= load_file(file) if file.suffix == ".safetensors" else {}
    start = load_file(folder / SINGLE)
    assert exported.keys() == start.keys()
    for name, tensor in start.items():
        assert exported[name].dtype == tensor.dtype, name
        assert torch.equal(exported[name], tensor), name
    before, after = tensors_of(folder), tensors_of(tmp_path / "exported")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    preflight(model_folders.configure(tmp_path / "again", tmp_path / "exported"))


@pytest.mark.long
def test_a_folder_whose_dropout_was_switched_off_is_exported_under_its_own_names(
    ranks: MakeRanks, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "model", "mixtral", attention_dropout=0.1)
    config = model_folders.configure(tmp_path / "run", folder, "grid.z=2", "model.dropout=0", *NO_CHANGE)
    model_folders.train_on_grid(ranks, config)
    export_folder(config.out, tmp_path / "exported")
    assert load_file(tmp_path / "exported" / SINGLE).keys() == load_file(folder / SINGLE).keys()


@pytest.mark.long
def test_a_folder_in_fp8_is_exported_in_bf16_without_entries_for_fp8_or_further_layers(
    ranks: MakeRanks, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "model", "deepseek_v3", dtype=torch.bfloat16, num_nextn_predict_layers=1)
    start = quantize_folder(folder)
    edit(lambda there: there.update({"model.layers.3.eh_proj.weight": torch.ones(2, 2)}))(folder)
    config = model_folders.configure(tmp_path / "run", folder, "grid.z=2", "grid.expert=2", *NO_CHANGE)
    with pytest.warns(UserWarning, match="neither trained nor exported"):
        preflight(config)
    model_folders.train_on_grid(ranks, config)
    export_folder(config.out, tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / SINGLE)
    assert exported.keys() == start.keys()
    for name, tensor in start.items():
        in_fp32 = name.endswith("e_score_correction_bias")
        assert exported[name].dtype == (torch.float32 if in_fp32 else torch.bfloat16)
        assert torch.equal(exported[name], tensor if in_fp32 else tensor.bfloat16()), name
    written = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert "quantization_config" not in written
    assert (written["num_nextn_predict_layers"], written["dtype"]) == (0, "bfloat16")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "exported").dtype == torch.bfloat16


@pytest.mark.exhaustive
def test_a_run_resumes_on_a_grid_that_divides_experts_otherwise(ranks: MakeRanks, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "deepseek_v3")
    steps = ("train.steps=4", "train.checkpoint_every=2")
    whole = model_folders.configure(tmp_path / "whole", folder, *X2_EXPERT2, *steps)
    model_folders.train_on_grid(ranks, whole)
    resume = f"train.resume={checkpoint_path(whole.out, 2)}"
    for name, grid in (("z", ["grid.z=2", "grid.expert=2"]), ("one", []), ("pipe", ["grid.pipe=2"])):
        resumed = model_folders.configure(tmp_path / name, folder, *grid, *steps, resume)
        preflight(resumed)
        model_folders.train_on_grid(ranks, resumed)
        losses = [line["loss"] for line in runs.metrics_of(resumed.out)]
        assert losses == pytest.approx([line["loss"] for line in runs.metrics_of(whole.out)[2:]], abs=1e-5)
        export_folder(resumed.out, tmp_path / f"{name}-exported")
        bias = "model.layers.2.mlp.gate.e_score_correction_bias"
        assert torch.equal(load_file(tmp_path / f"{name}-exported" / SINGLE)[bias], load_file(folder / SINGLE)[bias])


def test_a_load_balancing_loss_of_each_micro_batch_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "mixtral", output_router_logits=True)
    run = tmp_path / "run"
    for options in ([], ["grid.x=2", "train.micro_batch=8"], ["grid.data=2", "grid.expert=2"]):
        preflight(model_folders.configure(run, folder, *options))
    with pytest.raises(
        ValueError, match=r"output_router_logits of .*train\.micro_batch=2: .*train\.micro_batch=4 and no"
    ):
        preflight(model_folders.configure(run, folder, "grid.data=2", "train.micro_batch=2"))
    with pytest.raises(ValueError, match=r"the run has pipeline stages: set it to false there, or take"):
        preflight(model_folders.configure(run, folder, "grid.pipe=2"))


@pytest.mark.long
def test_a_folder_of_another_name_for_the_same_experts_names_those_of_the_export(
    ranks: MakeRanks, tmp_path: Path
) -> None:
    """One that has all experts in one tensor, as transformers' model has them, is exported so."""
    folder = write_folder(tmp_path / "model", "mixtral")
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / SINGLE)
    config = model_folders.configure(tmp_path / "run", folder, *NO_CHANGE)
    model_folders.train_on_grid(ranks, config)
    export_folder(config.out, tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / SINGLE)
    assert all(torch.equal(exported[name], tensor) for name, tensor in load_file(folder / SINGLE).items())
    assert exported["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 96, 32)
    after = tensors_of(tmp_path / "exported")
    assert all(torch.equal(after[name], tensor) for name, tensor in tensors_of(folder).items())
