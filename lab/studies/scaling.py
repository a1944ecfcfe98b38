# SPDX-License-Identifier: Apache-2.0
"""`python -m lab simulated-scaling`: figures 5.4, 5.5 and 5.7 of Singh's dissertation, and why Table 5.2 is slower.

Grids are those of `stretto.planner`. Steps of figures 5.4 and 5.5 are simulated, in closed form: all-reduces,
reduce-scatters and all-gathers are overlapped there; the all-reduces over data follow the backward pass.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lab.pictures import draw_result
from lab.planning.published import RUNS, PublishedRun, model_flops, paper_model
from lab.studies.machines import MACHINES
from lab.studies.settings import SimulatedScalingSetting
from lab.tables import ANY_CPU, TitledTable, write_tables
from stretto.bench.harness import Column, print_table, write_result
from stretto.cluster import Cluster, name_grid
from stretto.execution import Overlap
from stretto.models import GPTConfig
from stretto.planner import GridPlan, plan, predict, read_architecture
from stretto.planner.workload import StepWorkload
from stretto.simulator.training import StepSimulation, simulate_step, step_of_plan

SEQ_LEN = 2048
TOKENS = 2e12  # of figure 5.7's training
DAY = 86400.0
MONTH = 365.25 / 12  # days
Row = dict[str, Any]

LADDER = (
    Column("cluster", "machine"),
    Column("gpus", "GPUs", "{:,}"),
    Column("model", "model"),
    Column("baseline_grid", "baseline"),
    Column("baseline_seconds", "its step (s)", "{:.2f}"),
    Column("model_grid", "best of the model's ten"),
    Column("model_seconds", "its step (s)", "{:.2f}"),
    Column("model_saved", "saved", "{:.0%}"),
    Column("ring_saved", "saved, rings in nodes of 200 GB/s", "{:.0%}"),
    Column("published_model_saved", "published"),
    Column("overlap_seconds", "with overlap (s)", "{:.2f}"),
    Column("overlap_saved", "saved", "{:.0%}"),
    Column("published_overlap_saved", "published"),
)
OVERLAPS = (
    Column("model", "model"),
    Column("gpus", "GCDs", "{:,}"),
    Column("grid", "grid"),
    Column("overlap", "overlap"),
    Column("seconds", "step (s)", "{:.2f}"),
    Column("compute_seconds", "computation (s)", "{:.2f}"),
    Column("exposed_seconds", "exposed (s)", "{:.2f}"),
    Column("saved", "saved", "{:.1%}"),
    Column("speedup", "speed-up less 1", "{:.1%}"),
    Column("published", "published"),
)
STRONG = (
    Column("model", "model"),
    Column("gpus", "GCDs", "{:,}"),
    Column("grid", "grid"),
    Column("seconds", "step (s)", "{:.2f}"),
    Column("days", "days to 2T tokens", "{:.1f}"),
    Column("published_days", "published", "{:.1f}"),
    Column("efficiency", "efficiency", "{:.0%}"),
    Column("published_efficiency", "published", "{:.0%}"),
)
REASONS = (
    Column("cluster", "machine"),
    Column("gpus", "GPUs", "{:,}"),
    Column("model", "model"),
    Column("published_seconds", "published step (s)", "{:.2f}"),
    Column("planned", "full model", "{:.2f}"),
    Column("products", "+ products as in training", "{:.2f}"),
    Column("attention", "+ attention's scores in memory", "{:.2f}"),
    Column("no_overlap", "+ nothing overlaps", "{:.2f}"),
    Column("planned_compute_seconds", "computation, full model (s)", "{:.2f}"),
    Column("products_compute_seconds", "+ products (s)", "{:.2f}"),
    Column("compute_seconds", "+ scores (s)", "{:.2f}"),
    Column("left_seconds", "published less that (s)", "{:.2f}"),
    Column("communication_seconds", "all communication (s)", "{:.2f}"),
)
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
# Figure 5.7 gives 50 months and 25.5 days, 14 years and 15 months.
PUBLISHED_DAYS = {
    ("gpt-80b", 128): 50 * MONTH,
    ("gpt-80b", 8192): 25.5,
    ("gpt-640b", 512): 14 * 365.25,
    ("gpt-640b", 8192): 15 * MONTH,
}
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


def bench_simulated_scaling(setting: SimulatedScalingSetting, out: Path) -> dict[str, Any]:
    """Plan all runs, print tables, and write simulated-scaling.json, .md and .png to `out`."""
    runs = [run for run in RUNS if run.cluster in setting.clusters]
    ladder = [_climb(run, setting.batch) for run in runs]
    overlaps = [row for model in OVERLAPPED_MODELS for row in _overlap(model, setting.batch)]
    strong = [row for model, counts in STRONG_GPUS.items() for row in _scale_strongly(model, counts, setting.batch)]
    reasons = [_explain(run, setting.batch) for run in runs]
    tables: tuple[TitledTable, ...] = (
        ("Figure 5.5: what each optimization saves of a step", LADDER, ladder),
        ("Figure 5.4: overlaps on 8,192 GCDs of Frontier", OVERLAPS, overlaps),
        ("Figure 5.7: days to two trillion tokens on Frontier", STRONG, strong),
        ("Table 5.2's steps over these, one assumption after the other", REASONS, reasons),
    )
    for title, columns, found in tables:
        print_table(title, columns, found)
    about = {
        "setting": asdict(setting),
        "sources": {name: asdict(each) for name, each in IN_TRAINING.items()},
        "overlaps": overlaps,
        "strong": strong,
        "reasons": reasons,
    }
    path = write_result(out, "simulated-scaling", LADDER, ladder, machine=ANY_CPU, **about)
    write_tables(path, tables)
    draw_result(path)
    return {"ladder": ladder, "overlaps": overlaps, "strong": strong, "reasons": reasons}


def _climb(run: PublishedRun, batch: int) -> Row:
    """Figure 5.5 (right) for one run: the baseline, the best of the paper's model's first ten, and overlap."""
    cluster = Cluster.preset(run.cluster)
    batch = _divisible(batch, run.gpus // cluster.gpus_per_node)
    waiting, chosen = _choose(run.model, cluster, run.gpus, batch)
    baseline = _baseline(waiting, cluster.gpus_per_node)
    name = name_grid(chosen.grid)
    of_baseline = None if baseline is None else _simulate(run.model, cluster, batch, baseline, WAITING).step_time
    of_model, overlapped = (
        _simulate(run.model, cluster, batch, chosen, HIDDEN[bar]).step_time for bar in ("none", "OAR + ORS + OAG")
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
    waiting, chosen = _choose(run.model, slower, run.gpus, batch)
    baseline = _baseline(waiting, slower.gpus_per_node)
    if baseline is None:
        return None
    of_baseline, of_model = (
        _simulate(run.model, slower, batch, each, WAITING).step_time for each in (baseline, chosen)
    )
    return 1 - of_model / of_baseline


def _choose(model: str, cluster: Cluster, gpus: int, batch: int) -> tuple[dict[str, GridPlan], GridPlan]:
    """All plans that fit, with nothing overlapped, by grid; and the fastest among the paper's model's first ten."""
    options: dict[str, Any] = {"gpus": gpus, "batch": batch, "seq_len": SEQ_LEN, "recompute": "full"}
    trained = paper_model(model)
    plans = {name_grid(each.grid): each for each in plan(trained, cluster, **options, overlaps=False) if each.fits}
    first_ten = [name_grid(each.grid) for each in plan(trained, cluster, cost="paper", **options)[:10]]
    return plans, min((plans[name] for name in first_ten if name in plans), key=lambda each: each.step_time)


def _simulate(model: str, cluster: Cluster, batch: int, chosen: GridPlan, overlap: Overlap) -> StepSimulation:
    workload = StepWorkload(read_architecture(paper_model(model), SEQ_LEN), batch, SEQ_LEN)
    return simulate_step(workload, step_of_plan(chosen, overlap=overlap), cluster)


def _overlap(model: str, batch: int) -> list[Row]:
    """Figure 5.4 for one model: one overlap after the other, on the grid of figure 5.5."""
    cluster = Cluster.preset("frontier")
    _, chosen = _choose(model, cluster, OVERLAPPED_GPUS, batch)
    rows: list[Row] = []
    for bar, overlap in HIDDEN.items():
        step = _simulate(model, cluster, batch, chosen, overlap)
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


def _divisible(batch: int, nodes: int) -> int:
    """The batch, or the next smaller one that data parallelism over all nodes divides."""
    return batch if batch % nodes == 0 else batch // nodes * nodes


def _scale_strongly(model: str, counts: tuple[int, ...], batch: int) -> list[Row]:
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
