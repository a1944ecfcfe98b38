# SPDX-License-Identifier: Apache-2.0
"""Keyed jagged tensors are as TorchRec's: its tests' cases as data, also for its own classes if it is installed."""

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from stretto.recommendation import jagged
from stretto.recommendation.jagged import KeyedJaggedTensor, select_features

OFFSETS = [0, 2, 2, 3, 4, 5, 8]
# Of torchrec/sparse/tests: two features of three samples, with an empty bag, and weights.
FEATURES: dict[str, Any] = {
    "keys": ["index_0", "index_1"],
    "values": torch.arange(1.0, 9.0),
    "weights": torch.tensor([1.0, 0.5, 1.5, 1.0, 0.5, 1.0, 1.0, 1.5]),
}
BAGS = {"index_0": [[1.0, 2.0], [], [3.0]], "index_1": [[4.0], [5.0], [6.0, 7.0, 8.0]]}


@pytest.fixture(params=["stretto", "torchrec"])
def library(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "stretto":
        return jagged
    pytest.importorskip("torchrec", reason="the same cases for TorchRec's own classes")
    return importlib.import_module("torchrec.sparse.jagged_tensor")


def features(library: ModuleType) -> Any:
    return library.KeyedJaggedTensor.from_offsets_sync(offsets=torch.tensor(OFFSETS, dtype=torch.int32), **FEATURES)


def bags(features: Any) -> dict[str, list[list[float]]]:
    return {key: [bag.tolist() for bag in one.to_dense()] for key, one in features.to_dict().items()}


def test_features_are_found_by_name(library: ModuleType) -> None:
    found = features(library)
    assert bags(found) == BAGS
    assert [bag.tolist() for bag in found["index_1"].to_dense_weights()] == [[1.0], [0.5], [1.0, 1.0, 1.5]]
    assert found["index_0"].lengths().tolist() == [2, 0, 1]
    assert found["index_1"].offsets().tolist() == [0, 1, 2, 5]
    assert (found.stride(), found.length_per_key(), found.offset_per_key()) == (3, [3, 5], [0, 3, 8])
    assert (found.lengths().tolist(), found.stride_per_key()) == ([2, 0, 1, 1, 1, 3], [3, 3])
    assert not found.variable_stride_per_key()


def test_features_are_split_permuted_joined_and_empty(library: ModuleType) -> None:
    kind, found = library.KeyedJaggedTensor, features(library)
    none, both = found.split([0, 2])
    assert (none.keys(), none.stride(), bags(both)) == ([], 3, BAGS)
    first, second = found.split([1, 1])
    assert bags(kind.concat([second, first])) == BAGS
    turned = found.permute([1, 0])
    assert (turned.keys(), turned.weights().tolist()[:2], bags(turned)) == (["index_1", "index_0"], [1.0, 0.5], BAGS)
    assert bags(kind.from_jt_dict(found.to_dict())) == BAGS
    assert kind.empty().to_dict() == {}
    nothing = kind(keys=["a"], values=torch.tensor([]), lengths=torch.tensor([], dtype=torch.int32))
    assert (nothing["a"].lengths().numel(), nothing.stride()) == (0, 0)
    assert bags(found.to(torch.device("cpu"))) == BAGS
    assert (kind.empty_like(found).keys(), kind.empty_like(found).stride()) == ([], 3)
    known = kind(keys=["a", "b"], values=torch.arange(3.0), lengths=torch.tensor([1, 2]), length_per_key=[1, 2])
    assert (known.offset_per_key(), known["b"].values().tolist()) == ([0, 1, 3], [1.0, 2.0])


def test_strings_show_values_and_weights_by_feature(library: ModuleType) -> None:
    found, kind = features(library), library.JaggedTensor
    shown = '"values": [[4.0], [5.0], [6.0, 7.0, 8.0]],\n{0}"weights": [[1.0], [0.5], [1.0, 1.0, 1.5]]\n'
    assert str(found["index_1"]) == f"JaggedTensor({{\n    {shown.format('    ')}}})\n"
    assert f'    "index_1": {{\n        {shown.format("        ")}    }}\n}})\n' in str(found)
    assert str(kind(torch.ones(2), lengths=torch.tensor([0, 2]))) == "JaggedTensor({\n    [[], [1.0, 1.0]]\n})\n"


def test_slices_are_padded_and_cut(library: ModuleType) -> None:
    one = features(library)["index_1"]
    assert one.to_padded_dense().tolist() == [[4.0, 0.0, 0.0], [5.0, 0.0, 0.0], [6.0, 7.0, 8.0]]
    assert one.to_padded_dense(2, -1.0).tolist() == [[4.0, -1.0], [5.0, -1.0], [6.0, 7.0]]
    rows = library.JaggedTensor(torch.arange(6.0).view(3, 2).requires_grad_(), lengths=torch.tensor([0, 1, 2]))
    padded = rows.to_padded_dense(1)
    assert padded.tolist() == [[[0.0, 0.0]], [[0.0, 1.0]], [[2.0, 3.0]]]
    (gradient,) = torch.autograd.grad(padded.sum(), rows.values())
    assert gradient.tolist() == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]
    assert one.to_padded_dense_weights(1).tolist() == [[1.0], [0.5], [1.0]]
    cut = library.JaggedTensor.from_dense_lengths(torch.arange(6).view(2, 3), torch.tensor([1, 2]))
    assert (cut.values().tolist(), cut.lengths().tolist()) == ([0, 3, 4], [1, 2])
    assert library.JaggedTensor.empty().values().numel() == 0
    dense = library.JaggedTensor.from_dense([torch.tensor([1.0]), torch.tensor([]), torch.tensor([7.0, 8.0])])
    assert (dense.lengths().tolist(), dense.values().tolist()) == ([1, 0, 2], [1.0, 7.0, 8.0])


