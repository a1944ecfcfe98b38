# SPDX-License-Identifier: Apache-2.0
"""Without matplotlib, which is optional, commands do their work and say how to get pictures."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from tests.report.test_layout import ABOUT, overlap
from tests.report.test_run_report import write_run
from typer.testing import CliRunner

from lab.pictures import draw_result
from stretto.cli import app
from stretto.report import pictures, write_report

HINT = "pip install 'stretto[plots]'"


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """No module that imports matplotlib can be imported, as if it were not installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    drawing = ("stretto.report.style", "stretto.report.schedule", "stretto.report.loss_plot", "stretto.report.timeline")
    for name in drawing:
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ModuleNotFoundError, match="matplotlib"):
        importlib.import_module("stretto.report.style")
    pictures._explain_how_to_install.cache_clear()


@pytest.mark.usefixtures("without_matplotlib")
def test_a_run_is_reported_without_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", [5.0, 4.0])
    write_report(tmp_path / "run")
    assert not list(tmp_path.rglob("*.png"))
    summary = (tmp_path / "run" / "summary.md").read_text()
    assert "Each step's is in [metrics.jsonl](metrics.jsonl)." in summary
    assert ".png" not in summary
    write_report(tmp_path / "run")
    assert capsys.readouterr().err.count(HINT) == 1  # printed once


@pytest.mark.usefixtures("without_matplotlib")
def test_a_bench_writes_its_numbers_and_no_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "overlap.json"
    result.write_text(json.dumps(ABOUT | overlap(2)))
    assert draw_result(result) is None
    assert HINT in capsys.readouterr().err


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("without_matplotlib")
@pytest.mark.parametrize("command", [["collective", "show", "ring-all-reduce", "--ranks", "2"]])
def test_a_command_that_only_draws_is_refused(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, command)
    assert (result.exit_code, HINT in result.stderr) == (2, True)
    assert not list(tmp_path.iterdir())
