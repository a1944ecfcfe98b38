# SPDX-License-Identifier: Apache-2.0
"""Files of mixtures of experts: a tensor for each expert there, and one parameter for all of them in the model."""

import json
import warnings
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.conftest import Ranks
from tests.parallel import moe_families
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from stretto.parallel import Grid, gather, parallelize
from stretto.train.checkpoint.file_tensors import PlainTensor, StackedTensor, with_scales
from stretto.train.checkpoint.metadata import saved_tensors
from stretto.train.checkpoint.weights import check_safetensors, import_safetensors
from stretto.train.gpt.model_source import FolderSource

SINGLE = "model.safetensors"


def read(folder: Path) -> dict[str, Tensor]:
    """Parameters and buffers of the folder's model, as Stretto reads them into a model without values."""
    model = FolderSource(str(folder)).build().to_empty(device="cpu")
    with torch.no_grad():
        for tensor in saved_tensors(model).values():
            tensor.fill_(torch.nan)
    import_safetensors(model, folder / SINGLE)
    return saved_tensors(model)


# transformers makes no causal language model of a folder of Mistral 4.
OTHERS = [pytest.param(each, marks=pytest.mark.exhaustive) for each in moe_families.BY_BLOCKS if each != "mistral4"]


@pytest.mark.parametrize("family", [*moe_families.FAMILIES, *OTHERS])
def test_files_of_transformers_are_read_as_by_transformers(tmp_path: Path, family: str) -> None:
    print(f"seed {moe_families.SEED}")
    moe_families.write_folder(tmp_path, family, tie_word_embeddings=False)
    there = load_file(tmp_path / SINGLE)
    is_stacked = family == "gpt_oss" or family in moe_families.BY_BLOCKS
    assert is_stacked or any(".experts.3." in name for name in there), "each expert has tensors of its own"
    expected = saved_tensors(AutoModelForCausalLM.from_pretrained(tmp_path))
    found = read(tmp_path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def save_from_grid(family: str, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = parallelize(moe_families.build(family, tie_word_embeddings=False), Grid(z=2, expert=2))
    whole = {name: gather(tensor).detach().clone() for name, tensor in model.state_dict().items()}
    if torch.distributed.get_rank() == 0:
        model.save_pretrained(folder, state_dict=whole)


@pytest.mark.parametrize("family", [pytest.param("gpt_oss", marks=pytest.mark.long), *OTHERS])
def test_gathered_experts_are_saved_as_transformers_saves_them(ranks: Ranks, tmp_path: Path, family: str) -> None:
    moe_families.write_folder(tmp_path / "plain", family, tie_word_embeddings=False)
    ranks(2).run(save_from_grid, family, tmp_path / "grid")
    expected, found = (load_file(tmp_path / folder / SINGLE) for folder in ("plain", "grid"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_files_that_have_all_experts_in_one_tensor_are_read_too(tmp_path: Path) -> None:
    model: Any = moe_families.write_folder(tmp_path, "mixtral")
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, tmp_path / SINGLE)
    found = read(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in saved_tensors(model).items())


def edit(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def edit_folder(folder: Path) -> None:
        tensors = load_file(folder / SINGLE)
        change(tensors)
        save_file(tensors, folder / SINGLE)

    return edit_folder


MOE = "model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda there: there.pop(f"{MOE}.2.up_proj.weight"), rf"{MOE}\.2\.up_proj\.weight is missing"),
        (
            lambda there: [there.pop(f"{MOE}.{expert}.up_proj.weight") for expert in range(8)],
            rf"{MOE}\.gate_up_proj is stacked from several tensors of each expert, and some of them are missing",
        ),
        (
            lambda there: there.update({f"{MOE}.8.down_proj.weight": torch.zeros(32, 16)}),
            rf"{MOE}\.8\.down_proj\.weight is unexpected: {MOE}\.down_proj has 8 experts",
        ),
        (
            lambda there: there.update({f"{MOE}.1.down_proj.weight": torch.zeros(32, 8)}),
            rf"{MOE}\.1\.down_proj\.weight has shape \[32, 8\] there, and {MOE}\.0\.down_proj\.weight has \[32, 16\]",
        ),
        (
            lambda there: there.update({f"{MOE}.0.side_proj.weight": torch.zeros(32, 8)}),
            rf"{MOE}\.0\.side_proj\.weight is unexpected",
        ),
        (
            lambda there: there.update({"model.layers.1.mlp.gate.e_score_correction_bias": torch.zeros(4)}),
            r"e_score_correction_bias has shape \[4\] there, and the model's is \[8\]",
        ),
    ],
)
def test_a_file_with_other_experts_than_the_model_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    model = moe_families.write_folder(tmp_path, "deepseek_v3")
    edit(change)(tmp_path)
    with pytest.raises(ValueError, match=message):
        check_safetensors(model, tmp_path / SINGLE)


def test_a_file_without_a_buffer_is_read_with_a_warning(tmp_path: Path) -> None:
    model = moe_families.write_folder(tmp_path, "deepseek_v3")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    before = saved_tensors(model)[name].clone()
    edit(lambda there: there.pop(name))(tmp_path)
    with pytest.warns(UserWarning, match=rf"has no {name}: the model's initial values stay"):
        import_safetensors(model, tmp_path / SINGLE)
    assert torch.equal(saved_tensors(model)[name], before)


def test_layers_that_predict_further_tokens_are_dropped_with_a_warning_that_names_them(tmp_path: Path) -> None:
    model = moe_families.write_folder(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    expected = {name: tensor.clone() for name, tensor in saved_tensors(model).items()}
    names = ("eh_proj.weight", "mlp.experts.0.gate_proj.weight", "self_attn.o_proj.weight")
    edit(lambda there: there.update({f"model.layers.3.{name}": torch.ones(2, 2) for name in names}))(tmp_path)
    with pytest.warns(UserWarning, match=r"model\.layers\.3\.\S+ and 2 other tensors.*dropped, neither trained nor"):
        found = read(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    edit(lambda there: there.update({"model.layers.4.eh_proj.weight": torch.ones(2, 2)}))(tmp_path)
    with pytest.raises(ValueError, match=r"model\.layers\.4\.eh_proj\.weight is unexpected"):
        check_safetensors(model, tmp_path / SINGLE)


def test_a_box_of_stacked_experts_is_read_from_the_tensors_that_it_crosses(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(moe_families.SEED)
    tensors = {f"{expert}.{part}": torch.randn(6, 5, generator=generator) for expert in range(4) for part in range(2)}
    whole = torch.stack([torch.cat([tensors[f"{expert}.{part}"] for part in range(2)]) for expert in range(4)])
    save_file(tensors, tmp_path / SINGLE)
    with safe_open(tmp_path / SINGLE, framework="pt") as opened:
        one = {name: PlainTensor(opened.get_slice(name)) for name in tensors}
        stacked = StackedTensor(tuple((one[f"{expert}.0"], one[f"{expert}.1"]) for expert in range(4)))
        assert stacked.shape == (4, 12, 5)
        for box in ((slice(0, 4), slice(0, 12), slice(0, 5)), (slice(1, 3), slice(3, 9), slice(2, 5)),
                    (slice(2, 3), slice(6, 8), slice(0, 1)), (slice(3, 4), slice(0, 6), slice(4, 5))):  # fmt: skip
            values = torch.full_like(whole[box], torch.nan, dtype=torch.float64)
            stacked.copy_into(values, [each.start for each in box])
            assert torch.equal(values, whole[box].double())


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in fp8 and the scales of its blocks of 128 x 128, as DeepSeek-V3's files have them."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    scales, values = torch.empty(rows, columns), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(rows):
        for column in range(columns):
            box = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            scales[row, column] = weight[box].abs().max() / 448
            values[box] = (weight[box] / scales[row, column]).to(torch.float8_e4m3fn)
    return values, scales


def dequantize(values: Tensor, scales: Tensor) -> Tensor:
    """Number by number: the value times its block's scale."""
    whole = torch.empty(values.shape)
    for row in range(values.shape[0]):
        for block in range(scales.shape[1]):
            columns = slice(128 * block, 128 * block + 128)
            whole[row, columns] = values[row, columns].float() * scales[row // 128, block]
    return whole


def test_any_box_of_an_fp8_matrix_is_scaled_by_its_blocks(tmp_path: Path) -> None:
    print(f"seed {moe_families.SEED}")
    generator = torch.Generator().manual_seed(moe_families.SEED)
    blocks = torch.randn(3, 2, generator=generator).repeat_interleave(128, 0).repeat_interleave(128, 1)[:300, :200]
    values, scales = quantize(torch.randn(300, 200, generator=generator) * blocks.exp())
    whole = dequantize(values, scales)
    save_file({"a.weight": values, "a.weight_scale_inv": scales}, tmp_path / SINGLE)
    with safe_open(tmp_path / SINGLE, framework="pt") as opened:
        tensors = with_scales(
            {name: PlainTensor(opened.get_slice(name)) for name in ("a.weight_scale_inv", "a.weight")}
        )
        assert [*tensors] == ["a.weight"]
        for rows, columns in ((range(300), range(200)), (range(100, 200), range(100, 130)), (range(256, 300), [199])):
            found = torch.full((len(rows), len(columns)), torch.nan)
            tensors["a.weight"].copy_into(found, (rows[0], columns[0]))
            assert torch.equal(found, whole[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1])


QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def quantize_folder(folder: Path) -> dict[str, Tensor]:
    """Have the folder's linears be in fp8; returns the weights of its file dequantized, by the file's names."""
    there = load_file(folder / SINGLE)
    new: dict[str, Tensor] = {}
    for name in [name for name in there if name.endswith("_proj.weight") or "proj_with_mqa" in name]:
        new[name], new[f"{name}_scale_inv"] = quantize(there[name].float())
        there[name] = dequantize(new[name], new[f"{name}_scale_inv"])
    save_file({**there, **new}, folder / SINGLE)
    edit_config(folder, quantization_config=QUANTIZATION)
    return there


def edit_config(folder: Path, **entries: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_experts_in_fp8_are_dequantized_as_they_are_read(tmp_path: Path) -> None:
    moe_families.write_folder(tmp_path, "deepseek_v3", hidden_size=160, moe_intermediate_size=136, dtype=torch.bfloat16)
    dequantized = quantize_folder(tmp_path)
    found = read(tmp_path)
    gate, up = (dequantized[f"{MOE}.5.{part}_proj.weight"] for part in ("gate", "up"))
    assert torch.equal(found[f"{MOE}.gate_up_proj"][5], torch.cat([gate, up]))
    assert torch.equal(found[f"{MOE}.down_proj"][5], dequantized[f"{MOE}.5.down_proj.weight"])
    kv = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    assert torch.equal(found[kv], dequantized[kv])


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"quantized by 'gptq', which is not read; fp8 with weight_block_size="),
        ({"quant_method": "fp8"}, r"by 'fp8' with weight_block_size=None, which is not read"),
        (QUANTIZATION | {"weight_block_size": [64, 64]}, r"weight_block_size=\[64, 64\], which is not read"),
    ],
)
def test_other_quantized_folders_are_refused(tmp_path: Path, quantization: dict[str, Any], message: str) -> None:
    moe_families.write_folder(tmp_path, "deepseek_v3")
    edit_config(tmp_path, quantization_config=quantization)
    with pytest.raises(ValueError, match=message):
        FolderSource(str(tmp_path))


def test_fp8_without_scales_and_with_those_of_other_blocks_is_refused(tmp_path: Path) -> None:
    model = moe_families.write_folder(tmp_path, "deepseek_v3", dtype=torch.bfloat16)
    quantize_folder(tmp_path)
    name = f"{MOE}.0.gate_proj.weight_scale_inv"
    edit(lambda there: there.update({name: torch.ones(2, 2)}))(tmp_path)
    with pytest.raises(ValueError, match=rf"{name} of shape \[1, 1\], one for each block .* some of shape \[2, 2\]"):
        check_safetensors(model, tmp_path / SINGLE)
    edit(lambda there: there.pop(name))(tmp_path)
    with pytest.raises(ValueError, match=rf"{name} of shape \[1, 1\], .* there are none"):
        check_safetensors(model, tmp_path / SINGLE)


def test_a_bias_of_experts_scores_is_saved_and_loaded_with_a_checkpoint(tmp_path: Path) -> None:
    """DeepSeek-V3 has it as a buffer, which no gradient changes."""
    from stretto.train.checkpoint import training_state

    model = moe_families.build("deepseek_v3")
    state = training_state(model, None)
    assert "model.model.layers.1.mlp.gate.e_score_correction_bias" in state
    assert not any("inv_freq" in name for name in state), "what transformers computes anew is not saved"


def read_on_grid(folder: Path, sizes: dict[str, int]) -> tuple[dict[str, Tensor], int, int]:
    """The whole tensors, how many numbers of the files this rank has read, and how many it holds."""
    grid = Grid(**sizes)
    model = parallelize(FolderSource(str(folder)).build(), grid, seed=None)
    count = 0
    read = PlainTensor.read

    def counting(self: PlainTensor, offsets: Any, box: Any) -> Tensor:
        nonlocal count
        values = read(self, offsets, box)
        count += values.numel()
        return values

    with mock.patch.object(PlainTensor, "read", counting):
        import_safetensors(model, folder / SINGLE)
    held = saved_tensors(model)
    local = sum((each.to_local() if isinstance(each, DTensor) else each).numel() for each in held.values())
    return {name: gather(tensor).detach() for name, tensor in held.items()}, count, local


@pytest.mark.long
@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 2, "x": 2, "expert": 2},
        pytest.param({"x": 2, "y": 2, "z": 2, "expert": 2}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_rank_reads_what_it_holds_of_experts_and_nothing_else(
    ranks: Callable[[int], Ranks], tmp_path: Path, sizes: dict[str, int]
) -> None:
    expected = saved_tensors(moe_families.write_folder(tmp_path, "deepseek_v3"))
    whole = sum(tensor.numel() for tensor in expected.values())
    for found, count, local in ranks(prod(sizes.values()) // 2).run(read_on_grid, tmp_path, sizes):
        assert count == local < 0.6 * whole
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
