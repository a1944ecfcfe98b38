# SPDX-License-Identifier: Apache-2.0
"""Records a step (`planner.step`) of a workload on a grid, by the models of computation and of communication.

Bytes are those of `planner.communication` and `planner.experts.cost`, seconds those of `planner.compute` and
`planner.collective_times`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from stretto.axes import EXPERT, EXPERT_DATA, EXPERT_Z, REPLICAS, SHARDS
from stretto.cluster import Cluster
from stretto.execution import BUCKET_BYTES, HALVED_BYTES, HALVED_INPUTS, SCATTERS_IN_FLIGHT
from stretto.planner.architecture import Architecture
from stretto.planner.collective_times import collective_seconds
from stretto.planner.communication import (
    LinearTraffic,
    Rates,
    WeightTraffic,
    has_nvlink_over,
    keys_numbers,
    linear_traffic,
    sends_latents,
)
from stretto.planner.compute import (
    BACKWARD_ATTENTION,
    BlockSeconds,
    CastSeconds,
    Device,
    block_seconds,
    cast_seconds,
    head_seconds,
)
from stretto.planner.experts.cost import HOST_READ, expert_messages, local_expert_parameters, weight_traffic
from stretto.planner.layers import Linear
from stretto.planner.memory import gathered_by_copy_engines, local_parameters
from stretto.planner.optimizer_state import gradient_chunks, number_bytes
from stretto.planner.step import (
    BlockRecord,
    EndRecord,
    ExpertsRecord,
    GroupCollective,
    KeysRecord,
    LinearRecord,
    PassRecorder,
    Prefetch,
    ProductRecord,
    SendGradient,
    StepRecord,
    TiledCollective,
    WeightCollectives,
)
from stretto.planner.workload import StepConfig, StepWorkload


def record_step(workload: StepWorkload, config: StepConfig, device: Device, rates: Rates) -> StepRecord:
    """Record a step. rates: the grid's `bandwidths`. Raises ValueError like these, for a figure that is missing."""
    return _WorkloadRecorder(workload.as_sharded(config), config, device, rates).record()


def chunked_sums(
    workload: StepWorkload, config: StepConfig, cluster: Cluster, rates: Rates
) -> tuple[int, GroupCollective | None]:
    """The all-reduces over data of gradients with separate optimizer state: how many chunks there are, and one's sum.

    workload: of the rank's own stages.
    """
    model, grid = workload.model, config.grid
    gradient, parameters = (
        number_bytes(workload, config.state).gradient,
        local_parameters(model, model.splitting_sizes(grid)),
    )
    chunks, of_experts = gradient_chunks(config.state, parameters), local_expert_parameters(model, grid)

    def sent(kept: float, replicas: int) -> float:
        return 2 * (replicas - 1) / replicas * kept / chunks * gradient

    num_bytes = sent(parameters - of_experts, grid.replicas)
    seconds = collective_seconds("all_reduce", REPLICAS, num_bytes, cluster, grid, rates, config.options.two_level)
    if of_experts:
        sent_by_experts = sent(of_experts, grid.expert_data)
        seconds += collective_seconds("all_reduce", EXPERT_DATA, sent_by_experts, cluster, grid, rates)
    whole = sent(parameters, grid.replicas)
    return chunks, GroupCollective("all_reduce", REPLICAS, whole, seconds) if seconds else None


class GradientBuckets:
    """Fills buckets with gradients, in the order in which they come: one message sums a bucket over data.

    As `parallel.comm.gradient_buckets.BucketPlan` does: the gradient with which a bucket has `BUCKET_BYTES` is its
    last. Gradients that are summed over other groups have other buckets.
    """

    def __init__(self, config: StepConfig, cluster: Cluster, rates: Rates) -> None:
        self._config, self._cluster, self._rates = config, cluster, rates
        self._open: dict[tuple[str, ...], list[float]] = {}  # bytes: of the gradients, and sent over each group

    def add(self, weight: WeightCollectives) -> list[GroupCollective]:
        """Put a gradient into its bucket. Returns the messages of a bucket that it fills."""
        if not weight.sums:
            return []
        groups = tuple([each.group for each in weight.sums])
        sizes = self._open.setdefault(groups, [0.0] * (1 + len(groups)))
        sizes[0] += weight.gradient_bytes
        for place, each in enumerate(weight.sums, 1):
            sizes[place] += each.num_bytes
        return self._close(groups) if sizes[0] >= BUCKET_BYTES else []

    def rest(self) -> list[GroupCollective]:
        """Returns the messages of the buckets that are not full."""
        return [each for groups in list(self._open) for each in self._close(groups)]

    def total(self, gradients: Iterable[WeightCollectives]) -> tuple[int, float]:
        """Returns how many messages send these gradients, and their seconds together."""
        messages = [message for each in gradients for message in self.add(each)] + self.rest()
        return len(messages), sum(each.seconds for each in messages)

    def _close(self, groups: tuple[str, ...]) -> list[GroupCollective]:
        _, *sent = self._open.pop(groups)
        cluster, grid, two_level = self._cluster, self._config.grid, self._config.options.two_level
        keys = [("all_reduce", group, num_bytes) for group, num_bytes in zip(groups, sent, strict=True)]
        return [GroupCollective(*key, collective_seconds(*key, cluster, grid, self._rates, two_level)) for key in keys]


