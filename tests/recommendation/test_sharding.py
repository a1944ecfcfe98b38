# SPDX-License-Identifier: Apache-2.0
"""Tables that are cut by rows or columns or replicated, with fused optimizers: the results of one rank."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stretto.recommendation import DLRM, TablePlacement, TableSize
from stretto.train.checkpoint import checkpoint_path
from tests.conftest import Ranks
from tests.pool import Pool
from tests.recommendation import dlrm, sharding

MakeRanks = Callable[[int], Ranks]
STEPS = 2
# A letter for each table, of 50, 7, 1, 20, 3 and 11 rows: table, row, column, node, everywhere; each table has each.
CASES = [
    ("rtnetr", "rowwise-adagrad"), ("cncrct", "adam"), ("ertnen", "rowwise-adagrad"), ("tcecrc", "full-adagrad"),
    ("nertne", "sgd"),
]  # fmt: skip


def train_by_torch(kind: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Tables after the steps of torch's optimizers on the whole batch's gradients, and the vectors of each step."""
    (start,) = sharding_start
    model = DLRM(dlrm.CONFIG).double()
    model.load_state_dict(start)
    tables = [bag.weight for bag in model.tables]
    options = sharding.OPTIONS[kind]
    if kind == "adam":
        optimizer: Any = torch.optim.SparseAdam(tables, lr=0.3, eps=1e-30)
    elif kind == "full-adagrad":
        groups = [{"params": [table], "lr": 0.3 * options["lr_factors"].get(at, 1)} for at, table in enumerate(tables)]
        optimizer = torch.optim.Adagrad(groups, eps=1e-8)
    elif kind == "sgd":
        optimizer = torch.optim.SGD(tables, lr=0.3)
    else:
        optimizer = dlrm.RowWiseAdagrad(tables, lr=0.3)
    vectors = []
    for number in range(STEPS):
        _, indices, offsets, _ = dlrm.make_batch(number)
        out = model.tables(indices, offsets)
        generator = torch.Generator().manual_seed(number)
        out.backward(torch.randn(dlrm.BATCH, dlrm.CONFIG.tables * dlrm.CONFIG.dim, generator=generator).double())
        for table in tables:  # what no sparse optimizer of torch's does: clipping of rows, and decay of looked-up ones
            sparse = table.grad.coalesce()
            rows, values = sparse.indices()[0], sparse.values()
            norms = values.norm(dim=1, keepdim=True).clamp(min=1e-300)
            values = values * (options.get("max_norm", float("inf")) / norms).clamp(max=1.0)
            values = values + options.get("weight_decay", 0.0) * table.detach()[rows]
            table.grad = torch.sparse_coo_tensor(
                sparse.indices(), values, table.shape, is_coalesced=True, check_invariants=False
            )
        optimizer.step()
        optimizer.zero_grad()
        vectors.append(out.detach().view(dlrm.BATCH, dlrm.CONFIG.tables, dlrm.CONFIG.dim))
    return {f"model.tables.{number}.weight": table.detach() for number, table in enumerate(tables)}, vectors


sharding_start: list[dict[str, Tensor]] = []


@pytest.fixture(scope="module", autouse=True)
def start(pool: Any) -> None:
    """The initial weights, which are the same on every placement."""
    (found,) = Ranks(pool, 1).run(dlrm.train, 0)
    sharding_start[:] = [found["parameters"]]


@pytest.mark.long
@pytest.mark.parametrize(
    "count",
    [
        3,
        pytest.param(4, marks=pytest.mark.long),
        *(pytest.param(count, marks=pytest.mark.exhaustive) for count in (1, 2, 8)),
    ],
)
def test_every_kind_of_sharding_and_optimizer_gives_the_results_of_torch_on_one_rank(
    ranks: MakeRanks, count: int
) -> None:
    cases = CASES[1:5] if count == 3 else CASES
    results = ranks(count).run(sharding.update, cases, STEPS)
    for (kinds, kind), (found, vectors) in zip(cases, results[0], strict=True):
        expected, expected_vectors = train_by_torch(kind)
        for step, (ours, theirs) in enumerate(zip(vectors, expected_vectors, strict=True)):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12, msg=f"{kinds} {kind}, vectors of step {step}")
        for name, table in expected.items():
            torch.testing.assert_close(found[name], table, rtol=0, atol=1e-11, msg=f"{kinds} {kind} {name}")


