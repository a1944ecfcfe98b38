# SPDX-License-Identifier: Apache-2.0
"""Options of how a step of a sharded model executes, shared by train, the planner and `parallelize`. Imports no torch.

Below the options are the fixed sizes by which `parallelize` splits work, since the planner predicts time and memory
from the same numbers.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from numbers import Real
from textwrap import fill
from typing import Any, Literal, NamedTuple, TypedDict, get_args

from stretto.quantities import require_least
from stretto.suggestions import did_you_mean, require_fields, require_one_of


@dataclass(frozen=True)
class Overlap:
    """Choice of the collectives that `parallelize` overlaps with computation (Singh, section 5.1.4).

    Switching one off changes when data is sent, but not the results, which are bitwise equal, except for copy_engines.

    all_reduce: the all-reduce of the input gradient, under the weight gradient's product ("OAR"); the all-reduce of a
        router's choices, under the rest of the forward pass.
    reduce_scatter: the reduce-scatter of weight gradients, under the rest of the backward pass ("ORS").
    all_gather: the all-gather of the next weight, under the current weight's product ("OAG").
    data: the all-reduce over data of gradient buckets, under the backward pass (False: after it).
    copy_engines: if NVLink connects the GPUs of z, copy engines reduce-scatter linears' gradients
        (`stretto.parallel.comm.copy_engine_scatter`), and, where all_gather is on and weights stay gathered for the
        backward pass, gather all weights of a forward pass from its beginning on
        (`stretto.parallel.comm.copy_engine_gather`); of a model without roles, only parameters of MIN_COPIED_BYTES
        and more are gathered by copy engines, and NCCL reduces the gradients. Over more than two ranks, copy engines
        sum gradients in another order than NCCL, so their last bits may differ.
    """

    all_reduce: bool = True
    reduce_scatter: bool = True
    all_gather: bool = True
    data: bool = True
    copy_engines: bool = True

    def __post_init__(self) -> None:
        require_fields(self, "overlap's ")

    @classmethod
    def parse(cls, value: "Overlap | bool") -> "Overlap":
        """Parse the argument of `parallelize(overlap=...)`: True switches all kinds on, False off.

        With False, every collective is waited for where it is issued; copy engines still reduce gradients, so that
        results are bitwise equal to those of True.
        """
        if isinstance(value, Overlap):
            return value
        if not isinstance(value, bool):
            raise ValueError(f"overlap is {value!r}, but must be True, False or an Overlap")
        return cls() if value else cls(all_reduce=False, reduce_scatter=False, all_gather=False, data=False)

    @property
    def hides_any(self) -> bool:
        """True if some collective is overlapped; copy engines move data in either case."""
        return self.all_reduce or self.reduce_scatter or self.all_gather or self.data


StateLocation = Literal["fp32", "device", "host"]
StepPlace = Literal["device", "host", "auto"]
SparseIndexKind = Literal["bitmap", "int32"]


@dataclass(frozen=True)
class StateOptions:
    """Places optimizer state, and divides it into buckets (Singh, sections 3.3 and 7.2).

    location: "fp32": parameters, gradients and state are fp32, on the device. "device": weights and gradients are in
        the compute dtype, and fp32 weights and state are stored separately on the device. "host": fp32 weights and
        state are in pinned host memory.
    bucket_size: parameters in a bucket, which are updated, and copied from the host, together; a multiple of
        BUCKET_ALIGNMENT.
    buffer_sets: number of bucket buffers on the device, for state on the host.
    coarsening: buckets per all-reduce of gradients.
    splits_weights: for state on the host with bf16 weights, store only the lower 16 bits of the fp32 weights.
        accumulates_fp32: accumulate gradients of micro-batches in fp32.
    step_on: for state on the host, where the optimizer step runs: "auto" measures which is faster.
    sparsity: the part of the weights of linears that is pruned: gradients, fp32 weights and state hold what is left
        (Singh, chapter 4). index: how its places are kept.

    Raises ValueError for others.
    """

    location: StateLocation = "fp32"
    bucket_size: int = 1 << 24
    buffer_sets: int = 3
    coarsening: int = 4
    splits_weights: bool = True
    accumulates_fp32: bool = False
    step_on: StepPlace = "device"
    sparsity: float = 0.0
    index: SparseIndexKind = "bitmap"

    def __post_init__(self) -> None:
        check_sparsity(self.sparsity)
        require_fields(self)
        if self.sparsity and not self.is_separate:
            raise ValueError(
                f"sparsity is {self.sparsity}, which needs optimizer state apart from the weights: location is "
                f"{self.location!r}; 'device' or 'host' would do"
            )
        if self.bucket_size < 1 or self.bucket_size % BUCKET_ALIGNMENT:
            near = max(BUCKET_ALIGNMENT, round(self.bucket_size / BUCKET_ALIGNMENT) * BUCKET_ALIGNMENT)
            raise ValueError(
                f"a bucket has {self.bucket_size} numbers, but must have a positive multiple of {BUCKET_ALIGNMENT}; "
                f"{near} would do"
            )
        require_least(1, buffer_sets=self.buffer_sets, coarsening=self.coarsening)

    @property
    def is_separate(self) -> bool:
        """True if optimizer state is stored separately from the model's parameters ("device" or "host")."""
        return self.location != "fp32"

    def splits(self, element: int, *, is_bf16: bool) -> bool:
        """True if fp32 weights are kept as lower halves beside weights of `element` bytes."""
        return self.location == "host" and self.splits_weights and is_bf16 and element == 2 and self.step_on == "device"


