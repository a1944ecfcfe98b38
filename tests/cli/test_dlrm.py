# SPDX-License-Identifier: Apache-2.0
"""`stretto train` of a DLRM, with real ranks: from Criteo's text to the report, and errors with the line of a file."""

import json
import random
from pathlib import Path

import pytest
from tests.cli.commands import finish, start
from typer.testing import CliRunner

from stretto.cli import app

CONFIG = """
out = "{out}"
ranks = 2
[model]
kind = "dlrm"
rows = [{rows}]
dim = 4
bottom = [8, 4]
top = [8, 1]
[data]
format = "criteo"
path = "{data}"
evaluation_samples = 50
[train]
steps = 4
batch = 16
evaluate_every = 2
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
    draw = random.Random(0)
    lines = [
        "\t".join(
            [str(draw.randrange(2)), *(str(draw.randrange(100)) for _ in range(13)),
             *(f"{draw.randrange(20):08x}" for _ in range(26))]
        )
        for _ in range(200)
    ]  # fmt: skip
    (tmp_path / "logs.txt").write_text("\n".join(lines) + "\n")
    rows = ", ".join(["10"] * 26)
    (tmp_path / "run.toml").write_text(CONFIG.format(out=tmp_path / "out", rows=rows, data=tmp_path / "logs.txt"))
    return tmp_path / "run.toml"


@pytest.mark.exhaustive
def test_a_run_leaves_everything_in_its_folder(config: Path) -> None:
    status, output, errors = finish(start("train", config, "--json", "--trace"))
    assert status == 0, errors
    result, out = json.loads(output), config.parent / "out"
    for name in ("config.toml", "metrics.jsonl", "summary.json", "loss.png", "summary.md", "timeline.png"):
        assert (out / name).stat().st_size > 0
    assert (result["step"], result["ranks"]) == (4, 2)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [("auc" in line) for line in lines] == [False, True, False, True]
    assert result["auc"] == lines[-1]["auc"]
    assert result["samples_per_second"] > 0
    report = (out / "summary.md").read_text()
    for words in ("nats a sample", f"auc {result['auc']:.4f}", "samples/s", "16 samples, fp32"):
        assert words in report

    exported = CliRunner().invoke(app, ["export", str(out), "--to", str(out / "model.safetensors")])
    assert exported.exit_code == 0, exported.output


def test_a_line_that_is_no_sample_ends_the_command_before_any_rank_starts(config: Path) -> None:
    logs = config.parent / "logs.txt"
    lines = logs.read_text().splitlines()
    lines[120] = lines[120].replace("\t", " ", 1)
    logs.write_text("\n".join(lines))
    result = CliRunner().invoke(app, ["train", str(config)])
    assert result.exit_code == 2
    assert f"{logs}: line 121 has 39 columns, but must have 40" in result.output
    assert not (config.parent / "out").exists()
