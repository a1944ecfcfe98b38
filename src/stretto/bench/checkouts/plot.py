"""The picture of `stretto bench checkouts`: each case's ratio with its confidence interval."""

import json
from pathlib import Path

from matplotlib.figure import Figure

from stretto.bench.plots import EXPOSED, OURS, PEER


def plot_checkouts(result: Path, picture: Path) -> None:
    """A line a case: the median of after / before and its interval; the bounds are dotted. Filling kernels in red."""
    data = json.loads(result.read_text())
    rows = data["rows"][::-1]
    figure = Figure(figsize=(8, 0.14 * len(rows) + 1.4), layout="constrained")
    panel = figure.add_subplot()
    for place, row in enumerate(rows):
        colour = EXPOSED if row["is_bounded"] else OURS
        panel.plot([row["low"], row["high"]], [place, place], color=colour, linewidth=1)
        panel.plot([row["ratio"]], [place], ".", color=colour, markersize=5)
    panel.axvline(1, color=PEER, linewidth=0.8)
    for bound in (1 - data["bound"], 1 + data["bound"]):
        panel.axvline(bound, color=PEER, linewidth=0.8, linestyle=":")
    panel.set_yticks(range(len(rows)), [row["case"] for row in rows], fontsize=5)
    panel.set_ylim(-1, len(rows))
    panel.set_xlabel("after / before (median, 95% interval); in red: kernels that fill the GPU and wait")
    figure.suptitle(f"{data['ranks']} ranks on one device, {data['machine']['devices']}, {data['date']}", fontsize=9)
    figure.savefig(picture, dpi=130)
