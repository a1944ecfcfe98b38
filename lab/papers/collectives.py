# SPDX-License-Identifier: Apache-2.0
"""Chapter 6 of Singh's dissertation, two-level collectives: figures 6.1 and 6.6 to 6.11, simulated.

Each all-gather and reduce-scatter is predicted twice: in closed form (`machines`), and event-driven, with packets that
queue on links (`symmetric`). Two levels are recursive between nodes, as in the figures.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lab.harness import ANY_CPU, Measured, Table, column
from lab.papers import Compared, read_paper, symmetric
from lab.papers.machines import MACHINES, MIB, RCCL_HOPS, StudiedMachine, name_machines, with_rccl_table
from lab.pictures import describe_origin, group, points, select
from lab.two_level.crossovers import find_crossovers
from stretto.bench.harness import Column
from stretto.cluster.two_level import Collective
from stretto.collectives.two_level.inter_node import InterNodeAlgorithm
from stretto.models.gpt_config import PRESETS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lab.style import Chart

COLLECTIVES: tuple[Collective, ...] = ("all_gather", "reduce_scatter")
BETWEEN_NODES: tuple[InterNodeAlgorithm, ...] = ("recursive", "ring")
RANKS, SIZES = (32, 64, 128, 256, 512, 1024, 2048), (16, 32, 64, 128, 256, 512, 1024)
PACKET = 64 * 1024
# Sizes of the curves in figures 6.7, 6.8 and 6.10, of which the first and the last are drawn.
CURVES = {"frontier": (64, 512), "perlmutter": (64, 128)}
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
class Cell:
    """A collective on a number of ranks, by each library, in closed form and event-driven."""

    machine: str = column("machine")
    collective: Literal["all_gather", "reduce_scatter", "all_reduce"] = column("collective")
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
    event_speedup: float | None = column("event-driven", "{:.2f}")
    is_within: str = column("within 10%")
    implied_hop_us: float | None = column("hop that would give the published (us)", "{:.1f}", default=None)
    hop_us: float | None = column("hop of the tables (us)", "{:.1f}", default=None)


@dataclass(frozen=True)
class Crossover:
    """Where two levels overtake the flat ring."""

    machine: str = column("machine")
    collective: str = column("collective")
    mb: int = column("MB")
    closed_form: float | None = column("two levels win from (ranks), closed-form", "{:.0f}")
    event_driven: float | None = column("event-driven", "{:.0f}")


@dataclass(frozen=True)
class Recursion:
    """A corner of figure 6.6 (left), on one switch and in a dragonfly's groups."""

    ranks: int = column("GCDs", "{:,}")
    mb: int = column("MB")
    one_switch: float = column("recursive over ring, one switch", "{:.2f}")
    event_driven: float = column("event-driven", "{:.2f}")
    groups: float = column("groups of 128 nodes, closed-form", "{:.2f}")


@dataclass(frozen=True)
class Message:
    """A model's all-gathers (figure 6.1)."""

    model: str = column("model")
    fsdp_mb: float = column("FSDP, a block (MB)", "{:.0f}")
    zero3_mb: str = column("ZeRO-3, smallest to largest linear (MB)")
    axonn_mb: str = column("AxoNN over z, x = 8 (MB)")


