# SPDX-License-Identifier: Apache-2.0
"""GEMMs whose exchange is a schedule, on ranks that are declared to be several nodes, which put to each other."""

import os
import random
import re
from dataclasses import replace
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.collectives.joint.random_algorithms import random_schedule
from tests.ops.operands import BLOCKS, random_of, relative_error

from stretto import ops
from stretto.collectives.algorithms import find
from stretto.collectives.joint import cross_nodes, join, verify_joint
from stretto.memory import PeerError
from stretto.ops.joint import kernel
from stretto.ops.operator import close_workspaces

SEED = random.randrange(2**31)
OPERATORS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8}


def on_nodes(nodes, function, *arguments, seconds=60.0, proxy="auto"):
    """What the function returns, given a group whose ranks are on these nodes."""
    with mock.patch.dict(os.environ, {"STRETTO_NODES": nodes, "STRETTO_PROXY": proxy}):
        group = dist.new_group(timeout=timedelta(seconds=seconds))
        try:
            return function(group, *arguments)
        finally:
            close_workspaces(group.group_name)


def multiply(group, operator, schedule, shape, dtype, movers=2, programs=7):
    """(error, whether another call has the same bits, the sum of what this rank has)."""
    rank, world, (rows, n, k) = dist.get_rank(), dist.get_world_size(), shape
    rows *= world if operator == "matmul_reduce_scatter" else 1
    inputs = [random_of(peer, rows, k, dtype=dtype) for peer in range(world)]
    weights = [random_of(peer, n, k, dtype=dtype, seed=1) for peer in range(world)]
    bias = random_of(world if operator == "matmul_all_reduce" else rank, n, dtype=dtype, seed=2)
    how = "kernel"
    if schedule is not None:
        how = ops.KernelConfig(blocks=BLOCKS._replace(m=16, programs=programs), movers=movers)
    run, before = getattr(ops, operator), ops.counts(group).get((operator, "kernel"), 0)
    out, again = (
        run(inputs[rank], weights[rank], group, bias=bias, implementation=how, schedule=schedule) for _ in range(2)
    )
    if operator == "all_gather_matmul":
        expected = torch.cat(inputs).double() @ weights[rank].double().T
    else:
        expected = sum(x.double() @ weight.double().T for x, weight in zip(inputs, weights, strict=True))
    if operator == "matmul_reduce_scatter":
        expected = expected.chunk(world)[rank]
    assert ops.counts(group)[operator, "kernel"] == before + 2
    return relative_error(out, expected + bias.double()), torch.equal(out, again), out.double().sum().item()


def multiply_all(group, cases):
    """The cases whose product is wrong, or not the same twice."""
    wrong = []
    for operator, make, shape, dtype, *rest in cases:
        schedule = make if make is None or isinstance(make, str) else find(make[0]).compile(**make[1])
        error, is_same, _ = multiply(group, operator, schedule, shape, dtype, *rest)
        if error > dist.get_world_size() * 2 * ROUNDING[dtype] or not is_same:
            wrong.append((operator, make, shape, error, is_same))
    return wrong


CASES = {
    "2x2": [
        *((operator, None, (24, 40, 33), torch.float32) for operator in OPERATORS),
        ("all_gather_matmul", "ring-all-gather", (37, 16, 24), torch.bfloat16, 2, 4),
        (
            "matmul_reduce_scatter",
            ("hierarchical-reduce-scatter", {"nodes": 2, "gpus": 2}),
            (19, 72, 16),
            torch.bfloat16,
        ),
        ("matmul_all_reduce", "ring-all-reduce", (70, 32, 16), torch.float32, 1, 3),
    ],
    "2,1": [
        *((operator, None, (5, 24, 16), torch.float32) for operator in OPERATORS),
        ("matmul_reduce_scatter", "ring-reduce-scatter", (9, 16, 16), torch.float32),
    ],
}


@pytest.mark.parametrize("nodes", list(CASES))
def test_products_on_several_nodes_are_right(interpret, nodes):
    """Also of more elements than all slots hold, so that each is used again."""
    ranks = 4 if nodes == "2x2" else 3
    assert interpret(ranks, on_nodes, nodes, multiply_all, CASES[nodes]) == [[]] * ranks
