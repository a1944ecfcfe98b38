# SPDX-License-Identifier: Apache-2.0
"""From programs to schedules: the passes' choices, and the ways in which such compilers were wrong."""

import random

import pytest
from tests.collectives.machine import runs_right

from stretto.collectives import (
    AllGather,
    AllReduce,
    Buffer,
    Collective,
    StepType,
    chunk,
    compile_program,
    parallelize,
    trace,
    verify,
)


def compiled(collective, program, **options):
    with trace(collective) as traced:
        program()
    return compile_program(traced.program, name="test", **options)


def types(block):
    return [step.type.value for step in block.steps]


def all_steps(schedule, rank):
    return [step for block in schedule.ranks[rank].thread_blocks for step in block.steps]


def anything(ranks, inputs, outputs, expected):
    """An own collective; `expected` maps (rank, index) to what must be there."""
    return Collective("custom", ranks, inputs, outputs, lambda rank, index: expected.get((rank, index)))


def check(schedule, **options):
    found = verify(schedule, **options)
    assert found.ok, found.errors
    for seed in range(5):
        assert runs_right(schedule, schedule.collective, options.get("slots") or schedule.slots, random.Random(seed))


def ring(ranks):
    for index in range(ranks):
        c = chunk((index + 1) % ranks, "in", index)
        for hop in range(2, ranks + 1):
            c = chunk((index + hop) % ranks, "in", index).reduce(c)
        for hop in range(1, ranks):
            c = c.copy((index + hop) % ranks, "in", index)


def test_a_ring_all_reduce_is_one_thread_block_of_fused_steps():
    schedule = compiled(AllReduce(4, 4), lambda: ring(4))
    for rank, program in enumerate(schedule.ranks):
        (only,) = program.thread_blocks
        assert (only.send_peer, only.receive_peer) == ((rank + 1) % 4, (rank - 1) % 4)
        assert types(only) == ["s", "rrs", "rrs", "rrcs", "rcs", "rcs", "r"]
    check(schedule)


def test_without_fusion_every_message_is_a_send_and_a_receive():
    schedule = compiled(AllReduce(3, 3), lambda: ring(3), fusion=False)
    assert {step.type.value for step in all_steps(schedule, 0)} == {"s", "r", "rrc"}
    check(schedule)


def test_the_send_on_the_longest_path_is_fused():
    def program():
        c = chunk(0, "in", 0).copy(1, "scratch", 0)
        c.copy(2, "scratch", 0)
        c.copy(3, "scratch", 0).copy(4, "out", 0)

    schedule = compiled(anything(5, 1, 1, {(4, 0): ((0, 0),)}), program)
    (passing,) = [block for block in schedule.ranks[1].thread_blocks if "rcs" in types(block)]
    assert passing.send_peer == 3
    check(schedule)


def test_a_sum_that_is_used_locally_is_stored():
    def program():
        c = chunk(1, "in", 0).reduce(chunk(0, "in", 0))
        c.copy(2, "out", 0)
        c.copy(1, "out", 0)

    schedule = compiled(anything(3, 1, 1, {(1, 0): ((0, 0), (1, 0)), (2, 0): ((0, 0), (1, 0))}), program)
    assert "rrcs" in [step.type.value for step in all_steps(schedule, 1)]
    check(schedule)


def test_a_sum_that_the_collective_asks_for_is_stored():
    def program():
        c = chunk(0, "in", 0).copy(1, "out", 0)
        chunk(1, "out", 0).reduce(chunk(2, "in", 0)).copy(3, "out", 0)
        del c

    both = ((0, 0), (2, 0))
    schedule = compiled(anything(4, 1, 1, {(1, 0): both, (3, 0): both}), program)
    assert "rrcs" in [step.type.value for step in all_steps(schedule, 1)]
    check(schedule)
    schedule = compiled(anything(4, 1, 1, {(3, 0): both}), program)
    assert "rrs" in [step.type.value for step in all_steps(schedule, 1)]
    check(schedule)


