# SPDX-License-Identifier: Apache-2.0
"""`python -m lab simulated-two-level`: figures 6.1 and 6.6 to 6.11 of Singh's dissertation, simulated.

Each all-gather and reduce-scatter is predicted twice: in closed form (`machines`), and event-driven, with packets that
queue on links (`symmetric`). Two levels are recursive between nodes, as in the figures.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.studies import symmetric
from lab.studies.machines import MACHINES, MIB, RCCL_HOPS, StudiedMachine, with_rccl_table
from lab.studies.settings import SimulatedTwoLevelSetting
from lab.two_level.crossovers import find_crossovers
from stretto.bench.harness import ANY_CPU, Column, print_table, write_result, write_tables
from stretto.bench.pictures import draw_result
from stretto.collectives.two_level import Links, predict
from stretto.collectives.two_level.inter_node import InterNodeAlgorithm
from stretto.collectives.two_level.model import TYPICAL, Collective
from stretto.models.gpt_config import PRESETS

COLLECTIVES: tuple[Collective, ...] = ("all_gather", "reduce_scatter")
BETWEEN_NODES: tuple[InterNodeAlgorithm, ...] = ("recursive", "ring")
Row = dict[str, Any]

CELLS = (
    Column("machine", "machine"),
    Column("collective", "collective"),
    Column("ranks", "ranks", "{:,}"),
    Column("mb", "MB"),
    Column("protocol", "protocol"),
    Column("flat_ms", "flat ring (ms)", "{:.3f}"),
    Column("two_level_ms", "two levels (ms)", "{:.3f}"),
    Column("speedup", "speed-up", "{:.2f}"),
    Column("flat_event_ms", "flat, event-driven (ms)", "{:.3f}"),
    Column("two_level_event_ms", "two levels, event-driven (ms)", "{:.3f}"),
    Column("event_speedup", "speed-up, event-driven", "{:.2f}"),
    Column("mpi_ms", "Cray MPICH (ms)", "{:.3f}"),
    Column("mpi_speedup", "speed-up over it", "{:.1f}"),
    Column("recursive_over_ring", "recursive over ring between nodes", "{:.2f}"),
    Column("event_recursive_over_ring", "the same, event-driven", "{:.2f}"),
)


@dataclass(frozen=True)
class PublishedSpeedup:
    """A published speed-up of two levels over a library. high: None for "more than"; over: "vendor" or "mpi"."""

    figure: str
    machine: str
    collective: Collective
    ranks: int
    mb: int
    low: float
    high: float | None
    over: str = "vendor"

    def __str__(self) -> str:
        if self.high is None:
            return f"over {self.low:g}"
        return f"{self.low:.3g}" if self.high == self.low else f"{self.low:g} to {self.high:g}"


def _published() -> Iterator[PublishedSpeedup]:
    frontier, perlmutter = "frontier", "perlmutter"
    for name, smallest, of_512, of_1024 in zip(COLLECTIVES, (0.52, 0.55), (11.4, 11.4), (7.0, 6.2), strict=True):
        yield PublishedSpeedup("6.9", frontier, name, 32, 1024, smallest, smallest)
        for mb in (16, 32, 64):
            yield PublishedSpeedup("6.9", frontier, name, 2048, mb, 30, None)
        yield PublishedSpeedup("6.9", frontier, name, 2048, 512, of_512, of_512)
        yield PublishedSpeedup("6.9", frontier, name, 2048, 1024, of_1024, of_1024)
    for mb in (64, 128, 256, 512):
        yield PublishedSpeedup("6.7", frontier, "all_gather", 2048, mb, 7, 24)
        yield PublishedSpeedup("6.7", frontier, "all_gather", 2048, mb, 27, 82, over="mpi")
    yield PublishedSpeedup("6.11", perlmutter, "all_gather", 32, 1024, 1 / 1.5, 1 / 1.5)
    for name in COLLECTIVES:
        for ranks in (1024, 2048):
            for mb in (16, 32):
                yield PublishedSpeedup("6.11", perlmutter, name, ranks, mb, 3, 5)
            for mb in (64, 128):
                yield PublishedSpeedup("6.10", perlmutter, name, ranks, mb, 1.3, 4.6)
                yield PublishedSpeedup("6.10", perlmutter, name, ranks, mb, 8.8, 15, over="mpi")
        for mb in (128, 256, 512):
            yield PublishedSpeedup("6.11", perlmutter, name, 2048, mb, 2, 3)


PUBLISHED = tuple(_published())
# Sizes of the curves in figures 6.7, 6.8 and 6.10, of which the first and the last are drawn.
CURVES = {"frontier": (64, 512), "perlmutter": (64, 128)}
CLAIMS = (
    Column("figure", "figure"),
    Column("machine", "machine"),
    Column("collective", "collective"),
    Column("ranks", "ranks", "{:,}"),
    Column("mb", "MB"),
    Column("over", "over"),
    Column("published", "published"),
    Column("speedup", "closed-form", "{:.2f}"),
    Column("event_speedup", "event-driven", "{:.2f}"),
    Column("typical_speedup", "with 10 and 20 us a hop", "{:.2f}"),
    Column("is_within", "within 10%"),
    Column("implied_hop_us", "hop that would give the published (us)", "{:.1f}"),
    Column("hop_us", "hop of the tables (us)", "{:.1f}"),
)
CROSSOVERS = (
    Column("machine", "machine"),
    Column("collective", "collective"),
    Column("mb", "MB"),
    Column("closed_form", "two levels win from (ranks), closed-form", "{:.0f}"),
    Column("event_driven", "event-driven", "{:.0f}"),
)
RECURSION = (
    Column("ranks", "GCDs", "{:,}"),
    Column("mb", "MB"),
    Column("one_switch", "recursive over ring, one switch", "{:.2f}"),
    Column("event_driven", "event-driven", "{:.2f}"),
    Column("groups", "groups of 128 nodes, closed-form", "{:.2f}"),
)
# A group of Frontier's dragonfly has 128 nodes, whose links to other groups have 57% of their bandwidth (Atchley et
# al., "Frontier: exploring exascale", SC 2023).
GROUP_NODES, GROUP_OVERSUBSCRIPTION = 128, 1 / 0.57
# Corners of figure 6.9, of all-gathers, with the paper's values.
CORNERS = {(32, 1024): "0.52", (2048, 16): "over 30", (2048, 64): "over 30", (2048, 512): "11.4", (2048, 1024): "7"}
TABLES = (
    Column("table", "RCCL's table"),
    *(Column(f"{ranks} {mb}", f"{ranks:,} GCDs, {mb} MB", "{}") for ranks, mb in CORNERS),
)
MESSAGES = (
    Column("model", "model"),
    Column("fsdp_mb", "FSDP, a block (MB)", "{:.0f}"),
    Column("zero3_mb", "ZeRO-3, smallest to largest linear (MB)"),
    Column("axonn_mb", "AxoNN over z, x = 8 (MB)"),
)


def bench_simulated_two_level(setting: SimulatedTwoLevelSetting, out: Path) -> dict[str, Any]:
    """Simulate all cells, print tables, and write simulated-two-level.json, .md and .png to `out`."""
    rows = [
        _cell(MACHINES[name], collective, ranks, mb, setting)
        for name in setting.machines
        for collective in COLLECTIVES
        for ranks in setting.ranks
        for mb in setting.sizes
    ]
    claims = list(_compare(rows))
    crossovers = list(_crossovers(rows))
    recursion = list(_recursion(rows))
    of_tables = list(_compare_tables()) if "frontier" in setting.machines else []
    messages = [_messages(name) for name in PRESETS if name.startswith("gpt-")]
    tables = (
        ("Published speed-ups of two levels, and these", CLAIMS, claims),
        ("Where two levels overtake the flat ring", CROSSOVERS, crossovers),
        (
            "Figure 6.6, left: reduce-scatters on Frontier, recursive halving over a ring between nodes",
            RECURSION,
            recursion,
        ),
        ("Figure 6.9, all-gathers: speed-ups by each of RCCL's tables, closed-form", TABLES, of_tables),
        ("Figure 6.1: bytes that one all-gather makes on a rank", MESSAGES, messages),
    )
    for title, columns, found in tables:
        print_table(title, columns, found)
    about = {
        "setting": asdict(setting),
        "sources": {name: dict(MACHINES[name].sources) for name in setting.machines},
        "claims": claims,
        "crossovers": crossovers,
        "recursion": recursion,
        "rccl_tables": of_tables,
        "messages": messages,
    }
    path = write_result(out, "simulated-two-level", CELLS, rows, machine=ANY_CPU, **about)
    write_tables(path, [*tables, ("All cells", CELLS, rows)])
    draw_result(path)
    curves = [row for row in rows if row["mb"] in CURVES[row["machine"]]]
    if curves:
        draw_result(write_result(out, "simulated-curves", CELLS, curves, machine=ANY_CPU))
    return {"rows": rows, "claims": claims, "crossovers": crossovers, "messages": messages}


def _cell(
    machine: StudiedMachine, collective: Collective, ranks: int, mb: int, setting: SimulatedTwoLevelSetting
) -> Row:
    """One collective on `ranks` ranks, in milliseconds."""
    num_bytes, packet = mb * MIB, setting.packet_kib * 1024
    links = machine.two_level_links(setting.leaf_nodes, setting.oversubscription)
    protocol = machine.choose_protocol(num_bytes, ranks)
    flat, mpi = machine.flat_seconds(num_bytes, ranks), machine.mpi_seconds(num_bytes, ranks)
    recursive, ring = (
        machine.two_level_seconds(collective, algorithm, num_bytes, ranks, links) for algorithm in BETWEEN_NODES
    )
    flat_event = symmetric.flat_seconds(machine, protocol, num_bytes, ranks, packet)
    # The event-driven network has one switch: only the closed form models several.
    event = event_ring = None
    if setting.leaf_nodes is None:
        event, event_ring = (
            symmetric.two_level_seconds(machine, collective, algorithm, num_bytes, ranks, packet)
            for algorithm in BETWEEN_NODES
        )
    return {
        "machine": machine.name,
        "collective": collective,
        "ranks": ranks,
        "mb": mb,
        "protocol": protocol.name,
        "flat_ms": flat * 1e3,
        "two_level_ms": recursive * 1e3,
        "speedup": flat / recursive,
        "flat_event_ms": flat_event * 1e3,
        "two_level_event_ms": None if event is None else event * 1e3,
        "event_speedup": None if event is None else flat_event / event,
        "mpi_ms": mpi * 1e3,
        "mpi_speedup": mpi / recursive,
        "recursive_over_ring": ring / recursive,
        "event_recursive_over_ring": None if event is None or event_ring is None else event_ring / event,
    }


def _compare(rows: list[Row]) -> Iterator[Row]:
    """The published speed-ups that were simulated, with the simulated ones."""
    cells = {(row["machine"], row["collective"], row["ranks"], row["mb"]): row for row in rows}
    for claim in PUBLISHED:
        cell = cells.get((claim.machine, claim.collective, claim.ranks, claim.mb))
        if cell is None:
            continue
        machine, is_vendor = MACHINES[claim.machine], claim.over == "vendor"
        speedup = cell["speedup"] if is_vendor else cell["mpi_speedup"]
        event_speedup = cell["event_speedup"] if is_vendor else None
        judged = speedup if event_speedup is None else event_speedup
        yield {
            "figure": claim.figure,
            "machine": claim.machine,
            "collective": claim.collective,
            "ranks": claim.ranks,
            "mb": claim.mb,
            "over": machine.library if is_vendor else "Cray MPICH",
            "published": str(claim),
            "speedup": speedup,
            "event_speedup": event_speedup,
            "typical_speedup": _typical_speedup(machine, claim) if is_vendor else None,
            "is_within": "yes" if 0.9 * claim.low <= judged <= 1.1 * (claim.high or float("inf")) else "no",
            **(_hops(machine, claim, cell) if is_vendor else {}),
        }


def _typical_speedup(machine: StudiedMachine, claim: PublishedSpeedup) -> float:
    """The same with the latencies that `TwoLevelGroup` assumes for unknown machines, for all messages."""
    num_bytes = claim.mb * MIB
    flat, two_level = machine.flat_links(machine.simple), machine.two_level_links()
    nodes, size = claim.ranks // machine.gpus_per_node, machine.gpus_per_node

    def typical(links: Links) -> Links:
        return Links(TYPICAL.in_node_latency, links.in_node_bandwidth, TYPICAL.latency, links.node_bandwidth)

    shard = num_bytes / claim.ranks
    alone = machine.two_level_seconds(claim.collective, "recursive", num_bytes, claim.ranks) - predict(
        claim.collective, "recursive", shard, nodes, size, two_level
    )
    of_flat = machine.simple.start + predict(claim.collective, "flat", shard, nodes, size, typical(flat))
    return of_flat / (alone + predict(claim.collective, "recursive", shard, nodes, size, typical(two_level)))


def _hops(machine: StudiedMachine, claim: PublishedSpeedup, cell: Row) -> Row:
    """How long a hop of the flat ring starts, on average: so that the published speed-up results, and by the tables.

    Not a fit: it is not used, and only shows how far the tables are from the chapter's measurements.
    """
    protocol = machine.choose_protocol(claim.mb * MIB, claim.ranks)
    carried = claim.mb * MIB / machine.flat_links(protocol).node_bandwidth
    nodes = claim.ranks // machine.gpus_per_node
    hops = claim.ranks - 1
    average = (nodes * protocol.latency + (claim.ranks - nodes) * protocol.in_node_latency) / claim.ranks
    return {
        "implied_hop_us": max(0.0, claim.low * cell["two_level_ms"] / 1e3 - carried) / hops * 1e6,
        "hop_us": average * 1e6,
    }


def _crossovers(rows: list[Row]) -> Iterator[Row]:
    """From how many ranks on two levels are faster, by machine, collective and size."""
    keys = dict.fromkeys((row["machine"], row["collective"], row["mb"]) for row in rows)
    for machine, collective, mb in keys:
        cells = [row for row in rows if (row["machine"], row["collective"], row["mb"]) == (machine, collective, mb)]
        cells.sort(key=lambda row: row["ranks"])
        yield {
            "machine": machine,
            "collective": collective,
            "mb": mb,
            "closed_form": _first_win(cells, "speedup"),
            "event_driven": _first_win(cells, "event_speedup"),
        }


def _first_win(cells: list[Row], key: str) -> float | None:
    """The number of ranks at which the speed-up passes 1; the smallest if it is above 1 there; None if it never is."""
    if any(cell[key] is None for cell in cells):
        return None
    speedups = {float(cell["ranks"]): float(cell[key]) for cell in cells}
    if next(iter(speedups.values())) >= 1:
        return next(iter(speedups))
    found = find_crossovers(list(speedups), speedups.__getitem__, lambda _: 1.0)
    return found[0] if found else None


def _compare_tables() -> Iterator[Row]:
    """How much the speed-ups depend on the table that RCCL selects."""
    for table in RCCL_HOPS:
        machine = with_rccl_table(MACHINES["frontier"], table)
        speedups = {
            f"{ranks} {mb}": machine.flat_seconds(mb * MIB, ranks)
            / machine.two_level_seconds("all_gather", "recursive", mb * MIB, ranks)
            for ranks, mb in CORNERS
        }
        yield {"table": table} | {corner: f"{speedup:.2f}" for corner, speedup in speedups.items()}
    yield {"table": "the paper"} | {f"{ranks} {mb}": published for (ranks, mb), published in CORNERS.items()}


def _recursion(rows: list[Row]) -> Iterator[Row]:
    """Figure 6.6 (left): the corners of the heat map, and the effect of a dragonfly's fewer links between groups."""
    found = [row for row in rows if (row["machine"], row["collective"]) == ("frontier", "reduce_scatter")]
    shown_ranks, shown_sizes = ({min(values), max(values)} if values else set() for values in _spans(found))
    machine = MACHINES["frontier"]
    groups = machine.two_level_links(GROUP_NODES, GROUP_OVERSUBSCRIPTION)
    for row in found:
        if row["ranks"] in shown_ranks and row["mb"] in shown_sizes:
            recursive, ring = (
                machine.two_level_seconds("reduce_scatter", algorithm, row["mb"] * MIB, row["ranks"], groups)
                for algorithm in BETWEEN_NODES
            )
            yield {
                "ranks": row["ranks"],
                "mb": row["mb"],
                "one_switch": row["recursive_over_ring"],
                "event_driven": row["event_recursive_over_ring"],
                "groups": ring / recursive,
            }


def _spans(rows: list[Row]) -> tuple[list[int], list[int]]:
    return [row["ranks"] for row in rows], [row["mb"] for row in rows]


def _messages(name: str) -> Row:
    """Figure 6.1: all-gathers of a model's 16-bit weights.

    FSDP gathers a block, ZeRO-3 a parameter at a time, and AxoNN a linear that x splits (within a node of Frontier).
    """
    hidden = PRESETS[name].hidden
    linears = [(hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden)]
    sizes = [2 * inputs * outputs / MIB for inputs, outputs in linears]
    return {
        "model": name,
        "fsdp_mb": sum(sizes),
        "zero3_mb": f"{min(sizes):.0f} to {max(sizes):.0f}",
        "axonn_mb": f"{min(sizes) / 8:.0f} to {max(sizes) / 8:.0f}",
    }
