# SPDX-License-Identifier: Apache-2.0
"""A tuner without a machine: simulates algorithms, channels, instances and protocols, and keeps the fastest by size."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto.collectives.algorithms import ALGORITHMS
from stretto.collectives.compiler import CompileError
from stretto.collectives.schedule import Schedule
from stretto.simulator.network.topology import NetworkTopology
from stretto.simulator.schedules.costs import MachineCosts
from stretto.simulator.schedules.simulate import simulate_schedule
from stretto.suggestions import name_known

INSTANCES = (1, 2, 4, 8, 16, 24)
MAX_STEPS = 20_000
"""The most steps of a candidate's schedule, instances included: larger ones are left out, and counted."""
LIBRARY = "nccl"
"""The executor that stands for a vendor's library: the tuner chooses among the others."""
_CHANNELS = (1, 2, 4)
_SIMULATED_TILES = 6


@dataclass(frozen=True)
class ScheduleCandidate:
    """One way to run a collective. parameters: of the algorithm (ranks, or nodes and gpus, and channels)."""

    algorithm: str
    parameters: tuple[tuple[str, int], ...]
    executor: str
    protocol: str
    instances: int

    @property
    def channels(self) -> int:
        """The channels of a ring; 1 for algorithms that take none."""
        return dict(self.parameters).get("channels", 1)

    def __str__(self) -> str:
        channels = f", {self.channels} channels" if self.channels > 1 else ""
        instances = f" x{self.instances}" if self.instances > 1 else ""
        return f"{self.algorithm} {self.protocol}{instances}{channels} ({self.executor})"


@dataclass
class ScheduleTuner:
    """Finds the fastest candidate for a collective ("allreduce", ...) on a network. Remembers compiled schedules.

    nodes: of equally many ranks each. executors: those that are tried (None: all but the library's). skipped:
    schedules too large to be tried so far, or that do not compile for these ranks. Raises ValueError for a collective
    that no algorithm implements, and for ranks that are not equally many a node.
    """

    collective: str
    topology: NetworkTopology
    costs: MachineCosts
    nodes: int = 1
    executors: Sequence[str] | None = None
    skipped: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        ranks = self.topology.devices
        if self.nodes < 1 or ranks % self.nodes:
            raise ValueError(f"{ranks} ranks are not equally many on {self.nodes} nodes; 1 node would do")
        for name in self.executors or ():
            self.costs.executor(name)
        self._schedules = list(self._compile())
        if not self._schedules:
            raise ValueError(
                f"no algorithm for {self.collective!r} is known on {ranks} ranks"
                f"{name_known(self.collective, list_collectives(), 'there are')}"
            )

    def tune(self, num_bytes: float) -> list[tuple[ScheduleCandidate, float]]:
        """All candidates with their simulated seconds for a rank's larger buffer of so many bytes, fastest first."""
        found: list[tuple[ScheduleCandidate, float]] = []
        for name in self.executors or [name for name in self.costs.executors if name != LIBRARY]:
            for protocol in self.costs.executors[name].protocols:
                for algorithm, parameters, schedule in self._schedules:
                    found += self._try_instances(name, protocol, algorithm, parameters, schedule, num_bytes)
        return sorted(found, key=lambda each: each[1])

    def _try_instances(
        self,
        executor: str,
        protocol: str,
        algorithm: str,
        parameters: tuple[tuple[str, int], ...],
        schedule: Schedule,
        num_bytes: float,
    ) -> Iterator[tuple[ScheduleCandidate, float]]:
        """Try growing numbers of instances, until more of them are slower."""
        costs = self.costs.executors[executor]
        blocks = max(len(program.thread_blocks) for program in schedule.ranks)
        best = float("inf")
        for instances in INSTANCES if costs.instances == 1 else (1,):
            if instances > 1 and costs.max_blocks is not None and blocks * instances > costs.max_blocks:
                return
            if schedule.steps * instances * costs.instances > MAX_STEPS:
                self.skipped.add(f"{algorithm} on {executor}")
                return
            seconds = simulate_schedule(
                schedule,
                num_bytes,
                self.topology,
                costs,
                protocol=protocol,
                ranks_per_node=self.topology.devices // self.nodes,
                instances=instances,
                max_tiles=_SIMULATED_TILES,
            ).seconds
            yield ScheduleCandidate(algorithm, parameters, executor, protocol, instances), seconds
            if seconds > best:
                return
            best = seconds

    def _compile(self) -> Iterator[tuple[str, tuple[tuple[str, int], ...], Schedule]]:
        ranks = self.topology.devices
        both = {"nodes": self.nodes, "gpus": ranks // self.nodes}
        for name, algorithm in ALGORITHMS.items():
            takes = algorithm.parameters
            if "nodes" in takes and self.nodes == 1:
                continue
            parameters = {key: value for key, value in {"ranks": ranks, **both}.items() if key in takes}
            for channels in _CHANNELS if "channels" in takes else (None,):
                given = parameters if channels is None else parameters | {"channels": channels}
                schedule = self._compile_one(name, given)
                if schedule is not None:
                    yield name, tuple(given.items()), schedule

    def _compile_one(self, name: str, parameters: Mapping[str, int]) -> Schedule | None:
        algorithm = ALGORITHMS[name]
        options: dict[str, Any] = dict(parameters)
        try:
            traced = algorithm.trace(**options)
            if traced.collective.name != self.collective or traced.collective.ranks != self.topology.devices:
                return None
            return algorithm.compile(**options)
        except (CompileError, ValueError) as error:
            self.skipped.add(f"{name}: {error}")
            return None


def list_collectives() -> list[str]:
    """The names of the collectives that have an algorithm."""
    sizes = {"ranks": 8, "nodes": 2, "gpus": 4}
    return sorted(
        {
            algorithm.trace(
                **{key: value for key, value in sizes.items() if key in algorithm.parameters}
            ).collective.name
            for algorithm in ALGORITHMS.values()
        }
    )
