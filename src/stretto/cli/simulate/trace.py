# SPDX-License-Identifier: Apache-2.0
"""`stretto simulate trace` and `export`: Chakra execution traces, simulated and made of a run's own trace."""

from pathlib import Path
from typing import Annotated, Any

import typer

from stretto.atomic_files import require_writable
from stretto.cli.commands import refuse_options, with_options_of
from stretto.cli.console import Json, print_json, refusing_bad_input
from stretto.cli.simulate import NetworkOptions, read_packets
from stretto.quantities import counted


@with_options_of(NetworkOptions)
def trace(
    call: typer.Context,
    prefix: Annotated[Path, typer.Argument(metavar="PREFIX", help="The files are PREFIX.0.et, PREFIX.1.et, ...")],
    given: NetworkOptions,
    groups: Annotated[
        Path | None, typer.Option(help="Process groups, as JSON: {NAME: [RANK, ...]} (default: PREFIX.groups.json).")
    ] = None,
    algorithm: Annotated[
        list[str] | None, typer.Option(metavar="COLLECTIVE=NAME", help="ring, direct or recursive; may be repeated.")
    ] = None,
    flops: Annotated[
        float | None,
        typer.Option(help="FLOP/s, for nodes with num_ops and no duration (default: the bf16 peak of --cluster)."),
    ] = None,
    memory_bandwidth: Annotated[
        str | None, typer.Option(help="For nodes with tensor_size and no duration: 2TB/s (default: of --cluster).")
    ] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="Take the trace's own durations for communication too; no network.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Simulate a Chakra execution trace (MLCommons) on a network, in both fidelities.

    - stretto simulate trace step --topology ring:16 --bandwidth 50GiB/s --latency 500ns
    - stretto simulate trace step --cluster perlmutter --gpus 64 --algorithm all_reduce=recursive --json
    - stretto simulate trace step --replay
    """
    with refusing_bad_input(as_json=as_json):
        from stretto.cluster import Cluster
        from stretto.quantities import read_bandwidth, show_nanoseconds, whole_nanoseconds
        from stretto.simulator import ClosedFormNetwork, EventDrivenNetwork, execute
        from stretto.simulator.chakra import ALGORITHMS, NodeTimes, read_chakra, trace_graph
        from stretto.simulator.collectives.patterns import ALGORITHMS as ONE_LEVEL
        from stretto.simulator.network.shapes import fully_connected
        from stretto.suggestions import name_known

        if replay:
            network_names = ("topology", "cluster", "bandwidth", "latency", "gpus", "packet_bytes", "algorithm")
            refuse_options(call, "--replay, which uses no network", *network_names)
        network = None if replay else given.build()
        chosen = {}
        for each in algorithm or ():
            name, _, value = each.partition("=")
            if name not in ALGORITHMS or not value:
                raise ValueError(f"--algorithm {each!r} must be COLLECTIVE=NAME{name_known(name, ALGORITHMS)}")
            if value not in ONE_LEVEL:
                raise ValueError(f"--algorithm {each!r} names no algorithm{name_known(value, ONE_LEVEL)}")
            chosen[name] = value
        memory = None if memory_bandwidth is None else read_bandwidth(memory_bandwidth)
        if given.cluster is not None:
            gpu = Cluster.find(given.cluster).gpu
            flops, memory = flops or gpu.peak_flops.bf16, memory or gpu.memory_bandwidth
        times = NodeTimes(flops=flops, memory_bandwidth=memory, is_replayed=replay)
        read = read_chakra(prefix, groups=groups)
        graph = trace_graph(read, times=times, algorithms=chosen)
        found: dict[str, Any] = {
            "trace": str(prefix),
            "ranks": read.ranks,
            "nodes": sum(map(len, read.nodes)),
            "messages": int((graph.kinds == 1).sum()),
        }
        if network is None:
            replayed = execute(graph, ClosedFormNetwork(fully_connected(max(read.ranks, 2), 1.0, 0.0)))
            found |= {"replayed_ns": whole_nanoseconds(replayed.makespan)}
        else:
            closed = execute(graph, ClosedFormNetwork(network))
            queued = execute(graph, EventDrivenNetwork(network, read_packets(given.packet_bytes)))
            found |= {
                "topology": network.name,
                "closed_form_ns": whole_nanoseconds(closed.makespan),
                "event_driven_ns": whole_nanoseconds(queued.makespan),
            }
    if as_json:
        print_json(found)
        return
    print(f"{prefix}: {', '.join(counted(found[f'{noun}s'], noun) for noun in ('rank', 'node', 'message'))}")
    labels = {
        "replayed_ns": "replayed, as measured",
        "closed_form_ns": "closed form, no contention",
        "event_driven_ns": "event-driven",
    }
    for key, label in labels.items():
        if key in found:
            print(f"  {label:36}{show_nanoseconds(found[key]):>14}")


def export(
    source: Annotated[
        Path, typer.Argument(metavar="TRACE.json", help="The trace.json that `stretto train --trace` wrote.")
    ],
    prefix: Annotated[Path, typer.Argument(metavar="PREFIX", help="The files are PREFIX.0.et, PREFIX.1.et, ...")],
    step: Annotated[
        int | None, typer.Option(help="The number of the traced step to export (default: the last).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Export a traced step as Chakra execution traces, one file per rank, for `simulate trace` and ASTRA-sim.

    - stretto train demo.toml --trace --set out=runs/traced
    - stretto simulate export runs/traced/trace.json runs/traced/step
    """
    with refusing_bad_input(as_json=as_json):
        from stretto.simulator.chakra import write_chakra
        from stretto.train.observe.chakra import step_trace
        from stretto.train.observe.timeline import read_timeline

        if not source.is_file():
            raise ValueError(f"there is no {source}: `stretto train --trace` writes trace.json into its folder")
        require_writable(prefix.with_name(f"{prefix.name}.0.et"), "PREFIX.0.et")
        made = step_trace(read_timeline(source), step)
        paths = write_chakra(made, prefix)
    if as_json:
        print_json({"ranks": made.ranks, "nodes": sum(map(len, made.nodes)), "files": [str(path) for path in paths]})
    else:
        print(f"{counted(made.ranks, 'rank')}, {counted(sum(map(len, made.nodes)), 'node')}: {paths[0]} to {paths[-1]}")
