# SPDX-License-Identifier: Apache-2.0
"""The configuration of a GPT's training run, and the rules between its options. Imports no torch."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ValidationInfo, model_validator

from stretto.axes import OUTER_TO_INNER, GridSizes
from stretto.execution import ExecutionOptions, Overlap, Recomputation, StateOptions
from stretto.planner.grids import divisors, every_grid
from stretto.suggestions import are_missing
from stretto.train.config.options import (
    MAX_LAYERS,
    MAX_LENGTH,
    MAX_RANKS,
    MAX_VOCAB,
    MAX_WIDTH,
    PRESETS,
    CanBeNone,
    GridConfig,
    JobConfig,
    RunOptions,
    Section,
    contradictions_of_run,
    nearest_multiple,
    option,
)

if TYPE_CHECKING:
    from stretto.models import GPTConfig


class ModelConfig(Section):
    """The model to train: a GPT, by a preset, by its numbers, or by both; or the folder of a Hugging Face model."""

    path: Annotated[str | None, CanBeNone] = option(
        None, "a Hugging Face folder in place of a GPT's shape: config.json, weights (safetensors), tokenizer; of the "
        "options below it takes only `model.dropout = 0`",
    )  # fmt: skip
    name: Annotated[str | None, CanBeNone] = option(
        None, "a preset: gpt2-small, gpt-5b, gpt-10b, gpt-20b, gpt-40b, gpt-60b, gpt-80b, gpt-160b, gpt-320b, gpt-640b"
    )
    layers: Annotated[int | None, CanBeNone] = option(None, "transformer blocks", unset=PRESETS, ge=1, le=MAX_LAYERS)
    hidden: Annotated[int | None, CanBeNone] = option(
        None, "width of a token's vector", unset=PRESETS, ge=1, le=MAX_WIDTH
    )
    heads: Annotated[int | None, CanBeNone] = option(None, "attention heads", unset=PRESETS, ge=1, le=MAX_WIDTH)
    kv_heads: Annotated[int | None, CanBeNone] = option(
        None, "heads of keys and values; fewer than `model.heads` is grouped-query attention", unset="`model.heads`",
        ge=1, le=MAX_WIDTH,
    )  # fmt: skip
    ffn: Annotated[int | None, CanBeNone] = option(
        None, "inner width of the MLP", unset="4 x `model.hidden`", ge=1, le=4 * MAX_WIDTH
    )
    vocab: Annotated[int | None, CanBeNone] = option(
        None, "vocabulary size", unit="tokens", unset="the preset's, else the data's", ge=1, le=MAX_VOCAB
    )
    max_seq_len: Annotated[int | None, CanBeNone] = option(
        None, "longest sequence", unit="tokens", unset="the preset's, else `train.seq_len`", ge=1, le=MAX_LENGTH
    )
    positions: Annotated[Literal["learned", "rotary"] | None, CanBeNone] = option(
        None, "position embedding", unset="`learned`"
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
        None, "dropout probability", unset="`0`, or what the folder of `model.path` says", ge=0, lt=1
    )

    def to_gpt(self, *, data_vocab: int, seq_len: int) -> "GPTConfig":
        """Build the model's shape. `data_vocab` and `seq_len` apply where neither the file nor the preset says.

        Raises ValueError when the numbers do not fit together.
        """
        from stretto.models import GPTConfig  # torch is imported here and not when a file is read

        given = self._shape()
        if self.name is not None:
            return GPTConfig.preset(self.name, **given)
        return GPTConfig(**{"vocab": data_vocab, "max_seq_len": seq_len} | given)

    def known_vocab(self) -> int | None:
        """The vocabulary size that the file or the preset sets; None leaves it to the data."""
        if self.vocab is not None or self.name is None:
            return self.vocab
        from stretto.models import GPTConfig

        return GPTConfig.preset(self.name).vocab

    def _shape(self) -> dict[str, Any]:
        """The options of a GPT that the file sets."""
        return {name: value for name, value in self if value is not None and name not in ("name", "path")}

    @model_validator(mode="after")
    def _has_a_shape(self) -> "ModelConfig":
        if self.path is not None:
            shape = self._shape() | ({} if self.name is None else {"name": self.name})
            if self.dropout == 0:
                del shape["dropout"]
            if shape:
                others = ", ".join(f"model.{name}={value!r}" for name, value in shape.items())
                raise ValueError(
                    f"model.path is {self.path!r}, whose config.json describes the model, and {others} would change "
                    "it: leave out one of the two (of dropout, model.dropout=0 would do)"
                )
            return self
        missing = [f"model.{name}" for name in ("layers", "hidden", "heads") if getattr(self, name) is None]
        if self.name is None and missing:
            raise ValueError(
                f"{are_missing(missing)}: give model.layers, model.hidden and model.heads, "
                "or a preset such as model.name='gpt2-small'"
            )
        return self


class DataConfig(Section):
    """What to train on."""

    path: str | list[str] = option(
        ..., "a file or folder, or a list of them; `python-docs` is the documentation in Python's standard library"
    )
    format: Literal["auto", "text", "chat", "nanogpt", "megatron"] = option(
        "auto",
        "text, conversations (.jsonl) or token files of nanoGPT (.bin) or Megatron (.bin with .idx); `auto` decides by "
        "the files",
    )
    tokenizer: Annotated[str | None, CanBeNone] = option(
        None, "for text: `bytes`, or the path of a Hugging Face tokenizer.json", unset="`bytes`, or the tokenizer of "
        "`model.path`",
    )  # fmt: skip
    token_dtype: Literal["uint16", "uint32", "int64"] = option("uint16", "for nanogpt: the dtype of ids in the file")
    evaluation_path: Annotated[str | list[str] | None, CanBeNone] = option(
        None, "held-out data: a file or folder, or a list of them, read as `data.path` is"
    )
    evaluation_sequences: Annotated[int | None, CanBeNone] = option(
        None, "how many sequences to evaluate on: the first of `data.evaluation_path`, or else the last of "
        "`data.path`, which are not trained on then", unit="sequences",
        unset="all of `data.evaluation_path`, or none of `data.path`", ge=1, lt=1 << 40,
    )  # fmt: skip


def _check_recompute(mode: str) -> str:
    """Refuse unknown modes of recomputation."""
    try:
        Recomputation.parse(mode)
    except ValueError as error:
        raise ValueError(f"train.{error}") from None
    return mode


class RunConfig(RunOptions):
    """How to train."""

    batch: int = option(
        ..., "global batch size; must be a multiple of data x z (x micro_batch)", unit="sequences", ge=1, lt=1 << 31
    )
    seq_len: int = option(..., "sequence length", unit="tokens", ge=1, le=MAX_LENGTH)
    seed: int = option(0, "seed of the initial weights, of the data's order and of dropout", ge=0, lt=1 << 63)
    dtype: Literal["fp32", "bf16", "fp16", "fp64"] = option(
        "fp32", "dtype of the computation; bf16 and fp16 keep fp32 master weights, and fp16 scales the loss"
    )
    micro_batch: Annotated[int | None, CanBeNone] = option(
        None, "sequences in one forward and backward pass of a rank; gradients accumulate over the passes of a step",
        unit="sequences", unset="the rank's whole part of the batch", ge=1,
    )  # fmt: skip
    clip: Annotated[float | None, CanBeNone] = option(
        1.0, "clip gradients to this global norm; `none` does not clip", gt=0
    )
    recompute: Annotated[str, AfterValidator(_check_recompute)] = option(
        "none", "activation checkpointing: what blocks compute again in the backward pass instead of storing it: "
        "`none`, `full`, `every:k`, `products`, `communication` or `host` ([memory.md](memory.md))",
    )  # fmt: skip
    checkpoint_activations: bool = option(False, '`train.recompute = "full"`, if that does not say otherwise')
    keep_gathered: bool = option(
        True, "keep the weights that were all-gathered over z for the backward pass instead of gathering them again"
    )
    accumulate_unsharded: bool = option(
        False, "with micro-batches, add up the weights' gradients whole, and reduce-scatter them over z once a step in "
        "place of once a micro-batch; takes memory for gradients that z does not divide",
    )  # fmt: skip
    tune_matmuls: bool = option(False, "autotune the layouts of each linear's matrix products in the first step")
    shard_sequence: bool = option(
        False, "sequence parallelism over x between blocks: all-gathers and reduce-scatters, fused with the matrix "
        "products, in place of all-reduces",
    )  # fmt: skip
    cuda_graph: bool = option(
        False, "replay each step as one CUDA graph; faster where steps are so short that the host limits the GPU"
    )
    writes_copies: bool = option(
        False, "adamw on GPUs also writes each weight in bf16, for the next step; 2 more bytes a parameter"
    )
    optimizer_state: Literal["fp32", "device", "host"] = option(
        "fp32", "`fp32`: parameters, gradients and optimizer state are fp32, on the device; `device`: weights and "
        "gradients have 16 bits (`train.dtype`), with fp32 weights and optimizer state beside them on the device; "
        "`host`: these lie in pinned host memory, and are stepped bucket by bucket",
    )  # fmt: skip
    state_bucket: int = option(
        1 << 24, "optimizer_state device and host: numbers that are stepped, and fetched from the host, at once; a "
        "multiple of 64", ge=64, lt=1 << 40, multiple_of=64,
    )  # fmt: skip
    state_buffers: int = option(
        3, "optimizer_state host: buckets that are on the device at once; with 1, fetches, steps and returns do not "
        "overlap", unit="buckets", ge=1, le=64,
    )  # fmt: skip
    reduce_buckets: int = option(
        4, "optimizer_state device and host: buckets whose gradients one all-reduce sums (k of Singh, section 3.3.3)",
        unit="buckets", ge=1, le=1 << 20,
    )  # fmt: skip
    split_weights: bool = option(
        True, "optimizer_state host with bf16: beside a bf16 weight keep the lower half of the fp32 weight alone, "
        "exactly; 2 bytes a parameter less travel each way",
    )  # fmt: skip
    step_on: Literal["device", "host", "auto"] = option(
        "device", "optimizer_state host: where a step is computed; `auto` measures both when training begins"
    )
    host_memory: Annotated[float | None, CanBeNone] = option(
        None, "optimizer_state host: how much of this machine's memory all ranks may use", unit="bytes",
        unset="what the container's or the machine's limit is", gt=0,
    )  # fmt: skip
    accumulate_fp32: bool = option(
        False, "optimizer_state device and host: add up gradients of micro-batches in fp32; 2 more bytes a parameter"
    )
    loss_scale: float = option(65536.0, "fp16: the first loss scale; it adapts", ge=1, le=2.0**24)
    loss_scale_steps: int = option(
        2000, "fp16: steps without an overflow after which the loss scale is doubled", unit="steps", ge=1, le=1 << 31
    )

    @property
    def state(self) -> StateOptions:
        """Where optimizer state lies, as the planner counts it and the store keeps it."""
        return StateOptions(
            location=self.optimizer_state,
            bucket_size=self.state_bucket,
            buffer_sets=self.state_buffers,
            coarsening=self.reduce_buckets,
            splits_weights=self.split_weights,
            accumulates_fp32=self.accumulate_fp32,
            step_on=self.step_on,
        )

    @property
    def recompute_mode(self) -> str:
        """What `recompute` and `checkpoint_activations` mean together."""
        return "full" if self.checkpoint_activations and self.recompute == "none" else self.recompute


class OverlapConfig(Section):
    """Which collectives overlap with computation. None of these options changes a result."""

    all_reduce: bool = option(
        True, "all-reduce input gradients over x and y while the weight gradient is computed (OAR)"
    )
    reduce_scatter: bool = option(
        True, "reduce-scatter weight gradients over z during the rest of the backward pass (ORS)"
    )
    all_gather: bool = option(True, "prefetch the next weight over z while the current one is used (OAG)")
    copy_engines: bool = option(
        True, "between GPUs linked by NVLink, copy engines prefetch all weights from the start of the forward pass"
    )
    data: bool = option(True, "all-reduce gradient buckets over data during the backward pass, not after it")


def _ranks_of_grid(value: Any, info: ValidationInfo) -> Any:
    """Default `ranks` to the grid's product. The grid's own rules report an invalid grid."""
    if value is None or value == "none":
        return info.data["grid"].ranks if "grid" in info.data else 1
    return value


class TrainConfig(JobConfig):
    """A training run of a GPT."""

    grid: GridConfig = GridConfig()
    ranks: Annotated[int, BeforeValidator(_ranks_of_grid)] = option(
        None, "number of processes; must be the grid's product", unit="ranks", unset="the grid's product",
        ge=1, le=MAX_RANKS, validate_default=True,
    )  # fmt: skip
    cluster: Annotated[str | None, CanBeNone] = option(
        None, "a machine of `stretto cluster list` or a file of `stretto probe`; the report then compares the "
        "planner's prediction with the measurement",
    )  # fmt: skip
    model: ModelConfig
    data: DataConfig
    train: RunConfig
    overlap: OverlapConfig = OverlapConfig()

    @property
    def execution(self) -> ExecutionOptions:
        """How a step executes, as the planner predicts it and `parallelize` takes it."""
        return ExecutionOptions(
            overlap=Overlap(**dict(self.overlap)),
            keep_gathered=self.train.keep_gathered,
            recompute=self.train.recompute_mode,
            shard_sequence=self.train.shard_sequence,
            tune_matmuls=self.train.tune_matmuls,
            accumulate_unsharded=self.train.accumulate_unsharded,
        )

    @property
    def items_a_step(self) -> int:
        """Tokens in a step's global batch."""
        return self.train.batch * self.train.seq_len

    @property
    def unit(self) -> Literal["tokens", "samples"]:
        """What rates and progress count."""
        return "tokens"

    @model_validator(mode="after")
    def _fits_together(self) -> "TrainConfig":
        if problems := list(_contradictions(self)):
            raise ValueError("\n".join(problems))
        return self


