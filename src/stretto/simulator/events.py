# SPDX-License-Identifier: Apache-2.0
"""The simulator's clock: calls functions at simulated times, in order of time, and at one time in order of insertion.

Events of the same time share a bucket, and the heap holds each time once. Where many ranks do the same, many events
fall on one time, so most insertions are an append to a list; where they do not, the heap compares floats alone.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

NANOSECONDS = 1e9  # a second


class EventQueue:
    """Events of a simulation. Times are nanoseconds (float), and the simulation begins at 0.

    `now` is the time of the event that runs, `processed` how many have run. An event is a function with its arguments,
    as for `loop.call_later` of asyncio.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.processed = 0
        self._times: list[float] = []
        self._buckets: dict[float, list[tuple[Callable[..., object], tuple[Any, ...]]]] = {}

    def at(self, time: float, function: Callable[..., object], *arguments: Any) -> None:
        """Call `function(*arguments)` at a time in nanoseconds. ValueError for a time that has passed, and for NaN."""
        bucket = self._buckets.get(time)
        if bucket is not None:
            bucket.append((function, arguments))
            return
        if not time >= self.now:
            raise ValueError(f"an event at {time} ns is before the present, {self.now} ns; {self.now} ns would do")
        self._buckets[time] = [(function, arguments)]
        heappush(self._times, time)

    def run(self) -> float:
        """Call all events, and those that they insert. Returns the time of the last in nanoseconds."""
        times, buckets = self._times, self._buckets
        while times:
            self.now = time = times[0]
            bucket = buckets[time]
            for function, arguments in bucket:  # a list may grow while it is iterated: an event may add to its own time
                function(*arguments)
            heappop(times)  # after the bucket, so that events of this time find it, not a new one
            del buckets[time]
            self.processed += len(bucket)
        return self.now

    @property
    def next_time(self) -> float | None:
        """When the next event runs, in nanoseconds; None if there is none."""
        return self._times[0] if self._times else None

    def __len__(self) -> int:
        """How many events are left."""
        return sum(map(len, self._buckets.values()))
