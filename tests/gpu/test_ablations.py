# SPDX-License-Identifier: Apache-2.0
"""The ablations run on GPUs, and have a time for everything that runs eagerly."""

import json
from pathlib import Path

import pytest

from lab.collectives.ablations import BENCH, COMPOSED, PIPELINED, AblationsSetting


@pytest.mark.own_gpus("it measures times, NCCL's too")
@pytest.mark.exhaustive
def test_both_ablations_are_measured(tmp_path: Path, world: int) -> None:
    sizes = {"smallest": 1 << 20, "largest": 1 << 20, "tiles": (480 * 8,)}
    BENCH(AblationsSetting(protocol="Simple", instances=2, ranks=world, **sizes), tmp_path)
    rows = {name: json.loads((tmp_path / f"{name}.json").read_text())["rows"] for name in ("pipelining", "composition")}
    assert [(row["algorithm"], row["mode"]) for row in rows["pipelining"]] == [
        (name, mode) for name in PIPELINED for mode in ("graph", "eager")
    ]
    for row in rows["pipelining"]:
        assert row["ratio"] > 0, row
    assert {row["algorithm"] for row in rows["composition"]} == set(COMPOSED)
    for row in rows["composition"]:
        if row["mode"] == "eager":
            assert all(row[name] > 0 for name in ("composed", "kernel", "interpreted", "library")), row
