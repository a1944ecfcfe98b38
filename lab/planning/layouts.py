# SPDX-License-Identifier: Apache-2.0
"""`python -m lab layouts`: training runs of one model in several layouts, compared with the planner's predictions.

A layout is a whole configuration of `stretto train`: grid, pipeline schedule, experts, micro-batches, recomputation and
the place of optimizer state. `predict_layouts` needs no GPU, so that its file can be committed before anything is
measured; `bench_layouts` reads it. Each run is trained by the task that `stretto train` runs, on random tokens, and
torch's FSDP2 trains the same model in the same job. Runs of a job are interleaved, round by round.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lab.pictures import draw_result
from lab.planning.comparison import compare, summarize
from lab.planning.layout_settings import FsdpPeer, LayoutFile, LayoutsSetting, describe_options, predictions_file
from lab.shared_gpus import shared_where_few
from lab.tables import append_to_table
from lab.training.torch_peers import FsdpOptions, build_accumulating
from stretto.atomic_files import write_atomically
from stretto.axes import OUTER_TO_INNER
from stretto.bench.harness import TORCH_DTYPES, Column, markdown_table, print_table, run_ranks, write_result
from stretto.bench.training.runs import Step, Stepped, TrainingRun, measure
from stretto.cluster import Cluster
from stretto.ops import free_workspaces
from stretto.parallel import Grid
from stretto.planner.grid_plan import GridPlan
from stretto.train.config import TrainConfig
from stretto.train.gpt.model_source import GPTSource
from stretto.train.gpt.preflight import plan_of_run

LEARNING_RATE = 1e-5
GIB = 1 << 30
# Seconds after which NCCL aborts ranks that wait for a failed one.
TIME_LIMIT = 90.0
# NCCL's communicators of a grid live until their process ends: 2 GiB a grid of 4 H100, so that the last of 12 layouts
# in one job ran out of memory.
RUNS_OF_A_JOB = 5
COLUMNS = (
    Column("grid", "layout"),
    Column("predicted_milliseconds", "predicted (ms)", "{:.0f}"),
    Column("measured_milliseconds", "measured (ms)", "{:.0f}"),
    Column("time_ratio", "predicted / measured", "{:.2f}"),
    Column("predicted_gib", "predicted (GiB)", "{:.1f}"),
    Column("measured_gib", "measured (GiB)", "{:.1f}"),
    Column("memory_ratio", "predicted / measured", "{:.2f}"),
    Column("tokens_per_second_per_gpu", "tokens/s/GPU", "{:,.0f}"),
    Column("loss", "first loss", "{:.3f}"),
    Column("fits", "predicted to fit"),
    Column("reason", "why not"),
)
PREDICTED_COLUMNS = (
    Column("grid", "layout"),
    Column("predicted_milliseconds", "predicted (ms)", "{:.0f}"),
    Column("predicted_gib", "predicted (GiB)", "{:.1f}"),
    Column("fits", "fits"),
    Column("parts", "of which (ms)"),
    Column("reason", "why not"),
)
SUMMARY_COLUMNS = (
    Column("grids", "layouts measured"),
    Column("rank_correlation", "rank correlation", "{:.3f}"),
    Column("predicted_fastest", "predicted fastest"),
    Column("measured_fastest", "truly fastest"),
    Column("loss_by_choice", "slower by", "{:.1%}"),
    Column("largest_time_error", "largest time error", "{:.1%}"),
    Column("largest_memory_error", "largest memory error", "{:.1%}"),
    Column("failed", "predicted to fit, but failed"),
)


@dataclass(frozen=True)
class LayoutWorkload:
    """The workload that `measure` expects: global batch, tokens of a sequence, and how steps are timed."""

    batch: int
    seq_len: int
    warm_up: int
    repeats: int
    rounds: int


def predict_layouts(file: LayoutFile, cluster: Cluster, out: Path) -> dict[str, Any]:
    """Predict every layout's step and memory, print them, and write `out`/predictions-NAME.json. Returns its content.

    An impossible layout has a reason in place of numbers. Raises ValueError for a cluster without the GPU's memory.
    """
    cluster.require("gpu.memory")
    rows = [_predict(name, layout, cluster) for name, layout in file.layouts.items()]
    print_table(f"{file.name} on {cluster.name}, predicted", PREDICTED_COLUMNS, rows)
    written = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cluster": cluster.name,
        "gpu": cluster.gpu.name,
        "rows": rows,
    }
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(predictions_file(out, file.name), json.dumps(written, indent=1) + "\n")
    return written


def _predict(name: str, layout: TrainConfig, cluster: Cluster) -> dict[str, Any]:
    row: dict[str, Any] = {"grid": name, "options": describe_options(layout)}
    try:
        plan = plan_of_run(layout, _source_of(layout), cluster)
    except ValueError as error:
        return row | {"predicted_milliseconds": None, "predicted_gib": None, "fits": "no", "reason": str(error)}
    return row | {
        "predicted_milliseconds": plan.step_time * 1e3,
        "predicted_gib": plan.peak_memory / GIB,
        "fits": "yes" if plan.fits else "no",
        "parts": _describe_parts(plan),
        "terms": {term: seconds * 1e3 for term, seconds in plan.terms.items()},
        "memory": {part: size / GIB for part, size in plan.memory.items()},
        "reason": None if plan.is_possible else plan.why,
    }


def _describe_parts(plan: GridPlan) -> str:
    """The parts of a step that take a hundredth of it or more, in milliseconds."""
    large = {term: seconds for term, seconds in plan.terms.items() if seconds >= plan.step_time / 100}
    return ", ".join(f"{term} {seconds * 1e3:.0f}" for term, seconds in large.items())


def _source_of(layout: TrainConfig) -> GPTSource:
    """The layout's model. Raises ValueError if the file does not set its vocabulary."""
    if layout.model.path is not None:
        raise ValueError("layouts train a GPT from random weights: give model.layers, model.hidden, not model.path")
    if layout.model.vocab is None and layout.model.name is None:
        raise ValueError("model.vocab is absent, and there is no data that it could be read from")
    vocab = layout.model.vocab or 0
    return GPTSource(layout.model.to_gpt(data_vocab=vocab, seq_len=layout.train.seq_len))


