# SPDX-License-Identifier: Apache-2.0
"""Plans context-parallel attention: which blocks of scores a rank computes, and whose keys it needs for them.

All of it is integers on the host, the same on all ranks. A rank's sequence is cut into spans, each of one document and
without gaps. Without its diagonal, the mask between two spans is a rectangle or, with a window, a band, so that any
kernel for whole rectangles and causal squares computes a rank's attention in few calls.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Literal, NamedTuple, get_args

from stretto.ops.attention.balance import balance

Layout = Literal["contiguous", "zigzag", "balanced"]
Schedule = Literal["all_gather", "ring"]


class Range(NamedTuple):
    """Rows from start to stop."""

    start: int
    stop: int


class Mask(NamedTuple):
    """The keys that a query sees. causal: those up to its own; window: the last so many of them; documents: its own's.

    documents: the position of each document's first token, then the sequence's length; None for one document.
    """

    causal: bool = False
    window: int | None = None
    documents: tuple[int, ...] | None = None


class Block(NamedTuple):
    """Scores of some queries with some keys, both of one range of rows.

    is_causal: a square, whose i-th query sees its first i + 1 keys. left: None, or the number of keys that a query sees
    before the key that is as far from the last key as the query is from the last query (flash attention's
    window_size_left). Every query sees a key.
    """

    queries: Range
    keys: Range
    is_causal: bool = False
    left: int | None = None


class ExchangeStep(NamedTuple):
    """One exchange of keys and values, and the blocks that need it.

    sends: for each rank, which of this rank's rows it is sent. receives: for each rank, which of its rows come, in this
    order. blocks: their keys are rows of what has come. lands, lands_back: for each rank, the first row of what comes
    to it at which this rank's begin: keys, and the gradients that return. room: the most rows that come to a rank.
    """

    sends: tuple[tuple[Range, ...], ...]
    receives: tuple[tuple[Range, ...], ...]
    blocks: tuple[Block, ...]
    lands: tuple[int, ...]
    lands_back: tuple[int, ...]
    room: int


class Plan(NamedTuple):
    """The blocks that one rank computes: `own` ones with its own keys, then those of each step."""

    own: tuple[Block, ...]
    steps: tuple[ExchangeStep, ...]


class ContextWork(NamedTuple):
    """Work by rank: scores, those of them with own keys, and the rows of keys that a rank sends and receives.
    largest_step: the most rows that one rank sends another."""

    scores: tuple[int, ...]
    own: tuple[int, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    largest_step: int


class _Span(NamedTuple):
    """Positions from start to stop, of one document: a rank's rows from `row` on."""

    row: int
    start: int
    stop: int
    document: int

    @property
    def rows(self) -> Range:
        return Range(self.row, self.row + self.stop - self.start)


def require_layout(layout: str, length: int) -> None:
    """ValueError for an unknown layout, or a length that it cannot cut."""
    if layout not in get_args(Layout):
        raise ValueError(f"context attention: layout must be one of {', '.join(get_args(Layout))}, not {layout!r}")
    if layout == "zigzag" and length % 2:
        raise ValueError(
            f"context attention: in the zigzag layout a rank has two equal chunks, and {length} positions make none: "
            f'pad to {length + 1} or use layout="contiguous"'
        )


def list_chunks(
    layout: str, rank: int, ranks: int, length: int, documents: tuple[int, ...] | None = None
) -> list[Range]:
    """The positions in the global sequence of a rank's `length` rows, in their order.

    "contiguous": the rank's part. "zigzag": chunks `rank` and 2 * ranks - 1 - rank of 2 * ranks equal ones, so that
    causal attention is the same work on every rank. "balanced": the same, unless `documents` (as in `Mask`) make the
    largest work more than 1.05 of the mean; then as `balance` cuts them.
    """
    require_layout(layout, length)
    if layout == "contiguous":
        return [Range(rank * length, (rank + 1) * length)]
    if layout == "balanced":
        found = balance(documents or (0, ranks * length), ranks, length)
        if found is not None:
            return [Range(*chunk) for chunk in found[rank]]
    half = length // 2
    return [Range(chunk * half, (chunk + 1) * half) for chunk in (rank, 2 * ranks - 1 - rank)]


def list_chunks_together(
    layout: str, number: int, degree: int, ranks: int, length: int, documents: tuple[int, ...] | None
) -> list[Range]:
    """The positions of the rows of `degree` ranks that follow each other, the `number`-th such, in the ranks' order."""
    members = range(number * degree, (number + 1) * degree)
    return [chunk for rank in members for chunk in list_chunks(layout, rank, ranks, length, documents)]


