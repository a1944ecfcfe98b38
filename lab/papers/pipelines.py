# SPDX-License-Identifier: Apache-2.0
"""Chapter 3 of Singh's dissertation, pipelines on Summit: its runs planned, simulated, and as measured there.

The runs are 12B parameters on 48 GPUs with 6 to 48 stages (figures 3.3 and 3.4), and the choices of Table 3.1 with 48
to 384 GPUs (figure 3.7). AxoNN overlaps the same collectives as Stretto; for DeepSpeed and Megatron-LM, which did not
then, every collective is assumed to be exposed in the simulation.
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lab.harness import Measured, Table, column
from lab.papers import Compared, by_number, model_flops, read_paper
from lab.pictures import describe_origin, group, points
from stretto.axes import GridSizes
from stretto.cluster import Cluster
from stretto.execution import StateOptions
from stretto.models import GPTConfig
from stretto.planner import GridPlan, plan, predict
from stretto.planner.architecture_loader import read_architecture
from stretto.planner.communication import bandwidth
from stretto.planner.pipeline.memory import checkpoint_interval
from stretto.planner.search_space import PredictKeywords
from stretto.planner.step import COMPUTE
from stretto.planner.workload import StepWorkload
from stretto.simulator.training import StepSimulation, simulate_step, step_of_plan
from stretto.simulator.training.simulation import Fidelity

SEQ_LEN = 512
PEAK = 125e12  # FLOP/s of a V100, as the dissertation counts
# Section 3.3 has 2048 sequences. The batch of section 3.4 is not stated: with 2048 sequences, 48 stages and
# micro-batches of 2 would idle a quarter of the time, but the runs reached half of the peak.
FIGURES_BATCH, RUNS_BATCH = 2048, 16384
STATE = StateOptions("host")  # as there, with 16-bit weights and gradients on the GPU
# Sizes of the models, from AxoNN's paper; the dissertation only states their parameter counts. With dropout, as GPT
# models had then: blocks that are recomputed are computed to their end.
MODELS = {
    billions: GPTConfig(layers=layers, hidden=hidden, heads=heads, vocab=51200, max_seq_len=SEQ_LEN, dropout=0.1)
    for billions, layers, hidden, heads in (
        (12, 48, 4512, 24),
        (24, 48, 6336, 36),
        (50, 96, 6528, 48),
        (100, 96, 9360, 60),
    )
}
# Of a step with more rounds (as many micro-batches as stages), these and one more are simulated; each further round
# takes as long as the last.
SIMULATED_ROUNDS = 4
SINGH = read_paper("singh")
CHOICES: list[tuple[int, str, int, int, int, int]] = [tuple(choice) for choice in SINGH["table-3-1"]["choices"]]
MEASURED_PHASE, MEASURED_REDUCTION = (by_number(SINGH["figure-3-4"][key]) for key in ("phase", "reduction"))
PUBLISHED: dict[str, Any] = SINGH["figure-3-7"]


@dataclass(frozen=True)
class Stages:
    """A number of stages: published, planned and simulated times (figures 3.3 and 3.4)."""

    stages: int = column("G_inter")
    published_seconds: float | None = column("pipeline, published (s)", "{:.2f}")
    planned_seconds: float = column("planner (s)", "{:.2f}")
    paper_seconds: float = column("eq. 4.7 and 4.10 (s)", "{:.2f}")
    message_gigabytes: float = column("sent by an inner rank (GB)", "{:.1f}")
    compute_over_messages: float = column("computation / sent (s/GB)", "{:.2f}")
    reduction_seconds: float = column("all-reduce (s)", "{:.2f}")
    outer_reduction_seconds: float = column("data outermost (s)", "{:.2f}")
    published_reduction_seconds: float | None = column("published (s)", "{:.2f}")
    planned_step_seconds: float = column("planned step (s)", "{:.2f}")
    closed_seconds: float | None = column("pipeline, closed form (s)", "{:.2f}", default=None)
    queued_seconds: float | None = column("event-driven (s)", "{:.2f}", default=None)
    idle_share: float | None = column("idle", "{:.0%}", default=None)
    pipe_share: float | None = column("waits for messages", "{:.1%}", default=None)


@dataclass(frozen=True)
class Choice:
    """A choice of Table 3.1, planned and simulated, and of AxoNN's our best plans of as many GPUs."""

    billions: int = column("parameters (10^9)")
    framework: str = column("framework")
    gpus: int = column("GPUs")
    choice: str = column("choice of Table 3.1")
    planned_seconds: float = column("planner (s)", "{:.0f}")
    planned_share: float = column("of the peak", "{:.0%}")
    memory_gigabytes: float = column("memory (GB)", "{:.1f}")
    step_seconds: float = column("simulated (s)", "{:.0f}")
    peak_share: float = column("of the peak", "{:.0%}")
    published_share: str = column("published")
    exposed_share: float = column("exposed", "{:.1%}")
    idle_share: float = column("idle", "{:.0%}")
    planned_over_axonn: float = column("over AxoNN's, planner", "{:.2f}", default=1.0)
    over_axonn: float = column("simulated", "{:.2f}", default=1.0)
    published_over_axonn: float | None = column("published", "{:.2f}", default=None)
    best: str | None = column("our best, stages x data", default=None)
    best_seconds: float | None = column("its step (s)", "{:.0f}", default=None)
    over_best: float | None = column("the choice over it", "{:.3f}", default=None)
    best_of_all: str | None = column("our best of all grids", default=None)
    best_of_all_seconds: float | None = column("its step (s)", "{:.0f}", default=None)


