# SPDX-License-Identifier: Apache-2.0
"""Kernels that wait leave room for those of other groups: two groups that cross, beside a stand-in for NCCL."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu.crossing import KINDS, SAMPLED_KINDS, Setting, cross

SEED = random.randrange(2**31)
pytestmark = pytest.mark.ranks(4, own=(4,), among=(4,))


@pytest.mark.parametrize(
    ("kinds", "rounds"),
    [
        pytest.param(SAMPLED_KINDS, 9 * 32, id="sampled"),
        pytest.param(KINDS, 10_000, id="all", marks=pytest.mark.exhaustive),
    ],
)
def test_groups_that_cross_with_nccl_never_deadlock_in_any_order_of_launch(
    run_ranks: Callable[..., list[Any]], world: int, kinds: tuple[str, ...], rounds: int
) -> None:
    print(f"seed {SEED}")
    found = run_ranks(world, cross, Setting(SEED, rounds, seconds=250.0, kinds=kinds), timeout=290.0)
    assert found[0]["rounds"] == rounds, f"seed {SEED}: there was time for {found[0]['rounds']} rounds only"
    assert min(row["rounds"] for row in found[0]["rows"]) >= 16, "each pair of kinds meets in every order of its groups"
