# SPDX-License-Identifier: Apache-2.0
"""`python -m lab layouts`: training runs of one model in several layouts, compared with the planner's predictions.

A layout is a whole configuration of `stretto train`: grid, pipeline schedule, experts, micro-batches, recomputation and
the place of optimizer state. `predict_layouts` needs no GPU, so that its file can be committed before anything is
measured; measuring reads it. Each run is trained by the task that `stretto train` runs, on random tokens, and
torch's FSDP2 trains the same model in the same job. Runs of a job are interleaved, round by round.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist

from lab.harness import ANY_CPU, Bench, Measured, Table, column
from lab.peers import FsdpOptions, build_accumulating
from lab.planning.comparison import Row, Summary, compare, plot_predicted, summarize
from lab.planning.layout_file import (
    FsdpPeer,
    LayoutFile,
    describe_options,
    read_layout_predictions,
    read_layouts,
    shrink,
)
from stretto.axes import OUTER_TO_INNER
from stretto.bench.harness import TORCH_DTYPES, run_ranks, shared_where_few
from stretto.bench.settings import Needs, Option, Repeats, Rounds, WarmUp
from stretto.bench.training.runs import Step, Stepped, TrainingRun, measure
from stretto.bench.training.settings import TrainingWorkload
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


@dataclass(frozen=True)
class Predicted:
    """A layout's predicted step and memory, or why it is impossible."""

    grid: str = column("layout")
    predicted_milliseconds: float = column("predicted (ms)", "{:.0f}")
    predicted_gib: float = column("predicted (GiB)", "{:.1f}")
    fits: str = column("fits")
    parts: str = column("of which (ms)")
    reason: str = column("why not")


@dataclass(frozen=True)
class LayoutsSetting:
    """Settings of `python -m lab layouts`, which predicts or measures layouts.
    Raises ValueError for impossible numbers.
    """

    file: Annotated[Path, Option("The file of layouts.", "--file")] = Path("lab/results/layouts/llama.toml")
    cluster: Annotated[
        str | None,
        Option("Only predict, for this cluster: a file (`stretto probe`) or a preset's name. Do it before measuring."),
    ] = None
    small: Annotated[
        bool, Option("Tiny sizes of the model in the same layouts, for a try, also without a GPU; no comparison.")
    ] = False
    warm_up: WarmUp = 1
    repeats: Repeats = 3
    rounds: Rounds = 2


def run_layouts(setting: LayoutsSetting, out: Path) -> Iterator[Measured] | Measured:
    file = read_layouts(setting.file)
    file = shrink(file) if setting.small else file
    if setting.cluster is not None:
        return predict_layouts(file, Cluster.find(setting.cluster))
    predicted = read_layout_predictions(out, file)
    if not torch.cuda.is_available() and not setting.small:
        raise ValueError("this bench takes GPUs, and torch sees none here; --small tries the command without one")
    return compare_layouts(file, predicted, setting)


def predict_layouts(file: LayoutFile, cluster: Cluster) -> Measured:
    """Predict every layout's step and memory, for predictions-NAME.json.

    An impossible layout has a reason in place of numbers. Raises ValueError for a cluster without the GPU's memory.
    """
    cluster.require("gpu.memory")
    rows = [_predict(name, layout, cluster) for name, layout in file.layouts.items()]
    about = {"machine": ANY_CPU, "cluster": cluster.name, "gpu": cluster.gpu.name}
    title = f"{file.name} on {cluster.name}, predicted"
    return Measured(rows, about, name=f"predictions-{file.name}", title=title, row=Predicted)


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


def compare_layouts(
    file: LayoutFile, predicted: Sequence[Mapping[str, Any]], setting: LayoutsSetting
) -> Iterator[Measured]:
    """Measure every layout and peer, in jobs of a few; the result is written after each job.

    A layout that is predicted to need more than the GPU's memory is not tried: ranks that run out of memory at
    different moments would wait for each other.
    """
    ranks = file.first.ranks
    names = [*file.layouts, *file.peers]
    measured: list[dict[str, Any]] = []
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
            yield _join(file, predicted, measured)


