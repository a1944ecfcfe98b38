# SPDX-License-Identifier: Apache-2.0
"""The record of a training step on a grid: what each block computes, sends and waits for, made by `step_recorder`.

A `StepRecord` has the passes of one block of each kind, and of the modules before and after all blocks, for one
micro-batch. `planner.cost` and `planner.pipeline` add it up in closed form; `simulator.training` plays it on every
rank. Rules of overlap (docs/overlap.md) are the places in a pass at which a collective starts and is waited for:

- the sum of a large output in two halves, the first under the product of the second (all_reduce);
- the sum of an input's gradient under the weight's gradient (all_reduce);
- gathers and scatters of sharded tokens within a product, except for one rank's part;
- keys and values over context while a rank attends to its own (context);
- weights gathered one ahead, or all by copy engines from the forward pass's beginning on (`StepRecord.prefetch`);
- weight gradients scattered during later computation, at most `StepRecord.scatters_in_flight` at a time
  (reduce_scatter), and summed over data under what follows (data), in the last micro-batch.

The last two rules cross passes, which only mark their weights (`UseWeight`, `SendGradient`): `planner.cost` computes
what they hide, and `WeightGathers` and `GradientSums` of `simulator.training.program` issue it. Everything else is
waited for where it is issued.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from stretto.axes import EXPERT_DATA, EXPERT_Z, REPLICAS, SHARDS
from stretto.cluster import Cluster, HostTimes
from stretto.execution import ExecutionOptions
from stretto.planner.workload import StepConfig, StepWorkload

# A collective uses some multiprocessors, memory bandwidth and power, which slows down concurrent kernels.
SLOWDOWN_BESIDE_COMMUNICATION = 0.2
COMPUTE = "compute"
HOST = "host"
AXIS_OF_GROUP = {REPLICAS: "data", SHARDS: "z", EXPERT_DATA: "data", EXPERT_Z: "z"}
OTHER = "attention, norms and element-wise kernels"

Prefetch = Literal["all", "next", "none"]


class GroupCollective(NamedTuple):
    """One collective over a group of ranks.

    kind: all_gather, reduce_scatter, all_reduce or all_to_all. group: an axis, one of experts', or a group of several
    (`stretto.axes`). num_bytes: what a ring sends from one rank. seconds: with all groups of this kind concurrently.
    by_copy_engine: no multiprocessor sends it.
    """

    kind: str
    group: str
    num_bytes: float
    seconds: float
    by_copy_engine: bool = False

    @property
    def axis(self) -> str:
        """The axis that reports count it to."""
        return AXIS_OF_GROUP.get(self.group, self.group)


@dataclass(frozen=True)
class WeightCollectives:
    """Collectives of one weight, or of several together: over z, and of its gradient over z, data and copies.

    sums: all-reduces over data and copies, sent with those of other gradients (`step_recorder.GradientBuckets`).
    gradient_bytes: of the gradient on a rank, once it is scattered.
    """

    gather: GroupCollective | None
    scatter: GroupCollective | None
    sums: tuple[GroupCollective, ...] = ()
    gradient_bytes: float = 0.0


# Steps of a pass.


class Computation(NamedTuple):
    """Kernels that take so many seconds; on HOST, a wait of the host, which holds up computation."""

    name: str
    seconds: float
    stream: str = COMPUTE


class StartCollective(NamedTuple):
    """Issues a collective of what was computed last; it overlaps with what follows, up to where it is awaited."""

    name: str
    collective: GroupCollective


class AwaitCollective(NamedTuple):
    """Lets the next computation wait for the collective that was issued at this place of the pass."""

    start: int


class UseWeight(NamedTuple):
    """Lets the next computation wait for a weight, if it is gathered in this pass; `prefetch` says when it starts."""

    gather: GroupCollective | None


class AwaitRoom(NamedTuple):
    """Lets the next gradient wait until there is room for another on its way over z."""


class LaunchKernels(NamedTuple):
    """Ends a pass: the host takes so many seconds to launch it, while the GPU runs what was launched before."""

    seconds: float


class SendGradient(NamedTuple):
    """Sends the gradient that was computed last over z and data, in the micro-batches that do so."""

    weight: WeightCollectives


PassStep = Computation | StartCollective | AwaitCollective | UseWeight | AwaitRoom | SendGradient | LaunchKernels
Pass = tuple[PassStep, ...]


class PassRecorder:
    """Records the steps of a pass, in the order in which a rank issues them."""

    def __init__(self) -> None:
        self.steps: list[PassStep] = []
        self.operators = 0  # products that hide a collective, of which the first part is recorded, and the rest

    def compute(self, name: str, seconds: float, stream: str = COMPUTE) -> None:
        if seconds > 0:
            self.steps.append(Computation(name, seconds, stream))

    def start(self, name: str, collective: GroupCollective | None) -> int | None:
        """Issue a collective. Returns its place, to be waited for; None for none."""
        if collective is None:
            return None
        self.steps.append(StartCollective(name, collective))
        return len(self.steps) - 1

    def wait(self, *starts: int | None) -> None:
        for start in starts:
            if start is not None:
                self.steps.append(AwaitCollective(start))

    def run(self, name: str, *collectives: GroupCollective | None) -> None:
        for collective in collectives:
            self.wait(self.start(name, collective))

    def use(self, *weights: WeightCollectives | None) -> None:
        self.steps += [UseWeight(weight.gather) for weight in weights if weight is not None]

    def weight_gradient(self, name: str, seconds: float, weight: WeightCollectives | None) -> None:
        self.steps.append(AwaitRoom())
        self.compute(name, seconds)
        if weight is not None:
            self.steps.append(SendGradient(weight))

    def finish(self, host: HostTimes, kernels: float | None) -> Pass:
        """All steps. kernels: seconds in which the host launches all kernels, but those of collectives."""
        if kernels is not None:
            collective = host.collective or 0.0
            alone = sum(map(_is_collective, self.steps)) - 2 * self.operators
            operator = 2 * collective if host.operator is None else host.operator
            self.steps.append(LaunchKernels(kernels + alone * collective + self.operators * operator))
        return tuple(self.steps)


def _is_collective(step: PassStep) -> bool:
    match step:
        case UseWeight():
            return step.gather is not None
        case SendGradient():
            return step.weight.scatter is not None
    return isinstance(step, StartCollective)


# The parts of a model.


class TiledCollective(NamedTuple):
    """A collective that runs tile by tile within a product: `first` of it without the product, `rest` during it.

    A gather's first part comes before the product, a scatter's after it.
    """

    first: GroupCollective
    rest: GroupCollective | None


@dataclass(frozen=True)
class ProductRecord:
    """A product, and what is sent of its operand and of its result.

    gathered, scattered: over x, of sharded tokens. sums: of partial sums, of equal parts of the result's rows.
    """

    name: str
    seconds: float
    gathered: TiledCollective | None = None
    scattered: TiledCollective | None = None
    sums: tuple[GroupCollective, ...] = ()


@dataclass(frozen=True)
class LinearRecord:
    """One linear for one micro-batch. is_kept: whether recomputation keeps the output. weight_gradient: seconds."""

    output: ProductRecord
    input_gradient: ProductRecord
    weight_gradient: float
    is_kept: bool
    weight: WeightCollectives | None


@dataclass(frozen=True)
class ExpertsRecord:
    """A mixture of experts for one micro-batch: seconds of its products, and of the host's wait for counts of rows.

    product: of the forward pass; the gradients by inputs, and those by weights, take as long each. forward, backward:
    the collectives before the products and after them.
    """

    product: float
    host_wait: float
    forward: tuple[tuple[GroupCollective, ...], tuple[GroupCollective, ...]]
    backward: tuple[tuple[GroupCollective, ...], tuple[GroupCollective, ...]]


@dataclass(frozen=True)
class KeysRecord:
    """Attention over context for one micro-batch: what it sends of keys and values, and what hides that.

    place: of the linear after it. sent: keys and values, in the forward pass; in the backward pass again, beside half
    of the computation, and as many gradients of them beside the other half. own, own_backward: seconds of attention
    to what hides it: a rank's own keys, and of a ring others', too. expands: seconds to make keys of other ranks'
    latents, which then are what is sent, with nothing to hide them, and in the backward pass their gradients alone;
    None for others. exposed: of heads, the half that travels before and after attention, which hides the other half.
    merges: seconds of merging what a ring's further steps compute.
    """

    place: int
    sent: GroupCollective
    own: float
    own_backward: float
    expands: float | None = None
    merges: float = 0.0
    exposed: GroupCollective | None = None


@dataclass(frozen=True)
class BlockRecord:
    """One block of a kind for one micro-batch, and its passes.

    other_forward, other_backward, other_again: seconds of all but linears' and experts' products (attention, norms,
    element-wise kernels, casts) in the forward pass, the backward pass, and the recomputed forward pass, and but what
    `keys` has.
    statistics: of one of two norms, over y.
    weights: of what is not sent with a linear: all of a block that is sharded as one, or experts. frees: whether
    weights are freed after the forward pass, and gathered again for the backward pass. leaves_out_last: whether the
    last linear's output is not computed again in the last of the blocks that are recomputed together. host: seconds
    to launch passes.
    """

    options: ExecutionOptions
    host: HostTimes
    linears: tuple[LinearRecord, ...]
    other_forward: float
    other_backward: float
    other_again: float
    statistics: GroupCollective | None
    weights: tuple[WeightCollectives, ...]
    experts: ExpertsRecord | None
    frees: bool
    leaves_out_last: bool
    keys: KeysRecord | None = None

    @cached_property
    def forward(self) -> Pass:
        return self._forward()

    @cached_property
    def again(self) -> Pass:
        """A recomputed forward pass, except for what is kept; of the last of the blocks that are recomputed together
        `again_last` is recorded."""
        return self._forward(again=True) if self.options.recomputation.is_on else ()

    @cached_property
    def again_last(self) -> Pass:
        """The same of the last of them."""
        return self._forward(again=True, is_last=True) if self.leaves_out_last else self.again

    @cached_property
    def backward(self) -> Pass:
        """A backward pass, without recomputation."""
        return self._backward(computes_weights=True)

    @cached_property
    def backward_inputs(self) -> Pass:
        """A backward pass without weights' gradients, where a schedule splits it."""
        return self._backward(computes_weights=False)

    @cached_property
    def backward_weights(self) -> Pass:
        """The weights' gradients alone, where a schedule splits backward passes."""
        to = PassRecorder()
        if self.experts is not None:
            to.compute("gradient of experts' weights", self.experts.product)
        for linear in reversed(self.linears):
            self._weight_gradient(to, linear)
        self._send_together(to)
        return tuple(to.steps)

    @property
    def weight_seconds(self) -> float:
        """Computation of the weights' gradients, a part of `backward`."""
        return sum(each.weight_gradient for each in self.linears) + (self.experts.product if self.experts else 0.0)

    @property
    def all_weights(self) -> Iterator[WeightCollectives]:
        """All of the block's weights, by the messages that they are sent in."""
        return (each for each in (*(linear.weight for linear in self.linears), *self.weights) if each is not None)

    @property
    def _is_gathered_whole(self) -> bool:
        return not any(linear.weight for linear in self.linears)

    def _forward(self, *, again: bool = False, is_last: bool = False) -> Pass:
        to, recomputation = PassRecorder(), self.options.recomputation
        # Before each linear and after the last.
        other = (self.other_again if again else self.other_forward) / (len(self.linears) + 1)
        exchanges, sums = not again or recomputation.exchanges_again, not again or recomputation.sums_again
        if self._is_gathered_whole:
            to.use(*self.weights)
        for place, linear in enumerate(self.linears):
            if self._begins_with_norm(place) and exchanges:
                to.run("norm statistics", self.statistics)
            to.compute(OTHER, other)
            if self.keys is not None and place == self.keys.place:
                self._exchange_forward(to, self.keys)
            is_left_out = is_last and place == len(self.linears) - 1
            if not (is_left_out and self.frees):
                to.use(linear.weight)
            if not is_left_out:
                is_kept = again and linear.is_kept
                to.wait(*self._product(to, linear.output, is_kept=is_kept, exchanges=exchanges, sums=sums))
        if not self._is_gathered_whole:
            to.use(*self.weights)
        if self.experts is not None:
            if exchanges:
                to.compute("wait for counts of rows", self.experts.host_wait, HOST)
            self._experts(to, self.experts.product, self.experts.forward if exchanges else ((), ()))
        to.compute(OTHER, other)
        return to.finish(self.host, self.host.block_forward)

    def _backward(self, *, computes_weights: bool) -> Pass:
        to = PassRecorder()
        other = self.other_backward / (len(self.linears) + 1)
        if self.frees:
            to.use(*reversed(self.weights))
        to.compute(f"{OTHER}, backward", other)
        if self.experts is not None:
            self._experts(to, self.experts.product, self.experts.backward)
            if computes_weights:
                to.compute("gradient of experts' weights", self.experts.product)
        if computes_weights and not self._is_gathered_whole:
            self._send_together(to)
        for place, linear in reversed(list(enumerate(self.linears))):
            if self.frees:
                to.use(linear.weight)
            started = self._product(to, linear.input_gradient)
            if computes_weights:
                self._weight_gradient(to, linear)
            to.wait(*started)
            if self.keys is not None and place == self.keys.place:
                self._exchange_backward(to, self.keys)
            to.compute(f"{OTHER}, backward", other)
            if self._begins_with_norm(place):
                to.run("norm statistics, backward", self.statistics)
        if computes_weights and self._is_gathered_whole:
            self._send_together(to)
        return to.finish(self.host, self.host.block_backward)

    def _exchange_forward(self, to: PassRecorder, keys: KeysRecord) -> None:
        if keys.exposed is not None:
            self._exchange_heads(to, "heads", keys, keys.own)
        elif keys.expands is None:
            self._exchange(to, "keys and values", keys.sent, keys.own)
        else:
            to.run("latents", keys.sent)
            to.compute("keys of latents", keys.expands)
            to.compute("attention to a rank's own keys", keys.own)

    def _exchange_backward(self, to: PassRecorder, keys: KeysRecord) -> None:
        if keys.exposed is not None:
            self._exchange_heads(to, "gradients of heads", keys, keys.own_backward)
        elif keys.expands is None:
            self._exchange(to, "keys and values", keys.sent, keys.own_backward / 2)
            self._exchange(to, "gradients of keys and values", keys.sent, keys.own_backward / 2)
        else:
            to.compute("attention to a rank's own keys", keys.own_backward)
            to.compute("keys of latents, backward", 2 * keys.expands)
            to.run("gradients of latents", keys.sent)

    def _exchange_heads(self, to: PassRecorder, name: str, keys: KeysRecord, seconds: float) -> None:
        assert keys.exposed is not None
        to.run(name, keys.exposed)
        self._exchange(to, name, keys.sent, seconds)

    @staticmethod
    def _exchange(to: PassRecorder, name: str, collective: GroupCollective, seconds: float) -> None:
        started = to.start(name, collective)
        to.compute("attention to a rank's own keys", seconds)
        to.wait(started)

    def _product(
        self,
        to: PassRecorder,
        product: ProductRecord,
        *,
        is_kept: bool = False,
        exchanges: bool = True,
        sums: bool = True,
    ) -> list[int | None]:
        """Record a product, what brings its operand, and the sums of its result. Returns what is not waited for yet."""
        name, seconds, hides = product.name, 0.0 if is_kept else product.seconds, self.options.overlap.hides_any
        tiled = product.gathered if exchanges and product.gathered is not None else product.scattered if sums else None
        to.operators += hides and tiled is not None and tiled.rest is not None
        if exchanges and product.gathered is not None:
            # The first tiles wait for one rank's part, while the others are gathered concurrently.
            to.run(f"gather for {name}", product.gathered.first)
            rest = to.start(f"gather for {name}", product.gathered.rest)
            if not hides:
                to.wait(rest)
                rest = None
            to.compute(name, seconds)
            to.wait(rest)
        elif sums and product.scattered is not None:
            # Tiles are scattered as they come; the last rank's part follows the product.
            if hides:
                rest = to.start(f"scatter {name}", product.scattered.rest)
                to.compute(name, seconds)
            else:
                to.compute(name, seconds)
                rest = to.start(f"scatter {name}", product.scattered.rest)
            to.wait(rest)
            to.run(f"scatter {name}", product.scattered.first)
        else:
            parts = product.sums if sums and product.sums else (None,)
            started = []
            for collective in parts:
                to.compute(name, seconds / len(parts))
                started.append(to.start(f"sum {name}", collective))
                if not self.options.overlap.all_reduce:
                    to.wait(started.pop())
            return started
        if sums:
            to.run(f"sum {name}", *product.sums)
        return []

    @staticmethod
    def _experts(
        to: PassRecorder, product: float, around: tuple[tuple[GroupCollective, ...], tuple[GroupCollective, ...]]
    ) -> None:
        for collective in around[0]:
            to.run(f"{collective.kind} of rows", collective)
        to.compute("experts", product)
        for collective in around[1]:
            to.run(f"{collective.kind} of rows", collective)

    @staticmethod
    def _weight_gradient(to: PassRecorder, linear: LinearRecord) -> None:
        to.weight_gradient(f"weight gradient of {linear.output.name}", linear.weight_gradient, linear.weight)

    def _send_together(self, to: PassRecorder) -> None:
        for weight in self.weights:
            to.weight_gradient("", 0.0, weight)

    def _begins_with_norm(self, place: int) -> bool:
        """Check whether one of a block's two norms stands before a linear: the first, and that in the middle."""
        return place == 0 or place == len(self.linears) // 2


