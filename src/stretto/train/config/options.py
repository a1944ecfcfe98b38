"""What a training run is, as one typed value: read from TOML, checked, and written back as it was resolved.

Sections and names are those of the file: `grid.x` is `TrainConfig.grid.x`. Nothing here imports torch, so that
a mistake in a file is reported at once. What needs data, model or machine is checked by `train.preflight`.
"""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from stretto.planner.grids import divisors

if TYPE_CHECKING:
    from stretto.models import GPTConfig

MAX_RANKS = 1 << 20  # bounds the search for a grid to suggest
MAX_TIMEOUT = 30 * 24 * 3600  # seconds, as stretto.memory.groups allows
MAX_STEPS = 1 << 53  # numbers beyond it are not whole in floating point
# Of a model. Far above any that was ever trained, and low enough that to check a configuration takes seconds.
MAX_LAYERS = 1 << 12
MAX_WIDTH = 1 << 20
MAX_VOCAB = MAX_LENGTH = 1 << 24
PRESETS = "the preset's"


def option(default: Any, description: str, *, unit: str = "", unset: str = "none", **rules: Any) -> Any:
    """A field with what docs/configuration.md shows: its meaning, its unit, and what a default of None stands for.

    `...` as default makes it required.
    """
    return Field(default, description=description, json_schema_extra={"unit": unit, "unset": unset}, **rules)


def _none_from_text(value: Any) -> Any:
    """TOML has no null: the text "none" stands for it in options that can be switched off."""
    return None if value == "none" else value


CanBeNone = BeforeValidator(_none_from_text)


def _folder_of_text(value: Any) -> Any:
    """`~` is the home folder, as in a shell. The name goes to files in UTF-8."""
    if isinstance(value, str | Path):
        try:
            str(value).encode()
        except UnicodeEncodeError:
            raise ValueError(f"out is {str(value)!r}, but must be text in UTF-8; rename the folder") from None
        path = Path(os.path.expanduser(value))
        # What is left of "./~" would become the home folder when the configuration is read again.
        return str(path.absolute() if str(path).startswith("~") else path)
    return value


def _ranks_of_grid(value: Any, info: ValidationInfo) -> Any:
    """Without `ranks`, the grid says how many there are. An invalid grid is reported by its own rules."""
    if value is None or value == "none":
        return info.data["grid"].ranks if "grid" in info.data else 1
    return value


class Section(BaseModel):
    """A table of the file: unknown options, values of another type, infinities and NaN are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class GridConfig(Section):
    """How the ranks are laid out; their number is the product."""

    data: int = option(1, "copies of the model, each on its part of the batch", unit="ranks", ge=1, le=MAX_RANKS)
    x: int = option(
        1, "cuts linears' outputs (every second one's inputs), heads and vocabulary; innermost", unit="ranks",
        ge=1, le=MAX_RANKS,
    )  # fmt: skip
    y: int = option(
        1, "cuts linears' inputs (every second one's outputs) and the hidden size", unit="ranks", ge=1, le=MAX_RANKS
    )
    z: int = option(
        1, "cuts each weight that is left, to be gathered before use; cuts the batch too", unit="ranks",
        ge=1, le=MAX_RANKS,
    )  # fmt: skip

    @property
    def ranks(self) -> int:
        return self.data * self.x * self.y * self.z

    @property
    def batch_parts(self) -> int:
        """How many parts the global batch is cut into: data and z both split it."""
        return self.data * self.z

    def __str__(self) -> str:
        return " ".join(f"{axis}={size}" for axis, size in self.sizes().items())

    def sizes(self) -> dict[str, int]:
        """The axes' sizes by name, as `stretto.parallel.validate` takes them."""
        return {"data": self.data, "x": self.x, "y": self.y, "z": self.z}


