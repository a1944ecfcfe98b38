# SPDX-License-Identifier: Apache-2.0
"""Networks: topologies, routes, and two fidelities at which messages are timed.

Modules: `topology` (the graph), `shapes` (rings, tori, switches and others by name), `clusters` (nodes of GPUs with
NICs), `files` (names and graph files), `routing` (shortest paths), `closed_form` and `event_driven` (the fidelities).
"""

from stretto.simulator.network.closed_form import ClosedFormNetwork, NetworkModel
from stretto.simulator.network.clusters import of_cluster, rails
from stretto.simulator.network.event_driven import EventDrivenNetwork
from stretto.simulator.network.files import parse_topology, read_graph
from stretto.simulator.network.shapes import dragonfly, fat_tree, fully_connected, ring, switch, torus
from stretto.simulator.network.topology import DirectedLink, NetworkTopology

__all__ = [
    "ClosedFormNetwork",
    "DirectedLink",
    "EventDrivenNetwork",
    "NetworkModel",
    "NetworkTopology",
    "dragonfly",
    "fat_tree",
    "fully_connected",
    "of_cluster",
    "parse_topology",
    "rails",
    "read_graph",
    "ring",
    "switch",
    "torus",
]
