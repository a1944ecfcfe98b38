# SPDX-License-Identifier: Apache-2.0
"""Embedding tables on several ranks: the losses and weights are those of the plain model, wherever the tables are."""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from stretto.recommendation import DLRM, TablePlacement, TableSize, distribute_tables, place_tables
from stretto.recommendation.index_exchange import _shorten, check_offsets
from stretto.recommendation.pooled_exchange import choose_operators
from tests.conftest import Ranks
from tests.recommendation import dlrm

MakeRanks = Callable[[int], Ranks]
STEPS = 4


@pytest.fixture(scope="module")
def plain(pool: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and last weights of the plain model on the whole batch, from the same initial weights."""
    (start,) = Ranks(pool, 1).run(dlrm.train, 0)
    model = DLRM(dlrm.CONFIG).double()
    model.load_state_dict(start["parameters"])
    optimizers = dlrm.optimizers_of(model)
    losses = [dlrm.step(model, optimizers, dlrm.make_batch(number)).item() for number in range(STEPS)]
    assert losses[0] != pytest.approx(losses[-1], abs=1e-3)
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


PLACEMENTS: dict[str, tuple[int, tuple[tuple[int, ...], ...] | None]] = {
    "one rank": (1, None),
    "two ranks": (2, None),
    "four ranks": (4, None),
    "more ranks than tables": (8, None),
    "all on the last rank": (2, ((), (0, 1, 2, 3, 4, 5))),
    "any order": (4, ((5,), (0, 3), (), (1, 2, 4))),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PLACEMENTS)
def test_losses_and_weights_are_those_of_the_plain_model(
    ranks: MakeRanks, plain: tuple[list[float], dict[str, torch.Tensor]], name: str
) -> None:
    world, owned = PLACEMENTS[name]
    results = ranks(world).run(dlrm.train, STEPS, owned)
    losses, weights = plain
    seen = set()
    for rank, result in enumerate(results):
        assert result["losses"] == pytest.approx(losses, abs=1e-12)
        for parameter, value in result["parameters"].items():
            torch.testing.assert_close(value, weights[parameter], rtol=0, atol=1e-12)
            if not parameter.startswith("tables."):
                assert torch.equal(value, results[0]["parameters"][parameter]), "ranks differ in their bits"
        tables = {int(key.split(".")[1]) for key in result["parameters"] if key.startswith("tables.")}
        assert tables == set(result["owned"][rank])
        seen |= tables
    assert seen == set(range(dlrm.CONFIG.tables))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_every_owner_gets_the_bags_of_the_whole_batch_in_its_order(ranks: MakeRanks, dtype: torch.dtype) -> None:
    _, indices, offsets, _ = dlrm.make_batch(0)
    for owned, lookups in ranks(4).run(dlrm.exchange, dtype):
        assert lookups.batch == dlrm.BATCH
        assert lookups.indices.dtype == lookups.offsets.dtype == torch.int32  # its tables have fewer rows than 2^31
        for place, table in enumerate(owned):
            assert lookups.ends[place] == lookups.offsets[place * dlrm.BATCH]
            for sample in range(dlrm.BATCH):
                bag = table * dlrm.BATCH + sample
                got = place * dlrm.BATCH + sample
                assert torch.equal(
                    lookups.indices[lookups.offsets[got] : lookups.offsets[got + 1]],
                    indices[offsets[bag] : offsets[bag + 1]].to(dtype),
                )


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ([0, 1, 2, 4], "offsets have shape .4., but need tables x batch . 1 numbers, and there are 2 tables"),
        ([0, 1, 3, 2, 4], "offsets fall from 3 to 2 at position 3"),
        ([1, 1, 2, 3, 4], "offsets go from 1 to 4, but must go from 0 to the number of indices, 4"),
        ([0, 1, 2, 3, 5], "offsets go from 0 to 5"),
    ],
)
def test_offsets_that_divide_nothing_are_refused(offsets: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_offsets(torch.zeros(4, dtype=torch.int64), torch.tensor(offsets), 2)


@pytest.mark.parametrize("index", [-1, 20])
def test_an_index_outside_of_its_table_is_named_and_no_rank_waits(ranks: MakeRanks, index: int) -> None:
    words = rf"index {index} at position \d+ \(table 3, sample 1 of rank 1\) is outside .* rows 0 to 19"
    (other, after), (own, own_after) = ranks(2).run(dlrm.exchange_bad_index, index)
    assert re.match(words, own)
    assert other == "rank 1 has rejected its own batch: see its error"
    assert after == own_after == dlrm.BATCH


def test_batches_of_different_sizes_are_refused_on_every_rank(ranks: MakeRanks) -> None:
    for message, batch in ranks(3).run(dlrm.exchange_batches_of, (4, 4, 3)):
        assert message.startswith("the ranks' batches have 4, 4, 3 samples, but must all have as many")
        assert batch == 6


def test_a_rank_without_samples_is_refused_on_every_rank(ranks: MakeRanks) -> None:
    for message, batch in ranks(3).run(dlrm.exchange_batches_of, (2, 0, 2)):
        assert message.startswith("the ranks' batches have 2, 0, 2 samples")
        assert batch == 6


def test_backward_passes_after_one_that_failed_sum_all_gradients_and_add_up(ranks: MakeRanks) -> None:
    for expected, found in ranks(2).run(dlrm.fail_and_go_on):
        torch.testing.assert_close(found, expected)


def test_a_kernel_that_cannot_run_is_refused_and_auto_does_without() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose_operators("auto", torch.float64, cuda, [4]) is None
    assert choose_operators("auto", torch.float32, cpu, [4]) is None
    assert choose_operators("auto", torch.float32, cuda, [4, 6]) is None
    assert choose_operators("library", torch.float32, cuda, [4]) is None
    with pytest.raises(ValueError, match=r"implementation is 'kernel', but .*; implementation='library' would do"):
        choose_operators("kernel", torch.float64, cpu, [4])
    with pytest.raises(ValueError, match="implementation is 'kernal', but must be one of auto, kernel, library"):
        choose_operators("kernal", torch.float32, cpu, [4])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("owned", "words"),
    [(((0, 1, 2, 3, 4),), r"puts tables \[0, 1, 2, 3, 4\] on 1 ranks"), (((), (0, 1, 2, 3, 4, 5)), "on 2 ranks")],
)
def test_a_placement_of_other_tables_or_ranks_is_refused(
    ranks: MakeRanks, owned: tuple[tuple[int, ...], ...], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        ranks(1).run(dlrm.train, 0, owned)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tables": (TableSize(8, 4), TableSize(6, 4))}, r"of shapes \[\(8, 4\), \(6, 4\)\], but they have .*\(7, 4\)"),
        ({"kinds": ("table",)}, "has 1 kinds for 2 tables: give one for each"),
        ({"kinds": ("table", "rows")}, "there is no sharding 'rows' of table 1; did you mean 'row'"),
        ({"owned": ((0, 1), (1,))}, r"table 1 is whole, but placed on ranks \[0, 1\]: one of them, or kind 'row'"),
        ({"owned": ((0, 0, 1), ())}, "table 0 is placed on a rank twice: name it once"),
        ({"kinds": ("table", "replicated")}, "table 1 is replicated, so it is in no rank's owned"),
        ({"cached": (4,)}, "has 1 caches for 2 tables: give one for each"),
        ({"cached": (0, -1)}, "table 1 has a cache of -1 rows"),
    ],
)
def test_a_placement_that_contradicts_itself_is_refused(change: dict[str, Any], words: str) -> None:
    placement = TablePlacement((TableSize(8, 4), TableSize(7, 4)), ((0,), (1,)))
    placement.check([(8, 4), (7, 4)], 2)
    with pytest.raises(ValueError, match=words):
        replace(placement, **change).check([(8, 4), (7, 4)], 2)


def test_a_model_without_tables_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no `tables`"):
        distribute_tables(torch.nn.Linear(1, 1), None)  # type: ignore[arg-type]


def largest_part(placement: TablePlacement) -> float:
    held = [sum(placement.tables[table].numbers for table in owned) for owned in placement.owned]
    return max(max(held) / sum(held), *placement.work_shares())


def test_tables_of_one_size_are_dealt_out_evenly() -> None:
    placement = place_tables([TableSize(100, 8)] * 12, 4)
    assert [len(owned) for owned in placement.owned] == [3, 3, 3, 3]
    assert sorted(placement.order) == list(range(12))


def test_a_table_that_is_looked_up_most_does_not_stand_with_the_longest() -> None:
    placement = place_tables([TableSize(1000, 8, 1), TableSize(10, 8, 500), TableSize(10, 8, 1)], 2)
    assert placement.owner(0) != placement.owner(1)


@pytest.mark.parametrize("seed", range(5))
def test_no_rank_is_much_fuller_than_in_the_best_placement(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda high: int(torch.randint(1, high, (), generator=generator))  # noqa: E731
    tables = [TableSize(draw(1000), 4, draw(50)) for _ in range(7)]
    best = min(
        largest_part(TablePlacement(tuple(tables), tuple(tuple(t for t in range(7) if a[t] == r) for r in range(3))))
        for a in product(range(3), repeat=7)
    )
    assert largest_part(place_tables(tables, 3)) <= 1.5 * best


def test_a_rank_may_have_no_table_with_a_warning() -> None:
    placement = place_tables([TableSize(10, 4)], 3)
    assert placement.owned == ((0,), (), ())
    assert placement.explain().splitlines()[1] == "rank 1: 0 B, 0.0% of the look-ups; tables none"
    assert placement.explain().splitlines()[0] == "rank 0: 160 B, 100.0% of the look-ups; tables 0"


def test_nothing_to_place_is_refused() -> None:
    with pytest.raises(ValueError, match="0 tables on 2 ranks"):
        place_tables([], 2)
    with pytest.raises(ValueError, match="a table's rows is 0, but must be at least 1"):
        place_tables([TableSize(1, 1), TableSize(0, 1)], 2)


def test_an_index_that_no_table_has_is_none_as_32_bits_either() -> None:
    given = torch.tensor([2**32 + 3, -(2**40), 5, 2**31 - 2])
    assert _shorten(given).tolist() == [2**31 - 1, -1, 5, 2**31 - 2]
