# SPDX-License-Identifier: Apache-2.0
"""`python -m lab simulated-scaling`: figures 5.4, 5.5 and 5.7 of Singh's dissertation, and why Table 5.2 is slower.

Grids are those of `stretto.planner`. Steps of figures 5.4 and 5.5 are simulated, in closed form: all-reduces,
reduce-scatters and all-gathers are overlapped there; the all-reduces over data follow the backward pass.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from lab.harness import ANY_CPU, Bench, Measured, Table, column
from lab.papers import read_paper
from lab.pictures import describe_origin
from lab.planning.published import RUNS, PublishedRun, model_flops, paper_model
from lab.studies.machines import MACHINES, name_machines
from stretto.bench.settings import Option, require_known
from stretto.cluster import Cluster, name_grid
from stretto.execution import Overlap
from stretto.models import GPTConfig
from stretto.planner import GridPlan, plan, predict, read_architecture
from stretto.planner.workload import StepWorkload
from stretto.simulator.training import StepSimulation, simulate_step, step_of_plan


@dataclass(frozen=True)
class SimulatedScalingSetting:
    """Which runs of Singh's chapter 5 are planned, and the global batch, which the text does not state."""

    clusters: Annotated[tuple[str, ...], Option("Of perlmutter, frontier and alps.")] = (
        "perlmutter",
        "frontier",
        "alps",
    )
    batch: Annotated[int, Option("Global batch, in sequences of 2048 tokens.")] = 8192

    def __post_init__(self) -> None:
        require_known("cluster", self.clusters, ("perlmutter", "frontier", "alps"))
        if self.batch < 4096 or self.batch % 4096:
            near = max(4096, round(self.batch / 4096) * 4096)
            raise ValueError(f"--batch is {self.batch}, which 4096 replicas cannot share; {near} would do")


def plan_scaling(setting: SimulatedScalingSetting) -> Measured:
    """Plan and simulate the runs of figures 5.5, 5.4 and 5.7, and compare those of Table 5.2."""
    runs = [run for run in RUNS if run.cluster in setting.clusters]
    ladder = [_climb(run, setting.batch) for run in runs]
    overlaps = [row for model in OVERLAPPED_MODELS for row in _overlap(model, setting.batch)]
    strong = [row for model, counts in STRONG_GPUS.items() for row in scale_strongly(model, counts, setting.batch)]
    reasons = [_explain(run, setting.batch) for run in runs]
    tables = (
        Table("Figure 5.4: overlaps on 8,192 GCDs of Frontier", overlaps, OverlapRow, "overlaps"),
        Table("Figure 5.7: days to two trillion tokens on Frontier", strong, StrongRow, "strong"),
        Table("Table 5.2's steps over these, one assumption after the other", reasons, ReasonRow, "reasons"),
    )
    return Measured(ladder, {"sources": {name: asdict(each) for name, each in IN_TRAINING.items()}}, tables=tables)


SEQ_LEN = 2048
TOKENS = 2e12  # of figure 5.7's training
DAY = 86400.0
Row = dict[str, Any]


@dataclass(frozen=True)
class LadderRow:
    """A run of Table 5.2: the baseline, the model's grid, and overlap (figure 5.5)."""

    cluster: str = column("machine")
    gpus: int = column("GPUs", "{:,}")
    model: str = column("model")
    baseline_grid: str = column("baseline")
    baseline_seconds: float = column("its step (s)", "{:.2f}")
    model_grid: str = column("best of the model's ten")
    model_seconds: float = column("its step (s)", "{:.2f}")
    model_saved: float = column("saved", "{:.0%}")
    ring_saved: float = column("saved, rings in nodes of 200 GB/s", "{:.0%}")
    published_model_saved: str = column("published")
    overlap_seconds: float = column("with overlap (s)", "{:.2f}")
    overlap_saved: float = column("saved", "{:.0%}")
    published_overlap_saved: str = column("published")


@dataclass(frozen=True)
class OverlapRow:
    """One overlap more on 8,192 GCDs of Frontier (figure 5.4)."""

    model: str = column("model")
    gpus: int = column("GCDs", "{:,}")
    grid: str = column("grid")
    overlap: str = column("overlap")
    seconds: float = column("step (s)", "{:.2f}")
    compute_seconds: float = column("computation (s)", "{:.2f}")
    exposed_seconds: float = column("exposed (s)", "{:.2f}")
    saved: float = column("saved", "{:.1%}")
    speedup: float = column("speed-up less 1", "{:.1%}")
    published: str = column("published")


