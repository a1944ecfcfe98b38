# SPDX-License-Identifier: Apache-2.0
"""Topologies: numbers of devices, links and hops; routes; clusters; files; and networks that cannot be."""

import json
from collections import Counter
from dataclasses import replace

import networkx
import pytest

from stretto.cluster import GPU, Cluster, NetworkLink, NodeLink
from stretto.simulator import of_cluster, parse_topology
from stretto.simulator.network import (
    DirectedLink,
    NetworkTopology,
    dragonfly,
    fat_tree,
    rails,
    read_graph,
    ring,
    routing,
    torus,
)


def hops(topology, source, target):
    return len(topology.routes(source, target)[0])


def is_route(topology, route, source, target):
    links = [topology.links[number] for number in route]
    return [link.source for link in links] + [target] == [source] + [link.target for link in links]


# Devices, vertices and links of textbooks, and the diameter in links.
@pytest.mark.parametrize(
    ("text", "devices", "vertices", "links", "diameter"),
    [
        ("ring:16", 16, 16, 32, 8),
        ("ring:2", 2, 2, 2, 1),
        ("full:16", 16, 16, 240, 1),
        ("switch:16", 16, 17, 32, 2),
        ("torus:4x6", 24, 24, 96, 5),
        ("torus:2x3x4", 24, 24, 24 * (1 + 2 + 2), 4),
        ("fat-tree:4", 16, 36, 96, 6),
        ("dragonfly:5x4x2", 40, 60, 2 * (40 + 5 * 6 + 10), 5),
    ],
)
def test_shapes_have_the_links_and_diameters_of_textbooks(text, devices, vertices, links, diameter):
    topology = parse_topology(text, 1e9, 1e-6)
    assert (topology.name, topology.devices, topology.vertices, len(topology.links)) == (text, devices, vertices, links)
    pairs = [(source, target) for source in range(devices) for target in range(devices) if source != target]
    assert max(hops(topology, *pair) for pair in pairs) == diameter
    for pair in pairs:
        routes = topology.routes(*pair)
        assert len(set(routes)) == len(routes)
        assert len({len(route) for route in routes}) == 1
        assert all(is_route(topology, route, *pair) for route in routes)


def test_gpus_of_two_numa_domains_share_the_link_between_them():
    topology = of_cluster(Cluster.preset("a100-pcie"), 8)
    for source, target, links in ((0, 3, 2), (4, 7, 2), (3, 4, 3), (7, 0, 3)):
        assert hops(topology, source, target) == links
    crossing = {topology.routes(source, target)[0][1] for source in range(4) for target in range(4, 8)}
    assert [topology.links[number].bandwidth for number in crossing] == [16e9]
    assert hops(of_cluster(Cluster.preset("a100-pcie"), 5), 0, 4) == 3  # the fifth GPU is in the second domain
    two_nodes = of_cluster(Cluster.preset("a100-pcie"), 16)
    assert (hops(two_nodes, 8, 11), hops(two_nodes, 8, 12)) == (2, 3)


def test_routes_are_as_short_as_networkx_finds_them():
    topology = torus((5, 4), 1e9, 0.0)
    graph = networkx.DiGraph([(link.source, link.target) for link in topology.links])
    for source, lengths in networkx.all_pairs_shortest_path_length(graph):
        for target, length in lengths.items():
            assert source == target or hops(topology, source, target) == length


def test_a_ring_in_one_direction_goes_round():
    topology = ring(8, 1e9, 0.0, bidirectional=False)
    assert (hops(topology, 0, 7), hops(topology, 7, 0)) == (7, 1)


def test_all_shortest_paths_are_found_and_the_first_ones_begin_with_different_links():
    topology = torus((4, 4), 1e9, 0.0)
    assert len(topology.routes(0, 5)) == 2  # one step in each dimension
    routes = topology.routes(0, 10)  # two steps in each, either way round: 24 paths, of which some are kept
    assert len(routes) == 8
    assert len({route[0] for route in routes[:4]}) == 4
    assert len(fat_tree(4, 1e9, 0.0).routes(0, 15)) == 4  # one for each core switch


