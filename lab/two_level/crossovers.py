# SPDX-License-Identifier: Apache-2.0
"""The sizes at which one algorithm becomes faster than another."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise


def find_crossovers(
    sizes: Sequence[float], first: Callable[[float], float], second: Callable[[float], float]
) -> list[float]:
    """The sizes at which two algorithms take equally long; `first` and `second` give seconds for a size.

    Looks between neighbours of the rising `sizes`, where it interpolates the logarithms of both times linearly over the
    logarithm of the size.
    """
    found = []
    gaps = [math.log(first(size) / second(size)) for size in sizes]
    for (size, gap), (next_size, next_gap) in pairwise(zip(sizes, gaps, strict=True)):
        if gap * next_gap < 0 or (not next_gap and gap):
            found.append(size * (next_size / size) ** (gap / (gap - next_gap)))
    return found
