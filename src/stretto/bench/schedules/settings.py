# SPDX-License-Identifier: Apache-2.0
"""Settings of `stretto bench schedules`."""

import re
from dataclasses import dataclass
from typing import Annotated

from stretto.bench.settings import Option, require_least

MOST_UNITS = 1 << 16  # of a schedule


@dataclass(frozen=True)
class SchedulesSetting:
    """Which pipelines are simulated. Times are in units of a forward pass; a backward pass takes 2.

    Raises ValueError for sizes and times that make no sense.
    """

    sizes: Annotated[tuple[str, ...], Option("Stages x micro-batches.", separator=" ")] = ("4x16", "8x32")
    latencies: Annotated[tuple[float, ...], Option("Latencies of a message, in forward passes.")] = (0.0, 0.25)
    jitters: Annotated[tuple[float, ...], Option("How much the time of a unit varies: 0.2 is 20%.")] = (0.0, 0.2, 0.5)
    seeds: Annotated[int, Option("Seeds of the jitter; medians are of these.")] = 200

    def __post_init__(self) -> None:
        self.pipelines()
        require_least(1, seeds=self.seeds)
        require_least(0, **{f"--latencies {value:g}": value for value in self.latencies})
        for jitter in self.jitters:
            if not 0 <= jitter <= 1:
                raise ValueError(f"--jitters has {jitter:g}, but jitter is from 0 to 1")

    def pipelines(self) -> list[tuple[int, int]]:
        """Stages and micro-batches of each size. Raises ValueError for a text that is no size."""
        found = []
        for text in self.sizes:
            size = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text)
            if size is None:
                raise ValueError(f"--sizes has {text!r}, but a size is stages x micro-batches, such as 4x16")
            stages, micro_batches = int(size[1]), int(size[2])
            if stages < 2 or stages * micro_batches > MOST_UNITS:
                raise ValueError(
                    f"--sizes has {text!r}, but a pipeline has at least 2 stages, and here at most {MOST_UNITS} "
                    "micro-batches of all stages"
                )
            found.append((stages, micro_batches))
        return found
