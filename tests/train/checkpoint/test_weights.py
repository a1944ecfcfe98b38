# SPDX-License-Identifier: Apache-2.0
"""Weights as safetensors: out of a checkpoint, into a model on any grid."""

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import Ranks
from tests.train import runs
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from stretto import Grid, parallelize
from stretto.train.checkpoint import checkpoint_path
from stretto.train.checkpoint.export import export_safetensors
from stretto.train.checkpoint.weights import import_safetensors
from stretto.train.optimizer import local_shard

MakeRanks = Callable[[int], Ranks]


@pytest.fixture(scope="module", params=[runs.make_gpt, runs.make_hugging_face_gpt2])
def trained(pool: Any, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model's maker, a run's folder, and the weights that it trained on (x=2, z=2)."""
    out = tmp_path_factory.mktemp("trained")
    return request.param, out, Ranks(pool, 4).run(runs.save_trained, request.param, {"x": 2, "z": 2}, out)[0]


@pytest.mark.long
def test_an_exported_file_has_every_weight_once_under_its_name(trained: Any, tmp_path: Path) -> None:
    _, out, weights = trained
    assert export_safetensors(out, tmp_path / "new" / "model.safetensors") == [tmp_path / "new" / "model.safetensors"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.safetensors"]
    exported = load_file(tmp_path / "new" / "model.safetensors")
    assert exported.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(exported[name], weight), name


def test_a_large_model_goes_to_several_files_with_an_index(trained: Any, tmp_path: Path) -> None:
    _, out, weights = trained
    limit = 5000
    files = export_safetensors(checkpoint_path(out, 2), tmp_path / "model.safetensors", max_file_bytes=limit)
    assert files[-1].name == "model.safetensors.index.json"
    assert len(files) > 3
    index = json.loads(files[-1].read_text())
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in weights.values())
    exported: dict[str, torch.Tensor] = {}
    for file in files[:-1]:
        content = load_file(file)
        assert sum(tensor.nbytes for tensor in content.values()) <= limit or len(content) == 1
        assert all(index["weight_map"][name] == file.name for name in content)
        exported |= content
    assert all(torch.equal(exported[name], weight) for name, weight in weights.items())
    assert exported.keys() == weights.keys()


@pytest.mark.parametrize(
    "grid", [{}, {"x": 2, "y": 2}, pytest.param({"data": 2, "x": 2, "z": 2}, marks=pytest.mark.exhaustive)]
)
def test_every_grid_imports_the_same_weights(
    ranks: MakeRanks, trained: Any, tmp_path: Path, grid: dict[str, int]
) -> None:
    make, out, weights = trained
    files = export_safetensors(out, tmp_path / "model.safetensors", max_file_bytes=5000)
    for imported in ranks(2 ** len(grid)).run(runs.load_weights, make, grid, files[-1]):
        assert all(torch.equal(imported[name], weight) for name, weight in weights.items())


def test_a_plain_model_imports_a_file_of_another_dtype(trained: Any, tmp_path: Path) -> None:
    make, _, weights = trained
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, tmp_path / "model.safetensors")
    model = make()
    import_safetensors(model, tmp_path / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, weights[name].bfloat16().float()), name


@pytest.mark.parametrize("dtype", ["I8", "U8", "BOOL", "I64", "F8_E5M2", "C64", "F4", "F6_E2M3"])
def test_weights_in_a_dtype_of_quantized_ones_are_refused_and_change_nothing(tmp_path: Path, dtype: str) -> None:
    model = runs.make_gpt()
    entries: dict[str, Any] = {}
    stop = 0
    for name, parameter in model.named_parameters():
        kind = dtype if name == "norm.weight" else "F32"
        bits = {"F4": 4, "F6_E2M3": 6, "I64": 64, "C64": 64, "F32": 32}.get(kind, 8)
        start, stop = stop, stop + parameter.numel() * bits // 8
        entries[name] = {"dtype": kind, "shape": list(parameter.shape), "data_offsets": [start, stop]}
    header = json.dumps(entries).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\1" * stop)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match=rf"norm\.weight is stored as {dtype}, but the model needs floating-point"):
        import_safetensors(model, tmp_path / "model.safetensors")
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_buffers_of_integers_are_filled_and_not_by_floats(tmp_path: Path) -> None:
    def make(seen: int) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        model.register_buffer("mask", torch.tensor([seen > 0, False]))
        model[1].num_batches_tracked += seen
        return model

    saved, model, file = make(5).state_dict(), make(0), tmp_path / "model.safetensors"
    save_file(saved, file)
    import_safetensors(model, file)
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    save_file(saved | {"mask": torch.ones(2)}, file)
    with pytest.raises(ValueError, match="mask is stored as F32, but the model needs integer values"):
        import_safetensors(model, file)


def test_a_tied_weight_may_stand_under_its_other_name_or_under_both(tmp_path: Path) -> None:
    source = runs.make_gpt()
    weights = {name: parameter.detach().clone() for name, parameter in source.named_parameters()}
    assert "head.weight" not in weights
    for names in (["head.weight"], ["head.weight", "embedding.weight"]):
        others = {name: weight for name, weight in weights.items() if name != "embedding.weight"}
        save_file(others | {name: weights["embedding.weight"].clone() for name in names}, tmp_path / "m.safetensors")
        model = runs.make_gpt()
        import_safetensors(model, tmp_path / "m.safetensors")
        assert torch.equal(model.get_parameter("head.weight"), weights["embedding.weight"])


def import_twice_tied(folder: Path, config: Any) -> str:
    """Import the file into a model that ties the two matrices and is sharded. Returns the error's message."""
    model = parallelize(LlamaForCausalLM(config), Grid(z=torch.distributed.get_world_size()), dtype=torch.float32)
    before = [local_shard(parameter).detach().clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match="different values") as error:
        import_safetensors(model, folder / "model.safetensors.index.json")
    for parameter, weight in zip(model.parameters(), before, strict=True):
        assert torch.equal(local_shard(parameter), weight)
    return str(error.value)


def test_two_matrices_in_the_file_of_a_tied_configuration_are_both_kept_as_by_transformers(
    ranks: MakeRanks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    source = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))
    source.save_pretrained(tmp_path, max_shard_size="20KB")
    config = LlamaConfig(**sizes, tie_word_embeddings=True)
    model, index = LlamaForCausalLM(config), tmp_path / "model.safetensors.index.json"
    for _ in range(2):
        import_safetensors(model, index)
    assert all(torch.equal(weight, source.get_parameter(name)) for name, weight in model.named_parameters())
    assert "lm_head.weight" in dict(model.named_parameters())
    [line] = [record.getMessage() for record in caplog.records if "not tied" in record.getMessage()]
    assert "model.embed_tokens.weight and lm_head.weight with different values" in line
    model.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == source.state_dict().keys()
    for message in ranks(2).run(import_twice_tied, tmp_path, config):
        assert "model.embed_tokens.weight and lm_head.weight" in message
        assert "load the file before parallelize, or build the model with tie_word_embeddings=False" in message

    # Another tensor that does not fit: nothing is changed. Equal matrices: they remain tied.
    for edit, is_refused in (("model.norm.weight", True), ("lm_head.weight", False)):
        weights = {name: weight.clone() for name, weight in source.state_dict().items()}
        weights[edit] = weights[edit][:8].clone() if is_refused else weights["model.embed_tokens.weight"].clone()
        save_file(weights, tmp_path / "m.safetensors")
        model = LlamaForCausalLM(config)
        with pytest.raises(ValueError, match=r"norm\.weight has shape") if is_refused else nullcontext():
            import_safetensors(model, tmp_path / "m.safetensors")
        assert model.lm_head.weight is model.model.embed_tokens.weight
    # One matrix, and a configuration that does not tie.
    save_file(
        {name: weight for name, weight in weights.items() if name != "lm_head.weight"}, tmp_path / "m.safetensors"
    )
    untied = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))
    advice = r"lm_head\.weight is missing; if it is model\.embed_tokens\.weight, tie_word_embeddings=True .* would do"
    with pytest.raises(ValueError, match=advice):
        import_safetensors(untied, tmp_path / "m.safetensors")


