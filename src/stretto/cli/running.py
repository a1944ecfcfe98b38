# SPDX-License-Identifier: Apache-2.0
"""Runs training from a checked configuration to the report, for `stretto train` and `stretto demo`."""

import os
import signal
from contextlib import ExitStack, nullcontext

import typer

from stretto.atomic_files import write_atomically
from stretto.cli.console import fail, refusing_bad_input, stdout_on_stderr
from stretto.launch import RankFailure, remove_traces
from stretto.launch.elastic import continues_job
from stretto.launch.run_lock import command_lock
from stretto.report import remove_report
from stretto.train.config import JobConfig, config_to_toml
from stretto.train.job import launch
from stretto.train.trainer import train

RANK_FAILED = 1


def run_training(config: JobConfig, *, as_json: bool) -> signal.Signals | None:
    """Start the ranks and train. Returns the signal that stopped it, if one did; ends the command if a rank failed.

    No other command uses the run's folder meanwhile. Files of an earlier run that this one rewrites are deleted first.
    """
    with ExitStack() as stack:
        stack.enter_context(refusing_bad_input(as_json=as_json))
        if is_first():
            stack.enter_context(command_lock(config.out))
            # A job that torchrun continues keeps the whole grid's file, and the traces of why it was started again.
            if not continues_job(config.out):
                _begin_folder(config)
        try:
            with stdout_on_stderr() if as_json else nullcontext():
                return launch(train_silently if as_json else train, config)
        except RankFailure as failure:
            raise fail(str(failure), RANK_FAILED, as_json=as_json) from failure


def _begin_folder(config: JobConfig) -> None:
    """Write the configuration into the run's folder, and remove reports and traces of an earlier run."""
    try:
        write_atomically(config.out / "config.toml", config_to_toml(config))
        remove_report(config.out)
        remove_traces(config.out)
    except OSError as error:
        raise ValueError(f"out is {str(config.out)!r}, where nothing can be written: {error.strerror}") from error


def train_silently(config: JobConfig) -> None:
    """Train without printing anything."""
    train(config, display="none")


def is_first() -> bool:
    """True if this process is the launcher, or the first of torchrun's ranks."""
    return os.environ.get("RANK", "0") == "0"


def exit_by(signal_number: signal.Signals) -> typer.Exit:
    """The exit of a command that a signal has stopped: status 128 + the signal's number."""
    return typer.Exit(128 + signal_number)
