# SPDX-License-Identifier: Apache-2.0
"""`python -m lab plan`: writes the planner's predictions first, then measures every grid.

`write_predictions` needs no GPU, so that its file can be committed before anything is measured; the bench only reads
it. Both take whole local batches (no accumulation), no checkpointing, weights kept gathered, and overlap.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch

from lab.harness import Bench, Measured, Table
from lab.planning.comparison import Row, Summary, compare, plot_predicted, summarize
from lab.training.models import model_config
from stretto.atomic_files import write_atomically
from stretto.bench.harness import run_ranks
from stretto.bench.settings import (
    Needs,
    Option,
    Ranks,
    Repeats,
    Rounds,
    SeqLen,
    Vocab,
    WarmUp,
    parse_number,
)
from stretto.bench.training.runs import make_grid, measure, stretto_run
from stretto.bench.training.settings import PADDED_VOCAB, TrainingWorkload, grids_of
from stretto.cluster import Cluster, name_grid
from stretto.parallel import Grid
from stretto.planner import predict

ASSUMED: dict[str, Any] = {"cost": "full", "recompute": "none", "reshard": "after_backward"}
DTYPES = ("bf16", "fp32")


@dataclass(frozen=True)
class Planned:
    """A workload to predict and measure; its key and the model's sizes join the prediction and the measurement."""

    model_name: str
    workload: TrainingWorkload
    ranks: int

    @property
    def key(self) -> str:
        work = self.workload
        dtype = "" if work.dtype == "bf16" else f", {work.dtype}"
        return (
            f"{self.model_name}, {work.model.layers} layers, batch {work.batch} x {work.seq_len} tokens, "
            f"{self.ranks} ranks{dtype}"
        )


@dataclass(frozen=True)
class PlanSetting:
    """Settings of `python -m lab plan`. Raises ValueError for options that exclude each other."""

    models: Annotated[
        tuple[str, ...], Option("Sizes of Table 5.1, with :LAYERS where not all are taken.", separator=" ")
    ] = ("gpt-5b", "gpt-10b")
    ranks: Ranks = None
    batches: Annotated[tuple[int, ...], Option("Global batches in sequences.")] = (8, 16)
    seq_len: SeqLen = 2048
    vocab: Vocab = PADDED_VOCAB
    dtype: Annotated[str, Option("Dtype of the computation: bf16 or fp32.")] = "bf16"
    predict: Annotated[
        Path | None, Option("Only predict, and write this file; do it before measuring.", metavar="FILE")
    ] = None
    cluster: Annotated[str | None, Option("Cluster to predict for: a file (`stretto probe`) or a preset's name.")] = (
        None
    )
    predictions: Annotated[Path, Option("The file that --predict has written.")] = Path(
        "lab/results/plan/predictions.json"
    )
    shards_sequence: Annotated[
        bool, Option("With --predict: grids with x > 1 also with sharded tokens.", "--shard-sequence")
    ] = False
    again: Annotated[bool, Option("Measure again what plan.json already has.")] = False
    warm_up: WarmUp = 3
    repeats: Repeats = 5
    rounds: Rounds = 2

    def __post_init__(self) -> None:
        if (self.predict is None) != (self.cluster is None):
            raise ValueError("--predict FILE and --cluster go together: predictions are made for a cluster")
        if self.shards_sequence and self.predict is None:
            raise ValueError("--shard-sequence goes with --predict: what the file predicts is measured")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype is {' or '.join(DTYPES)}, not {self.dtype!r}")
        if self.ranks is not None:
            planned = self.workloads()
            if self.predict is None:
                read_predictions(self.predictions, planned)

    def workloads(self) -> list[Planned]:
        """Every model with every batch, for the ranks. Raises ValueError for an unknown model."""
        planned = []
        for spec in self.models:
            name, _, layers = spec.partition(":")
            config = model_config(
                name, parse_number(layers, "the layers in --models") if layers else None, self.seq_len
            )
            config = replace(config, vocab=self.vocab)
            for batch in self.batches:
                timing = (self.seq_len, self.warm_up, self.repeats, self.rounds)
                planned.append(
                    Planned(name, TrainingWorkload(config, batch, *timing, dtype=self.dtype), self.ranks or 1)
                )
        return planned


