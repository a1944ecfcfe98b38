# SPDX-License-Identifier: Apache-2.0
"""The operators of fp8 operands between real processes, whose kernels are interpreted, against fp64."""

import random

import pytest
import torch
import torch.distributed as dist
from tests.ops import operands
from tests.ops.operands import BLOCKS, random_of
from torch.autograd import forward_ad

from stretto import ops
from stretto.ops import choices
from stretto.ops.scaled import align_scales, all_gather_scaled_matmul_gathered

GATHERS = ["copies", "copies, unshifted", "pushes", "wide, pushes", "auto", "library"]

SCATTERS = ["copies", "split", "packets", "wide", "auto", "library"]

REDUCES = ["one shot", "two shots", "wide, two shots", "shared", "copies", "auto", "library"]

CASES = [
    (2, (64, 64, 64), ("rows", "rows"), torch.bfloat16, False),
    (4, (36, 41, 48), ("column", "number"), torch.float32, True),
    (3, (6, 72, 112), ("one", "column"), torch.float16, True),
]
"""(ranks, (rows, n, k), the scales' shapes, dtype, whether there is a bias): whole tiles; odd sizes; few rows, so that
tiles have several ranks'."""

ERRORS = {
    "dtype": "x must be of torch.float8_e4m3fn, not torch.float32",
    "weight's dtype": "weight must be of torch.float8_e4m3fn, not torch.bfloat16",
    "e5m2": "weight must be of torch.float8_e4m3fn, not torch.float8_e5m2",
    "plain": "all_gather_matmul does not support fp8; use the operators with scales: all_gather_scaled_matmul",
    "transposed": "takes a contiguous fp8 weight",
    "k": "differ in k",
    "odd k": "k of fp8 operands must be a multiple of 16, not 24",
    "dims": "takes x [..., k], of two dims or more, not [32]",
    "blocks of scales": "x_scale must be one number, or one for each of 4 rows, not [4, 2]",
    "number of scales": "weight_scale must be one number, or one for each of 6 rows, not [5]",
    "scale's dtype": "x_scale must be torch.float32 on cpu, not [] of torch.bfloat16",
    "bias": "bias must be [6] of torch.bfloat16 on cpu, contiguous, not [6] of torch.float32",
    "out_dtype": "returns torch.bfloat16, torch.float16, torch.float32, not torch.float64",
    "reduce_dtype": "partial sums of torch.bfloat16 travel in torch.bfloat16 or torch.float32, not torch.float16",
    "rows": "2 ranks do not divide x's first dim, 3",
    "gradients": "has no gradients",
    "steps": "k of blocks for fp8 must be 32 or more, not 16",
    "tuned k": "scaled_matmul_all_reduce: k of fp8 operands must be a multiple of 16, not 24",
    "tuned weight": "scaled_matmul_all_reduce takes a contiguous fp8 weight [n, k], not strides (1, 8)",
}


FP8 = torch.float8_e4m3fn

OPERATORS = {
    "gather": ops.all_gather_scaled_matmul,
    "scatter": ops.scaled_matmul_reduce_scatter,
    "reduce": ops.scaled_matmul_all_reduce,
}

PLANS = {
    **operands.PLANS,
    "wide": ops.KernelConfig(blocks=BLOCKS._replace(n=48), exchange="packets"),
    "wide, two shots": ops.KernelConfig(blocks=BLOCKS._replace(n=80), exchange="packets", shots=2),
    "wide, pushes": ops.KernelConfig(blocks=BLOCKS._replace(n=48), transfer="programs", movers=2, piece_bytes=512),
    "split": ops.KernelConfig(blocks=BLOCKS._replace(programs=5), piece_bytes=512),
    "shared": ops.KernelConfig(blocks=BLOCKS._replace(programs=5), exchange="packets"),
}
"""Those of other dtypes, and some whose steps over k are as long as fp8 takes them."""

ROUNDOFF = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def make_scale(rank, rows, kind, seed=0):
    """Far from 1, and another for each rank; of a row each, or one, in one of the shapes that they may have."""
    scale = random_of(rank, rows, seed=seed).abs() * 4.0**rank + 0.01
    return {"rows": scale, "column": scale[:, None], "one": scale[:1], "number": scale[:1].reshape(())}[kind]