def study_pipelines() -> Iterator[Measured | Compared]:
    """Plan and simulate the figures' stages and the choices of Table 3.1."""
    stages = [simulate_stages(plan_stages(count)) for count in (6, 12, 24, 48)]
    choices: list[Choice] = []
    for choice in CHOICES:
        choices.append(_compare_choice(choice, choices))
    table = Table(f"12B parameters on 48 GPUs of Summit, {FIGURES_BATCH} sequences", stages, key="stages")
    about, title = {"batch": RUNS_BATCH, "seq_len": SEQ_LEN}, f"Table 3.1's choices, {RUNS_BATCH} sequences"
    yield Measured(choices, about, name="simulated-pipelines", title=title, tables=(table,))
    for row in stages:
        if row.published_seconds is not None:
            run, times = f"12B on 48 GPUs of Summit, {row.stages} stages", (row.planned_seconds, row.closed_seconds)
            yield Compared("Singh", "figure 3.4", run, "pipeline (s)", f"{row.published_seconds}", *times)
    for each in choices:
        if each.published_over_axonn is not None:
            published, ratios = f"{each.published_over_axonn}", (each.planned_over_axonn, each.over_axonn)
            yield Compared("Singh", "figure 3.7", f"100B, {each.framework}", "step over AxoNN's", published, *ratios)


