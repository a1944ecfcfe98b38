# SPDX-License-Identifier: Apache-2.0
"""The order of data: permutations, reproducible by (seed, step), the same however ranks split it."""

import collections
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.train.data import Sampler, rank_rows


def stream(sampler: Sampler, steps: int) -> np.ndarray:
    return np.concatenate([sampler.indices(step) for step in range(steps)])


@settings(max_examples=20, deadline=None)
@given(length=st.integers(1, 100), batch=st.integers(1, 64), seed=st.integers(0, 2**63 - 1))
def test_every_epoch_holds_every_sequence_once_also_where_batches_cross_epochs(
    length: int, batch: int, seed: int
) -> None:
    epochs = 3
    order = stream(Sampler(length, batch, seed), -(-epochs * length // batch))
    for epoch in range(epochs):
        assert sorted(order[epoch * length : (epoch + 1) * length].tolist()) == list(range(length))


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(length=st.integers(1, 10**12), seed=st.integers(0, 2**32), batches=st.permutations([1, 4, 6, 12]))
def test_the_order_does_not_depend_on_the_batch(length: int, seed: int, batches: list[int]) -> None:
    orders = [stream(Sampler(length, batch, seed), 24 // batch).tolist() for batch in batches]
    assert orders[1:] == orders[:-1]


@settings(max_examples=40, deadline=None)
@given(parts=st.sampled_from([1, 2, 4, 8]), step=st.integers(0, 10**9), seed=st.integers(0, 2**32))
def test_ranks_rows_put_together_are_the_global_batch_for_any_split(parts: int, step: int, seed: int) -> None:
    indices = Sampler(12345, 16, seed).indices(step)
    rows = [indices[rank_rows(16, coordinate, parts)] for coordinate in range(parts)]
    assert {len(part) for part in rows} == {16 // parts}
    assert np.concatenate(rows).tolist() == indices.tolist()


def test_a_step_can_be_asked_for_alone_and_again() -> None:
    sampler = Sampler(1000, 32, seed=5)
    order = [sampler.indices(step).tolist() for step in range(100)]
    assert Sampler(1000, 32, seed=5).indices(77).tolist() == order[77]
    assert sampler.indices(3).tolist() == order[3]


def test_seeds_and_epochs_differ() -> None:
    orders = [Sampler(1000, 1000, seed).indices(step).tolist() for seed in (0, 1, 2**40) for step in (0, 1)]
    assert len({tuple(order) for order in orders}) == 6
    assert list(range(1000)) not in orders


def test_a_billion_sequences_cost_no_more_than_the_batch() -> None:
    sampler = Sampler(10**9, 256, seed=1)
    tracemalloc.start()
    indices = sampler.indices(10**11)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    assert indices.shape == (256,)
    assert indices.dtype == np.int64
    assert len(set(indices.tolist())) == 256
    assert indices.min() >= 0
    assert indices.max() < 10**9


def test_all_orders_of_a_few_sequences_are_equally_likely() -> None:
    seed, epochs = 3, 20_000
    print(f"seed={seed}")
    for length in range(2, 7):
        order = Sampler(length, length * epochs, seed).indices(0).reshape(epochs, length)
        counts = collections.Counter(map(tuple, order.tolist()))
        orders = math.factorial(length)
        expected = epochs / orders
        chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
        chi_squared += (orders - len(counts)) * expected
        assert abs(chi_squared - (orders - 1)) < 5 * math.sqrt(2 * (orders - 1)), f"{length} sequences"


def test_neighbours_in_an_epoch_are_unrelated() -> None:
    seed, length = 11, 50_000
    print(f"seed={seed}")
    order = Sampler(length, length, seed).indices(0)
    steps = np.diff(order)
    # For a random order, the mean distance of neighbours is a third of the length.
    assert abs(np.abs(steps).mean() / length - 1 / 3) < 0.01
    assert abs(np.corrcoef(np.arange(length), order)[0, 1]) < 0.02
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02


def test_the_order_is_the_one_of_every_release_so_that_old_runs_resume() -> None:
    assert Sampler(1000, 8, seed=0).indices(0).tolist() == [586, 278, 925, 674, 337, 176, 50, 225]
    late = Sampler(10**9, 4, seed=2**63 - 1).indices(10**15)
    assert late.tolist() == [503530364, 934159568, 640000368, 326594128]


@pytest.mark.parametrize(
    ("length", "batch", "seed", "message"),
    [
        (0, 1, 0, "dataset_length=0 must be at least 1"),
        (10, 0, 0, "batch=0 must be at least 1"),
        (10, 1, -1, "seed=-1 must be at least 0"),
        (10, 1, 2**63, "seed=9223372036854775808 must be at least 0 and below"),
    ],
)
def test_a_sampler_refuses_what_it_cannot_order(length: int, batch: int, seed: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampler(length, batch, seed)


@pytest.mark.parametrize("step", [-1, 2**63])
def test_a_step_outside_the_stream_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match=f"step={step} must be at least 0"):
        Sampler(10, 4, 0).indices(step)


@pytest.mark.parametrize(
    ("batch", "parts", "message"),
    [
        (10, 4, "batch=10 is not divisible by data . z = 4: 8 and 12 are the nearest"),
        (3, 4, "batch=3 is not divisible by data . z = 4: 4 is the nearest"),
        (0, 2, "batch=0 is not divisible by data . z = 2: 2 is the nearest"),
    ],
)
def test_a_batch_that_ranks_cannot_share_is_refused_with_the_nearest(batch: int, parts: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rank_rows(batch, 0, parts)


def test_a_coordinate_outside_the_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="batch coordinate 4 is not one of 0 to 3"):
        rank_rows(8, 4, 4)
