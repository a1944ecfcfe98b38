# SPDX-License-Identifier: Apache-2.0
"""Settings of `python -m lab plan` and `memory`, and the predictions that the first reads."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from lab.training.models import model_config
from stretto.bench.settings import Option, Ranks, Repeats, Rounds, SeqLen, Vocab, WarmUp, parse_number, require_least
from stretto.bench.training.settings import PADDED_VOCAB, TrainingWorkload

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

    def workloads(self, ranks: int) -> list[Planned]:
        """Every model with every batch, for `ranks` ranks. Raises ValueError for an unknown model."""
        planned = []
        for spec in self.models:
            name, _, layers = spec.partition(":")
            config = model_config(
                name, parse_number(layers, "the layers in --models") if layers else None, self.seq_len
            )
            config = replace(config, vocab=self.vocab)
            for batch in self.batches:
                timing = (self.seq_len, self.warm_up, self.repeats, self.rounds)
                planned.append(Planned(name, TrainingWorkload(config, batch, *timing, dtype=self.dtype), ranks))
        return planned


@dataclass(frozen=True)
class MemorySetting:
    """Which training runs `python -m lab memory` measures: those whose predicted memory is in a range of the GPU's.

    smallest, largest: percent of the GPU's memory. Raises ValueError for a range that is empty or beyond 120%.
    """

    runs: Annotated[int, Option("Number of training runs.")] = 24
    smallest: Annotated[float, Option("Predicted memory of the smallest run, in percent of the GPU's.")] = 60.0
    largest: Annotated[float, Option("The same of the largest run.")] = 98.0
    steps: Annotated[int, Option("Steps of each run.")] = 3
    seconds: Annotated[float | None, Option("Start no run after so many seconds.", least=0)] = None
    on_cpu: Annotated[bool, Option("Two tiny runs that measure nothing, to try the command.", "--cpu")] = False

    def __post_init__(self) -> None:
        require_least(1, runs=self.runs, steps=self.steps)
        if not 0 < self.smallest <= self.largest <= 120:
            raise ValueError(
                f"--smallest {self.smallest:g} --largest {self.largest:g} is no range of percents: 0 < smallest <= "
                "largest <= 120"
            )


@dataclass(frozen=True)
class PublishedPipelinesSetting:
    """The global batch that `python -m lab published-pipelines` assumes for the runs of Table 3.1."""

    batch: Annotated[int, Option("Global batch of Table 3.1's runs, in sequences of 512 tokens.")] = 16384

    def __post_init__(self) -> None:
        if self.batch < 64 or self.batch % 64:
            near = max(64, round(self.batch / 64) * 64)
            raise ValueError(
                f"--batch is {self.batch}, which 8 replicas with micro-batches of 8 do not divide; {near} would do"
            )


@dataclass(frozen=True)
class PublishedExpertsSetting:
    """The micro-batch that `python -m lab published-experts` assumes for the runs of chapter 7."""

    micro_batch: Annotated[int, Option("Micro-batch of the steps on Summit, in sequences of 2048 tokens.")] = 1

    def __post_init__(self) -> None:
        if self.micro_batch not in (1, 2, 4, 8):
            near = min((1, 2, 4, 8), key=lambda size: abs(size - self.micro_batch))
            raise ValueError(
                f"--micro-batch is {self.micro_batch}, which does not divide the sequences of a rank in all runs; "
                f"{near} would do"
            )


@dataclass(frozen=True)
class SimulatedStepsSetting:
    """Which measured steps `python -m lab simulated-steps` simulates."""

    plans: Annotated[
        tuple[str, ...],
        Option("Folders of `python -m lab plan`, with the machine's probed.toml.", separator=" ", metavar="FOLDER"),
    ] = ("lab/results/plan", "lab/results/plan-2-gpus")
    overlaps: Annotated[
        Path, Option("A file of `python -m lab overlap` from the first folder's machine.", metavar="FILE")
    ] = Path("lab/results/overlap/overlap.json")

    def __post_init__(self) -> None:
        for folder in self.plans:
            if not (Path(folder) / "probed.toml").is_file():
                raise ValueError(f"--plans has {folder}, which has no probed.toml; lab/results/plan would do")


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
