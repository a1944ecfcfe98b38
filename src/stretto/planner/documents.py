# SPDX-License-Identifier: Apache-2.0
"""Packed documents of a workload: the part of attention's products that they leave, and how context shares it.

Rows are packed as data are (`stretto.train.data`): documents follow each other, and what a row cuts off begins the
next. Work and rows of keys are counted of the operator's own plans (`stretto.ops.attention`), of a sample of rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import NamedTuple

from stretto.cluster import read_bounded
from stretto.quantities import require_whole

# Size in GiB and mean document in KiB, of the table in the README of github.com/EleutherAI/the-pile (commit 0373f19):
# PubMed Central, Bibliotik, ArXiv, OpenWebText2, Github, FreeLaw, StackExchange, USPTO, Wikipedia (en), PubMed
# Abstracts, Gutenberg (PG-19), OpenSubtitles, DM Mathematics, Literotica, BookCorpus, Ubuntu IRC, EuroParl,
# YoutubeSubtitles, PhilPapers, NIH ExPorter, HackerNews, Enron Emails.
_PILE = (
    (90.27, 30.55), (100.96, 538.36), (56.21, 46.61), (62.77, 3.85), (630.64, 11.68), (51.15, 15.06), (32.20, 2.16),
    (22.90, 4.08), (17.27, 3.00), (19.26, 1.30), (10.88, 398.73), (12.98, 30.48), (7.75, 48343.04), (11.60, 25.69),
    (6.30, 369.87), (5.52, 2058.24), (4.59, 68.87), (3.73, 22.55), (2.38, 73.37), (1.89, 2.11), (1.59, 4.46),
    (0.88, 1.78),
)  # fmt: skip

Histogram = Sequence[tuple[int, float]]
"""Lengths of documents, in tokens, and how many documents have each."""

PILE: Histogram = tuple((round(size * 1024 / 4), whole / size) for whole, size in _PILE)
"""Long-tailed lengths: those of The Pile, by its components, in tokens of 4 bytes."""

_TOKENS, _MIN_ROWS, _MAX_ROWS = 1 << 21, 8, 64  # of a sample
_MAX_BYTES = 1 << 28  # of a file of lengths


class ContextShare(NamedTuple):
    """The shares of the ranks of context in packed rows, in the mean of the sample.

    balance: the largest work of a rank over the mean. own: the part of all scores that are with a rank's own keys.
    busiest: rows of keys that the rank which sends or receives most does, for each position of a rank. held: the most
    rows that come to a rank, for each of its positions; held_of_step: those of one step of a ring.
    """

    balance: float
    own: float
    busiest: float
    held: float
    held_of_step: float


@dataclass(frozen=True, eq=False)  # or workloads that have it would take long to hash
class PackedDocuments:
    """A sample of rows: where the documents of each begin, and its length."""

    rows: tuple[tuple[int, ...], ...]

    @cached_property
    def _lengths(self) -> list[int]:
        return [stop - start for row in self.rows for start, stop in pairwise(row)]

    @property
    def seq_len(self) -> int:
        """Tokens of a row."""
        return self.rows[0][-1]

    @cached_property
    def share(self) -> float:
        """Causal scores within documents over those of whole rows."""
        whole = len(self.rows) * self.seq_len * (self.seq_len + 1)
        return sum(length * (length + 1) for length in self._lengths) / whole

    @cached_property
    def length(self) -> float:
        """The mean length of a document, by scores: kernels run as fast as for one as long."""
        return sum(length**3 for length in self._lengths) / sum(length**2 for length in self._lengths)

    def over_context(self, ranks: int) -> ContextShare:
        """Measure the shares of so many ranks, with rows cut as in training (`layout="balanced"`)."""
        if ranks == 1:
            return ContextShare(1.0, 1.0, 0.0, 0.0, 0.0)
        if ranks not in self._shares:
            self._shares[ranks] = self._share_out(ranks)
        return self._shares[ranks]

    @cached_property
    def _shares(self) -> dict[int, ContextShare]:
        return {}

    def _share_out(self, ranks: int) -> ContextShare:
        from stretto.ops.attention.plan import Mask, measure_work  # with torch

        length = self.seq_len // ranks
        works = [measure_work("balanced", ranks, length, Mask(True, None, row)) for row in self.rows]
        scores = sum(sum(each.scores) for each in works)
        positions = length * len(works)
        return ContextShare(
            balance=sum(max(each.scores) for each in works) * ranks / scores,
            own=sum(sum(each.own) for each in works) / scores,
            busiest=sum(max(*each.sent, *each.received) for each in works) / positions,
            held=sum(max(each.received) for each in works) / positions,
            held_of_step=sum(each.largest_step for each in works) / positions,
        )

    def describe(self) -> str:
        return (
            f"rows of {self.seq_len} tokens pack {len(self._lengths) / len(self.rows):.3g} documents, whose attention "
            f"is {self.share:.1%} of a whole row's products"
        )


def draw_starts(histogram: Histogram, total: int, seed: int) -> tuple[int, ...]:
    """Draw where packed documents begin in a sequence of so many tokens, then its length, where the last one is cut."""
    lengths, counts = zip(*histogram, strict=True)
    random, starts = Random(seed), [0]
    while starts[-1] < total:
        starts.append(min(total, starts[-1] + random.choices(lengths, counts)[0]))
    return tuple(starts)


def pack(histogram: Histogram, seq_len: int) -> PackedDocuments:
    """A sample of rows of documents of these lengths: the same at every call."""
    rows = min(_MAX_ROWS, max(_MIN_ROWS, _TOKENS // seq_len))
    starts = draw_starts(histogram, rows * seq_len, seed=1)
    found: list[list[int]] = [[0] for _ in range(rows)]
    for start in starts[1:-1]:
        if start % seq_len:
            found[start // seq_len].append(start % seq_len)
    return PackedDocuments(tuple((*row, seq_len) for row in found))


def read_packed(documents: object, seq_len: int) -> PackedDocuments | None:
    """The sample that `plan`'s `documents` means: "pile", a file (`read_lengths`), lengths, or a sample itself.

    ValueError for anything else, and for a sample of rows of another length.
    """
    match documents:
        case None:
            return None
        case PackedDocuments():
            if documents.seq_len != seq_len:
                raise ValueError(
                    f"documents are packed to rows of {documents.seq_len} tokens, but seq_len is {seq_len}"
                )
            return documents
        case "pile":
            return pack(PILE, seq_len)
        case str() | Path():
            return pack(read_lengths(Path(documents)), seq_len)
        case Sequence() if documents:
            return pack([(require_whole("a document's length", each, 1, 1 << 40), 1) for each in documents], seq_len)
    raise ValueError(f"documents must be 'pile', a file of lengths, or one or more lengths, not {documents!r:.60}")


def read_lengths(path: Path) -> Histogram:
    """Lengths of documents in tokens, one a line; of a histogram, how many documents have it after it.

    ValueError, with the line, for a file that has anything else.
    """
    try:
        lines = read_bounded(path, _MAX_BYTES, "lengths, but for a histogram (a length and a count a line),").decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ValueError(
            f"the documents' lengths {str(path)!r} cannot be read: {reason} ('pile' is a known one)"
        ) from None
    found = []
    for number, line in enumerate(lines.splitlines(), start=1):
        fields = line.split()
        if not fields:
            continue
        if len(fields) > 2 or not all(each.isdecimal() and len(each) < 13 and int(each) for each in fields):
            raise ValueError(
                f"{path}, line {number}: {line!r:.60} is no document's length in tokens, or it and a count"
            )
        found.append((int(fields[0]), float(fields[1]) if len(fields) > 1 else 1.0))
    if not found:
        raise ValueError(f"{path} has no lengths of documents: one a line, in tokens")
    return found
