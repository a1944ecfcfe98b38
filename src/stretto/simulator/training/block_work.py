# SPDX-License-Identifier: Apache-2.0
"""What a block computes and sends for one micro-batch, operation by operation.

Seconds of computation and bytes of collectives are the planner's (`planner.compute`, `planner.communication`,
`planner.experts.cost`), which adds them up where this lists them: the sums are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stretto.axes import EXPERT, EXPERT_DATA, EXPERT_Z, REPLICAS
from stretto.planner.architecture import Architecture
from stretto.planner.collective_times import group_seconds, message_latency
from stretto.planner.communication import (
    LinearTraffic,
    WeightTraffic,
    features_traffic,
    has_nvlink_over_z,
    linear_traffic,
)
from stretto.planner.compute import Device, compute
from stretto.planner.cost import StepCommunication, is_halved
from stretto.planner.experts.cost import (
    HOST_READ,
    all_to_all_seconds,
    expert_messages,
    group_of_replicas,
    group_of_shards,
    ranks_in_node,
    weight_traffic,
)
from stretto.planner.layers import Linear
from stretto.planner.memory import gathered_by_copy_engines
from stretto.planner.workload import StepConfig, StepWorkload
from stretto.simulator.training.program import GroupCollective, Prefetch


@dataclass(frozen=True)
class WeightCollectives:
    """What is sent of one weight, or of several together: over z, and of its gradient over z, data and copies."""

    gather: GroupCollective | None
    scatter: GroupCollective | None
    data: GroupCollective | None
    copies: GroupCollective | None = None


@dataclass(frozen=True)
class TiledCollective:
    """A collective that runs tile by tile within a product: `first` of it without the product, `rest` during it.

    A gather's first part comes before the product, a scatter's after it.
    """

    first: GroupCollective
    rest: GroupCollective | None


@dataclass(frozen=True)
class LinearWork:
    """One linear for one micro-batch: seconds of its three products, and their communication.

    is_kept: whether recomputation keeps the output. gathers_input, scatters_output, gathers_gradient,
    scatters_gradient: over x, of sharded tokens. output: partial sums of the output, of equal parts of its rows.
    gradient: partial sums of the input's gradient.
    """

    name: str
    product: float
    input_gradient: float
    weight_gradient: float
    is_kept: bool = False
    gathers_input: TiledCollective | None = None
    scatters_output: TiledCollective | None = None
    gathers_gradient: TiledCollective | None = None
    scatters_gradient: TiledCollective | None = None
    output: tuple[GroupCollective, ...] = ()
    gradient: GroupCollective | None = None
    weight: WeightCollectives | None = None


@dataclass(frozen=True)
class ExpertWork:
    """A mixture of experts for one micro-batch: seconds of its products, and of the host's wait for counts of rows.

    forward, backward: the collectives before the products and after them.
    """

    product: float
    weight_gradient: float
    host_wait: float
    forward: tuple[tuple[GroupCollective, ...], tuple[GroupCollective, ...]]
    backward: tuple[tuple[GroupCollective, ...], tuple[GroupCollective, ...]]


@dataclass(frozen=True)
class BlockWork:
    """One block of a kind for one micro-batch.

    other_forward, other_backward, other_again: seconds of all but linears' and experts' products (attention, norms,
    element-wise kernels, casts) in the forward pass, the backward pass, and the recomputed forward pass.
    statistics: of one of two norms, over y. features: hidden features for experts that z alone shards, over y.
    weights: of what is not sent with a linear: all of a block that is sharded as one, or experts. left_out:
    seconds of the last linear's product, in the mean over blocks, if recomputation leaves it out of the last block.
    """

    linears: tuple[LinearWork, ...]
    other_forward: float
    other_backward: float
    other_again: float = 0.0
    statistics: GroupCollective | None = None
    features: GroupCollective | None = None
    weights: tuple[WeightCollectives, ...] = ()
    experts: ExpertWork | None = None
    left_out: float = 0.0

    @property
    def forward_seconds(self) -> float:
        """Computation of a forward pass."""
        return self.other_forward + sum(each.product for each in self.linears) + self._of_experts

    @property
    def backward_seconds(self) -> float:
        """Computation of a backward pass, recomputation included."""
        own = sum(each.input_gradient + each.weight_gradient for each in self.linears)
        again = 0.0
        if self.other_again:
            again = self.other_again + self._of_experts
            again += sum(each.product for each in self.linears if not each.is_kept) - self.left_out
        weights = self.experts.weight_gradient if self.experts else 0.0
        return self.other_backward + own + again + self._of_experts + weights

    @property
    def _of_experts(self) -> float:
        return self.experts.product if self.experts else 0.0


class BlockWorkBuilder:
    """Makes the work of blocks out of the planner's models, for one workload and configuration."""

    def __init__(self, workload: StepWorkload, config: StepConfig, device: Device, step: StepCommunication) -> None:
        self.workload, self.config, self.device, self.cluster = workload, config, device, device.cluster
        self.step = step
        self.tokens = config.micro_batch * workload.seq_len
        options, has_nvlink = config.options, has_nvlink_over_z(self.cluster, config.grid)
        is_plain = not workload.model.is_sharded_by_blocks
        engines = options.overlap.copy_engines and has_nvlink and config.grid.z > 1
        keeps = options.keeps_weights and (not options.recomputation.is_on or options.gathers_once)
        keeps = keeps and config.grid.pipe == 1
        # Of a model that is sharded by blocks, copy engines gather its large parameters alone.
        is_large = is_plain or sum(gathered_by_copy_engines(workload, config, has_nvlink=has_nvlink)) > 0
        self.gathers_by_engine = engines and keeps and options.overlap.all_gather and is_large
        self.scatters_by_engine = engines and is_plain

    @property
    def prefetch(self) -> Prefetch:
        """How weights are gathered in a forward pass."""
        if not self.config.options.overlap.all_gather:
            return "none"
        return "all" if self.gathers_by_engine else "next"

    def over(self, kind: str, axis: str, num_bytes: float) -> GroupCollective | None:
        """A collective over an axis that sends so many bytes from a rank; None where it has one rank."""
        group = REPLICAS if axis == "data" else axis
        seconds = self.step.collective(kind, group, num_bytes)
        return GroupCollective(kind, group, axis, num_bytes, seconds) if seconds > 0 else None

    def weight(self, traffic: WeightTraffic) -> WeightCollectives:
        """What is sent of weights over z and data."""
        element = self.workload.element
        gather = self.over("all_gather", "z", traffic.all_gather * element)
        scatter = self.over("reduce_scatter", "z", traffic.reduce_scatter * element)
        data = self.over("all_reduce", "data", traffic.data * element)
        copies = None
        if isinstance(traffic, LinearTraffic) and traffic.copies:
            copies = self.over("all_reduce", "x", traffic.copies * element)
        is_separate = self.config.state.is_separate  # gradients are summed in separate chunks
        return WeightCollectives(
            gather and gather._replace(by_copy_engine=self.gathers_by_engine),
            scatter and scatter._replace(by_copy_engine=self.scatters_by_engine),
            None if is_separate else data,
            None if is_separate else copies,
        )

    def block(self, model: Architecture, inner: StepWorkload) -> BlockWork:
        """The work of one block of a kind. inner: the workload of such a block alone."""
        config, count = self.config, self.config.micro_batches(self.workload)
        grid, by_blocks = model.splitting_sizes(config.grid), model.is_sharded_by_blocks
        work = compute(inner, config, self.device)
        plain = compute(inner, replace(config, options=config.options.replace(recompute="none")), self.device)
        times = [
            tuple(each / count for each in of_linear)
            for of_linear in zip(work.outputs, work.input_gradients, work.weight_gradients, strict=True)
        ]
        linears = [self._linear(place, model.linears, *of_linear) for place, of_linear in enumerate(times)]
        experts = self._experts(model, work.other_weight_gradients / count)
        of_experts = experts.product if experts else 0.0
        again = (work.backward - plain.backward) / count
        is_left_out = model.ends_with_linear and not linears[-1].is_kept
        left_out = linears[-1].product / config.options.recomputation.blocks if is_left_out else 0.0
        again -= sum(each.product for each in linears if not each.is_kept) + of_experts - left_out
        forward = work.forward / count - sum(each.product for each in linears) - of_experts
        backward = plain.backward / count - of_experts - (experts.weight_gradient if experts else 0.0)
        backward -= sum(each.input_gradient + each.weight_gradient for each in linears)
        statistics = features = None
        if not by_blocks:
            statistics = self.over("all_reduce", "y", 2 * (grid.y - 1) / grid.y * self.tokens / config.token_parts * 8)
        if model.gathered_parameters and not by_blocks:
            numbers = features_traffic(model, config.grid, self.tokens * config.grid.z)
            features = self.over("all_gather", "y", numbers * self.workload.element)
        return BlockWork(
            tuple(linears),
            max(0.0, forward),
            max(0.0, backward),
            max(0.0, again) if config.options.recomputation.is_on else 0.0,
            statistics,
            features,
            self._weights_together(model),
            experts,
            left_out,
        )

    def _weights_together(self, model: Architecture) -> tuple[WeightCollectives, ...]:
        weights = list[WeightCollectives]()
        if together := model.block_parameters if model.is_sharded_by_blocks else model.gathered_parameters:
            weights.append(self.weight(WeightTraffic.of(together, self.config.grid)))
        if model.expert_tensors:
            traffic, grid = weight_traffic(model, self.config.grid), self.config.grid
            shards, replicas, element = group_of_shards(grid), group_of_replicas(grid), self.workload.element
            found = [
                GroupCollective(kind, group, axis, sent, group_seconds(kind, ranks, sent, self.cluster))
                for kind, group, axis, ranks, sent in (
                    ("all_gather", EXPERT_Z, "z", shards, traffic.all_gather * element),
                    ("reduce_scatter", EXPERT_Z, "z", shards, traffic.reduce_scatter * element),
                    ("all_reduce", EXPERT_DATA, "data", replicas, traffic.data * element),
                )
            ]
            gather, scatter, data = (each if each.seconds > 0 else None for each in found)
            weights.append(WeightCollectives(gather, scatter, None if self.config.state.is_separate else data))
        return tuple(weights)

    def _linear(
        self, place: int, linears: Sequence[Linear], output: float, input_gradient: float, weight_gradient: float
    ) -> LinearWork:
        """One linear. With sharded tokens, its sums over x are gathers and scatters within its products."""
        linear, config, element = linears[place], self.config, self.workload.element
        model, grid = self.workload.model, config.grid
        is_kept = config.options.recomputation.keeps_product(linear.input_shards(model.splitting_sizes(grid)))
        work = LinearWork(linear.name, output, input_gradient, weight_gradient, is_kept)
        if model.is_sharded_by_blocks:
            return work
        tokens = self.tokens * grid.z  # as equations 5.3 and 5.4 have them
        traffic = linear_traffic(linear, grid, tokens)
        work = replace(work, weight=self.weight(traffic))
        if config.token_parts == 1:
            parts = 2 if is_halved(linear, grid, tokens * element) else 1
            each = self.over("all_reduce", traffic.output_sum_axis, traffic.output * element / parts)
            gradient = self.over("all_reduce", traffic.gradient_sum_axis, traffic.gradient * element)
            return replace(work, output=() if each is None else (each,) * parts, gradient=gradient)
        if linear.is_rowwise:
            return replace(
                work,
                scatters_output=self._tiled("reduce_scatter", traffic.output),
                gathers_gradient=self._tiled("all_gather", traffic.output),
                gradient=self.over("all_reduce", "y", traffic.gradient * element),
            )
        gathers = place == 0 or linears[place - 1].is_rowwise  # gate and up take the same
        over_y = self.over("all_reduce", "y", traffic.output * element)
        return replace(
            work,
            gathers_input=self._tiled("all_gather", traffic.gradient) if gathers else None,
            scatters_gradient=self._tiled("reduce_scatter", traffic.gradient),
            output=() if over_y is None else (over_y,),
        )

    def _tiled(self, kind: str, numbers: float) -> TiledCollective | None:
        """Half of an all-reduce over x, within a product, all but one rank's part; across nodes, before or after it."""
        whole = self.over(kind, "x", numbers / 2 * self.workload.element)
        if whole is None:
            return None
        parts = self.config.grid.x
        if parts > self.cluster.gpus_per_node:
            return TiledCollective(whole, None)
        first, rest = (
            whole._replace(num_bytes=whole.num_bytes * part, seconds=whole.seconds * part)
            for part in (1 / parts, 1 - 1 / parts)
        )
        return TiledCollective(first, rest)

    def _experts(self, model: Architecture, weight_gradient: float) -> ExpertWork | None:
        layer, config, grid = model.moe_layer, self.config, self.config.grid
        if layer is None:
            return None
        product = sum(self.device.grouped_matmul(*sizes) for sizes in layer.expert_products(grid, self.tokens))
        waits = grid.expert > 1 and config.options.expert_rows is None
        leaves = grid.expert > ranks_in_node(grid, self.cluster.gpus_per_node)
        latency = message_latency(self.cluster, leaves=leaves)
        by_pass: dict[bool, list[GroupCollective]] = {True: [], False: []}
        for message in expert_messages(
            layer, grid, self.tokens, config.token_parts, drops_duplicates=config.drops_duplicates
        ):
            num_bytes = message.numbers * self.workload.element
            found: GroupCollective | None = None
            if message.kind != "all_to_all":
                found = self.over(message.kind, message.axis, num_bytes)
            elif grid.expert > 1:
                seconds = all_to_all_seconds(num_bytes, grid, self.cluster, latency)
                found = GroupCollective("all_to_all", EXPERT, EXPERT, num_bytes, seconds)
            if found is not None:
                by_pass[message.is_forward].append(found)
        return ExpertWork(
            product,
            weight_gradient,
            HOST_READ if waits else 0.0,
            *(_around(by_pass[is_forward]) for is_forward in (True, False)),
        )


def _around(messages: Sequence[GroupCollective]) -> tuple[tuple[GroupCollective, ...], tuple[GroupCollective, ...]]:
    """Which collectives come before experts' products: the router's gather over y, the first all-to-all, and the gather
    of rows over x. The rest, sums over y among them, follows."""
    before: list[GroupCollective] = []
    after: list[GroupCollective] = []
    for message in messages:
        kinds = [each.kind for each in (*before, *after) if each.axis == message.axis]
        is_first = message.kind in ("all_to_all", "all_gather") and message.kind not in kinds
        (before if is_first else after).append(message)
    return tuple(before), tuple(after)