@lru_cache(maxsize=64)
def make_plan(layout: str, rank: int, ranks: int, length: int, mask: Mask, schedule: str, degree: int = 1) -> Plan:
    """Plan a rank's attention. schedule: "all_gather" exchanges all keys at once, "ring" those of one rank at a time.

    degree: of neighbours that are as one rank, which has all their rows in the order of the sequence.

    In step d of a ring a rank receives from the rank d before it: keys come from their owner, instead of being handed
    on from neighbour to neighbour. A step moves as many bytes, rows that a rank does not need are left out, and so are
    steps in which no rank needs any.
    """
    spans, blocks = _list_all(layout, ranks, length, mask, degree)
    distances = [
        distance
        for distance in range(1, ranks)
        if any(blocks[here, (here - distance) % ranks] for here in range(ranks))
    ]
    groups = [[each] for each in distances] if schedule == "ring" else [distances] if distances else []
    return Plan(
        _list_own_blocks(spans[rank], mask),
        tuple(_make_step(blocks, rank, ranks, set(distances)) for distances in groups),
    )


def measure_work(layout: str, ranks: int, length: int, mask: Mask) -> ContextWork:
    """Count what `make_plan`'s plans of all ranks compute and exchange, forward."""
    spans, blocks = _list_all(layout, ranks, length, mask, 1)
    own = [sum(map(_count_scores, _list_own_blocks(each, mask))) for each in spans]
    rows = {pair: sum(map(count_rows, _join(sorted(each.keys for each in found)))) for pair, found in blocks.items()}
    others = [range(rank + 1, rank + ranks) for rank in range(ranks)]
    return ContextWork(
        tuple(
            own[rank] + sum(_count_scores(block) for peer in others[rank] for block in blocks[rank, peer % ranks])
            for rank in range(ranks)
        ),
        tuple(own),
        tuple(sum(rows[peer % ranks, rank] for peer in others[rank]) for rank in range(ranks)),
        tuple(sum(rows[rank, peer % ranks] for peer in others[rank]) for rank in range(ranks)),
        max(rows.values(), default=0),
    )


def _list_all(
    layout: str, ranks: int, length: int, mask: Mask, degree: int
) -> tuple[list[list[_Span]], dict[tuple[int, int], list[Block]]]:
    """Spans of each rank, and the blocks of each rank's queries with each other rank's keys."""
    whole = degree, ranks * degree, length // degree, mask.documents
    chunks = [_join(sorted(list_chunks_together(layout, peer, *whole))) for peer in range(ranks)]
    spans = [_list_spans(each, mask) for each in chunks]
    blocks = {
        (here, peer): _list_blocks(spans[here], spans[peer], mask)
        for here in range(ranks)
        for peer in range(ranks)
        if peer != here
    }
    return spans, blocks


def _count_scores(block: Block) -> int:
    queries, keys = count_rows(block.queries), count_rows(block.keys)
    if block.is_causal and block.left is None:
        return queries * (queries + 1) // 2
    if block.left is None:
        return queries * keys
    ends = range(1, keys + 1) if block.is_causal else [keys] * queries
    firsts = (max(0, query + keys - queries - block.left) for query in range(queries))
    return sum(end - first for end, first in zip(ends, firsts, strict=True))


