# SPDX-License-Identifier: Apache-2.0
"""`python -m lab products`: all ways compute one product, and rows are written as they come."""

import json
from functools import partial

import pytest

from lab.cases import measure_rows, read_predictions
from lab.harness import keep_rows
from lab.operators.products import BENCH, MLPS, ProductsSetting, Row, list_cases, measure


def test_all_ways_compute_the_same_and_rows_of_a_run_that_ends_early_are_kept(ranks, tmp_path):
    setting = ProductsSetting(operators=("gather", "mlp"), ms=(64,), ranks=2)
    cases = list_cases(setting)
    assert [case["case"] for case in cases] == ["flux", *MLPS]
    cases[1]["case"] = "a case that nobody knows"  # ends the run in its second row
    keep = partial(keep_rows, tmp_path, "kept", Row, {})
    with pytest.raises(KeyError, match="a case that nobody knows"):
        ranks(2).run(measure_rows, 2, None, cases, [0.5] * len(cases), partial(measure, setting), keep)
    (row,) = json.loads((tmp_path / "kept.json").read_text())["rows"]
    assert row.keys() > {"gemm", "nccl", "library", "stretto", "tuned", "gathered", "gathered_tuned"}
    assert row["predicted"] == 0.5
    assert row["difference"] < 2e-2
    assert row["failed"].startswith("async_tp: ")  # a GPU's alone
    assert ";" not in row["failed"]


def test_a_whole_mlp_is_that_of_its_peers(ranks):
    setting = ProductsSetting(operators=("mlp",), ms=(64,), ranks=2)
    cases = list_cases(setting)
    rows = ranks(2).run(measure_rows, 2, None, cases, [None] * len(cases), partial(measure, setting), len)[0]
    assert [row["case"] for row in rows] == list(MLPS)
    assert rows[0].keys() > {"gemm", "nccl", "library", "stretto", "torch_tp"}
    assert all(row["difference"] < 2e-2 for row in rows)


def test_a_prediction_hides_most_of_the_exchange_where_the_product_is_longer(tmp_path):
    said = BENCH(ProductsSetting(operators=("gather",), ms=(64, 8192), ranks=4, cluster="dgx-h100"), tmp_path)
    few, many = (row["hidden"] for row in said["rows"])
    assert few < many == pytest.approx(0.75)
    cases = [{"operator": "gather", "case": "flux", "m": m} for m in (8192, 512)]
    found = read_predictions(tmp_path / "predictions-products-4.json", cases)
    assert found == [said["rows"][1]["predicted"], None]
