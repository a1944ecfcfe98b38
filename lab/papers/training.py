# SPDX-License-Identifier: Apache-2.0
"""Chapter 5 of Singh's dissertation: Table 5.2 planned, why it is slower, and figures 5.4, 5.5 and 5.7.

Grids are those of `stretto.planner`. Steps of figures 5.4 and 5.5 are simulated, in closed form: all-reduces,
reduce-scatters and all-gathers are overlapped there; the all-reduces over data follow the backward pass.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lab.harness import ANY_CPU, Measured, Table, column
from lab.papers import Compared, model_flops, read_paper
from lab.papers.machines import MACHINES, name_machines
from lab.pictures import describe_origin, group, points
from stretto.cluster import Cluster, name_grid
from stretto.execution import Overlap
from stretto.models import GPTConfig
from stretto.planner import GridPlan, plan, predict, read_architecture
from stretto.planner.workload import StepWorkload
from stretto.simulator.training import StepSimulation, simulate_step, step_of_plan

# The text does not give the batch; every run is assumed to have 16.8 million tokens.
BATCH, SEQ_LEN = 8192, 2048
TOKENS, DAY = 2e12, 86400.0  # of figure 5.7's training
# Figure 5.4's bars. Copy engines are of NVIDIA's GPUs in one node.
WAITING = Overlap(all_reduce=False, reduce_scatter=False, all_gather=False, data=False, copy_engines=False)
HIDDEN = {
    "none": WAITING,
    "OAR": replace(WAITING, all_reduce=True),
    "OAR + ORS": replace(WAITING, all_reduce=True, reduce_scatter=True),
    "OAR + ORS + OAG": replace(WAITING, all_reduce=True, reduce_scatter=True, all_gather=True),
}
ALL_HIDDEN = HIDDEN["OAR + ORS + OAG"]
OVERLAPPED_MODELS, OVERLAPPED_GPUS = ("gpt-20b", "gpt-40b", "gpt-80b"), 8192
PUBLISHED_DAYS = {tuple(run): days for *run, days in read_paper("singh")["figure-5-7"]["days"]}
STRONG_GPUS = {"gpt-80b": (128, 256, 512, 1024, 2048, 4096, 8192), "gpt-640b": (512, 1024, 2048, 4096, 8192)}
# FLOP/s that products reach in training, and where that is from.
IN_TRAINING = {
    "frontier": (0.55 * 191.5e12, "Singh, section 5.1.3: products but the slowest reach 55% of the peak"),
    "alps": (660e12, "lab/results/plan/probed.toml: an H200, of the same kind, in large products"),
}


@dataclass(frozen=True)
class Run:
    """A row of Table 5.2."""

    cluster: str = column("machine")
    gpus: int = column("GPUs", "{:,}")
    model: str = column("model")
    petaflops: float = column("published PFLOP/s", "{:,.1f}")


RUNS = tuple(Run(*run) for run in read_paper("singh")["table-5-2"]["runs"])


@dataclass(frozen=True)
class PlannedRun(Run):
    """A run as planned; published seconds over planned ones, one assumption after the other."""

    paper_grid: str = column("best grid, paper's model")
    paper_seconds: float = column("its communication (s)", "{:.3g}")
    full_grid: str = column("best grid, full model")
    full_seconds: float = column("its step (s)", "{:.3g}")
    exposed_seconds: float = column("of it exposed (s)", "{:.3g}")
    predicted_petaflops: float = column("predicted PFLOP/s", "{:,.1f}")
    published_seconds: float = column("published step (s)", "{:.2f}")
    planned: float = column("over full model", "{:.2f}")
    products: float = column("+ products as in training", "{:.2f}")
    attention: float = column("+ attention's scores in memory", "{:.2f}")
    no_overlap: float = column("+ nothing overlaps", "{:.2f}")
    planned_compute_seconds: float = column("computation, full model (s)", "{:.2f}")
    products_compute_seconds: float = column("+ products (s)", "{:.2f}")
    compute_seconds: float = column("+ scores (s)", "{:.2f}")
    left_seconds: float = column("published less that (s)", "{:.2f}")
    communication_seconds: float = column("all communication (s)", "{:.2f}")


@dataclass(frozen=True)
class LadderRow(Run):
    """A run: the baseline, the model's grid, and overlap (figure 5.5)."""

    baseline_grid: str | None = column("baseline")
    baseline_seconds: float | None = column("its step (s)", "{:.2f}")
    model_grid: str = column("best of the model's ten")
    model_seconds: float = column("its step (s)", "{:.2f}")
    model_saved: float | None = column("saved", "{:.0%}")
    ring_saved: float | None = column("saved, rings in nodes of 200 GB/s", "{:.0%}")
    published_model_saved: str | None = column("published")
    overlap_seconds: float = column("with overlap (s)", "{:.2f}")
    overlap_saved: float = column("saved", "{:.0%}")
    published_overlap_saved: str | None = column("published")
    simulated_petaflops: float = column("PFLOP/s, simulated", "{:,.1f}")


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
    published: str | None = column("published")