@lru_cache(maxsize=64)
def list_key_blocks(
    layout: str, rank: int, ranks: int, length: int, mask: Mask, keys: tuple[Range, ...]
) -> tuple[tuple[Block, ...], ...]:
    """List the blocks of a rank's queries with ranges of gathered rows, each range of one other rank.

    Rank p's rows begin at p * length; the blocks' keys are gathered rows.
    """

    def list_spans(peer: int) -> list[_Span]:
        return _list_spans(sorted(list_chunks(layout, peer, ranks, length, mask.documents)), mask)

    queries, found = list_spans(rank), []
    for start, stop in keys:
        first = start // length * length
        spans = []
        for span in list_spans(start // length):
            low, high = max(start - first, span.rows.start), min(stop - first, span.rows.stop)
            if low < high:
                moved = span.start - span.row
                spans.append(_Span(first + low, moved + low, moved + high, span.document))
        found.append(_join_blocks(_list_blocks(queries, spans, mask)))
    return tuple(found)


def _list_spans(chunks: Iterable[Range], mask: Mask) -> list[_Span]:
    spans, row = [], 0
    for start, stop in chunks:
        while start < stop:
            document, end = 0, stop
            if mask.documents is not None:
                document = bisect_right(mask.documents, start) - 1
                end = min(stop, mask.documents[document + 1])
            spans.append(_Span(row, start, end, document))
            row, start = row + end - start, end
    return spans


def _list_own_blocks(spans: Sequence[_Span], mask: Mask) -> tuple[Block, ...]:
    if mask.window is None:  # spans of one document may lie apart: only their order counts
        blocks = []
        for _, group in groupby(spans, lambda span: span.document):
            parts = [span.rows for span in group]
            rows = Range(parts[0].start, parts[-1].stop)
            blocks.append(Block(rows, rows, mask.causal))
        return tuple(blocks)
    squares = [
        Block(span.rows, span.rows, True, mask.window - 1 if mask.window < span.stop - span.start else None)
        for span in spans
    ]
    return (*squares, *_list_blocks(spans, spans, mask))


def _list_blocks(queries: Sequence[_Span], keys: Sequence[_Span], mask: Mask) -> list[Block]:
    """Blocks between different spans; their keys are rows of the keys' rank."""
    by_document = defaultdict(list)
    for key in keys:
        by_document[key.document].append(key)
    pairs = ((query, key) for query in queries for key in by_document[query.document])
    found = (block for query, key in pairs if (block := _find_block(query, key, mask)) is not None)
    return [part for block in found for part in _split_queries(block)]


def _find_block(query: _Span, key: _Span, mask: Mask) -> Block | None:
    if query.start == key.start or (mask.causal and key.start > query.start):
        return None
    if mask.window is None:
        return Block(query.rows, key.rows)
    first = max(key.start, query.start - mask.window + 1)
    if first >= key.stop:
        return None
    stop = min(query.stop, key.stop - 1 + mask.window)  # later queries see none of these keys
    return Block(
        Range(query.row, query.row + stop - query.start),
        Range(key.row + first - key.start, key.rows.stop),
        left=None if stop - first <= mask.window else key.stop - stop + mask.window - 1,
    )


def _split_queries(block: Block) -> Iterator[Block]:
    """Cut a block with `left` that has more queries than keys: the first queries see all keys, the others are fewer.

    torch's flash attention sets the window to the right, which it is not given, to the number of keys. With more
    queries than that the first ones miss keys, and the earliest of all see none: their results are NaN.
    """
    size = count_rows(block.keys)
    if block.left is None or count_rows(block.queries) <= size:
        yield block
        return
    limited = block.queries.stop - (size - 1 - block.left)
    yield Block(Range(block.queries.start, limited), block.keys)
    yield block._replace(queries=Range(limited, block.queries.stop))


def _make_step(blocks: dict[tuple[int, int], list[Block]], rank: int, ranks: int, distances: set[int]) -> ExchangeStep:
    def needs(here: int, peer: int) -> tuple[Range, ...]:
        """The peer's rows that a rank needs in this step."""
        if (here - peer) % ranks not in distances:
            return ()
        return tuple(_join(sorted(block.keys for block in blocks[here, peer])))

    receives = tuple(needs(rank, peer) for peer in range(ranks))
    arrived, found = 0, []
    for peer, parts in enumerate(receives):
        for part in parts:
            for block in blocks[rank, peer]:
                if part.start <= block.keys.start < part.stop:
                    moved = arrived - part.start
                    keys = Range(block.keys.start + moved, block.keys.stop + moved)
                    found.append(block._replace(keys=keys))
            arrived += part.stop - part.start
    counts = [[sum(map(count_rows, needs(here, peer))) for peer in range(ranks)] for here in range(ranks)]
    return ExchangeStep(
        tuple(needs(peer, rank) for peer in range(ranks)),
        receives,
        _join_blocks(found),
        tuple(sum(row[:rank]) for row in counts),
        tuple(sum(row[peer] for row in counts[:rank]) for peer in range(ranks)),
        max(*map(sum, counts), *map(sum, zip(*counts, strict=True))),
    )


def count_rows(part: Range) -> int:
    return part.stop - part.start


def _join(parts: Iterable[Range]) -> list[Range]:
    """The union of sorted ranges, as ranges that do not touch."""
    joined: list[Range] = []
    for part in parts:
        if joined and part.start <= joined[-1].stop:
            joined[-1] = Range(joined[-1].start, max(joined[-1].stop, part.stop))
        else:
            joined.append(part)
    return joined


def _join_blocks(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """The same scores in fewer blocks: whole rectangles whose keys, then whose queries, touch are one."""
    bands, keys_of = [], defaultdict(list)
    for block in blocks:
        if block.left is None:
            keys_of[block.queries].append(block.keys)
        else:
            bands.append(block)
    queries_of: dict[Range, list[Range]] = defaultdict(list)
    for queries in sorted(keys_of):
        for keys in _join(sorted(keys_of[queries])):
            queries_of[keys].append(queries)
    whole = [Block(queries, keys) for keys, parts in queries_of.items() for queries in _join(parts)]
    return (*whole, *bands)