def test_of_several_tied_weights_those_are_untied_that_differ_in_the_file(tmp_path: Path) -> None:
    config = T5Config(vocab_size=61, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=2, tie_word_embeddings=True)
    source = T5ForConditionalGeneration(config)
    shared = source.shared.weight.detach()
    head = torch.randn_like(shared)
    weights = {name: value.detach() for name, value in source.named_parameters() if name != "shared.weight"}
    weights |= {"lm_head.weight": head, "decoder.embed_tokens.weight": head.clone()}
    save_file(weights | {"encoder.embed_tokens.weight": shared}, tmp_path / "model.safetensors")
    model = T5ForConditionalGeneration(config)
    import_safetensors(model, tmp_path / "model.safetensors")
    assert model.shared.weight is model.encoder.embed_tokens.weight
    assert model.lm_head.weight is model.decoder.embed_tokens.weight
    assert torch.equal(model.shared.weight, shared)
    assert torch.equal(model.lm_head.weight, head)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda weights: weights.pop("norm.weight"), r"norm\.weight is missing"),
        (lambda weights: weights.update(extra=torch.zeros(1)), "extra is unexpected"),
        (
            lambda weights: weights.update({"norm.weight": torch.zeros(17)}),
            r"norm\.weight has shape \[17\] there, and the model's is \[16\]",
        ),
    ],
)
def test_a_file_of_another_model_is_refused_and_changes_nothing(tmp_path: Path, change: Any, difference: str) -> None:
    model = runs.make_gpt()
    weights = {name: parameter.detach() + 1 for name, parameter in model.named_parameters()}
    change(weights)
    save_file(weights, tmp_path / "model.safetensors")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match=rf"is of another model: {difference}"):
        import_safetensors(model, tmp_path / "model.safetensors")
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", b"\xff" * 64])
def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read as safetensors"):
        import_safetensors(runs.make_gpt(), tmp_path / "model.safetensors")


def test_an_index_is_checked_and_leads_to_no_other_folder(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("[]")
    with pytest.raises(ValueError, match="is not an index of safetensors files"):
        import_safetensors(runs.make_gpt(), index)
    os.truncate(index, (1 << 26) + 1)
    with pytest.raises(
        ValueError, match="is larger than 67108864 bytes, the most an index of safetensors files may have"
    ):
        import_safetensors(runs.make_gpt(), index)
    index.write_text('{"weight_map": {"norm.weight": "/etc/passwd"}}')
    with pytest.raises(ValueError, match=rf"{tmp_path}/passwd cannot be read"):
        import_safetensors(runs.make_gpt(), index)


def test_a_file_of_an_index_that_is_a_pipe_is_refused_and_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"norm.weight": "pipe.safetensors"}}')
    with pytest.raises(ValueError, match=r"pipe\.safetensors cannot be read as safetensors: it is not a regular file"):
        import_safetensors(runs.make_gpt(), index)


def test_a_name_that_is_no_safetensors_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.bin does not end in \.safetensors; .*model\.safetensors would do"):
        export_safetensors(tmp_path, tmp_path / "model.bin")
