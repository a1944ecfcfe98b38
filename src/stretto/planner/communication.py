# SPDX-License-Identifier: Apache-2.0
"""Predicts the communication of a step in bytes and seconds (Singh, section 5.1.2, equations 5.1 to 5.7).

Bytes are those that a ring algorithm sends from one rank. Times add up the kinds of collectives by the axis that they
run over, which for a rowwise linear is the other one: x and y change roles in every equation. What experts send is in
`experts.cost`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stretto.axes import EXPERT, INNER_TO_OUTER, NAMES, REPLICAS, SHARDS, GridSizes
from stretto.cluster import Cluster
from stretto.execution import MAX_EXPANDED
from stretto.planner.architecture import Architecture
from stretto.planner.documents import PackedDocuments
from stretto.planner.layers import Linear
from stretto.planner.workload import StepConfig, StepWorkload

KINDS = ("all_gather_z", "reduce_scatter_z", "all_reduce_y", "all_reduce_x", "all_reduce_data", "all_to_all", "keys")
Rates = Mapping[str, float | None]  # bytes/s, by axis
AXIS_OF = dict(zip(KINDS, ("z", "z", "y", "x", "data", EXPERT, "context"), strict=True))
MEANINGS = {
    "all_gather_z": "gathering weights over z",
    "reduce_scatter_z": "scattering weight gradients over z",
    "all_reduce_y": "sums over y",
    "all_reduce_x": "sums over x",
    "all_reduce_data": "summing gradients over data",
    "all_to_all": "sending rows to experts and back",
    "keys": "exchanging keys and values over context",
}
_OVER_SHARDS = dict.fromkeys(("all_gather_z", "reduce_scatter_z"), SHARDS)
GROUP_OF = AXIS_OF | _OVER_SHARDS | {"all_reduce_data": REPLICAS}  # an axis, or a group over several


@dataclass(frozen=True)
class Volume:
    """The communication of one rank in a step, in bytes (or, over a bandwidth, in seconds), by collective and axis."""

    all_gather_z: float = 0.0
    reduce_scatter_z: float = 0.0
    all_reduce_y: float = 0.0
    all_reduce_x: float = 0.0
    all_reduce_data: float = 0.0
    all_to_all: float = 0.0
    keys: float = 0.0

    @property
    def total(self) -> float:
        """Equation 5.6: their sum; and rows of experts, and keys of attention."""
        return sum(getattr(self, kind) for kind in KINDS)

    def __add__(self, other: "Volume") -> "Volume":
        return Volume(*(getattr(self, kind) + getattr(other, kind) for kind in KINDS))

    def times(self, factor: float) -> "Volume":
        return Volume(*(getattr(self, kind) * factor for kind in KINDS))

    def by_name(self) -> dict[str, float]:
        """Each of them, the last two only where they are sent, and their total."""
        found = {kind: getattr(self, kind) for kind in KINDS if kind not in KINDS[-2:] or getattr(self, kind)}
        return found | {"total": self.total}


@dataclass(frozen=True)
class WeightTraffic:
    """Numbers (not bytes) that one rank sends for one weight, or all of a block's, in a step, by equation."""

    all_gather: float  # 5.1: the weight, over z, once
    reduce_scatter: float  # 5.2: its gradient, over z
    data: float  # 5.5: its gradient, over data
    shard: float  # of which a rank has so many

    @classmethod
    def of(cls, parameters: float, grid: GridSizes) -> "WeightTraffic":
        """The traffic of so many parameters that only z splits: those of a block, or those that are in none."""
        gz, gdata = grid.shards, grid.replicas
        sharded = (gz - 1) / gz * parameters
        return cls(sharded, sharded, 2 * (gdata - 1) / gdata * parameters / gz, parameters / gz)


