# SPDX-License-Identifier: Apache-2.0
"""The operators between real processes, whose kernels are interpreted, against fp64."""

import pytest
import torch
import torch.distributed as dist
from tests.differences import largest
from tests.ops.operands import find_plan, lie, random_of, random_operands, relative_error

from stretto import ops
from stretto.ops import gemm
from stretto.ops.config import Machine

CASES = [
    (2, (64, 64, 64), torch.bfloat16, False, True),
    (4, (37, 41, 33), torch.float32, False, False),
    (4, (32, 72, 40), torch.bfloat16, False, False),
    (3, (5, 72, 40), torch.bfloat16, True, True),
    (2, (50, 24, 16), torch.float16, True, False),
]
"""(ranks, (rows of a rank, n, k), dtype, whether the weight is a transpose, whether there is a bias): whole tiles; odd
sizes, which TMA refuses; few rows, so that tiles have several ranks'."""

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def ran_kernels(operator, calls=3):
    return {(operator, "kernel"): calls}


def gather_and_multiply(shape, dtype, by_columns, has_bias, plan):
    """(error of products, whether the gathered x and equal calls are right to the last bit, what ran)."""
    rank, world, (rows, n, k) = dist.get_rank(), dist.get_world_size(), shape
    shards = [random_of(peer, rows, k, dtype=dtype) for peer in range(world)]
    weight = lie(random_of(10 + rank, n, k, dtype=dtype), by_columns)
    bias = random_of(20 + rank, n, dtype=dtype) if has_bias else None
    how, ran = find_plan(plan), dict(ops.counts())
    out, gathered = ops.all_gather_matmul_gathered(shards[rank], weight, bias=bias, implementation=how)
    again = [ops.all_gather_matmul(shards[rank], weight, bias=bias, implementation=how) for _ in range(2)]
    ran = {what: count - ran.get(what, 0) for what, count in ops.counts().items() if count != ran.get(what, 0)}
    expected = torch.cat(shards).double() @ weight.double().T
    if has_bias:
        expected += bias.double()
    error = largest(relative_error(one, expected) for one in (out, again[0]))
    return error, torch.equal(gathered, torch.cat(shards)), torch.equal(*again), ran


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "plan", ["copies", "copies, unshifted", "pushes", "odd tiles", "odd tiles, pushes", "odd tiles, copies"]
)
@pytest.mark.parametrize("case", CASES)
def test_gathered_rows_are_multiplied_as_they_come(interpret, case, plan):
    ranks, shape, dtype, *rest = case
    for error, is_gathered, is_same, ran in interpret(ranks, gather_and_multiply, shape, dtype, *rest, plan):
        assert error <= ROUNDING[dtype]
        assert is_gathered
        assert is_same
        assert ran == ran_kernels("all_gather_matmul")


def multiply_and_scatter(shape, dtype, by_columns, has_bias, plan):
    """(error, whether other calls have the same bits, what ran)."""
    rank, world, (rows, n, k) = dist.get_rank(), dist.get_world_size(), shape
    inputs, weights, bias = random_operands(rows * world, n, k, dtype, has_bias)
    weight, how, ran = lie(weights[rank], by_columns), find_plan(plan), dict(ops.counts())
    out, *again = (ops.matmul_reduce_scatter(inputs[rank], weight, bias=bias, implementation=how) for _ in range(3))
    ran = {what: count - ran.get(what, 0) for what, count in ops.counts().items() if count != ran.get(what, 0)}
    expected = sum(x.double() @ weight.double().T for x, weight in zip(inputs, weights, strict=True))
    expected = expected[rank * rows : (rank + 1) * rows]
    if has_bias:
        expected = expected + bias.double()
    return relative_error(out, expected), all(torch.equal(out, one) for one in again), ran


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "plan",
    [
        "copies",
        "copies, unshifted",
        "split",
        "packets",
        "shared steps",
        "odd tiles",
        "odd tiles, copies",
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_partial_sums_are_added_by_the_owner_of_their_rows(interpret, case, plan):
    ranks, shape, dtype, *rest = case
    for error, is_same, ran in interpret(ranks, multiply_and_scatter, shape, dtype, *rest, plan):
        assert error <= 2 * ROUNDING[dtype]  # rounded before they travel, and after
        assert is_same
        assert ran == ran_kernels("matmul_reduce_scatter")


def share(what, shape, plan):
    """(how many shares there are, less tiles, at most; what `what` returns)."""
    more, deal = [0], gemm.split_last_wave.__wrapped__

    def see(count, *arguments):
        dealt = deal(count, *arguments)
        more.append(dealt[1] - count)
        return dealt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm, "_FIX_UP_STEPS", 1)  # so that it is worth it for few steps
        patch.setattr(gemm, "split_last_wave", see)
        result = what(shape, torch.bfloat16, False, True, plan)
    return largest(more), *result


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("what", "plan"),
    [(gather_and_multiply, "copies"), (gather_and_multiply, "pushes"), (multiply_and_scatter, "copies")],
)
@pytest.mark.parametrize(
    ("ranks", "shape"), [(2, (32, 64, 264)), (4, (30, 20, 296)), (2, (19, 33, 267)), (2, (30, 32, 479))]
)
def test_tiles_of_the_last_wave_are_shared_by_steps_over_k(interpret, ranks, shape, what, plan):
    """By three programs: the fourth of four tiles, with odd sizes as well; or two tiles, each in three parts."""
    shared = interpret(ranks, share, what, shape, plan)
    assert all(more > 0 for more, *_ in shared)
    for _, error, *is_right, _ in shared:
        assert error <= 2 * ROUNDING[torch.bfloat16]
        assert all(is_right)


