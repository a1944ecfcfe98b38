# SPDX-License-Identifier: Apache-2.0
"""Fits the costs of executors and protocols to measured cases: damped least squares of the logarithms of times."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from lab.simulated_schedules.cases import MeasuredSchedule
from stretto.collectives.algorithms import find
from stretto.collectives.schedule import Schedule
from stretto.simulator.network.topology import NetworkTopology
from stretto.simulator.schedules.costs import ExecutorCosts, MachineCosts
from stretto.simulator.schedules.simulate import simulate_schedule

Parameter = tuple[str, str, str]
"""An executor, a protocol of it ("" for figures of the executor itself) and the figure's name."""
_ROUNDS = 12
_STEP = 0.02  # of a logarithm, for derivatives
_SIMULATED_TILES = 4  # enough to see the slope of the pipelining loop


@lru_cache(maxsize=256)
def compile_case(algorithm: str, parameters: tuple[tuple[str, int], ...]) -> Schedule:
    """Compile an algorithm out of place, as the benches ran it."""
    given: dict[str, Any] = dict(parameters)
    return find(algorithm).compile(in_place=False, **given)


@dataclass
class SchedulePredictor:
    """Predicts cases by simulation, and caches predictions whose costs have not changed."""

    topology_of: Callable[[int], NetworkTopology]
    _known: dict[tuple[Any, ...], float] = field(default_factory=dict)

    def predict(self, case: MeasuredSchedule, costs: MachineCosts) -> float:
        """The simulated seconds of a case; outside of a CUDA graph, at least the host's time to issue the call."""
        executor = costs.executor(case.executor)
        protocols = [case.protocol] if case.protocol else list(executor.protocols)
        seconds = executor.launch + min(self._simulate(case, executor, protocol) for protocol in protocols)
        return max(seconds, executor.host_seconds) if case.mode == "eager" else seconds

    def _simulate(self, case: MeasuredSchedule, executor: ExecutorCosts, protocol: str) -> float:
        if case.tile_bytes is not None:
            executor = replace(executor, tile_bytes=case.tile_bytes)
        executor = replace(executor, launch=0.0, host_seconds=0.0)
        key = (
            case.algorithm, case.parameters, case.num_bytes, case.instances, protocol, executor.tile_bytes,
            executor.instances, executor.protocols[protocol],
        )  # fmt: skip
        if key not in self._known:
            self._known[key] = simulate_schedule(
                compile_case(case.algorithm, case.parameters),
                case.num_bytes,
                self.topology_of(case.ranks),
                executor,
                protocol=protocol,
                instances=case.instances,
                max_tiles=_SIMULATED_TILES,
            ).seconds
        return self._known[key]


def get(costs: MachineCosts, parameter: Parameter) -> float:
    """A figure of the costs."""
    executor, protocol, name = parameter
    of = costs.executors[executor]
    return getattr(of.protocols[protocol] if protocol else of, name)


def put(costs: MachineCosts, values: Mapping[Parameter, float]) -> MachineCosts:
    """The costs with some figures replaced."""
    executors = dict(costs.executors)
    for (executor, protocol, name), value in values.items():
        of = executors[executor]
        figure: dict[str, Any] = {name: value}
        if protocol:
            changed = replace(of.protocols[protocol], **figure)
            executors[executor] = replace(of, protocols={**of.protocols, protocol: changed})
        else:
            executors[executor] = replace(of, **figure)
    return replace(costs, executors=executors)


def fit(
    cases: Sequence[MeasuredSchedule],
    start: MachineCosts,
    parameters: Sequence[Parameter],
    predict: Callable[[MeasuredSchedule, MachineCosts], float],
) -> MachineCosts:
    """Fit the parameters from their values in `start` (Levenberg-Marquardt on logarithms of parameters and times).

    Large deviations count less than squared (they are weighted by their inverse beyond 15%), so that a few
    outliers do not dominate the fit.
    """
    values = np.array([math.log(get(start, each)) for each in parameters])

    def costs_of(logs: "np.ndarray[Any, Any]") -> MachineCosts:
        found = {}
        for each, log in zip(parameters, logs, strict=True):
            value = math.exp(log)
            found[each] = min(value, 1.0) if each[2] == "bandwidth_factor" else value
        return put(start, found)

    def residuals(logs: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        costs = costs_of(logs)
        return np.array([math.log(predict(case, costs) / case.seconds) for case in cases])

    def loss(errors: "np.ndarray[Any, Any]") -> float:
        small = np.abs(errors) <= 0.15
        return float(np.where(small, errors**2, 0.3 * np.abs(errors) - 0.0225).sum())

    damping, errors = 1e-2, residuals(values)
    for _ in range(_ROUNDS):
        jacobian = np.empty((len(cases), len(values)))
        for column in range(len(values)):
            moved = values.copy()
            moved[column] += _STEP
            jacobian[:, column] = (residuals(moved) - errors) / _STEP
        weights = np.sqrt(np.minimum(1.0, 0.15 / np.maximum(np.abs(errors), 1e-9)))
        weighted, target = jacobian * weights[:, None], -errors * weights
        normal = weighted.T @ weighted
        for _ in range(6):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), weighted.T @ target).clip(
                -1.0, 1.0
            )
            tried = residuals(values + step)
            if loss(tried) < loss(errors):
                values, errors, damping = values + step, tried, damping / 3
                break
            damping *= 4
        else:
            break
        if np.abs(step).max() < 1e-3:
            break
    return costs_of(values)
