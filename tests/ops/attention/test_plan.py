# SPDX-License-Identifier: Apache-2.0
"""Blocks of context-parallel attention are the mask's, each pair of positions once, whatever its sizes."""

import random

import pytest
import torch
from tests.ops.attention.whole import Case, see

from stretto.ops.attention.plan import Mask, list_chunks, make_plan


def draw_case(choose, ranks):
    length = choose.choice((2, 4, 6, 10))
    total = length * ranks
    documents = sorted({0, total, *choose.choices(range(total), k=choose.randrange(6))})
    return Case(
        length,
        choose.choice(("contiguous", "zigzag")),
        causal := choose.random() < 0.8,
        choose.randrange(1, total + 2) if causal and choose.random() < 0.6 else None,
        tuple(documents) if choose.random() < 0.6 else None,
    )


def count_pairs(case, ranks, schedule):
    """How often blocks have each pair of positions, int [total, total]; all ranks' steps send what others receive."""
    places = [
        [position for chunk in list_chunks(case.layout, rank, ranks, case.length) for position in range(*chunk)]
        for rank in range(ranks)
    ]
    found = torch.zeros(case.length * ranks, case.length * ranks, dtype=torch.int64)
    mask = Mask(case.causal, case.window, case.documents)
    plans = [make_plan(case.layout, rank, ranks, case.length, mask, schedule) for rank in range(ranks)]
    for rank, plan in enumerate(plans):
        calls = [(plan.own, places[rank])]
        for number, step in enumerate(plan.steps):
            rows = []
            for peer, parts in enumerate(step.receives):
                others = plans[peer].steps[number]
                assert others.sends[rank] == parts
                assert others.lands[rank] == len(rows) if parts else True
                rows += [places[peer][row] for part in parts for row in range(*part)]
            assert len(rows) <= step.room
            calls.append((step.blocks, rows))
        for blocks, keys in calls:
            for block in blocks:
                query, key = (torch.arange(part.stop - part.start) for part in block[:2])
                seen = torch.ones(len(query), len(key), dtype=torch.bool)
                if block.is_causal:
                    assert len(query) == len(key)
                    seen &= key <= query[:, None]
                if block.left is not None:
                    seen &= key >= query[:, None] + len(key) - len(query) - block.left
                assert seen.any(1).all()
                at = torch.tensor(places[rank])[slice(*block.queries)], torch.tensor(keys)[slice(*block.keys)]
                found[at[0][:, None], at[1]] += seen
    return found


@pytest.mark.parametrize("seed", range(4))
def test_blocks_have_each_pair_that_is_seen_once(seed):
    choose = random.Random(seed)
    for _ in range(40):
        ranks = choose.choice((1, 2, 3, 5))
        case, schedule = draw_case(choose, ranks), choose.choice(("all_gather", "ring"))
        assert torch.equal(count_pairs(case, ranks, schedule), see(case, case.length * ranks).long()), (case, ranks)


def test_the_work_of_zigzag_ranks_is_equal_and_of_few_calls():
    for rank in range(8):
        plan = make_plan("zigzag", rank, 8, 32, Mask(True), "all_gather")
        blocks = [*plan.own, *(block for step in plan.steps for block in step.blocks)]
        areas = ((block.queries.stop - block.queries.start, block.keys.stop - block.keys.start) for block in blocks)
        work = [
            rows * (rows + 1) // 2 if block.is_causal else rows * keys
            for block, (rows, keys) in zip(blocks, areas, strict=True)
        ]
        assert sum(work) == 256 * 257 // 2 // 8
        assert len(work) <= 3
