# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of the docs: `make docs-figures`.

The timeline is drawn from timeline.json, which `python docs/figures.py runs/timeline/trace.json` takes from a trace.
"""

import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Polygon, Rectangle

from stretto.ops.attention.choice import AttentionProblem, predict
from stretto.ops.prediction import Speeds
from stretto.report.pipeline import plot_pipeline
from stretto.report.run import read_run
from stretto.report.style import (
    GREEN,
    GREY,
    GUIDE,
    INK,
    LIGHT,
    ORANGE,
    PURPLE,
    SKY,
    TEXT,
    VERMILION,
    drawing,
    tint,
)
from stretto.report.timeline import plot_timeline
from stretto.schedules import (
    SCHEDULES,
    StageCosts,
    StageLinks,
    build_schedule,
    simulate,
    simulate_message_driven,
)
from stretto.train.observe.timeline import Span, Timeline, TracedStep, read_timeline

FOLDER = Path(__file__).parent
ARROW = {"arrowstyle": "->", "color": INK}


def hide_frame(panel: Axes) -> None:
    """Leave only what is drawn into a panel: no spines, ticks and grid."""
    panel.set(xticks=[], yticks=[])
    panel.grid(visible=False)
    panel.spines[:].set_visible(False)


def draw_box(axes: Axes, left: float, bottom: float, size: tuple[float, float], colour: str, text: str = "") -> None:
    """A box with a text in its middle."""
    box = Rectangle((left, bottom), *size)
    box.set(facecolor=colour, edgecolor="white", linewidth=1.5)
    axes.add_patch(box)
    if text:
        axes.text(left + size[0] / 2, bottom + size[1] / 2, text, ha="center", va="center_baseline", fontsize=TEXT)


def draw_matrix(axes: Axes, title: str, rows: tuple[str, str], columns: tuple[str, str], copies: str) -> None:
    """A matrix in 2 x 2 (or 4 x 2) blocks; each cell names the coordinates of the ranks that hold it."""
    row_axis, row_name = rows
    column_axis, column_name = columns
    colours = {(0, 0): tint(SKY), (1, 0): tint(ORANGE), (0, 1): tint(GREEN), (1, 1): tint(PURPLE)}
    is_weight = row_axis == "xz"
    count = 4 if is_weight else 2
    for row in range(count):
        for column in range(2):
            outer = row // 2 if is_weight else row
            held_by = f"x={outer} z={row % 2}" if is_weight else f"{row_axis}={row}"
            draw_box(
                axes,
                column / 2,
                1 - (row + 1) / count,
                (0.5, 1 / count),
                colours[column, outer],
                f"{column_axis}={column}, {held_by}",
            )
    hide_frame(axes)
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel=column_name, ylabel=row_name, title=f"{title}\n{copies}")


def draw_grid(path: Path) -> None:
    """How a colwise linear's input, weight and output lie on a grid of x=2, y=2, z=2."""
    with drawing(path, 10, 3.4) as picture:
        left, middle, right = picture.panels(1, 3)[0]
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
        picture.title = "A colwise linear on a grid of x=2, y=2, z=2"
        picture.caption = (
            "A block names the ranks that hold it by their places on the axes. The next linear is rowwise: read x for "
            "y, and y for x."
        )


def draw_ranks(axes: Axes, title: str, held: dict[tuple[int, int], tuple[str, str]]) -> None:
    """A row for each rank of data and a column for each of x: what the rank holds, and its colour."""
    for (data, x), (text, colour) in held.items():
        draw_box(axes, x, -data - 1, (1, 1), colour, text)
    rows = 1 + max(data for data, _ in held)
    hide_frame(axes)
    axes.set(xlim=(0, 2), ylim=(-rows, 0), title=title)
    axes.set_xticks((0.5, 1.5), ("x=0", "x=1"))
    axes.set_yticks([-data - 0.5 for data in range(rows)], [f"data={data}" for data in range(rows)])
    axes.tick_params(length=0)


