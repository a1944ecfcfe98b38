# SPDX-License-Identifier: Apache-2.0
"""`stretto simulate`: messages and collectives on a network that you do not have."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.commands import App, with_options_of
from stretto.cli.console import Json, print_json, refusing_bad_input
from stretto.quantities import counted, read_bandwidth, read_bytes, read_seconds, show_nanoseconds, whole_nanoseconds

if TYPE_CHECKING:
    from stretto.simulator import NetworkTopology

app = App(
    help="Simulate messages, collectives, training steps and traces on a cluster that you do not have. Needs no GPU."
)

app.add_lazy("step", "stretto.cli.simulate.step:step")
app.add_lazy("trace", "stretto.cli.simulate.trace:trace")
app.add_lazy("export", "stretto.cli.simulate.trace:export")

_MAX_BY_DEFAULT = 4096  # GPUs of a cluster that are simulated without --gpus: of more, a network takes long to make
Topology = Annotated[
    str | None,
    typer.Option(
        metavar="SHAPE|FILE",
        help="ring:N, full:N, switch:N, torus:AxB[xC], fat-tree:PORTS, dragonfly:GROUPSxROUTERSxDEVICES, or a graph: "
        ".json, .graphml, .gml or .edgelist, as networkx writes them.",
    ),
]
Bandwidth = Annotated[
    str | None,
    typer.Option(
        help="Bandwidth of every link in one direction (for a file: of links without one): 50GiB/s, 25GB/s, 200Gb/s."
    ),
]
Latency = Annotated[
    str | None, typer.Option(help="Latency of every link (for a file: of links without one): 700ns, 1.5us.")
]
ClusterName = Annotated[
    str | None, typer.Option("--cluster", help="Instead of --topology: a machine of `stretto cluster list`, or a file.")
]
Gpus = Annotated[
    int | None,
    typer.Option(help="Number of GPUs of --cluster (default: all; for a message, the nodes up to the later rank's)."),
]
Bytes = Annotated[str, typer.Option("--bytes", help="Size: 4096, 64KiB, 1MiB (2^20 bytes), 1MB (10^6).")]
Packets = Annotated[
    str | None,
    typer.Option(help="Links forward packets of this size (default: they store and forward whole messages)."),
]


@dataclass(frozen=True)
class NetworkOptions:
    """The options that say which network."""

    topology: Topology = None
    bandwidth: Bandwidth = None
    latency: Latency = None
    cluster: ClusterName = None
    gpus: Gpus = None
    packet_bytes: Packets = None

    def build(self, ranks: int | None = None) -> "NetworkTopology":
        """The network. ValueError for both, or neither, of --topology and --cluster, and for what these refuse.

        ranks: how many of a large cluster's ranks suffice, where --gpus does not say how many there are.
        """
        from stretto.simulator import of_cluster, parse_topology

        if (self.topology is None) == (self.cluster is None):
            given = "neither is" if self.topology is None else "both are"
            raise ValueError(f"give --topology or --cluster: {given} given")
        if self.topology is not None:
            if self.gpus is not None:
                raise ValueError("--gpus is an option of --cluster; a topology has its own number of ranks")
            bandwidth = None if self.bandwidth is None else read_bandwidth(self.bandwidth)
            latency = None if self.latency is None else read_seconds(self.latency)
            missing = [name for name in ("bandwidth", "latency") if getattr(self, name) is None]
            if missing and ":" in self.topology:
                raise ValueError(
                    f"--topology {self.topology} needs --{' and --'.join(missing)}, such as 50GiB/s and 500ns"
                )
            return parse_topology(self.topology, bandwidth, latency)
        if self.bandwidth is not None or self.latency is not None:
            raise ValueError("--bandwidth and --latency are options of --topology; a cluster has its own")
        from stretto.cluster import Cluster

        assert self.cluster is not None
        found = Cluster.find(self.cluster)
        if self.gpus is not None:
            return of_cluster(found, self.gpus)
        if ranks is not None and (found.gpus is None or found.gpus > _MAX_BY_DEFAULT):
            nodes = max(1, -(-ranks // found.gpus_per_node))
            return of_cluster(found, nodes * found.gpus_per_node)
        if found.gpus is None:
            raise ValueError(f"cluster {found.name!r} does not limit its nodes: give --gpus")
        if found.gpus > _MAX_BY_DEFAULT:
            raise ValueError(
                f"cluster {found.name!r} has {found.gpus:,} GPUs; for more than {_MAX_BY_DEFAULT:,}, give --gpus"
            )
        return of_cluster(found, found.gpus)

    def gpus_per_node(self) -> int | None:
        """Count a node's GPUs; None for a topology. A cluster of fewer GPUs than a node has is one node."""
        if self.cluster is None:
            return None
        from stretto.cluster import Cluster

        size = Cluster.find(self.cluster).gpus_per_node
        return size if self.gpus is None else min(size, self.gpus)