def test_the_local_operand_of_a_reduce_is_read_where_it_is_and_not_where_the_senders_was():
    def program():
        chunk(1, "in", 3).copy(1, "out", 0)
        chunk(1, "out", 0).reduce(chunk(0, "in", 2))

    schedule = compiled(anything(2, 4, 1, {(1, 0): ((0, 2), (1, 3))}), program)
    (step,) = [step for step in all_steps(schedule, 1) if step.type is StepType.RECEIVE_REDUCE_COPY]
    assert (step.source_buffer, step.source) == (Buffer.OUT, 0)
    assert (step.destination_buffer, step.destination) == (Buffer.OUT, 0)
    check(schedule)


def test_a_chunk_passes_through_ranks_whose_scratch_is_laid_out_differently():
    def program():
        chunk(1, "in", 0).copy(1, "scratch", 0)
        c = chunk(0, "in", 0).copy(1, "scratch", 4)
        c = c.copy(2, "scratch", 1)
        c.copy(3, "out", 0)

    schedule = compiled(anything(4, 1, 1, {(3, 0): ((0, 0),)}), program)
    (at_one,) = [step for step in all_steps(schedule, 1) if step.type is StepType.RECEIVE_COPY_SEND]
    (at_two,) = [step for step in all_steps(schedule, 2) if step.type is StepType.RECEIVE_COPY_SEND]
    assert (at_one.destination_buffer, at_one.destination) == (Buffer.SCRATCH, 4)
    assert (at_two.destination_buffer, at_two.destination) == (Buffer.SCRATCH, 1)
    assert [program.scratch_chunks for program in schedule.ranks] == [0, 5, 2, 0]
    check(schedule)


@pytest.mark.parametrize("instances", [1, 2, 3, 4])
def test_an_instance_waits_for_every_instance_whose_chunks_its_message_carries(instances):
    # Four single chunks arrive, each in `instances` parts; then all four leave as one message, in `instances` parts
    # that each lie across the parts of several.
    def program():
        for index in range(4):
            chunk(0, "in", index).copy(1, "scratch", index)
        chunk(1, "scratch", 0, 4).copy(2, "out", 0)

    schedule = compiled(
        anything(3, 4, 4, {(2, index): ((0, index),) for index in range(4)}), program, instances=instances
    )
    check(schedule)


def test_fragments_with_different_instances_cut_chunks_finely_enough_for_both():
    def program():
        with parallelize(2):
            c = chunk(0, "in", 0).copy(1, "scratch", 0)
        with parallelize(3):
            c.copy(2, "out", 0)

    schedule = compiled(anything(3, 1, 1, {(2, 0): ((0, 0),)}), program)
    assert schedule.collective.input_chunks == 6
    assert {block.channel for block in schedule.ranks[0].thread_blocks} == {0, 1}
    assert len({block.channel for block in schedule.ranks[2].thread_blocks}) == 3
    check(schedule)


def test_instances_of_a_program_share_no_channel():
    schedule = compiled(AllReduce(4, 4), lambda: ring(4), instances=3)
    for program in schedule.ranks:
        assert sorted(block.channel for block in program.thread_blocks) == [0, 1, 2]
    assert schedule.collective.input_chunks == 12
    check(schedule)


def test_messages_go_over_the_channels_that_are_asked_for():
    def program():
        chunk(0, "in", 0).copy(1, "out", 0, ch=3)
        chunk(0, "in", 0).copy(1, "out", 1, ch=1)

    schedule = compiled(anything(2, 1, 2, {(1, 0): ((0, 0),), (1, 1): ((0, 0),)}), program)
    assert sorted(block.channel for block in schedule.ranks[0].thread_blocks) == [1, 3]
    check(schedule)