def draw_experts(path: Path) -> None:
    """Which rank of data=4, x=2, expert=2 holds what of a block with four experts."""
    places = [(data, x) for data in range(4) for x in range(2)]
    of_x, of_experts = (SKY, ORANGE), {(0, 0): SKY, (0, 1): ORANGE, (1, 0): GREEN, (1, 1): PURPLE}
    with drawing(path, 9, 3) as picture:
        left, right = picture.panels(1, 2)[0]
        dense = {(data, x): (f"heads of x={x}", tint(of_x[x])) for data, x in places}
        draw_ranks(left, "attention, and all else that is no expert:\nfour copies, over data", dense)
        experts = {
            (data, x): (f"experts {'0, 1' if data % 2 == 0 else '2, 3'}:\npart {x}", tint(of_experts[data % 2, x]))
            for data, x in places
        }
        draw_ranks(right, "experts: divided over expert=2, two copies,\nover what is left of data", experts)
        picture.title = "A block with four experts on eight ranks: data=4, x=2, expert=2"
        picture.caption = (
            "Boxes of one colour hold the same numbers, and sum their gradients. Tokens travel between the two rows of "
            "a pair, data=0 and 1, or 2 and 3, to the ranks that have their experts, and back."
        )


def draw_scores(axes: Axes, title: str, owners: list[int]) -> None:
    """The scores of a causal sequence in 8 chunks, whose queries are of `owners`, and each rank's part of them."""
    work = [0.0] * 4
    for row, rank in enumerate(owners):
        colour = (SKY, ORANGE, GREEN, PURPLE)[rank]
        draw_box(axes, 0, -row - 1, (row, 1), tint(colour))
        axes.add_patch(Polygon([(row, -row), (row, -row - 1), (row + 1, -row - 1)], facecolor=tint(colour)))
        axes.text(-0.2, -row - 0.5, f"rank {rank}", ha="right", va="center_baseline", fontsize=TEXT)
        work[rank] += (row + 0.5) / 32
    for rank, part in enumerate(work):
        axes.text(5.2, -0.5 - 0.8 * rank, f"rank {rank}: {part:.0%}", va="center_baseline", fontsize=TEXT)
    hide_frame(axes)
    axes.set(xlim=(-1.6, 8), ylim=(-8, 0), title=title, xlabel="keys")


def draw_context(path: Path) -> None:
    """Whose queries the chunks of a causal sequence are, contiguously and zig-zag, on four ranks."""
    with drawing(path, 8, 3.4) as picture:
        left, right = picture.panels(1, 2)[0]
        draw_scores(left, "contiguous", [0, 0, 1, 1, 2, 2, 3, 3])
        draw_scores(right, "zig-zag", [0, 1, 2, 3, 3, 2, 1, 0])
        picture.title = "Causal attention of four ranks: a sequence in 8 chunks, and each rank's part of the scores"
        picture.caption = (
            "A row is a chunk of queries, and what is coloured are the scores that its rank computes: those of keys "
            "before it. The keys of other ranks travel to it."
        )