def check_sparsity(sparsity: float) -> None:
    """Raise ValueError unless sparsity, the part of numbers that is pruned, is in [0, 1)."""
    is_number = isinstance(sparsity, Real) and not isinstance(sparsity, bool)
    if not (is_number and 0 <= sparsity < 1):  # NaN is refused, too
        near = 0.0 if is_number and sparsity < 1 else 0.9
        raise ValueError(f"sparsity is {sparsity!r}, but must be at least 0 and less than 1; {near} would do")


StagePlacement = Literal["loops", "v"]


@dataclass(frozen=True)
class StageOptions:
    """Description of how a model is split into pipeline stages (`parallelize(stages=...)`).

    virtual_stages: number of stages per rank of pipe.
    placement: the rank of each stage, if a rank has several. "loops": round-robin, as in interleaved schedules. "v":
        ascending, then descending order of ranks, as in ZB-V and DualPipe-V, with two stages per rank.
    cuts: the first blocks of stages 1, 2, ... None: such that the most expensive stage is as cheap as possible.
    blocks: names or patterns of the blocks between which the model is split. None: the children of its longest
        nn.ModuleList.
    first, last: names of modules outside of the blocks that belong to the first or the last stage, if the order of
        registration would assign them differently.

    Raises ValueError for others.
    """

    virtual_stages: int = 1
    placement: StagePlacement = "loops"
    cuts: tuple[int, ...] | None = None
    blocks: tuple[str, ...] | None = None
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_fields(self, "stages' ")
        require_least(1, virtual_stages=self.virtual_stages)
        if self.placement == "v" and self.virtual_stages != 2:
            raise ValueError(f"placement 'v' takes two stages a rank, and virtual_stages is {self.virtual_stages}")

    def check(self, pipe: int, blocks: int) -> None:
        """Raise ValueError if a model of so many blocks cannot be cut into the stages of so many ranks of pipe."""
        count = pipe * self.virtual_stages
        if blocks < count:
            fewer = blocks // self.virtual_stages
            nearest = f"pipe={fewer}" if fewer else "pipe=1 with a stage a rank"
            raise ValueError(
                f"pipe={pipe} with {self.virtual_stages} stages a rank makes {count} stages, but the model has "
                f"{blocks} blocks, and each stage needs one; {nearest} would do"
            )
        if self.cuts is None:
            return
        bounds = (0, *self.cuts, blocks)
        if len(bounds) != count + 1 or any(later <= before for before, later in pairwise(bounds)):
            raise ValueError(
                f"cuts is {list(self.cuts)}, but must be {count - 1} ascending numbers between 1 and {blocks - 1}, of "
                f"the blocks with which stages 1 to {count - 1} begin"
            )


# Numbers: each parameter begins at a multiple of it in flat tensors, so that kernels may read 16 bytes at a time.
BUCKET_ALIGNMENT = 64


