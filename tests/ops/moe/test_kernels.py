# SPDX-License-Identifier: Apache-2.0
"""Kernels of experts in Triton's interpreter, beside loops over tokens in fp64, and compiled for GPUs."""

from itertools import product
from unittest import mock

import pytest
import torch
from tests.differences import largest
from tests.ops.moe import test_exchange
from tests.ops.moe.oracle import draw, make_layer
from tests.tiles.machine_code import compile_to_ptx, find_spills
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck
from torch.nn.functional import silu

from stretto.ops import moe
from stretto.ops.moe import activation, permutation

SEED = 120
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SIZES = [(5, 3, 40), (3, 1, 1), (2, 11, 300), (4, 2, 0), (0, 2, 8)]  # tokens, k, columns
COMPILED = [
    pytest.param(torch.bfloat16, 4096, marks=pytest.mark.long),
    *(
        pytest.param(dtype, columns, marks=pytest.mark.exhaustive)
        for dtype, columns in ((torch.bfloat16, 2880), (torch.float16, 1537), (torch.float32, 4096))
    ),
]


def by_kernels():
    """CPU tensors take the kernels, too; gradients of gradients do not."""

    def suits(*tensors):
        return not permutation.needs_gradients(*tensors)

    return mock.patch.multiple(permutation, suits_kernels=suits), mock.patch.object(
        activation, "suits_kernel", lambda x: x.dim() == 2
    )


def make_rows(seed, tokens, k, columns, dtype):
    """(tokens, rows of which some have no position, positions, weights, is_valid), in this dtype."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randperm(tokens * k + 3, generator=generator)[: tokens * k].view(tokens, k)
    is_valid = torch.rand(tokens, k, generator=generator) < 0.6
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x, rows = draw(seed, tokens, columns).to(dtype), draw(seed + 1, tokens * k + 3, columns).to(dtype)
    return x, rows, positions, draw(seed + 2, tokens, k).to(wide), is_valid


def add_copies(rows, positions, weights, is_valid):
    """The sum of each token's rows in fp64, and that of their sizes."""
    out = torch.zeros(len(positions), rows.shape[1], dtype=torch.float64)
    sizes = torch.zeros_like(out)
    for token, places in enumerate(positions.tolist()):
        for slot, place in enumerate(places):
            if is_valid is None or is_valid[token, slot]:
                factor = 1.0 if weights is None else weights[token, slot].double()
                out[token] += factor * rows[place].double()
                sizes[token] += (factor * rows[place].double()).abs()
    return out, sizes


def compare(found, expected, sizes, dtype):
    """True if a result has one rounding to its dtype, and sums in fp32 (fp64)."""
    assert found.dtype == dtype
    assert found.shape == expected.shape
    exact = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    allowed = expected.abs() * torch.finfo(dtype).eps / 2 * 1.01 + 16 * exact * sizes
    smallest = 2**-24 if dtype == torch.float16 else 0  # below the normal numbers
    assert ((found.double() - expected).abs() <= allowed + smallest).all()


