# SPDX-License-Identifier: Apache-2.0
"""Verifies a joint schedule: of the tables that will run, not of the schedule from which they were made.

It checks that every place is written once in a call; that a move, or a tile, waits for the signal of whoever writes
what it reads, and so sees exactly that; that no two give one signal; that the output is what the collective specifies;
and that the call ends even if one program takes all of a rank's moves, and another one its tiles, each in their order:
more programs only allow more to run. Between nodes a third program receives what is put, and a put ends only once it
is received, as if there were no slots: more slots only allow more to be put.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise, zip_longest
from typing import NamedTuple

from stretto.collectives.joint.schedule import (
    INPUT,
    LANDED,
    NOBODY,
    NOWHERE,
    OUTPUT,
    Destination,
    JointSchedule,
    Move,
    Receive,
    Rows,
    Source,
)

_Signal = tuple[int, int, int]
"""A signal: its receiver, its sender and its channel there."""


class _Written(NamedTuple):
    """Rows of a rank that a move writes: the rank and the number of the move."""

    rows: Rows
    rank: int
    number: int


class _Writes:
    """All rows that moves write, by the rank and the area where they are, in order."""

    def __init__(self, joint: JointSchedule) -> None:
        self.found: dict[tuple[int, int], list[_Written]] = {}
        for rank, plan in enumerate(joint.ranks):
            for number, move in enumerate(plan.moves):
                for one in (one for one in move.destinations if one.rows.area != NOWHERE):
                    written = _Written(one.rows, rank, number)
                    self.found.setdefault((one.rank, one.rows.area), []).append(written)
        for listed in self.found.values():
            listed.sort()

    def find(self, rank: int, rows: Rows) -> _Written | None:
        """Find the move that wrote all of these rows there; None if no single one did."""
        listed = self.found.get((rank, rows.area), [])
        at = bisect_right(listed, rows.start, key=lambda written: written.rows.start) - 1
        return listed[at] if at >= 0 and rows.stop <= listed[at].rows.stop else None


def verify_joint(joint: JointSchedule) -> list[str]:
    """Verify it; returns what is wrong, each with its rank, and the move or the tile, or nothing."""
    if errors := [*_find_bad_places(joint), *_find_bad_receives(joint)]:
        return errors
    writes = _Writes(joint)
    errors = [*_find_collisions(joint, writes), *_find_blind_reads(joint, writes)]
    return errors or list(_find_wrong_rows(joint, writes))


def _name(rank: int, number: int) -> str:
    return f"rank {rank}, move {number}"


def _find_bad_places(joint: JointSchedule) -> Iterator[str]:
    """Find rows, ranks and channels outside of what there is, and moves of rows of several sizes."""
    sizes = {INPUT: joint.rows, LANDED: joint.landed_rows, OUTPUT: joint.output_rows}
    sizes |= {NOWHERE: joint.landed_rows} if joint.pulls else {}
    reached = NOWHERE if joint.pulls else LANDED  # of other ranks
    for rank, plan in enumerate(joint.ranks):
        for number, move in enumerate(plan.moves):
            name = _name(rank, number)
            everywhere = [one.rows for one in move.sources] + [one.rows for one in move.destinations]
            if not move.sources or not move.destinations:
                yield f"{name} has no source or no destination"
            if len({rows.stop - rows.start for rows in everywhere}) > 1:
                yield f"{name} is of rows of several sizes: {_show(*everywhere)}"
            for rows in everywhere:
                if rows.area not in sizes or not 0 <= rows.start < rows.stop <= sizes[rows.area]:
                    yield f"{name}: {_show(rows)} are not there"
            for one in move.destinations:
                is_reached = 0 <= one.rank < len(joint.ranks) and (one.rows.area == reached or one.rank == rank)
                if not is_reached or one.rows.area == INPUT:
                    yield f"{name} cannot write to {_show(one.rows)} of rank {one.rank}"
            if any(one.rows.area == NOWHERE and one.rows[1:] != move.sources[0].rows[1:] for one in move.destinations):
                yield f"{name} offers {_show(move.destinations[0].rows)}, and has others"
            if any(one.rows.area in (OUTPUT, NOWHERE) for one in move.sources):
                yield f"{name} reads the output"
            if any(one.rank not in (NOBODY, one.sender) or (one.rank != NOBODY) > joint.pulls for one in move.sources):
                yield f"{name} reads the memory of a rank that has offered nothing"
            if any((one.sender == NOBODY) != (one.channel == NOBODY) for one in move.sources):
                yield f"{name} waits for a rank on no channel, or on a channel for no rank"
            # Copy engines make these, the ones of x first.
            if joint.is_gather and not _is_copy(move, pulls=joint.pulls):
                yield f"{name} is not a copy of x, or of what it waits for, to gathered rows"
            for channel in [one.channel for one in move.sources] + [one.channel for one in move.destinations]:
                if not NOBODY <= channel < joint.channels:
                    yield f"{name}: there is no channel {channel} of {joint.channels}"
        yield from _find_bad_tiles(joint, rank)


def _find_bad_receives(joint: JointSchedule) -> Iterator[str]:
    """Find ranks that do not receive what another node's rank puts, in its order, or receive what none puts."""
    if joint.nodes is not None and (joint.pulls or len(joint.nodes) != len(joint.ranks)):
        yield f"{len(joint.ranks)} ranks that pull, or have {len(joint.nodes)} nodes' numbers, do not put"
        return
    for sender, of_sender in enumerate(joint.ranks):
        puts = _list_puts(joint, sender, of_sender.moves)
        for rank, plan in enumerate(joint.ranks):
            put = [Receive(sender, to.rows, to.channel) for to in puts[rank]]
            if put != [one for one in plan.receives if one.sender == sender]:
                yield f"rank {rank} does not receive what rank {sender} puts to it, in its order"


