# SPDX-License-Identifier: Apache-2.0
"""Start the ranks of a run, watch them, and stop them."""

from stretto.train.launch.launcher import (
    RankFailure,
    allocator_environment,
    check_started_ranks,
    launch,
    remove_traces,
    resolve_device,
)

__all__ = [
    "RankFailure",
    "allocator_environment",
    "check_started_ranks",
    "launch",
    "remove_traces",
    "resolve_device",
]
