"""Sets of moments, as sorted intervals that do not touch: what is busy when, and what is left of it."""

from collections.abc import Iterable

Interval = tuple[float, float]  # from, to; half-open, so that neighbours do not overlap
Intervals = tuple[Interval, ...]


def merge(intervals: Iterable[Interval]) -> Intervals:
    """The moments that are in any of the intervals, which may overlap and come in any order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return tuple(merged)


def subtract(busy: Intervals, other: Intervals) -> Intervals:
    """The moments of `busy` that are not in `other`; both are merged, and so is what comes out."""
    left: list[Interval] = []
    first = 0  # the first of `other` that may still reach what follows
    for start, end in busy:
        while first < len(other) and other[first][1] <= start:
            first += 1
        at = first
        while at < len(other) and other[at][0] < end:
            if start < other[at][0]:
                left.append((start, other[at][0]))
            start = other[at][1]
            at += 1
        if start < end:
            left.append((start, end))
    return tuple(left)


def total(intervals: Intervals) -> float:
    """How long merged intervals are together."""
    return sum(end - start for start, end in intervals)
