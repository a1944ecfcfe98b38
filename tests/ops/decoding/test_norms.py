# SPDX-License-Identifier: Apache-2.0
"""Sums over ranks with residual and norm: kernels and the library beside fp64, and separate calls' bits."""

import itertools
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.differences import largest
from tests.ops.operands import PLANS, find_plan, random_of, relative_error
from torch.nn import functional

from stretto import ops
from stretto.memory import compilation
from stretto.ops.operator import find_workspace
from stretto.ops.row_sums.norm import Norm, NormOperands, add_and_normalize_by_torch, add_norm, normalize_by_torch
from stretto.tiles.call_state import CLOCK

EPS = 1e-3
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
WAYS = ["one shot", "two shots", "library"]
CASES = [(6, 64, 48, torch.bfloat16, "rms"), (5, 41, 24, torch.float32, "layer"), (1, 130, 32, torch.float16, "rms")]
"""(rows, n, a rank's k, dtype, norm)"""


def normalize(total, weight, bias, offset):
    total, weight = total.double(), weight.double() + offset
    if bias is None:
        return functional.rms_norm(total, total.shape[-1:], weight, EPS)
    return functional.layer_norm(total, total.shape[-1:], weight, bias.double(), EPS)


@torch.no_grad()
def add_up(case, ways):
    """Errors of each way: (new residual, norm), whether its bits are those of separate calls; and of the sum alone."""
    m, n, k, dtype, norm = case
    world, rank, found = dist.get_world_size(), dist.get_rank(), {}
    xs = [random_of(peer, m, k, dtype=dtype) for peer in range(world)]
    weights = [random_of(10 + peer, n, k, dtype=dtype) for peer in range(world)]
    residual, bias, norm_weight = random_of(20, m, n, dtype=dtype), random_of(21, n, dtype=dtype), random_of(22, n)
    norm_bias = random_of(23, n).half() if norm == "layer" else None
    options = {"eps": EPS, "norm": norm, "bias": bias, "norm_bias": norm_bias, "offset": 0.5}
    partial = [x @ weight.t() for x, weight in zip(xs, weights, strict=True)]
    sums = {
        "product": sum(x.double() @ weight.double().t() for x, weight in zip(xs, weights, strict=True)),
        "sum": sum(one.double() for one in partial),
    }
    for way in ways:
        plan = find_plan(way)
        results = {"product": [
            ops.matmul_all_reduce_norm(xs[rank], weights[rank], residual, norm_weight, implementation=plan, **options)
            for _ in range(2)
        ]}  # fmt: skip
        if way not in PLANS:
            results["sum"] = [
                ops.all_reduce_norm(partial[rank], residual, norm_weight, implementation=way, **options)
                for _ in range(2)
            ]
        total = ops.matmul_all_reduce(xs[rank], weights[rank], bias=bias, implementation=plan)
        operands = NormOperands(None, residual, norm_weight, norm_bias)
        composed = add_norm(total, operands, Norm(norm, EPS, 0.5))
        for name, (first, second) in results.items():
            added = sums[name] + bias.double() + residual.double()
            errors = (
                relative_error(first[1], added),
                relative_error(first[0], normalize(added, norm_weight, norm_bias, 0.5)),
            )
            is_same = all(torch.equal(*pair) for pair in zip(first, second, strict=True))
            if name == "product":
                is_same &= all(torch.equal(*pair) for pair in zip(first, composed, strict=True))
            found[way, name] = *errors, is_same, first[0].float().sum().item()
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_fused_call_has_the_bits_of_separate_ones(interpret, case):
    ranks = 4 if case[0] == 6 else 2
    results = interpret(ranks, add_up, case, WAYS)
    for (way, name), (added, normed, is_same, _) in results[0].items():
        assert added <= 3 * ROUNDING[case[3]], (way, name)
        assert normed <= 4 * ROUNDING[case[3]], (way, name)
        assert is_same, (way, name)
        assert len({each[way, name][3] for each in results}) == 1, f"ranks have different results by {way}"


