# SPDX-License-Identifier: Apache-2.0
"""`python -m lab simulated-two-level`: figures 6.1 and 6.6 to 6.11 of Singh's dissertation, simulated.

Each all-gather and reduce-scatter is predicted twice: in closed form (`machines`), and event-driven, with packets that
queue on links (`symmetric`). Two levels are recursive between nodes, as in the figures.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from lab.harness import ANY_CPU, Bench, Measured, Table, column
from lab.papers import read_paper
from lab.pictures import describe_origin
from lab.studies import STUDIED, symmetric
from lab.studies.machines import MACHINES, MIB, RCCL_HOPS, StudiedMachine, name_machines, with_rccl_table
from lab.two_level.crossovers import find_crossovers
from stretto.bench.harness import Column
from stretto.bench.settings import Option, require_known, require_least
from stretto.collectives.two_level import Links, predict
from stretto.collectives.two_level.inter_node import InterNodeAlgorithm
from stretto.collectives.two_level.model import TYPICAL, Collective
from stretto.models.gpt_config import PRESETS


@dataclass(frozen=True)
class SimulatedTwoLevelSetting:
    """Which collectives of Singh's chapter 6 are simulated. Raises ValueError for numbers of ranks that nodes lack."""

    machines: Annotated[tuple[str, ...], Option("Of frontier and perlmutter.")] = STUDIED
    ranks: Annotated[tuple[int, ...], Option("Numbers of ranks (GCDs, GPUs).")] = (32, 64, 128, 256, 512, 1024, 2048)
    sizes: Annotated[tuple[int, ...], Option("MiB: an all-gather's output, a reduce-scatter's input.")] = (
        16, 32, 64, 128, 256, 512, 1024,
    )  # fmt: skip
    packet_kib: Annotated[int, Option("KiB of a packet of the event-driven network.")] = 64
    leaf_nodes: Annotated[int | None, Option("Nodes on one switch (default: all on one).")] = None
    oversubscription: Annotated[
        float, Option("How many times more these nodes send than their switch's links carry.")
    ] = 1.0

    def __post_init__(self) -> None:
        require_known("machine", self.machines, STUDIED)
        require_least(1, packet_kib=self.packet_kib)
        for count in self.ranks:
            if count < 16 or count % 8:
                near = max(16, round(count / 8) * 8)
                raise ValueError(
                    f"--ranks has {count}, but takes whole nodes, 2 or more: multiples of 8; {near} would do"
                )
        if self.leaf_nodes is not None:
            require_least(1, leaf_nodes=self.leaf_nodes)
        require_least(1, oversubscription=self.oversubscription)


def simulate_cells(setting: SimulatedTwoLevelSetting) -> Iterator[Measured]:
    """Simulate all cells, compare them with what is published, and repeat those of the curves."""
    rows = [
        simulate_cell(MACHINES[name], collective, ranks, mb, setting)
        for name in setting.machines
        for collective in COLLECTIVES
        for ranks in setting.ranks
        for mb in setting.sizes
    ]
    recursion = "Figure 6.6, left: reduce-scatters on Frontier, recursive halving over a ring between nodes"
    of_tables = "Figure 6.9, all-gathers: speed-ups by each of RCCL's tables, closed-form"
    compared = list(_compare_tables()) if "frontier" in setting.machines else []
    messages = [_messages(name) for name in PRESETS if name.startswith("gpt-")]
    tables = (
        Table("Published speed-ups of two levels, and these", list(compare_claims(rows)), Claim, "claims"),
        Table("Where two levels overtake the flat ring", list(_crossovers(rows)), Crossover, "crossovers"),
        Table(recursion, list(_recursion(rows)), Recursion, "recursion"),
        Table(of_tables, compared, TABLES, "rccl_tables"),
        Table("Figure 6.1: bytes that one all-gather makes on a rank", messages, Message, "messages"),
    )
    sources = {name: dict(MACHINES[name].sources) for name in setting.machines}
    yield Measured(rows, {"setting": asdict(setting), "sources": sources}, tables=tables)
    curves = [row for row in rows if row["mb"] in CURVES[row["machine"]]]
    if curves:
        yield Measured(curves, name="simulated-curves", title="Cells of the curves in figures 6.7, 6.8 and 6.10")


