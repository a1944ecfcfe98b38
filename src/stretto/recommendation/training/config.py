# SPDX-License-Identifier: Apache-2.0
"""The configuration of a DLRM's training run (`model.kind = "dlrm"`), and its rules. Imports no torch."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from stretto.quantities import MAX_WIDTH
from stretto.suggestions import are_missing
from stretto.train.config.options import (
    MAX_RANKS,
    GridConfig,
    JobConfig,
    RunOptions,
    Section,
    broken,
    contradictions_of_run,
    nearest_multiple,
    option,
)

if TYPE_CHECKING:
    from stretto.recommendation import DLRMConfig, TableSize

MAX_ROWS = 1 << 40
MAX_TABLES = 1 << 14
PRESETS = "the preset's"

_Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]
_Rows = Annotated[int, Field(ge=1, le=MAX_ROWS)]


class DLRMModelConfig(Section):
    """The DLRM to train: a preset, a shape given by its numbers, or a preset with some numbers replaced."""

    kind: Literal["dlrm"] = option(..., "the kind of model; a file without it trains a GPT")
    name: str | None = option(None, "a preset: small, kaggle, mlperf-v2, paper")
    rows: list[_Rows] | None = option(None, "rows of each embedding table", unset=PRESETS, max_length=MAX_TABLES)
    max_rows: int | None = option(
        None, "limit on the rows of a table; the categories of longer tables then collide", ge=1, le=MAX_ROWS
    )
    pooling: list[_Width] | None = option(
        None, "mean rows that a sample looks up in each table; one number holds for all tables",
        unset="the preset's, else 1", max_length=MAX_TABLES,
    )  # fmt: skip
    dim: int | None = option(None, "embedding dimension of every table", unset=PRESETS, ge=1, le=MAX_WIDTH)
    bottom: list[_Width] | None = option(
        None, "layer widths of the bottom MLP, which reads the dense features; the last is `model.dim`", unset=PRESETS
    )
    top: list[_Width] | None = option(
        None, "layer widths of the top MLP, after the interaction; the last is 1", unset=PRESETS
    )
    dense: int | None = option(None, "dense features of a sample", unset="the preset's, else 13", ge=1, le=MAX_WIDTH)

    def to_dlrm(self) -> "DLRMConfig":
        """Build the model's shape. Raises ValueError when the numbers do not fit together."""
        from stretto.recommendation import DLRMConfig

        given = {key: value for key, value in self if value is not None and key not in ("kind", "name", "max_rows")}
        given = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
        if self.name is not None and "rows" in given and "pooling" not in given:
            given["pooling"] = (1,)  # the preset's is for its own tables
        config = DLRMConfig(**given) if self.name is None else DLRMConfig.preset(self.name, **given)
        return config if self.max_rows is None else config.capped(self.max_rows)

    @model_validator(mode="after")
    def _has_a_shape(self) -> "DLRMModelConfig":
        missing = [f"model.{name}" for name in ("rows", "dim", "bottom", "top") if getattr(self, name) is None]
        if self.name is None and missing:
            raise ValueError(
                f"{are_missing(missing)}: give model.rows, model.dim, model.bottom and model.top, "
                "or a preset such as model.name='small'"
            )
        self.to_dlrm()
        return self


class DLRMDataConfig(Section):
    """The data to train on."""

    format: Literal["criteo", "synthetic"] = option(
        ..., "`criteo`: lines of text, gzipped or not; `synthetic`: generated samples that have a signal to learn"
    )
    path: str | list[str] | None = option(
        None, "criteo: a file or folder, or a list of them", unset="required for criteo"
    )
    evaluation_path: str | list[str] | None = option(
        None, "criteo: files to evaluate on", unset="the last samples of `data.path`"
    )
    samples: int = option(1 << 20, "synthetic: size of the training set", unit="samples", ge=1, lt=1 << 62)
    evaluation_samples: int = option(
        1 << 14, "size of the evaluation set, which is not trained on; 0 for none", unit="samples", ge=0, lt=1 << 40
    )
    jagged: bool = option(False, "synthetic: bag sizes from 0 to twice the pooling instead of exactly the pooling")
    seed: int = option(0, "synthetic: seed of the samples", ge=0, lt=1 << 63)