@dataclass(frozen=True)
class StrongRow:
    """A training of two trillion tokens by the number of GCDs (figure 5.7)."""

    model: str = column("model")
    gpus: int = column("GCDs", "{:,}")
    grid: str = column("grid")
    seconds: float = column("step (s)", "{:.2f}")
    days: float = column("days to 2T tokens", "{:.1f}")
    published_days: float | None = column("published", "{:.1f}")
    efficiency: float = column("efficiency", "{:.0%}", default=1.0)
    published_efficiency: float | None = column("published", "{:.0%}", default=None)


def study_training(batch: int = BATCH) -> Iterator[Measured | Compared]:
    """Plan Table 5.2's runs, and simulate figures 5.5, 5.4 and 5.7. batch: a multiple of 4096 sequences."""
    runs = [plan_run(run, batch) for run in RUNS]
    about = {"batch": batch, "seq_len": SEQ_LEN, "sources": IN_TRAINING, "machine": ANY_CPU}
    yield Measured(runs, about, name="published", title=f"Table 5.2's runs, {batch} sequences of {SEQ_LEN} tokens")
    ladder = [climb(run, batch) for run in RUNS]
    overlaps = [row for model in OVERLAPPED_MODELS for row in _overlap(model, batch)]
    strong = [row for model, counts in STRONG_GPUS.items() for row in scale_strongly(model, counts, batch)]
    title = "Figure 5.5: what each optimization saves of a step"
    tables = (
        Table("Figure 5.4: overlaps on 8,192 GCDs of Frontier", overlaps, key="overlaps"),
        Table("Figure 5.7: days to two trillion tokens on Frontier", strong, key="strong"),
    )
    yield Measured(ladder, about, name="simulated-scaling", title=title, tables=tables)
    for planned, step in zip(runs, ladder, strict=True):
        what, flops = f"{step.model} on {step.gpus:,} GPUs of {step.cluster}", planned.predicted_petaflops
        yield Compared("Singh", "table 5.2", what, "PFLOP/s", f"{step.petaflops}", flops, step.simulated_petaflops)
    for row in strong:
        if row.published_days is not None:
            what = f"{row.model} on {row.gpus:,} GCDs of Frontier"
            yield Compared("Singh", "figure 5.7", what, "days", f"{row.published_days:.1f}", row.days)


def paper_model(name: str) -> GPTConfig:
    """A preset as the paper trained it: with dropout, so that a block that is recomputed is computed to its end."""
    return replace(GPTConfig.preset(name), dropout=0.1)


def _plan(model: str, cluster: Cluster, gpus: int, batch: int, **options: Any) -> list[GridPlan]:
    """Plan a run, which recomputes activations as the paper's do, and has all tokens on each rank of x."""
    options |= {"seq_len": SEQ_LEN, "recompute": "full", "shard_sequence": False}
    return plan(paper_model(model), cluster, gpus=gpus, batch=batch, **options)


