# SPDX-License-Identifier: Apache-2.0
"""Shows a run's progress on the screen: a progress bar on a terminal, lines of text elsewhere."""

import os
import sys
from contextlib import AbstractContextManager, suppress
from typing import IO, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stretto.train.observe.metrics import StepMetrics

Display = Literal["auto", "lines", "none"]


class ProgressReporter(AbstractContextManager["ProgressReporter"]):
    """Shows finished steps, and messages between them. This base class shows nothing."""

    def show(self, metrics: StepMetrics) -> None:
        """Show a finished step."""

    def print_message(self, message: str) -> None:
        """Print a line, above the bar if there is one."""

    def __exit__(self, *_: object) -> None:
        """Restore the terminal."""


def open_reporter(display: Display, *, start: int, steps: int, every: int) -> ProgressReporter:
    """Make the reporter for `display`: "none", "lines" (one every `every` steps), or "auto": a bar on a terminal."""
    console = Console()
    if display == "none":
        return ProgressReporter()
    if display == "auto" and console.is_terminal:
        return Bar(console, start=start, steps=steps)
    return Lines(console, start=start, steps=steps, every=every)


class Bar(ProgressReporter):
    """A progress bar with the loss, tokens (or samples) per second, and the remaining time."""

    def __init__(self, console: Console, *, start: int, steps: int) -> None:
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
        )
        self._task = self._progress.add_task("train", total=steps, completed=start, loss="-", rate="-")

    def show(self, metrics: StepMetrics) -> None:
        self._progress.update(
            self._task,
            completed=metrics.step,
            loss=f"{metrics.loss:.4f}",
            rate=f"{metrics.experts or ''}{_rate(metrics)}",
        )
        if metrics.evaluation:
            self.print_message(f"step {metrics.step}  {_evaluation(metrics).strip()}")

    def print_message(self, message: str) -> None:
        with suppress(OSError):  # the terminal may have been closed
            self._progress.console.print(message, markup=False, highlight=False)

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._progress.stop()


class Lines(ProgressReporter):
    """Lines of text, for files and pipes: for the first step, every `every` steps, and the last step."""

    def __init__(self, console: Console, *, start: int, steps: int, every: int) -> None:
        self._console = console
        self._first, self._steps, self._every = start + 1, steps, every
        self._seconds = 0.0

    def show(self, metrics: StepMetrics) -> None:
        self._seconds += metrics.seconds
        is_due = metrics.step in (self._first, self._steps) or metrics.step % self._every == 0
        if not is_due and not metrics.evaluation:
            return
        left = self._seconds / (metrics.step - self._first + 1) * (self._steps - metrics.step)
        self.print_message(
            f"step {metrics.step}/{self._steps}  loss {metrics.loss:.4f}  {metrics.experts or ''}{_evaluation(metrics)}"
            f"{_rate(metrics)}  {_clock(left)} left"
        )

    def print_message(self, message: str) -> None:
        print_line(message, self._console.file)


def _rate(metrics: StepMetrics) -> str:
    mfu = "" if metrics.mfu is None else f" ({metrics.mfu:.1%} MFU)"
    return f"{metrics.rate:,.0f} {metrics.unit}/s{mfu}"


def _evaluation(metrics: StepMetrics) -> str:
    """Format the evaluation on held-out samples for a line of text."""
    shown = [(name.replace("_", " "), value) for name, value in metrics.evaluation.items()]
    return "".join(f"{name} {'undefined' if value is None else format(value, '.4f')}  " for name, value in shown)


def print_line(text: str, file: IO[str] | None = None) -> None:
    """Print to `file` (default: stdout). If its reader has exited (`| head`), discard the output: the run continues."""
    file = file or sys.stdout
    try:
        print(text, file=file, flush=True)
    except OSError:
        _send_nowhere(file)


def _send_nowhere(file: IO[str]) -> None:
    """Discard what `file` has buffered and all later output. Otherwise Python's flush at exit would fail, too."""
    with suppress(OSError, ValueError):  # not every stream is a file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, file.fileno())
        os.close(nowhere)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
