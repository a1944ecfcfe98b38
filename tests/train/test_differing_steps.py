# SPDX-License-Identifier: Apache-2.0
"""Steps that differ from the first one, in which a model and its optimizer learn: on grids, and in plain PyTorch."""

from typing import Any

import pytest
from tests.train.differing_steps import MIXED_STEPS, STEPS, THAWED_STEPS, train_on_grid, train_plain

Case = tuple[str, bool, dict[str, Any]]
SUMMED: list[Case] = [("torch", True, {"accumulate_unsharded": True}), ("torch", False, {"keep_gathered": False})]
SHARDS: list[Case] = [("shards", True, {"recompute": "communication"}), ("shards", False, {"recompute": "full"})]
STORED: list[Case] = [
    ("device", True, {}),
    ("host", False, {"keep_gathered": False}),
    ("host, tiled", True, {"recompute": "full"}),
    ("host, tiled", False, {}),
]


@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 2},
        pytest.param({"z": 2}, marks=pytest.mark.long),
        pytest.param({"data": 2, "z": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_steps_that_differ_from_the_first_give_the_norms_and_weights_of_one_process(
    ranks: Any, sizes: dict[str, int]
) -> None:
    """Other numbers of micro-batches and of sums, other rows and modules, evaluations, parameters frozen and thawed."""
    for cases, steps in ((SUMMED, STEPS), (SHARDS, THAWED_STEPS), (STORED, MIXED_STEPS)):
        right_norms, right_weights = train_plain(steps)
        for kind, has_roles, options in cases:
            for norms, weights in ranks(2 ** len(sizes)).run(
                train_on_grid, sizes, kind, has_roles=has_roles, steps=steps, **options
            ):
                assert norms == pytest.approx(right_norms, rel=1e-5), (kind, has_roles, options)
                for name, right in right_weights.items():
                    assert float((weights[name] - right).abs().max()) <= 1e-5, (kind, has_roles, options, name)