@pytest.mark.parametrize("many", [32, 0], ids=["small switches", "large switches"])
def test_paths_that_branch_more_than_the_first_one_are_found_too(many, monkeypatch):
    monkeypatch.setattr(routing, "_MANY_LINKS", many)  # of a vertex, from which on a search begins at both ends
    for seed in range(30):
        graph = networkx.gnp_random_graph(20, 0.2, seed=seed).to_directed()
        if not networkx.is_connected(graph.to_undirected()):
            continue
        topology = NetworkTopology("random", 20, [DirectedLink(*ends, 1e9, 0.0) for ends in sorted(graph.edges)])
        for target in range(1, 20):
            paths = list(networkx.all_shortest_paths(graph, 0, target))
            routes = topology.routes(0, target)
            found = [[0, *(topology.links[number].target for number in route)] for route in routes]
            assert all(path in paths for path in found), f"{seed=}"
            assert len(found) == len(paths) or 8 == len(found) < len(paths), f"{seed=}, to {target}: {found}"


def test_a_dragonfly_joins_each_two_groups_by_one_link():
    topology = dragonfly(5, 2, 3, 1e9, 0.0)
    groups = Counter()
    for link in topology.links:
        if link.source >= 30 and link.target >= 30:
            pair = (link.source - 30) // 2, (link.target - 30) // 2
            groups[pair] += pair[0] != pair[1]
    assert {pair: count for pair, count in groups.items() if count} == {
        (one, other): 1 for one in range(5) for other in range(5) if one != other
    }


def latency(topology, source, target):
    return sum(topology.links[number].latency for number in topology.routes(source, target)[0])


def test_rails_join_nics_of_one_place_and_other_messages_change_gpus_in_a_node():
    topology = rails(3, 4, 4, 300e9, 1e-6, 25e9, 2e-6)
    assert topology.devices == 12
    assert hops(topology, 0, 1) == 2  # through the node's switch
    assert hops(topology, 0, 4) == 4  # NIC, rail, NIC
    assert hops(topology, 0, 5) == 6
    assert latency(topology, 0, 1) == pytest.approx(1e-6)
    assert latency(topology, 0, 4) == pytest.approx(2e-6)
    assert latency(topology, 0, 5) == pytest.approx(3e-6)
    around_one_switch = rails(3, 4, 4, 300e9, 1e-6, 25e9, 2e-6, is_rail_optimized=False)
    assert hops(around_one_switch, 0, 5) == 4


def test_gpus_share_nics_and_a_gpu_has_several():
    shared = rails(2, 8, 4, 200e9, 1e-6, 25e9, 2e-6)
    nics = {gpu: shared.links[shared.routes(gpu, gpu + 8)[0][0]].target for gpu in range(8)}
    assert [nics[gpu] for gpu in (0, 2, 4, 6)] == [nics[gpu] for gpu in (1, 3, 5, 7)]
    assert len(set(nics.values())) == 4
    several = rails(2, 2, 4, 200e9, 1e-6, 25e9, 2e-6)
    assert len(several.routes(0, 2)) == 2
    assert len(several.routes(1, 3)) == 2
    nics = [sorted(several.links[route[0]].target for route in several.routes(gpu, gpu + 2)) for gpu in (0, 1)]
    assert nics[0] == [nics[0][0], nics[0][0] + 1]  # neighbouring NICs, and the other GPU has the next two
    assert nics[1] == [nics[0][0] + 2, nics[0][0] + 3]


CLUSTER = Cluster(
    name="pairs",
    nodes=4,
    gpus_per_node=4,
    nics_per_node=2,
    gpu=GPU(name="a GPU"),
    in_node=NodeLink(bandwidth=300e9, pair_bandwidth=100e9, latency=1e-6),
    between_nodes=NetworkLink(bandwidth=25e9, latency=4e-6),
)


def test_a_clusters_network_has_its_figures():
    topology = of_cluster(CLUSTER, 8)
    assert (topology.name, topology.devices) == ("pairs:8", 8)
    in_node = topology.links[topology.routes(0, 3)[0][0]]
    assert (in_node.target, in_node.bandwidth, in_node.latency) == (3, 100e9, 1e-6)  # a link between each pair
    between = [topology.links[number] for number in topology.routes(0, 7)[0]]
    assert min(link.bandwidth for link in between) == 25e9
    assert latency(topology, 0, 7) == pytest.approx(4e-6)
    assert of_cluster(CLUSTER, 2).devices == 2


