# SPDX-License-Identifier: Apache-2.0
"""Simulated schedules: times that can be worked out by hand, what slots and tiles do, and bad input."""

from dataclasses import replace

import pytest

from stretto.cluster import Cluster
from stretto.collectives import AllToNext, RankProgram, Schedule, Step, StepType, ThreadBlock
from stretto.collectives.algorithms import find
from stretto.collectives.collective import Buffer
from stretto.simulator.network import NetworkTopology, parse_topology
from stretto.simulator.network.shapes import fully_connected, switch
from stretto.simulator.network.topology import DirectedLink
from stretto.simulator.schedules import ExecutorCosts, MachineCosts, ProtocolCosts, simulate_schedule

BANDWIDTH, LATENCY = 100e9, 1e-6
SIMPLE = ExecutorCosts(0.0, {"Simple": ProtocolCosts(2e-6, 1.0)}, tile_bytes=None)
LL = ExecutorCosts(0.0, {"LL": ProtocolCosts(2e-6, 0.5, is_streaming=True)}, tile_bytes=None)


def full(ranks: int) -> NetworkTopology:
    return fully_connected(ranks, BANDWIDTH, LATENCY)


def seconds(schedule: Schedule, num_bytes: float, costs: ExecutorCosts, topology: NetworkTopology, **options) -> float:
    return simulate_schedule(schedule, num_bytes, topology, costs, **options).seconds


def test_ring_of_whole_chunks_is_stored_and_forwarded_by_simple():
    schedule = find("ring-all-gather").compile(ranks=4, in_place=True)
    # 3 hops of a chunk of 1e6 bytes: 10 us on the link, 1 us of it, 2 us until the receiver sees the flag.
    assert seconds(schedule, 4e6, SIMPLE, full(4)) == pytest.approx(3 * (10e-6 + 1e-6 + 2e-6))


def test_ring_by_ll_forwards_while_it_receives():
    schedule = find("ring-all-gather").compile(ranks=4, in_place=True, protocol="LL")
    # Each rank sends 3 chunks of 2e6 bytes (half of them flags); the first byte of a chunk is 3 us behind its sender's.
    assert seconds(schedule, 4e6, LL, full(4)) == pytest.approx(3 * 20e-6 + 3e-6, rel=1e-6)
    # What is short takes the latencies alone.
    assert seconds(schedule, 4, LL, full(4)) == pytest.approx(3 * 3e-6, rel=1e-3)


def test_a_switch_is_crossed_once_in_time_and_twice_in_latency():
    schedule = find("direct-all-gather").compile(ranks=2, in_place=True)
    assert seconds(schedule, 2e6, SIMPLE, switch(2, BANDWIDTH, LATENCY)) == pytest.approx(
        10e-6 + 256 / BANDWIDTH + 2e-6 + 2e-6
    )


def test_a_link_carries_one_message_at_a_time():
    schedule = find("direct-all-gather").compile(ranks=4, in_place=True)
    result = simulate_schedule(schedule, 4e6, switch(4, BANDWIDTH, LATENCY), SIMPLE)
    assert result.seconds >= 3 * 10e-6
    assert all(link.busy == pytest.approx(3 * 10e-6) for link in result.links)
    assert len(result.links) == 8


def test_links_carry_the_flags_too():
    schedule = find("ring-all-reduce").compile(ranks=4, protocol="LL")
    result = simulate_schedule(schedule, 4e6, full(4), LL)
    assert sum(link.num_bytes for link in result.links) == pytest.approx(2 * 3 * 4e6 * 2)


def relay(messages: int) -> Schedule:
    """Rank 0 sends to rank 1, whose steps take their time."""
    send = Step(StepType.SEND, Buffer.IN, 0, size=1)
    receive = Step(StepType.RECEIVE, destination_buffer=Buffer.OUT, destination=0, size=1)
    return Schedule(
        "relay",
        AllToNext(2, 1),
        "Simple",
        (
            RankProgram(1, 1, 0, (ThreadBlock(1, None, 0, (send,) * messages),)),
            RankProgram(1, 1, 0, (ThreadBlock(None, 0, 0, (receive,) * messages),)),
        ),
    )


def test_slots_bound_the_messages_in_flight():
    # A step takes 10 us at either end, a link's latency is 1 us, and flags take none.
    costs = ExecutorCosts(0.0, {"Simple": ProtocolCosts(0.0, 1.0, step_seconds=10e-6)}, tile_bytes=None)
    # With one slot a message follows once the one before was read and its slot is known to be free: 10 + 1 + 10 + 1.
    assert seconds(relay(3), 1, costs, full(2), slots=1) == pytest.approx(2 * 22e-6 + 21e-6, rel=1e-4)
    # With two slots the sender fills one while the other is read.
    two = simulate_schedule(relay(3), 1, full(2), costs, slots=2)
    assert two.seconds == pytest.approx(22e-6 + 21e-6, rel=1e-4)
    assert two.blocks[0].slot == pytest.approx(2e-6, rel=1e-3)
    assert seconds(relay(3), 1, costs, full(2), slots=3) == pytest.approx(41e-6, rel=1e-4)


