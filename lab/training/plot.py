# SPDX-License-Identifier: Apache-2.0
"""Pictures of the benches of training, drawn from their JSON."""

import json
from pathlib import Path

from stretto.bench.pictures import describe_origin
from stretto.report.style import (
    EXPOSED,
    LIGHT,
    OTHER_PEER,
    PEER,
    SERIES,
    STRETTO,
    THIRD_PEER,
    drawing,
    name_bars,
)


def plot_experts(result: Path, picture: Path) -> None:
    """Draw a step of each run as a bar of its parts, and next to it the savings relative to the baseline."""
    data = json.loads(result.read_text())
    rows = {(row["name"], row["part"]): row for row in data["rows"]}
    names = list(dict.fromkeys(row["name"] for row in data["rows"]))[::-1]
    parts = ("all-to-all", "all-reduce", "reduce-scatter, all-gather", "gradients, and all else")
    compared = [row for row in data["rows"] if row["published_saved"] is not None][::-1]
    with drawing(picture, 11, max(0.75 * len(names), 0.45 * len(compared)) + 0.6) as drawn:
        steps, saved = drawn.panels(1, 2, width_ratios=(3, 2))[0]
        lengths = [0.0] * len(names)
        looks = (EXPOSED, STRETTO, OTHER_PEER, SERIES[3])
        for part, look in zip(parts, looks, strict=True):
            times = [rows[name, part]["milliseconds"] / 1e3 for name in names]
            steps.barh(range(len(names)), times, 0.6, left=lengths, label=part, **look.bar)
            lengths = [length + more for length, more in zip(lengths, times, strict=True)]
        whole = [rows[name, "step"]["milliseconds"] / 1e3 for name in names]
        rest = [all_of_it - length for all_of_it, length in zip(whole, lengths, strict=True)]
        label = "computation, and waits for other ranks"
        bars = steps.barh(range(len(names)), rest, 0.6, left=lengths, label=label, **PEER.bar)
        drawn.label_bars(steps, bars, [f"{seconds:,.2f}" for seconds in whole])
        name_bars(steps, range(len(names)), names)
        steps.set_xlabel("seconds a step")
        places = range(len(compared))
        kinds = (
            ("published_saved", "published, figure 7.5", THIRD_PEER.bar),
            ("predicted_saved", "predicted here", {"facecolor": LIGHT}),
            ("saved", "measured here", SERIES[2].bar),
        )
        for turn, (key, label, bar) in enumerate(kinds):
            values = [100 * row[key] for row in compared]
            bars = saved.barh([place + 0.27 * (turn - 1) for place in places], values, 0.25, label=label, **bar)
            drawn.label_bars(saved, bars, [f"{value:.0f}" for value in values])
        name_bars(saved, places, [f"{row['part']}, {row['name']}" for row in compared])
        saved.set_xlabel("less time than the baseline (%)")
        setting = data["setting"]
        drawn.title = (
            f"A step of a mixture of experts on data={setting['data']} x={setting['x']} expert={setting['data']}"
        )
        drawn.subtitle = describe_origin(data)
        drawn.caption = (
            f"Links are made by waiting: {setting['node_link']:g} MB/s over x, {setting['link']:g} MB/s over all other "
            "axes. DTD: duplicate token dropping. CAC: communication-aware checkpointing. Figure 7.5 of Singh's "
            "dissertation: 6.7 billion parameters, 32 experts, 128 GPUs, x = 4."
        )
