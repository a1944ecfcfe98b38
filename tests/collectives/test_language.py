# SPDX-License-Identifier: Apache-2.0
"""The chunk language: what a program may do, and the line that an error names."""

import inspect

import pytest

from stretto.collectives import (
    Algorithm,
    AllGather,
    AllReduce,
    Broadcast,
    Collective,
    ProgramError,
    ReduceScatter,
    chunk,
    parallelize,
    trace,
)


def here() -> str:
    """The file and line before the one that calls this."""
    frame = inspect.currentframe().f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno - 1}"


def test_operations_are_recorded_in_order_with_their_places_channels_and_instances():
    with trace(AllReduce(2, 4, in_place=False)) as traced:
        first = chunk(0, "in", 1, 2).copy(1, "scratch", 3, ch=5)
        with parallelize(2), parallelize(3):
            chunk(1, "in", 0, 2).reduce(first)
    copy, reduce = traced.program.operations
    assert (copy.kind, copy.channel, copy.instances) == ("copy", 5, 1)
    assert copy.source == (0, "in", 1, 2)
    assert copy.destination == (1, "scratch", 3, 2)
    assert (reduce.kind, reduce.channel, reduce.instances) == ("reduce", None, 6)
    assert reduce.source == (1, "scratch", 3, 2)
    assert reduce.destination == (1, "in", 0, 2)
    assert traced.program.scratch_chunks == (0, 5)


def test_buffers_that_share_memory_are_one_place():
    with trace(AllGather(3, chunks=2, in_place=True)):
        assert chunk(1, "in", 1).chunks == (1, "out", 3, 1)
        same = chunk(1, "in", 0, 2)
        assert same.copy(1, "out", 2) is same, "a copy onto itself does nothing"
    with trace(ReduceScatter(3, chunks=2, in_place=True)):
        assert chunk(2, "out", 0).chunks == (2, "in", 4, 1)


def test_a_stale_reference_is_refused_with_its_line():
    with trace(AllReduce(2, 1)):
        stale = chunk(0, "in", 0)
        chunk(1, "in", 0).copy(0, "in", 0)
        with pytest.raises(ProgramError) as caught:
            stale.copy(1, "in", 0)
        line = here()
        assert str(caught.value).startswith(f"{line}: the reference to rank 0's in[0] is stale")


def test_a_chunk_that_holds_nothing_is_refused():
    with trace(AllReduce(2, 2, in_place=False)):
        with pytest.raises(ProgramError, match=r"rank 0's out\[0\] holds nothing yet"):
            chunk(0, "out", 0)
        chunk(0, "in", 0).copy(0, "out", 0)
        with pytest.raises(ProgramError, match=r"rank 0's out\[1\] holds nothing yet"):
            chunk(0, "out", 0, 2)
    with trace(Broadcast(2, root=1)), pytest.raises(ProgramError, match="holds nothing"):
        chunk(0, "in", 0)


@pytest.mark.parametrize(
    ("do", "why"),
    [
        (lambda: chunk(2, "in", 0), "there is no rank 2: there are 0 to 1"),
        (lambda: chunk(-1, "in", 0), "there is no rank -1"),
        (lambda: chunk(0, "inn", 0), 'there is no buffer \'inn\': there are "in", "out", "scratch"'),
        (lambda: chunk(0, "in", 3, 2), "out of bounds: in has 4 chunks"),
        (lambda: chunk(0, "in", -1), "counted from 0"),
        (lambda: chunk(0, "in", 0, 0), "at least one"),
        (lambda: chunk(0, "in", 0, 2).reduce(chunk(1, "in", 0)), "differ in their counts"),
        (lambda: chunk(0, "in", 0, 2).reduce(chunk(0, "in", 1, 2)), "overlap"),
        (lambda: chunk(0, "in", 0, 2).copy(0, "in", 1), "overlap"),
        (lambda: chunk(0, "in", 0).copy(1, "in", 0, ch=-1), "a channel is a number from 0, not -1"),
        (lambda: chunk(0, "in", 0).copy(1, "out"), "needs an index"),
        (lambda: chunk(0, "in", 0, 3).split(2), "3 chunks cannot be split into 2 equal parts"),
        (lambda: parallelize(0).__enter__(), "parallelize takes 1 to 256 instances, not 0"),
    ],
)
def test_invalid_arguments_raise(do, why):
    with trace(AllReduce(2, 4)), pytest.raises(ProgramError) as caught:
        do()
    assert why in str(caught.value)
    assert str(caught.value).startswith(__file__)


