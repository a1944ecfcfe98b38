# SPDX-License-Identifier: Apache-2.0
"""Pictures of the benches of training (`stretto bench train`, `overlap`, `chunks` ...), drawn from their JSON."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.pictures import describe_origin
from lab.style import PEER, drawing, name_bars
from stretto.report.style import STRETTO

_BAR = 0.24  # inches
_TERMS = {
    r"\b(data|x|y|z)=": "data, x, y, z: the sizes of Stretto's grid.",
    "FSDP2": "FSDP2: torch's fully sharded data parallelism.",
    "TP=": "TP: torch's tensor parallelism with DTensor.",
    "weights kept": "Weights kept: gathered once a step, and not again in the backward pass.",
    "bf16 reduction": "bf16 reduction: gradients are reduced in bf16, elsewhere in fp32.",
    "bf16 weights": "bf16 weights: with fp32 copies in the optimizer.",
    "autocast": "Autocast: torch.autocast over fp32 weights.",
    "async": "Async: torch's async tensor parallelism.",
    "sequence": "Sequence sharded: tokens are sharded over x between blocks.",
    "compiled": "Compiled: by torch.compile.",
    "captured": "Captured: a step is one CUDA graph.",
}
"""Explanations of words in runs' names, by pattern."""


def plot_train(data: dict[str, Any], picture: Path) -> None:
    """Draw tokens/s a GPU and peak memory of each run as bars, peers in another colour."""
    model = data["workload"]["model"]
    what = (
        f"Training a GPT on every grid: {model['layers']} layers, hidden {model['hidden']}, "
        f"sequence length {data['workload']['seq_len']}"
    )
    plot_runs(data, lambda row: "FSDP" in row["name"], what, picture)


def plot_runs(data: Mapping[str, Any], is_peer: Callable[[Mapping[str, Any]], bool], what: str, picture: Path) -> None:
    """Draw tokens/s a GPU and peak memory of each run as bars, peers in another colour."""
    rows = [row for row in data["rows"] if "tokens_per_second_per_gpu" in row][::-1]
    has_memory = any(row["peak_memory_gib"] for row in rows)
    with drawing(picture, 9, _BAR * len(rows) + 0.6) as drawn:
        panels = drawn.panels(1, 2 if has_memory else 1, sharey=True)[0]
        columns: list[tuple[str, list[float], str]] = [
            ("tokens/s a GPU", [row["tokens_per_second_per_gpu"] for row in rows], "{:,.0f}"),
            ("peak memory (GiB)", [row["peak_memory_gib"] or 0.0 for row in rows], "{:.0f}"),
        ]
        for panel, (title, values, form) in zip(panels, columns, strict=False):
            for label, look, is_drawn in (("Stretto", STRETTO, False), ("torch", PEER, True)):
                mine = [(place, values[place]) for place, row in enumerate(rows) if is_peer(row) == is_drawn]
                if mine:
                    bars = panel.barh(
                        [at for at, _ in mine], [value for _, value in mine], 0.75, label=label, **look.bar
                    )
                    drawn.label_bars(panel, bars, [form.format(value) for _, value in mine])
            panel.set_xlabel(title)
            panel.set_ylim(-0.6, len(rows) - 0.4)
            name_bars(panel, range(len(rows)), [row["name"].removeprefix("Stretto ") for row in rows])
        drawn.title = what
        drawn.subtitle = describe_origin(data)
        drawn.caption = _explain(data["rows"])


def _explain(rows: Sequence[Mapping[str, Any]]) -> str:
    """The terms in the names of the runs that are drawn, and why others have no bar."""
    names = " ".join(row["name"] for row in rows if "tokens_per_second_per_gpu" in row)
    sentences = [meaning for term, meaning in _TERMS.items() if re.search(term, names)]
    for error in dict.fromkeys(row.get("error") for row in rows if row.get("error")):
        count = sum(row.get("error") == error for row in rows)
        sentences.append(f"{count} more run{'s' if count > 1 else ''} could not be made: {error}.")
    return " ".join(sentences)
