# SPDX-License-Identifier: Apache-2.0
"""`stretto collective simulate` and `stretto collective tune`: schedules' times on a cluster that is not there."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.collective import NOT_VERIFIED, MaxFileBytes, MaybeClusterName, Name, Waive, app
from stretto.cli.commands import with_options_of
from stretto.cli.console import Json, fail, print_json, refusing_bad_input
from stretto.cli.schedules import DEFAULT_MAX_FILE_BYTES, Compilation, describe, load_schedule, shown_name
from stretto.cli.simulate import Bandwidth, Latency, NetworkOptions, Topology
from stretto.quantities import counted

if TYPE_CHECKING:
    from stretto.cluster import Cluster
    from stretto.simulator.network.topology import NetworkTopology
    from stretto.simulator.schedules import MachineCosts, ScheduleTime

_SHOWN = 8
ClusterName = Annotated[
    str, typer.Option("--cluster", metavar="NAME|FILE", help="A preset (`stretto cluster list`) or a cluster file.")
]
Costs = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE", help="Costs of protocols and executors: h200, nccl-2.8-a100, nccl-2.8-v100, or a file."
    ),
]


@app.command()
@with_options_of(Compilation)
def simulate(
    name: Name,
    size: Annotated[
        str, typer.Option("--bytes", help="Size of a rank's larger buffer: 4096, 64KiB, 1MiB (2^20 bytes), 1MB (10^6).")
    ],
    given: Compilation,
    cluster: MaybeClusterName = None,
    topology: Topology = None,
    bandwidth: Bandwidth = None,
    latency: Latency = None,
    costs: Costs = "h200",
    executor: Annotated[
        str, typer.Option(help="The executor that runs the schedule; one of those in --costs.")
    ] = "interpreter",
    protocol: Annotated[str | None, typer.Option(help="Simple, LL or LL128 (default: the schedule's).")] = None,
    instances: Annotated[
        int, typer.Option(help="Number of instances of the whole schedule, each for a part of the data.")
    ] = 1,
    waive: Waive = None,
    max_file_bytes: MaxFileBytes = DEFAULT_MAX_FILE_BYTES,
    as_json: Json = False,
) -> None:
    """Simulate a schedule on a cluster: its time, its thread blocks' waiting times, and the use of each link.

    It is verified first, and needs no GPU. Its ranks fill the cluster's nodes one after another.

    - stretto collective simulate ring.xml --cluster dgx-h200 --bytes 1M
    - stretto collective simulate ring.xml --topology switch:8 --bandwidth 450GB/s --latency 250ns --bytes 1M
    - stretto collective simulate hierarchical-all-reduce --nodes 2 --gpus 8 --cluster azure-ndv4 --bytes 64M
    """
    with refusing_bad_input(as_json=as_json):
        from stretto.collectives import verify
        from stretto.quantities import read_bytes
        from stretto.simulator.schedules import MachineCosts, simulate_schedule

        num_bytes = read_bytes(size)
        schedule = load_schedule(name, given, max_file_bytes, ("slots",))
        machine = MachineCosts.find(costs)
        if topology is None:
            if bandwidth is not None or latency is not None:
                raise ValueError("--bandwidth and --latency are options of --topology; a cluster has its own")
            network, found_cluster = _find_network(cluster, machine, schedule.collective.ranks)
            ranks_per_node, where = found_cluster.gpus_per_node, found_cluster.name
        else:
            network = NetworkOptions(topology, bandwidth, latency, cluster).build()
            ranks_per_node, where = network.devices, network.name
        run_by = machine.executor(executor)
        if protocol is None and schedule.protocol not in run_by.protocols:
            protocol = next(iter(run_by.protocols))
        verification = verify(schedule, slots=given.slots, waive=waive or ())
        if verification.ok:
            result = simulate_schedule(
                schedule,
                num_bytes,
                network,
                run_by,
                protocol=protocol,
                ranks_per_node=ranks_per_node,
                slots=given.slots,
                instances=instances,
            )
    if not verification.ok:
        print(describe(schedule, verification), file=sys.stderr)
        raise fail("not simulated: the schedule is not verified", NOT_VERIFIED, as_json=as_json)
    about = {
        "schedule": shown_name(schedule.name),
        "cluster": where,
        "ranks": schedule.collective.ranks,
        "costs": machine.machine,
        "executor": executor,
        "protocol": protocol or schedule.protocol,
        "assumes_in_node_costs": schedule.collective.ranks > ranks_per_node and not run_by.between_nodes,
    }
    if about["assumes_in_node_costs"]:
        _note_in_node_costs(machine.machine)
    if as_json:
        print_json(about | result.to_json())
    else:
        _print_result(about, result)


@app.command()
def tune(
    collective: Annotated[str, typer.Argument(help="allreduce, allgather, reducescatter, alltoall, ...")],
    cluster: ClusterName,
    gpus: Annotated[int, typer.Option(help="Number of ranks; they fill the cluster's nodes one after another.")],
    sizes: Annotated[str, typer.Option("--bytes", help="Sizes of a rank's larger buffer, separated by commas.")] = (
        "1K,16K,256K,4M,64M,1G"
    ),
    costs: Costs = "h200",
    executors: Annotated[str | None, typer.Option(help="Executors to try, separated by commas (default: all).")] = None,
    as_json: Json = False,
) -> None:
    """Find the fastest schedule for each size by simulating all algorithms, channels, instances and protocols.

    - stretto collective tune allreduce --cluster dgx-h200 --gpus 8
    """
    with refusing_bad_input(as_json=as_json):
        from stretto.quantities import read_bytes
        from stretto.simulator.schedules import MachineCosts, ScheduleTuner

        all_bytes = [read_bytes(each) for each in sizes.split(",")]
        machine = MachineCosts.find(costs)
        topology, found_cluster = _find_network(cluster, machine, gpus)
        tuner = ScheduleTuner(
            collective,
            topology,
            machine,
            nodes=max(gpus // found_cluster.gpus_per_node, 1),
            executors=None if executors is None else executors.split(","),
        )
        rows = []
        for num_bytes in all_bytes:
            found = tuner.tune(num_bytes)
            if not found:
                raise ValueError(f"every schedule for {collective} on {gpus} ranks is too large to be simulated here")
            rows.append(_row(num_bytes, found))
            if not as_json:
                best, second = rows[-1]["best"], rows[-1]["second"]
                print(
                    f"{num_bytes:>14,} bytes: {best['name']}, {best['time_ns'] / 1e3:,.1f} us"
                    + (f"; then {second['name']}, {second['time_ns'] / 1e3:,.1f} us" if second else "")
                )
    left_out = sorted(tuner.skipped)
    is_assumed = tuner.nodes > 1 and not all(each.between_nodes for each in machine.executors.values())
    if is_assumed:
        _note_in_node_costs(machine.machine)
    if as_json:
        about = {"collective": collective, "cluster": found_cluster.name, "ranks": gpus, "costs": machine.machine}
        print_json(
            about
            | {"fidelity": "event-driven", "assumes_in_node_costs": is_assumed, "sizes": rows, "left_out": left_out}
        )
    elif left_out:
        print(f"left out, since they do not compile for {gpus} ranks or are too large: {'; '.join(left_out)}")


def _note_in_node_costs(machine: str) -> None:
    print(
        f"stretto: the costs of {machine} were measured inside a node; the same are assumed between nodes, in "
        "addition to the links' latency and bandwidth",
        file=sys.stderr,
    )


def _find_network(cluster: str | None, costs: "MachineCosts", ranks: int) -> "tuple[NetworkTopology, Cluster]":
    from stretto.cluster import Cluster

    if cluster is None:
        raise ValueError("give --cluster or --topology: neither is given")
    found = Cluster.find(cluster)
    return costs.topology(found, ranks), found


def _row(num_bytes: int, found: list[tuple[Any, float]]) -> dict[str, Any]:
    best = found[0][0]
    others = [each for each in found if each[0].algorithm != best.algorithm]
    return {
        "bytes": num_bytes,
        "tried": len(found),
        "best": _describe(*found[0]),
        "second": _describe(*others[0]) if others else None,
    }


def _describe(candidate: Any, seconds: float) -> dict[str, Any]:
    return {
        "name": str(candidate),
        "algorithm": candidate.algorithm,
        "channels": candidate.channels,
        "instances": candidate.instances,
        "protocol": candidate.protocol,
        "executor": candidate.executor,
        "time_ns": round(seconds * 1e9),
    }


def _print_result(about: dict[str, Any], result: "ScheduleTime") -> None:
    print(
        f"{about['schedule']} on {counted(about['ranks'], 'rank')} of {about['cluster']}, {result.num_bytes:,} bytes, "
        f"{about['protocol']} by the {about['executor']} ({about['costs']}): {result.seconds * 1e6:,.1f} us, "
        f"{result.bandwidth / 1e9:,.1f} GB/s ({result.fidelity})"
    )
    if result.is_extrapolated:
        print(
            f"  {result.tiles} tiles a chunk, of which {result.simulated_tiles} were simulated; the rest extrapolated"
        )
    blocks = sorted(result.blocks, key=lambda each: -each.exposed)[:_SHOWN]
    print("  thread blocks that wait the longest (us): busy, for a message, for a slot, for another block's step")
    for each in blocks:
        times = (each.busy, each.message, each.slot, each.step)
        print(f"    rank {each.rank}, block {each.block}: " + ", ".join(f"{value * 1e6:,.1f}" for value in times))
    print("  links that are busy the longest: share of the time, bytes")
    for link in sorted(result.links, key=lambda each: -each.busy)[:_SHOWN]:
        use = link.busy / result.seconds if result.seconds else 0.0
        print(f"    {link.source} -> {link.target}: {use:.0%}, {link.num_bytes:,.0f}")
