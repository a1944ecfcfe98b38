# SPDX-License-Identifier: Apache-2.0
"""Predicts the time of a step by one of two cost models.

`paper`: the assumptions of Singh's dissertation. Only the linears' collectives count, at the bandwidths of section
5.1.2, with no start-up, nothing hidden and no computation: good for ranking grids, not for telling the time.

`full` adds what they omit: computation, embedding, head and norms, a start-up latency per message, and overlap.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from stretto.axes import EXPERT, REPLICAS, GridSizes
from stretto.cluster import Cluster
from stretto.execution import HALVED_BYTES, HALVED_INPUTS
from stretto.planner.collective_times import chunked_sums, collective_seconds, group_seconds, message_latency
from stretto.planner.communication import (
    KINDS,
    MEANINGS,
    LinearTraffic,
    Rates,
    Volume,
    WeightTraffic,
    blocks_volume,
    features_traffic,
    has_nvlink_over_z,
    linear_traffic,
    seconds,
    sum_by_axis,
)
from stretto.planner.compute import Compute, Device, compute
from stretto.planner.experts.cost import (
    HOST_READ,
    all_to_all_seconds,
    expert_messages,
    expert_seconds,
    expert_volume,
    group_of_replicas,
    group_of_shards,
    ranks_in_node,
    weight_traffic,
)
from stretto.planner.layers import Linear
from stretto.planner.memory import local_parameters
from stretto.planner.optimizer_state import exposed_sums, gradient_chunks, steps_in_chunks
from stretto.planner.workload import StepConfig, StepWorkload

PAPER_ELEMENT = 2  # bytes: the paper trains in bf16
# A collective uses some multiprocessors, memory bandwidth and power, which slows down concurrent kernels.
SLOWDOWN_BESIDE_COMMUNICATION = 0.2
# Copy engines use no multiprocessors: concurrently with their all-gather of 256 MB, of 0.59 ms, products took
# 0.19 ms longer, and with NCCL's, of 0.67 ms, 0.29 ms (`python -m lab backend`, 4x H200, 2026-11-26).
SLOWDOWN_BESIDE_COPIES = 0.3


@dataclass(frozen=True)
class PipelineCost:
    """What a step takes because its model is cut into stages, in seconds on the rank that computes most.

    cuts: stage s has the blocks cuts[s]:cuts[s + 1]. bubble: how long the rank waits although messages took no time.
    messages: all messages that an inner rank sends in a step, hidden or not. is_replayed: whether the whole schedule
    was simulated, in place of a closed form. phase: all forward and backward passes, from the first to the last.
    """

    cuts: tuple[int, ...]
    bubble: float
    messages: float
    phase: float
    is_replayed: bool = False


@dataclass(frozen=True)
class Cost:
    """A step's predicted seconds. `communication` is all of it; `exposed`, by axis, what computation does not hide.

    `terms` are the parts of the step by name: their sum is its time, and explanations compare them one by one.
    """

    terms: Mapping[str, float]
    bandwidth: Mapping[str, float | None]
    communication: Volume
    exposed: Mapping[str, float]
    compute: Compute | None = field(default=None)
    pipeline: "PipelineCost | None" = None

    @property
    def step_time(self) -> float:
        return sum(self.terms.values())


def paper_cost(workload: StepWorkload, config: StepConfig, cluster: Cluster, rates: Rates) -> Cost:
    """Only equations 5.1 to 5.7, with 2 bytes per element and m = batch x seq_len / G_data; and what experts
    send (section 7.3), at the same bandwidths.

    rates: the grid's `bandwidths`.
    """
    grid = config.grid
    gathers = 1 if config.options.keeps_weights else 2
    volume = blocks_volume(workload.model, grid, workload.tokens / grid.replicas, PAPER_ELEMENT, gathers=gathers)
    times = seconds(volume, rates, grid) + paper_expert_seconds(workload, config, cluster, gathers)
    return Cost(paper_terms(times), rates, times, sum_by_axis(times.by_name()))


def paper_terms(times: Volume) -> dict[str, float]:
    """The parts of a step of the paper's model, by name; all-to-alls only where there are any."""
    return {name: times.by_name()[kind] for kind, name in MEANINGS.items() if kind in times.by_name()}


