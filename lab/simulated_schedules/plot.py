# SPDX-License-Identifier: Apache-2.0
"""Pictures of the benches of simulated schedules, drawn from their JSON."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from lab.pictures import describe_origin
from stretto.bench.interleaved import name_size
from stretto.report.style import BLACK, GUIDE, SERIES, YELLOW, Look, Picture, drawing, plain_log

_PANELS = (
    ("2 and 4 H200", ("fused", "copy-engine", "interpreter", "nccl")),
    ("8 processes over shaped links", ("sockets", "two-level")),
)
_NAMES = {
    "fused": "one kernel, fused",
    "copy-engine": "copy engines",
    "interpreter": "one kernel, interpreted",
    "nccl": "NCCL",
    "sockets": "schedules over sockets",
    "two-level": "two-level collectives",
}


def plot_simulated_collectives(result: Path, picture: Path) -> None:
    """A panel a machine: simulated over measured time by size, of fitted sizes hollow and of the others filled."""
    data = json.loads(result.read_text())
    with drawing(picture, 9.5, 3.4) as drawn:
        panels = drawn.panels(1, 2, sharey=True)[0]
        looks = dict(zip(_NAMES, SERIES, strict=False))
        for panel, (title, executors) in zip(panels, _PANELS, strict=True):
            rows = [row for row in data["rows"] if row["executor"] in executors]
            for executor in executors:
                _plot_ratios(panel, [row for row in rows if row["executor"] == executor], executor, looks[executor])
            panel.axhline(1, **GUIDE)
            panel.axhspan(0.85, 1.15, color="#e4e4e4", zorder=0)
            panel.set_xscale("log", base=2)
            drawn.log_ticks(panel.xaxis, sorted({row["bytes"] for row in rows}), name_size)
            panel.set_xlabel("bytes of the larger buffer")
            panel.set_title(title)
        plain_log(panels[0].yaxis)
        panels[0].set_ylabel("simulated / measured time")
        drawn.title = "Simulated schedules beside measured ones"
        drawn.subtitle = describe_origin(data, simulated="the machines above the panels")
        drawn.caption = (
            "Hollow: sizes that the costs of protocols were fitted to; filled: the others. Grey: within 15%. "
            + " ".join(
                f"{group['group'][0].upper()}{group['group'][1:]}: median error of the other sizes "
                f"{group['others_median']:.1%}."
                for group in data["groups"]
                if group["group"].startswith("all")
            )
        )


def _plot_ratios(panel: Axes, rows: Sequence[Mapping[str, Any]], executor: str, look: Look) -> None:
    for use, face in (("fitted", "white"), ("predicted", look.colour)):
        chosen = [row for row in rows if row["use"] == use]
        if chosen:
            panel.plot(
                [row["bytes"] for row in chosen],
                [row["predicted_us"] / row["measured_us"] for row in chosen],
                linestyle="none",
                marker=look.marker,
                markersize=3.5,
                markerfacecolor=face,
                markeredgecolor=look.colour,
                label=_NAMES[executor] if use == "predicted" else None,
            )


_VARIANTS = dict(
    zip(("MSCCLang", "composed of NCCL calls", "NCCL", "r=1", "r=4", "r=12"), SERIES, strict=True),
    LL=Look(BLACK, "P", (0, (1, 1))),
    Simple=Look(YELLOW, "p", (0, (6, 1))),
)


def plot_simulated_msccl(result: Path, picture: Path) -> None:
    """A panel a study: speed-ups over size, a line a variant, and the paper's claim as a dashed line."""
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


def _plot_study(drawn: Picture, panel: Axes, study: str, rows: Sequence[Mapping[str, Any]]) -> None:
    for variant in dict.fromkeys(row["variant"] for row in rows):
        mine = [row for row in rows if row["variant"] == variant]
        look = _VARIANTS.get(variant, SERIES[0])
        panel.plot([row["bytes"] for row in mine], [row["speedup"] for row in mine], label=variant, **look.line)
    claims = {row["claim"] for row in rows if row["claim"] is not None}
    for claim in claims:
        panel.axhline(claim, linestyle=(0, (4, 2)), **GUIDE)
    panel.axhline(1, **GUIDE)
    panel.set_xscale("log", base=2)
    drawn.log_ticks(panel.xaxis, sorted({row["bytes"] for row in rows}), name_size)
    panel.set_title(study)
    panel.set_xlabel("bytes of the larger buffer")
    plain_log(panel.yaxis)
