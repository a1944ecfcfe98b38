# SPDX-License-Identifier: Apache-2.0
"""`python -m lab joint-schedules`: each schedule is timed and simulated, and the last lines compare both."""

from functools import partial

import pytest

from lab.cases import measure_rows
from lab.operators.joint_schedules import BENCH, SHORT, JointSchedulesSetting, measure, summarize


@pytest.mark.long
def test_each_schedule_is_timed_and_simulated(interpret):
    setting = JointSchedulesSetting(("scatter",), ms=(64,), ranks=2)
    cases = [{"operator": kind, "m": 64} for kind in setting.operators]
    for row in interpret(2, measure_rows, 2, None, cases, [None], partial(measure, setting), len)[0]:
        assert row["failed"] is None
        assert all(row[short] > 0 and row[f"{short}_simulated"] > 0 for short in SHORT)


def test_the_last_lines_say_the_error_and_what_was_picked():
    row = {"direct": 1.0, "direct_simulated": 1.1, "ring": 2.0, "ring_simulated": 1.0}
    rows = [row | {"to_default": 1.01, "is_picked": False}, row | {"to_default": 1.1, "is_picked": True}, {}]
    simulated, default = summarize(rows)
    assert simulated.startswith("4 joint schedules, simulated: median error 30%")
    assert simulated.endswith("at 1 of 2 shapes")
    assert default.endswith("at 1 of 2 shapes")


def test_predictions_say_what_an_order_and_programs_cost(tmp_path):
    setting = JointSchedulesSetting(ms=(8192,), ranks=4, variants=True, predicts=True)
    for row in BENCH(setting, tmp_path)["rows"]:
        assert row["gemm"] < row["direct_simulated"] * 1.001 < row["plain_simulated"]
        assert row["direct_simulated"] < row["programs_simulated"]