def _list_puts(joint: JointSchedule, rank: int, moves: Iterable[Move]) -> dict[int, list[Destination]]:
    """The destinations of these moves of a rank that are on other nodes, by rank."""
    found: dict[int, list[Destination]] = defaultdict(list)
    for to in (to for move in moves for to in move.destinations):
        if joint.find_giver(rank, to.rank) != rank:
            found[to.rank].append(to)
    return found


def _is_copy(move: Move, *, pulls: bool) -> bool:
    """True if copy engines can make it, in whatever order those of x come: before all others."""
    return (
        len(move.sources) == 1
        and all(one.rows.area in (LANDED, NOWHERE) for one in move.destinations)
        and (pulls or (move.sources[0].rows.area == INPUT) == (move.sources[0].sender == NOBODY))
        and (move.sources[0].rows.area != INPUT or all(one.rows.area == LANDED for one in move.destinations))
    )


def _find_bad_tiles(joint: JointSchedule, rank: int) -> Iterator[str]:
    """Find rows of the product that are not of one tile, and tiles that are too large."""
    tiles = sorted(joint.ranks[rank].tiles)
    covered: list[list[int]] = []
    for tile in tiles:
        if covered and covered[-1][1] == tile.start:
            covered[-1][1] = tile.stop
        else:
            covered.append([tile.start, tile.stop])
    needed = [(0, joint.product_rows)] if joint.needs is None else joint.needs[rank]
    own = [tile for tile in tiles if tile.sender == NOBODY]
    if any(tile.sender == NOBODY for tile in joint.ranks[rank].tiles[len(own) :]):
        yield f"rank {rank}: tiles of its own rows of x do not come first"
    for tile in own:
        is_own = rank * joint.rows <= tile.start < tile.stop <= (rank + 1) * joint.rows and tile.channel == NOBODY
        if not (joint.reads_own and is_own):
            yield f"rank {rank}: the tile of rows {tile.start} to {tile.stop - 1} waits for no one, and is not of x"
    for one, other in zip_longest(chain(*covered), chain(*needed)):
        if one != other:
            row = min(end for end in (one, other) if end is not None)
            yield f"rank {rank}: row {row} of the product is of no tile, or of two"
            break
    for tile in tiles:
        if not 0 < tile.stop - tile.start <= joint.block_rows or not (
            tile in own or 0 <= tile.channel < joint.channels
        ):
            yield f"rank {rank}: there is no tile of rows {tile.start} to {tile.stop - 1} on channel {tile.channel}"
        if not joint.is_gather and tile.sender != rank:
            yield f"rank {rank}: the tile of rows {tile.start} to {tile.stop - 1} signals rank {tile.sender}"


