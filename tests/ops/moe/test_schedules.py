# SPDX-License-Identifier: Apache-2.0
"""Experts whose tokens move by a schedule, interpreted: the bits of the direct exchange, 2 to 8 ranks."""

import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.collectives.joint.random_algorithms import random_all_to_all
from tests.ops.embedding import test_schedules as look_ups
from tests.ops.joint.test_nodes import in_one_node, on_nodes
from tests.ops.moe.oracle import draw, make_layer
from tests.ops.moe.test_exchange import Case, part
from tests.pool import Pool
from tests.processes import shared_server

from stretto.collectives.algorithms import find
from stretto.ops import moe
from stretto.ops.moe import kernel_route
from stretto.ops.operator import list_put_channels

SEED = random.randrange(2**31)
HIDDEN = 21


def make_schedule(which):
    """An algorithm's name, (nodes, gpus) of a two-step one, or (seed, ranks, chunks) of a random one."""
    match which:
        case (nodes, gpus):
            return find("two-step-all-to-all").compile(nodes=nodes, gpus=gpus)
        case (seed, ranks, chunks):
            return random_all_to_all(random.Random(seed), ranks, chunks)
    return which


def run_products(case, dtype, group=None, **options):
    """Products, output and gradients of experts, of which all ranks have several."""
    rank, group = dist.get_rank(), group or dist.group.WORLD
    layer = make_layer(7, sum(case.tokens), case.k, case.experts, chosen=case.chosen, hidden=HIDDEN)
    x, weights = (part(one, case.tokens, rank).clone() for one in (layer.x.to(dtype), layer.weights.float()))
    up = draw(rank, case.experts // group.size(), 8, HIDDEN).to(dtype)
    leaves = [one.requires_grad_() for one in (x, weights, up)]
    ids = part(layer.ids, case.tokens, rank)
    inner, sent = moe.dispatch_grouped_matmul(x, ids, up, group, topk_weights=weights, **options)
    out = moe.grouped_matmul_combine(inner, up.mT, sent, weights, group)
    grad = part(draw(9, *layer.x.shape), case.tokens, rank).to(dtype)
    return [inner.detach(), sent.offsets, out.detach(), *torch.autograd.grad(out, leaves, grad)]


def compare_with_direct(case, dtype, which, options):
    """(whether each result of a call has the bits of the kernels' own exchange, launches that moved rows)."""
    with (
        mock.patch.object(kernel_route, "launch_moves", wraps=kernel_route.launch_moves) as moves,
        mock.patch.object(kernel_route, "push_rows", new=None),
    ):
        ours = run_products(case, dtype, schedule=make_schedule(which), **options)
    direct = run_products(case, dtype, implementation="kernel", **options)
    return [torch.equal(*pair) for pair in zip(ours, direct, strict=True)], moves.call_count


RANK, CHOICE, BF16, FP32 = {}, {"reduce": "choice"}, torch.bfloat16, torch.float32


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "call"),
    [
        (4, (Case((2, 5, 0, 9), 2, 8), BF16, (2, 2), RANK)),
        pytest.param(4, (Case((3, 3, 3, 3), 2, 4), FP32, (2, 2), {"max_rows": 24}), marks=pytest.mark.exhaustive),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                (2, (Case((2, 5), 2, 4), BF16, "direct-all-to-all", RANK)),
                (3, (Case((2, 0, 3), 2, 6), FP32, (SEED, 3, 2), CHOICE)),
                (4, (Case((2, 1, 6, 3), 2, 8), BF16, (SEED, 4, 1), RANK)),
            )
        ),
    ],
    ids=["two-step", "two-step-fixed", "direct", "random-choice", "random"],
)
def test_experts_whose_tokens_move_by_a_schedule_have_the_bits_of_the_direct_exchange(interpret, ranks, call):
    print(f"seed {SEED}")
    for same, moves in interpret(ranks, compare_with_direct, *call):
        assert all(same), same
        assert moves >= 4


