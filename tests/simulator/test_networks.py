# SPDX-License-Identifier: Apache-2.0
"""Networks in both fidelities: known answers to the nanosecond, queues, packets, and several paths."""

import random
from heapq import heappop, heappush
from itertools import count

import pytest

from stretto.simulator import ClosedFormNetwork, EventDrivenNetwork, GraphBuilder, execute, parse_topology
from stretto.simulator.network import DirectedLink, NetworkTopology, rails, ring, switch

GB = 2**30


def run(network, *messages):
    """When each message (source, target, bytes) has arrived, in ns, if all are sent at time 0."""
    builder = GraphBuilder()
    for message in messages:
        builder.message(*message)
    return [end * 1e9 for end in execute(builder.build(), network).ends]


# ASTRA-sim's analytical networks, without and with contention: 16 NPUs, 50 GB/s, 500 ns, 1 MiB from 1 to 4.
@pytest.mark.parametrize(
    ("topology", "closed_form", "event_driven"),
    [("ring:16", 21_031, 60_093), ("full:16", 20_031, 20_031), ("switch:16", 20_531, 40_062)],
)
def test_known_answers_of_one_message(topology, closed_form, event_driven):
    network = parse_topology(topology, 50 * GB, 500e-9)
    assert run(ClosedFormNetwork(network, truncates=True), (1, 4, 2**20)) == pytest.approx([closed_form])
    assert run(EventDrivenNetwork(network, truncates=True), (1, 4, 2**20)) == pytest.approx([event_driven])


def line(*bandwidths):
    """A chain of devices with these bandwidths between them and 100 ns a link, both ways."""
    links = [
        DirectedLink(*ends, bandwidth, 100e-9)
        for place, bandwidth in enumerate(bandwidths)
        for ends in ((place, place + 1), (place + 1, place))
    ]
    return NetworkTopology("a line", len(bandwidths) + 1, links)


@pytest.mark.parametrize("bandwidths", [(1e9, 1e9, 1e9), (1e9, 4e9, 2e9), (4e9, 1e9, 2e9), (4e9, 2e9, 1e9)])
def test_packets_flow_through_a_line_at_the_pace_of_its_slowest_link(bandwidths):
    """The first packet crosses all links, and the others follow it at the slowest link's pace."""
    first = sum(64 / bandwidth for bandwidth in bandwidths) + 3 * 100e-9
    others = (64_000 - 64) / min(bandwidths)
    assert run(EventDrivenNetwork(line(*bandwidths), 64), (0, 3, 64_000)) == pytest.approx([(first + others) * 1e9])


def test_a_closed_form_has_the_pace_of_the_slowest_link_and_all_latencies():
    assert run(ClosedFormNetwork(line(4e9, 1e9, 2e9)), (0, 3, 64_000)) == pytest.approx([64_000 + 3 * 100])


def test_a_message_of_less_than_a_packet_is_stored_and_forwarded_whole():
    expected = 3 * (32 + 100)
    assert run(EventDrivenNetwork(line(1e9, 1e9, 1e9), 64), (0, 3, 32)) == pytest.approx([expected])


def test_messages_wait_for_one_another_on_a_link_and_not_for_its_latency():
    network = line(1e9)
    assert run(EventDrivenNetwork(network), (0, 1, 1000), (0, 1, 1000), (1, 0, 1000)) == pytest.approx(
        [1100, 2100, 1100]
    )
    assert run(ClosedFormNetwork(network), (0, 1, 1000), (0, 1, 1000)) == pytest.approx([1100, 1100])


def test_senders_to_one_rank_share_its_link():
    network = switch(5, 1e9, 100e-9)
    ends = run(EventDrivenNetwork(network), *((rank, 4, 1000) for rank in range(4)))
    assert ends == pytest.approx([2200, 3200, 4200, 5200])  # each stored at the switch, then one after another
    ends = run(EventDrivenNetwork(network, 10), *((rank, 4, 1000) for rank in range(4)))
    assert max(ends) == pytest.approx(4 * 1000 + 10 + 200)  # the last link is busy all the time


