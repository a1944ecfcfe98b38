# SPDX-License-Identifier: Apache-2.0
"""Times messages with a first-in, first-out queue on every link. A message costs one event a link.

A link is busy for bytes / bandwidth of each message; latency comes after that, so that a link takes the next message
while the last is still in flight.
"""

import math
from collections.abc import Callable
from typing import Any

from stretto.simulator.events import NANOSECONDS, EventQueue
from stretto.simulator.network.topology import NetworkTopology


class EventDrivenNetwork:
    """A queue on every link. Whole messages are stored and forwarded, or packets of `packet_bytes` bytes are.

    With packets, a link forwards a message as soon as the message's first packet has arrived. Packets of one message
    stay together in a queue, but a link that waits for the next packet from a slower link serves other messages in the
    meantime; so a message takes one event a link, whatever its number of packets.

    Where there are several shortest paths, messages of one pair of ranks take them in turn, and sources begin with
    different ones. truncates: round the time of each hop down to whole nanoseconds, as the analytical networks of
    ASTRA-sim do. Raises ValueError for packets of less than one byte.
    """

    fidelity = "event-driven"

    def __init__(self, topology: NetworkTopology, packet_bytes: int | None = None, *, truncates: bool = False) -> None:
        if packet_bytes is not None and packet_bytes < 1:
            raise ValueError(f"packets of {packet_bytes} bytes: must be at least 1; 4096 would do")
        self.topology = topology
        self._most = math.inf if packet_bytes is None else packet_bytes
        self._truncates = truncates
        self._costs = [(NANOSECONDS / link.bandwidth, link.latency * NANOSECONDS) for link in topology.links]
        self._routes: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}
        self.reset()

    def reset(self) -> None:
        """Empty all queues."""
        self._free_at = [0.0] * len(self.topology.links)
        self._busy = [0.0] * len(self.topology.links)
        self._sent: dict[tuple[int, int], int] = {}
        self._forward = _make_forward(self._free_at, self._busy, self._costs, self._most, self._truncates)

    @property
    def link_busy(self) -> list[float]:
        """Seconds in which each link has been sending since the last reset, by its number."""
        return [busy / NANOSECONDS for busy in self._busy]

    def busy_until(self, nanoseconds: float) -> list[float]:
        """Seconds in which each link has been sending by a time that the simulation has reached."""
        pairs = zip(self._busy, self._free_at, strict=True)  # what is queued keeps a link busy without a gap
        return [(busy - max(0.0, free_at - nanoseconds)) / NANOSECONDS for busy, free_at in pairs]

    def send(
        self,
        queue: EventQueue,
        source: int,
        target: int,
        num_bytes: float,
        arrived: Callable[..., object],
        *arguments: Any,
    ) -> None:
        pair = source, target
        routes = self._routes.get(pair)
        if routes is None:
            routes = self._routes[pair] = self.topology.routes(source, target)
        route = routes[0]
        if len(routes) > 1:
            turn = self._sent.get(pair, source)
            self._sent[pair] = turn + 1
            route = routes[turn % len(routes)]
        transit: list[Any] = [queue, [*reversed(route)], num_bytes, queue.now, (arrived, arguments), None]
        transit[5] = self._forward, (transit,)
        self._forward(transit)


def _make_forward(
    free_at: list[float], busy: list[float], costs: list[tuple[float, float]], most: float, truncates: bool
) -> Callable[[list[Any]], None]:
    """The function that queues a message on the next link of its route: a closure, since it runs once an event.

    The message's first packet is at the link now, the last at `complete_at`. A message in transit is one list, and its
    event one tuple, which are used again at every link.
    """

    def forward(transit: list[Any]) -> None:
        queue, links, num_bytes, complete_at, arrived, event = transit
        link = links.pop()
        cost, latency = costs[link]
        begin = free_at[link]
        if begin < queue.now:
            begin = queue.now
        occupied = num_bytes * cost
        busy[link] += occupied
        free_at[link] = free = begin + occupied
        if num_bytes <= most:
            first_at = complete_at = free + latency
        else:
            packet = most * cost
            first_at = begin + packet + latency
            complete_at = max(free, complete_at + packet) + latency
        if truncates:
            first_at = begin + math.floor(first_at - begin)
            complete_at = begin + math.floor(complete_at - begin)
        if links:
            transit[3] = complete_at
            queue.put(first_at, event)
        else:
            transit[5] = None  # else the message and its event would refer to each other until a garbage collection
            queue.put(complete_at, arrived)

    return forward