def plan_run(run: Run, batch: int) -> PlannedRun:
    """Plan a run with both cost models, and remove idealizations of the full one, on its grid, one after the other."""
    cluster = Cluster.preset(run.cluster)
    paper, best = (_plan(run.model, cluster, run.gpus, batch, cost=cost)[0] for cost in ("paper", "full"))
    if run.cluster in IN_TRAINING:
        flops = replace(cluster.gpu.empirical_flops, bf16=IN_TRAINING[run.cluster][0])
        cluster = replace(cluster, gpu=replace(cluster.gpu, empirical_flops=flops))
    model = read_architecture(paper_model(run.model), SEQ_LEN)
    products, attention, waiting = (
        predict(
            replace(model, has_plain_attention=plain_attention),
            cluster,
            grid=best.grid,
            batch=batch,
            seq_len=SEQ_LEN,
            micro_batch=best.micro_batch,
            recompute="full",
            reshard=best.reshard,
            overlaps=overlaps,
        )
        for plain_attention, overlaps in ((False, True), (True, True), (True, False))
    )
    work = model_flops(GPTConfig.preset(run.model), batch, SEQ_LEN) / 1e15
    published = work / run.petaflops
    assert best.compute_time is not None
    assert products.compute_time is not None
    assert waiting.compute_time is not None
    return PlannedRun(
        **asdict(run),
        paper_grid=name_grid(paper.grid),
        paper_seconds=paper.step_time,
        full_grid=name_grid(best.grid),
        full_seconds=best.step_time,
        exposed_seconds=sum(best.exposed.values()),
        predicted_petaflops=work / best.step_time,
        published_seconds=published,
        planned=published / best.step_time,
        products=published / products.step_time,
        attention=published / attention.step_time,
        no_overlap=published / waiting.step_time,
        planned_compute_seconds=best.compute_time,
        products_compute_seconds=products.compute_time,
        compute_seconds=waiting.compute_time,
        left_seconds=published - waiting.compute_time,
        communication_seconds=waiting.communication["total"],
    )


def climb(run: Run, batch: int) -> LadderRow:
    """Figure 5.5 (right) for one run: the baseline, the best of the paper's model's first ten, and overlap."""
    cluster = Cluster.preset(run.cluster)
    nodes = run.gpus // cluster.gpus_per_node
    batch = batch // nodes * nodes  # data parallelism over all nodes divides it
    baseline, chosen = _choose(run.model, cluster, run.gpus, batch)
    simulate = partial(_simulate, run.model, cluster, batch)
    of_baseline = None if baseline is None else simulate(baseline, WAITING).step_time
    of_model, overlapped = (simulate(chosen, overlap).step_time for overlap in (WAITING, ALL_HIDDEN))
    is_in_figure = run.cluster == "frontier" and run.gpus <= 8192
    return LadderRow(
        **asdict(run),
        baseline_grid=None if baseline is None else name_grid(baseline.grid),
        baseline_seconds=of_baseline,
        model_grid=name_grid(chosen.grid),
        model_seconds=of_model,
        model_saved=None if of_baseline is None else 1 - of_model / of_baseline,
        ring_saved=_grid_gain_of_rings(run, cluster, batch),
        published_model_saved="13% to 45%" if is_in_figure else None,
        overlap_seconds=overlapped,
        overlap_saved=1 - overlapped / of_model,
        published_overlap_saved=("22%" if run.model == "gpt-80b" else "up to 22%") if is_in_figure else None,
        simulated_petaflops=model_flops(paper_model(run.model), batch, SEQ_LEN) / overlapped / 1e15,
    )


def _grid_gain_of_rings(run: Run, cluster: Cluster, batch: int) -> float | None:
    """The saving of the model's grid with the ring bandwidth of the study of collectives, if that is lower."""
    studied = MACHINES.get(run.cluster)
    if studied is None or studied.ring_bandwidth >= cluster.require("in_node.bandwidth"):
        return None
    slower = replace(cluster, in_node=replace(cluster.in_node, bandwidth=studied.ring_bandwidth))
    baseline, chosen = _choose(run.model, slower, run.gpus, batch)
    if baseline is None:
        return None
    simulate = partial(_simulate, run.model, slower, batch, overlap=WAITING)
    return 1 - simulate(chosen).step_time / simulate(baseline).step_time