def test_a_chunk_from_one_peer_forwarded_to_two_others_takes_two_channels():
    def program():
        chunk(0, "in", 0).copy(1, "scratch", 0).copy(2, "out", 0)
        chunk(0, "in", 1).copy(1, "scratch", 1).copy(3, "out", 0)

    schedule = compiled(anything(4, 2, 1, {(2, 0): ((0, 0),), (3, 0): ((0, 1),)}), program)
    passing = [block for block in schedule.ranks[1].thread_blocks if types(block) == ["rcs"]]
    assert {(block.send_peer, block.channel) for block in passing} == {(2, 0), (3, 1)}
    check(schedule)


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_no_more_messages_are_sent_than_slots_before_one_is_received(slots):
    def program():
        for index in range(6):
            chunk(0, "in", index).copy(1, "scratch", index)
            chunk(1, "in", index).copy(0, "scratch", index)
        for index in range(6):
            chunk(0, "scratch", index).copy(0, "out", index)
            chunk(1, "scratch", index).copy(1, "out", index)

    expected = {(rank, index): ((1 - rank, index),) for rank in range(2) for index in range(6)}
    schedule = compiled(anything(2, 6, 6, expected), program, slots=slots)
    check(schedule, slots=slots)


@pytest.mark.parametrize("slots", [1, 2])
def test_messages_that_had_to_wait_for_a_slot_are_fused_all_the_same(slots):
    def program():
        for index in range(6):
            chunk(0, "in", index).copy(1, "scratch", index).copy(2, "out", index)

    schedule = compiled(anything(3, 6, 6, {(2, index): ((0, index),) for index in range(6)}), program, slots=slots)
    assert [types(block) for block in schedule.ranks[1].thread_blocks] == [["rcs"] * 6]
    check(schedule, slots=slots)


def test_steps_of_different_thread_blocks_wait_for_each_other_and_only_where_they_must():
    def program():
        c = chunk(0, "in", 0).copy(1, "out", 0)
        c.copy(2, "out", 0, ch=1)
        c.copy(3, "out", 0, ch=2)

    expected = {(rank, 0): ((0, 0),) for rank in (1, 2, 3)}
    schedule = compiled(anything(4, 1, 1, expected), program, fusion=False)
    receive = [block for block in schedule.ranks[1].thread_blocks if types(block) == ["r"]]
    sends = [block for block in schedule.ranks[1].thread_blocks if types(block) == ["s"]]
    assert len(receive) == 1
    assert receive[0].steps[0].awaited
    number = schedule.ranks[1].thread_blocks.index(receive[0])
    assert [send.steps[0].waits_for for send in sends] == [(number, 0)] * 2
    check(schedule)


def test_a_step_that_waits_for_several_others_has_nops_before_it_that_wait_too():
    def program():
        for source in (1, 2, 3):
            chunk(source, "in", 0).copy(0, "scratch", source)
        chunk(0, "scratch", 1, 3).copy(4, "out", 0)

    expected = {(4, index): ((index + 1, 0),) for index in range(3)}
    schedule = compiled(anything(5, 1, 3, expected), program)
    (send,) = [block for block in schedule.ranks[0].thread_blocks if block.send_peer == 4]
    assert types(send) == ["nop", "nop", "s"]
    assert len({step.waits_for for step in send.steps}) == 3
    check(schedule)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"protocol": "LL64"}, "the protocols are Simple, LL, LL128, not 'LL64'"),
        ({"instances": 0}, "at least 1 instance, not 0"),
        ({"instances": 10**7}, "more than 1048576 chunks"),
        ({"slots": 0}, "at least 1 FIFO slot, not 0"),
        ({"min_bytes": 5, "max_bytes": 4}, "no range"),
    ],
)
def test_options_that_cannot_be_are_refused(options, why):
    with pytest.raises(ValueError, match=why):
        compiled(AllGather(2), lambda: chunk(0, "in", 0).copy(1, "out", 0), **options)


def test_an_empty_program_is_a_schedule_without_steps():
    schedule = compiled(anything(2, 1, 1, {}), lambda: None)
    assert schedule.steps == 0
    check(schedule)