def _find_collisions(joint: JointSchedule, writes: _Writes) -> Iterator[str]:
    """Find rows that are written twice, and signals that two give."""
    for (rank, _), listed in writes.found.items():
        for one, other in pairwise(listed):
            if other.rows.start < one.rows.stop:
                both = f"{_name(one.rank, one.number)} and {_name(other.rank, other.number)}"
                yield f"{both} write to {_show(other.rows)} of rank {rank}"
    signals: dict[_Signal, str] = {}
    for rank, plan in enumerate(joint.ranks):
        if not joint.is_gather:
            signals |= {(rank, rank, tile.channel): f"rank {rank}'s tiles" for tile in plan.tiles}
        for number, move in enumerate(plan.moves):
            for to in move.destinations:
                if to.channel == NOBODY:
                    continue
                signal = to.rank, joint.find_giver(rank, to.rank), to.channel
                if signal in signals:  # of one move too: copy engines would give it after the first of two copies
                    yield f"{_name(rank, number)} and {signals[signal]} signal channel {to.channel} of rank {to.rank}"
                signals[signal] = _name(rank, number)


def _find_blind_reads(joint: JointSchedule, writes: _Writes) -> Iterator[str]:
    """Find moves and tiles that read rows of which the signal that they wait for says nothing."""
    givers: dict[_Signal, tuple[int, int]] = {}
    for rank, plan in enumerate(joint.ranks):
        for number, move in enumerate(plan.moves):
            to = (one for one in move.destinations if one.channel != NOBODY)
            givers.update({(one.rank, rank, one.channel): (rank, number) for one in to})
    for rank, plan in enumerate(joint.ranks):
        channels = {} if joint.is_gather else _list_tile_channels(joint, rank)
        for number, move in enumerate(plan.moves):
            for source in move.sources:
                if source.rows.area == INPUT and joint.is_gather:
                    continue
                if source.rows.area == INPUT:
                    is_seen = source.sender == rank and channels.get(source.channel, Rows(INPUT, 0, 0)) == source.rows
                else:
                    written = writes.find(_find_holder(rank, source), source.rows)
                    giver = givers.get((rank, source.sender, source.channel))
                    is_seen = written is not None and (
                        (
                            giver == (written.rank, written.number)
                            if source.rank == NOBODY
                            else _offers(joint, giver, source)
                        )
                        or (  # a program reads only the elements that it has written: the same of all rows
                            source.sender == NOBODY
                            and written.rank == rank
                            and written.number < number
                            and written.rows == source.rows
                        )
                    )
                if not is_seen:
                    yield f"{_name(rank, number)} reads {_show(source.rows)} before they are there"
        for tile in plan.tiles if joint.is_gather else ():
            if tile.sender == NOBODY:  # of x
                continue
            written = writes.find(rank, Rows(LANDED, tile.start, tile.stop))
            giver = givers.get((rank, tile.sender, tile.channel))
            if written is None or giver != (written.rank, written.number):
                yield f"rank {rank}: the tile of rows {tile.start} to {tile.stop - 1} begins before they are there"


def _find_holder(rank: int, source: Source) -> int:
    """The rank in whose memory a source's rows are."""
    return rank if source.rank == NOBODY else source.rank


def _offers(joint: JointSchedule, giver: tuple[int, int] | None, source: Source) -> bool:
    """True if a signal is the offer of these rows by the rank that has them, which waits for them in its order."""
    if giver is None or giver[0] != source.rank:
        return False
    move = joint.ranks[giver[0]].moves[giver[1]]
    return move.sources[0].rows == source.rows and move.destinations[0].rows.area == NOWHERE


def _list_tile_channels(joint: JointSchedule, rank: int) -> dict[int, Rows]:
    """The rows of the product that each channel of a rank's tiles is of, where these have no gaps."""
    found: dict[int, Rows] = {}
    for tile in sorted(joint.ranks[rank].tiles):
        before = found.get(tile.channel)
        start = tile.start if before is None or before.stop != tile.start else before.start
        found[tile.channel] = Rows(INPUT, start, tile.stop)
    return found


_Value = Counter[tuple[int, int]]
"""The content of rows: for each rank whose rows were added there, how much later its row is; and how often."""


