# SPDX-License-Identifier: Apache-2.0
"""Pictures of the benches of training, drawn from their JSON."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mode
from typing import Any

from lab.pictures import describe_origin
from lab.training.ddp import split_kernels
from lab.training.throughput_plot import _BAR
from stretto.report.style import (
    EXPOSED,
    GUIDE,
    LIGHT,
    OTHER_PEER,
    PEER,
    SERIES,
    STRETTO,
    THIRD_PEER,
    Look,
    drawing,
    name_bars,
)
from stretto.train.observe.timeline import subtract


def plot_overlap(result: Path, picture: Path) -> None:
    """Draw a panel a grid: step time of each stage, with its exposed communication (if measured) hatched."""
    data = json.loads(result.read_text())
    rows = [row for row in data["rows"] if "step_milliseconds" in row]
    grids = list(dict.fromkeys(row["grid"] for row in rows))
    most = max((sum(row["grid"] == grid for row in rows) for grid in grids), default=1)
    has_exposed = any(row.get("exposed_milliseconds") for row in rows)
    with drawing(picture, max(6.0, 4.4 * len(grids)), _BAR * most + 0.9) as drawn:
        for panel, grid in zip(drawn.panels(1, len(grids))[0], grids, strict=False):
            stages = [row for row in rows if row["grid"] == grid][::-1]
            exposed = [row.get("exposed_milliseconds") or 0.0 for row in stages]
            rest = [row["step_milliseconds"] - part for row, part in zip(stages, exposed, strict=True)]
            places = range(len(stages))
            bars = panel.barh(places, rest, 0.75, label="computation, and what runs beside it", **STRETTO.bar)
            if has_exposed:
                bars = panel.barh(places, exposed, 0.75, left=rest, label="exposed communication", **EXPOSED.bar)
            drawn.label_bars(panel, bars, [f"{row['step_milliseconds']:,.0f}" for row in stages])
            name_bars(panel, places, [row["overlap"] for row in stages])
            panel.set_title(grid)
            panel.set_xlabel("ms a step")
        drawn.title = f"What overlap is worth: {data['model']}"
        drawn.subtitle = describe_origin(data)
        drawn.caption = "Each row switches on one more option of [overlap]." + (
            " Exposed: only communication runs." if has_exposed else ""
        )


def plot_dlrm(result: Path, picture: Path) -> None:
    """Draw the step time of each implementation as a bar, with the look-up and its all-to-all hatched."""
    data = json.loads(result.read_text())
    rows = [row for row in data["rows"] if "step_milliseconds" in row][::-1]
    names = {"library": "PyTorch's functions", "kernel": "Stretto's fused operator"}
    looks: tuple[Look, Look] = (STRETTO, EXPOSED)
    with drawing(picture, 8, 0.4 * len(rows) + 0.6) as drawn:
        panel = drawn.panels(1, 1)[0, 0]
        forward = [row["forward_milliseconds"] for row in rows]
        rest = [row["step_milliseconds"] - part for row, part in zip(rows, forward, strict=True)]
        panel.barh(range(len(rows)), rest, 0.7, label="the rest of the step", **looks[0].bar)
        bars = panel.barh(
            range(len(rows)), forward, 0.7, left=rest, label="forward look-up and all-to-all", **looks[1].bar
        )
        drawn.label_bars(panel, bars, [f"{row['step_milliseconds']:,.2f}" for row in rows])
        name_bars(panel, range(len(rows)), [names.get(row["name"], row["name"]) for row in rows])
        panel.set_xlabel("ms a training step")
        setting = data["setting"]
        tables = len(setting["model"]["rows"])
        drawn.title = f"A DLRM's training step: {tables} tables, global batch {setting['batch']:,}"
        drawn.subtitle = describe_origin(data)
        drawn.caption = (
            "The fused operator looks up and sends at once; its tables' optimizer is fused into the backward pass."
        )


def plot_ddp(result: Path, picture: Path) -> None:
    """Draw rank 0's kernels over a step of each checkout: a row for the model's and one for the all-reduces."""
    data = json.loads(result.read_text())
    kernels = data["kernels"]
    ends = [end for each in kernels.values() for _, _, end in each]
    with drawing(picture, 10, 1.1 * len(kernels)) as drawn:
        panels = drawn.panels(len(kernels), 1, sharex=True)[:, 0]
        for panel, (checkout, spans) in zip(panels, kernels.items(), strict=True):
            work, communication = split_kernels(spans)
            alone = subtract(communication, work)
            for place, (times, label, look) in enumerate(
                ((work, "computation", STRETTO), (subtract(communication, alone), "all-reduces beside it", PEER))
            ):
                if times:  # the legend only has drawn bars
                    panel.broken_barh(_bars(times), (place - 0.4, 0.8), color=look.colour, label=label)
            if alone:
                panel.broken_barh(
                    _bars(alone), (0.6, 0.8), color=EXPOSED.colour, hatch="//", edgecolor="white", linewidth=0,
                    label="all-reduces alone",
                )  # fmt: skip
            panel.set_yticks([0, 1], ["model", "buckets"])
            panel.set_ylim(1.6, -0.6)
            panel.grid(visible=False, axis="y")
            panel.set_xlim(0, max(ends) / 1e3)
            panel.set_title(checkout, loc="left")
        panels[-1].set_xlabel("ms since the step's first kernel, on rank 0")
        drawn.title = f"A step of DistributedDataParallel over Stretto's backend: {data['ranks']} ranks on one GPU"
        drawn.subtitle = describe_origin(data)


def plot_buckets(result: Path, picture: Path) -> None:
    """Draw the time of a step with state on the host, over the link's, against the size of buckets."""
    data = json.loads(result.read_text())
    rows = [row for row in data["rows"] if row["step_on"] == "device"]
    sets = mode(row["buffers"] for row in rows)  # of the lines; other rows are single points
    with drawing(picture, 7.5, 3.2) as drawn:
        panel = drawn.panels(1, 1)[0, 0]
        panel.axhline(1, **GUIDE)
        limits = {row["weights"]: row["limit_seconds"] for row in rows}
        for weights, look in zip(limits, SERIES, strict=False):
            mine = sorted((row["bucket"], row["ratio"]) for row in rows if _is_of(row, weights, sets))
            panel.plot(*zip(*mine, strict=True), label=f"{weights} fp32 weights, {_name_sets(sets)}", **look.line)
        others = sorted({(row["buffers"], row["weights"]) for row in rows if row["buffers"] != sets})
        for (count, weights), look in zip(others, SERIES[len(limits) :], strict=False):
            mine = [(row["bucket"], row["ratio"]) for row in rows if _is_of(row, weights, count)]
            points = look.line | {"linestyle": "", "markerfacecolor": "white", "markersize": 6}
            panel.plot(*zip(*mine, strict=True), label=f"{weights}, {_name_sets(count)}", **points)
        drawn.log_ticks(panel.xaxis, [row["bucket"] for row in rows])
        panel.set_xlabel("numbers of a bucket (millions)")
        panel.set_ylabel("step time / link time")
        drawn.title = "A step of AdamW with state on the host, beside the time that its bytes take on the link"
        drawn.subtitle = describe_origin(data)
        times = ", ".join(f"{seconds:.3f} s ({weights})" for weights, seconds in limits.items())
        drawn.caption = f"Link time: all bytes over the bandwidth of copies both ways at once, {times}." + "".join(
            f" Not drawn: step on the host ({row['weights']}, {row['bucket']} million), {row['seconds']:.2f} s a step."
            for row in data["rows"]
            if row["step_on"] == "host"
        )


