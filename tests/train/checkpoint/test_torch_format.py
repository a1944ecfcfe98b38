# SPDX-License-Identifier: Apache-2.0
"""Runs that start from what others have written: torch.distributed.checkpoint without Stretto, and Stretto's first."""

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tests.conftest import Ranks
from tests.train import model_folders, runs
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from stretto.models import GPT
from stretto.train.checkpoint import load_checkpoint
from stretto.train.checkpoint.export import export_safetensors
from stretto.train.checkpoint.verification import verify
from stretto.train.checkpoint.weights import import_safetensors
from stretto.train.config import TrainConfig
from stretto.train.gpt.preflight import open_data
from stretto.train.preflight import preflight

MakeRanks = Callable[[int], Ranks]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SAVED, STEPS = 3, 6
OPTIONS = (f"train.steps={STEPS}", "train.schedule=constant", "train.warmup_steps=0", "train.clip=none")
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))


def save(model: nn.Module, optimizer: Any, folder: Path, layout: str) -> None:
    """Write a state in one of the layouts that scripts have."""
    weights, state = get_state_dict(model, optimizer, options=FLAT if layout == "torchtitan" else None)
    states = {
        "model, optim": {"model": weights, "optim": state},
        "app": {"app": {"model": weights, "optimizer": state, "epoch": 1}},
        "torchtitan": {**weights, "optimizer": state, "train_state": {"step": torch.tensor(SAVED)}},
        "weights": {"model": weights},
    }
    dcp.save(states[layout], checkpoint_id=folder)


def train_by_fsdp2(config: TrainConfig, folder: Path, layout: str) -> list[float]:
    """A run of the configuration in FSDP2 on 4 ranks, saved after SAVED steps; the losses of the global batch."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    assert config.model.path is not None
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).train()
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    matrices, vectors = ([p for p in model.parameters() if (p.dim() >= 2) == are] for are in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.train.lr, betas=(0.9, 0.95))
    losses = []
    for step, (tokens, targets) in enumerate(model_folders.batches_of(config, open_data(config)), start=1):
        logits = model(input_ids=tokens.chunk(ranks)[rank]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.chunk(ranks)[rank].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / ranks)
        if step == SAVED:
            save(model, optimizer, folder, layout)
    return losses


@pytest.mark.long
@pytest.mark.parametrize("layout", ["model, optim", "app", "torchtitan"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.sampled(1)
def test_a_run_of_fsdp2_is_continued_by_the_command(layout: str, tied: bool, ranks: MakeRanks, tmp_path: Path) -> None:
    folder, saved = model_folders.write_folder(tmp_path / "model", tied=tied), tmp_path / "saved"
    plain = model_folders.configure(tmp_path / "plain", folder, *OPTIONS)
    expected = ranks(4).run(train_by_fsdp2, plain, saved, layout)[0][SAVED:]
    for number, grid in enumerate([("grid.data=2", "grid.z=2"), ("grid.x=2", "grid.z=2"), ()]):
        resume = (f"train.resume={saved}", *OPTIONS, *grid)
        config = model_folders.configure(tmp_path / f"run{number}", folder, *resume)
        preflight(config)
        model_folders.train_on_grid(ranks, config)
        assert [line["step"] for line in runs.metrics_of(config.out)] == [4, 5, 6]
        assert [line["loss"] for line in runs.metrics_of(config.out)] == pytest.approx(expected, rel=1e-5)


def write_plain(folder: Path, model: nn.Module, layout: str = "weights") -> Path:
    """A folder of torch's with a model, in this process."""
    save(model, torch.optim.AdamW(model.parameters()), folder, layout)
    return folder


def test_weights_alone_are_step_0_of_a_run_and_can_be_exported(ranks: MakeRanks, tmp_path: Path) -> None:
    folder = model_folders.write_folder(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    saved = write_plain(tmp_path / "saved", model)
    config = model_folders.configure(tmp_path / "run", folder, f"train.resume={saved}", *OPTIONS, "train.steps=1")
    preflight(config)
    model_folders.train_on_grid(ranks, config)
    assert runs.metrics_of(config.out)[0]["loss"] == pytest.approx(torch.tensor(301.0).log().item(), abs=1e-5)
    export_safetensors(saved, tmp_path / "weights.safetensors")
    exported = load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(value, exported[name]) for name, value in model.state_dict().items())


