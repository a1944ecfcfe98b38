# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of few tokens: beside those of any number, and the kernels in Triton's interpreter."""

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import triton.language as tl
from tests.ops.moe.oracle import make_layer
from tests.ops.moe.test_exchange import Case, part
from tests.ops.test_failures import shorten_limits
from tests.tiles.machine_code import compile_to_ptx, find, find_spills, make_channel

from stretto import ops
from stretto.memory import PeerError
from stretto.ops import moe, quantize_rows
from stretto.ops.moe import few_kernels, few_tokens

SEED, HIDDEN, MAX = 610, 48, 6
FP8 = torch.float8_e4m3fn


def make_operands(case, dtype):
    """This rank's x, ids and weights."""
    layer = make_layer(SEED, sum(case.tokens), case.k, case.experts, chosen=case.chosen, hidden=HIDDEN)
    operands = layer.x.to(dtype), layer.ids, layer.weights.float()
    return [part(one, case.tokens, dist.get_rank()) for one in operands]


def multiply(rows, offsets):
    """Each row times the number of its expert among all ranks', plus 1."""
    local, numbers = len(offsets) - 1, torch.arange(len(rows), dtype=torch.int32)
    experts = torch.searchsorted(offsets[1:], numbers, right=True)
    return rows * (experts + dist.get_rank() * local + 1)[:, None].to(rows.dtype)


def run_few(case, dtype, payload, implementation, calls=1):
    """(rows without padding, offsets, combined) of the last of some calls."""
    x, ids, weights = make_operands(case, dtype)
    options = {"max_tokens": MAX, "payload": payload, "implementation": implementation}
    for turn in range(calls):
        sent = moe.dispatch_few(x * (calls - turn), ids, weights, case.experts, dist.group.WORLD, **options)
        out = moe.combine_few(multiply(sent.rows, sent.offsets), sent.handle)
    assert len(sent.rows) == case.ranks * MAX * case.k
    return sent.rows[: sent.offsets[-1]].clone(), sent.offsets, out


def compare(one, other):
    return [torch.equal(*pair) for pair in zip(one, other, strict=True)]


def compare_with_dispatch(case, dtype, payload):
    x, ids, weights = make_operands(case, dtype)
    if payload is not None:
        quantized, scales = quantize_rows(x)
        x = (quantized.float() * scales[:, None]).to(dtype)
    sent = moe.dispatch(x, ids, case.experts, dist.group.WORLD)
    out = moe.combine(multiply(sent.rows, sent.offsets), sent.handle, weights, dist.group.WORLD)
    return compare(run_few(case, dtype, payload, "auto"), (sent.rows, sent.offsets, out))


@pytest.mark.parametrize(
    ("case", "dtype", "payload"),
    [
        (Case((2, 6, 0), 3, 6), torch.bfloat16, None),
        (Case((5, 1), 2, 4), torch.float64, FP8),
        (Case((1, 4), 1, 4, range(2, 4)), torch.float32, None),  # none on rank 0
    ],
    ids=str,
)
def test_few_tokens_have_the_rows_and_sums_of_dispatch_and_combine(ranks, case, dtype, payload):
    for same in ranks(case.ranks).run(compare_with_dispatch, case, dtype, payload):
        assert all(same), same


def compare_with_library(case, dtype, payload, calls):
    ours = run_few(case, dtype, payload, "kernel", calls)
    return compare(ours, run_few(case, dtype, payload, "library"))


