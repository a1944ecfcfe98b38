# SPDX-License-Identifier: Apache-2.0
"""Settings of `python -m lab messages`."""

from dataclasses import dataclass
from typing import Annotated

from stretto.bench.settings import Option, Repeats, require_least

LARGEST_MIB = 4096
LIBRARY = "torch's send and recv"
"""The baseline for messages."""


@dataclass(frozen=True)
class MessagesSetting:
    """What `python -m lab messages` measures. Raises ValueError for settings that cannot work."""

    sizes: Annotated[tuple[float, ...], Option("Sizes in MiB, with commas.")] = (1, 2, 5, 10, 20, 50)
    repeats: Repeats = 10
    rounds: Annotated[int, Option("Rounds over all transports; the median of all rounds' runs counts.")] = 5

    def __post_init__(self) -> None:
        require_least(1, repeats=self.repeats, rounds=self.rounds)
        for size in self.sizes:
            if not 0 < size <= LARGEST_MIB:
                raise ValueError(f"a size of {size:g} MiB: must be more than 0 and at most {LARGEST_MIB}")


def require_two_ranks(ranks: int) -> None:
    """Raise ValueError for a single rank, which has no peer."""
    if ranks < 2:
        raise ValueError(f"messages go between 2 ranks at least, and --ranks is {ranks}: 2 would do")