class OverlapConfig(Section):
    """Which collectives hide under computation. Switching one off changes no result."""

    all_reduce: bool = option(True, "sum input gradients over x and y under the weight gradient's product (OAR)")
    reduce_scatter: bool = option(True, "scatter weight gradients over z under the rest of the backward pass (ORS)")
    all_gather: bool = option(True, "gather the next weight over z under this one's product (OAG)")
    copy_engines: bool = option(
        True, "on GPUs that NVLink links, copy engines gather all weights from the forward pass's beginning on"
    )
    data: bool = option(True, "sum buckets of gradients over data under the backward pass, not after it")


class ModelConfig(Section):
    """The GPT to train: a preset's name, its numbers, or a preset with some of them replaced."""

    name: Annotated[str | None, CanBeNone] = option(
        None, "a preset: gpt2-small, gpt-5b, gpt-10b, gpt-20b, gpt-40b, gpt-60b, gpt-80b, gpt-160b, gpt-320b, gpt-640b"
    )
    layers: Annotated[int | None, CanBeNone] = option(None, "transformer blocks", unset=PRESETS, ge=1, le=MAX_LAYERS)
    hidden: Annotated[int | None, CanBeNone] = option(
        None, "width of a token's vector", unset=PRESETS, ge=1, le=MAX_WIDTH
    )
    heads: Annotated[int | None, CanBeNone] = option(None, "attention heads", unset=PRESETS, ge=1, le=MAX_WIDTH)
    kv_heads: Annotated[int | None, CanBeNone] = option(
        None, "heads of keys and values: fewer than `heads` is grouped-query attention", unset="`model.heads`",
        ge=1, le=MAX_WIDTH,
    )  # fmt: skip
    ffn: Annotated[int | None, CanBeNone] = option(
        None, "inner width of the MLP", unset="4 x `model.hidden`", ge=1, le=4 * MAX_WIDTH
    )
    vocab: Annotated[int | None, CanBeNone] = option(
        None, "vocabulary", unit="tokens", unset="the preset's, else the data's", ge=1, le=MAX_VOCAB
    )
    max_seq_len: Annotated[int | None, CanBeNone] = option(
        None, "longest sequence", unit="tokens", unset="the preset's, else `train.seq_len`", ge=1, le=MAX_LENGTH
    )
    positions: Annotated[Literal["learned", "rotary"] | None, CanBeNone] = option(
        None, "kind of positions", unset="`learned`"
    )
    activation: Annotated[Literal["gelu", "swiglu"] | None, CanBeNone] = option(
        None, "the MLP's activation", unset="`gelu`"
    )
    norm: Annotated[Literal["layernorm", "rmsnorm"] | None, CanBeNone] = option(
        None, "kind of norm", unset="`layernorm`"
    )
    bias: Annotated[bool | None, CanBeNone] = option(None, "whether linears and norms have biases", unset="`true`")
    tie_embeddings: Annotated[bool | None, CanBeNone] = option(
        None, "whether the output layer shares the embedding's weights", unset="`true`"
    )
    dropout: Annotated[float | None, CanBeNone] = option(
        None, "part of activations set to zero", unset="`0`", ge=0, lt=1
    )

    def to_gpt(self, *, data_vocab: int, seq_len: int) -> "GPTConfig":
        """The model's shape; the data's vocabulary and `seq_len` fill in where neither file nor preset says.

        Raises ValueError when the numbers do not fit together.
        """
        from stretto.models import GPTConfig  # torch is imported here and not when a file is read

        given = {name: value for name, value in self if value is not None and name != "name"}
        if self.name is not None:
            return GPTConfig.preset(self.name, **given)
        return GPTConfig(**{"vocab": data_vocab, "max_seq_len": seq_len} | given)

    def known_vocab(self) -> int | None:
        """The vocabulary, where file or preset says it: None leaves it to the data."""
        if self.vocab is not None or self.name is None:
            return self.vocab
        from stretto.models import GPTConfig

        return GPTConfig.preset(self.name).vocab

    @model_validator(mode="after")
    def _has_a_shape(self) -> "ModelConfig":
        missing = [name for name in ("layers", "hidden", "heads") if getattr(self, name) is None]
        if self.name is None and missing:
            raise ValueError(
                f"model.{missing[0]} is missing: give model.layers, model.hidden and model.heads, "
                "or a preset such as model.name='gpt2-small'"
            )
        return self


