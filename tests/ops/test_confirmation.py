# SPDX-License-Identifier: Apache-2.0
"""Tests of first calls that are timed: results, choices that all ranks share, and runs that resume with them."""

from types import SimpleNamespace

import pytest
import torch
from tests.ops import confirmed

from stretto.ops import confirmation

NAMES = {"all_gather_matmul", "all_gather_matmul_gathered", "matmul_all_reduce", "matmul_reduce_scatter"}


@pytest.mark.parametrize(
    ("times", "faster"),
    [([[1.0, 2.0], [3.0, 2.5]], "library"), ([[1.0, 2.0], [1.9, 0.5]], "kernel"), ([[9.0, 1.0], None], "kernel")],
)
def test_the_faster_one_on_the_slowest_rank_runs_on_all_ranks_and_is_kept(interpret, tmp_path, times, faster):
    for rank, found in enumerate(interpret(2, confirmed.choose_by_times, str(tmp_path), times)):
        ran, first, in_all, kept = found
        is_timed = times[1] is not None
        assert ran == {faster}  # the prediction, where a rank could not time them
        assert first == (len(NAMES) if is_timed else 1)  # no other wait is risked
        assert in_all == first
        assert kept == (NAMES if is_timed and rank == 0 else set())


def test_nothing_is_timed_where_a_rank_cannot(interpret, tmp_path):
    assert interpret(2, confirmed.choose_where_one_rank_cannot, str(tmp_path)) == [(0, {"kernel"})] * 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("times", [[1.0, 2.0], [2.0, 1.0], None])  # None: the prediction, which could not be timed
def test_a_resumed_run_makes_the_choices_of_the_run_that_was_stopped(interpret, tmp_path, times):
    for is_same, has_same_choices, timed, choices in interpret(2, confirmed.stop_and_resume, str(tmp_path), times):
        assert is_same
        assert has_same_choices
        assert timed == 0
        assert ("library" in choices) == (times == [2.0, 1.0])


def test_timed_calls_harm_nothing_around_them(interpret, tmp_path):
    for found in interpret(2, confirmed.meet_hazards, str(tmp_path)):
        assert len(found) == 11
        assert [hazard for hazard, is_well in found.items() if not is_well] == []


@pytest.mark.parametrize(
    ("changes", "can_time"),
    [
        ({}, True),
        ({"STRETTO_CONFIRM": "0"}, False),
        ({"STRETTO_SHARE_GPUS": "1"}, False),
        ({"captures": True}, False),
        ({"deterministic": True}, False),
        ({"kinds": 0}, False),
        ({"free": confirmation.HEADROOM + 99}, False),
        ({"device": "cpu"}, False),
    ],
)
def test_calls_are_timed_unless_something_speaks_against_it(monkeypatch, changes, can_time):
    monkeypatch.delenv("STRETTO_CONFIRM", raising=False)
    for name, value in changes.items():
        if name.isupper():
            monkeypatch.setenv(name, value)
    free = changes.get("free", confirmation.HEADROOM + 100)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: "captures" in changes)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: "deterministic" in changes)
    monkeypatch.setattr(confirmation, "_budget", confirmation._Budget(changes.get("kinds", 1)))
    assert confirmation.can_time_calls(torch.device(changes.get("device", "cuda")), 100) is can_time


class Event:
    """An event of a GPU on which a millisecond passes between two of them, and which gets to `reached` of them."""

    made, reached = 0, 100

    def __init__(self, enable_timing):
        self.number = None

    def record(self):
        Event.made, self.number = Event.made + 1, Event.made

    def query(self):
        return self.number < Event.reached

    def elapsed_time(self, end):
        return float(end.number - self.number)


@pytest.mark.parametrize(("reached", "expected"), [(100, [1e-3, 1e-3]), (3, None)])
def test_a_gpu_that_does_not_get_to_the_calls_ends_their_timing(monkeypatch, reached, expected):
    """It may wait for a rank that waits for this one."""
    called = []
    monkeypatch.setattr(Event, "made", 0)
    monkeypatch.setattr(Event, "reached", reached)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(clock_rate=1))
    monkeypatch.setattr(confirmation, "_PATIENCE", 0.0)

    runs = [lambda: called.append("kernel"), lambda: called.append("library")]
    assert confirmation.time_calls(runs, torch.device("cuda", 0), 5) == expected
    assert called == ["kernel", "library"] * 6  # in turns, so that both meet the same clocks
