# SPDX-License-Identifier: Apache-2.0
"""Cuts packed documents among ranks, so that causal attention is as many positions and nearly as many scores on each.

Documents lie on a circle, the shortest first. Of arcs of one length, some have the mean number of scores: those that
tile the circle have it on average, and arcs between them are all that lies between (Stromquist and Woodall, "Sets on
which several measures agree", 1985). A rank takes the arc of these whose ends cut documents with the fewest keys, and
leaves a circle to the others. So N ranks cut documents at no more places than zig-zag chunks do: 2 * N.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

_GOOD_ENOUGH = 1.05  # the largest over the mean number of scores with which zig-zag chunks are kept
_TOLERANCE = 0.015  # of the mean: what an arc may have too many or too few scores, to send fewer keys
_CANDIDATES = 1024  # arcs that begin evenly along a rank's positions, beside those that begin or end with a document


class _Circle(NamedTuple):
    """Pieces of documents that follow each other, int64 [pieces] each: where in the global sequence they begin, after
    how many positions of their documents, and their numbers of positions."""

    starts: Tensor
    depths: Tensor
    counts: Tensor

    def measure(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """(scores of all positions before each place, depth in its document there); a place may be a turn further."""
        scores = self.counts * self.depths + self.counts * (self.counts + 1) // 2
        ends, sums = self.counts.cumsum(0), scores.cumsum(0)
        turns, places = places // ends[-1], places % ends[-1]
        piece = torch.searchsorted(ends, places, right=True)
        inside = places - (ends - self.counts)[piece]
        before = turns * sums[-1] + (sums - scores)[piece]
        depths = self.depths[piece]
        return before + inside * depths + inside * (inside + 1) // 2, depths + inside

    def take(self, start: int, stop: int) -> "_Circle":
        """The pieces from place start to stop, which may be a turn further."""
        starts, depths, counts = (torch.cat((each, each)) for each in self)
        begins = counts.cumsum(0) - counts
        first, end = (start - begins).clamp(min=0), torch.minimum(stop - begins, counts)
        kept = first < end
        return _Circle((starts + first)[kept], (depths + first)[kept], (end - first)[kept])


@lru_cache(maxsize=64)
def balance(documents: Sequence[int], ranks: int, length: int) -> tuple[tuple[tuple[int, int], ...], ...] | None:
    """Return for each rank (start, stop) of its positions, `length` in all; None if zig-zag chunks are balanced.

    documents: where each begins, then the sequence's length. The same on all ranks: integers alone.
    """
    edges = torch.tensor(documents, device="cpu")
    sizes = edges.diff()
    whole = _Circle(edges[:-1], torch.zeros_like(sizes), sizes)
    if length % 2 == 0:
        chunks = whole.measure(torch.arange(2 * ranks + 1, device="cpu") * (length // 2))[0].diff()
        scores = (chunks + chunks.flip(0))[:ranks]
        if int(scores.max()) * ranks <= _GOOD_ENOUGH * int(scores.sum()):
            return None
    order = sizes.argsort(stable=True)
    rest = _Circle(*(each[order] for each in whole))
    allowed = _TOLERANCE * int(rest.measure(edges[-1:])[0]) / ranks
    found = []
    for left in range(ranks, 1, -1):
        start = _find_arc(rest, left, length, allowed)
        found.append(rest.take(start, start + length))
        rest = rest.take(start + length, start + left * length)
    return tuple(_list_ranges(each) for each in (*found, rest))


def _find_arc(circle: _Circle, ranks: int, length: int, allowed: float) -> int:
    """Find an arc of `length` places with 1 / ranks of the circle's scores, at most `allowed` more or less."""
    total = ranks * length
    begins = circle.counts.cumsum(0) - circle.counts
    even = torch.arange(0, total, max(1, length // _CANDIDATES), device="cpu")
    starts = torch.cat((begins, (begins - length) % total, even))
    before, first = circle.measure(starts)
    after, last = circle.measure(starts + length)
    whole = int(circle.measure(torch.tensor([total], device="cpu"))[0])
    error = ((after - before) * ranks - whole).abs()
    fits = error <= max(int(error.min()), allowed * ranks)
    # Keys before an arc in its first document come to it, and its own of the last one go to what is left.
    return int(starts[torch.where(fits, first + last, total * total).argmin()])


def _list_ranges(pieces: _Circle) -> tuple[tuple[int, int], ...]:
    """List the pieces' (start, stop) in the sequence, in its order; those that touch are one."""
    starts, order = pieces.starts.sort()
    stops = starts + pieces.counts[order]
    begins = torch.cat((starts[:1] >= 0, starts[1:] != stops[:-1]))
    ends = torch.cat((begins[1:], begins[:1]))
    return tuple(zip(starts[begins].tolist(), stops[ends].tolist(), strict=True))
