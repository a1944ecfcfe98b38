# SPDX-License-Identifier: Apache-2.0
"""`python -m lab simulated-msccl`: MSCCLang's figures 8c, 8e, 8g and 11 simulated, compared with the paper.

Costs are those of NCCL 2.8's own model (`nccl-2.8-a100` and `-v100`), on which MSCCLang's runtime is built; nothing is
fitted to the paper. `CLAIMS` has predictions made by hand before the first run. The paper's figures are curves without
numbers, so only the numbers in its text are compared.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from lab.harness import Bench, Measured, Table, column
from lab.pictures import describe_origin
from lab.simulated_schedules.peers import (
    chained_trees_all_reduce,
    dgx1_topology,
    direct_sends,
    rotated_rings_all_reduce,
    two_step_exchanges,
)
from stretto.bench.interleaved import name_size
from stretto.bench.settings import Option
from stretto.cluster import Cluster
from stretto.collectives.algorithms import find
from stretto.collectives.schedule import Schedule
from stretto.simulator.network import NetworkTopology
from stretto.simulator.schedules import MachineCosts, simulate_schedule

MEMORY_BANDWIDTH = {"azure-ndv4": 1555e9, "dgx-2": 900e9}  # bytes/s, reads and writes together
COSTS = {"azure-ndv4": "nccl-2.8-a100", "dgx-2": "nccl-2.8-v100"}
TITLES = {"azure-ndv4": "NDv4", "dgx-2": "DGX-2"}
Times = dict[int, tuple[float, str]]
"""By bytes: the best simulated seconds, and the configuration that reached them."""


@dataclass(frozen=True)
class SimulatedMscclSetting:
    """Settings: how finely the pipelining loop of large buffers is simulated."""

    tiles: Annotated[int, Option("Tiles of a chunk that are simulated; further ones are extrapolated.", least=2)] = 4


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
    tiles: int
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
            max_tiles=self.tiles,
        ).seconds


def on_cluster(name: str, tiles: int) -> ClusterSimulation:
    """A cluster of the paper by its preset."""
    return ClusterSimulation(Cluster.preset(name), MachineCosts.find(COSTS[name]), tiles)


def hierarchical_study(name: str, nodes: int, tiles: int, sizes: Sequence[int]) -> Iterator[Row]:
    """Figure 8c: hierarchical all-reduce and the same composed of NCCL's calls, over NCCL's all-reduce."""
    where = on_cluster(name, tiles)
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


def two_step_study(name: str, nodes: int, tiles: int, sizes: Sequence[int]) -> Iterator[Row]:
    """Figure 8e: two-step all-to-all and NCCL's, over two-step written by hand with NCCL's sends and receives."""
    where = on_cluster(name, tiles)
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


def next_study(name: str, nodes: int, tiles: int, sizes: Sequence[int]) -> Iterator[Row]:
    """Figure 8g: AllToNext with r instances, over each GPU's one send to the next."""
    where = on_cluster(name, tiles)
    gpus = where.cluster.gpus_per_node
    sends = replace(where, executor="nccl")
    direct = sends.best(direct_sends(nodes * gpus, gpus), sizes, protocols=("Simple",), instances=(1, 2))
    schedule = find("all-to-next").compile(nodes=nodes, gpus=gpus)
    study = f"8g: AllToNext, {nodes} {TITLES[name]} nodes, over direct sends"
    for instances in (1, 4, 12):
        if where.fits(schedule, instances):
            found = where.best(schedule, sizes, instances=(instances,))
            yield from _rows(study, f"r={instances}", found, direct, 14.5)


def sccl_study(tiles: int, sizes: Sequence[int]) -> Iterator[Row]:
    """Figure 11: the (1,2,2) all-gather on a DGX-1 by MSCCLang's protocols, over SCCL's direct copies.

    The baseline is Simple without the copy out of slots, and without slots to wait for.
    """
    costs = MachineCosts.find("nccl-2.8-v100")
    topology = dgx1_topology(costs.link_latency)
    where = ClusterSimulation(Cluster.preset("dgx-1v"), costs, tiles, topology=topology)
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


@dataclass(frozen=True)
class PublishedClaim:
    """One claim of the paper. value: finds our number in the rows of a study; low, high: the range of agreement."""

    figure: str
    study: str
    claim: str
    prediction: str
    value: Callable[[Sequence[Row]], float]
    low: float
    high: float


def most(variant: str, least: int = 0, largest: int = 1 << 62) -> Callable[[Sequence[Row]], float]:
    """The largest speed-up of a variant between two sizes."""
    return lambda rows: max(
        row.speedup for row in rows if row.variant.startswith(variant) and least <= row.bytes <= largest
    )


def _two_step_over_nccl(rows: Sequence[Row]) -> float:
    ours, nccl = ({row.bytes: row.time_us for row in rows if row.variant == name} for name in ("MSCCLang", "NCCL"))
    return max(nccl[size] / ours[size] for size in ours if size > 512 << 20)


