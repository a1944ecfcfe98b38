# SPDX-License-Identifier: Apache-2.0
"""Plots how evenly a mixture of experts spread tokens over its experts, by step and block."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from stretto.report.loss_plot import SMOOTHED_FROM, running_mean
from stretto.report.style import BLUE, GREY, GUIDE, SERIES, STRETTO, VERMILION, drawing


@dataclass(frozen=True)
class RoutingHistory:
    """Statistics of a run's routers, step by step. Each list has a number for each of `blocks` in each step.

    loads: the fullest expert's tokens, as a multiple of the mean. dropped: choices that found no slot. bias_ranges: the
    largest bias minus the smallest.
    """

    blocks: Sequence[int]
    steps: Sequence[int]
    loads: Sequence[Sequence[float]]
    dropped: Sequence[Sequence[int]]
    bias_ranges: Sequence[Sequence[float]]


def plot_experts(history: RoutingHistory, file: Path, *, origin: str = "") -> None:
    """Plot loads over steps into a PNG, and dropped tokens and ranges of biases where there are any.

    origin: the machine and the date.
    """
    more = {
        "dropped choices": np.asarray(history.dropped, dtype=np.float64),
        "bias, max - min": np.asarray(history.bias_ranges, dtype=np.float64),
    }
    shown = {name: values for name, values in more.items() if (values > 0).any()}
    heights = (3, *(1.2 for _ in shown))
    with drawing(file, 7.5, 1.1 * sum(heights)) as picture:
        panels = picture.panels(len(heights), 1, sharex=True, height_ratios=heights)[:, 0]
        draw_loads(panels[0], history.steps, history.loads, [f"block {number}" for number in history.blocks])
        panels[0].set_ylabel("load: max / mean")
        for panel, (name, values) in zip(panels[1:], shown.items(), strict=True):
            _draw_curves(panel, history.steps, values, {})
            panel.set_ylabel(name)
            panel.set_ylim(bottom=0)
        panels[-1].set_xlabel("step")
        panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        picture.subtitle = origin
        picture.title = "Load of the fullest expert in each block, as a multiple of the mean expert's"
        picture.caption = "1: all experts of a block get equally many tokens."
        if len(history.steps) >= SMOOTHED_FROM:
            picture.caption += " Lines are running means over a fiftieth of the curve."


def draw_loads(panel: Axes, steps: Sequence[int], loads: Sequence[Sequence[float]], names: Sequence[str]) -> None:
    """Draw a line for each block; of more blocks than there are looks, the mean and the highest over pale lines."""
    values = np.asarray(loads, dtype=np.float64)
    panel.axhline(1.0, **GUIDE)
    if len(names) <= len(SERIES):
        _draw_curves(panel, steps, values, dict(enumerate(names)))
    else:
        for block in range(len(names)):
            panel.plot(steps, _smooth(values[:, block]), color=GREY, linewidth=0.5, alpha=0.4)
        panel.plot(steps, _smooth(values.mean(1)), color=BLUE, label="mean of the blocks")
        panel.plot(steps, _smooth(values.max(1)), color=VERMILION, linestyle="--", label="highest of a block")
    panel.set_ylim(bottom=0.9)


def _draw_curves(panel: Axes, steps: Sequence[int], values: NDArray[np.float64], names: Mapping[int, str]) -> None:
    for block in range(values.shape[1]):
        look = SERIES[block] if values.shape[1] <= len(SERIES) else STRETTO
        marker = look.marker if len(steps) == 1 else None
        line = look.line | {"marker": marker, "linewidth": 1.2}
        panel.plot(steps, _smooth(values[:, block]), label=names.get(block), **line)


def _smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return running_mean(values) if len(values) >= SMOOTHED_FROM else values