@pytest.mark.long
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_kernels_update_cut_and_replicated_tables_as_the_library_does(
    ranks: MakeRanks, interpreted_pool: Pool, count: int
) -> None:
    # Dims of kernels' shards are multiples of 4.
    cases = [("crtnec", "adam")] if count == 2 else [("rrtnre", "adam")]
    kernel = interpreted_pool.run(count, sharding.update, cases, 2, torch.float32, "kernel", timeout=120)
    library = ranks(count).run(sharding.update, cases, 2, torch.float32)
    for (ours, our_vectors), (theirs, their_vectors) in zip(kernel[0], library[0], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6, msg=name)
        for one, other in zip(our_vectors, their_vectors, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_groups_that_average_their_tables_are_one_group_with_sgd_and_drift_between_averages(ranks: MakeRanks) -> None:
    (alone,) = ranks(1).run(sharding.update, [("tttttt", "sgd-plain")], 4)[0]
    found, drifts = ranks(4).run(sharding.replicate, "rtrcte", "sgd", 1, 4)[0]
    for name, value in alone[0].items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=name)
    assert min(drifts) > 1e-3
    seldom, drifts = ranks(4).run(sharding.replicate, "trtrtt", "rowwise-adagrad", 2, 4)[0]
    assert drifts[0] == 0
    assert 0 < drifts[1] == drifts[2] != drifts[3]
    assert any(name.endswith("sum") for name in seldom)
    words = ranks(4).run(sharding.refuse_replicas)[0]
    assert words[0].startswith("replicas is 3 and sync_every 0, but groups are equal parts of 4 ranks")
    assert words[0].endswith("replicas=2 and sync_every=1 would do")
    assert words[1].startswith("tables that are cached or grow have one copy: replicas=1 would do, not 2")


@pytest.mark.long
def test_stochastic_rounding_has_the_same_bits_on_every_placement(ranks: MakeRanks) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        ((alone, _),) = ranks(1).run(sharding.update, [("tttttt", "adam")], STEPS, dtype)[0]
        for count, kinds in ((4, "crtnec"), (3, "rcrecr")):
            ((found, _),) = ranks(count).run(sharding.update, [(kinds, "adam")], STEPS, dtype)[0]
            for name, value in alone.items():
                assert value.dtype == (dtype if name.startswith("model.") else torch.float32)
                assert torch.equal(found[name], value), f"{name} of {kinds}"


def test_gradients_without_a_fused_optimizer_are_those_of_one_rank(ranks: MakeRanks) -> None:
    model = DLRM(dlrm.CONFIG).double()
    model.load_state_dict(sharding_start[0])
    _, indices, offsets, _ = dlrm.make_batch(0)
    generator = torch.Generator().manual_seed(0)
    width = dlrm.CONFIG.tables * dlrm.CONFIG.dim
    model.tables(indices, offsets).backward(torch.randn(dlrm.BATCH, width, generator=generator).double())
    seen = set()
    for of_rank in ranks(4).run(sharding.gradients, "crtnec"):
        for name, gradient in of_rank.items():
            table, row, column = map(int, name.split())
            rows, columns = gradient.shape
            whole = model.tables[table].weight.grad.to_dense()
            expected = whole[row : row + rows, column : column + columns]
            torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
            seen |= {(table, row + one, column + other) for one in range(rows) for other in range(columns)}
    assert len(seen) == sum(dlrm.CONFIG.rows) * dlrm.CONFIG.dim


@pytest.mark.long
@pytest.mark.parametrize("before", ["crtnec", pytest.param("eetrte", marks=pytest.mark.exhaustive)])
def test_checkpoints_of_any_sharding_resume_on_another_one_and_other_ranks(
    ranks: MakeRanks, tmp_path: Path, before: str
) -> None:
    expected = ranks(4).run(sharding.save, before, "adam", tmp_path)[0]
    own = checkpoint_path(tmp_path / "own", 2)
    for count, kinds, checkpoint in ((3, "rceter", own), (1, "tttttt", None), (2, "ercrrt", None)):
        found = ranks(count).run(sharding.resume, kinds, "adam", tmp_path, checkpoint)[0]
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=f"{name} of {kinds}")


