# SPDX-License-Identifier: Apache-2.0
"""The planner of tables: balance, memory, traffic, and what it says."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stretto.cli import app
from stretto.cluster import Cluster
from stretto.recommendation import DLRMConfig, HitRates, TableRates, TableSize, place_tables, plan_tables
from stretto.recommendation.table_planner import RowRate

MLPERF = DLRMConfig.preset("mlperf-v2")
SIZES = [TableSize(rows, MLPERF.dim, pooling) for rows, pooling in zip(MLPERF.rows, MLPERF.pooling, strict=True)]


@pytest.mark.parametrize("ranks", [4, 8])
def test_mlperf_tables_are_within_a_tenth_of_even(ranks: int) -> None:
    assert max(place_tables(SIZES, ranks).work_shares()) * ranks > 1.6  # whole tables
    plan = plan_tables(SIZES, ranks)
    assert plan.imbalance < 0.1
    assert plan == plan_tables(SIZES, ranks)
    plan.placement.check([(size.rows, size.dim) for size in SIZES], ranks)
    assert plan.placement.kind(20) == "row"  # the table that is looked up most
    assert "table 20: table -> row" in plan.explain()
    assert "column" not in plan.placement.kinds  # row-wise Adagrad takes whole rows
    assert max(load.memory for load in plan.loads) <= 2.01 * sum(load.memory for load in plan.loads) / ranks


def test_a_table_larger_than_a_rank_is_cut_and_what_fits_nowhere_is_refused() -> None:
    sizes = [TableSize(10**6, 64, 1), TableSize(1000, 64, 1)]
    of_table = 10**6 * (64 * 4 + 4)
    plan = plan_tables(sizes, 4, memory=0.4 * of_table)
    assert plan.placement.kind(0) in ("row", "table-row")
    assert max(load.memory for load in plan.loads) <= 0.4 * of_table
    with pytest.raises(ValueError, match=r"do not fit into 24.8 MiB a rank, even if they are cut: 62.24 MiB"):
        plan_tables(sizes, 4, memory=0.1 * of_table)
    with pytest.raises(ValueError, match="optimizer 'adamw'"):
        plan_tables(sizes, 4, optimizer="adamw")
    with pytest.raises(ValueError, match="0 tables on 4 ranks"):
        plan_tables([], 4)


def test_tables_that_do_not_fit_are_cached_where_the_fewest_rows_miss() -> None:
    sizes = [TableSize(10**6, 64, 1), TableSize(10**6, 64, 10), TableSize(10**6, 64, 1), TableSize(1000, 64, 1)]
    rates = HitRates((1000, 100_000), (0.5, 0.9), 2000)
    of_table = 10**6 * (64 * 4 + 4)
    plan = plan_tables(sizes, 2, batch=4096, memory=1.15 * of_table, hit_rates={0: rates, 1: rates, 2: rates})
    cached = plan.placement.cached
    assert cached[1] == cached[3] == 0  # the one that is looked up most is on GPUs
    assert min(cached[0], cached[2]) == 100_000 < max(cached)
    plan.placement.check([(size.rows, size.dim) for size in sizes], 2)
    assert max(load.memory for load in plan.loads) <= 1.15 * of_table
    assert sum(load.host for load in plan.loads) == pytest.approx(
        sum(2 * (1 - rates.at(rows, 10**6)) * 4096 * 260 for rows in cached if rows)
    )
    text = plan.explain()
    assert "table 0: in host memory with a cache of " in text
    assert "of its look-ups hit" in text
    assert "from host memory and back" in text
    slow = plan_tables(
        sizes, 2, batch=4096, memory=1.15 * of_table, hit_rates={0: rates, 2: rates}, rates=TableRates(host=1e6)
    )
    assert max(slow.seconds) == pytest.approx(max(load.host for load in slow.loads) / 1e6)  # the link is the slowest
    with pytest.raises(
        ValueError, match=r"do not fit into .* or more ranks, or hit_rates=, with which tables are cached"
    ):
        plan_tables(sizes, 2, memory=of_table)
    assert plan_tables(sizes, 2, memory=2 * of_table, hit_rates={0: rates}).placement.cached == ()


def test_states_of_the_optimizer_are_counted() -> None:
    size = [TableSize(1000, 16)]
    found = {kind: plan_tables(size, 1, optimizer=kind).loads[0].memory for kind in ("sgd", "rowwise-adagrad", "adam")}
    assert found == {"sgd": 64_000, "rowwise-adagrad": 68_000, "adam": 192_000}


def test_cuts_between_slow_nodes_stay_inside_a_node() -> None:
    sizes = [TableSize(10**6, 128, 100), *(TableSize(1000, 128, 1) for _ in range(6))]
    plan = plan_tables(sizes, 8, ranks_per_node=4, rates=TableRates(between_nodes=1e9))
    owners = plan.placement.owners(0)
    assert len(owners) > 1
    if plan.placement.kind(0) == "table-row":
        assert len({rank // 4 for rank in owners}) == 1
    for load in plan.loads:
        assert load.sent_between == pytest.approx(load.sent * 4 / 3)


def test_rows_between_measured_sizes_are_on_a_line_and_short_ones_are_a_transaction() -> None:
    rates = TableRates((RowRate(512, 1e9, 1e8), RowRate(1024, 5e8, 5e7)))
    assert rates.seconds_a_row(768) == (pytest.approx(1.5e-9), pytest.approx(1.5e-8))
    assert rates.seconds_a_row(2048) == (pytest.approx(4e-9), pytest.approx(4e-8))
    assert rates.seconds_a_row(256) == (pytest.approx(0.5e-9), pytest.approx(0.5e-8))
    assert rates.seconds_a_row(4) == rates.seconds_a_row(128)


def test_rates_of_a_machine_are_those_measured_by_its_memory() -> None:
    h200, h100 = (TableRates.of_cluster(Cluster.preset(name)) for name in ("dgx-h200", "dgx-h100"))
    assert h200.rows == TableRates().rows
    assert h200.in_node == 325e9
    assert h100.rows[0].looked_up / h200.rows[0].looked_up == pytest.approx(h100.memory / h200.memory)
    assert "times 0.7" in h100.source


CONFIG = """
out = "runs/x"
ranks = 4
[model]
kind = "dlrm"
name = "mlperf-v2"
[data]
format = "synthetic"
[train]
steps = 1
batch = 65536
lr = 1e-3
"""


def run(folder: Path, *arguments: str) -> Any:
    (folder / "dlrm.toml").write_text(CONFIG)
    return CliRunner().invoke(app, ["plan", str(folder / "dlrm.toml"), *arguments])


def test_the_command_shows_and_explains_the_plan(tmp_path: Path) -> None:
    shown = run(tmp_path)
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("\nrank ") == 3
    assert "with whole tables 68%" in shown.output
    assert "table 20: table" not in shown.output
    explained = run(tmp_path, "--gpus", "8", "--cluster", "dgx-h100", "--explain")
    assert "table 20: table -> row" in explained.output
    found = json.loads(run(tmp_path, "--json", "--gpus", "8").output)
    assert len(found["ranks"]) == 8
    assert found["imbalance"] < 0.1
    assert run(tmp_path, "--gpus", "7").exit_code != 0
    refused = run(tmp_path, "--seq-len", "8")
    assert refused.exit_code != 0
    assert "--seq-len is no option of a DLRM's plan" in refused.output


def test_no_rank_has_more_than_its_memory_whatever_tables_are_swapped() -> None:
    draw = random.Random(5)
    for _ in range(12):
        sizes = [TableSize(10 ** draw.randint(2, 6), 16, 10 ** draw.uniform(0, 2)) for _ in range(9)]
        plan = plan_tables(sizes, 3)  # at most twice an even share
        even = sum(size.rows * (16 * 4 + 4) for size in sizes) / 3
        assert max(load.memory for load in plan.loads) < 2.02 * even
