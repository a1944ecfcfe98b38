# SPDX-License-Identifier: Apache-2.0
"""Settings of `python -m lab faults`."""

import os
from dataclasses import dataclass
from typing import Annotated

from stretto.bench.settings import Option, require_known
from stretto.quantities import require_least

KINDS = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP",
    "loop": "endless loop",
    "exception": "exception",
    "disk": "full disk",
    "connection": "dropped connection",
}
"""The kinds of faults: the names of `--kinds`, and their names in tables."""

GRIDS = {
    2: ({"data": 2}, {"x": 2}, {"z": 2}, {"pipe": 2}),
    4: ({"data": 4}, {"data": 2, "x": 2}, {"x": 2, "z": 2}, {"pipe": 2, "data": 2}),
    8: ({"data": 8}, {"data": 2, "x": 2, "z": 2}, {"x": 2, "z": 4}, {"pipe": 2, "data": 2, "x": 2}),
}
"""Grids of jobs, by the number of ranks."""


@dataclass(frozen=True)
class FaultsSetting:
    """Faults that `python -m lab faults` makes: how many, of which kinds.
    Raises ValueError for settings that cannot work.
    """

    ranks: Annotated[int, Option("Processes of a job: 2, 4 or 8.")] = 4
    faults: Annotated[int, Option("Faults altogether.")] = 200
    seed: Annotated[int, Option("Draws kinds, ranks, moments and grids.")] = 0
    kinds: Annotated[tuple[str, ...], Option("Some of kill, stop, loop, exception, disk, connection.")] = tuple(KINDS)
    faults_a_job: Annotated[int, Option("Faults that one run bears, one after another.")] = 10
    jobs: Annotated[int | None, Option("Jobs side by side (default: cores / ranks).")] = None
    timeout: Annotated[float, Option("train.timeout, in seconds: a rank without progress ends the run then.")] = 8.0
    grace: Annotated[float, Option("Seconds over the time limit in which a failure must still be named.")] = 3.0
    only: Annotated[tuple[int, ...], Option("Run only these jobs of the draw, by number, to look at them again.")] = ()

    def __post_init__(self) -> None:
        if self.ranks not in GRIDS:
            known = ", ".join(map(str, GRIDS))
            nearest = min(GRIDS, key=lambda ranks: abs(ranks - self.ranks))
            raise ValueError(f"--ranks is {self.ranks}, but must be one of {known}; {nearest} would do")
        require_least(1, faults=self.faults, faults_a_job=self.faults_a_job, timeout=self.timeout)
        require_least(0, grace=self.grace, seed=self.seed)
        if self.jobs is not None:
            require_least(1, jobs=self.jobs)
        require_known("kind of fault", self.kinds, KINDS)
        for number in self.only:
            if number > self.num_jobs:
                raise ValueError(f"--only has {number}, but there are {self.num_jobs} jobs")

    @property
    def num_jobs(self) -> int:
        return -(-self.faults // self.faults_a_job)

    @property
    def jobs_at_once(self) -> int:
        """The number of concurrent jobs: `jobs`, else as many as have a core for each rank, and at least one."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return self.jobs or max(1, cores // self.ranks)
