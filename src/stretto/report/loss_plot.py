# SPDX-License-Identifier: Apache-2.0
"""Plots the loss by step of one or several runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from stretto.report.style import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, VERMILION, drawing

SMOOTHED_FROM = 200  # steps: below, each step's loss is clear enough without smoothing

# The first of several curves is drawn wide and pale, so that a curve which covers it does not hide it.
_UNDER, _COLOURS, _ALONE = SKY, (VERMILION, GREEN, PURPLE, ORANGE), BLUE
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (5, 1.5, 1, 1.5)))

Curve = tuple[Sequence[int], Sequence[float]]


def plot_loss(curves: Mapping[str, Curve], file: Path, *, unit: str = "token", origin: str = "") -> None:
    """Plot losses (nats per token or other unit) over steps into a PNG. curves: {name: (steps, losses)}.

    origin: the machine and the date. Long curves are drawn with a running mean. Two curves get a second panel with
    their difference. Raises ValueError when there is no curve.
    """
    if not curves:
        raise ValueError("there is no curve to draw: give at least one")
    with drawing(file, 7.5, 4.8 if len(curves) == 2 else 3.6) as picture:
        if len(curves) == 2:
            axes, difference = picture.panels(2, 1, sharex=True, height_ratios=(3, 1))[:, 0]
            _draw_difference(difference, *curves.values())
        else:
            axes = difference = picture.panels(1, 1)[0, 0]
        for number, (name, curve) in enumerate(curves.items()):
            _draw(axes, name, curve, number, len(curves))
        axes.set_ylabel(f"loss (nats a {unit})")
        difference.set_xlabel("step")
        difference.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        picture.title = f"Training loss: the mean over the {unit}s of each step's batch"
        picture.subtitle = origin
        if any(len(steps) >= SMOOTHED_FROM for steps, _ in curves.values()):
            picture.caption = "Pale: each step. Strong: a running mean over a fiftieth of the curve."


def _draw(axes: Axes, name: str, curve: Curve, number: int, count: int) -> None:
    steps, losses = np.asarray(curve[0]), np.asarray(curve[1])
    is_under = number == 0 and count > 1
    colour = _ALONE if count == 1 else _UNDER if is_under else _COLOURS[(number - 1) % len(_COLOURS)]
    width = 5.0 if is_under else 1.4
    dashes = "-" if is_under else _DASHES[max(0, number - 1) % len(_DASHES)]
    marker = "o" if len(steps) == 1 else None
    strong = losses
    if len(steps) >= SMOOTHED_FROM:
        axes.plot(steps, losses, color=colour, linewidth=0.6, alpha=0.3)
        strong = running_mean(losses)
    axes.plot(steps, strong, color=colour, linewidth=width, linestyle=dashes, marker=marker, label=name)


def _draw_difference(axes: Axes, one: Curve, other: Curve) -> None:
    """Plot the absolute difference on a logarithmic scale, at the steps that both curves have."""
    others = dict(zip(*other, strict=True))
    steps = [step for step in one[0] if step in others]
    losses = dict(zip(*one, strict=True))
    sizes = np.array([abs(losses[step] - others[step]) for step in steps])
    axes.set_ylabel("|difference|")
    if (sizes > 0).any():  # a logarithmic scale has no zero
        axes.semilogy(steps, np.where(sizes > 0, sizes, np.nan), ".", color=INK, markersize=4)


def running_mean(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Average each value with its neighbours, up to a hundredth of the curve on either side, fewer at the ends."""
    at = np.arange(len(losses))
    # The same number on both sides: otherwise a steep start would be drawn too high.
    reach = np.minimum(max(1, len(losses) // 100), np.minimum(at, at[::-1]))
    sums = np.concatenate(([0.0], np.cumsum(losses)))
    return (sums[at + reach + 1] - sums[at - reach]) / (2 * reach + 1)