class Recomputation(NamedTuple):
    """A mode of activation checkpointing: `kind` is the mode without its number (docs/memory.md).

    blocks: number of blocks that are recomputed together, from the input of the first.
    """

    kind: str
    blocks: int = 1

    @classmethod
    def parse(cls, mode: str) -> "Recomputation":
        """Read "none", "full", "every:k", "products", "communication" or "host". ValueError for anything else."""
        if mode in RECOMPUTATION_KINDS:
            return cls(mode)
        found = re.fullmatch(r"every:([1-9]\d{0,5})", mode) if isinstance(mode, str) else None
        if found is None:
            known = ", ".join(RECOMPUTATION_KINDS)
            raise ValueError(f"recompute is {mode!r}, but must be one of {known}, or every:k (every:2, say)")
        return cls("every", int(found[1]))

    @property
    def is_on(self) -> bool:
        return self.kind != "none"

    @property
    def sums_again(self) -> bool:
        """True if recomputation repeats the all-reduces of linears' outputs."""
        return self.kind in ("full", "every", "host")

    @property
    def exchanges_again(self) -> bool:
        """True if recomputation gathers sharded tokens, and the statistics of norms over y, again."""
        return self.sums_again or self.kind == "products"

    def keeps_product(self, ranks: int) -> bool:
        """True if a linear's output, summed over so many ranks, is kept, and so not computed again."""
        return self.kind == "products" or (self.kind == "communication" and ranks > 1)

    def check_blocks(self, blocks: int) -> None:
        """Raise ValueError if a model of so many blocks has no segment of the mode's length."""
        if self.blocks > blocks:
            raise ValueError(
                f"recompute is 'every:{self.blocks}', but the model has {blocks} block{'s' * (blocks > 1)}; "
                f"every:{blocks} would do"
            )


RECOMPUTATION_KINDS = ("none", "full", "products", "communication", "host")  # and every:k


Fp8Recipe = Literal["tensorwise", "rowwise"]
_NO_RECIPES = {
    "mxfp8": "a scale for each 32 numbers",
    "nvfp4": "4 bits and a scale for each 16 numbers",
    "mxfp4": "4 bits and a scale for each 32 numbers",
}


@dataclass(frozen=True)
class Fp8:
    """fp8 products of linears and experts (`parallelize(fp8=...)`), by dynamic scales: forward and both gradients.

    recipe: "tensorwise": one scale for a whole tensor; activations and weights are e4m3, and gradients e5m2.
        "rowwise": a scale, a power of two, for each row of a product's operands; all are e4m3.
    leave_out: what computes in the dtype of the others: "first" and "last", the linears of a model's first and last
        block; "head", which must be in it; and patterns of names, in which "*" matches any characters.

    Raises ValueError for others.
    """

    recipe: Fp8Recipe = "tensorwise"
    leave_out: tuple[str, ...] = ("first", "last", "head")

    def __post_init__(self) -> None:
        if isinstance(self.recipe, str) and self.recipe.lower() in _NO_RECIPES:
            raise ValueError(
                f"fp8 recipe {self.recipe!r} has {_NO_RECIPES[self.recipe.lower()]}, which tensor cores multiply from "
                "Blackwell on alone, and Stretto does not support; 'rowwise' would do"
            )
        require_one_of(get_args(Fp8Recipe), "fp8 ", recipe=self.recipe)
        names = self.leave_out
        if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
            raise ValueError(
                f"leave_out is {names!r}, but must be a tuple of names; ('first', 'last', 'head') would do"
            )
        if "head" not in names:
            raise ValueError(
                f"leave_out is {tuple(names)!r}, but the head, whose product is a part of the loss, is never in fp8; "
                f"{('head', *names)!r} would do"
            )
        object.__setattr__(self, "leave_out", tuple(names))

    @classmethod
    def parse(cls, value: "Fp8 | str | bool | None") -> "Fp8 | None":
        """Parse the argument of `parallelize(fp8=...)`: a recipe's name, True for the default, None for off."""
        if isinstance(value, str):
            return cls(value)  # type: ignore[arg-type]
        if value is None or isinstance(value, bool):
            return cls() if value else None
        if not isinstance(value, Fp8):
            raise ValueError(f"fp8 is {value!r}, but must be a recipe's name, an Fp8, True or None; True would do")
        return value


Fused = Literal["auto", False]
ExpertReduce = Literal["rank", "choice"]
TwoLevel = Literal["auto", True, False]
ReshardPolicy = Literal["after_forward", "after_backward", "weights_after_step", "gradients_after_step", "after_step"]


