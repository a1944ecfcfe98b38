# SPDX-License-Identifier: Apache-2.0
"""Makes the networks of clusters: nodes of GPUs, links inside a node, and NICs that rails of switches join."""

from dataclasses import dataclass
from itertools import combinations

from stretto.cluster import Cluster
from stretto.simulator.network.shapes import both_directions, check_counts
from stretto.simulator.network.topology import DirectedLink, NetworkTopology, check_link

# What a message takes at the least where a cluster does not say its latencies: assumptions, not measurements.
DEFAULT_IN_NODE_LATENCY = 1e-6  # seconds, NVLink between two GPUs
DEFAULT_LATENCY = 2e-6  # seconds, a NIC of InfiniBand or Slingshot to another, with the switches between them
MAX_GPUS = 131_072  # of one network, whose graph then has a million links
_PART_TO_ONE_PEER = 0.75  # of all that a GPU sends at once: see `is_switched`


@dataclass(frozen=True)
class _Node:
    """The links of one node's GPUs. bandwidth: of one GPU to all others. pair_bandwidth: to one, if wired in pairs.

    domain_bandwidth: of the link between two NUMA domains, of `domain_gpus` GPUs with a switch of their own each.
    """

    bandwidth: float
    latency: float
    pair_bandwidth: float | None = None
    domain_gpus: int | None = None
    domain_bandwidth: float = 0.0


