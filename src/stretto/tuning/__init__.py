# SPDX-License-Identifier: Apache-2.0
"""Autotuning: measures choices once, keeps their times between runs, and chooses alike on all ranks.

`stretto tune`, `ops.tune`, `ops.tune_embedding` and steps with `tune_matmuls` write times to one file, tuning.json
(`TuningStore`). Its readers choose by them: `collectives.selection`, `ops.choices` (fused GEMMs),
`ops.embedding.autotune`, and `parallel.layers.gemm_layout` (a model's matrix products, with `tune_matmuls`).
"""

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

__getattr__, __dir__ = attach(__name__)