def compare_nodes(group, case, dtype, which, options):
    """Whether each result of a call between nodes, by puts, has the bits of one in one node."""
    how = {"implementation": "kernel"} if which is None else {"schedule": make_schedule(which)}
    far = [run_products(case, dtype, group, **how, **options) for _ in range(2)]
    direct = in_one_node(run_products, case, dtype, implementation="kernel", **options)
    assert not list_put_channels(dist.group.WORLD.group_name)
    assert list_put_channels(group.group_name)
    return [torch.equal(*pair) for found in far for pair in zip(found, direct, strict=True)]


@pytest.mark.parametrize(
    ("ranks", "nodes", "call"),
    [
        pytest.param(4, "2x2", (Case((2, 5, 0, 9), 2, 8), BF16, None, RANK), marks=pytest.mark.long),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                (4, "2x2", (Case((3, 3, 3, 3), 2, 4), FP32, None, {"max_rows": 24})),
                (2, "1,1", (Case((2, 5), 2, 4), BF16, "direct-all-to-all", CHOICE)),
                (3, "1,1,1", (Case((2, 0, 3), 2, 6), FP32, (SEED, 3, 2), RANK)),
                (4, "2x2", (Case((2, 1, 6, 3), 2, 8), BF16, (SEED, 4, 1), RANK)),
            )
        ),
    ],
)
def test_experts_of_several_nodes_have_the_bits_of_one_node(interpret, ranks, nodes, call):
    print(f"seed {SEED}")
    for same in interpret(ranks, on_nodes, nodes, "auto", compare_nodes, *call, timeout=300.0):
        assert all(same), same


def refuse_unequal_nodes(group):
    x, ids, weight = torch.ones(4, 8), torch.tensor([[0, 1]] * 4), torch.ones(1, 8, 8)
    with pytest.raises(ValueError, match="its nodes have 2, 1 ranks, and tokens go to alike nodes"):
        moe.dispatch_grouped_matmul(x, ids, weight, group, implementation="kernel")
    return moe.dispatch_grouped_matmul(x, ids, weight, group)[0].shape[1]


def test_experts_of_unequal_nodes_run_the_library(interpret):
    assert interpret(3, on_nodes, "2,1", "auto", refuse_unequal_nodes) == [8] * 3


@pytest.mark.exhaustive
def test_tokens_and_vectors_go_by_two_nodes_of_four_ranks():
    print(f"seed {SEED}")
    pool = Pool(8, {"TRITON_INTERPRET": "1"}, modules=["stretto.ops"], python=shared_server("torch").python)
    try:
        case = Case((2, 1, 0, 3, 1, 4, 2, 1), 2, 8)
        for same, moves in pool.run(8, compare_with_direct, case, BF16, (2, 4), RANK, timeout=600.0):
            assert all(same), same
            assert moves >= 4
        assert pool.run(8, look_ups.compare_with_direct, SEED % 1000, ["two-step"], timeout=600.0) == [[]] * 8
    finally:
        pool.close()


def refuse():
    """What each wrong schedule is refused with."""
    x, ids, weight = torch.ones(4, 8), torch.tensor([[0, 1]] * 4), torch.ones(2, 8, 8)
    found, pair = [], dist.new_group([0, 1])
    for schedule, options in (
        ("ring-all-gather", {}),
        (find("all-to-next").compile(nodes=1, gpus=2), {}),
        (find("direct-all-to-all").compile(ranks=3), {}),
        ("two-step-all-to-all", {}),
        ("direct-all-to-al", {}),
        ("direct-all-to-all", {"implementation": "library"}),
        ("direct-all-to-all", {"gather_group": pair}),
        (find("direct-all-to-all").compile(ranks=2, instances=80), {}),
    ):
        with pytest.raises(ValueError) as refusal:
            moe.dispatch_grouped_matmul(x, ids, weight, dist.group.WORLD, schedule=schedule, **options)
        found.append(str(refusal.value))
    return found


def test_schedules_that_experts_cannot_have_are_refused(interpret):
    for found in interpret(2, refuse):
        for message, words in zip(
            found,
            (
                "would do: direct-all-to-all, two-step-all-to-all",
                "all-to-next is one of 'alltonext'",
                "a schedule of 3 ranks, and the group has 2",
                "it takes nodes, gpus",
                "direct-all-to-all",
                "leave out",
                "leave out gather_group",
                "compile it with fewer instances",
            ),
            strict=True,
        ):
            assert words in message