def bench_layouts(
    file: LayoutFile, predicted: Sequence[Mapping[str, Any]], setting: LayoutsSetting, out: Path
) -> dict[str, Any]:
    """Measure every layout and peer, print the table, and write `out`/layouts-NAME.json, .md and .png.

    A layout that is predicted to need more than the GPU's memory is not tried: ranks that run out of memory at
    different moments would wait for each other. Runs are measured in jobs of a few; results are written after each
    job. Returns the rows and a summary.
    """
    ranks = file.first.ranks
    names = [*file.layouts, *file.peers]
    measured: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="stretto-bench-") as folder, shared_where_few(ranks):
        tokens = _write_tokens(file.first, Path(folder))
        layouts = {name: _with_data(layout, tokens, Path(folder)) for name, layout in file.layouts.items()}
        first = next(iter(layouts.values()))
        for start in range(0, len(names), RUNS_OF_A_JOB):
            chosen = names[start : start + RUNS_OF_A_JOB]
            of_job = {name: layouts[name] for name in chosen if name in layouts}
            peers = {name: file.peers[name] for name in chosen if name in file.peers}
            rows = [row for row in predicted if row["grid"] in of_job]
            measured += run_ranks(ranks, measure_layouts, first, of_job, peers, rows, setting)
            result = _write(file, predicted, measured, out)
    print_table(f"{file.name}, {ranks} ranks", COLUMNS, result["rows"])
    print_table("The planner's choice", SUMMARY_COLUMNS, [result["summary"]])
    draw_result(result.pop("path"))
    return result


def _write(
    file: LayoutFile, predicted: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]], out: Path
) -> dict[str, Any]:
    """Write the measurements so far. Returns their rows, summary and path."""
    peers = [{**row, "workload": file.name} for row in measured if row["grid"] in file.peers]
    rows = compare(file.name, predicted, [row for row in measured if row["grid"] not in file.peers])
    fitting = {row["grid"]: row["fits"] for row in predicted}
    rows = [row | {"fits": fitting[row["grid"]]} for row in rows]
    summary = summarize(file.name, rows)
    known = {row["grid"] for row in measured}
    without_time = [row for row in rows if row["grid"] in known and row.get("measured_milliseconds") is None]
    summary["failed"] = sum(row["fits"] == "yes" for row in without_time)
    path = write_result(
        out,
        f"layouts-{file.name}",
        COLUMNS,
        rows + peers,
        ranks=file.first.ranks,
        gpus=torch.cuda.device_count(),
        layouts={name: describe_options(layout) for name, layout in file.layouts.items()},
        peers={name: asdict(peer) for name, peer in file.peers.items()},
        not_measured=[name for name in (*file.layouts, *file.peers) if name not in known],
        summary=summary,
    )
    append_to_table(path, markdown_table(SUMMARY_COLUMNS, [summary]))
    return {"rows": rows + peers, "summary": summary, "path": path}


