# SPDX-License-Identifier: Apache-2.0
"""Steps whose loss or gradient is not finite change nothing or end the run, and weights that are not are refused."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.numpy import load_file, save_file
from tests.conftest import Ranks
from tests.train import model_folders, runs
from tests.train.test_trainer import assert_same_state, weights_of
from torch import Tensor

from stretto.models import GPT
from stretto.parallel import Pipeline
from stretto.report import read_run
from stretto.train import nonfinite
from stretto.train.checkpoint import checkpoint_path
from stretto.train.config import TrainConfig, make_config
from stretto.train.data import Sampler, open_dataset
from stretto.train.gpt.task import GPTTask
from stretto.train.observe.metrics import DivergenceError
from stretto.train.observe.progress import ProgressReporter
from stretto.train.observe.recorder import StepRecorder
from stretto.train.trainer import train

MakeRanks = Callable[[int], Ranks]
BAD = 3  # the step


def train_with_bad_step(config: TrainConfig, fault: str, rank: int | None = None) -> None:
    """Train; in step BAD the loss is NaN, or the gradient of one rank infinite, or of a pipeline the loss alone NaN."""
    step, compute_loss, run_pipeline = GPTTask.step, GPTTask._compute_loss, Pipeline.step
    now = [0]

    def is_bad() -> bool:
        return now[0] == BAD and rank in (None, dist.get_rank())

    def note_step(task: GPTTask, number: int, lr: float) -> Any:
        now[0] = number
        return step(task, number, lr)

    def spoil(task: GPTTask, *batch: Tensor) -> Tensor:
        loss = compute_loss(task, *batch)
        if is_bad() and fault == "gradient":
            loss = loss.view_as(loss)
            loss.register_hook(lambda gradient: gradient * math.inf)
        return loss * math.nan if is_bad() and fault == "loss" else loss

    def spoil_pipeline(pipeline: Pipeline, **call: Any) -> Tensor:
        loss = run_pipeline(pipeline, **call)
        return loss * math.nan if is_bad() else loss

    with (
        mock.patch.object(GPTTask, "step", note_step),
        mock.patch.object(GPTTask, "_compute_loss", spoil),
        mock.patch.object(Pipeline, "step", spoil_pipeline),
    ):
        train(config, display="none")


OPTIONS = ["train.on_nonfinite=skip", "train.steps=5", "train.checkpoint_every=1", "train.keep_checkpoints=9"]


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("fault", "rank", "options"),
    [
        ("gradient", 1, ["grid.x=2", "grid.z=2"]),
        ("loss", None, ["grid.data=2", "train.optimizer_state=host", "train.dtype=bf16", "train.step_on=device"]),
        ("loss alone", None, ["grid.pipe=2", "train.micro_batch=4"]),
        (
            "loss alone",
            None,
            ["grid.pipe=2", "train.optimizer_state=device", "train.micro_batch=4", "train.dtype=bf16"],
        ),
        ("gradient", 0, ["grid.data=2", "model.num_experts=4", "model.balance=bias"]),
        ("loss", None, ["grid.data=2", "train.optimizer=sgd", "train.momentum=0.9"]),
        ("loss", None, ["grid.y=2", "train.optimizer_state=device", "train.dtype=bf16", "train.clip=none"]),
        ("gradient", 1, ["grid.data=2", "train.optimizer_state=device", "train.dtype=fp16", "train.loss_scale=8"]),
        ("gradient", 1, ["grid.data=2", "train.dtype=fp64", "train.micro_batch=2"]),
    ],
    ids=str,
)
def test_a_skipped_step_changes_no_bit_on_any_rank(
    ranks: MakeRanks, tmp_path: Path, fault: str, rank: int | None, options: list[str]
) -> None:
    config = runs.configure(tmp_path / "run", *OPTIONS, *options)
    ranks(config.ranks).run(train_with_bad_step, config, fault, rank, timeout=120)
    lines = runs.metrics_of(config.out)
    assert [line.get("skipped", False) for line in lines] == [False, False, True, False, False]
    assert (lines[BAD - 1]["loss"] is None) == (fault != "gradient")
    after = [checkpoint_path(config.out, step) for step in range(1, 6)]
    if config.train.dtype == "fp16":  # an overflow also halves the loss scale
        first, second = weights_of(after[BAD - 2]), weights_of(after[BAD - 1])
        assert all(torch.equal(first[name], second[name]) for name in first)
        return
    assert_same_state(after[BAD - 2], after[BAD - 1])
    for before, then in ((after[0], after[1]), (after[BAD - 1], after[BAD])):
        first, second = weights_of(before), weights_of(then)
        assert any(not torch.equal(first[name], second[name]) for name in first), "the other steps must train"


@pytest.mark.long
def test_a_run_goes_on_after_a_skipped_step_as_if_it_had_not_been(ranks: MakeRanks, tmp_path: Path) -> None:
    """SGD without momentum and decay: the losses are those of a loop that leaves the step's update out."""
    options = ["train.optimizer=sgd", "train.weight_decay=0", "grid.data=2", "train.schedule=constant"]
    config = runs.configure(tmp_path / "run", *OPTIONS, *options)
    ranks(2).run(train_with_bad_step, config, "loss", timeout=120)
    resumed = runs.configure(
        tmp_path / "from 2", *OPTIONS, *options, f"train.resume={checkpoint_path(config.out, BAD - 1)}"
    )
    ranks(2).run(train_from_later_batches, resumed, timeout=120)
    skipped, expected = runs.metrics_of(config.out), runs.metrics_of(resumed.out)
    assert [line["loss"] for line in skipped[BAD:]] == [line["loss"] for line in expected[:2]]


