# SPDX-License-Identifier: Apache-2.0
"""Settings of the benches of training."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, cast, get_args

import stretto
from lab.checkouts.settings import find_source
from lab.training.models import LLAMA_7B, model_config, parse_grids
from stretto.bench.settings import (
    Layers,
    Option,
    Ranks,
    Repeats,
    Rounds,
    SeqLen,
    WarmUp,
    require_known,
    require_least,
)
from stretto.bench.training.settings import TrainingWorkload
from stretto.execution import Recomputation
from stretto.models import DLRMConfig, GPTConfig

Implementation = Literal["library", "kernel"]
BLOCK_MODELS = ("translator", "vision-transformer", "u-net")


@dataclass(frozen=True)
class PeersSetting:
    """What `python -m lab peers` trains and times."""

    models: Annotated[tuple[str, ...], Option("llama-7b, or gpt-5b to gpt-640b, with spaces between.")] = ("llama-7b",)
    layers: Layers = None
    ranks: Ranks = None
    batches: Annotated[tuple[int, ...], Option("Global batches in sequences (default: 1, 2, and 1 and 2 a rank).")] = ()
    seq_len: SeqLen = 4096
    grids: Annotated[
        str | None, Option("Stretto's grids, as 'z=4, x=2 z=2' (default: all that can cut the batch).")
    ] = None
    only: Annotated[
        tuple[str, ...], Option("Only runs with this in their name; may be given several times.", is_repeated=True)
    ] = ()
    with_compiled: Annotated[bool, Option("Measure compiled blocks too.", "--compiled/--no-compiled")] = True
    tunes_matmuls: Annotated[
        bool, Option("Let Stretto choose each product's layout by timing it.", "--tune-matmuls/--no-tune-matmuls")
    ] = False
    warm_up: WarmUp = 3
    repeats: Repeats = 5
    rounds: Rounds = 2

    def workloads(self, ranks: int) -> dict[str, list[TrainingWorkload]]:
        """The workloads of `ranks` ranks: for each model, one a batch size.

        ValueError for unknown models, and for an invalid grid.
        """
        if self.grids is not None:
            parse_grids(self.grids, ranks)
        sizes = self.batches or tuple(sorted({1, 2, ranks, 2 * ranks}))
        configs = {name: model_config(name, self.layers, self.seq_len) for name in self.models}
        timing = (self.seq_len, self.warm_up, self.repeats, self.rounds)
        return {name: [TrainingWorkload(config, size, *timing) for size in sizes] for name, config in configs.items()}


@dataclass(frozen=True)
class OverlapSetting:
    """What `python -m lab overlap` trains and times."""

    model: Annotated[str, Option("llama-7b, or gpt-5b to gpt-640b.")] = "gpt-5b"
    layers: Layers = None
    ranks: Ranks = None
    batch: Annotated[int | None, Option("Global batch in sequences (default: 2 a rank).", least=1)] = None
    seq_len: SeqLen = 2048
    grids: Annotated[str, Option("Grids to measure.")] = "x=2 z=2, data=2 z=2"
    warm_up: WarmUp = 3
    repeats: Repeats = 5
    rounds: Rounds = 3

    def workload(self, ranks: int) -> TrainingWorkload:
        """The workload of `ranks` ranks. Raises ValueError for an unknown model or wrong grids."""
        parse_grids(self.grids, ranks)
        config = model_config(self.model, self.layers, self.seq_len)
        batch = 2 * ranks if self.batch is None else self.batch
        return TrainingWorkload(config, batch, self.seq_len, self.warm_up, self.repeats, self.rounds)


@dataclass(frozen=True)
class BlocksSetting:
    """What `python -m lab blocks` trains and times. Raises ValueError for settings that cannot work."""

    models: Annotated[tuple[str, ...], Option("translator, vision-transformer, u-net, with commas.")] = BLOCK_MODELS
    ranks: Annotated[
        int | None, Option("Processes (default: the machine's GPUs); more than GPUs share these.", least=1)
    ] = None
    layers: Annotated[
        int | None, Option("Of an encoder or decoder, a third of a vision transformer's, blocks of a U-Net's level.")
    ] = None
    samples: Annotated[int | None, Option("Samples a rank (default: 8 pairs of sentences, 16 images).")] = None
    warm_up: WarmUp = 3
    repeats: Repeats = 5
    rounds: Rounds = 3

    def __post_init__(self) -> None:
        require_known("model", self.models, BLOCK_MODELS)
        require_least(1, repeats=self.repeats, rounds=self.rounds)
        require_least(0, warm_up=self.warm_up)
        for name, number in (("layers", self.layers), ("samples", self.samples)):
            if number is not None:
                require_least(1, **{name: number})


@dataclass(frozen=True)
class PipelineSetting:
    """What `python -m lab pipeline` measures. Raises ValueError for settings that cannot work."""

    stages: Annotated[tuple[int, ...], Option("Of each pipeline, one on each process, with commas.")] = (4, 8)
    micro_batches: Annotated[tuple[int, ...], Option("Of a step of each pipeline, with commas.")] = (16, 32)
    unit: Annotated[float, Option("Seconds that F, I and W of a stage sleep each.")] = 0.02
    latencies: Annotated[tuple[float, ...], Option("Seconds that a message takes, with commas.")] = (0.0, 0.005)
    repeats: Repeats = 3

    def __post_init__(self) -> None:
        require_least(1, repeats=self.repeats)
        if not self.stages or len(self.stages) != len(self.micro_batches):
            raise ValueError(f"stages is {self.stages} and micro_batches {self.micro_batches}, but must be as many")
        for stages, micro_batches in zip(self.stages, self.micro_batches, strict=True):
            if stages < 2 or micro_batches < 2 * stages:
                raise ValueError(
                    f"{stages} stages and {micro_batches} micro-batches: there must be at least 2 stages, and twice as "
                    f"many micro-batches; {max(2, stages)} and {2 * max(2, stages)} would do"
                )
        if not self.unit > 0:
            raise ValueError(f"unit is {self.unit}, but must be positive")
        if not self.latencies or min(self.latencies) < 0:
            raise ValueError(f"latencies is {self.latencies}, but must be numbers of 0 and more")


@dataclass(frozen=True)
class StagesSetting:
    """What `python -m lab stages` trains. Raises ValueError for settings that cannot work."""

    layers: Annotated[int, Option("Transformer blocks of a Llama of width 4096.")] = 16
    seq_len: SeqLen = 4096
    batch: Annotated[int, Option("Micro-batches of a step, of one sequence each.")] = 8
    virtual_stages: Annotated[int, Option("Stages on the rank.")] = 4
    dtype: Annotated[str, Option("Of the computation: bf16, or fp32.")] = "bf16"
    compiled: Annotated[bool, Option("Also with compiled blocks.")] = True
    small: Annotated[bool, Option("A model of width 64, for a try without a GPU.")] = False
    warm_up: WarmUp = 2
    repeats: Repeats = 5
    rounds: Rounds = 2

    def __post_init__(self) -> None:
        numbers = {"layers": self.layers, "seq_len": self.seq_len, "batch": self.batch}
        require_least(1, repeats=self.repeats, rounds=self.rounds, **numbers)
        require_least(2, virtual_stages=self.virtual_stages)
        require_least(0, warm_up=self.warm_up)
        if self.dtype not in ("bf16", "fp32"):
            raise ValueError(f"dtype is {self.dtype!r}, but must be bf16 or fp32")
        if self.layers % self.virtual_stages:
            near = max(1, round(self.layers / self.virtual_stages)) * self.virtual_stages
            raise ValueError(f"{self.virtual_stages} stages do not divide {self.layers} layers; {near} would do")

    def model(self) -> GPTConfig:
        """The model that is trained."""
        whole = replace(LLAMA_7B, layers=self.layers, max_seq_len=self.seq_len)
        return replace(whole, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=256) if self.small else whole


OFFLOAD_PARTS = ("buckets", "tiles", "train", "peers", "largest")


@dataclass(frozen=True)
class OffloadSetting:
    """What `python -m lab offload` measures. Raises ValueError for settings that cannot work."""

    parts: Annotated[tuple[str, ...], Option("buckets, tiles, train, peers, largest, with commas.")] = (
        "buckets",
        "tiles",
        "train",
    )
    layers: Annotated[int, Option("Of the model that is trained, a Llama of width 4096.")] = 32
    seq_len: SeqLen = 4096
    micro_batch: Annotated[int, Option("Sequences of a micro-batch.")] = 2
    micro_batches: Annotated[tuple[int, ...], Option("How many a step has, with commas.")] = (1, 4, 16)
    numbers: Annotated[int, Option("Parameters that are stepped without a model, for buckets and tiles.")] = 1 << 29
    repeats: Repeats = 2
    cpu: Annotated[bool, Option("Small sizes on the CPU: a try, no figure.")] = False

    def __post_init__(self) -> None:
        require_known("part", self.parts, OFFLOAD_PARTS)
        require_least(
            1,
            layers=self.layers,
            seq_len=self.seq_len,
            micro_batch=self.micro_batch,
            numbers=self.numbers,
            repeats=self.repeats,
            micro_batches=min(self.micro_batches, default=0),
        )

    def model(self) -> GPTConfig:
        """The model that is trained."""
        if self.cpu:
            return replace(LLAMA_7B, layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=256, max_seq_len=64)
        return replace(LLAMA_7B, layers=self.layers, max_seq_len=self.seq_len)


@dataclass(frozen=True)
class RecomputeSetting:
    """What `python -m lab recompute` trains, over which links. Raises ValueError for settings that cannot work."""

    ranks: Annotated[int, Option("Processes of the CPU, along x.")] = 2
    modes: Annotated[tuple[str, ...], Option("Modes of recomputation in addition to full, with commas.")] = (
        "communication",
    )
    links: Annotated[tuple[int, ...], Option("Bandwidths of links in MB/s, with commas.")] = (10, 3)
    layers: Annotated[int, Option("Transformer blocks.")] = 4
    hidden: Annotated[int, Option("Width of a token's vector; heads are of 64.")] = 128
    batch: Annotated[int, Option("Sequences of a step.")] = 4
    seq_len: SeqLen = 128
    warm_up: WarmUp = 1
    repeats: Repeats = 5
    rounds: Rounds = 3

    def __post_init__(self) -> None:
        numbers = {"layers": self.layers, "hidden": self.hidden, "batch": self.batch, "seq_len": self.seq_len}
        require_least(2, ranks=self.ranks)
        require_least(1, repeats=self.repeats, rounds=self.rounds, **numbers)
        require_least(0, warm_up=self.warm_up)
        if self.hidden % 64 or self.hidden // 64 % self.ranks:
            raise ValueError(
                f"hidden is {self.hidden}, but must be 64 times a number of heads that the {self.ranks} ranks divide; "
                f"{64 * self.ranks} would do"
            )
        object.__setattr__(self, "modes", tuple(dict.fromkeys(("full", *self.modes))))
        for mode in self.modes:
            Recomputation.parse(mode).check_blocks(self.layers)

    @property
    def model(self) -> GPTConfig:
        """The GPT that is trained."""
        return GPTConfig(self.layers, self.hidden, self.hidden // 64, vocab=256, max_seq_len=self.seq_len)


@dataclass(frozen=True)
class DlrmWorkload:
    """The DLRM that is trained, its global batch, and how it is timed. ValueError for impossible sizes."""

    model: DLRMConfig
    batch: int
    implementations: tuple[Implementation, ...] = get_args(Implementation)
    is_jagged: bool = False
    warm_up: int = 3
    repeats: int = 10
    rounds: int = 3

    def __post_init__(self) -> None:
        require_least(1, batch=self.batch, repeats=self.repeats, rounds=self.rounds)
        require_least(0, warm_up=self.warm_up)
        for name in self.implementations:
            if name not in get_args(Implementation):
                raise ValueError(f"there is no implementation {name!r} to measure: there are library and kernel")


@dataclass(frozen=True)
class DlrmSetting:
    """What `python -m lab dlrm` trains and times."""

    model: Annotated[str, Option("small, kaggle, mlperf-v2 or paper.")] = "mlperf-v2"
    max_rows: Annotated[int | None, Option("Cut longer tables down to so many rows (default: none).", least=1)] = None
    tables: Annotated[int | None, Option("How many tables, for paper.", least=1)] = None
    ranks: Ranks = None
    batch: Annotated[int, Option("Global batch in samples.", least=1)] = 65536
    implementations: Annotated[tuple[str, ...], Option("library, kernel, with commas.")] = get_args(Implementation)
    is_jagged: Annotated[bool, Option("Bags from none to twice the pooling.", "--jagged/--no-jagged")] = False
    warm_up: WarmUp = 3
    repeats: Repeats = 10
    rounds: Rounds = 3

    def workload(self) -> DlrmWorkload:
        """The workload. ValueError for an unknown model, or for `tables` if the model's tables differ in size."""
        config = DLRMConfig.preset(self.model)
        if self.tables is not None:
            if self.tables < 1 or len(set(zip(config.rows, config.pooling, strict=True))) > 1:
                raise ValueError(
                    f"--tables is {self.tables}, but is at least 1, and for a model whose tables are alike: paper"
                )
            config = replace(config, rows=config.rows[:1] * self.tables, pooling=config.pooling[:1])
        config = config if self.max_rows is None else config.capped(self.max_rows)
        names = cast("tuple[Implementation, ...]", self.implementations)
        return DlrmWorkload(config, self.batch, names, self.is_jagged, self.warm_up, self.repeats, self.rounds)


@dataclass(frozen=True)
class DdpSetting:
    """Which checkouts `python -m lab ddp` compares. Raises ValueError for settings that cannot work.

    before, after: folders that hold the package `stretto`, or a `src` that does.
    """

    before: Annotated[Path, Option("A checkout of Stretto, or its src.")]
    after: Annotated[Path, Option("Another one (default: where this command is from).")] = field(
        default_factory=lambda: Path(stretto.__file__).parents[1]
    )
    ranks: Annotated[int, Option("Processes; all share one GPU.")] = 4
    steps: Annotated[int, Option("Timed steps of each start.")] = 20
    turns: Annotated[int, Option("Starts of each checkout.")] = 2
    seconds: Annotated[float, Option("Time limit of each start.")] = 150.0
    on_cpu: Annotated[bool, Option("A small model on the CPU, to try the command: no trace.", "--cpu")] = False

    def __post_init__(self) -> None:
        require_least(2, ranks=self.ranks)
        require_least(1, steps=self.steps, turns=self.turns, seconds=self.seconds)
        for name, path in (("before", self.before), ("after", self.after)):
            find_source(name, path)
