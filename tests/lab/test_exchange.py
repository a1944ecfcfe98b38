# SPDX-License-Identifier: Apache-2.0
"""`python -m lab exchange`: passes compute the same as by NCCL, and bytes are counted."""

import json
from functools import partial

import pytest

from lab.experts.exchange import BENCH, KINDS, ExchangeSetting, Row, measure_all
from lab.harness import keep_rows


def test_passes_compute_the_same_as_by_the_public_way(ranks, tmp_path):
    setting = ExchangeSetting(routing=("skewed",), ranks=2)
    ranks(2).run(measure_all, setting, partial(keep_rows, tmp_path, "kept", Row, {}))
    rows = json.loads((tmp_path / "kept.json").read_text())["rows"]
    assert [row["kind"] for row in rows] == list(KINDS)
    for row in rows:
        assert row.get("failed") is None
        assert 0 < row["megabytes"] < row["choice_megabytes"]
    for row in rows[:2]:
        assert row["counted_megabytes"] > 0
        assert row["rate"] > 0
        assert row["fixed"] > 0
    assert all(row["difference"] < 2e-2 for row in rows[2:])


def test_predictions_have_one_row_a_token_and_rank(tmp_path):
    said = BENCH(ExchangeSetting(ranks=4, cluster="dgx-h200", megabytes=4, tokens=2048), tmp_path)["rows"]
    dispatch, forward = said[0], said[2]
    assert dispatch["megabytes"] == pytest.approx(4 * 2**20 / 1e6, rel=0.02)
    assert dispatch["choice_megabytes"] / dispatch["megabytes"] == pytest.approx(6 / 2.72, rel=0.05)
    assert forward["products"] < forward["predicted"] < forward["nccl"]
