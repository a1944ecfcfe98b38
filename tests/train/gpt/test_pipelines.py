# SPDX-License-Identifier: Apache-2.0
"""Runs whose model is cut into pipeline stages: losses of one rank, checkpoints for any grid, rules of the options."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import Ranks
from tests.train import model_folders, runs
from tests.train.test_trainer import weights_of

from stretto.train.checkpoint import checkpoint_path
from stretto.train.config import ConfigError
from stretto.train.preflight import preflight

MakeRanks = Callable[[int], Ranks]
FP64 = ("train.dtype=fp64", "train.micro_batch=1", "model.layers=4")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v", "message-driven")
GRIDS = [
    {"pipe": 2, "data": 2},
    {"pipe": 2, "x": 2},
    {"pipe": 2, "y": 2},
    {"pipe": 2, "z": 2},
    {"pipe": 2},
    {"pipe": 1},
    {"pipe": 4},
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))


def on(grid: dict[str, int], schedule: str = "1f1b") -> list[str]:
    return [*(f"grid.{axis}={size}" for axis, size in grid.items()), f"pipeline.schedule={schedule}"]


def run(ranks: MakeRanks, out: Path, *options: str, timeout: float = 120) -> list[dict[str, Any]]:
    config = runs.configure(out, *options)
    preflight(config)
    ranks(config.ranks).run(runs.train_quietly, config, timeout=timeout)
    return runs.metrics_of(out)


def same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], tolerance: float = 1e-10) -> None:
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert ("evaluation_loss" in mine) == ("evaluation_loss" in other)
        for key in {"loss", "grad_norm", "evaluation_loss"} & other.keys():
            assert mine[key] == pytest.approx(other[key], rel=tolerance), (key, mine["step"])


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: "-".join(f"{axis}{size}" for axis, size in grid.items()))
def test_a_pipelined_run_is_the_run_of_one_rank(
    ranks: MakeRanks, tmp_path: Path, grid: dict[str, int], schedule: str
) -> None:
    """With dropout, clipping and held-out sequences; and it goes on without a pipeline, and the other way round."""
    layers = f"model.layers={8 if grid['pipe'] == 4 else 4}"
    # As many micro-batches as the schedules take: four for two stages.
    batch = f"train.batch={8 if grid['pipe'] == 4 or 'data' in grid or 'z' in grid else 4}"
    options = (*FP64, layers, batch, "train.steps=3", "model.dropout=0.1", "data.evaluation_sequences=5")
    options += ("train.clip=0.5",)
    whole = run(ranks, tmp_path / "whole", *options, "train.checkpoint_every=2")
    options += tuple(on(grid, schedule))
    cut = run(ranks, tmp_path / "cut", *options, "train.checkpoint_every=2")
    same(cut, whole)
    expected = weights_of(checkpoint_path(tmp_path / "whole", 3))
    found = weights_of(checkpoint_path(tmp_path / "cut", 3))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-12)
    middle = [checkpoint_path(tmp_path / name, 2) for name in ("whole", "cut")]
    same(run(ranks, tmp_path / "on", *options, f"train.resume={middle[0]}"), whole[2:])
    alone = [option for option in options if not option.startswith(("grid.", "pipeline."))]
    same(run(ranks, tmp_path / "back", *alone, f"train.resume={middle[1]}"), whole[2:])


def check_state_apart(
    ranks: MakeRanks, tmp_path: Path, grid: dict[str, int], schedule: str, state: str, tied: bool
) -> None:
    """A run in stages whose optimizer state is apart has the losses of one rank, and so has its continuation."""
    options = (
        "train.micro_batch=1", f"model.layers={2 if schedule == '1f1b' else 4}", "train.steps=3",
        f"model.tie_embeddings={str(tied).lower()}", f"train.optimizer_state={state}", "train.state_bucket=1024",
    )  # fmt: skip
    whole = run(ranks, tmp_path / "whole", *options)
    cut = [*options, *on(grid, schedule)]
    same(run(ranks, tmp_path / "cut", *cut, "train.checkpoint_every=2"), whole, 1e-5)
    resumed = run(ranks, tmp_path / "on", *cut, f"train.resume={checkpoint_path(tmp_path / 'cut', 2)}")
    same(resumed, whole[2:], 1e-5)


@pytest.mark.long
def test_separate_optimizer_state_is_stepped_and_resumed_on_two_stages(ranks: MakeRanks, tmp_path: Path) -> None:
    check_state_apart(ranks, tmp_path, {"pipe": 2}, "1f1b", "device", tied=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("state", ["device", "host"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "message-driven"])
def test_separate_optimizer_state_is_stepped_and_resumed_on_each_stage(
    ranks: MakeRanks, tmp_path: Path, schedule: str, state: str, tied: bool
) -> None:
    check_state_apart(ranks, tmp_path, {"pipe": 2, "data": 2}, schedule, state, tied)


@pytest.mark.exhaustive
def test_a_model_folder_is_trained_in_stages(ranks: MakeRanks, tmp_path: Path) -> None:
    folder = model_folders.write_folder(tmp_path / "model")
    options = ["model.layers=none", "model.hidden=none", "model.heads=none", f"model.path={folder}", "train.steps=2"]
    options += ["train.micro_batch=2", "train.dtype=fp64"]
    whole = run(ranks, tmp_path / "whole", *options)
    same(run(ranks, tmp_path / "cut", *options, *on({"pipe": 2, "z": 2})), whole, 1e-9)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["grid.pipe=2", "pipeline.limit=3"], "pipeline.limit is 3, but pipeline.schedule is '1f1b'"),
        (["grid.pipe=2", "pipeline.schedule=zb-h1", "pipeline.extra_warm_up=1"], "pipeline.schedule='1f1b' would do"),
        (["grid.pipe=2", "pipeline.schedule=zb-v", "pipeline.virtual_stages=3"], "placement 'v' takes two stages"),
        (["grid.pipe=2", "train.cuda_graph=true"], "a graph cannot wait for messages"),
        (["grid.pipe=4", "model.layers=8", "train.micro_batch=2", "pipeline.schedule=dualpipe-v"], "8 would do"),
        (["grid.pipe=3"], "pipe=2 would do"),
        (["pipeline.cuts=[1]"], "grid.pipe is 1"),
        (["grid.pipe=2", "pipeline.cuts=[0]"], "pipeline.cuts is [0], but must be"),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_anything_is_spent(
    tmp_path: Path, options: list[str], words: str
) -> None:
    with pytest.raises((ConfigError, ValueError)) as caught:
        preflight(runs.configure(tmp_path / "run", *options))
    assert words in str(caught.value)