class DLRMRunConfig(RunOptions):
    """The training. `optimizer`, `lr` and the options that belong to them are the MLPs'; the tables have their own."""

    batch: int = option(..., "global batch size; must be a multiple of the ranks", unit="samples", ge=1, lt=1 << 31)
    dtype: Literal["fp32", "fp64"] = option("fp32", "dtype of weights and computation")
    weight_decay: float = option(0.0, "decoupled weight decay of the MLPs' matrices; biases and tables have none", ge=0)
    beta2: float = option(0.999, "adamw: decay of the running mean of squared gradients", ge=0, lt=1)
    table_optimizer: Literal["rowwise-adagrad", "sgd", "full-adagrad", "adam"] = option(
        "rowwise-adagrad", "the tables' optimizer"
    )
    table_lr: float = option(0.02, "the tables' learning rate after warm-up; it follows the MLPs' schedule", gt=0)
    table_eps: float = option(1e-8, "all but sgd: added to the denominator", gt=0)
    table_weight_decay: float = option(0.0, "decay of rows that are looked up, added to their gradients", ge=0)
    table_clip: float | None = option(None, "largest norm of the gradient of a table's row", unset="no limit", gt=0)
    sharding: Literal["table", "auto"] = option(
        "table",
        "placement of tables: `table` keeps each whole on a rank, `auto` also cuts and replicates them for balance",
    )
    implementation: Literal["auto", "kernel", "library"] = option(
        "auto", "look-up and exchange: `kernel` is fused, `library` is PyTorch, `auto` is the kernel where it can run"
    )
    cuda_graph: bool = option(
        False, "replay each step as one CUDA graph, once its indices are exchanged; for bags of fixed sizes"
    )


class DLRMTrainConfig(JobConfig):
    """A training run of a DLRM: tables are distributed over the ranks, MLPs are replicated."""

    kind = "dlrm"
    reference = """\
# A DLRM's options

With `model.kind = "dlrm"`, a file describes the training of a recommendation model ([dlrm.md](dlrm.md)). It has no
`[grid]` and no `[overlap]`. `out` and `device` are the same as above, and so are these options of `[train]`:
"""
    ranks: int = option(
        1, "number of processes; each has some of the tables and a part of the batch", ge=1, le=MAX_RANKS
    )
    model: DLRMModelConfig
    data: DLRMDataConfig
    train: DLRMRunConfig

    @property
    def grid(self) -> GridConfig:
        """The grid: every rank has a part of the batch."""
        return GridConfig(data=self.ranks)

    def grid_options(self, grid: GridConfig) -> dict[str, Any]:
        """The options of the grid, as `JobConfig.grid_options`."""
        if grid != GridConfig(data=grid.ranks):
            raise ValueError(f"a DLRM has only the axis data; data={grid.ranks} would do")
        return {"ranks": grid.ranks}

    @property
    def items_a_step(self) -> int:
        """Samples in a step's global batch."""
        return self.train.batch

    @property
    def unit(self) -> Literal["tokens", "samples"]:
        """Unit that rates and progress count."""
        return "samples"

    @model_validator(mode="after")
    def _fits_together(self) -> "DLRMTrainConfig":
        if problems := list(_contradictions(self)):
            raise ValueError("\n".join(problems))
        return self


def _contradictions(config: DLRMTrainConfig) -> Iterator[str]:
    """Check the rules between options. Yields a message for each rule that is broken."""
    run, data = config.train, config.data
    yield from contradictions_of_run(run)
    if run.batch % config.ranks:
        yield (
            f"train.batch is {run.batch}, but ranks = {config.ranks} must divide it; "
            f"the nearest batch that would do is {nearest_multiple(run.batch, config.ranks)}"
        )
    if run.on_nonfinite == "skip":
        yield (
            "train.on_nonfinite is 'skip', but a DLRM's tables are updated in the backward pass, before it is known "
            "that a step is to be skipped; train.on_nonfinite='stop' would do"
        )
    reasons = {
        "data.jagged is true, so that steps differ in size; data.jagged=false": data.jagged,
        "train.sharding is 'auto', which may cut tables by rows; train.sharding='table'": run.sharding == "auto",
        "PyTorch's functions wait for the GPU; train.implementation='kernel'": run.implementation == "library",
    }
    for reason in broken(reasons) if run.cuda_graph else ():
        yield f"train.cuda_graph is on, but {reason} or train.cuda_graph=false would do"
    if data.format == "criteo" and not data.path:
        yield "data.path is missing: name Criteo's files, or take data.format='synthetic'"
    for name in ("path", "evaluation_path"):
        if data.format == "synthetic" and getattr(data, name) is not None:
            yield f"data.{name} is {getattr(data, name)!r}, but synthetic samples are not read from files"
    if data.format == "criteo" and data.jagged:
        yield "data.jagged is true, but only synthetic samples can be jagged; data.jagged=false would do"


def sizes_of(model: "DLRMConfig") -> "tuple[TableSize, ...]":
    """The sizes of a model's tables."""
    from stretto.recommendation import TableSize

    return tuple(TableSize(rows, model.dim, pooling) for rows, pooling in zip(model.rows, model.pooling, strict=True))


def table_options(run: DLRMRunConfig) -> dict[str, Any]:
    """The options of a run that `plan_tables` takes."""
    return {
        "batch": run.batch,
        "itemsize": 4 if run.dtype == "fp32" else 8,
        "optimizer": run.table_optimizer,
        "clips": run.table_clip is not None,
    }


def describe(config: DLRMTrainConfig) -> dict[str, Any]:
    """The model's options as a checkpoint stores them."""
    return {"kind": config.model.kind} | {
        key: list(value) if isinstance(value, tuple) else value for key, value in asdict(config.model.to_dlrm()).items()
    }
