# SPDX-License-Identifier: Apache-2.0
"""The loss on held-out sequences is one mean over all of their targets, on any grid, and changes no training."""

import math
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import Ranks
from tests.train import model_folders, runs
from tests.train.test_trainer import weights_of
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from stretto.models import GPT
from stretto.parallel import Grid
from stretto.planner.grids import every_grid
from stretto.report import write_report
from stretto.train.checkpoint import checkpoint_path
from stretto.train.config import ConfigError, TrainConfig
from stretto.train.gpt.preflight import build_model_config, open_data, open_held_out
from stretto.train.gpt.task import GPTTask
from stretto.train.preflight import preflight

MakeRanks = Callable[[int], Ranks]
HELD_OUT = "The voices enter one after another, before the last of them has finished. " * 3


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))


def write_held_out(tmp_path: Path) -> str:
    path = tmp_path / "held-out.txt"
    path.write_text(HELD_OUT)
    return f"data.evaluation_path={path}"


def plain_loss(config: TrainConfig, logits_of: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """The mean over all targets of the held-out sequences, taken at once."""
    held_out = open_held_out(config, open_data(config))
    assert held_out is not None
    pairs = [held_out.dataset.read(index) for index in held_out.sequences]
    inputs, targets = (torch.stack([torch.from_numpy(part) for part in parts]) for parts in zip(*pairs, strict=True))
    with torch.no_grad():
        return F.cross_entropy(logits_of(inputs).flatten(0, 1).double(), targets.flatten()).item()


def evaluations_of(out: Path) -> dict[int, Any]:
    return {line["step"]: line["evaluation_loss"] for line in runs.metrics_of(out) if "evaluation_loss" in line}


@pytest.mark.long
@pytest.mark.parametrize(
    "sizes",
    [{"data": 4}, *(pytest.param(sizes, marks=pytest.mark.exhaustive) for sizes in every_grid(8))],
    ids=lambda sizes: "x".join(map(str, sizes.values())),
)
def test_the_loss_is_that_of_plain_pytorch_on_every_grid_of_8(
    ranks: MakeRanks, tmp_path: Path, sizes: dict[str, int]
) -> None:
    """14 sequences in batches of 8: the last batch is filled up, on some grids with ranks that have no target."""
    on_grid = [f"grid.{axis}={size}" for axis, size in sizes.items()]
    config = runs.configure(tmp_path / "run", write_held_out(tmp_path), *on_grid, "train.steps=1", "train.lr=1e-30")
    preflight(config)
    ranks(prod(sizes.values())).run(runs.train_quietly, config, timeout=120)
    weights = weights_of(checkpoint_path(config.out, 1))
    model = GPT(build_model_config(config, open_data(config)))
    model.load_state_dict(weights | {"head.weight": weights["embedding.weight"]})
    (line,) = runs.metrics_of(config.out)
    assert line["evaluation_loss"] == pytest.approx(plain_loss(config, model), abs=1e-6)
    assert line["perplexity"] == pytest.approx(math.exp(line["evaluation_loss"]))


@pytest.mark.exhaustive
def test_conversations_count_by_their_targets_and_not_by_their_number(ranks: MakeRanks, tmp_path: Path) -> None:
    folder = model_folders.write_folder(tmp_path / "model")
    words = runs.TEXT.split()
    turns = [("Go on:", " ".join(words[start : start + 1 + 2 * (start % 5)])) for start in range(11)]
    chats = {name: model_folders.write_chat(tmp_path / f"{name}.jsonl", turns) for name in ("train", "held-out")}
    data = (f"data.path={chats['train']}", f"data.evaluation_path={chats['held-out']}")
    options = ("grid.x=2", "grid.z=2", "train.steps=1", "train.lr=1e-30", "train.micro_batch=2", "train.seq_len=32")
    config = model_folders.configure(tmp_path / "run", folder, *data, *options)
    model_folders.train_on_grid(ranks, config)
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = plain_loss(config, lambda tokens: model(input_ids=tokens).logits)
    assert evaluations_of(config.out)[1] == pytest.approx(expected, abs=1e-6)


@pytest.mark.long
def test_a_run_is_evaluated_when_it_is_due_and_trains_as_one_that_is_not(ranks: MakeRanks, tmp_path: Path) -> None:
    """Dropout is off in an evaluation, and on again afterwards."""
    options = ("grid.z=2", "train.steps=3", "model.dropout=0.5")
    every = ("train.evaluate_every=2", write_held_out(tmp_path))
    evaluated = runs.configure(tmp_path / "evaluated" / "run", *options, *every)
    unchanged = runs.configure(tmp_path / "unchanged" / "run", *options, *every, "train.lr=1e-30")
    for config in (evaluated, unchanged, plain := runs.configure(tmp_path / "plain" / "run", *options)):
        runs.write_config(config)
        ranks(2).run(runs.train_quietly, config, timeout=120)
    losses = [[line["loss"] for line in runs.metrics_of(config.out)] for config in (evaluated, plain)]
    assert losses[0] == losses[1]
    assert list(evaluations_of(evaluated.out)) == [2, 3]
    assert evaluations_of(plain.out) == {}
    assert len(set(evaluations_of(unchanged.out).values())) == 1
    write_report(evaluated.out)
    assert "| on sequences not trained on | evaluation loss " in (evaluated.out / "summary.md").read_text()


def indices_that_a_task_trains_on(config: TrainConfig, steps: int) -> set[int]:
    task = GPTTask(config, Grid())
    return {int(index) for step in range(steps) for index in task.sampler.indices(step)}


def test_the_last_sequences_are_held_out_of_training(ranks: MakeRanks, tmp_path: Path) -> None:
    config = runs.configure(tmp_path / "run", "data.evaluation_sequences=20")
    dataset = open_data(config)
    held_out = open_held_out(config, dataset)
    assert held_out is not None
    assert held_out.dataset is dataset
    assert held_out.sequences == range(len(dataset) - 20, len(dataset))
    seen = ranks(1).run(indices_that_a_task_trains_on, config, 99)[0]
    assert seen == set(range(len(dataset) - 20))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["data.evaluation_sequences=9999"], r"but .* has 184 sequences of .*; 18 would do"),
        (["data.evaluation_path={text}"], r"data\.evaluation_path has .*text\.txt, which data\.path has, too"),
        (["data.evaluation_path={missing}"], r"missing\.txt: no such file"),
    ],
)
def test_impossible_evaluation_splits_raise(tmp_path: Path, options: list[str], message: str) -> None:
    paths = {name: str(tmp_path / f"{name}.txt") for name in ("text", "missing")}
    with pytest.raises(ValueError, match=message):
        preflight(runs.configure(tmp_path / "run", *(option.format(**paths) for option in options)))


def test_evaluating_without_held_out_data_is_refused_by_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing is held out to evaluate on: give data"):
        runs.configure(tmp_path / "run", "train.evaluate_every=2")
