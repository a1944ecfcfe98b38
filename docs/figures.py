# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of the docs: `make docs-figures`."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

COLOURS = {(0, 0): "#9ecae1", (1, 0): "#fdae6b", (0, 1): "#a1d99b", (1, 1): "#bcbddc"}


def draw_matrix(axes: Axes, title: str, rows: tuple[str, str], columns: tuple[str, str], copies: str) -> None:
    """A matrix in 2 x 2 (or 4 x 2) blocks; each cell names the coordinates of the ranks that hold it."""
    row_axis, row_name = rows
    column_axis, column_name = columns
    is_weight = row_axis == "xz"
    count = 4 if is_weight else 2
    for row in range(count):
        for column in range(2):
            outer = row // 2 if is_weight else row
            height = 1 / count
            box = Rectangle((column / 2, 1 - (row + 1) * height), 0.5, height)
            box.set(facecolor=COLOURS[column, outer], edgecolor="white", linewidth=2)
            axes.add_patch(box)
            held_by = f"x={outer} z={row % 2}" if is_weight else f"{row_axis}={row}"
            axes.text(
                column / 2 + 0.25,
                1 - (row + 0.5) * height,
                f"{column_axis}={column}, {held_by}",
                ha="center",
                va="center",
                fontsize=9,
            )
    axes.set(xlim=(0, 1), ylim=(0, 1), xticks=[], yticks=[])
    axes.set_xlabel(column_name, fontsize=10)
    axes.set_ylabel(row_name, fontsize=10)
    axes.set_title(f"{title}\n{copies}", fontsize=10)
    axes.set_frame_on(False)


