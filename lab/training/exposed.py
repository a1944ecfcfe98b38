# SPDX-License-Identifier: Apache-2.0
"""Measures exposed communication with torch's profiler: the time in which a GPU runs only collectives."""

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from stretto.bench.training.runs import Step
from stretto.train.observe.timeline import Interval, copying_streams, is_by_copy_engine, merge, subtract, total

STEPS = 2
WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def profile_exposed(step: Step) -> dict[str, Any]:
    """Profile rank 0: exposed_milliseconds and communication_milliseconds a step, None without a GPU. Collective."""
    if not torch.cuda.is_available():
        return {"exposed_milliseconds": None, "communication_milliseconds": None}
    torch.cuda.synchronize()
    dist.barrier()
    if dist.get_rank() != 0:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        return {"exposed_milliseconds": None, "communication_milliseconds": None}
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    exposed, communication = exposed_time(events)
    return {
        "exposed_milliseconds": exposed / 1e3 / STEPS,
        "communication_milliseconds": communication / 1e3 / STEPS,
    }


def exposed_time(events: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """Returns (exposed, all) time of collectives, in the unit of a Chrome trace's events (microseconds).

    Collectives are NCCL's kernels, copies between GPUs, and the kernels around these; other kernels, copies and fills
    are work that may hide them. Where two collectives run at once, the time counts once.
    """
    intervals: dict[bool, list[Interval]] = {True: [], False: []}
    events = list(events)
    copying = copying_streams(events)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in WORK:
            start, is_nccl = float(event["ts"]), "nccl" in str(event["name"]).lower()
            intervals[is_nccl or is_by_copy_engine(event, copying)].append((start, start + float(event["dur"])))
    collectives, work = merge(intervals[True]), merge(intervals[False])
    return total(subtract(collectives, work)), total(collectives)
