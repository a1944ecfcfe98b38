# SPDX-License-Identifier: Apache-2.0
"""`python -m lab compile`: seconds and memory to compile and verify collectives as they grow. Needs no GPU."""

import resource
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Annotated, Any

from lab.harness import Bench, column
from stretto.bench.settings import Option
from stretto.collectives import verify
from stretto.collectives.algorithms import find

COMPILED_CASES: tuple[tuple[str, dict[str, int]], ...] = (
    *(("ring-all-reduce", {"ranks": ranks}) for ranks in (8, 16, 32, 64, 128, 256)),
    *(("hierarchical-all-reduce", {"nodes": nodes, "gpus": 8}) for nodes in (2, 4, 8, 16, 32, 64)),
    *(("two-shot-all-reduce", {"ranks": ranks}) for ranks in (8, 16, 32, 64)),
    *(("recursive-halving-all-reduce", {"ranks": ranks}) for ranks in (16, 64, 256)),
)


def count_case_ranks(sizes: Mapping[str, int]) -> int:
    """The ranks of a case of `python -m lab compile`."""
    return sizes.get("ranks") or sizes["nodes"] * sizes["gpus"]


@dataclass(frozen=True)
class CompileSetting:
    """The largest case that `python -m lab compile` measures."""

    largest: Annotated[int | None, Option("Leave out cases with more ranks.")] = None

    def __post_init__(self) -> None:
        smallest = min(count_case_ranks(sizes) for _, sizes in COMPILED_CASES)
        if self.largest is not None and self.largest < smallest:
            raise ValueError(f"the smallest case has {smallest} ranks, more than {self.largest}")


@dataclass(frozen=True)
class Row:
    """A case: what was compiled, its steps, and what that took."""

    algorithm: str = column("algorithm")
    size: str = column("size")
    steps: int = column("steps", "{:,}")
    compile_seconds: float = column("compile (s)", "{:.2f}")
    verify_seconds: float = column("verify (s)", "{:.2f}")
    microseconds_per_step: float = column("both, µs a step", "{:.0f}")
    peak_gib: float = column("peak memory (GiB)", "{:.2f}")


def measure_cases(setting: CompileSetting) -> Iterator[Row]:
    for name, sizes in COMPILED_CASES:
        if setting.largest is None or count_case_ranks(sizes) <= setting.largest:
            with get_context("spawn").Pool(1) as pool:
                yield pool.apply(measure, (name, sizes))


def measure(name: str, sizes: dict[str, Any]) -> Row:
    """Compile and verify one case; returns its row. Raises AssertionError if the schedule does not verify."""
    begin = time.perf_counter()
    schedule = find(name).compile(**sizes)
    compiled = time.perf_counter()
    found = verify(schedule)
    end = time.perf_counter()
    assert found.ok, found.errors
    return Row(
        algorithm=name,
        size=" x ".join(str(size) for size in sizes.values()),
        steps=schedule.steps,
        compile_seconds=compiled - begin,
        verify_seconds=end - compiled,
        microseconds_per_step=(end - begin) / schedule.steps * 1e6,
        # Linux counts in KiB.
        peak_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    )


BENCH = Bench(
    "compile",
    "Seconds and memory to compile and verify collectives of up to 512 ranks (needs no GPU).",
    CompileSetting,
    measure_cases,
    Row,
    title="Compile and verify, one process",
)
