# SPDX-License-Identifier: Apache-2.0
"""`python -m lab simulated-pipelines`: chapter 3 of Singh's dissertation, pipelines on Summit, simulated.

The runs are those of `python -m lab published-pipelines`: 12B parameters on 48 GPUs with 6 to 48 stages (figures 3.3
and 3.4), and the choices of Table 3.1 with 48 to 384 GPUs (figure 3.7). AxoNN overlaps the same collectives as
Stretto; for DeepSpeed and Megatron-LM, which did not then, every collective is assumed to be exposed.
"""

from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lab.planning.published_pipelines import (
    CHOICES,
    FIGURES_BATCH,
    MEASURED_PHASE,
    MODELS,
    RUNS_BATCH,
    SEQ_LEN,
    STATE,
    PublishedChoice,
    model_flops,
    plan_stages,
    predict_pipeline,
)
from stretto.axes import GridSizes
from stretto.bench.harness import Column, append_to_table, markdown_table, print_table, write_result
from stretto.bench.pictures import draw_result
from stretto.cluster import Cluster
from stretto.planner import GridPlan
from stretto.planner.architecture_loader import read_architecture
from stretto.planner.step import COMPUTE
from stretto.planner.workload import StepWorkload
from stretto.simulator.training import StepSimulation, simulate_step, step_of_plan
from stretto.simulator.training.simulation import Fidelity

PEAK = 125e12  # FLOP/s of a V100, as the dissertation counts
# Figure 3.7 and its text: parts of the peak, and the step of 100B over AxoNN's.
PUBLISHED_SHARE = {"AxoNN": "49 to 54%", "DeepSpeed": "39 to 42%", "Megatron-LM": "21 to 41%"}
PUBLISHED_OVER_AXONN = {(100, "DeepSpeed"): 1.18, (100, "Megatron-LM"): 2.46}
# A round is as many micro-batches as there are stages. Of a step with more rounds, these and one more are simulated;
# each further round takes as long as the last.
SIMULATED_ROUNDS = 4

STAGE_COLUMNS = (
    Column("stages", "G_inter"),
    Column("closed_seconds", "pipeline, closed form (s)", "{:.2f}"),
    Column("queued_seconds", "event-driven (s)", "{:.2f}"),
    Column("planned_seconds", "planner (s)", "{:.2f}"),
    Column("published_seconds", "published (s)", "{:.2f}"),
    Column("idle_share", "idle", "{:.0%}"),
    Column("pipe_share", "waits for messages", "{:.1%}"),
)
CHOICE_COLUMNS = (
    Column("billions", "parameters (10^9)"),
    Column("framework", "framework"),
    Column("gpus", "GPUs"),
    Column("choice", "choice of Table 3.1"),
    Column("planned_seconds", "planner (s)", "{:.0f}"),
    Column("step_seconds", "simulated (s)", "{:.0f}"),
    Column("peak_share", "of the peak", "{:.0%}"),
    Column("published_share", "published"),
    Column("over_axonn", "over AxoNN's", "{:.2f}"),
    Column("published_over_axonn", "published", "{:.2f}"),
    Column("exposed_share", "exposed", "{:.1%}"),
    Column("idle_share", "idle", "{:.0%}"),
)


@dataclass(frozen=True)
class LongStep:
    """Seconds of a step of many micro-batches, and of its pipelined phase without the optimizer; of the rank that
    computes most, seconds of exposed communication, of exposed messages between stages, and idle."""

    seconds: float
    phase: float
    exposed: float
    pipe: float
    idle: float


def bench_simulated_pipelines(out: Path, batch: int = RUNS_BATCH) -> dict[str, list[dict[str, Any]]]:
    """Simulate all runs, print both tables, and write simulated-pipelines.json to `out`."""
    stages = [simulate_stages(count) for count in (6, 12, 24, 48)]
    choices: list[dict[str, Any]] = []
    for choice in CHOICES:
        row = simulate_choice(choice, batch)
        axonn = next((each for each in choices if each["billions"] == choice.billions), row)
        choices.append(row | {"over_axonn": row["step_seconds"] / axonn["step_seconds"]})
    print_table(f"12B parameters on 48 GPUs of Summit, {FIGURES_BATCH} sequences", STAGE_COLUMNS, stages)
    print_table(f"Table 3.1's choices, {batch} sequences", CHOICE_COLUMNS, choices)
    path = write_result(
        out, "simulated-pipelines", CHOICE_COLUMNS, choices, stages=stages, batch=batch, seq_len=SEQ_LEN
    )
    append_to_table(path, markdown_table(STAGE_COLUMNS, stages))
    draw_result(path)
    return {"stages": stages, "choices": choices}