@torch.no_grad()
def sum_after_loading():
    """The limits of waits, in seconds, before and after the end of a call that may wait for a peer's compiler."""
    x, weight, name = torch.ones(2, 32), torch.ones(32), dist.group.WORLD.group_name
    ops.all_reduce_norm(x, x, weight, eps=EPS, implementation="kernel")
    channel = find_workspace(name, x.device, 0, "packets").channel
    words = channel._state[CLOCK.value + 2 : CLOCK.value + 4].view(torch.int64)
    limits, launch = [], channel.launch

    def note(*arguments, **options):
        limits.append(words.item() / 1e9)
        launch(*arguments, **options)

    compilation.note_loaded_kernel()
    with mock.patch.object(channel, "launch", note):
        ops.all_reduce_norm(x, x, weight, eps=EPS, implementation="kernel")
    return limits[0] - channel.limit.seconds, words.item() / 1e9 - channel.limit.seconds


def test_the_end_of_a_call_sets_the_limit_of_waits_back(interpret):
    assert interpret(2, sum_after_loading) == [(compilation.ALLOWANCE, 0.0)] * 2


def test_without_kernels_torch_computes_it(ranks):
    results = ranks(2).run(add_up, CASES[1], ["auto", "library"])
    for added, normed, is_same, _ in results[0].values():
        assert largest(added, normed) < 1e-5
        assert is_same


@torch.no_grad()
def scale():
    """Errors of the fp8 form, and whether it has the same bits compiled."""
    world, rank = dist.get_world_size(), dist.get_rank()
    xs = [ops.quantize_rows(random_of(peer, 3, 64)) for peer in range(world)]
    weights = [ops.quantize_rows(random_of(10 + peer, 40, 64)) for peer in range(world)]
    residual, norm_weight = random_of(20, 3, 40, dtype=torch.bfloat16), random_of(22, 40)
    total = residual.double()
    for (x, of_rows), (weight, of_columns) in zip(xs, weights, strict=True):
        total = total + x.double() @ weight.double().t() * of_rows[:, None] * of_columns
    call = partial(ops.scaled_matmul_all_reduce_norm, norm_weight=norm_weight, eps=EPS)
    operands = xs[rank][0], weights[rank][0], xs[rank][1], weights[rank][1], residual
    normed, added = call(*operands)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)(*operands)
    is_same = torch.equal(compiled[0], normed) and torch.equal(compiled[1], added)
    return relative_error(added, total), relative_error(normed, normalize(total, norm_weight, None, 0)), is_same


def test_fp8_operands_have_scales(interpret):
    for *errors, is_same in interpret(2, scale):
        assert largest(errors) < 2**-6
        assert is_same


@torch.no_grad()
@torch.no_grad()
def norm_nothing(rows, columns):
    x, weight = torch.ones(rows, columns), torch.ones(columns)
    for norm, invariant in itertools.product(("rms", "layer"), (False, True)):
        options = {"eps": EPS, "norm": norm, "invariant": invariant}
        for out in (
            *ops.all_reduce_norm(x, x, weight, **options),
            *ops.matmul_all_reduce_norm(torch.ones(rows, 8), torch.ones(columns, 8), x, weight, **options),
            ops.invariant_norm(x, weight, eps=EPS, norm=norm),
        ):
            assert out.shape == (rows, columns)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_a_norm_of_no_rows_or_columns_is_empty(interpret, ranks, shape):
    interpret(2, norm_nothing, *shape)
    ranks(2).run(norm_nothing, *shape)


def norm_rows():
    """Whether exact norms have torch's bits, in a kernel, for rows of any size of numbers."""
    same = []
    for columns, dtype in ((7, torch.float32), (300, torch.bfloat16)):
        x = (random_of(1, 12, columns) * 2.0 ** random_of(2, 12, 1).mul(12).round()).to(dtype)
        x[3], x[4, 1], x[5, 2] = 0, torch.inf, torch.nan
        weight, bias = random_of(3, columns), random_of(4, columns, dtype=torch.bfloat16)
        for kind, given in (("rms", None), ("layer", bias)):
            found = ops.invariant_norm(x, weight, eps=EPS, norm=kind, bias=given)
            right = normalize_by_torch(x, weight, given, Norm(kind, EPS, is_exact=True))
            same.append(torch.equal(found.nan_to_num(7), right.nan_to_num(7)))
    return same


