# SPDX-License-Identifier: Apache-2.0
"""GEMMs whose exchange is a schedule, on ranks that are declared to be several nodes, which put to each other."""

import os
import random
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.collectives.joint.random_algorithms import random_schedule
from tests.ops.operands import BLOCKS, random_of, relative_error

from stretto import ops
from stretto.collectives.algorithms import find
from stretto.memory import PeerError
from stretto.ops.operator import close_workspaces

SEED = random.randrange(2**31)
OPERATORS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8}


def on_nodes(nodes, proxy, function, *arguments, seconds=60.0):
    """What the function returns, given a group whose ranks are on these nodes."""
    with mock.patch.dict(os.environ, {"STRETTO_NODES": nodes, "STRETTO_PROXY": proxy}):
        if dist.get_rank() == 0:  # by how many groups a rank has, torch names those that it makes
            dist.new_group([0], use_local_synchronization=True)
        group = dist.new_group(timeout=timedelta(seconds=seconds))
        try:
            return function(group, *arguments)
        finally:
            close_workspaces(group.group_name)


def in_one_node(function, *arguments, **options):
    """What the function returns, if its groups are first used now: their ranks are on this machine's one node."""
    with mock.patch.dict(os.environ):
        del os.environ["STRETTO_NODES"]
        return function(*arguments, **options)


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
        if not error <= dist.get_world_size() * 2 * ROUNDING[dtype] or not is_same:
            wrong.append((operator, make, shape, error, is_same))
    return wrong


CASES = {
    "2x2": [(operator, None, (24, 40, 33), torch.float32) for operator in OPERATORS[:2]],
    "2,1": [
        *((operator, None, (5, 24, 16), torch.float32) for operator in OPERATORS),
        ("all_gather_matmul", "ring-all-gather", (40, 16, 64), torch.float32, 1, 3),
    ],
}
MORE_CASES = {
    "2x2": [
        ("all_gather_matmul", "ring-all-gather", (37, 16, 24), torch.bfloat16, 2, 4),
        (
            "matmul_reduce_scatter",
            ("hierarchical-reduce-scatter", {"nodes": 2, "gpus": 2}),
            (19, 72, 16),
            torch.bfloat16,
        ),
        ("matmul_all_reduce", None, (24, 40, 33), torch.float32),
        ("matmul_all_reduce", "ring-all-reduce", (70, 32, 16), torch.float32, 1, 3),
    ],
    "4x1": [(operator, None, (24, 40, 33), torch.float32) for operator in OPERATORS],
}
"""(operator, schedule, (rows, n, k), dtype, movers, programs)."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("nodes", "cases"),
    [
        *CASES.items(),
        *(pytest.param(nodes, cases, marks=pytest.mark.exhaustive) for nodes, cases in MORE_CASES.items()),
    ],
)
def test_products_on_several_nodes_are_right(interpret, nodes, cases):
    """Also of more elements than all slots hold, so that each is used again."""
    ranks = 3 if nodes == "2,1" else 4
    assert interpret(ranks, on_nodes, nodes, "auto", multiply_all, cases) == [[]] * ranks


def multiply_by_random(group, seed, count):
    """The random schedules whose product is wrong, or not the same twice."""
    rng, wrong = random.Random(seed), []
    for number in range(count):
        operator = rng.choice(OPERATORS)
        schedule = random_schedule(rng, operator, dist.get_world_size(), rng.choice([1, 2, 3]))
        shape = rng.randint(1, 40), rng.choice([16, 24]), rng.choice([16, 40])
        error, is_same, _ = multiply(group, operator, schedule, shape, torch.float32, rng.choice([1, 2]))
        if not error <= 1e-5 or not is_same:
            wrong.append((number, operator, shape, error, is_same))
    return wrong


@pytest.mark.exhaustive
@pytest.mark.parametrize("proxy", ["native", "python"])
@pytest.mark.parametrize("nodes", ["1,1", "2,1", "2x2", "1,2,1"])
def test_products_by_random_schedules_on_several_nodes_are_right(interpret, nodes, proxy):
    print(f"seed {SEED}")
    ranks = {"1,1": 2, "2,1": 3}.get(nodes, 4)
    found = interpret(ranks, on_nodes, nodes, proxy, multiply_by_random, SEED, 12, timeout=3600.0)
    assert found == [[]] * ranks


def refuse(group):
    """What a group of several nodes refuses."""
    x, weight, fp8 = torch.ones(4, 16), torch.ones(16, 16), torch.float8_e4m3fn
    scaled = x.to(fp8), weight.to(fp8), torch.ones(4), torch.ones(16)
    pulls = ops.KernelConfig(direction="pull")
    found = []
    for run, operands, options in (
        (ops.all_gather_scaled_matmul, scaled, {"implementation": "kernel"}),
        (ops.all_gather_matmul, (x, weight), {"implementation": ops.KernelConfig(transfer="programs")}),
        (ops.all_gather_matmul, (x, weight), {"implementation": pulls, "schedule": "ring-all-gather"}),
    ):
        with pytest.raises(ValueError) as refusal:
            run(*operands, group, **options)
        found.append(str(refusal.value))
    ops.all_gather_matmul(x, weight, group)
    assert ops.counts(group)["all_gather_matmul", "library"] == 1
    return found


def lose_a_rank(group):
    """What ranks say of one of another node that makes no third call."""
    x, weight = torch.ones(4, 16), torch.ones(8, 16)
    for _ in range(2):  # the first one loads kernels, for which ranks wait longer
        ops.all_gather_matmul(x, weight, group, implementation="kernel")
    message = ""
    if dist.get_rank():
        with pytest.raises(PeerError) as lost:
            ops.all_gather_matmul(x, weight, group, implementation="kernel")
        message = str(lost.value)
    dist.barrier()
    return message


def refuse_and_lose():
    # A wait for another node ends a tenth of the limit before those within the node, which do not know who is lost.
    return on_nodes("2x1", "auto", refuse), on_nodes("2x1", "auto", lose_a_rank, seconds=4.0)


def test_what_cannot_run_is_refused_and_a_lost_rank_is_named_with_node_interface_and_operator(interpret):
    (found, _), (_, message) = interpret(2, refuse_and_lose)
    for refusal, words in zip(
        found,
        (
            'its ranks are on 2 nodes, and kernels reach the memory of one; implementation="library" can',
            'implementation="library" can, as can a schedule',
            "is pulled, and between nodes rows are put: push it",
        ),
        strict=True,
    ):
        assert words in refusal
    assert message.startswith("rank 1 of 2 (node 1, NIC lo): all_gather_matmul: waited in vain for a slice with signal")
    assert "of rank 0 of 2 (node 0, NIC lo), 3.6 s: its counter is at" in message
