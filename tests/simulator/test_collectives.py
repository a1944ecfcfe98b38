# SPDX-License-Identifier: Apache-2.0
"""Collectives: textbook times in both fidelities, what every rank receives, two levels, and symmetry."""

from collections import Counter
from dataclasses import replace

import pytest

from stretto.cluster import Cluster
from stretto.quantities import whole_nanoseconds
from stretto.simulator import ClosedFormNetwork, EventDrivenNetwork, GraphBuilder, execute, of_cluster, parse_topology
from stretto.simulator.collectives import CollectiveOptions, add_collective, closed_form_seconds, simulate_collective
from stretto.simulator.network import DirectedLink, NetworkTopology, fully_connected, ring, switch

GB = 2**30
LATENCY, BANDWIDTH, BYTES, N = 1e-6, 1e9, 80_000.0, 8  # a chunk of 10,000 bytes takes 10 us
CHUNK = BYTES / N / BANDWIDTH


def with_link(topology: NetworkTopology, number: int, **changes: float) -> NetworkTopology:
    """The topology with another bandwidth or latency of one link."""
    links = list(topology.links)
    links[number] = replace(links[number], **changes)
    return NetworkTopology(topology.name, topology.devices, links, vertices=topology.vertices)


def test_the_known_answer_of_a_ring_all_reduce():
    """2 x 7 steps of 500 ns + 128 KiB / 50 GB/s are 41,179.7 ns. Steps rounded down each would give 14 x 2941."""
    topology = parse_topology("ring:8", 50 * GB, 500e-9)
    assert whole_nanoseconds(closed_form_seconds("all_reduce", "ring", topology, 2**20)) == 41_180
    assert (
        whole_nanoseconds(simulate_collective("all_reduce", "ring", EventDrivenNetwork(topology), 2**20).seconds)
        == 41_180
    )


# Thakur, Rabenseifner and Gropp (2005), with one link between each two ranks.
@pytest.mark.parametrize(
    ("collective", "algorithm", "seconds"),
    [
        ("all_reduce", "ring", 2 * (N - 1) * (LATENCY + CHUNK)),
        ("all_gather", "ring", (N - 1) * (LATENCY + CHUNK)),
        ("reduce_scatter", "ring", (N - 1) * (LATENCY + CHUNK)),
        ("all_to_all", "ring", (N - 1) * LATENCY + N * (N - 1) / 2 * CHUNK),
        ("broadcast", "ring", (N - 1) * (LATENCY + N * CHUNK)),
        ("all_reduce", "recursive", 6 * LATENCY + 2 * (N - 1) * CHUNK),
        ("all_gather", "recursive", 3 * LATENCY + (N - 1) * CHUNK),
        ("reduce_scatter", "recursive", 3 * LATENCY + (N - 1) * CHUNK),
        ("all_to_all", "recursive", 3 * (LATENCY + N / 2 * CHUNK)),
        ("broadcast", "recursive", 3 * (LATENCY + N * CHUNK)),
        ("all_reduce", "direct", 2 * (LATENCY + CHUNK)),
        ("all_gather", "direct", LATENCY + CHUNK),
        ("reduce_scatter", "direct", LATENCY + CHUNK),
        ("all_to_all", "direct", LATENCY + CHUNK),
        ("broadcast", "direct", LATENCY + N * CHUNK),
    ],
)
def test_collectives_take_their_textbook_times_in_both_fidelities(collective, algorithm, seconds):
    topology = fully_connected(N, BANDWIDTH, LATENCY)
    assert closed_form_seconds(collective, algorithm, topology, BYTES) == pytest.approx(seconds)
    for network in (ClosedFormNetwork(topology), EventDrivenNetwork(topology)):
        assert simulate_collective(collective, algorithm, network, BYTES).seconds == pytest.approx(seconds)


