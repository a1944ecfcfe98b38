# SPDX-License-Identifier: Apache-2.0
"""MSCCLang's figures 8c, 8e, 8g and 11 simulated, compared with the claims of the paper's text.

Costs are those of NCCL 2.8's own model (`nccl-2.8-a100` and `-v100`), on which MSCCLang's runtime is built.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.harness import Measured, Table, column
from lab.papers import Compared, read_paper
from lab.papers.msccl_peers import (
    chained_trees_all_reduce,
    dgx1_topology,
    direct_sends,
    rotated_rings_all_reduce,
    two_step_exchanges,
)
from lab.pictures import describe_origin, group, points
from stretto.bench.interleaved import name_size
from stretto.cluster import Cluster
from stretto.collectives.algorithms import find
from stretto.collectives.schedule import Schedule
from stretto.simulator.network import NetworkTopology
from stretto.simulator.schedules import MachineCosts, simulate_schedule

MEMORY_BANDWIDTH = {"azure-ndv4": 1555e9, "dgx-2": 900e9}  # bytes/s, reads and writes together
TILES = 4  # of a chunk that are simulated; further ones are extrapolated
COSTS = {"azure-ndv4": "nccl-2.8-a100", "dgx-2": "nccl-2.8-v100"}
CLAIMS: list[dict[str, Any]] = read_paper("mscclang")["claims"]
TITLES = {"azure-ndv4": "NDv4", "dgx-2": "DGX-2"}
Times = dict[int, tuple[float, str]]
"""By bytes: the best simulated seconds, and the configuration that reached them."""


@dataclass(frozen=True)
class Row:
    """A variant's best simulated time at a size, and its speed-up over the study's baseline. claim: the paper's."""

    bytes: int
    claim: float | None
    study: str = column("study")
    variant: str = column("variant")
    size: str = column("bytes")
    best: str = column("as")
    time_us: float = column("simulated (us)", "{:,.1f}")
    baseline_us: float = column("baseline (us)", "{:,.1f}")
    speedup: float = column("speed-up", "{:.2f}")


@dataclass(frozen=True)
class Claim:
    """A claim of the paper's text, what was predicted before the first run, and the simulated number."""

    figure: str = column("figure")
    claim: str = column("the paper says")
    prediction: str = column("predicted before the first run")
    simulated: str = column("simulated")
    is_met: str = column("the paper's claim is")


@dataclass(frozen=True)
class ClusterSimulation:
    """Simulates schedules on nodes of one cluster with its costs, and selects the best of several configurations.

    executor: of the costs. topology: None for the cluster's.
    """

    cluster: Cluster
    costs: MachineCosts
    executor: str = "interpreter"
    topology: NetworkTopology | None = None

    def best(
        self,
        schedules: Schedule | Mapping[str, Schedule],
        sizes: Sequence[int],
        *,
        protocols: Sequence[str] = ("LL", "LL128", "Simple"),
        instances: Sequence[int] = (1,),
    ) -> Times:
        """The fastest of all schedules, protocols and instances by size, as the paper tunes them by hand.

        Of each schedule and protocol, more instances are tried until they are slower.
        """
        named = {"": schedules} if isinstance(schedules, Schedule) else schedules
        found: Times = {}
        for num_bytes in sizes:
            times: list[tuple[float, str]] = []
            for name, schedule in named.items():
                for protocol in protocols:
                    fastest = math.inf
                    for count in instances:
                        if count > 1 and not self.fits(schedule, count):
                            break
                        seconds = self._simulate(schedule, num_bytes, protocol, count)
                        times.append((seconds, f"{name} {protocol} r={count}".strip()))
                        if seconds > fastest:
                            break
                        fastest = seconds
            found[num_bytes] = min(times)
        return found

    def fits(self, schedule: Schedule, instances: int) -> bool:
        """True if so many instances can be resident."""
        most = self.costs.executor(self.executor).max_blocks
        return most is None or instances * max(len(program.thread_blocks) for program in schedule.ranks) <= most

    def _simulate(self, schedule: Schedule, num_bytes: int, protocol: str, instances: int) -> float:
        return simulate_schedule(
            schedule,
            num_bytes,
            self.topology or self.costs.topology(self.cluster, schedule.collective.ranks),
            self.costs.executor(self.executor),
            protocol=protocol,
            ranks_per_node=self.cluster.gpus_per_node,
            instances=instances,
            max_tiles=TILES,
        ).seconds


def on_cluster(name: str) -> ClusterSimulation:
    return ClusterSimulation(Cluster.preset(name), MachineCosts.find(COSTS[name]))


