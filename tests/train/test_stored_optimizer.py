# SPDX-License-Identifier: Apache-2.0
"""Training with optimizer state apart from the model: on the device, on the host, in buckets, split, and by tiles."""

import os
import signal
from contextlib import nullcontext
from itertools import product
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.differences import largest
from tests.parallel.zoo import list_families
from tests.pool import RankError
from tests.train.runs import TEXT, metrics_of
from tests.train.stored_zoo import losses_of_family
from torch import nn

from stretto.execution import StateOptions
from stretto.models import GPT, GPTConfig
from stretto.optim import AdamW
from stretto.optim.state.loss_scale import LossScaleOptions
from stretto.parallel import Grid, gather, no_sync, parallelize
from stretto.parallel.grid import GradientReduction
from stretto.train.checkpoint import checkpoint_path
from stretto.train.checkpoint.metadata import read_metadata
from stretto.train.checkpoint.storage import read_tensor
from stretto.train.config import TrainConfig, make_config
from stretto.train.data import Sampler
from stretto.train.optimizer import ShardOptimizer
from stretto.train.stored_optimizer import StoredOptimizer, adamw_update, sgd_update, tiled_update
from stretto.train.trainer import train

GRIDS_OF_8 = [
    {"data": data, "x": x, "y": y, "z": z} for data, x, y, z in product((1, 2, 4, 8), repeat=4) if data * x * y * z == 8
]
STEPS = 4


def configure(out: Path, grid: dict[str, int], *overrides: str) -> TrainConfig:
    text = out.parent / "text.txt"
    if not text.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        text.write_text(TEXT)
    batch = 4 * max(2, grid.get("data", 1) * grid.get("z", 1))  # two micro-batches or more on each rank
    values = {
        "out": str(out),
        "device": "cpu",
        "grid": grid,
        "data": {"path": str(text)},
        "model": {"layers": 2, "hidden": 32, "heads": 8, "vocab": 256},
        "train": {"steps": STEPS, "batch": batch, "seq_len": 8, "lr": 1e-2, "micro_batch": 2, "dtype": "bf16"},
    }
    return make_config(values, list(overrides))


def run_all(folder: str, grid: dict[str, int], runs: dict[str, list[str]]) -> None:
    """Train once for each entry of `runs`: overrides by a name, which is the folder's."""
    for name, overrides in runs.items():
        train(configure(Path(folder) / name, grid, *overrides), display="none")


def weights_of(out: Path) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint: fp32 weights, and the optimizer's state."""
    path = checkpoint_path(out, STEPS)
    return {name: read_tensor(path, entry) for name, entry in read_metadata(path).tensors.items()}


def differences(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> dict[str, float]:
    assert first.keys() == second.keys()
    return {
        name: float((first[name].double() - second[name].double()).abs().max())
        for name in first
        if not torch.equal(first[name], second[name])
    }


def apart(location: str, **options: Any) -> list[str]:
    return [f"train.optimizer_state={location}", *(f"train.{name}={value}" for name, value in options.items())]


def common_options(optimizer: str) -> list[str]:
    own = ["train.momentum=0.9", "train.lr=0.1"] if optimizer == "sgd" else []
    return [f"train.optimizer={optimizer}", "train.clip=none", *own]


def host_options(k: int, n: int) -> list[str]:
    split = "false" if (k + n) % 2 else "true"
    return apart("host", split_weights=split, state_bucket=512, reduce_buckets=k, state_buffers=n)


def check_bits(folder: Path, grid: dict[str, int], names: list[str]) -> None:
    """Gradients of norms and biases are summed over data and z, and over the axis that replicates them."""
    sums_of_two = max(grid["data"] * grid["z"] * grid[axis] for axis in "xy") <= 2
    expected = weights_of(folder / "device")
    for name in names:
        found = differences(weights_of(folder / name), expected)
        assert largest(found.values(), default=0) <= (0 if sums_of_two else 1e-6), (name, found)


def states_of_a_run(grid: Grid, optimizer: str, options: StateOptions) -> dict[str, torch.Tensor]:
    """A rank's weights and states after three steps of two micro-batches, of which each step has other tokens."""
    torch.manual_seed(0)
    model = parallelize(
        GPT(GPTConfig(layers=2, hidden=32, heads=8, vocab=64, max_seq_len=8)), grid, dtype=torch.bfloat16
    )
    make = adamw_update(betas=(0.9, 0.95), eps=1e-8, tile=300) if optimizer == "adamw" else sgd_update(momentum=0.9)
    if optimizer == "torch's sgd":
        make = tiled_update(lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9), tile=300)
    stored = StoredOptimizer(model, grid, make, name=optimizer, weight_decay=0.1, options=options)
    generator = torch.Generator().manual_seed(7)
    for _ in range(3):
        tokens = torch.randint(64, (16, 8), generator=generator)
        mine = tokens.chunk(grid.size("batch"))[grid.coordinate("batch")]
        for number, part in enumerate(mine.chunk(2)):
            with nullcontext() if number == 1 else no_sync(model):
                model(part, part, tokens.numel()).backward()
        stored.step(1e-2)
    names = stored.parameters
    return {f"{name}.{key}": value.clone() for name in names for key, value in stored.slots(name).items()} | {
        name: stored.weight(name).clone() for name in names
    }