@pytest.mark.parametrize(("make", "why"), [(lambda: AllGather(2.5), "not 2.5"), (lambda: AllReduce("2", 4), "not '2'")])
def test_a_collective_of_no_number_of_ranks_is_refused(make, why):
    with pytest.raises(ValueError, match=f"a collective has 1 to 4096 ranks, {why}"):
        make()


def test_references_split_and_group():
    with trace(AllReduce(2, 6)):
        first, second = chunk(0, "in", 0, 4).split(2)
        assert (first.chunks, second.chunks) == ((0, "in", 0, 2), (0, "in", 2, 2))
        assert second.group(chunk(0, "in", 5)).chunks == (0, "in", 2, 4)
        with pytest.raises(ProgramError, match="not in one buffer"):
            first.group(chunk(1, "in", 0))


def test_a_copy_to_scratch_without_an_index_goes_behind_what_is_used():
    with trace(AllReduce(2, 2)):
        assert chunk(0, "in", 0).copy(1, "scratch").index == 0
        assert chunk(0, "in", 0, 2).copy(1, "scratch").index == 1
        assert chunk(0, "in", 1).copy(1).chunks == (1, "in", 1, 1)


def test_nothing_of_a_trace_outlives_it():
    with trace(AllReduce(2, 2)):
        kept = chunk(0, "in", 0)
    with pytest.raises(ProgramError, match="there is no rank 7"), trace(AllReduce(2, 2)):
        chunk(7, "in", 0)
    with pytest.raises(ProgramError, match="use it inside one that is traced"):
        chunk(0, "in", 0)
    with trace(AllReduce(2, 2)):
        with trace(AllReduce(3, 1)):
            chunk(2, "in", 0)
        with pytest.raises(ProgramError, match="there is no rank 2"):
            chunk(2, "in", 0)
        with pytest.raises(ProgramError, match="another program"):
            kept.copy(1, "in", 0)


def copy_once() -> None:
    chunk(0, "in", 0).copy(0, "out", 0)


@pytest.mark.parametrize(
    "expected", [[(0, 0)], (0, 0), (), ((0, 0), (9, 0)), ((0, 1),), ((0, -1),), ([0, 0],), "in", 7]
)
def test_a_condition_that_names_no_input_chunks_is_refused_before_anything_is_traced(expected):
    wrong = Collective("own", 2, 1, 1, expected=lambda rank, index: expected)
    with pytest.raises(ValueError, match=r"own: out\[0\] of rank 0 is expected to hold .* neither None nor a tuple"):
        Algorithm("own", copy_once, lambda: wrong, "").trace()


@pytest.mark.parametrize("start", [-1, 2, 5])
def test_a_buffer_that_begins_outside_the_other_one_is_refused(start):
    wrong = Collective("own", 2, 1, 2, lambda rank, index: None, in_place=True, starts=lambda rank: (start, 0))
    with pytest.raises(ValueError, match=f"own in place: in of rank 0 begins at chunk {start} of 2"):
        Algorithm("own", copy_once, lambda: wrong, "").trace()


def test_an_invalid_operand_is_named_with_its_line():
    with trace(AllGather(2)):
        own = chunk(0, "in", 0)
        for wrong in (
            lambda: own.reduce(5),
            lambda: own.group(None),
            lambda: own.split("2"),
            lambda: parallelize("2").__enter__(),
        ):
            with pytest.raises(ProgramError, match=r"test_language.py:[0-9]+: "):
                wrong()
