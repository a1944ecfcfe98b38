# SPDX-License-Identifier: Apache-2.0
"""Tests of what a run shows on the screen."""

import io
import os
from dataclasses import replace

import pytest
from rich.console import Console

from stretto.train.observe.experts import ExpertMetrics
from stretto.train.observe.metrics import StepMetrics
from stretto.train.observe.progress import Bar, Lines, open_reporter


def metrics(step: int) -> StepMetrics:
    return StepMetrics(step=step, loss=5 / step, grad_norm=1.0, lr=0.1, rate=12345.6, seconds=30.0, seen=step * 100)


def test_without_a_terminal_there_are_lines_for_some_steps_and_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    with open_reporter("auto", start=10, steps=25, every=10) as reporter:
        for step in range(11, 26):
            reporter.show(metrics(step))
    assert capsys.readouterr().out.splitlines() == [
        "step 11/25  loss 0.4545  12,346 tokens/s  0:07:00 left",
        "step 20/25  loss 0.2500  12,346 tokens/s  0:02:30 left",
        "step 25/25  loss 0.2000  12,346 tokens/s  0:00:00 left",
    ]


def test_the_utilization_is_shown_next_to_the_rate(capsys: pytest.CaptureFixture[str]) -> None:
    with open_reporter("lines", start=0, steps=1, every=1) as reporter:
        reporter.show(replace(metrics(1), mfu=0.4567))
    assert "12,346 tokens/s (45.7% MFU)  0:00:00 left" in capsys.readouterr().out


def test_the_highest_load_of_experts_is_shown_and_what_was_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    experts = ExpertMetrics((1.25, 1.5), (0, 0), (0.0, 0.0), 0.01, 0.0)
    with open_reporter("lines", start=0, steps=2, every=1) as reporter:
        reporter.show(replace(metrics(1), experts=experts))
        reporter.show(replace(metrics(2), experts=replace(experts, dropped=(1000, 234))))
    first, second = capsys.readouterr().out.splitlines()
    assert "loss 5.0000  load 1.50  12,346 tokens/s" in first
    assert "loss 2.5000  load 1.50  dropped 1,234  12,346 tokens/s" in second


def test_a_run_continues_when_its_output_is_no_longer_read() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as screen:
        lines = Lines(Console(file=screen), start=0, steps=2, every=1)
        lines.show(metrics(1))
        lines.show(metrics(2))
        screen.flush()  # as Python does at its end: nothing is left that could fail


def test_nothing_is_shown_where_nothing_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with open_reporter("none", start=0, steps=1, every=1) as reporter:
        reporter.show(metrics(1))
        reporter.print_message("stopped")
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_a_bar_has_loss_rate_and_time_left() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120, color_system=None)
    with Bar(console, start=0, steps=20) as bar:
        bar.show(metrics(10))
        bar.print_message("stopped after step 10")
    shown = screen.getvalue()
    for part in ("10/20", "loss 0.5000", "12,346 tokens/s", "left", "stopped after step 10"):
        assert part in shown
