# SPDX-License-Identifier: Apache-2.0
"""`partition`: contiguous cuts of a model's blocks into stages, the costliest stage as cheap as can be."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise


def partition(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Cut a row of items into stages so that the largest cost of a stage is as small as possible.

    costs: of each item (a block), in any unit, at least 0.
    first, last: additional cost of the first and the last stage: a model's embedding and its head.

    Returns stages + 1 cuts from 0 to len(costs): stage s has the items cuts[s]:cuts[s + 1], at least one. The minimum
    is exact. Among cuts that reach it, each stage is as near to the mean of the remaining cost as possible.

    Raises ValueError for fewer items than stages, and for costs that are negative or not finite.
    """
    if not 1 <= stages <= len(costs):
        most = max(1, len(costs))
        raise ValueError(
            f"{len(costs)} items cannot be cut into {stages} stages, each with at least one; {most} would do"
        )
    named = [("first", first), ("last", last), *((f"costs[{place}]", cost) for place, cost in enumerate(costs))]
    for name, cost in named:
        if not 0 <= cost < float("inf"):
            raise ValueError(f"{name} is {cost}, but must be at least 0 and finite")
    padded = [*costs]
    padded[0] += first
    padded[-1] += last
    sums = [0.0, *accumulate(padded)]
    largest = _smallest_maximum(sums, stages)
    return _balanced_cuts(sums, stages, largest)


def _smallest_maximum(sums: list[float], stages: int) -> float:
    """The smallest cost that the costliest stage can have: bisection between costs that stages really have.

    sums: of the first 0, 1, ... items.
    """
    low = max(sums[-1] / stages, max(b - a for a, b in pairwise(sums)))
    high = sums[-1]
    while low < high:
        middle = low + (high - low) / 2
        middle = middle if middle < high else low  # neighbouring floats have none between them
        reached, needed = _fill(sums, stages, middle)
        if needed is None:
            if reached <= low or middle == low:
                return reached
            high = reached
        else:
            low = needed
    return _fill(sums, stages, high)[0]


def _fill(sums: list[float], stages: int, limit: float) -> tuple[float, float | None]:
    """Fill each stage up to a limit.

    Returns the largest cost of a stage and, if items are left over, the smallest limit with which a stage takes more.
    """
    start, largest, needed = 0, 0.0, float("inf")
    for _ in range(stages):
        end = _farthest(sums, start, limit)
        largest = max(largest, sums[end] - sums[start])
        if end == len(sums) - 1:
            return largest, None
        needed = min(needed, sums[end + 1] - sums[start])
        start = end
    return largest, needed


def _farthest(sums: list[float], start: int, limit: float) -> int:
    """The last end of a stage from `start` whose cost is within a limit."""
    end = bisect_right(sums, limit, lo=start, key=lambda value: value - sums[start]) - 1
    return max(start, end)


def _balanced_cuts(sums: list[float], stages: int, limit: float) -> tuple[int, ...]:
    """Cuts within a limit, each as near to the mean of what is left as the rest allows."""
    items = len(sums) - 1
    earliest = [items]  # the earliest cut from which the stages after it can take all items, from the last backwards
    for left in range(1, stages):
        end = earliest[-1]
        start = bisect_left(sums, -limit, hi=end, key=lambda value: value - sums[end])
        earliest.append(max(stages - left, start))
    cuts = [0]
    for left in range(stages - 1, 0, -1):
        start = cuts[-1]
        lowest = max(start + 1, earliest[left])
        highest = min(items - left, _farthest(sums, start, limit))
        wanted = sums[start] + (sums[-1] - sums[start]) / (left + 1)
        nearest = bisect_left(sums, wanted, lo=lowest, hi=highest)
        if nearest > lowest and wanted - sums[nearest - 1] <= sums[nearest] - wanted:
            nearest -= 1
        cuts.append(nearest)
    return (*cuts, items)
