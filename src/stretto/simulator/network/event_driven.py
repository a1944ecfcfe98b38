# SPDX-License-Identifier: Apache-2.0
"""Times messages with a first-in, first-out queue on every link. A message costs one event a link.

A link is busy for bytes / bandwidth of each message; latency comes after that, so that a link takes the next message
while the last is still under way.
"""

import math
from collections.abc import Callable
from typing import Any

from stretto.simulator.events import NANOSECONDS, EventQueue
from stretto.simulator.network.topology import NetworkTopology


class EventDrivenNetwork:
    """A queue on every link. Whole messages are stored and forwarded, or packets of `packet_bytes` bytes are.

    With packets, a link forwards a message as soon as the message's first packet is there. Packets of one message stay
    together in a queue, but a link that waits for the next packet from a slower link serves other messages meanwhile;
    so a message takes one event a link, whatever its number of packets.

    Where there are several shortest paths, messages of one pair of ranks take them in turn, and sources begin with
    different ones. truncates: round the time of each hop down to whole nanoseconds, as the analytical networks of
    ASTRA-sim do. Raises ValueError for packets of less than one byte.
    """

    fidelity = "event-driven"

    def __init__(self, topology: NetworkTopology, packet_bytes: int | None = None, *, truncates: bool = False) -> None:
        if packet_bytes is not None and packet_bytes < 1:
            raise ValueError(f"packets of {packet_bytes} bytes: must be at least 1; 4096 would do")
        self.topology = topology
        self.packet_bytes = packet_bytes
        self._most = math.inf if packet_bytes is None else packet_bytes
        self._truncates = truncates
        self._latency = [link.latency * NANOSECONDS for link in topology.links]
        self._cost = [NANOSECONDS / link.bandwidth for link in topology.links]  # ns a byte
        self._routes: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}
        self.reset()

    def reset(self) -> None:
        """Empty all queues."""
        self._free_at = [0.0] * len(self.topology.links)
        self._busy = [0.0] * len(self.topology.links)
        self._sent: dict[tuple[int, int], int] = {}

    @property
    def link_busy(self) -> list[float]:
        """Seconds in which each link has been sending since the last reset, by its number."""
        return [busy / NANOSECONDS for busy in self._busy]

    def send(
        self,
        queue: EventQueue,
        source: int,
        target: int,
        num_bytes: float,
        arrived: Callable[..., object],
        *arguments: Any,
    ) -> None:
        """Send a message, as `NetworkModel.send`."""
        pair = source, target
        routes = self._routes.get(pair)
        if routes is None:
            routes = self._routes[pair] = self.topology.routes(source, target)
        route = routes[0]
        if len(routes) > 1:
            turn = self._sent.get(pair, source)
            self._sent[pair] = turn + 1
            route = routes[turn % len(routes)]
        self._forward(queue, route, 0, num_bytes, queue.now, arrived, arguments)

    def _forward(
        self,
        queue: EventQueue,
        route: tuple[int, ...],
        place: int,
        num_bytes: float,
        complete_at: float,
        arrived: Callable[..., object],
        arguments: tuple[Any, ...],
    ) -> None:
        """Queue a message, whose first packet is here now and the last at `complete_at`, on a link of its route."""
        link = route[place]
        cost = self._cost[link]
        latency = self._latency[link]
        begin = self._free_at[link]
        if begin < queue.now:
            begin = queue.now
        occupied = num_bytes * cost
        self._free_at[link] = begin + occupied
        self._busy[link] += occupied
        packet = num_bytes
        if packet > self._most:
            packet = self._most
        first_at = begin + packet * cost + latency
        complete_at += packet * cost
        if complete_at < begin + occupied:
            complete_at = begin + occupied
        complete_at += latency
        if self._truncates:
            first_at = begin + math.floor(first_at - begin)
            complete_at = begin + math.floor(complete_at - begin)
        place += 1
        if place == len(route):
            queue.at(complete_at, arrived, *arguments)
        else:
            queue.at(first_at, self._forward, queue, route, place, num_bytes, complete_at, arrived, arguments)