@pytest.mark.parametrize(
    ("case", "dtype", "payload", "calls"),
    [
        pytest.param(Case((2, 6, 0), 2, 6), torch.bfloat16, None, 2, marks=pytest.mark.exhaustive),
        (Case((5, 3), 3, 4), torch.float32, FP8, 2),
        pytest.param(Case((1, 4), 1, 4, range(2, 4)), torch.float32, None, 1, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_kernels_give_the_librarys_bits(interpret, case, dtype, payload, calls):
    for same in interpret(case.ranks, compare_with_library, case, dtype, payload, calls):
        assert all(same), same


def combine_ahead():
    """Whether rank 0 gets each call's sums, if rank 1, which waits for no rows, could be two calls ahead."""
    rank, group = dist.get_rank(), dist.group.WORLD
    x, ids = torch.ones(3 - 3 * rank, 16), torch.ones(3 - 3 * rank, 1, dtype=torch.int64)
    sent = moe.dispatch_few(x, ids, ids.float(), 2, group, max_tokens=3, implementation="kernel")
    if rank == 0:
        time.sleep(1)
    found = [moe.combine_few(sent.rows * number, sent.handle) for number in range(1, 4)]
    return rank == 1 or [bool((out == number).all()) for number, out in enumerate(found, 1)]


@pytest.mark.long
def test_no_rank_combines_two_calls_ahead(interpret):
    assert interpret(2, combine_ahead)[0] == [True] * 3


def run_alone(payload):
    x, ids, weights = torch.randn(3, 16), torch.tensor([[1, 0], [0, 2], [2, 1]]), torch.rand(3, 2)
    sent = moe.dispatch_few(x, ids, weights, 3, payload=payload)
    out = moe.combine_few(sent.rows, sent.handle)
    return sent.offsets.tolist(), (out - x * weights.sum(1, keepdim=True)).abs().max()


def test_one_rank_needs_no_group():
    for payload, limit in ((None, 1e-6), (FP8, 0.5)):
        offsets, error = run_alone(payload)
        assert offsets == [0, 2, 4, 6]
        assert error < limit
        assert payload is None or error > 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_tokens": 2}, "this rank has 3 tokens, more than max_tokens=2: give max_tokens=3 on all ranks"),
        ({"max_tokens": 129}, "max_tokens must be 1 to 128, not 129; dispatch takes more"),
        ({"max_tokens": 2.5}, "max_tokens must be 1 to 128, not 2.5"),
        (
            {"x": torch.ones(129, 16), "topk_ids": torch.zeros(129, 2, dtype=int), "topk_weights": torch.ones(129, 2)},
            "this rank has 129 tokens, more than max_tokens=128: take dispatch, which has no limit",
        ),
        ({"implementation": "kernel"}, "no kernel can run: one rank has all 4 experts, so that nothing is sent"),
        ({"payload": torch.float16}, "payload must be None, for x's dtype, or torch.float8_e4m3fn, not torch.float16"),
        ({"x": torch.ones(3, 16, requires_grad=True)}, "dispatch_few has no gradients: call it under torch.no_grad()"),
        ({"topk_weights": torch.ones(3, 1)}, r"topk_weights \[3, 2\], not \[3, 16\] and \[3, 1\]"),
        ({"topk_ids": torch.full((3, 2), 4)}, "experts are numbered 0 to 3"),
    ],
    ids=str,
)
def test_calls_that_cannot_be_right_are_refused(changed, message):
    arguments = {
        "x": torch.ones(3, 16), "topk_ids": torch.tensor([[0, 1]] * 3), "topk_weights": torch.ones(3, 2),
        "num_experts": 4,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        moe.dispatch_few(**arguments | changed)


def test_combine_takes_the_rows_of_its_dispatch():
    sent = moe.dispatch_few(torch.ones(3, 16), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), 2)
    with pytest.raises(ValueError, match=r"returned rows \[3, 16\] of torch.float32 with this handle, not \[3, 8\]"):
        moe.combine_few(sent.rows[:, :8], sent.handle)
    with pytest.raises(ValueError, match="combine_few has no gradients"):
        moe.combine_few(sent.rows.requires_grad_(), sent.handle)


def send_nothing():
    """The shape of sums of tokens without columns, and the error where ranks have ids of different dtypes."""
    x, ids, weights = torch.ones(2, 0), torch.tensor([[0, 1]] * 2), torch.ones(2, 2)
    group = dist.new_group()  # whose first calls are compared
    with pytest.raises(ValueError, match="ranks of a group make the same calls") as error:
        moe.dispatch_few(x, ids.to([torch.int64, torch.int32][dist.get_rank()]), weights, 2, group)
    sent = moe.dispatch_few(x, ids.int(), weights, 2, group)
    return list(moe.combine_few(sent.rows, sent.handle).shape), str(error.value)


def test_tokens_may_have_no_columns_and_ids_have_one_dtype_on_all_ranks(ranks):
    for shape, message in ranks(2).run(send_nothing):
        assert shape == [2, 0]
        assert "torch.int64" in message
        assert "torch.int32" in message


def refuse(columns):
    x, ids, weights = torch.ones(2, columns), torch.tensor([[0, 1]] * 2), torch.ones(2, 2)
    with pytest.raises(ValueError, match="no kernel can run") as error:
        moe.dispatch_few(x, ids, weights, 4, dist.group.WORLD, implementation="kernel")
    return str(error.value)


def test_where_no_kernel_can_run_it_says_so(ranks, interpret):
    for message in ranks(2).run(refuse, 16):
        assert "on CPUs kernels are interpreted" in message
    for message in interpret(2, refuse, 18):
        assert "it takes rows of a multiple of 16 bytes, such as 16 columns, not 18" in message


def miss_a_call():
    """Rank 1 misses a combine: rank 0's errors of it, and of the next dispatch."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    x, ids, weights = torch.ones(2, 16), torch.tensor([[0, 1]] * 2), torch.ones(2, 2)
    sent = moe.dispatch_few(x, ids, weights, 2, group, max_tokens=2, implementation="kernel")
    shorten_limits(group, 3.0)
    messages = []
    if dist.get_rank() == 0:
        with pytest.raises(PeerError) as error:
            moe.combine_few(sent.rows, sent.handle)
        messages.append(str(error.value))
        with pytest.raises(PeerError) as error:
            moe.dispatch_few(x, ids, weights, 2, group, max_tokens=2, implementation="kernel")
        messages.append(str(error.value))
    dist.barrier()
    with pytest.raises(PeerError) if messages else pytest.MonkeyPatch.context():
        dist.destroy_process_group(group)
        if messages:
            ops.check()
    return messages


@pytest.mark.long
def test_a_missed_call_is_an_error_that_names_the_rank(interpret):
    messages, nothing = interpret(2, miss_a_call)
    assert nothing == []
    for message in messages:
        assert "moe.combine_few" in message
        assert "waited in vain for rank 1" in message


def launch_few(kernel, is_fp8=False, is_dependent=False):
    """(the kernel, arguments and options) of a call of 128 tokens on 4 ranks."""
    world, sizes, columns, rows, block, warps = 4, (128, 8, 32, 4096), 2048, 8, 512, 8
    channel = make_channel("p2p")._replace(begun_in_kernel=tl.constexpr(True))
    halves, ints, longs = (torch.zeros(64, dtype=dtype) for dtype in (torch.bfloat16, torch.int32, torch.int64))
    choices = few_kernels.SentChoices(ints, ints.float(), ints, ints)
    received = few_kernels.ReceivedRows(halves, ints, 4096)
    operands = {
        few_kernels.dispatch_tokens: (received, halves, longs, ints.float(), 100, is_fp8),
        few_kernels.combine_sums: (halves, halves, 100),
    }[kernel]
    words = columns // 4 if is_fp8 and len(operands) > 3 else columns // 2
    layout = few_tokens._describe(world, sizes, words, rows, block, 32 * warps, is_dependent)
    arguments = channel, layout, choices, longs, ints, *operands
    return (
        kernel,
        arguments,
        {"num_warps": warps, "enable_fp_fusion": False} | ({"launch_pdl": True} if is_dependent else {}),
    )


@pytest.mark.long
@pytest.mark.parametrize("is_fp8", [False, True])
def test_packets_are_stored_and_polled_in_fours_by_one_thread_each(is_fp8, tmp_path):
    for kernel, sources in ((few_kernels.dispatch_tokens, 1), (few_kernels.combine_sums, 4)):
        _, arguments, options = launch_few(kernel, is_fp8, is_dependent=True)
        lines = compile_to_ptx(kernel, arguments, **options)
        [waits] = (number for number, line in enumerate(lines) if "griddepcontrol.wait" in line)
        assert waits < find(lines, r"\b(ld|st|atom|red)\S*\.global")  # nothing is read that the kernel before may write
        polls = [line for line in lines if re.search(r"ld\.volatile\.global\.v4\.b32", line)]
        each = 8 * 512 // (32 * options["num_warps"]) // 4
        assert len(polls) == 2 * each * sources  # before the loop, and in it
        assert any(re.search(r"st\.global\.(.*\.)?v2\.b64", line) for line in lines)
        assert find_spills(lines, tmp_path) < 512
