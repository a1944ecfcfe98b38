"""Embedding look-ups between real processes, whose kernels are interpreted, against fp64."""

import random

import pytest
import torch

MODULE = "embedding_programs"
SEED = 234939


@pytest.mark.parametrize(("ranks", "calls"), [(1, 10), (2, 30), (3, 20), (4, 15)])
def test_random_jagged_batches_are_pooled_where_they_belong(interpret, ranks, calls):
    print("seed", SEED)
    assert interpret(ranks, "look_up_random_batches", SEED, calls, module=MODULE) == [[]] * ranks


@pytest.mark.parametrize(("ranks", "calls"), [(2, 6), (3, 4)])
def test_gradients_dense_and_sparse_are_the_unfused_ones(interpret, ranks, calls):
    print("seed", SEED)
    assert interpret(ranks, "differentiate", SEED, calls, module=MODULE) == [[]] * ranks


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_the_fused_update_is_the_unfused_one(interpret, optimizer):
    print("seed", SEED)
    for is_equal, difference in interpret(3, "train_in_two_ways", SEED, optimizer, 3, torch.float32, module=MODULE):
        assert is_equal or difference < 1e-6
