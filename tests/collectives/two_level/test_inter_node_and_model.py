# SPDX-License-Identifier: Apache-2.0
"""The steps between nodes and the model of their time, against hand-computed figures; needs no process."""

import math
from dataclasses import replace

import pytest

from lab.two_level.crossovers import find_crossovers
from stretto.cluster import Cluster
from stretto.cluster import two_level as model
from stretto.collectives.two_level import Links, Nodes, choose, predict
from stretto.collectives.two_level.buffers import SlotRange, split_range, split_slots
from stretto.collectives.two_level.inter_node import InterNodeStep, all_gather_steps, reduce_scatter_steps
from stretto.collectives.two_level.nodes import Host, find_nodes

# 2 ms and 1 MB/s inside a node, 10 ms and 4 MB/s between nodes.
LINKS = Links(in_node_latency=2e-3, in_node_bandwidth=1e6, latency=10e-3, node_bandwidth=4e6)


@pytest.mark.parametrize("algorithm", ["ring", "recursive"])
@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 31])
def test_after_an_all_gather_every_node_has_every_slot_and_nothing_was_sent_twice(algorithm, nodes):
    held = [{0: node} for node in range(nodes)]  # slot: whose
    for step in all_gather_steps(algorithm, nodes):
        moved = [
            {step.target + i: held[(node + step.distance) % nodes][step.source + i] for i in range(step.blocks)}
            for node in range(nodes)
        ]
        for mine, new in zip(held, moved, strict=True):
            assert not mine.keys() & new.keys()
            mine.update(new)
    assert held == [{slot: (node + slot) % nodes for slot in range(nodes)} for node in range(nodes)]


@pytest.mark.parametrize("algorithm", ["ring", "recursive"])
@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 31])
def test_after_a_reduce_scatter_slot_0_has_every_nodes_part_once(algorithm, nodes):
    held = [[[(node, (node + slot) % nodes)] for slot in range(nodes)] for node in range(nodes)]  # (from, for)
    for step in reduce_scatter_steps(algorithm, nodes):
        sent = [mine[step.target : step.target + step.blocks] for mine in held]
        for node, mine in enumerate(held):
            for i, part in enumerate(sent[(node - step.distance) % nodes]):
                mine[step.source + i] = mine[step.source + i] + part
    for node, mine in enumerate(held):
        assert sorted(mine[0]) == [(source, node) for source in range(nodes)]


