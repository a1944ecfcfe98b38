# SPDX-License-Identifier: Apache-2.0
"""An event-driven network in which switches forward a message while it still arrives, as NVSwitches do."""

from collections.abc import Callable
from dataclasses import dataclass

from stretto.simulator.events import EventQueue
from stretto.simulator.network.topology import NetworkTopology

_NS = 1e9


@dataclass(frozen=True)
class LinkUse:
    """One link's bytes (flags included), and the seconds in which it carried them."""

    source: int
    target: int
    num_bytes: float
    busy: float


class CutThroughNetwork:
    """Sends messages hop by hop: a link carries one message at a time, first come, first served.

    A message's head goes on to the next link as soon as it has crossed one; its tail arrives once the slowest link of
    its route has carried all bytes. A message that finds a link busy waits before it, with room for all that wait. So
    two hops cost one transmission time and not two, which whole messages that are stored and forwarded would cost, and
    a message is one event a hop, which packets would not be.
    """

    fidelity = "event-driven"

    def __init__(self, topology: NetworkTopology) -> None:
        self.topology = topology
        self.link_busy = [0.0] * len(topology.links)
        self.link_bytes = [0.0] * len(topology.links)
        self._free = [0.0] * len(topology.links)
        self._byte_ns = [_NS / link.bandwidth for link in topology.links]
        self._latency_ns = [link.latency * _NS for link in topology.links]
        self._routes: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}
        self._sent: dict[tuple[int, int], int] = {}

    def latency(self, source: int, target: int) -> float:
        """Seconds from a message's first byte at the source to its first byte at the target, on an idle network."""
        return sum(self.topology.links[link].latency for link in self._find_routes((source, target))[0])

    def list_use(self) -> tuple[LinkUse, ...]:
        """What each link has carried so far, in the order of the topology's links."""
        return tuple(
            LinkUse(link.source, link.target, carried, busy)
            for link, carried, busy in zip(self.topology.links, self.link_bytes, self.link_busy, strict=True)
        )

    def send(self, queue: EventQueue, source: int, target: int, num_bytes: float, arrived: Callable[[], None]) -> None:
        """Send a message now; `arrived` is called once its last byte has arrived. Several routes take turns."""
        pair = (source, target)
        routes = self._find_routes(pair)
        turn = self._sent.get(pair, 0)
        self._sent[pair] = turn + 1
        self._hop(queue, routes[turn % len(routes)], 0, num_bytes, 0.0, arrived)

    def _find_routes(self, pair: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
        routes = self._routes.get(pair)
        if routes is None:
            routes = self._routes[pair] = self.topology.routes(*pair)
        return routes

    def _hop(
        self,
        queue: EventQueue,
        route: tuple[int, ...],
        at: int,
        num_bytes: float,
        tail: float,
        arrived: Callable[[], None],
    ) -> None:
        """The message's head is before link `at` of its route; its tail gets there at `tail` (ns)."""
        link = route[at]
        carried = num_bytes * self._byte_ns[link]
        start = max(queue.now, self._free[link])
        end = max(start + carried, tail)
        self._free[link] = start + carried
        self.link_busy[link] += carried / _NS
        self.link_bytes[link] += num_bytes
        latency = self._latency_ns[link]
        if at + 1 == len(route):
            queue.at(end + latency, arrived)
        else:
            queue.at(start + latency, self._hop, queue, route, at + 1, num_bytes, end + latency, arrived)