def compare_all(sizes: dict[str, int], optimizer: str) -> dict[str, float]:
    """The largest difference from state on the device, for each number of buckets in a message and of buffers."""
    grid = Grid(**sizes, device="cpu")
    expected = states_of_a_run(grid, optimizer, StateOptions("device"))
    found = {}
    for k, n, splits in product((1, 2, 4, 8), (1, 2, 3), (False, True)):
        options = StateOptions("host", bucket_size=512, coarsening=k, buffer_sets=n, splits_weights=splits)
        other = states_of_a_run(grid, optimizer, options)
        found[f"k={k}, n={n}, {splits}"] = largest(float((other[key] - expected[key]).abs().max()) for key in expected)
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "torch's sgd"])
@pytest.mark.parametrize("grid", GRIDS_OF_8, ids=lambda grid: "-".join(map(str, grid.values())))
def test_state_on_the_host_gives_the_bits_of_state_on_the_device_on_8_ranks(
    ranks: Any, grid: dict[str, int], optimizer: str
) -> None:
    """Buckets, chunks and tiles of any size change where a message ends, and no number; nothing is clipped."""
    limit = 0 if max(grid["data"] * grid["z"] * grid[axis] for axis in "xy") <= 2 else 1e-6
    for found in ranks(8).run(compare_all, grid, optimizer, timeout=400):
        assert largest(found.values()) <= limit, found


@pytest.mark.exhaustive
@pytest.mark.parametrize(("sizes", "optimizer"), [((2, 1, 1, 2), "adamw"), ((1, 1, 2, 2), "sgd")])
def test_state_on_the_host_gives_the_bits_of_state_on_the_device(
    ranks: Any, tmp_path: Path, sizes: tuple[int, ...], optimizer: str
) -> None:
    grid = dict(zip(("data", "x", "y", "z"), sizes, strict=True))
    common = common_options(optimizer)
    runs = {"device": [*common, *apart("device")]}
    runs |= {f"host-{k}-{n}": [*common, *host_options(k, n)] for k, n in ((1, 1), (2, 3))}
    ranks(4).run(run_all, str(tmp_path), grid, runs, timeout=300)
    check_bits(tmp_path, grid, list(runs))


@pytest.mark.exhaustive
def test_fp32_weights_train_as_without_separate_state(ranks: Any, tmp_path: Path) -> None:
    """In fp32 nothing is rounded, so that state apart must give what the default gives; clipped, over four ranks."""
    common = ["train.dtype=fp32", "train.clip=0.5"]
    runs = {"beside": common, "host": [*common, *apart("host", state_bucket=512, reduce_buckets=2)]}
    ranks(4).run(run_all, str(tmp_path), {"data": 2, "z": 2}, runs, timeout=300)
    losses = [[line["loss"] for line in metrics_of(tmp_path / name)] for name in runs]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    weights, keys = [weights_of(tmp_path / name) for name in ("host", "beside")], [{}, {}]
    for of_run, of_keys in zip(weights, keys, strict=True):
        for name in [name for name in of_run if name.endswith("qkv.bias")]:
            groups = of_run[name].view(8, 3, -1)  # heads of a query, a key and a value each
            of_run[name], of_keys[name] = groups[:, [0, 2]], groups[:, 1]
    found, of_noise = differences(*weights), differences(*keys)
    assert largest(found.values(), default=0) <= 5e-7, found
    # AdamW makes steps of the rounding noise that is the gradient of the biases of keys, which change no loss.
    assert largest(of_noise.values(), default=0) <= 5e-6, of_noise