@dataclass(frozen=True)
class EndRecord:
    """The embeddings, or the final norm, head and loss, for one micro-batch: all of their collectives are waited for.

    weight: of the table, or of all that is in no block.
    """

    forward: Pass
    backward: Pass
    weight: WeightCollectives | None


@dataclass(frozen=True)
class StepRecord:
    """A step on one grid, with one micro-batch.

    kinds: how many blocks of each kind the model has, as `Architecture.kinds`. first, last: the embeddings, and the
    head. prefetch: how weights are gathered in a forward pass: "all" together from its beginning on, as copy engines
    do, "next", when the one before it is used, or "none" before it is needed.
    """

    workload: StepWorkload
    config: StepConfig
    cluster: Cluster
    kinds: tuple[tuple[int, BlockRecord], ...]
    first: EndRecord
    last: EndRecord
    prefetch: Prefetch
    scatters_in_flight: int

    @property
    def micro_batches(self) -> int:
        return self.config.micro_batches(self.workload)

    @property
    def blocks(self) -> list[BlockRecord]:
        return [self.kinds[-1 if has_moe else 0][1] for has_moe in self.workload.model.has_moe]


def overlap_slowdown(cluster: Cluster) -> float:
    """Seconds that computation loses in a second of a concurrent collective."""
    return cluster.gpu.overlap_slowdown or SLOWDOWN_BESIDE_COMMUNICATION