@pytest.mark.long
def test_a_last_wave_with_tiles_of_own_rows_is_not_shared(interpret):
    """Seven programs for four tiles, of which two are of own rows, which come first and whole."""
    for more, error, *is_right, _ in interpret(2, share, gather_and_multiply, (32, 64, 264), "copies, many programs"):
        assert more == 0
        assert error <= 2 * ROUNDING[torch.bfloat16]
        assert all(is_right)


def multiply_and_reduce(shape, dtype, by_columns, has_bias, plan):
    """(error, all bits for comparison between ranks, whether other calls have the same, what ran)."""
    rank, (m, n, k) = dist.get_rank(), shape
    inputs, weights, _ = random_operands(m, n, k, dtype, has_bias)
    bias = random_of(20, n, dtype=dtype) if has_bias else None
    weight, how, ran = lie(weights[rank], by_columns), find_plan(plan), dict(ops.counts())
    out, *again = (ops.matmul_all_reduce(inputs[rank], weight, bias=bias, implementation=how) for _ in range(3))
    ran = {what: count - ran.get(what, 0) for what, count in ops.counts().items() if count != ran.get(what, 0)}
    expected = sum(x.double() @ weight.double().T for x, weight in zip(inputs, weights, strict=True))
    if has_bias:
        expected = expected + bias.double()
    return (
        relative_error(out, expected),
        out.float().flatten().tolist(),
        all(torch.equal(out, one) for one in again),
        ran,
    )


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "plan",
    [
        "one shot",
        "two shots",
        "shared steps",
        "odd tiles",
        "odd tiles, two shots",
        "copies",
        "split",
        "odd tiles, copies",
        "auto",
    ],
)
@pytest.mark.parametrize(
    "case",
    [
        (4, (1, 72, 64), torch.bfloat16, False, True),
        (3, (3, 41, 33), torch.float32, True, True),
        (2, (16, 65, 40), torch.float16, False, False),
        (2, (36, 50, 24), torch.bfloat16, True, True),
        (3, (100, 40, 33), torch.float16, False, True),
    ],
)
def test_sums_are_equal_on_all_ranks(interpret, case, plan):
    ranks, shape, dtype, *rest = case
    results = interpret(ranks, multiply_and_reduce, shape, dtype, *rest, plan)
    for error, bits, is_same, ran in results:
        assert error <= 2 * ROUNDING[dtype]
        assert bits == results[0][1]
        assert is_same
        assert ran == ran_kernels("matmul_all_reduce")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_library_does_the_same_and_is_counted(interpret, dtype):
    accuracy = ROUNDING.get(dtype, 1e-15)
    for error, is_gathered, _, ran in interpret(3, gather_and_multiply, (5, 24, 16), dtype, False, True, "library"):
        assert error <= accuracy
        assert is_gathered
        assert ran == {("all_gather_matmul", "library"): 3}
    for error, _, ran in interpret(3, multiply_and_scatter, (5, 24, 16), dtype, True, True, "library"):
        assert error <= 3 * accuracy
        assert ran == {("matmul_reduce_scatter", "library"): 3}
    for error, _, _, ran in interpret(3, multiply_and_reduce, (5, 24, 16), dtype, True, True, "library"):
        assert error <= 4 * accuracy
        assert ran == {("matmul_all_reduce", "library"): 3}


def cancel(reduce_dtype, plan):
    """257 - 256 by two ranks in bf16, of which 257 is no number; (the sum, and of what kind it is)."""
    weight = torch.tensor([[256.0, 1.0], [-256.0, 0.0]][dist.get_rank()]).repeat(3, 1).bfloat16()
    x, how = torch.ones(4, 2).bfloat16(), find_plan(plan)
    out = ops.matmul_reduce_scatter(x, weight, reduce_dtype=reduce_dtype, implementation=how)
    return out.unique().tolist(), out.dtype


@pytest.mark.parametrize("plan", ["auto", "copies", "split"])
@pytest.mark.parametrize(("reduce_dtype", "total"), [(None, 0.0), (torch.bfloat16, 0.0), (torch.float32, 1.0)])
def test_partial_sums_in_fp32_lose_nothing_on_the_wire(interpret, reduce_dtype, total, plan):
    assert interpret(2, cancel, reduce_dtype, plan) == [([total], torch.bfloat16)] * 2