def test_a_direct_collective_behind_a_switch_sends_one_message_after_another():
    topology = switch(N, BANDWIDTH, LATENCY)
    sends = (N - 1) * CHUNK
    assert closed_form_seconds("all_to_all", "direct", topology, BYTES) == pytest.approx(2 * LATENCY + sends)
    found = simulate_collective("all_to_all", "direct", EventDrivenNetwork(topology), BYTES)
    assert found.seconds == pytest.approx(2 * LATENCY + sends + CHUNK)  # the switch stores the last one


# What a rank receives at the least: all but its own part; of an all_reduce, twice.
@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize(
    ("collective", "algorithm", "buffers"),
    [
        (collective, algorithm, (2 if collective == "all_reduce" else 1) * part)
        for algorithm in ("ring", "direct", "recursive")
        for collective in ("all_reduce", "all_gather", "reduce_scatter")
        for part in (1,)
    ],
)
def test_every_rank_receives_all_that_others_have(n, collective, algorithm, buffers):
    if algorithm == "recursive" and n in (3, 5):
        with pytest.raises(ValueError, match=f"power of two of ranks, not {n}"):
            add_collective(GraphBuilder(), collective, algorithm, range(n), BYTES)
        return
    assert received(collective, algorithm, n) == pytest.approx(dict.fromkeys(range(n), buffers * (n - 1) / n * BYTES))


def received(collective, algorithm, n, **options):
    builder = GraphBuilder(n)
    add_collective(builder, collective, algorithm, range(n), BYTES, **options)
    graph = builder.build()
    counts = Counter()
    for rank, size in zip(graph.targets.tolist(), graph.sizes.tolist(), strict=True):
        counts[rank] += size
    counts.pop(-1)
    return dict(counts)


@pytest.mark.parametrize("n", [2, 3, 5, 8, 12])
@pytest.mark.parametrize("algorithm", ["ring", "direct", "recursive"])
def test_a_broadcast_reaches_every_rank_once(n, algorithm):
    assert received("broadcast", algorithm, n) == pytest.approx(dict.fromkeys(range(1, n), BYTES))


@pytest.mark.parametrize("n", [2, 3, 5, 8, 12])
def test_bruck_and_direct_all_to_alls_deliver_every_block(n):
    """Bruck's algorithm sends a block on in each round whose bit is set in the distance to its target."""
    assert received("all_to_all", "direct", n) == pytest.approx(dict.fromkeys(range(n), (n - 1) / n * BYTES))
    ones = sum(distance.bit_count() for distance in range(n))
    assert received("all_to_all", "recursive", n) == pytest.approx(dict.fromkeys(range(n), ones / n * BYTES))


def test_recursive_halving_begins_with_half_of_the_buffer_and_doubling_ends_with_it():
    topology = fully_connected(N, BANDWIDTH, LATENCY)
    for collective, parts in (("reduce_scatter", [4, 2, 1]), ("all_gather", [1, 2, 4])):
        builder = GraphBuilder(N)
        add_collective(builder, collective, "recursive", range(N), BYTES)
        graph = builder.build()
        execution = execute(graph, EventDrivenNetwork(topology))
        of_rank = (graph.ranks == 3) & (graph.targets >= 0)
        sizes = graph.sizes[of_rank][execution.starts[of_rank].argsort()]
        assert sizes == pytest.approx([part * BYTES / N for part in parts])


def test_a_rank_sends_on_only_what_it_has_received():
    """Even ranks get the block of rank 1 by rank 0, to which the link is slow; rank 1 ends when it has sent it."""
    topology = fully_connected(8, BANDWIDTH, LATENCY)
    slow = with_link(topology, topology.routes(1, 0)[0][0], latency=1.0)
    found = simulate_collective("all_gather", "recursive", EventDrivenNetwork(slow), BYTES)
    assert [end > 1.0 for end in found.ends] == [True, True, True, False, True, False, True, False]