_MB, _GB = 1 << 20, 1 << 30
CLAIMS = (
    PublishedClaim(
        "8c", "8c: hierarchical all-reduce, 2 NDv4", "small sizes: up to 1.4x NCCL",
        "1.0 to 1.2x: NCCL's trees take as many hops", most("MSCCLang", largest=_MB), 1.2, 1.6,
    ),
    PublishedClaim(
        "8c", "8c: hierarchical all-reduce, 2 NDv4", "above 1 GB: up to 11% faster than NCCL",
        "0 to 10%: both fill the NICs", most("MSCCLang", least=_GB), 1.0, 1.2,
    ),
    PublishedClaim(
        "8c", "8c: hierarchical all-reduce, 2 NDv4", "composed of NCCL calls: slower than NCCL",
        "0.3x below 1 MB, 0.7x above 1 GB: phases do not overlap", most("composed"), 0.0, 1.0,
    ),
    PublishedClaim(
        "8e", "8e: two-step all-to-all, 8 NDv4", "large sizes: up to 1.3x hand-written",
        "1.2 to 1.4x: the phases overlap", most("MSCCLang", least=64 * _MB), 1.15, 1.45,
    ),
    PublishedClaim(
        "8e", "8e: two-step all-to-all, 8 NDv4", "above 512 MB: NCCL is faster than hand-written",
        "1.2x: it sends as many bytes over the NICs, in one kernel", most("NCCL", least=512 * _MB + 1), 1.0, 9.0,
    ),
    PublishedClaim(
        "8e", "8e: two-step all-to-all, 8 NDv4", "above 512 MB: 20% faster than NCCL",
        "0 to 5%: what a message costs beside its bytes no longer counts", _two_step_over_nccl, 1.1, 1.3,
    ),
    PublishedClaim(
        "8g", "8g: AllToNext, 3 NDv4", "small buffers: slower than direct sends",
        "0.4 to 0.8x at 1 KB", most("r=1", largest=16 << 10), 0.0, 1.0,
    ),
    PublishedClaim(
        "8g", "8g: AllToNext, 3 NDv4", "large buffers: up to 14.5x direct sends",
        "at most 8x: 8 NICs instead of one", most("r="), 12.0, 17.0,
    ),
    PublishedClaim(
        "11", "11: ", "small sizes: LL is faster than SCCL",
        "2x: a third of the latency", most("LL", largest=64 << 10), 1.0, 99.0,
    ),
    PublishedClaim(
        "11", "11: ", "middle sizes: Simple is slower than SCCL",
        "0.6 to 0.8x: each byte is copied twice more", most("Simple", least=_MB, largest=16 * _MB), 0.0, 0.99,
    ),
)  # fmt: skip


def simulate_studies(setting: SimulatedMscclSetting) -> Measured:
    """Simulate all studies."""
    all_reduce = [1 << power for power in (12, 16, 20, 24, 28, 30, 32)]
    large, every = ([1 << power for power in range(first, 31, 2)] for first in (18, 10))
    rows: list[Row] = []
    for study in (
        hierarchical_study("azure-ndv4", 2, setting.tiles, all_reduce),
        hierarchical_study("dgx-2", 2, setting.tiles, all_reduce),
        two_step_study("azure-ndv4", 8, setting.tiles, large),
        two_step_study("dgx-2", 4, setting.tiles, large),
        next_study("azure-ndv4", 3, setting.tiles, every),
        next_study("dgx-2", 3, setting.tiles, every),
        sccl_study(setting.tiles, every[:-1]),
    ):
        rows += study
        print(f"{rows[-1].study}: done", file=sys.stderr, flush=True)
    return Measured(rows, tables=(Table("Beside the paper's text", list_claims(rows), key="claims"),))


def list_claims(rows: Sequence[Row]) -> list[Claim]:
    """Each claim with the simulated number, and whether that is in the claim's range."""
    found = []
    for claim in CLAIMS:
        number = claim.value([row for row in rows if row.study.startswith(claim.study)])
        met = "met" if claim.low <= number <= claim.high else "missed"
        found.append(Claim(claim.figure, claim.claim, claim.prediction, f"{number:.2f}x", met))
    return found


def plot_simulated_msccl(result: Path, picture: Path) -> None:
    """A panel a study: speed-ups over size, a line a variant, and the paper's claim as a dashed line."""
    from lab.style import drawing

    data = json.loads(result.read_text())
    studies = list(dict.fromkeys(row["study"] for row in data["rows"]))
    columns = 2 if len(studies) > 1 else 1
    with drawing(picture, 4.6 * columns, 2.6 * -(-len(studies) // columns)) as drawn:
        panels = drawn.panels(-(-len(studies) // columns), columns)
        for panel, study in zip(panels.flat, studies, strict=False):
            _plot_study(drawn, panel, study, [row for row in data["rows"] if row["study"] == study])
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
    for variant in dict.fromkeys(row["variant"] for row in rows):
        mine = [row for row in rows if row["variant"] == variant]
        speedups = [row["speedup"] for row in mine]
        panel.plot([row["bytes"] for row in mine], speedups, label=variant, **looks.get(variant, SERIES[0]).line)
    claims = {row["claim"] for row in rows if row["claim"] is not None}
    for claim in claims:
        panel.axhline(claim, linestyle=(0, (4, 2)), **GUIDE)
    panel.axhline(1, **GUIDE)
    panel.set_xscale("log", base=2)
    drawn.log_ticks(panel.xaxis, sorted({row["bytes"] for row in rows}), name_size)
    panel.set_title(study)
    panel.set_xlabel("bytes of the larger buffer")
    plain_log(panel.yaxis)


BENCH = Bench(
    "simulated-msccl",
    "MSCCLang's figures 8 and 11 simulated: hierarchical, two-step and AllToNext on clusters (needs no GPU).",
    SimulatedMscclSetting,
    simulate_studies,
    Row,
    title="MSCCLang's figures 8 and 11, simulated",
    plot=plot_simulated_msccl,
    about=lambda setting: {},
)
