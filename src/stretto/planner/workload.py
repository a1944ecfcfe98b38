# SPDX-License-Identifier: Apache-2.0
"""The workload that a plan is made for, and one configuration of its step."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, get_args

from stretto.axes import GridSizes
from stretto.execution import MIN_COPIED_BYTES, ExecutionOptions, StateOptions
from stretto.planner.architecture import Architecture
from stretto.planner.documents import PackedDocuments
from stretto.quantities import require_whole
from stretto.schedules import ServeFirst
from stretto.suggestions import require_one_of

Dtype = Literal["bf16", "fp16", "fp32", "fp64", "fp8"]
OptimizerName = Literal["adamw", "muon", "sgd"]
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "fp8": 2}  # fp8: of what is computed in bf16


@dataclass(frozen=True, kw_only=True)
class NumberTypes:
    """The dtype in which a step computes, and its optimizer, which determine the bytes that a rank keeps per parameter.

    has_momentum: of SGD. has_averages: of the weights, which are state, too. Raises ValueError for an unknown dtype or
    optimizer.
    """

    dtype: Dtype = "bf16"
    optimizer: OptimizerName = "adamw"
    has_momentum: bool = False
    has_averages: bool = False

    def __post_init__(self) -> None:
        require_one_of(ELEMENT_BYTES, dtype=self.dtype)
        require_one_of(get_args(OptimizerName), optimizer=self.optimizer)

    @property
    def element(self) -> int:
        """Bytes of an activation, and of a weight or its gradient on the wire."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def gathered_share(self) -> float:
        """The bytes of a block's weight that is gathered over z, over those of another number on the wire."""
        return 0.5 if self.dtype == "fp8" else 1.0

    @property
    def master(self) -> int:
        """Bytes of a parameter, of its gradient, and of each number of optimizer state."""
        return max(4, self.element)

    @property
    def prunable(self) -> float:
        """The part of the parameters that sparsity applies to: all, where the model is not known."""
        return 1.0

    @property
    def moments(self) -> float:
        """Numbers that the optimizer keeps for each parameter; Muon at most, without a model."""
        return {"adamw": 2, "muon": 2, "sgd": int(self.has_momentum)}[self.optimizer] + self.has_averages


@dataclass(frozen=True)
class StepWorkload(NumberTypes):
    """A training step: the model, the global batch in sequences, and the numbers' types.

    Activations, gathered weights and messages are in `dtype`; parameters, gradients and optimizer state in fp32
    (fp64 for fp64), unless the state is separate (`StepConfig.state`). documents: which sequences pack, of which
    attention keeps each apart; None for one a sequence.
    """

    model: Architecture
    batch: int
    seq_len: int
    documents: PackedDocuments | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "seq_len"):
            object.__setattr__(self, name, require_whole(name, getattr(self, name), 1, 1 << 31))
        super().__post_init__()

    @property
    def prunable(self) -> float:
        """The part of the model's parameters that sparsity applies to."""
        return self.model.prunable_parameters / max(self.model.parameters, 1)

    @property
    def moments(self) -> float:
        """Numbers that the optimizer keeps for each parameter: Muon one, and two of embeddings and head."""
        if self.optimizer != "muon":
            return super().moments
        rows = self.model.embedding_rows + self.model.position_rows
        rows += self.model.head_outputs if self.model.has_own_head else 0
        return 1 + self.has_averages + rows * self.model.hidden / max(self.model.parameters, 1)

    @property
    def tokens(self) -> int:
        """Tokens of the global batch."""
        return self.batch * self.seq_len

    def as_sharded(self, config: "StepConfig") -> "StepWorkload":
        """The workload as `parallelize` shards its model on this grid: a transformers model of small weights over z
        alone has its blocks gathered whole (`stretto.parallel.resolve.prefer_blocks`)."""
        model, grid, options = self.model, config.grid, config.options
        is_divided = grid.x * grid.y * grid.pipe * grid.context * grid.expert > 1
        takes_roles = (
            options.fp8 is not None or options.invariant or options.tune_matmuls or options.recomputation.is_on
        )
        of_transformers = model.shards_tokens_of_blocks and not model.is_sharded_by_blocks
        has_head = model.labels is None and model.moe is None
        if grid.z == 1 or is_divided or takes_roles or model.gathers_blocks or not (of_transformers and has_head):
            return self
        largest = max(linear.weights for linear in model.linears) * self.element
        return self if largest >= MIN_COPIED_BYTES else self._with_gathered_blocks

    @cached_property
    def _with_gathered_blocks(self) -> "StepWorkload":
        return replace(self, model=replace(self.model, gathers_blocks=True))

    def stage(self, blocks: int, *, is_first: bool, is_last: bool, moe_blocks: int | None = None) -> "StepWorkload":
        """The workload of a pipeline stage of so many blocks (`Architecture.stage`)."""
        key = blocks, is_first, is_last, moe_blocks
        if key not in self._stages:
            model = self.model.stage(blocks, is_first=is_first, is_last=is_last, moe_blocks=moe_blocks)
            self._stages[key] = replace(self, model=model)
        return self._stages[key]

    @cached_property
    def _stages(self) -> dict[tuple[int, bool, bool, int | None], "StepWorkload"]:
        return {}


