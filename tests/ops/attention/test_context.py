# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention between real processes, forward and gradients, against one device in fp64."""

from dataclasses import replace

import pytest
from tests.differences import largest
from tests.ops.attention.whole import Case, find_differences

EXACT = 1e-10
IMPLEMENTATIONS = "all_gather", "ring", "ulysses"


def list_cases(ranks):
    total = 8 * ranks
    documents = (0, 3, total // 2 + 1, total // 2 + 2, total - 2, total)
    for layout in ("contiguous", "zigzag"):
        plain = Case(layout=layout, heads=4 * ranks, kv_heads=2 * ranks)
        for causal in (False, True):
            case = replace(plain, causal=causal)
            yield case
            yield replace(case, documents=documents, has_sinks=True)
        yield replace(plain, window=5)
        yield replace(plain, window=13, documents=documents, has_sinks=True)
        yield replace(plain, window=total + 5, sizes=(8, 4), scale=0.3)
    packed = replace(plain, layout="balanced", documents=documents)
    yield packed
    yield replace(packed, window=5, length=7, documents=(0, 1, 3, 4 * ranks, 7 * ranks))
    for scale in (0.0, -0.3):
        yield replace(packed, scale=scale, sizes=(3, 3))
    yield Case(length=5, layout="contiguous", heads=ranks, kv_heads=ranks, window=1)
    if ranks == 4:
        yield Case(kv_heads=2)
        yield Case(kv_heads=2, layout="balanced", documents=documents)  # Ulysses' sets of two
        yield Case(heads=6, kv_heads=2, layout="contiguous", documents=documents, has_sinks=True)


def differ(ranks):
    return [
        (implementation, case, differences)
        for case in list_cases(ranks)
        for implementation in IMPLEMENTATIONS
        if not largest(differences := find_differences(case, implementation)) <= EXACT
    ]


@pytest.mark.parametrize(
    "count", [1, 2, pytest.param(3, marks=pytest.mark.exhaustive), pytest.param(4, marks=pytest.mark.long)]
)
def test_each_implementation_is_attention_of_the_whole_sequence(ranks, count):
    for rank, found in enumerate(ranks(count).run(differ, count)):
        assert not found, (rank, found)
