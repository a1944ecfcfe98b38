# SPDX-License-Identifier: Apache-2.0
"""Predicts a mixture of experts' communication: all-to-alls of rows, exchanges over x and y, and weights.

A token of a rank is sent to each rank of its experts, once, and comes back (Singh, section 7.1, steps 4 and 7; there a
token has one expert); the backward pass sends two all-to-alls more, and so does recomputation that keeps nothing. Ranks
of x that cut experts need all tokens: TED sends them from each rank of x, and sums outputs over x. With duplicates
dropped (section 7.3.1), each rank of x sends its part of the tokens, so that all-to-alls send 1/x of the bytes, and
what came is gathered over x at the experts; outputs are scattered there, where the paper sums them whole, and drops.
The backward all-reduces belong to steps 2 and 6 of figure 7.3 (the text says 4 and 6, which are an all-to-all and the
sum).
"""

from collections.abc import Iterator
from typing import NamedTuple

from stretto.axes import EXPERT, GridSizes
from stretto.cluster import Cluster
from stretto.execution import ExecutionOptions
from stretto.planner.architecture import Architecture
from stretto.planner.communication import Volume, WeightTraffic, group_bandwidth, network_bandwidth
from stretto.planner.experts.layers import MoeLayer, distinct_ranks, expert_parts, places_of_rank, rows_of_rank
from stretto.planner.optimizer_state import Formula
from stretto.planner.workload import StepConfig, StepWorkload

# Seconds that each peer adds to an all-to-all in addition to its bytes. Messages to peers start together, so it is less
# than a hop of a ring takes.
ALL_TO_ALL_PEER = 1e-6
# Seconds that the host waits for the counts of rows, and launches kernels again after it, where `expert_rows` does not
# say how many rows there are at most. An assumption: a transfer of some hundred bytes and the launch of a few kernels.
HOST_READ = 40e-6


class ExpertMessage(NamedTuple):
    """One collective of a block's experts for one micro-batch: numbers that a rank sends, and the axis that it goes
    over.

    kind: "all_to_all", "all_gather", "reduce_scatter" or "all_reduce".
    """

    kind: str
    axis: str
    numbers: float
    is_forward: bool


class RankGroup(NamedTuple):
    """Groups of so many ranks, each so far from the next."""

    preceding: int
    size: int


def group_of_shards(grid: GridSizes) -> RankGroup:
    """The ranks that shard an expert's weights: what `expert` leaves of z."""
    return RankGroup(grid.preceding("z") * grid.expert_taken["z"], grid.expert_z)


def group_of_replicas(grid: GridSizes) -> RankGroup:
    """The ranks that sum gradients of the same experts: what `expert` leaves of data."""
    return RankGroup(grid.preceding("data") * grid.expert_taken["data"], grid.expert_data)


def expert_weights(model: Architecture, grid: GridSizes) -> float:
    """Numbers of one block's experts on a rank, whole over expert_z. Of a model whose blocks are alike."""
    return sum(model.expert_tensors) / (grid.expert * expert_parts(grid))


def local_expert_parameters(model: Architecture, grid: GridSizes) -> float:
    """Parameters of routed experts that one rank holds, of all blocks."""
    if not model.expert_parameters:
        return 0.0
    held = 0.0
    for count, kind in model.kinds:
        ups, downs = kind.expert_biases or (0, 0)
        held += count * expert_weights(kind, grid) / grid.expert_z
        held += count * (ups / grid.expert_x + downs / grid.y) / grid.expert
    return held


def weight_traffic(model: Architecture, grid: GridSizes) -> WeightTraffic:
    """Numbers that a rank sends of one block's experts: over expert_z, and over expert_data."""
    weights, shards, replicas = expert_weights(model, grid), grid.expert_z, grid.expert_data
    sharded = (shards - 1) / shards * weights
    return WeightTraffic(sharded, sharded, 2 * (replicas - 1) / replicas * weights / shards, weights / shards)


