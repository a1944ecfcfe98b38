"""Weights that are pushed over z are the weights that a process group gathers."""

import importlib
import importlib.util
from typing import Any

import pytest
import torch

WEIGHTS = 9  # of the programs' model: two blocks of four linears, and the head

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is for Linux alone", allow_module_level=True)


def call(name: str, *arguments: Any) -> Any:
    """Run one of the programs in a rank's process: here, where kernels are not interpreted, it is not imported."""
    return getattr(importlib.import_module("tests.parallel.pushed_programs"), name)(*arguments)


@pytest.fixture
def interpret(interpreted_pool):
    return lambda ranks, name, *arguments: interpreted_pool.run(ranks, call, name, *arguments, timeout=120.0)


@pytest.mark.parametrize(
    ("x", "z", "dtype", "straggles"),
    [(1, 2, None, False), (2, 2, torch.bfloat16, False), (1, 3, None, True)],
)
def test_training_keeps_its_bits_and_only_the_embedding_goes_through_the_group(interpret, x, z, dtype, straggles):
    pushed = interpret(x * z, "train", x, z, True, dtype, straggles)
    plain = interpret(x * z, "train", x, z, False, dtype, False)
    for ours, other in zip(pushed, plain, strict=True):
        assert all(map(torch.equal, ours["shards"], other["shards"]))
        assert (ours["pushed"], other["pushed"]) == (WEIGHTS, 0)
        assert ours["gathers"] == 3
        assert other["gathers"] == 3 * (WEIGHTS + 1)


def test_two_passes_may_be_alive_at_once(interpret):
    for ours, other in zip(*(interpret(2, "hold_two_graphs", way) for way in (True, False)), strict=True):
        assert all(map(torch.equal, ours, other))


def test_weights_that_were_written_over_before_the_backward_pass_are_named(interpret):
    for message in interpret(2, "change_before_backward"):
        assert "was changed" in message
        assert "blocks.1.mlp.down" in message


def test_what_is_called_outside_of_a_pass_sees_the_weights_as_they_are(interpret):
    for ours, other in zip(*(interpret(2, "call_a_part", way) for way in (True, False)), strict=True):
        assert all(map(torch.equal, ours, other))


@pytest.mark.parametrize("how", ["stretto", "reentrant", "not reentrant"])
def test_activation_checkpointing_ends_it_and_frees_its_memory(interpret, how):
    for ours, other in zip(*(interpret(2, "checkpoint_later", way, how) for way in (True, False)), strict=True):
        assert all(map(torch.equal, ours["shards"], other["shards"]))
        assert ours["pushed"] == 0


def test_passes_without_gradients_alone_keep_no_weights(interpret):
    assert interpret(2, "look_only") == [0, 0]


def test_a_weight_is_taken_when_all_of_it_has_come(interpret):
    assert interpret(3, "take_at_once") == [[True] * WEIGHTS] * 3