@pytest.mark.parametrize(("to_one_peer", "is_switched"), [(274e9, True), (327e9, True), (163e9, False), (109e9, False)])
def test_gpus_are_behind_a_switch_if_a_probe_measured_almost_all_bandwidth_to_one_peer(to_one_peer, is_switched):
    probed = replace(CLUSTER, in_node=NodeLink(bandwidth=327e9, pair_bandwidth=to_one_peer, latency=1e-6))
    topology = of_cluster(probed, 4)
    hops = [topology.links[number] for number in topology.routes(0, 3)[0]]
    assert [link.bandwidth for link in hops] == ([327e9, 327e9] if is_switched else [to_one_peer])


@pytest.mark.parametrize(
    ("gpus", "message"), [(6, "fill no whole nodes .* 4 would do"), (32, "has 16 GPUs, not 32"), (0, "0 GPUs")]
)
def test_gpus_that_a_cluster_cannot_give_are_refused(gpus, message):
    with pytest.raises(ValueError, match=message):
        of_cluster(CLUSTER, gpus)


def test_a_network_too_large_for_memory_is_refused_before_it_is_made():
    with pytest.raises(ValueError, match="800000000 GPUs is not simulated; 131072 are the most"):
        of_cluster(replace(CLUSTER, nodes=None), 800_000_000)


def test_a_cluster_without_a_bandwidth_is_refused():
    cluster = Cluster(name="unknown", gpus_per_node=2, gpu=GPU(name="a GPU"))
    with pytest.raises(ValueError, match=r"does not say in_node\.bandwidth"):
        of_cluster(cluster, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rign:16", "did you mean 'ring'"),
        ("ring:0", r"must be written ring:N"),
        ("ring:many", r"must be written ring:N"),
        ("torus:16", r"has 1 sizes, but is written torus:AxB\[xC\]"),
        ("torus:16x-8", "must be written torus"),
        ("fat-tree:3", "must be even; 4 would do"),
        ("full:99999", "has 99999 devices; 2048 are the most"),
        ("torus:999x999x999", "65536 are the most"),
    ],
)
def test_topologies_that_do_not_exist_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_topology(text, 1e9, 1e-6)


@pytest.mark.parametrize(
    ("bandwidth", "latency", "message"),
    [
        (0.0, 0.0, "bandwidth of 0 bytes/s"),
        (-1.0, 0.0, "bandwidth of -1 bytes/s"),
        (float("inf"), 0.0, "bandwidth of inf"),
        (float("nan"), 0.0, "bandwidth of nan"),
        (1e-300, 0.0, "1 is the least"),
        (1e9, 1e300, "1e\\+06 s is the longest"),
        (1e9, -1e-9, "latency of -1e-09 s"),
        (1e9, float("inf"), "latency of inf s"),
        (None, 0.0, "needs the bandwidth and the latency"),
    ],
)
def test_links_that_cannot_be_are_refused(bandwidth, latency, message):
    with pytest.raises(ValueError, match=message):
        parse_topology("ring:4", bandwidth, latency)


def test_devices_without_a_route_are_refused():
    links = [DirectedLink(0, 1, 1e9, 0.0), DirectedLink(1, 0, 1e9, 0.0)]
    with pytest.raises(ValueError, match="not connected: no route leads from device 0 to device 2"):
        NetworkTopology("two and one", 3, links)
    with pytest.raises(ValueError, match="not connected: no route leads from device 2 to device 0"):
        NetworkTopology("one way", 3, [*links, DirectedLink(1, 2, 1e9, 0.0)])
    with pytest.raises(ValueError, match="link from vertex 1 to itself"):
        NetworkTopology("a loop", 2, [*links, DirectedLink(1, 1, 1e9, 0.0)])
    with pytest.raises(ValueError, match="link 1 -> 2, but its vertices are 0 to 1"):
        NetworkTopology("too far", 2, [*links, DirectedLink(1, 2, 1e9, 0.0)])


def test_a_link_can_be_lost():
    topology = ring(4, 1e9, 1e-6)
    number = topology.routes(0, 1)[0][0]
    assert hops(topology.without_links([number]), 0, 1) == 3
    with pytest.raises(ValueError, match="not connected"):
        topology.without_links([link for link in range(8) if topology.links[link].target == 1])


def star(kind=networkx.Graph):
    graph = kind()
    graph.add_node("hub", kind="switch")
    graph.add_edge("hub", "a", bandwidth=1e9, latency=1e-6)
    graph.add_edge("hub", "b", bandwidth=2e9)
    return graph


