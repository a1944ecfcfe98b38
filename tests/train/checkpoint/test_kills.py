# SPDX-License-Identifier: Apache-2.0
"""Kill -9 at random moments of asynchronous saves leaves whole checkpoints alone (`stretto bench saves --kills`)."""

import random

import pytest

from stretto.bench.saves.kills import kill_runs


def check(count: int, hidden: int, steps: int) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    kills, _ = kill_runs(count, 2, seed, hidden=hidden, steps=steps)
    assert len(kills) == count
    assert [kill for kill in kills if kill.broken] == [], f"seed {seed}"


@pytest.mark.usefixtures("forks_processes")
def test_a_kill_during_a_save_leaves_whole_checkpoints_and_the_run_goes_on_as_if_undisturbed() -> None:
    check(1, hidden=64, steps=4)


@pytest.mark.exhaustive
def test_200_kills_leave_whole_checkpoints() -> None:
    check(200, hidden=256, steps=40)
