# SPDX-License-Identifier: Apache-2.0
"""`python -m lab simulated-pipelines`: chapter 3 of Singh's dissertation, pipelines on Summit, simulated.

The runs are those of `python -m lab published-pipelines`: 12B parameters on 48 GPUs with 6 to 48 stages (figures 3.3
and 3.4), and the choices of Table 3.1 with 48 to 384 GPUs (figure 3.7). AxoNN overlaps the same collectives as
Stretto; for DeepSpeed and Megatron-LM, which did not then, every collective is assumed to be exposed.
"""

import json
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lab.harness import Bench, Measured, Table, column
from lab.papers import read_paper
from lab.pictures import describe_origin
from lab.planning.published_pipelines import (
    CHOICES,
    FIGURES_BATCH,
    MEASURED_PHASE,
    MODELS,
    SEQ_LEN,
    STATE,
    PublishedChoice,
    PublishedPipelinesSetting,
    model_flops,
    plan_stages,
    predict_pipeline,
)
from stretto.axes import GridSizes
from stretto.cluster import Cluster
from stretto.planner import GridPlan
from stretto.planner.architecture_loader import read_architecture
from stretto.planner.step import COMPUTE
from stretto.planner.workload import StepWorkload
from stretto.simulator.training import StepSimulation, simulate_step, step_of_plan
from stretto.simulator.training.simulation import Fidelity


def simulate_published(setting: PublishedPipelinesSetting) -> Measured:
    """Simulate the choices of Table 3.1, and the figures' stages."""
    stages = [simulate_stages(count) for count in (6, 12, 24, 48)]
    choices: list[dict[str, Any]] = []
    for choice in CHOICES:
        row = simulate_choice(choice, setting.batch)
        axonn = next((each for each in choices if each["billions"] == choice.billions), row)
        choices.append(row | {"over_axonn": row["step_seconds"] / axonn["step_seconds"]})
    title = f"12B parameters on 48 GPUs of Summit, {FIGURES_BATCH} sequences"
    return Measured(choices, tables=(Table(title, stages, StagesRow, "stages"),))


PEAK = 125e12  # FLOP/s of a V100, as the dissertation counts
PUBLISHED: dict[str, Any] = read_paper("singh")["figure-3-7"]
# A round is as many micro-batches as there are stages. Of a step with more rounds, these and one more are simulated;
# each further round takes as long as the last.
SIMULATED_ROUNDS = 4


@dataclass(frozen=True)
class StagesRow:
    """A number of stages: the pipeline's seconds simulated, planned and published."""

    stages: int = column("G_inter")
    closed_seconds: float = column("pipeline, closed form (s)", "{:.2f}")
    queued_seconds: float = column("event-driven (s)", "{:.2f}")
    planned_seconds: float = column("planner (s)", "{:.2f}")
    published_seconds: float = column("published (s)", "{:.2f}")
    idle_share: float = column("idle", "{:.0%}")
    pipe_share: float = column("waits for messages", "{:.1%}")


@dataclass(frozen=True)
class Row:
    """A choice of Table 3.1: simulated, planned and published."""

    billions: int = column("parameters (10^9)")
    framework: str = column("framework")
    gpus: int = column("GPUs")
    choice: str = column("choice of Table 3.1")
    planned_seconds: float = column("planner (s)", "{:.0f}")
    step_seconds: float = column("simulated (s)", "{:.0f}")
    peak_share: float = column("of the peak", "{:.0%}")
    published_share: str = column("published")
    over_axonn: float = column("over AxoNN's", "{:.2f}")
    published_over_axonn: float = column("published", "{:.2f}")
    exposed_share: float = column("exposed", "{:.1%}")
    idle_share: float = column("idle", "{:.0%}")


@dataclass(frozen=True)
class LongStep:
    """Seconds of a step of many micro-batches, and of its pipelined phase without the optimizer; of the rank that
    computes most, seconds of exposed communication, of exposed messages between stages, and idle."""

    seconds: float
    phase: float
    exposed: float
    pipe: float
    idle: float


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
        "published_share": PUBLISHED["share"][choice.framework],
        "published_over_axonn": PUBLISHED["over_axonn_100"].get(choice.framework) if choice.billions == 100 else None,
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


def plot_simulated_pipelines(result: Path, picture: Path) -> None:
    """Draw the pipeline's phase by stages, and each framework's step over AxoNN's and part of the peak by GPUs."""
    from lab.style import PEER, drawing
    from stretto.report.style import SERIES, STRETTO

    data = json.loads(result.read_text())
    with drawing(picture, 12, 3.2) as drawn:
        stages, shares, ratios = drawn.panels(1, 3)[0]
        for key, label, look in (
            ("closed_seconds", "simulated", STRETTO),
            ("planned_seconds", "planner", SERIES[1]),
            ("published_seconds", "published", PEER),
        ):
            known = [(row["stages"], row[key]) for row in data["stages"] if row[key] is not None]
            if known:
                stages.plot(*zip(*known, strict=True), label=label, **look.line)
        stages.set_title("12B parameters, 48 GPUs", loc="left")
        stages.set_xlabel("stages")
        stages.set_ylabel("pipeline (s)")
        stages.set_ylim(bottom=0)
        frameworks = list(dict.fromkeys(row["framework"] for row in data["rows"]))
        for framework, look in zip(frameworks, SERIES[2:], strict=False):
            rows = [row for row in data["rows"] if row["framework"] == framework]
            gpus = [row["gpus"] for row in rows]
            shares.plot(gpus, [100 * row["peak_share"] for row in rows], label=framework, **look.line)
            ratios.plot(gpus, [row["over_axonn"] for row in rows], **look.line)
            known = [(row["gpus"], row["published_over_axonn"]) for row in rows if row["published_over_axonn"]]
            for place, ratio in known:
                ratios.plot([place], [ratio], marker=look.marker, color=look.colour, markerfacecolor="none")
        shares.set_ylabel("of the peak (%)")
        shares.set_ylim(bottom=0)
        ratios.set_ylabel("step over AxoNN's")
        for panel in (shares, ratios):
            panel.set_title("Table 3.1's choices", loc="left")
            panel.set_xlabel("GPUs")
        drawn.title = "Pipelines on Summit, simulated"
        drawn.subtitle = describe_origin(data, simulated="Summit, in closed form")
        drawn.caption = (
            "Hollow: published (figure 3.7, 100B parameters). Published parts of the peak: AxoNN 49 to 54%, "
            "DeepSpeed 39 to 42%, Megatron-LM 21 to 41%."
        )


BENCH = Bench(
    "simulated-pipelines",
    "The pipelines of Singh's chapter 3 on Summit, simulated, compared with the published times (needs no GPU).",
    PublishedPipelinesSetting,
    simulate_published,
    Row,
    title=lambda setting: f"Table 3.1's choices, {setting.batch} sequences",
    plot=plot_simulated_pipelines,
    about=lambda setting: {"batch": setting.batch, "seq_len": SEQ_LEN},
)
