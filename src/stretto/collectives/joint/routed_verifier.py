# SPDX-License-Identifier: Apache-2.0
"""Verifies a routed schedule, for any sizes of its chunks: of the tables that will run.

Sizes are symbols. A place is a number in its area's list of chunks, and its first row is the sum of the sizes of the
chunks before it. So places of one area never overlap, whatever the sizes, and a place has room for exactly the chunk
that the list has there. What remains to be shown is of lists alone: hops copy a chunk to a place of that chunk, from a
place that holds it; each place is written once in a call, so that nothing is overwritten before it is read; whoever
reads a place waits for the message that writes it; the memory behind what arrives holds all that is passed on; and all
ends, even if one program makes all of a rank's hops in their order. By induction over the messages, each in its turn,
every place then holds its chunk.
"""

from collections.abc import Iterator
from typing import NamedTuple

from stretto.collectives.joint.routed import ARRIVED, FORWARDED, GIVEN, Hop, RoutedMessage, RoutedSchedule, count_pairs
from stretto.collectives.joint.schedule import NOBODY

_AREAS = {GIVEN: "given", FORWARDED: "forwarded", ARRIVED: "arrived"}


class _Brought(NamedTuple):
    """The message that writes a place."""

    sender: int
    message: RoutedMessage


def verify_routed(routed: RoutedSchedule) -> list[str]:
    """Verify it; returns what is wrong, each with its rank and its message, or nothing."""
    if errors := list(_find_bad_places(routed)):
        return errors
    writers: dict[tuple[int, int, int], _Brought] = {}  # by receiver, area and place
    errors = [*_find_collisions(routed, writers), *_find_blind_reads(routed, writers)]
    return errors or list(_find_cycles(routed))


def _name(rank: int, number: int) -> str:
    return f"rank {rank}, message {number}"


def _list_hops(routed: RoutedSchedule) -> Iterator[tuple[int, str, RoutedMessage, Hop]]:
    for rank, routes in enumerate(routed.ranks):
        for number, message in enumerate(routes.messages):
            for hop in message.hops:
                yield rank, _name(rank, number), message, hop


def _find_bad_places(routed: RoutedSchedule) -> Iterator[str]:
    """Find ranks, channels and places that are not there, and places of other chunks, and so of other sizes."""
    world, chunks = len(routed.ranks), len(routed.ranks) ** 2 * routed.pieces
    for rank, routes in enumerate(routed.ranks):
        if any(not 0 <= chunk < chunks for chunk in routes.forwarded):
            yield f"rank {rank} passes on a chunk that is not there: there are {chunks}"
        elif (needed := count_pairs(routes.forwarded, routed.pieces)) > routed.forwarded_pairs:
            yield (
                f"rank {rank} passes on rows of {needed} pairs of ranks, and its memory is for those of "
                f"{routed.forwarded_pairs}"
            )
        if len(routes.arrivals) != world * routed.pieces:
            yield f"rank {rank} waits for {len(routes.arrivals)} chunks, and {world * routed.pieces} arrive"
        for number, message in enumerate(routes.messages):
            if not (0 <= message.receiver < world and message.area in (FORWARDED, ARRIVED) and message.hops):
                yield f"{_name(rank, number)} goes to no place of a rank"
            elif not 0 <= message.channel < routed.channels:
                yield f"{_name(rank, number)}: there is no channel {message.channel} of {routed.channels}"
    lists = [[routed.list_places(rank, area) for area in _AREAS] for rank in range(world)]
    for rank, name, message, hop in _list_hops(routed):
        if not 0 <= message.receiver < world or message.area not in _AREAS or hop.area not in _AREAS:
            yield f"{name} goes from or to no area"
            continue
        for what, of, area, at in (
            ("reads", rank, hop.area, hop.number),
            ("writes", message.receiver, message.area, hop.to),
        ):
            places = lists[of][area]
            if not 0 <= at < len(places) or places[at] != hop.chunk:
                is_of = f"that of chunk {places[at]}" if 0 <= at < len(places) else "not there"
                yield f"{name} {what} chunk {hop.chunk} at place {at} of what is {_AREAS[area]}, which is {is_of}"


def _find_collisions(routed: RoutedSchedule, writers: dict[tuple[int, int, int], _Brought]) -> Iterator[str]:
    """Find places that are written twice or never, and signals that two messages give; note who writes what."""
    signals: dict[tuple[int, int, int], RoutedMessage] = {}
    for rank, name, message, hop in _list_hops(routed):
        place = message.receiver, message.area, hop.to
        if place in writers:
            yield f"{name} writes to a place that rank {writers[place].sender} writes to, of rank {message.receiver}"
        writers[place] = _Brought(rank, message)
        signal = message.receiver, rank, message.channel
        if signals.setdefault(signal, message) is not message:
            yield f"{name} gives the signal of another message: channel {message.channel} of rank {message.receiver}"
    for rank in range(len(routed.ranks)):
        for area in (FORWARDED, ARRIVED):
            for at, chunk in enumerate(routed.list_places(rank, area)):
                if (rank, area, at) not in writers:
                    yield f"rank {rank}: chunk {chunk}, place {at} of what is {_AREAS[area]}, is sent by no message"


def _find_blind_reads(routed: RoutedSchedule, writers: dict[tuple[int, int, int], _Brought]) -> Iterator[str]:
    """Find hops and tiles that wait for another message than the one that writes what they read."""

    def is_seen(rank: int, area: int, at: int, sender: int, channel: int) -> bool:
        if area == GIVEN:
            return sender == channel == NOBODY
        writer = writers.get((rank, area, at))
        return writer is not None and (writer.sender, writer.message.channel) == (sender, channel)

    for rank, name, _, hop in _list_hops(routed):
        if not is_seen(rank, hop.area, hop.number, hop.sender, hop.channel):
            yield f"{name} reads chunk {hop.chunk} before it is there"
    for rank, routes in enumerate(routed.ranks):
        for at, (sender, channel) in enumerate(routes.arrivals):
            if not is_seen(rank, ARRIVED, at, sender, channel):
                yield f"rank {rank}: tiles of chunk {routed.list_places(rank, ARRIVED)[at]} begin before it is there"


def _find_cycles(routed: RoutedSchedule) -> Iterator[str]:
    """Run all ranks' messages, each rank's in their order, and received in that of their channels, as between nodes:
    find one that waits for ever."""
    given: set[tuple[int, int, int]] = set()
    taken = [0] * len(routed.ranks)
    at, goes_on = [0] * len(routed.ranks), True
    while goes_on:
        goes_on = False
        for rank, routes in enumerate(routed.ranks):
            for message in routes.messages[at[rank] :]:
                waits = {(rank, hop.sender, hop.channel) for hop in message.hops if hop.sender != NOBODY}
                if not waits <= given or message.channel != taken[message.receiver]:
                    break
                given.add((message.receiver, rank, message.channel))
                taken[message.receiver] += 1
                at[rank] += 1
                goes_on = True
    for rank, routes in enumerate(routed.ranks):
        if at[rank] < len(routes.messages):
            message = routes.messages[at[rank]]
            awaited = ((hop.sender, hop.channel) for hop in message.hops if hop.sender != NOBODY)
            late = next((one for one in awaited if (rank, *one) not in given), (message.receiver, message.channel))
            yield f"{_name(rank, at[rank])} waits for ever for rank {late[0]}, channel {late[1]}"
            return