def test_a_whole_model_with_cut_tables_has_the_losses_of_one_rank(ranks: MakeRanks) -> None:
    alone = ranks(1).run(sharding.train, 3, "tttttt")[0]
    assert alone[0] != pytest.approx(alone[-1], abs=1e-3)
    for count, kinds in ((4, "rretnr"), (2, "ereret")):
        for losses in ranks(count).run(sharding.train, 3, kinds):
            assert losses == pytest.approx(alone, abs=1e-12)


@pytest.mark.parametrize(
    ("kinds", "kind", "options", "words"),
    [
        ("tctttt", "rowwise-adagrad", {}, "rowwise-adagrad takes whole rows, but table 1 is cut by columns"),
        ("tctttt", "adam", {"max_norm": 1.0}, r"clipping by a row's norm \(max_norm\) takes whole rows"),
        ("tttttt", "adamw", {}, "there is no table optimizer 'adamw'; did you mean 'adam'"),
        ("tttttt", "sgd", {"lr": -1.0}, "lr is -1.0, but must be at least 0"),
        ("tttttt", "adam", {"betas": (0.9, 1.0)}, r"betas are \(0.9, 1.0\), but must be at least 0 and below 1"),
        ("tttttt", "sgd", {"lr_factors": {6: 1.0}}, "lr_factors has table 6, but there are tables 0 to 5"),
    ],
)
def test_an_optimizer_that_tables_cannot_have_is_refused(
    ranks: MakeRanks, kinds: str, kind: str, options: dict[str, Any], words: str
) -> None:
    for message in ranks(2).run(sharding.refuse, kinds, kind, options):
        assert re.match(words, message), message


@pytest.mark.parametrize(
    ("owned", "kinds", "words"),
    [
        (((0, 1, 2), (1, 3, 4, 5)), "tttttt", "table 1 is whole, but placed on ranks [0, 1]"),
        (((0, 1, 2, 3), (2, 4, 5)), "ttrttt", "table 2 has 1 rows, which are cut for 2 ranks: 1 ranks would do"),
        (((0, 1, 2, 3), (4, 5)), "tttett", "table 3 is replicated, so it is in no rank's owned"),
        (
            ((0, 1, 2, 3), (0, 4, 5)),
            "nttttt",
            "table 0 is cut inside a node ('table-row'), but its ranks [0, 1] are on",
        ),
        (((0, 1, 2, 3), (4, 5)), "ttttt", "the placement has 5 kinds for 6 tables: give one for each"),
    ],
)
def test_a_placement_that_cannot_be_is_refused_before_anything_is_allocated(
    ranks: MakeRanks, owned: Any, kinds: str, words: str
) -> None:
    placement = sharding.place("tttttt", 2)
    names: dict[str, Any] = {"t": "table", "r": "row", "n": "table-row", "e": "replicated"}
    changed = TablePlacement(placement.tables, owned, tuple(names[kind] for kind in kinds))
    for message in ranks(2).run(sharding.refuse_placement, changed, "2x1"):
        assert message.startswith(words)


def test_shards_are_equal_boxes_that_cover_their_tables() -> None:
    sizes = (TableSize(10, 12), TableSize(7, 16), TableSize(3, 4))
    placement = TablePlacement(sizes, ((0, 1), (0, 1), (0,)), ("row", "column", "replicated"))
    assert [[(one.row, one.rows, one.column, one.columns) for one in of_rank] for of_rank in placement.shards] == [
        [(0, 3, 0, 12), (0, 7, 0, 8)], [(3, 3, 0, 12), (0, 7, 8, 8)], [(6, 4, 0, 12)],
    ]  # fmt: skip
    assert placement.order == (0, 1, 2)
    assert placement.explain().splitlines()[0].endswith("tables 0/0 of 3 by row, 1/0 of 2 by column")
    assert sum(placement.work_shares()) == pytest.approx(1)
    assert placement.explain().splitlines()[-1] == "every rank: tables 2"