def expert_messages(
    layer: MoeLayer, grid: GridSizes, tokens: float, options: ExecutionOptions, *, gpus_per_node: int | None = None
) -> list[ExpertMessage]:
    """The collectives of one block's forward and backward pass, for so many tokens of each part of the batch.

    options: without drop_duplicates, and with x cutting experts, every rank of x sends all tokens. With expert_rows
    the library gathers all tokens, where kernels cannot send each to its ranks: over x, and over several nodes.
    gpus_per_node: None for one node.
    """
    return [message for message in _list_messages(layer, grid, tokens, options, gpus_per_node) if message.numbers > 0]


def _list_messages(
    layer: MoeLayer, grid: GridSizes, tokens: float, options: ExecutionOptions, gpus_per_node: int | None
) -> Iterator[ExpertMessage]:
    token_parts = grid.x if options.shard_sequence else 1
    shape, x, y = layer.shape, grid.x, grid.y
    hidden, ffn = layer.hidden / y, shape.ffn / grid.expert_x
    cuts = grid.expert_x > 1
    stays = grid.expert == 1 and token_parts == 1  # one rank has all experts, and no token is sent
    is_distinct = not stays and (not cuts or options.drop_duplicates or token_parts > 1)
    gathers = cuts and is_distinct
    rows = rows_of_rank(shape, grid, tokens)  # that experts compute
    there = places_of_rank(shape, grid, tokens)  # what experts receive, and what returns from them
    back = rows if options.expert_reduce == "choice" else there
    kinds = "all_to_all", "all_to_all"
    is_far = gpus_per_node is not None and ranks_in_node(grid, gpus_per_node) < grid.expert
    if options.expert_rows is not None and (gathers or is_far):
        there = tokens * grid.expert * grid.expert_x / x  # all tokens of the group
        back = there * shape.active if options.expert_reduce == "choice" else there
        kinds = "all_gather", "reduce_scatter"
    others = (grid.expert - 1) / grid.expert / (grid.expert_x if is_distinct else 1)
    for is_forward in (True, False):
        for kind, sent in zip(kinds, (there, back), strict=True):
            yield ExpertMessage(kind, EXPERT, others * sent * hidden, is_forward)
        if gathers:
            for kind, sent in (("all_gather", there), ("reduce_scatter", back)):
                yield ExpertMessage(kind, "x", (x - 1) / x * sent * hidden, is_forward)
        elif cuts:  # of whole outputs, if no token is sent
            yield ExpertMessage("all_reduce", "x", 2 * (x - 1) / x * (tokens if stays else rows) * hidden, is_forward)
        if is_distinct and token_parts == 1:  # outputs of all tokens, and gradients by their inputs
            yield ExpertMessage("all_gather", "x", (x - 1) / x * tokens * hidden, is_forward)
        # Partial sums over y: of gate and up, and of the gradient by what down takes.
        yield ExpertMessage(
            "all_reduce", "y", 2 * (y - 1) / y * rows * ffn * (shape.ups if is_forward else 1), is_forward
        )
    yield ExpertMessage("all_gather", "y", (y - 1) * tokens / token_parts * hidden, True)  # for the router


def expert_volume(
    model: Architecture,
    grid: GridSizes,
    tokens: float,
    element: int,
    *,
    options: ExecutionOptions | None = None,
    forward_passes: int = 1,
    gathers: float = 1,
) -> Volume:
    """Bytes that experts of all blocks send in a step, for so many tokens of each part of the batch."""
    total = Volume()
    for count, kind in model.kinds:
        if (layer := kind.moe_layer) is None:
            continue
        sent = {"x": 0.0, "y": 0.0, EXPERT: 0.0}
        for message in expert_messages(layer, grid, tokens, options or ExecutionOptions()):
            sent[message.axis] += message.numbers * (forward_passes if message.is_forward else 1)
        traffic = weight_traffic(kind, grid)
        of_block = Volume(
            gathers * traffic.all_gather, traffic.reduce_scatter, sent["y"], sent["x"], traffic.data, sent[EXPERT]
        )
        total += of_block.times(count * element)
    return total


