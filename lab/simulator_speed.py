# SPDX-License-Identifier: Apache-2.0
"""`python -m lab simulator-speed`: how long simulations take, and how that grows with the number of ranks.

Times are CPU times of this process on one core, which other load affects little: of finding the routes and adding the
messages, and of executing them.
"""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from lab.harness import Bench, column
from stretto.bench.settings import Option

CLUSTER = "perlmutter"
SMALLEST = 32
ALGORITHMS = {  # those that are simulated at every number of ranks
    "two levels, recursive": ("two-level-recursive", False),
    "two levels, ring": ("two-level-ring", False),
    "two levels, ring, symmetry": ("two-level-ring", True),
    "one ring, symmetry": ("ring", True),
}
RANDOM = "random messages on a torus"
_ROUNDS = 50  # of random messages
_SEED = 32


@dataclass(frozen=True)
class SimulatorSpeedSetting:
    """The all-gather that `python -m lab simulator-speed` simulates, and among how many ranks at the most."""

    largest: Annotated[int, Option("Most ranks, a power of two; the fewest are 32.")] = 2048
    megabytes: Annotated[int, Option("The gathered buffer, in MB.", least=1)] = 256

    def __post_init__(self) -> None:
        if self.largest < SMALLEST or self.largest & (self.largest - 1):
            near = max(SMALLEST, 1 << (max(self.largest, 1).bit_length() - 1))
            raise ValueError(f"--largest is {self.largest}, but must be a power of two from 32 on; {near} would do")


@dataclass(frozen=True)
class Row:
    """A simulation, and how long it took."""

    case: str = column("simulated")
    ranks: int = column("ranks")
    events: int = column("events", "{:,}")
    preparation_seconds: float = column("routes and messages (s)", "{:.2f}")
    execution_seconds: float = column("execution (s)", "{:.2f}")
    events_per_second: float = column("events a second", "{:,.0f}")
    simulated_milliseconds: float = column("simulated (ms)", "{:.3f}")


def time_simulations(setting: SimulatorSpeedSetting) -> Iterator[Row]:
    """Time simulations of all-gathers on Perlmutter, and of random messages, where no two events fall together."""
    _time_all_gather(SMALLEST, "ring", False, setting.megabytes)  # imports are not timed
    ranks = SMALLEST
    while ranks <= setting.largest:
        for case, (algorithm, uses_symmetry) in ALGORITHMS.items():
            yield Row(case, ranks, **_time_all_gather(ranks, algorithm, uses_symmetry, setting.megabytes))
        yield Row(RANDOM, ranks, **_time_random_messages(ranks))
        ranks *= 2


def _time_all_gather(ranks: int, algorithm: str, uses_symmetry: bool, megabytes: int) -> dict[str, Any]:
    from stretto.cluster import Cluster
    from stretto.simulator import EventDrivenNetwork, of_cluster
    from stretto.simulator.collectives import CollectiveOptions, simulate_collective
    from stretto.simulator.collectives.algorithms import plan_phases

    cluster = Cluster.preset(CLUSTER)

    def run() -> tuple[int, float, float]:
        network = EventDrivenNetwork(of_cluster(cluster, ranks))
        for phase in plan_phases("all_gather", algorithm, range(ranks), 1.0, cluster.gpus_per_node):
            for group in phase.groups:
                for each in phase.pattern.rounds:
                    for source, target, _ in each.messages:
                        network.topology.routes(group[source], group[target])
        options = CollectiveOptions(cluster.gpus_per_node, uses_symmetry=uses_symmetry)
        found = simulate_collective("all_gather", algorithm, network, megabytes * 1e6, options)
        return found.events, found.execution_seconds, found.seconds

    return _time(run)


def _time_random_messages(ranks: int) -> dict[str, Any]:
    """Every rank sends 50 messages one after another, of random sizes and to random ranks of a torus: no symmetry."""
    from stretto.simulator import EventDrivenNetwork, GraphBuilder, execute
    from stretto.simulator.network import torus

    generator = random.Random(_SEED)

    def run() -> tuple[int, float, float]:
        rows = 1 << (ranks.bit_length() // 2)
        network = EventDrivenNetwork(torus((rows, ranks // rows), 25e9, 700e-9))
        builder = GraphBuilder(ranks)
        for _ in range(_ROUNDS):
            for source in range(ranks):
                target = generator.randrange(ranks - 1)
                builder.message(source, target + (target >= source), generator.random() * 2**20, stream="messages")
        graph = builder.build()
        for source, target in set(zip(graph.ranks.tolist(), graph.targets.tolist(), strict=True)):
            network.topology.routes(source, target)
        execution = execute(graph, network)
        return execution.events, execution.execution_seconds, execution.makespan

    return _time(run)


def _time(run: Callable[[], tuple[int, float, float]]) -> dict[str, Any]:
    begin = time.process_time()
    events, execution, simulated = run()
    return {
        "events": events,
        "preparation_seconds": time.process_time() - begin - execution,
        "execution_seconds": execution,
        "events_per_second": events / execution,
        "simulated_milliseconds": simulated * 1e3,
    }


def plot_simulator_speed(data: dict[str, Any], picture: Path) -> None:
    """Draw the seconds of a simulation, and events a second, over ranks: a line a case."""
    from lab.pictures import describe_origin, group
    from lab.style import drawing, plain_log
    from stretto.report.style import SERIES

    with drawing(picture, 9.0, 3.2) as drawn:
        (left, right), *_ = drawn.panels(1, 2)
        for (case, rows), look in zip(group(data["rows"], "case").items(), SERIES, strict=False):
            ranks = [row["ranks"] for row in rows]
            whole = [row["preparation_seconds"] + row["execution_seconds"] for row in rows]
            left.plot(ranks, whole, label=case, **look.line)
            right.plot(ranks, [row["events_per_second"] / 1e6 for row in rows], **look.line)
        for panel, what in ((left, "seconds of one core"), (right, "million events a second")):
            drawn.log_ticks(panel.xaxis, [row["ranks"] for row in data["rows"]])
            panel.set(xlabel="ranks", ylabel=what)
        plain_log(left.yaxis)
        right.set_ylim(bottom=0)
        drawn.title = "How long a simulation takes, event-driven, on one core"
        drawn.subtitle = describe_origin(data)
        drawn.caption = (
            f"All-gathers of {data['megabytes']} MB on {data['cluster']}; with symmetry, equal groups and steady "
            "rounds are simulated once. Random messages have no symmetry: 50 a rank, of random sizes. Left: finding "
            "routes and adding messages is counted; right: execution alone."
        )


BENCH = Bench(
    "simulator-speed",
    "How long simulations of all-gathers and random messages take, by the number of ranks (needs no GPU).",
    SimulatorSpeedSetting,
    time_simulations,
    Row,
    title="How long simulations take, on one core",
    plot=plot_simulator_speed,
    about=lambda setting: {"megabytes": setting.megabytes, "cluster": CLUSTER},
)
