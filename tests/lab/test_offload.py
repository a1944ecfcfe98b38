# SPDX-License-Identifier: Apache-2.0
"""`python -m lab offload`, in small on the CPU: what is measured, and what is written."""

from tests.lab.workloads import start_on_pool

from lab.training import offload
from lab.training.offload import OffloadSetting


def test_offload_trains_equally_with_state_on_the_host_and_on_the_device(ranks, tmp_path, monkeypatch):
    start_on_pool(monkeypatch, offload, ranks)
    rows = offload.BENCH(OffloadSetting(micro_batches=(1, 2), repeats=1, cpu=True), tmp_path)["rows"]
    assert [(row["name"], row["micro_batches"]) for row in rows] == [
        (name, count) for name in ("host, split", "device") for count in (1, 2)
    ]
    assert rows[0]["loss"] == rows[2]["loss"]  # of the same weights: the first step's