@dataclass(frozen=True)
class StrongRow:
    """A training of two trillion tokens by the number of GCDs (figure 5.7)."""

    model: str = column("model")
    gpus: int = column("GCDs", "{:,}")
    grid: str = column("grid")
    seconds: float = column("step (s)", "{:.2f}")
    days: float = column("days to 2T tokens", "{:.1f}")
    published_days: float = column("published", "{:.1f}")
    efficiency: float = column("efficiency", "{:.0%}")
    published_efficiency: float = column("published", "{:.0%}")


@dataclass(frozen=True)
class ReasonRow:
    """A run of Table 5.2 over its plan, one assumption after the other."""

    cluster: str = column("machine")
    gpus: int = column("GPUs", "{:,}")
    model: str = column("model")
    published_seconds: float = column("published step (s)", "{:.2f}")
    planned: float = column("full model", "{:.2f}")
    products: float = column("+ products as in training", "{:.2f}")
    attention: float = column("+ attention's scores in memory", "{:.2f}")
    no_overlap: float = column("+ nothing overlaps", "{:.2f}")
    planned_compute_seconds: float = column("computation, full model (s)", "{:.2f}")
    products_compute_seconds: float = column("+ products (s)", "{:.2f}")
    compute_seconds: float = column("+ scores (s)", "{:.2f}")
    left_seconds: float = column("published less that (s)", "{:.2f}")
    communication_seconds: float = column("all communication (s)", "{:.2f}")


# Figure 5.4's bars. Copy engines are of NVIDIA's GPUs in one node.
WAITING = Overlap(all_reduce=False, reduce_scatter=False, all_gather=False, data=False, copy_engines=False)
HIDDEN = {
    "none": WAITING,
    "OAR": replace(WAITING, all_reduce=True),
    "OAR + ORS": replace(WAITING, all_reduce=True, reduce_scatter=True),
    "OAR + ORS + OAG": replace(WAITING, all_reduce=True, reduce_scatter=True, all_gather=True),
}
OVERLAPPED_MODELS = ("gpt-20b", "gpt-40b", "gpt-80b")
OVERLAPPED_GPUS = 8192
PUBLISHED_DAYS = {tuple(run): days for *run, days in read_paper("singh")["figure-5-7"]["days"]}
STRONG_GPUS = {
    "gpt-80b": (128, 256, 512, 1024, 2048, 4096, 8192),
    "gpt-640b": (512, 1024, 2048, 4096, 8192),
}


@dataclass(frozen=True)
class SlowerProducts:
    """FLOP/s that products reach in training, and where that is from."""

    flops: float
    source: str


IN_TRAINING = {
    "frontier": SlowerProducts(0.55 * 191.5e12, "Singh, section 5.1.3: products but the slowest reach 55% of the peak"),
    "alps": SlowerProducts(660e12, "lab/results/plan/probed.toml: an H200, of the same kind, in large products"),
}