def draw_blocks(axes: Axes, title: str, held: list[list[int]]) -> None:
    """A row a rank: the blocks in its memory, in order; a gap between nodes."""
    colours = (tint(SKY), SKY, tint(ORANGE), ORANGE, tint(GREEN), GREEN)
    for rank, blocks in enumerate(held):
        top = -rank - 0.6 * (rank // 2)
        for column, block in enumerate(blocks):
            draw_box(axes, column, top - 0.9, (1, 0.9), colours[block], str(block))
    hide_frame(axes)
    axes.set(ylim=(-7.3, 0.1), title=title)


def draw_two_level(path: Path) -> None:
    """What each of 3 nodes of 2 ranks holds after the phases of a two-level all-gather (Singh, figure 6.5)."""
    ranks = range(6)
    # on node n, slot i is of node n + i
    between = [[(rank + 2 * slot) % 6 for slot in range(3)] for rank in ranks]
    inside = [between[rank - rank % 2] + between[rank - rank % 2 + 1] for rank in ranks]
    phases = {
        "at first": [[rank] for rank in ranks],
        "1. between nodes": between,
        "2. inside nodes": inside,
        "3. shuffled": [list(ranks) for _ in ranks],
    }
    with drawing(path, 10, 3) as picture:
        panels = picture.panels(1, 4, width_ratios=(1.2, 3, 6, 6))[0]
        for panel, (title, held) in zip(panels, phases.items(), strict=True):
            draw_blocks(panel, title, held)
            panel.set_xlim(0, len(held[0]))
        names = [f"{f'node {rank // 2}, ' if rank % 2 == 0 else ''}rank {rank}" for rank in ranks]
        panels[0].set_yticks([-rank - 0.6 * (rank // 2) - 0.45 for rank in ranks], names)
        panels[0].tick_params(axis="y", length=0)
        picture.title = "A two-level all-gather on 3 nodes of 2 ranks: what each rank holds after each phase"
        picture.caption = (
            "A box is the block of the rank with its number, and blocks of one node have one colour. Only phase 1 "
            "crosses the network."
        )


def draw_put(path: Path) -> None:
    """The way of a slice from one rank's kernel to another's, in columns: two GPUs, two hosts, and the network."""
    size = (1.7, 0.8)
    boxes = (
        (0, 2, "kernel stores\ninto a slot", tint(ORANGE)),
        (0, 0, "and posts\na descriptor", tint(ORANGE)),
        (2.5, 2, "pinned slot", tint(SKY)),
        (2.5, 0, "FIFO, read\nby the proxy", tint(SKY)),
        (5, 1, "frame: number,\nbytes, signal", LIGHT),
        (7.5, 2, "pinned slot", tint(SKY)),
        (7.5, 0, "proxy counts up,\nin order", tint(SKY)),
        (10, 2, "kernel loads,\ngives the credit", tint(ORANGE)),
        (10, 0, "kernel waits for\nthe signal", tint(ORANGE)),
    )
    arrows = (
        ((1.7, 2.4), (2.5, 2.4)),
        ((1.7, 0.4), (2.5, 0.4)),
        ((4.2, 2.3), (5, 1.6)),
        ((4.2, 0.5), (5, 1.2)),
        ((6.7, 1.6), (7.5, 2.3)),
        ((6.7, 1.2), (7.5, 0.5)),
        ((9.2, 2.4), (10, 2.4)),
        ((9.2, 0.4), (10, 0.4)),
        ((10.85, 0.8), (10.85, 2)),
    )
    with drawing(path, 10, 2.6) as picture:
        axes = picture.panels(1, 1)[0, 0]
        for left, bottom, text, colour in boxes:
            draw_box(axes, left, bottom, size, colour, text)
        for start, end in arrows:
            axes.annotate("", end, start, arrowprops=ARROW)
        hide_frame(axes)
        axes.set(xlim=(-0.1, 11.8), ylim=(-0.1, 3.1))
        axes.set_xticks(
            [0.85, 3.35, 5.85, 8.35, 10.85],
            ["GPU of rank 0", "host of rank 0", "network", "host of rank 1", "GPU of rank 1"],
        )
        axes.set_yticks([])
        axes.tick_params(length=0)
        picture.title = "A put: the way of a slice from a kernel on one node to a kernel on another"
        picture.caption = (
            "The proxies are threads of the two processes. The descriptor comes after the bytes on the sending side, "
            "the signal on the receiving side; the network may deliver frames in any order. The credit goes back the "
            "same way, as a put of no bytes."
        )


def draw_fused_kernel(path: Path) -> None:
    """Chunks as rows, and one thread's elements as a column through all of them."""
    rows = ["in[0]", "in[1]", "mailbox of rank 1", "mailbox of rank 2", "out[0]", "out[1]"]
    with drawing(path, 8.5, 2.6) as picture:
        axes = picture.panels(1, 1)[0, 0]
        for row in range(len(rows)):
            for column in range(16):
                draw_box(axes, column, -row, (1, 0.86), tint(ORANGE) if column == 5 else "#e6eef5")
        for above, below in ((0, 2), (2, 3), (3, 4)):
            arrow = {"arrowstyle": "->", "color": VERMILION, "linewidth": 1.4, "connectionstyle": "arc3,rad=0.35"}
            axes.annotate("", (5.5, -below + 0.62), (5.5, -above + 0.24), arrowprops=arrow)
        hide_frame(axes)
        axes.set(xlim=(0, 16), ylim=(-5.1, 1))
        axes.set_yticks([-row + 0.43 for row in range(len(rows))], rows)
        axes.set_xticks([column + 0.5 for column in range(16)], [str(column) for column in range(16)])
        axes.tick_params(length=0)
        axes.set_xlabel("element of a chunk")
        picture.title = "The fused kernel: a thread owns one element of every chunk"
        picture.caption = (
            "A row is a chunk, or a mailbox in the memory of another rank. The thread of element 5 executes all of the "
            "rank's steps on it: loads, sends, adds and stores. Other elements belong to other threads, which do "
            "not wait for it."
        )


def draw_channels(path: Path) -> None:
    """Tiles that two ranks push, the channels that they signal, and the tiles that wait for these."""
    parts = (  # place, width, title, (first row, number of rows, label) of each box
        (0, 3, "tiles that signal:\nshard_tiles(48, 2, 16)", [(16 * tile, 16, f"tile {tile}") for tile in range(6)]),
        (5, 2.4, "channels", [(0, 32, "0"), (32, 16, "1"), (48, 32, "2"), (80, 16, "3")]),
        (9.4, 3, "tiles that wait:\nwhole_tiles(48, 2, 32)", [(32 * tile, 32, f"tile {tile}") for tile in range(3)]),
    )
    with drawing(path, 8.5, 3.4) as picture:
        axes = picture.panels(1, 1)[0, 0]
        for left, width, title, boxes in parts:
            for low, rows, label in boxes:
                colour = tint(SKY) if low + rows <= 48 else tint(ORANGE) if low >= 48 else "#d9d9d9"
                draw_box(axes, left, -low - rows + 1.5, (width, rows - 3), colour, label)
            axes.text(left + width / 2, 4, title, ha="center", va="bottom", fontsize=TEXT)
        for tile, channel in enumerate((16, 16, 40, 64, 64, 88)):
            axes.annotate("", (4.9, -channel), (3.1, -16 * tile - 8), arrowprops=ARROW)
        for channel, tile in ((16, 0), (40, 1), (64, 1), (64, 2), (88, 2)):
            axes.annotate("", (9.3, -32 * tile - 16), (7.5, -channel), arrowprops=ARROW)
        hide_frame(axes)
        axes.set(xlim=(-0.2, 12.6), ylim=(-97, 16))
        axes.set_yticks([-24, -72], ["rows of\nrank 0", "rows of\nrank 1"])
        axes.tick_params(length=0)
        picture.title = "From tiles to channels to tiles: two ranks of 48 rows"
        picture.caption = (
            "A channel is a group of rows with one signal. Grey: a tile with rows of both ranks, which waits for the "
            "channels of both."
        )


def draw_memory(path: Path) -> None:
    """A training step with `train.optimizer_state = "host"`: what lies where, and what runs when (Singh, 3.3)."""
    ends = {"forward": 3.0, "backward": 9.0, "step": 15.4, "next forward": 17.2}
    last = ends["next forward"]
    colours = (tint(SKY), tint(ORANGE), tint(GREEN))  # of chunks
    resident = tint(GREY, 0.3)
    fetched, updates, sums, num_sets = 1.0, 0.4, 3.0, 3
    with drawing(path, 10, 5.2) as picture:
        gpu, work, host = picture.panels(3, 1, sharex=True, height_ratios=(4.1, 4, 3))[:, 0]
        draw_box(gpu, 0, 3.2, (last, 0.8), resident)
        draw_box(gpu, 0, 2.4, (last, 0.8), resident)
        grown = [0, 0.9, 0, 0, 0.9 * (last - ends["step"]) / ends["forward"]]
        gpu.fill_between([0, *ends.values()], 1.3, [1.3 + each for each in grown], color=tint(PURPLE), linewidth=0)
        for number in range(num_sets):
            draw_box(gpu, 0, 0.8 - 0.4 * number, (last, 0.4), resident)
        for chunk, start in enumerate((5.0, 8.0, 11.0)):
            draw_box(work, start, 3, (sums, 0.9), colours[chunk], f"chunk {chunk}")
        draw_box(work, 0, 2, (ends["forward"], 0.9), tint(PURPLE), "forward")
        draw_box(work, ends["forward"], 2, (ends["backward"] - ends["forward"], 0.9), tint(PURPLE), "backward")
        draw_box(work, ends["step"], 2, (last - ends["step"], 0.9), tint(PURPLE), "forward")
        for bucket in range(6):
            colour, came = colours[bucket // 2], ends["backward"] + (bucket + 1) * fetched
            draw_box(work, came - fetched, 1, (fetched, 0.9), colour, str(bucket))
            draw_box(work, came, 2, (updates, 0.9), colour, str(bucket))
            draw_box(work, came + updates, 0, (fetched, 0.9), colour, str(bucket))
            held = (2 * fetched + updates, 0.4)
            draw_box(gpu, came - fetched, 0.8 - 0.4 * (bucket % num_sets), held, colour, str(bucket))
        draw_box(host, 0, 0.8, (last, 2.4), resident)
        draw_box(host, 0, 0, (last, 0.8), resident)
        middle = (ends["forward"] + ends["backward"]) / 2
        for panel, height, text in (
            (gpu, 3.6, "bf16: upper halves of the fp32 weights"),
            (gpu, 2.8, "bf16: of micro-batches, then of all ranks"),
            (host, 2, "fp32: AdamW's first and second moments"),
            (host, 0.4, "16 bits: lower halves of the fp32 weights"),
        ):
            panel.text(middle, height, text, ha="center", va="center_baseline", fontsize=TEXT)
        rows = {
            gpu: {"weights, 2 bytes": 3.6, "gradients, 2 bytes": 2.8, "activations": 1.75, "buffers, 10 bytes": 0.6},
            work: {"all-reduces": 3.45, "GPU": 2.45, "host to device": 1.45, "device to host": 0.45},
            host: {"moments, 8 bytes": 2, "lower halves, 2 bytes": 0.4},
        }
        for panel, title in ((gpu, "GPU memory"), (work, "what runs"), (host, "host memory")):
            hide_frame(panel)
            panel.set_title(title, loc="left", weight="bold")
            panel.set_yticks(list(rows[panel].values()), list(rows[panel]))
            panel.tick_params(length=0)
            for end in list(ends.values())[:-1]:
                panel.axvline(end, linestyle=(0, (2, 2)), zorder=0 if panel is work else 2, **GUIDE)
        gpu.set(xlim=(0, last), ylim=(-0.05, 4.05))
        work.set(ylim=(-0.05, 3.95))
        host.set(ylim=(-0.05, 3.25))
        starts = [0.0, *ends.values()]
        host.set_xticks([(start + end) / 2 for start, end in zip(starts, ends.values(), strict=False)], list(ends))
        picture.title = 'A training step with train.optimizer_state = "host": AdamW, bf16, split weights'
        picture.caption = (
            "A number is a bucket, and a colour a chunk of two buckets. While the GPU updates a bucket, the next one "
            "is fetched and the one before is returned. Without clipping and loss scale, chunk 0 is updated while "
            "later chunks are summed. Bytes: for each parameter of the rank, or of a bucket in each buffer. Times are "
            "not to scale."
        )


def draw_sparse(path: Path) -> None:
    """Bytes of state a parameter over sparsity, and where layouts break even with dense ones (Singh, section 4.1.4)."""
    sparsities = [number / 200 for number in range(200)]
    with drawing(path, 7, 3.2) as picture:
        panel = picture.panels(1, 1)[0, 0]
        for dense, text in ((20, "dense, of the paper: 20 bytes"), (16, "dense, of Stretto: 16 bytes")):
            panel.axhline(dense, **GUIDE)
            panel.text(0.995, dense + 0.2, text, ha="right", va="bottom", fontsize=TEXT)
        for of_left, rest, label, colour, style in (
            (24, 2, "the paper: 24 f + 2", VERMILION, "--"),
            (18, 2, "Stretto, int32: 18 f + 2", ORANGE, "-."),
            (14, 2 + 1 / 8 + 4 / 1024, "Stretto, bitmap: 14 f + 2.129", SKY, "-"),
        ):
            sizes = [of_left * (1 - sparsity) + rest for sparsity in sparsities]
            panel.plot(sparsities, sizes, label=label, color=colour, linestyle=style)
            even = 1 - ((20 if of_left == 24 else 16) - rest) / of_left
            panel.plot([even], [of_left * (1 - even) + rest], marker="o", color=colour)
        panel.set(xlim=(0, 1), ylim=(0, 27), xlabel="sparsity", ylabel="bytes a parameter")
        picture.title = "State of a pruned parameter with AdamW in bf16"
        picture.caption = "f is 1 - sparsity. Dots: as much as dense state takes."


def draw_long_context(path: Path) -> None:
    """Bytes and predicted time of attention over context, over the sequence's length."""
    ways = (("all_gather", "gather", SKY, "-"), ("ring", "ring", ORANGE, "--"), ("ulysses", "Ulysses", GREEN, "-."))
    lengths = [4096 << number for number in range(10)]
    calls = [
        AttentionProblem(1, 32, 8, length // 8, 128, 128, torch.bfloat16, True, None, False, 8) for length in lengths
    ]
    ticks = {"xticks": lengths[1::2], "xticklabels": [f"{length >> 10}k" for length in lengths[1::2]]}
    with drawing(path, 10, 3.2) as picture:
        sent, *times = picture.panels(1, 3)[0]
        for part, label, (colour, style) in (
            (0.75 * 7 * 2 * 8, "gather", (SKY, "-")),
            (7 / 8 * 2 * (32 + 8), "Ulysses", (GREEN, "-.")),
        ):
            sizes = [length / 8 * part * 128 * 2 / 1e6 for length in lengths]
            sent.plot(lengths, sizes, label=label, color=colour, linestyle=style)
        sent.set(xscale="log", yscale="log", xlabel="tokens of the sequence", ylabel="MB that a rank sends", **ticks)
        for panel, link in zip(times, (450e9, 50e9), strict=True):
            speeds = Speeds(132 * 1980e6 * 4096, 2 * 3201e6 * 6144 / 8, link)
            alone = [predict(call, "all_gather", speeds._replace(link=1e30, memory=1e30)) for call in calls]
            for way, label, colour, style in ways:
                over = [
                    100 * (predict(call, way, speeds) / least - 1) for call, least in zip(calls, alone, strict=True)
                ]
                panel.plot(lengths, over, label=label, color=colour, linestyle=style)
            panel.set(
                xscale="log",
                ylim=(0, 100),
                xlabel="tokens of the sequence",
                title=f"{link / 1e9:.0f} GB/s a GPU",
                **ticks,
            )
            panel.set(ylabel="% over an eighth of one GPU's time")
        picture.title = "A layer's attention forward: 8 ranks, 32 heads, 8 KV heads of 128, bf16, causal, zig-zag"
        picture.caption = "Times are predicted for H200, as calls choose by them. A ring sends as much as a gather, "
        picture.caption += "which holds 4 GiB of keys at 1024k."


def draw_timeline(path: Path) -> None:
    """The timeline of a run on CPU processes, from timeline.json."""
    content = json.loads((FOLDER / "timeline.json").read_text())
    timeline = Timeline(
        grid=content["grid"],
        rank=content["rank"],
        steps=tuple(TracedStep(**step) for step in content["steps"]),
        spans=tuple(Span(row, row, *part) for row, parts in content["busy"].items() for part in parts),
    )
    plot_timeline(timeline, path, origin=content["origin"])


def take_timeline(trace: Path) -> None:
    """Write timeline.json: of a run's trace, what a timeline draws, in seconds, and the run's device and date."""
    timeline = read_timeline(trace)
    content = {
        "origin": read_run(trace.parent).origin,
        "grid": timeline.grid,
        "rank": timeline.rank,
        "steps": [asdict(step) for step in timeline.steps],
        "busy": {row: [[round(start, 6), round(end, 6)] for start, end in timeline.busy(row)] for row in timeline.rows},
    }
    (FOLDER / "timeline.json").write_text(json.dumps(content) + "\n")


def draw_schedules(folder: Path) -> None:
    """The schedules of docs/collectives.md, by examples/collectives.py."""
    spec = importlib.util.spec_from_file_location("collectives", FOLDER.parent / "examples" / "collectives.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main(folder)


def draw_pipelines(folder: Path) -> None:
    """The schedules of docs/pipelines.md on four ranks: as `stretto pipeline show` draws them.

    A rank's part of the model takes 1 forward, and 2 backward, whatever number of stages it is cut into.
    """
    folder.mkdir(exist_ok=True)
    unit = "in forward passes of a rank's layers"
    for name in SCHEDULES:
        schedule = build_schedule(name, 4, 8)
        times = (1 / schedule.virtual_stages,) * 3
        plot_pipeline(
            simulate(schedule, StageCosts.uniform(schedule.stages, *times)), folder / f"{name}.png", unit=unit
        )
    costs, links = StageCosts.uniform(4), StageLinks(0.5)
    late = simulate(build_schedule("1f1b", 4, 12), costs, links)
    hidden = simulate(build_schedule("1f1b", 4, 12, extra_warm_up=3), costs, links)
    driven = simulate_message_driven(12, costs, links, limit=7)
    for timeline, name, title in (
        (late, "latency", "1F1B with a latency of half a forward pass"),
        (hidden, "extra-warm-up", "1F1B with its warm-up doubled, and the same latency"),
        (driven, "message-driven", "Message-driven order with a limit of 7, and the same latency"),
    ):
        plot_pipeline(timeline, folder / f"{name}.png", title, unit=unit)


def main() -> None:
    for trace in sys.argv[1:]:
        take_timeline(Path(trace))
    draw_grid(FOLDER / "grid.png")
    draw_experts(FOLDER / "experts.png")
    draw_context(FOLDER / "context.png")
    draw_two_level(FOLDER / "two-level.png")
    draw_put(FOLDER / "put.png")
    draw_fused_kernel(FOLDER / "fused-kernel.png")
    draw_channels(FOLDER / "channels.png")
    draw_memory(FOLDER / "memory.png")
    draw_sparse(FOLDER / "sparse.png")
    draw_long_context(FOLDER / "long-context.png")
    draw_timeline(FOLDER / "timeline.png")
    draw_schedules(FOLDER / "collectives")
    draw_pipelines(FOLDER / "pipelines")


if __name__ == "__main__":
    main()
