# SPDX-License-Identifier: Apache-2.0
"""DLRM computes what its paper says, in any order of its tables, and its sizes fit together or are refused."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from stretto.recommendation import DLRM, DLRMConfig

CONFIG = DLRMConfig(rows=(5, 7, 4), dim=3, bottom=(6, 3), top=(5, 1), dense=2)


def bags(batch: int) -> list[list[list[int]]]:
    """Rows of each table and sample: none, one, and several with a row twice."""
    return [[[(sample + k) % rows for k in range((sample + table) % 3)] * 2 for sample in range(batch)]
            for table, rows in enumerate(CONFIG.rows)]  # fmt: skip


def flat(nested: list[list[list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    every = [bag for of_table in nested for bag in of_table]
    lengths = torch.tensor([0] + [len(bag) for bag in every])
    return torch.tensor([row for bag in every for row in bag]), lengths.cumsum(0)


def expected_logits(model: DLRM, dense: torch.Tensor, nested: list[list[list[int]]]) -> torch.Tensor:
    """Sample by sample, pair by pair."""
    logits = []
    for sample in range(len(dense)):
        x = model.bottom(dense[sample])
        vectors = [x]
        for table, of_table in enumerate(nested):
            weight = model.get_parameter(f"tables.{table}.weight")
            vectors.append(sum((weight[row] for row in of_table[sample]), torch.zeros(CONFIG.dim)))
        products = [vectors[0] @ vector for vector in vectors[1:]]
        products += [vectors[i] @ vectors[j] for i in range(1, len(vectors)) for j in range(1, i)]
        logits.append(model.top(torch.cat([x, torch.stack(products)])))
    return torch.cat(logits)


def test_logits_are_those_of_every_pair_of_vectors() -> None:
    torch.manual_seed(0)
    model, dense, nested = DLRM(CONFIG), torch.randn(4, 2), bags(4)
    torch.testing.assert_close(model(dense, *flat(nested)), expected_logits(model, dense, nested))


def test_the_loss_is_the_mean_or_the_sum_over_the_given_number() -> None:
    torch.manual_seed(0)
    model, dense, inputs, labels = DLRM(CONFIG), torch.randn(4, 2), flat(bags(4)), torch.tensor([0, 1, 1, 0])
    expected = F.binary_cross_entropy_with_logits(model(dense, *inputs), labels.float())
    torch.testing.assert_close(model(dense, *inputs, labels=labels), expected)
    torch.testing.assert_close(model(dense, *inputs, labels=labels, num_samples=16), expected / 4)


def test_tables_in_another_order_change_nothing() -> None:
    torch.manual_seed(0)
    model, x, pooled = DLRM(CONFIG), torch.randn(4, 3), torch.randn(4, 3, 3)
    before = model.interaction(x, pooled.flatten(1))
    order = [2, 0, 1]
    model.reorder(order)
    torch.testing.assert_close(model.interaction(x, pooled[:, order].flatten(1)), before)
    with pytest.raises(ValueError, match=r"\[0, 0, 1\] is no order of 3 tables"):
        model.reorder([0, 0, 1])


def test_a_batch_of_no_samples_has_no_logits_and_gradients_of_zeros() -> None:
    model, none = DLRM(CONFIG), torch.zeros(0, dtype=torch.int64)
    logits = model(torch.zeros(0, 2), none, torch.zeros(1, dtype=torch.int64))
    assert logits.shape == (0,)
    logits.sum().backward()
    assert all(parameter.grad.to_dense().count_nonzero() == 0 for parameter in model.parameters())


@pytest.mark.parametrize(
    ("samples", "change", "words"),
    [
        (4, lambda offsets: offsets[:-1], r"offsets have shape \[12\], but need tables x batch \+ 1 .* 3 tables"),
        (4, lambda offsets: offsets[None], r"offsets have shape \[1, 13\]"),
        (4, lambda offsets: offsets[:0], r"offsets have shape \[0\]"),
        (3, lambda offsets: offsets, "dense has 3 samples, and offsets 4: both must be of one batch"),
        (4, lambda offsets: offsets + 1, "offsets go from 1 to 25, but must go from 0 to the number of indices, 24"),
        (4, lambda offsets: offsets.clamp(max=23), "offsets go from 0 to 23"),
        (
            4,
            lambda offsets: torch.cat((offsets[:1], offsets[1:12].flip(0), offsets[12:])),
            r"offsets fall from \d+ to \d+ at position 2: a bag cannot end",
        ),
    ],
)
def test_offsets_that_are_not_those_of_the_batch_are_refused(
    samples: int, change: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    indices, offsets = flat(bags(4))
    assert int(offsets[-1]) == 24
    with pytest.raises(ValueError, match=words):
        DLRM(CONFIG)(torch.randn(samples, 2), indices, change(offsets))


def test_mlperfs_model_has_its_published_sizes() -> None:
    with torch.device("meta"):
        model = DLRM(DLRMConfig.preset("mlperf-v2"))
    assert sum(DLRMConfig.preset("mlperf-v2").pooling) == 214
    assert sum(parameter.numel() for parameter in model.tables.parameters()) == 204_184_588 * 128
    assert model.top[0].in_features == 128 + 27 * 26 // 2
    capped = DLRMConfig.preset("mlperf-v2").capped(1000)
    assert max(capped.rows) == 1000
    assert min(capped.rows) == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": ()}, "model.rows is empty"),
        ({"rows": (5, 0)}, r"model.rows\[1\] is 0, but must be at least 1"),
        ({"dim": 0}, "model.dim is 0"),
        ({"bottom": (6, 4)}, "model.bottom ends with 4, but must end with 3"),
        ({"top": (5,)}, "model.top ends with 5, but must end with 1"),
        ({"pooling": (1, 2)}, "model.pooling has 2 numbers, but model.rows has 3"),
        ({"layers": 3}, "a DLRM has no option 'layers'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DLRMConfig.preset(
            "small", **{"rows": (5, 7, 4), "dim": 3, "bottom": (3,), "top": (1,), "pooling": (1,)} | change
        )
