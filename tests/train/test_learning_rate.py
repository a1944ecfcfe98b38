# SPDX-License-Identifier: Apache-2.0
"""The learning rate: a linear warm-up, then one of four schedules."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.train.config.options import RunOptions
from stretto.train.optimizer import learning_rate


def rates(steps: int, warmup_steps: int, lr: float = 1.0, min_lr: float = 0.0, **schedule: Any) -> list[float]:
    options = RunOptions(steps=steps, batch=1, warmup_steps=warmup_steps, lr=lr, min_lr=min_lr, **schedule)
    return [learning_rate(step, options) for step in range(1, steps + 1)]


def test_warm_up_is_linear_and_ends_at_the_full_rate() -> None:
    assert rates(steps=10, warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_without_warm_up_the_first_step_takes_the_full_rate() -> None:
    assert rates(steps=10, warmup_steps=0)[0] == 1.0


def test_half_way_down_the_rate_is_half_way_to_the_minimum() -> None:
    assert rates(steps=12, warmup_steps=2, lr=1.0, min_lr=0.2)[7] == pytest.approx(0.6)


def test_the_cosine_ends_just_above_the_minimum() -> None:
    last = rates(steps=1000, warmup_steps=0, min_lr=0.1)[-1]
    assert 0.1 < last < 0.1 + 1e-5


def test_a_run_of_one_step_trains_at_the_full_rate() -> None:
    assert rates(steps=1, warmup_steps=0) == [1.0]
    assert rates(steps=1, warmup_steps=1) == [1.0]


def test_a_line_falls_by_the_same_amount_each_step() -> None:
    assert rates(steps=7, warmup_steps=2, min_lr=0.5, schedule="linear") == pytest.approx(
        [0.5, 1.0, 1.0, 0.9, 0.8, 0.7, 0.6]
    )


def test_a_stable_phase_lasts_until_the_decay_begins() -> None:
    assert rates(steps=8, warmup_steps=2, schedule="wsd", decay_steps=4) == pytest.approx(
        [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    )
    assert rates(steps=20, warmup_steps=0, schedule="wsd") == pytest.approx([1.0] * 19 + [0.5])  # a tenth decays


def test_a_constant_rate_stays_after_warm_up() -> None:
    assert rates(steps=4, warmup_steps=2, schedule="constant") == [0.5, 1.0, 1.0, 1.0]


@given(st.integers(1, 300), st.sampled_from(["cosine", "linear", "wsd", "constant"]), st.data())
def test_the_rate_rises_then_falls_and_stays_between_its_bounds(steps: int, schedule: str, data: st.DataObject) -> None:
    warmup_steps = data.draw(st.integers(0, steps))
    all_rates = rates(steps, warmup_steps, lr=3e-4, min_lr=3e-5, schedule=schedule)
    peak = max(warmup_steps, 1)
    assert all_rates[:peak] == sorted(all_rates[:peak])
    assert all_rates[peak - 1 :] == sorted(all_rates[peak - 1 :], reverse=True)
    assert all(0 < rate <= 3e-4 for rate in all_rates)
    assert all(rate >= 3e-5 for rate in all_rates[warmup_steps:])
    assert math.isclose(max(all_rates), 3e-4)