class _WorkloadRecorder:
    """Records the parts of one step."""

    def __init__(self, workload: StepWorkload, config: StepConfig, device: Device, rates: Rates) -> None:
        self.workload, self.config, self.device, self.rates = workload, config, device, rates
        self.cluster, self.model = device.cluster, workload.model
        self.tokens, grid = config.tokens(workload), config.grid
        sizes = {"x": grid.x, "y": grid.y, SHARDS: grid.shards, REPLICAS: grid.replicas, "context": grid.context}
        sizes |= {EXPERT: grid.expert, EXPERT_Z: grid.expert_z, EXPERT_DATA: grid.expert_data}
        self._known = device.collectives(grid, config.options.two_level)
        self._several = {group for group, size in sizes.items() if size > 1}  # that have several ranks
        options, has_nvlink = config.options, has_nvlink_over(self.cluster, config.grid, SHARDS)
        is_plain, is_whole = not self.model.sends_blocks, config.grid.pipe == 1
        engines = options.overlap.copy_engines and has_nvlink and config.grid.shards > 1 and is_whole
        keeps = options.keeps_weights and (not options.recomputation.is_on or options.gathers_once)
        # Of a model that is sharded by blocks, copy engines gather its large parameters alone.
        is_large = is_plain or sum(gathered_by_copy_engines(workload, config, has_nvlink=has_nvlink)) > 0
        engines = engines and not config.state.sparsity  # messages carry what is left
        self.gathers_by_engine = engines and keeps and options.overlap.all_gather and is_large
        self.reads_table = engines and keeps and options.overlap.all_gather and not self.model.is_sharded_by_blocks
        self.scatters_by_engine = engines and is_plain

    def record(self) -> StepRecord:
        workload, config, model = self.workload, self.config, self.model
        is_whole = config.grid.pipe == 1
        prefetch: Prefetch = "all" if self.gathers_by_engine else "next"
        kinds, casts = [], [0.0, 0.0]
        for count, kind in model.kinds:
            inner = workload.stage(1, is_first=False, is_last=False, moe_blocks=int(kind.moe_blocks > 0))
            of_block = cast_seconds(inner, config, self.device)
            kinds.append((count, self._block(kind, of_block)))
            casts = [casts[0] + count * of_block.forward, casts[1] + count * (of_block.again + of_block.backward)]
        outside = (0.0, 0.0)  # of the ends of pipelines, no casts are counted
        if is_whole:
            whole = cast_seconds(workload, config, self.device)
            outside = max(0.0, whole.forward - casts[0]), max(0.0, whole.again + whole.backward - casts[1])
        first, last = (
            workload if is_whole else workload.stage(1, is_first=is_first, is_last=not is_first)
            for is_first in (True, False)
        )
        return StepRecord(
            workload,
            config,
            self.cluster,
            tuple(kinds),
            self._embedding(first.model, outside),
            self._head(last),
            prefetch if config.options.overlap.all_gather else "none",
            1 if model.sends_blocks else SCATTERS_IN_FLIGHT,
        )

    def _over(self, kind: str, group: str, num_bytes: float) -> GroupCollective | None:
        """A collective over a group that sends so many bytes from a rank; None where it has one rank."""
        if group not in self._several:
            return None
        key = kind, group, num_bytes
        if key not in self._known:
            options = self.config.options
            seconds = collective_seconds(*key, self.cluster, self.config.grid, self.rates, options.two_level)
            self._known[key] = GroupCollective(*key, seconds) if seconds > 0 else None
        return self._known[key]

    def _weight(
        self, traffic: WeightTraffic, shards: str = SHARDS, replicas: str = REPLICAS, *, pruned: float = 0.0
    ) -> WeightCollectives:
        """Collectives of weights over the ranks that shard them, and over those that hold the same.

        pruned: the part of them that pruning has left nothing of, and that is not sent.
        """
        element, is_separate = self.workload.element, self.config.state.is_separate
        sent = element * (1 - pruned)
        # Of linears and experts: what is gathered outside of blocks is not in fp8.
        in_fp8 = isinstance(traffic, LinearTraffic) or shards == EXPERT_Z
        share = self.workload.gathered_share if in_fp8 else 1.0
        gather = self._over("all_gather", shards, traffic.all_gather * sent * share)
        scatter = self._over("reduce_scatter", shards, traffic.reduce_scatter * sent)
        sums = [self._over("all_reduce", replicas, traffic.data * element)]
        if isinstance(traffic, LinearTraffic) and traffic.copies:
            sums.append(self._over("all_reduce", "x", traffic.copies * element))
        return WeightCollectives(
            gather._replace(by_copy_engine=self.gathers_by_engine and shards == SHARDS) if gather else None,
            scatter._replace(by_copy_engine=self.scatters_by_engine and shards == SHARDS) if scatter else None,
            () if is_separate else tuple(filter(None, sums)),  # separate state sums chunks
            traffic.shard * element,
        )

    def _block(self, model: Architecture, casts: CastSeconds) -> BlockRecord:
        config, options, by_blocks = self.config, self.config.options, model.sends_blocks
        recomputes = options.recomputation.is_on
        seconds = block_seconds(self.workload, model, config, self.device)
        linears = tuple(self._linear(place, model.linears, seconds) for place in range(len(model.linears)))
        keys = self._keys(model, seconds)
        own, own_backward = (0.0, 0.0) if keys is None else (keys.own - keys.merges, keys.own_backward)
        return BlockRecord(
            options,
            self.cluster.host,
            linears,
            seconds.other_forward + casts.forward - own,
            seconds.other_backward + casts.backward - own_backward,
            seconds.other_forward + casts.again - own if recomputes else 0.0,
            None if by_blocks else self._statistics(),
            tuple(self._weights_together(model)),
            self._experts(model, seconds.experts),
            frees=not options.keeps_weights and not (recomputes and by_blocks),
            leaves_out_last=seconds.leaves_out_last,
            keys=keys,
        )

    def _keys(self, model: Architecture, seconds: BlockSeconds) -> KeysRecord | None:
        """Record what attention over context exchanges. To its own keys a rank attends in its part of all, cut zig-zag;
        of packed documents, in more."""
        grid, config = model.splitting_sizes(self.config.grid), self.config
        has_nvlink = has_nvlink_over(self.cluster, config.grid, "context")
        latents = sends_latents(self.workload, config, has_nvlink=has_nvlink)
        packed, way = self.workload.documents, config.attention_way
        shared = None if packed is None else packed.over_context(grid.context)
        numbers = keys_numbers(model, grid, self.tokens, packed, latents=latents)
        if way == "ulysses":  # one half travels under the other's attention
            heads = sum(layer.exchanged_heads(grid) for layer in model.block)
            numbers = self.tokens * heads * (grid.context - 1) / grid.context / 2
        keys = self._over("all_to_all", "context", numbers * self.workload.element)
        if keys is None:
            return None
        place = next(place for place, linear in enumerate(model.linears) if linear.is_rowwise)
        others = grid.context - 1 if way == "ring" else 1  # a ring sends under all keys but the last
        share = 1 / grid.context if shared is None else shared.own / others
        own, expands, merges = others * share * seconds.attention, None, 0.0
        if way == "ring":  # results in fp32, read and written
            queries = sum(layer.exchanged_heads(grid) - layer.exchanged_keys(grid) for layer in model.block) / 2
            merges = self.device.traffic((others - 1) * 2 * 4 * self.tokens * max(queries, 0.0))
        if way == "ulysses":
            own = seconds.attention
        elif latents:  # of the last tokens' rank, the linear before its output's makes keys of all others' latents
            expands = (grid.context - 1 if shared is None else shared.held) * seconds.linears[place - 1][0]
        exposed = keys if way == "ulysses" else None
        return KeysRecord(place, keys, own, BACKWARD_ATTENTION * own, expands, merges, exposed)

    def _statistics(self) -> GroupCollective | None:
        y = self.config.grid.y
        return self._over("all_reduce", "y", 2 * (y - 1) / y * self.tokens / self.config.token_parts * 8)

    def _weights_together(self, model: Architecture) -> Iterator[WeightCollectives]:
        grid = self.config.grid
        if model.sends_blocks:
            prunable = sum(linear.weights for linear in model.linears) + sum(model.expert_tensors)
            pruned = self.config.state.sparsity * prunable / model.block_parameters
            yield self._weight(WeightTraffic.of(model.block_parameters, grid), pruned=pruned)
        if model.expert_tensors:
            pruned = self.config.state.sparsity
            yield self._weight(weight_traffic(model, grid), EXPERT_Z, EXPERT_DATA, pruned=pruned)

    def _linear(self, place: int, linears: Sequence[Linear], seconds: BlockSeconds) -> LinearRecord:
        """One linear. With sharded tokens, its sums over x are gathers and scatters within its products."""
        linear, config, element = linears[place], self.config, self.workload.element
        output, input_gradient, weight_gradient = seconds.linears[place]
        names, is_kept = (linear.name, f"input gradient of {linear.name}"), seconds.kept[place]
        if self.model.sends_blocks:
            products = ProductRecord(names[0], output), ProductRecord(names[1], input_gradient)
            return LinearRecord(*products, weight_gradient, is_kept, None)
        tokens = self.tokens * config.grid.shards  # as equations 5.3 and 5.4 have them
        traffic = linear_traffic(linear, config.grid, tokens)
        gathered = scattered = gradient_gathered = gradient_scattered = sums = gradient_sums = None
        parts = 1
        if config.token_parts == 1:
            parts = 2 if is_halved(linear, config, tokens * element) else 1
            sums = self._over("all_reduce", traffic.output_sum_axis, traffic.output * element / parts)
            gradient_sums = self._over("all_reduce", traffic.gradient_sum_axis, traffic.gradient * element)
        elif linear.is_rowwise:
            scattered = self._tiled("reduce_scatter", traffic.output)
            gradient_gathered = self._tiled("all_gather", traffic.output)
            gradient_sums = self._over("all_reduce", "y", traffic.gradient * element)
        else:
            if place == 0 or linears[place - 1].is_rowwise:  # else the linear before it has gathered the same
                gathered = self._tiled("all_gather", traffic.gradient)
            if linear.name not in ("k", "v"):  # whose gradients are scattered with that of q
                gradient_scattered = self._tiled("reduce_scatter", traffic.gradient)
            sums = self._over("all_reduce", "y", traffic.output * element)
        return LinearRecord(
            ProductRecord(names[0], output, gathered, scattered, (sums,) * parts if sums else ()),
            ProductRecord(
                names[1],
                input_gradient,
                gradient_gathered,
                gradient_scattered,
                (gradient_sums,) if gradient_sums else (),
            ),
            weight_gradient,
            is_kept,
            self._weight(traffic, pruned=config.state.sparsity),
        )

    def _tiled(self, kind: str, numbers: float) -> TiledCollective | None:
        """Half of an all-reduce over x, within a product, all but one rank's part; across nodes, before or after it.

        Kernels reach the GPUs of one node; across nodes the library sends, and all of it is waited for.
        """
        whole = self._over(kind, "x", numbers / 2 * self.workload.element)
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

    def _experts(self, model: Architecture, product: float) -> ExpertsRecord | None:
        layer, config, grid = model.moe_layer, self.config, self.config.grid
        if layer is None:
            return None
        waits = grid.expert > 1 and config.options.expert_rows is None
        by_pass: dict[bool, list[GroupCollective]] = {True: [], False: []}
        per_node = self.cluster.gpus_per_node
        for message in expert_messages(layer, grid, self.tokens, config.options, gpus_per_node=per_node):
            found = self._over(message.kind, message.axis, message.numbers * self.workload.element)
            by_pass[message.is_forward] += [found] if found is not None else []
        return ExpertsRecord(product, HOST_READ if waits else 0.0, _around(by_pass[True]), _around(by_pass[False]))

    def _embedding(self, model: Architecture, casts: tuple[float, float]) -> EndRecord:
        """The embeddings: looked up where x has the rows, and summed over x, or scattered where tokens are sharded.

        Where copy engines gather weights, the tokens' rows are read from the z ranks that have them: no rank gathers
        the table. Its gradient is sent whole, by the library. model: the first stage. Of a model that is sharded by
        blocks, all of it that is in no block is one.
        """
        grid = self.config.grid
        if model.is_sharded_by_blocks:
            return _record_end((), (), self._weight(WeightTraffic.of(model.outside_parameters, grid)), casts=casts)
        table, rows = self._weight(WeightTraffic.of(model.vocab / grid.x * model.hidden / grid.y, grid)), None
        if self.reads_table and table.gather is not None and table.scatter is not None:
            looked_up = self.tokens / grid.x * model.hidden / grid.y * self.workload.element
            rows = self._over("all_gather", SHARDS, (grid.shards - 1) / grid.shards * looked_up)
            table = replace(table, gather=None, scatter=table.scatter._replace(by_copy_engine=False))
        half = self._half_over_x()
        if self.config.token_parts > 1:
            kind, parts = ("all_reduce", 2) if model.shards_tokens_of_blocks else ("reduce_scatter", 1)
            summed, gathered = self._over(kind, "x", parts * half), self._over("all_gather", "x", half)
            return _record_end([rows, summed], [gathered], table, casts=casts)
        return _record_end([rows, self._over("all_reduce", "x", 2 * half)], (), table, casts=casts)

    def _head(self, end: StepWorkload) -> EndRecord:
        """The final norm, the head and the loss. end: the workload of the last stage."""
        model, config, grid, tokens = end.model, self.config, self.config.grid, self.tokens
        seconds = head_seconds(end, model.splitting_sizes(grid), tokens, self.device)
        in_forward = 1.0 if model.logits == "sliced" else 1 / 3  # a loss in slices computes its gradients with them
        head = in_forward * seconds, (1 - in_forward) * seconds
        if model.is_sharded_by_blocks:
            has_own = not model.is_first  # else the embeddings' message has it
            weight = self._weight(WeightTraffic.of(model.outside_parameters, grid)) if has_own else None
            return _record_end((), (), weight, head=head)
        element, x, y = end.element, grid.x, grid.y
        outputs = model.head_outputs / x
        statistics, table = self._statistics(), None
        forward = [statistics]
        backward = [statistics] * (2 if config.options.recomputation.exchanges_again else 1)
        if outputs:
            half = self._half_over_x()
            if config.token_parts > 1:
                forward.append(self._over("all_gather", "x", half))
            backward.append(self._over("all_reduce", "x", 2 * half))
            forward.append(self._over("all_reduce", "y", 2 * (y - 1) / y * tokens * outputs * element))
            table = self._weight(WeightTraffic.of(outputs * model.hidden / y, grid))
            table = table if model.has_own_head else replace(table, sums=())
        if model.logits == "sliced":
            forward += [self._over("all_reduce", "x", 2 * (x - 1) / x * tokens * 8)] * 2
        elif outputs:
            forward.append(self._over("all_gather", "x", (x - 1) * tokens * outputs * element))
        return _record_end(forward, backward, table, head=head)

    def _half_over_x(self) -> float:
        """Bytes that a rank sends to gather, or to scatter, hidden activations over x."""
        grid = self.config.grid
        return (grid.x - 1) / grid.x * self.tokens * self.model.hidden / grid.y * self.workload.element


