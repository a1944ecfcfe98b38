# SPDX-License-Identifier: Apache-2.0
"""The verifier finds faults in schedules written by hand, and names their places."""

import tracemalloc

import pytest
from tests.collectives.schedules import block, schedule, step
from tests.fuzzing import cpu_limit

from stretto.collectives import AllReduce, Broadcast, Collective, from_xml, to_xml, verify
from stretto.collectives.algorithms import one_shot_all_reduce, ring_all_reduce
from stretto.collectives.verifier import races

SUM = AllReduce(2, 1, in_place=True)
IN_TIME = pytest.mark.usefixtures("limit_of_seconds")
"""Of what takes seconds, and minutes where work grows with the square of the schedule."""


@pytest.fixture
def limit_of_seconds():
    with cpu_limit(25):
        yield


def exchange(*, wait=True, wait_for_send=True):
    """An all-reduce of 2 ranks: each sends its chunk, and adds what it got into scratch."""
    ranks = []
    for rank in range(2):
        peer = 1 - rank
        receives = block(step("r", None, ("scratch", 0), awaited=True), receive=peer)
        sends = block(step("s", ("in", 0), awaited=True), send=peer)
        adds = block(
            *([step("nop", waits_for=(1, 0))] if wait_for_send else []),
            step("re", ("scratch", 0), ("in", 0), waits_for=(0, 0) if wait else None),
        )
        ranks.append([receives, sends, adds])
    return schedule(SUM, *ranks)


def test_a_right_schedule_verifies():
    found = verify(exchange())
    assert found.ok
    assert found.postcondition
    assert found.deadlock_free
    assert found.replica_consistent
    assert (found.min_slots, found.roundings, found.races, found.errors) == (1, 1, (), ())


def test_a_missing_wait_is_a_race_at_its_place():
    found = verify(exchange(wait=False))
    assert not found.ok
    assert {(race.kind, race.rank, race.buffer, race.index) for race in found.races} == {
        ("read-write", 0, "scratch", 0),
        ("read-write", 1, "scratch", 0),
    }
    assert "rank 0, thread block 2, step 1 (re)" in found.races[0].other + found.races[0].one


def test_writing_what_another_thread_block_still_sends_is_a_race():
    found = verify(exchange(wait_for_send=False))
    assert {(race.kind, race.buffer) for race in found.races} == {("read-write", "in")}
    assert any("make the later one wait" in error for error in found.errors)


def test_two_writers_in_no_order_are_a_race():
    only_root = Collective("custom", 1, 2, 1, lambda rank, index: None)
    found = verify(
        schedule(only_root, [block(step("cpy", ("in", 0), ("out", 0))), block(step("cpy", ("in", 1), ("out", 0)))])
    )
    assert [race.kind for race in found.races] == ["write-write"]


def test_a_race_is_found_on_any_chunk_of_a_step():
    wide = Collective("custom", 1, 4, 4, lambda rank, index: None)
    found = verify(
        schedule(
            wide, [block(step("cpy", ("in", 0), ("out", 0), size=3)), block(step("cpy", ("in", 3), ("out", 2), size=1))]
        )
    )
    assert [(race.kind, race.index) for race in found.races] == [("write-write", 2)]


def test_an_order_that_leads_over_another_rank_is_no_race():
    # Rank 0 sends its chunk; rank 1 answers when it has it; only then rank 0 overwrites it, in another thread block.
    there_and_back = Collective("custom", 2, 1, 1, lambda rank, index: ((1, 0),) if rank == 0 else None, in_place=True)
    found = verify(
        schedule(
            there_and_back,
            [block(step("s", ("in", 0)), send=1), block(step("r", None, ("in", 0)), receive=1)],
            [block(step("r", None, ("scratch", 0)), step("s", ("in", 0)), send=0, receive=0)],
        )
    )
    assert found.ok, found.errors


def test_waits_in_a_circle_are_a_deadlock_at_any_number_of_slots():
    circle = Collective("custom", 1, 1, 2, lambda rank, index: None)
    found = verify(
        schedule(
            circle,
            [
                block(step("cpy", ("in", 0), ("out", 0), waits_for=(1, 0), awaited=True)),
                block(step("cpy", ("in", 0), ("out", 1), waits_for=(0, 0), awaited=True)),
            ],
        )
    )
    assert (found.ok, found.deadlock_free, found.min_slots) == (False, False, None)
    assert found.postcondition is None
    assert "thread block 0, step 0 (cpy) waits for rank 0, thread block 1, step 0" in found.errors[0]


