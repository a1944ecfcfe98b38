# SPDX-License-Identifier: Apache-2.0
"""Simulates a verified schedule for a message size on a network: its time, exposed waiting and use of links."""

import math
from dataclasses import replace

from stretto.collectives.schedule import PROTOCOLS, Schedule
from stretto.simulator.network import EventDrivenNetwork, NetworkTopology
from stretto.simulator.schedules.costs import ExecutorCosts
from stretto.simulator.schedules.result import BlockTime, LinkUse, ScheduleTime, list_link_use
from stretto.simulator.schedules.thread_blocks import TileRun, TileSimulation

MAX_SIMULATED_TILES = 32
"""The most tiles of a chunk that are simulated: the pipelining loop is steady before, and more are extrapolated."""
MAX_STEPS = 4 << 20
"""The most steps of all thread blocks and tiles that are simulated: about a minute."""
PACKET_BYTES = 256
"""Bytes that a link forwards at once (NVLink's largest payload): switches pass a message on while it still arrives."""
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
    the data, as `--instances` compiles it. Each chunk is sent in tiles, and a step handles one tile of its chunks.

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
        blocks_of_ranks = (block for program in schedule.ranks for block in program.thread_blocks)
        sent = (step.size for block in blocks_of_ranks for step in block.steps if step.type.sends)
        most = min(most, inside.slot_bytes / max(1, max(sent, default=1)))
    tiles = max(1, math.ceil(chunk_bytes / most))
    simulated = min(tiles, max_tiles)
    all_steps = schedule.steps * instances
    if all_steps * simulated > MAX_STEPS:
        raise ValueError(
            f"{schedule.name} has {all_steps} steps, of {simulated} tiles each: simulating at most {MAX_STEPS} "
            f"is feasible; max_tiles = {max(2, MAX_STEPS // all_steps)} would do"
        )

    def run(count: int) -> tuple[TileRun, EventDrivenNetwork]:
        network = EventDrivenNetwork(topology, PACKET_BYTES)
        node = ranks if ranks_per_node is None else ranks_per_node
        simulation = TileSimulation(
            schedule, chunk_bytes / tiles, count, network, costs, protocol, node, slots, instances
        )
        return simulation.run(), network

    whole, network = run(simulated)
    blocks = tuple(
        BlockTime(rank, number, block.channel, *(value / _NS for value in whole.blocks[at]))
        for at, (rank, number, block) in enumerate(
            (rank, number, block)
            for rank, program in enumerate(schedule.ranks)
            for number, block in enumerate(program.thread_blocks * instances)
        )
    )
    result = ScheduleTime(
        network.fidelity,
        whole.nanoseconds / _NS,
        num_bytes,
        tiles,
        simulated,
        whole.events,
        blocks,
        list_link_use(network),
    )
    if simulated < tiles:
        half, half_network = run(simulated // 2)
        result = _extrapolate(result, whole, half, half_network)
    result = replace(result, links=tuple(link for link in result.links if link.num_bytes))
    return replace(result, seconds=result.seconds + costs.launch + inside.call_seconds)


def _extrapolate(result: ScheduleTime, whole: TileRun, half: TileRun, half_network: EventDrivenNetwork) -> ScheduleTime:
    """Add the tiles that were not simulated, each as those of the second half.

    A tile takes at least as long as it keeps the busiest link or thread block: a long pipeline may not be full yet, and
    its further tiles then fill what was idle.
    """
    steps = result.simulated_tiles - result.simulated_tiles // 2
    factor = (result.tiles - result.simulated_tiles) / steps

    def further(at_all: float, at_half: float) -> float:
        return at_all + factor * (at_all - at_half)

    before = list_link_use(half_network)
    links = tuple(
        LinkUse(now.source, now.target, further(now.num_bytes, then.num_bytes), further(now.busy, then.busy))
        for now, then in zip(result.links, before, strict=True)
    )
    blocks = []
    for block, at_half in zip(result.blocks, half.blocks, strict=True):
        busy, step, message, slot = (value / _NS for value in at_half)
        blocks.append(
            replace(
                block,
                busy=further(block.busy, busy),
                step=further(block.step, step),
                message=further(block.message, message),
                slot=further(block.slot, slot),
            )
        )
    added = max(
        factor * (whole.nanoseconds - half.nanoseconds) / _NS,
        max((now.busy - then.busy for now, then in zip(links, result.links, strict=True)), default=0.0),
        max((now.busy - then.busy for now, then in zip(blocks, result.blocks, strict=True)), default=0.0),
    )
    return replace(
        result, seconds=result.seconds + added, events=whole.events + half.events, blocks=tuple(blocks), links=links
    )
