# SPDX-License-Identifier: Apache-2.0
"""`python -m lab schedules`: orders of pipelines beside each other, at equal and at twice the memory."""

import json

import pytest

from lab.planning.schedules import BENCH, SchedulesSetting


@pytest.mark.long
def test_message_driven_order_gains_where_it_has_twice_the_memory(tmp_path):
    rows = BENCH(SchedulesSetting(sizes=("4x16",), seeds=5), tmp_path)["rows"]
    found = {(row["latency"], row["jitter"], row["order"], row["memory"]): row for row in rows}
    assert len(found) == len(rows) == 2 * 3 * 9
    for (latency, jitter, order, memory), row in found.items():
        assert row["live"] <= (4 if memory == "equal" else 8)
        if order.startswith("message-driven"):
            assert row["to_1f1b"] >= 1 if memory == "equal" else row["to_1f1b"] < 0.96 or latency == jitter == 0
    assert found[0, 0, "1F1B", "equal"]["makespan"] == 57
    assert json.loads((tmp_path / "schedules.json").read_text())["rows"] == rows
    assert (tmp_path / "schedules.png").is_file()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"sizes": ("4",)}, "--sizes has '4', but a size is stages x micro-batches, such as 4x16"),
        ({"sizes": ("1x16",)}, "a pipeline has at least 2 stages"),
        ({"sizes": ("1000x1000",)}, "at most 65536"),
        ({"jitters": (2.0,)}, "--jitters has 2, but jitter is from 0 to 1"),
        ({"latencies": (-1.0,)}, "--latencies -1 is -1.0, but must be at least 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(setting, words):
    with pytest.raises(ValueError, match=words):
        SchedulesSetting(**setting)
