# SPDX-License-Identifier: Apache-2.0
"""Kill -9 at random moments of asynchronous saves leaves whole checkpoints alone (`python -m lab saves --kills`)."""

import multiprocessing
import random

import pytest
from tests.faults import kills
from tests.faults.kills import kill_runs


def check(count: int, hidden: int, steps: int) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    found, _ = kill_runs(count, 2, seed, hidden=hidden, steps=steps)
    assert len(found) == count
    assert [kill for kill in found if kill.broken] == [], f"seed {seed}"


@pytest.mark.long
@pytest.mark.usefixtures("forks_processes")
def test_a_kill_during_a_save_leaves_whole_checkpoints_and_the_run_goes_on_as_if_undisturbed() -> None:
    check(1, hidden=64, steps=4)


@pytest.mark.usefixtures("forks_processes")
def test_ranks_are_ended_where_the_bench_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the command would wait for them when it exits."""

    def fail(*_: object) -> float:
        raise RuntimeError("a save has not begun")

    monkeypatch.setattr(kills, "_time_saves", fail)
    before = set(multiprocessing.active_children())
    with pytest.raises(RuntimeError, match="a save has not begun"):
        kill_runs(1, 2, 0, hidden=64, steps=4)
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.exhaustive
def test_200_kills_leave_whole_checkpoints() -> None:
    check(200, hidden=256, steps=40)