def test_messages_are_taken_in_order_whatever_their_routes():
    fast = DirectedLink(0, 2, BANDWIDTH, 1e-6), DirectedLink(2, 1, BANDWIDTH, 0)
    slow = DirectedLink(0, 3, BANDWIDTH, 50e-6), DirectedLink(3, 1, BANDWIDTH, 0)
    back = DirectedLink(1, 0, BANDWIDTH, 0)
    topology = NetworkTopology("two routes", 2, (*fast, *slow, back), vertices=4)
    assert len(topology.routes(0, 1)) == 2
    costs = ExecutorCosts(0.0, {"Simple": ProtocolCosts(0.0, 1.0, step_seconds=1e-6)}, tile_bytes=None)
    assert seconds(relay(4), 1, costs, topology, slots=8) == pytest.approx(50e-6, rel=0.2)


def test_slots_bound_what_a_message_carries():
    schedule = find("ring-all-gather").compile(ranks=2, in_place=True)
    costs = ExecutorCosts(0.0, {"Simple": ProtocolCosts(2e-6, 1.0, slot_bytes=1 << 20)}, tile_bytes=None)
    assert simulate_schedule(schedule, 8 << 20, full(2), costs).tiles == 4
    # Two chunks in a message share its slot.
    two = find("two-step-all-to-all").compile(nodes=2, gpus=2)
    assert simulate_schedule(two, 16 << 20, full(4), costs).tiles == 8


def test_calls_and_headers_have_their_configured_costs():
    schedule = find("direct-all-gather").compile(ranks=2, in_place=True)
    costs = ExecutorCosts(
        3e-6, {"Simple": ProtocolCosts(0.0, 1.0, call_seconds=4e-6, header_bytes=1e6)}, tile_bytes=None
    )
    assert seconds(schedule, 2e6, costs, full(2)) == pytest.approx(3e-6 + 4e-6 + 2 * 10e-6 + 1e-6)


def test_without_a_copy_out_of_slots_a_receiver_only_waits():
    costs = ExecutorCosts(0.0, {"Simple": ProtocolCosts(0.0, 1.0, 10e9)}, tile_bytes=None)
    copied = seconds(relay(1), 1e6, costs, full(2))
    assert copied == pytest.approx(100e-6 + 1e-6 + 100e-6)
    assert seconds(relay(1), 1e6, replace(costs, copies_from_slots=False), full(2)) == pytest.approx(100e-6 + 1e-6)


def test_a_thread_block_waits_for_the_step_it_depends_on():
    copy = Step(StepType.COPY, Buffer.IN, 0, Buffer.OUT, 0, 1, awaited=True)
    program = RankProgram(1, 1, 0, (ThreadBlock(None, None, 0, (copy,)), ThreadBlock(None, None, 0, (
        Step(StepType.COPY, Buffer.OUT, 0, Buffer.OUT, 0, 1, waits_for=(0, 0)),
    ))))  # fmt: skip
    costs = ExecutorCosts(0.0, {"Simple": ProtocolCosts(0.0, 1.0, step_seconds=7e-6)})
    result = simulate_schedule(Schedule("waits", AllToNext(2, 1), "Simple", (program,) * 2), 1, full(2), costs)
    assert result.seconds == pytest.approx(14e-6)
    assert result.blocks[1].step == pytest.approx(7e-6)
    assert result.blocks[1].busy == pytest.approx(7e-6)


def test_tiles_of_a_chunk_are_pipelined_over_several_hops():
    send = Step(StepType.SEND, Buffer.IN, 0, size=1)
    forward = Step(StepType.RECEIVE_COPY_SEND, destination_buffer=Buffer.OUT, destination=0, size=1)
    receive = Step(StepType.RECEIVE, destination_buffer=Buffer.OUT, destination=0, size=1)
    blocks = [
        ThreadBlock(1, None, 0, (send,)),
        ThreadBlock(2, 0, 0, (forward,)),
        ThreadBlock(3, 1, 0, (forward,)),
        ThreadBlock(None, 2, 0, (receive,)),
    ]
    programs = tuple(RankProgram(1, 1, 0, (block,)) for block in blocks)
    chain = Schedule("chain", AllToNext(4, 1), "Simple", programs)
    # 100e6 bytes take 1 ms a hop; in 100 tiles of 1e6 bytes, 10 us each, the last of three hops ends two tiles later.
    assert seconds(chain, 100e6, SIMPLE, full(4)) == pytest.approx(3 * 1003e-6)
    tiled = seconds(chain, 100e6, replace(SIMPLE, tile_bytes=10**6), full(4), slots=8, max_tiles=100)
    assert tiled == pytest.approx(1003e-6 + 2 * 13e-6)


