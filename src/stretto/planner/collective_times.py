# SPDX-License-Identifier: Apache-2.0
"""Predicts the seconds of one collective: as measured, or by a start-up a hop and its bytes over the bandwidth."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import cast

from stretto.axes import EXPERT, EXPERT_DATA, EXPERT_Z, REPLICAS, SHARDS, GridSizes
from stretto.cluster import Cluster, MeasuredCollective
from stretto.cluster.two_level import LEVELED, Collective, Links, choose, choose_parts, predict
from stretto.execution import TwoLevel
from stretto.planner.communication import Rates, group_bandwidth, network_bandwidth, slowest_rate
from stretto.planner.experts.cost import all_to_all_seconds, group_of_replicas, group_of_shards, ranks_in_node

# Seconds that a hop of a ring takes to start, where the cluster does not say.
IN_NODE_LATENCY = 3e-6
BETWEEN_NODES_LATENCY = 6e-6


def collective_seconds(
    kind: str,
    group: str,
    num_bytes: float,
    cluster: Cluster,
    grid: GridSizes,
    rates: Rates,
    two_level: TwoLevel = False,
) -> float:
    """Seconds of one collective that sends so many bytes from a rank: measured, or by latency and bandwidth.

    group: an axis, one of experts' (`stretto.axes`), or a group of ranks over several axes. two_level: for z and the
    replicas, as `ExecutionOptions.two_level`.
    """
    if group == EXPERT:
        leaves = grid.expert > ranks_in_node(grid, cluster.gpus_per_node)
        return all_to_all_seconds(num_bytes, grid, cluster, message_latency(cluster, leaves=leaves))
    rate = None
    if group == EXPERT_Z:
        preceding, size = group_of_shards(grid)
    elif group == EXPERT_DATA:
        preceding, size = group_of_replicas(grid)
    else:
        over = grid.axes_of(group)
        preceding, size, rate = grid.preceding(over[-1]), grid.over(over), slowest_rate(rates, grid, group)
    if size == 1:
        return 0.0
    leaves = preceding * size > cluster.gpus_per_node
    if not leaves and (measured := cluster.measured_transfers(kind, preceding, size)):
        return _interpolate(measured, num_bytes)
    trips = 2 if kind == "all_reduce" else 1  # around the ring
    start_up = trips * (size - 1) * message_latency(cluster, leaves=leaves)
    flat = start_up + num_bytes / (rate or group_bandwidth(cluster, preceding, size))
    if kind == "reduce_scatter" and cluster.library == "gloo":
        flat *= 2  # it is an all-reduce
    if not leaves or two_level is False or group not in (SHARDS, REPLICAS):
        return flat
    shard = num_bytes / (trips * (size - 1))
    leveled = two_level_seconds(cast(Collective, kind), shard, cluster, preceding, size)
    return flat if leveled is None or (two_level == "auto" and flat <= leveled) else leveled


def two_level_seconds(
    kind: Collective, shard_bytes: float, cluster: Cluster, preceding: int, size: int
) -> float | None:
    """Seconds of a collective in two levels (`stretto.cluster.two_level`); None for a group that has none.

    The group has `size` ranks, each `preceding` from the next, and as many groups share each node's interfaces. Ranks
    of a node that is not full, and groups with one node, have no two levels.
    """
    inside = cluster.gpus_per_node // preceding if preceding < cluster.gpus_per_node else 1
    if size % inside or size == inside or (preceding < cluster.gpus_per_node and cluster.gpus_per_node % preceding):
        return None
    links = Links(
        in_node_latency=message_latency(cluster, leaves=False),
        in_node_bandwidth=group_bandwidth(cluster, preceding, inside) if inside > 1 else network_bandwidth(cluster),
        latency=message_latency(cluster, leaves=True),
        node_bandwidth=network_bandwidth(cluster) / min(preceding, cluster.gpus_per_node),
    )
    nodes = size // inside
    chosen = choose(kind, shard_bytes, nodes, inside, links, LEVELED)
    parts = choose_parts(kind, chosen, shard_bytes, nodes, inside, links)
    return predict(kind, chosen, shard_bytes, nodes, inside, links, parts)


def message_latency(cluster: Cluster, *, leaves: bool) -> float:
    """Seconds that a message takes to start, within a node or between two."""
    if leaves:
        return cluster.between_nodes.latency or BETWEEN_NODES_LATENCY
    return cluster.in_node.latency or IN_NODE_LATENCY


def _interpolate(measured: Sequence[MeasuredCollective], num_bytes: float) -> float:
    """Seconds of a message among measured ones: linear between two of them, by bandwidth beyond the largest."""
    sizes = [row.bytes for row in measured]
    above = bisect_left(sizes, num_bytes)
    if above == 0:
        return measured[0].seconds
    if above == len(measured):
        return measured[-1].seconds * num_bytes / sizes[-1]
    low, high = measured[above - 1], measured[above]
    part = (num_bytes - low.bytes) / (high.bytes - low.bytes)
    return low.seconds + part * (high.seconds - low.seconds)
