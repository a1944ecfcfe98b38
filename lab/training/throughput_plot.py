# SPDX-License-Identifier: Apache-2.0
"""Picture of `stretto bench train`, drawn from its JSON."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.pictures import describe_origin
from lab.style import PEER, drawing, name_bars
from stretto.report.style import STRETTO

BAR = 0.24  # inches
_TERMS = (
    "data, x, y, z: the sizes of Stretto's grid. FSDP2: torch's fully sharded data parallelism. Weights kept: gathered "
    "once a step, and not again in the backward pass. Compiled: by torch.compile."
)


def plot_train(data: dict[str, Any], picture: Path) -> None:
    """Draw tokens/s a GPU and peak memory of each run as bars, peers in another colour."""
    model = data["workload"]["model"]
    rows = [row for row in data["rows"] if "tokens_per_second_per_gpu" in row][::-1]
    has_memory = any(row["peak_memory_gib"] for row in rows)
    with drawing(picture, 9, BAR * len(rows) + 0.6) as drawn:
        panels = drawn.panels(1, 2 if has_memory else 1, sharey=True)[0]
        columns: list[tuple[str, list[float], str]] = [
            ("tokens/s a GPU", [row["tokens_per_second_per_gpu"] for row in rows], "{:,.0f}"),
            ("peak memory (GiB)", [row["peak_memory_gib"] or 0.0 for row in rows], "{:.0f}"),
        ]
        for panel, (title, values, form) in zip(panels, columns, strict=False):
            for label, look, is_peer in (("Stretto", STRETTO, False), ("torch", PEER, True)):
                places = [place for place, row in enumerate(rows) if ("FSDP" in row["name"]) == is_peer]
                if places:
                    mine = [values[place] for place in places]
                    bars = panel.barh(places, mine, 0.75, label=label, **look.bar)
                    drawn.label_bars(panel, bars, [form.format(value) for value in mine])
            panel.set_xlabel(title)
            panel.set_ylim(-0.6, len(rows) - 0.4)
            name_bars(panel, range(len(rows)), [row["name"] for row in rows])
        drawn.title = (
            f"Training a GPT on every grid: {model['layers']} layers, hidden {model['hidden']}, "
            f"sequence length {data['workload']['seq_len']}"
        )
        drawn.subtitle = describe_origin(data)
        drawn.caption = " ".join([_TERMS, *_name_errors(data["rows"])])


def _name_errors(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why some runs have no bar."""
    errors = [row["error"] for row in rows if row.get("error")]
    return [
        f"{errors.count(error)} more run{'s' if errors.count(error) > 1 else ''} could not be made: {error}."
        for error in dict.fromkeys(errors)
    ]
