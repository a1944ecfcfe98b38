# SPDX-License-Identifier: Apache-2.0
"""Options that every kind of training run has, as typed sections; the kinds' configurations add a model's own.

Sections and names are those of the TOML file: `train.lr` is `JobConfig.train.lr`. Nothing here imports torch, so a
mistake in a file is reported immediately. `train.preflight` runs the checks that need the data, the model or the
machine.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
)

from stretto.axes import (
    AXES,
    CONTEXT_WEIGHTS_DESCRIPTION,
    EXPERT,
    EXPERT_DESCRIPTION,
    EXPERT_TENSOR_DESCRIPTION,
    NAMES,
    ContextWeights,
    ExpertTensor,
    GridSizes,
    shown_sizes,
)
from stretto.execution import option_metadata

MAX_RANKS = 1 << 20  # bounds the search for a grid to suggest
MAX_TIMEOUT = 30 * 24 * 3600  # seconds, as stretto.memory.groups allows
MAX_STEPS = 1 << 53  # larger whole numbers are not exact in floating point
MAX_GRIDS = 64
MAX_RESTARTS = 1 << 20
PRESETS = "the preset's"
Schedule = Literal["cosine", "linear", "wsd", "constant"]


def option(default: Any, description: str, *, unit: str = "", unset: str = "none", **rules: Any) -> Any:
    """Declare an option: a pydantic field with the texts that docs/configuration.md shows.

    default: `...` makes the option required. unset: the words for a default of None. rules: pydantic's bounds.
    """
    return Field(default, description=description, json_schema_extra={"unit": unit, "unset": unset}, **rules)


def execution_option(name: str, **rules: Any) -> Any:
    """Declare an option that is a field of ExecutionOptions, with its default and texts."""
    described = option_metadata(name)
    texts = {key: described[key] for key in ("unit", "unset") if key in described}
    return option(described["default"], described["help"], **texts, **rules)


CanBeSwitch = BeforeValidator(
    lambda value: {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value
)
"""Validates an option that takes words beside booleans: the texts "true" and "false" are booleans."""


def _folder_of_text(value: Any) -> Any:
    """Expand `~` to the home folder, as a shell does, and refuse names that UTF-8 files cannot hold."""
    if isinstance(value, str | Path):
        try:
            str(value).encode()
        except UnicodeEncodeError:
            raise ValueError(f"out is {str(value)!r}, but must be text in UTF-8; rename the folder") from None
        if value == "":  # such as a shell's variable without a value; the path would be "."
            raise ValueError("out is '', but must name a folder, for example 'runs/first'")
        path = Path(os.path.expanduser(value))
        # "./~" leaves "~", which would become the home folder when the configuration is read again.
        return str(path.absolute() if str(path).startswith("~") else path)
    return value


class Section(BaseModel):
    """A table of the file. Unknown options, values of another type, infinities and NaN are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _read_none(cls, value: Any, info: ValidationInfo) -> Any:
        """Take the text "none" for None, which TOML lacks, where an option may be None and the word is no choice."""
        kinds = get_args(cls.model_fields[str(info.field_name)].annotation)
        is_off = value == "none" and NoneType in kinds and not any("none" in get_args(kind) for kind in kinds)
        return None if is_off else value


class _GridSection(Section):
    """The sizes of the grid's axes. The number of ranks is the product of all sizes except for expert."""

    @property
    def ranks(self) -> int:
        return GridSizes(**self.sizes()).ranks

    @property
    def batch_parts(self) -> int:
        """The number of shards of the global batch: data and z both split it."""
        return GridSizes(**self.sizes()).batch_parts

    def __str__(self) -> str:
        return " ".join(f"{axis}={size}" for axis, size in shown_sizes(self.sizes()).items())

    def sizes(self) -> dict[str, Any]:
        """The sizes by axis, as `Grid` and `stretto.parallel.validate` take them (`GridSizes.sizes`)."""
        return GridSizes(**self.model_dump()).sizes()


if TYPE_CHECKING:

    class GridConfig(_GridSection):
        pipe: int = 1
        data: int = 1
        context: int = 1
        x: int = 1
        y: int = 1
        z: int = 1
        expert: int = 1
        expert_tensor: ExpertTensor = "cut"
        context_weights: ContextWeights = "copy"