def hierarchical_study(name: str, nodes: int, sizes: Sequence[int]) -> Iterator[Row]:
    """Figure 8c: hierarchical all-reduce and the same composed of NCCL's calls, over NCCL's all-reduce."""
    where = on_cluster(name)
    gpus = where.cluster.gpus_per_node
    shape: dict[str, Any] = {"nodes": nodes, "gpus": gpus}
    rings = rotated_rings_all_reduce.compile(rings=int(where.cluster.require("nics_per_node")), **shape)
    # NCCL 2.8 uses 24 channels on A100, and fewer for small buffers: a ring a NIC of a node, once or three times.
    nccl = where.best({"ring": rings, "tree": chained_trees_all_reduce.compile(**shape)}, sizes, instances=(1, 3))
    hierarchical = find("hierarchical-all-reduce")
    together = (1, 4, 8) if gpus == 8 else (1, 4)
    candidates = {f"parallel={parallel}": hierarchical.compile(parallel=parallel, **shape) for parallel in together}
    ours = where.best(candidates, sizes, instances=(1, 2, 4, 8))
    in_node = replace(where, topology=where.costs.topology(where.cluster, gpus))
    names = ("ring-reduce-scatter", "ring-all-gather")
    scatter, gather = (in_node.best(find(each).compile(ranks=gpus), sizes, instances=(1, 24)) for each in names)
    shares = {size: size // gpus for size in sizes}
    ring = find("ring-all-reduce").compile(ranks=nodes)
    reduce = _one_gpu_a_node(where).best(ring, sorted(set(shares.values())), instances=(1, 4))
    composed = {size: (scatter[size][0] + reduce[shares[size]][0] + gather[size][0], "3 calls") for size in sizes}
    study = f"8c: hierarchical all-reduce, {nodes} {TITLES[name]} nodes, over NCCL"
    yield from _rows(study, "MSCCLang", ours, nccl, 1.4)
    yield from _rows(study, "composed of NCCL calls", composed, nccl, 1.4)


def _one_gpu_a_node(where: ClusterSimulation) -> ClusterSimulation:
    """The ranks with the same local rank on all nodes, with their share of the NICs."""
    cluster = where.cluster
    share = min(1.0, (cluster.nics_per_node or 1) / cluster.gpus_per_node)
    link = replace(cluster.between_nodes, bandwidth=cluster.require("between_nodes.bandwidth") * share)
    return replace(where, cluster=replace(cluster, gpus_per_node=1, nics_per_node=1, between_nodes=link))


def two_step_study(name: str, nodes: int, sizes: Sequence[int]) -> Iterator[Row]:
    """Figure 8e: two-step all-to-all and NCCL's, over two-step written by hand with NCCL's sends and receives."""
    where = on_cluster(name)
    gpus = where.cluster.gpus_per_node
    ours = where.best(find("two-step-all-to-all").compile(nodes=nodes, gpus=gpus), sizes)
    sends = replace(where, executor="nccl")  # as NCCL 2.8 sends and receives
    exchanges = (find("direct-all-to-all").compile(ranks=nodes * gpus), *two_step_exchanges(nodes, gpus))
    nccl, first, second = (sends.best(each, sizes, protocols=("Simple",)) for each in exchanges)
    copied = 2 / MEMORY_BANDWIDTH[name]  # seconds a byte: read and written once
    by_hand = {size: (first[size][0] + copied * size + second[size][0], "3 kernels") for size in sizes}
    study = f"8e: two-step all-to-all, {nodes} {TITLES[name]} nodes, over hand-written"
    yield from _rows(study, "MSCCLang", ours, by_hand, 1.3)
    yield from _rows(study, "NCCL", nccl, by_hand, 1.3)


def next_study(name: str, nodes: int, sizes: Sequence[int]) -> Iterator[Row]:
    """Figure 8g: AllToNext with r instances, over each GPU's one send to the next."""
    where = on_cluster(name)
    gpus = where.cluster.gpus_per_node
    sends = replace(where, executor="nccl")
    direct = sends.best(direct_sends(nodes * gpus, gpus), sizes, protocols=("Simple",), instances=(1, 2))
    schedule = find("all-to-next").compile(nodes=nodes, gpus=gpus)
    study = f"8g: AllToNext, {nodes} {TITLES[name]} nodes, over direct sends"
    for instances in (1, 4, 12):
        if where.fits(schedule, instances):
            found = where.best(schedule, sizes, instances=(instances,))
            yield from _rows(study, f"r={instances}", found, direct, 14.5)


def sccl_study(sizes: Sequence[int]) -> Iterator[Row]:
    """Figure 11: the (1,2,2) all-gather on a DGX-1 by MSCCLang's protocols, over SCCL's direct copies.

    The baseline is Simple without the copy out of slots, and without slots to wait for.
    """
    costs = MachineCosts.find("nccl-2.8-v100")
    topology = dgx1_topology(costs.link_latency)
    where = ClusterSimulation(Cluster.preset("dgx-1v"), costs, topology=topology)
    schedule, several = find("dgx1-all-gather").compile(), (1, 2, 4)
    copies = replace(where, executor="direct-copy")
    direct = copies.best(schedule, sizes, protocols=("Simple",), instances=several)
    study = "11: (1,2,2) all-gather, one DGX-1, over SCCL"
    for protocol in ("LL", "Simple"):
        yield from _rows(
            study, protocol, where.best(schedule, sizes, protocols=(protocol,), instances=several), direct, None
        )


def _rows(study: str, variant: str, times: Times, baseline: Times, claim: float | None) -> Iterator[Row]:
    for num_bytes, (seconds, best) in times.items():
        base = baseline[num_bytes][0]
        size = name_size(num_bytes)
        yield Row(num_bytes, claim, study, variant, size, best, seconds * 1e6, base * 1e6, base / seconds)


def study_msccl() -> Iterator[Measured | Compared]:
    all_reduce = [1 << power for power in (12, 16, 20, 24, 28, 30, 32)]
    large, every = ([1 << power for power in range(first, 31, 2)] for first in (18, 10))
    rows: list[Row] = []
    for study in (
        hierarchical_study("azure-ndv4", 2, all_reduce),
        hierarchical_study("dgx-2", 2, all_reduce),
        two_step_study("azure-ndv4", 8, large),
        two_step_study("dgx-2", 4, large),
        next_study("azure-ndv4", 3, every),
        next_study("dgx-2", 3, every),
        sccl_study(every[:-1]),
    ):
        rows += study
        print(f"{rows[-1].study}: done", file=sys.stderr, flush=True)
    claims = list_claims(rows)
    title, tables = "MSCCLang's figures 8 and 11, simulated", (Table("Beside the paper's text", claims, key="claims"),)
    yield Measured(rows, name="simulated-msccl", title=title, tables=tables)
    for claim, found in zip(CLAIMS, claims, strict=True):
        speedup = float(found.simulated.removesuffix("x"))
        yield Compared(
            "Cowan et al.", f"figure {claim['figure']}", claim["study"], "speed-up", claim["claim"], None, speedup
        )


def list_claims(rows: Sequence[Row]) -> list[Claim]:
    """Each claim with the simulated number, and whether that is in the claim's range."""
    found = []
    for claim in CLAIMS:
        of_study = [row for row in rows if row.study.startswith(claim["study"])]
        over = {row.bytes: row.time_us for row in of_study if row.variant == claim.get("over")}
        number = max(
            over[row.bytes] / row.time_us if over else row.speedup
            for row in of_study
            if row.variant.startswith(claim["variant"])
            and claim.get("least", 0) <= row.bytes <= claim.get("largest", row.bytes)
        )
        low, high = claim["agrees"]
        met = "met" if low <= number <= high else "missed"
        found.append(Claim(claim["figure"], claim["claim"], claim["prediction"], f"{number:.2f}x", met))
    return found


def plot_simulated_msccl(data: dict[str, Any], picture: Path) -> None:
    """A panel a study: speed-ups over size, a line a variant, and the paper's claim as a dashed line."""
    from lab.style import drawing

    studies = group(data["rows"], "study")
    columns = 2 if len(studies) > 1 else 1
    with drawing(picture, 4.6 * columns, 2.6 * -(-len(studies) // columns)) as drawn:
        panels = drawn.panels(-(-len(studies) // columns), columns)
        for panel, (study, rows) in zip(panels.flat, studies.items(), strict=False):
            _plot_study(drawn, panel, study, rows)
        for panel in list(panels.flat)[len(studies) :]:
            panel.remove()
        for panel in panels[:, 0]:
            panel.set_ylabel("speed-up")
        drawn.title = "MSCCLang's figures 8 and 11, simulated"
        drawn.subtitle = describe_origin(data, simulated="the nodes above the panels")
        drawn.caption = (
            "Speed-up over each panel's baseline. Dashed: the largest that the paper states. NDv4: nodes of 8 A100; "
            "DGX-2: of 16 V100; DGX-1: of 8 V100. r: how many instances of the program share the data. LL, Simple: "
            "the program's protocols; LL sends a flag beside every 4 bytes."
        )


def _plot_study(drawn: Any, panel: Any, study: str, rows: Sequence[Mapping[str, Any]]) -> None:
    from lab.style import plain_log
    from stretto.report.style import BLACK, GUIDE, SERIES, YELLOW, Look

    variants = ("MSCCLang", "composed of NCCL calls", "NCCL", "r=1", "r=4", "r=12")
    looks = dict(zip(variants, SERIES, strict=True))
    looks |= {"LL": Look(BLACK, "P", (0, (1, 1))), "Simple": Look(YELLOW, "p", (0, (6, 1)))}
    for variant, mine in group(rows, "variant").items():
        panel.plot(*points(mine, "bytes", "speedup"), label=variant, **looks.get(variant, SERIES[0]).line)
    claims = {row["claim"] for row in rows if row["claim"] is not None}
    for claim in claims:
        panel.axhline(claim, linestyle=(0, (4, 2)), **GUIDE)
    panel.axhline(1, **GUIDE)
    panel.set_xscale("log", base=2)
    drawn.log_ticks(panel.xaxis, sorted({row["bytes"] for row in rows}), name_size)
    panel.set(title=study, xlabel="bytes of the larger buffer")
    plain_log(panel.yaxis)
