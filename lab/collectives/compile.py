# SPDX-License-Identifier: Apache-2.0
"""`python -m lab compile`: seconds and memory to compile and verify collectives as they grow. Needs no GPU."""

import resource
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from lab.collectives.settings import COMPILED_CASES, count_case_ranks
from stretto.bench.harness import Column, print_table, write_result
from stretto.bench.pictures import draw_result
from stretto.collectives import verify
from stretto.collectives.algorithms import find

COLUMNS = (
    Column("algorithm", "algorithm"),
    Column("size", "size"),
    Column("steps", "steps", "{:,}"),
    Column("compile_seconds", "compile (s)", "{:.2f}"),
    Column("verify_seconds", "verify (s)", "{:.2f}"),
    Column("microseconds_per_step", "both, µs a step", "{:.0f}"),
    Column("peak_gib", "peak memory (GiB)", "{:.2f}"),
)


def bench_compile(out: Path, largest: int | None = None) -> list[dict[str, Any]]:
    """Compile and verify each case in its own process, print the table, and write compile.json and compile.png.

    largest: leave out cases with more ranks.
    """
    rows = []
    for name, sizes in COMPILED_CASES:
        if largest is None or count_case_ranks(sizes) <= largest:
            with get_context("spawn").Pool(1) as pool:
                rows.append(pool.apply(measure, (name, sizes)))
    print_table("Compile and verify, one process", COLUMNS, rows)
    draw_result(write_result(out, "compile", COLUMNS, rows))
    return rows


def measure(name: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Compile and verify one case; returns its row. Raises AssertionError if the schedule does not verify."""
    begin = time.perf_counter()
    schedule = find(name).compile(**sizes)
    compiled = time.perf_counter()
    found = verify(schedule)
    end = time.perf_counter()
    assert found.ok, found.errors
    return {
        "algorithm": name,
        "size": " x ".join(str(size) for size in sizes.values()),
        "steps": schedule.steps,
        "compile_seconds": compiled - begin,
        "verify_seconds": end - compiled,
        "microseconds_per_step": (end - begin) / schedule.steps * 1e6,
        # Linux counts in KiB.
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
