# SPDX-License-Identifier: Apache-2.0
"""Tables in host memory with a cache: the bits of tables on the device, for every optimizer and sharding."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from stretto.parallel.comm.collectives import NO_GROUP
from stretto.recommendation import Growth, HitRates, measure_hit_rates
from stretto.recommendation.growing import GrowingRows
from stretto.recommendation.pooled_exchange import TableLookups
from stretto.recommendation.table_cache import CachedTables, RowCache
from tests.conftest import Ranks
from tests.pool import Pool
from tests.recommendation import caching
from tests.recommendation.caching import Case

MakeRanks = Callable[[int], Ranks]
PLAIN = {"weight_decay": 0.1, "max_norm": 0.5}
CASES = [
    Case("tttt", "sgd", options=PLAIN),
    Case("tttt", "rowwise-adagrad", options={"lr_factors": {2: 0.5}}),
    Case("rtrt", "adam"),
    Case("ctct", "full-adagrad"),
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


def test_cached_tables_have_the_bits_of_tables_on_the_device(ranks: MakeRanks) -> None:
    for dtype, cases, rows in (
        (torch.float64, CASES[:2], (20, 0, 20, 0)),
        (torch.bfloat16, CASES[2:], (40, 0, 40, 0)),
    ):
        expected = ranks(2).run(caching.update, cases, 6, dtype, "library")
        mine = cached(cases, rows, prefetches=dtype == torch.bfloat16)
        compare(ranks(2).run(caching.update, mine, 6, dtype, "library"), expected)


@pytest.mark.long
def test_kernels_update_caches_to_the_bits_of_tables_on_the_device(interpreted_pool: Pool) -> None:
    cases = [CASES[2], *cached(CASES[2:3], (40, 0, 40, 0), prefetches=True)]
    found = interpreted_pool.run(2, caching.update, cases, 2, torch.bfloat16, "kernel", timeout=120)
    compare([of_rank[1:] for of_rank in found], [of_rank[:1] for of_rank in found])


def test_tables_that_grow_have_the_same_bits_on_every_grid(ranks: MakeRanks) -> None:
    cases = [
        Case("tttt", "adam", growth=Growth(min_count=2)),
        Case("tttt", "rowwise-adagrad", prefetches=True, growth=Growth(evicts="least-frequent")),
    ]
    alone = ranks(1).run(caching.update, cases, 8, torch.bfloat16, "library")[0]
    for tensors, _, _ in alone:
        assert (tensors["model.tables.3.ids"].view(torch.int64) >= 0).sum() > 10
    found = ranks(3).run(
        caching.update, [*cases[:1], cases[1]._replace(cached=(20, 0, 0, 0))], 8, torch.bfloat16, "library"
    )
    for (tensors, _, _), (expected, _, _) in zip(found[0], alone, strict=True):
        assert tensors.keys() == expected.keys()
        for name, value in expected.items():
            if ".3." in name or name.startswith("model"):
                assert torch.equal(tensors[name], value), name


def test_ids_get_rows_once_they_were_seen_often_and_lose_them_by_age_or_count() -> None:
    for evicts, left in (("least-recent", [2, 3, 4, 5]), ("least-frequent", [1, 3, 4, 5])):
        weight = torch.zeros(5, 4)
        rows = GrowingRows(weight, Growth(min_count=2, evicts=evicts), 0)  # type: ignore[arg-type]
        rows.add_states([state := torch.ones(5)])
        assert rows.fetch(torch.tensor([1, 2, 3]), grows=True).tolist() == [0, 0, 0]  # seen once
        assert rows.fetch(torch.tensor([1, 2, 1, 1, 1, 3, 4, 4, 7]), grows=True).tolist() == [1, 3, 1, 1, 1, 4, 2, 2, 0]
        assert rows.fetch(torch.tensor([9, 9, 4]), grows=False).tolist() == [0, 0, 2]  # an evaluation changes nothing
        for ids in ([2, 2, 3, 3], [4], [4]):
            rows.fetch(torch.tensor(ids), grows=True)
        before, state[:] = weight.clone(), 1
        (new,) = rows.fetch(torch.tensor([5, 5, 6]), grows=True)[:2].unique().tolist()
        assert sorted(rows.ids.tolist()) == [-1, *left]
        assert rows.fetch(torch.tensor([5, 6]), grows=False).tolist() == [new, 0]
        changed = (weight != before).any(1)
        assert changed.tolist() == (state == 0).tolist() == [place == new for place in range(5)]
        assert (weight.abs() <= 5**-0.5).all()


@pytest.mark.parametrize("is_torch", [False, pytest.param(True, marks=pytest.mark.long)])
def test_checkpoints_see_no_cache_and_resume_on_another_sharding(
    ranks: MakeRanks, tmp_path: Path, is_torch: bool
) -> None:
    case = Case("rttt", "adam", (20, 0, 40, 0), growth=Growth(min_count=2))
    expected = ranks(2).run(caching.save, case, tmp_path)[0]
    others = ((1, Case("tttt", "adam", growth=case.growth)), (3, case._replace(kinds="crrt", cached=(60, 0, 20, 0))))
    for count, other in others:
        found = ranks(count).run(caching.resume, other, tmp_path, is_torch)[0]
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


def test_what_caches_do_not_serve_is_refused_in_words(ranks: MakeRanks) -> None:
    (words,) = ranks(1).run(caching.refusals)
    for found, expected in zip(
        words,
        (
            "tables that are cached, grow or have replicas get no gradients: call fuse_update",
            "tables that are cached or grow are more than parameters: distributed_state has them whole",
            "a cache of 10 rows is too small for two batches of 11 different rows: a cache of 11 would do",
            "2 batches were looked up in cached tables, or a checkpoint was made, since the one of this backward pass",
            "table 0 grows, so it is whole on one rank's GPU and has two rows or more: kind 'table' would do, not",
            "table 0 is replicated, so it has no cache: kind 'row' would do",
            "table 1 has a cache of -1 rows: 0 to 2147483646 would do",
            "the placement has 1 caches for 2 tables: give one for each",
            "evicts is 'lru'",
        ),
        strict=True,
    ):
        assert found.startswith(expected), found


def test_what_one_ranks_caches_refuse_is_refused_on_all(ranks: MakeRanks) -> None:
    too_small = r"a cache of 10 rows is too small for .* different rows"
    other = "rank 0 has refused this batch, which is too large for its caches: see its error"
    for words, refused in zip(ranks(2).run(caching.refused_on_one_rank), (too_small, other), strict=True):
        for found, expected in zip(words, (refused, refused, "tables that are cached, grow"), strict=True):
            assert re.match(expected, found), found


def test_a_cuda_graph_of_cached_tables_is_refused() -> None:
    tables = CachedTables({}, 1, torch.device("cuda"), NO_GROUP)
    lookups = TableLookups(torch.tensor([0]), torch.tensor([0, 1]), (0, 1), 1)
    with mock.patch("torch.cuda.is_current_stream_capturing", return_value=True):
        for call in (lambda: tables.fetch(lookups), lambda: tables.use(lookups, None)):
            with pytest.raises(ValueError, match="a CUDA graph would look up the rows of the batch of its capture"):
                call()


def test_ids_that_a_growing_table_cannot_have_stay_outside_of_it() -> None:
    rows = GrowingRows(torch.zeros(5, 4), Growth(ids=3), 0)
    for _ in range(2):
        assert rows.fetch(torch.tensor([2, -1, -(2**62), 3, 2**62, 2]), grows=True).tolist() == [
            1,
            -1,
            -(2**62),
            5,
            2**62,
            1,
        ]
    assert rows.ids.tolist() == [-1, 2, -1, -1, -1]


def zeros_on_demand(*size: int, dtype: torch.dtype, device: Any = None) -> torch.Tensor:
    """Zeros that take no memory until they are written."""
    return torch.from_numpy(np.zeros(size, str(dtype).removeprefix("torch.")))


def test_tables_of_more_than_two_billion_rows_are_cached() -> None:
    rows = 2**31 + 100
    with mock.patch.object(torch, "zeros", zeros_on_demand):
        cache = RowCache(rows, 1, 4, torch.float16, torch.device("cpu"))
    cache.held[0][-2:] = torch.tensor([[3.0], [5.0]])
    for number, ids in enumerate(([rows - 1, 0, rows - 2], [7, 8, 9, 2**31]), 1):
        slots = cache.fetch(torch.tensor(ids), number, number)
        if number == 1:
            assert cache.weight[slots].tolist() == [[5.0], [0.0], [3.0]]
            cache.weight[slots[0]] = 9.0
    assert cache.held[0][-1] == 9.0  # written back


def test_hit_rates_are_of_batches_that_did_not_tell_what_is_hot() -> None:
    batches = [torch.tensor(ids) for ids in ([1, 1, 1, 2, 2, 3], [1, 1, 2, 4], [1, 2, 2, 4], [1, 9, 1, 9, 3])]
    rates = measure_hit_rates(batches)
    assert rates == HitRates((1, 2, 4), (pytest.approx(3 / 9), pytest.approx(5 / 9), pytest.approx(7 / 9)), 3)
    assert rates.at(3, 100) == pytest.approx(6 / 9)
    assert rates.at(52, 100) == pytest.approx(1 - 1 / 9)
    with pytest.raises(ValueError, match="1 batches: the first half tells what is hot"):
        measure_hit_rates(batches[:1])
