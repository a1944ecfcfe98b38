# SPDX-License-Identifier: Apache-2.0
"""The simulator's clock: calls functions at simulated times, in order of time, and at one time in order of insertion.

Events of the same time share a bucket, and the heap holds each time once. Where many ranks do the same, many events
fall on one time, so most insertions are an append to a list; where they do not, the heap compares floats alone.
"""

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

NANOSECONDS = 1e9  # a second
Event = tuple[Callable[..., object], tuple[Any, ...]]  # a function and its arguments


class EventQueue:
    """Events of a simulation. Times are nanoseconds (float), and the simulation begins at 0.

    `now` is the time of the event that runs, `processed` how many have run. An event is a function with its arguments,
    as for `loop.call_later` of asyncio.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.processed = 0
        self._times: list[float] = []
        self._buckets: dict[float, list[Event]] = {}

    def at(self, time: float, function: Callable[..., object], *arguments: Any) -> None:
        """Call `function(*arguments)` at a time in nanoseconds. ValueError for one that is past or not finite."""
        self.put(time, (function, arguments))

    def put(self, time: float, event: Event) -> None:
        """Insert an event as `at`, one that the caller keeps and inserts again and again."""
        buckets = self._buckets
        if time in buckets:
            buckets[time].append(event)
            return
        if not self.now <= time < math.inf:
            raise ValueError(f"an event at {time} ns: must be finite, and not before the present, {self.now} ns")
        buckets[time] = [event]
        heappush(self._times, time)

    def run(self) -> float:
        """Call all events, and those that they insert. Returns the time of the last in nanoseconds."""
        times, buckets = self._times, self._buckets
        while times:
            self.now = time = heappop(times)
            bucket = buckets.pop(time)  # what its events add to this time makes another bucket, which comes next
            for function, arguments in bucket:
                function(*arguments)
            self.processed += len(bucket)
        return self.now

    def __len__(self) -> int:
        """Number of events that are left."""
        return sum(map(len, self._buckets.values()))
