# SPDX-License-Identifier: Apache-2.0
"""The event queue: events run in order of time, and at one time in the order in which they were inserted."""

import pytest

from stretto.simulator import EventQueue


def test_events_run_by_time_and_then_in_the_order_of_insertion():
    queue, seen = EventQueue(), []
    for time, name in [(5.0, "a"), (1.0, "b"), (5.0, "c"), (0.0, "d"), (1.0, "e")]:
        queue.at(time, seen.append, name)
    assert len(queue) == 5
    assert queue.run() == 5.0
    assert seen == ["d", "b", "e", "a", "c"]
    assert (queue.processed, len(queue)) == (5, 0)


def test_events_inserted_at_the_current_time_run_after_those_already_queued():
    queue, seen = EventQueue(), []

    def insert(name):
        seen.append(name)
        if name == "first":
            queue.at(queue.now, insert, "inserted")

    queue.at(2.0, insert, "first")
    queue.at(2.0, insert, "second")
    queue.run()
    assert seen == ["first", "second", "inserted"]
    assert queue.now == 2.0


@pytest.mark.parametrize("time", [1.0, float("nan"), float("inf")])
def test_an_event_cannot_be_before_the_present(time):
    queue = EventQueue()
    queue.at(3.0, queue.at, time, print)
    with pytest.raises(ValueError, match=r"not before the present, 3\.0 ns"):
        queue.run()
