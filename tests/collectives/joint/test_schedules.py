# SPDX-License-Identifier: Apache-2.0
"""Joint schedules: random algorithms are joined and proved, and every one that is broken on purpose is refused."""

import random
from dataclasses import replace

import pytest
from tests.collectives.joint.random_algorithms import COLLECTIVES, random_schedule

from stretto.collectives import AllReduce, verify
from stretto.collectives.algorithms import find
from stretto.collectives.joint.rewrite import cross_nodes, cut_chunks, keep_needed, pull, read_own_rows
from stretto.collectives.joint.schedule import (
    INPUT,
    LANDED,
    NOBODY,
    OUTPUT,
    Destination,
    Move,
    Rows,
    Source,
    join,
    require_collective,
)
from stretto.collectives.joint.verifier import verify_joint

SEED = random.randrange(2**31)
OPERATORS = list(COLLECTIVES)


def random_joint(rng, operator):
    """A random joint schedule, of a schedule that is verified, of several ranks."""
    ranks = rng.choice([2, 3, 4, 5, 8])
    schedule = random_schedule(rng, operator, ranks, rng.choice([1, 1, 2, 3]))
    assert verify(schedule, waive=["replica_consistency"]).ok
    require_collective(operator, schedule, ranks)
    rows = rng.randint(1, 40) * (ranks if operator == "matmul_reduce_scatter" else 1)
    joint = join(operator, schedule, rows, rng.choice([4, 16]))
    if operator == "all_gather_attention":  # of a mask that lets each rank see some chunks of others
        joint = keep_needed(joint, [set(rng.sample(range(joint.channels), joint.channels // 2)) for _ in range(ranks)])
    elif rng.random() < 0.5:
        joint = cut_chunks(joint, rng.randint(1, 12), 4)
    if operator == "all_gather_matmul" and rng.random() < 0.4:
        return read_own_rows(joint)
    if joint.is_gather and rng.random() < 0.5:
        return pull(joint)
    if operator != "all_gather_attention" and rng.random() < 0.5:
        return cross_nodes(joint, [rng.randrange(3) for _ in range(ranks)])
    return joint


@pytest.mark.parametrize("operator", OPERATORS)
def test_random_verified_schedules_are_proved(operator):
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    for _ in range(40):
        assert verify_joint(random_joint(rng, operator)) == []


def test_pieces_end_where_tiles_do_and_own_rows_are_read_first_without_a_copy():
    ring = find("ring-all-gather").compile(ranks=2)
    joint = read_own_rows(cut_chunks(join("all_gather_matmul", ring, 40, 8), 10, 8))
    assert verify_joint(joint) == []
    own, (first, *_) = [tile for tile in joint.ranks[1].tiles if tile.sender == NOBODY], joint.ranks[1].moves
    assert [tile.start for tile in joint.ranks[1].tiles] == [40, 48, 56, 64, 72, 0, 8, 16, 24, 32]
    assert own == list(joint.ranks[1].tiles[:5])
    assert first == Move(
        (Source(Rows(INPUT, 0, 16)),), (Destination(0, Rows(LANDED, 40, 56), first.destinations[0].channel),)
    )
    assert len(joint.ranks[1].moves) == 3  # of 16, 16 and 8 rows, to the other rank alone
    assert len({tile.channel for tile in joint.ranks[1].tiles[5:]}) == 3
    late = change_plan(joint, 1, tiles=(*joint.ranks[1].tiles[5:], *own))
    assert "do not come first" in verify_joint(late)[0]


@pytest.mark.parametrize("ranks", [2, 4, 5])
def test_tiles_of_direct_algorithms_have_fluxs_shift(ranks):
    for operator, name in (
        ("all_gather_matmul", "direct-all-gather"),  # as rows arrive: those of the rank before it first
        ("matmul_reduce_scatter", "direct-reduce-scatter"),
        ("matmul_all_reduce", "two-shot-all-reduce"),
    ):
        joint = join(operator, find(name).compile(ranks=ranks), 4 * ranks, 4 * ranks)
        step, first = (-1, 0) if joint.is_gather else (1, 1)
        for rank, plan in enumerate(joint.ranks):
            wanted = [(rank + first + step * turn) % ranks for turn in range(ranks)]
            assert [tile.channel for tile in plan.tiles] == wanted


def change_plan(joint, rank, **changes):
    plans = list(joint.ranks)
    plans[rank] = plans[rank]._replace(**changes)
    return replace(joint, ranks=tuple(plans))


def change_move(joint, rank, number, **changes):
    moves = list(joint.ranks[rank].moves)
    moves[number] = moves[number]._replace(**changes)
    return change_plan(joint, rank, moves=tuple(moves))


def change_one(rng, entries, change):
    """The entries with one of them changed, or None where there is none that can be."""
    changed = [(at, change(entry)) for at, entry in enumerate(entries)]
    changed = [(at, entry) for at, entry in changed if entry is not None]
    if not changed:
        return None
    at, entry = rng.choice(changed)
    return (*entries[:at], entry, *entries[at + 1 :])


def shift(rows, by):
    return rows._replace(start=rows.start + by, stop=rows.stop + by)


def drop_a_wait(rng, joint, rank, number):
    """A move that does not wait for a source of others."""
    waits = change_one(
        rng,
        joint.ranks[rank].moves[number].sources,
        lambda one: None if one.sender == NOBODY else one._replace(sender=NOBODY, channel=NOBODY),
    )
    return waits and change_move(joint, rank, number, sources=waits)


def wait_for_another(rng, joint, rank, number):
    """A move that waits for another channel of the sender's."""
    waits = change_one(
        rng,
        joint.ranks[rank].moves[number].sources,
        lambda one: None if one.sender == NOBODY else one._replace(channel=(one.channel + 1) % joint.channels),
    )
    return waits and change_move(joint, rank, number, sources=waits)


def read_a_row_off(rng, joint, rank, number):
    move = joint.ranks[rank].moves[number]
    by = rng.choice([-1, 1])
    return change_move(
        joint, rank, number, sources=change_one(rng, move.sources, lambda one: one._replace(rows=shift(one.rows, by)))
    )


def write_a_row_off(rng, joint, rank, number):
    move = joint.ranks[rank].moves[number]
    by = rng.choice([-1, 1])
    changed = change_one(rng, move.destinations, lambda one: one._replace(rows=shift(one.rows, by)))
    return change_move(joint, rank, number, destinations=changed)


def send_to_another_rank(rng, joint, rank, number):
    """The chunk arrives at the rank after the one that it is for."""
    ranks = len(joint.ranks)
    changed = change_one(
        rng,
        joint.ranks[rank].moves[number].destinations,
        lambda one: one._replace(rank=(one.rank + 1) % ranks) if one.rows.area == LANDED else None,
    )
    return changed and change_move(joint, rank, number, destinations=changed)


def use_a_place_again(rng, joint, rank, number):
    """Two moves write to one place."""
    others = [
        one for plan in joint.ranks for move in plan.moves for one in move.destinations if one.rows.area == LANDED
    ]

    def change(one):
        same = [
            other.rows
            for other in others
            if other.rank == one.rank
            and other.rows != one.rows
            and other.rows.stop - other.rows.start == one.rows.stop - one.rows.start
        ]
        return one._replace(rows=rng.choice(same)) if same and one.rows.area == LANDED else None

    changed = change_one(rng, joint.ranks[rank].moves[number].destinations, change)
    return changed and change_move(joint, rank, number, destinations=changed)


def lose_a_move(rng, joint, rank, number):
    moves = joint.ranks[rank].moves
    return change_plan(joint, rank, moves=moves[:number] + moves[number + 1 :])


def add_twice(rng, joint, rank, number):
    sources = joint.ranks[rank].moves[number].sources
    return change_move(joint, rank, number, sources=(*sources, rng.choice(sources)))


def map_a_tile_a_row_off(rng, joint, rank, number):
    tiles = joint.ranks[rank].tiles
    changed = change_one(rng, tiles, lambda tile: tile._replace(start=tile.start + 1, stop=tile.stop + 1))
    return changed and change_plan(joint, rank, tiles=changed)


def signal_another_chunk(rng, joint, rank, number):
    """A tile that waits for, or signals, another chunk than its own."""
    used = sorted({tile.channel for tile in joint.ranks[rank].tiles})
    if len(used) < 2:
        return None
    changed = change_one(
        rng, joint.ranks[rank].tiles, lambda tile: tile._replace(channel=used[used.index(tile.channel) - 1])
    )
    return change_plan(joint, rank, tiles=changed)


def wait_for_what_comes_later(rng, joint, rank, number):
    """A rank's last move that waits for another goes first, and one that others wait for goes last."""
    moves = joint.ranks[rank].moves
    waiting = [at for at, move in enumerate(moves) if any(one.sender not in (NOBODY, rank) for one in move.sources)]
    givers = [at for at, move in enumerate(moves) if any(one.rank != rank for one in move.destinations)]
    if not waiting or not givers or givers[0] >= waiting[-1]:
        return None
    last = moves[waiting[-1]]
    needs = {(rank, one.sender, one.channel) for one in last.sources}
    depends = {sender for _, sender, _ in needs if sender not in (NOBODY, rank)}
    if not any(
        source.sender == rank
        for sender in depends
        for move in joint.ranks[sender].moves
        if any((one.rank, sender, one.channel) in needs for one in move.destinations)
        for source in move.sources
    ):
        return None  # nothing that it needs is of this rank
    return change_plan(joint, rank, moves=(last, *moves[: waiting[-1]], *moves[waiting[-1] + 1 :]))


def receive_in_another_order(rng, joint, rank, number):
    """Two receives from one sender change places, or one is lost."""
    receives = list(joint.ranks[rank].receives)
    if not receives:
        return None
    at = rng.randrange(len(receives))
    same = [other for other in range(at) if receives[other].sender == receives[at].sender]
    if same:
        receives[at], receives[same[0]] = receives[same[0]], receives[at]
    else:
        del receives[at]
    return change_plan(joint, rank, receives=tuple(receives))


BREAKS = [
    drop_a_wait,
    wait_for_another,
    read_a_row_off,
    write_a_row_off,
    send_to_another_rank,
    use_a_place_again,
    lose_a_move,
    add_twice,
    map_a_tile_a_row_off,
    signal_another_chunk,
    wait_for_what_comes_later,
    receive_in_another_order,
]


@pytest.mark.parametrize("break_it", BREAKS)
def test_broken_ones_are_refused_by_name(break_it):
    print(f"seed {SEED}")
    rng, broken = random.Random(SEED), 0
    while broken < 20:
        joint = random_joint(rng, rng.choice(OPERATORS))
        rank = rng.randrange(len(joint.ranks))
        if not joint.ranks[rank].moves:
            continue
        changed = break_it(rng, joint, rank, rng.randrange(len(joint.ranks[rank].moves)))
        if changed is None or changed.ranks == joint.ranks:
            continue
        errors = verify_joint(changed)
        assert errors, (joint, changed)
        assert all("rank" in error for error in errors)
        broken += 1


def agree_on_no_signal(joint):
    """A message that nobody signals, and for which nobody's channel is waited for."""
    (to,), (_, add) = joint.ranks[1].moves[0].destinations, joint.ranks[0].moves
    joint = change_move(joint, 1, 0, destinations=(to._replace(channel=NOBODY),))
    sources = tuple(one._replace(channel=NOBODY) if one.sender == 1 else one for one in add.sources)
    return change_move(joint, 0, 1, sources=sources)


def signal_before_the_second_place(joint):
    """A move that gives one signal for two places."""
    (to,) = joint.ranks[0].moves[0].destinations
    there = Rows(LANDED, joint.landed_rows, joint.landed_rows + to.rows.stop - to.rows.start)
    joint = replace(joint, landed_rows=there.stop)
    return change_move(joint, 0, 0, destinations=(to, to._replace(rows=there)))


def signal_of_a_tile_to_another(joint):
    tile, *others = joint.ranks[0].tiles
    return change_plan(joint, 0, tiles=(tile._replace(sender=1), *others))


def read_other_elements(joint):
    """A sum that is kept, and read again in parts: a program of several has not written all that it reads."""
    *moves, add = joint.ranks[0].moves
    joint = replace(joint, landed_rows=joint.landed_rows + 4)
    kept = Rows(LANDED, joint.landed_rows - 4, joint.landed_rows)
    parts = [(Rows(LANDED, kept.start + at, kept.start + at + 2), Rows(OUTPUT, at, at + 2)) for at in (0, 2)]
    store = [Move((Source(part),), (Destination(0, to),)) for part, to in parts]
    return change_plan(joint, 0, moves=(*moves, add._replace(destinations=(Destination(0, kept),)), *store))


def test_receives_in_an_order_in_which_puts_wait_for_each_other_are_refused():
    """All ranks' first puts are to their neighbours, which would first receive what these put later."""
    schedule = find("recursive-doubling-all-gather").compile(ranks=4)
    joint = cross_nodes(join("all_gather_matmul", schedule, 8, 4), range(4))
    assert verify_joint(joint) == []
    for rank, plan in enumerate(joint.ranks):
        receives = tuple(sorted(plan.receives, key=lambda one, rank=rank: -(one.sender ^ rank)))
        joint = change_plan(joint, rank, receives=receives)
    assert "rank 0, move 1 puts for ever" in verify_joint(joint)[0]
    with pytest.raises(ValueError, match="is pulled, and between nodes rows are put"):
        cross_nodes(pull(join("all_gather_matmul", schedule, 8, 4)), range(4))


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (agree_on_no_signal, "waits for a rank on no channel"),
        (signal_before_the_second_place, "move 0 and rank 0, move 0 signal channel"),
        (signal_of_a_tile_to_another, "signals rank 1"),
        (read_other_elements, "before they are there"),
    ],
)
def test_what_only_a_kernel_would_meet_is_refused(break_it, words):
    joint = join("matmul_reduce_scatter", find("ring-reduce-scatter").compile(ranks=2), 8, 4)
    assert verify_joint(joint) == []
    assert words in verify_joint(break_it(joint))[0]


@pytest.mark.parametrize(
    ("source", "area"), [(Source(Rows(LANDED, 0, 8)), LANDED), (Source(Rows(INPUT, 0, 8)), OUTPUT)]
)
def test_a_gather_of_what_copy_engines_cannot_order_is_refused(source, area):
    """They make copies of a rank's own rows first, and all of them to gathered rows."""
    joint = replace(join("all_gather_matmul", find("ring-all-gather").compile(ranks=2), 8, 4), landed_rows=24)
    start = 16 if area == LANDED else 0
    extra = Move((source,), (Destination(0, Rows(area, start, start + 8)),))
    errors = verify_joint(change_plan(joint, 0, moves=(*joint.ranks[0].moves, extra)))
    assert "is not a copy of x" in errors[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"reduction": "max"}, "schedule of 'max'"), ({"in_place": False, "out_of_place": False}, "meant for no call")],
)
def test_schedules_of_other_sums_and_of_no_calls_are_refused(changes, words):
    schedule = replace(find("ring-all-reduce").compile(ranks=2), **changes)
    with pytest.raises(ValueError, match=words):
        require_collective("matmul_all_reduce", schedule, 2)


def test_a_collective_of_other_name_whose_sums_have_another_order_is_the_same():
    same = replace(AllReduce(2, 2), name="custom", expected=lambda rank, index: ((1, index), (0, index)))
    require_collective("matmul_all_reduce", replace(find("ring-all-reduce").compile(ranks=2), collective=same), 2)