def _bars(times: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(start / 1e3, (end - start) / 1e3) for start, end in times]


def _is_of(row: Mapping[str, Any], weights: str, sets: int) -> bool:
    return bool(row["weights"] == weights and row["buffers"] == sets)


def _name_sets(count: int) -> str:
    return f"{count} set{'s' if count > 1 else ''} of buffers"


def plot_pipeline(result: Path, picture: Path) -> None:
    """Draw a panel for each pipeline and latency: measured makespan and the timing model's, by schedule."""
    data = json.loads(result.read_text())
    keys = list(dict.fromkeys((row["stages"], row["micro_batches"], row["latency_ms"]) for row in data["rows"]))
    most = max(sum(_panel_of(row) == key for row in data["rows"]) for key in keys)
    unit = data["setting"]["unit"] * 1e3
    columns = min(2, len(keys))
    lines = -(-len(keys) // columns)
    with drawing(picture, 5.2 * columns, (1.2 + 0.3 * most) * lines) as drawn:
        panels = list(drawn.panels(lines, columns).flat)
        for panel in panels[len(keys) :]:
            panel.remove()
        for panel, key in zip(panels, keys, strict=False):
            rows = [row for row in data["rows"] if _panel_of(row) == key][::-1]
            places = range(len(rows))
            panel.barh(places, [row["units"] for row in rows], height=0.6, color=STRETTO.colour, label="measured")
            panel.scatter(
                [row["model_units"] for row in rows], places, label="timing model", color=PEER.colour, zorder=3
            )
            panel.set_yticks(places, [row["schedule"] for row in rows])
            panel.set_xlabel(f"units of {unit:g} ms")
            panel.set_title(f"{key[0]} x {key[1]}, {key[2]:g} ms")
        drawn.title = "A step in pipeline stages that sleep"
        drawn.subtitle = describe_origin(data)
        drawn.caption = (
            "Panels: stages x micro-batches, and the latency of messages. F, I and W of a stage take a unit of "
            f"{unit:g} ms each."
        )


def _panel_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["stages"], row["micro_batches"], row["latency_ms"]


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