def study_collectives(
    machines: Iterable[str] = tuple(MACHINES), ranks: Iterable[int] = RANKS, sizes: Iterable[int] = SIZES
) -> Iterator[Measured | Compared]:
    """Simulate all cells, compare them with what is published, and repeat those of the curves.

    ranks: whole nodes, 2 or more. sizes: MiB, an all-gather's output and a reduce-scatter's input.
    """
    rows = [
        simulate_cell(MACHINES[name], collective, count, mb)
        for name in machines
        for collective in COLLECTIVES
        for count in ranks
        for mb in sizes
    ]
    names = dict.fromkeys(row.machine for row in rows)
    claims = list(compare_claims(rows))
    tables = (
        Table("Published speed-ups of two levels, and these", claims, key="claims"),
        Table("Where two levels overtake the flat ring", list(find_wins(rows)), key="crossovers"),
        Table(
            "Figure 6.6, left: reduce-scatters on Frontier, recursive halving over a ring between nodes",
            list(_recursion(rows)),
            key="recursion",
        ),
        Table(
            "Figure 6.9, all-gathers: speed-ups by each of RCCL's tables, closed-form",
            list(_compare_tables()) if "frontier" in names else [],
            TABLES,
            "rccl_tables",
        ),
        Table("Figure 6.1: bytes that one all-gather makes on a rank", list(_messages()), key="messages"),
    )
    about = {"machine": ANY_CPU, "sources": {name: dict(MACHINES[name].sources) for name in names}}
    yield Measured(rows, about, name="simulated-two-level", title="All cells", tables=tables)
    curves = [row for row in rows if row.mb in CURVES[row.machine]]
    if curves:
        yield Measured(curves, name="simulated-curves", title="Cells of the curves in figures 6.7, 6.8 and 6.10")
    for claim in claims:
        run = f"{claim.collective}, {claim.mb} MB on {claim.ranks:,} ranks of {claim.machine}"
        what, times = f"speed-up over {claim.over}", (claim.speedup, claim.event_speedup)
        yield Compared("Singh", f"figure {claim.figure}", run, what, claim.published, *times)


def simulate_cell(machine: StudiedMachine, collective: Collective, ranks: int, mb: int) -> Cell:
    num_bytes = mb * MIB
    protocol = machine.choose_protocol(num_bytes, ranks)
    flat, mpi = machine.flat_seconds(num_bytes, ranks), machine.mpi_seconds(num_bytes, ranks)
    recursive, ring = (
        machine.two_level_seconds(collective, algorithm, num_bytes, ranks) for algorithm in BETWEEN_NODES
    )
    flat_event = symmetric.flat_seconds(machine, protocol, num_bytes, ranks, PACKET)
    event, event_ring = (
        symmetric.two_level_seconds(machine, collective, algorithm, num_bytes, ranks, PACKET)
        for algorithm in BETWEEN_NODES
    )
    return Cell(
        machine.name,
        collective,
        ranks,
        mb,
        protocol.name,
        flat_ms=flat * 1e3,
        two_level_ms=recursive * 1e3,
        speedup=flat / recursive,
        flat_event_ms=flat_event * 1e3,
        two_level_event_ms=event * 1e3,
        event_speedup=flat_event / event,
        mpi_ms=mpi * 1e3,
        mpi_speedup=mpi / recursive,
        recursive_over_ring=ring / recursive,
        event_recursive_over_ring=event_ring / event,
    )


def compare_claims(rows: list[Cell]) -> Iterator[Claim]:
    """The published speed-ups that were simulated, with the simulated ones."""
    cells = {(row.machine, row.collective, row.ranks, row.mb): row for row in rows}
    for entry in read_paper("singh")["speedups"]:
        for collective in entry.get("collectives", COLLECTIVES):
            for ranks, mb, low, *high in entry["cells"]:
                if (cell := cells.get((entry["machine"], collective, ranks, mb))) is not None:
                    yield _compare(cell, entry["figure"], low, *high, is_vendor=entry.get("over") != "mpi")


def _compare(cell: Cell, figure: str, low: float, high: float | str | None = None, *, is_vendor: bool) -> Claim:
    """high: of the published range, "more" where it has no upper end."""
    machine = MACHINES[cell.machine]
    published = f"over {low:g}" if high == "more" else f"{low:g} to {high:g}" if high else f"{low:.3g}"
    most = float("inf") if isinstance(high, str) else high or low
    about = (figure, cell.machine, cell.collective, cell.ranks, cell.mb)
    if not is_vendor:
        is_within = "yes" if 0.9 * low <= cell.mpi_speedup <= 1.1 * most else "no"
        return Claim(*about, "Cray MPICH", published, cell.mpi_speedup, None, is_within)
    # How long a hop of the flat ring starts, on average: so that the published speed-up results, and by the tables. Not
    # a fit: it is not used, and only shows how far the tables are from the chapter's measurements.
    protocol = machine.choose_protocol(cell.mb * MIB, cell.ranks)
    carried = cell.mb * MIB / machine.flat_links(protocol).node_bandwidth
    nodes = cell.ranks // machine.gpus_per_node
    average = (nodes * protocol.latency + (cell.ranks - nodes) * protocol.in_node_latency) / cell.ranks
    return Claim(
        *about,
        machine.library,
        published,
        cell.speedup,
        cell.event_speedup,
        is_within="yes" if 0.9 * low <= cell.event_speedup <= 1.1 * most else "no",
        implied_hop_us=max(0.0, low * cell.two_level_ms / 1e3 - carried) / (cell.ranks - 1) * 1e6,
        hop_us=average * 1e6,
    )