def _option(default: Any, help: str, **more: str) -> Any:
    """A field with its documentation. more: `unit`; `unset`, the words for None."""
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True)
class ExecutionOptions:
    """Options of a step's execution, apart from its grid, micro-batch and dtypes.

    Raises ValueError for an unknown reshard policy, mode of recomputation or value of fused or two_level, for
    expert_rows that are not positive, and for expert_reduce with another value.
    """

    overlap: Overlap = _option(
        Overlap(),
        "which collectives overlap with computation (True: all, False: none); results are the same",
    )
    reshard: ReshardPolicy = _option(
        "after_backward",
        "when what is whole over z is sharded again. `after_forward`: weights are freed after the forward pass and "
        "gathered again in the backward pass; `after_backward`: weights are kept between the two; "
        "`weights_after_step`: weights are gathered once per step, for all micro-batches and for recomputation, which "
        "takes the memory of all weights in `train.dtype` (in a training loop of your own: inside of "
        "`stretto.parallel.gather_once(model)`); `gradients_after_step`: unsharded weight gradients are accumulated "
        "over the micro-batches and reduce-scattered once per step, which takes memory for gradients that z does not "
        "shard; `after_step`: both. Pipelines keep gathered weights to the step's end, except for `after_forward`",
    )
    recompute: str = _option(
        "none",
        "activation checkpointing: which activations are recomputed in the backward pass: `none`, `full`, `every:k`, "
        "`products`, `communication` or `host` ([memory.md](memory.md))",
    )
    shard_sequence: bool = _option(
        False,
        "sequence parallelism over x between blocks: all-gathers and reduce-scatters, fused with the matrix products, "
        "in place of all-reduces",
    )
    tune_matmuls: bool = _option(
        False,
        "autotune the layouts of each linear's matrix products in the first step, and which of torch's kernels "
        "computes attention where `fused` replaces modules of a transformers model",
    )
    fused: Fused = _option(
        "auto",
        "replace norms, rotary positions, gated SiLUs and the loss of a transformers model by fused kernels: `auto`: "
        "on GPUs, where they compute the same and torch.compile does not; `false`: nowhere ([what it does to "
        "bits](hugging-face.md#fused-kernels))",
    )
    two_level: TwoLevel = _option(
        False,
        "for the gathers and reduce-scatters of z and the sums over data, of ranks on several nodes: collectives in "
        "two levels, between nodes and inside them: `true`: always, which takes nodes of equally many ranks; `auto`: "
        "where a model of both levels predicts them to be faster than the library's own; `false`: never ([two "
        "levels](two-levels.md#two-levels-in-training))",
    )
    fp8: Fp8 | None = _option(
        None,
        "float8 training: linears and experts compute in fp8, with dynamic scales, and their weights are gathered over "
        "z in fp8 ([float8](training.md#float8))",
        unset="off",
    )
    stages: StageOptions = _option(
        StageOptions(),
        "how the model is split into pipeline stages, if the grid or a rank has several",
    )
    drop_duplicates: bool = _option(
        True,
        "each rank of x sends only its part of the tokens to the experts, because all ranks of x have the same tokens",
    )
    expert_rows: int | None = _option(
        None,
        "fixed capacity of a rank, in rows of experts' inputs, so that the host need not wait for their number; more "
        "rows are an error",
        unit="rows",
        unset="dynamic",
    )
    invariant: bool = _option(
        False,
        "a forward pass in which a token's bits depend on its own sequence alone: neither on the batch nor on x, z or "
        "expert, and so are those of an `Engine` on any grid ([inference.md](inference.md#the-same-bits-everywhere))",
    )
    expert_reduce: ExpertReduce = _option(
        "rank",
        "where a token's outputs of several experts are summed. `rank`: each rank sums those of its experts and "
        "returns one row, so the bits depend on `expert`; `choice`: every output is returned, and the bits are those "
        "of expert=1 ([bits](experts.md#sharding-over-a-grid))",
    )

    def __post_init__(self) -> None:
        Recomputation.parse(self.recompute)
        require_fields(self)
        if self.invariant and self.fp8 is not None:
            raise ValueError("invariant sums are not of fp8 products: leave fp8 out, or invariant=False would do")
        require_least(1, expert_rows=self.expert_rows)

    @cached_property
    def recomputation(self) -> Recomputation:
        return Recomputation.parse(self.recompute)

    @property
    def keeps_weights(self) -> bool:
        """True if weights stay gathered from the forward to the backward pass."""
        return self.reshard != "after_forward"

    @property
    def gathers_once(self) -> bool:
        """True if weights are gathered over z once per step. In a training loop of one's own,
        `stretto.parallel.gather_once` does so."""
        return self.reshard in ("weights_after_step", "after_step")

    @property
    def scatters_once(self) -> bool:
        """True if weight gradients are reduce-scattered over z once per step."""
        return self.reshard in ("gradients_after_step", "after_step")

    def replace(self, **changes: Any) -> "ExecutionOptions":
        """The same with other values by name; `overlap` and `fp8` may be simpler (`parse`). TypeError for no option."""
        known = [each.name for each in fields(self)]
        for name in changes.keys() - set(known):
            near = did_you_mean(name, known) or f": known are {', '.join(known)}"
            raise TypeError(f"there is no option {name!r}{near}")
        if "overlap" in changes:
            changes["overlap"] = Overlap.parse(changes["overlap"])
        if "fp8" in changes:
            changes["fp8"] = Fp8.parse(changes["fp8"])
        return replace(self, **changes)


