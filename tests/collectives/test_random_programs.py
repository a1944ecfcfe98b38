# SPDX-License-Identifier: Apache-2.0
"""What verifies runs right, whatever the order of events; what is damaged is caught, or proved harmless."""

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.collectives.machine import runs_right
from tests.collectives.random_programs import damaged, random_program

from stretto.collectives import PROTOCOLS, compile_program, from_xml, to_xml, verify

RUNS = 4
seeds = st.integers(0, 2**32 - 1)


def compiled(rng: random.Random):
    slots = rng.choice([None, 1, 2])
    protocol = rng.choice(list(PROTOCOLS))
    schedule = compile_program(
        random_program(rng), name="random", protocol=protocol, instances=rng.choice([1, 1, 2, 3]), slots=slots
    )
    return schedule, slots or PROTOCOLS[protocol]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
@given(seeds)
def test_a_random_program_compiles_to_a_schedule_that_verifies_and_runs_right(seed):
    rng = random.Random(seed)
    schedule, slots = compiled(rng)
    found = verify(schedule, slots=slots)
    assert found.ok, found.errors[:3]
    for _ in range(RUNS):
        assert runs_right(schedule, schedule.collective, slots, rng)
    assert from_xml(to_xml(schedule), collective=schedule.collective).ranks == schedule.ranks


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
@given(seeds)
def test_damage_is_caught_or_does_no_harm(seed):
    rng = random.Random(seed)
    schedule, slots = compiled(rng)
    for _ in range(4):
        if (result := damaged(schedule, rng)) is None:
            continue
        what, broken = result
        if verify(broken, slots=slots).ok:
            for _ in range(RUNS):
                assert runs_right(broken, broken.collective, slots, rng), what