class DataConfig(Section):
    """What to train on."""

    path: str | list[str] = option(..., "a file, a folder, or several; `python-docs` is the text that Python ships")
    format: Literal["auto", "text", "nanogpt", "megatron"] = option(
        "auto",
        "text, or tokens as nanoGPT (.bin) or Megatron (.bin with .idx) write them; auto looks at the files",
    )
    tokenizer: str = option("bytes", "for text: bytes, or the path of a `tokenizers` tokenizer.json")
    token_dtype: Literal["uint16", "uint32", "int64"] = option("uint16", "for nanogpt: the type of the ids in the file")


class RunOptions(Section):
    """What every kind of model is trained with."""

    steps: int = option(
        ..., "optimizer steps in all, those of a resumed run included", unit="steps", ge=1, le=MAX_STEPS
    )
    batch: int = option(..., "global batch", ge=1, lt=1 << 31)
    seed: int = option(0, "seed of weights and order of the data", ge=0, lt=1 << 63)
    optimizer: Literal["adamw", "sgd"] = option("adamw", "optimizer")
    lr: float = option(3e-4, "learning rate after warm-up", gt=0)
    min_lr: float = option(0.0, "learning rate that the cosine ends at", ge=0)
    warmup_steps: int = option(
        0, "steps over which the learning rate rises linearly to lr", unit="steps", ge=0, le=MAX_STEPS
    )
    weight_decay: float = option(0.1, "decoupled weight decay of matrices; norms and biases have none", ge=0)
    beta1: float = option(0.9, "adamw: decay of the gradient's mean", ge=0, lt=1)
    beta2: float = option(0.95, "adamw: decay of the squared gradient's mean", ge=0, lt=1)
    eps: float = option(1e-8, "adamw: added to the denominator", gt=0)
    momentum: float = option(0.0, "sgd: momentum", ge=0, lt=1)
    checkpoint_every: Annotated[int | None, CanBeNone] = option(
        None, "how often to write a checkpoint, besides when training ends or is stopped", unit="steps", ge=1
    )
    keep_checkpoints: int = option(2, "newest checkpoints to keep", unit="checkpoints", ge=1)
    resume: Annotated[str | None, CanBeNone] = option(
        None, "latest (of the run in `out`), or a run's or checkpoint's folder; the grid may be another"
    )
    log_every: int = option(10, "steps between lines of text where there is no terminal", unit="steps", ge=1)
    timeout: float = option(
        600.0, "time that a rank may be later than the others, to compile or to save, before they give up and the run "
        "ends", unit="seconds", ge=1, le=MAX_TIMEOUT,
    )  # fmt: skip
    trace: bool = option(False, "also write a timeline of two steps: trace.json and timeline.png")
    tensorboard: bool = option(False, "also write TensorBoard events (pip install 'stretto[tensorboard]')")


