# SPDX-License-Identifier: Apache-2.0
"""Describes a network as a graph: devices (the ranks), switches and NICs, and links with a bandwidth and a latency."""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from stretto.simulator.network.routing import MAX_ROUTES, ShortestPaths

MIN_BANDWIDTH = 1.0  # byte/s; with it, and with LONGEST_LATENCY, no time overflows
LONGEST_LATENCY = 1e6  # seconds


@dataclass(frozen=True, slots=True)
class DirectedLink:
    """A link from one vertex to another, in one direction. bandwidth: bytes/s. latency: seconds."""

    source: int
    target: int
    bandwidth: float
    latency: float


class NetworkTopology:
    """A network. Devices 0 to devices - 1 are the ranks; further vertices (switches, NICs) have the numbers after them.

    Two links may join the same vertices. Immutable: the tuple `links` gives each link its number.

    Raises ValueError for a bandwidth that is not positive and finite, a latency that is negative or not finite, a link
    from a vertex to itself or to one that does not exist, and devices between which there is no route.
    """

    def __init__(self, name: str, devices: int, links: Iterable[DirectedLink], *, vertices: int | None = None) -> None:
        self.name = name
        self.devices = devices
        self.links = tuple(links)
        self.vertices = devices if vertices is None else vertices
        self._check()
        self._paths = ShortestPaths(self.vertices, [(link.source, link.target) for link in self.links])
        self._routes: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}
        self._check_connected()

    def routes(self, source: int, target: int) -> tuple[tuple[int, ...], ...]:
        """Shortest paths (of the fewest links) from one device to another, each as the numbers of its links.

        All of them in a fixed order, but of more than MAX_ROUTES a part that branches early. Raises ValueError for
        the same device twice, and for a rank that does not exist.
        """
        found = self._routes.get((source, target))
        if found is None:
            self.check_pair(source, target)
            found = self._routes[source, target] = self._paths.find(source, target, MAX_ROUTES)
        return found

    def check_pair(self, source: int, target: int) -> None:
        """Raise ValueError if a message cannot go from one rank to another: see `routes`."""
        for rank in (source, target):
            if not 0 <= rank < self.devices:
                raise ValueError(
                    f"rank {rank} is not in {self.name}, which has ranks 0 to {self.devices - 1}; "
                    f"{min(max(rank, 0), self.devices - 1)} would do"
                )
        if source == target:
            other = (source + 1) % self.devices
            hint = f"to rank {other} would do" if other != source else f"{self.name} has no other"
            raise ValueError(f"a message from rank {source} to itself crosses no link; {hint}")

    def without_links(self, numbers: Collection[int]) -> "NetworkTopology":
        """A copy without some links; the others are renumbered. ValueError if it is no longer connected."""
        links = (link for number, link in enumerate(self.links) if number not in numbers)
        return NetworkTopology(self.name, self.devices, links, vertices=self.vertices)

    def __repr__(self) -> str:
        return f"NetworkTopology({self.name!r}, {self.devices} devices, {len(self.links)} links)"

    def _check(self) -> None:
        if self.devices < 1:
            raise ValueError(f"{self.name} has no device; 2 would do")
        for link in self.links:
            check_link(link.bandwidth, link.latency, f"{self.name}: the link {link.source} -> {link.target}")
            if link.source == link.target:
                raise ValueError(f"{self.name} has a link from vertex {link.source} to itself; leave it out")
            if not (0 <= link.source < self.vertices and 0 <= link.target < self.vertices):
                raise ValueError(
                    f"{self.name} has a link {link.source} -> {link.target}, but its vertices are 0 to "
                    f"{self.vertices - 1}"
                )

    def _check_connected(self) -> None:
        """A device that all others reach, and that reaches all others, connects every pair."""
        for is_reverse in (False, True):
            reached = self._paths.reachable(0, is_reverse=is_reverse)
            missing = next((device for device in range(self.devices) if not reached[device]), None)
            if missing is not None:
                source, target = (missing, 0) if is_reverse else (0, missing)
                raise ValueError(
                    f"{self.name} is not connected: no route leads from device {source} to device {target}; "
                    "add a link, or leave out the device"
                )


def check_link(bandwidth: float, latency: float, what: str = "a link") -> None:
    """Raise ValueError for a bandwidth (bytes/s) or a latency (seconds) that no link can have."""
    if not (bandwidth > 0 and math.isfinite(bandwidth)):
        raise ValueError(f"{what} has a bandwidth of {bandwidth:g} bytes/s, which must be finite and more than 0")
    if bandwidth < MIN_BANDWIDTH:
        raise ValueError(f"{what} has a bandwidth of {bandwidth:g} bytes/s; {MIN_BANDWIDTH:g} is the least")
    if not (latency >= 0 and math.isfinite(latency)):
        raise ValueError(f"{what} has a latency of {latency:g} s, which must be finite and at least 0; 0 would do")
    if latency > LONGEST_LATENCY:
        raise ValueError(f"{what} has a latency of {latency:g} s; {LONGEST_LATENCY:g} s is the longest")