else:
    _DESCRIPTIONS = {axis.name: axis.description for axis in AXES} | {EXPERT: EXPERT_DESCRIPTION}
    GridConfig = create_model(
        "GridConfig",
        __base__=_GridSection,
        __doc__=_GridSection.__doc__,
        __module__=__name__,
        **{axis: (int, option(1, _DESCRIPTIONS[axis], unit="ranks", ge=1, le=MAX_RANKS)) for axis in (*NAMES, EXPERT)},
        expert_tensor=(ExpertTensor, option("cut", EXPERT_TENSOR_DESCRIPTION)),
        context_weights=(ContextWeights, option("copy", CONTEXT_WEIGHTS_DESCRIPTION)),
    )


def grid_from_text(text: str) -> GridConfig:
    """Read a grid as it is written in `train.grids`: "data=2 x=2". Raises ValueError."""
    sizes: dict[str, Any] = {}
    for part in text.replace(",", " ").split():
        axis, separator, size = part.partition("=")
        if not separator or axis in sizes:
            raise ValueError(f"train.grids has {text!r}, but a grid is written as 'data=2 x=2'")
        sizes[axis] = int(size) if size.isdecimal() else size
    return _grid_of(sizes)


def _grid_of(sizes: Mapping[str, Any]) -> GridConfig:
    if not sizes:
        raise ValueError("train.grids has an empty grid, but a grid is written as 'data=2 x=2'")
    try:
        return GridConfig(**sizes)
    except ValidationError as error:
        detail = error.errors()[0]
        axis, value = ".".join(map(str, detail["loc"])), detail["input"]
        rule = "is no axis" if detail["type"] == "extra_forbidden" else f"is {value!r}: {detail['msg']}"
        shown = " ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"train.grids has the grid {shown!r}, where {axis} {rule}; 'data=2 x=2' would do") from None


def _grids_from_any(value: Any) -> Any:
    """Read tables and texts as texts of one form, "data=2 x=2", which TOML, JSON and `--set` hold alike."""
    if value is None or value in ("none", "auto"):
        return None if value == "none" else value
    items = value if isinstance(value, list) else [value]
    if len(items) > MAX_GRIDS:
        raise ValueError(f"train.grids has {len(items)} grids, but may have at most {MAX_GRIDS}")
    grids = []
    for item in items:
        match item:
            case str():
                grids.append(grid_from_text(item))
            case Mapping():
                grids.append(_grid_of(item))
            case _:
                raise ValueError(
                    f"train.grids has {item!r}, but must be 'auto' or a list of grids such as {{data = 2, x = 2}} or "
                    "'data=2 x=2'"
                )
    return [str(grid) for grid in grids]


Grids = Annotated[Literal["auto"] | list[str] | None, BeforeValidator(_grids_from_any)]