def test_another_model_is_refused_by_names_before_anything_starts(tmp_path: Path) -> None:
    folder = model_folders.write_folder(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.norms, model.lm_head = model.model.norm, nn.Linear(32, 300, bias=False)
    del model.model.norm
    saved = write_plain(tmp_path / "saved", model)
    with pytest.raises(ValueError, match="is of another model") as caught:
        preflight(model_folders.configure(tmp_path / "run", folder, f"train.resume={saved}", *OPTIONS))
    message = str(caught.value)
    assert "model.norm.weight is missing; did you mean 'model.norms.weight'" in message
    assert "lm_head.weight has shape [300, 32] there, and the model's is [301, 32]" in message
    assert "model.norms.weight is unexpected" in message


def test_two_matrices_for_one_tied_parameter_are_refused_unless_they_are_equal(tmp_path: Path) -> None:
    folder = model_folders.write_folder(tmp_path / "model", tied=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for name, factor in (("same", 1.0), ("other", 2.0)):
        model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach() * factor)
        saved = write_plain(tmp_path / name, model)
        config = model_folders.configure(tmp_path / f"run-{name}", folder, f"train.resume={saved}", *OPTIONS)
        if factor == 1.0:
            preflight(config)
            continue
        with pytest.raises(
            ValueError, match=r"embed_tokens\.weight and lm_head\.weight with different values.*False in"
        ):
            preflight(config)


def test_state_by_numbers_and_of_other_optimizers_is_refused(tmp_path: Path) -> None:
    folder = model_folders.write_folder(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    state = {"model": model.state_dict()}
    for number, (slots, message) in enumerate(
        [
            ({"0": {"exp_avg": torch.zeros(2)}}, "is keyed by numbers"),
            ({"lm_head.weight": {"sum": torch.zeros(2)}}, "of optimizers' states, those of AdamW and SGD"),
            ({"lm_head.weight": {"momentum_buffer": torch.zeros(301, 32)}}, "was written with sgd"),
        ]
    ):
        saved = tmp_path / f"saved{number}"
        dcp.save(state | {"optim": {"state": slots}}, checkpoint_id=saved, no_dist=True)
        with pytest.raises(ValueError, match=message):
            preflight(model_folders.configure(tmp_path / "run", folder, f"train.resume={saved}", *OPTIONS))


def test_weights_of_any_dtype_stand_beside_other_entries(tmp_path: Path) -> None:
    folder = model_folders.write_folder(tmp_path / "model")
    weights = {name: value.half() for name, value in AutoModelForCausalLM.from_pretrained(folder).state_dict().items()}
    slots = {name: {"exp_avg": value, "exp_avg_sq": value, "step": torch.tensor(2)} for name, value in weights.items()}
    others = {"rng": torch.get_rng_state(), "model.seen": torch.arange(3)}
    saved = tmp_path / "saved"
    dcp.save({"model": weights, "optim": {"state": slots}, **others}, checkpoint_id=saved, no_dist=True)
    export_safetensors(saved, tmp_path / "weights.safetensors", dtype="float32")
    exported = load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(exported[name], value.float()) for name, value in weights.items())
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
    import_safetensors(model, tmp_path / "weights.safetensors")
    assert model.seen.tolist() == [0, 1, 2]
    for number, (dtype, message) in enumerate(
        [
            (torch.float16, "seen is unexpected"),
            (torch.int8, "lm_head.weight is stored as int8"),
            (torch.float8_e4m3fn, "has model.lm_head.weight in float8_e4m3fn"),
        ]
    ):
        saved = tmp_path / f"saved{number}"
        stored = {"lm_head.weight": weights["lm_head.weight"].to(dtype)}
        beside = others if dtype == torch.float16 else {}
        dcp.save({"model": weights | stored, "optim": {"state": slots}, **beside}, checkpoint_id=saved, no_dist=True)
        assert all(not result.damages for result in verify(saved))
        with pytest.raises(ValueError, match=message):
            preflight(model_folders.configure(tmp_path / "run", folder, f"train.resume={saved}", *OPTIONS))


class Opened:
    """Object that runs `Path.touch` when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_an_index_cannot_run_code(tmp_path: Path) -> None:
    folder = model_folders.write_folder(tmp_path / "model")
    saved = write_plain(tmp_path / "saved", AutoModelForCausalLM.from_pretrained(folder))
    content = io.BytesIO()
    pickle.dump({"index": Opened(tmp_path / "ran")}, content)
    (saved / ".metadata").write_bytes(content.getvalue())
    with pytest.raises(ValueError, match=r"is no index of torch.distributed.checkpoint: it has pathlib.*Path"):
        preflight(model_folders.configure(tmp_path / "run", folder, f"train.resume={saved}", *OPTIONS))
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_of_the_first_version_is_resumed(tmp_path: Path) -> None:
    """Written here as version 0.1's files were, so that renaming anything on the disk does not pass unseen."""
    torch.manual_seed(8)
    config, folder = runs.GPT_CONFIG, tmp_path / "step-00000004"
    folder.mkdir()
    wanted = {f"model.{name}": value.detach() for name, value in GPT(config).named_parameters()}
    tensors, start = {}, 0
    with open(folder / "__0_0.distcp", "wb") as file:
        for name, value in wanted.items():
            content = io.BytesIO()
            torch.save(value.clone(), content)
            file.write(content.getvalue())
            box = {"offsets": [0] * value.dim(), "sizes": list(value.shape), "file": "__0_0.distcp"}
            chunk = box | {"start": start, "bytes": len(content.getvalue())}
            tensors[name] = {"shape": list(value.shape), "dtype": "float32", "chunks": [chunk]}
            start += chunk["bytes"]
    model = {
        "layers": 2,
        "hidden": 16,
        "heads": 8,
        "kv_heads": 4,
        "ffn": None,
        "vocab": 61,
        "max_seq_len": 16,
        "positions": "learned",
        "activation": "gelu",
        "norm": "layernorm",
        "bias": True,
        "tie_embeddings": True,
        "dropout": 0.0,
    }
    about = {"format": 1, "step": 4, "torch": "2.11.0", "optimizer": "adamw", "model": model, "run": {}, "data": {}}
    (folder / "metadata.json").write_text(json.dumps(about | {"tensors": tensors}))
    loaded = GPT(config)
    assert load_checkpoint(folder, loaded).step == 4
    assert all(torch.equal(value, wanted[f"model.{name}"]) for name, value in loaded.named_parameters())
