# SPDX-License-Identifier: Apache-2.0
"""Other forms of a joint schedule: without what nobody needs, of own rows of x, in pieces, pulled, and between nodes.

Each is a function from one schedule to another, which `verify_joint` proves again.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from stretto.collectives.joint.schedule import (
    INPUT,
    LANDED,
    NOBODY,
    NOWHERE,
    Destination,
    JointSchedule,
    Move,
    RankPlan,
    Receive,
    Rows,
    Source,
    find_times,
)

_End = TypeVar("_End", Source, Destination)


def read_own_rows(joint: JointSchedule) -> JointSchedule:
    """The gather whose tiles of own rows read x itself, first of all, and which does not copy it among the others.

    Own rows that a move reads where they were copied to are copied still.
    """
    plans = []
    for rank, plan in enumerate(joint.ranks):
        own = range(rank * joint.rows, (rank + 1) * joint.rows)
        read = {one.rows for move in plan.moves for one in move.sources if one.rows.area == LANDED}
        left = (
            (
                move,
                tuple(to for to in move.destinations if to.rank != rank or to.rows in read or to.rows.start not in own),
            )
            for move in plan.moves
        )
        tiles = [tile._replace(sender=NOBODY, channel=NOBODY) for tile in plan.tiles if tile.start in own]
        tiles += [tile for tile in plan.tiles if tile.start not in own]
        moves = tuple(move._replace(destinations=to) for move, to in left if to)
        plans.append(plan._replace(moves=moves, tiles=tuple(tiles)))
    return replace(joint, ranks=tuple(plans), reads_own=True)


def cut_chunks(joint: JointSchedule, rows: int, most: int) -> JointSchedule:
    """The schedule whose chunks travel, and are added up, in pieces of about so many rows, each with its own signal.

    So a chunk moves on while its last tiles are multiplied. most: pieces of a chunk. They end where tiles do.
    """
    longest = max((_count(move.sources[0].rows) for plan in joint.ranks for move in plan.moves), default=0)
    pieces = min(most, -(-longest // max(rows, 1)))
    if pieces <= 1:
        return joint
    of_piece = -(-longest // (pieces * joint.block_rows)) * joint.block_rows

    def number(channel: int, piece: int) -> int:
        return NOBODY if channel == NOBODY else channel * pieces + piece

    def cut(one: _End, piece: int) -> _End:
        start = one.rows.start + piece * of_piece
        rows = one.rows._replace(start=start, stop=min(start + of_piece, one.rows.stop))
        return one._replace(rows=rows, channel=number(one.channel, piece))

    plans = []
    for plan in joint.ranks:
        moves = tuple(
            Move(tuple(cut(one, piece) for one in move.sources), tuple(cut(to, piece) for to in move.destinations))
            for move in plan.moves
            for piece in range(-(-_count(move.sources[0].rows) // of_piece))
        )
        starts: dict[int, int] = {}
        for tile in sorted(plan.tiles):
            starts.setdefault(tile.channel, tile.start)
        tiles = tuple(
            tile._replace(channel=number(tile.channel, (tile.start - starts[tile.channel]) // of_piece))
            for tile in plan.tiles
        )
        plans.append(RankPlan(moves, tiles))
    return replace(joint, ranks=tuple(plans), channels=joint.channels * pieces)


def _count(rows: Rows) -> int:
    return rows.stop - rows.start


def keep_needed(joint: JointSchedule, needs: Sequence[Collection[int]]) -> JointSchedule:
    """The gather without tiles of chunks that a rank does not need, and without moves on which no needed chunk depends.

    needs: the chunks of each rank, by their channels. What nobody needs behind a rank on a chunk's way does not travel.
    """
    moves = {
        (to.rank, rank, to.channel): (rank, move) for rank, plan in enumerate(joint.ranks) for move in plan.moves
        for to in move.destinations
    }  # fmt: skip
    tiles = [
        [tile for tile in plan.tiles if tile.channel in needed] for plan, needed in zip(joint.ranks, needs, strict=True)
    ]
    asked = [(rank, tile.sender, tile.channel) for rank, of_rank in enumerate(tiles) for tile in of_rank]
    kept = set(asked)
    while asked:
        giver, move = moves[asked.pop()]
        more = {(giver, one.sender, one.channel) for one in move.sources if one.sender != NOBODY} - kept
        kept |= more
        asked += more
    plans = []
    for rank, plan in enumerate(joint.ranks):
        left = (
            (move, tuple(to for to in move.destinations if (to.rank, rank, to.channel) in kept)) for move in plan.moves
        )
        plans.append(tuple(move._replace(destinations=to) for move, to in left if to))
    arrivals = find_times(plans).signals
    for rank, of_rank in enumerate(tiles):
        of_rank.sort(key=lambda tile: (arrivals.get((rank, tile.sender, tile.channel), 0), tile.start))
    ranks = tuple(RankPlan(*both) for both in zip(plans, map(tuple, tiles), strict=True))
    return replace(joint, ranks=ranks, needs=tuple(join_rows(tile[:2] for tile in of_rank) for of_rank in tiles))


def join_rows(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ranges of rows, from start to stop, in order, without those that touch."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return tuple(joined)


def pull(joint: JointSchedule) -> JointSchedule:
    """The gather whose copies are made by those who receive them, from where their senders have the rows.

    A sender offers rows once they lie among its gathered rows, its own as well, and the receiver, which has waited for
    that, copies them and signals itself. Offers and copies are in one order of all ranks, the pushed moves' by the time
    at which these begin: of one move the offer before the copy, and offers of own rows first of all.
    """
    if not joint.is_gather:
        raise ValueError(f"{joint.operator} adds up what comes, so {joint.name} is not pulled: push it")
    made: list[list[tuple[tuple[int, bool], Move]]] = [[] for _ in joint.ranks]
    begins = find_times([plan.moves for plan in joint.ranks]).begins
    for rank, plan in enumerate(joint.ranks):
        placed = {
            move.sources[0].rows: to.rows
            for move in plan.moves
            for to in move.destinations
            if to.rank == rank and move.sources[0].rows.area == INPUT
        }
        for begin, move in zip(begins[rank], plan.moves, strict=True):
            (source,) = move.sources
            for to in move.destinations:
                if to.rank == rank:
                    # What an earlier copy of this rank has brought needs no wait on the same stream.
                    made[rank].append(((begin, False), Move((Source(source.rows),), (to,))))
                    continue
                rows, at = source.rows, begin
                if rows.area == INPUT:
                    at = 0
                    if rows not in placed:
                        start = rank * joint.rows + rows.start
                        placed[rows] = Rows(LANDED, start, start + rows.stop - rows.start)
                        made[rank].append(((-1, False), Move((source,), (Destination(rank, placed[rows]),))))
                    rows = placed[rows]
                offer = Destination(to.rank, rows._replace(area=NOWHERE), to.channel)
                made[rank].append(((at, False), Move((Source(rows),), (offer,))))
                copied = Source(rows, rank, to.channel, rank)
                made[to.rank].append(((begin, True), Move((copied,), (to,))))
    plans = []
    for rank, plan in enumerate(joint.ranks):
        first = [(place, move) for place, move in made[rank] if move.sources[0].rows.area == INPUT]
        rest = [(place, move) for place, move in made[rank] if move.sources[0].rows.area != INPUT]
        rest.sort(key=lambda one: one[0])
        tiles = tuple(tile._replace(sender=rank) for tile in plan.tiles)
        plans.append(RankPlan(tuple(move for _, move in (*first, *rest)), tiles))
    return replace(joint, ranks=tuple(plans), pulls=True)


def cross_nodes(joint: JointSchedule, nodes: Sequence[int]) -> JointSchedule:
    """The schedule on ranks of several nodes: what a move writes at another node is put, and received there.

    nodes: the number of each rank's node. A rank's receives are in one order of all ranks' moves, by the time at which
    these begin. So the first put that is not received yet always can be, however few slots there are: whoever receives
    it has received all that comes before it, and its sender has made all moves before it (`verify_joint`).
    """
    if joint.pulls:
        raise ValueError(f"{joint.operator}: {joint.name} is pulled, and between nodes rows are put: push it")
    coming: list[list[tuple[tuple[int, int], Receive]]] = [[] for _ in joint.ranks]
    for rank, begins in enumerate(find_times([plan.moves for plan in joint.ranks]).begins):
        for begin, move in zip(begins, joint.ranks[rank].moves, strict=True):
            for to in move.destinations:
                if nodes[to.rank] != nodes[rank]:
                    coming[to.rank].append(((begin, rank), Receive(rank, to.rows, to.channel)))
    ranks = tuple(
        plan._replace(receives=tuple(receive for _, receive in sorted(of_rank, key=lambda one: one[0])))
        for plan, of_rank in zip(joint.ranks, coming, strict=True)
    )
    return replace(joint, ranks=ranks, nodes=tuple(nodes))