class RunOptions(Section):
    """The options of `[train]` that every kind of model has."""

    steps: int = option(
        ..., "total optimizer steps, including those before a checkpoint that the run resumes", unit="steps", ge=1,
        le=MAX_STEPS,
    )  # fmt: skip
    batch: int = option(..., "global batch size", ge=1, lt=1 << 31)
    seed: int = option(0, "seed of the initial weights and of the data's order", ge=0, lt=1 << 63)
    optimizer: Literal["adamw", "muon", "sgd"] = option(
        "adamw", "optimizer; `muon` orthogonalizes the momentum of hidden matrices, with AdamW's learning rates, and "
        "updates all else by `adamw`",
    )  # fmt: skip
    lr: float = option(3e-4, "learning rate after warm-up", gt=0)
    schedule: Schedule = option(
        "cosine", "learning rate after warm-up: `cosine` and `linear` decay it until training ends, `wsd` (warm-up, "
        "stable, decay) over the last `train.decay_steps`, `constant` keeps it",
    )  # fmt: skip
    min_lr: float = option(0.0, "learning rate at the end of the decay", ge=0)
    decay_steps: int | None = option(
        None, "wsd: steps over which the learning rate decays linearly; `none` for a tenth of `train.steps`",
        unit="steps", ge=1, le=MAX_STEPS,
    )  # fmt: skip
    warmup_steps: int = option(
        0, "steps over which the learning rate rises linearly to `train.lr`", unit="steps", ge=0, le=MAX_STEPS
    )
    weight_decay: float = option(0.1, "decoupled weight decay of matrices; norms and biases have none", ge=0)
    beta1: float = option(0.9, "adamw: decay of the running mean of gradients", ge=0, lt=1)
    beta2: float = option(0.95, "adamw: decay of the running mean of squared gradients", ge=0, lt=1)
    eps: float = option(1e-8, "adamw: added to the denominator", gt=0)
    momentum: float = option(0.0, "sgd, muon: momentum; for muon 0 stands for 0.95", ge=0, lt=1)
    checkpoint_every: int | None = option(
        None, "how often to write a checkpoint; one is also written when training ends or is stopped", unit="steps",
        ge=1,
    )  # fmt: skip
    async_save: Annotated[Literal["auto"] | bool, CanBeSwitch] = option(
        "auto", "write checkpoints asynchronously, from a copy in host memory: `auto` if there is enough memory; with "
        "`false` training waits",
    )  # fmt: skip
    keep_checkpoints: int = option(2, "how many of the newest checkpoints to keep", unit="checkpoints", ge=1)
    keep_every: int | None = option(
        None, "also keep permanently the checkpoints whose step is a multiple of this; must be a multiple of "
        "`train.checkpoint_every`", unit="steps", ge=1,
    )  # fmt: skip
    keep_best: int = option(
        0, "also keep this many checkpoints with the lowest loss on held-out data; needs an evaluation at each "
        "checkpoint", unit="checkpoints", ge=0,
    )  # fmt: skip
    evaluate_every: int | None = option(
        None, "how often to evaluate on held-out data; the run is also evaluated after its last step", unit="steps",
        ge=1,
    )  # fmt: skip
    resume: str | None = option(
        None, "checkpoint to continue from: `latest` of the run in `out`, or the folder of a run or a checkpoint, also "
        "of one that torch.distributed.checkpoint has written elsewhere; the grid may differ",
    )  # fmt: skip
    log_every: int = option(10, "steps between log lines where the output is not a terminal", unit="steps", ge=1)
    timeout: float = option(
        600.0, "the run ends with an error that names the rank if a rank makes no progress for this long while others "
        "wait for it; also the timeout of all process groups", unit="seconds", ge=1,
        le=MAX_TIMEOUT,
    )  # fmt: skip
    on_nonfinite: Literal["stop", "skip"] = option(
        "stop", "what happens if a step's loss or gradient norm is not finite: `stop` ends the run; `skip` skips the "
        "update on all ranks and continues. Both save the step's batch",
    )  # fmt: skip
    verify_steps: int | None = option(
        None, "how often ranks compare a hash of replicated weights, to detect silent data corruption "
        "([when ranks fail](when-ranks-fail.md#replicated-weights)); also before each checkpoint",
        unit="steps", ge=1,
    )  # fmt: skip
    max_restarts: int = option(
        0, "most consecutive restarts from the newest checkpoint after a rank has failed, without a new checkpoint in "
        "between ([when ranks fail](when-ranks-fail.md#restarts))", unit="restarts", ge=0, le=MAX_RESTARTS,
    )  # fmt: skip
    grids: Grids = option(
        None, "grids for restarts on fewer ranks: a list of tables, `[{data = 2, x = 2}, {x = 2}]`, or of texts, "
        '`["data=2 x=2", "x=2"]`; `auto` uses the grid that the planner predicts to be the fastest',
    )  # fmt: skip
    retry_after: float = option(
        600.0, "how long a restarted run trains on a smaller grid before it tries all ranks again; twice as long each "
        "time that the same rank fails again", unit="seconds", ge=0, le=MAX_TIMEOUT,
    )  # fmt: skip
    preflight: bool = option(
        False, "before training, measure all ranks' GPUs, links, files and clocks, and warn of what is slow or "
        "different ([launching.md](launching.md#preflight)); writes preflight.json",
    )  # fmt: skip
    trace: bool = option(False, "also write a timeline of two steps: trace.json and timeline.png")
    tensorboard: bool = option(False, "also write TensorBoard events (pip install 'stretto[tensorboard]')")
    wandb: str | None = option(
        None, "also log to this project of Weights & Biases (pip install 'stretto[wandb]'); WANDB_MODE=offline writes "
        "only to the run's folder",
    )  # fmt: skip

    if TYPE_CHECKING:  # each kind of run has it, with other choices

        @property
        def dtype(self) -> str: ...

    @property
    def skips_nonfinite(self) -> bool:
        """True if a step whose loss or gradient norm is not finite leaves weights and optimizer state as they are.

        With `verify_steps` also in a run that ends with it: an update by NaN would destroy the weights that the ranks
        compare.
        """
        return self.on_nonfinite == "skip" or self.verify_steps is not None