def _choose(model: str, cluster: Cluster, gpus: int, batch: int) -> tuple[GridPlan | None, GridPlan]:
    """The baseline, and the fastest among the paper's model's first ten grids, of plans that overlap nothing and fit.

    The baseline is tensor parallelism over a node, and data parallelism across nodes that shards no more than memory
    requires.
    """
    plans = {name_grid(each.grid): each for each in _plan(model, cluster, gpus, batch, overlaps=False) if each.fits}
    first_ten = [name_grid(each.grid) for each in _plan(model, cluster, gpus, batch, cost="paper")[:10]]
    of_nodes = [each for each in plans.values() if (each.grid["x"], each.grid["y"]) == (cluster.gpus_per_node, 1)]
    fastest = min((plans[name] for name in first_ten if name in plans), key=lambda each: each.step_time)
    return min(of_nodes, key=lambda each: each.grid["z"], default=None), fastest


def _simulate(model: str, cluster: Cluster, batch: int, chosen: GridPlan, overlap: Overlap) -> StepSimulation:
    """Simulate a step of a plan, in closed form."""
    workload = StepWorkload(read_architecture(paper_model(model), SEQ_LEN), batch, SEQ_LEN)
    return simulate_step(workload, step_of_plan(chosen, overlap=overlap), cluster)


def _overlap(model: str, batch: int) -> Iterator[OverlapRow]:
    """Figure 5.4 for one model: one overlap after the other, on the grid of figure 5.5."""
    cluster = Cluster.preset("frontier")
    _, chosen = _choose(model, cluster, OVERLAPPED_GPUS, batch)
    first = _simulate(model, cluster, batch, chosen, WAITING).step_time
    for bar, overlap in HIDDEN.items():
        step = _simulate(model, cluster, batch, chosen, overlap)
        yield OverlapRow(
            model,
            OVERLAPPED_GPUS,
            name_grid(chosen.grid),
            bar,
            step.step_time,
            step.computation,
            step.exposed_total,
            saved=1 - step.step_time / first,
            speedup=first / step.step_time - 1,
            published="18.69%" if (model, overlap) == ("gpt-80b", ALL_HIDDEN) else None,
        )


def scale_strongly(model: str, counts: tuple[int, ...], batch: int) -> list[StrongRow]:
    """Figure 5.7 for one model: the best plan at each number of GCDs, the batch unchanged."""
    rows: list[StrongRow] = []
    for gpus in counts:
        best = _plan(model, Cluster.preset("frontier"), gpus, batch)[0]
        days = TOKENS / (batch * SEQ_LEN) * best.step_time / DAY
        row = StrongRow(model, gpus, name_grid(best.grid), best.step_time, days, PUBLISHED_DAYS.get((model, gpus)))
        first = (rows or [row])[0]
        row = replace(row, efficiency=first.days / days / (gpus / first.gpus))
        if row.published_days is not None and first.published_days is not None:
            gain = first.published_days / row.published_days / (gpus / first.gpus)
            row = replace(row, published_efficiency=gain)
        rows.append(row)
    return rows


def plot_scaling(data: dict[str, Any], picture: Path) -> None:
    """Draw figure 5.5 (steps of the ladder by run) and figure 5.7 (days by GCDs, with the published ones)."""
    import numpy as np

    from lab.style import drawing, group_bars, name_bars, plain_log
    from stretto.report.style import SERIES

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
        ladder.set(xlabel="s a step", title="Figure 5.5: grid and overlap")
        for look, (model, found) in zip(SERIES[3:], group(data["strong"], "model").items(), strict=False):
            strong.plot(*points(found, "gpus", "days"), label=model, **look.line)
            star: dict[str, Any] = {"color": look.colour, "marker": "*", "markersize": 8, "linestyle": "none"}
            strong.plot(*points(found, "gpus", "published_days"), label=f"{model}, published", **star)
        drawn.log_ticks(strong.xaxis, [row["gpus"] for row in data["strong"]])
        plain_log(strong.yaxis)
        strong.set(xlabel="GCDs of Frontier", ylabel="days to 2T tokens", title="Figure 5.7: strong scaling")
        drawn.title = "Weak and strong scaling of training, planned"
        drawn.subtitle = describe_origin(data, simulated=name_machines(dict.fromkeys(row["cluster"] for row in rows)))
