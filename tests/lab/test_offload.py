# SPDX-License-Identifier: Apache-2.0
"""`python -m lab offload` and `chunks`, in small on the CPU: what is measured, and what is written."""

import json

import pytest
from tests.lab.workloads import start_on_pool

from lab.training import chunks, offload
from lab.training.offload import OffloadSetting


def test_offload_trains_equally_with_state_on_the_host_and_on_the_device(ranks, tmp_path, monkeypatch):
    start_on_pool(monkeypatch, offload, ranks)
    setting = OffloadSetting(("buckets", "tiles", "train"), micro_batches=(1, 2), repeats=1, cpu=True)
    offload.BENCH(setting, tmp_path)
    rows = {path.stem: json.loads(path.read_text())["rows"] for path in tmp_path.glob("*.json")}
    assert set(rows) == {"offload-links", "offload-buckets", "offload-tiles", "offload-train"}
    trained = rows["offload-train"]
    assert [row["micro_batches"] for row in trained] == [1, 2, 1, 2]
    assert trained[0]["loss"] == trained[2]["loss"]  # of the same weights: the first step's
    assert {row["step_on"] for row in rows["offload-buckets"]} == {"device", "host"}
    assert rows["offload-tiles"][0]["name"] == "kernel"


def test_chunks_are_measured_for_each_number_of_buckets(ranks, tmp_path, monkeypatch):
    start_on_pool(monkeypatch, chunks, ranks)
    setting = chunks.ChunksSetting(buckets=6, bucket=64, latencies=(1.0,), repeats=1)
    rows = chunks.BENCH(setting, tmp_path)["rows"]
    assert [(row["coarsening"], row["chunks"]) for row in rows] == [(1, 6), (2, 3), (4, 2), (6, 1)]
    assert rows[-1]["to_none"] == 1
    # A message's latency is the time of a bucket's bytes, and all bytes take 2.5 times the steps.
    by_k = {row["coarsening"]: row["predicted_seconds"] for row in rows}
    assert by_k[1] == max(by_k.values())


@pytest.mark.parametrize("given", [{"bucket": 100}, {"latencies": (-1.0,)}, {"latencies": ()}])
def test_chunks_that_cannot_be_are_refused(given):
    with pytest.raises(ValueError, match="must be"):
        chunks.ChunksSetting(**given)