@pytest.mark.parametrize("k", [2, 3, 5])
def test_k_sends_before_k_receives_need_k_slots(k):
    swap = Collective("custom", 2, k, k, lambda rank, index: ((1 - rank, index),))
    ranks = [
        [
            block(
                *(step("s", ("in", index)) for index in range(k)),
                *(step("r", None, ("out", index)) for index in range(k)),
                send=1 - rank,
                receive=1 - rank,
            )
        ]
        for rank in range(2)
    ]
    made = schedule(swap, *ranks)
    few = verify(made, slots=k - 1)
    assert (few.ok, few.deadlock_free, few.min_slots) == (False, False, k)
    assert f"deadlock with {k - 1} FIFO slots" in few.errors[0]
    assert "needs the slot that" in few.errors[0]
    assert verify(made, slots=k).ok


def test_a_chunk_that_is_counted_twice_breaks_the_postcondition():
    twice = schedule(AllReduce(1, 1, in_place=True), [block(step("re", ("in", 0), ("in", 0)))])
    found = verify(twice)
    assert not found.postcondition
    assert "out[0] of rank 0 holds 2 x in[0] of rank 0, but in[0] of rank 0 is wanted" in found.errors[0]


def test_ranks_that_add_in_different_orders_are_inconsistent_unless_waived():
    made = one_shot_all_reduce.compile(ranks=3)
    assert verify(made).replica_consistent
    # Rank 2 adds its own chunk to the first that it has, and then the other: (2 + 0) + 1 instead of (0 + 1) + 2.
    chunks = AllReduce(3, 1, in_place=True)
    ranks = []
    for rank in range(3):
        others = [other for other in range(3) if other != rank]
        blocks = [block(step("s", ("in", 0), awaited=True), send=other) for other in others]
        blocks += [block(step("r", None, ("scratch", other), awaited=True), receive=other) for other in others]
        waits = [step("nop", waits_for=(number, 0)) for number in range(3)]
        adds = [step("re", ("scratch", other), ("in", 0)) for other in others]
        adds[0] = adds[0]._replace(waits_for=(3, 0))
        ranks.append([*blocks, block(*waits, *adds)])
    found = verify(schedule(chunks, *ranks))
    assert found.postcondition
    assert found.replica_consistent is False
    assert not found.ok
    assert "add out[0] in different orders" in found.errors[0]
    waived = verify(schedule(chunks, *ranks), waive=["replica_consistency"])
    assert waived.ok
    assert waived.replica_consistent is False


def test_malformed_schedules_are_named():
    two = Collective("custom", 2, 2, 2, lambda rank, index: None)

    def errors(*ranks, **options):
        found = verify(schedule(two, *ranks, **options))
        assert not found.ok
        assert found.postcondition is None
        return found.errors

    (error,) = errors([block(step("cpy", ("in", 1), ("out", 0), size=2))], [])
    assert (
        error == "rank 0, thread block 0, step 0 (cpy): its source, 2 chunks of in from 1, is out of bounds: in has 2"
    )
    (error,) = errors([block(step("s", ("in", 0)), send=1)], [])
    assert error.startswith("1 sends but 0 receives from rank 0 to rank 1 on channel 0")
    (error,) = errors(
        [block(step("s", ("in", 0), size=2), send=1)], [block(step("r", None, ("out", 0), size=1), receive=0)]
    )
    assert error.endswith("sends 2 chunks, but rank 1, thread block 0, step 0 (r) receives 1")
    (error,) = errors([block(step("cpy", ("in", 0), ("out", 0), size=0))], [])
    assert error == "rank 0, thread block 0, step 0 (cpy) handles 0 chunks"
    (error,) = errors([block(step("nop", waits_for=(3, 0)))], [])
    assert error == "rank 0, thread block 0, step 0 (nop) waits for step 0 of thread block 3, which is not there"
    (error,) = errors([block(step("nop", waits_for=(1, 0))), block(step("cpy", ("in", 0), ("out", 0)))], [])
    assert "whose end is never published" in error
    (error,) = errors([block(step("s", ("in", 0)))], [])
    assert error.endswith("sends, but its thread block has no peer to send to")
    sends = [block(step("s", ("in", 0)), send=1), block(step("s", ("in", 0)), send=1)]
    receives = [block(step("r", None, ("out", 0)), step("r", None, ("out", 0)), receive=0)]
    (error,) = errors(sends, receives)
    assert error.startswith("rank 0: thread blocks 0 and 1 both send from rank 0 to rank 1 on channel 0")


