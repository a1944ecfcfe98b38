# SPDX-License-Identifier: Apache-2.0
"""`stretto bench simulated-scaling`: figures 5.4, 5.5 and 5.7 of Singh's dissertation, and why Table 5.2 is slower.

Plans are those of `stretto.planner`; the step of figure 5.4 is also executed event by event.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stretto.bench.harness import Column, markdown_table, print_table, write_result
from stretto.bench.pictures import draw_result
from stretto.bench.plan.published import RUNS, PublishedRun, model_flops
from stretto.bench.studies.settings import SimulatedScalingSetting
from stretto.cluster import Cluster, name_grid
from stretto.models import GPTConfig
from stretto.planner import GridPlan, plan, predict, read_architecture

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
    Column("published_model_saved", "published"),
    Column("overlap_seconds", "with overlap (s)", "{:.2f}"),
    Column("overlap_saved", "saved", "{:.0%}"),
    Column("published_overlap_saved", "published"),
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
    Column("compute_seconds", "computation of these (s)", "{:.2f}"),
    Column("left_seconds", "published less that (s)", "{:.2f}"),
    Column("communication_seconds", "all communication (s)", "{:.2f}"),
)
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
    "alps": SlowerProducts(660e12, "results/plan/probed.toml: an H200, of the same kind, in large products"),
}


def bench_simulated_scaling(setting: SimulatedScalingSetting, out: Path) -> dict[str, Any]:
    """Plan all runs, print tables, and write simulated-scaling.json, .md and .png to `out`."""
    runs = [run for run in RUNS if run.cluster in setting.clusters]
    ladder = [_climb(run, setting.batch) for run in runs]
    strong = [row for model, counts in STRONG_GPUS.items() for row in _scale_strongly(model, counts, setting.batch)]
    reasons = [_explain(run, setting.batch) for run in runs]
    tables = (
        ("Figure 5.5: what each optimization saves of a step", LADDER, ladder),
        ("Figure 5.7: days to two trillion tokens on Frontier", STRONG, strong),
        ("Table 5.2's steps over these, one assumption after the other", REASONS, reasons),
    )
    for title, columns, found in tables:
        print_table(title, columns, found)
    about = {
        "setting": asdict(setting),
        "sources": {name: asdict(each) for name, each in IN_TRAINING.items()},
        "strong": strong,
        "reasons": reasons,
    }
    path = write_result(out, "simulated-scaling", LADDER, ladder, **about)
    table = path.with_suffix(".md")
    head = table.read_text().partition("\n\n")[0]
    parts = [f"{title}:\n\n" + "\n".join(markdown_table(columns, found)) for title, columns, found in tables]
    table.write_text("\n\n".join([head, *parts]) + "\n")
    draw_result(path)
    return {"ladder": ladder, "strong": strong, "reasons": reasons}


def _climb(run: PublishedRun, batch: int) -> Row:
    """Figure 5.5 (right) for one run: the baseline, the best of the paper's model's first ten, and overlap."""
    cluster = Cluster.preset(run.cluster)
    batch = _divisible(batch, run.gpus // cluster.gpus_per_node)
    options: dict[str, Any] = {"gpus": run.gpus, "batch": batch, "seq_len": SEQ_LEN, "checkpoint_activations": True}
    waiting, hiding = (
        {name_grid(each.grid): each for each in plan(run.model, cluster, **options, overlaps=overlaps) if each.fits}
        for overlaps in (False, True)
    )
    first_ten = [name_grid(each.grid) for each in plan(run.model, cluster, cost="paper", **options)[:10]]
    baseline = _baseline(waiting, cluster.gpus_per_node)
    chosen = min((waiting[name] for name in first_ten if name in waiting), key=lambda each: each.step_time)
    name = name_grid(chosen.grid)
    overlapped = hiding[name].step_time
    return {
        "cluster": run.cluster,
        "gpus": run.gpus,
        "model": run.model,
        "batch": batch,
        "baseline_grid": None if baseline is None else name_grid(baseline.grid),
        "baseline_seconds": None if baseline is None else baseline.step_time,
        "model_grid": name,
        "model_seconds": chosen.step_time,
        "model_saved": None if baseline is None else 1 - chosen.step_time / baseline.step_time,
        "published_model_saved": "13% to 45%" if _is_in_figure(run) else None,
        "overlap_seconds": overlapped,
        "overlap_saved": 1 - overlapped / chosen.step_time,
        "published_overlap_saved": _published_overlap(run),
    }


def _baseline(plans: Mapping[str, GridPlan], node: int) -> GridPlan | None:
    """Tensor parallelism over a node, and data parallelism across nodes that shards no more than memory asks for."""
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
    cluster = Cluster.preset("frontier")
    rows: list[Row] = []
    for gpus in counts:
        best = plan(model, cluster, gpus=gpus, batch=batch, seq_len=SEQ_LEN, checkpoint_activations=True)[0]
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
    """How much too fast the full model's plan is, and what is left when idealizations go, one after the other.

    The grid is the plan's. Ratios are published seconds over predicted ones.
    """
    cluster = Cluster.preset(run.cluster)
    best = plan(run.model, cluster, gpus=run.gpus, batch=batch, seq_len=SEQ_LEN, checkpoint_activations=True)[0]
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
        "left_seconds": published - waiting.compute_time,
        "communication_seconds": waiting.communication["total"],
    }


def _predictor(best: GridPlan, run: PublishedRun, cluster: Cluster, batch: int) -> Callable[..., GridPlan]:
    """Predicts the plan's grid with its options, and attention by plain operations or a fused kernel."""

    def predicted(*, plain_attention: bool, overlaps: bool) -> GridPlan:
        model = replace(read_architecture(run.model, SEQ_LEN), has_plain_attention=plain_attention)
        return predict(
            model,
            cluster,
            grid=best.grid,
            batch=batch,
            seq_len=SEQ_LEN,
            micro_batch=best.micro_batch,
            recompute="full",
            keep_gathered=best.keep_gathered,
            overlaps=overlaps,
        )

    return predicted