def sum_weigh_and_multiply(cases):
    for (tokens, k, columns), dtype in cases:
        x, rows, positions, weights, is_valid = make_rows(SEED, tokens, k, columns, dtype)
        poisoned = rows.clone()
        poisoned[positions[~is_valid]] = torch.nan  # is not read
        strided = torch.stack((poisoned, poisoned), 2)[:, :, 0]
        for factors, mask in product((None, weights, weights.to(dtype)), (None, is_valid)):
            source = rows if mask is None else strided
            theirs = permutation.sum_copies(source, positions, factors, mask)
            with by_kernels()[0]:
                mine = permutation.sum_copies(source, positions, factors, mask)
            assert torch.equal(mine, theirs)  # in bits
            compare(mine, *add_copies(source, positions, factors, mask), dtype)
        for mask in (None, is_valid):
            source = rows if mask is None else strided
            with by_kernels()[0]:
                mine = permutation.multiply_copies(x, source, positions, mask)
            expected, sizes = (torch.zeros(tokens, k, dtype=torch.float64) for _ in range(2))
            for token, slot in product(range(tokens), range(k)):
                if mask is None or mask[token, slot]:
                    terms = x[token].double() * rows[positions[token, slot]].double()
                    expected[token, slot], sizes[token, slot] = terms.sum(), terms.abs().sum()
            compare(mine, expected, sizes, torch.float64 if dtype == torch.float64 else torch.float32)
        with by_kernels()[0]:
            of_rows, products = permutation.weigh_and_multiply(x, rows, positions, weights)
            assert torch.equal(products, permutation.multiply_copies(x, rows, positions))
        expected = torch.zeros_like(rows)
        for token, slot in product(range(tokens), range(k)):
            expected[positions[token, slot]] = (x[token].to(weights.dtype) * weights[token, slot]).to(dtype)
        assert torch.equal(of_rows, expected)
        number = int(is_valid.sum())
        named = torch.where(is_valid, is_valid.view(-1).cumsum(0).view(tokens, k) - 1, positions)
        for factors, limit in product((None, weights), (number + 2, max(number - 1, 1))):
            call = x, named, factors, is_valid, limit, torch.tensor(number)
            theirs = permutation.spread_tokens(*call)
            with by_kernels()[0]:
                mine = permutation.spread_tokens(*call)
            expected = torch.zeros(limit, columns, dtype=dtype)
            for row, (token, slot) in enumerate(is_valid.nonzero().tolist()[:limit]):
                expected[row] = x[token] if factors is None else (x[token].to(weights.dtype) * weights[token, slot])
            if limit < number:
                expected.fill_(torch.nan)
            for one in (theirs, mine):
                assert one.dtype == dtype
                assert torch.equal(one.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.long
@pytest.mark.parametrize(
    "cases",
    [
        [(SIZES[0], dtype) for dtype in DTYPES] + list(zip(SIZES[1:], DTYPES, strict=True)),
        pytest.param(list(product(SIZES, DTYPES)), marks=pytest.mark.exhaustive),
    ],
    ids=["some", "all"],
)
def test_sums_and_products_of_copies_are_those_of_a_loop_over_tokens(interpret, cases):
    interpret(1, sum_weigh_and_multiply, cases)


def differentiate_twice():
    """Both passes of permute and unpermute by kernels; gradients of gradients by torch's operators."""
    layer = make_layer(SEED, 2, 2, 3)
    positions = moe.permute(layer.x, layer.ids, 3).positions + 1
    leaves = [draw(SEED, 6, 2).requires_grad_(), layer.weights.clone().requires_grad_()]
    x = layer.x[:, :2].clone().requires_grad_()
    gated = draw(SEED, 2, 4).requires_grad_()
    with by_kernels()[0], by_kernels()[1]:
        for check in (gradcheck, torch.autograd.gradgradcheck):
            assert check(lambda x: moe.permute(x, layer.ids, 3).rows, x)
            assert check(lambda rows, weights: moe.unpermute(rows, positions, weights), leaves)
            for one in leaves:
                frozen = [other if other is one else other.detach() for other in leaves]
                assert check(lambda *all: moe.unpermute(all[0], positions, all[1]), frozen)
            assert check(moe.gated_activation, gated)


@pytest.mark.long
def test_gradients_are_those_of_finite_differences(interpret):
    interpret(1, differentiate_twice)


def gate():
    for (tokens, _, inner), dtype in product([*SIZES, (2, 1, 1030)], DTYPES):
        x, grad = draw(SEED, tokens, 2 * inner).to(dtype) * 4, draw(SEED + 1, tokens, inner).to(dtype)
        if inner > 2 and tokens:
            x[0, :3] = torch.tensor([-90.0, 0.0, 90.0])
        x = torch.stack((x, x), 2)[:, :, 0].requires_grad_()
        with by_kernels()[1]:
            out = moe.gated_activation(x, nn.SiLU())
            (of_x,) = torch.autograd.grad(out, x, grad)
        assert out.grad_fn is not None
        wide = x.detach().double().requires_grad_()
        expected = silu(wide[:, :inner]) * wide[:, inner:]
        (right,) = torch.autograd.grad(expected, wide, grad.double())
        ups = wide.detach()[:, inner:].abs()
        compare(out.detach(), expected.detach(), ups + expected.detach().abs(), dtype)
        sizes = torch.cat((grad.double().abs() * ups * 3, right[:, inner:].abs() + grad.double().abs()), 1)
        compare(of_x, right, sizes, dtype)


def test_gated_silu_and_its_gradient_are_rounded_once(interpret):
    interpret(1, gate)


def weigh():
    """The largest error of each result of weighed rows, plain and gated, in units of its rounding, by the kernel."""
    for (tokens, _, inner), dtype, width in product([*SIZES, (2, 1, 1030)], DTYPES, (1, 2)):
        rows, grad = draw(SEED, tokens, width * inner).to(dtype) * 2, draw(SEED + 1, tokens, inner).to(dtype)
        factors = draw(SEED + 2, tokens).to(permutation.sum_dtype(dtype))
        with by_kernels()[1]:
            found = activation.differentiate_weighed(rows, grad, factors)
        assert [one.dtype for one in found] == [dtype, dtype, factors.dtype]
        wide, factor = rows.double().requires_grad_(), factors.double().requires_grad_()
        values = silu(wide[:, :inner]) * wide[:, inner:] if width == 2 and inner else wide
        weighed = values * factor[:, None]
        expected = torch.autograd.grad(weighed, (wide, factor), grad.double())
        given = grad.double().abs()
        sizes = (
            expected[0].abs() + 3 * (given * factors.abs()[:, None]).repeat(1, width) * wide.abs().roll(inner, 1),
            weighed.abs(),
            (given * values.abs()).sum(1),
        )
        for one, right, size in zip(found, (expected[0], weighed, expected[1]), sizes, strict=True):
            assert (
                (one.double() - right).abs() <= 4 * torch.finfo(dtype).eps * size + 1e-7 * (dtype.itemsize == 2)
            ).all()
        plain = activation.differentiate_weighed(rows, grad, factors)  # by torch's operators
        if width == 1:
            assert torch.equal(found.of_rows, plain.of_rows)
            assert torch.equal(found.weighed, plain.weighed)


def test_weighed_rows_are_differentiated_in_one_pass(interpret):
    interpret(1, weigh)


def exchange_by_kernels(max_rows):
    """`find_differences` of an exchange, and how often each operator was called."""
    names = ("sum_on_gpu", "spread_on_gpu", "multiply_on_gpu", "weigh_and_multiply_on_gpu")
    spies = {name: mock.Mock(wraps=getattr(permutation, name)) for name in names}
    case = test_exchange.CASES["as many tokens each"]
    with by_kernels()[0], by_kernels()[1], mock.patch.multiple(permutation, **spies):
        differences = test_exchange.find_differences(case, max_rows)
    return differences, [spies[name].call_count for name in names]


@pytest.mark.parametrize(("max_rows", "calls"), [(None, [10, 4, 1, 0]), (16, [4, 4, 1, 0])])
def test_ranks_exchange_tokens_by_kernels(interpret, max_rows, calls):
    for differences, counts in interpret(2, exchange_by_kernels, max_rows):
        assert largest(differences) < test_exchange.EXACT
        assert counts == calls


def test_kernels_take_cuda_tensors_but_no_gradients_of_gradients():
    with FakeTensorMode():  # which needs no GPU for its CUDA tensors
        x, rows, weights = (torch.empty(size, 4, device="cuda") for size in (3, 12, 3))
        positions = torch.empty(3, 4, dtype=torch.int64, device="cuda")
        suits = permutation.suits_kernels
        assert suits(rows, None, weights)
        assert not suits(rows.cpu(), weights)
        assert not suits(rows.to(torch.complex64))
        assert activation.suits_kernel(x)
        assert not any(map(activation.suits_kernel, (x.cpu(), torch.empty(4, device="cuda"), x.to(torch.complex64))))
        rows.requires_grad_()
        assert not suits(weights, rows)
        with torch.no_grad():
            assert suits(weights, rows)
            results = [
                permutation.sum_copies(rows, positions, weights),
                permutation.spread_tokens(x, positions, weights),
                permutation.multiply_copies(x, rows, positions),
                *permutation.weigh_and_multiply(x, rows.half(), positions, weights),
                moe.gated_activation(rows),
            ]
    assert [list(one.shape) for one in results] == [[3, 4], [12, 4], [3, 4], [12, 4], [3, 4], [12, 2]]
    assert [one.dtype for one in results[3:5]] == [torch.float16, torch.float32]
    assert all(one.is_cuda for one in results)


class Doubled(nn.SiLU):
    def forward(self, x):
        return 2 * super().forward(x)


def test_only_what_is_silu_for_certain_is_taken_for_it():
    from transformers.activations import ACT2FN, SiLUActivation

    assert all(map(activation.is_silu, (silu, nn.SiLU(), SiLUActivation(), ACT2FN["silu"], torch.nn.functional.silu)))
    assert activation.is_silu(activation.find_activation("silu"))
    hooked, replaced = nn.SiLU(), nn.SiLU()
    hooked.register_forward_hook(lambda module, inputs, output: 2 * output)
    replaced.forward = lambda x: 2 * x
    others = Doubled(), nn.SiLU(inplace=True), hooked, replaced, nn.GELU(), torch.tanh, lambda x: silu(x)
    assert not any(map(activation.is_silu, others))


def run_layer(x, ids, weights, gate_up, down):
    sent = moe.dispatch(x, ids, 4, None)
    rows = moe.experts_mlp(sent.rows, sent.offsets, gate_up, down, SILU)
    return moe.combine(rows, sent.handle, weights, None)


SILU = nn.SiLU()


def compile_layer():
    """The operators that are in the graph of a layer and of its backward pass, which give the bits of eager calls."""
    seen = set()

    def record(graph, inputs):
        seen.update(str(node.target).split(".")[1] for node in graph.graph.nodes if "stretto" in str(node.target))
        return graph

    from torch._dynamo.backends.common import aot_autograd

    layer = make_layer(SEED, 5, 2, 4)
    leaves = [one.float().requires_grad_() for one in layer.leaves]
    compiled = torch.compile(run_layer, backend=aot_autograd(fw_compiler=record), fullgraph=True)
    with by_kernels()[0], by_kernels()[1]:
        outs = [run(leaves[0], layer.ids, *leaves[1:]) for run in (run_layer, compiled)]
        grads = [torch.autograd.grad(out.square().sum(), leaves) for out in outs]
    assert torch.equal(*outs)
    assert all(map(torch.equal, *grads))
    return sorted(name for name in seen if "grouped" not in name)


@pytest.mark.long
def test_a_layer_of_one_rank_compiles_with_kernels_in_its_graph(interpret):
    assert interpret(1, compile_layer) == [
        ["experts_mlp", "experts_mlp_gradient", "moe_spread_tokens", "moe_sum_copies", "moe_weigh_and_multiply"]
    ]


def check_operators():
    x, rows, positions, weights, is_valid = make_rows(SEED, 3, 2, 5, torch.float32)
    operators = torch.ops.stretto
    torch.library.opcheck(operators.moe_sum_copies.default, (rows, positions, weights, is_valid))
    torch.library.opcheck(operators.moe_spread_tokens.default, (x, positions, weights, None, 9, None))
    torch.library.opcheck(operators.moe_sort_copies.default, (torch.tensor([[2, 0], [1, 2]]), 2, 3, torch.tensor(1)))
    torch.library.opcheck(operators.moe_multiply_copies.default, (x, rows, positions, None))
    torch.library.opcheck(operators.moe_weigh_and_multiply.default, (x, rows, positions, weights))
    torch.library.opcheck(operators.gated_silu.default, (draw(SEED, 3, 4).requires_grad_(),))
    torch.library.opcheck(operators.gated_silu_gradient.default, (draw(SEED, 3, 4), draw(SEED, 3, 2)))


@pytest.mark.long
def test_torch_finds_nothing_wrong_with_the_operators(interpret):
    interpret(1, check_operators)


@pytest.mark.parametrize("columns", [1, 63, 256, 257, 768, 1408, 2880, 4096, 14336])
def test_blocks_leave_few_lanes_without_work(columns):
    block, warps = permutation.choose_block(columns)
    assert block == 256 * warps
    assert -columns % block < max(columns / 8, 256)


def launches(dtype, columns, k=8):
    """(kernel, arguments, options) as calls launch them."""
    found = []
    rows, wide = torch.zeros(64, columns, dtype=dtype), torch.zeros(8, k)
    positions, is_valid = torch.zeros(8, k, dtype=torch.int64), torch.ones(8, k, dtype=torch.bool)

    def record(kernel, programs, *arguments, **options):
        found.append((kernel, arguments, options))

    with (
        mock.patch.object(permutation, "launch_cached", record),
        mock.patch.object(activation, "launch_cached", record),
    ):
        permutation._run_sum(rows, positions, wide, is_valid)
        permutation._run_sum(rows, positions, None, None)
        permutation._run_spread(rows[:8], positions, wide, is_valid, 64, positions)
        permutation._run_spread(rows[:8], positions, None, None, 64, None)
        permutation._run_multiply(rows, rows, positions, is_valid)
        permutation._run_both(rows, rows, positions, wide)
        activation._run(rows.repeat(1, 2))
        activation._run_gradient(rows.repeat(1, 2), rows)
    return found


@pytest.mark.parametrize(("dtype", "columns"), COMPILED, ids=str)
def test_kernels_spill_nothing_and_move_16_bytes_at_once(dtype, columns, tmp_path):
    found = launches(dtype, columns)
    assert len(found) == 8
    for kernel, arguments, options in found:
        named = {name: value for name, value in options.items() if name.isupper()}
        rest = {name: value for name, value in options.items() if not name.isupper()}
        lines = compile_to_ptx(kernel, arguments, **named, **rest)
        assert find_spills(lines, tmp_path) == 0
        assert columns % 16 or any("ld.global.v4" in line for line in lines)
        is_rounded = kernel.__module__ == permutation.__name__
        assert not (is_rounded and any("fma.rn.f32" in line for line in lines))
        assert not any("atom" in line or "red.global" in line for line in lines)
