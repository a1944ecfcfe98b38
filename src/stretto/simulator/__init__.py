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
    from stretto.simulator import collectives as collectives
    from stretto.simulator import events as events
    from stretto.simulator import graph as graph
    from stretto.simulator import network as network
    from stretto.simulator import schedules as schedules
    from stretto.simulator import training as training
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

__getattr__, __dir__ = attach(__name__)