@dataclass(frozen=True)
class LinearTraffic(WeightTraffic):
    """Numbers (not bytes) that one rank sends for one linear in a step, by equation."""

    output: float  # 5.3: the output's partial sums, in the forward pass, over `output_sum_axis`
    gradient: float  # 5.4: those of the input's gradient, in the backward pass, over `gradient_sum_axis`
    copies: float  # the weight's gradient, over the ranks of x that hold copies
    output_sum_axis: str
    gradient_sum_axis: str


def linear_traffic(linear: Linear, grid: GridSizes, tokens: float) -> LinearTraffic:
    """Equations 5.1 to 5.5 for one linear, x and y swapped for a rowwise one. `tokens` (m): those of a data group."""
    weight, copies = linear.local_weights(grid), linear.copies(grid)
    gx, gy, gz, gdata = linear.output_shards(grid), linear.input_shards(grid), grid.shards, grid.replicas
    return LinearTraffic(
        all_gather=(gz - 1) * weight / gz,
        reduce_scatter=(gz - 1) / gz * weight,
        output=2 * (gy - 1) / gy * tokens * linear.local_outputs(grid) / gz,
        gradient=2 * (gx - 1) / gx * tokens * linear.inputs / (gz * gy),
        copies=2 * (copies - 1) / copies * weight / gz,
        data=2 * (gdata - 1) / gdata * weight / gz,
        shard=weight / gz,
        output_sum_axis=linear.input_axis,
        gradient_sum_axis=linear.output_axis,
    )


def blocks_volume(
    model: Architecture,
    grid: GridSizes,
    tokens: float,
    element: int,
    *,
    gathers: float = 1,
    documents: PackedDocuments | None = None,
) -> Volume:
    """Equation 5.6 over all linears of all blocks, in bytes of `element` a number.

    A model that is sharded by blocks sends all parameters of a block, over z and data alone.

    `gathers`: how often a step gathers a weight over z. Algorithm 3 keeps it for the backward pass: once. In fp8, half
    as often. documents: those that sequences pack.
    """
    if model.is_sharded_by_blocks:
        block = WeightTraffic.of(model.block_parameters, grid)
        keys = 3 * keys_numbers(model, model.splitting_sizes(grid), tokens / grid.shards, documents)
        of_block = Volume(gathers * block.all_gather, block.reduce_scatter, all_reduce_data=block.data, keys=keys)
        return of_block.times(model.layers * element)
    total = Volume()
    for count, kind in model.kinds:
        total += _block_volume(kind, grid, tokens, gathers, documents).times(count * element)
    return total


def _block_volume(
    model: Architecture, grid: GridSizes, tokens: float, gathers: float, documents: PackedDocuments | None
) -> Volume:
    """Elements that one block sends, except for experts that ranks divide."""
    # Again, and gradients, in the backward pass.
    total = Volume(keys=3 * keys_numbers(model, grid, tokens / grid.shards, documents))
    for linear in model.linears:
        traffic = linear_traffic(linear, grid, tokens)
        sums = {traffic.output_sum_axis: traffic.output, traffic.gradient_sum_axis: traffic.gradient}
        over_x = sums["x"] + traffic.copies
        total += Volume(gathers * traffic.all_gather, traffic.reduce_scatter, sums["y"], over_x, traffic.data)
    return total


def keys_numbers(
    model: Architecture,
    grid: GridSizes,
    tokens: float,
    documents: PackedDocuments | None = None,
    *,
    latents: bool = False,
) -> float:
    """Numbers that one rank sends of one block's keys and values in its forward pass, `tokens` of them its own.

    The rank that sends most, of sequences cut zig-zag: the last, whose tokens all others need; of packed documents,
    which need their own alone, the one that sends or receives most. latents: of these (`sends_latents`).
    """
    numbers = sum(layer.latents(grid)[0] if latents else layer.exchanged_keys(grid) for layer in model.block)
    if documents is not None and numbers:
        return documents.over_context(grid.context).busiest * tokens * numbers
    return (grid.context - 1) * tokens * numbers