def draw_grid(path: Path) -> None:
    """How a colwise linear's input, weight and output lie on a grid of x=2, y=2, z=2."""
    figure = Figure(figsize=(10.5, 3.9), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    draw_matrix(left, "input", ("z", "batch: over z"), ("y", "in features: over y"), "the same on every x")
    draw_matrix(
        middle,
        "weight (as stored)",
        ("xz", "out features: over x, then rows over z"),
        ("y", "in features: over y"),
        "all-gathered over z before use",
    )
    draw_matrix(
        right,
        "output",
        ("z", "batch: over z"),
        ("x", "out features: over x"),
        "summed over y; the same on every y",
    )
    figure.suptitle("A colwise linear. The next one is rowwise: read x for y and y for x", fontsize=11)
    figure.savefig(path, dpi=130)


BLOCK_COLOURS = ("#9ecae1", "#4292c6", "#fdae6b", "#e6550d", "#a1d99b", "#41ab5d")


def draw_blocks(axes: Axes, title: str, held: list[list[int]]) -> None:
    """A row a rank: the blocks in its memory, in order; a gap between nodes."""
    for rank, blocks in enumerate(held):
        top = -rank - 0.6 * (rank // 2)
        for column, block in enumerate(blocks):
            box = Rectangle((column, top - 0.85), 0.92, 0.85)
            box.set(facecolor=BLOCK_COLOURS[block], edgecolor="none")
            axes.add_patch(box)
            axes.text(column + 0.46, top - 0.42, str(block), ha="center", va="center", fontsize=10)
    axes.set(xlim=(0, 6), ylim=(-7.3, 0.1), xticks=[], yticks=[])
    axes.set_title(title, fontsize=10)
    axes.set_frame_on(False)


def draw_two_level(path: Path) -> None:
    """What each of 3 nodes of 2 ranks holds after the phases of a two-level all-gather (Singh, figure 6.5)."""
    ranks = range(6)
    # on node n, slot i is of node n + i
    between = [[(rank + 2 * slot) % 6 for slot in range(3)] for rank in ranks]
    inside = [between[rank - rank % 2] + between[rank - rank % 2 + 1] for rank in ranks]
    figure = Figure(figsize=(11, 3.3), layout="constrained")
    panels = figure.subplots(1, 4, width_ratios=(2, 3, 5, 5))
    for panel, (title, held) in zip(
        panels,
        (
            ("at first", [[rank] for rank in ranks]),
            ("1. between nodes", between),
            ("2. inside nodes", inside),
            ("3. shuffled", [list(ranks) for _ in ranks]),
        ),
        strict=True,
    ):
        draw_blocks(panel, title, held)
        panel.set_xlim(0, max(2, len(held[0])))
    for rank in ranks:
        panels[0].text(-0.2, -rank - 0.6 * (rank // 2) - 0.42, f"rank {rank}", ha="right", va="center", fontsize=9)
    for node in range(3):
        panels[0].text(-1.9, -2.6 * node - 0.9, f"node {node}", ha="right", va="center", fontsize=9, weight="bold")
    figure.savefig(path, dpi=130)


def draw_fused_kernel(path: Path) -> None:
    """Chunks as rows, and one thread's elements as a column through all of them."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots()
    rows = ["in[0]", "in[1]", "mailbox of rank 1", "mailbox of rank 2", "out[0]", "out[1]"]
    for row, name in enumerate(rows):
        for column in range(16):
            colour = "#fdae6b" if column == 5 else "#e6eef5"
            box = Rectangle((column, -row), 0.94, 0.8)
            box.set(facecolor=colour, edgecolor="white")
            axes.add_patch(box)
        axes.text(-0.2, -row + 0.4, name, ha="right", va="center", fontsize=9)
    for above, below in ((0, 2), (2, 3), (3, 4)):
        arrow = {"arrowstyle": "->", "color": "#8c510a", "connectionstyle": "arc3,rad=0.35"}
        axes.annotate("", (5.5, -below + 0.6), (5.5, -above + 0.2), arrowprops=arrow)
    axes.text(5.5, 1.15, "element 5: one thread\nloads, sends, adds, stores", ha="center", fontsize=9)
    axes.text(12, 1.15, "other elements, other threads:\nno waits between them", ha="center", fontsize=9)
    axes.set(xlim=(-4, 16.2), ylim=(-5.3, 2.2), xticks=[], yticks=[])
    axes.set_frame_on(False)
    figure.savefig(path, dpi=120)


def draw_channels(path: Path) -> None:
    """Tiles that two ranks push, the channels that they signal, and the tiles that wait for these."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    parts = (  # place, width, title, (first row, number of rows, label) of each box
        (0, 3, "shard_tiles(48, 2, 16): they signal", [(16 * tile, 16, f"tile {tile}") for tile in range(6)]),
        (5, 2.4, "channels", [(0, 32, "0"), (32, 16, "1"), (48, 32, "2"), (80, 16, "3")]),
        (9.4, 3, "whole_tiles(48, 2, 32): they wait", [(32 * tile, 32, f"tile {tile}") for tile in range(3)]),
    )
    for left, width, title, boxes in parts:
        for low, rows, label in boxes:
            box = Rectangle((left, -low - rows + 1.5), width, rows - 3)
            box.set(facecolor="#9ecae1" if low + rows <= 48 else "#fdae6b" if low >= 48 else "#d9d9d9")
            axes.add_patch(box)
            axes.text(left + width / 2, -low - rows / 2, label, ha="center", va="center", fontsize=9)
        axes.text(left + width / 2, 5, title, ha="center", fontsize=9)
    arrow = {"arrowstyle": "->", "color": "#636363"}
    for tile, channel in enumerate((16, 16, 40, 64, 64, 88)):
        axes.annotate("", (4.9, -channel), (3.1, -16 * tile - 8), arrowprops=arrow)
    for channel, tile in ((16, 0), (40, 1), (64, 1), (64, 2), (88, 2)):
        axes.annotate("", (9.3, -32 * tile - 16), (7.5, -channel), arrowprops=arrow)
    for rank in range(2):
        axes.text(-0.3, -48 * rank - 24, f"rows of\nrank {rank}", ha="right", va="center", fontsize=9)
    axes.set(xlim=(-2, 12.6), ylim=(-97, 12), xticks=[], yticks=[])
    axes.set_frame_on(False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    draw_grid(Path(__file__).parent / "grid.png")
    draw_two_level(Path(__file__).parent / "two-level.png")
    draw_fused_kernel(Path(__file__).parent / "fused-kernel.png")
    draw_channels(Path(__file__).parent / "channels.png")
