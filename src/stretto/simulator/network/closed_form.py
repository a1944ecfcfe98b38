# SPDX-License-Identifier: Apache-2.0
"""Times messages by a formula, as if each were alone in the network: hops x latency + bytes / bandwidth."""

import math
from collections.abc import Callable
from typing import Any, Protocol

from stretto.simulator.events import NANOSECONDS, EventQueue
from stretto.simulator.network.topology import NetworkTopology


class NetworkModel(Protocol):
    """A network that takes messages. `fidelity` names how it times them: "closed-form" or "event-driven"."""

    fidelity: str
    topology: NetworkTopology

    def send(
        self,
        queue: EventQueue,
        source: int,
        target: int,
        num_bytes: float,
        arrived: Callable[..., object],
        *arguments: Any,
    ) -> None:
        """Send a message now, and call `arrived(*arguments)` when its last byte has reached the target."""

    def reset(self) -> None:
        """Forget all messages, before another simulation begins."""


class ClosedFormNetwork:
    """No contention: a message over h links takes their latencies and bytes / bandwidth of the slowest.

    Links forward a message while it still arrives (cut-through), along the first shortest path. Messages do not wait
    for one another, not even at one source. truncates: round each message's time down to whole nanoseconds, as the
    analytical networks of ASTRA-sim do.
    """

    fidelity = "closed-form"

    def __init__(self, topology: NetworkTopology, *, truncates: bool = False) -> None:
        self.topology = topology
        self._truncates = truncates
        self._costs: dict[tuple[int, int], tuple[float, float]] = {}  # ns, ns a byte

    def message_nanoseconds(self, source: int, target: int, num_bytes: float) -> float:
        """Return what a message takes. ValueError for ranks between which none can be sent."""
        costs = self._costs.get((source, target))
        if costs is None:
            links = [self.topology.links[number] for number in self.topology.routes(source, target)[0]]
            costs = (
                sum(link.latency for link in links) * NANOSECONDS,
                NANOSECONDS / min(link.bandwidth for link in links),
            )
            self._costs[source, target] = costs
        time = costs[0] + num_bytes * costs[1]
        return math.floor(time) if self._truncates else time

    def send(
        self,
        queue: EventQueue,
        source: int,
        target: int,
        num_bytes: float,
        arrived: Callable[..., object],
        *arguments: Any,
    ) -> None:
        queue.at(queue.now + self.message_nanoseconds(source, target, num_bytes), arrived, *arguments)

    def reset(self) -> None:
        """Do nothing: messages do not meet."""
