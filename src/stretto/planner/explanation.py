# SPDX-License-Identifier: Apache-2.0
"""Explains why a plan has its place in the ranking, in a sentence, and what its memory is made of, by formulas."""

from collections.abc import Mapping

from stretto.axes import EXPERT
from stretto.cluster import Cluster
from stretto.planner.architecture import Architecture
from stretto.planner.communication import AXIS_OF, KINDS, MEANINGS
from stretto.planner.cost import LAUNCH_WAITS, Cost
from stretto.planner.experts.cost import ranks_in_node
from stretto.planner.optimizer_state import (
    USABLE_OF_HOST,
    Formula,
    PinnedMemory,
    bucket_numbers,
    host_traffic,
    number_bytes,
    parameters_and_optimizer,
    take_over,
)
from stretto.planner.workload import StepConfig, StepWorkload

_MESSAGES = "messages_pipe"
_NEGLIGIBLE = 0.02  # of the largest term's difference: smaller ones are summed up


def explain(
    model: Architecture,
    config: StepConfig,
    cost: Cost,
    memory: Mapping[str, float],
    best: StepConfig,
    best_cost: Cost,
    limit: float,
    cluster: Cluster,
    host: PinnedMemory,
) -> str:
    """One sentence: what makes the first the first, what another loses by, or what would make it fit.

    If ranks compute the same, it begins with that: such grids come after all others that fit.
    """
    copies = model.copies(config.grid)
    same = f"its x * y = {copies} ranks compute the same, {copies} times the work of x = y = 1; " if copies > 1 else ""
    needed = sum(memory.values())
    if needed > limit:
        return same + _does_not_fit(model, config, memory, limit)
    if not host.fits:
        return same + _does_not_fit_the_host(host)
    if cost.is_host_bound:
        assert cost.launches is not None
        on_gpu = cost.launches - cost.terms[LAUNCH_WAITS]
        same += f"host-bound: launching takes the host {_seconds(cost.launches)}, running the GPU {_seconds(on_gpu)}; "
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
        f"optimizer state on the {config.state.location}": config.state.is_separate,
    }
    if config.schedule is not None:
        ways = {f"schedule {config.schedule}": True} | ways
    used = " and ".join(way for way, is_used in ways.items() if is_used)
    how = f" with {used}" if used else ""
    sent = {kind: getattr(cost.communication, kind) for kind in KINDS}
    if cost.pipeline is not None:
        sent[_MESSAGES] = cost.pipeline.messages
    most = max(sent, key=lambda kind: sent[kind])
    if not sent[most]:
        return f"the fastest that fits{how}: it sends nothing"
    if most == _MESSAGES:
        longest = f"messages between stages ({_seconds(sent[most])})"
        return f"the fastest that fits{how}; what takes longest to send is {longest}"
    axis = AXIS_OF[most]
    if axis == EXPERT:
        inside = ranks_in_node(config.grid, cluster.gpus_per_node) == config.grid.expert
    else:
        inside = config.grid.preceding(axis) * config.grid[axis] <= cluster.gpus_per_node
    return (
        f"the fastest that fits{how}; what takes longest to send is {MEANINGS[most]}, "
        f"{'inside' if inside else 'across'} nodes ({_seconds(sent[most])})"
    )


def _differences(cost: Cost, best: Cost) -> str:
    """Return what is longer and what is shorter than in the best step, the largest first: together,
    the times' difference.
    """
    names = dict.fromkeys((*cost.terms, *best.terms))
    by_name = {name: cost.terms.get(name, 0.0) - best.terms.get(name, 0.0) for name in names}
    largest = max(map(abs, by_name.values()))
    reported = {name: time for name, time in by_name.items() if abs(time) > _NEGLIGIBLE * largest}
    order = sorted(reported, key=lambda name: -reported[name])
    rest = sum(by_name.values()) - sum(reported.values())
    parts = [(reported[name], name) for name in order] + [(rest, "the rest")] * (abs(rest) > 1e-12 * largest)
    return ", ".join(f"{_seconds(abs(time))} {'more' if time > 0 else 'less'} for {name}" for time, name in parts)