def rails(
    nodes: int,
    gpus_per_node: int,
    nics_per_node: int,
    in_node_bandwidth: float,
    in_node_latency: float,
    bandwidth: float,
    latency: float,
    *,
    pair_bandwidth: float | None = None,
    is_rail_optimized: bool = True,
    domain_gpus: int | None = None,
    domain_bandwidth: float = 0.0,
) -> NetworkTopology:
    """Nodes of GPUs with several NICs. NIC i of every node is on rail i, one switch that never blocks.

    GPU g of a node sends through NIC g * nics_per_node // gpus_per_node (with more NICs than GPUs: through the NICs i
    with i * gpus_per_node // nics_per_node = g, in turn). A message to another rail changes GPUs inside a node, as NCCL
    does with PXN. With is_rail_optimized=False, one switch joins all NICs of all nodes, and no message changes rails.

    in_node_bandwidth: bytes/s in one direction, from a GPU to all others of its node. bandwidth: of a NIC.
    in_node_latency, latency: seconds of a message from GPU to GPU, in a node and between nodes on one rail (not a link:
    each of the links on the way has its part). pair_bandwidth: bytes/s of a link between each two GPUs of a node;
    without it a switch joins them, as NVSwitch does. domain_gpus: GPUs of a NUMA domain, which has a switch for them
    and a link of domain_bandwidth to each other domain of the node.
    """
    check_counts("a network of nodes", nodes=nodes, gpus_per_node=gpus_per_node, nics_per_node=nics_per_node)
    check_link(in_node_bandwidth, in_node_latency, "the link in a node")
    check_link(bandwidth, latency, "the link of a NIC")
    devices = nodes * gpus_per_node
    layout = _Layout(nodes, gpus_per_node, nics_per_node, is_rail_optimized)
    node = _Node(in_node_bandwidth, in_node_latency, pair_bandwidth, domain_gpus, domain_bandwidth)
    links = [link for each in range(nodes) for link in _links_in_node(layout, each, node)]
    if nodes > 1:
        for each in range(nodes):
            links += _links_of_nics(layout, each, node, bandwidth, latency)
    name = f"{'rails' if is_rail_optimized else 'nodes'}:{nodes}x{gpus_per_node}x{nics_per_node}"
    switches = nodes * -(-gpus_per_node // domain_gpus) if domain_gpus else 0
    return NetworkTopology(name, devices, links, vertices=layout.vertices + switches)


def of_cluster(cluster: Cluster, gpus: int) -> NetworkTopology:
    """The network of the first `gpus` GPUs of a cluster: `rails` with its figures. Ranks fill one node after another.

    Where the cluster does not say a latency, DEFAULT_IN_NODE_LATENCY and DEFAULT_LATENCY are assumed. The switches
    between nodes never block: the cluster's file says nothing of their topology. Raises ValueError for a number of GPUs
    that the cluster does not have, that fills no whole nodes, or that is over MAX_GPUS, and for a bandwidth that it
    does not say.
    """
    check_counts("the network of a cluster", GPUs=gpus)
    if gpus > MAX_GPUS:
        raise ValueError(f"a network of {gpus} GPUs is not simulated; {MAX_GPUS} are the most")
    size = cluster.gpus_per_node
    if cluster.gpus is not None and gpus > cluster.gpus:
        raise ValueError(f"cluster {cluster.name!r} has {cluster.gpus} GPUs, not {gpus}; {cluster.gpus} would do")
    if gpus > size and gpus % size:
        raise ValueError(
            f"{gpus} GPUs fill no whole nodes of cluster {cluster.name!r}, which have {size}; {gpus // size * size} "
            "would do"
        )
    nodes, in_node = max(gpus // size, 1), min(gpus, size)
    link = cluster.in_node
    is_alone = in_node == 1  # nothing is sent in a node
    within = link.bandwidth or link.pair_bandwidth or (1.0 if is_alone else cluster.require("in_node.bandwidth"))
    topology = rails(
        nodes,
        in_node,
        int(cluster.require("nics_per_node")) if nodes > 1 else 1,
        within,
        DEFAULT_IN_NODE_LATENCY if link.latency is None else link.latency,
        cluster.require("between_nodes.bandwidth") if nodes > 1 else 1.0,
        DEFAULT_LATENCY if cluster.between_nodes.latency is None else cluster.between_nodes.latency,
        pair_bandwidth=None if is_alone or is_switched(cluster) else max(link.pair_bandwidth or 0, within / (size - 1)),
        is_rail_optimized=False,
        domain_gpus=size // cluster.domains if cluster.domains > 1 else None,
        domain_bandwidth=link.domain_bandwidth or 0.0,
    )
    topology.name = f"{cluster.name}:{gpus}"
    return topology


def is_switched(cluster: Cluster) -> bool:
    """True if a switch joins a node's GPUs: one sends to one peer almost as fast as to all of them together.

    A probe measures a little less to one peer than to all even behind a switch (84% on 4 H200). GPUs that are wired in
    pairs have links to two peers at least, or one peer alone, where it makes no difference.
    """
    link = cluster.in_node
    if not link.bandwidth or not link.pair_bandwidth:
        return True
    return link.pair_bandwidth >= _PART_TO_ONE_PEER * link.bandwidth


@dataclass(frozen=True)
class _Layout:
    """The numbers of vertices: GPUs, a switch a node, NICs, a switch a rail (or the first alone).

    A NIC that serves several GPUs has a vertex for what it sends and one for what it receives, or it would be a path
    from one of its GPUs to another, as short as that through the node's switch.
    """

    nodes: int
    gpus: int
    rails: int
    is_rail_optimized: bool

    def gpu(self, node: int, place: int) -> int:
        return node * self.gpus + place

    def nic(self, node: int, place: int) -> int:
        return self.nodes * (self.gpus + 1) + node * self.rails + place

    def rail(self, place: int) -> int:
        return self.nodes * (self.gpus + 1 + self.rails) + (place if self.is_rail_optimized else 0)

    def receiver(self, node: int, place: int) -> int:
        if self.rails >= self.gpus:
            return self.nic(node, place)
        return self.rail(self.rails - 1) + 1 + node * self.rails + place

    @property
    def vertices(self) -> int:
        return max(self.rail(self.rails - 1), self.receiver(self.nodes - 1, self.rails - 1)) + 1


def _links_in_node(layout: _Layout, node: int, about: _Node) -> list[DirectedLink]:
    gpus = [layout.gpu(node, place) for place in range(layout.gpus)]
    if about.pair_bandwidth is not None:
        pairs = [(one, other) for one in gpus for other in gpus if one != other]
        return [DirectedLink(*pair, about.pair_bandwidth, about.latency) for pair in pairs]
    if about.domain_gpus is not None:
        domains = -(-layout.gpus // about.domain_gpus)
        hubs = range(layout.vertices + node * domains, layout.vertices + (node + 1) * domains)
        links: list[DirectedLink] = []
        for place, gpu in enumerate(gpus):
            links += both_directions(gpu, hubs[place // about.domain_gpus], about.bandwidth, about.latency / 2)
        for one, other in combinations(hubs, 2):
            links += both_directions(one, other, about.domain_bandwidth, about.latency)
        return links
    hub = layout.nodes * layout.gpus + node
    return [link for gpu in gpus for link in both_directions(gpu, hub, about.bandwidth, about.latency / 2)]


def _links_of_nics(layout: _Layout, node: int, about: _Node, bandwidth: float, latency: float) -> list[DirectedLink]:
    """Each GPU to its NICs, by links as fast as the faster of NIC and in-node link, and each NIC to its rail."""
    links: list[DirectedLink] = []
    for place in range(layout.rails):
        nic, receiver, rail = layout.nic(node, place), layout.receiver(node, place), layout.rail(place)
        if layout.rails >= layout.gpus:
            served = [place * layout.gpus // layout.rails]
        else:
            served = [gpu for gpu in range(layout.gpus) if gpu * layout.rails // layout.gpus == place]
        fast = max(bandwidth, about.bandwidth)
        for gpu in (layout.gpu(node, each) for each in served):
            links.append(DirectedLink(gpu, nic, fast, latency / 4))
            links.append(DirectedLink(receiver, gpu, fast, latency / 4))
        links.append(DirectedLink(nic, rail, bandwidth, latency / 4))
        links.append(DirectedLink(rail, receiver, bandwidth, latency / 4))
    return links
