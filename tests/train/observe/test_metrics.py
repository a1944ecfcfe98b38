# SPDX-License-Identifier: Apache-2.0
"""metrics.jsonl, as a resumed run reads it, and what goes to TensorBoard and Weights & Biases."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from tests.train import runs

from stretto.models.moe import RoutingStatistics
from stretto.train.observe.experts import ExpertMetrics, pack
from stretto.train.observe.metrics import METRICS_FILE, MetricsLog, StepMetrics, read_steps
from stretto.train.preflight import preflight

LINES = [f'{{"step": {step}, "loss": 2.5, "tokens_per_second": 9}}\n'.encode() for step in (1, 2, 3)]


def write(folder: Path, *lines: bytes) -> Path:
    (folder / METRICS_FILE).write_bytes(b"".join(lines))
    return folder / METRICS_FILE


def test_a_resumed_run_keeps_the_lines_up_to_its_start_whatever_a_kill_has_cut_short(tmp_path: Path) -> None:
    file = write(tmp_path, *LINES, b'{"step": 4, "lo\xc3')
    with MetricsLog(tmp_path, 2):
        assert file.read_bytes() == b"".join(LINES[:2])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[]\n", "no number 'step'"),
        (b'{"step": "2"}\n', "no number 'step'"),
        (b'{"step": 2, "tokens_per_second": 1}\n', "no number 'loss'"),
        (b'{"step": 2, "l\xffoss": 1}\n', "damaged: .*utf-8"),
        (b"[" * 300_000 + b"\n", "damaged: .*recursion"),
        (b'{"step": 2, "lo\n', "damaged"),
    ],
)
def test_a_damaged_line_is_named_and_no_later_one_lost(tmp_path: Path, line: bytes, message: str) -> None:
    file = write(tmp_path, LINES[0], line, LINES[2])
    with pytest.raises(ValueError, match=rf"metrics\.jsonl: line 2 is .*{message}"):
        list(read_steps(file))
    with pytest.raises(ValueError, match="line 2"):
        MetricsLog(tmp_path, 3)
    assert file.read_bytes() == LINES[0] + line + LINES[2]


STEP = StepMetrics(step=3, loss=2.5, grad_norm=1.0, lr=0.1, rate=90.0, seconds=0.1, seen=27, ranks=2)
EVALUATED = {"evaluation_loss": 2.0, "perplexity": None}


def fake_package(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package that notes how it is called, in the place of one that is not installed."""
    package = mock.MagicMock(spec=ModuleType(name), __spec__=ModuleSpec(name, None))
    package.init, package.SummaryWriter = mock.Mock(), mock.Mock()
    monkeypatch.setitem(sys.modules, name, package)
    return package


def test_steps_and_evaluations_go_to_weights_and_biases_and_to_tensorboard_by_the_same_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb, tensorboard = (fake_package(name, monkeypatch) for name in ("wandb", "torch.utils.tensorboard"))
    evaluated = StepMetrics(**{**vars(STEP), "evaluation": EVALUATED})
    with MetricsLog(tmp_path / ".", 0, tensorboard=True, wandb="voices", options={"ranks": 2}) as log:
        log.write(evaluated)
    scalars = {
        "train/loss": 2.5,
        "train/grad_norm": 1.0,
        "train/lr": 0.1,
        "train/tokens_per_second": 90.0,
        "train/tokens_per_second_per_rank": 45.0,
        "evaluation/evaluation_loss": 2.0,
    }
    wandb.init.assert_called_once_with(project="voices", group=tmp_path.name, dir=str(tmp_path), config={"ranks": 2})
    wandb.init.return_value.log.assert_called_once_with(scalars, step=3)
    wandb.init.return_value.finish.assert_called_once_with(exit_code=0)
    calls = tensorboard.SummaryWriter.return_value.add_scalar.call_args_list
    assert {call.args[0]: call.args[1] for call in calls} == scalars
    assert {call.args[2] for call in calls} == {3}


def test_a_run_that_fails_is_one_that_has_failed_in_weights_and_biases_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = fake_package("wandb", monkeypatch)
    with pytest.raises(KeyError), MetricsLog(tmp_path, 0, wandb="voices"):
        raise KeyError("a mistake")
    wandb.init.return_value.finish.assert_called_once_with(exit_code=1)


def test_weights_and_biases_that_cannot_start_raises_with_how_to_work_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_package("wandb", monkeypatch).init.side_effect = OSError("no API key")
    with pytest.raises(ValueError, match=r"train\.wandb='voices': no API key: .* WANDB_MODE=offline"):
        MetricsLog(tmp_path, 0, wandb="voices")


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("tensorboard=true", r"is true, .*pip install 'stretto\[tensorboard\]', or set train\.tensorboard=false"),
        ("wandb=voices", r"is 'voices', .*pip install 'stretto\[wandb\]', or set train\.wandb=none"),
    ],
)
def test_a_package_that_is_not_installed_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, remedy: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"train\.{option.partition('=')[0]} {remedy}"):
        preflight(runs.configure(tmp_path / "run", f"train.{option}"))


def noted_training(config: Any) -> list[Any]:
    """Train with a package in the place of wandb that notes its calls."""
    with pytest.MonkeyPatch.context() as patch:
        wandb = fake_package("wandb", patch)
        runs.train_quietly(config)
        return [(call.args[0]["train/loss"], call.kwargs) for call in wandb.init.return_value.log.call_args_list]


def test_only_the_first_rank_of_a_run_logs(ranks: Any, tmp_path: Path) -> None:
    config = runs.configure(tmp_path / "run", "train.wandb=voices", "train.steps=2", "grid.data=2")
    first, other = ranks(2).run(noted_training, config)
    losses = [line["loss"] for line in runs.metrics_of(config.out)]
    assert first == [(loss, {"step": step}) for step, loss in enumerate(losses, start=1)]
    assert other == []


def test_router_statistics_are_in_a_steps_line_and_among_its_scalars() -> None:
    experts = ExpertMetrics.of([[1.5, 7.0, 0.02, 0.01, 0.1], [2.0, 0.0, 0.0, 0.02, 0.2]])
    step = StepMetrics(**{**vars(STEP), "experts": experts})
    assert {key: value for key, value in step.as_line().items() if key not in STEP.as_line()} == {
        "expert_load": [1.5, 2.0],
        "dropped_tokens": [7, 0],
        "bias_range": [0.02, 0.0],
        "balance_loss": pytest.approx(0.03),
        "z_loss": pytest.approx(0.3),
    }
    scalars = step.as_scalars()
    assert (scalars["experts/load_0"], scalars["experts/load_1"], scalars["experts/dropped_tokens"]) == (1.5, 2.0, 7)


def test_loads_are_the_fullest_expert_by_the_mean_expert() -> None:
    counts = torch.tensor([[6.0, 2.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]).double()
    dropped = torch.tensor([[1.0, 0.0, 0.0, 2.0], [0.0] * 4]).double()
    biases = torch.tensor([[0.5, -0.25, 0.0, 0.0], [0.0] * 4])
    packed = pack(RoutingStatistics(("a", "b"), counts, dropped, torch.zeros(2, 2).double(), biases))
    assert packed[0].tolist() == [3.0, 3.0, 0.75, 0.0, 0.0]
    assert packed[1].tolist() == [0.0] * 5
