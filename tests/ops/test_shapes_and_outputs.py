# SPDX-License-Identifier: Apache-2.0
"""Operands of more dims than two, several weights for one gather, and outputs that the caller gives."""

import pytest
import torch
import torch.distributed as dist
from tests.ops.operands import find_plan, random_of
from torch.utils.flop_counter import FlopCounterMode

from stretto import ops


def numbers_of(rank, *shape):
    """Small whole numbers, so that sums are exact."""
    return random_of(rank, *shape).round()


def call_with_dims(lead, compiles):
    """Of x [*lead, 8], the outputs' rows lie as the plain products of all ranks' x in the first dim, and gradients."""
    rank, world = dist.get_rank(), dist.get_world_size()
    xs = [numbers_of(peer, *lead, 8).requires_grad_() for peer in range(world)]
    weights = [numbers_of(10 + peer, 6, 8).requires_grad_() for peer in range(world)]
    plain = {
        ops.all_gather_matmul: [torch.cat(xs) @ weight.T for weight in weights],
        ops.matmul_reduce_scatter: sum(x @ w.T for x, w in zip(xs, weights, strict=True)).chunk(world),
        ops.matmul_all_reduce: [sum(x @ w.T for x, w in zip(xs, weights, strict=True))] * world,
    }
    for operator, outs in plain.items():
        x, weight = (one[rank].detach().clone().requires_grad_() for one in (xs, weights))
        layer = torch.compile(operator, backend="aot_eager", fullgraph=True) if compiles else operator
        out = layer(x, weight)
        assert torch.equal(out, outs[rank]), operator.__name__
        factors = [numbers_of(20 + peer, *out.shape) for peer in range(world)]
        (out * factors[rank]).sum().backward()
        loss = sum((one * factor).sum() for one, factor in zip(outs, factors, strict=True))
        expected = torch.autograd.grad(loss, (xs[rank], weights[rank]), retain_graph=True)
        assert torch.equal(x.grad, expected[0]), operator.__name__
        assert torch.equal(weight.grad, expected[1]), operator.__name__
    product, gathered = ops.all_gather_matmul_gathered(xs[rank].detach(), weights[rank].detach())
    assert torch.equal(product, plain[ops.all_gather_matmul][rank])
    assert torch.equal(gathered, torch.cat(xs))


@pytest.mark.parametrize(
    ("lead", "compiles"),
    [((4, 3), False), ((2, 3, 5), False), ((4, 0), False), pytest.param((4, 3), True, marks=pytest.mark.long)],
)
def test_rows_are_the_flattened_dims_before_the_last(interpret, lead, compiles):
    interpret(2, call_with_dims, lead, compiles, timeout=200.0)


def call_others_with_dims():
    """MLPs and products in fp8 of [4, 3, k] are those of [12, k], in other dims."""
    rank = dist.get_rank()
    x, up, down = random_of(rank, 4, 3, 16), random_of(5, 6, 16), random_of(6, 16, 6)
    for needs in (True, False):
        x.requires_grad_(needs)
        for gate in (None, up):
            flat = ops.mlp(x.flatten(0, 1), up, down, gate=gate)
            assert torch.equal(ops.mlp(x, up, down, gate=gate), flat.unflatten(0, (4, 3)))
    x, (weight, factor) = x.detach(), ops.quantize_rows(up)
    rows, scale = ops.quantize_rows(x)
    assert scale.shape == (4, 3)
    for operator, first in (
        (ops.all_gather_scaled_matmul, 8),
        (ops.scaled_matmul_reduce_scatter, 2),
        (ops.scaled_matmul_all_reduce, 4),
    ):
        flat = operator(rows.flatten(0, 1), weight, scale.flatten(), factor)
        for scales in (scale, scale[..., None], scale.flatten()):
            assert torch.equal(operator(rows, weight, scales, factor), flat.unflatten(0, (first, 3)))
        out = torch.empty(first, 3, 6, dtype=torch.bfloat16)
        assert operator(rows, weight, scale, factor, out=out) is out
        assert torch.equal(out, flat.unflatten(0, (first, 3)))


