# SPDX-License-Identifier: Apache-2.0
"""Training on packed documents: none sees another's tokens, on any grid; a mixture, and a ramp, resume on any grid."""

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.train import model_folders, runs
from tests.train.test_trainer import assert_same_state, weights_of
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid
from stretto.train import task as task_module
from stretto.train.checkpoint import checkpoint_path
from stretto.train.checkpoint.metadata import read_metadata
from stretto.train.config import TrainConfig
from stretto.train.gpt.preflight import build_model_config, open_data
from stretto.train.gpt.task import GPTTask
from stretto.train.preflight import preflight

GRIDS = (
    ({"context": 2, "x": 2}, ()),
    ({"pipe": 2, "data": 2}, ()),
    ({"z": 2, "y": 2}, ("train.recompute=full",)),
    ({"context": 2, "pipe": 2}, ()),
    ({"x": 2, "z": 2}, ("train.shard_sequence=true",)),
)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))


def write_mixture(folder: Path) -> tuple[str, ...]:
    """Two sources, of short and of long documents."""
    words = runs.TEXT.split()
    texts = [" ".join(words[at : at + 1 + at % 7]) for at in range(120)], [" ".join(words)] * 3
    for name, written in zip("ab", texts, strict=True):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in written))
    return f"data.path=[{str(folder / 'a.jsonl')!r}, {str(folder / 'b.jsonl')!r}]", "data.weights=[0.7, 0.3]"


