# SPDX-License-Identifier: Apache-2.0
"""GEMMs whose exchange is a schedule, between real processes with interpreted kernels, against fp64."""

import pytest
import torch
import torch.distributed as dist
from tests.ops.operands import BLOCKS, lie, random_operands, relative_error

from stretto import ops
from stretto.collectives.algorithms import find

OPERATORS = {
    "all_gather_matmul": ("direct-all-gather", "ring-all-gather", "recursive-doubling-all-gather"),
    "matmul_reduce_scatter": ("direct-reduce-scatter", "ring-reduce-scatter", "recursive-halving-reduce-scatter"),
    "matmul_all_reduce": ("one-shot-all-reduce", "two-shot-all-reduce", "ring-all-reduce"),
}
CASES = [
    (2, (64, 64, 64), torch.bfloat16, False, True),
    (4, (37, 41, 33), torch.float32, True, False),
    (3, (5, 72, 40), torch.bfloat16, False, True),
]
"""(ranks, (rows, n, k), dtype, whether the weight is a transpose, whether there is a bias)."""
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8}


def multiply(operator, schedule, shape, dtype, by_columns, has_bias):
    """(error, whether another call has the same bits, and whether all ranks have them; what ran by a kernel)."""
    rank, world, (rows, n, k) = dist.get_rank(), dist.get_world_size(), shape
    rows *= world if operator == "matmul_reduce_scatter" else 1
    inputs, weights, bias = random_operands(rows, n, k, dtype, has_bias)
    if operator == "matmul_all_reduce" and has_bias:  # of which all ranks have the same
        dist.broadcast(bias, 0)
    how = ops.KernelConfig(blocks=BLOCKS._replace(m=16), movers=1 + world % 2)
    run, before = getattr(ops, operator), ops.counts().get((operator, "kernel"), 0)
    weight = lie(weights[rank], by_columns)
    out, again = (run(inputs[rank], weight, bias=bias, implementation=how, schedule=schedule) for _ in range(2))
    if operator == "all_gather_matmul":
        expected = torch.cat(inputs).double() @ weight.double().T
    else:
        expected = sum(x.double() @ weight.double().T for x, weight in zip(inputs, weights, strict=True))
    if operator == "matmul_reduce_scatter":
        expected = expected.chunk(world)[rank]
    if has_bias:
        expected = expected + bias.double()
    ran = ops.counts()[operator, "kernel"] - before
    return relative_error(out, expected), torch.equal(out, again), out.double().sum().item(), ran


@pytest.mark.sampled(3, quick=1)
@pytest.mark.parametrize(("operator", "schedule"), [(one, name) for one, names in OPERATORS.items() for name in names])
@pytest.mark.parametrize("case", CASES)
def test_products_with_a_schedule_are_right(interpret, operator, schedule, case):
    ranks, shape, dtype, *rest = case
    results = interpret(ranks, multiply, operator, schedule, shape, dtype, *rest)
    for error, is_same, total, ran in results:
        assert error <= (1 if operator == "all_gather_matmul" else ranks + 1) * ROUNDING[dtype]
        assert is_same
        assert ran == 2
        if operator == "matmul_all_reduce":
            assert total == results[0][2]
