# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a job on this machine, watches them, stops them, and starts them again: for any `LaunchJob`.

Modules: `job`, `launcher` (starts ranks), `rank` (the process of one), `supervisor` (forwards signals, ends all ranks
when one has failed), `failures` (kinds of failures, and which is the cause), `restarts` with `slots` and `journal`,
`elastic` (jobs that torchrun starts again), `leftovers`, `run_lock`; `watching` finds stuck and slow ranks.

A rank hangs: the launcher finds it by `watch`, which looks at least once a second at the counters of
all ranks (`watching.monitor`, which also writes the message); under torchrun, the process `watching.watcher` does.
"""

from typing import TYPE_CHECKING

from stretto.lazy import attach

if TYPE_CHECKING:
    from stretto.launch.failures import RankFailure
    from stretto.launch.job import LaunchJob
    from stretto.launch.launcher import (
        allocator_environment,
        changed_environment,
        launch_job,
        loopback_environment,
        rank_variables,
        remove_traces,
    )
    from stretto.launch.supervisor import StopTimeouts

__all__ = [
    "LaunchJob",
    "RankFailure",
    "StopTimeouts",
    "allocator_environment",
    "changed_environment",
    "launch_job",
    "loopback_environment",
    "rank_variables",
    "remove_traces",
]

__getattr__, __dir__ = attach(__name__)
