# SPDX-License-Identifier: Apache-2.0
"""`python -m lab experts`: the runs of figure 7.5 train the same, and send what section 7.3 says."""

import json

import pytest
from tests.lab.workloads import start_on_pool
from typer.testing import CliRunner

from lab.commands import app
from lab.experts import communication
from lab.experts.communication import (
    ALL_REDUCE,
    ALL_TO_ALL,
    BARS,
    BENCH,
    GRADIENTS,
    IN_ITS_PLACE,
    OVER_X,
    STEP,
    ExpertsSetting,
    tabulate,
)

NAMES = [bar.name for bar in BARS]


@pytest.mark.exhaustive
def test_runs_train_the_same_and_send_what_is_predicted(ranks, tmp_path, monkeypatch):
    start_on_pool(monkeypatch, communication, ranks)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    fast = {"link": 1000, "node_link": 1000, "repeats": 1, "rounds": 1}
    setting = ExpertsSetting(x=2, layers=2, hidden=128, batch=2, seq_len=64, **fast)
    BENCH(setting, tmp_path)
    rows = {(row["name"], row["part"]): row for row in json.loads((tmp_path / "experts.json").read_text())["rows"]}

    def column(part: str, key: str) -> list[float]:
        return [rows[name, part][key] for name in NAMES]

    assert column(ALL_TO_ALL, "calls") == [6, 6, 4]
    assert column(ALL_REDUCE, "calls") == [6, 3, 2]
    assert column(IN_ITS_PLACE, "calls") == [None, 8, 6]
    baseline, dropped, both = column(ALL_TO_ALL, "megabytes")
    # exactly 1/2 and then 2/3 of the rows; their numbers and weights, which are sent as well, are not predicted
    assert dropped == pytest.approx(baseline / 2, rel=0.01)
    assert both == pytest.approx(baseline / 3, rel=0.01)
    # predicted of experts that have as many tokens each; the router here gives some more
    assert column(ALL_TO_ALL, "predicted_megabytes") == pytest.approx([baseline, dropped, both], rel=0.05)
    assert rows[NAMES[0], OVER_X]["predicted_megabytes"] == pytest.approx(rows[NAMES[0], OVER_X]["megabytes"], rel=0.01)
    losses, norms = column(STEP, "loss"), column(STEP, "gradient_norm")
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)
    assert (losses[1], norms[1]) == (losses[2], norms[2])  # recomputation changes no bit


@pytest.mark.exhaustive
def test_runs_on_gpus_train_the_same_in_bf16_and_count_the_bytes_of_one_step(ranks):
    sizes = {"x": 2, "hidden": 256, "batch": 2, "seq_len": 64, "repeats": 2}
    setting = ExpertsSetting(on_gpus=True, **sizes)  # here, CPUs
    runs, _ = ranks(4).run(communication.measure_bars, setting)[0]
    predictions = {bar.name: communication.predict_bytes(setting, bar) for bar in BARS}
    rows = {(row["name"], row["part"]): row for row in tabulate(setting, predictions, runs)}
    for name in NAMES:
        sent = rows[name, ALL_TO_ALL]
        assert sent["megabytes"] == pytest.approx(sent["predicted_megabytes"], rel=0.02)
        assert sent["milliseconds"] is None
        assert rows[name, STEP]["milliseconds"] > 0 < rows[name, STEP]["predicted_milliseconds"]
        assert rows[name, STEP]["loss"] == pytest.approx(rows[NAMES[0], STEP]["loss"], rel=1e-3)


def run(bar: str, is_slow: bool, seconds: float, waited: float) -> dict[str, object]:
    """A measured run that waits half of `waited` for all-to-alls, and half over x."""
    parts = {ALL_TO_ALL: 0.5, ALL_REDUCE: 0.25, IN_ITS_PLACE: 0.25, GRADIENTS: 0.0}
    return {
        "bar": bar,
        "is_slow": is_slow,
        "step_milliseconds": 1e3 * seconds,
        "sent": {part: 4e6 * share for part, share in parts.items()},
        "waited": {part: waited * share for part, share in parts.items()},
        "loss": 5.0,
        "gradient_norm": 1.0,
    }


def test_predictions_are_bytes_over_rates_and_the_step_without_links_on_top():
    setting = ExpertsSetting(link=2.0, node_link=4.0)
    predictions = {
        name: {ALL_TO_ALL: 8e6 / turn, OVER_X: 8e6 / turn, GRADIENTS: 2e6} for turn, name in enumerate(NAMES, start=1)
    }
    before = {(row["name"], row["part"]): row for row in tabulate(setting, predictions)}
    assert before[NAMES[0], ALL_TO_ALL]["predicted_milliseconds"] == pytest.approx(4000)
    assert before[NAMES[0], OVER_X]["predicted_milliseconds"] == pytest.approx(2000)
    assert before[NAMES[0], STEP]["predicted_milliseconds"] == pytest.approx(7000)
    assert before[NAMES[1], STEP]["predicted_saved"] == pytest.approx(3 / 7)
    measured = [run(NAMES[0], False, 1.0, 0.0), run(NAMES[0], True, 9.0, 8.0), run(NAMES[1], True, 6.0, 4.0)]
    failed = {"bar": NAMES[2], "is_slow": True, "error": "no memory"}
    after = {(row["name"], row["part"]): row for row in tabulate(setting, predictions, [*measured, failed])}
    assert after[NAMES[0], STEP]["predicted_milliseconds"] == pytest.approx(8000)
    assert after[NAMES[1], STEP]["saved"] == pytest.approx(1 / 3)
    assert after[NAMES[1], OVER_X]["saved"] == pytest.approx(1 / 2)
    assert (after[NAMES[1], OVER_X]["milliseconds"], after[NAMES[1], OVER_X]["megabytes"]) == pytest.approx((2000, 2))
    assert after[NAMES[2], STEP]["milliseconds"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--layers", "3"], "blocks alternate, so that it must be even; 4 would do"),
        (["--hidden", "48"], "64 would do"),
        (["--batch", "3"], "which data = 2 does not divide; 4 would do"),
        (["--x", "1"], "x is 1, but must be at least 2"),
        (["--link", "0"], "link is 0.0 MB/s, but must be more than 0; 1 would do"),
    ],
)
def test_settings_that_cannot_work_are_refused(arguments, words):
    result = CliRunner().invoke(app, ["experts", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