def loss_of_each_document(model: Any, dataset: Any, indices: list[int]) -> torch.Tensor:
    """The mean loss over sequences, of a model that is given one document at a time."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for index in indices:
        (tokens, targets), places = map(torch.from_numpy, dataset.read(index)), dataset.read_places(index)
        starts = [*(places == 0).nonzero()[0].tolist(), len(places)]
        for start, stop in pairwise(starts):
            logits = model(tokens[None, start:stop])
            logits = getattr(logits, "logits", logits)[0]
            total += F.cross_entropy(logits, targets[start:stop], ignore_index=-100, reduction="sum").double()
            count += int((targets[start:stop] != -100).sum())
    return total / count


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_a_gpt_attends_within_documents(positions: str) -> None:
    torch.manual_seed(0)
    config = GPTConfig(layers=2, hidden=16, heads=4, kv_heads=2, vocab=61, max_seq_len=24, positions=positions)
    model, tokens = GPT(config).double(), torch.randint(61, (2, 24))
    lengths = [5, 1, 11, 7], [24]
    places = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    packed = model(tokens, documents=places)
    for row, of_row in enumerate(lengths):
        apart = [model(part[None])[0] for part in tokens[row].split(of_row)]
        torch.testing.assert_close(packed[row], torch.cat(apart), rtol=1e-9, atol=1e-9)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize("number", range(len(GRIDS)))
def test_the_losses_are_those_of_documents_one_at_a_time(ranks: Any, tmp_path: Path, kind: str, number: int) -> None:
    sizes, more = GRIDS[number]
    mixture = write_mixture(tmp_path)
    options = [*(f"grid.{axis}={size}" for axis, size in sizes.items()), "train.steps=1", "train.lr=1e-30"]
    options += [*mixture, "train.seq_len=32", f"data.evaluation_path={tmp_path / 'held-out.jsonl'}"]
    (tmp_path / "held-out.jsonl").write_text((tmp_path / "a.jsonl").read_text() * 2)
    options += ["train.micro_batch=2", *more]
    if kind == "gpt":
        config = runs.configure(tmp_path / "run", "model.positions=learned", *options)
    else:
        config = model_folders.configure(tmp_path / "run", model_folders.write_folder(tmp_path / "model"), *options)
    preflight(config)
    model_folders.train_on_grid(ranks, config)
    dataset = open_data(config)
    if kind == "gpt":
        model: Any = GPT(build_model_config(config, dataset))
        weights = weights_of(checkpoint_path(config.out, 1))
        model.load_state_dict(weights | {"head.weight": weights["embedding.weight"]})
    else:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    (line,) = runs.metrics_of(config.out)
    with torch.no_grad():
        expected = loss_of_each_document(model, dataset, dataset.order(8, 0).indices(0).tolist())
        held_out = open_data(
            config.model_copy(
                update={"data": config.data.model_copy(update={"path": config.data.evaluation_path, "weights": None})}
            )
        )
        expected_held_out = loss_of_each_document(model, held_out, list(range(len(held_out))))
    assert line["loss"] == pytest.approx(float(expected), abs=2e-6)
    assert line["evaluation_loss"] == pytest.approx(float(expected_held_out), abs=2e-6)


RESUMED = (
    "train.ema=0.9",
    "train.batch_ramp=[[2, 4], [4, 8]]",
    "train.batch=16",
    "train.seq_len=16",
    "train.dtype=fp64",
    "train.schedule=constant",
)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"z": 2}, marks=pytest.mark.long),
        pytest.param({"data": 2, "pipe": 2}, marks=pytest.mark.exhaustive),
        pytest.param({"x": 2, "y": 2}, marks=pytest.mark.exhaustive),
    ],
)
def test_averages_and_a_ramp_go_on_in_bits_on_the_same_grid_and_in_one_order_on_another(
    ranks: Any, tmp_path: Path, sizes: dict[str, int]
) -> None:
    mixture = write_mixture(tmp_path)
    on_grid = [*(f"grid.{axis}={size}" for axis, size in sizes.items()), "train.micro_batch=2"]
    evaluated = ("train.evaluate_every=3", f"data.evaluation_path={tmp_path / 'text.txt'}")
    (tmp_path / "text.txt").write_text(runs.TEXT)

    def run(name: str, *options: str) -> Any:
        config = runs.configure(tmp_path / name, *RESUMED, *mixture, *evaluated, *options)
        preflight(config)
        model_folders.train_on_grid(ranks, config)
        return config

    whole = run("whole", *on_grid, "train.steps=6", "train.checkpoint_every=3")
    again = run("again", *on_grid, "train.steps=6", f"train.resume={checkpoint_path(whole.out, 3)}")
    assert_same_state(checkpoint_path(whole.out, 6), checkpoint_path(again.out, 6))
    moved = run("moved", "train.steps=6", f"train.resume={checkpoint_path(whole.out, 3)}")
    lines = {line["step"]: line for line in runs.metrics_of(whole.out)}
    assert [lines[step]["tokens"] for step in range(1, 7)] == [16 * n for n in (4, 8, 16, 24, 40, 56)]
    for line in runs.metrics_of(moved.out):
        expected = lines[line["step"]]
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-9)
        assert line["tokens"] == expected["tokens"]
    assert line["evaluation_loss"] == pytest.approx(expected["evaluation_loss"], rel=1e-9)
    names = read_metadata(checkpoint_path(whole.out, 6)).tensors
    averages = {name for name in names if name.endswith(".average")}
    assert len(averages) == sum(name.startswith("model.") for name in names)


@pytest.mark.long
def test_a_resumed_run_names_the_files_that_have_changed(ranks: Any, tmp_path: Path) -> None:
    """And a run measures its machines before it trains."""
    mixture = write_mixture(tmp_path)
    config = runs.configure(tmp_path / "run", *mixture, "train.steps=1", "train.preflight=true")
    model_folders.train_on_grid(ranks, config)
    assert len(json.loads((config.out / "preflight.json").read_text())["products"]) == 1
    changed = (tmp_path / "a.jsonl").read_text().replace("bright", "blight")
    (tmp_path / "a.jsonl").write_text(changed)
    (message,) = ranks(1).run(warnings_of_resuming, config, str(tmp_path / "cache"))
    assert f"{tmp_path / 'a.jsonl'} has changed from token 0 on" in message
    assert "b.jsonl" not in message


def warnings_of_resuming(config: TrainConfig, cache: str) -> str:
    with mock.patch.dict(os.environ, {"STRETTO_CACHE": cache}):
        task = GPTTask(config, Grid())
        with mock.patch.object(task_module.logger, "warning") as warn:
            task.compare_data(read_metadata(checkpoint_path(config.out, 1)))
    return "\n".join(call.args[0] % call.args[1:] for call in warn.call_args_list)