def is_halved(linear: Linear, config: StepConfig, token_bytes: float) -> bool:
    """True if `parallelize` sums this linear's output in halves; `token_bytes`: m times the bytes of a number."""
    grid = config.grid
    into = linear.input_shards(grid)
    is_large = token_bytes / grid.shards * linear.local_outputs(grid) >= HALVED_BYTES
    return into > 1 and is_large and linear.inputs / into >= HALVED_INPUTS


def _around(messages: Sequence[GroupCollective]) -> tuple[tuple[GroupCollective, ...], tuple[GroupCollective, ...]]:
    """Return which collectives come before experts' products: the router's gather over y, the first all-to-all,
    and the gather
    of rows over x. The rest, sums over y among them, follows."""
    before: list[GroupCollective] = []
    after: list[GroupCollective] = []
    for message in messages:
        kinds = [each.kind for each in (*before, *after) if each.axis == message.axis]
        is_first = message.kind in ("all_to_all", "all_gather") and message.kind not in kinds
        (before if is_first else after).append(message)
    return tuple(before), tuple(after)


def _record_end(
    forward: Sequence[GroupCollective | None],
    backward: Sequence[GroupCollective | None],
    weight: WeightCollectives | None,
    *,
    casts: tuple[float, float] = (0.0, 0.0),
    head: tuple[float, float] = (0.0, 0.0),
) -> EndRecord:
    """casts, head: seconds in the forward and in the backward pass; collectives come after them, and before them."""
    to, back = PassRecorder(), PassRecorder()
    to.use(weight)
    to.compute("casts", casts[0])
    to.compute("head and loss", head[0])
    for collective in filter(None, forward):
        to.run(f"{collective.kind} outside blocks", collective)
    for collective in filter(None, backward):
        back.run(f"{collective.kind} outside blocks, backward", collective)
    back.compute("head and loss, backward", head[1])
    back.compute("casts, backward", casts[1])
    if weight is not None:
        back.steps.append(SendGradient(weight))
    return EndRecord(tuple(to.steps), tuple(back.steps), weight)