@pytest.mark.long
def test_mlps_and_scaled_products_take_more_dims(interpret):
    interpret(2, call_others_with_dims)


def refuse_dims():
    x, weight = torch.zeros(3, 4, 8), torch.zeros(6, 8)
    with pytest.raises(ValueError, match="2 ranks do not divide x's first dim, 3: 4 will do"):
        ops.matmul_reduce_scatter(x, weight)
    with pytest.raises(ValueError, match="2 ranks do not divide x's first dim, 3: 4 will do"):
        ops.matmul_reduce_scatter(x, weight, out=torch.zeros(1, 4, 6))
    for operator in (ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce):
        with pytest.raises(ValueError, match=r"takes a contiguous x, not strides \(8, 32, 1\)"):
            operator(x.transpose(0, 1), weight)


def test_dims_that_are_no_rows_are_refused(interpret):
    interpret(2, refuse_dims)


def multiply_several(lead, needs, plan, has_bias, compiles):
    """Products and gradients of three weights, of which the second is the widest, beside plain products."""
    rank, world, sizes = dist.get_rank(), dist.get_world_size(), (6, 10, 4)
    xs = [numbers_of(peer, *lead, 8).requires_grad_() for peer in range(world)]
    weights = [[numbers_of(10 * (peer + 1) + n, n, 8).requires_grad_() for n in sizes] for peer in range(world)]
    biases = [numbers_of(90 + rank + n, n).requires_grad_() if has_bias and n != 6 else None for n in sizes]
    leaves = [one.detach().clone().requires_grad_("x" in needs) for one in (xs[rank],)]
    leaves += [one.detach().clone().requires_grad_("w" in needs) for one in weights[rank]]
    options = {"bias": biases if has_bias else None, "implementation": find_plan(plan)}

    def layer(x, *weights):
        return ops.all_gather_matmul(x, weights, **options)

    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiles else layer
    with FlopCounterMode(display=False) as counter:
        layer(*leaves)
    assert counter.get_total_flops() == 2 * torch.cat(xs).numel() * sum(sizes)
    outs = run(*leaves)
    every = [[torch.cat(xs) @ w.T for w in one] for one in weights]
    for out, plain, bias in zip(outs, every[rank], biases, strict=True):
        assert torch.equal(out, plain if bias is None else plain + bias)
        assert out.is_contiguous()
    if not needs:
        return
    factors = [[numbers_of(70 + peer + place, *one.shape) for place, one in enumerate(outs)] for peer in range(world)]
    sum((out * factor).sum() for out, factor in zip(outs, factors[rank], strict=True)).backward()
    total = sum(
        (one * f).sum() for part, fs in zip(every, factors, strict=True) for one, f in zip(part, fs, strict=True)
    )
    expected = torch.autograd.grad(total, (xs[rank], *weights[rank]))
    for leaf, grad in zip(leaves, expected, strict=True):
        assert leaf.grad is None if not leaf.requires_grad else torch.equal(leaf.grad, grad)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("needs", ["xw", "x", "w", ""])
@pytest.mark.parametrize(
    ("lead", "plan", "has_bias", "compiles"),
    [
        ((20,), "auto", True, False),
        ((5, 2), "copies", False, False),
        pytest.param((4,), "library", True, True, marks=pytest.mark.long),
    ],
)
def test_several_weights_share_a_gather(interpret, lead, plan, has_bias, compiles, needs):
    interpret(2, multiply_several, lead, needs, plan, has_bias, compiles, timeout=200.0)


