# SPDX-License-Identifier: Apache-2.0
"""The configuration of a GPT's training run, and the rules between its options. Imports no torch."""

from dataclasses import fields
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from stretto.execution import (
    ExecutionOptions,
    ExpertReduce,
    Fp8,
    Fp8Recipe,
    Fused,
    Overlap,
    Recomputation,
    ReshardPolicy,
    SparseIndexKind,
    StageOptions,
    StagePlacement,
    StateOptions,
    TwoLevel,
)
from stretto.quantities import MAX_LAYERS, MAX_LENGTH
from stretto.train.config.model import ModelConfig
from stretto.train.config.options import (
    MAX_RANKS,
    CanBeSwitch,
    GridConfig,
    JobConfig,
    RunOptions,
    Section,
    execution_option,
    option,
)


class DataConfig(Section):
    """The data to train on."""

    path: str | list[str] = option(
        ..., "a file or folder, or a list of them; `python-docs` is the documentation in Python's standard library"
    )
    weights: list[float] | None = option(
        None, "a weight for each path of `data.path`: each is packed by itself, and its sequences are this share of "
        "all ([data.md](data.md#mixtures))", unset="the paths are one stream",
    )  # fmt: skip
    format: Literal["auto", "text", "chat", "jsonl", "parquet", "arrow", "nanogpt", "megatron"] = option(
        "auto",
        "text, conversations (.jsonl), documents (.jsonl, .parquet, a folder that `datasets` has saved) or token files "
        "of nanoGPT (.bin) or Megatron (.bin with .idx); `auto` detects the format",
    )
    field: str = option("text", "for documents: the field of a record that has its text, or its token ids")
    separator: str | None = option(
        None, "for documents: text whose tokens end each of them, such as the tokenizer's end of text"
    )
    document_mask: bool = option(
        True, "for documents: tokens attend to their own document alone, whose first token is no target; with `false` "
        "boundaries count for nothing",
    )  # fmt: skip
    tokenizer: str | None = option(
        None, "for text and documents: `bytes`, or the path of a Hugging Face tokenizer.json", unset="`bytes`, or the "
        "tokenizer of `model.path`",
    )  # fmt: skip
    token_dtype: Literal["uint16", "uint32", "int64"] = option("uint16", "for nanogpt: the dtype of ids in the file")
    evaluation_path: str | list[str] | None = option(
        None, "held-out data: a file or folder, or a list of them, read as `data.path` is"
    )
    evaluation_sequences: int | None = option(
        None, "how many sequences to evaluate on: the first of `data.evaluation_path`, or else the last of "
        "`data.path`, which are then not used for training", unit="sequences",
        unset="all of `data.evaluation_path`, or none of `data.path`", ge=1, lt=1 << 40,
    )  # fmt: skip


def _check_recompute(mode: str) -> str:
    try:
        Recomputation.parse(mode)
    except ValueError as error:
        raise ValueError(f"train.{error}") from None
    return mode


def _check_fp8_recipe(recipe: str) -> str:
    """Refuse unknown recipes of float8 training."""
    try:
        Fp8(recipe)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"train.fp8_recipe: {error}") from None
    return recipe


StepAndBatch = Annotated[list[int], Field(min_length=2, max_length=2)]