class JobConfig(Section):
    """Options of every run, whatever it trains: its folder and its device. Immutable; change it by `model_copy`."""

    kind: ClassVar[str]  # of model, in `stretto.train.kinds`
    reference: ClassVar[str]  # the head of its options in docs/configuration.md, where they come after a GPT's
    out: Annotated[Path, BeforeValidator(_folder_of_text), Field(strict=False)] = option(..., "the run's folder")
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "`cuda` communicates by NCCL, `cpu` by gloo; `auto` uses cuda if there is a GPU for each rank"
    )

    if TYPE_CHECKING:  # each kind of run has these, as an option or as a property

        @property
        def ranks(self) -> int: ...
        @property
        def grid(self) -> GridConfig: ...
        @property
        def model(self) -> Section: ...
        @property
        def data(self) -> Section: ...
        @property
        def train(self) -> RunOptions: ...
        @property
        def unit(self) -> Literal["tokens", "samples"]: ...
        @property
        def items_a_step(self) -> int: ...

    def items_until(self, step: int) -> int:
        """Tokens or samples of the steps up to this one; the first is 1."""
        return step * self.items_a_step

    def grid_options(self, grid: GridConfig) -> dict[str, Any]:
        """The options that put this run on another grid. Raises ValueError for axes that its kind does not have."""
        return {"grid": grid.model_dump(), "ranks": grid.ranks}


AnyConfig = TypeVar("AnyConfig", bound=JobConfig)


def broken(rules: Mapping[str, object]) -> Iterator[str]:
    """The messages of broken rules: each with whether it is."""
    return (message for message, is_broken in rules.items() if is_broken)


def contradictions_of_run(run: RunOptions) -> Iterator[str]:
    """Check the rules between the options of RunOptions. Yields a message for each rule that is broken."""
    if run.min_lr > run.lr:
        yield f"train.min_lr is {run.min_lr}, but must be at most train.lr; {run.lr} would do"
    if run.schedule == "constant" and run.min_lr:
        yield (
            f"train.min_lr is {run.min_lr}, but train.schedule='constant' never decays to it: leave it at 0, or take "
            "train.schedule='cosine', 'linear' or 'wsd'"
        )
    if run.decay_steps is not None:
        room = run.steps - run.warmup_steps
        if run.schedule != "wsd":
            yield (
                f"train.decay_steps is {run.decay_steps}, but only train.schedule='wsd' takes it, "
                f"and train.schedule is {run.schedule!r}"
            )
        elif run.decay_steps > room:
            yield (
                f"train.decay_steps is {run.decay_steps}, but {max(room, 0)} steps are left after warm-up"
                + (f"; {room} would do" if room > 0 else "")
            )
    yield from _contradictions_of_retention(run)
    if run.optimizer == "adamw" and run.momentum:
        yield (
            f"train.momentum is {run.momentum}, but adamw has no momentum: train.beta1 is adamw's, "
            "or take train.optimizer='sgd'"
        )


def _contradictions_of_retention(run: RunOptions) -> Iterator[str]:
    """Rules between the options that say which checkpoints are written and kept."""
    every, evaluated = run.checkpoint_every, run.evaluate_every
    if run.keep_every is not None and (every is None or run.keep_every % every):
        would_do = (
            "set train.checkpoint_every" if every is None else f"{nearest_multiple(run.keep_every, every)} would do"
        )
        yield (
            f"train.keep_every is {run.keep_every}, but must be a multiple of train.checkpoint_every, which is "
            f"{'none' if every is None else every}; {would_do}"
        )
    if run.keep_best and (every is None or evaluated is None or every % evaluated):
        would_do = "set both" if every is None else f"train.evaluate_every={every} would do"
        yield (
            f"train.keep_best is {run.keep_best}, but checkpoints are compared by evaluations: train.checkpoint_every "
            f"({'none' if every is None else every}) must be a multiple of train.evaluate_every "
            f"({'none' if evaluated is None else evaluated}); {would_do}"
        )


def nearest_multiple(number: int, divisor: int) -> int:
    """The positive multiple of `divisor` that is closest to `number`."""
    return max(1, round(number / divisor)) * divisor
