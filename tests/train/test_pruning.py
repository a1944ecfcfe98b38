# SPDX-License-Identifier: Apache-2.0
"""Pruned models: masks on any grid, training beside dense training under the mask, checkpoints, and errors."""

from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.differences import largest
from tests.train.pruned import (
    ROWS,
    SHAPE,
    Bank,
    count_launches,
    odd_masks,
    train_bank,
    train_bank_by_kernels,
    train_both,
    train_convolutions,
)
from tests.train.runs import metrics_of
from tests.train.test_stored_optimizer import GRIDS_OF_8, configure, differences, run_all, weights_of
from torch import nn

from stretto.execution import StateOptions
from stretto.models import GPT, GPTConfig
from stretto.optim.sparse import EarlyBird, Masks, WeightMask
from stretto.parallel import Grid, Pipeline, parallelize
from stretto.parallel.layout import gather, layout_of, place_like
from stretto.train.checkpoint import checkpoint_path
from stretto.train.checkpoint.metadata import read_metadata
from stretto.train.pruning import prunable, prune
from stretto.train.stored_optimizer import StoredOptimizer, adamw_update

PIPELINES_OF_8 = [
    {"pipe": pipe, "data": data, "x": x, "y": y, "z": z}
    for pipe, data, x, y, z in product((2, 4, 8), *[(1, 2, 4)] * 4)
    if pipe * data * x * y * z == 8
]

# In bits where two ranks at most are summed; in fp32 with SGD elsewhere, which turns no noise into steps.
CASES: dict[str, dict[str, Any]] = {
    "odd masks": {"odd": True},
    "host, split": {"location": "host", "odd": True, "index": "int32"},
    "host, whole": {"location": "host", "splits": False, "optimizer": "sgd", "recompute": "full"},
    "tiles": {"optimizer": "tiled", "accumulates_fp32": True},
    "fp32": {"dtype": "float32", "optimizer": "sgd", "odd": True},
    "fp16 that overflows": {"dtype": "float16", "optimizer": "sgd"},
    "freed weights": {"parallel": {"reshard": "after_forward"}, "recompute": "every:2"},
}
NEAR: dict[str, dict[str, Any]] = {
    "clipped": {"dtype": "float32", "optimizer": "sgd", "clip": 0.5, "odd": True},
    "step on the host": {"location": "host", "step_on": "host", "dtype": "float32", "optimizer": "sgd"},
}


def compare_cases(sizes: dict[str, int], names: list[str]) -> dict[str, Any]:
    return {name: train_both(sizes, (CASES | NEAR)[name]) for name in names}


def check_cases(ranks: Any, sizes: dict[str, int], names: list[str]) -> None:
    sums_of_two = max(sizes.get("data", 1) * sizes.get("z", 1) * sizes.get(axis, 1) for axis in "xy") <= 2
    found = ranks(prod(sizes.values())).run(compare_cases, sizes, names, timeout=600)
    for name in names:
        limit = 0 if sums_of_two and name in CASES else 1e-6
        for of_rank in found:
            assert largest(of_rank[name]["differences"].values()) <= limit, (name, of_rank[name]["differences"])
        kept = [sum(of_rank[name][run]["numbers"] for of_rank in found) for run in ("pruned", "dense")]
        assert kept[0] < 0.7 * kept[1]  # with gaps, to multiples of 64


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ({"z": 2}, ["odd masks", "clipped"]),
        ({"pipe": 2, "z": 2}, ["odd masks"]),
        pytest.param({"data": 2}, ["host, split", "tiles"], marks=pytest.mark.exhaustive),
        pytest.param({"x": 2}, [*CASES, *NEAR], marks=pytest.mark.exhaustive),
        pytest.param({"y": 2}, [*CASES, *NEAR], marks=pytest.mark.exhaustive),
        pytest.param({"z": 2}, [*CASES, *NEAR], marks=pytest.mark.exhaustive),
        pytest.param({"data": 2}, [*CASES, *NEAR], marks=pytest.mark.exhaustive),
    ],
)
def test_pruned_training_is_dense_training_under_the_mask(ranks: Any, sizes: dict[str, int], names: list[str]) -> None:
    check_cases(ranks, sizes, names)


@pytest.mark.exhaustive
@pytest.mark.parametrize("grid", [*GRIDS_OF_8, *PIPELINES_OF_8], ids=lambda grid: "-".join(map(str, grid.values())))
def test_pruned_training_is_dense_training_under_the_mask_on_8_ranks(ranks: Any, grid: dict[str, int]) -> None:
    check_cases(ranks, grid, ["fp32", *NEAR])