def _climb(run: PublishedRun, batch: int) -> Row:
    """Figure 5.5 (right) for one run: the baseline, the best of the paper's model's first ten, and overlap."""
    cluster = Cluster.preset(run.cluster)
    batch = divisible(batch, run.gpus // cluster.gpus_per_node)
    waiting, chosen = choose(run.model, cluster, run.gpus, batch)
    baseline = _baseline(waiting, cluster.gpus_per_node)
    name = name_grid(chosen.grid)
    of_baseline = None if baseline is None else simulate(run.model, cluster, batch, baseline, WAITING).step_time
    of_model, overlapped = (
        simulate(run.model, cluster, batch, chosen, HIDDEN[bar]).step_time for bar in ("none", "OAR + ORS + OAG")
    )
    return {
        "cluster": run.cluster,
        "gpus": run.gpus,
        "model": run.model,
        "batch": batch,
        "baseline_grid": None if baseline is None else name_grid(baseline.grid),
        "baseline_seconds": of_baseline,
        "model_grid": name,
        "model_seconds": of_model,
        "model_saved": None if of_baseline is None else 1 - of_model / of_baseline,
        "ring_saved": _grid_gain_of_rings(run, cluster, batch),
        "published_model_saved": "13% to 45%" if _is_in_figure(run) else None,
        "overlap_seconds": overlapped,
        "overlap_saved": 1 - overlapped / of_model,
        "published_overlap_saved": _published_overlap(run),
    }


def _grid_gain_of_rings(run: PublishedRun, cluster: Cluster, batch: int) -> float | None:
    """The saving of the model's grid with the ring bandwidth of the study of collectives, if that is lower."""
    studied = MACHINES.get(run.cluster)
    if studied is None or studied.ring_bandwidth >= cluster.require("in_node.bandwidth"):
        return None
    slower = replace(cluster, in_node=replace(cluster.in_node, bandwidth=studied.ring_bandwidth))
    waiting, chosen = choose(run.model, slower, run.gpus, batch)
    baseline = _baseline(waiting, slower.gpus_per_node)
    if baseline is None:
        return None
    of_baseline, of_model = (simulate(run.model, slower, batch, each, WAITING).step_time for each in (baseline, chosen))
    return 1 - of_model / of_baseline


def choose(model: str, cluster: Cluster, gpus: int, batch: int) -> tuple[dict[str, GridPlan], GridPlan]:
    """All plans that fit, with nothing overlapped, by grid; and the fastest among the paper's model's first ten."""
    options: dict[str, Any] = {"gpus": gpus, "batch": batch, "seq_len": SEQ_LEN, "recompute": "full"}
    trained = paper_model(model)
    plans = {name_grid(each.grid): each for each in plan(trained, cluster, **options, overlaps=False) if each.fits}
    first_ten = [name_grid(each.grid) for each in plan(trained, cluster, cost="paper", **options)[:10]]
    return plans, min((plans[name] for name in first_ten if name in plans), key=lambda each: each.step_time)


def simulate(model: str, cluster: Cluster, batch: int, chosen: GridPlan, overlap: Overlap) -> StepSimulation:
    """Simulate a step of a plan, in closed form."""
    workload = StepWorkload(read_architecture(paper_model(model), SEQ_LEN), batch, SEQ_LEN)
    return simulate_step(workload, step_of_plan(chosen, overlap=overlap), cluster)


def _overlap(model: str, batch: int) -> list[Row]:
    """Figure 5.4 for one model: one overlap after the other, on the grid of figure 5.5."""
    cluster = Cluster.preset("frontier")
    _, chosen = choose(model, cluster, OVERLAPPED_GPUS, batch)
    rows: list[Row] = []
    for bar, overlap in HIDDEN.items():
        step = simulate(model, cluster, batch, chosen, overlap)
        first = rows[0]["seconds"] if rows else step.step_time
        is_published = (model, bar) == ("gpt-80b", "OAR + ORS + OAG")
        rows.append(
            {
                "model": model,
                "gpus": OVERLAPPED_GPUS,
                "grid": name_grid(chosen.grid),
                "overlap": bar,
                "seconds": step.step_time,
                "compute_seconds": step.computation,
                "exposed_seconds": step.exposed_total,
                "saved": 1 - step.step_time / first,
                "speedup": first / step.step_time - 1,
                "published": "18.69%" if is_published else None,
            }
        )
    return rows


def _baseline(plans: Mapping[str, GridPlan], node: int) -> GridPlan | None:
    """Tensor parallelism over a node, and data parallelism across nodes that shards no more than memory requires."""
    found = [each for each in plans.values() if each.grid["x"] == node and each.grid["y"] == 1]
    return min(found, key=lambda each: each.grid["z"], default=None)


def _is_in_figure(run: PublishedRun) -> bool:
    return run.cluster == "frontier" and run.gpus <= 8192


def _published_overlap(run: PublishedRun) -> str | None:
    if not _is_in_figure(run):
        return None
    return "22%" if run.model == "gpt-80b" else "up to 22%"


def divisible(batch: int, nodes: int) -> int:
    """The batch, or the next smaller one that data parallelism over all nodes divides."""
    return batch if batch % nodes == 0 else batch // nodes * nodes


def scale_strongly(model: str, counts: tuple[int, ...], batch: int) -> list[Row]:
    """Figure 5.7 for one model: the best plan at each number of GCDs, the batch unchanged."""
    cluster, trained = Cluster.preset("frontier"), paper_model(model)
    rows: list[Row] = []
    for gpus in counts:
        best = plan(trained, cluster, gpus=gpus, batch=batch, seq_len=SEQ_LEN, recompute="full")[0]
        days = TOKENS / (batch * SEQ_LEN) * best.step_time / DAY
        rows.append(
            {
                "model": model,
                "gpus": gpus,
                "grid": name_grid(best.grid),
                "fits": best.fits,
                "seconds": best.step_time,
                "days": days,
                "published_days": PUBLISHED_DAYS.get((model, gpus)),
            }
        )
    for key in ("days", "published_days"):
        first = rows[0]
        for row in rows:
            if row[key] is not None:
                gain = first[key] / row[key] / (row["gpus"] / first["gpus"])
                row["efficiency" if key == "days" else "published_efficiency"] = gain
    return rows


def _explain(run: PublishedRun, batch: int) -> Row:
    """How much too fast the full model's plan is, and the rest as idealizations are removed one after the other.

    The grid is the plan's. Ratios are published seconds over predicted ones.
    """
    cluster = Cluster.preset(run.cluster)
    options: dict[str, Any] = {"batch": batch, "seq_len": SEQ_LEN, "recompute": "full"}
    best = plan(paper_model(run.model), cluster, gpus=run.gpus, **options)[0]
    slower = IN_TRAINING.get(run.cluster)
    if slower is not None:
        flops = replace(cluster.gpu.empirical_flops, bf16=slower.flops)
        cluster = replace(cluster, gpu=replace(cluster.gpu, empirical_flops=flops))
    predicted = _predictor(best, run, cluster, batch)
    with_products = predicted(plain_attention=False, overlaps=True)
    with_attention = predicted(plain_attention=True, overlaps=True)
    waiting = predicted(plain_attention=True, overlaps=False)
    published = model_flops(GPTConfig.preset(run.model), batch) / (run.petaflops * 1e15)
    assert waiting.compute_time is not None
    return {
        "cluster": run.cluster,
        "gpus": run.gpus,
        "model": run.model,
        "grid": name_grid(best.grid),
        "published_seconds": published,
        "planned": published / best.step_time,
        "products": published / with_products.step_time,
        "attention": published / with_attention.step_time,
        "no_overlap": published / waiting.step_time,
        "compute_seconds": waiting.compute_time,
        "planned_compute_seconds": best.compute_time,
        "products_compute_seconds": with_products.compute_time,
        "left_seconds": published - waiting.compute_time,
        "communication_seconds": waiting.communication["total"],
    }


def _predictor(best: GridPlan, run: PublishedRun, cluster: Cluster, batch: int) -> Callable[..., GridPlan]:
    """Predicts the plan's grid with its options, and attention by plain operations or a fused kernel."""

    def predicted(*, plain_attention: bool, overlaps: bool) -> GridPlan:
        model = replace(read_architecture(paper_model(run.model), SEQ_LEN), has_plain_attention=plain_attention)
        return predict(
            model,
            cluster,
            grid=best.grid,
            batch=batch,
            seq_len=SEQ_LEN,
            micro_batch=best.micro_batch,
            recompute="full",
            reshard=best.reshard,
            overlaps=overlaps,
        )

    return predicted


def plot_scaling(result: Path, picture: Path) -> None:
    """Draw figure 5.5 (steps of the ladder by run) and figure 5.7 (days by GCDs, with the published ones)."""
    import numpy as np

    from lab.style import drawing, group_bars, name_bars, plain_log
    from stretto.report.style import SERIES

    data = json.loads(result.read_text())
    names = (("baseline_seconds", "baseline"), ("model_seconds", "model's grid"), ("overlap_seconds", "with overlap"))
    rows = data["rows"]
    with drawing(picture, 9.4, max(3.2, 0.4 * len(rows))) as drawn:
        ladder, strong = drawn.panels(1, 2)[0]
        places, width = group_bars(len(rows), len(names))
        for series, (key, name) in enumerate(names):
            values = [row[key] or np.nan for row in rows]
            ladder.barh(places[series], values, width, label=name, **SERIES[series].bar)
        name_bars(ladder, range(len(rows)), [f"{row['cluster'].capitalize()} {row['gpus']:,}" for row in rows])
        ladder.invert_yaxis()
        ladder.set_xlabel("s a step")
        ladder.set_title("Figure 5.5: grid and overlap")
        models = dict.fromkeys(row["model"] for row in data["strong"])
        for series, model in enumerate(models):
            found = [row for row in data["strong"] if row["model"] == model]
            known = [row for row in found if row["published_days"] is not None]
            look = SERIES[3 + series]
            strong.plot([row["gpus"] for row in found], [row["days"] for row in found], label=model, **look.line)
            strong.plot(
                [row["gpus"] for row in known],
                [row["published_days"] for row in known],
                label=f"{model}, published",
                color=look.colour,
                marker="*",
                markersize=8,
                linestyle="none",
            )
        drawn.log_ticks(strong.xaxis, [row["gpus"] for row in data["strong"]])
        plain_log(strong.yaxis)
        strong.set_xlabel("GCDs of Frontier")
        strong.set_ylabel("days to 2T tokens")
        strong.set_title("Figure 5.7: strong scaling")
        drawn.title = "Weak and strong scaling of training, planned"
        drawn.subtitle = describe_origin(data, simulated=name_machines(dict.fromkeys(row["cluster"] for row in rows)))


BENCH = Bench(
    "simulated-scaling",
    "Weak and strong scaling against Singh's figures 5.4, 5.5 and 5.7, and why Table 5.2 is slower (needs no GPU).",
    SimulatedScalingSetting,
    plan_scaling,
    LadderRow,
    title="Figure 5.5: what each optimization saves of a step",
    plot=plot_scaling,
    about=lambda setting: {"machine": ANY_CPU, "setting": asdict(setting)},
)