def find_wins(rows: list[Cell]) -> Iterator[Crossover]:
    """From how many ranks on two levels are faster, by machine, collective and size."""
    for key in dict.fromkeys((row.machine, row.collective, row.mb) for row in rows):
        cells = [row for row in rows if (row.machine, row.collective, row.mb) == key]
        cells.sort(key=lambda row: row.ranks)
        counts = [cell.ranks for cell in cells]
        found = (_first_win(counts, [getattr(cell, of) for cell in cells]) for of in ("speedup", "event_speedup"))
        yield Crossover(*key, *found)


def _first_win(counts: list[int], speedups: list[float]) -> float | None:
    """The number of ranks at which the speed-up passes 1; the smallest if it is above 1 there; None if it never is."""
    if speedups[0] >= 1:
        return counts[0]
    found = find_crossovers(counts, dict(zip(map(float, counts), speedups, strict=True)).__getitem__, lambda _: 1.0)
    return found[0] if found else None


def _compare_tables() -> Iterator[dict[str, str]]:
    """Return how much the speed-ups depend on the table that RCCL selects."""
    for table in RCCL_HOPS:
        machine = with_rccl_table(MACHINES["frontier"], table)
        speedups = {
            f"{ranks} {mb}": machine.flat_seconds(mb * MIB, ranks)
            / machine.two_level_seconds("all_gather", "recursive", mb * MIB, ranks)
            for ranks, mb in CORNERS
        }
        yield {"table": table} | {corner: f"{speedup:.2f}" for corner, speedup in speedups.items()}
    yield {"table": "the paper"} | {f"{ranks} {mb}": published for (ranks, mb), published in CORNERS.items()}


def _recursion(rows: list[Cell]) -> Iterator[Recursion]:
    """Figure 6.6 (left): the corners of the heat map, and the effect of a dragonfly's fewer links between groups."""
    found = [row for row in rows if (row.machine, row.collective) == ("frontier", "reduce_scatter")]
    ranks, sizes = [row.ranks for row in found], [row.mb for row in found]
    machine = MACHINES["frontier"]
    groups = machine.two_level_links(GROUP_NODES, GROUP_OVERSUBSCRIPTION)
    for row in found:
        if row.ranks in (min(ranks), max(ranks)) and row.mb in (min(sizes), max(sizes)):
            recursive, ring = (
                machine.two_level_seconds("reduce_scatter", algorithm, row.mb * MIB, row.ranks, groups)
                for algorithm in BETWEEN_NODES
            )
            over_ring = row.recursive_over_ring, row.event_recursive_over_ring
            yield Recursion(row.ranks, row.mb, *over_ring, groups=ring / recursive)


def _messages() -> Iterator[Message]:
    """Figure 6.1: all-gathers of a model's 16-bit weights.

    FSDP gathers a block, ZeRO-3 a parameter at a time, and AxoNN a linear that x splits (within a node of Frontier).
    """
    for name, preset in PRESETS.items():
        if name.startswith("gpt-"):
            least = 2 * preset.hidden**2 / MIB  # of four linears, with 3, 1, 4 and 4 times as many weights
            whole, split = f"{least:.0f} to {4 * least:.0f}", f"{least / 8:.0f} to {4 * least / 8:.0f}"
            yield Message(name, 12 * least, whole, split)


