# SPDX-License-Identifier: Apache-2.0
"""Section 4.4 of Punniyamurthy et al., a DLRM's step with fused look-up and all-to-all, simulated.

The paper's nodes and network (table 2); unstated parameters are varied. Its kernels' times on an MI210 are not
published: they are estimated from that GPU's datasheet, or measured on an H200.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any

from lab.harness import ANY_CPU, Measured, Table, column, columns_of
from lab.papers import Compared, read_paper
from lab.pictures import select
from lab.simulated_dlrm.exchange import EXCHANGES
from lab.simulated_dlrm.kernels import H200, MI210, KernelRates, RecommendationStep
from lab.simulated_dlrm.step import FIDELITIES, FUSIONS, simulate_recommendation
from stretto.bench.harness import Column
from stretto.simulator.network import NetworkTopology
from stretto.simulator.network.shapes import dragonfly, fat_tree, ring, switch, torus

Row = dict[str, Any]

BANDWIDTH, LATENCY = 25e9, 700e-9  # 200 Gb/s a link and direction; table 2
SIZES = {128: (16, 8), 256: (16, 16), 512: (32, 16), 1024: (32, 32)}  # of the torus
PUBLISHED: float = read_paper("punniyamurthy")["section-4-4"]["forward_less"]  # 128 nodes, "on average"
STEP, KERNELS = RecommendationStep(batch=512, tables=4), (MI210, H200)
SLICES = 16  # of the message from a rank to another on 128 ranks; as many in total on more ranks
# Written before the study ran, from the load of the busiest link and the kernels' times: less time, forward and both.
PREDICTED: dict[tuple[str, str, str], tuple[float, float]] = {
    ("MI210", "direct", "closed-form"): (0.025, 0.025),
    ("MI210", "direct", "event-driven"): (0.13, 0.38),
    ("MI210", "by-dimension", "event-driven"): (0.20, 0.50),
    ("H200", "direct", "event-driven"): (0.048, 0.27),
}
PREDICTED_BY_RANKS = {128: (0.21, 0.50), 256: (0.265, 0.61), 512: (0.20, 0.47), 1024: (0.26, 0.58)}  # by dimension


@dataclass(frozen=True)
class Times:
    """A step separate and fused, with what varies; each table shows some of the columns."""

    changed: str = column("what differs")
    kernels: str = column("kernels' times")
    collective: str = column("all-to-all")
    fidelity: str = column("fidelity")
    ranks: int = column("ranks")
    torus: str = column("torus")
    batch: int = column("samples a rank")
    tables: int = column("tables a rank")
    lookup_ms: float = column("look-up (ms)", "{:.2f}")
    exposed_ms: float = column("not computing (ms)", "{:.2f}")
    none_ms: float = column("separate (ms)", "{:.2f}")
    forward_ms: float = column("forward fused (ms)", "{:.2f}")
    both_ms: float = column("both fused (ms)", "{:.2f}")
    forward_less: float = column("forward: less time", "{:.1%}")
    both_less: float = column("both: less time", "{:.1%}")
    forward_predicted: float = column("forward predicted", "{:.1%}")
    both_predicted: float = column("both predicted", "{:.1%}")


@dataclass(frozen=True)
class Average:
    """Mean saving over the shapes that the paper leaves open, beside its own."""

    collective: str = column("all-to-all")
    forward_less: float = column("forward: less time, mean", "{:.1%}")
    published: float = column("published", "{:.0%}")


def study_dlrm() -> Iterator[Measured | Compared]:
    """Simulate 128 nodes, more nodes, and what the paper leaves open; tables but the first are of the first kernels."""
    fused = [
        compare_fusions(STEP, each, torus_of(128), collective, fidelity)
        for each in KERNELS
        for collective in EXCHANGES
        for fidelity in FIDELITIES
    ]
    shapes = _vary_shapes(MI210)
    scale = [
        compare_fusions(STEP, MI210, torus_of(count), "by-dimension", fidelity, slices=SLICES * 128 // count)
        for count in SIZES
        for fidelity in FIDELITIES
    ]
    averages = [
        Average(collective, mean(row["forward_less"] for row in select(shapes, collective=collective)), PUBLISHED)
        for collective in EXCHANGES
    ]
    first, less = MI210.name, ("forward_less", "both_less", "forward_predicted", "both_predicted")
    times = ("none_ms", "forward_ms", "both_ms", *less)
    tables = (
        Table("Means over the shapes below, beside the paper's", averages, key="averages"),
        Table(
            f"Shapes that table 2 leaves open, {first}, event-driven",
            shapes,
            _columns("collective", "batch", "tables", *times),
            "shapes",
        ),
        Table(
            f"More nodes, {first}, by-dimension, the same samples and tables a rank",
            scale,
            _columns("ranks", "torus", "fidelity", *times),
            "scale",
        ),
        Table(
            f"Other assumptions, {first}, direct, event-driven, 128 ranks",
            _vary_assumptions(MI210),
            _columns("changed", *times[:5]),
            "varied",
        ),
    )
    about = {"step": asdict(STEP), "kernels": {each.name: asdict(each) for each in KERNELS}, "published": PUBLISHED}
    row = _columns("kernels", "collective", "fidelity", "lookup_ms", "exposed_ms", *times)
    title = "128 nodes, 16 x 8 torus"
    yield Measured(fused, about | {"machine": ANY_CPU}, name="simulated-dlrm", title=title, tables=tables, row=row)
    saved = [row["forward_less"] for row in select(fused, kernels=first, collective="direct")]
    paper = "Punniyamurthy et al.", "section 4.4"
    yield Compared(*paper, "128 nodes", "part of a step saved", f"{PUBLISHED}", *saved)


def _columns(*keys: str) -> tuple[Column, ...]:
    return tuple(each for each in columns_of(Times) if each.key in keys)


def torus_of(ranks: int) -> NetworkTopology:
    return torus(SIZES[ranks], BANDWIDTH, LATENCY)


def compare_fusions(
    step: RecommendationStep,
    rates: KernelRates,
    network: NetworkTopology,
    collective: str,
    fidelity: str,
    *,
    fusions: Sequence[str] = FUSIONS,
    slices: int = SLICES,
    **options: Any,
) -> Row:
    """A row: the step separate and fused, in milliseconds."""
    options = {"slice_vectors": -(-step.batch * step.tables // max(slices, 1))} | options
    found = {
        fused: simulate_recommendation(
            step, rates, network, fused=fused, collective=collective, fidelity=fidelity, **options
        )
        for fused in fusions
    }
    separate = found["none"]
    row: Row = {
        "kernels": rates.name,
        "collective": collective,
        "fidelity": fidelity,
        "ranks": network.devices,
        "torus": network.name.removeprefix("torus:"),
        "batch": step.batch,
        "tables": step.tables,
        "lookup_ms": separate.lookup * 1e3,
        "exposed_ms": separate.exposed * 1e3,
    }
    for fused, each in found.items():
        row[f"{fused}_ms"] = each.seconds * 1e3
        if fused != "none":
            row[f"{fused}_less"] = 1 - each.seconds / separate.seconds
    predicted = PREDICTED.get((rates.name, collective, fidelity)) if network.devices == 128 else None
    if network.devices != 128 and fidelity == "event-driven" and collective == "by-dimension":
        predicted = PREDICTED_BY_RANKS[network.devices]
    if predicted is not None:
        row["forward_predicted"], row["both_predicted"] = predicted
    return row


def _vary_shapes(rates: KernelRates) -> list[Row]:
    """Batches and tables, with fewer slices: only how much of the look-up is hidden depends on them."""
    return [
        compare_fusions(
            replace(STEP, batch=batch, tables=tables),
            rates,
            torus_of(128),
            collective,
            "event-driven",
            fusions=("none", "forward"),
            slices=SLICES // 2,
        )
        for collective in EXCHANGES
        for batch in (64, 256, 1024)
        for tables in (1, 4, 16)
    ]


def _vary_assumptions(rates: KernelRates) -> list[Row]:
    """The parameters that the paper does not state, changed one at a time."""
    half = replace(rates, lookup=rates.lookup / 2, memory=rates.memory / 2)
    slow = replace(rates, flops=rates.flops / 2, launch=4 * rates.launch)
    network = torus_of(128)
    changes: list[tuple[str, Mapping[str, Any]]] = [
        ("nothing", {}),
        ("half the memory bandwidth", {"rates": half}),
        ("products and launches twice and four times as slow", {"rates": slow}),
        ("a bottom MLP of 1 layer", {"step": replace(STEP, bottom_layers=1)}),
        ("an update of 4 look-ups", {"rates": replace(rates, update_factor=4.0)}),
        ("4 slices a pair of ranks", {"slices": 4}),
        ("64 slices a pair of ranks", {"slices": 64, "fusions": ("none", "forward")}),
        ("16 slices of a rank under way", {"window": 16}),
        ("any number of slices under way", {"window": None}),
        ("packets of 4 KiB", {"packet_bytes": 4096}),
        ("a ring", {"network": ring(128, BANDWIDTH, LATENCY)}),
        ("one switch", {"network": switch(128, BANDWIDTH, LATENCY)}),
        ("a fat tree of 8-port switches", {"network": fat_tree(8, BANDWIDTH, LATENCY)}),
        ("a dragonfly of 8 groups of 4 routers", {"network": dragonfly(8, 4, 4, BANDWIDTH, LATENCY)}),
    ]
    base: dict[str, Any] = {"step": STEP, "rates": rates, "network": network, "collective": "direct"}
    base["fidelity"] = "event-driven"
    return [{"changed": what} | compare_fusions(**(base | dict(change))) for what, change in changes]