def train_from_later_batches(config: TrainConfig) -> None:
    """Train as if the data of step BAD were not there."""
    indices = Sampler.indices
    with mock.patch.object(Sampler, "indices", lambda sampler, number: indices(sampler, number + 1)):
        train(config, display="none")


@pytest.mark.long
@pytest.mark.parametrize("mode", ["stop", pytest.param("skip", marks=pytest.mark.exhaustive)])
def test_the_batch_is_saved_as_every_rank_had_it(ranks: MakeRanks, tmp_path: Path, mode: str) -> None:
    config = runs.configure(tmp_path / "run", *OPTIONS, "grid.x=2", "grid.z=2", f"train.on_nonfinite={mode}")
    folder = config.out / "nonfinite" / "step-00000003"
    if mode == "stop":
        with pytest.raises(DivergenceError, match=rf"in step 3; its batch is saved in {folder}; the last checkpoint"):
            ranks(4).run(train_with_bad_step, config, "loss", timeout=120)
    else:
        ranks(4).run(train_with_bad_step, config, "loss", timeout=120)
    dataset = open_dataset(config.data.path, seq_len=config.train.seq_len)
    expected = Sampler(len(dataset), config.train.batch, config.train.seed).indices(BAD - 1)
    assert sorted(path.name for path in folder.iterdir()) == [f"rank-{rank}.safetensors" for rank in range(4)]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    # x is innermost: ranks 0 and 1 have the first half of the batch, 2 and 3 the second.
    for rank in range(4):
        batch = load_file(folder / f"rank-{rank}.safetensors")
        rows = expected[:4] if rank < 2 else expected[4:]
        assert batch["sequences"].tolist() == rows.tolist()
        ids = np.stack([dataset[index] for index in rows])
        assert (batch["tokens"] == ids[:, :-1]).all()
        assert (batch["targets"] == ids[:, 1:]).all()


def record(skips: bool, losses: Sequence[float], norms: Sequence[float], **options: Any) -> list[str]:
    """Record steps. Returns what is printed."""
    messages: list[str] = []

    class Screen(ProgressReporter):
        def print_message(self, message: str) -> None:
            messages.append(message)

    recorder = StepRecorder(
        lambda step: step, None, Screen(), skips_nonfinite=skips, on_nonfinite=lambda step: f" ({step})", **options
    )
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1):
        recorder.add(step, 0.1, torch.tensor(loss), torch.tensor(norm))
    return messages


def test_steps_are_skipped_with_a_line_and_only_so_many_in_a_row() -> None:
    assert record(True, [1.0, math.nan, 1.0], [1.0, math.nan, math.inf]) == [
        "step 2 is skipped: the loss is nan (2)",
        "step 3 is skipped: the gradient's norm is inf (3)",
    ]
    bad = [math.nan] * 32
    assert len(record(True, [*bad, 1.0, *bad], [*bad, 1.0, *bad])) == 64
    with pytest.raises(DivergenceError, match=r"was not finite in 33 steps in a row, of which the last is 33"):
        record(True, [math.nan] * 33, [1.0] * 33)