def _write_tokens(layout: TrainConfig, folder: Path) -> Path:
    """Write random tokens, enough for two steps, in nanoGPT's format."""
    vocab = _source_of(layout).config.vocab
    count = 2 * layout.train.batch * layout.train.seq_len + 1
    path = folder / "tokens.bin"
    np.random.default_rng(0).integers(0, vocab, count, dtype=np.uint32).tofile(path)
    return path


def _with_data(layout: TrainConfig, tokens: Path, folder: Path) -> TrainConfig:
    """The layout's configuration with data, as plain options again, so that everything is checked once more."""
    options = layout.model_dump(mode="json", exclude_unset=True)
    options["data"] = {"path": str(tokens), "format": "nanogpt", "token_dtype": "uint32"}
    options["out"] = str(folder / "run")
    return TrainConfig.model_validate(options)


def measure_layouts(
    first: TrainConfig,
    layouts: Mapping[str, TrainConfig],
    peers: Mapping[str, FsdpPeer],
    predicted: Sequence[Mapping[str, Any]],
    setting: LayoutsSetting,
) -> list[dict[str, Any]]:
    """The job of each rank; returns a row a layout and peer: times and memory, or the reason why there are none.

    first: the configuration whose model and batch the peers train.
    """
    world = Grid(data=first.ranks, timeout=TIME_LIMIT)  # joins the job
    reasons = {str(row["grid"]): _why_not(row, world.device) for row in predicted}
    runs = [
        TrainingRun(name, partial(_TaskStep, layout, world.device))
        for name, layout in layouts.items()
        if reasons[name] is None
    ]
    runs += [
        TrainingRun(name, partial(_build_peer, first, peer, world.device), is_peer=True) for name, peer in peers.items()
    ]
    run = first.train
    workload = LayoutWorkload(run.batch, run.seq_len, setting.warm_up, setting.repeats, setting.rounds)
    rows: list[dict[str, Any]] = [
        {"grid": name, "reason": reasons[name]} for name in layouts if reasons[name] is not None
    ]
    for row in measure(runs, workload, world.device):
        rows.append(
            {
                "grid": row["name"],
                "measured_milliseconds": row.get("step_milliseconds"),
                "measured_gib": row.get("peak_memory_gib"),
                "tokens_per_second_per_gpu": row.get("tokens_per_second_per_gpu"),
                "loss": row.get("loss"),
                "seconds": row.get("seconds"),
                "step_seconds": row.get("step_seconds"),
                "reason": row.get("error"),
            }
        )
    return rows


def _why_not(row: Mapping[str, Any], device: torch.device) -> str | None:
    if row["reason"] is not None:
        return str(row["reason"])
    if device.type == "cuda":
        has = torch.cuda.get_device_properties(device).total_memory / GIB
        if row["predicted_gib"] > has:
            return f"not tried: it would need {row['predicted_gib']:.0f} GiB of the {has:.0f} that there are"
    return None


class _TaskStep:
    """Steps of the task that `stretto train` runs."""

    def __init__(self, layout: TrainConfig, device: torch.device) -> None:
        from stretto.train.gpt.task import GPTTask

        self._grid = Grid(**layout.grid.sizes(), device=device, timeout=TIME_LIMIT)
        self._task = GPTTask(layout, self._grid)
        self._task.start()
        self._step = 0

    def __call__(self) -> Stepped:
        self._step += 1
        return Stepped(*self._task.step(self._step, LEARNING_RATE))

    def close(self) -> None:
        """Stop the pipeline's threads, and free the workspaces that operators keep for their next calls."""
        self._task.close()
        for axis in OUTER_TO_INNER:
            if self._grid.size(axis) > 1:
                free_workspaces(self._grid.group(axis))


def _build_peer(layout: TrainConfig, peer: FsdpPeer, device: torch.device) -> Step:
    run, model = layout.train, _source_of(layout).config
    ranks, rank = dist.get_world_size(), dist.get_rank()
    options = FsdpOptions(
        dtype=TORCH_DTYPES[run.dtype],
        learning_rate=LEARNING_RATE,
        frees_weights=peer.frees_weights,
        recompute=peer.recompute,
        is_on_host=peer.optimizer_state == "host",
    )
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(model.vocab, (run.batch // ranks, run.seq_len + 1), generator=generator).to(device)
    return build_accumulating(model, tokens, peer.micro_batch, device, options)