class RunConfig(RunOptions):
    """How to train."""

    batch: int = option(
        ..., "global batch; data x z (and micro_batch) must divide it", unit="sequences", ge=1, lt=1 << 31
    )
    seq_len: int = option(..., "length of a sequence", unit="tokens", ge=1, le=MAX_LENGTH)
    seed: int = option(0, "seed of weights, order of the data and dropout", ge=0, lt=1 << 63)
    dtype: Literal["fp32", "bf16", "fp64"] = option("fp32", "dtype of the computation; bf16 keeps fp32 master weights")
    micro_batch: Annotated[int | None, CanBeNone] = option(
        None, "what a rank takes at once, accumulating gradients", unit="sequences", unset="its whole part", ge=1
    )
    clip: Annotated[float | None, CanBeNone] = option(1.0, "largest global norm of the gradient, or `none`", gt=0)
    checkpoint_activations: bool = option(False, "recompute each block in the backward pass instead of keeping it")
    keep_gathered: bool = option(
        True, "keep the weights gathered over z for the backward pass, instead of gathering them again"
    )
    tune_matmuls: bool = option(
        False, "time each linear's products in every layout in the first step, and take the fastest from then on"
    )
    shard_sequence: bool = option(
        False, "between blocks, shard tokens over x: all-gathers and reduce-scatters, within products, for all-reduces"
    )
    cuda_graph: bool = option(
        False, "replay each step as one CUDA graph: faster where a step is so short that the host cannot keep up"
    )
    writes_copies: bool = option(
        False, "adamw on GPUs writes bf16 weights beside the fp32 ones, for the next step: 2 bytes more a parameter"
    )


class JobConfig(Section):
    """Where a run is and what it runs on, whatever it trains. Immutable; `model_copy(update=...)` makes another."""

    out: Annotated[Path, BeforeValidator(_folder_of_text), Field(strict=False)] = option(..., "the run's folder")
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "cuda has NCCL between GPUs, cpu has gloo; auto takes cuda where there is a GPU for each rank"
    )

    if TYPE_CHECKING:  # what each kind of run says, as an option or as what follows from them

        @property
        def ranks(self) -> int: ...
        @property
        def grid(self) -> GridConfig: ...
        @property
        def model(self) -> Section: ...
        @property
        def train(self) -> RunOptions: ...
        @property
        def unit(self) -> Literal["tokens", "samples"]: ...
        @property
        def items_a_step(self) -> int: ...


AnyConfig = TypeVar("AnyConfig", bound=JobConfig)


class TrainConfig(JobConfig):
    """A training run of a GPT."""

    grid: GridConfig = GridConfig()
    ranks: Annotated[int, BeforeValidator(_ranks_of_grid)] = option(
        None, "processes; must be the grid's product", unit="ranks", unset="the grid's product",
        ge=1, le=MAX_RANKS, validate_default=True,
    )  # fmt: skip
    cluster: Annotated[str | None, CanBeNone] = option(
        None, "a machine of `stretto cluster list`, or a file of `stretto probe`: predictions stand beside measurements"
    )
    model: ModelConfig
    data: DataConfig
    train: RunConfig
    overlap: OverlapConfig = OverlapConfig()

    @property
    def items_a_step(self) -> int:
        """How much a step trains on, in `unit`s."""
        return self.train.batch * self.train.seq_len

    @property
    def unit(self) -> Literal["tokens", "samples"]:
        """What the model is trained on."""
        return "tokens"

    @model_validator(mode="after")
    def _fits_together(self) -> "TrainConfig":
        if problems := list(_contradictions(self)):
            raise ValueError("\n".join(problems))
        return self


