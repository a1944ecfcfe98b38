# SPDX-License-Identifier: Apache-2.0
"""Simulates what a cluster that you do not have would do. Imports no GPU library, needs no GPU.

Packages and modules: `events` (the clock), `graph` (computation and messages, and their execution), `network`
(topologies, routes, two fidelities), `collectives` (textbook algorithms). Every result names its fidelity:
"closed-form" (each message as if it were alone) or "event-driven" (with a queue on every link).
"""

from typing import TYPE_CHECKING

from stretto.lazy import attach

if TYPE_CHECKING:
    from stretto.simulator.collectives import add_collective, closed_form_seconds
    from stretto.simulator.events import EventQueue
    from stretto.simulator.graph import Execution, ExecutionGraph, GraphBuilder, execute
    from stretto.simulator.network import (
        ClosedFormNetwork,
        EventDrivenNetwork,
        NetworkTopology,
        of_cluster,
        parse_topology,
    )

__all__ = [
    "ClosedFormNetwork",
    "EventDrivenNetwork",
    "EventQueue",
    "Execution",
    "ExecutionGraph",
    "GraphBuilder",
    "NetworkTopology",
    "add_collective",
    "closed_form_seconds",
    "execute",
    "of_cluster",
    "parse_topology",
]

_HOMES = {
    "ClosedFormNetwork": "stretto.simulator.network",
    "EventDrivenNetwork": "stretto.simulator.network",
    "EventQueue": "stretto.simulator.events",
    "Execution": "stretto.simulator.graph",
    "ExecutionGraph": "stretto.simulator.graph",
    "GraphBuilder": "stretto.simulator.graph",
    "NetworkTopology": "stretto.simulator.network",
    "add_collective": "stretto.simulator.collectives",
    "closed_form_seconds": "stretto.simulator.collectives",
    "execute": "stretto.simulator.graph",
    "of_cluster": "stretto.simulator.network",
    "parse_topology": "stretto.simulator.network",
}
__getattr__, __dir__ = attach(__name__, _HOMES, submodules=("collectives", "events", "graph", "network"))