def add_in_order(operator, plan):
    """Of 4 ranks: fp32 sums of 2^24, 1, -2^24 and 1, which depend on their order."""
    weight = torch.tensor([2.0**24, 1.0, -(2.0**24), 1.0])[dist.get_rank()].repeat(3, 1)
    return getattr(ops, operator)(torch.ones(8, 1), weight, implementation=find_plan(plan)).unique().tolist()


@pytest.mark.parametrize(
    ("operator", "plan"),
    [
        ("matmul_reduce_scatter", "copies"),
        ("matmul_reduce_scatter", "copies, unshifted"),
        ("matmul_reduce_scatter", "packets"),
        ("matmul_all_reduce", "one shot"),
        ("matmul_all_reduce", "two shots"),
        ("matmul_all_reduce", "odd tiles"),
    ],
)
@pytest.mark.sampled(4)
def test_partial_sums_are_added_in_rank_order(interpret, operator, plan):
    assert interpret(4, add_in_order, operator, plan) == [[1.0]] * 4


def call_with_nothing():
    """Sizes of 0 need no kernel."""
    assert ops.all_gather_matmul(torch.zeros(0, 8), torch.zeros(4, 8)).shape == (0, 4)
    assert ops.matmul_reduce_scatter(torch.zeros(0, 8), torch.zeros(4, 8)).shape == (0, 4)
    bias = torch.arange(4.0)
    assert torch.equal(ops.all_gather_matmul(torch.zeros(3, 0), torch.zeros(4, 0), bias=bias), bias.repeat(6, 1))
    assert torch.equal(ops.matmul_reduce_scatter(torch.zeros(6, 0), torch.zeros(4, 0), bias=bias), bias.repeat(3, 1))
    assert ops.all_gather_matmul(torch.zeros(3, 8), torch.zeros(0, 8)).shape == (6, 0)
    assert ops.matmul_all_reduce(torch.zeros(0, 8), torch.zeros(4, 8)).shape == (0, 4)
    assert torch.equal(ops.matmul_all_reduce(torch.zeros(3, 0), torch.zeros(4, 0), bias=bias), bias.repeat(3, 1))


def test_sizes_of_zero_are_no_special_case_to_the_caller(interpret):
    interpret(2, call_with_nothing)


def ask_wrongly():
    x, weight = torch.zeros(4, 8), torch.zeros(6, 8)
    for operator in (ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce):
        name = operator.__name__
        for arguments, words in (
            ((x[0], weight), f"{name} takes x .* of two dims or more, not .8."),
            ((x, weight[None]), f"{name} takes x .* and weight .* two dims, not .4, 8. and .1, 6, 8."),
            ((x, weight[:, :7]), r"x \[4, 8\] and weight \[6, 7\] differ in k"),
            ((x, weight.bfloat16()), r"weight must be \[6, 8\] of torch.float32 .*, not \[6, 8\] of torch.bfloat16"),
            ((x.double(), weight.double()), "takes torch.bfloat16, torch.float16, torch.float32, not torch.float64"),
            ((x.double(), weight.double()), 'float64: convert x, weight and bias, or give implementation="library"'),
            ((x, weight.to("meta")), r"weight must be \[6, 8\] .* on cpu, not \[6, 8\] of torch.float32 on meta"),
            ((torch.zeros(8, 4).t(), weight), r"takes a contiguous x, not strides \(1, 4\): call contiguous\(\)"),
            ((x, torch.zeros(6, 16)[:, ::2]), r"takes a contiguous weight, or the transpose of one, not strides \(16"),
        ):
            with pytest.raises(ValueError, match=words):
                operator(*arguments)
        with pytest.raises(ValueError, match=r"bias must be \[6\] of .*, not \[5\] of"):
            operator(x, weight, bias=torch.zeros(5))
    with pytest.raises(ValueError, match="2 ranks do not divide x's first dim, 3: 4 will do"):
        ops.matmul_reduce_scatter(x[:3], weight)
    with pytest.raises(ValueError, match=r"travel in torch.float32 or torch.float32, not torch.bfloat16"):
        ops.matmul_reduce_scatter(x, weight, reduce_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"an mlp's activation is 'tanh', but must be one of gelu, "):
        ops.mlp(x, weight, weight.t(), activation="tanh")
    with pytest.raises(ValueError, match=r"an mlp's gate must be of up's shape, \[6, 8\], not \[4, 8\]"):
        ops.mlp(x, weight, weight.t(), gate=x)
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match=r"this process \(rank 1\) is not in the group"):
            ops.all_gather_matmul(x, weight, group)


def test_unsupported_operands_raise_before_anything_runs(interpret):
    interpret(2, ask_wrongly)


HOPPER = Machine(132, True, True)