def _contradictions(config: TrainConfig) -> list[str]:
    """Check the rules between options. Returns a message for each rule that is broken."""
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
    problems += _contradictions_of_state(config)
    if run.accumulate_unsharded:
        reasons = {
            f"grid.z is {grid.z}, so that z divides no gradient": grid.z == 1,
            "a rank's whole part of the batch is one micro-batch": run.micro_batch in (None, run.batch // parts),
        }
        problems += [
            f"train.accumulate_unsharded is on, but {reason}; train.accumulate_unsharded=false would do"
            for reason, is_so in reasons.items()
            if is_so
        ]
    if run.cuda_graph and run.trace:
        problems.append(
            "train.cuda_graph and train.trace are both on, but a graph's kernels do not say whose they are; "
            "train.cuda_graph=false would do"
        )
    if run.cuda_graph and run.recompute_mode != "none":
        name = "checkpoint_activations" if run.checkpoint_activations else "recompute"
        problems.append(
            f"train.cuda_graph and train.{name} are both on, but a block that is run again asks for the "
            "state of random numbers, which a graph does not have; train.cuda_graph=false would do"
        )
    if run.cuda_graph and config.model.dropout:
        problems.append(
            f"train.cuda_graph is on and model.dropout is {config.model.dropout}, but a graph would draw the same "
            "masks in every step; train.cuda_graph=false or model.dropout=0 would do"
        )
    for name in ("path", "evaluation_path"):
        if getattr(config.data, name) == []:
            problems.append(f"data.{name} is [], but must name at least one file or folder")
    if run.evaluate_every is not None and config.data.evaluation_path is config.data.evaluation_sequences is None:
        problems.append(
            f"train.evaluate_every is {run.evaluate_every}, but nothing is held out to evaluate on: give "
            "data.evaluation_path, or data.evaluation_sequences for a part of data.path"
        )
    return problems


def _contradictions_of_copies(config: TrainConfig) -> list[str]:
    """Check that train.writes_copies has weights to write. Returns a message for each reason why it has none."""
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


def _contradictions_of_state(config: TrainConfig) -> list[str]:
    """Check the options of optimizer state apart from the model. Returns a message for each rule that is broken."""
    run, problems = config.train, []
    if run.optimizer_state == "fp32":
        if run.dtype == "fp16":
            problems.append(
                "train.dtype is 'fp16', which needs its fp32 weights apart: train.optimizer_state='device' or 'host' "
                "would do"
            )
        changed = [name for name in _STATE_OPTIONS if getattr(run, name) != type(run).model_fields[name].default]
        problems += [
            f"train.{name} is {getattr(run, name)}, but train.optimizer_state is 'fp32', which has no such state; "
            "train.optimizer_state='device' or 'host' would do"
            for name in changed
        ]
        return problems
    reasons = {
        "train.dtype is 'fp64'; train.dtype='bf16', 'fp16' or 'fp32' would do": run.dtype == "fp64",
        "train.writes_copies is on, whose copies are the weights already; train.writes_copies=false would do": (
            run.writes_copies
        ),
        "train.accumulate_unsharded is on, which keeps whole gradients in fp32; train.accumulate_unsharded=false would "
        "do": run.accumulate_unsharded,
        "train.cuda_graph is on, and a graph cannot wait for the host; train.cuda_graph=false or "
        "train.optimizer_state='device' would do": run.cuda_graph and run.optimizer_state == "host",
    }
    return [
        f"train.optimizer_state is {run.optimizer_state!r}, but {reason}" for reason, is_so in reasons.items() if is_so
    ]


_STATE_OPTIONS = (
    "state_bucket",
    "state_buffers",
    "reduce_buckets",
    "split_weights",
    "accumulate_fp32",
    "step_on",
    "host_memory",
)


def nearest_grid(
    grid: GridConfig, ranks: int, suits: Callable[[GridSizes], bool] = lambda sizes: True
) -> GridConfig | None:
    """Find the grid of `ranks` that changes the fewest axes of `grid`, and these by the smallest ratios.

    suits: whether a grid will do; None if no grid will.
    """

    def distance(sizes: GridSizes) -> tuple[float, ...]:
        ratios = [abs(math.log2(sizes[axis] / old)) for axis, old in grid.sizes().items()]
        # Of grids that are equally close, the one with the smallest sizes inside data.
        return sum(ratio > 0 for ratio in ratios), sum(ratios), *(sizes[axis] for axis in OUTER_TO_INNER[1:])

    suitable = filter(suits, every_grid(ranks))
    nearest = min(suitable, key=distance, default=None)
    return None if nearest is None else GridConfig(**nearest)
