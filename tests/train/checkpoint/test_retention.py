# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints are kept, by the rule alone."""

import pytest

from stretto.train.checkpoint.retention import Retention

LOSSES = {10: 3.0, 20: 1.0, 30: 2.0, 40: None, 50: 1.0, 60: 4.0}


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (Retention(1), {60}),
        (Retention(3), {40, 50, 60}),
        (Retention(9), set(LOSSES)),
        (Retention(1, every=20), {20, 40, 60}),
        (Retention(1, every=7), {60}),
        (Retention(1, best=1), {20, 60}),  # of two equal losses the earlier
        (Retention(1, best=2), {20, 50, 60}),
        (Retention(1, best=9), {10, 20, 30, 50, 60}),  # one without an evaluation is never among the best
        (Retention(2, every=30, best=1), {20, 30, 50, 60}),
    ],
)
def test_a_checkpoint_is_kept_if_one_of_the_rules_says_so(rule: Retention, kept: set[int]) -> None:
    assert rule.surplus(LOSSES) == sorted(set(LOSSES) - kept)


def test_the_newest_is_kept_even_if_it_is_the_worst_and_there_is_no_other() -> None:
    assert Retention(1, best=1).surplus({7: 9.0}) == []
    assert Retention().surplus({}) == []
