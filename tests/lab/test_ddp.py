# SPDX-License-Identifier: Apache-2.0
"""`python -m lab ddp`: what counts as exposed, ranks of a checkout on the CPU, and a rank that fails."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import stretto
from lab.commands import app
from lab.training import ddp
from lab.training.ddp import split_kernels
from stretto.train.observe.timeline import subtract, total

SOURCE = Path(stretto.__file__).parents[1]
OPTIONS = ["--before", str(SOURCE), "--cpu", "--ranks", "2", "--turns", "1", "--steps", "2"]


def test_collectives_are_exposed_where_none_of_the_models_kernels_runs():
    work, communication = split_kernels([[False, 0, 10], [True, 8, 14], [False, 12, 20], [True, 19, 21]])
    assert (work, communication) == (((0, 10), (12, 20)), ((8, 14), (19, 21)))
    assert total(subtract(communication, work)) == 2 + 1


@pytest.mark.exhaustive
def test_two_checkouts_train_and_are_measured(tmp_path):
    result = CliRunner().invoke(app, ["ddp", *OPTIONS, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "ddp.json").read_text())
    assert [(row["checkout"], row["rank"]) for row in found["rows"]] == [
        ("before", 0), ("before", 1), ("after", 0), ("after", 1),
    ]  # fmt: skip
    assert all(row["milliseconds"] > 0 for row in found["rows"])
    assert str(SOURCE) not in (tmp_path / "ddp.json").read_text()  # results are committed


def test_a_rank_that_fails_ends_the_others_and_is_quoted(tmp_path, monkeypatch):
    script = tmp_path / "rank.py"
    script.write_text(
        "import json, sys, time\n"
        "if json.loads(sys.argv[1])['rank'] == 1:\n    raise SystemExit('no such algorithm')\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(ddp, "_RANK", script)
    with pytest.raises(ValueError, match="rank 1 of before died at: a training; its last words: no such algorithm"):
        ddp.BENCH(ddp.DdpSetting(SOURCE, ranks=2, on_cpu=True), tmp_path / "out")


def test_a_folder_without_stretto_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["ddp", "--before", str(tmp_path)])
    assert result.exit_code == 2
    assert "holds no package stretto" in result.output