MODES = {
    "fp32": ["train.dtype=fp32"],
    "device": ["train.dtype=fp32", *apart("device")],
    "host": ["train.dtype=fp32", *apart("host", state_bucket=1024)],
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("grid", "first", "second"),
    [
        ({"z": 2}, "host", "device"),
        *(
            pytest.param({"x": 2, "z": 2}, *modes, marks=pytest.mark.exhaustive)
            for modes in (("fp32", "host"), ("host", "device"), ("device", "fp32"))
        ),
    ],
)
def test_runs_of_every_mode_resume_each_other_on_another_grid(
    ranks: Any, tmp_path: Path, grid: dict[str, int], first: str, second: str
) -> None:
    """Two steps on a grid in one mode, two on data2 in another, against four steps on one rank; with averages."""
    evaluated = ["train.evaluate_every=2", "data.evaluation_sequences=4"]
    common = ["train.schedule=constant", "train.batch=16", "train.ema=0.5", *evaluated]
    begin, end = [*MODES[first], *common, "train.steps=2"], [*MODES[second], *common, "train.resume=latest"]
    ranks(1).run(run_all, str(tmp_path), {}, {"whole": [*MODES["fp32"], *common]}, timeout=300)
    ranks(prod(grid.values())).run(run_all, str(tmp_path), grid, {"parts": begin}, timeout=300)
    ranks(2).run(run_all, str(tmp_path), {"data": 2}, {"parts": end}, timeout=300)
    found = differences(weights_of(tmp_path / "parts"), weights_of(tmp_path / "whole"))
    assert largest(found.values(), default=0) <= 2e-5, found  # without the moments it would be 1e-2
    whole, parts = ({line["step"]: line for line in metrics_of(tmp_path / name)} for name in ("whole", "parts"))
    for step in (2, 4):  # of the averages, which the weights are far from
        assert parts[step]["evaluation_loss"] == pytest.approx(whole[step]["evaluation_loss"], rel=1e-5)


@pytest.mark.exhaustive
def test_split_weights_resume_in_bits(ranks: Any, tmp_path: Path) -> None:
    """bf16 with split weights: what a checkpoint holds is joined, and split again."""
    common = ["train.schedule=constant", "train.ema=0.9"]
    options = [*apart("host", state_bucket=512), *common]
    runs = {"whole": options, "parts": [*options, "train.steps=2"]}
    ranks(2).run(run_all, str(tmp_path), {"z": 2}, runs, timeout=300)
    runs = {"parts": [*apart("device"), *common, "train.resume=latest"]}
    ranks(2).run(run_all, str(tmp_path), {"z": 2}, runs, timeout=300)
    assert not differences(weights_of(tmp_path / "parts"), weights_of(tmp_path / "whole"))


@pytest.mark.exhaustive
def test_fp16_skips_overflows_on_all_ranks_and_halves_the_scale(ranks: Any, tmp_path: Path) -> None:
    """2^24 overflows fp16 gradients: such steps change nothing, and their norm is unknown; then training goes on."""
    options = ["train.dtype=fp16", *apart("host", state_bucket=512), "train.loss_scale=16777216", "train.steps=12"]
    ranks(2).run(run_all, str(tmp_path), {"x": 2}, {"fp16": options}, timeout=300)
    lines = metrics_of(tmp_path / "fp16")
    skipped = [line["step"] for line in lines if line["grad_norm"] is None]
    assert skipped
    assert skipped == list(range(1, len(skipped) + 1))
    path = checkpoint_path(tmp_path / "fp16", 12)
    tensors = read_metadata(path).tensors
    scale = float(read_tensor(path, tensors["training.loss_scale"]))
    assert scale == 2.0 ** (24 - len(skipped))
    assert float(read_tensor(path, tensors["optimizer.embedding.weight.step"])) == 12 - len(skipped)
    assert lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.exhaustive