COLLECTIVES: tuple[Collective, ...] = ("all_gather", "reduce_scatter")
BETWEEN_NODES: tuple[InterNodeAlgorithm, ...] = ("recursive", "ring")
Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A collective on a number of ranks, by each library, in closed form and event-driven."""

    machine: str = column("machine")
    collective: str = column("collective")
    ranks: int = column("ranks", "{:,}")
    mb: int = column("MB")
    protocol: str = column("protocol")
    flat_ms: float = column("flat ring (ms)", "{:.3f}")
    two_level_ms: float = column("two levels (ms)", "{:.3f}")
    speedup: float = column("speed-up", "{:.2f}")
    flat_event_ms: float = column("flat, event-driven (ms)", "{:.3f}")
    two_level_event_ms: float = column("two levels, event-driven (ms)", "{:.3f}")
    event_speedup: float = column("speed-up, event-driven", "{:.2f}")
    mpi_ms: float = column("Cray MPICH (ms)", "{:.3f}")
    mpi_speedup: float = column("speed-up over it", "{:.1f}")
    recursive_over_ring: float = column("recursive over ring between nodes", "{:.2f}")
    event_recursive_over_ring: float = column("the same, event-driven", "{:.2f}")


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
    for entry in read_paper("singh")["speedups"]:
        for collective in entry.get("collectives", COLLECTIVES):
            for ranks, mb, low, *high in entry["cells"]:
                most = low if not high else None if high[0] == "more" else high[0]
                over = entry.get("over", "vendor")
                yield PublishedSpeedup(entry["figure"], entry["machine"], collective, ranks, mb, low, most, over)


PUBLISHED = tuple(_published())
# Sizes of the curves in figures 6.7, 6.8 and 6.10, of which the first and the last are drawn.
CURVES = {"frontier": (64, 512), "perlmutter": (64, 128)}


@dataclass(frozen=True)
class Claim:
    """A published speed-up of two levels, and the simulated ones."""

    figure: str = column("figure")
    machine: str = column("machine")
    collective: str = column("collective")
    ranks: int = column("ranks", "{:,}")
    mb: int = column("MB")
    over: str = column("over")
    published: str = column("published")
    speedup: float = column("closed-form", "{:.2f}")
    event_speedup: float = column("event-driven", "{:.2f}")
    typical_speedup: float = column("with 10 and 20 us a hop", "{:.2f}")
    is_within: str = column("within 10%")
    implied_hop_us: float = column("hop that would give the published (us)", "{:.1f}")
    hop_us: float = column("hop of the tables (us)", "{:.1f}")


@dataclass(frozen=True)
class Crossover:
    """Where two levels overtake the flat ring."""

    machine: str = column("machine")
    collective: str = column("collective")
    mb: int = column("MB")
    closed_form: float = column("two levels win from (ranks), closed-form", "{:.0f}")
    event_driven: float = column("event-driven", "{:.0f}")


@dataclass(frozen=True)
class Recursion:
    """A corner of figure 6.6 (left), on one switch and in a dragonfly's groups."""

    ranks: int = column("GCDs", "{:,}")
    mb: int = column("MB")
    one_switch: float = column("recursive over ring, one switch", "{:.2f}")
    event_driven: float = column("event-driven", "{:.2f}")
    groups: float = column("groups of 128 nodes, closed-form", "{:.2f}")


# A group of Frontier's dragonfly has 128 nodes, whose links to other groups have 57% of their bandwidth (Atchley et
# al., "Frontier: exploring exascale", SC 2023).
GROUP_NODES, GROUP_OVERSUBSCRIPTION = 128, 1 / 0.57
# Corners of figure 6.9, of all-gathers, with the paper's values.
CORNERS = {(ranks, mb): speedup for ranks, mb, speedup in read_paper("singh")["figure-6-9"]["corners"]}
TABLES = (
    Column("table", "RCCL's table"),
    *(Column(f"{ranks} {mb}", f"{ranks:,} GCDs, {mb} MB", "{}") for ranks, mb in CORNERS),
)


@dataclass(frozen=True)
class Message:
    """A model's all-gathers (figure 6.1)."""

    model: str = column("model")
    fsdp_mb: float = column("FSDP, a block (MB)", "{:.0f}")
    zero3_mb: str = column("ZeRO-3, smallest to largest linear (MB)")
    axonn_mb: str = column("AxoNN over z, x = 8 (MB)")


