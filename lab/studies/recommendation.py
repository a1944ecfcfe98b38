# SPDX-License-Identifier: Apache-2.0
"""`python -m lab simulated-dlrm`: section 4.4 of Punniyamurthy et al., a DLRM's step with fused look-up and all-to-all.

The paper's nodes and network (table 2); unstated parameters are varied. Its kernels' times on an MI210 are not
published: they are estimated from that GPU's datasheet, or measured on an H200. Nothing is fitted to the paper.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

from lab.pictures import draw_result
from lab.studies.settings import SimulatedDlrmSetting
from lab.tables import ANY_CPU, write_tables
from stretto.bench.harness import Column, print_table, write_result
from stretto.simulator.dlrm import (
    EXCHANGES,
    FIDELITIES,
    FUSIONS,
    KernelRates,
    RecommendationStep,
    find_kernels,
    simulate_recommendation,
)
from stretto.simulator.network import NetworkTopology
from stretto.simulator.network.shapes import dragonfly, fat_tree, ring, switch, torus

Row = dict[str, Any]

BANDWIDTH, LATENCY = 25e9, 700e-9  # 200 Gb/s a link and direction; table 2
SIZES = {128: (16, 8), 256: (16, 16), 512: (32, 16), 1024: (32, 32)}  # of the torus
PUBLISHED = 0.10  # forward pass fused, 128 nodes, "on average"
SLICES = 16  # of the message from a rank to another on 128 ranks; as many in total on more ranks
# Written before the study ran, from the load of the busiest link and the kernels' times: less time, forward and both.
PREDICTED: dict[tuple[str, str, str], tuple[float, float]] = {
    ("MI210", "direct", "closed-form"): (0.025, 0.025),
    ("MI210", "direct", "event-driven"): (0.13, 0.38),
    ("MI210", "by-dimension", "event-driven"): (0.20, 0.50),
    ("H200", "direct", "event-driven"): (0.048, 0.27),
}
PREDICTED_BY_RANKS = {128: (0.21, 0.50), 256: (0.265, 0.61), 512: (0.20, 0.47), 1024: (0.26, 0.58)}  # by dimension

TIMES = (
    Column("none_ms", "separate (ms)", "{:.2f}"),
    Column("forward_ms", "forward fused (ms)", "{:.2f}"),
    Column("both_ms", "both fused (ms)", "{:.2f}"),
    Column("forward_less", "forward: less time", "{:.1%}"),
    Column("both_less", "both: less time", "{:.1%}"),
)
FUSED = (
    Column("kernels", "kernels' times"),
    Column("collective", "all-to-all"),
    Column("fidelity", "fidelity"),
    Column("lookup_ms", "look-up (ms)", "{:.2f}"),
    Column("exposed_ms", "not computing (ms)", "{:.2f}"),
    *TIMES,
    Column("forward_predicted", "forward predicted", "{:.1%}"),
    Column("both_predicted", "both predicted", "{:.1%}"),
)
SHAPES = (
    Column("collective", "all-to-all"),
    Column("batch", "samples a rank"),
    Column("tables", "tables a rank"),
    *(column for column in TIMES if "both" not in column.key),
)
SCALE = (
    Column("ranks", "ranks"),
    Column("torus", "torus"),
    Column("fidelity", "fidelity"),
    *TIMES,
    Column("forward_predicted", "forward predicted", "{:.1%}"),
    Column("both_predicted", "both predicted", "{:.1%}"),
)
VARIED = (Column("changed", "what differs"), *TIMES)


def bench_simulated_dlrm(setting: SimulatedDlrmSetting, out: Path) -> dict[str, Any]:
    """Simulate all tables, print them, and write simulated-dlrm.json, .md and .png to `out`."""
    step = RecommendationStep(batch=setting.batch, tables=setting.tables)
    rates = [find_kernels(name) for name in setting.kernels]
    fused = [
        _compare(step, each, _torus(128), collective, fidelity)
        for each in rates
        for collective in EXCHANGES
        for fidelity in FIDELITIES
    ]
    shapes = [] if setting.is_quick else _vary_shapes(step, rates[0])
    scale = [
        _compare(step, rates[0], _torus(ranks), "by-dimension", fidelity, slices=SLICES * 128 // ranks)
        for ranks in setting.ranks
        for fidelity in FIDELITIES
    ]
    varied = [] if setting.is_quick else _vary_assumptions(step, rates[0])
    averages = [
        {
            "collective": collective,
            "forward_less": mean(row["forward_less"] for row in shapes if row["collective"] == collective),
            "published": PUBLISHED,
        }
        for collective in EXCHANGES
        if shapes
    ]
    means = (
        Column("collective", "all-to-all"),
        Column("forward_less", "forward: less time, mean", "{:.1%}"),
        Column("published", "published", "{:.0%}"),
    )
    tables = (
        ("128 nodes, 16 x 8 torus", FUSED, fused),
        ("Means over the shapes below, beside the paper's", means, averages),
        (f"Shapes that table 2 leaves open, {rates[0].name}, event-driven", SHAPES, shapes),
        (f"More nodes, {rates[0].name}, by-dimension, the same samples and tables a rank", SCALE, scale),
        (f"Other assumptions, {rates[0].name}, direct, event-driven, 128 ranks", VARIED, varied),
    )
    shown = [table for table in tables if table[2]]
    for title, columns, rows in shown:
        print_table(title, columns, rows)
    about = {
        "setting": asdict(setting),
        "step": asdict(step),
        "kernels": {each.name: asdict(each) for each in rates},
        "published": PUBLISHED,
        "averages": averages,
        "shapes": shapes,
        "scale": scale,
        "varied": varied,
    }
    path = write_result(out, "simulated-dlrm", FUSED, fused, machine=ANY_CPU, **about)
    write_tables(path, shown)
    draw_result(path)
    return {"rows": fused, "averages": averages, "shapes": shapes, "scale": scale, "varied": varied}


def _torus(ranks: int) -> NetworkTopology:
    return torus(SIZES[ranks], BANDWIDTH, LATENCY)


def _compare(
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


def _vary_shapes(step: RecommendationStep, rates: KernelRates) -> list[Row]:
    """Batches and tables, with fewer slices: only how much of the look-up is hidden depends on them."""
    return [
        _compare(
            replace(step, batch=batch, tables=tables),
            rates,
            _torus(128),
            collective,
            "event-driven",
            fusions=("none", "forward"),
            slices=SLICES // 2,
        )
        for collective in EXCHANGES
        for batch in (64, 256, 1024)
        for tables in (1, 4, 16)
    ]


def _vary_assumptions(step: RecommendationStep, rates: KernelRates) -> list[Row]:
    """The parameters that the paper does not state, changed one at a time."""
    half = replace(rates, lookup=rates.lookup / 2, memory=rates.memory / 2)
    slow = replace(rates, flops=rates.flops / 2, launch=4 * rates.launch)
    network = _torus(128)
    changes: list[tuple[str, Mapping[str, Any]]] = [
        ("nothing", {}),
        ("half the memory bandwidth", {"rates": half}),
        ("products and launches twice and four times as slow", {"rates": slow}),
        ("a bottom MLP of 1 layer", {"step": replace(step, bottom_layers=1)}),
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
    base: dict[str, Any] = {
        "step": step,
        "rates": rates,
        "network": network,
        "collective": "direct",
        "fidelity": "event-driven",
    }
    return [{"changed": what} | _compare(**(base | dict(change))) for what, change in changes]
