# SPDX-License-Identifier: Apache-2.0
"""`python -m lab schedules`: message-driven order compared with 1F1B for units of unequal times, by the timing model.

Singh's argument for message-driven order (section 3.2.1) is that a stage computes any micro-batch that has arrived,
instead of the next one in a fixed order. The gain depends on the available memory: each order is compared with 1F1B at
equal memory (as many live micro-batches as there are stages), and at twice that. Every unit's time is multiplied by a
number drawn uniformly from [1 - jitter, 1 + jitter]; all orders have the same numbers.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from lab.planning.settings import SchedulesSetting
from stretto.bench.harness import Column, print_table, write_result
from stretto.bench.pictures import draw_result
from stretto.schedules import (
    PipelineTimeline,
    ServeFirst,
    StageCosts,
    StageLinks,
    build_schedule,
    simulate,
    simulate_message_driven,
)

COLUMNS = (
    Column("size", "stages x micro-batches"),
    Column("latency", "latency", "{:g}"),
    Column("jitter", "jitter", "{:.0%}"),
    Column("order", "order"),
    Column("memory", "live micro-batches"),
    Column("live", "of them on a rank", "{:g}"),
    Column("makespan", "makespan (median)", "{:.2f}"),
    Column("to_1f1b", "to plain 1F1B", "{:.3f}"),
)

_FIRST = {"arrival": "in order of arrival", "backward": "backward first", "forward": "forward first"}

Simulation = Callable[[StageLinks, float, int], PipelineTimeline]


def bench_schedules(setting: SchedulesSetting, out: Path) -> list[dict[str, Any]]:
    """Simulate every order, print the table, and write schedules.json, .md and .png to `out`."""
    rows = [row for size in setting.pipelines() for row in _compare(*size, setting)]
    print_table("Orders of a pipeline, F = 1, B = 2", COLUMNS, rows)
    draw_result(write_result(out, "schedules", COLUMNS, rows, setting=asdict(setting)))
    return rows


def list_orders(stages: int, micro_batches: int) -> Iterator[tuple[str, str, Simulation]]:
    """Each order with its memory, "equal" to plain 1F1B's or "twice", and the function that simulates it."""
    costs = StageCosts.uniform(stages)
    orders = {
        ("1F1B", "equal"): build_schedule("1f1b", stages, micro_batches),
        ("ZB-H1", "equal"): build_schedule("zb-h1", stages, micro_batches),
        ("1F1B", "twice"): build_schedule("1f1b", stages, micro_batches, extra_warm_up=stages),
    }
    for (name, memory), schedule in orders.items():

        def run(links: StageLinks, jitter: float, seed: int, schedule: Any = schedule) -> PipelineTimeline:
            return simulate(schedule, costs, links, jitter=jitter, seed=seed)

        yield name, memory, run
    for memory, limit in (("equal", stages), ("twice", 2 * stages)):
        for first in get_args(ServeFirst):

            def drive(
                links: StageLinks, jitter: float, seed: int, limit: int = limit, first: ServeFirst = first
            ) -> PipelineTimeline:
                return simulate_message_driven(
                    micro_batches, costs, links, limit=limit, serve_first=first, jitter=jitter, seed=seed
                )

            yield f"message-driven, {_FIRST[first]}", memory, drive


def _compare(stages: int, micro_batches: int, setting: SchedulesSetting) -> Iterator[dict[str, Any]]:
    orders = list(list_orders(stages, micro_batches))
    for latency in setting.latencies:
        links = StageLinks(latency)
        for jitter in setting.jitters:
            seeds = range(setting.seeds if jitter else 1)
            plain = None
            for name, memory, run in orders:
                timelines = [run(links, jitter, seed) for seed in seeds]
                makespan = statistics.median(timeline.makespan for timeline in timelines)
                plain = makespan if plain is None else plain
                yield {
                    "size": f"{stages} x {micro_batches}",
                    "latency": latency,
                    "jitter": jitter,
                    "order": name,
                    "memory": memory,
                    "live": statistics.median(max(each.live.ranks) for each in timelines),
                    "makespan": makespan,
                    "to_1f1b": makespan / plain,
                }
