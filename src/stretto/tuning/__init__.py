# SPDX-License-Identifier: Apache-2.0
"""Autotuning: measures choices once, keeps their times between runs, and chooses alike on all ranks."""

from stretto.deprecated import alias
from stretto.tuning.autotuner import (
    Autotuner,
    TimeKeys,
    decide_on_rank_0,
    machine_key,
    median_seconds,
    slowest_times,
    time_runs,
)
from stretto.tuning.store import TuningStore, read_times

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

__getattr__ = alias(__name__, {"Store": "TuningStore"})
