# SPDX-License-Identifier: Apache-2.0
"""Embeddings that ranks share out: losses, gradients and weights are those of the same model on one rank."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stretto.parallel import Grid
from stretto.recommendation import EmbeddingBagCollection, EmbeddingBagConfig, distribute_embeddings
from tests.conftest import Ranks
from tests.recommendation import embedding_models

MakeRanks = Callable[[int], Ranks]
LONG = pytest.mark.long


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "options"),
    [
        (3, {}),
        pytest.param(1, {}, marks=pytest.mark.exhaustive),
        pytest.param(2, {"gradients": "sum", "pooling": {"t1": 50.0}}, marks=LONG),
        pytest.param(4, {"z": 2, "sparse": True}, marks=LONG),
        pytest.param(
            4,
            {"owners": dict.fromkeys(("t1", "t2", "t3", "w1", "w2", "s1", "s2", "bag", "row"), 3)},
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_training_is_that_of_one_rank(ranks: MakeRanks, world: int, options: dict[str, Any]) -> None:
    owned = ranks(world).run(embedding_models.compare, **options)
    for module, tables in {"pooled": 3, "weighted": 2, "rows": 2, "bag": 1, "row": 1}.items():
        assert sum(len(of_rank[module]) for of_rank in owned) == tables, f"{module}: each table is on one rank"


@pytest.mark.parametrize(
    ("kind", "torchs", "options"),
    [("full-adagrad", torch.optim.Adagrad, {"eps": 1e-6}), pytest.param("sgd", torch.optim.SGD, {}, marks=LONG)],
)
def test_optimizers_in_the_backward_pass_are_torchs(
    ranks: MakeRanks, kind: str, torchs: type[torch.optim.Optimizer], options: dict[str, float]
) -> None:
    ranks(3).run(embedding_models.compare_optimizers, kind, torchs, **options)


@LONG
def test_the_fused_operator_pools_and_updates_as_one_rank_does(interpret: Callable[..., list[Any]]) -> None:
    interpret(2, embedding_models.compare_kernel)


def test_what_one_rank_is_given_wrongly_all_refuse_by_name_and_go_on(ranks: MakeRanks) -> None:
    other, own = ranks(2).run(embedding_models.refuse_and_go_on)
    expected = [
        r"index 7 at position \d+ \(feature 'country' of table 't2', sample \d of rank 1\) is outside .* rows 0 to 6",
        "the KeyedJaggedTensor has no feature 'clicks'; did you mean 'click'",
        "ids are torch.float64",
        "is_weighted=True, so its KeyedJaggedTensor has a weight for each id",
        "the ranks' batches have 6, 2 samples",
    ]
    for message, from_other, words in zip(own, other, expected, strict=True):
        assert re.search(words, message)
        assert from_other == message if "batches" in words else "rank 1 has rejected its own batch" in from_other


def test_state_dicts_have_torchrecs_names_and_load_on_any_placement(ranks: MakeRanks, tmp_path: Path) -> None:
    names = ranks(2).run(embedding_models.save_and_load, str(tmp_path))
    assert {"pooled.embedding_bags.t1.weight", "rows.embeddings.s2.weight", "bag.weight", "over.0.bias"} <= {
        *names[0],
        *names[1],
    }


@LONG
def test_a_model_on_meta_starts_with_the_same_weights_on_any_number_of_ranks(ranks: MakeRanks) -> None:
    (alone,), several = (
        ranks(1).run(embedding_models.initial_weights, 7),
        ranks(3).run(embedding_models.initial_weights, 7),
    )
    assert {name for of_rank in several for name in of_rank} == {*alone}
    for of_rank in several:
        for name, value in of_rank.items():
            assert torch.equal(value, alone[name])
    assert alone["pooled.embedding_bags.t1.weight"].abs().max() <= 10**-0.5


@LONG
def test_modules_that_are_not_named_are_parallelized_as_dense_layers(ranks: MakeRanks) -> None:
    ranks(2).run(embedding_models.leave_some_to_parallelize)


def test_an_embedding_bag_takes_all_of_torchs_inputs(ranks: MakeRanks) -> None:
    ranks(2).run(embedding_models.forms_of_bags)


@LONG
def test_tables_of_several_dtypes_are_looked_up_in_one_collection(ranks: MakeRanks) -> None:
    for kinds in ranks(2).run(embedding_models.half_precision):
        assert kinds[0] == torch.float32


class Tied(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Embedding(4, 2, **options), nn.Linear(2, 4, bias=False)
        if not options:
            self.last.weight = self.first.weight


REFUSED: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [
    (Tied, {}, "first.weight is a parameter of other modules, too"),
    (lambda: Tied(max_norm=1.0), {}, "first has max_norm=1.0"),
    (lambda: Tied(sparse=True), {"modules": ["frist"]}, "no module with embeddings is named 'frist'.*first"),
    (lambda: Tied(sparse=True), {"owners": {}}, "owners has no rank for table 'first'"),
    (lambda: Tied(sparse=True), {"owners": {"first": 1}}, "'first' is on rank 1, but ranks are 0 to 0"),
    (lambda: Tied(sparse=True), {"pooling": {"fist": 1}}, "pooling: no table is named 'fist'"),
    (lambda: Tied(sparse=True), {"blocks": ["lost"]}, "no submodule is named 'lost'"),
    (lambda: nn.Linear(1, 1), {}, "Linear has no EmbeddingBagCollection"),
    (lambda: nn.Sequential(nn.EmbeddingBag(2, 2, mode="max")), {}, "mode='max'"),
    (
        lambda: nn.Sequential(EmbeddingBagCollection([EmbeddingBagConfig(2, 3, "t")])),
        {"implementation": "kernel"},
        "dim is a multiple of 4",
    ),
]


def refuse_all() -> None:
    grid = Grid(device="cpu")
    for make, options, words in REFUSED:
        model = make()
        before = dict(model.named_modules())
        with pytest.raises(ValueError, match=words):
            distribute_embeddings(model, grid, **options)
        assert dict(model.named_modules()) == before


def test_what_cannot_be_distributed_is_refused_and_left_alone(ranks: MakeRanks) -> None:
    ranks(1).run(refuse_all)


def test_an_axis_that_cuts_weights_is_refused(ranks: MakeRanks) -> None:
    with pytest.raises(ValueError, match="x=2, but tables are distributed over data and z: choose x=1"):
        ranks(2).run(distribute_over_x)


def distribute_over_x() -> None:
    distribute_embeddings(nn.EmbeddingBag(2, 2), Grid(x=2, device="cpu"))
