# SPDX-License-Identifier: Apache-2.0
"""Plots the loss by step of one or several runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

# Distinguishable with colour blindness, and by line width: later curves are drawn over earlier ones.
COLOURS = ("#1f5fa8", "#d8731f", "#3a8a4d", "#8f4a9e", "#7a6a58")
SMOOTHED_FROM = 200  # steps: below, each step's loss is clear enough by itself

Curve = tuple[Sequence[int], Sequence[float]]


def plot_loss(curves: Mapping[str, Curve], file: Path, *, unit: str = "token") -> None:
    """Plot losses (nats per token or other unit) over steps into a PNG. curves: {name: (steps, losses)}.

    Long curves are drawn with a running mean. Two curves get a second panel with their difference. Raises ValueError
    when there is no curve.
    """
    if not curves:
        raise ValueError("there is no curve to draw: give at least one")
    # Figure is used without pyplot, which needs no window system and has no global state.
    figure = Figure(figsize=(7.2, 5.4 if len(curves) == 2 else 4.2), dpi=150, layout="constrained")
    if len(curves) == 2:
        axes, difference = figure.subplots(2, sharex=True, height_ratios=(3, 1))
        _draw_difference(difference, *curves.values())
    else:
        axes = difference = figure.subplots()
    for number, (name, curve) in enumerate(curves.items()):
        _draw(axes, name, curve, COLOURS[number % len(COLOURS)], is_under=number == 0 and len(curves) > 1)
    axes.set_ylabel(f"loss (nats a {unit})")
    axes.legend(frameon=False)
    difference.set_xlabel("step")
    difference.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    for each in figure.axes:
        each.grid(color="#e4e4e4", linewidth=0.6)
        each.spines[["top", "right"]].set_visible(False)
        each.set_axisbelow(True)
    figure.savefig(file)


def _draw(axes: Axes, name: str, curve: Curve, colour: str, *, is_under: bool) -> None:
    steps, losses = np.asarray(curve[0]), np.asarray(curve[1])
    width = 4.0 if is_under else 1.6
    marker = "o" if len(steps) == 1 else None
    if len(steps) < SMOOTHED_FROM:
        axes.plot(steps, losses, color=colour, linewidth=width, marker=marker, alpha=0.5 if is_under else 1, label=name)
        return
    axes.plot(steps, losses, color=colour, linewidth=0.6, alpha=0.25)
    axes.plot(steps, running_mean(losses), color=colour, linewidth=width, alpha=0.5 if is_under else 1, label=name)


def _draw_difference(axes: Axes, one: Curve, other: Curve) -> None:
    """Plot the absolute difference on a logarithmic scale, at the steps that both curves have."""
    others = dict(zip(*other, strict=True))
    steps = [step for step in one[0] if step in others]
    losses = dict(zip(*one, strict=True))
    sizes = np.array([abs(losses[step] - others[step]) for step in steps])
    axes.set_ylabel("|difference|")
    if (sizes > 0).any():  # a logarithmic scale has no zero
        axes.semilogy(steps, np.where(sizes > 0, sizes, np.nan), ".", color="#555555", markersize=4)


def running_mean(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Average each value with its neighbours, up to a hundredth of the curve on either side, fewer at the ends."""
    at = np.arange(len(losses))
    # The same number on both sides: otherwise a steep start would be drawn too high.
    reach = np.minimum(max(1, len(losses) // 100), np.minimum(at, at[::-1]))
    sums = np.concatenate(([0.0], np.cumsum(losses)))
    return (sums[at + reach + 1] - sums[at - reach]) / (2 * reach + 1)
