# SPDX-License-Identifier: Apache-2.0
"""The ablation: each stage adds one overlap, none changes what is computed; exposed time is lone collectives'."""

import json

import pytest
from tests.lab.workloads import WORKLOAD, start_on_pool

from lab.training import overlap
from lab.training.overlap import BENCH, STAGES, OverlapSetting, exposed_time, parse_grids
from stretto.parallel import Overlap


def test_each_stage_adds_one_overlap_and_the_last_has_all():
    on = [sum(vars(stage).values()) for stage in STAGES.values()]
    assert on == [0, 1, 2, 3, 4, 5]
    assert list(STAGES.values())[-1] == Overlap()


def test_grids_are_read_as_people_write_them():
    assert parse_grids("z=4,x=2 z=2", 4) == [
        {"pipe": 1, "data": 1, "x": 1, "y": 1, "z": 4},
        {"pipe": 1, "data": 1, "x": 2, "y": 1, "z": 2},
    ]
    with pytest.raises(ValueError, match="the grid x=2 has 2 ranks, but 4 are used"):
        parse_grids("x=2", 4)
    with pytest.raises(ValueError, match="'w=4' is not a grid; write grids as"):
        parse_grids("w=4", 4)


@pytest.mark.exhaustive
def test_all_stages_are_measured_on_each_grid_and_compute_the_same(ranks, tmp_path, monkeypatch):
    start_on_pool(monkeypatch, overlap, ranks)
    monkeypatch.setattr(OverlapSetting, "workload", lambda self: WORKLOAD)
    BENCH(OverlapSetting(ranks=2, grids="z=2, data=2"), tmp_path)
    rows = json.loads((tmp_path / "overlap.json").read_text())["rows"]
    assert [(row["grid"], row["overlap"]) for row in rows] == [(g, s) for g in ("z=2", "data=2") for s in STAGES]
    for grid in ("z=2", "data=2"):
        mine = [row for row in rows if row["grid"] == grid]
        assert len({(row["loss"], row["last_loss"], row["gradient_norm"]) for row in mine}) == 1
        assert mine[0]["faster"] == 0
        assert all(row["exposed_milliseconds"] is None for row in mine)  # there is no GPU to profile
    assert (tmp_path / "overlap.png").stat().st_size > 1000


def event(name: str, start: float, end: float, category: str = "kernel") -> dict[str, object]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start}


@pytest.mark.parametrize(
    ("events", "exposed", "communication"),
    [
        ([], 0, 0),
        ([event("ncclDevKernel_AllReduce", 0, 10)], 10, 10),
        ([event("ncclDevKernel_AllReduce", 0, 10), event("gemm", 2, 5)], 7, 10),
        ([event("ncclDevKernel_AllReduce", 0, 10), event("gemm", 2, 5), event("add", 4, 12)], 2, 10),
        ([event("ncclDevKernel_AllReduce", 0, 10), event("ncclDevKernel_AllGather", 5, 15)], 15, 15),
        ([event("ncclDevKernel_AllReduce", 0, 10), event("Memcpy DtoD", 0, 4, "gpu_memcpy")], 6, 10),
        ([event("gemm", 0, 10), event("ncclDevKernel_AllReduce", 10, 12), event("gemm", 12, 20)], 2, 2),
        ([event("nccl:all_reduce", 0, 10, "gpu_user_annotation"), event("gemm", 0, 3)], 0, 0),
        ([{"ph": "M", "name": "process_name"}, event("cudaLaunchKernel", 0, 9, "cuda_runtime")], 0, 0),
    ],
)
def test_communication_is_exposed_while_nothing_else_runs(events, exposed, communication):
    assert exposed_time(events) == (exposed, communication)


def test_pushes_of_copy_engines_and_waits_for_them_are_communication():
    products, copies = {"args": {"stream": 7}}, {"args": {"stream": 20}}
    trace = [
        event("gemm", 0, 10) | products,
        event("Memcpy DtoD (Device -> Device)", 5, 20, "gpu_memcpy") | copies,
        event("wait_for_all", 10, 20) | products,
        event("Memcpy DtoD (Device -> Device)", 20, 22, "gpu_memcpy") | products,  # within this GPU: work
        event("Memcpy PtoP (Device -> Device)", 30, 34, "gpu_memcpy") | products,
    ]
    assert exposed_time(trace) == (14, 19)