def test_vectors_are_found_and_regrouped_by_name(library: ModuleType) -> None:
    kind, parts = library.KeyedTensor, [torch.randn(2, width) for width in (4, 8, 2, 3)]
    one = kind.from_tensor_list(["a", "b", "c"], parts[:3])
    other = kind(["d"], [3], parts[3])
    assert (one.keys(), one.length_per_key(), one.offset_per_key()) == (["a", "b", "c"], [4, 8, 2], [0, 4, 12, 14])
    assert torch.equal(one["b"], parts[1])
    first, second = kind.regroup([one, other], [["a", "d"], ["c"]])
    assert torch.equal(first, torch.cat([parts[0], parts[3]], 1))
    assert torch.equal(second, parts[2])
    assert torch.equal(
        kind.regroup_as_dict([one, other], [["a"], ["d", "c"]], ["u", "v"])["v"], torch.cat([parts[3], parts[2]], 1)
    )
    rows = kind.from_tensor_list(["x", "y"], [torch.ones(1, 2), torch.zeros(2, 2)], key_dim=0, cat_dim=0)
    assert torch.equal(rows.to_dict()["y"], torch.zeros(2, 2))


def test_torchs_pytrees_reach_the_tensors() -> None:
    doubled = tree_map(lambda tensor: tensor if tensor is None else tensor * 2, features(jagged)["index_0"])
    assert doubled.values().tolist() == [2.0, 4.0, 6.0]


@pytest.mark.parametrize("order", [["index_0", "index_1"], ["index_1", "index_0", "index_1"]])
def test_chosen_features_keep_their_bags(library: ModuleType, order: list[str]) -> None:
    ids = library.KeyedJaggedTensor(["index_0", "index_1"], torch.arange(8), offsets=torch.tensor(OFFSETS))
    found = select_features(ids, order, is_weighted=False)
    lengths = {"index_0": [2, 0, 1], "index_1": [1, 1, 3]}
    values = {"index_0": [0, 1, 2], "index_1": [3, 4, 5, 6, 7]}
    assert found.offsets.diff().tolist() == [length for key in order for length in lengths[key]]
    assert (found.indices.tolist(), found.batch) == ([value for key in order for value in values[key]], 3)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"lengths": torch.tensor([1.0] * 6)}, "lengths are torch.float32, but must be int32 or int64"),
    ({}, "takes lengths or offsets, and was given neither"),
    ({"lengths": torch.tensor([2, 0, 1])}, "2 keys of 1 samples have 2 bags, but .* describe 3"),
    ({"lengths": torch.tensor([2, 0, 1, 1, 1, 3]), "stride": 2}, "2 keys of 2 samples have 4 bags, but .* describe 6"),
    ({"lengths": torch.tensor([4, 4]), "weights": torch.ones(2)}, "8 values and 2 weights: give one for each"),
    ({"lengths": torch.tensor([4, 4]), "keys": ["a", "a"]}, "each feature has one key, once"),
    ({"lengths": torch.tensor([4, 4]), "length_per_key": [4, 3]}, "where each of 2 keys begins, and 8, the number of"),
    ({"lengths": torch.tensor([4, 4]), "stride_per_key_per_rank": [[1], [1]]}, "a batch size of each feature's own"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_describes_no_bags_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        KeyedJaggedTensor(**(FEATURES | changes))


def test_parts_that_are_not_of_one_batch_are_refused_and_what_is_not_there_is_named() -> None:
    one, two, weighted = (
        KeyedJaggedTensor([key], torch.arange(2), weights, torch.tensor(lengths))
        for key, weights, lengths in (("a", None, [2]), ("b", None, [1, 1]), ("c", torch.ones(2), [2]))
    )
    with pytest.raises(ValueError, match="the parts have batches of 1, 2"):
        KeyedJaggedTensor.concat([one, two])
    with pytest.raises(ValueError, match="some of the parts have weights and others do not"):
        KeyedJaggedTensor.concat([one, weighted])
    with pytest.raises(ValueError, match="this KeyedJaggedTensor has no weights"):
        one.weights()
    with pytest.raises(KeyError, match="b"):
        one["b"]
    with pytest.raises(ValueError, match=r"2 keys of widths \[2, 3\] do not fit values of shape \[1, 4\]"):
        jagged.KeyedTensor(["a", "b"], [2, 3], torch.zeros(1, 4))


def test_a_batch_size_of_each_features_own_is_refused_by_name() -> None:
    torchrec = pytest.importorskip("torchrec", reason="only its KeyedJaggedTensor has one")
    with_own = torchrec.KeyedJaggedTensor(
        ["a", "b"], torch.arange(8), offsets=torch.tensor(OFFSETS), stride_per_key_per_rank=[[2], [4]]
    )
    with pytest.raises(ValueError, match="a batch size of each feature's own"):
        select_features(with_own, ["a"], is_weighted=False)
