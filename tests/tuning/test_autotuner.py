# SPDX-License-Identifier: Apache-2.0
"""Times are kept by kind of machine, typed keys go to text and back, and all ranks choose alike."""

import re
import time
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from stretto.tuning import (
    Autotuner,
    TimeKeys,
    TuningStore,
    decide_on_rank_0,
    machine_key,
    median_seconds,
    slowest_times,
    time_runs,
)
from stretto.tuning import autotuner as module

CPU = torch.device("cpu")


def test_a_machine_is_named_by_gpu_links_and_versions(monkeypatch):
    torch_version = f"torch {torch.__version__}"
    assert machine_key(CPU) == f"cpu, {torch_version}"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    gpu = torch.device("cuda", 0)
    assert machine_key(gpu) == f"a GPU, {torch_version}"
    assert machine_key(gpu, operator="embedding", versions=("triton 3",)) == (
        f"embedding, a GPU, {torch_version}, triton 3"
    )
    assert machine_key(gpu, links="NVLink", versions=("NCCL 2.9",)) == f"a GPU, NVLink, {torch_version}, NCCL 2.9"
    monkeypatch.setattr(module.shared_gpus, "is_enabled", lambda: True)
    assert machine_key(gpu) == f"a GPU, {torch_version}, GPUs shared by ranks"


def test_every_run_is_timed_but_warm_ups():
    runs = []

    def run():
        runs.append(time.perf_counter())
        time.sleep(0.002)

    seconds = time_runs(run, CPU, repeats=3, warmups=2, calls=4)
    assert len(runs) == 5
    assert len(seconds) == 3
    assert all(second >= 0.002 / 4 for second in seconds)
    assert median_seconds([3.0, 1.0, 2.0]) == 2.0
    assert median_seconds([0.0]) > 0


class Size(NamedTuple):
    rows: int


def parse(key: str) -> tuple[Size, str]:
    match = re.fullmatch(r"size (\d+) by (\w+)", key)
    if match is None:
        raise ValueError(key)
    return Size(int(match[1])), match[2]


KEYS = TimeKeys(lambda size, name: f"size {size.rows} by {name}", parse)


def test_typed_times_are_found_again_and_other_keys_are_left_out(tmp_path):
    store = TuningStore(tmp_path / "times.json")
    Autotuner("a machine", KEYS, store).keep(Size(8), {"slow": 2.0, "fast": 1.0})
    Autotuner("a machine", KEYS, store).keep_all({Size(8): {"slow": 3.0}, Size(9): {"slow": 4.0}})
    Autotuner("another", KEYS, store).keep(Size(8), {"fast": 9.0})
    store.add("a machine", {"size of another version": [1.0], "size 8 by vectors": [1.0, 2.0]})
    assert Autotuner("a machine", KEYS, store).read() == {Size(8): {"slow": 3.0, "fast": 1.0}, Size(9): {"slow": 4.0}}
    assert store.read("another") == {"size 8 by fast": (9.0,)}


def measured(folder):
    """Return what ranks agree on that measured different times, where only rank 0 has a file."""
    rank = dist.get_rank()
    meetings = []
    time_runs(lambda: meetings.append(rank), CPU, repeats=2, warmups=1, group=dist.group.WORLD, barrier_each_time=True)
    found = slowest_times([[1.0 + rank, 5.0], [2.0, 5.0 - rank]], CPU, None)
    decided = decide_on_rank_0(lambda: {"rank": rank}, dict)

    def refuse():
        raise ValueError(f"rank {rank} has no file")

    with pytest.raises(ValueError, match="rank 0 has no file"):
        decide_on_rank_0(refuse, dict)
    return found, decided, len(meetings)


def test_all_ranks_hold_the_slowest_ranks_times_and_what_rank_0_decides(ranks, tmp_path):
    wanted = [[3.0, 5.0], [2.0, 5.0]], {"rank": 0}, 3
    assert ranks(3).run(measured, tmp_path) == [wanted] * 3