@pytest.mark.long
@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 2, "z": 2},
        *(pytest.param(sizes, marks=pytest.mark.exhaustive) for sizes in ({"z": 8}, {"data": 4, "z": 2}, {"data": 8})),
    ],
)
def test_integer_gradients_give_the_bits_on_any_ranks_and_z_carries_what_is_left(
    ranks: Any, sizes: dict[str, int]
) -> None:
    """A model without roles, of whose third layer all that is left is on z's first rank."""
    found = ranks(prod(sizes.values())).run(train_bank, sizes)
    for rank in found:
        assert rank["equal"]
        dense, pruned = rank["sent"]
        if sizes.get("z") == 2:  # the messages of these small layers are shorter than z's rounding otherwise
            assert pruned["z"] < 0.3 * dense["z"]
    shares = [rank["shares"] for rank in found]
    assert all(max(of_layer) - min(of_layer) <= 2 * sizes.get("z", 1) for of_layer in zip(*shares, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("sizes", [{"z": 2}, {"data": 2}])
def test_convolutions_are_pruned_as_linears_are(ranks: Any, sizes: dict[str, int]) -> None:
    for found in ranks(2).run(train_convolutions, sizes):
        assert max(found["differences"].values()) == 0, found["differences"]
        assert list(found["left"]) == ["0.weight", "2.weight", "4.weight", "6.weight"]
        assert all(left == pytest.approx(0.25, abs=0.01) for left in found["left"].values())


def draw(sizes: dict[str, int], scope: str, **shape: int) -> dict[str, torch.Tensor]:
    """Whole masks of a GPT with tied and equal numbers, at sparsity 0.7."""
    model = _make_model(sizes, **shape)
    masks = prune(model, 0.7, scope=scope, exclude=["blocks.1.mlp.*"])  # type: ignore[arg-type]
    assert masks is not None
    found = {}
    for name, parameter in model.named_parameters():
        if name in masks.masks:
            own = masks.masks[name].unpacked().float()
            found[name] = gather(place_like(own, parameter), layout_of(parameter))  # type: ignore[arg-type]
            shard = parameter.to_local()  # type: ignore[attr-defined]
            assert torch.equal(shard != 0, (shard != 0) & (own != 0))
    return found


def _make_model(sizes: dict[str, int], **shape: int) -> nn.Module:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SHAPE, **shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(50).round_().div_(50)  # many equal magnitudes
    return parallelize(model, Grid(**sizes, device="cpu"))


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_masks_are_the_same_on_every_grid(ranks: Any, scope: str) -> None:
    alone = ranks(1).run(draw, {}, scope)[0]
    assert alone.keys() == {
        f"blocks.{block}.{name}.weight"
        for block in range(2)
        for name in ("attention.qkv", "attention.out", *(("mlp.up", "mlp.down") if block == 0 else ()))
    }
    left, size = sum(float(mask.sum()) for mask in alone.values()), sum(mask.numel() for mask in alone.values())
    assert abs(left - 0.3 * size) <= (0.5 if scope == "global" else len(alone))
    for others in ranks(4).run(draw, {"x": 2, "z": 2}, scope):
        assert all(torch.equal(others[name], alone[name]) for name in alone)


def test_experts_that_fewer_ranks_hold_count_as_often_in_global_masks(ranks: Any) -> None:
    (alone,) = ranks(1).run(draw, {}, "global", num_experts=4)
    assert any("experts" in name for name in alone)
    for others in ranks(4).run(draw, {"data": 4, "expert": 2}, "global", num_experts=4):
        assert all(torch.equal(others[name], alone[name]) for name in alone)


OPTIONS = ["train.optimizer_state=device", "train.schedule=constant", "train.dtype=fp32", "train.batch=16"]
PRUNED = [*OPTIONS, "train.sparsity=0.75"]


@pytest.mark.exhaustive
def test_a_killed_run_resumes_with_its_masks_on_another_grid_and_elsewhere(ranks: Any, tmp_path: Path) -> None:
    """Two steps on z=2, two in a pipeline with state on the host, against four on one rank; averages, too."""
    common = [*PRUNED, "train.ema=0.5", "train.evaluate_every=2", "data.evaluation_sequences=4"]
    ranks(1).run(run_all, str(tmp_path), {}, {"whole": common}, timeout=300)
    ranks(2).run(run_all, str(tmp_path), {"z": 2}, {"parts": [*common, "train.steps=2"]}, timeout=300)
    end = [*common, "train.optimizer_state=host", "train.resume=latest"]
    ranks(2).run(run_all, str(tmp_path), {"pipe": 2}, {"parts": end}, timeout=300)
    whole = weights_of(tmp_path / "whole")
    found = differences(weights_of(tmp_path / "parts"), whole)
    assert largest(found.values(), default=0) <= 2e-5, found  # without the moments it would be 1e-2
    losses = [[line.get("evaluation_loss") for line in metrics_of(tmp_path / name)] for name in ("parts", "whole")]
    assert losses[0][1::2] == pytest.approx(losses[1][1::2], rel=1e-5)
    for name, mask in whole.items():
        if name.startswith("mask."):
            assert int(mask.sum()) == mask.numel() // 4
            for of in ("model.", "optimizer."):
                keys = [key for key in whole if key.startswith(of + name.removeprefix("mask."))]
                assert all(not whole[key][mask == 0].any() for key in keys if whole[key].shape == mask.shape)


@pytest.mark.exhaustive
def test_dense_and_pruned_runs_resume_each_other(ranks: Any, tmp_path: Path) -> None:
    """Pruned after two steps, of the same run or of a dense one that ended there; and dense again after it."""
    late = [*PRUNED, "train.prune_at=2"]
    runs = {
        "late": late,
        "parts": [*OPTIONS, "train.steps=2"],
        "dense": [*PRUNED, "train.steps=2"],
        "early": [*late, "train.prune_at=1", "train.prune_method=early-bird", "train.lr=1e-6", "train.steps=6"],
    }
    ranks(2).run(run_all, str(tmp_path), {"z": 2}, runs, timeout=300)
    more = {"parts": [*late, "train.resume=latest"], "dense": [*OPTIONS, "train.resume=latest"]}
    ranks(2).run(run_all, str(tmp_path), {"z": 2}, more, timeout=300)
    assert not differences(weights_of(tmp_path / "parts"), weights_of(tmp_path / "late"))
    name = "model.blocks.0.mlp.up.weight"
    assert (weights_of(tmp_path / "dense")[name] == 0).float().mean() < 0.01
    assert (weights_of(tmp_path / "late")[name] == 0).float().mean() >= 0.75
    other = [*OPTIONS, "train.sparsity=0.5", "train.resume=latest", "train.steps=6"]
    with pytest.raises(ValueError, match=r"pruned with a sparsity of 0.75, and train.sparsity is 0.5; 0.75 would do"):
        ranks(2).run(run_all, str(tmp_path), {"z": 2}, {"late": other}, timeout=300)
    assert len(metrics_of(tmp_path / "early")) == 6
    assert "training.sparsity" in read_metadata(checkpoint_path(tmp_path / "early", 6)).tensors


def give_other_masks(kind: str) -> str:
    grid = Grid(data=2, device="cpu")
    model = parallelize(GPT(GPTConfig(**SHAPE)), grid)
    masks = prune(model, 0.5)
    assert masks is not None
    name = "blocks.0.mlp.up.weight"
    if kind == "differing" and grid.coordinate("data") == 1:
        other = masks.masks[name].unpacked().flatten().roll(1).view(masks.masks[name].shape)
        masks = Masks({**masks.masks, name: WeightMask.of(other)}, 0.5)
    elif kind == "missing" and grid.coordinate("data") == 1:
        masks = Masks({key: mask for key, mask in masks.masks.items() if key != name}, 0.5)
    elif kind == "shape" or (kind == "one" and grid.coordinate("data") == 1):
        masks = Masks({name: WeightMask.of(torch.ones(3, 3))}, 0.5)
    elif kind == "name":
        masks = Masks({"nothing": WeightMask.of(torch.ones(3, 3))}, 0.5)
    try:
        StoredOptimizer(model, grid, adamw_update(betas=(0.9, 0.95), eps=1e-8), name="adamw", masks=masks)
    except ValueError as error:
        return str(error)
    return ""


def test_a_micro_batchs_gradients_are_compressed_by_its_end(ranks: Any) -> None:
    """By one launch, after one that notes their addresses: a graph of it may be replayed."""
    assert ranks(1).run(count_launches) == [[2, 4]]


@pytest.mark.long
@pytest.mark.parametrize("sizes", [{"z": 2}, {"data": 2}])
def test_kernels_give_the_bits_too(interpret: Any, sizes: dict[str, int]) -> None:
    assert all(found["equal"] for found in interpret(2, train_bank_by_kernels, sizes))


@pytest.mark.long
def test_masks_that_fit_no_replica_or_no_parameter_are_refused_on_all_ranks(ranks: Any) -> None:
    messages = {
        "differing": "the masks of blocks.0.mlp.up.weight differ between ranks that hold the same shard",
        "shape": "the mask of blocks.0.mlp.up.weight is [3, 3], but this rank's shard is [128, 32]",
        "name": "a mask is of 'nothing', which is no trained parameter",
    }
    for kind, message in messages.items():
        assert all(message in found for found in ranks(2).run(give_other_masks, kind))
    assert all(messages["differing"] in found for found in ranks(2).run(give_other_masks, "missing"))
    of_others, own = ranks(2).run(give_other_masks, "one")
    assert of_others == "the masks of other ranks do not fit: their errors say which"
    assert messages["shape"] in own


def prune_beside_a_frozen_stage() -> tuple[list[str], list[int], float]:
    """Of two stages, the first of which is frozen: masks, what the store of this rank keeps, and a step's norm."""
    grid = Grid(pipe=2, device="cpu")
    torch.manual_seed(0)
    whole = GPT(GPTConfig(**SHAPE))
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_("blocks.1." in name)
    model = parallelize(whole, grid)
    masks = prune(model, 0.75)
    assert masks is not None
    stored = StoredOptimizer(model, grid, adamw_update(betas=(0.9, 0.95), eps=1e-8), name="adamw", masks=masks)
    tokens = torch.arange(ROWS * 8).view(ROWS, 8) % 64
    Pipeline(model, grid, micro_batch_size=8).step(tokens, tokens)
    if grid.coordinate("pipe"):  # the other stage has no gradients
        with pytest.raises(ValueError, match=r"prune of adamw between a backward pass .* call step\(\), or zero_grad"):
            stored.prune(masks)
    norm = float(stored.step(1e-3))
    return sorted(masks.masks), [place.size for place in stored.store.layout.places], norm


def test_a_stage_without_trained_parameters_takes_part(ranks: Any) -> None:
    first, last = ranks(2).run(prune_beside_a_frozen_stage)
    assert first[:2] == ([], [])
    assert first[2] == last[2] > 0
    assert len(last[0]) == 4
    assert min(last[1]) >= 32


def step_after(change: str) -> str:
    """The error of a step after the weights of a pruned model were changed; and what is left after one, if none."""
    grid = Grid(device="cpu")
    model = parallelize(GPT(GPTConfig(**SHAPE)), grid)
    make = adamw_update(betas=(0.9, 0.95), eps=1e-8)
    stored = StoredOptimizer(model, grid, make, name="adamw", options=StateOptions("device"), masks=prune(model, 0.5))
    weight = model.get_parameter("blocks.0.mlp.up.weight")
    if change == "loaded":
        model.load_state_dict({name: torch.ones_like(each) for name, each in model.state_dict().items()})
    elif (masks := prune(model, 0.75, weights=stored.weight)) is not None and change == "pruned in both":
        stored.prune(masks)
    tokens = torch.arange(64).view(8, 8)
    model(tokens, tokens, 64).backward()
    try:
        stored.step(1e-3)
    except ValueError as error:
        return str(error)
    return f"{float((weight != 0).float().mean()):g} is left"


def test_weights_that_the_optimizer_does_not_know_of_are_refused(ranks: Any) -> None:
    for change in ("loaded", "pruned"):
        (message,) = ranks(1).run(step_after, change)
        assert "embedding.weight was written" in message or "blocks.0.attention.qkv.weight was written" in message
    assert ranks(1).run(step_after, "pruned in both") == ["0.25 is left"]


def test_what_is_pruned_of_a_plain_model_is_zero() -> None:
    model = Bank()
    names = set(prunable(model))
    assert names == {f"layers.{number}.weight" for number in range(4)}
    masks = prune(model, 0.5)
    assert masks is not None
    for name, parameter in model.named_parameters():
        assert int((parameter != 0).sum()) == parameter.numel() - round(parameter.numel() / 2)
        assert torch.equal(masks.masks[name].unpacked(), parameter != 0)
    assert set(odd_masks(GPT(GPTConfig(**SHAPE)))) == set(prunable(GPT(GPTConfig(**SHAPE))))


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_weights_that_are_not_finite_are_named(scope: Any) -> None:
    model = Bank()
    with torch.no_grad():
        model.layers[1].weight[2, 3] = float("nan" if scope == "layer" else "inf")  # type: ignore[index, union-attr]
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(
        ValueError, match=r"layers\.1\.weight have numbers that are NaN, infinite or on the meta device"
    ):
        prune(model, 0.5, scope=scope)
    assert all(torch.equal(a[a.isfinite()], b[a.isfinite()]) for a, b in zip(before, model.parameters(), strict=True))
    masks = {f"layers.{number}.weight": torch.zeros(layer.weight.shape) for number, layer in enumerate(model.layers)}  # type: ignore[arg-type, union-attr]
    assert prune(model, None, masks) is not None
    assert not any(parameter.any() for parameter in model.parameters())


def test_a_layer_that_vanishes_and_zeros_that_remain_are_warned_of() -> None:
    model = Bank()
    with pytest.warns(UserWarning, match=r"nothing is left of layers\.0\.weight: exclude small weights"):
        prune(model, 0.9)
    with pytest.warns(UserWarning, match=r"layers\.1\.weight.*: more is left than is not zero"):
        prune(model, 0.1, exclude=["layers.0.*"])


def test_a_model_is_pruned_once_its_masks_have_settled() -> None:
    model, early_bird = Bank(), EarlyBird(window=3, tolerance=0.0)
    with torch.no_grad():
        assert prune(model, 0.5, early_bird) is None
        model.layers[2].weight.neg_().mul_(2)  # type: ignore[operator, union-attr]
        assert prune(model, 0.5, early_bird) is None
        assert prune(model, 0.5, early_bird) is not None
        model.layers[2].weight.copy_(torch.randn(16, 8))  # type: ignore[operator, union-attr]
        assert prune(model, 0.5, early_bird) is None
    with pytest.raises(ValueError, match="masks of another model or sparsity"):
        prune(model, 0.4, early_bird)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sparsity": 1.0}, "sparsity is 1.0, but must be at least 0 and less than 1; 0.9 would do"),
        ({"sparsity": None}, "sparsity is None, but must be"),
        ({"sparsity": 0.5, "scope": "row"}, "scope is 'row', but must be 'layer' or 'global'"),
        ({"sparsity": 0.5, "method": "random"}, "method is 'random', but must be 'magnitude'"),
        ({"sparsity": 0.5, "exclude": ["layers.*"]}, "there is nothing to prune"),
        ({"sparsity": 0.5, "exclude": ["layer.*"]}, "exclude has 'layer.*', which names no parameter"),
        ({"sparsity": 0.5, "method": {}}, "masks are given, which say what is left"),
        ({"sparsity": None, "method": {}}, "masks are of no number"),
        ({"sparsity": None, "method": {"a": torch.ones(1)}}, "a mask is of 'a', which is no trained parameter"),
        ({"sparsity": "0.5"}, "sparsity is '0.5', but must be at least 0 and less than 1; 0.9 would do"),
        ({"sparsity": None, "method": {"layers.1.weight": [[True]]}}, "is a list, but must be a tensor of bools"),
        (
            {"sparsity": None, "method": {"layers.1.weight": torch.eye(7, 5) * 2}},
            "a dense tensor of bools, or of zeros",
        ),
        ({"sparsity": None, "method": {"layers.1.weight": torch.eye(7, 5)}, "exclude": ["a"]}, "leave both out"),
        ({"sparsity": None, "method": {"layers.1.weight": torch.ones(2, 2)}}, r"is \[2, 2\], but .* is \[7, 5\]"),
    ],
)
def test_what_cannot_be_pruned_raises(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prune(Bank(), **arguments)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.sparsity=0.9"], "train.sparsity is 0.9, but train.optimizer_state is 'fp32'"),
        (["train.sparsity=1.0", "train.optimizer_state=device"], "train.sparsity is 1.0, but must be below 1.0"),
        (["train.prune_at=5"], "train.prune_at is 5, but train.sparsity is 0, which prunes nothing"),
        ([*PRUNED, "train.prune_method=early-bird"], "draws masks every train.prune_at steps, and that is 0"),
        ([*PRUNED, "train.prune_at=5", "train.cuda_graph=true"], "a graph's steps cannot change"),
    ],
)
def test_options_of_pruning_that_do_not_fit_together_raise(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configure(tmp_path / "out", {}, *overrides)
