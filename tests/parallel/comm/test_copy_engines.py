# SPDX-License-Identifier: Apache-2.0
"""Weights that are pushed over z are the weights that a process group gathers."""

import importlib
import importlib.util
import random
import re
from typing import Any

import pytest
import torch

WEIGHTS = 9  # of the programs' model: two blocks of four linears, and the head

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is for Linux alone", allow_module_level=True)


def call(name: str, *arguments: Any) -> Any:
    """Run one of the programs in a rank's process: here, where kernels are not interpreted, it is not imported."""
    return getattr(importlib.import_module("tests.parallel.comm.copy_engine_programs"), name)(*arguments)


@pytest.fixture
def interpret(interpreted_pool):
    return lambda ranks, name, *arguments: interpreted_pool.run(ranks, call, name, *arguments, timeout=120.0)


@pytest.mark.parametrize(
    ("x", "z", "dtype", "straggles", "tolerance"),
    # Over two ranks both ways add the same two numbers; in bf16 the group rounds their sum, and pushes do not.
    [(1, 2, None, True, 0), (2, 2, torch.bfloat16, False, 1e-2), (1, 3, None, True, 1e-6)],
)
def test_training_is_the_same_and_only_embedding_and_head_go_through_the_group(
    interpret, x, z, dtype, straggles, tolerance
):
    pushed = interpret(x * z, "train", x, z, True, dtype, straggles)
    plain = interpret(x * z, "train", x, z, False, dtype, False)
    for ours, other in zip(pushed, plain, strict=True):
        for mine, theirs in zip(ours["shards"], other["shards"], strict=True):
            assert torch.equal(mine, theirs) or (mine - theirs).norm() < tolerance * theirs.norm()
        assert (ours["pushed"], other["pushed"]) == (WEIGHTS, 0)
        assert (ours["gathers"], other["gathers"]) == (3, 3 * (WEIGHTS + 1))
        assert (ours["scatters"], other["scatters"]) == (3 * 2, 3 * (WEIGHTS + 1))


def test_two_passes_may_be_alive_at_once(interpret):
    for ours, other in zip(*(interpret(2, "hold_two_graphs", way) for way in (True, False)), strict=True):
        assert all(map(torch.equal, ours, other))


def test_weights_that_were_written_over_before_the_backward_pass_are_named(interpret):
    for message in interpret(2, "change_before_backward"):
        assert "was changed" in message
        assert "blocks.1.mlp.down" in message


def test_what_was_gathered_outside_of_a_pass_is_never_written_over(interpret):
    assert interpret(2, "keep_a_graph_of_a_part") == [[True], [True]]


def test_what_is_called_outside_of_a_pass_sees_the_weights_as_they_are(interpret):
    for ours, other in zip(*(interpret(2, "call_a_part", way) for way in (True, False)), strict=True):
        assert all(map(torch.equal, ours, other))


@pytest.mark.parametrize("how", ["stretto", "reentrant", "not reentrant"])
def test_activation_checkpointing_ends_it_and_frees_its_memory(interpret, how):
    for ours, other in zip(*(interpret(2, "checkpoint_later", way, how) for way in (True, False)), strict=True):
        assert all(map(torch.equal, ours["shards"], other["shards"]))
        assert ours["pushed"] == 0


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gradients_are_sums_in_rank_order_whatever_is_on_its_way(interpret, ranks):
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    assert interpret(ranks, "scatter_many", seed) == [[]] * ranks


def test_a_backward_pass_that_failed_leaves_nothing_on_its_way(interpret):
    pushed, plain = (interpret(2, "give_up_a_pass", way) for way in (True, False))
    for (ours, by_group), (other, _) in zip(pushed, plain, strict=True):
        assert all(map(torch.equal, ours, other))
        assert by_group == 2  # embedding and head; the rest is pushed again


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernels_compile_and_load_and_store_16_bytes_at_a_time(target, dtype):
    from stretto.parallel.comm import copy_engine_scatter
    from stretto.tiles.compile_only import compile_kernel
    from tests.tiles.machine_code import compile_to_ptx, make_channel

    channel, word = make_channel("p2p"), torch.zeros(1, dtype=torch.int32)
    compile_kernel(copy_engine_scatter.begin_scatter, (channel, word, word, 3), {"num_warps": 1}, target)
    parts, out = torch.zeros(256, dtype=dtype), torch.zeros(256, dtype=torch.float32)
    arguments = (channel, word, word, parts, parts, out, 4096, 8192, 2048)
    lines = compile_to_ptx(copy_engine_scatter.sum_parts, arguments, target, num_warps=8)
    loads = [line for line in lines if re.search(r"ld\.global.*\.v\d\.b32", line)]
    assert loads
    assert all(".v4.b32" in line for line in loads)
    assert any(re.search(r"st\.global.*\.v4\.b32", line) for line in lines)


def test_a_slot_is_released_when_all_programs_have_summed():
    from stretto.parallel.comm import copy_engine_scatter
    from tests.tiles.machine_code import RELEASE, compile_to_ptx, find, make_channel

    channel, word, numbers = make_channel("p2p"), torch.zeros(1, dtype=torch.int32), torch.zeros(256)
    arguments = (channel, word, word, numbers, numbers, numbers, 4096, 8192, 2048)
    lines = compile_to_ptx(copy_engine_scatter.sum_parts, arguments, num_warps=8)
    # A program counts itself after the loads and stores of all its threads; the last one has seen all counts.
    counted = find(lines, r"atom\.global\.(gpu\.acq_rel|acq_rel\.gpu)\.add")
    before = [line for line in lines[:counted] if re.search(r"(ld|st)\.global|bar\.sync", line)]
    assert before[-1].startswith("bar.sync"), before[-3:]
    assert len([line for line in lines[counted:] if re.search(RELEASE, line)]) == 3  # one for each other rank


def test_passes_without_gradients_alone_keep_no_weights(interpret):
    assert interpret(2, "look_only") == [0, 0]


def test_a_weight_is_taken_when_all_of_it_has_come(interpret):
    assert interpret(3, "take_at_once") == [[True] * WEIGHTS] * 3


def test_every_stream_that_takes_a_weight_waits_for_it_once_a_pass(interpret):
    assert interpret(2, "take_on_streams") == [[1, 2, 2, 2, 3, 4]] * 2
