# SPDX-License-Identifier: Apache-2.0
"""`python -m lab papers`: numbers that papers have published, predicted and simulated here, side by side.

The published numbers are in the TOML files of this folder; predictions and simulations are those of `lab.planning` and
`lab.studies`, whose own commands have more of each figure. Nothing is fitted to a paper.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

from lab.harness import ANY_CPU, Bench, column
from lab.papers import read_paper
from lab.planning import published, published_experts, published_pipelines, simulated_pipelines
from lab.studies import recommendation, scaling, two_level, zero3
from lab.studies.machines import MACHINES
from stretto.bench.settings import Option, require_known
from stretto.cluster import Cluster
from stretto.recommendation.simulation import find_kernels

PARTS = ("pipelines", "training", "strong-scaling", "collectives", "zero3", "experts", "dlrm")


@dataclass(frozen=True)
class PapersSetting:
    """Which parts of the papers `python -m lab papers` compares."""

    only: Annotated[tuple[str, ...], Option(", ".join(PARTS) + ", with commas.")] = PARTS

    def __post_init__(self) -> None:
        require_known("part", self.only, PARTS)


@dataclass(frozen=True)
class Row:
    """A published number, beside the planner's (or closed form's) and the simulator's."""

    paper: str = column("paper")
    source: str = column("figure or table")
    run: str = column("run")
    quantity: str = column("quantity")
    published: str = column("published")
    predicted: float | None = column("predicted", "{:,.3g}")
    simulated: float | None = column("simulated", "{:,.3g}", default=None)


def compare_papers(setting: PapersSetting) -> Iterator[Row]:
    """Predict and simulate the published numbers of each part."""
    compared: dict[str, Callable[[], Iterator[Row]]] = {
        "pipelines": _pipelines,
        "training": _training,
        "strong-scaling": _strong_scaling,
        "collectives": _collectives,
        "zero3": _zero3,
        "experts": _experts,
        "dlrm": _dlrm,
    }
    for part in setting.only:
        yield from compared[part]()


def _pipelines() -> Iterator[Row]:
    for stages, seconds in published_pipelines.MEASURED_PHASE.items():
        planned, simulated = published_pipelines.plan_stages(stages), simulated_pipelines.simulate_stages(stages)
        run = f"12B on 48 GPUs of Summit, {stages} stages"
        times = planned["phase_seconds"], simulated["closed_seconds"]
        yield Row("Singh", "figure 3.4", run, "pipeline (s)", f"{seconds}", *times)
    batch = published_pipelines.RUNS_BATCH
    of_100 = [choice for choice in published_pipelines.CHOICES if choice.billions == 100]
    rows = {choice.framework: simulated_pipelines.simulate_choice(choice, batch) for choice in of_100}
    for framework, ratio in simulated_pipelines.PUBLISHED["over_axonn_100"].items():
        ratios = (rows[framework][key] / rows["AxoNN"][key] for key in ("planned_seconds", "step_seconds"))
        yield Row("Singh", "figure 3.7", f"100B, {framework}", "step over AxoNN's", f"{ratio}", *ratios)


def _training() -> Iterator[Row]:
    for run in published.RUNS:
        row, batch = published.plan_run(run, published.BATCH), published.BATCH
        cluster = Cluster.preset(run.cluster)
        batch = scaling.divisible(batch, run.gpus // cluster.gpus_per_node)
        _, chosen = scaling.choose(run.model, cluster, run.gpus, batch)
        step = scaling.simulate(run.model, cluster, batch, chosen, scaling.HIDDEN["OAR + ORS + OAG"]).step_time
        flops = published.model_flops(published.paper_model(run.model), batch) / step / 1e15
        what = f"{run.model} on {run.gpus:,} GPUs of {run.cluster}"
        yield Row("Singh", "table 5.2", what, "PFLOP/s", f"{run.petaflops}", row.predicted_petaflops, flops)


def _strong_scaling() -> Iterator[Row]:
    for model, counts in scaling.STRONG_GPUS.items():
        for row in scaling.scale_strongly(model, counts, scaling.SimulatedScalingSetting().batch):
            if row["published_days"] is not None:
                run = f"{model} on {row['gpus']:,} GCDs of Frontier"
                yield Row("Singh", "figure 5.7", run, "days", f"{row['published_days']:.1f}", row["days"])


def _collectives() -> Iterator[Row]:
    cells = dict.fromkeys((claim.machine, claim.collective, claim.ranks, claim.mb) for claim in two_level.PUBLISHED)
    setting = two_level.SimulatedTwoLevelSetting()
    rows = [
        two_level.simulate_cell(MACHINES[name], collective, ranks, mb, setting) for name, collective, ranks, mb in cells
    ]
    for claim in two_level.compare_claims(rows):
        run = f"{claim['collective']}, {claim['mb']} MB on {claim['ranks']:,} ranks of {claim['machine']}"
        over = f"speed-up over {claim['over']}"
        times = claim["speedup"], claim["event_speedup"]
        yield Row("Singh", f"figure {claim['figure']}", run, over, claim["published"], *times)


def _zero3() -> Iterator[Row]:
    for row in zero3.simulate_steps(zero3.SimulatedZero3Setting()):
        if row["published"] is not None:
            run = f"{row['model']} on {row['ranks']:,} ranks of {row['machine']}"
            saved = row["saved"], row["event_saved"]
            yield Row("Singh", "figure 6.12", run, "part of the batch time saved", row["published"], *saved)


def _experts() -> Iterator[Row]:
    for gpus, ratio in published_experts.PUBLISHED_RATIO.items():
        found = published_experts.plan_sizes(gpus)["ratio"]
        yield Row("Singh", "figure 7.9", f"{gpus} GPUs of Summit", "largest mixture, ratio", f"{ratio}", found)
    for each in published_experts.plan_bars(1):
        if each["published_saved"] is not None:
            published_saved = f"{each['published_saved']:.3f}"
            yield Row("Singh", "figure 7.5", each["bar"], "part of the step saved", published_saved, each["saved"])
    for steps in published_experts.STEPS:
        found = published_experts.plan_steps(steps, 1)
        run = f"{steps.base}, {steps.experts} experts on {steps.gpus} GPUs of Summit"
        yield Row("Singh", f"figure {steps.figure}", run, "gain (%)", found["published_gain"], 100 * found["gain"])


def _dlrm() -> Iterator[Row]:
    step, rates = recommendation.RecommendationStep(), find_kernels("mi210")
    less = read_paper("punniyamurthy")["section-4-4"]["forward_less"]
    closed, queued = (
        recommendation.compare_fusions(step, rates, recommendation.torus_of(128), "direct", fidelity)
        for fidelity in recommendation.FIDELITIES
    )
    times = closed["forward_less"], queued["forward_less"]
    yield Row("Punniyamurthy et al.", "section 4.4", "128 nodes", "part of a step saved", f"{less}", *times)


BENCH = Bench(
    "papers",
    "Numbers that papers have published, predicted and simulated here, side by side (needs no GPU).",
    PapersSetting,
    compare_papers,
    Row,
    title="Published, predicted and simulated",
    about=lambda setting: {"machine": ANY_CPU, "parts": list(setting.only)},
)