def send_packet_by_packet(topology, messages, packet):
    """When each message has arrived, in ns, if every packet is sent by itself, first come, first served."""
    free, done, order = [0.0] * len(topology.links), [0.0] * len(messages), count()
    events = [
        (0.0, next(order), number, topology.routes(source, target)[0])
        for number, (source, target, size) in enumerate(messages)
        for _ in range(size // packet)
    ]
    while events:
        now, _, number, route = heappop(events)
        if not route:
            done[number] = now
            continue
        link = topology.links[route[0]]
        free[route[0]] = max(now, free[route[0]]) + packet / link.bandwidth * 1e9
        heappush(events, (free[route[0]] + link.latency * 1e9, next(order), number, route[1:]))
    return done


@pytest.mark.parametrize("seed", range(4))
def test_random_messages_in_packets_arrive_as_if_each_packet_were_sent_separately(seed):
    """The last arrives at the same time; others may be earlier, since packets of one message stay together."""
    print(f"seed {seed}")
    generator = random.Random(seed)
    topology = rails(4, 4, 2, 300e9, 1e-6, 25e9, 2e-6, is_rail_optimized=False)  # one path for each pair
    pairs = [generator.sample(range(16), 2) for _ in range(24)]
    messages = [(*pair, 65_536 * generator.randrange(1, 16)) for pair in pairs]
    found = run(EventDrivenNetwork(topology, 4096), *messages)
    expected = send_packet_by_packet(topology, messages, 4096)
    assert max(found) == pytest.approx(max(expected), rel=0.01)
    assert sum(found) == pytest.approx(sum(expected), rel=0.2)


def test_a_fast_link_carries_packets_of_several_slow_ones_at_once():
    """Four devices of 1 GB/s each behind one link of 4 GB/s: none takes longer than alone, but for a few packets."""
    links = [DirectedLink(device, 5, 1e9, 0.0) for device in range(4)]
    links += [DirectedLink(5, device, 1e9, 0.0) for device in range(4)]
    links += [DirectedLink(5, 4, 4e9, 0.0), DirectedLink(4, 5, 4e9, 0.0)]
    network = NetworkTopology("slow links to a fast one", 5, links, vertices=6)
    ends = run(EventDrivenNetwork(network, 10), *((rank, 4, 1000) for rank in range(4)))
    assert max(ends) <= 1000 + 4 * 10


def test_messages_of_one_pair_take_all_shortest_paths_in_turn():
    network = ring(4, 1e9, 0.0)
    assert len(network.routes(0, 2)) == 2
    assert run(EventDrivenNetwork(network), (0, 2, 1000), (0, 2, 1000)) == pytest.approx([2000, 2000])
    assert run(EventDrivenNetwork(network), (0, 1, 1000), (0, 1, 1000)) == pytest.approx([1000, 2000])


def test_use_of_links_is_counted():
    network = EventDrivenNetwork(line(1e9, 2e9))
    run(network, (0, 2, 1000), (1, 2, 1000))
    assert network.link_busy == pytest.approx([1e-6, 0, 1e-6, 0])
    network.reset()
    assert network.link_busy == [0, 0, 0, 0]


def test_packets_have_at_least_a_byte():
    with pytest.raises(ValueError, match="packets of 0 bytes: must be at least 1"):
        EventDrivenNetwork(line(1e9), 0)


def test_ranks_between_which_nothing_can_be_sent_are_refused():
    network = ring(4, 1e9, 0.0)
    with pytest.raises(ValueError, match="rank 4 is not in ring:4, which has ranks 0 to 3; 3 would do"):
        network.routes(0, 4)
    with pytest.raises(ValueError, match="from rank 2 to itself"):
        network.routes(2, 2)
