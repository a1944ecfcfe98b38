"""Large buffers in parts: no message, and no call of the library, of more bytes than a limit.

Backends count some things in 32 bits, so a single message over 2 GiB is asking for trouble; the staging buffers of the
phase inside a node need be no larger than a part, too.
"""

from collections.abc import Iterator
from dataclasses import dataclass

DEFAULT_PART_BYTES = 2**30


@dataclass(frozen=True)
class Piece:
    """Elements `begin` to `end` of each of the slots `first` to `last` (both ends not included)."""

    first: int
    last: int
    begin: int
    end: int

    @property
    def slots(self) -> int:
        """How many slots it has a part of."""
        return self.last - self.first

    @property
    def elements(self) -> int:
        """How many elements of each."""
        return self.end - self.begin


def cut_ranges(elements: int, limit: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of consecutive ranges of at most `limit` elements, at least one of them each; none for none."""
    limit = max(1, limit)
    for begin in range(0, elements, limit):
        yield begin, min(begin + limit, elements)


def cut_slots(slots: int, elements: int, limit: int) -> Iterator[Piece]:
    """Pieces of `slots` rows of `elements`, each piece of at most `limit` elements together.

    Whole slots while one fits into the limit, else ranges of one slot; one piece where everything fits.
    """
    if not elements:
        return
    if elements <= limit:
        for first, last in cut_ranges(slots, limit // elements):
            yield Piece(first, last, 0, elements)
        return
    for slot in range(slots):
        for begin, end in cut_ranges(elements, limit):
            yield Piece(slot, slot + 1, begin, end)