def simulate_stages(stages: int) -> dict[str, Any]:
    """12B parameters with `stages` stages, micro-batches of one sequence, in both fidelities."""
    grid = GridSizes(pipe=stages, data=48 // stages)
    found = predict_pipeline(12, grid, FIGURES_BATCH, 1)
    closed, queued = (simulate_long(12, found, FIGURES_BATCH, fidelity) for fidelity in ("closed-form", "event-driven"))
    return {
        "stages": stages,
        "closed_seconds": closed.phase,
        "queued_seconds": queued.phase,
        "planned_seconds": plan_stages(stages)["phase_seconds"],
        "published_seconds": MEASURED_PHASE.get(stages),
        "idle_share": closed.idle / closed.seconds,
        "pipe_share": closed.pipe / closed.seconds,
    }


def simulate_choice(choice: PublishedChoice, batch: int) -> dict[str, Any]:
    """A choice of Table 3.1, in closed form."""
    grid = GridSizes(pipe=choice.inter, data=choice.data, x=choice.intra)
    is_axonn = choice.framework == "AxoNN"
    found = predict_pipeline(choice.billions, grid, batch, choice.micro_batch, is_axonn)
    long = simulate_long(choice.billions, found, batch, "closed-form", hides=is_axonn)
    flops = model_flops(MODELS[choice.billions], batch)
    return {
        "billions": choice.billions,
        "framework": choice.framework,
        "gpus": grid.ranks,
        "choice": f"{grid}, micro-batches of {choice.micro_batch}",
        "planned_seconds": found.step_time,
        "step_seconds": long.seconds,
        "peak_share": flops / long.seconds / grid.ranks / PEAK,
        "published_share": PUBLISHED_SHARE[choice.framework],
        "published_over_axonn": PUBLISHED_OVER_AXONN.get((choice.billions, choice.framework)),
        "exposed_share": long.exposed / long.seconds,
        "idle_share": long.idle / long.seconds,
    }


def simulate_long(billions: int, found: GridPlan, batch: int, fidelity: Fidelity, *, hides: bool = True) -> LongStep:
    """Simulate a plan's step of `batch` sequences, of many micro-batches a part (SIMULATED_ROUNDS)."""
    config = step_of_plan(found, overlap=hides, state=STATE)
    pipe, each = config.grid.pipe, config.micro_batch * config.grid.batch_parts
    count = batch // each

    def simulate(micro_batches: int) -> StepSimulation:
        model = replace(MODELS[billions], max_seq_len=SEQ_LEN)
        workload = StepWorkload(read_architecture(model, SEQ_LEN), micro_batches * each, SEQ_LEN, dtype="fp16")
        return simulate_step(workload, config, Cluster.preset("summit"), fidelity=fidelity)

    part = SIMULATED_ROUNDS * pipe
    if count <= part + pipe:
        return _times(simulate(count))
    before, after = _times(simulate(part)), _times(simulate(part + pipe))
    rounds = (count - part - pipe) / pipe
    times = zip(astuple(before), astuple(after), strict=True)
    return LongStep(*(late + rounds * (late - early) for early, late in times))


def _times(step: StepSimulation) -> LongStep:
    return LongStep(step.step_time, _phase(step), step.exposed_total, step.exposed["pipe"], step.idle)


def _phase(step: StepSimulation) -> float:
    """Seconds until the last backward pass has ended."""
    graph = step.lowered.graph
    stream = graph.stream_names.index(COMPUTE)
    passes = np.array([name != "optimizer" for name in graph.names]) & (graph.streams == stream)
    return float(step.execution.ends[passes].max())
