# SPDX-License-Identifier: Apache-2.0
"""Autotuning: measures choices once, keeps their times between runs, and chooses alike on all ranks."""

from typing import TYPE_CHECKING

from stretto.lazy import attach
from stretto.tuning.store import TuningStore, read_times

if TYPE_CHECKING:
    from stretto.tuning.autotuner import (
        Autotuner,
        TimeKeys,
        decide_on_rank_0,
        machine_key,
        median_seconds,
        slowest_times,
        time_runs,
    )

__all__ = [
    "Autotuner",
    "TimeKeys",
    "TuningStore",
    "decide_on_rank_0",
    "machine_key",
    "median_seconds",
    "read_times",
    "slowest_times",
    "time_runs",
]

_NEEDING_TORCH = (
    "Autotuner",
    "TimeKeys",
    "decide_on_rank_0",
    "machine_key",
    "median_seconds",
    "slowest_times",
    "time_runs",
)
__getattr__, __dir__ = attach(__name__, dict.fromkeys(_NEEDING_TORCH, "stretto.tuning.autotuner"))