def count_collectives_of_several():
    """Collectives of a forward and a backward pass with three weights, by the library."""
    x, weights = torch.ones(4, 8, requires_grad=True), [torch.ones(6, 8, requires_grad=True) for _ in range(3)]
    ops.all_gather_matmul(x, weights, implementation="library")
    with torch.profiler.profile() as profile:
        sum(out.sum() for out in ops.all_gather_matmul(x, weights, implementation="library")).backward()
    names = [event.name for event in profile.events() if event.name.startswith("_c10d_functional::")]
    return sorted(name.split("::")[1] for name in names if "wait" not in name)


def test_several_weights_have_one_gather_and_one_reduce_scatter(interpret):
    expected = ["all_gather_into_tensor", "all_to_all_single"]  # the latter is the reduce-scatter on CPUs
    assert interpret(2, count_collectives_of_several) == [expected] * 2


def refuse_lists():
    x, weight, ran = torch.zeros(4, 8), torch.zeros(6, 8), dict(ops.counts())
    for given, options, words in (
        ([], {}, "weight must be a tensor or a list of one or more tensors, not "),
        ([weight, None], {}, r"weight\[1\] must be a dense tensor, not None"),
        ([weight, weight[:, :7]], {}, "differ in k"),
        ([weight, weight.half()], {}, "weight must be .* of torch.float32 on cpu, not .* of torch.float16"),
        ([weight] * 2, {"bias": [None]}, "bias of 2 weights must be as long a list, not 1"),
        ([weight] * 2, {"bias": torch.zeros(6)}, "bias of 2 weights must be as long a list, not Tensor"),
        ([weight] * 2, {"out": [torch.zeros(8, 6)]}, "out of 2 weights must be as long a list, not 1"),
        ([weight] * 2, {"out": [torch.zeros(8, 6), torch.zeros(8, 5)]}, r"out must be \[8, 6\] of .*, not \[8, 5\]"),
        ([weight] * 2, {"out": [torch.zeros(8, 6)] * 2}, "out shares memory with"),
        ([weight] * 2, {"saves_gathered": False}, "saves_gathered=False is for one weight"),
        (weight, {"bias": [None]}, "a list of biases.* only with a list of weights"),
    ):
        with pytest.raises(ValueError, match=words):
            ops.all_gather_matmul(x, given, **options)
    assert ops.counts() == ran


def test_lists_that_do_not_fit_are_refused_before_anything_runs(interpret):
    interpret(2, refuse_lists)


PLANS = {
    ops.all_gather_matmul: ("copies", "pushes", "library"),
    ops.matmul_reduce_scatter: ("copies", "packets", "library"),
    ops.matmul_all_reduce: ("one shot", "two shots", "copies", "library"),
}


def write_to_outputs(most_plans_of_batches):
    """Outputs that were given hold the bits of those that are returned, and memory around them is left alone."""
    rank = dist.get_rank()
    for shape, most_plans in (((12, 16), None), ((4, 3, 16), most_plans_of_batches)):
        x, weights = random_of(rank, *shape), [random_of(10 + rank, n, 16) for n in (24, 8)]
        for operator, plans in PLANS.items():
            for plan in plans[:most_plans]:
                expected = operator(x, weights[0], implementation=find_plan(plan))
                around = torch.full((expected.numel() + 8,), 7.0)
                out = around[4:-4].view(expected.shape)
                version = out._version
                assert operator(x, weights[0], out=out, implementation=find_plan(plan)) is out
                assert torch.equal(out, expected), (operator.__name__, plan)
                assert out._version > version  # autograd sees that it was written to
                assert torch.equal(around[[0, 1, 2, 3, -4, -3, -2, -1]], torch.full((8,), 7.0))
        for bias in (None, [random_of(20, 24), None]):
            for implementation in ("auto", "library"):
                expected = ops.all_gather_matmul(x, weights, bias=bias, implementation=implementation)
                outs = [torch.empty_like(one) for one in expected]
                with torch.autocast("cpu", torch.bfloat16):  # which leaves operators as they are
                    given = ops.all_gather_matmul(x, weights, bias=bias, out=outs, implementation=implementation)
                assert all(map(torch.equal, outs, expected))
                assert all(out._version > 0 for out in outs)
                assert all(one is out for one, out in zip(given, outs, strict=True))
        down = random_of(30 + rank, 16, 24)
        expected = ops.mlp(x, weights[0], down)
        out = torch.empty_like(expected)
        assert ops.mlp(x, weights[0], down, out=out) is out
        assert torch.equal(out, expected)
    for size in ((0, 16), (4, 0)):
        out = torch.full((2 * size[0], 3), 7.0)
        assert not ops.all_gather_matmul(torch.ones(size), torch.ones(3, size[1]), out=out).any()

    def doubled(x, weight, out):
        return ops.matmul_reduce_scatter(x, weight, out=out) * 2

    x, out = random_of(rank, 12, 16), torch.empty(6, 24)
    compiled = torch.compile(doubled, backend="aot_eager", fullgraph=True)(x, weights[0], out)
    assert torch.equal(compiled, 2 * out)
    assert torch.equal(out, ops.matmul_reduce_scatter(x, weights[0]))