def _join(file: LayoutFile, predicted: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]]) -> Measured:
    """The measurements so far, beside their predictions."""
    peers = [{**row, "workload": file.name} for row in measured if row["grid"] in file.peers]
    rows = compare(file.name, predicted, [row for row in measured if row["grid"] not in file.peers])
    fitting = {row["grid"]: row["fits"] for row in predicted}
    rows = [row | {"fits": fitting[row["grid"]]} for row in rows]
    summary = summarize(file.name, rows)
    known = {row["grid"] for row in measured}
    without_time = [row for row in rows if row["grid"] in known and row.get("measured_milliseconds") is None]
    summary["failed"] = sum(row["fits"] == "yes" for row in without_time)
    about = {
        "ranks": file.first.ranks,
        "gpus": torch.cuda.device_count(),
        "layouts": {name: describe_options(layout) for name, layout in file.layouts.items()},
        "peers": {name: peer.model_dump() for name, peer in file.peers.items()},
        "not_measured": [name for name in (*file.layouts, *file.peers) if name not in known],
        "summary": summary,
    }
    choice = Table("The planner's choice", [summary], Summary, "summaries")
    return Measured(rows + peers, about, tables=(choice,), name=f"layouts-{file.name}")


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
    reasons = {str(row["grid"]): why_not(row, world.device) for row in predicted}
    runs = [
        TrainingRun(name, partial(_TaskStep, layout, world.device))
        for name, layout in layouts.items()
        if reasons[name] is None
    ]
    runs += [
        TrainingRun(name, partial(_build_peer, first, peer, world.device), is_peer=True) for name, peer in peers.items()
    ]
    run = first.train
    model = _source_of(first).config
    workload = TrainingWorkload(model, run.batch, run.seq_len, setting.warm_up, setting.repeats, setting.rounds)
    rows: list[dict[str, Any]] = [
        {"grid": name, "reason": reasons[name]} for name in layouts if reasons[name] is not None
    ]
    return rows + [name_measured(row) for row in measure(runs, workload, world.device)]


def name_measured(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `measure` as `compare` joins it with its prediction."""
    return {
        "grid": row["name"],
        "measured_milliseconds": row.get("step_milliseconds"),
        "measured_gib": row.get("peak_memory_gib"),
        "tokens_per_second_per_gpu": row.get("tokens_per_second_per_gpu"),
        "loss": row.get("loss"),
        "seconds": row.get("seconds"),
        "step_seconds": row.get("step_seconds"),
        "reason": row.get("error"),
    }


def why_not(row: Mapping[str, Any], device: torch.device) -> str | None:
    """The reason not to measure a predicted row: it is impossible, or needs more than the GPU's memory."""
    if row.get("reason") is not None:
        return str(row["reason"])
    if device.type == "cuda":
        has = torch.cuda.get_device_properties(device).total_memory / 2**30
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


def plot_plan(data: dict[str, Any], picture: Path) -> None:
    """Draw the committed runs of all grids of 2 and 4 GPUs and 8 CPU ranks: a row of panels a workload."""
    plot_predicted(data, picture, "grid", "Grids are the sizes of data, x, y and z")


def plot_layouts(data: dict[str, Any], picture: Path) -> None:
    """Draw a line a layout, from its predicted to its measured time, and memory; peers have no prediction."""
    plot_predicted(data, picture, "layout", "Layouts are grids with how they run")


BENCH = Bench(
    "layouts",
    """Grids with pipelines, experts and state on the host: measured, compared with predictions and with FSDP2.

    Predict first (this needs no GPU): python -m lab layouts --file FILE --cluster CLUSTER.toml
    """,
    LayoutsSetting,
    run_layouts,
    Row,
    title=lambda setting: f"Layouts of {setting.file.stem}",
    plot={"layouts-*": plot_layouts, "plan": plot_plan},
    needs=Needs.TWO_GPUS,
    about=lambda setting: {},
)
