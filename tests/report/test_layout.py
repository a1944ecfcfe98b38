# SPDX-License-Identifier: Apache-2.0
"""Every kind of picture, drawn from made-up results: no label covers another, and legends name what is drawn."""

import json
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from tests.report.layout import find_faults

import lab  # noqa: F401  (adds its pictures)
from lab.pictures import PLOTS, describe_origin, draw_result, redraw
from lab.style import PEER, drawing, group_bars, name_bars, plain_log
from stretto.collectives.algorithms import ring_all_reduce
from stretto.report import Timeline, plot_loss, plot_timeline
from stretto.report.expert_plot import RoutingHistory, plot_experts
from stretto.report.pipeline import plot_pipeline
from stretto.report.schedule import plot_schedule
from stretto.report.style import SERIES, STRETTO
from stretto.schedules import SCHEDULES, StageCosts, build_schedule, simulate
from stretto.train.observe.timeline import Span, TracedStep

COUNTS = (1, 2, 3, 5)
ABOUT = {"date": "2026-01-02", "machine": {"devices": "4x NVIDIA H200"}, "ranks": 4}
ROOT = Path(__file__).parents[2]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are written while a test runs."""
    figures: list[Figure] = []

    def keep(figure: Figure, file: Any, *, dpi: float, format: str) -> None:
        assert dpi == figure.dpi  # boxes are measured in the file's pixels, and nothing is cropped
        figure.draw_without_rendering()
        figures.append(figure)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def runs(count: int) -> list[dict[str, Any]]:
    names = ("z=4", "FSDP2=2 TP=2, weights kept, bf16 reduction, compiled, captured", "Stretto x=2 z=2", "FSDP2", "y=4")
    return [
        {
            "name": names[place],
            "is_peer": "FSDP2" in names[place],
            "tokens_per_second_per_gpu": 15_000.0 - 2000 * place,
            "peak_memory_gib": 39.0 + 10 * place,
        }
        for place in range(count)
    ] + [{"name": "FSDP2=4", "is_peer": True, "error": "a batch of 2 cannot be cut into 4 parts"}]


def train(count: int) -> dict[str, Any]:
    return {"workload": {"model": {"layers": 24, "hidden": 4096}, "seq_len": 2048}, "rows": runs(count)}


def overlap(count: int) -> dict[str, Any]:
    stages = ("none", "+ all_reduce", "+ reduce_scatter", "+ all_gather", "+ data")
    rows = [
        {"grid": grid, "overlap": stage, "step_milliseconds": 1302.0 - place, "exposed_milliseconds": 53.0}
        for grid in ("x=2 z=2", "z=4")
        for place, stage in enumerate(stages[:count])
    ]
    return {"model": "gpt-5b", "rows": rows}


def dlrm(count: int) -> dict[str, Any]:
    rows = [
        {"name": name, "step_milliseconds": 90.1 + place, "forward_milliseconds": 3.0}
        for place, name in enumerate(("library", "kernel", "kernel of before", "another", "a last one")[:count])
    ]
    return {"setting": {"model": {"rows": [100] * 26}, "batch": 65_536}, "rows": rows}


def plan(count: int) -> dict[str, Any]:
    grids = ("z=4", "data=2 x=2", "x=2, sequence sharded", "data=2 y=2 z=2", "y=4")
    rows = [
        {
            "workload": workload,
            "grid": grid,
            "predicted_milliseconds": 279.0 + place,  # so close that labels beside the points would collide
            "measured_milliseconds": 280.0 + place,
            "predicted_gib": 39.0,
            "measured_gib": 39.1 + 40 * place,
        }
        for workload in (
            "gpt-5b, 24 layers, batch 8 x 2048 tokens, 4 ranks",
            "gpt2-small, 12 layers, batch 1 x 64 tokens",
        )
        for place, grid in enumerate(grids[:count])
    ]
    return {"rows": [*rows, rows[0] | {"grid": "data=4", "measured_milliseconds": None}]}


def layouts(count: int) -> dict[str, Any]:
    rows = plan(count)["rows"][:count]
    peers = [
        {"workload": rows[0]["workload"], "grid": name, "measured_milliseconds": 281.0, "measured_gib": 50.0}
        for name in ("FSDP2", "FSDP2, recomputation, CPUOffloadPolicy")
    ]
    return {"rows": [*rows, *peers]}


def simulated_steps(count: int) -> dict[str, Any]:
    rows = [
        {
            "workload": workload,
            "grid": grid,
            "planned_error": None if workload.endswith("z=4") else -0.05 + 0.02 * place,
            "simulated_error": -0.049 + 0.02 * place,
        }
        for workload in ("gpt-5b, 24 layers, batch 8 x 2048 tokens, 4 ranks", "gpt-5b, overlaps of z=4")
        for place, grid in enumerate(("z=4", "data=2 x=2", "x=2, sequence sharded", "+ reduce_scatter", "y=4")[:count])
    ]
    return {"rows": rows}


def simulated_pipelines(count: int) -> dict[str, Any]:
    rows = [
        {"framework": name, "gpus": 48 * 2**place, "peak_share": 0.6 - 0.05 * place, "over_axonn": 1.0 + 0.2 * place}
        | {"published_over_axonn": 1.2 if place else None}
        for name in ("AxoNN", "DeepSpeed", "Megatron-LM")
        for place in range(count)
    ]
    stages = [
        {"stages": 6 * 2**place, "closed_seconds": 30.0, "planned_seconds": 30.1, "published_seconds": None}
        for place in range(count)
    ]
    return {"rows": rows, "stages": stages}


def collectives(count: int) -> dict[str, Any]:
    names = ("allreduce", "allgather", "reducescatter", "alltoall", "broadcast")
    rows = [
        {
            "collective": name,
            "dtype": "bf16",
            "mode": "graph",
            "bytes": size,
            "nccl": size / 1e5 + 13,
            "torch": size / 1e5 + 7 if name == "allreduce" else None,
            "stretto": size / 1e5 + 3,
            "way": "NCCL" if size > 1 << 26 else "ring-all-reduce LL",
            "ratio": (size / 1e5 + 13) / (size / 1e5 + 3),
            "busbw": size / (size / 1e5 + 3) / 1e3,
        }
        for name in names[:count]
        for size in (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 26, 1 << 30)[: 2 * count - 1]
    ]
    return {"rows": rows}


def operators(count: int) -> dict[str, Any]:
    rows = [
        {
            "operator": name,
            "case": case,
            "m": m,
            "n": 12_288,
            "k": 12_288,
            "mode": "graph",
            "gemm": m / 2000 + 0.07,
            "nccl": m / 1900 + 0.09,
            "async_tp": None if name == "reduce" else m / 1950 + 0.3,
            "stretto": m / 1960 + 0.08,
            "ran": "kernel" if m < 4096 else "library",
            "efficiency": 4.7 if name == "reduce" else 0.7,
            "to_nccl": 1.0 + m / 1e5,
        }
        for name in ("gather", "scatter", "reduce")
        for case in ("flux", "attention-4096")
        for m in (64, 512, 1024, 4096, 8192)[:count]
    ]
    return {"rows": rows}


def embedding(count: int) -> dict[str, Any]:
    peers = {"bags": 3.15, "batched": 1.31, "chunked": 1.2, "alone": 1.07}
    rows: list[dict[str, Any]] = [
        {"case": case, "study": "peers", "what": what, "stretto": 1.05}
        | dict(list(peers.items())[: count if what == "forward" else 1])
        for what in ("forward", "backward")
        for case in ("256x16x256x70", "8192x256x256x70", "mlperf", "1024x64x128x70", "4096x64x128x70")[:count]
    ]
    return {"dtype": "float32", "rows": rows}


def two_level(count: int) -> dict[str, Any]:
    names = ("recursive", "ring", "flat")
    rows = [
        {"collective": collective, "shard_kib": size}
        | {f"{name}_ms": 100.0 + place * size for place, name in enumerate(names)}
        | {f"{name}_model_ms": 104.0 + place * size for place, name in enumerate(names)}
        for collective in ("all_gather", "reduce_scatter")
        for size in (4, 8, 64, 256, 512)[:count]
    ]
    crossing = {"between": "recursive, ring", "measured_kib": 5.0, "predicted_kib": None}
    crossovers = [crossing | {"collective": name} for name in ("all_gather", "reduce_scatter")]
    setting = {"nodes": 4, "ranks_per_node": 2, "bandwidth": 50.0, "delay": 40.0}
    return {"setting": setting, "crossovers": crossovers, "rows": rows}


def simulated_cells(count: int) -> list[dict[str, Any]]:
    return [
        {"machine": machine, "collective": collective, "ranks": ranks, "mb": mb, "speedup": ranks / mb}
        | {"flat_ms": 0.1 * ranks, "two_level_ms": 0.1 * mb, "mpi_ms": 0.2 * ranks}
        | {"event_speedup": ranks / mb}
        | {"flat_event_ms": 0.1 * ranks, "two_level_event_ms": 0.1 * mb}
        for machine in ("frontier", "perlmutter")[:count]
        for collective in ("all_gather", "reduce_scatter")[:count]
        for ranks in (32, 128, 512, 1024, 2048)[:count]
        for mb in (16, 1024)[:count]
    ]


def simulated(count: int) -> dict[str, Any]:
    return {"rows": simulated_cells(count)}


def simulated_zero3(count: int) -> dict[str, Any]:
    rows = [
        {"machine": machine, "model": model, "ranks": ranks}
        | {"vendor_seconds": 1000.0 / ranks, "two_level_seconds": 900.0 / ranks}
        for machine in ("frontier", "perlmutter")[:count]
        for model in ("7B", "13B")[:count]
        for ranks in (128, 256, 512, 1024, 2048)[:count]
    ]
    return {"rows": rows, "setting": {"batch": 2048}, "seq_len": 2048}


def simulated_scaling(count: int) -> dict[str, Any]:
    rows = [
        {"cluster": cluster, "gpus": 1024 * place, "model_seconds": 4.0 + place, "overlap_seconds": 3.0 + place}
        | {"baseline_seconds": None if place == 2 else 5.0 + place}
        for cluster in ("frontier", "perlmutter", "alps")[:count]
        for place in range(1, count + 1)
    ]
    strong = [
        {"model": model, "gpus": gpus, "days": 3e5 / gpus, "published_days": None if gpus == 256 else 4e5 / gpus}
        for model in ("gpt-80b", "gpt-640b")[:count]
        for gpus in (128, 256, 512, 1024, 8192)[:count]
    ]
    return {"rows": rows, "strong": strong}


def pipeline(count: int) -> dict[str, Any]:
    names = ("gpipe", "1f1b", "interleaved, 2 stages a rank", "message-driven as planned: limit 14, backward")
    rows = [
        {"stages": stages, "micro_batches": 4 * stages, "latency_ms": latency, "schedule": name}
        | {"units": 51.2 + 3 * place, "model_units": 50 + 3 * place}
        for stages, latency in ((4, 0.0), (4, 5.0), (8, 5.0))[:count]
        for place, name in enumerate(names[: count + 1])
    ]
    return {"setting": {"unit": 0.02}, "rows": rows}


def schedules(count: int) -> dict[str, Any]:
    orders = ("1F1B", "ZB-H1", "message-driven, in order of arrival", "message-driven, forward first", "another")
    rows = [
        {
            "size": size,
            "latency": latency,
            "jitter": jitter,
            "order": order,
            "memory": memory,
            "to_1f1b": 1 - jitter / 9,
        }
        for size in ("4 x 16", "8 x 32")[:count]
        for latency in (0, 0.25, 1)[:count]
        for jitter in (0, 0.2, 0.5)[:count]
        for memory in ("equal", "twice")[:count]
        for order in orders[:count]
    ]
    return {"setting": {"seeds": 200}, "rows": rows}


def moe_demo(count: int) -> dict[str, Any]:
    steps = 2 + 90 * count
    curve = {
        "loss": [5 - 3 * step / steps for step in range(steps)],
        "evaluated": list(range(1, steps + 1, 25)),
        "evaluation_loss": [5 - 3 * step / steps for step in range(0, steps, 25)],
    }
    of_experts = {"blocks": list(range(3 * count)), "load": [[1.5 + block for block in range(3 * count)]] * steps}
    dense = curve | {"blocks": [], "load": []}
    return {"curves": {"mixture of experts": curve | of_experts, "dense": dense}, "rows": []}


def experts(count: int) -> dict[str, Any]:
    parts = ("all-to-all", "all over x", "all-reduce", "reduce-scatter, all-gather", "gradients, and all else", "step")
    rows = [
        {
            "name": name,
            "part": part,
            "milliseconds": 700.0 * 10**count if part == "step" else 100.0 * 10**count / (turn + 1),
            "saved": None if turn == 0 else 0.15 * turn * count,
            "predicted_saved": None if turn == 0 else 0.3 * turn,
            "published_saved": 0.207
            if turn > 0 and part in ("all-to-all", "all over x", "step")[: count + 1]
            else None,
        }
        for turn, name in enumerate(("baseline", "DTD", "DTD and CAC"))
        for part in parts
    ]
    return {"setting": {"data": 2, "x": 4, "link": 0.25, "node_link": 1.5}, "rows": rows}


def simulated_collectives(count: int) -> dict[str, Any]:
    executors = ("fused", "copy-engine", "interpreter", "nccl", "sockets", "two-level")
    rows = [
        {
            "executor": executor,
            "bytes": 1024 << 2 * step,
            "measured_us": 10.0,
            "predicted_us": 10.0 * (1 + 0.1 * turn - 0.05 * step),
            "use": ("fitted", "predicted")[step % 2],
        }
        for turn, executor in enumerate(executors)
        for step in range(2 * count)
    ]
    groups = [{"group": f"all on {name}", "others_median": 0.05} for name in ("2 and 4 H200", "8 processes")]
    return {"rows": rows, "groups": groups}


def simulated_msccl(count: int) -> dict[str, Any]:
    studies = (
        "8c: hierarchical all-reduce, 2 NDv4 nodes, over NCCL",
        "8e: two-step all-to-all, 8 NDv4 nodes, over hand-written",
        "11: all-gather",
    )
    rows = [
        {
            "study": study,
            "variant": variant,
            "bytes": 1024 << 4 * step,
            "speedup": (1.5 + turn) * (step + 1) / count,
            "claim": (1.4, 14.5, None)[at],
        }
        for at, study in enumerate(studies[:count])
        for turn, variant in enumerate(("MSCCLang", "composed of NCCL calls", "r=12")[:count])
        for step in range(count)
    ]
    return {"rows": rows}


def faults(count: int) -> dict[str, Any]:
    kinds = ("SIGKILL", "SIGSTOP", "endless loop", "exception", "full disk", "dropped connection")
    found = [
        {
            "kind": kind,
            "seconds_named": 0.5 + place + 0.1 * number,
            "seconds_again": None if number == 2 else 14.0 + place + number,
            "problems": ["it was named too late"] if number == 3 else [],
        }
        for place, kind in enumerate(kinds[: count + 1])
        for number in range(4 * count)
    ]
    return {"ranks": 4, "timeout": 8.0, "limit": 11.0, "faults": found, "rows": []}


def curves(count: int) -> dict[str, Any]:
    models = ("dense", "mixture of experts", "mixture of experts, fp64", "other")[:count]
    names = ("one rank", "pipe=2", "x=2 z=2")
    losses = {name: [2 + 3 / (step + 1) + 1e-6 * place for step in range(60)] for place, name in enumerate(names)}
    return {"curves": dict.fromkeys(models, losses)}


def precisions(count: int) -> dict[str, Any]:
    losses = {
        name: [2 + (3 + 0.01 * place) / (step + 1) for step in range(60)]
        for place, name in enumerate(("bf16", "fp8, tensorwise", "fp8, rowwise"))
    }
    return {"curves": dict.fromkeys(("dense", "mixture of experts", "other", "another")[:count], losses)}


def pruned_state(count: int) -> dict[str, Any]:
    sparsities = [0.25 + 0.7 * number / (4 * count) for number in range(4 * count)]
    rows = [
        {"sparsity": sparsity, "index": index, "state_bytes": left * (1 - sparsity) + 2}
        for sparsity in sparsities
        for index, left in (("bitmap", 14), ("int32", 18))
    ]
    return {"rows": [{"sparsity": 0.0, "index": None, "state_bytes": 16.1}, *rows]}


def pruned_curves(count: int) -> dict[str, Any]:
    names = ("never", "at initialization", "after 10% of the steps")[:count]
    losses = {
        name: [(step * 1e6, 1 + (3 + place) / (step + 1)) for step in range(9)] for place, name in enumerate(names)
    }
    return {"curves": losses, "setting": {"sparsity": 0.9}}


def muon_curves(count: int) -> dict[str, Any]:
    names = [f"{optimizer}, lr {rate}" for rate in (0.003, 0.01, 0.03)[:count] for optimizer in ("adamw", "muon")]
    losses = {name: [2 + (3 + 0.1 * place) / (step + 1) for step in range(60)] for place, name in enumerate(names)}
    return {"curves": losses}


def embedding_figures(count: int) -> dict[str, Any]:
    rows = [
        {"study": study, "what": f"{what} {4 << 2 * number}", "milliseconds": 0.4 + 0.07 * number}
        for study, what in (("slices", "slices of"), ("orders", "the own rank's"), ("programs", "programs"))[:count]
        for number in range(count + 2)
    ]
    spans = [[program, (program + 1) % 2, 1.0 + program, 25.0] for program in range(count)]
    timeline = {"rank": 0, "slices": spans, "programs": [[0.0, 30.0, 40.0]] * count}
    rows.append({"study": "timeline", "what": "clocked", "milliseconds": 0.4, "timeline": timeline})
    return {"rows": rows, "setting": {"case": "1024x64x256x70"}}


RESULTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "faults.json": faults,
    "train.json": train,
    "overlap.json": overlap,
    "dlrm.json": dlrm,
    "plan.json": plan,
    "layouts-llama.json": layouts,
    "simulated-steps.json": simulated_steps,
    "simulated-pipelines.json": simulated_pipelines,
    "collectives.json": collectives,
    "operators.json": operators,
    "operators-fp8.json": operators,
    "embedding.json": embedding,
    "two-level.json": two_level,
    "simulated-two-level.json": simulated,
    "simulated-curves.json": simulated,
    "simulated-zero3.json": simulated_zero3,
    "simulated-scaling.json": simulated_scaling,
    "moe-demo.json": moe_demo,
    "experts.json": experts,
    "pipeline.json": pipeline,
    "schedules.json": schedules,
    "simulated-collectives.json": simulated_collectives,
    "simulated-msccl.json": simulated_msccl,
    "curves.json": curves,
    "precision.json": precisions,
    "pruned-state.json": pruned_state,
    "pruned-curves.json": pruned_curves,
    "muon-curves.json": muon_curves,
    "embedding-figures.json": embedding_figures,
}


def test_every_kind_of_result_is_drawn_here() -> None:
    assert len(RESULTS) == len(PLOTS)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", RESULTS)
def test_labels_of_a_result_are_clear_of_each_other(tmp_path: Path, drawn: list[Figure], name: str, count: int) -> None:
    result = tmp_path / name
    result.write_text(json.dumps(ABOUT | RESULTS[name](count)))
    assert draw_result(result) == result.with_suffix(".png")
    assert find_faults(drawn[0]) == []
    subtitles = [text.get_text().replace("\n", " ") for text in drawn[0].texts]
    origin = describe_origin(ABOUT)
    is_simulated = name.startswith("simulated-")
    assert any(text.startswith("simulated: " if is_simulated else origin) and origin in text for text in subtitles)


def committed() -> Iterator[Path]:
    for path in sorted((ROOT / "lab" / "results").rglob("*.png")):
        if path.with_suffix(".json").is_file():
            yield path.relative_to(ROOT)


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("picture", list(committed()), ids=str)
def test_labels_of_committed_results_are_clear_of_each_other(
    tmp_path: Path, drawn: list[Figure], picture: Path
) -> None:
    result = tmp_path / picture.with_suffix(".json").name
    result.write_bytes((ROOT / picture.with_suffix(".json")).read_bytes())
    draw_result(result)
    assert find_faults(drawn[0]) == []


@pytest.mark.sampled(4)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("steps", [1, 3, 500])
def test_labels_of_losses_are_clear_of_each_other(tmp_path: Path, drawn: list[Figure], count: int, steps: int) -> None:
    numbers = range(1, steps + 1)
    curves = {
        f"{ranks} ranks, x={ranks}": (numbers, [5.0 / n + ranks / 1e4 for n in numbers]) for ranks in range(count)
    }
    plot_loss(curves, tmp_path / "loss.png")
    assert find_faults(drawn[0]) == []
    panels = drawn[0].axes
    assert len(panels) == (2 if count == 2 else 1)
    assert {line.get_label() for line in panels[0].lines if not line.get_label().startswith("_")} == set(curves)


COPIES = ("host to device", "device to host")


@pytest.mark.parametrize(
    "rows", [("compute",), ("compute", "x"), ("compute", "x", "z", "other"), ("compute", "x", "z", *COPIES)]
)
def test_labels_of_a_timeline_are_clear_of_each_other(
    tmp_path: Path, drawn: list[Figure], rows: tuple[str, ...]
) -> None:
    spans = [Span(row, row, 0.1 * place, 0.1 * place + 0.15) for place, row in enumerate(rows)]
    if COPIES[0] in rows:  # no other one overlaps with computation
        spans.append(Span(COPIES[0], "a copy", 0.05, 0.1))
    steps = (TracedStep(4, 0.0, 0.3), TracedStep(5, 0.3, 0.6))
    plot_timeline(Timeline({"x": 2, "z": 2}, 0, steps, tuple(spans)), tmp_path / "timeline.png")
    assert find_faults(drawn[0]) == []
    named = {text.get_text() for legend in drawn[0].legends for text in legend.get_texts()}
    kinds = {"computation", "communication that overlaps with computation", "exposed communication"}
    if set(COPIES) & set(rows):
        kinds |= {"copies between host and device that overlap with computation", "exposed copies"}
    assert named == ({"computation"} if len(rows) == 1 else kinds)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("instances", [1, 3])
def test_labels_of_a_schedule_are_clear_of_each_other(
    tmp_path: Path, drawn: list[Figure], ranks: int, instances: int
) -> None:
    plot_schedule(ring_all_reduce.compile(ranks=ranks, instances=instances), tmp_path / "ring.png")
    assert find_faults(drawn[0]) == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("pipe", "micro_batches"), [(1, 2), (4, 8), (3, 12)])
def test_labels_of_a_pipeline_are_clear_of_each_other(
    tmp_path: Path, drawn: list[Figure], name: str, pipe: int, micro_batches: int
) -> None:
    schedule = build_schedule(name, pipe, micro_batches)
    plot_pipeline(simulate(schedule, StageCosts.uniform(schedule.stages)), tmp_path / "pipeline.png")
    assert find_faults(drawn[0]) == []
    boxes = sum(len(collection.get_paths()) for collection in drawn[0].axes[0].collections)
    assert boxes == sum(map(len, schedule.ranks))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", ["grid", "context", "two_level", "put", "fused_kernel", "channels", "memory", "long_context", "timeline"]
)
def test_labels_of_the_docs_pictures_are_clear_of_each_other(tmp_path: Path, drawn: list[Figure], name: str) -> None:
    figures = runpy.run_path(str(ROOT / "docs" / "figures.py"), run_name="figures")
    figures[f"draw_{name}"](tmp_path / "picture.png")
    assert find_faults(drawn[0]) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("series", COUNTS)
@pytest.mark.parametrize("groups", COUNTS)
def test_groups_of_bars_are_centred_on_their_names(
    tmp_path: Path, drawn: list[Figure], groups: int, series: int
) -> None:
    centres, width = group_bars(groups, series)
    with drawing(tmp_path / "bars.png", 6, 3) as picture:
        panel = picture.panels(1, 1)[0, 0]
        for place, at in enumerate(centres):
            bars = panel.bar(at, [3.0] * groups, width, label=f"series {place}", **SERIES[place].bar)
            picture.label_bars(panel, bars, ["3"] * groups)
        name_bars(panel, range(groups), [f"case {place}" for place in range(groups)], is_horizontal=False)
    assert find_faults(drawn[0]) == []


@pytest.mark.parametrize("ratio", [1.6, 2.8, 8.0, 60.0, 1e4])
def test_a_logarithmic_axis_names_several_values(tmp_path: Path, drawn: list[Figure], ratio: float) -> None:
    with drawing(tmp_path / "log.png", 4, 2) as picture:
        panel = picture.panels(1, 1)[0, 0]
        panel.plot([1, 2], [0.55, 0.55 * ratio])
        plain_log(panel.yaxis)
    assert find_faults(drawn[0]) == []
    low, high = panel.get_ylim()
    assert sum(low <= place <= high for place in panel.yaxis.get_majorticklocs()) >= 2


def draw_badly(panel: Axes, fault: str) -> None:
    panel.bar([0, 1], [1, 2], 0.5, label="bars", **STRETTO.bar)
    match fault:
        case "overlaps":
            panel.annotate("a long label", (0, 1))
            panel.annotate("another label", (0, 1))
        case "leaves":
            panel.figure.text(0.95, 0.5, "a long label")
        case "edge":
            panel.annotate("a long label at the edge", (1, 1))
        case "centred":
            panel.annotate("1", (0.2, 1))
        case "middle":
            panel.set_xticks([0.2, 1], ["one", "two"])
        case "nothing of it is drawn":
            panel.plot([], [], label="nothing", **PEER.line)
        case "legend of its own":
            panel.legend()
        case "names only":
            panel.set(yscale="log", ylim=(0.7, 2.5))
            panel.yaxis.set_minor_formatter(NullFormatter())


@pytest.mark.parametrize(
    "fault",
    ["overlaps", "leaves", "edge", "centred", "middle", "nothing of it is drawn", "legend of its own", "names only"],
)
def test_a_fault_in_a_layout_is_found(tmp_path: Path, drawn: list[Figure], fault: str) -> None:
    with drawing(tmp_path / "bad.png", 4, 3) as picture:
        draw_badly(picture.panels(1, 1)[0, 0], fault)
    assert any(fault in found for found in find_faults(drawn[0])), find_faults(drawn[0])


@pytest.mark.long
def test_the_bars_of_the_embedding_bench_are_centred_whatever_their_number(tmp_path: Path, drawn: list[Figure]) -> None:
    for count in COUNTS:
        result = tmp_path / "embedding.json"
        result.write_text(json.dumps(ABOUT | embedding(count)))
        draw_result(result)
        panel = drawn[-1].axes[0]
        bars = [bar for container in panel.containers for bar in container.patches]
        assert len(bars) == count * min(count, 4)
        middles = [bar.get_x() + bar.get_width() / 2 for bar in bars]
        assert sum(middles) / len(middles) == pytest.approx(sum(panel.get_xticks()) / count)


def test_a_folder_is_drawn_again_with_its_runs(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "overlap.json").write_text(json.dumps(ABOUT | overlap(2)))
    (tmp_path / "a" / "mutations.json").write_text("[]")  # has no picture
    assert redraw(tmp_path) == [tmp_path / "a" / "overlap.png"]
    assert (tmp_path / "a" / "overlap.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="has no picture"):
        draw_result(tmp_path / "a" / "mutations.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no result of a bench that has a picture"):
        redraw(tmp_path / "empty")


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("blocks", "steps"), [(1, 1), (3, 40), (12, 250)])
def test_loads_of_experts_are_drawn_for_each_block_and_drops_and_biases_where_there_are_any(
    tmp_path: Path, drawn: list[Figure], blocks: int, steps: int
) -> None:
    loads = [[1 + block + 1 / (step + 1) for block in range(blocks)] for step in range(steps)]
    some, none = [[3] * blocks] * steps, [[0] * blocks] * steps
    for dropped, biases, panels in ((none, none, 1), (some, none, 2), (some, [[0.1] * blocks] * steps, 3)):
        history = RoutingHistory(range(blocks), range(1, steps + 1), loads, dropped, biases)
        plot_experts(history, tmp_path / "experts.png")
        assert find_faults(drawn[-1]) == []
        assert len(drawn[-1].axes) == panels
    names = {line.get_label() for line in drawn[-1].axes[0].lines if not line.get_label().startswith("_")}
    assert names == (
        {f"block {n}" for n in range(blocks)} if blocks < 6 else {"mean of the blocks", "highest of a block"}
    )
