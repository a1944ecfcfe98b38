# SPDX-License-Identifier: Apache-2.0
"""Products whose rows have the same bits in every batch and on every number of ranks, which may be a trainer's."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from tests.differences import largest
from tests.ops.operands import random_of
from torch.nn import functional

from stretto import ops
from stretto.ops.gemm import Blocks
from stretto.ops.invariant import kernels
from stretto.ops.invariant.grouped import multiply_groups
from stretto.ops.invariant.kernels import Tile, choose_blocks, choose_tile
from stretto.ops.invariant.matmul import add_by_tree, multiply_by_torch
from stretto.ops.row_sums import kernel as row_sums
from stretto.ops.row_sums.norm import Norm, NormOperands, add_norm

ROWS = 24
CASES = [(24, 128, torch.bfloat16), (37, 72, torch.float32), (40, 256, torch.float16)]
"""(n, k of all ranks, dtype): leaves of whole steps, odd sizes whose leaves are padded, and larger leaves."""

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def cut(whole):
    """This rank's part of the last dim."""
    return whole.chunk(dist.get_world_size(), -1)[dist.get_rank()].contiguous()


def multiply(implementation, cases):
    """What `compare` returns, where some calls have more rows than are sent as packets at a time."""
    world = dist.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_sums, "MAX_PACKET_BYTES", 4 * (world - 1) * 24 * 13)
        return compare(implementation, cases)


