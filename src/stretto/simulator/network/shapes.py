# SPDX-License-Identifier: Apache-2.0
"""Makes the topologies that have names: rings, tori, switches, fat trees, dragonflies, nodes with several NICs.

Bandwidths are bytes/s in one direction, latencies seconds a link. Links are bidirectional unless
documented otherwise.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

from stretto.simulator.network.topology import DirectedLink, NetworkTopology


def ring(n: int, bandwidth: float, latency: float, *, bidirectional: bool = True) -> NetworkTopology:
    """A ring of n devices; in one direction only if it is not `bidirectional`."""
    check_counts("a ring", devices=n)
    name = f"ring:{n}" if bidirectional else f"ring:{n} in one direction"
    links: list[DirectedLink] = []
    for device in range(n if n > 1 else 0):
        links.append(DirectedLink(device, (device + 1) % n, bandwidth, latency))
        if bidirectional and n > 2:
            links.append(DirectedLink(device, (device - 1) % n, bandwidth, latency))
    return NetworkTopology(name, n, links)


def fully_connected(n: int, bandwidth: float, latency: float) -> NetworkTopology:
    """n devices, each with a link to each other."""
    check_counts("a full network", devices=n)
    pairs = ((source, target) for source in range(n) for target in range(n) if source != target)
    return NetworkTopology(f"full:{n}", n, (DirectedLink(*pair, bandwidth, latency) for pair in pairs))


def switch(n: int, bandwidth: float, latency: float) -> NetworkTopology:
    """n devices around one switch that never blocks. A message crosses two links, each with the latency."""
    check_counts("a switch", devices=n)
    links = [link for device in range(n) for link in both_directions(device, n, bandwidth, latency)]
    return NetworkTopology(f"switch:{n}", n, links, vertices=n + 1)


def torus(sizes: Sequence[int], bandwidth: float, latency: float) -> NetworkTopology:
    """A torus of any number of dimensions, the last the fastest: device a * B + b of A x B has the coordinates (a, b).

    A dimension of 2 has one link between its two devices, not two.
    """
    check_counts("a torus", **{f"dimension_{place}": size for place, size in enumerate(sizes)})
    strides = [prod(sizes[place + 1 :]) for place in range(len(sizes))]
    links: list[DirectedLink] = []
    for coordinates in product(*map(range, sizes)):
        device = sum(at * stride for at, stride in zip(coordinates, strides, strict=True))
        for at, size, stride in zip(coordinates, sizes, strides, strict=True):
            for step in (1, -1)[: min(size - 1, 2)]:
                links.append(DirectedLink(device, device + ((at + step) % size - at) * stride, bandwidth, latency))
    return NetworkTopology(f"torus:{'x'.join(map(str, sizes))}", prod(sizes), links)


def fat_tree(ports: int, bandwidth: float, latency: float) -> NetworkTopology:
    """A three-level fat tree of switches with `ports` ports, ports^3 / 4 devices, without oversubscription.

    Al-Fares et al., "A scalable, commodity data center network architecture" (2008): `ports` pods of ports / 2 edge and
    ports / 2 aggregation switches, and (ports / 2)^2 core switches.
    """
    check_counts("a fat tree", ports=ports)
    if ports % 2:
        raise ValueError(f"a fat tree's switches have {ports} ports, which must be even; {ports + 1} would do")
    half = ports // 2
    devices = ports * half * half
    edges, aggregations = devices, devices + ports * half
    cores = aggregations + ports * half
    links: list[DirectedLink] = []
    for device in range(devices):
        links += both_directions(device, edges + device // half, bandwidth, latency)
    for pod, edge, place in product(range(ports), range(half), range(half)):
        links += both_directions(edges + pod * half + edge, aggregations + pod * half + place, bandwidth, latency)
    for pod, place, core in product(range(ports), range(half), range(half)):
        links += both_directions(aggregations + pod * half + place, cores + place * half + core, bandwidth, latency)
    return NetworkTopology(f"fat-tree:{ports}", devices, links, vertices=cores + half * half)


def dragonfly(groups: int, routers: int, devices: int, bandwidth: float, latency: float) -> NetworkTopology:
    """A dragonfly: `groups` of fully connected `routers`, each with `devices`; one link between each two groups.

    Kim et al., "Technology-driven, highly-scalable dragonfly topology" (2008). A group's links to other groups are
    dealt to its routers in turn. Routing is minimal.
    """
    check_counts("a dragonfly", groups=groups, routers=routers, devices=devices)
    total = groups * routers * devices
    links: list[DirectedLink] = []
    for device in range(total):
        links += both_directions(device, total + device // devices, bandwidth, latency)
    for group, one in product(range(groups), range(routers)):
        first = total + group * routers
        for other in range(one + 1, routers):
            links += both_directions(first + one, first + other, bandwidth, latency)
    for group in range(groups):
        for other in range(group + 1, groups):
            router = total + group * routers + (other - group - 1) % routers
            peer = total + other * routers + (groups + group - other - 1) % routers
            links += both_directions(router, peer, bandwidth, latency)
    name = f"dragonfly:{groups}x{routers}x{devices}"
    return NetworkTopology(name, total, links, vertices=total + groups * routers)


def both_directions(one: int, other: int, bandwidth: float, latency: float) -> Iterator[DirectedLink]:
    yield DirectedLink(one, other, bandwidth, latency)
    yield DirectedLink(other, one, bandwidth, latency)


def check_counts(what: str, **counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{what} has {count} {name.replace('_', ' ')}, which must be at least 1; 2 would do")
