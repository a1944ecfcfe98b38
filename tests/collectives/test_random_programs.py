# SPDX-License-Identifier: Apache-2.0
"""Verified programs run right, whatever the order of events; damage to them is caught, or proved harmless."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.collectives.machine import runs_right
from tests.collectives.random_programs import damaged, random_program

from stretto.collectives import PROTOCOLS, compile_program, from_xml, to_xml, verify

RUNS = 4
FEW, MANY = 15, 150
seeds = st.integers(0, 2**32 - 1)


def compiled(rng: random.Random):
    slots = rng.choice([None, 1, 2])
    protocol = rng.choice(list(PROTOCOLS))
    schedule = compile_program(
        random_program(rng), name="random", protocol=protocol, instances=rng.choice([1, 1, 2, 3]), slots=slots
    )
    return schedule, slots or PROTOCOLS[protocol]


def try_programs(examples: int) -> Callable[..., Any]:
    """A decorator: the test takes the seeds of so many programs."""
    with_settings = settings(
        max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
    )
    return lambda test: with_settings(given(seeds)(test))


def check_program(seed: int) -> None:
    rng = random.Random(seed)
    schedule, slots = compiled(rng)
    found = verify(schedule, slots=slots)
    assert found.ok, found.errors[:3]
    for _ in range(RUNS):
        assert runs_right(schedule, schedule.collective, slots, rng)
    assert from_xml(to_xml(schedule), collective=schedule.collective).ranks == schedule.ranks


def check_damage(seed: int) -> None:
    rng = random.Random(seed)
    schedule, slots = compiled(rng)
    for _ in range(4):
        if (result := damaged(schedule, rng)) is None:
            continue
        what, broken = result
        if verify(broken, slots=slots).ok:
            for _ in range(RUNS):
                assert runs_right(broken, broken.collective, slots, rng), what


@try_programs(FEW)
def test_a_random_program_compiles_to_a_schedule_that_verifies_and_runs_right(seed):
    check_program(seed)


@pytest.mark.exhaustive
@try_programs(MANY)
def test_many_random_programs_compile_to_schedules_that_verify_and_run_right(seed):
    check_program(seed)


@try_programs(FEW)
def test_damage_is_caught_or_does_no_harm(seed):
    check_damage(seed)


@pytest.mark.exhaustive
@try_programs(MANY)
def test_damage_of_many_programs_is_caught_or_does_no_harm(seed):
    check_damage(seed)