def sends_latents(workload: StepWorkload, config: StepConfig, *, has_nvlink: bool) -> bool:
    """True if ranks of context exchange latents, and make keys and values of them (`stretto.parallel.context`): of
    blocks that are recomputed, where not too many numbers are made. has_nvlink: whether it joins these ranks, so that
    copy engines send keys under attention."""
    grid, (kind, *_) = workload.model.splitting_sizes(config.grid), workload.model.kinds
    expanded = sum(layer.exchanged_keys(grid) for layer in kind.model.block if layer.latents(grid)[0])
    pays = config.options.recomputation.is_on and config.token_parts == 1 and not has_nvlink and grid.context > 1
    return pays and 0 < config.micro_batch * workload.seq_len * expanded <= MAX_EXPANDED


def bandwidth(cluster: Cluster, grid: GridSizes, axis: str) -> float:
    """A rank's bytes/s in the axis's collectives while all groups of the axis communicate.

    Case 1, groups inside a node: the measured row of `in_node_bandwidths`; where there is none, the figures of the
    node's links (a group of `size` reaches size - 1 peers, each by its own link, up to all of a GPU's links). Case 2,
    groups across nodes: equation 5.7. Raises ValueError for a figure that the cluster does not have.
    """
    return group_bandwidth(cluster, grid.preceding(axis), grid[axis])


def group_bandwidth(cluster: Cluster, preceding: int, size: int) -> float:
    """`bandwidth` of groups of so many ranks, each so far from the next."""
    if preceding * size > cluster.gpus_per_node:
        return network_bandwidth(cluster) / min(cluster.gpus_per_node, preceding)
    measured = cluster.measured_in_node_bandwidth(preceding, size)
    if measured is not None:
        return measured
    whole = cluster.require("in_node.bandwidth")
    pair = cluster.in_node.pair_bandwidth
    return whole if pair is None or size == 1 else min(whole, (size - 1) * pair)


def network_bandwidth(cluster: Cluster) -> float:
    """Bytes/s that a node sends to others. Raises ValueError for a cluster that does not say it."""
    if cluster.inter_node_bandwidth is None:
        cluster.require("nics_per_node")
        cluster.require("between_nodes.bandwidth")
    assert cluster.inter_node_bandwidth is not None
    return cluster.inter_node_bandwidth