def test_chunks_that_overlap_in_memory_are_not_copied_whatever_their_buffers_are_called():
    shift = Collective("shift", 1, 3, 3, lambda rank, index: ((0, max(0, index - 1)),), in_place=True)
    for buffer in ("in", "out"):
        found = verify(schedule(shift, [block(step("cpy", ("in", 0), (buffer, 1), size=2))]))
        assert "reads and writes chunks that overlap" in found.errors[0]
    apart = Collective("shift", 1, 3, 3, lambda rank, index: ((0, index - 1),) if index else None)
    assert verify(schedule(apart, [block(step("cpy", ("in", 0), ("out", 1), size=2))])).ok


def test_a_thread_block_that_only_holds_a_connection_is_a_second_one():
    two = Collective("custom", 2, 1, 1, lambda rank, index: None)
    idle = block(step("nop"), send=1)
    found = verify(
        schedule(two, [block(step("s", ("in", 0)), send=1), idle], [block(step("r", None, ("out", 0)), receive=0)])
    )
    assert "thread blocks 0 and 1 both send" in found.errors[0]


def test_reading_what_holds_nothing_is_an_error():
    found = verify(schedule(Broadcast(1, root=0, in_place=False), [block(step("cpy", ("scratch", 2), ("out", 0)))]))
    assert found.errors[0] == "rank 0, thread block 0, step 0 (cpy) reads a chunk that holds nothing yet"


def test_a_schedule_for_both_kinds_of_call_is_verified_for_both():
    made = ring_all_reduce.compile(ranks=3, in_place=True)
    both = schedule(made.collective, *[list(rank.thread_blocks) for rank in made.ranks], out_of_place=True)
    found = verify(both)
    assert not found.ok, "it puts the sums into the input"
    assert found.writes_input


def test_steps_after_a_wait_may_rely_on_the_named_step_alone():
    # The wait ends with the first published step from the named one on; but a runtime that publishes every end lets
    # the reader go on before the second step.
    one = Collective("custom", 1, 2, 2, lambda rank, index: ((0, index),))
    first = block(step("cpy", ("in", 0), ("out", 0)), step("cpy", ("in", 1), ("scratch", 0), awaited=True))
    second = block(step("cpy", ("scratch", 0), ("out", 1), waits_for=(0, 0)))
    found = verify(schedule(one, [first, second]))
    assert (found.deadlock_free, len(found.races)) == (True, 1)
    waits_for_both = second._replace(steps=(second.steps[0]._replace(waits_for=(0, 1)),))
    assert verify(schedule(one, [first, waits_for_both])).ok


def test_a_wait_for_an_end_that_is_published_too_late_is_a_deadlock():
    one = Collective("custom", 1, 2, 2, lambda rank, index: None)
    first = block(step("cpy", ("in", 0), ("out", 0)), step("nop", waits_for=(1, 0), awaited=True))
    second = block(step("cpy", ("in", 1), ("out", 1), waits_for=(0, 0), awaited=True))
    assert verify(schedule(one, [first, second])).min_slots is None


def test_an_unknown_collective_is_not_verified():
    made = schedule(Collective("scan", 1, 1, 1, lambda rank, index: None), [])
    read = from_xml(to_xml(made))
    found = verify(read)
    assert not found.ok
    assert "the conditions of 'scan' are unknown" in found.errors[0]
    assert verify(from_xml(to_xml(made), collective=made.collective)).ok


def test_options_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="at least 1 FIFO slot, not 0"):
        verify(exchange(), slots=0)
    with pytest.raises(ValueError, match="'races' cannot be waived"):
        verify(exchange(), waive=["races"])


@pytest.mark.long
@IN_TIME
def test_many_chunks_that_want_one_long_sum_are_compared_in_time():
    # 2^19 outputs want a sum of 2048 chunks each: to hash it, or to count it, for each of them would take minutes.
    only_own = [block(step("cpy", ("in", 0), ("out", 0), size=256))]
    made = schedule(AllReduce(2048, 256, in_place=False), *[only_own] * 2048)
    assert not verify(made).postcondition


