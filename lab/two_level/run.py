# SPDX-License-Identifier: Apache-2.0
"""`python -m lab two-level`: recursive, ring and flat collectives between network namespaces, and where they cross.

The Linux kernel limits the bandwidth (tbf on every link), and the transport adds the delay (`rank.DelayedTransport`).
The prediction uses both settings, and only the software time of a message is measured, in the same run.
"""

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lab.harness import Bench, Measured, Table, column
from lab.pictures import describe_origin, group
from lab.two_level.namespaces import Network, command_in, require_namespaces, shaped_network
from stretto.bench.settings import Option

if TYPE_CHECKING:
    from stretto.collectives.two_level import Links

ALGORITHMS = ("recursive", "ring", "flat")
COLLECTIVES = ("all_gather", "reduce_scatter")
PAIRS = (("recursive", "ring"), ("recursive", "flat"), ("ring", "flat"))
_START_LIMIT = 300.0  # seconds for eight processes to import torch on few cores, and to join
_MEGABIT = 1e6 / 8


@dataclass(frozen=True)
class TwoLevelSetting:
    """The network (nodes, Mbit/s of the links, ms of delay), and the sizes that are measured on it.

    Links are slow and the delay is long, so that the software time of eight processes on few cores does not matter.
    `trunk` is the link between the two halves of the nodes. If it carries less than a half can send, distant nodes
    share it, as they do in most machines' networks.
    """

    ranks_per_node: Annotated[int, Option("Ranks in each of the namespaces.", least=1)] = 2
    nodes: Annotated[int, Option("Network namespaces.")] = 4
    bandwidth: Annotated[float, Option("Bandwidth of a node's link, Mbit/s.")] = 50.0
    loopback: Annotated[float, Option("Bandwidth inside a node, Mbit/s.")] = 200.0
    trunk: Annotated[float, Option("Bandwidth of the link between the halves of the nodes, Mbit/s.")] = 50.0
    delay: Annotated[float, Option("Delay of a message between nodes, ms.", least=0)] = 40.0
    smallest: Annotated[int, Option("Bytes a rank of the smallest collective.", least=4)] = 4096
    sizes: Annotated[int, Option("How many sizes, each twice the one before.", least=2)] = 8
    repeats: Annotated[int, Option("Runs of each; their median counts.", least=1)] = 7

    def __post_init__(self) -> None:
        if self.nodes % 2:
            raise ValueError(f"{self.nodes} nodes have no two halves; {self.nodes + 1} would do")
        self.network()

    @property
    def world(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def shard_bytes(self) -> list[int]:
        return [self.smallest << step for step in range(self.sizes)]

    def network(self) -> Network:
        links = {
            "node_bandwidth": self.bandwidth * _MEGABIT,
            "loopback_bandwidth": self.loopback * _MEGABIT,
            "trunk_bandwidth": self.trunk * _MEGABIT,
        }
        return Network(nodes=self.nodes, leaf_nodes=self.nodes // 2, **links)

    def links(self, overheads: dict[str, float]) -> "Links":
        """The links of the model: as set, plus the software time of a message (seconds, `inside`, `between`)."""
        from stretto.collectives.two_level import Links

        network = self.network()
        return Links(
            in_node_latency=overheads["inside"],
            in_node_bandwidth=network.loopback_bandwidth / self.ranks_per_node,
            latency=self.delay / 1e3 + overheads["between"],
            node_bandwidth=network.node_bandwidth,
            leaf_nodes=network.leaf_nodes,
            oversubscription=max(1.0, network.leaf_nodes * network.node_bandwidth / network.trunk_bandwidth),
        )

    def describe(self) -> str:
        return (
            f"{self.nodes} nodes of {self.ranks_per_node} ranks, {self.bandwidth:g} Mbit/s a node, {self.loopback:g} "
            f"inside, {self.trunk:g} between halves, {self.delay:g} ms; medians of {self.repeats} times"
        )


@dataclass(frozen=True)
class Row:
    """Times of a collective in ms: median, least and most of each algorithm, and the model's; and what it chooses."""

    shard_bytes: int
    recursive_least_ms: float
    recursive_most_ms: float
    ring_least_ms: float
    ring_most_ms: float
    flat_least_ms: float
    flat_most_ms: float
    collective: str = column("collective")
    shard_kib: float = column("a rank (KiB)", "{:g}")
    recursive_ms: float = column("recursive (ms)", "{:.1f}")
    recursive_model_ms: float = column("model", "{:.1f}")
    ring_ms: float = column("ring (ms)", "{:.1f}")
    ring_model_ms: float = column("model", "{:.1f}")
    flat_ms: float = column("flat (ms)", "{:.1f}")
    flat_model_ms: float = column("model", "{:.1f}")
    library_ms: float = column("gloo, no delay (ms)", "{:.1f}")
    fastest: str = column("fastest")
    chosen: str = column("chosen by the model")
    chosen_loss: float = column("slower by", "{:.0%}")


@dataclass(frozen=True)
class Crossover:
    """The first size at which two algorithms cross, measured and predicted (None: never), and all such sizes."""

    all_measured_kib: list[float]
    all_predicted_kib: list[float]
    collective: str = column("collective")
    between: str = column("from, to")
    measured_kib: float | None = column("measured (KiB a rank)", "{:.0f}")
    predicted_kib: float | None = column("predicted", "{:.0f}")
    ratio: float | None = column("measured / predicted", "{:.2f}")


def measure_network(setting: TwoLevelSetting) -> Measured:
    """Measure between namespaces, which are always removed at the end.

    Raises ValueError, before anything is made, if this machine or user cannot make namespaces.
    """
    require_namespaces()
    with shaped_network(setting.network()):
        measured = run_nodes(setting)
    links = setting.links(measured["overheads"])
    rows = [_make_row(row, setting, links) for row in measured["rows"]]
    crossovers = list(_find_crossovers(rows, setting, links))
    return Measured(rows, {"links": asdict(links)}, tables=(Table("Where they cross", crossovers, key="crossovers"),))


def run_nodes(setting: TwoLevelSetting) -> dict[str, Any]:
    """Start one process a rank, each in its node's namespace. Returns rank 0's result."""
    nodes = [rank // setting.ranks_per_node for rank in range(setting.world)]
    limit = _START_LIMIT + _predict_longest(setting)
    return run_ranks_on(nodes, "lab.two_level.rank", asdict(setting), limit)


def run_ranks_on(nodes: Sequence[int], module: str, given: dict[str, Any], limit: float) -> Any:
    """Run a module that calls `rank.serve` in the namespaces of these nodes, one a rank. Returns rank 0's result.

    limit: seconds, for the start and all that is measured.
    """
    with tempfile.TemporaryDirectory(prefix="stretto-") as folder:
        arguments = json.dumps(given), str(Path(folder) / "store"), str(len(nodes))
        commands = [command_in(node, module, *arguments, str(rank)) for rank, node in enumerate(nodes)]
        return run_processes(commands, limit)


def run_processes(commands: Sequence[Sequence[str]], limit: float) -> Any:
    """Run a process a rank, which end with this one. Returns the JSON that rank 0 writes to stdout.

    Raises ValueError if a rank fails, or after `limit` seconds.
    """
    with tempfile.TemporaryFile() as answer, ExitStack() as stack:
        ranks: list[subprocess.Popen[bytes]] = []
        for command in commands:
            out = subprocess.DEVNULL if ranks else answer
            # In a session of its own: Ctrl-C reaches this process alone.
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, start_new_session=True)
            ranks.append(process)
            stack.callback(_end, process)
        end = time.monotonic() + limit
        while (codes := [process.poll() for process in ranks]) != [0] * len(ranks):
            if failed := [rank for rank, code in enumerate(codes) if code]:
                raise ValueError(f"rank {failed[0]} of the bench died; its own words are above")
            if time.monotonic() >= end:
                raise ValueError(f"rank {codes.index(None)} of the bench did not answer within {limit:.0f} s")
            time.sleep(0.05)
        answer.seek(0)
        return json.load(answer)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Close a rank's stdin, at which it exits even in the middle of a command, and kill it if it remains."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _predict_longest(setting: TwoLevelSetting) -> float:
    """Seconds that the collectives may take: ten times the predicted time with 1 ms of software a message."""
    links = setting.links({"inside": 1e-3, "between": 1e-3})
    names = (*ALGORITHMS, ALGORITHMS[-1])
    once = sum(
        _predict("all_gather", name, setting, links, size) + 0.1 for size in setting.shard_bytes for name in names
    )
    return 10 * once * len(COLLECTIVES) * (setting.repeats + 1)


def _predict(collective: Any, name: Any, setting: TwoLevelSetting, links: "Links", size: float) -> float:
    from stretto.collectives.two_level import predict

    return predict(collective, name, size, setting.nodes, setting.ranks_per_node, links)


def _make_row(measured: dict[str, Any], setting: TwoLevelSetting, links: "Links") -> Row:
    collective, size, seconds = (measured[key] for key in ("collective", "shard_bytes", "seconds"))
    times: dict[str, float] = {}
    for name in ALGORITHMS:
        times[f"{name}_ms"] = seconds[name]["median"] * 1e3
        times |= {f"{name}_{key}_ms": seconds[name][key] * 1e3 for key in ("least", "most")}
        times[f"{name}_model_ms"] = _predict(collective, name, setting, links, size) * 1e3
    fastest = min(ALGORITHMS, key=lambda name: times[f"{name}_ms"])
    chosen = min(ALGORITHMS, key=lambda name: times[f"{name}_model_ms"])
    return Row(
        collective=collective,
        shard_bytes=size,
        shard_kib=size / 1024,
        **times,
        library_ms=seconds["library"]["median"] * 1e3,
        fastest=fastest,
        chosen=chosen,
        chosen_loss=times[f"{chosen}_ms"] / times[f"{fastest}_ms"] - 1,
    )


def _find_crossovers(rows: Sequence[Row], setting: TwoLevelSetting, links: "Links") -> Iterator[Crossover]:
    from lab.two_level.crossovers import find_crossovers

    for collective in dict.fromkeys(row.collective for row in rows):
        of_size = {row.shard_bytes: row for row in rows if row.collective == collective}
        sizes = sorted(of_size)
        fine = [low * (high / low) ** (i / 64) for low, high in pairwise(sizes) for i in range(64)] + [sizes[-1]]

        def measure(name: str, size: float, of_size: dict[Any, Row] = of_size) -> float:
            return float(getattr(of_size[size], f"{name}_ms")) / 1e3

        for pair in PAIRS:
            found = find_crossovers(sizes, *(partial(measure, name) for name in pair))
            predicted = find_crossovers(fine, *(partial(_predict, collective, name, setting, links) for name in pair))
            yield Crossover(
                collective=collective,
                between=", ".join(pair),
                measured_kib=found[0] / 1024 if found else None,
                predicted_kib=predicted[0] / 1024 if predicted else None,
                ratio=found[0] / predicted[0] if found and predicted else None,
                all_measured_kib=[size / 1024 for size in found],
                all_predicted_kib=[size / 1024 for size in predicted],
            )


def plot_two_level(data: dict[str, Any], picture: Path) -> None:
    """Draw a panel a collective: times over size, predictions dashed, and where recursive and ring cross."""
    from lab.style import PEER, drawing, plain_log
    from stretto.report.style import GREEN, INK, ORANGE, STRETTO, Look

    collectives = group(data["rows"], "collective")
    setting, dashed = data["setting"], (0, (4, 2))
    looks = {"recursive": STRETTO, "ring": Look(ORANGE, "^"), "flat": Look(PEER.colour, "s")}
    with drawing(picture, max(6.0, 4.5 * len(collectives)), 3.2) as drawn:
        panels = drawn.panels(1, len(collectives), sharey=True)[0]
        for panel, (collective, rows) in zip(panels, collectives.items(), strict=True):
            sizes = [row["shard_kib"] for row in rows]
            for name, look in looks.items():
                panel.plot(sizes, [row[f"{name}_ms"] for row in rows], label=name, **look.line)
                predicted = [row[f"{name}_model_ms"] for row in rows]
                panel.plot(sizes, predicted, color=look.colour, linestyle=dashed, linewidth=1)
            between = (collective, "recursive, ring")
            crossing = next(row for row in data["crossovers"] if (row["collective"], row["between"]) == between)
            for key, colour, dashes in (("measured", GREEN, "-"), ("predicted", INK, dashed)):
                if (size := crossing[f"{key}_kib"]) is not None:
                    label = f"recursive and ring cross, {key}"
                    panel.axvline(size, color=colour, linestyle=dashes, linewidth=1, label=label)
            drawn.log_ticks(panel.xaxis, sizes)
            plain_log(panel.yaxis)
            panel.set(xlabel="KiB of each rank", title=collective.replace("_", "-"))
        panels[0].set_ylabel("ms")
        drawn.title = (
            f"Two-level collectives: {setting['nodes']} network namespaces of {setting['ranks_per_node']} ranks, "
            f"{setting['bandwidth']:g} Mbit/s, {setting['delay']:g} ms"
        )
        drawn.subtitle = describe_origin(data)
        drawn.caption = (
            "Dashed without markers: predicted by the model. Recursive, ring: recursive doubling (halving) or a ring "
            "between nodes, and a collective inside each node. Flat: one ring over all ranks."
        )


BENCH = Bench(
    "two-level",
    "Two-level collectives between network namespaces: recursive, ring and flat, compared with the model (needs root).",
    TwoLevelSetting,
    measure_network,
    Row,
    title=TwoLevelSetting.describe,
    plot=plot_two_level,
)
