# SPDX-License-Identifier: Apache-2.0
"""Explains in a sentence why a plan has its place in the ranking."""

from collections.abc import Mapping

from stretto.cluster import Cluster
from stretto.planner.architecture import Architecture
from stretto.planner.communication import AXIS_OF, KINDS, MEANINGS
from stretto.planner.cost import Cost
from stretto.planner.workload import StepConfig

_NEGLIGIBLE = 0.02  # of the largest term's difference: smaller ones are told together


def explain(
    model: Architecture,
    config: StepConfig,
    cost: Cost,
    memory: Mapping[str, float],
    best: StepConfig,
    best_cost: Cost,
    limit: float,
    cluster: Cluster,
) -> str:
    """One sentence: what makes the first the first, what another loses by, or what would make it fit.

    Where ranks compute the same, it says so first: such grids come after all others that fit.
    """
    copies = model.copies(config.grid)
    same = f"its x * y = {copies} ranks compute the same, {copies} times the work of x = y = 1; " if copies > 1 else ""
    needed = sum(memory.values())
    if needed > limit:
        return same + _does_not_fit(model, config, memory, limit)
    if config == best:
        return same + _first(config, cost, cluster)
    slower = cost.step_time / best_cost.step_time - 1 if best_cost.step_time else 0.0
    if abs(slower) < 5e-4:
        return f"{same}as fast as the first, {best.grid}, but it needs more memory or computes more twice"
    than = f"{abs(slower):.1%} {'slower' if slower > 0 else 'faster'} than"
    return f"{same}{than} {best.grid}: {_differences(cost, best_cost)}"


def _first(config: StepConfig, cost: Cost, cluster: Cluster) -> str:
    mode = config.options.recompute
    ways = {
        "activation checkpointing" if mode == "full" else f"recompute={mode}": mode != "none",
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
        f"the fastest that fits{how}; what takes longest to send is {MEANINGS[most]}, "
        f"{'inside' if inside else 'across'} nodes ({_seconds(sent[most])})"
    )


def _differences(cost: Cost, best: Cost) -> str:
    """What is longer and what is shorter than in the best step, the largest first: together, the times' difference."""
    by_name = {name: cost.terms[name] - best.terms[name] for name in cost.terms}
    largest = max(map(abs, by_name.values()))
    told = {name: time for name, time in by_name.items() if abs(time) > _NEGLIGIBLE * largest}
    order = sorted(told, key=lambda name: -told[name])
    rest = sum(by_name.values()) - sum(told.values())
    parts = [(told[name], name) for name in order] + [(rest, "the rest")] * (abs(rest) > 1e-12 * largest)
    return ", ".join(f"{_seconds(abs(time))} {'more' if time > 0 else 'less'} for {name}" for time, name in parts)


def _does_not_fit(model: Architecture, config: StepConfig, memory: Mapping[str, float], limit: float) -> str:
    needed = sum(memory.values())
    largest = max(memory, key=lambda part: memory[part])
    remedies = []
    if not config.options.recomputation.is_on:
        remedies.append("activation checkpointing")
    if config.options.keep_gathered and memory["gathered_weights"] > 0.1 * needed:
        remedies.append("freeing gathered weights (keep_gathered=false)")
    if config.options.accumulate_unsharded and config.grid.z > 1:
        remedies.append("gradients accumulated as shards (accumulate_unsharded=false)")
    if config.micro_batch > 1:
        remedies.append("a smaller micro-batch")
    states = memory["parameters"] + memory["optimizer"] + memory["gradients"]
    if model.copies(config.grid) > 1:
        remedies.append("moving ranks from x and y to z")
    elif states > limit and (model.is_sharded_by_blocks or model.experts):  # z alone shards all, or experts
        remedies.append("moving ranks from data to z" if config.grid.data > 1 else "more GPUs along z")
    elif states > limit:
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
