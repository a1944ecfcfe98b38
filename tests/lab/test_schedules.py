# SPDX-License-Identifier: Apache-2.0
"""`python -m lab schedules`: orders of pipelines beside each other, at equal and at twice the memory."""

import json

from lab.planning.schedules import BENCH, SchedulesSetting


def test_message_driven_order_gains_where_it_has_twice_the_memory(tmp_path):
    rows = BENCH(SchedulesSetting(seeds=2), tmp_path)["rows"]
    keys = ("latency", "jitter", "order", "memory")
    found = {tuple(row[key] for key in keys): row for row in rows if row["size"] == "4 x 16"}
    assert 2 * len(found) == len(rows) == 2 * 2 * 3 * 9
    for (latency, jitter, order, memory), row in found.items():
        assert row["live"] <= (4 if memory == "equal" else 8)
        if order.startswith("message-driven"):
            assert row["to_1f1b"] >= 1 if memory == "equal" else row["to_1f1b"] < 0.96 or latency == jitter == 0
    assert found[0, 0, "1F1B", "equal"]["makespan"] == 57
    assert json.loads((tmp_path / "schedules.json").read_text())["rows"] == rows
    assert (tmp_path / "schedules.png").is_file()