@app.command()
@with_options_of(NetworkOptions)
def message(
    num_bytes: Bytes,
    src: Annotated[int, typer.Option(help="The rank that sends.")],
    dst: Annotated[int, typer.Option(help="The rank that receives.")],
    given: NetworkOptions,
    as_json: Json = False,
) -> None:
    """Simulate one message between two ranks: closed-form (cut-through), and event-driven (store-and-forward).

    Each hop's time is rounded down to whole nanoseconds, but for packets.

    - stretto simulate message --topology ring:16 --bandwidth 50GiB/s --latency 500ns --bytes 1MiB --src 1 --dst 4
    - stretto simulate message --cluster perlmutter --gpus 64 --bytes 1MiB --src 0 --dst 63 --packet-bytes 4KiB
    """
    with refusing_bad_input(as_json=as_json):
        from stretto.simulator import ClosedFormNetwork, EventDrivenNetwork, GraphBuilder, execute

        network = given.build(max(src, dst) + 1)
        network.check_pair(src, dst)
        packets = read_packets(given.packet_bytes)
        size = read_bytes(num_bytes)
        builder = GraphBuilder(network.devices)
        builder.message(src, dst, size)
        graph = builder.build()
        closed = execute(graph, ClosedFormNetwork(network, truncates=packets is None))
        queued = execute(graph, EventDrivenNetwork(network, packets, truncates=packets is None))
        found = {
            "topology": network.name,
            "source": src,
            "target": dst,
            "bytes": size,
            "hops": len(network.routes(src, dst)[0]),
            "routes": len(network.routes(src, dst)),
            "packet_bytes": packets,
            "closed_form_ns": whole_nanoseconds(closed.makespan),
            "event_driven_ns": whole_nanoseconds(queued.makespan),
        }
    _print(found, f"A message of {num_bytes} from rank {src} to rank {dst}", as_json=as_json)


@app.command()
@with_options_of(NetworkOptions)
def collective(
    name: Annotated[
        str,
        typer.Argument(
            metavar="COLLECTIVE", help="all_reduce, all_gather, reduce_scatter, all_to_all, or broadcast (from rank 0)."
        ),
    ],
    num_bytes: Bytes,
    given: NetworkOptions,
    algorithm: Annotated[
        str,
        typer.Option(
            help="ring, direct, recursive, or between nodes one of them: two-level-ring, two-level-direct, "
            "two-level-recursive."
        ),
    ] = "ring",
    ranks_per_node: Annotated[
        int | None,
        typer.Option(help="For two-level algorithms: ranks per node (default: the GPUs of a node of --cluster)."),
    ] = None,
    in_node: Annotated[
        str, typer.Option(help="For two-level algorithms: the algorithm inside a node: ring, direct or recursive.")
    ] = "ring",
    splits: Annotated[
        int, typer.Option(help="Split the buffer into this many equal parts, each a concurrent collective.")
    ] = 1,
    symmetry: Annotated[
        bool, typer.Option("--symmetry", help="Simulate identical groups of ranks, and repeated rounds, only once.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Simulate a collective of all ranks: closed-form, and event-driven with a queue on every link.

    --bytes is the whole buffer of one rank: of all_gather its output, of reduce_scatter its input.

    - stretto simulate collective all_reduce --topology ring:8 --bandwidth 50GiB/s --latency 500ns --bytes 1MiB
    - stretto simulate collective all_to_all --algorithm direct --topology torus:16x8 --bandwidth 25GiB/s
      --latency 700ns --bytes 64MiB
    - stretto simulate collective all_gather --algorithm two-level-recursive --cluster frontier --gpus 2048
      --bytes 256MB
    """
    with refusing_bad_input(as_json=as_json):
        from stretto.simulator import EventDrivenNetwork
        from stretto.simulator.collectives import CollectiveOptions, closed_form_seconds, simulate_collective

        network = given.build()
        size, packets = read_bytes(num_bytes), read_packets(given.packet_bytes)
        if not algorithm.startswith("two-level") and (ranks_per_node is not None or in_node != "ring"):
            raise ValueError(f"--ranks-per-node and --in-node are of two-level algorithms, not of {algorithm}")
        if algorithm.startswith("two-level") and given.cluster is None and ranks_per_node is None:
            raise ValueError(f"{algorithm} on a --topology needs --ranks-per-node, such as 4")
        per_node = given.gpus_per_node() if ranks_per_node is None else ranks_per_node
        options = CollectiveOptions(per_node, in_node, splits, symmetry)
        closed = closed_form_seconds(name, algorithm, network, size, ranks_per_node=per_node, in_node=in_node)
        queued = simulate_collective(name, algorithm, EventDrivenNetwork(network, packets), size, options)
        found = {
            "topology": network.name,
            "collective": name,
            "algorithm": algorithm,
            "ranks": network.devices,
            "bytes": size,
            "splits": splits,
            "packet_bytes": packets,
            "closed_form_ns": whole_nanoseconds(closed),
            "event_driven_ns": whole_nanoseconds(queued.seconds),
            "events": queued.events,
        }
    _print(found, f"{name} ({algorithm}) of {num_bytes} among {counted(network.devices, 'rank')}", as_json=as_json)


def read_packets(text: str | None) -> int | None:
    return None if text is None else read_bytes(text)


def _print(found: Mapping[str, Any], title: str, *, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("fidelity", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    queues = "packets" if found["packet_bytes"] else "whole messages"
    table.add_row("closed form, no contention", show_nanoseconds(found["closed_form_ns"]))
    table.add_row(f"event-driven, {queues}", show_nanoseconds(found["event_driven_ns"]))
    console = Console()
    console.print(f"{title} of {found['topology']}", highlight=False, soft_wrap=True, markup=False)
    console.print(table)
