# SPDX-License-Identifier: Apache-2.0
"""Simulates messages, collectives and training steps on a cluster. Imports no GPU library; needs no GPU.

Packages and modules: `events` (the clock), `graph` (computation and messages, and their execution), `network`
(topologies, routes, two fidelities), `collectives` (textbook algorithms), `schedules` (verified schedules, thread block
by thread block, and a tuner), `training` (steps of the planner's models). Every result names its fidelity:
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
    from stretto.simulator.schedules import MachineCosts, ScheduleTuner, simulate_schedule
    from stretto.simulator.training import StepSimulation, plan_simulated, simulate_step

__all__ = [
    "ClosedFormNetwork",
    "EventDrivenNetwork",
    "EventQueue",
    "Execution",
    "ExecutionGraph",
    "GraphBuilder",
    "MachineCosts",
    "NetworkTopology",
    "ScheduleTuner",
    "StepSimulation",
    "add_collective",
    "closed_form_seconds",
    "execute",
    "of_cluster",
    "parse_topology",
    "plan_simulated",
    "simulate_schedule",
    "simulate_step",
]

_HOMES = {
    "ClosedFormNetwork": "stretto.simulator.network",
    "EventDrivenNetwork": "stretto.simulator.network",
    "EventQueue": "stretto.simulator.events",
    "Execution": "stretto.simulator.graph",
    "ExecutionGraph": "stretto.simulator.graph",
    "GraphBuilder": "stretto.simulator.graph",
    "MachineCosts": "stretto.simulator.schedules",
    "NetworkTopology": "stretto.simulator.network",
    "ScheduleTuner": "stretto.simulator.schedules",
    "StepSimulation": "stretto.simulator.training",
    "add_collective": "stretto.simulator.collectives",
    "closed_form_seconds": "stretto.simulator.collectives",
    "execute": "stretto.simulator.graph",
    "of_cluster": "stretto.simulator.network",
    "parse_topology": "stretto.simulator.network",
    "plan_simulated": "stretto.simulator.training",
    "simulate_schedule": "stretto.simulator.schedules",
    "simulate_step": "stretto.simulator.training",
}
_MODULES = ("collectives", "events", "graph", "network", "schedules", "training")
__getattr__, __dir__ = attach(__name__, _HOMES, submodules=_MODULES)