def test_ring_has_a_step_a_node_and_recursive_one_a_doubling():
    assert all_gather_steps("ring", 4) == (
        InterNodeStep(1, 0, 1, 1),
        InterNodeStep(1, 1, 2, 1),
        InterNodeStep(1, 2, 3, 1),
    )
    assert all_gather_steps("recursive", 4) == (InterNodeStep(1, 0, 1, 1), InterNodeStep(2, 0, 2, 2))
    assert all_gather_steps("recursive", 5) == (
        InterNodeStep(1, 0, 1, 1),
        InterNodeStep(2, 0, 2, 2),
        InterNodeStep(4, 0, 4, 1),
    )
    assert [len(all_gather_steps("recursive", n)) for n in (1, 2, 3, 8, 9)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_the_model_gives_hand_computed_seconds(collective):
    # 4 nodes of 2 ranks, 1000 bytes a rank: 2 x 1000 B / 4 MB/s = 0.5 ms a block between nodes, and
    # 2 ms + 4000 B / 1 MB/s = 6 ms inside.
    assert predict(collective, "ring", 1000, 4, 2, LINKS) == pytest.approx(3 * (10e-3 + 0.5e-3) + 6e-3)
    assert predict(collective, "recursive", 1000, 4, 2, LINKS) == pytest.approx(2 * 10e-3 + 3 * 0.5e-3 + 6e-3)
    # flat: 7 hops, 4 between nodes of 10.25 ms, 3 inside of 3 ms: longer than 7 x 0.25 ms on one link.
    assert predict(collective, "flat", 1000, 4, 2, LINKS) == pytest.approx(4 * 10.25e-3 + 3 * 3e-3)
    # a large one is bound by the link between nodes, which sends 7 blocks of 0.25 s one after the other
    fast = Links(in_node_latency=0, in_node_bandwidth=1e12, latency=10e-3, node_bandwidth=4e6)
    assert predict(collective, "flat", 1e6, 4, 2, fast) == pytest.approx(10e-3 + 7 * 0.25, rel=1e-5)
    # 2 nodes of 2 ranks, a block of 2 s inside and of 1 s between, no latency: a block comes to place 0 at 1, 3 and 5 s
    # (each but the first awaits its hop inside, which ends at 2 and 4), to place 1 at 2, 4 and 6 s
    slow = Links(in_node_latency=0, in_node_bandwidth=0.5, latency=0, node_bandwidth=1)
    assert predict(collective, "flat", 1, 2, 2, slow) == pytest.approx(6)


def test_an_all_reduce_costs_both_and_nothing_costs_nothing():
    assert predict("all_reduce", "ring", 1000, 4, 2, LINKS) == pytest.approx(
        2 * predict("all_gather", "ring", 1000, 4, 2, LINKS)
    )
    assert predict("all_gather", "ring", 0, 4, 2, LINKS) == 0
    assert predict("all_gather", "flat", 1000, 1, 1, LINKS) == 0
    assert predict("all_gather", "ring", 1000, 1, 3, LINKS) == pytest.approx(2 * 3e-3)


def test_distant_nodes_share_the_links_between_switches():
    tapered = Links(0, 1e12, 10e-3, 4e6, leaf_nodes=2, oversubscription=2)
    assert [tapered.slowdown(distance, 4) for distance in (1, 2, 3)] == [1, 2, 1]
    assert [tapered.slowdown(distance, 2) for distance in (1,)] == [1]
    assert LINKS.slowdown(2, 4) == 1
    wide = Links(0, 1e12, 10e-3, 4e6, leaf_nodes=4, oversubscription=4)
    assert [wide.slowdown(distance, 16) for distance in (1, 2, 4, 8)] == [1, 2, 4, 4]
    # a block takes 0.5 ms; the second step's two take twice as long
    inside = 4000 / 1e12
    assert predict("all_gather", "recursive", 1000, 4, 2, tapered) == pytest.approx(
        10.5e-3 + 10e-3 + 2 * 2 * 0.5e-3 + inside
    )
    assert predict("all_gather", "ring", 1000, 4, 2, tapered) == pytest.approx(31.5e-3 + inside)


def test_recursive_is_chosen_for_latency_ring_for_shared_links_and_flat_for_a_slow_node():
    # recursive and ring are equal at 10 ms = 2 blocks of L x 2 / 4 MB/s: L = 10 kB
    links = Links(in_node_latency=0, in_node_bandwidth=8e6, latency=10e-3, node_bandwidth=4e6, leaf_nodes=2)
    tapered = Links(**(vars(links) | {"oversubscription": 2.0}))
    assert choose("all_gather", 9_000, 4, 2, tapered) == "recursive"
    assert choose("all_gather", 11_000, 4, 2, tapered) == "ring"
    # ring 30 ms + L (1.5 + 0.5) us, flat 10 ms + 1.75 L us
    assert choose("all_gather", 100_000, 4, 2, tapered) == "flat"
    assert choose("all_gather", 1_000_000, 4, 2, links, ("recursive", "ring")) == "recursive"
    assert choose("all_gather", 1, 1, 8, tapered) == "flat"
    gloo = replace(tapered, library_scatters=False)  # whose flat reduce-scatter takes twice as long
    assert choose("reduce_scatter", 100_000, 4, 2, tapered) == choose("all_gather", 100_000, 4, 2, gloo) == "flat"
    assert choose("reduce_scatter", 100_000, 4, 2, gloo) != "flat"
    sizes = [1e3 * 2**i for i in range(12)]
    (crossing,) = find_crossovers(
        sizes,
        lambda size: predict("all_gather", "recursive", size, 4, 2, tapered),
        lambda size: predict("all_gather", "ring", size, 4, 2, tapered),
    )
    assert crossing == pytest.approx(10_000, rel=0.02)


def test_a_choice_for_many_ranks_is_not_predicted_again(monkeypatch):
    links = Links(1e-6, 1e9, 3e-6, 2e9)
    chosen = choose("all_gather", 77_777, 4096, 8, links)
    monkeypatch.setattr(model, "predict", None)
    assert choose("all_gather", 77_777, 4096, 8, links) == chosen
    with pytest.raises(TypeError):  # another size is predicted
        choose("all_gather", 77_778, 4096, 8, links)


def test_lines_cross_where_their_logarithms_do():
    assert find_crossovers([1, 100], lambda size: size, lambda size: 10) == [pytest.approx(10)]
    assert find_crossovers([1, 10, 100], lambda size: size, lambda size: 10) == [pytest.approx(10)]
    assert find_crossovers([1, 2, 4], lambda size: size, lambda size: 10) == []


def test_links_are_read_from_a_cluster_and_invalid_ones_raise():
    links = Links.of_cluster(Cluster.preset("perlmutter"))
    assert (links.in_node_bandwidth, links.node_bandwidth) == (300e9, 100e9)
    good = vars(LINKS)
    for change, words in (
        ({"latency": -1.0}, "latency = -1.0: must be a finite number of seconds"),
        ({"node_bandwidth": 0.0}, "node_bandwidth = 0.0: must be a finite number of bytes/s"),
        ({"in_node_bandwidth": math.nan}, "in_node_bandwidth = nan"),
        ({"leaf_nodes": 0}, "leaf_nodes = 0: must be at least 1"),
        ({"oversubscription": 0.5}, "oversubscription = 0.5: must be at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            Links(**(good | change))


def test_ranks_of_one_host_are_a_node_wherever_they_are():
    assert Nodes.of_hosts(["a", "b", "b", "a"]).ranks == ((0, 3), (1, 2))
    assert not Nodes.of_hosts(["a", "b", "b", "a"]).is_consecutive
    assert Nodes.of_consecutive(6, 3) == Nodes.of_hosts("aaabbb")
    assert Nodes.of_consecutive(6, 3).is_consecutive
    assert Nodes.of_consecutive(6, 3).place_of(4) == (1, 1)


def test_agents_are_nodes_where_a_host_has_more_ranks_than_its_launcher_started():
    def host(name: str, ranks: int | None, agent: int | None) -> Host:
        return Host(name, ranks, agent)

    assert find_nodes([host("a", 4, 0), host("a", 4, 0), host("b", 4, 1), host("b", 4, 1)]).count == 2
    assert find_nodes([host("a", 2, 0), host("a", 2, 0), host("a", 2, 1), host("a", 2, 1)]).ranks == ((0, 1), (2, 3))
    assert find_nodes([host("a", None, None)] * 4).count == 1


def test_uneven_nodes_are_refused():
    with pytest.raises(ValueError, match="the group's nodes have 2, 1 ranks, and two levels need equally many"):
        Nodes.of_hosts("aab")
    with pytest.raises(ValueError, match="ranks_per_node is 4, but the group's 6 ranks must fill whole nodes; 3"):
        Nodes.of_consecutive(6, 4)
    with pytest.raises(ValueError, match="must hold each of the ranks 0 to 1 once"):
        Nodes(((0,), (2,)))


def test_pieces_cover_all_elements_once_and_keep_to_the_limit():
    assert list(split_range(5, 2)) == [(0, 2), (2, 4), (4, 5)]
    assert list(split_range(0, 2)) == []
    assert list(split_slots(3, 4, 12)) == [SlotRange(0, 3, 0, 4)]
    assert list(split_slots(3, 4, 8)) == [SlotRange(0, 2, 0, 4), SlotRange(2, 3, 0, 4)]
    assert list(split_slots(2, 4, 3)) == [
        SlotRange(0, 1, 0, 3),
        SlotRange(0, 1, 3, 4),
        SlotRange(1, 2, 0, 3),
        SlotRange(1, 2, 3, 4),
    ]
    # counts over 32 bits
    gigabytes = list(split_range(3 * 2**31 + 1, 2**30))
    assert (len(gigabytes), gigabytes[-1]) == (7, (6 * 2**30, 6 * 2**30 + 1))
