# SPDX-License-Identifier: Apache-2.0
"""Writes simulated steps as traces: Chrome's JSON, which Perfetto opens, as torch.profiler writes it of a GPU.

The trace of one rank has the key "stretto" that `stretto train --trace` adds, so the same timeline and picture are made
of it as of a measured step.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stretto.atomic_files import write_atomically
from stretto.planner.step import COMPUTE, HOST
from stretto.simulator.training.simulation import StepSimulation, StepSpan

MAX_RANKS = 64  # in one trace
BINS = 100
_MICROSECONDS = 1e6


def make_trace(step: StepSimulation, *, is_whole: bool = False) -> dict[str, Any]:
    """The trace of the rank that computes most, or, with is_whole, of all that were simulated, up to MAX_RANKS.

    Counters have, for each of BINS equal times of the step, the part of it in which ranks compute, in which they
    communicate over each axis, and in which links send (event-driven: the mean of all, and the busiest).
    """
    ranks = range(min(step.lowered.graph.world, MAX_RANKS)) if is_whole else [step.rank]
    events = [event for rank in ranks for event in _events_of(step, rank)]
    uses = {
        "ranks that compute" if row == COMPUTE else f"ranks that communicate over {row}": use
        for row, use in step.use_over_time(BINS).items()
    }
    if (links := step.link_use_over_time(BINS)) is not None:
        uses |= {"links that send": links.mean(1).tolist(), "the busiest link": links.max(1).tolist()}
    events += [
        {
            "ph": "C",
            "name": name,
            "pid": step.lowered.devices[ranks[0]],
            "ts": place * step.step_time / BINS * _MICROSECONDS,
            "args": {"part": part},
        }
        for name, use in uses.items()
        for place, part in enumerate(use)
    ]
    trace: dict[str, Any] = {"traceEvents": events, "displayTimeUnit": "ms", "fidelity": step.fidelity}
    if len(ranks) == 1:
        trace["stretto"] = {"groups": {}, "rank": step.device, "grid": step.programs.config.grid.sizes()}
    return trace


def write_trace(step: StepSimulation, file: Path) -> None:
    """Write the trace of all ranks that were simulated. Raises OSError where it cannot be written."""
    write_atomically(file, json.dumps(make_trace(step, is_whole=True)) + "\n")


def _events_of(step: StepSimulation, rank: int) -> Iterator[dict[str, Any]]:
    device = step.lowered.devices[rank]
    stage = f", stage rank {step.lowered.stage_of[rank]} of pipe" if len(step.programs.ranks) > 1 else ""
    yield {"ph": "M", "name": "process_name", "pid": device, "args": {"name": f"rank {device}{stage}"}}
    yield {
        "ph": "X",
        "cat": "gpu_user_annotation",
        "name": "stretto step 1",
        "pid": device,
        "tid": "step",
        "ts": 0.0,
        "dur": step.step_time * _MICROSECONDS,
    }
    for span in step.spans(rank):
        yield _event(span, device)


def _event(span: StepSpan, device: int) -> dict[str, Any]:
    about: dict[str, Any] = {"stream": span.row}
    if span.row not in (COMPUTE, HOST):
        about |= {"Collective name": span.name, "Process Group Description": f"mesh_{span.row}"}
    return {
        "ph": "X",
        "cat": "cpu_op" if span.row == HOST else "kernel",
        "name": span.name,
        "pid": device,
        "tid": span.row,
        "ts": span.start * _MICROSECONDS,
        "dur": (span.end - span.start) * _MICROSECONDS,
        "args": about,
    }