@pytest.mark.long
@pytest.mark.parametrize("most_plans_of_batches", [1, pytest.param(None, marks=pytest.mark.long)])
def test_outputs_that_are_given_are_written_to(interpret, most_plans_of_batches):
    interpret(2, write_to_outputs, most_plans_of_batches, timeout=200.0)


def refuse_outputs():
    x, weight, ran = torch.zeros(4, 8), torch.zeros(8, 8), dict(ops.counts())
    for operator, rows in ((ops.all_gather_matmul, 8), (ops.matmul_reduce_scatter, 2), (ops.matmul_all_reduce, 4)):
        memory = torch.zeros(rows * 16)
        for out, words in (
            (
                torch.zeros(rows, 7),
                rf"out must be \[{rows}, 8\] of torch.float32 on cpu, contiguous, not \[{rows}, 7\]",
            ),
            (torch.zeros(1, rows, 8), rf"out must be \[{rows}, 8\] of torch.float32"),
            (torch.zeros(rows, 8).half(), "out must be .*, not .* of torch.float16"),
            (torch.zeros(rows, 8, device="meta"), "out must be .*, not .* on meta"),
            (memory.view(rows, 16)[:, :8], r"out must be .*, contiguous, not .* with strides \(16, 1\)"),
            (torch.zeros(rows, 8).requires_grad_(), "with out= has no gradients"),
            ([torch.zeros(rows, 8)], "out must be a dense tensor, not|a list of biases, and of outputs"),
        ):
            with pytest.raises(ValueError, match=words):
                operator(x, weight, out=out)
        for needs in ((True, False), (False, True)):
            operands = [one.clone().requires_grad_(need) for one, need in zip((x, weight), needs, strict=True)]
            with pytest.raises(ValueError, match="with out= has no gradients"):
                operator(*operands, out=torch.zeros(rows, 8))
            with torch.no_grad():
                operator(*operands, out=torch.zeros(rows, 8))
        for ran_before in (ops.counts(),):
            x2, weight2 = memory[: 4 * 8].view(4, 8), torch.zeros(8, 8)
            with pytest.raises(ValueError, match="out shares memory with an operand"):
                operator(x2, weight2, out=memory[8 : 8 + 8 * rows].view(rows, 8))
            assert ops.counts() == ran_before
    assert all(what[1] for what in ran)
    with pytest.raises(ValueError, match=r"mlp: out must be \[4, 8\] .*, not \[8, 8\]"):
        ops.mlp(x, weight, weight, out=torch.zeros(8, 8))
    with pytest.raises(ValueError, match="mlp with out= has no gradients"):
        ops.mlp(x, weight.requires_grad_(), weight, out=torch.zeros(4, 8))


def test_outputs_that_cannot_be_written_to_are_refused(interpret):
    interpret(2, refuse_outputs)
