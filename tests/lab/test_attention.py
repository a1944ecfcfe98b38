# SPDX-License-Identifier: Apache-2.0
"""`python -m lab attention`: Stretto and public ways compute the same, and predictions."""

import json
from functools import partial

import pytest

from lab.harness import keep_rows
from lab.operators.attention import BENCH, OURS, AttentionSetting, Row, measure_all


def test_rows_have_stretto_and_public_ways(ranks, tmp_path):
    setting = AttentionSetting(sequences=(128,), masks=("causal",), ranks=2)
    ranks(2).run(measure_all, setting, partial(keep_rows, tmp_path, "kept", Row, {}))
    rows = json.loads((tmp_path / "kept.json").read_text())["rows"]
    assert [row["kind"] for row in rows] == ["forward", "backward"]
    for row in rows:
        assert row.get("failed") is None
        assert row["difference"] < 2e-2  # of all ways
        assert all(row[name] > 0 for name in (*OURS, "gathered", "torch_ulysses", "alone", "exchange"))


def test_predictions_hide_exchanges_of_long_sequences(tmp_path):
    first, *_, last = BENCH(AttentionSetting(ranks=4, cluster="dgx-h200"), tmp_path)["rows"]
    assert first["predicted"] >= first["alone"]
    assert last["hidden"] == pytest.approx(1)
    assert last["exchange"] == pytest.approx(2 * 8 / 0.75 * first["exchange"])
