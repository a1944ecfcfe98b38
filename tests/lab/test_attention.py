# SPDX-License-Identifier: Apache-2.0
"""`python -m lab attention`: Stretto and public ways compute the same, and predictions."""

import pytest

from lab.cases import measure_rows
from lab.operators.attention import BENCH, OURS, AttentionSetting, measure, measure_with_variants


@pytest.mark.long
def test_rows_have_stretto_and_public_ways(ranks):
    cases = AttentionSetting(sequences=(8192,), masks=("causal", "packed")).cases()
    *rows, packed, packed_backward = ranks(2).run(measure_rows, 2, None, cases, [None] * 4, measure, len)[0]
    assert [row["kind"] for row in rows] == ["forward", "backward"]
    for row in (packed, packed_backward):
        assert row["difference"] < 2e-2
        assert row["zigzag"] > 0
        balanced, zigzag = (float(cut.split(",")[0]) for cut in row["balance"].split("; "))
        assert 1 <= balanced <= max(zigzag, 1.06)
    for row in rows:
        assert row.get("failed") is None
        assert row["difference"] < 2e-2  # of all ways
        assert all(row[name] > 0 for name in (*OURS, "gathered", "torch_ulysses", "alone", "exchange"))
    (row,) = ranks(2).run(measure_rows, 2, None, cases[1:2], [None], measure_with_variants, len)[0]
    assert row["difference"] < 2e-2
    assert all(row[name] > 0 for name in (*OURS, "turns", "urgent"))


def test_predictions_hide_exchanges_of_long_sequences(tmp_path):
    first, *_, last = BENCH(AttentionSetting(ranks=4, cluster="dgx-h200"), tmp_path)["rows"]
    assert first["predicted"] >= first["alone"]
    assert last["hidden"] == pytest.approx(1)
    assert last["exchange"] == pytest.approx(2 * 8 / 0.75 * first["exchange"])