def write(graph, path):
    match path.suffix:
        case ".json":
            path.write_text(json.dumps(networkx.node_link_data(graph, edges="edges")))
        case ".graphml":
            networkx.write_graphml(graph, path)
        case ".gml":
            networkx.write_gml(graph, path)


@pytest.mark.parametrize("suffix", [".json", ".graphml", ".gml"])
def test_graphs_are_read_from_files(tmp_path, suffix):
    path = tmp_path / f"star{suffix}"
    write(star(), path)
    topology = parse_topology(path, 8e9, 5e-6)
    assert (topology.devices, topology.vertices) == (2, 3)  # a and b are the ranks, and the hub is a switch
    assert [topology.links[number].bandwidth for number in topology.routes(0, 1)[0]] == [1e9, 2e9]
    assert [topology.links[number].latency for number in topology.routes(0, 1)[0]] == [1e-6, 5e-6]


@pytest.mark.parametrize(
    "lines",
    ["0 1 1e9 1e-6\n1 2 2e9 1e-6\n", "# a line of three\n0 1\n1 2 # the last\n", "0 1 {'bandwidth': 1e9}\n1 2 {}\n"],
)
def test_an_edge_list_is_read(tmp_path, lines):
    path = tmp_path / "line.edgelist"
    path.write_text(lines)
    topology = read_graph(path, 2e9, 1e-6)
    assert topology.devices == 3
    assert hops(topology, 0, 2) == 2
    rates = [topology.links[number].bandwidth for number in topology.routes(0, 2)[0]]
    assert rates == [1e9 if "1e9" in lines else 2e9, 2e9]


def test_ranks_of_a_file_are_in_the_order_of_their_ids_wherever_they_are_in_it(tmp_path):
    lines = [f"{rank} {rank + 1} {(rank + 1) * 1e9} 1e-6" for rank in range(11)]
    for prefix in ("", "gpu"):
        read = []
        for order in (lines, lines[::-1], lines[5:] + lines[:5]):
            path = tmp_path / "line.edgelist"
            path.write_text("\n".join(f"{prefix}{line.replace(' ', f' {prefix}', 1)}" for line in order))
            read.append(read_graph(path))
        assert [link.bandwidth for link in read[0].links if link.target == link.source + 1] == [
            (rank + 1) * 1e9 for rank in range(11)
        ]
        assert all(topology.links == read[0].links for topology in read)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{}", r"a\.json: is no graph"),
        ("a.json", "[", r"a\.json: is no graph"),
        ("a.json", "[]", "its JSON is no object"),
        ("a.json", '{"nodes": []}', "reads from .json: there is no key 'edges'"),
        ("a.graphml", "<graphml", r"a\.graphml: is no graph"),
        ("a.graphml", '<!DOCTYPE a [<!ENTITY b "c">]><graphml>&b;</graphml>', r"a\.graphml: is no graph"),
        ("a.gml", "graph", r"a\.gml: is no graph"),
        ("a.edgelist", "0 1 fast 0\n", r"a\.edgelist: is no graph"),
        ("a.edgelist", "0 1 0 0\n", "bandwidth of 0 bytes/s"),
        ("a.edgelist", "0 1 1e9 0\n2 3 1e9 0\n", "is not connected"),
        ("a.edgelist", "", "has no device"),
        (
            "a.json",
            f'{{"nodes": [{{"id": 0}}], "edges": [{{"source": 0, "target": 1, "bandwidth": {10**400}}}]}}',
            "an edge has bandwidth = 1000.* must be a number up to",
        ),
    ],
)
def test_files_that_are_no_network_are_refused_in_one_line(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        read_graph(tmp_path / name, 1e9, 1e-6)
    assert "\n" not in str(raised.value)


def test_an_edge_without_a_bandwidth_and_a_missing_file_are_refused(tmp_path):
    write(star(), tmp_path / "star.json")
    with pytest.raises(ValueError, match=r"star\.json: an edge has no latency; write it there"):
        read_graph(tmp_path / "star.json")
    with pytest.raises(ValueError, match=r"there is no such file; did you mean .*star\.json"):
        read_graph(tmp_path / "satr.json")
    (tmp_path / "analytical.json").write_text('{"topology": ["Ring"], "npus_count": [8]}')
    for name, message in ((".", "a graph's file ends in .*--topology ring"), ("analytical.json", "--topology ring:8")):
        with pytest.raises(ValueError, match=message):
            read_graph(tmp_path / name)
