# SPDX-License-Identifier: Apache-2.0
"""`python -m lab recompute`: modes train the same, and savings are reported with the planner's predictions."""

import json

import pytest
from tests.lab.workloads import start_on_pool
from typer.testing import CliRunner

from lab.commands import app
from lab.training import recompute
from lab.training.recompute import RecomputeSetting


@pytest.mark.long
def test_modes_train_the_same_and_send_what_is_predicted(ranks, tmp_path, monkeypatch):
    start_on_pool(monkeypatch, recompute, ranks)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    setting = RecomputeSetting(
        modes=("communication", "products"), links=(1000,), layers=2, batch=1, seq_len=16, repeats=1, rounds=1
    )
    recompute.BENCH(setting, tmp_path)
    rows = json.loads((tmp_path / "recompute.json").read_text())["rows"]
    assert [(row["link_megabytes"], row["recompute"]) for row in rows] == [
        (link, mode) for link in (None, 1000) for mode in ("full", "communication", "products")
    ]
    assert len({(row["loss"], row["gradient_norm"], row["last_loss"]) for row in rows}) == 1
    for row in rows:
        assert row["sent_megabytes"] == pytest.approx(row["predicted_megabytes"], rel=0.01)
        assert ("saved_milliseconds" in row) == (row["recompute"] != "full")
        assert ("predicted_milliseconds" in row) == (row["recompute"] != "full" and row["link_megabytes"] is not None)
    # Of each block's two sums "full" sends the first again: the second is of what nobody would read.
    assert rows[0]["sent_megabytes"] - rows[1]["sent_megabytes"] == pytest.approx(2 * 1 * 16 * 128 * 4 / 1e6)


def test_the_prediction_is_the_removed_bytes_over_the_link():
    setting = RecomputeSetting(links=(10,), layers=2, batch=1, seq_len=16)
    times = [(None, 100.0, 80.0), (10, 130.0, 90.0)]
    rows = [
        {"link_megabytes": link, "recompute": mode, "step_milliseconds": milliseconds}
        for link, *both in times
        for mode, milliseconds in zip(("full", "communication"), both, strict=True)
    ]
    found = recompute.compare(setting, rows)
    assert [row.get("saved_milliseconds") for row in found] == [None, 20.0, None, 40.0]
    assert found[3]["predicted_milliseconds"] == pytest.approx(2 * 1 * 16 * 128 * 4 / 10e6 * 1e3)
    failed = recompute.compare(setting, [{"link_megabytes": None, "recompute": "full", "error": "no memory"}, rows[1]])
    assert "predicted_milliseconds" not in failed[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "1"], "ranks is 1, but must be at least 2"),
        (["--hidden", "192", "--ranks", "2"], "128 would do"),
        (["--modes", "every:9"], "the model has 4 blocks; every:4 would do"),
        (["--links", "fast"], "--links has 'fast'"),
    ],
)
def test_settings_that_cannot_work_are_refused(arguments, words):
    result = CliRunner().invoke(app, ["recompute", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
