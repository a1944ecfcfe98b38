# SPDX-License-Identifier: Apache-2.0
"""Embedding collections in plain PyTorch: results and gradients of torch's and FBGEMM's look-ups, TorchRec's names."""

import importlib
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto import recommendation
from stretto.recommendation import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
)

BAGS = {"f1": [[0, 1], [], [2]], "f2": [[3], [4], [5, 6, 7]]}  # of torchrec/modules/tests


def keyed(bags: dict[str, list[list[int]]], weights: Tensor | None = None, kind: Any = KeyedJaggedTensor) -> Any:
    flat = [bag for of_feature in bags.values() for bag in of_feature]
    values = torch.tensor([value for bag in flat for value in bag])
    return kind.from_lengths_sync([*bags], values, torch.tensor([len(bag) for bag in flat]), weights)


# TorchRec's own cases: tables as (name, dim, features), bags, and keys and offsets of the result.
CASES: dict[str, tuple[list[tuple[str, int, list[str]]], dict[str, list[list[int]]], list[str], list[int]]] = {
    "unweighted": ([("t1", 3, ["f1"]), ("t2", 4, ["f2"])], BAGS, ["f1", "f2"], [0, 3, 7]),
    "shared tables": ([("t1", 3, ["f1", "f2"])], BAGS, ["f1", "f2"], [0, 3, 6]),
    "shared features": (
        [("t1", 3, ["f1"]), ("t2", 4, ["f1"])],
        {"f1": [*BAGS["f1"], *BAGS["f2"]]},
        ["f1@t1", "f1@t2"],
        [0, 3, 7],
    ),
    "other order": (
        [("t1", 3, ["f1", "f3"]), ("t2", 4, ["f2"])],
        {"f1": [[1, 2], [4, 5]], "f3": [[4, 3], [2, 9]], "f2": [[1, 3], [4, 7]]},
        ["f1", "f3", "f2"],
        [0, 3, 6, 10],
    ),
    "no samples": ([("t1", 3, ["f1"]), ("t2", 4, [])], {"t2": [], "f1": []}, ["f1", "t2"], [0, 3, 7]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", PoolingType)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_pooled_vectors_and_all_gradients_are_those_of_sums_of_rows(
    name: str, mode: PoolingType, is_weighted: bool
) -> None:
    tables, bags, keys, offsets = CASES[name]
    configs = [
        EmbeddingBagConfig(10, dim, table, feature_names=features, pooling=mode) for table, dim, features in tables
    ]
    module = EmbeddingBagCollection(configs, is_weighted).double()
    total = sum(len(bag) for of_feature in bags.values() for bag in of_feature)
    factors = torch.rand(total, dtype=torch.float64, requires_grad=True)
    pooled = module(keyed(bags, factors if is_weighted else None))
    assert isinstance(pooled, KeyedTensor)
    assert (pooled.keys(), pooled.offset_per_key()) == (keys, offsets)

    places = dict(zip([(key, bag) for key in bags for bag in range(len(bags[key]))], _spans(bags), strict=True))
    columns = []
    for table, _, features in tables:
        weight = module.embedding_bags[table].weight
        for feature in features or [table]:
            rows = [
                _pool(weight, bag, factors[places[feature, at]] if is_weighted else None, mode)
                for at, bag in enumerate(bags[feature])
            ]
            columns.append(torch.stack(rows) if rows else weight[:0])
    expected = torch.cat(columns, 1)
    torch.testing.assert_close(pooled.values(), expected, rtol=0, atol=1e-14)
    towards = torch.randn_like(expected)
    inputs = [*module.parameters(), *([factors] if is_weighted else [])]
    torch.testing.assert_close(
        torch.autograd.grad(pooled.values(), inputs, towards),
        torch.autograd.grad(expected, inputs, towards, allow_unused=True, materialize_grads=True),
        rtol=0,
        atol=1e-14,
    )


def _spans(bags: dict[str, list[list[int]]]) -> list[slice]:
    spans, position = [], 0
    for bag in (bag for of_feature in bags.values() for bag in of_feature):
        spans.append(slice(position, position := position + len(bag)))
    return spans


def _pool(weight: Tensor, bag: list[int], factors: Tensor | None, mode: PoolingType) -> Tensor:
    rows = weight[torch.tensor(bag, dtype=torch.int64)]
    if factors is not None:
        rows = rows * factors.unsqueeze(1)
    return rows.sum(0) / (max(len(bag), 1) if mode is PoolingType.MEAN else 1)


def test_rows_by_id_are_as_torchrecs() -> None:
    tables = [
        EmbeddingConfig(10, 5, "t1", feature_names=["f1", "f2"]),
        EmbeddingConfig(10, 5, "t2", feature_names=["f2"]),
    ]
    module = EmbeddingCollection(tables, need_indices=True).double()
    rows = module(keyed({"f1": [[0, 1], [2]], "f2": [[], [3]]}))
    assert {name: one.weights().tolist() for name, one in rows.items()} == {"f1": [0, 1, 2], "f2@t1": [3], "f2@t2": [3]}
    assert torch.equal(rows["f1"].values(), module.embeddings["t1"].weight[:3])
    assert torch.equal(rows["f2@t2"].values(), module.embeddings["t2"].weight[3:4])
    assert rows["f2@t1"].lengths().tolist() == [0, 1]
    assert module.embedding_dim() == 5


def test_state_dicts_have_torchrecs_names_and_initial_weights_those_bounds() -> None:
    tables = [
        EmbeddingBagConfig(10, 3, "t1", feature_names=["f1"], init_fn=partial(nn.init.constant_, val=1.5)),
        EmbeddingBagConfig(10_000, 4, "t2"),
    ]
    module = EmbeddingBagCollection(tables)
    assert [*module.state_dict()] == ["embedding_bags.t1.weight", "embedding_bags.t2.weight"]
    assert bool((module.embedding_bags["t1"].weight == 1.5).all())
    assert 0.0099 < module.embedding_bags["t2"].weight.abs().max() <= 0.01
    assert tables[1].feature_names == ["t2"]
    assert [*EmbeddingCollection([EmbeddingConfig(10, 3, "t1")]).state_dict()] == ["embeddings.t1.weight"]
    assert EmbeddingBagCollection(tables, device=torch.device("meta")).device == torch.device("meta")


def config(name: str = "t1", dim: int = 4, **options: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(10, dim, name, **options)


BROKEN: list[tuple[Callable[[], object], str]] = [
    (lambda: EmbeddingBagCollection([config(), config(dim=3)]), "two tables are named 't1'"),
    (lambda: EmbeddingBagCollection([config("items")]), "no table can be named 'items'"),
    (lambda: EmbeddingBagCollection([]), "has no tables"),
    (lambda: EmbeddingBagConfig(0, 4, "t"), "table 't' is 0 x 4"),
    (
        lambda: EmbeddingBagCollection([config(pooling=SimpleNamespace(value="MAX"))]),
        "table 't1' has pooling MAX, but must have SUM or MEAN",
    ),
    (lambda: EmbeddingCollection([config(), config("t2", 3)]), "'t2' has dim 3 and 't1' 4"),
    (lambda: EmbeddingBagCollection([config()])(keyed({"t2": [[1]]})), "has no feature 't1': it has t2"),
    (
        lambda: EmbeddingBagCollection([config()])(keyed({"t1": [[1], [10]]})),
        r"index 10 .*feature 't1' of table 't1', sample 1",
    ),
    (lambda: EmbeddingCollection([config()])(keyed({"t1": [[1], [-1]]})), r"index -1 .* rows 0 to 9"),
    (
        lambda: EmbeddingBagCollection([config()])(
            KeyedJaggedTensor(["t1"], torch.arange(3), lengths=torch.tensor([2]))
        ),
        "offsets go from 0 to 2, but must go from 0 to the number of indices, 3",
    ),
    (
        lambda: EmbeddingBagCollection([config()])(
            KeyedJaggedTensor(["t2", "t1"], torch.arange(3), lengths=torch.tensor([1, 1]))
        ),
        "bags have 2 ids, but it has 3 values",
    ),
    (lambda: EmbeddingBagCollection([config()], True)(keyed({"t1": [[1]]})), "a weight for each id"),
    (
        lambda: EmbeddingBagCollection([config()], True)(
            KeyedJaggedTensor(["t1"], torch.arange(2), torch.ones(2, 2), torch.tensor([2]))
        ),
        r"weights are \[2, 2\], but there is one number for each of 2 ids",
    ),
    (lambda: EmbeddingBagCollection([config()])(torch.tensor([1])), "takes a KeyedJaggedTensor, not Tensor"),
]


@pytest.mark.parametrize(("run", "words"), BROKEN)
def test_bad_tables_and_inputs_are_refused_by_name(run: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run()


def test_torchrecs_module_and_ours_give_the_same() -> None:
    """With the same weights, on both libraries' inputs; and each returns its input's kind."""
    torchrec = pytest.importorskip("torchrec", reason="the peer")
    for name, mode in (("unweighted", "SUM"), ("shared features", "MEAN"), ("other order", "SUM")):
        tables, bags, *_ = CASES[name]
        made = []
        for library in (recommendation, torchrec):
            configs = [
                library.EmbeddingBagConfig(
                    name=table,
                    embedding_dim=dim,
                    num_embeddings=10,
                    feature_names=features,
                    pooling=library.PoolingType[mode],
                )
                for table, dim, features in tables
            ]
            made.append(library.EmbeddingBagCollection(tables=configs))
        ours, theirs = made
        ours.load_state_dict(theirs.state_dict())
        expected = theirs(keyed(bags, kind=torchrec.KeyedJaggedTensor))
        for kind, result in ((KeyedJaggedTensor, KeyedTensor), (torchrec.KeyedJaggedTensor, torchrec.KeyedTensor)):
            found = ours(keyed(bags, kind=kind))
            assert isinstance(found, result)
            assert found.keys() == expected.keys()
            torch.testing.assert_close(found.values(), expected.values())


@pytest.mark.parametrize(("pooling", "is_weighted"), [("SUM", False), ("SUM", True), ("MEAN", False), ("MEAN", True)])
def test_vectors_and_gradients_are_fbgemms(pooling: str, is_weighted: bool) -> None:
    """Its dense table-batched embeddings on a CPU: pooled vectors, gradients of rows, and those of weights of sums."""
    pytest.importorskip("fbgemm_gpu", reason="the peer")
    ops = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    tables, bags, *_ = CASES["other order"]
    configs = [
        EmbeddingBagConfig(10, 4, table, feature_names=features, pooling=PoolingType[pooling])
        for table, _, features in tables
    ]
    module = EmbeddingBagCollection(configs, is_weighted)
    peer = ops.DenseTableBatchedEmbeddingBagsCodegen(
        [(10, 4)] * len(tables),
        feature_table_map=[number for number, (*_, features) in enumerate(tables) for _ in features],
        pooling_mode=common.PoolingMode[pooling],
        use_cpu=True,
    )
    for split, table in zip(peer.split_embedding_weights(), module.parameters(), strict=True):
        split.data.copy_(table)
    given = keyed(bags, torch.rand(12) if is_weighted else None)
    theirs = [factor.clone().requires_grad_() for factor in ([given.weights()] if is_weighted else [])]
    expected = peer(given.values(), given.offsets(), *theirs)
    factors = given.weights().requires_grad_() if is_weighted else None
    found = module(given).values()
    torch.testing.assert_close(found, expected)
    towards = torch.randn_like(found)
    found.backward(towards)
    expected.backward(towards)
    if not (is_weighted and pooling == "MEAN"):  # there FBGEMM's gradient, on CPUs, is not divided as its vectors are
        found = torch.cat([table.grad.flatten() for table in module.parameters()])
        torch.testing.assert_close(found, peer.weights.grad)
    if factors is not None and pooling == "SUM":
        torch.testing.assert_close(factors.grad, theirs[0].grad)
