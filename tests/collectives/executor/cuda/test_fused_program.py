# SPDX-License-Identifier: Apache-2.0
"""Fused programs give the right numbers when all ranks go through the levels one after another, on numbers."""

import random

import pytest

from stretto.collectives import AllReduce, Broadcast, algorithm, chunk
from stretto.collectives.algorithms import ALGORITHMS
from stretto.collectives.collective import Buffer, Collective
from stretto.collectives.executor.cuda.fused.program import ChunkPlace, lower_to_fused_program

SIZES = [{"ranks": ranks} for ranks in (2, 3, 4, 5, 8)]
SHAPES = [{"nodes": nodes, "gpus": gpus} for nodes, gpus in ((1, 2), (2, 2), (2, 3), (3, 2))]


def sizes(name):
    if name == "dgx1-all-gather":
        return [{"ranks": 8}]
    return SHAPES if "nodes" in ALGORITHMS[name].parameters else SIZES


def run(fused, inputs):
    """Every rank's memory after the collective, a number a chunk: all ranks level by level, in a random order."""
    collective = fused.collective
    memory = [
        {ChunkPlace(*collective.place(rank, Buffer.IN, index)): given for index, given in enumerate(inputs[rank])}
        for rank in range(collective.ranks)
    ]
    mail = [{} for _ in range(collective.ranks)]
    values = [{} for _ in range(collective.ranks)]
    for level in range(fused.num_hops + 1):
        arrived = [dict(box) for box in mail]  # what is sent in this level comes in the next
        for rank in random.sample(range(collective.ranks), collective.ranks):
            program, held = fused.ranks[rank], values[rank]
            if level >= len(program.levels):
                continue
            now = program.levels[level]
            for receive in now.receives:
                sender, held[receive.value] = arrived[rank].pop(receive.message)
                del mail[rank][receive.message]
                assert sender == receive.peer
            for load in now.loads:
                held[load.value] = memory[rank][load.place]
            for reduce in now.reduces:
                held[reduce.value] = held[reduce.left] + held[reduce.right]
            for send in now.sends:
                assert send.message not in mail[send.peer]
                mail[send.peer][send.message] = rank, held[send.value]
            for store in now.stores:
                memory[rank][store.place] = held[store.value]
    assert not any(mail)
    return memory


@pytest.mark.parametrize("instances", [1, 2])
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_algorithm_gives_the_right_numbers_and_keeps_its_input(name, instances):
    for size in sizes(name):
        for in_place in (True, False):
            if name == "all-to-next" and in_place:
                continue
            options = size if name == "all-to-next" else {**size, "in_place": in_place}
            fused = lower_to_fused_program(ALGORITHMS[name].compile(instances=instances, **options), in_place=in_place)
            collective = fused.collective
            inputs = [
                [random.randrange(10**6) for _ in range(collective.input_chunks)] for _ in range(collective.ranks)
            ]
            memory = run(fused, inputs)
            for rank in range(collective.ranks):
                for index in range(collective.output_chunks):
                    expected = collective.expected(rank, index)
                    if expected is not None:
                        found = memory[rank][ChunkPlace(*collective.place(rank, Buffer.OUT, index))]
                        assert found == sum(inputs[giver][given] for giver, given in expected), (options, rank, index)
                if not in_place:
                    assert [memory[rank][ChunkPlace(Buffer.IN, index)] for index in range(len(inputs[rank]))] == inputs[
                        rank
                    ]


def test_a_two_shot_all_reduce_is_three_levels_without_a_copy():
    fused = lower_to_fused_program(ALGORITHMS["two-shot-all-reduce"].compile(ranks=4, in_place=False), in_place=False)
    first, second, third = fused.ranks[2].levels
    assert [len(level.receives) for level in (first, second, third)] == [0, 3, 3]
    assert [len(level.sends) for level in (first, second, third)] == [3, 3, 0]
    assert [len(level.stores) for level in (first, second, third)] == [0, 1, 3]
    assert len(second.reduces) == 3
    assert fused.ranks[2].rounded == {second.reduces[-1].value}  # only the whole sum travels
    assert second.reduces[-1].completes
    assert fused.has_implicit_barrier


def test_ranks_that_round_at_different_places_round_every_sum():
    @algorithm(lambda: AllReduce(3, 1, in_place=False))
    def lopsided() -> None:
        """Rank 2 sends 1 + 0's sum on through rank 1, and rank 0 adds all three by itself."""
        own = chunk(0, "in", 0).copy(0, "out", 0)
        at_1 = chunk(1, "in", 0).copy(1, "out", 0)
        at_2 = chunk(2, "in", 0).copy(2, "out", 0)
        at_1.copy(0, "scratch", 0)
        at_2.copy(0, "scratch", 1)
        own.copy(1, "scratch", 0)
        total = own.reduce(chunk(0, "scratch", 0)).reduce(chunk(0, "scratch", 1))
        partial = at_1.reduce(chunk(1, "scratch", 0))
        partial.copy(2, "scratch", 0)
        at_2.copy(1, "scratch", 1)
        partial.reduce(chunk(1, "scratch", 1))
        at_2.reduce(chunk(2, "scratch", 0))
        assert total is not None

    fused = lower_to_fused_program(lopsided.compile(), in_place=False)
    for program in fused.ranks:
        assert program.rounded == {reduce.value for level in program.levels for reduce in level.reduces}


def test_a_broadcast_does_not_keep_its_root_until_all_have_begun():
    @algorithm(lambda: Broadcast(3, 1, in_place=True))
    def star() -> None:
        """The root sends to both others."""
        for rank in (1, 2):
            chunk(0, "in", 0).copy(rank, "out", 0)

    assert not lower_to_fused_program(star.compile(), in_place=True).has_implicit_barrier


def test_a_send_is_not_held_up_by_what_its_rank_receives_before_it_in_the_program():
    """Rounds of everyone's input to the next: in the schedule each rank has heard of all before its last send."""

    def expected(rank, index):
        return (((rank - 1) % 3, 0),)

    @algorithm(lambda: Collective("custom", 3, 1, 4, expected))
    def shift() -> None:
        for index in range(4):
            for rank in range(3):
                chunk(rank, "in", 0).copy((rank + 1) % 3, "out", index)

    # A thread sends all at once, and then waits for the rank before it alone.
    assert not lower_to_fused_program(shift.compile(), in_place=False).has_implicit_barrier


@pytest.mark.exhaustive
def test_a_program_that_is_too_long_for_a_thread_is_refused():
    with pytest.raises(ValueError, match="operations on each element: one thread takes up to 4096"):
        lower_to_fused_program(ALGORITHMS["direct-all-to-all"].compile(ranks=8, instances=256), in_place=False)