def read_predictions(file: Path, planned: Sequence[Planned]) -> dict[str, list[dict[str, Any]]]:
    """Read the predicted grids by workload. ValueError if the file lacks one, or predicts it for another model."""
    remedy = f"write it before you measure: python -m lab plan --predict {file} --cluster CLUSTER.toml"
    if not file.is_file():
        raise ValueError(f"there is no file of predictions at {file}; {remedy}")
    try:
        workloads = {entry["workload"]: entry for entry in json.loads(file.read_text())["workloads"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} holds no predictions: {error!r}; {remedy}") from error
    for one in planned:
        if one.key not in workloads:
            raise ValueError(f"{file} has no prediction for {one.key!r}, only for {sorted(workloads)}; {remedy}")
        if workloads[one.key]["model"] != asdict(one.workload.model):
            raise ValueError(f"{file} predicts {one.key!r} for a model of other sizes; {remedy}")
    return {one.key: workloads[one.key]["grids"] for one in planned}


@dataclass(frozen=True)
class GridVariant:
    """A grid, with or without sequence sharding over its x axis."""

    sizes: Mapping[str, int]
    shards_sequence: bool = False

    @property
    def name(self) -> str:
        """The key that joins predictions and measurements of one workload."""
        return name_grid(self.sizes) + (", sequence sharded" if self.shards_sequence else "")


def list_variants(ranks: int, *, shards_sequence: bool = True) -> list[GridVariant]:
    """Every grid of the ranks; with `shards_sequence`, grids with x > 1 also with sharded tokens."""
    shardings = (False, True) if shards_sequence else (False,)
    return [
        GridVariant(sizes, shards)
        for sizes in grids_of(ranks)
        for shards in (shardings if sizes["x"] > 1 else (False,))
    ]


def write_predictions(
    planned: Sequence[Planned], cluster: Cluster, file: Path, *, shards_sequence: bool = False
) -> dict[str, Any]:
    """Predict every grid of each workload, and write `file`. Returns the file's content.

    shards_sequence: predict grids with x > 1 twice, also with sharded tokens. the bench measures these grids.

    Raises ValueError for a cluster that lacks a figure that is needed.
    """
    cluster.require("gpu.memory")
    written = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cluster": cluster.name,
        "assumed": ASSUMED | {"dtype": ", ".join(dict.fromkeys(one.workload.dtype for one in planned))},
        "workloads": [
            {
                "workload": one.key,
                "model": asdict(one.workload.model),
                "grids": [
                    _predict(one, variant, cluster)
                    for variant in list_variants(one.ranks, shards_sequence=shards_sequence)
                ],
            }
            for one in planned
        ],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(written, indent=1) + "\n")
    return written


def _predict(planned: Planned, variant: GridVariant, cluster: Cluster) -> dict[str, Any]:
    work = planned.workload
    row: dict[str, Any] = {"grid": variant.name}
    options = ASSUMED | {"dtype": work.dtype, "shard_sequence": variant.shards_sequence}
    try:
        plan = predict(work.model, cluster, grid=variant.sizes, batch=work.batch, seq_len=work.seq_len, **options)
    except ValueError as error:
        return row | {"predicted_milliseconds": None, "predicted_gib": None, "reason": str(error)}
    return row | {"predicted_milliseconds": plan.step_time * 1e3, "predicted_gib": plan.peak_memory / 2**30}


def run_plan(setting: PlanSetting, out: Path) -> Iterator[Measured] | dict[str, Any]:
    """Measure the workloads, or predict them alone."""
    if setting.predict is None or setting.cluster is None:
        return compare_workloads(setting, out)
    cluster = Cluster.find(setting.cluster)
    written = write_predictions(setting.workloads(), cluster, setting.predict, shards_sequence=setting.shards_sequence)
    print(f"predictions written to {setting.predict}", file=sys.stderr)
    return written


def compare_workloads(setting: PlanSetting, out: Path) -> Iterator[Measured]:
    """Measure each workload that `out`/plan.json lacks, compare all with their predictions, and rewrite the file.

    Every workload is a job of its own, whose grids are interleaved; the file is written after each.
    """
    planned = setting.workloads()
    predicted = read_predictions(setting.predictions, planned)
    about = json.loads(setting.predictions.read_text())
    kept: dict[str, list[dict[str, Any]]] = {}
    file = out / "plan.json"
    if file.is_file():
        for row in json.loads(file.read_text())["rows"]:
            kept.setdefault(row["workload"], []).append(row)
    for one in planned:
        if setting.again or one.key not in kept:
            measured = run_ranks(one.ranks, measure_grids, one.workload, one.ranks, predicted[one.key])
        else:
            measured = kept[one.key]
        kept[one.key] = compare(one.key, predicted[one.key], measured)
        yield Measured(
            [row for rows in kept.values() for row in rows],
            {"predictions": {key: about[key] for key in ("date", "cluster", "assumed")}},
            tables=(Table("The planner's choice", [summarize(*each) for each in kept.items()], Summary, "summaries"),),
        )


def measure_grids(workload: TrainingWorkload, ranks: int, predicted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The job of each rank; returns a row a grid: measured_milliseconds and measured_gib, or the reason why not.

    A grid that is predicted to need more than the GPU's whole memory is not tried: ranks that run out of memory at
    different moments would wait for each other.
    """
    world = Grid(data=ranks)  # joins the job
    reasons = {row["grid"]: why_not(row, world.device) for row in predicted}
    runs = [
        stretto_run(workload, make_grid(variant.sizes), variant.name, shards_sequence=variant.shards_sequence)
        for variant in list_variants(ranks)
        if reasons.get(variant.name, "not predicted") is None
    ]
    rows = [{"grid": grid, "reason": reason} for grid, reason in reasons.items() if reason is not None]
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


def plot_plan(data: dict[str, Any], picture: Path) -> None:
    """Draw a row of panels a workload: a line a grid, from its predicted to its measured time, and memory."""
    plot_predicted(data, picture, "grid", "Grids are the sizes of data, x, y and z")


BENCH = Bench(
    "plan",
    """Every grid of the ranks, measured and compared with the planner's predictions: step times, memory, order.

    Predict first (this needs no GPU): python -m lab plan --predict FILE --cluster CLUSTER.toml --ranks 4
    """,
    PlanSetting,
    run_plan,
    Row,
    title="Predicted and measured grids",
    plot=plot_plan,
    needs=Needs.RANKS,
    about=lambda setting: {},
)