def paper_expert_seconds(workload: StepWorkload, config: StepConfig, cluster: Cluster, gathers: int) -> Volume:
    """Seconds of what experts send: two all-to-alls in the forward pass and two in the backward pass, and two again
    where activations are checkpointed without keeping what collectives bring (section 7.3.2)."""
    model, grid, options = workload.model, config.grid, config.options
    if model.moe is None:
        return Volume()
    volume = expert_volume(
        model,
        grid,
        workload.tokens / grid.batch_parts,
        PAPER_ELEMENT,
        forward_passes=2 if options.recomputation.exchanges_again else 1,
        drops_duplicates=config.drops_duplicates,
        gathers=gathers,
    )
    return expert_seconds(volume, grid, cluster)


def full_cost(workload: StepWorkload, config: StepConfig, cluster: Cluster, device: Device, rates: Rates) -> Cost:
    """Computation and communication of a step on one rank, and how much of the latter is exposed.

    All of it where nothing overlaps: every collective is waited for where it is issued. rates: the grid's `bandwidths`.
    """
    work = compute(workload, config, device)
    step = StepCommunication(workload, config, cluster, work, rates)
    communication = step.communication()
    exposed = sum_by_axis(
        step.exposed() if config.options.overlap.hides_any else {kind: getattr(communication, kind) for kind in KINDS}
    )
    slowdown = cluster.gpu.overlap_slowdown or SLOWDOWN_BESIDE_COMMUNICATION
    terms = {"computation": work.total - work.optimizer, "the optimizer": work.optimizer}
    terms |= {f"exposed communication over {axis}": time for axis, time in exposed.items()}
    hidden = communication.total - sum(exposed.values())
    by_copies = min(step.by_copy_engines, hidden)
    slower = slowdown * (hidden - by_copies) + min(slowdown, SLOWDOWN_BESIDE_COPIES) * by_copies
    terms["slower computation beside communication"] = slower
    if reads := step.host_reads:
        terms["waits of the host for counts of rows"] = reads
    return Cost(terms, step.rates, communication, exposed, work)


@dataclass(frozen=True)
class _Sum:
    """Seconds of a step in which partial sums of one linear go over an axis, and how many a product hides."""

    axis: str
    time: float
    hidden: float
    is_forward: bool