def multiply(operator, shape, plan, kinds, dtype, has_bias, seed=0, **options):
    """(whether all numbers are within their bound of fp64's, all bits, whether other calls' are the same, what ran)."""
    rank, world, (m, n, k) = dist.get_rank(), dist.get_world_size(), shape
    xs = [random_of(peer, m, k, seed=seed).to(FP8) for peer in range(world)]
    weights = [random_of(10 + peer, n, k, seed=seed).to(FP8) for peer in range(world)]
    x_scales = [make_scale(peer, m, kinds[0], seed + 1) for peer in range(world)]
    weight_scales = [make_scale(peer, n, kinds[1], seed + 2) for peer in range(world)]
    bias = random_of(20, n, seed=seed).to(dtype) if has_bias else None
    before, own = dict(ops.counts()), (xs[rank], weights[rank], x_scales[rank], weight_scales[rank])
    out, *again = (
        OPERATORS[operator](*own, bias=bias, out_dtype=dtype, implementation=PLANS.get(plan, plan), **options)
        for _ in range(3)
    )
    ran = {what: count - before.get(what, 0) for what, count in ops.counts().items() if count != before.get(what, 0)}
    wholes = [
        (x.double() * x_scale.double().reshape(-1, 1), weight.double() * weight_scale.double().reshape(-1, 1))
        for x, weight, x_scale, weight_scale in zip(xs, weights, x_scales, weight_scales, strict=True)
    ]
    if operator == "gather":
        wholes = [(torch.cat([x for x, _ in wholes]), wholes[rank][1])]
    expected = sum(x @ weight.T for x, weight in wholes)
    size = sum(x.abs() @ weight.abs().T for x, weight in wholes)
    sent = 0.0 if operator == "gather" else sum((x @ weight.T).abs() for x, weight in wholes)
    if operator == "scatter":
        rows = slice(rank * m // world, (rank + 1) * m // world)
        expected, size, sent = expected[rows], size[rows], sent[rows]
    if bias is not None:
        expected, size = expected + bias.double(), size + bias.double().abs()
    bound = ROUNDOFF[dtype] * (expected.abs() + sent) + (k + world + 4) * 2**-23 * size
    is_right = bool(((out.double() - expected).abs() <= 1.01 * bound).all()) and out.shape == expected.shape
    bits = out.float().flatten().tolist() if operator == "reduce" else []
    return is_right, bits, out.dtype == dtype and all(torch.equal(out, one) for one in again), ran


@pytest.mark.long
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("operator", "plan"),
    [
        *(("gather", plan) for plan in GATHERS),
        *(("scatter", plan) for plan in SCATTERS),
        *(("reduce", plan) for plan in REDUCES),
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_products_are_scaled_by_row_and_by_column(interpret, case, operator, plan):
    ranks, shape, *options = case
    found = interpret(ranks, multiply, operator, shape, plan, *options)
    for is_right, bits, is_same, ran in found:
        assert is_right
        assert is_same
        assert bits == found[0][1]
        assert [how for (_, how), count in ran.items() if count] == ["library" if plan == "library" else "kernel"]


def multiply_gradients(plans):
    """Which plans are wrong of gradients in e5m2, which come back gathered."""
    rank, world, wrong = dist.get_rank(), dist.get_world_size(), []
    xs = [random_of(peer, 32, 64).to(torch.float8_e5m2) for peer in range(world)]
    weight, scale = random_of(9 + rank, 48, 64).to(FP8), make_scale(rank, 48, "rows")
    for plan in plans:
        for x_scale, has_one_scale in ((torch.tensor(0.5), True), (make_scale(rank, 32, "rows"), False)):
            product, gathered = all_gather_scaled_matmul_gathered(
                xs[rank], weight, x_scale, scale, has_one_scale=has_one_scale, implementation=PLANS.get(plan, plan)
            )
            scales = x_scale if has_one_scale else torch.cat([make_scale(peer, 32, "rows") for peer in range(world)])
            left = torch.cat(xs).double() * scales.double().reshape(-1, 1)
            expected = left @ (weight.double() * scale.double()[:, None]).T
            is_gathered = torch.equal(gathered.view(torch.uint8), torch.cat([x.view(torch.uint8) for x in xs]))
            if not is_gathered or not (product.double() - expected).norm() < 0.01 * expected.norm():
                wrong.append((plan, has_one_scale))
    return wrong


def test_gradients_in_e5m2_are_multiplied_and_come_back_gathered(interpret):
    assert interpret(2, multiply_gradients, ["library", "copies", "auto"]) == [[], []]


def multiply_random(calls, seed):
    """Random calls by kernels; those that are wrong."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*options):
        return options[int(torch.randint(len(options), (), generator=generator))]

    wrong = []
    for call in range(calls):
        operator = draw(*OPERATORS)
        m, n = (int(torch.randint(1, 70, (), generator=generator)) for _ in range(2))
        shape = m * (dist.get_world_size() if operator == "scatter" else 1), n, 16 * draw(1, 2, 3, 7)
        kinds = draw("rows", "column", "one", "number"), draw("rows", "column", "one", "number")
        dtype, has_bias = draw(*ROUNDOFF), draw(True, False)
        found = multiply(operator, shape, "kernel", kinds, dtype, has_bias, seed + call)
        if not (found[0] and found[2]):
            wrong.append((operator, shape, kinds, dtype, has_bias))
    return wrong


@pytest.mark.parametrize("calls", [5, pytest.param(16, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
@pytest.mark.long
def test_random_calls(interpret, ranks, calls):
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    assert interpret(ranks, multiply_random, calls, seed) == [[]] * ranks


def multiply_misaligned():
    """Operands that begin where TMA takes none."""
    x, weight = (random_of(at, 33, 48).to(FP8) for at in range(2))
    shifted = [torch.cat([one.new_zeros(1), one.flatten()])[1:].view(33, 48) for one in (x, weight)]
    scale = make_scale(1, 33, "rows")
    results = [
        ops.all_gather_scaled_matmul(*operands, scale, scale, implementation="kernel")
        for operands in ((x, weight), shifted)
    ]
    assert all(one.data_ptr() % 16 for one in shifted)
    return torch.equal(*results)


def test_operands_that_tma_refuses_have_the_same_product(interpret):
    assert interpret(2, multiply_misaligned) == [True, True]


def compile_block():
    """(whether a compiled MLP has the eager one's numbers, how often its graph broke)."""
    from torch._dynamo.utils import counters

    up, down = (random_of(at, 32, 32) for at in range(2))
    (up, up_scale), (down, down_scale) = ops.quantize_rows(up), ops.quantize_rows(down)

    def block(x):
        x, scale = ops.quantize_rows(x)
        hidden = torch.relu(ops.all_gather_scaled_matmul(x, up, scale, up_scale))
        hidden, scale = ops.quantize_rows(hidden)
        return ops.scaled_matmul_reduce_scatter(hidden, down, scale, down_scale)

    x = random_of(dist.get_rank(), 8, 32)
    counters.clear()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")(x)
    return torch.equal(compiled, block(x)), sum(counters["graph_break"].values())


@pytest.mark.long
def test_a_compiled_block_is_the_eager_one_without_a_graph_break(interpret):
    assert interpret(2, compile_block) == [(True, 0)] * 2


def differentiate_others():
    """True if a product is the same beside forward-mode derivatives of something else; its own are refused."""
    x, weight = (random_of(at, 8, 32).to(FP8) for at in range(2))
    scale, one = make_scale(1, 8, "rows"), torch.ones(())
    plain = ops.all_gather_scaled_matmul(x, weight, scale, scale)
    with forward_ad.dual_level():
        product = ops.all_gather_scaled_matmul(x, weight, scale, scale) * forward_ad.make_dual(one, one)
        with torch.no_grad(), pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
            ops.all_gather_scaled_matmul(x, weight, forward_ad.make_dual(scale, scale), scale)
        return all(torch.equal(each, plain) for each in forward_ad.unpack_dual(product))


def test_forward_mode_derivatives_are_refused_of_the_product_alone(interpret):
    assert interpret(1, differentiate_others) == [True]


def find_errors():
    """The messages of calls with wrong input, by name."""
    x, weight, one = torch.zeros(4, 32).to(FP8), torch.zeros(6, 32).to(FP8), torch.ones(())
    gather, scatter, reduce = OPERATORS.values()
    calls = {
        "dtype": lambda: gather(x.float(), weight, one, one),
        "weight's dtype": lambda: gather(x, weight.bfloat16(), one, one),
        "e5m2": lambda: gather(x, weight.to(torch.float8_e5m2), one, one),
        "plain": lambda: ops.all_gather_matmul(x, weight),
        "transposed": lambda: reduce(torch.zeros(4, 16).to(FP8), torch.zeros(16, 6).to(FP8).t(), one, one),
        "k": lambda: reduce(x, torch.zeros(6, 16).to(FP8), one, one),
        "odd k": lambda: reduce(torch.zeros(4, 24).to(FP8), torch.zeros(6, 24).to(FP8), one, one),
        "dims": lambda: gather(x[0], weight, one, one),
        "blocks of scales": lambda: gather(x, weight, torch.ones(4, 2), one),
        "number of scales": lambda: gather(x, weight, one, torch.ones(5)),
        "scale's dtype": lambda: gather(x, weight, one.bfloat16(), one),
        "bias": lambda: reduce(x, weight, one, one, bias=torch.ones(6)),
        "out_dtype": lambda: reduce(x, weight, one, one, out_dtype=torch.float64),
        "reduce_dtype": lambda: scatter(x, weight, one, one, reduce_dtype=torch.float16),
        "rows": lambda: scatter(x[:3], weight, one, one),
        "gradients": lambda: gather(x, weight, torch.ones((), requires_grad=True), one),
        "steps": lambda: gather(x, weight, one, one, implementation=PLANS["odd tiles"]),
        "tuned k": lambda: ops.tune("matmul_all_reduce", 8, 8, 24, dtype=FP8, device="cpu"),
        "tuned weight": lambda: ops.tune("matmul_all_reduce", 8, 8, 32, dtype=FP8, device="cpu", transposed=True),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            messages[name] = str(error)
    return messages


def test_wrong_input_is_refused_with_its_name(interpret):
    for messages in interpret(2, find_errors):
        assert {name: message for name, message in messages.items() if ERRORS[name] not in message} == {}
        assert set(messages) == set(ERRORS)


def find_empty():
    """Return what products without rows, columns or terms are."""
    one = torch.ones(())

    def make(*shape):
        return torch.zeros(*shape).to(FP8)

    bias = torch.arange(3.0).bfloat16()
    return [
        ops.all_gather_scaled_matmul(make(0, 32), make(3, 32), torch.ones(0, 1), one, bias=bias).shape,
        ops.scaled_matmul_all_reduce(make(2, 0), make(3, 0), one, one, bias=bias).tolist(),
        ops.scaled_matmul_reduce_scatter(make(4, 32), make(0, 32), one, one).shape,
    ]


def test_products_without_numbers_are_empty_or_the_bias(interpret):
    for shapes in interpret(2, find_empty):
        assert shapes == [(0, 3), [[0.0, 1.0, 2.0]] * 2, (2, 0)]


def multiply_by_far_scales(path):
    """True if products are the same by scales that lie so far apart that 32 bits do not count the numbers between."""
    x, weight = (random_of(at, 3, 32).to(FP8) for at in range(2))
    near = make_scale(0, 3, "rows")
    # A file without blocks for what was never written.
    far = torch.from_file(path, shared=True, size=(1 << 31) + 1, dtype=torch.float32)[:: 1 << 30]
    far.copy_(near)
    return [
        torch.equal(operator(x, weight, far, far, implementation="kernel"), operator(x, weight, near, near))
        for operator in OPERATORS.values()
    ]


def test_scales_that_are_gigabytes_apart_are_found(interpret, tmp_path):
    assert interpret(1, multiply_by_far_scales, str(tmp_path / "scales")) == [[True] * 3]


def _tune_gather():
    measured = ops.tune("all_gather_matmul", 16, 32, 32, dtype=FP8, device="cpu")
    x, weight, one = torch.zeros(8, 32).to(FP8), torch.zeros(32, 32).to(FP8), torch.ones(())
    call = choices.describe_problem("all_gather_matmul", 16, x, weight, dist.group.WORLD.group_name)
    plan = choices.choose_config(call, x, weight, dist.group.WORLD.group_name, "auto")
    ops.all_gather_scaled_matmul(x, weight, one, one)
    return len(measured), measured[plan] == min(measured.values())


def tune_gather(folder):
    """(how many plans were measured, whether a call by itself takes the fastest); folder: of the times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRETTO_CACHE", folder)
        return _tune_gather()


def test_times_are_measured_and_the_fastest_plan_is_taken(interpret, tmp_path):
    for count, is_fastest in interpret(2, tune_gather, str(tmp_path)):
        assert count > 2
        assert is_fastest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_quantized_by_their_largest_number(dtype):
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[1] *= 1e30
    x[2] = 0
    x[3] *= 1e-30
    quantized, scale = ops.quantize_rows(x)
    assert quantized.dtype == torch.float8_e4m3fn
    assert scale.dtype == torch.float32
    assert quantized.float().abs().amax(1).tolist() == [448, 448, 0, 448, 448]
    # Three bits of mantissa: within a sixteenth, or half of the smallest step.
    error = (quantized.double() * scale.double()[:, None] - x.double()).abs()
    assert (error <= torch.maximum(x.double().abs() / 16, scale.double()[:, None] * 2**-10)).all()


def test_a_transposed_matrix_is_quantized_into_rows_as_operators_take_them():
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(0)).t()
    for quantized, expected in zip(ops.quantize_rows(x), ops.quantize_rows(x.contiguous()), strict=True):
        assert quantized.is_contiguous()
        assert torch.equal(quantized.float(), expected.float())


def test_tensors_without_rows_or_of_integers_or_fp8_are_not_quantized():
    for x in (torch.zeros(3), torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, 4).to(torch.float8_e4m3fn)):
        with pytest.raises(ValueError, match="quantize_rows takes"):
            ops.quantize_rows(x)
    assert ops.quantize_rows(torch.zeros(3, 0))[0].shape == (3, 0)


def test_scales_for_a_library_begin_at_a_multiple_of_16_bytes() -> None:
    scales = torch.arange(1.0, 9.0)
    for given in (scales, scales[1:2], scales[3:], scales[1:2].expand(5), scales[::2]):
        found = align_scales(given)
        assert torch.equal(found, given)
        assert found.is_contiguous()
        assert not found.data_ptr() % 16
    assert align_scales(scales[4:]).data_ptr() == scales[4:].data_ptr(), "those that are aligned are not copied"