def test_an_overflow_of_fp16_is_no_fault_of_the_batch() -> None:
    assert record(False, [1.0, 1.0], [math.inf, 1.0], skips_overflows=True) == []
    with pytest.raises(DivergenceError, match=r"the loss is nan in step 2 \(2\)"):
        record(False, [1.0, math.nan], [1.0, 1.0], skips_overflows=True)


@pytest.mark.long
def test_a_report_can_be_written_of_skipped_steps(ranks: MakeRanks, tmp_path: Path) -> None:
    config = runs.configure(tmp_path / "run", *OPTIONS)
    ranks(1).run(train_with_bad_step, config, "loss", timeout=60)
    runs.write_config(config)
    run = read_run(config.out)
    assert [math.isnan(loss) for loss in run.losses] == [False, False, True, False, False]
    assert run.finite_losses()[0] == [1, 2, 4, 5]
    for line in (config.out / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    ranks(1).run(runs.train_quietly, runs.configure(config.out, *OPTIONS, "train.steps=6", "train.resume=latest"))
    assert len(runs.metrics_of(config.out)) == 6


def test_only_so_many_batches_are_kept(tmp_path: Path) -> None:
    task = mock.MagicMock()
    task.config.out = tmp_path
    task.read_batch.return_value = {"tokens": np.arange(3)}
    with mock.patch.object(dist, "get_rank", return_value=0), mock.patch.object(nonfinite, "MAX_BATCHES", 2):
        assert [nonfinite.save_batch(task, step)[:24] for step in (1, 2, 2, 3)] == [
            "; its batch is saved in ", "; its batch is saved in ", "; its batch is saved in ",
            "; its batch is not saved",
        ]  # fmt: skip
        task.read_batch.side_effect = ValueError("text.txt: was cut short")
        assert nonfinite.save_batch(task, 1) == "; its batch could not be saved: text.txt: was cut short"
    assert sorted(path.name for path in (tmp_path / "nonfinite").iterdir()) == ["step-00000001", "step-00000002"]


def test_skipping_is_refused_where_tables_are_updated_in_the_backward_pass(tmp_path: Path) -> None:
    values = {
        "out": str(tmp_path),
        "model": {"kind": "dlrm", "name": "small"},
        "data": {"format": "synthetic"},
        "train": {"steps": 1, "batch": 4, "on_nonfinite": "skip"},
    }
    with pytest.raises(ValueError, match=r"tables are updated in the backward pass.*on_nonfinite='stop' would do"):
        make_config(values, [])


@pytest.mark.parametrize("options", [["grid.x=2"], ["grid.data=2", "train.optimizer_state=device", "train.dtype=fp16"]])
def test_a_folder_with_a_weight_that_is_not_finite_is_refused_before_the_first_step(
    ranks: MakeRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
    folder = model_folders.write_folder(tmp_path / "model", kind="gpt2", tied=True)
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["transformer.h.1.mlp.c_proj.bias"][5] = math.nan  # a later one
    # Of the second shard over x; and in fp16 a number that is finite in the file is infinite.
    weights["transformer.h.0.attn.c_proj.weight"][-1, -1] = math.inf if options == ["grid.x=2"] else 7e4
    save_file(weights, file, {"format": "pt"})
    config = model_folders.configure(tmp_path / "run", folder, *options)
    with pytest.raises(
        ValueError, match=rf"{file}: transformer\.h\.0\.attn\.c_proj\.weight is not finite.* 1 infinite"
    ):
        model_folders.train_on_grid(ranks, config)
    assert not (config.out / "metrics.jsonl").exists()


def test_a_checkpoint_of_another_library_with_a_weight_that_is_not_finite_is_refused(
    ranks: MakeRanks, tmp_path: Path
) -> None:
    config = runs.configure(tmp_path / "run", f"train.resume={tmp_path / 'saved'}")
    model = GPT(config.model.to_gpt(data_vocab=256, seq_len=config.train.seq_len))
    with torch.no_grad():
        model.get_parameter("blocks.1.mlp.down.weight")[3, :2] = math.nan
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "saved", no_dist=True)
    with pytest.raises(ValueError, match=r"saved: blocks\.1\.mlp\.down\.weight is not finite: of \d+ numbers, 2 NaN"):
        ranks(1).run(runs.train_quietly, config)
