# SPDX-License-Identifier: Apache-2.0
"""Embeddings that ranks share out: losses, gradients and weights are those of the same model on one rank."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from stretto.parallel import Grid
from stretto.recommendation import EmbeddingBagCollection, EmbeddingBagConfig, distribute_embeddings
from tests.conftest import Ranks
from tests.differences import largest
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


@pytest.mark.parametrize(("world", "cut"), [(3, 0), pytest.param(2, 1, marks=LONG), pytest.param(1, 0, marks=LONG)])
def test_tables_that_are_cut_train_as_on_one_rank_and_their_weights_of_ids_get_gradients(
    ranks: MakeRanks, world: int, cut: int
) -> None:
    owned = ranks(world).run(embedding_models.compare, kinds=embedding_models.CUTS[cut])
    assert {len(of_rank["weighted"]) for of_rank in owned} == {2}


@pytest.mark.exhaustive
def test_the_fused_operator_looks_up_tables_that_are_cut(interpret: Callable[..., list[Any]]) -> None:
    kinds = {"t1": "row", "t2": "column", "w1": "row", "w2": "row"}
    interpret(2, embedding_models.compare_kernel, "cpu", kinds)


def test_parts_of_tables_are_saved_as_one_and_load_into_other_parts(ranks: MakeRanks, tmp_path: Path) -> None:
    ranks(3).run(embedding_models.save_and_load_parts, str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "torchs", "options"),
    [
        ("full-adagrad", torch.optim.Adagrad, {"eps": 1e-6, "kinds": embedding_models.CUTS[0]}),
        pytest.param("sgd", torch.optim.SGD, {}, marks=LONG),
    ],
)
def test_optimizers_in_the_backward_pass_are_torchs(
    ranks: MakeRanks, kind: str, torchs: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    ranks(3).run(embedding_models.compare_optimizers, kind, torchs, **options)


@LONG
def test_the_fused_operator_pools_and_updates_as_one_rank_does(interpret: Callable[..., list[Any]]) -> None:
    interpret(2, embedding_models.compare_kernel)


@pytest.mark.parametrize(
    ("kinds", "generated"),
    [
        ({}, {}),
        ({"table_0": "row", "table_3": "row", "weighted_table_1": "row"}, {"use_offsets": True}),
        ({"table_0": "column", "weighted_table_0": "column"}, {"pooling_avg": 1}),
        ({}, {f"{name}_dtype": torch.int32 for name in ("indices", "offsets", "lengths")}),
    ],
)
def test_torchrecs_own_test_model_trains_as_on_one_rank(
    ranks: MakeRanks, kinds: dict[str, Any], generated: dict[str, Any]
) -> None:
    pytest.importorskip("torchrec", reason="the model")
    assert largest(ranks(2).run(embedding_models.train_torchrecs_model, kinds, timeout=300, **generated)) < 1e-5


def test_schedulers_set_the_rate_and_frozen_tables_stay(ranks: MakeRanks) -> None:
    for found in ranks(2).run(embedding_models.schedule):
        assert found == [True, True, True]


def test_tables_may_be_frozen_and_thawed_after_fuse_update(
    ranks: MakeRanks, interpret: Callable[..., list[Any]]
) -> None:
    for found in (ranks(2).run(embedding_models.freeze), interpret(2, embedding_models.freeze, "kernel")):
        assert found == [[True] * 6, []]


@pytest.mark.exhaustive
def test_the_fused_operator_has_learning_rates_and_leaves_frozen_tables(interpret: Callable[..., list[Any]]) -> None:
    assert interpret(2, embedding_models.schedule, "kernel") == [[True] * 3] * 2


def test_tables_are_not_converted_once_ranks_have_agreed_on_them(ranks: MakeRanks) -> None:
    for words in ranks(2).run(embedding_models.convert):
        assert words == "these tables are torch.float32 on cpu, on all ranks, and cannot become torch.float64 on cpu"


def test_what_one_rank_is_given_wrongly_all_refuse_by_name_and_go_on(ranks: MakeRanks) -> None:
    other, own = ranks(2).run(embedding_models.refuse_and_go_on)
    expected = [
        r"index 7 at position \d+ \(feature 'country' of table 't2', sample \d of rank 1\) is outside .* rows 0 to 6",
        "the KeyedJaggedTensor has no feature 'clicks'; did you mean 'click'",
        "ids are torch.float64",
        "is_weighted=True, so its KeyedJaggedTensor has a weight for each id",
        "the ranks' batches have 6, 2 samples",
        "takes no offsets",
        "must be a Tensor",
    ]
    for message, from_other, words in zip(own, other, expected, strict=True):
        assert re.search(words, message)
        assert from_other == message if "batches" in words else "rank 1 has rejected its own batch" in from_other


def test_ids_that_are_sent_ahead_give_the_same_bits_and_errors_at_their_step(ranks: MakeRanks) -> None:
    other, own = ranks(2).run(embedding_models.prefetch)
    refused = "rank 1 has rejected its own batch"
    expected = [
        ("disk", refused),
        ("index 10. at position 0 .* of rank 1", refused),
        ("rank 1 has no batch left, but rank 0 has one", None),
        ("pooled was not called with the features of its batch", None),
        ("these weights of ids need gradients", None),
        ("no collection is named 'poled'; did you mean 'pooled'", None),
        (r"a batch \(int\) has 0 KeyedJaggedTensors", None),
    ]
    for message, from_other, (words, others) in zip(own, other, expected, strict=True):
        assert re.search(words, message)
        assert re.search(others or words, from_other)


def test_state_dicts_have_torchrecs_names_and_load_on_any_placement(ranks: MakeRanks, tmp_path: Path) -> None:
    names = ranks(2).run(embedding_models.save_and_load, str(tmp_path))
    assert {"pooled.embedding_bags.t1.weight", "rows.embeddings.s2.weight", "bag.weight", "over.0.bias"} <= {
        *names[0],
        *names[1],
    }


def test_optimizer_states_are_saved_and_resume_on_any_placement(ranks: MakeRanks, tmp_path: Path) -> None:
    def run(count: int, resumes: bool, **options: Any) -> dict[str, torch.Tensor]:
        whole = dict[str, torch.Tensor]()
        for of_rank in ranks(count).run(embedding_models.save_or_resume, str(tmp_path), resumes, **options):
            for name, (shape, offsets, values) in of_rank.items():
                into = whole.setdefault(name, torch.empty(shape, dtype=values.dtype))
                into[tuple(slice(at, at + size) for at, size in zip(offsets, values.shape, strict=True))] = values
        return whole

    expected = run(3, False)
    assert {"model.bag.weight", "optimizer.pooled.embedding_bags.t1.weight.sum"} <= expected.keys()
    assert expected["optimizer.rows.rows.float64.clock"].tolist() == [3, 0]
    tables = ("t1", "t2", "t3", "w1", "w2", "s1", "s2", "bag", "row")
    for count, options in (
        (2, {"owners": dict.fromkeys(tables, 1)}),
        (3, {"kinds": {"t1": "row", "t2": "row", "w1": "column", "bag": "column"}}),
        (1, {}),
    ):
        found = run(count, True, **options)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10, msg=name)


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


def watched(**options: Any) -> nn.Module:
    """An embedding whose weight has a hook."""
    made = nn.Embedding(4, 2, **options)
    made.weight.register_hook(lambda gradient: gradient)
    return nn.Sequential(made)


def updated() -> nn.Module:
    """An embedding with an optimizer in its backward pass."""
    made = nn.Sequential(nn.Embedding(4, 2))
    _apply_optimizer_in_backward(torch.optim.SGD, made.parameters(), {"lr": 0.1})
    return made


def fused() -> nn.Module:
    """A collection with an optimizer of its own, as TorchRec's FusedEmbeddingBagCollection has one."""
    made: Any = EmbeddingBagCollection([EmbeddingBagConfig(2, 4, "t")])
    made.fused_optimizer = lambda: None
    return nn.Sequential(made)


REFUSED: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [
    (Tied, {}, "first.weight is a parameter of other modules, too"),
    (lambda: Tied(max_norm=1.0), {}, "first has max_norm=1.0"),
    (watched, {}, "0.weight has hooks"),
    (fused, {}, "0 is a EmbeddingBagCollection, whose optimizer would be left out"),
    (updated, {}, "0.weight was given to apply_optimizer_in_backward.*fuse_update"),
    (lambda: Tied(sparse=True), {"modules": ["frist"]}, "no module with embeddings is named 'frist'.*first"),
    (lambda: Tied(sparse=True), {"owners": {}}, "owners has no rank for table 'first'"),
    (lambda: Tied(sparse=True), {"owners": {"first": 1}}, "'first' is on rank 1, but ranks are 0 to 0"),
    (lambda: Tied(sparse=True), {"kinds": {"first": "row"}}, "table 'first' has kind 'row': pooled tables are"),
    (lambda: Tied(sparse=True), {"owners": {"first": [0, 0]}}, r"'first' is on ranks \[0, 0\], but whole on one"),
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