@contextmanager
def _drawing_cells(
    data: dict[str, Any], picture: Path, height: float
) -> "Iterator[tuple[Chart, list[tuple[Axes, list[Any]]]]]":
    from lab.style import drawing

    machines, collectives = (list(dict.fromkeys(row[key] for row in data["rows"])) for key in ("machine", "collective"))
    with drawing(picture, 4.2 * len(collectives), height * len(machines)) as drawn:
        axes = drawn.panels(len(machines), len(collectives))
        panels: list[tuple[Axes, list[Any]]] = []
        for line, machine in zip(axes, machines, strict=True):
            for panel, collective in zip(line, collectives, strict=True):
                panel.set(title=f"{machine.capitalize()}, {collective.replace('_', '-')}", xlabel="ranks")
                panels.append((panel, select(data["rows"], machine=machine, collective=collective)))
        drawn.subtitle = describe_origin(data, simulated=name_machines(machines))
        yield drawn, panels


def plot_two_level_heat_maps(data: dict[str, Any], picture: Path) -> None:
    """Draw figures 6.9 and 6.11: a panel a machine and collective, the speed-up of two levels by ranks and MiB."""
    import numpy as np
    from matplotlib.colors import LogNorm

    from stretto.report.style import SMALL

    with _drawing_cells(data, picture, 3.2) as (drawn, panels):
        for panel, rows in panels:
            ranks = sorted({row["ranks"] for row in rows})
            sizes = sorted({row["mb"] for row in rows}, reverse=True)
            cells = np.full((len(sizes), len(ranks)), np.nan)
            for row in rows:
                cells[sizes.index(row["mb"]), ranks.index(row["ranks"])] = row["event_speedup"]
            panel.imshow(cells, cmap="RdBu", norm=LogNorm(1 / 40, 40), aspect="auto")
            for line, place in np.ndindex(cells.shape):
                value = cells[line, place]
                colour = "white" if abs(np.log(value)) > np.log(8) else "black"
                panel.text(place, line, f"{value:.2g}", ha="center", va="center", fontsize=SMALL, color=colour)
            panel.set_xticks(range(len(ranks)), [f"{count}" for count in ranks])
            panel.set_yticks(range(len(sizes)), [f"{size}" for size in sizes])
            panel.grid(visible=False)
            panel.set_ylabel("MiB")
        drawn.title = "Speed-up of two levels over the vendor's flat ring, simulated"
        drawn.caption = (
            "Event-driven: packets that queue on links; a node stands for all. Above 1, two levels (recursive between "
            "nodes) are faster. MiB: an all-gather's output, a reduce-scatter's input, of a rank."
        )


def plot_curves(data: dict[str, Any], picture: Path) -> None:
    """Draw figures 6.7, 6.8 and 6.10: a panel a machine and collective, the times of each library by ranks."""
    from lab.style import plain_log
    from stretto.report.style import SERIES

    # Cray MPICH's ring is not simulated event by event.
    libraries = (("two_level_event_ms", "two levels"), ("flat_event_ms", "vendor's ring"), ("mpi_ms", "Cray MPICH"))
    with _drawing_cells(data, picture, 3.0) as (drawn, panels):
        for panel, rows in panels:
            sizes = sorted({row["mb"] for row in rows})
            for nth, (_, cells) in enumerate(sorted(group(rows, "mb").items())):
                for place, (key, name) in enumerate(libraries):
                    label = f"{name}, {'smaller' if nth == 0 else 'larger'}"
                    panel.plot(*points(cells, "ranks", key), label=label, **SERIES[place + 3 * (nth % 2)].line)
            drawn.log_ticks(panel.xaxis, [row["ranks"] for row in rows])
            plain_log(panel.yaxis)
            panel.set(title=f"{panel.get_title()}, {' and '.join(map(str, sizes))} MiB", ylabel="ms")
        drawn.title = "All-gathers and reduce-scatters by library, simulated"
        drawn.caption = "Event-driven, but for Cray MPICH (closed-form, on one network interface, additions left out)."