def test_a_run_with_a_loss_scale_resumes_with_it(ranks: Any, tmp_path: Path) -> None:
    options = ["train.dtype=fp16", *apart("device"), "train.loss_scale=16777216", "train.schedule=constant"]
    runs = {"whole": options, "parts": [*options, "train.steps=2"]}
    ranks(2).run(run_all, str(tmp_path), {"data": 2}, runs, timeout=300)
    ranks(2).run(run_all, str(tmp_path), {"data": 2}, {"parts": [*options, "train.resume=latest"]}, timeout=300)
    assert not differences(weights_of(tmp_path / "parts"), weights_of(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.dtype=fp16"], "train.dtype is 'fp16', which needs separate fp32 weights"),
        (["train.state_bucket=128"], "train.state_bucket is 128, but train.optimizer_state is 'fp32'"),
        ([*apart("host"), "train.dtype=fp64"], "train.optimizer_state is 'host', but train.dtype is 'fp64'"),
        ([*apart("host"), "train.cuda_graph=true"], "a graph cannot wait for the host"),
        ([*apart("device"), "train.writes_copies=true"], "whose copies are the weights already"),
        (
            [*apart("host"), "train.state_bucket=100"],
            "train.state_bucket is 100, but must be a multiple of 64; 128 would do",
        ),
    ],
)
def test_incompatible_options_raise(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configure(tmp_path / "out", {}, *overrides)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("clip", ["none", "0.5"])
@pytest.mark.long
def test_steps_on_the_host_give_what_steps_on_the_device_do(ranks: Any, tmp_path: Path, clip: str) -> None:
    common = ["train.dtype=fp32", f"train.clip={clip}"]
    runs = {
        "device": [*common, *apart("host", state_bucket=512)],
        "host": [*common, *apart("host", state_bucket=512, step_on="host", state_buffers=2)],
        "auto": [*common, *apart("host", state_bucket=512, step_on="auto")],
    }
    ranks(2).run(run_all, str(tmp_path), {"data": 2}, runs, timeout=300)
    for name in ("host", "auto"):
        found = differences(weights_of(tmp_path / name), weights_of(tmp_path / "device"))
        assert largest(found.values(), default=0) <= 2e-5, (name, found)


def train_and_die(folder: str, grid: dict[str, int], overrides: list[str]) -> None:
    """Train with a checkpoint every two steps; rank 1 is killed while it reads the batch of step 4."""
    indices = Sampler.indices

    def indices_or_die(sampler: Sampler, number: int) -> Any:
        if number == 3 and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return indices(sampler, number)

    with mock.patch.object(Sampler, "indices", indices_or_die):
        train(configure(Path(folder) / "killed", grid, "train.checkpoint_every=2", *overrides), display="none")


KILLED = {
    "split": apart("host", state_bucket=512),
    "host": apart("host", state_bucket=512, split_weights="false"),
    "step on the host": apart("host", state_bucket=512, step_on="host"),
    "device": apart("device"),
    "fp16": ["train.dtype=fp16", *apart("host", state_bucket=512)],
    "sgd": ["train.optimizer=sgd", "train.momentum=0.9", *apart("host", state_bucket=512)],
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[] if mode == "split" else [pytest.mark.exhaustive]) for mode in KILLED]
)
def test_a_killed_run_resumes_with_the_weights_of_one_that_was_not(ranks: Any, tmp_path: Path, mode: str) -> None:
    grid, overrides = {"data": 2}, ["train.schedule=constant", *KILLED[mode]]
    with pytest.raises(RankError):
        ranks(2).run(train_and_die, str(tmp_path), grid, overrides)
    again = ["train.checkpoint_every=2", "train.resume=latest", *overrides]
    ranks(2).run(run_all, str(tmp_path), grid, {"killed": again, "whole": overrides}, timeout=300)
    assert [line["step"] for line in metrics_of(tmp_path / "killed")] == [1, 2, 3, 4]
    assert not differences(weights_of(tmp_path / "killed"), weights_of(tmp_path / "whole"))


