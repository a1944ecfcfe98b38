# SPDX-License-Identifier: Apache-2.0
"""Plans of Qwen3-30B-A3B and DeepSeek-V3 on 64 and 2,048 H100, compared with the layout that DeepSeek-V3's
authors published."""

import time
from dataclasses import dataclass
from typing import Any

from lab.harness import column
from lab.papers import read_paper
from stretto.axes import GridSizes
from stretto.cluster import Cluster
from stretto.planner import GridPlan, plan, predict
from stretto.planner.search_space import PredictKeywords

SEQ_LEN = 4096
CONFIGS = read_paper("models")
# DeepSeek-V3's batch of 15,360 sequences (its report, section 4.2); the others are chosen for as many a GPU.
RUNS = (
    ("Qwen3-30B-A3B", 64, 512),
    ("Qwen3-30B-A3B", 2048, 16384),
    ("DeepSeek-V3", 64, 512),
    ("DeepSeek-V3", 2048, 15360),
)
# Section 3.2 of DeepSeek-V3's report: 16 stages, 64 ranks for experts over 8 nodes, ZeRO-1, no tensor parallelism. z
# stands for ZeRO-1, for a pipeline stage gathers its weights once a step; z=128 does not divide its 576 latent rows.
AUTHORS = GridSizes(pipe=16, data=2, z=64, expert=64)
AUTHORS_OPTIONS: PredictKeywords = {"schedule": "1f1b", "recompute": "full"}


@dataclass(frozen=True)
class ModernRow:
    """A plan of a current model, ours or its authors'."""

    model: str = column("model")
    gpus: int = column("H100")
    whose: str = column("plan")
    grid: str = column("grid")
    schedule: str = column("schedule")
    micro_batch: int = column("micro-batch")
    recompute: str = column("recompute")
    step_seconds: float = column("step (s)", "{:.2f}")
    tokens_per_second: float = column("tokens/s a GPU", "{:,.0f}")
    all_to_all_seconds: float = column("all-to-alls (s)", "{:.2f}")
    memory_gigabytes: float = column("memory (GB)", "{:.1f}")
    plan_seconds: float = column("planned in (s)", "{:.1f}")


def plan_modern() -> list[dict[str, Any]]:
    """The best plan of each run, with and without stages, and that of DeepSeek-V3's authors."""
    cluster, rows = Cluster.preset("dgx-h100"), []
    for model, gpus, batch in RUNS:
        began = time.process_time()
        best = plan(CONFIGS[model], cluster, gpus=gpus, batch=batch, seq_len=SEQ_LEN, pipe="auto")[0]
        took = time.process_time() - began
        rows.append(_row(model, gpus, batch, "fastest", best) | {"plan_seconds": took})
    grid = AUTHORS.sizes()
    batch = RUNS[-1][2]
    authors = predict(
        CONFIGS["DeepSeek-V3"], cluster, grid=grid, batch=batch, seq_len=SEQ_LEN, micro_batch=1, **AUTHORS_OPTIONS
    )
    return [*rows, _row("DeepSeek-V3", AUTHORS.ranks, batch, "its authors'", authors)]


def _row(model: str, gpus: int, batch: int, whose: str, found: GridPlan) -> dict[str, Any]:
    schedule = found.schedule
    if schedule == "interleaved":
        schedule += f", {found.virtual_stages} stages a rank"
    return {
        "model": model,
        "gpus": gpus,
        "whose": whose if found.fits else f"{whose}, does not fit",
        "grid": str(GridSizes(**found.grid)),
        "schedule": schedule,
        "micro_batch": found.micro_batch,
        "recompute": found.recompute,
        "step_seconds": found.step_time,
        "tokens_per_second": batch * SEQ_LEN / found.step_time / gpus,
        "all_to_all_seconds": found.communication.get("all_to_all", 0.0),
        "memory_gigabytes": found.peak_memory / 1e9,
    }