def test_an_exact_norm_has_the_same_bits_in_a_kernel_and_by_torch(interpret):
    assert interpret(1, norm_rows) == [[True] * 4]


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_an_exact_norm_is_the_norm_in_any_order_of_columns(kind):
    x, weight = random_of(1, 9, 1000) + 1, torch.ones(1000)
    bias = None if kind == "rms" else torch.zeros(1000)
    found = ops.invariant_norm(x, weight, eps=EPS, norm=kind)
    torch.testing.assert_close(found.double(), normalize(x, weight, bias, 0), rtol=1e-5, atol=1e-6)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(1))
    assert torch.equal(ops.invariant_norm(x[:, order].contiguous(), weight, eps=EPS, norm=kind), found[:, order])


def test_an_exact_norm_has_gradients_and_they_have_some():
    x, weight = random_of(1, 3, 16).requires_grad_(), random_of(2, 16).requires_grad_()

    def differentiate(norm):
        # Twice, so that the second one's x is computed of its weight.
        first = torch.autograd.grad(norm(norm(x).sin()).pow(3).sum(), (x, weight), create_graph=True)
        return *first, *torch.autograd.grad(first[0].square().sum() + first[1].sum(), (x, weight))

    found = differentiate(partial(ops.invariant_norm, weight=weight, eps=EPS))
    right = differentiate(lambda x: functional.rms_norm(x, (16,), weight, EPS))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


def test_residual_and_sum_are_rounded_as_separate_operators_round_them():
    total, residual = torch.tensor([[1.0039]]), torch.tensor([[256.0]]).bfloat16()
    operands = NormOperands(None, residual, torch.ones(1), None)
    _, added = add_and_normalize_by_torch(total, operands, Norm("rms", EPS))
    assert torch.equal(added, residual + total.bfloat16())


def refuse():
    x, weight, residual, norm_weight = torch.ones(3, 8), torch.ones(5, 8), torch.ones(3, 5), torch.ones(5)
    messages = []
    for arguments, options in (
        ((x, weight, residual[:2], norm_weight), {}),
        ((x, weight, residual.half(), norm_weight), {}),
        ((x, weight, residual, norm_weight[:4]), {}),
        ((x, weight, residual, norm_weight), {"norm": "batch"}),
        ((x, weight, residual, norm_weight), {"eps": -1}),
        ((x, weight, residual, norm_weight), {"bias": torch.ones(5).half()}),
        ((x.clone().requires_grad_(), weight, residual, norm_weight), {}),
    ):
        with pytest.raises(ValueError) as refused:
            ops.matmul_all_reduce_norm(*arguments, **{"eps": EPS, **options})
        messages.append(str(refused.value))
    rank = dist.get_rank()
    with pytest.raises(ValueError) as refused:  # ranks compare their calls
        ops.all_reduce_norm(torch.ones(3 + rank, 5), torch.ones(3 + rank, 5), norm_weight, eps=EPS)
    return [*messages, str(refused.value)]


def test_bad_calls_are_refused_before_ranks_wait_for_each_other(ranks):
    for messages in ranks(2).run(refuse):
        for message, words in zip(
            messages,
            (
                "residual must be [3, 5] of torch.float32 on cpu, contiguous, not [2, 5]",
                "residual must be [3, 5] of torch.float32 on cpu, contiguous, not [3, 5] of torch.float16",
                "norm_weight must be [5] of torch.bfloat16 or torch.float16 or torch.float32 on cpu, contiguous",
                "norm is 'batch', but must be one of rms, layer",
                "eps must be a number from 0 to 1",
                "bias must be [5] of torch.float32 on cpu, contiguous, not [5] of torch.float16",
                "matmul_all_reduce_norm has no gradients",
                "ranks of a group make the same calls",
            ),
            strict=True,
        ):
            assert words in message