def _contradictions(config: TrainConfig) -> list[str]:
    """A message for each rule between options that does not hold."""
    grid, run, problems = config.grid, config.train, []
    parts = grid.batch_parts
    if grid.ranks != config.ranks:
        problems.append(
            f"ranks is {config.ranks}, but the grid {grid} has {grid.ranks}; "
            f"the grid {nearest_grid(grid, config.ranks)} would do, or ranks={grid.ranks}"
        )
    if run.batch % parts:
        problems.append(
            f"train.batch is {run.batch}, but grid.data x grid.z = {parts} must divide it; "
            f"the nearest batch that would do is {nearest_multiple(run.batch, parts)}"
        )
    elif run.micro_batch is not None and run.batch // parts % run.micro_batch:
        local, wanted = run.batch // parts, run.micro_batch
        problems.append(
            f"train.micro_batch is {wanted}, but must divide a rank's {local} sequences "
            f"(train.batch {run.batch} / (grid.data x grid.z = {parts})); the nearest that would do is "
            f"{min(divisors(local), key=lambda n: abs(n - wanted))}, "
            f"or a train.batch of {nearest_multiple(run.batch, parts * wanted)}"
        )
    else:
        tokens = (run.micro_batch or run.batch // parts) * run.seq_len
        if run.shard_sequence and tokens % grid.x:
            problems.append(
                f"train.shard_sequence is on, but grid.x = {grid.x} must divide a rank's {tokens} tokens at once "
                f"(its micro-batch x train.seq_len); train.seq_len={nearest_multiple(run.seq_len, grid.x)} would do"
            )
    problems += contradictions_of_run(run)
    problems += _contradictions_of_copies(config)
    if run.cuda_graph and run.trace:
        problems.append(
            "train.cuda_graph and train.trace are both on, but a graph's kernels do not say whose they are; "
            "train.cuda_graph=false would do"
        )
    if run.cuda_graph and run.checkpoint_activations:
        problems.append(
            "train.cuda_graph and train.checkpoint_activations are both on, but a block that is run again asks for the "
            "state of random numbers, which a graph does not have; train.cuda_graph=false would do"
        )
    if run.cuda_graph and config.model.dropout:
        problems.append(
            f"train.cuda_graph is on and model.dropout is {config.model.dropout}, but a graph would draw the same "
            "masks in every step; train.cuda_graph=false or model.dropout=0 would do"
        )
    if isinstance(config.data.path, list) and not config.data.path:
        problems.append("data.path is [], but must name at least one file or folder")
    return problems


def _contradictions_of_copies(config: TrainConfig) -> list[str]:
    """A message for each reason why an optimizer would have no copies to write."""
    grid, run = config.grid, config.train
    reasons = {
        f"train.dtype is {run.dtype!r}, in which the weights are kept": run.dtype != "bf16",
        f"train.optimizer is {run.optimizer!r}, and only adamw writes them": run.optimizer != "adamw",
        f"grid.z is {grid.z}, and there are copies only of weights that z does not cut": grid.z > 1,
        "train.keep_gathered is off, so that no weight stays from one pass to another": not run.keep_gathered,
    }
    return [
        f"train.writes_copies is on, but {reason}; train.writes_copies=false would do"
        for reason, is_so in reasons.items()
        if run.writes_copies and is_so
    ]


def contradictions_of_run(run: RunOptions) -> list[str]:
    """A message for each rule between any run's options that does not hold."""
    problems = []
    if run.min_lr > run.lr:
        problems.append(f"train.min_lr is {run.min_lr}, but must be at most train.lr; {run.lr} would do")
    if run.optimizer != "sgd" and run.momentum:
        problems.append(
            f"train.momentum is {run.momentum}, but only sgd has momentum: train.beta1 is {run.optimizer}'s, "
            "or take train.optimizer='sgd'"
        )
    return problems


def nearest_multiple(number: int, divisor: int) -> int:
    """The multiple of `divisor`, at least once, that is closest to `number`."""
    return max(1, round(number / divisor)) * divisor


def nearest_grid(grid: GridConfig, ranks: int) -> GridConfig:
    """The grid of `ranks` that is closest to `grid`: the fewest axes changed, then the smallest ratios."""

    def distance(sizes: tuple[int, int, int, int]) -> tuple[int, float]:
        ratios = [abs(math.log2(new / old)) for new, old in zip(sizes, grid.sizes().values(), strict=True)]
        return sum(ratio > 0 for ratio in ratios), sum(ratios)

    grids = [
        (ranks // (x * y * z), x, y, z)
        for z in divisors(ranks)
        for y in divisors(ranks // z)
        for x in divisors(ranks // (z * y))
    ]
    data, x, y, z = min(grids, key=distance)
    return GridConfig(data=data, x=x, y=y, z=z)
