# SPDX-License-Identifier: Apache-2.0
"""Places a schedule's steps in columns and rows, and refuses what cannot be drawn. Imports no matplotlib."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from stretto.collectives.schedule import Schedule
from stretto.collectives.verifier.graph import Graph, build_graph, linear_order

MAX_ROWS = 256
MAX_STEPS = 20_000

Places = Mapping[int, tuple[int, int]]
"""The column and the row of each step, by the step's number."""


class ScheduleLayout(NamedTuple):
    """The picture of a schedule: its graph, (rank, thread block) of each row, columns, and the drawn steps' places."""

    schedule: Schedule
    graph: Graph
    rows: Mapping[tuple[int, int], int]
    columns: int
    places: Places


def lay_out(schedule: Schedule, file: Path, ranks: range | None = None) -> ScheduleLayout:
    """Lay out a schedule, or some ranks of it, for a picture in a PNG or SVG file.

    A step's column is the length of the longest path of steps before it. Raises ValueError for more than MAX_ROWS
    thread blocks or MAX_STEPS steps, for ranks that do not exist, for a schedule that cannot run to its end, and for
    another file format.
    """
    if file.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"a picture must be a .png or .svg file, not {file.name!r}")
    shown = range(schedule.collective.ranks) if ranks is None else ranks
    if not shown or shown[0] < 0 or shown[-1] >= schedule.collective.ranks:
        raise ValueError(f"the schedule has ranks 0 to {schedule.collective.ranks - 1}")
    graph, times = _times(schedule)
    rows = {
        (rank, block): row
        for row, (rank, block) in enumerate(
            (rank, block) for rank in shown for block in range(len(schedule.ranks[rank].thread_blocks))
        )
    }
    drawn = [number for number, (rank, block, _) in enumerate(graph.places) if (rank, block) in rows]
    if len(rows) > MAX_ROWS or len(drawn) > MAX_STEPS:
        raise ValueError(
            f"{len(rows)} thread blocks and {len(drawn)} steps are too many for a picture (at most {MAX_ROWS} and "
            f"{MAX_STEPS}): show fewer ranks"
        )
    columns = max((times[number] for number in drawn), default=0) + 1
    places = {number: (times[number], rows[graph.places[number][:2]]) for number in drawn}
    return ScheduleLayout(schedule, graph, rows, columns, places)


def _times(schedule: Schedule) -> tuple[Graph, list[int]]:
    """Build the schedule's graph, and compute the length of the longest path to each step."""
    errors: list[str] = []
    graph = build_graph(schedule, errors)
    order, left = linear_order(graph)
    if left or errors:
        why = errors[0] if errors else f"{graph.name(left[0])} never begins"
        raise ValueError(f"the schedule cannot run to its end: {why}")
    times = [0] * len(graph.steps)
    for number in order:
        times[number] = max((times[other] + 1 for other in graph.before(number)), default=0)
    return graph, times