MESSAGE_DRIVEN = "message-driven"


@dataclass(frozen=True)
class ScheduleChoice:
    """The order in which a pipeline computes, as `stretto.parallel.Pipeline` takes it.

    name: one of `stretto.schedules.SCHEDULES`, or "message-driven". virtual_stages: stages a rank. extra_warm_up: of
    1f1b. limit, serve_first: of message-driven order, micro-batches in flight, and which message is served first.
    """

    name: str
    virtual_stages: int = 1
    extra_warm_up: int = 0
    limit: int | None = None
    serve_first: ServeFirst | None = None

    @property
    def is_message_driven(self) -> bool:
        return self.name == MESSAGE_DRIVEN

    def __str__(self) -> str:
        """The name, and the options that are not its own defaults: "1f1b, extra_warm_up=3"."""
        options = {
            "virtual_stages": self.virtual_stages if self.name == "interleaved" else 1,
            "extra_warm_up": self.extra_warm_up,
            "limit": self.limit,
            "serve_first": self.serve_first,
        }
        shown = [f"{option}={value}" for option, value in options.items() if value not in (None, 0, 1)]
        return ", ".join([self.name, *shown])


AttentionWay = Literal["all_gather", "ring", "ulysses"]


@dataclass(frozen=True)
class StepConfig:
    """One configuration of a workload's step.

    micro_batch: sequences per pass of a rank (it accumulates gradients). state: where optimizer state is stored.
    clips: whether gradients are clipped, so that separate optimizer state waits for the norm of all of them.
    schedule: of a grid with several pipeline stages. attention_way: over context (None: it gathers keys, or rings where
    these would take too much memory).
    """

    grid: GridSizes
    micro_batch: int
    options: ExecutionOptions = field(default_factory=ExecutionOptions)
    state: StateOptions = field(default_factory=StateOptions)
    clips: bool = True
    schedule: ScheduleChoice | None = None
    attention_way: AttentionWay | None = None

    @property
    def gathers_once(self) -> bool:
        """True if weights are gathered over z once a step, and kept to its end: by stages of a pipeline, and where it
        is asked for."""
        return self.options.keeps_weights and (self.grid.pipe > 1 or self.options.gathers_once)

    @property
    def token_parts(self) -> int:
        """Over how many ranks of x the activations between blocks are sharded."""
        return self.grid.x if self.options.shard_sequence else 1

    def tokens(self, workload: StepWorkload) -> int:
        """A rank's tokens of a micro-batch: context cuts its sequences."""
        return self.micro_batch * workload.seq_len // self.grid.context

    def weight_gathers(self, micro_batches: int) -> tuple[int, int]:
        """Number of times that weights are gathered over z for forward passes in a step,
        and those that are freed or computed
        with again for backward passes."""
        return (1, 0) if self.gathers_once else (micro_batches, micro_batches)

    def gradient_scatters(self, micro_batches: int) -> int:
        """Number of times that weights' gradients are sent over z in a step."""
        return 1 if self.options.scatters_once else micro_batches

    def micro_batches(self, workload: StepWorkload) -> int:
        return max(1, workload.batch // self.grid.batch_parts // self.micro_batch)
