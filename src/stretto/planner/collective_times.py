# SPDX-License-Identifier: Apache-2.0
"""Predicts the seconds of one collective: as measured, or by a start-up a hop and its bytes over the bandwidth."""

from bisect import bisect_left
from collections.abc import Sequence

from stretto.axes import GridSizes, axes_of
from stretto.cluster import Cluster, MeasuredCollective
from stretto.planner.communication import Rates, group_bandwidth, slowest_rate
from stretto.planner.experts.cost import RankGroup

# Seconds that a hop of a ring takes to start, where the cluster does not say.
IN_NODE_LATENCY = 3e-6
BETWEEN_NODES_LATENCY = 6e-6


def collective_seconds(
    kind: str, group: str, num_bytes: float, cluster: Cluster, grid: GridSizes, rates: Rates
) -> float:
    """Seconds of one collective that sends so many bytes from a rank: measured, or by latency and bandwidth.

    group: an axis, or a group of ranks over several axes.
    """
    over = axes_of(group)
    ranks = RankGroup(grid.preceding(over[-1]), grid.over(over))
    return group_seconds(kind, ranks, num_bytes, cluster, slowest_rate(rates, grid, group))


def group_seconds(kind: str, group: RankGroup, num_bytes: float, cluster: Cluster, rate: float | None = None) -> float:
    """The same of any group. rate: bytes/s where they are known already."""
    preceding, size = group
    if size == 1:
        return 0.0
    if preceding * size > cluster.gpus_per_node:
        latency = message_latency(cluster, leaves=True)
    elif measured := cluster.measured_transfers(kind, preceding, size):
        return _interpolate(measured, num_bytes)
    else:
        latency = message_latency(cluster, leaves=False)
    trips = 2 if kind == "all_reduce" else 1  # around the ring
    return trips * (size - 1) * latency + num_bytes / (rate or group_bandwidth(cluster, preceding, size))


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
