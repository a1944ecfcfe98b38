# SPDX-License-Identifier: Apache-2.0
"""`python -m lab between-nodes`: puts, schedules and training over shaped links between network namespaces.

    puts          two ranks, both ways at once, beside what the link carries
    all-reduce    in two levels of equal speed, in parts, beside its phases in turn
    all-to-next   three nodes of four ranks with an interface each: the host executor by puts, beside direct sends
    all-to-all    the same ranks: in two steps, beside direct messages, and how many messages leave a node
    training      steps on four nodes of two ranks by each algorithm, on three networks, beside the fastest one

Bandwidths are the kernel's token buckets'. What is predicted is given them as they were set, and the time of a call
without data, measured in the same run; of training, `plan`'s step on a cluster with these links, the time of a message
(in two levels, and in the library's ring), and a core on which a step without communication takes as long as it was
measured to. Messages are measured between the steps, in collectives that follow each other as a step's do: one alone
finds its ranks asleep, and takes up to three times as long. (gloo's own reduce-scatter, of z's "flat", sends as much as
an all-reduce: the model knows it.)
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from lab.harness import Bench, column
from lab.two_level.namespaces import Network, require_namespaces, shaped_network
from lab.two_level.run import run_ranks_on
from stretto.bench.settings import Option, require_known

if TYPE_CHECKING:
    from stretto.cluster.two_level import Links
    from stretto.execution import TwoLevel
    from stretto.simulator.network import NetworkTopology

KINDS = ("puts", "all-reduce", "all-to-next", "all-to-all", "training")
NODES, GPUS = 3, 4
PUT_SIZES = (256 << 10, 1 << 20, 4 << 20)
PARTS = (1, 2, 4, 8)
MODEL: dict[str, Any] = {"layers": 2, "hidden": 256, "heads": 8, "vocab": 64, "max_seq_len": 16}
TILE_BYTES = 128 << 10
_LIMIT = 900.0  # seconds of a kind: twelve processes import torch on few cores
_MEGABIT = 1e6 / 8
_HEADERS = 8934 / 9014  # TCP payload of an Ethernet frame of 9000 bytes
_IN_MEMORY = 10e9  # bytes/s, between ranks of a node


@dataclass(frozen=True)
class BetweenNodesSetting:
    """The links, the buffers, and which kinds are measured. ValueError for a kind that there is not."""

    bandwidth: Annotated[float, Option("Bandwidth of a node's link, or of a rank's own, Mbit/s.")] = 100.0
    megabytes: Annotated[int, Option("MB of a rank's buffer, and put for each size.", least=1)] = 8
    repeats: Annotated[int, Option("Runs of each; their median counts.", least=1)] = 5
    only: Annotated[
        tuple[str, ...], Option(f"Only this kind ({', '.join(KINDS)}); may be repeated.", is_repeated=True)
    ] = ()

    def __post_init__(self) -> None:
        require_known("kind", self.only, KINDS)
        self.network(2)

    @property
    def link(self) -> float:
        """Bytes/s of a link."""
        return self.bandwidth * _MEGABIT

    def network(self, nodes: int, loopback: float = 16.0, trunk: float = 1.0, leaves: int = 1) -> Network:
        """Nodes on so many switches; loopback, trunk: bandwidths, as multiples of a link's."""
        return Network(nodes, nodes // leaves, self.link, loopback * self.link, trunk * self.link)


@dataclass(frozen=True)
class Row:
    """A time beside another one's, the ratio that is asked for, and the predicted time."""

    kind: str = column("kind")
    what: str = column("what")
    ms: float = column("ms", "{:.1f}")
    beside: str = column("beside")
    beside_ms: float = column("ms", "{:.1f}")
    ratio: float = column("times faster", "{:.2f}")
    asked: float | None = column("asked", "{:.2f}", None)
    predicted_ms: float | None = column("predicted ms", "{:.1f}", None)
    error: float | None = column("error", "{:+.0%}", None)
    messages: str | None = column("messages between nodes", "{}", None)


def measure_kinds(setting: BetweenNodesSetting) -> Iterator[Row]:
    """Measure each kind between namespaces of its own, which are always removed."""
    require_namespaces()
    of_kind: dict[str, Callable[[BetweenNodesSetting], Iterator[Row]]] = {
        "puts": _measure_puts,
        "all-reduce": _measure_all_reduce,
        "all-to-next": _measure_schedules,
        "all-to-all": _measure_schedules,
        "training": _measure_training,
    }
    for kind in setting.only or KINDS:
        yield from of_kind[kind](replace(setting, only=(kind,)))


def _run(setting: BetweenNodesSetting, network: Network, ranks_per_node: int, **given: Any) -> Any:
    nodes = [node for node in range(network.nodes) for _ in range(ranks_per_node)]
    with shaped_network(network):
        return run_ranks_on(nodes, "lab.two_level.between_nodes_rank", asdict(setting) | given, _LIMIT)


def _measure_puts(setting: BetweenNodesSetting) -> Iterator[Row]:
    found = _run(setting, setting.network(2), 1, nodes="2x1")
    for size, (count, seconds) in zip(PUT_SIZES, found, strict=True):
        of_link = size * count / setting.link
        yield Row(
            "puts", f"{size >> 10} KiB, both ways", seconds * 1e3, "the link", of_link * 1e3, of_link / seconds, 0.95
        )


def _measure_all_reduce(setting: BetweenNodesSetting) -> Iterator[Row]:
    """Two nodes of two ranks: each level moves the buffer once each way, inside for two ranks over one loopback."""
    from stretto.cluster.two_level import Links, predict

    found = _run(setting, setting.network(2, loopback=2.0), 2, nodes="2x2")
    share = setting.megabytes * 1e6 / 4
    overhead = found["overhead"] / 4  # of an all-reduce's four phases
    links = Links(overhead, setting.link * _HEADERS, overhead, setting.link * _HEADERS)
    in_turn, *in_parts = found["seconds"]
    for parts, seconds in zip(PARTS[1:], in_parts, strict=True):
        predicted = predict("all_reduce", "ring", share, 2, 2, links, parts)
        yield Row(
            "all-reduce", f"in {parts} parts", seconds * 1e3, "phases in turn", in_turn * 1e3, in_turn / seconds, 1.5,
            predicted * 1e3, predicted / seconds - 1,
        )  # fmt: skip


def make_topology(bandwidth: float) -> "NetworkTopology":
    """Nodes of `GPUS` ranks, each with a link of so many bytes/s to one switch, and memory between those of a node."""
    from stretto.simulator.network import NetworkTopology
    from stretto.simulator.network.topology import DirectedLink

    ranks = NODES * GPUS
    links = []
    for rank in range(ranks):
        links += [DirectedLink(rank, ranks, bandwidth * _HEADERS, 0.0), DirectedLink(ranks, rank, _IN_MEMORY, 0.0)]
        near = range(rank // GPUS * GPUS, (rank // GPUS + 1) * GPUS)
        links += [DirectedLink(rank, peer, _IN_MEMORY, 0.0) for peer in near if peer != rank]
    return NetworkTopology("namespaces", ranks, links, vertices=ranks + 1)


def _measure_schedules(setting: BetweenNodesSetting) -> Iterator[Row]:
    from lab.two_level.between_nodes_rank import SCHEDULES
    from stretto.simulator.schedules import ExecutorCosts, ProtocolCosts
    from stretto.simulator.schedules.simulate import simulate_schedule

    (kind,) = setting.only
    if kind == "all-to-next":  # it is for large buffers, and a call of nearly nothing takes as long as 2 MB of a link
        setting = replace(setting, megabytes=4 * setting.megabytes)
    schedules = SCHEDULES[kind]()
    found = _run(setting, setting.network(NODES * GPUS), 1, nodes=f"{NODES}x{GPUS}")
    direct = found[schedules[0].name]
    for schedule in schedules:
        here = found[schedule.name]
        costs = ExecutorCosts(here["overhead"], {"Simple": ProtocolCosts(0.0, 1.0)}, tile_bytes=TILE_BYTES)
        size = setting.megabytes * 1e6
        predicted = simulate_schedule(
            schedule, size, make_topology(setting.link), costs, protocol="Simple", ranks_per_node=GPUS
        ).seconds
        is_direct = schedule is schedules[0]
        yield Row(
            kind, schedule.name, here["seconds"] * 1e3, "direct", direct["seconds"] * 1e3,
            direct["seconds"] / here["seconds"], 3.0 if kind == "all-to-next" and not is_direct else None,
            predicted * 1e3, predicted / here["seconds"] - 1, f"{here['messages']} of {direct['messages']}",
        )  # fmt: skip


def _measure_training(setting: BetweenNodesSetting) -> Iterator[Row]:
    """Four nodes: fast inside; as fast for each rank inside as between nodes; and with a trunk between two halves."""
    from stretto.cluster.two_level import Links

    for name, network in (
        ("nodes 8 times as fast inside", setting.network(4, loopback=8.0)),
        ("each rank as fast inside", setting.network(4, loopback=2.0)),
        ("8 times, one trunk", setting.network(4, loopback=8.0, leaves=2)),
    ):
        slower = max(1.0, network.leaf_nodes * network.node_bandwidth / network.trunk_bandwidth)
        given: dict[str, Any] = {
            "in_node_bandwidth": network.loopback_bandwidth / 2 * _HEADERS,
            "node_bandwidth": network.node_bandwidth * _HEADERS,
            "leaf_nodes": network.leaf_nodes,
            "oversubscription": slower if network.leaves > 1 else 1.0,
        }
        found = _run(setting, network, 2, nodes="4x2", links=given)
        for axis, of_axis in found.items():
            seconds, message = of_axis["seconds"], of_axis["overheads"]
            links = Links(message["inside"], latency=message["between"], **given)
            flat = replace(links, latency=message["library"], in_node_latency=message["library"])
            alone = seconds.pop("alone")
            best = min(seconds.values())
            for how, each in seconds.items():
                modes: dict[str, TwoLevel] = {"flat": False, "auto": "auto"} if network.leaves == 1 else {}
                predicted = _plan(axis, links if modes[how] else flat, modes[how], alone) if how in modes else None
                yield Row(
                    "training", f"{axis}=8, {name}: {how}", each * 1e3, "the fastest", best * 1e3, best / each,
                    0.95 if how == "auto" else None, None if predicted is None else predicted * 1e3,
                    None if predicted is None else predicted / each - 1,
                )  # fmt: skip


def _plan(axis: str, links: "Links", two_level: "TwoLevel", alone: float) -> float:
    """The seconds of a step by `plan`. alone: those that it computes."""
    from stretto.cluster import Cluster
    from stretto.cluster.model import GPU, FlopRates, NetworkLink, NodeLink
    from stretto.models import GPTConfig
    from stretto.planner import predict

    some = 1e9
    cluster = Cluster(
        name="namespaces",
        gpus_per_node=2,
        nics_per_node=1,
        library="gloo",
        gpu=GPU(name="a core", memory=1e10, memory_bandwidth=1e15, peak_flops=FlopRates(fp32=some)),
        in_node=NodeLink(links.in_node_bandwidth, latency=links.in_node_latency),
        between_nodes=NetworkLink(links.node_bandwidth, links.latency),
    )
    how: dict[str, Any] = {"grid": {axis: 8}, "batch": 8, "seq_len": MODEL["max_seq_len"], "dtype": "fp32"}
    compute_time = predict(GPTConfig(**MODEL), cluster, **how).compute_time
    assert compute_time is not None
    flops = FlopRates(fp32=some * compute_time / alone)
    cluster = replace(cluster, gpu=replace(cluster.gpu, peak_flops=flops))
    return predict(GPTConfig(**MODEL), cluster, two_level=two_level, **how).step_time


BENCH = Bench(
    "between-nodes",
    "Puts, schedules and training between network namespaces over shaped links (needs root).",
    BetweenNodesSetting,
    measure_kinds,
    Row,
    title="Between network namespaces",
)
