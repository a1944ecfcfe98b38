# SPDX-License-Identifier: Apache-2.0
"""Training steps: what every rank of a plan computes, sends and waits for, on equal or unequal GPUs and links.

`simulate_step` takes a `planner.workload.StepWorkload` and `StepConfig`. Modules: `program` (what one rank issues),
`step` (plays the planner's record of the step on every rank), `lowering` and `messages` (make a graph of it, in both
fidelities), `execution`, `simulation` (run it), `variation` (stragglers), `what_if`, `trace` and `plans`.
"""

from stretto.simulator.training.lowering import RankFactors
from stretto.simulator.training.plans import plan_simulated, step_of_plan
from stretto.simulator.training.simulation import StepSimulation, simulate_step
from stretto.simulator.training.variation import Variation
from stretto.simulator.training.what_if import CHANGES, ChangedStep, simulate_change

__all__ = [
    "CHANGES",
    "ChangedStep",
    "RankFactors",
    "StepSimulation",
    "Variation",
    "plan_simulated",
    "simulate_change",
    "simulate_step",
    "step_of_plan",
]
