# SPDX-License-Identifier: Apache-2.0
"""Simulates verified schedules of `stretto.collectives` on clusters: times, exposed waiting, use of links; and a tuner.

from stretto.cluster import Cluster
from stretto.collectives.algorithms import find
from stretto.simulator.schedules import MachineCosts, simulate_schedule

costs = MachineCosts.find("h200")
topology = costs.topology(Cluster.preset("dgx-h200"), gpus=8)
schedule = find("two-shot-all-reduce").compile(ranks=8, protocol="LL128")
print(simulate_schedule(schedule, 1 << 20, topology, costs.executor("fused")).seconds)
"""

from stretto.simulator.schedules.costs import ExecutorCosts, MachineCosts, ProtocolCosts
from stretto.simulator.schedules.result import BlockTime, LinkUse, ScheduleTime
from stretto.simulator.schedules.simulate import simulate_schedule
from stretto.simulator.schedules.tuner import ScheduleCandidate, ScheduleTuner

__all__ = [
    "BlockTime",
    "ExecutorCosts",
    "LinkUse",
    "MachineCosts",
    "ProtocolCosts",
    "ScheduleCandidate",
    "ScheduleTime",
    "ScheduleTuner",
    "simulate_schedule",
]
