# SPDX-License-Identifier: Apache-2.0
"""`python -m lab schedules`: message-driven order compared with 1F1B for units of unequal times, by the timing model.

Singh's argument for message-driven order (section 3.2.1) is that a stage computes any micro-batch that has arrived,
instead of the next one in a fixed order. The gain depends on the available memory: each order is compared with 1F1B at
equal memory (as many live micro-batches as there are stages), and at twice that. Every unit's time is multiplied by a
number drawn uniformly from [1 - jitter, 1 + jitter]; all orders have the same numbers.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

from lab.harness import Bench, column
from lab.pictures import describe_origin, select
from stretto.bench.settings import Option
from stretto.schedules import (
    PipelineTimeline,
    ServeFirst,
    StageCosts,
    StageLinks,
    build_schedule,
    simulate,
    simulate_message_driven,
)

PIPELINES = ((4, 16), (8, 32))  # stages, micro-batches
LATENCIES = (0.0, 0.25)  # of a message, in forward passes, of which a backward pass takes two
JITTERS = (0.0, 0.2, 0.5)
_MEMORY = {"equal": "live micro-batches as 1F1B", "twice": "twice as many"}


@dataclass(frozen=True)
class SchedulesSetting:
    """Settings of `python -m lab schedules`, which simulates pipelines."""

    seeds: Annotated[int, Option("Seeds of the jitter; medians are of these.", least=1)] = 200


@dataclass(frozen=True)
class Row:
    """An order's makespan, at one latency and jitter."""

    size: str = column("stages x micro-batches")
    latency: float = column("latency", "{:g}")
    jitter: float = column("jitter", "{:.0%}")
    order: str = column("order")
    memory: str = column("live micro-batches")
    live: float = column("of them on a rank", "{:g}")
    makespan: float = column("makespan (median)", "{:.2f}")
    to_1f1b: float = column("to plain 1F1B", "{:.3f}")


_FIRST = {"arrival": "in order of arrival", "backward": "backward first", "forward": "forward first"}

Simulation = Callable[..., PipelineTimeline]
"""Takes the links, and `jitter` and `seed` by name."""


def list_orders(stages: int, micro_batches: int) -> Iterator[tuple[str, str, Simulation]]:
    """Each order with its memory, "equal" to plain 1F1B's or "twice", and the function that simulates it."""
    costs = StageCosts.uniform(stages)
    orders = {
        ("1F1B", "equal"): build_schedule("1f1b", stages, micro_batches),
        ("ZB-H1", "equal"): build_schedule("zb-h1", stages, micro_batches),
        ("1F1B", "twice"): build_schedule("1f1b", stages, micro_batches, extra_warm_up=stages),
    }
    for (name, memory), schedule in orders.items():
        yield name, memory, partial(simulate, schedule, costs)
    for memory, limit in (("equal", stages), ("twice", 2 * stages)):
        for first in get_args(ServeFirst):
            run = partial(simulate_message_driven, micro_batches, costs, limit=limit, serve_first=first)
            yield f"message-driven, {_FIRST[first]}", memory, run


def compare_orders(setting: SchedulesSetting) -> Iterator[Row]:
    """Simulate every order of every pipeline."""
    for stages, micro_batches in PIPELINES:
        yield from _compare(stages, micro_batches, setting)


def _compare(stages: int, micro_batches: int, setting: SchedulesSetting) -> Iterator[Row]:
    orders = list(list_orders(stages, micro_batches))
    for latency in LATENCIES:
        links = StageLinks(latency)
        for jitter in JITTERS:
            seeds = range(setting.seeds if jitter else 1)
            plain = None
            for name, memory, run in orders:
                timelines = [run(links, jitter=jitter, seed=seed) for seed in seeds]
                makespan = statistics.median(timeline.makespan for timeline in timelines)
                plain = makespan if plain is None else plain
                yield Row(
                    size=f"{stages} x {micro_batches}",
                    latency=latency,
                    jitter=jitter,
                    order=name,
                    memory=memory,
                    live=statistics.median(max(each.live.ranks) for each in timelines),
                    makespan=makespan,
                    to_1f1b=makespan / plain,
                )


def plot_schedules(data: dict[str, Any], picture: Path) -> None:
    """Draw a row of panels for each size: a panel for each latency, at equal memory and at twice that."""
    from matplotlib.ticker import MaxNLocator

    from lab.style import drawing
    from stretto.report.style import GUIDE, SERIES

    sizes, latencies, memories, orders = (
        list(dict.fromkeys(row[key] for row in data["rows"])) for key in ("size", "latency", "memory", "order")
    )
    columns = [(latency, memory) for latency in latencies for memory in memories]
    with drawing(picture, max(6.0, 2.6 * len(columns)), 2.4 * len(sizes)) as drawn:
        panels = drawn.panels(len(sizes), len(columns), sharey="row", sharex=True)
        for across, size in zip(panels, sizes, strict=True):
            for panel, (latency, memory) in zip(across, columns, strict=True):
                panel.axhline(1, **GUIDE)
                for order, look in zip(orders, SERIES, strict=False):
                    rows = select(data["rows"], size=size, latency=latency, memory=memory, order=order)
                    jitters = [100 * row["jitter"] for row in rows]
                    if rows:
                        panel.plot(jitters, [row["to_1f1b"] for row in rows], label=order, **look.line)
                panel.set_title(f"{size}, latency {latency:g},\n{_MEMORY[memory]}")
            # The same ticks whatever the panel's height becomes.
            across[0].yaxis.set_major_locator(MaxNLocator(8, steps=[1, 5, 10]))
            across[0].set_ylabel("to plain 1F1B")
        for panel in panels[-1]:
            panel.set_xlabel("jitter of units (%)")
        drawn.title = "Makespans of pipelines whose units take unequal times, to that of plain 1F1B"
        drawn.subtitle = f"{describe_origin(data)}, by the timing model"
        drawn.caption = (
            f"Medians of {data['setting']['seeds']} seeds; lower is faster. Stages x micro-batches; F = 1, B = 2; "
            "latencies in forward passes."
        )


BENCH = Bench(
    "schedules",
    "Message-driven order compared with 1F1B for actions of unequal times, by the timing model of pipelines.",
    SchedulesSetting,
    compare_orders,
    Row,
    title="Orders of a pipeline, F = 1, B = 2",
    plot=plot_schedules,
)
