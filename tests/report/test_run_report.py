# SPDX-License-Identifier: Apache-2.0
"""loss.png and summary.md say what is in a run's folder, whole or cut short."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from stretto.report import largest_difference, plot_loss, read_run, write_report
from stretto.report.loss_plot import running_mean
from stretto.report.run import draw_loss
from stretto.train.config import config_to_toml, make_config

SUMMARY = {
    "steps": 4, "loss": 2.5, "seconds": 83.0, "tokens_per_second": 12345.6, "peak_memory_bytes": 3 << 20,
    "parameters": 1_234_567, "bytes_sent": {"data": 0, "x": 2048, "z": 1536}, "ranks": 2,
    "grid": {"data": 1, "x": 2, "y": 1, "z": 1}, "device": "cpu",
}  # fmt: skip


def write_run(out: Path, losses: list[float], *, x: int = 2, summary: dict[str, Any] | None = None) -> Path:
    out.mkdir()
    config = make_config(
        {
            "out": str(out),
            "grid": {"x": x},
            "model": {"layers": 2, "hidden": 8, "heads": 2},
            "data": {"path": "text.txt"},
            "train": {"steps": 4, "batch": 8, "seq_len": 16},
        }
    )
    (out / "config.toml").write_text(config_to_toml(config))
    lines = [{"step": step, "loss": loss, "tokens_per_second": 10.0} for step, loss in enumerate(losses, start=1)]
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if summary is not None:
        (out / "summary.json").write_text(json.dumps(summary))
    return out


def png_size(file: Path) -> tuple[int, int]:
    header = file.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(header[16:20]), int.from_bytes(header[20:24])


def test_a_summary_has_the_numbers_of_the_run(tmp_path: Path) -> None:
    out = write_run(tmp_path / "run", [5.0, 4.0, 3.0, 2.5], summary=SUMMARY)
    write_report(out)
    text = (out / "summary.md").read_text()
    for words in ("4 of 4", "2.5000 nats", "12,346", "3 MiB", "1,234,567", "1 min 23 s", "| x | 2,048 | 2 KiB |"):
        assert words in text
    assert "| data | 0 |" not in text  # nothing was sent there
    assert f"stretto train {out / 'config.toml'} --set train.resume=latest" not in text  # there is no checkpoint
    assert png_size(out / "loss.png")[0] >= 1000


def test_plots_of_a_run_name_its_device_and_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = write_run(tmp_path / "run", [5.0, 4.0], summary=SUMMARY)
    os.utime(out / "metrics.jsonl", (1.75e9, 1.75e9))  # of a run without a date in its summary
    assert read_run(out).origin == "CPU, 2025-06-15"
    (out / "summary.json").write_text(json.dumps(SUMMARY | {"device": "NVIDIA H200", "date": "2026-01-02"}))
    drawn: list[str] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.extend(t.get_text() for t in figure.texts))
    draw_loss(read_run(out))
    assert "NVIDIA H200, 2026-01-02" in drawn


def test_a_run_cut_short_is_reported_as_far_as_it_went(tmp_path: Path) -> None:
    out = write_run(tmp_path / "run", [5.0, 4.0])
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    write_report(out)
    assert "2 of 4" in (out / "summary.md").read_text()


def test_two_runs_are_compared_step_by_step(tmp_path: Path) -> None:
    one = write_run(tmp_path / "grid", [5.0, 4.0, 3.0], summary=SUMMARY)
    other = write_run(tmp_path / "alone", [5.0, 4.25, 3.0, 2.0], x=1)
    write_report(one, compare_with=other, sample="some ```text```")
    text = (one / "summary.md").read_text()
    assert "differ by at most 2.5e-01" in text
    assert "some text" in text
    assert png_size(one / "loss.png")[1] > png_size(one / "loss.png")[0] / 2
    assert largest_difference(read_run(one), read_run(other)) == 0.25
    skipped = replace(read_run(one), losses=(5.0, math.nan, 3.0))
    assert largest_difference(skipped, read_run(other)) == largest_difference(read_run(other), skipped) == math.inf
    assert largest_difference(skipped, skipped) == 0


def test_runs_without_a_common_step_have_no_difference(tmp_path: Path) -> None:
    one, other = write_run(tmp_path / "one", [1.0]), write_run(tmp_path / "other", [1.0])
    (other / "metrics.jsonl").write_text('{"step": 7, "loss": 1.0, "tokens_per_second": 1.0}\n')
    assert math.isnan(largest_difference(read_run(one), read_run(other)))


def test_a_folder_in_which_nothing_was_trained_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing was trained there"):
        write_report(write_run(tmp_path / "run", []))
    with pytest.raises(ValueError, match="there is no configuration file"):
        write_report(tmp_path)


@pytest.mark.parametrize("steps", [1, 3, 500])
def test_curves_of_any_length_are_drawn(tmp_path: Path, steps: int) -> None:
    curve = (range(1, steps + 1), [5.0 / step for step in range(1, steps + 1)])
    plot_loss({"one": curve, "two": curve, "three": curve}, tmp_path / "loss.png")
    assert png_size(tmp_path / "loss.png")[0] >= 1000


def test_no_curve_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no curve"):
        plot_loss({}, tmp_path / "loss.png")


def test_a_running_mean_keeps_lines_straight_and_both_ends() -> None:
    line = np.linspace(5.0, 2.0, 501)
    np.testing.assert_allclose(running_mean(line), line)
    noise = np.tile([1.0, -1.0], 500)
    assert np.abs(running_mean(noise)[20:-20]).max() < 0.1


@pytest.mark.long
def test_a_mixture_of_experts_has_its_load_in_the_summary_and_a_picture(tmp_path: Path) -> None:
    out = write_run(tmp_path / "run", [5.0, 4.0])
    config = (out / "config.toml").read_text()
    (out / "config.toml").write_text(
        config.replace("layers = 2", "layers = 4\nnum_experts = 4\nmoe_layers = 'every:2'")
    )
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {"expert_load": [1.5, 2.25], "dropped_tokens": [3, 1000], "bias_range": [0.0, 0.012]}
        line |= {"balance_loss": 0.02, "z_loss": 0.001}
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(out)
    text = (out / "summary.md").read_text()
    for words in ("![load by step and block](experts.png)", "| 1 | 1.50 | 3 | 0 |", "| 3 | 2.25 | 1,000 | 0.012 |"):
        assert words in text
    assert "2,006 choices of an expert were dropped" in text
    assert "balance 0.02, z 0.001" in text
    assert png_size(out / "experts.png")[0] >= 1000
    write_report(write_run(tmp_path / "dense", [5.0]))
    assert "## Experts" not in (tmp_path / "dense" / "summary.md").read_text()