def _does_not_fit(model: Architecture, config: StepConfig, memory: Mapping[str, float], limit: float) -> str:
    needed = sum(memory.values())
    if config.state.is_separate and not memory["activations"]:
        return (
            f"does not fit: when training begins, fp32 parameters stand beside those that are computed with, "
            f"{needed / 1e9:.1f} GB of {limit / 1e9:.1f} GB; try more GPUs along x, y or z"
        )
    largest = max(memory, key=lambda part: memory[part])
    remedies = []
    if not config.options.recomputation.is_on:
        remedies.append("activation checkpointing")
    if config.options.keeps_weights and memory["gathered_weights"] > 0.1 * needed:
        remedies.append("freeing gathered weights (reshard='after_forward')")
    if config.options.scatters_once and config.grid.shards > 1:
        remedies.append("gradients accumulated as shards (reshard='after_backward')")
    if config.micro_batch > 1:
        remedies.append("a smaller micro-batch")
    if config.schedule is not None and memory["activations"] > 0.2 * needed:
        remedies.append("a schedule that keeps fewer micro-batches (1f1b, or a lower limit)")
    states = memory["parameters"] + memory["optimizer"] + memory["gradients"]
    if model.copies(config.grid) > 1:
        remedies.append("moving ranks from x and y to z")
    elif states > limit and model.is_sharded_by_blocks:  # z alone shards all
        remedies.append("moving ranks from data to z" if config.grid.data > 1 else "more GPUs along z")
    elif states > limit:
        remedies.append("more of x, y and z" if config.grid.data > 1 else "more GPUs along x, y or z")
    elif config.grid.data > 1:
        remedies.append("moving ranks from data to z")
    if states > limit / 2 and config.state.location != "host" and not config.options.scatters_once:
        remedies.append("optimizer state on the host (--optimizer-state host)")
    return (
        f"does not fit: needs {needed / 1e9:.1f} GB of {limit / 1e9:.1f} GB, most of it {largest.replace('_', ' ')} "
        f"({memory[largest] / 1e9:.1f} GB); " + (f"try {' or '.join(remedies)}" if remedies else "take more GPUs")
    )


def _does_not_fit_the_host(host: PinnedMemory) -> str:
    assert host.limit is not None
    most, of = max((host.state, "optimizer state"), (host.activations, "activations"))
    return (
        f"does not fit: the {host.ranks} ranks of a node pin {host.of_node / 1e9:.1f} GB, which is more than "
        f"{USABLE_OF_HOST:.0%} of its memory, {host.limit / 1e9:.1f} GB, most of it {of} ({most / 1e9:.1f} GB a rank); "
        f"try more nodes, or {of} on the GPUs"
    )


def list_formulas(
    workload: StepWorkload, config: StepConfig, parameters: float, step_memory: Mapping[str, float], host: PinnedMemory
) -> tuple[Formula, ...]:
    """The components of device and host memory, and the bytes copied between them in a step.

    parameters: phi, those of a rank. step_memory: components of the device's at the peak of a step.
    """
    state, (weight, gradient, master, moments, index) = config.state, number_bytes(workload, config.state)
    phi, kept = {"phi": parameters}, weight + index
    if state.sparsity and parameters:
        kept = parameters_and_optimizer(workload, state, parameters, config.grid.shards)["parameters"] / parameters
    buffers = {"n": float(state.buffer_sets), "bsize": bucket_numbers(state, parameters)}
    size, steps_on_host = master + moments, state.step_on == "host"
    if state.location != "host":
        optimizer, terms = [f"{size:g} phi"], dict(phi)
    else:
        optimizer, terms = ([], {}) if steps_on_host else ([f"{size:g} n bsize"], dict(buffers))
    made_of = {
        "parameters": (f"{kept:g} phi", phi),
        "optimizer": (" + ".join(optimizer) or "0", terms),
        # Without separate state, not all gradients are allocated at every peak.
        "gradients": (f"{gradient:g} phi" if state.is_separate else f"at most {gradient:g} phi", phi),
    }
    lines = [Formula(name, *made_of.get(name, ("", {})), num_bytes) for name, num_bytes in step_memory.items()]
    lines.append(Formula("peak of a step", "the sum of these", {}, sum(step_memory.values())))
    if (beginning := take_over(workload, state, parameters)) is not None:
        early = f" + {master:g} phi" if beginning["optimizer"] else ""
        formula = f"{workload.master} phi + {index if state.sparsity else weight:g} phi{early}"
        lines.append(Formula("taking over fp32 parameters", formula, phi, sum(beginning.values())))
    if host.of_rank:
        parts, terms = [f"{size:g} phi"] if host.state else [], phi if host.state else {}
        if host.state and steps_on_host:
            parts, terms = [*parts, f"{weight + gradient:g} n bsize"], phi | buffers
        if host.activations:
            parts, terms = [*parts, "activations"], terms | {"activations": host.activations}
        lines.append(Formula("on the host, a rank", " + ".join(parts), terms, host.of_rank))
        of_node = {"ranks": float(host.ranks), "rank": host.of_rank}
        lines.append(Formula("on the host, a node", "ranks x rank", of_node, host.of_node))
    for name, of in zip(("to the device", "to the host"), host_traffic(workload, state), strict=True):
        if of:
            lines.append(Formula(f"{name}, each step", f"{of:g} phi", phi, of * parameters))
    return tuple(lines)


def _seconds(time: float) -> str:
    if time >= 999.5:
        return f"{time:,.0f} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if time >= scale:
            return f"{time / scale:.3g} {unit}"
    return f"{time / 1e-6:.3g} us"