def _find_wrong_rows(joint: JointSchedule, writes: _Writes) -> Iterator[str]:
    """Run all ranks' moves on symbols, in their order: find cycles of waits, and rows that hold something else."""
    memory: dict[tuple[int, Rows], _Value] = {}
    signals: set[_Signal] = set()
    if not joint.is_gather:  # tiles wait for nothing
        signals |= {(rank, rank, tile.channel) for rank, plan in enumerate(joint.ranks) for tile in plan.tiles}
    at, goes_on = [0] * len(joint.ranks), True
    received = [0] * len(joint.ranks)
    while goes_on:
        goes_on = False
        for rank, plan in enumerate(joint.ranks):
            for move in plan.moves[at[rank] :]:
                if not all(_is_signalled(rank, source, signals) for source in move.sources):
                    break
                if not all(_receives(joint, rank, puts, received) for puts in _list_puts(joint, rank, [move]).items()):
                    break
                for peer, puts in _list_puts(joint, rank, [move]).items():
                    received[peer] += len(puts)
                _run(move, rank, writes, memory)
                signals |= {(one.rank, rank, one.channel) for one in move.destinations}
                at[rank] += 1
                goes_on = True
    for rank, plan in enumerate(joint.ranks):
        if at[rank] < len(plan.moves):
            move = plan.moves[at[rank]]
            late = [one for one in move.sources if not _is_signalled(rank, one, signals)]
            what = f"waits for ever for rank {late[0].sender}, channel {late[0].channel}" if late else "puts for ever"
            yield f"{_name(rank, at[rank])} {what}"
            return
    for rank in range(len(joint.ranks)):
        area, size = (LANDED, joint.product_rows) if joint.is_gather else (OUTPUT, joint.output_rows)
        here = [one.rows for one in writes.found.get((rank, area), ()) if one.rows.start < size]
        for rows in here:
            wanted = _find_wanted(joint, rank, rows)
            if memory[rank, rows] != wanted:
                yield f"rank {rank}: {_show(rows)} hold {_describe(memory[rank, rows])}, not {_describe(wanted)}"
        needed = ((0, size),) if joint.needs is None else joint.needs[rank]
        if joint.reads_own:
            needed = (0, rank * joint.rows), ((rank + 1) * joint.rows, size)
        for end, stop in needed:
            for rows in here:
                end = max(end, rows.stop) if rows.start <= end else end
            if end < stop:
                yield f"rank {rank}: {_show(Rows(area, end, stop))} hold nothing"


def _find_wanted(joint: JointSchedule, rank: int, rows: Rows) -> _Value:
    """Return what these gathered rows, or rows of the output, should hold."""
    world = len(joint.ranks)
    if joint.is_gather:
        owner = rows.start // joint.rows
        return Counter({(owner, -owner * joint.rows): 1}) if rows.stop <= (owner + 1) * joint.rows else Counter()
    if joint.operator == "matmul_all_to_all":  # a rank's block of the output is this rank's block of that one's product
        of_block = joint.rows // world
        owner = rows.start // of_block
        return Counter({(owner, (rank - owner) * of_block): 1}) if rows.stop <= (owner + 1) * of_block else Counter()
    first = rank * joint.output_rows if joint.operator == "matmul_reduce_scatter" else 0
    return Counter({(giver, first): 1 for giver in range(world)})


def _receives(joint: JointSchedule, rank: int, puts: tuple[int, list[Destination]], received: Sequence[int]) -> bool:
    """Return whether a rank of another node, which has received so many, would next receive these puts of `rank`."""
    peer, destinations = puts
    coming = joint.ranks[peer].receives[received[peer] :]
    return all(
        one == Receive(rank, to.rows, to.channel) for one, to in zip_longest(coming[: len(destinations)], destinations)
    )


def _is_signalled(rank: int, source: Source, signals: set[_Signal]) -> bool:
    return source.sender == NOBODY or (rank, source.sender, source.channel) in signals


def _run(move: Move, rank: int, writes: _Writes, memory: dict[tuple[int, Rows], _Value]) -> None:
    """Execute a move on symbols; all that it reads was written."""
    first, total = move.sources[0].rows.start, Counter[tuple[int, int]]()
    for source in move.sources:
        moved = source.rows.start - first
        if source.rows.area == INPUT:
            total[rank, moved] += 1
            continue
        holder = _find_holder(rank, source)
        written = writes.find(holder, source.rows)
        assert written is not None
        for (giver, later), times in memory[holder, written.rows].items():
            total[giver, later + moved] += times
    for one in move.destinations:
        later = first - one.rows.start
        memory[one.rank, one.rows] = Counter({(giver, by + later): times for (giver, by), times in total.items()})


def _show(*rows: Rows) -> str:
    names = {INPUT: "input", LANDED: "landed", OUTPUT: "output", NOWHERE: "no place"}
    return ", ".join(f"rows {one.start} to {one.stop - 1} of {names.get(one.area, one.area)}" for one in rows)


def _describe(held: _Value) -> str:
    if not held:
        return "no rank's rows"
    return " + ".join(f"rank {rank}'s rows {later} later" for rank, later in sorted(held.elements())[:6])