def nic_bytes(workload: StepWorkload, config: StepConfig, cluster: Cluster) -> dict[str, float]:
    """Bytes that each network interface of a node sends in a step of the linears' collectives, by kind.

    Only of kinds whose groups reach other nodes, if the cluster says how many interfaces a node has; the node's traffic
    is shared evenly. A ring over all ranks crosses from node to node once a group; in two levels each rank sends its
    own part to every other node. ("auto" counts as rings: what it runs depends on the links' times.)
    """
    grid, options, nics = config.grid, config.options, cluster.nics_per_node
    if nics is None:
        return {}
    count = config.micro_batches(workload)
    first, again = config.weight_gathers(count)
    gathers = (first + (0 if options.keeps_weights else again)) * workload.gathered_share
    volume = blocks_volume(
        workload.model,
        grid,
        workload.tokens / grid.replicas,
        workload.element,
        gathers=gathers,
        documents=workload.documents,
    )
    volume = replace(volume, reduce_scatter_z=config.gradient_scatters(count) * volume.reduce_scatter_z)
    found = {}
    for kind in KINDS:
        over, sent = grid.axes_of(GROUP_OF[kind]), getattr(volume, kind)
        if not sent or AXIS_OF[kind] in (EXPERT, "context"):
            continue
        preceding, size = grid.preceding(over[-1]), grid.over(over)
        if preceding * size <= cluster.gpus_per_node:
            continue
        groups = min(preceding, cluster.gpus_per_node)
        inside = max(1, cluster.gpus_per_node // preceding)
        if options.two_level is True and AXIS_OF[kind] in ("z", "data"):
            sent *= (size - inside) / (size - 1)  # nothing that only goes inside the node
        found[kind] = groups * sent / nics
    return found


def leaves_node(cluster: Cluster, grid: GridSizes, pipe_rank: int) -> bool:
    """True if some rank of a stage has the rank after it, of the next stage, on another node.

    The ranks of a stage are consecutive. Of the last rank of pipe, the next is the first, where interleaved stages go
    on.
    """
    ranks, node = grid.stage_ranks, cluster.gpus_per_node
    if pipe_rank == grid.pipe - 1:
        return grid.pipe * ranks > node
    return pipe_rank * ranks % node + 2 * ranks > node


def message_rate(cluster: Cluster, grid: GridSizes, *, leaves: bool) -> float:
    """A rank's bytes/s to the rank of the next stage while all ranks of its stage send.

    Between nodes it is equation 5.7's, the ranks of a node sharing its network; within one, a measured row of
    `in_node_bandwidths`, or the link to one peer. Raises ValueError for a figure that the cluster does not have.
    """
    if leaves:
        return network_bandwidth(cluster) / min(cluster.gpus_per_node, grid.stage_ranks)
    for size in (grid.pipe, 2):
        measured = cluster.measured_in_node_bandwidth(grid.stage_ranks, size)
        if measured is not None:
            return measured
    whole = cluster.require("in_node.bandwidth")
    return whole if cluster.in_node.pair_bandwidth is None else min(whole, cluster.in_node.pair_bandwidth)


def message_numbers(model: Architecture, grid: GridSizes, tokens: float, token_parts: int) -> float:
    """Numbers of the hidden activations of so many tokens, or of their gradient, that a rank sends to the next stage.

    Ranks of x send the same, unless each has its part of the tokens.
    """
    return tokens * model.hidden / model.splitting_sizes(grid).y / token_parts


def has_nvlink_over(cluster: Cluster, grid: GridSizes, axis: str) -> bool:
    """True if NVLink reaches all ranks of an axis, or of a group over several."""
    over = grid.axes_of(axis)
    return cluster.has_nvlink and grid.preceding(over[-1]) * grid.over(over) <= cluster.gpus_per_node


def bandwidths(cluster: Cluster, grid: GridSizes) -> Rates:
    """`bandwidth` of every axis; for one of a single rank what a group there would get, or None if that is not known.

    Raises ValueError for a figure that an axis of several ranks needs and the cluster does not have.
    """
    known: dict[str, float | None] = {}
    for axis in INNER_TO_OUTER:
        try:
            known[axis] = bandwidth(cluster, grid, axis)
        except ValueError:
            if grid[axis] > 1:
                raise
            known[axis] = None
    return known


def slowest_rate(rates: Rates, grid: GridSizes, group: str) -> float | None:
    """The bandwidth of an axis, or of a group over several: that of its slowest axis of several ranks."""
    over = grid.axes_of(group)
    known = [rate for axis in over if grid[axis] > 1 and (rate := rates[axis]) is not None]
    return min(known, default=rates[over[0]])


def seconds(volume: Volume, rates: Rates, grid: GridSizes) -> Volume:
    """Bytes over the bandwidth of the axis, or group of axes, that they are sent over; without experts' all-to-alls."""
    rated = [kind for kind in KINDS if AXIS_OF[kind] != EXPERT]
    return Volume(
        **{kind: getattr(volume, kind) / (slowest_rate(rates, grid, GROUP_OF[kind]) or 1.0) for kind in rated}
    )


def sum_by_axis(times: Mapping[str, float]) -> dict[str, float]:
    """Seconds by axis; that of experts only where all-to-alls take any."""
    by_axis = dict.fromkeys(NAMES, 0.0)
    for kind in KINDS:
        if time := times.get(kind, 0.0):
            by_axis[AXIS_OF[kind]] = by_axis.get(AXIS_OF[kind], 0.0) + time
    return by_axis