def option_help(name: str) -> str:
    """Return the description of a field of ExecutionOptions without Markdown, for the help of commands."""
    return re.sub(r" \(\[.*?\)\)|`", "", _METADATA[name]["help"])


def option_metadata(name: str) -> Mapping[str, Any]:
    """Return a field's "default" and "help", and, if it has them, its "unit" and the words for None ("unset")."""
    return _METADATA[name]


_METADATA = {each.name: {"default": each.default, **each.metadata} for each in fields(ExecutionOptions)}
ExecutionOptions.__doc__ = f"{ExecutionOptions.__doc__}\n" + "\n".join(
    fill(f"{name}: {option_help(name)}.", 120, initial_indent="    ", subsequent_indent="        ")
    for name in _METADATA
)


class ExecutionKeywords(TypedDict, total=False):
    """ExecutionOptions one by one, as keyword arguments."""

    overlap: Overlap | bool
    reshard: ReshardPolicy
    recompute: str
    shard_sequence: bool
    tune_matmuls: bool
    fused: Fused
    two_level: TwoLevel
    fp8: Fp8 | str | bool | None
    stages: StageOptions
    drop_duplicates: bool
    expert_rows: int | None
    invariant: bool
    expert_reduce: ExpertReduce


# An output of at least so many bytes is summed over ranks in two halves, the first under the product of the second's
# rows, if it has at least so many inputs: with fewer, the product hides less than a second message costs.
HALVED_BYTES = 2 * 8 * 2**20
HALVED_INPUTS = 2048
# Logits of one slice of tokens, in elements: 256 MiB in fp32. Larger slices gain no speed, they only take memory.
LOGITS_SLICE = 2**26
# GEMMs want row strides of 16 bytes: a vocabulary's part is padded to this many rows, and the padding masked.
LOGITS_ROW_MULTIPLE = 64
# The target of a position that no loss counts, as torch's cross-entropy and transformers have it.
IGNORED_TARGET = -100
# A bucket's size: large enough for the links' full bandwidth, small enough that the last bucket does not delay the end.
BUCKET_BYTES = 64 * 2**20
# How many reduce-scatters over z may run at once: about two blocks' weights. It bounds the memory that they hold.
SCATTERS_IN_FLIGHT = 8
# Bytes of whole gradients that copy engines may have on their way over z, if three of the largest do not take more.
SCATTER_RING_BYTES = 256 << 20
# Of a whole parameter of a block without roles that copy engines gather by itself: smaller ones cost the host more than
# one message of all, for which transformers' models of nothing else are sharded by blocks (`parallel.resolve`).
MIN_COPIED_BYTES = 1 << 25
# Numbers of a layer's keys and values that a rank of context makes of latents, at most: 4 GiB of 16 bits.
MAX_EXPANDED = 1 << 31
# What operators send within a product lies in two slots in turn, up to this size. Calls that send more use one slot and
# begin with a barrier, whose time then matters less than the memory.
TWO_SLOTS_BYTES = 256 << 20
MIN_WORKSPACE_BYTES = 1 << 20
# Of the rings on a GPU through which messages of a pipeline come, one for each other rank: slots, bytes of a slot, and
# the most that all rings of a rank take, however many ranks there are.
MESSAGE_SLOTS = 8
MESSAGE_SLOT_BYTES = 8 << 20
MESSAGE_RINGS_BYTES = 256 << 20
