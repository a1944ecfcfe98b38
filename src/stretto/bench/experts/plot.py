# SPDX-License-Identifier: Apache-2.0
"""The picture of `stretto bench moe-demo`."""

import json
from pathlib import Path

from stretto.bench.pictures import describe_origin
from stretto.report.expert_plot import draw_loads
from stretto.report.style import SERIES, drawing


def plot_moe_demo(result: Path, picture: Path) -> None:
    """Draw the losses of all runs over steps, and the load of each block of those that have experts."""
    data = json.loads(result.read_text())
    curves = data["curves"]
    with drawing(picture, 7.5, 4.8) as drawn:
        losses, loads = drawn.panels(2, 1, sharex=True, height_ratios=(3, 2))[:, 0]
        for (name, curve), look in zip(curves.items(), SERIES, strict=False):
            steps = range(1, len(curve["loss"]) + 1)
            losses.plot(steps, curve["loss"], color=look.colour, linewidth=0.7, alpha=0.45)
            losses.plot(curve["evaluated"], curve["evaluation_loss"], label=f"{name}, held-out text", **look.line)
            if curve["load"]:
                draw_loads(loads, list(steps), curve["load"], [f"load of block {block}" for block in curve["blocks"]])
        losses.set_ylabel("loss (nats a byte)")
        loads.set_ylabel("load: max / mean")
        loads.set_xlabel("step")
        drawn.title = "A mixture of experts beside a dense model of the same FLOPs a token"
        drawn.subtitle = describe_origin(data)
        drawn.caption = (
            "Pale: the loss of each step's batch. Load: tokens of a block's fullest expert, as a multiple of the mean "
            "expert's; 1 is even."
        )