@pytest.mark.parametrize("outer", ["ring", "direct", "recursive"])
def test_two_levels_send_a_nodes_share_through_each_nic(outer):
    """4 nodes of 2: between nodes a rank receives 3/4 of its half of the buffer, inside the node the other half."""
    between, inside = 3 / 4 / 2, 1 / 2
    expected = {
        "all_gather": between + inside,
        "reduce_scatter": between + inside,
        "all_reduce": 2 * (between + inside),
    }
    for collective, buffers in expected.items():
        found = received(collective, f"two-level-{outer}", 8, ranks_per_node=2)
        assert found == pytest.approx(dict.fromkeys(range(8), buffers * BYTES))
    if outer == "direct":
        found = received("all_to_all", "two-level-direct", 8, ranks_per_node=2)
        assert found == pytest.approx(dict.fromkeys(range(8), (3 / 4 + 1 / 2) * BYTES))


def test_messages_of_two_levels_stay_in_a_node_or_keep_their_place():
    builder = GraphBuilder(12)
    add_collective(builder, "all_reduce", "two-level-ring", range(12), BYTES, ranks_per_node=3)
    graph = builder.build()
    messages = [(s, t) for s, t in zip(graph.ranks.tolist(), graph.targets.tolist(), strict=True) if t >= 0]
    assert all(source // 3 == target // 3 or source % 3 == target % 3 for source, target in messages)
    assert any(source // 3 == target // 3 for source, target in messages)


def test_a_collective_waits_for_what_it_is_after_and_holds_its_stream():
    topology = fully_connected(2, BANDWIDTH, LATENCY)
    builder = GraphBuilder(2)
    late = builder.compute(1, 5e-6)
    first = add_collective(builder, "all_gather", "ring", [0, 1], 2000, after=[[], [late]], stream="group")
    second = add_collective(builder, "all_gather", "ring", [1, 0], 2000, stream="group")
    execution = execute(builder.build(), EventDrivenNetwork(topology))
    assert execution.ends[first] == pytest.approx([7e-6, 7e-6])
    assert execution.ends[second] == pytest.approx([9e-6, 9e-6])
    assert execution.busy(0, "group") == pytest.approx(4e-6)


def test_splits_pipeline_a_chain():
    """A broadcast over a ring in 4 parts: each hop forwards a part while the next one comes."""
    topology = ring(5, BANDWIDTH, 0.0, bidirectional=False)
    network = EventDrivenNetwork(topology)
    whole = simulate_collective("broadcast", "ring", network, 4000)
    parts = simulate_collective("broadcast", "ring", network, 4000, CollectiveOptions(splits=4))
    assert whole.seconds == pytest.approx(4 * 4e-6)
    assert parts.seconds == pytest.approx((4 + 3) * 1e-6)


@pytest.mark.parametrize("algorithm", ["ring", "recursive", "two-level-ring", "two-level-recursive"])
@pytest.mark.parametrize("collective", ["all_gather", "all_reduce"])
@pytest.mark.parametrize("cluster", ["perlmutter", "frontier"])
def test_symmetry_changes_the_number_of_events_and_not_the_time(cluster, collective, algorithm):
    machine = Cluster.preset(cluster)
    network = EventDrivenNetwork(of_cluster(machine, 128), 65_536)
    one_by_one = CollectiveOptions(machine.gpus_per_node)
    all_of_it = simulate_collective(collective, algorithm, network, 64e6, one_by_one)
    symmetric = CollectiveOptions(machine.gpus_per_node, uses_symmetry=True)
    once = simulate_collective(collective, algorithm, network, 64e6, symmetric)
    assert once.seconds == pytest.approx(all_of_it.seconds, rel=1e-9)
    assert once.ends == pytest.approx(all_of_it.ends, rel=1e-3)  # of two that reach a NIC at once, either may be first
    assert once.events <= all_of_it.events
    if algorithm != "recursive":  # whose groups of all ranks, and rounds, all differ
        assert once.events < all_of_it.events / 1.5


def test_a_slow_link_is_no_symmetry():
    """One node of four has a slower link, and the result is that of all ranks simulated."""
    topology = of_cluster(Cluster.preset("perlmutter"), 16)
    slow = with_link(topology, topology.routes(4, 5)[0][0], bandwidth=1e9)
    network = EventDrivenNetwork(slow)
    found = [
        simulate_collective("all_gather", "two-level-ring", network, 1e6, CollectiveOptions(4, uses_symmetry=symmetry))
        for symmetry in (False, True)
    ]
    assert found[1].ends == pytest.approx(found[0].ends, rel=1e-9)
    assert (
        found[0].seconds
        > simulate_collective(
            "all_gather", "two-level-ring", EventDrivenNetwork(topology), 1e6, CollectiveOptions(4)
        ).seconds
    )


def test_a_ring_that_is_not_steady_is_simulated_to_its_end():
    """One slow link of a ring holds up one more rank in each round."""
    topology = with_link(ring(70, BANDWIDTH, LATENCY, bidirectional=False), 0, bandwidth=BANDWIDTH / 2)
    network = EventDrivenNetwork(topology)
    found = [
        simulate_collective("all_gather", "ring", network, 70_000, CollectiveOptions(uses_symmetry=symmetry))
        for symmetry in (False, True)
    ]
    assert found[1].ends == pytest.approx(found[0].ends, rel=1e-9)


def test_nodes_that_use_equal_links_otherwise_are_not_equal():
    """Two nodes that are rings of four; the ranks of the second are in an order in which neighbours are apart."""
    links = [
        DirectedLink(first + place, first + (place + step) % 4, BANDWIDTH, LATENCY)
        for first in (0, 4)
        for place in range(4)
        for step in (1, 3)
    ]
    links += [DirectedLink(rank, (rank + 4) % 8, BANDWIDTH, LATENCY) for rank in range(8)]
    network = EventDrivenNetwork(NetworkTopology("two rings", 8, links))
    found = [
        simulate_collective(
            "all_gather",
            "two-level-ring",
            network,
            BYTES,
            CollectiveOptions(4, in_node="recursive", uses_symmetry=symmetry),
            ranks=[0, 1, 2, 3, 4, 6, 5, 7],
        )
        for symmetry in (False, True)
    ]
    assert found[1].ends == pytest.approx(found[0].ends, rel=1e-9)
    assert max(found[0].ends[:4]) != pytest.approx(max(found[0].ends[4:]), rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("all_redcue", "ring", range(4), 8), {}, "did you mean 'all_reduce'"),
        (("all_reduce", "rong", range(4), 8), {}, "did you mean 'ring'"),
        (("all_reduce", "two-level-ring", range(4), 8), {}, "needs ranks_per_node"),
        (("all_reduce", "two-level-ring", range(6), 8), {"ranks_per_node": 4}, "fill no whole nodes of 4; 4 ranks"),
        (("all_reduce", "ring", [0, 1, 1], 8), {}, "must differ"),
        (("all_reduce", "ring", [], 8), {}, "one at least"),
        (("all_reduce", "ring", range(4), float("nan")), {}, "nan bytes"),
        (("all_reduce", "ring", range(4), -1), {}, "-1"),
        (("all_reduce", "ring", range(4), 8), {"splits": 0}, "0 splits"),
        (("all_to_all", "direct", range(10_000), 8), {}, "sends 99990000 messages; 16777216 are the most"),
        (("all_gather", "ring", range(10_000), 8), {}, "sends 99990000 messages; 16777216 are the most"),
        (("all_reduce", "ring", range(4), 8), {"after": [[]]}, "operations for 1 ranks"),
    ],
)
def test_collectives_that_cannot_run_are_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        add_collective(GraphBuilder(), *arguments, **options)


def test_a_collective_of_one_rank_takes_no_time():
    builder = GraphBuilder(2)
    add_collective(builder, "all_reduce", "ring", [1], 8)
    assert execute(builder.build(), EventDrivenNetwork(fully_connected(2, 1.0, 1.0))).makespan == 0.0