@pytest.mark.parametrize("name", ["ring-all-reduce", "two-shot-all-reduce", "direct-all-to-all"])
def test_extrapolated_tiles_take_the_time_of_simulated_ones(name):
    schedule = find(name).compile(ranks=4)
    costs = ExecutorCosts(5e-6, {"Simple": ProtocolCosts(2e-6, 0.9, 20e9, 1e-6)}, tile_bytes=64 << 10)
    exact = simulate_schedule(schedule, 64 << 20, full(4), costs, max_tiles=1000)
    quick = simulate_schedule(schedule, 64 << 20, full(4), costs, max_tiles=8)
    assert not exact.is_extrapolated
    assert quick.is_extrapolated
    assert quick.seconds == pytest.approx(exact.seconds, rel=0.02)
    assert quick.links[0].num_bytes == pytest.approx(exact.links[0].num_bytes)
    assert quick.blocks[0].busy == pytest.approx(exact.blocks[0].busy, rel=0.02)


def test_instances_run_as_compiled_ones():
    costs = ExecutorCosts(0.0, {"Simple": ProtocolCosts(2e-6, 0.9, 20e9, 1e-6)}, tile_bytes=None)
    topology = switch(4, BANDWIDTH, LATENCY)
    compiled = find("ring-all-reduce").compile(ranks=4, instances=4)
    once = find("ring-all-reduce").compile(ranks=4)
    assert seconds(once, 1 << 20, costs, topology, instances=4) == pytest.approx(
        seconds(compiled, 1 << 20, costs, topology), rel=0.02
    )


def test_results_repeat():
    schedule = find("hierarchical-all-reduce").compile(nodes=2, gpus=4)
    costs = ExecutorCosts(0.0, {"Simple": ProtocolCosts(2e-6, 0.9, 20e9, 1e-6)}, tile_bytes=64 << 10)
    topology = switch(8, BANDWIDTH, LATENCY)
    first, second = (simulate_schedule(schedule, 1 << 22, topology, costs) for _ in range(2))
    assert first == second
    assert first.fidelity == "event-driven"


def test_messages_between_nodes_have_costs_of_their_own():
    schedule = find("direct-all-gather").compile(ranks=2, in_place=True)
    costs = replace(SIMPLE, between_nodes={"Simple": ProtocolCosts(50e-6, 1.0)})
    assert seconds(schedule, 2, costs, full(2), ranks_per_node=1) == pytest.approx(51e-6, rel=1e-3)
    assert seconds(schedule, 2, costs, full(2), ranks_per_node=2) == pytest.approx(3e-6, rel=1e-3)


def test_another_number_of_ranks_is_refused():
    with pytest.raises(ValueError, match="has 4 ranks, the topology full:3 3 devices: give it 4 devices"):
        simulate_schedule(find("ring-all-gather").compile(ranks=4), 1, full(3), SIMPLE)


def test_a_deadlock_is_named():
    receive = Step(StepType.RECEIVE, destination_buffer=Buffer.OUT, destination=0, size=1)
    program = RankProgram(1, 1, 0, (ThreadBlock(None, 1, 0, (receive,)),))
    other = RankProgram(1, 1, 0, (ThreadBlock(None, 0, 0, (receive,)),))
    with pytest.raises(ValueError, match="relay deadlocks: rank 0, thread block 0 and 1 others wait"):
        simulate_schedule(Schedule("relay", AllToNext(2, 1), "Simple", (program, other)), 1, full(2), SIMPLE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_bytes": -1}, "at least 0, not -1"),
        ({"slots": 0}, "at least 1 FIFO slot"),
        ({"instances": 0}, "at least 1 instance"),
        ({"max_tiles": 1}, "at least 2 tiles"),
        ({"protocol": "LL"}, "no costs are known of the protocol 'LL'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        simulate_schedule(
            find("ring-all-gather").compile(ranks=2), options.pop("num_bytes", 1), full(2), SIMPLE, **options
        )


def test_zero_bandwidth_is_refused():
    with pytest.raises(ValueError, match="bandwidth of 0 bytes/s"):
        parse_topology("switch:4", 0, 0)


@pytest.mark.parametrize("name", ["dgx-2", "frontier", "summit"])
def test_gpus_that_share_a_nic_reach_each_other_inside_the_node(name):
    cluster = Cluster.preset(name)
    topology = MachineCosts.find("h200").topology(cluster, 2 * cluster.gpus_per_node)
    slowest = cluster.require("between_nodes.bandwidth")
    for target in range(1, cluster.gpus_per_node):
        (route,) = topology.routes(0, target)
        assert min(topology.links[link].bandwidth for link in route) > slowest
    (away,) = topology.routes(0, cluster.gpus_per_node)
    assert min(topology.links[link].bandwidth for link in away) == slowest


def test_unknown_figures_of_a_cluster_are_named():
    cluster = replace(Cluster.preset("dgx-h200"), nics_per_node=None)
    with pytest.raises(ValueError, match="does not say nics_per_node"):
        MachineCosts.find("h200").topology(cluster, 16)