class StepCommunication:
    """The collectives of one step on one rank, in seconds, by what can hide them."""

    def __init__(
        self, workload: StepWorkload, config: StepConfig, cluster: Cluster, work: Compute, rates: Rates
    ) -> None:
        self.workload, self.config, self.cluster, self.work, self.rates = workload, config, cluster, work, rates
        grid, model = config.grid, workload.model
        self.micro_batches = config.micro_batches(workload)
        # How often a weight's gradient goes over z in a step.
        self.scatters = 1 if config.options.scatters_once else self.micro_batches
        tokens = workload.tokens / grid.replicas / self.micro_batches
        # Recomputation runs the forward pass a second time, and what of its communication its mode does not keep.
        recomputation = config.options.recomputation
        self.forward_exchanges = 2 if recomputation.exchanges_again else 1
        # Of each kind of blocks, how many there are in a step, what each of its linears sends, and how often outputs
        # are summed: recomputation may leave out those of a block's last linear.
        self._traffics: list[tuple[int, Linear, LinearTraffic, float]] = []
        for kind in model.kinds if not model.is_sharded_by_blocks else ():
            is_left_out = recomputation.sums_again and kind.model.ends_with_linear
            for linear in kind.model.linears:
                sums: float = 2 if recomputation.sums_again else 1
                if is_left_out and linear is kind.model.linears[-1]:
                    sums -= 1 / recomputation.blocks
                traffic = linear_traffic(linear, grid, tokens)
                self._traffics.append((kind.blocks * self.micro_batches, linear, traffic, sums))

    @cached_property
    def gathers(self) -> float:
        """How often blocks' weights are gathered over z, for each micro-batch or, where they are kept, for each step.

        A freed weight is gathered again for the backward pass, but not for an output that recomputation
        leaves out; a block is kept from its recomputation on.
        """
        model, options = self.workload.model, self.config.options
        recomputation = options.recomputation
        if self.config.gathers_once:
            return 1
        frees = not options.keeps_weights and not (recomputation.is_on and model.is_sharded_by_blocks)
        gathers: float = 1 + recomputation.is_on + frees
        if frees and recomputation.is_on and self._of_weights[1]:
            last = [kind for kind in model.kinds if kind.model.ends_with_linear]
            traffics = [linear_traffic(kind.model.linears[-1], self.config.grid, 0.0) for kind in last]
            left_out = sum(kind.blocks * self._weights(each)[0] for kind, each in zip(last, traffics, strict=True))
            gathers -= left_out / self._of_weights[1] / recomputation.blocks
        return gathers

    @cached_property
    def _of_weights(self) -> tuple[int, float, float, float]:
        """In how many messages all blocks' weights are sent, and the seconds of one all-gather and one reduce-scatter
        over z, and of one all-reduce over data, of all of them."""
        model, grid = self.workload.model, self.config.grid
        numbers, times = 0, (0.0, 0.0, 0.0)
        for count, kind in model.kinds:
            # A message for each linear and one for a block's experts, or one for all of its parameters.
            messages: list[WeightTraffic] = []
            if not model.is_sharded_by_blocks:
                messages += [linear_traffic(linear, grid, 0.0) for linear in kind.linears]
            if together := kind.block_parameters if model.is_sharded_by_blocks else kind.gathered_parameters:
                messages.append(WeightTraffic.of(together, grid))
            sent = [self._weights(each) for each in messages]
            if kind.expert_tensors:
                sent.append(self._expert_weights(weight_traffic(kind, grid)))
            numbers += count * len(sent)
            times = tuple(time + count * sum(each) for time, each in zip(times, zip(*sent, strict=True), strict=True))
        return numbers, *times

    @cached_property
    def by_copy_engines(self) -> float:
        """Seconds of a step in which copy engines send linears' weights and gradients over z; 0 where NCCL does."""
        config, model = self.config, self.workload.model
        is_copied = config.options.overlap.copy_engines and config.grid.pipe == 1 and config.grid.z > 1
        if model.is_sharded_by_blocks or not is_copied or not has_nvlink_over_z(self.cluster, config.grid):
            return 0.0
        gathered = scattered = 0.0
        for count, kind in model.kinds:
            for linear in kind.linears:
                gather, scatter, _ = self._weights(linear_traffic(linear, config.grid, 0.0))
                gathered, scattered = gathered + count * gather, scattered + count * scatter
        gathers = self.gathers * (1 if config.gathers_once else self.micro_batches)
        return gathers * gathered + self.scatters * scattered

    @property
    def messages(self) -> int:
        """In how many messages all blocks' weights are sent."""
        return self._of_weights[0]

    @property
    def all_gather(self) -> float:
        """Seconds of gathering all blocks' weights over z, for forward passes alone if it is done again."""
        return (1 if self.config.gathers_once else self.micro_batches) * self._of_weights[1]

    @property
    def reduce_scatter(self) -> float:
        """Seconds of all reduce-scatters over z of blocks' gradients."""
        return self.scatters * self._of_weights[2]

    @cached_property
    def _of_data(self) -> tuple[int, float]:
        """All-reduces over data, and their seconds: of a block's weights, or, with separate optimizer state, chunks of
        all gradients."""
        workload, config, model = self.workload, self.config, self.workload.model
        if not config.state.is_separate:
            return model.layers, self._of_weights[3]
        parameters = local_parameters(model, model.splitting_sizes(config.grid))
        reductions = gradient_chunks(config.state, parameters)
        return reductions, chunked_sums(workload, config, self.cluster, self.rates, parameters, reductions)

    @property
    def reductions(self) -> int:
        """All-reduces over data in a step."""
        return self._of_data[0]

    @property
    def data(self) -> float:
        """Their seconds."""
        return self._of_data[1]

    @cached_property
    def sums(self) -> list[_Sum]:
        """All that linears send over x and y, and hidden features that are gathered for experts."""
        config, model = self.config, self.workload.model
        tokens = self.workload.tokens / config.grid.replicas / self.micro_batches
        sums: list[_Sum] = []
        for place in range(len(self._traffics)):
            sums += self._sharded_sums(place) if config.token_parts > 1 else self._whole_sums(place, tokens)
        if model.gathered_parameters and not model.is_sharded_by_blocks:
            sums += self._features_of_experts(tokens)
        if model.moe is not None:
            sums += self._rows_of_experts()
        return sums

    def _weights(self, traffic: WeightTraffic) -> tuple[float, float, float]:
        """Seconds of one all-gather and one reduce-scatter over z, and of one all-reduce over data."""
        element = self.workload.element
        sums = self.collective("all_reduce", REPLICAS, traffic.data * element)
        if isinstance(traffic, LinearTraffic) and traffic.copies:
            sums += self.collective("all_reduce", "x", traffic.copies * element)
        return (
            self.collective("all_gather", "z", traffic.all_gather * element),
            self.collective("reduce_scatter", "z", traffic.reduce_scatter * element),
            sums,
        )

    def _expert_weights(self, traffic: WeightTraffic) -> tuple[float, float, float]:
        """The same of experts, over expert_z and expert_data."""
        element, grid = self.workload.element, self.config.grid
        shards, replicas = group_of_shards(grid), group_of_replicas(grid)
        return (
            group_seconds("all_gather", shards, traffic.all_gather * element, self.cluster),
            group_seconds("reduce_scatter", shards, traffic.reduce_scatter * element, self.cluster),
            group_seconds("all_reduce", replicas, traffic.data * element, self.cluster),
        )

    def _whole_sums(self, place: int, tokens: float) -> Iterator[_Sum]:
        """Partial sums of the output, of large ones half under the product of the other half, and of the input's
        gradient, under the weight's."""
        calls, linear, traffic, passes = self._traffics[place]
        element = self.workload.element
        parts = 2 if is_halved(linear, self.config.grid, tokens * element) else 1
        each = self.collective("all_reduce", traffic.output_sum_axis, traffic.output * element / parts)
        time = calls * passes * parts * each
        hidden = min(time, passes * self.work.outputs[place]) / 2 if parts == 2 else 0.0
        yield _Sum(traffic.output_sum_axis, time, hidden, is_forward=True)
        time = calls * self.collective("all_reduce", traffic.gradient_sum_axis, traffic.gradient * element)
        yield _Sum(traffic.gradient_sum_axis, time, min(time, self.work.weight_gradients[place]), is_forward=False)

    def _sharded_sums(self, place: int) -> Iterator[_Sum]:
        """With tokens sharded over x: the halves of x's all-reduces, each within a product, and y's sums, waited for.

        A rowwise linear scatters its output and gathers its gradient; a colwise one gathers its input, if the linear
        before it has not (gate and up take the same), and scatters its gradient.
        """
        calls, linear, traffic, sums = self._traffics[place]
        element, work = self.workload.element, self.work
        passes = sums if linear.is_rowwise else self.forward_exchanges
        gathers_input = place == 0 or self._traffics[place - 1][1].is_rowwise
        if linear.is_rowwise:
            of_x, of_y, kinds = traffic.output, traffic.gradient, ("reduce_scatter", "all_gather")
        else:
            of_x, of_y, kinds = traffic.gradient, traffic.output, ("all_gather", "reduce_scatter")
        forward, backward = (calls * self.collective(kind, "x", of_x / 2 * element) for kind in kinds)
        if linear.is_rowwise or gathers_input:
            yield self._within(passes * forward, passes * work.outputs[place], is_forward=True)
        yield self._within(backward, work.input_gradients[place], is_forward=False)
        is_output = not linear.is_rowwise
        time = calls * (sums if is_output else 1) * self.collective("all_reduce", "y", of_y * element)
        yield _Sum("y", time, 0.0, is_forward=is_output)

    def _features_of_experts(self, tokens: float) -> Iterator[_Sum]:
        """Hidden features and their gradients, gathered over y for experts and waited for."""
        num_bytes = features_traffic(self.workload.model, self.config.grid, tokens) * self.workload.element
        again = 2 if self.config.options.recomputation.is_on else 1  # no mode keeps them
        for passes, is_forward in ((again, True), (1, False)):
            time = self.workload.model.layers * self.micro_batches * passes
            yield _Sum("y", time * self.collective("all_gather", "y", num_bytes), 0.0, is_forward)

    def _rows_of_experts(self) -> Iterator[_Sum]:
        """What experts send of their rows, all of it waited for."""
        config, element = self.config, self.workload.element
        tokens = config.micro_batch * self.workload.seq_len
        leaves = config.grid.expert > ranks_in_node(config.grid, self.cluster.gpus_per_node)
        latency = message_latency(self.cluster, leaves=leaves)
        for count, kind in self.workload.model.kinds:
            if (layer := kind.moe_layer) is None:
                continue
            for message in expert_messages(
                layer, config.grid, tokens, config.token_parts, drops_duplicates=config.drops_duplicates
            ):
                num_bytes = message.numbers * element
                if message.kind == "all_to_all":
                    each = all_to_all_seconds(num_bytes, config.grid, self.cluster, latency)
                else:
                    each = self.collective(message.kind, message.axis, num_bytes)
                passes = self.forward_exchanges if message.is_forward else 1
                yield _Sum(message.axis, count * self.micro_batches * passes * each, 0.0, message.is_forward)

    @property
    def host_reads(self) -> float:
        """Seconds in which the host waits for counts of rows: of each forward pass of experts on several ranks."""
        if self.config.grid.expert == 1 or self.config.options.expert_rows is not None:
            return 0.0
        return self.workload.model.moe_blocks * self.micro_batches * self.forward_exchanges * HOST_READ

    def _within(self, time: float, product: float, *, is_forward: bool) -> _Sum:
        """What goes over x within a product, tile by tile: the first or last rank's part is waited for.

        Kernels reach the GPUs of one node; across nodes the library sends, and all of it is waited for.
        """
        reaches = self.config.grid.x <= self.cluster.gpus_per_node
        left = self.left_over(time, product, self.config.grid.x) if reaches else time
        return _Sum("x", time, time - left, is_forward)

    def communication(self) -> Volume:
        """All of it, hidden or not."""
        sums = [(each.axis, each.time) for each in self.sums]
        return self._volume(self.all_gather * self.gathers, self.reduce_scatter, self.data, sums)

    def exposed(self) -> dict[str, float]:
        """What is left when the next weight is gathered under this linear, sums hide as each can, and weights'
        gradients are sent during the rest of the backward pass."""
        work, parts = self.work, self.micro_batches * self.messages
        sums = [(each.axis, each.time - each.hidden) for each in self.sums]
        room = work.backward - sum(each.hidden for each in self.sums if not each.is_forward)
        gathered_forward = self.left_over(self.all_gather, work.forward, parts)
        again = (self.gathers - 1) * self.all_gather
        in_last = room / self.micro_batches  # of which the last micro-batch's backward pass has this
        if self.scatters == self.micro_batches:
            in_backward = self.reduce_scatter + again
            left = self.left_over(in_backward, room, parts)
            share = self.reduce_scatter / in_backward if in_backward else 0.0
            gathered_again, scattered = left * (1 - share), left * share
            in_last -= in_backward / self.micro_batches
        else:  # what is gathered again comes first, and only the last micro-batch scatters
            gathered_again = self.left_over(again, room, parts)
            in_last = max(0.0, in_last - again / self.micro_batches)
            scattered = self.left_over(self.reduce_scatter, in_last, parts // self.micro_batches)
            in_last -= self.reduce_scatter
        # Only the last micro-batch's backward pass can hide the sum over data, and what z sends comes first.
        room_for_data = max(0.0, in_last)
        data = self.left_over(self.data, room_for_data, self.reductions)
        if steps_in_chunks(self.workload, self.config):
            data = exposed_sums(data, self.data, self.reductions, work.optimizer)
        volume = self._volume(gathered_forward + gathered_again, scattered, data, sums)
        return {kind: getattr(volume, kind) for kind in KINDS}

    @staticmethod
    def left_over(time: float, room: float, parts: int) -> float:
        """What does not fit into `room`; at least one of its parts, the first gathered or the last to be scattered."""
        return max(time - room, time / parts) if time else 0.0

    def _volume(self, gather: float, scatter: float, data: float, sums: list[tuple[str, float]]) -> Volume:
        over = {"x": 0.0, "y": 0.0, EXPERT: 0.0}
        for axis, time in sums:
            over[axis] += time
        return Volume(gather, scatter, over["y"], over["x"], data, over[EXPERT]) + self.outside_blocks

    @cached_property
    def outside_blocks(self) -> Volume:
        """Embedding, head, loss, and the statistics of norms over y, which are exposed."""
        workload, grid, model = self.workload, self.config.grid, self.workload.model
        element, micro_batches = workload.element, self.micro_batches
        gathers = 1 if self.config.gathers_once else micro_batches
        if model.is_sharded_by_blocks:  # gathered as one block, for the forward and the backward pass
            gather, scatter, over_data = self._weights(WeightTraffic.of(model.outside_parameters, grid))
            over_data *= not self.config.state.is_separate  # whose chunks have all gradients
            return Volume(gathers * gather, self.scatters * scatter, all_reduce_data=over_data)
        tokens = workload.tokens / grid.batch_parts / micro_batches
        hidden, outputs = model.hidden / grid.y, model.head_outputs / grid.x
        z, x, y, data = grid.z, grid.x, grid.y, grid.replicas
        gather = scatter = over_data = 0.0
        tables = [(model.vocab / grid.x * hidden, True)] if model.is_first else []
        tables += [(outputs * hidden, model.has_own_head)] if outputs else []
        for table, is_own in tables:
            of_table = (z - 1) / z * table
            gather += gathers * self.collective("all_gather", "z", of_table * element)
            scatter += self.scatters * self.collective("reduce_scatter", "z", of_table * workload.element)
            if is_own and not self.config.state.is_separate:
                of_shard = 2 * (data - 1) / data * table / z * workload.element
                over_data += self.collective("all_reduce", REPLICAS, of_shard)
        # The looked-up rows, and the gradient of the head's input.
        half = (x - 1) / x * tokens * hidden * element
        over_x = len(tables) * self.collective("all_reduce", "x", 2 * half)
        if self.config.token_parts > 1:  # what is looked up is scattered, its gradient gathered; so is the head's input
            over_x += len(tables) * self.collective("all_gather", "x", half)
            if model.is_first:
                over_x += self.collective("reduce_scatter", "x", half) - self.collective("all_reduce", "x", 2 * half)
        if model.logits == "sliced" and model.is_last:  # the loss's statistics
            over_x += 2 * self.collective("all_reduce", "x", 2 * (x - 1) / x * tokens * 8)
        elif outputs:
            over_x += self.collective("all_gather", "x", (x - 1) * tokens * outputs * element)
        logits = self.collective("all_reduce", "y", 2 * (y - 1) / y * tokens * outputs * element) if outputs else 0.0
        of_statistics = 2 * (y - 1) / y * tokens / self.config.token_parts * 8
        norms = (1 + self.forward_exchanges) * (2 * model.layers + model.is_last)
        over_y = logits + norms * self.collective("all_reduce", "y", of_statistics)
        return Volume(gather, scatter, micro_batches * over_y, micro_batches * over_x, over_data)

    def collective(self, kind: str, group: str, num_bytes: float) -> float:
        """Seconds of one collective that sends so many bytes from a rank."""
        return collective_seconds(kind, group, num_bytes, self.cluster, self.config.grid, self.rates)


def is_halved(linear: Linear, grid: GridSizes, token_bytes: float) -> bool:
    """Whether `parallelize` sums this linear's output in halves; `token_bytes`: m times the bytes of a number."""
    into = linear.input_shards(grid)
    is_large = token_bytes / grid.z * linear.local_outputs(grid) >= HALVED_BYTES
    return into > 1 and is_large and linear.inputs / into >= HALVED_INPUTS