class RunConfig(RunOptions):
    """Options of training."""

    batch: int = option(
        ..., "global batch size; must be a multiple of data x z (x micro_batch)", unit="sequences", ge=1, lt=1 << 31
    )
    batch_ramp: list[StepAndBatch] | None = option(
        None, "smaller batches at first: pairs of a step and the batch up to it, `[[1000, 64], [3000, 128]]`; after "
        "these, `train.batch`", unit="steps and sequences",
    )  # fmt: skip
    seq_len: int = option(..., "sequence length", unit="tokens", ge=1, le=MAX_LENGTH)
    seed: int = option(0, "seed of the initial weights, of the data's order and of dropout", ge=0, lt=1 << 63)
    dtype: Literal["fp32", "bf16", "fp16", "fp64", "fp8"] = option(
        "fp32", "dtype of the computation; bf16, fp16 and fp8 keep fp32 master weights, and fp16 scales the loss; fp8: "
        "of linears and experts, in bf16 else ([float8](training.md#float8))",
    )  # fmt: skip
    fp8_recipe: Annotated[str, AfterValidator(_check_fp8_recipe)] = option(
        "tensorwise", "fp8: `tensorwise`, one scale for a whole tensor, or `rowwise`, one for each row of a product's "
        "operands",
    )  # fmt: skip
    fp8_leave_out: list[str] = option(
        list(Fp8().leave_out), "fp8: what computes in bf16: `first` and `last` blocks, `head`, and patterns of names"
    )
    micro_batch: int | None = option(
        None, "sequences in one forward and backward pass of a rank; gradients accumulate over the passes of a step",
        unit="sequences", unset="the rank's whole part of the batch", ge=1,
    )  # fmt: skip
    clip: float | None = option(1.0, "clip gradients to this global norm; `none` does not clip", gt=0)
    ema: float | None = option(
        None, "also keep exponential moving averages of the weights, with this decay; evaluations take these "
        "([training.md](training.md#averages-of-weights))", gt=0, lt=1,
    )  # fmt: skip
    recompute: Annotated[str, AfterValidator(_check_recompute)] = execution_option("recompute")
    reshard: ReshardPolicy = execution_option("reshard")
    drop_duplicates: bool = execution_option("drop_duplicates")
    expert_rows: int | None = execution_option("expert_rows", ge=1, lt=1 << 40)
    expert_reduce: ExpertReduce = execution_option("expert_reduce")
    tune_matmuls: bool = execution_option("tune_matmuls")
    fused: Annotated[Fused, CanBeSwitch] = execution_option("fused")
    two_level: Annotated[TwoLevel, CanBeSwitch] = execution_option("two_level")
    shard_sequence: bool = execution_option("shard_sequence")
    invariant: bool = execution_option("invariant")
    cuda_graph: bool = option(
        False, "replay each step as one CUDA graph; faster where steps are so short that the host limits the GPU"
    )
    writes_copies: bool = option(
        False, "adamw on GPUs also writes each weight in bf16, for the next step; 2 more bytes per parameter if z=1"
    )
    optimizer_state: Literal["fp32", "device", "host"] = option(
        "fp32", "`fp32`: parameters, gradients and optimizer state are fp32, on the device; `device`: weights and "
        "gradients have 16 bits (`train.dtype`), and fp32 weights and optimizer state are stored separately on "
        "the device; `host`: fp32 weights and optimizer state are in pinned host memory, and are updated bucket "
        "by bucket",
    )  # fmt: skip
    state_bucket: int = option(
        1 << 24, "optimizer_state device and host: parameters in a bucket, which are updated, and copied from the "
        "host, together; a multiple of 64", ge=64, lt=1 << 40, multiple_of=64,
    )  # fmt: skip
    state_buffers: int = option(
        3, "optimizer_state host: number of bucket buffers on the device; with 1, copies and updates do not overlap",
        unit="buckets", ge=1, le=64,
    )  # fmt: skip
    reduce_buckets: int = option(
        4, "optimizer_state device and host: buckets per all-reduce of gradients (k of Singh, section 3.3.3)",
        unit="buckets", ge=1, le=1 << 20,
    )  # fmt: skip
    split_weights: bool = option(
        True, "optimizer_state host with bf16: store only the lower 16 bits of each fp32 weight, whose upper bits are "
        "the bf16 weight; copies 2 bytes per parameter less in each direction",
    )  # fmt: skip
    step_on: Literal["device", "host", "auto"] = option(
        "device", "optimizer_state host: where the optimizer step runs; `auto` measures both when training begins"
    )
    host_memory: float | None = option(
        None, "optimizer_state host: how much of this machine's memory all ranks may use", unit="bytes",
        unset="the container's or the machine's limit", gt=0,
    )  # fmt: skip
    accumulate_fp32: bool = option(
        False,
        "optimizer_state device and host: accumulate gradients of micro-batches in fp32; 2 more bytes per parameter",
    )
    sparsity: float = option(
        0.0, "part of the weights of linears that is pruned, by magnitude; optimizer_state device and host then keep "
        "gradients, fp32 weights and state of what is left alone ([sparse.md](sparse.md))", ge=0, lt=1,
    )  # fmt: skip
    sparse_index: SparseIndexKind = option(
        "bitmap", "how the places of what is left are stored: `bitmap`, 0.13 bytes per parameter; `int32`, 4 bytes for "
        "each that is left",
    )  # fmt: skip
    prune_scope: Literal["layer", "global"] = option(
        "layer", "whether each weight is pruned to `train.sparsity`, or all of them together"
    )
    prune_at: int = option(0, "steps after which the model is pruned", unit="steps", ge=0, le=1 << 40)
    prune_method: Literal["magnitude", "early-bird"] = option(
        "magnitude", "`early-bird`: masks are drawn every `train.prune_at` steps, and the model is pruned once five in "
        "a row differ in at most a tenth of their numbers",
    )  # fmt: skip
    loss_scale: float = option(65536.0, "fp16: the initial loss scale, which is adapted dynamically", ge=1, le=2.0**24)
    loss_scale_steps: int = option(
        2000, "fp16: steps without an overflow after which the loss scale is doubled", unit="steps", ge=1, le=1 << 31
    )

    def batch_at(self, step: int) -> int:
        """The global batch of a step; the first is 1."""
        return next((batch for last, batch in self.batch_ramp or () if step <= last), self.batch)

    def sequences_until(self, step: int) -> int:
        """The sequences of the steps up to this one."""
        total = before = 0
        for last, batch in self.batch_ramp or ():
            total += batch * (min(step, last) - before)
            before = min(step, last)
        return total + self.batch * (step - before)

    @property
    def state(self) -> StateOptions:
        """The placement of optimizer state, for the planner and the store."""
        return StateOptions(
            location=self.optimizer_state,
            bucket_size=self.state_bucket,
            buffer_sets=self.state_buffers,
            coarsening=self.reduce_buckets,
            splits_weights=self.split_weights,
            accumulates_fp32=self.accumulate_fp32,
            step_on=self.step_on,
            sparsity=self.sparsity,
            index=self.sparse_index,
        )