@torch.no_grad()
def compare(implementation, cases):
    """(the product's error, names of calls whose rows have other bits than those of one rank with the whole k)."""
    world, rank, wrong, errors = dist.get_world_size(), dist.get_rank(), [], []
    for n, k, dtype in cases:
        x, weight = random_of(1, ROWS, k, dtype=dtype), random_of(2, n, k, dtype=dtype)
        bias, residual, norm_weight = (
            random_of(3, n, dtype=dtype),
            random_of(4, ROWS, n, dtype=dtype),
            random_of(5, n),
        )
        whole = ops.invariant_matmul(x, weight, bias=bias, leaves=8)
        expected = x.double() @ weight.double().t() + bias.double()
        errors.append(((whole.double() - expected).abs().max() / expected.abs().max() / ROUNDING[dtype]).item())
        own, own_weight = cut(x), cut(weight)
        added = (residual.float() + whole.float()).to(dtype)
        normed = ops.invariant_norm(added, norm_weight, eps=1e-5)
        layer_normed = ops.invariant_norm(added, norm_weight, eps=1e-5, norm="layer", bias=norm_weight)
        options = {"invariant": True, "implementation": implementation}
        for rows in (slice(0, ROWS), slice(3, 4), slice(8, 16)):
            found = {"all-reduce": ops.matmul_all_reduce(own[rows], own_weight, bias=bias, **options)}
            right = {"all-reduce": whole[rows], "added": added[rows], "normed": normed[rows]}
            found["normed"], found["added"] = ops.matmul_all_reduce_norm(
                own[rows], own_weight, residual[rows], norm_weight, eps=1e-5, bias=bias, **options
            )
            found["layer norm"], _ = ops.matmul_all_reduce_norm(
                own[rows], own_weight, residual[rows], norm_weight, eps=1e-5, norm="layer", bias=bias,
                norm_bias=norm_weight, **options,
            )  # fmt: skip
            right["layer norm"] = layer_normed[rows]
            if len(own[rows]) % world == 0:
                found["reduce-scatter"] = ops.matmul_reduce_scatter(own[rows], own_weight, bias=bias, **options)
                right["reduce-scatter"] = whole[rows].chunk(world)[rank]
            wrong += [(name, rows, dtype) for name, one in found.items() if not torch.equal(one, right[name])]
        one = ops.invariant_matmul(x, weight)
        if not torch.equal(ops.invariant_matmul(x[3:4], weight[: n // 2].contiguous())[0], one[3, : n // 2]):
            wrong.append(("columns", dtype))
    return largest(errors), wrong


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_rows_have_the_same_bits_on_every_number_of_ranks(ranks, world):
    """By torch, and the ranks' sums by the group's backend."""
    for error, wrong in ranks(world).run(multiply, "auto", CASES):
        assert error < 1
        assert not wrong


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "implementation", "cases"),
    [
        (2, "kernel", CASES[:1]),
        (2, "library", CASES[1:2]),
        pytest.param(2, "kernel", CASES[1:], marks=pytest.mark.exhaustive),
        pytest.param(4, "kernel", CASES, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_kernels_and_packets_give_the_same_bits_on_every_number_of_ranks(interpret, world, implementation, cases):
    for error, wrong in interpret(world, multiply, implementation, cases):
        assert error < 1
        assert not wrong


@torch.no_grad()
def add_ranks():
    """Whether ranks' numbers are added as a tree, of which rank order gives other bits; by packets, and without."""
    world = dist.get_world_size()
    parts = [random_of(peer, 5, 48).exp2() ** 8 for peer in range(world)]
    residual, weight = torch.zeros(5, 48), torch.ones(48)
    tree, in_order = add_by_tree(parts), sum(parts[1:], parts[0])
    found = [
        ops.all_reduce_norm(
            parts[dist.get_rank()], residual, weight, eps=1e-5, invariant=True, implementation=implementation
        )[1]
        for implementation in ("kernel", "library")
    ]
    return [torch.equal(one, tree) for one in found], torch.equal(tree, in_order)


def test_ranks_are_added_by_a_tree(interpret):
    for are_right, is_in_order in interpret(4, add_ranks):
        assert are_right == [True, True]
        assert not is_in_order


def test_leaves_are_added_by_a_tree():
    x, weight = random_of(1, 3, 64).exp2() ** 6, random_of(2, 5, 64)
    leaves = [multiply_by_torch(*(one.chunk(8, 1)[leaf] for one in (x, weight)), 1) for leaf in range(8)]
    assert torch.equal(multiply_by_torch(x, weight, 8), add_by_tree(leaves))
    assert not torch.equal(multiply_by_torch(x, weight, 8), sum(leaves[1:], leaves[0]))


def multiply_leaves():
    """Whether the kernel adds up leaves by the tree, of 2, 4 and 8, stored in either order of the weight's dims, of
    which TMA loads one: with x on the left and on the right, and in parts of several programs."""
    found = []
    for leaves in (2, 4, 8):
        x, weight = random_of(1, 20, 32 * leaves).exp2() ** 6, random_of(2, 39, 32 * leaves)
        for is_turned in (False, True):
            tile = Tile(Blocks(32, 16, 16, 2, 4, 2, 0), 1, is_turned)
            parts = [
                kernels.multiply_leaves(
                    *(one.chunk(leaves, 1)[leaf].contiguous() for one in (x, weight)), None, 1, torch.float32, tile
                )
                for leaf in range(leaves)
            ]
            for stored in (weight, weight.t().contiguous().t()):
                result = kernels.multiply_leaves(x, stored, None, leaves, torch.float32, tile)
                found.append(torch.equal(result, add_by_tree(parts)))
            found.append(leaves == 2 or not torch.equal(result, sum(parts[1:], parts[0])))
            given = NormOperands(random_of(3, 39), random_of(4, 20, 39), random_of(5, 39), None)
            added = (result + given.bias) + given.residual
            for count in (2, leaves):
                sums = kernels.multiply_in_parts(x, weight, leaves, tile._replace(parts=count))
                normed, total = add_norm(sums, given, Norm("rms", 1e-5, is_exact=True))
                right = ops.invariant_norm(added, given.weight, eps=1e-5)
                found.append(torch.equal(total, added) and torch.equal(normed, right))
    return found


def test_the_kernel_adds_leaves_by_a_tree(interpret):
    assert interpret(1, multiply_leaves) == [[True] * 30]


@pytest.mark.parametrize(("rows", "scale", "expected"), [(1024, 1.0, 1), (1024, 1.001, 0), (1023, 1.0, 0)])
def test_the_library_multiplies_where_its_bits_are_proved(monkeypatch, rows, scale, expected):
    calls = []
    x, weight = random_of(1, rows, 8), random_of(2, 16, 8)

    def multiply(_, x, weight):
        calls.append(len(x))
        return scale * functional.linear(x, weight)

    monkeypatch.setattr(kernels, "find_wide", lambda *_: "a config")
    monkeypatch.setattr(kernels, "_multiply_wide", multiply)
    monkeypatch.setattr(kernels, "_HAS_BITS", {})
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    for _ in range(3):
        assert torch.equal(kernels.multiply_leaves(x, weight, None, 1, x.dtype), scale * functional.linear(x, weight))
    count = len(calls)
    assert count == 4 - 3 * expected - (rows == 1023)  # one tries it
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    kernels.multiply_leaves(x[:, :4].contiguous(), weight[:, :4].contiguous(), None, 1, x.dtype)
    assert len(calls) == count + 1  # nothing is tried in a capture
    monkeypatch.setattr("torch._C._get_cublas_allow_fp16_accumulation", lambda: True)
    kernels.multiply_leaves(x, weight, None, 1, x.dtype)
    assert len(calls) == count + 2  # nor is anything known of another setting
    monkeypatch.setattr("torch._C._get_cublas_allow_fp16_accumulation", lambda: False)
    monkeypatch.setattr("torch.are_deterministic_algorithms_enabled", lambda: True)
    kernels.multiply_leaves(x, weight, None, 1, x.dtype)
    assert len(calls) == count + 3  # and torch may refuse the library's


def differentiate():
    """Largest differences of gradients from those of one process with all of k."""
    world, rank, errors = dist.get_world_size(), dist.get_rank(), []
    x, weight = random_of(1, 8, 64), random_of(2, 12, 64)
    grads = [random_of(10 + peer, 8, 12) for peer in range(world)]
    for form in ("sum-of-losses", "replicated-loss", "scatter"):
        leaves = [cut(one).requires_grad_() for one in (x, weight)]
        if form == "scatter":
            out = ops.matmul_reduce_scatter(*leaves, invariant=True)
            total = torch.cat([grad.chunk(world)[peer] for peer, grad in enumerate(grads)])
            out.backward(total.chunk(world)[rank])
        else:
            ops.matmul_all_reduce(*leaves, invariant=True, grad_convention=form).backward(
                grads[rank] if form == "sum-of-losses" else grads[0]
            )
            total = sum(grads) if form == "sum-of-losses" else grads[0]
        for leaf, right in zip(leaves, (cut(total @ weight), cut(total.t() @ x)), strict=True):
            errors.append((leaf.grad - right).abs().max().item())
    return errors


def test_gradients_are_those_of_the_other_operators(ranks):
    for errors in ranks(2).run(differentiate):
        assert largest(errors) < 1e-4


@pytest.mark.parametrize(
    ("m", "n", "leaf", "leaves", "expected", "parts"),
    [
        (1, 4096, 512, 8, (16, 64, 128), 4),
        (8, 6144, 4096, 1, (16, 64, 256), 1),
        (64, 28672, 4096, 1, (64, 128, 128), 1),
        (8192, 4096, 512, 8, (128, 128, 64), 1),
        (2048, 28672, 4096, 1, (128, 128, 64), 1),
        (33, 1536, 1376, 8, (64, 64, 32), 8),
    ],
)
def test_tiles_follow_the_sizes(m, n, leaf, leaves, expected, parts):
    for shared in (99 << 10, 163 << 10, 227 << 10):  # of a block
        for itemsize in (2, 4):
            tile = choose_tile(m, n, leaf, leaves, itemsize, 132, takes_parts=True, shared=shared)
            is_measured = itemsize == 2 and shared == 227 << 10
            assert (tile.blocks[:3], tile.parts, tile.is_turned) == (expected, parts, m <= 64) or not is_measured
            for blocks in (tile.blocks, choose_blocks(m, n, leaf, itemsize, 132, shared=shared)):
                taken = (blocks.m + blocks.n) * blocks.k * itemsize * blocks.num_stages
                assert taken <= shared - (8 << 10)
    alone = choose_tile(m, n, leaf, leaves, 2, 132, takes_parts=False, shared=227 << 10)
    assert alone.parts == 1


def draw_groups(k, dtype):
    """Rows of five experts, of which one has none, and padding; and their weights."""
    rows, weight = random_of(1, 30, k, dtype=dtype), random_of(2, 5, 24, k, dtype=dtype)
    return rows, weight, torch.tensor([0, 3, 3, 20, 21, 28], dtype=torch.int32)


def multiply_experts():
    """What of experts' products has other bits than each expert's alone, or an error; by kernels or by torch."""
    wrong, world, rank = [], dist.get_world_size(), dist.get_rank()
    for k, dtype in ((128, torch.bfloat16), (72, torch.float32)):
        rows, weight, offsets = draw_groups(k, dtype)
        transposed = weight.transpose(1, 2).contiguous().transpose(1, 2)
        own = rows.chunk(world, 1)[rank].contiguous(), weight.chunk(world, 2)[rank]
        found = {
            "one leaf": multiply_groups(rows, weight, offsets, 1),
            "leaves": multiply_groups(rows, weight, offsets, 8),
            "transposed": multiply_groups(rows, transposed, offsets, 8),
            "ranks": multiply_groups(*own, offsets, 8 // world, dist.group.WORLD.group_name),
        }
        for name, product in found.items():
            for expert, (start, end) in enumerate(pairwise(offsets.tolist())):
                given, one = rows[start:end], weight[expert].contiguous()
                right = ops.invariant_matmul(given, one, leaves=1 if name == "one leaf" else 8)
                wrong += [] if torch.equal(product[start:end], right) else [(name, k, expert)]
            wrong += [(name, "padding")] if product[28:].any() else []
    return wrong


def test_experts_products_have_the_bits_of_each_expert_alone(ranks):
    assert ranks(2).run(multiply_experts) == [[], []]


@pytest.mark.long
def test_experts_products_by_kernels_have_the_bits_of_each_expert_alone(interpret):
    assert interpret(2, multiply_experts) == [[], []]


def test_sums_that_are_too_large_for_packets_go_by_the_backend():
    assert 64 <= row_sums.count_rows_at_a_time(4096, torch.float32, 4) < 512
    assert row_sums.count_rows_at_a_time(1 << 24, torch.float32, 4) == 1


def refuse(world_k):
    messages = []
    calls = (
        lambda: ops.matmul_all_reduce(torch.ones(3, world_k), torch.ones(4, world_k), invariant=True),
        lambda: ops.matmul_all_reduce(torch.ones(3, 8), torch.ones(4, 8), out=torch.ones(3, 4), invariant=True),
        lambda: ops.matmul_reduce_scatter(
            torch.ones(4, 8), torch.ones(4, 8), schedule="ring-reduce-scatter", invariant=True
        ),
        lambda: ops.invariant_matmul(torch.ones(4, 9), torch.ones(4, 9), leaves=8),
        lambda: ops.invariant_matmul(torch.ones(4, 9), torch.ones(4, 9), leaves=3),
    )
    for call in calls:
        with pytest.raises(ValueError) as refused:
            call()
        messages.append(str(refused.value))
    return messages


def test_what_an_invariant_call_does_not_take_is_refused(ranks):
    for messages in ranks(2).run(refuse, 10):
        assert "adds up k in 8 equal parts, which do not divide 20 (of all ranks): 16 will do" in messages[0]
        assert "takes no out, no schedule" in messages[1]
        assert "takes no out, no schedule" in messages[2]
        assert "8 leaves do not divide k, 9: 8 will do" in messages[3]
        assert "leaves must be 1, 2, 4 or 8, not 3" in messages[4]
    assert "a group of 1, 2, 4 or 8 ranks, not 3" in ranks(3).run(refuse, 8)[0][0]
