# SPDX-License-Identifier: Apache-2.0
"""Routed schedules: random all-to-alls are proved for any sizes, and every one that is broken on purpose is refused."""

import random
from dataclasses import replace

import pytest
from tests.collectives.joint.random_algorithms import random_all_to_all
from tests.collectives.joint.test_schedules import change_one

from stretto.collectives import AllToAll, verify
from stretto.collectives.algorithms import find
from stretto.collectives.joint.routed import ARRIVED, FORWARDED, GIVEN, route
from stretto.collectives.joint.routed_verifier import verify_routed
from stretto.collectives.joint.schedule import NOBODY, require_collective

SEED = random.randrange(2**31)


def random_routed(rng):
    schedule = random_all_to_all(rng, rng.choice([2, 3, 4, 5, 8]), rng.choice([1, 1, 2]))
    assert verify(schedule).ok
    return route(schedule)


def run(routed, rng):
    """What each rank's rows are in the end, of random numbers of rows, in memory of the sizes that are declared.

    A row is (source, target, number). Ranks take turns at random, each hop as soon as its message's have come.
    """
    world, pieces = len(routed.ranks), routed.pieces
    counts = [[rng.choice([0, 1, 5, 8]) for _ in range(world)] for _ in range(world)]
    given = [[(s, t, i) for t in range(world) for i in range(counts[s][t])] for s in range(world)]
    most = max(map(max, counts))
    room = {FORWARDED: routed.forwarded_pairs * most, ARRIVED: most * world}
    memory = [{area: [None] * size for area, size in room.items()} | {GIVEN: given[rank]} for rank in range(world)]

    def place(rank, area, number):
        sizes = []
        for chunk in routed.list_places(rank, area):
            pair, piece = divmod(chunk, pieces)
            each = -(-counts[pair // world][pair % world] // pieces)
            sizes.append(max(0, min(counts[pair // world][pair % world] - piece * each, each)))
        return slice(sum(sizes[:number]), sum(sizes[: number + 1]))

    signals, at = set(), [0] * world
    while left := [rank for rank in range(world) if at[rank] < len(routed.ranks[rank].messages)]:
        ready = []
        for rank in left:
            message = routed.ranks[rank].messages[at[rank]]
            if all(hop.sender == NOBODY or (rank, hop.sender, hop.channel) in signals for hop in message.hops):
                ready.append((rank, message))
        rank, message = rng.choice(ready)
        for hop in message.hops:
            rows = memory[rank][hop.area][place(rank, hop.area, hop.number)]
            there = place(message.receiver, message.area, hop.to)
            assert there.stop <= room[message.area]
            assert len(rows) == there.stop - there.start
            memory[message.receiver][message.area][there] = rows
        signals.add((message.receiver, rank, message.channel))
        at[rank] += 1
    expected = [[(s, t, i) for s in range(world) for i in range(counts[s][t])] for t in range(world)]
    return [memory[t][ARRIVED][: len(expected[t])] for t in range(world)], expected


def test_random_verified_all_to_alls_are_proved_and_bring_rows_of_any_number():
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    for _ in range(60):
        routed = random_routed(rng)
        assert verify_routed(routed) == []
        found, expected = run(routed, rng)
        assert found == expected


@pytest.mark.parametrize(("nodes", "gpus"), [(2, 2), (2, 4), (4, 2)])
@pytest.mark.parametrize("in_place", [False, True])
def test_two_steps_send_one_message_to_each_other_node(nodes, gpus, in_place):
    schedule = find("two-step-all-to-all").compile(nodes=nodes, gpus=gpus, in_place=in_place)
    require_collective("dispatch_grouped_matmul", schedule, nodes * gpus)
    routed = route(schedule)
    assert verify_routed(routed) == []
    assert routed.forwarded_pairs == (nodes - 1) * (gpus - 1)
    for rank, routes in enumerate(routed.ranks):
        across = [message for message in routes.messages if message.receiver // gpus != rank // gpus]
        assert sorted(message.receiver // gpus for message in across) == [n for n in range(nodes) if n != rank // gpus]
        for message in across:
            assert len(message.hops) == gpus
            places = [hop.to for hop in message.hops]
            assert places == list(range(places[0], places[0] + gpus))


def change_routes(routed, rank, **changes):
    ranks = list(routed.ranks)
    ranks[rank] = ranks[rank]._replace(**changes)
    return replace(routed, ranks=tuple(ranks))


def change_message(routed, rank, number, **changes):
    messages = list(routed.ranks[rank].messages)
    messages[number] = messages[number]._replace(**changes)
    return change_routes(routed, rank, messages=tuple(messages))


def change_hop(rng, routed, rank, number, change):
    hops = change_one(rng, routed.ranks[rank].messages[number].hops, change)
    return hops and change_message(routed, rank, number, hops=hops)


def drop_a_wait(rng, routed, rank, number):
    return change_hop(
        rng, routed, rank, number,
        lambda hop: None if hop.sender == NOBODY else hop._replace(sender=NOBODY, channel=NOBODY),
    )  # fmt: skip


def wait_for_another_message(rng, routed, rank, number):
    return change_hop(
        rng, routed, rank, number,
        lambda hop: None if hop.sender == NOBODY else hop._replace(channel=(hop.channel + 1) % routed.channels),
    )  # fmt: skip


def wait_for_another_rank(rng, routed, rank, number):
    world = len(routed.ranks)
    return change_hop(
        rng, routed, rank, number,
        lambda hop: None if hop.sender == NOBODY else hop._replace(sender=(hop.sender + 1) % world),
    )  # fmt: skip


def read_the_next_place(rng, routed, rank, number):
    return change_hop(rng, routed, rank, number, lambda hop: hop._replace(number=hop.number + rng.choice([-1, 1])))


def write_the_next_place(rng, routed, rank, number):
    return change_hop(rng, routed, rank, number, lambda hop: hop._replace(to=hop.to + rng.choice([-1, 1])))


def move_another_chunk(rng, routed, rank, number):
    return change_hop(rng, routed, rank, number, lambda hop: hop._replace(chunk=hop.chunk + rng.choice([-1, 1])))


def send_to_another_rank(rng, routed, rank, number):
    receiver = (routed.ranks[rank].messages[number].receiver + 1) % len(routed.ranks)
    return change_message(routed, rank, number, receiver=receiver)


def use_a_place_again(rng, routed, rank, number):
    """What a rank passes on comes to a place that another chunk has, of the same pair's."""
    forwarded = list(routed.ranks[rank].forwarded)
    if len(forwarded) < 2:
        return None
    at, other = rng.sample(range(len(forwarded)), 2)
    if forwarded[at] == forwarded[other]:
        return None
    forwarded[at] = forwarded[other]
    return change_routes(routed, rank, forwarded=tuple(forwarded))


def swap_places(rng, routed, rank, number):
    forwarded = routed.ranks[rank].forwarded
    return change_routes(routed, rank, forwarded=forwarded[1:] + forwarded[:1])


def take_too_little_memory(rng, routed, rank, number):
    return replace(routed, forwarded_pairs=routed.forwarded_pairs - 1) if routed.forwarded_pairs else None


def lose_a_message(rng, routed, rank, number):
    messages = routed.ranks[rank].messages
    return change_routes(routed, rank, messages=messages[:number] + messages[number + 1 :])


def send_twice(rng, routed, rank, number):
    messages = routed.ranks[rank].messages
    return change_routes(routed, rank, messages=(*messages, messages[number]))


def give_one_signal_for_two(rng, routed, rank, number):
    messages = routed.ranks[rank].messages
    same = [other for other in messages if other.receiver == messages[number].receiver]
    return change_message(routed, rank, number, channel=rng.choice(same).channel)


def begin_tiles_early(rng, routed, rank, number):
    changed = change_one(rng, routed.ranks[rank].arrivals, lambda one: (one[0], (one[1] + 1) % routed.channels))
    return change_routes(routed, rank, arrivals=changed)


def wait_for_what_comes_later(rng, routed, rank, number):
    """Every rank first sends what it passes on: of two that wait for each other none does."""
    for each, routes in enumerate(routed.ranks):
        last = [message for message in routes.messages if any(hop.sender != NOBODY for hop in message.hops)]
        first = [message for message in routes.messages if message not in last]
        routed = change_routes(routed, each, messages=(*last, *first))
    waits = {
        (rank, hop.sender)
        for rank, routes in enumerate(routed.ranks)
        for message in routes.messages[:1]
        for hop in message.hops
        if hop.sender != NOBODY
    }
    return routed if any((sender, rank) in waits for rank, sender in waits) else None


def receive_in_another_order(rng, routed, rank, number):
    """Two messages of one rank to another have each other's channels, which all who wait for them know."""
    message = routed.ranks[rank].messages[number]
    both = [at for at, one in enumerate(routed.ranks[rank].messages) if one.receiver == message.receiver]
    if len(both) < 2 or message.receiver == rank:
        return None
    one, other = (routed.ranks[rank].messages[at].channel for at in rng.sample(both, 2))
    swapped = {(rank, one): (rank, other), (rank, other): (rank, one)}
    for at in both:
        channel = routed.ranks[rank].messages[at].channel
        routed = change_message(routed, rank, at, channel=swapped.get((rank, channel), (rank, channel))[1])
    for at, sent in enumerate(routed.ranks[message.receiver].messages):
        hops = [hop._replace(channel=swapped.get(hop[-2:], hop[-2:])[1]) for hop in sent.hops]
        routed = change_message(routed, message.receiver, at, hops=tuple(hops))
    arrivals = [swapped.get(one, one) for one in routed.ranks[message.receiver].arrivals]
    return change_routes(routed, message.receiver, arrivals=tuple(arrivals))


BREAKS = [
    receive_in_another_order,
    drop_a_wait,
    wait_for_another_message,
    wait_for_another_rank,
    read_the_next_place,
    write_the_next_place,
    move_another_chunk,
    send_to_another_rank,
    use_a_place_again,
    swap_places,
    take_too_little_memory,
    lose_a_message,
    send_twice,
    give_one_signal_for_two,
    begin_tiles_early,
    wait_for_what_comes_later,
]


@pytest.mark.parametrize("break_it", BREAKS)
def test_broken_ones_are_refused_by_name(break_it):
    print(f"seed {SEED}")
    rng, broken = random.Random(SEED), 0
    while broken < 15:
        routed = random_routed(rng)
        rank = rng.randrange(len(routed.ranks))
        changed = break_it(rng, routed, rank, rng.randrange(len(routed.ranks[rank].messages)))
        if changed is None or (changed.ranks, changed.forwarded_pairs) == (routed.ranks, routed.forwarded_pairs):
            continue
        errors = verify_routed(changed)
        assert errors, (routed, changed)
        assert all("rank" in error for error in errors)
        broken += 1


def test_schedules_of_other_collectives_are_refused_with_those_that_would_do():
    for schedule in (find("all-to-next").compile(nodes=2, gpus=2), find("ring-all-gather").compile(ranks=4)):
        with pytest.raises(ValueError, match="would do: direct-all-to-all, two-step-all-to-all"):
            require_collective("dispatch_grouped_matmul", schedule, 4)
    with pytest.raises(ValueError, match="would do: ring-all-reduce, one-shot-all-reduce"):
        require_collective("matmul_all_reduce", find("all-to-next").compile(nodes=2, gpus=2), 4)
    same = replace(find("direct-all-to-all").compile(ranks=4), collective=replace(AllToAll(4), name="custom"))
    require_collective("embedding_all_to_all", same, 4)