class PipelineConfig(Section):
    """Options by which a step of a model in pipeline stages (`grid.pipe` > 1) executes."""

    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v", "message-driven"] = option(
        "1f1b", "the order of forward and backward passes; `message-driven` computes whichever message arrives first "
        "([pipelines.md](pipelines.md))",
    )  # fmt: skip
    virtual_stages: int | None = option(
        None, "stages that each rank of pipe has", unit="stages",
        unset="2 for interleaved, zb-v and dualpipe-v, else 1", ge=1, le=MAX_LAYERS,
    )  # fmt: skip
    limit: int | None = option(
        None, "message-driven: number of micro-batches in flight", unset="`grid.pipe`", ge=1, le=1 << 20
    )
    serve_first: Literal["arrival", "backward", "forward"] | None = option(
        None, "message-driven: what is computed first if an activation and a gradient are both waiting",
        unset="`backward`",
    )  # fmt: skip
    extra_warm_up: int = option(
        0, "1f1b: forward passes of the first stage before its first backward pass, beyond those that 1F1B needs; they "
        "hide the latency of messages", unit="micro-batches", ge=0, le=1 << 20,
    )  # fmt: skip
    cuts: list[int] | None = option(
        None, "the blocks with which stages 1, 2, ... begin", unset="so that the costliest stage is as cheap as can be"
    )

    @property
    def stages(self) -> StageOptions:
        """The cut of the model into stages."""
        placement: StagePlacement = "v" if self.schedule in ("zb-v", "dualpipe-v") else "loops"
        usual = 1 if self.schedule in ("gpipe", "1f1b", "zb-h1", "message-driven") else 2
        cuts = None if self.cuts is None else tuple(self.cuts)
        return StageOptions(self.virtual_stages or usual, placement, cuts)


class OverlapConfig(Section):
    """Choice of the collectives that overlap with computation. None of these options changes a result."""

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

    kind = "gpt"
    grid: GridConfig = GridConfig()
    ranks: Annotated[int, BeforeValidator(_ranks_of_grid)] = option(
        None, "number of processes; must be the grid's product", unit="ranks", unset="the grid's product",
        ge=1, le=MAX_RANKS, validate_default=True,
    )  # fmt: skip
    cluster: str | None = option(
        None, "a machine of `stretto cluster list` or a file of `stretto probe`; the report then compares the "
        "planner's prediction with the measurement",
    )  # fmt: skip
    model: ModelConfig
    data: DataConfig
    train: RunConfig
    overlap: OverlapConfig = OverlapConfig()
    pipeline: PipelineConfig = PipelineConfig()

    @property
    def execution(self) -> ExecutionOptions:
        """Options of a step's execution, as the planner predicts it and `parallelize` takes it."""
        names = (each.name for each in fields(ExecutionOptions))
        run = self.train
        return ExecutionOptions(
            fp8=Fp8(cast(Fp8Recipe, run.fp8_recipe), tuple(run.fp8_leave_out)) if run.dtype == "fp8" else None,
            overlap=Overlap(**dict(self.overlap)),
            stages=self.pipeline.stages if self.is_pipelined else StageOptions(),
            **{name: getattr(self.train, name) for name in names if name in RunConfig.model_fields},
        )

    @property
    def is_pipelined(self) -> bool:
        """True if the model is cut into pipeline stages."""
        return self.grid.pipe * self.pipeline.stages.virtual_stages > 1

    @property
    def items_a_step(self) -> int:
        """Tokens in a step's global batch."""
        return self.train.batch * self.train.seq_len

    def items_until(self, step: int) -> int:
        return self.train.sequences_until(step) * self.train.seq_len

    @property
    def unit(self) -> Literal["tokens", "samples"]:
        """The unit that rates and progress count."""
        return "tokens"

    @model_validator(mode="after")
    def _fits_together(self) -> "TrainConfig":
        from stretto.train.config.rules import contradictions

        if problems := contradictions(self):
            raise ValueError("\n".join(problems))
        return self
