"""A training run from its checked configuration to its report: what `train` and `demo` share."""

import os
import signal
from contextlib import nullcontext

import typer

from stretto.cli.console import fail, stdout_on_stderr
from stretto.train.config import TrainConfig, config_to_toml
from stretto.train.launch import RankFailure, launch
from stretto.train.trainer import train

RANK_FAILED = 1


def run_training(config: TrainConfig, *, as_json: bool) -> signal.Signals | None:
    """Start the ranks and train. Returns the signal that stopped it, if one did; ends the command if a rank failed."""
    config.out.mkdir(parents=True, exist_ok=True)
    if is_first():
        (config.out / "config.toml").write_text(config_to_toml(config), encoding="utf-8")
    try:
        with stdout_on_stderr() if as_json else nullcontext():
            return launch(train_silently if as_json else train, config)
    except RankFailure as failure:
        raise fail(str(failure), RANK_FAILED, as_json=as_json) from failure


def train_silently(config: TrainConfig) -> None:
    """`train` without anything on the screen."""
    train(config, display="none")


def is_first() -> bool:
    """Whether this process speaks for the job: the launcher, or the first of torchrun's ranks."""
    return os.environ.get("RANK", "0") == "0"


def exit_by(signal_number: signal.Signals) -> typer.Exit:
    """The exit of a command that a signal has stopped, as shells count it."""
    return typer.Exit(128 + signal_number)
