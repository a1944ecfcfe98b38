# SPDX-License-Identifier: Apache-2.0
"""Explains in a sentence why a plan has its place in the ranking."""

from collections.abc import Mapping

from stretto.cluster import Cluster
from stretto.planner.communication import AXIS_OF, KINDS
from stretto.planner.cost import Cost
from stretto.planner.workload import StepConfig

_NAMES = {
    "all_gather_z": "gathering weights over z",
    "reduce_scatter_z": "scattering weight gradients over z",
    "all_reduce_y": "sums over y",
    "all_reduce_x": "sums over x",
    "all_reduce_data": "summing gradients over data",
}


def explain(
    config: StepConfig,
    cost: Cost,
    memory: Mapping[str, float],
    best: StepConfig,
    best_cost: Cost,
    limit: float,
    cluster: Cluster,
) -> str:
    """One sentence: what makes the first the first, what another loses by, or what would make it fit."""
    needed = sum(memory.values())
    if needed > limit:
        return _does_not_fit(config, memory, needed, limit)
    if config == best:
        return _first(config, cost, cluster)
    slower = cost.step_time / best_cost.step_time - 1 if best_cost.step_time else 0.0
    if slower < 5e-4:
        return f"as fast as the first, {best.grid}, but it needs more memory or computes more twice"
    return f"{slower:.1%} slower than {best.grid}: {_largest_loss(cost, best_cost)}"


def _first(config: StepConfig, cost: Cost, cluster: Cluster) -> str:
    ways = {
        "activation checkpointing": config.options.checkpoint_activations,
        "shard_sequence": config.options.shard_sequence,
    }
    used = " and ".join(way for way, is_used in ways.items() if is_used)
    how = f" with {used}" if used else ""
    sent = {kind: getattr(cost.communication, kind) for kind in KINDS}
    most = max(sent, key=lambda kind: sent[kind])
    if not sent[most]:
        return f"the fastest that fits{how}: it sends nothing"
    axis = AXIS_OF[most]
    inside = config.grid.preceding(axis) * config.grid[axis] <= cluster.gpus_per_node
    return (
        f"the fastest that fits{how}; what takes longest to send is {_NAMES[most]}, "
        f"{'inside' if inside else 'across'} nodes ({_seconds(sent[most])})"
    )


def _largest_loss(cost: Cost, best: Cost) -> str:
    """The part of the step in which most of the difference lies."""
    losses = {f"exposed communication over {axis}": cost.exposed[axis] - best.exposed[axis] for axis in cost.exposed}
    if cost.compute is None or best.compute is None:  # the paper's model has nothing but communication
        losses = {_NAMES[kind]: getattr(cost.communication, kind) - getattr(best.communication, kind) for kind in KINDS}
    else:
        losses["computation"] = cost.compute.total - best.compute.total
        losses["what computes beside communication"] = (cost.communication.total - sum(cost.exposed.values())) - (
            best.communication.total - sum(best.exposed.values())
        )
    name = max(losses, key=lambda part: losses[part])
    return f"{_seconds(losses[name])} more for {name}"


def _does_not_fit(config: StepConfig, memory: Mapping[str, float], needed: float, limit: float) -> str:
    largest = max(memory, key=lambda part: memory[part])
    remedies = []
    if not config.options.checkpoint_activations:
        remedies.append("activation checkpointing")
    if config.options.keep_gathered and memory["gathered_weights"] > 0.1 * needed:
        remedies.append("freeing gathered weights (keep_gathered=false)")
    if config.options.accumulate_unsharded and config.grid.z > 1:
        remedies.append("gradients accumulated as shards (accumulate_unsharded=false)")
    if config.micro_batch > 1:
        remedies.append("a smaller micro-batch")
    states = memory["parameters"] + memory["optimizer"] + memory["gradients"]
    if states > limit:
        remedies.append("more of x, y and z" if config.grid.data > 1 else "more GPUs along x, y or z")
    elif config.grid.data > 1:
        remedies.append("moving ranks from data to z")
    return (
        f"does not fit: needs {needed / 1e9:.1f} GB of {limit / 1e9:.1f} GB, most of it {largest.replace('_', ' ')} "
        f"({memory[largest] / 1e9:.1f} GB); " + (f"try {' or '.join(remedies)}" if remedies else "take more GPUs")
    )


def _seconds(time: float) -> str:
    if time >= 999.5:
        return f"{time:,.0f} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if time >= scale:
            return f"{time / scale:.3g} {unit}"
    return f"{time / 1e-6:.3g} us"