def test_a_chunk_that_is_doubled_without_end_is_not_what_is_wanted():
    doubled = block(step("cpy", ("in", 0), ("out", 0)), *[step("re", ("out", 0), ("out", 0))] * 20000)
    found = verify(schedule(Broadcast(1, root=0, in_place=False), [doubled]))
    assert found.postcondition is False
    assert f"out[0] of rank 0 holds a sum of {2**62} input chunks or more" in found.errors[0]


@IN_TIME
def test_many_thread_blocks_with_a_connection_each_are_checked_in_time():
    channels = 32_000  # to look at each beside each other took eight seconds for a quarter of them
    givers = [block(step("s", ("in", 0)), send=1, channel=channel) for channel in range(channels)]
    takers = [block(receive=0, channel=channel) for channel in range(channels)]
    assert "1 sends but 0 receives" in verify(schedule(AllReduce(2, 1), givers, takers)).errors[0]


@IN_TIME
def test_an_order_that_leads_far_over_another_rank_is_found_in_time():
    """Rank 0 writes many chunks and says so once, over rank 1, to the thread block that reads them one by one."""
    chunks = 20_000  # to follow the order anew for each took 38 s
    writes = [step("cpy", ("in", 0), ("scratch", index)) for index in range(chunks)]
    reads = [step("cpy", ("scratch", index), ("out", 0)) for index in range(chunks)]
    found = verify(
        schedule(
            Collective("custom", 2, 1, 1, lambda rank, index: None),
            [block(*writes, step("s", ("in", 0)), send=1), block(step("r", None, ("out", 0)), *reads, receive=1)],
            [block(step("r", None, ("out", 0)), step("s", ("out", 0)), send=0, receive=0)],
            scratch=chunks,
        )
    )
    assert found.ok


@pytest.mark.long
def test_waits_among_many_thread_blocks_take_no_room_for_each_pair():
    """Every step waits for the one before it in a ring of thread blocks, so that each knows of all others."""
    blocks, rounds = 500, 10

    def waits(number, at):
        return (number - 1, at) if number else (blocks - 1, at - 1) if at else None

    ring = [
        block(
            *[step("cpy", ("in", 0), ("scratch", 0), waits_for=waits(number, at), awaited=True) for at in range(rounds)]
        )
        for number in range(blocks)
    ]
    tracemalloc.start()
    try:
        found = verify(schedule(AllReduce(1, 1), ring))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.ok
    assert peak < 20 * 2**20


@pytest.mark.long
@IN_TIME
def test_a_long_circle_of_waits_is_described_in_time():
    """Two thread blocks of many steps, each of whose first step waits for the last one of the other."""
    rest = [step("cpy", ("in", 0), ("scratch", 0))] * 30_000  # to search each in a list took 29 s
    blocks = [
        block(
            step("nop", waits_for=(1 - number, len(rest) + 1)),
            *rest,
            step("cpy", ("in", 0), ("scratch", 0), awaited=True),
        )
        for number in range(2)
    ]
    (error,) = verify(schedule(AllReduce(1, 1), blocks)).errors
    assert error.startswith("deadlock with 2 FIFO slots a connection: rank 0, thread block 0, step 0 (nop) waits for")


@pytest.mark.long
def test_countless_chunks_that_no_step_touches_are_not_all_checked():
    chunks = 2**18
    found = verify(schedule(AllReduce(4, chunks), [], [], [], [], scratch=0))
    assert found.postcondition is False
    assert found.errors[-1] == "postcondition: 990 or more chunks are wrong besides"


def test_races_that_cannot_be_decided_in_time_are_an_error(monkeypatch):
    """A thread block that begins late, after another rank's many steps, reads what another one of its rank wrote."""
    monkeypatch.setattr(races, "MAX_LOOKED_AT", 1000)
    chunks = 100
    writes = [step("cpy", ("in", 0), ("scratch", index)) for index in range(chunks)]
    reads = [step("cpy", ("scratch", index), ("out", 0)) for index in range(chunks)]
    others = [step("cpy", ("in", 0), ("scratch", 0))] * 2 * chunks
    found = verify(
        schedule(
            Collective("custom", 2, 1, 1, lambda rank, index: None),
            [block(*writes), block(step("r", None, ("out", 0)), *reads, receive=1)],
            [block(*others, step("s", ("in", 0)), send=0)],
            scratch=chunks,
        )
    )
    assert not found.ok
    assert 0 < len(found.races) < chunks
    assert found.errors[0].startswith("data races: 1,000 steps were looked at for paths that order others")
