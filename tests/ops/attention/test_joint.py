# SPDX-License-Identifier: Apache-2.0
"""Attention to keys that a schedule gathers, between real processes, against plain attention of the whole in fp64."""

import random
from dataclasses import replace

import pytest
from tests.collectives.joint.random_algorithms import random_schedule
from tests.ops.attention.whole import Case, find_differences

from stretto.collectives import AllGather, algorithm, chunk

EXACT = 1e-10
NAMED = "direct-all-gather", "ring-all-gather", "recursive-doubling-all-gather"


@algorithm(lambda ranks: AllGather(ranks, 2))
def gather_both_ways(ranks):
    """Each half goes around the ring its own way."""
    for rank in range(ranks):
        for half, step in ((0, 1), (1, -1)):
            value = chunk(rank, "in", half).copy(rank, "out", 2 * rank + half)
            for hop in range(1, ranks):
                value = value.copy((rank + step * hop) % ranks, "out", 2 * rank + half)


def list_cases(ranks):
    total = 7 * ranks
    documents = (0, 3, total // 2 + 1, total // 2 + 2, total - 2, total)
    plain = Case(length=7, layout="contiguous")
    yield replace(plain, causal=False, has_sinks=True)
    yield replace(plain, documents=documents, has_sinks=True)
    yield replace(plain, window=5)
    yield Case(sizes=(8, 4), scale=0.3)
    yield Case(window=13, documents=(0, 5, 8 * ranks - 3, 8 * ranks))
    yield replace(plain, layout="balanced", documents=documents)


def differ(ranks, seed):
    """The cases and schedules whose results or gradients are wrong."""
    rng, found = random.Random(seed), []
    for case in list_cases(ranks):
        for schedule in (
            *NAMED,
            gather_both_ways.compile(ranks=ranks),
            random_schedule(rng, "all_gather_matmul", ranks, 3),
        ):
            differences = find_differences(case, "all_gather", schedule=schedule)
            if max(differences) > EXACT:
                found.append((schedule if isinstance(schedule, str) else schedule.name, case, differences))
    return found


SEED = random.randrange(2**31)


@pytest.mark.parametrize("count", [2, 3, *(pytest.param(count, marks=pytest.mark.long) for count in (4, 8))])
def test_attention_by_any_schedule_is_that_of_the_whole_sequence(interpret, count):
    print(f"seed {SEED}")
    for rank, found in enumerate(interpret(count, differ, count, SEED)):
        assert not found, (rank, found)
