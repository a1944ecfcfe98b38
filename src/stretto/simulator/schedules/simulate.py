# SPDX-License-Identifier: Apache-2.0
"""Simulates a verified schedule for a message size on a network: its time, exposed waiting and use of links."""

import math
from collections.abc import Callable
from dataclasses import replace

from stretto.collectives.schedule import PROTOCOLS, Schedule
from stretto.simulator.network.cut_through import CutThroughNetwork
from stretto.simulator.network.topology import NetworkTopology
from stretto.simulator.schedules.costs import ExecutorCosts
from stretto.simulator.schedules.result import BlockTime, LinkUse, ScheduleTime
from stretto.simulator.schedules.thread_blocks import TileRun, TileSimulation

MAX_SIMULATED_TILES = 32
"""The most tiles of a chunk that are simulated: the pipelining loop is steady before, and more are extrapolated."""
MAX_STEPS = 4 << 20
"""The most steps of all thread blocks and tiles that are simulated: about a minute."""
_NS = 1e9


def simulate_schedule(
    schedule: Schedule,
    num_bytes: float,
    topology: NetworkTopology,
    costs: ExecutorCosts,
    *,
    protocol: str | None = None,
    ranks_per_node: int | None = None,
    slots: int | None = None,
    instances: int = 1,
    max_tiles: int = MAX_SIMULATED_TILES,
) -> ScheduleTime:
    """Simulate a verified schedule, event-driven, on ranks 0 to n - 1 of the topology.

    num_bytes: of a rank's larger buffer, as in `stretto collective run`; protocol: whose costs count (None: the
    schedule's); ranks_per_node: from which rank on messages leave the node (None: never); slots: of a FIFO (None: the
    executor's, else the protocol's); instances: how many times the whole program runs side by side, each on its part of
    the data, as `--instances` compiles it. Each chunk travels in tiles, and a step handles one tile of its chunks.

    Beyond `max_tiles` tiles a chunk, the time of further tiles is extrapolated from the second half of those.

    Raises ValueError for another number of ranks than the topology has, a size or protocol that cannot be, a schedule
    that deadlocks, and one of more than `MAX_STEPS` steps.
    """
    ranks = schedule.collective.ranks
    if ranks != topology.devices:
        raise ValueError(
            f"the schedule {schedule.name} has {ranks} ranks, the topology {topology.name} {topology.devices} devices: "
            f"give it {ranks} devices"
        )
    if not 0 <= num_bytes < math.inf:
        raise ValueError(f"a buffer has a finite number of bytes, at least 0, not {num_bytes}")
    if max_tiles < 2:
        raise ValueError(f"at least 2 tiles are simulated, not {max_tiles}")
    protocol = schedule.protocol if protocol is None else protocol
    slots = costs.slots or PROTOCOLS.get(protocol, 2) if slots is None else slots
    if slots < 1:
        raise ValueError(f"a connection has at least 1 FIFO slot, not {slots}")
    if instances < 1:
        raise ValueError(f"a schedule has at least 1 instance, not {instances}")
    instances *= costs.instances
    chunk_bytes = num_bytes / max(schedule.collective.chunks_per_loop, 1) / instances
    inside = costs.find(protocol, is_in_node=True)
    most = math.inf if costs.tile_bytes is None else costs.tile_bytes
    if inside.slot_bytes is not None:
        most = min(most, inside.slot_bytes / max(1, _largest_message(schedule)))
    tiles = max(1, math.ceil(chunk_bytes / most))
    simulated = min(tiles, max_tiles)
    all_steps = schedule.steps * instances
    if all_steps * simulated > MAX_STEPS:
        raise ValueError(
            f"{schedule.name} has {all_steps} steps, of {simulated} tiles each: simulating at most {MAX_STEPS} "
            f"is feasible; max_tiles = {max(2, MAX_STEPS // all_steps)} would do"
        )

    def run(count: int) -> tuple[TileRun, CutThroughNetwork]:
        network = CutThroughNetwork(topology)
        node = ranks if ranks_per_node is None else ranks_per_node
        simulation = TileSimulation(
            schedule, chunk_bytes / tiles, count, network, costs, protocol, node, slots, instances
        )
        return simulation.run(), network

    whole, network = run(simulated)
    links = tuple(
        LinkUse(link.source, link.target, carried, seconds)
        for link, carried, seconds in zip(topology.links, network.link_bytes, network.link_busy, strict=True)
        if carried
    )
    blocks = tuple(
        BlockTime(rank, number, block.channel, *(value / _NS for value in whole.blocks[at]))
        for at, (rank, number, block) in enumerate(
            (rank, number, block)
            for rank, program in enumerate(schedule.ranks)
            for number, block in enumerate(program.thread_blocks * instances)
        )
    )
    result = ScheduleTime(
        network.fidelity, whole.nanoseconds / _NS, num_bytes, tiles, simulated, whole.events, blocks, links
    )
    if simulated < tiles:
        half, half_network = run(simulated // 2)
        steps = simulated - simulated // 2
        factor = (tiles - simulated) / steps

        def further(at_all: float, at_half: float) -> float:
            return at_all + factor * (at_all - at_half)

        by_link = {
            (link.source, link.target): (carried, seconds)
            for link, carried, seconds in zip(
                topology.links, half_network.link_bytes, half_network.link_busy, strict=True
            )
        }
        result = replace(
            result,
            seconds=further(whole.nanoseconds, half.nanoseconds) / _NS,
            events=whole.events + half.events,
            blocks=tuple(_extrapolate(block, half.blocks[at], further) for at, block in enumerate(blocks)),
            links=tuple(
                LinkUse(
                    each.source,
                    each.target,
                    further(each.num_bytes, by_link[each.source, each.target][0]),
                    further(each.busy, by_link[each.source, each.target][1]),
                )
                for each in links
            ),
        )
    return replace(result, seconds=result.seconds + costs.launch + inside.call_seconds)


def _largest_message(schedule: Schedule) -> int:
    """The most chunks that travel in one message."""
    return max(
        (
            step.size
            for program in schedule.ranks
            for block in program.thread_blocks
            for step in block.steps
            if step.type.sends
        ),
        default=1,
    )


def _extrapolate(
    block: BlockTime, half: tuple[float, float, float, float], further: Callable[[float, float], float]
) -> BlockTime:
    busy, step, message, slot = (value / _NS for value in half)
    return replace(
        block,
        busy=further(block.busy, busy),
        step=further(block.step, step),
        message=further(block.message, message),
        slot=further(block.slot, slot),
    )