def step_of_blocks(sizes: dict[str, int], location: str, blocks: list[str] | None) -> dict[str, Any]:
    """Three steps of a model that nothing knows, whose second branch is called in the first step alone."""
    torch.manual_seed(0)
    grid = Grid(**sizes, device="cpu")
    model = Branches()
    made = parallelize(model, grid, blocks=blocks)
    optimizer = None
    if location == "fp32":
        inner = ShardOptimizer(made, lambda groups: AdamW(groups, lr=1e-2), weight_decay=0.1)
    else:
        options = StateOptions(location, bucket_size=128, coarsening=2)  # type: ignore[arg-type]
        make = adamw_update(betas=(0.9, 0.999), eps=1e-8)
        optimizer = StoredOptimizer(
            made, grid, make, name="adamw", weight_decay=0.1, dtype=torch.float32, options=options
        )
    generator = torch.Generator().manual_seed(4)
    for step in range(3):
        x = torch.randn(8, 16, generator=generator).chunk(grid.size("batch"))[grid.coordinate("batch")]
        loss = made(x, step == 0).square().mean()
        loss.backward()
        if optimizer is None:
            inner.step(1e-2)
        else:
            assert all(parameter.grad is None for parameter in made.parameters())
            optimizer.step(1e-2)
    return {name: gather(parameter).detach().clone() for name, parameter in made.named_parameters()}


class Branches(nn.Module):
    """Two branches of which the second may not be called; one weight is frozen, and two layers share one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.layers[1].weight = self.layers[0].weight
        self.layers[2].bias.requires_grad_(False)
        self.other = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, uses_other: bool) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.other(x) if uses_other else x


@pytest.mark.parametrize("sizes", [{"z": 2}, {"data": 2}])
def test_models_without_roles_shared_frozen_and_unused_parameters(ranks: Any, sizes: dict[str, int]) -> None:
    expected = ranks(2).run(step_of_blocks, sizes, "fp32", None)
    for location in ("host", "device"):
        for found, right in zip(ranks(2).run(step_of_blocks, sizes, location, None), expected, strict=True):
            for name, value in right.items():
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [{"x": 2, "z": 2}, {"data": 2, "z": 2}], ids=["x2z2", "data2z2"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_oss", "bloom", "gemma2", "mamba", "phi3", "qwen3_moe", "opt"])
def test_families_of_transformers_train_as_without_separate_state(
    ranks: Any, family: str, sizes: dict[str, int]
) -> None:
    for found in ranks(4).run(losses_of_family, family, dict(list_families())[family], sizes, timeout=200):
        assert found["device"] == pytest.approx(found["fp32"], rel=1e-5)
        assert found["host"] == pytest.approx(found["fp32"], rel=1e-5)


class Weighted(nn.Module):
    """Its gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight.float() * x).sum()


def steps_of_large_gradients(gradients: GradientReduction) -> list[tuple[float, float, float]]:
    """Of each step: the norm, the scale after it, and by how much it has changed the weight."""
    grid = Grid(data=2, z=2, device="cpu")
    model = parallelize(nn.Sequential(Weighted()), grid, dtype=torch.float16, blocks=["0"], gradients=gradients)
    optimizer = StoredOptimizer(
        model, grid, sgd_update(), name="sgd", dtype=torch.float16, options=StateOptions("host", bucket_size=64),
        loss_scale=LossScaleOptions(16.0, 1000),
    )  # fmt: skip
    assert optimizer.loss_scale is not None
    found = []
    for _ in range(4):
        before = optimizer.weight("0.weight").clone()
        optimizer.scale_loss(model(torch.full((64,), 2500.0))).backward()
        norm = float(optimizer.step(1e-6))
        change = float((before - optimizer.weight("0.weight")).abs().max())
        found.append((norm, float(optimizer.loss_scale.value), change))
    return found


@pytest.mark.parametrize(
    ("gradients", "overflows"), [pytest.param("mean", 0, marks=pytest.mark.exhaustive), ("sum", 2)]
)
def test_sums_over_four_ranks_in_fp16_overflow_on_all_of_them_or_on_none(
    ranks: Any, gradients: GradientReduction, overflows: int
) -> None:
    """Scaled by 16, a rank's gradient is 40,000. Divided by the number of ranks before the sum, it stays that large.

    Else the sum is 160,000, and exceeds the largest number of fp16, 65,504, until the scale is 4.
    """
    results = ranks(4).run(steps_of_large_gradients, gradients)
    assert all(result == results[0] or str(result) == str(results[0]) for result in results)
    steps = results[0]
    step = 1e-6 * 2500 * (4 if gradients == "sum" else 1)  # the learning rate times the gradient without its scale
    assert [change for _, _, change in steps] == pytest.approx([0] * overflows + [step] * (4 - overflows), rel=1e-3)
    assert steps[-1][1] == 16 / 2**overflows
    assert steps[-1][0] == pytest.approx(2500 * (4 if gradients == "sum" else 1) * 8, rel=1e-3)