def expert_seconds(volume: Volume, grid: GridSizes, cluster: Cluster) -> Volume:
    """Bytes of `expert_volume` over the bandwidths of their groups (equation 5.7 between nodes), without start-ups."""

    def over(num_bytes: float, group: RankGroup) -> float:
        return num_bytes / group_bandwidth(cluster, *group) if num_bytes else 0.0

    shards, replicas = group_of_shards(grid), group_of_replicas(grid)
    return Volume(
        over(volume.all_gather_z, shards),
        over(volume.reduce_scatter_z, shards),
        over(volume.all_reduce_y, RankGroup(grid.preceding("y"), grid.y)),
        over(volume.all_reduce_x, RankGroup(grid.preceding("x"), grid.x)),
        over(volume.all_reduce_data, replicas),
        all_to_all_transfer(volume.all_to_all, grid, cluster),
    )


def explain_messages(workload: StepWorkload, config: StepConfig) -> tuple[Formula, ...]:
    """Return what one block's experts send for one micro-batch, as lines of an explanation."""
    grid, tokens, shape = config.grid, config.tokens(workload), workload.model.moe
    assert shape is not None
    layer = workload.model.kinds[-1].model.moe_layer
    assert layer is not None
    forward = [message for message in expert_messages(layer, grid, tokens, config.options) if message.is_forward]
    lines = []
    exchanged = sum(message.numbers for message in forward if message.axis == EXPERT) * workload.element
    if exchanged:
        distinct = config.options.drop_duplicates or config.token_parts > 1 or grid.expert_x == 1
        terms = {
            "bytes": float(workload.element),
            "G_expert": float(grid.expert),
            "tokens": float(tokens),
            "ranks": distinct_ranks(shape, grid),
            "hidden": layer.hidden / grid.y,
            "imbalance": shape.imbalance,
        } | ({"G_x": float(grid.x)} if distinct and grid.x > 1 else {})
        parts = " / G_x" if "G_x" in terms else ""
        formula = f"2 bytes (G_expert - 1) / G_expert tokens min(ranks imbalance, G_expert) hidden{parts}"
        if config.options.expert_reduce == "choice" or config.options.expert_rows is not None:
            formula, terms = "the sum of its messages", {}
        lines.append(Formula("all-to-alls, a forward pass of a block", formula, terms, exchanged))
    over_x = sum(message.numbers for message in forward if message.axis == "x") * workload.element
    if over_x:
        lines.append(Formula("tokens over x, a forward pass of a block", "the sum of its messages", {}, over_x))
    return tuple(lines)


def ranks_in_node(grid: GridSizes, gpus_per_node: int) -> int:
    """The number of ranks of a group of `expert` on one node."""
    inside = 1
    for axis in ("x", "z", "data"):
        inside *= min(grid.expert_taken[axis], max(1, gpus_per_node // grid.preceding(axis)))
    return inside


def all_to_all_transfer(num_bytes: float, grid: GridSizes, cluster: Cluster) -> float:
    """Seconds of bytes that a rank sends to all others of its group of `expert`, without start-ups.

    Equally many go to each. Those to other nodes share the node's network with all of its ranks, and those within the
    node go over its links at the same time.
    """
    if not num_bytes:
        return 0.0
    inside, size = ranks_in_node(grid, cluster.gpus_per_node), grid.expert
    far = num_bytes * (size - inside) / (size - 1)
    between = within = 0.0
    if far:
        between = far / network_bandwidth(cluster) * min(cluster.gpus_per_node, grid.ranks)
    if inside > 1:
        within = (num_bytes - far) / group_bandwidth(
            cluster, min(grid.x * grid.y, cluster.gpus_per_node // inside), inside
        )
    return max(between, within)


def all_to_all_seconds(num_bytes: float, grid: GridSizes, cluster: Cluster, latency: float) -> float:
    """Seconds of one all-to-all over `expert` that sends so many bytes from a rank."""
    if grid.expert == 1:
        return 0.0
    return latency + (grid.expert - 1) * ALL_TO_ALL_PEER + all_to_all_transfer(num_bytes, grid, cluster)
