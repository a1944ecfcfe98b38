# SPDX-License-Identifier: Apache-2.0
"""Tables in host memory with a cache: the bits of tables on the device, for every optimizer and sharding."""

from collections.abc import Callable

import pytest
import torch

from tests.conftest import Ranks
from tests.pool import Pool
from tests.recommendation import caching
from tests.recommendation.caching import Case

MakeRanks = Callable[[int], Ranks]
PLAIN = {"weight_decay": 0.1, "max_norm": 0.5}
CASES = [
    Case("ttt", "sgd", options=PLAIN),
    Case("ttt", "rowwise-adagrad", options={"lr_factors": {2: 0.5}}),
    Case("rtr", "adam"),
    Case("ctc", "full-adagrad"),
]


def compare(found: list[list], expected: list[list]) -> None:
    """Both of all ranks: the same bits, and rows were found in the caches, but not all."""
    for of_rank, theirs in zip(found, expected, strict=True):
        for (tensors, vectors, rates), (resident, resident_vectors, _) in zip(of_rank, theirs, strict=True):
            assert tensors.keys() == resident.keys()
            for name, value in resident.items():
                assert torch.equal(tensors[name], value), name
            assert all(map(torch.equal, vectors, resident_vectors))
            assert all(rate < 1 for rate in rates.values())
    assert any(rate > 0.2 for _, _, rates in found[0] for rate in rates.values())


def cached(cases: list[Case], rows: tuple[int, ...], *, prefetches: bool) -> list[Case]:
    return [case._replace(cached=rows, prefetches=prefetches) for case in cases]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_cached_tables_have_the_bits_of_tables_on_the_device(ranks: MakeRanks, dtype: torch.dtype) -> None:
    expected = ranks(2).run(caching.update, CASES, 7, dtype, "library")
    for rows, prefetches in (((20, 0, 20), False), ((40, 0, 40), True)):
        found = ranks(2).run(caching.update, cached(CASES, rows, prefetches=prefetches), 7, dtype, "library")
        compare(found, expected)


@pytest.mark.long
def test_kernels_update_caches_to_the_bits_of_tables_on_the_device(interpreted_pool: Pool) -> None:
    cases = [CASES[2], *cached(CASES[2:3], (40, 0, 40), prefetches=True)]
    found = interpreted_pool.run(2, caching.update, cases, 4, torch.bfloat16, "kernel", timeout=120)
    compare([of_rank[1:] for of_rank in found], [of_rank[:1] for of_rank in found])