def plan_stages(stages: int) -> Stages:
    """Predict a step of 12B parameters on 48 GPUs with `stages` stages, micro-batches of 1 (section 3.3.2)."""
    grid = GridSizes(pipe=stages, data=48 // stages)
    found, paper = (predict_pipeline(12, grid, FIGURES_BATCH, 1, cost=cost) for cost in ("full", "paper"))
    # t_f + t_b of equation 4.7, of all micro-batches: computation does not depend on the number of stages.
    whole = paper.bubble / (1 - 1 / stages)
    after = found.terms["the optimizer"] + found.exposed["data"]
    sent = 2 * (FIGURES_BATCH // grid.data) * SEQ_LEN * MODELS[12].hidden * 2 * 2 / 1e9
    # With data outside of the stages, as the dissertation has it, all GPUs of a node share its network.
    outer = bandwidth(Cluster.preset("summit"), GridSizes(x=stages, data=grid.data), "data")
    reduction = found.communication["all_reduce_data"]
    return Stages(
        stages,
        MEASURED_PHASE.get(stages),
        planned_seconds=found.step_time - after,
        paper_seconds=whole * FIGURES_BATCH / 48 + paper.bubble + paper.message_time,
        message_gigabytes=sent,
        compute_over_messages=found.terms["computation"] / sent,
        reduction_seconds=reduction,
        outer_reduction_seconds=reduction * (found.bandwidth["data"] or outer) / outer,
        published_reduction_seconds=MEASURED_REDUCTION.get(stages),
        planned_step_seconds=found.step_time,
    )


def simulate_stages(planned: Stages) -> Stages:
    """The row with the simulated times, in both fidelities."""
    found = predict_pipeline(12, GridSizes(pipe=planned.stages, data=48 // planned.stages), FIGURES_BATCH, 1)
    closed, queued = (simulate_long(12, found, FIGURES_BATCH, fidelity) for fidelity in ("closed-form", "event-driven"))
    idle, pipe = closed.idle / closed.seconds, closed.pipe / closed.seconds
    return replace(planned, closed_seconds=closed.phase, queued_seconds=queued.phase, idle_share=idle, pipe_share=pipe)


def _compare_choice(choice: tuple[int, str, int, int, int, int], before: list[Choice]) -> Choice:
    """Predict and simulate a choice (in closed form). before: rows of other choices, with AxoNN's of this size."""
    billions, framework, micro_batch, intra, inter, data = choice
    grid, is_axonn = GridSizes(pipe=inter, data=data, x=intra), framework == "AxoNN"
    found = predict_pipeline(billions, grid, RUNS_BATCH, micro_batch, is_axonn)
    long = simulate_long(billions, found, RUNS_BATCH, "closed-form", hides=is_axonn)
    flops = model_flops(MODELS[billions], RUNS_BATCH, SEQ_LEN) / grid.ranks / PEAK
    row = Choice(
        billions,
        framework,
        grid.ranks,
        f"{grid}, micro-batches of {micro_batch}",
        planned_seconds=found.step_time,
        planned_share=flops / found.step_time,
        memory_gigabytes=found.peak_memory / 1e9,
        step_seconds=long.seconds,
        peak_share=flops / long.seconds,
        published_share=PUBLISHED["share"][framework],
        exposed_share=long.exposed / long.seconds,
        idle_share=long.idle / long.seconds,
    )
    if not is_axonn:
        axonn = next(each for each in before if each.billions == billions)
        return replace(
            row,
            planned_over_axonn=row.planned_seconds / axonn.planned_seconds,
            over_axonn=row.step_seconds / axonn.step_seconds,
            published_over_axonn=PUBLISHED["over_axonn_100"][framework] if billions == 100 else None,
        )
    best, best_of_all = _find_best(billions, grid.ranks)
    return replace(
        row,
        best=_name(best),
        best_seconds=best.step_time,
        over_best=found.step_time / best.step_time,
        best_of_all=_name(best_of_all),
        best_of_all_seconds=best_of_all.step_time,
    )


def predict_pipeline(
    billions: int, grid: GridSizes, batch: int, micro_batch: int, is_axonn: bool = True, cost: Any = "full"
) -> GridPlan:
    """Predict a step. AxoNN's pipeline_limit is the number of stages (section 3.2.1); the others run 1F1B."""
    interval = checkpoint_interval(MODELS[billions].layers, grid.pipe)
    options: PredictKeywords = {
        "schedule": "message-driven" if is_axonn else "1f1b",
        "recompute": f"every:{interval}" if interval > 1 else "full",
    }
    return predict(
        MODELS[billions],
        Cluster.preset("summit"),
        grid=grid,
        batch=batch,
        seq_len=SEQ_LEN,
        micro_batch=micro_batch,
        dtype="fp16",
        state=STATE,
        cost=cost,
        **options,
    )


def _find_best(billions: int, gpus: int) -> tuple[GridPlan, GridPlan]:
    """The fastest plan of stages and data alone, and that of all grids."""
    model, summit = MODELS[billions], Cluster.preset("summit")
    options: dict[str, Any] = {"gpus": gpus, "batch": RUNS_BATCH, "seq_len": SEQ_LEN, "dtype": "fp16", "state": STATE}
    options["shard_sequence"] = False  # as the paper's runs
    pipes = [pipe for pipe in range(2, model.layers + 1) if gpus % pipe == 0]
    plans = [each for pipe in pipes for each in plan(model, summit, pipe=pipe, **options) if each.fits]
    alone = [each for each in plans if each.grid["pipe"] * each.grid["data"] == gpus]
    return min(alone, key=lambda each: each.step_time), min(plans, key=lambda each: each.step_time)


def _name(found: GridPlan) -> str:
    schedule = f"{found.schedule}{f' v={found.virtual_stages}' if found.schedule == 'interleaved' else ''}"
    return f"{GridSizes(**found.grid)}, {schedule}, micro-batches of {found.micro_batch}, recompute={found.recompute}"


@dataclass(frozen=True)
class LongStep:
    """Seconds of a step of many micro-batches, and of its pipelined phase without the optimizer; of the rank that
    computes most, seconds of exposed communication, of exposed messages between stages, and idle."""

    seconds: float
    phase: float
    exposed: float
    pipe: float
    idle: float


def simulate_long(billions: int, found: GridPlan, batch: int, fidelity: Fidelity, *, hides: bool = True) -> LongStep:
    """Simulate a plan's step of `batch` sequences, of many micro-batches a part (SIMULATED_ROUNDS)."""
    config = step_of_plan(found, overlap=hides, state=STATE)
    pipe, each = config.grid.pipe, config.micro_batch * config.grid.batch_parts
    count = batch // each

    def simulate(micro_batches: int) -> LongStep:
        workload = StepWorkload(
            read_architecture(MODELS[billions], SEQ_LEN), micro_batches * each, SEQ_LEN, dtype="fp16"
        )
        step = simulate_step(workload, config, Cluster.preset("summit"), fidelity=fidelity)
        return LongStep(step.step_time, _phase(step), step.exposed_total, step.exposed["pipe"], step.idle)

    part = SIMULATED_ROUNDS * pipe
    if count <= part + pipe:
        return simulate(count)
    before, after = simulate(part), simulate(part + pipe)
    rounds = (count - part - pipe) / pipe
    times = zip(astuple(before), astuple(after), strict=True)
    return LongStep(*(late + rounds * (late - early) for early, late in times))


def _phase(step: StepSimulation) -> float:
    """Seconds until the last backward pass has ended."""
    graph = step.lowered.graph
    stream = graph.stream_names.index(COMPUTE)
    passes = np.array([name != "optimizer" for name in graph.names]) & (graph.streams == stream)
    return float(step.execution.ends[passes].max())


def plot_simulated_pipelines(data: dict[str, Any], picture: Path) -> None:
    """Draw the pipeline's phase by stages, and each framework's step over AxoNN's and part of the peak by GPUs."""
    from lab.style import PEER, drawing
    from stretto.report.style import SERIES, STRETTO

    with drawing(picture, 12, 3.2) as drawn:
        stages, shares, ratios = drawn.panels(1, 3)[0]
        for name, label, look in (
            ("closed", "simulated", STRETTO),
            ("planned", "planner", SERIES[1]),
            ("published", "published", PEER),
        ):
            known = points(data["stages"], "stages", f"{name}_seconds")
            if known[0]:
                stages.plot(*known, label=label, **look.line)
        stages.set(xlabel="stages", ylabel="pipeline (s)")
        stages.set_title("12B parameters, 48 GPUs", loc="left")
        stages.set_ylim(bottom=0)
        for (framework, rows), look in zip(group(data["rows"], "framework").items(), SERIES[2:], strict=False):
            gpus, of_peak = points(rows, "gpus", "peak_share")
            shares.plot(gpus, [100 * share for share in of_peak], label=framework, **look.line)
            ratios.plot(*points(rows, "gpus", "over_axonn"), **look.line)
            hollow: dict[str, Any] = {"marker": look.marker, "color": look.colour, "markerfacecolor": "none"}
            ratios.plot(*points(rows, "gpus", "published_over_axonn"), linestyle="none", **hollow)
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