def simulate_cell(
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


def compare_claims(rows: list[Row]) -> Iterator[Row]:
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


def plot_two_level_heat_maps(result: Path, picture: Path) -> None:
    """Draw figures 6.9 and 6.11: a panel a machine and collective, the speed-up of two levels by ranks and MiB."""
    import numpy as np
    from matplotlib.colors import LogNorm

    from lab.style import drawing
    from stretto.report.style import SMALL

    data = json.loads(result.read_text())
    panels = list(dict.fromkeys((row["machine"], row["collective"]) for row in data["rows"]))
    machines = list(dict.fromkeys(machine for machine, _ in panels))
    collectives = list(dict.fromkeys(collective for _, collective in panels))
    with drawing(picture, 4.2 * len(collectives), 3.2 * len(machines)) as drawn:
        axes = drawn.panels(len(machines), len(collectives))
        for machine, collective in panels:
            panel = axes[machines.index(machine)][collectives.index(collective)]
            rows = [row for row in data["rows"] if (row["machine"], row["collective"]) == (machine, collective)]
            ranks = sorted({row["ranks"] for row in rows})
            sizes = sorted({row["mb"] for row in rows}, reverse=True)
            cells = np.full((len(sizes), len(ranks)), np.nan)
            for row in rows:
                found = row["speedup"] if row["event_speedup"] is None else row["event_speedup"]
                cells[sizes.index(row["mb"]), ranks.index(row["ranks"])] = found
            panel.imshow(cells, cmap="RdBu", norm=LogNorm(1 / 40, 40), aspect="auto")
            for line, column in np.ndindex(cells.shape):
                value = cells[line, column]
                colour = "white" if abs(np.log(value)) > np.log(8) else "black"
                panel.text(column, line, f"{value:.2g}", ha="center", va="center", fontsize=SMALL, color=colour)
            panel.set_xticks(range(len(ranks)), [f"{count}" for count in ranks])
            panel.set_yticks(range(len(sizes)), [f"{size}" for size in sizes])
            panel.grid(visible=False)
            panel.set_title(f"{machine.capitalize()}, {collective.replace('_', '-')}")
            panel.set_xlabel("ranks")
            panel.set_ylabel("MiB")
        drawn.title = "Speed-up of two levels over the vendor's flat ring, simulated"
        drawn.subtitle = describe_origin(data, simulated=name_machines(machines))
        drawn.caption = (
            "Event-driven: packets that queue on links; a node stands for all. Above 1, two levels (recursive between "
            "nodes) are faster. MiB: an all-gather's output, a reduce-scatter's input, of a rank."
        )


def plot_curves(result: Path, picture: Path) -> None:
    """Draw figures 6.7, 6.8 and 6.10: a panel a machine and collective, the times of each library by ranks."""
    from lab.style import drawing, plain_log
    from stretto.report.style import SERIES

    data = json.loads(result.read_text())
    panels = list(dict.fromkeys((row["machine"], row["collective"]) for row in data["rows"]))
    machines = list(dict.fromkeys(machine for machine, _ in panels))
    collectives = list(dict.fromkeys(collective for _, collective in panels))
    libraries = (("two_level", "two levels"), ("flat", "vendor's ring"), ("mpi", "Cray MPICH"))
    with drawing(picture, 4.2 * len(collectives), 3.0 * len(machines)) as drawn:
        axes = drawn.panels(len(machines), len(collectives))
        for machine, collective in panels:
            panel = axes[machines.index(machine)][collectives.index(collective)]
            rows = [row for row in data["rows"] if (row["machine"], row["collective"]) == (machine, collective)]
            for nth, mb in enumerate(sorted({row["mb"] for row in rows})):
                cells = [row for row in rows if row["mb"] == mb]
                ranks = [row["ranks"] for row in cells]
                for place, (key, name) in enumerate(libraries):
                    # Cray MPICH's ring is not simulated event by event.
                    times = [row.get(f"{key}_event_ms") or row[f"{key}_ms"] for row in cells]
                    look = SERIES[place + 3 * (nth % 2)]
                    label = f"{name}, {'smaller' if nth == 0 else 'larger'}"
                    panel.plot(ranks, times, label=label, **look.line)
            drawn.log_ticks(panel.xaxis, [row["ranks"] for row in rows])
            plain_log(panel.yaxis)
            sizes = " and ".join(f"{mb}" for mb in sorted({row["mb"] for row in rows}))
            panel.set_title(f"{machine.capitalize()}, {collective.replace('_', '-')}, {sizes} MiB")
            panel.set_xlabel("ranks")
            panel.set_ylabel("ms")
        drawn.title = "All-gathers and reduce-scatters by library, simulated"
        drawn.subtitle = describe_origin(data, simulated=name_machines(machines))
        drawn.caption = "Event-driven, but for Cray MPICH (closed-form, on one network interface, additions left out)."


BENCH = Bench(
    "simulated-two-level",
    "Two-level collectives on Frontier and Perlmutter, compared with Singh's chapter 6 (needs no GPU).",
    SimulatedTwoLevelSetting,
    simulate_cells,
    Cell,
    title="All cells",
    plot={"simulated-two-level": plot_two_level_heat_maps, "simulated-curves": plot_curves},
    about=lambda setting: {"machine": ANY_CPU},
)
