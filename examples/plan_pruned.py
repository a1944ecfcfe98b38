# SPDX-License-Identifier: Apache-2.0
"""Plans the strong scaling of four GPT-3 models on Summit, dense and pruned to 90% (Singh, tables 4.1 and 4.2).

As AxoNN does, it divides GPUs into pipeline stages and replicas alone, in message-driven order, and recomputes
activations; of these it takes the fastest that fits into 16 GB. Needs no GPU.

python examples/plan_pruned.py [FOLDER]
"""

import json
import sys
from pathlib import Path
from typing import Any

from stretto.cluster import Cluster
from stretto.execution import StateOptions
from stretto.models import GPTConfig
from stretto.planner import GridPlan, predict

SEQ_LEN, SPARSITY, PEAK = 2048, 0.9, 125e12
# Layers, hidden size, heads, batch, and the paper's gains in percent from the fewest GPUs to the most.
MODELS = {
    "GPT-3 XL": (24, 2048, 16, 512, "10 to 47"),
    "GPT-3 2.7B": (32, 2560, 32, 512, "10 to 24 (34 at 512)"),
    "GPT-3 6.7B": (32, 4096, 32, 1024, "11 to 23"),
    "GPT-3 13B": (40, 5120, 40, 2048, "19 to 26"),
}
PAPER_PEAK = {256: (43.3, 53.4), 512: (39.7, 48.8), 1024: (32.2, 41.1), 2048: (22.9, 31.0)}  # table 4.2, 13B


def find_best(shape: tuple[int, int, int], batch: int, gpus: int, sparsity: float) -> GridPlan:
    """The fastest plan of stages and replicas that fits."""
    layers, hidden, heads = shape
    model = GPTConfig(layers=layers, hidden=hidden, heads=heads, vocab=50304, max_seq_len=SEQ_LEN)
    options: dict[str, Any] = {"batch": batch, "seq_len": SEQ_LEN, "dtype": "fp16", "recompute": "full"}
    options["state"] = StateOptions("device", sparsity=sparsity)
    found = []
    for pipe in (1, 2, 4, 8, 16, 32):
        schedule = "message-driven" if pipe > 1 else None
        grid = {"pipe": pipe, "data": gpus // pipe}
        rows = batch * pipe // gpus
        for size in (size for size in (1, 2, 4, 8) if layers >= pipe and rows and rows % size == 0):
            summit = Cluster.preset("summit")
            found.append(predict(model, summit, grid=grid, micro_batch=size, schedule=schedule, **options))
    return min((plan for plan in found if plan.fits), key=lambda plan: plan.step_time)


def describe(plan: GridPlan, shape: tuple[int, int, int], batch: int) -> dict[str, Any]:
    """What the tables show of a plan: seconds of a step's parts, and the part of the peak that its FLOPs are.

    FLOPs are those of Narayanan et al. (2021), equation 3, with recomputation, as the paper counts them.
    """
    layers, hidden, _ = shape
    per_layer = 1 + SEQ_LEN / (6 * hidden) + 50304 / (16 * layers * hidden)
    flops = 96 * batch * SEQ_LEN * layers * hidden**2 * per_layer
    gpus = plan.grid["pipe"] * plan.grid["data"]
    return {
        "stages": plan.grid["pipe"],
        "micro_batch": plan.micro_batch,
        "seconds": plan.step_time,
        "computation": plan.compute_time,
        "messages": plan.exposed["pipe"],
        "bubble": plan.bubble,
        "all_reduce": plan.exposed["data"],
        "gigabytes": plan.peak_memory / 1e9,
        "percent_of_peak": 100 * flops / plan.step_time / gpus / PEAK,
    }


def main(out: Path) -> None:
    rows = []
    for name, (*sizes, batch, paper) in MODELS.items():
        shape = (sizes[0], sizes[1], sizes[2])
        for gpus in (batch // 8, batch // 4, batch // 2, batch):
            dense, pruned = (describe(find_best(shape, batch, gpus, each), shape, batch) for each in (0.0, SPARSITY))
            gain = 100 * (dense["seconds"] / pruned["seconds"] - 1)
            rows.append({"model": name, "gpus": gpus, "paper": paper, "gain": gain, "dense": dense, "pruned": pruned})
    command = f"python examples/plan_pruned.py {out}"
    out.mkdir(parents=True, exist_ok=True)
    (out / "plans.json").write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")
    parts = ("computation", "messages", "bubble", "all_reduce")
    lines = [
        f"`{command}`",
        "",
        "| model | GPUs | stages, dense | pruned | step, dense (s) | pruned (s) | gain (%) | paper's gains (%) | "
        "computation, messages, bubble, all-reduce, dense (s) | pruned (s) | % of peak, dense | pruned | paper's |",
        "|" + "---|" * 13,
    ]
    for row in rows:
        dense, pruned = row["dense"], row["pruned"]
        split = [", ".join(f"{each[part]:.2f}" for part in parts) for each in (dense, pruned)]
        measured = PAPER_PEAK[row["gpus"]] if row["model"] == "GPT-3 13B" else ()
        cells = [row["model"], row["gpus"], dense["stages"], pruned["stages"]]
        cells += [f"{dense['seconds']:.2f}", f"{pruned['seconds']:.2f}", f"{row['gain']:.0f}", row["paper"], *split]
        cells += [f"{each['percent_of_peak']:.1f}" for each in (dense, pruned)]
        cells.append(", ".join(map(str, measured)) or "-")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    (out / "plans.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
