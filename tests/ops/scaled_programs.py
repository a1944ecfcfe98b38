# SPDX-License-Identifier: Apache-2.0
"""What ranks run of fp8 operands, with interpreted kernels. Only they import this: see conftest."""

import pytest
import torch
import torch.distributed as dist
from tests.ops import programs
from tests.ops.programs import BLOCKS, random_of
from torch.autograd import forward_ad

from stretto import ops
from stretto.ops import dispatch

FP8 = torch.float8_e4m3fn
OPERATORS = {
    "gather": ops.all_gather_scaled_matmul,
    "scatter": ops.scaled_matmul_reduce_scatter,
    "reduce": ops.scaled_matmul_all_reduce,
}
COUNTED = {"gather": "all_gather_matmul", "scatter": "matmul_reduce_scatter", "reduce": "matmul_all_reduce"}
PLANS = {
    **programs.PLANS,
    "wide": ops.KernelConfig(blocks=BLOCKS._replace(n=48), exchange="packets"),
    "wide, two shots": ops.KernelConfig(blocks=BLOCKS._replace(n=80), exchange="packets", shots=2),
    "wide, pushes": ops.KernelConfig(blocks=BLOCKS._replace(n=48), transfer="programs", movers=2, piece_bytes=512),
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


def multiply_by_far_scales(path):
    """Whether products are the same by scales that lie so far apart that 32 bits do not count the numbers between."""
    x, weight = (random_of(at, 3, 32).to(FP8) for at in range(2))
    near = make_scale(0, 3, "rows")
    # A file without blocks for what was never written.
    far = torch.from_file(path, shared=True, size=(1 << 31) + 1, dtype=torch.float32)[:: 1 << 30]
    far.copy_(near)
    return [
        torch.equal(operator(x, weight, far, far, implementation="kernel"), operator(x, weight, near, near))
        for operator in OPERATORS.values()
    ]


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


def differentiate_others():
    """Whether a product is the same beside forward-mode derivatives of something else; its own are refused."""
    x, weight = (random_of(at, 8, 32).to(FP8) for at in range(2))
    scale, one = make_scale(1, 8, "rows"), torch.ones(())
    plain = ops.all_gather_scaled_matmul(x, weight, scale, scale)
    with forward_ad.dual_level():
        product = ops.all_gather_scaled_matmul(x, weight, scale, scale) * forward_ad.make_dual(one, one)
        with torch.no_grad(), pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
            ops.all_gather_scaled_matmul(x, weight, forward_ad.make_dual(scale, scale), scale)
        return all(torch.equal(each, plain) for each in forward_ad.unpack_dual(product))


def find_errors():
    """The messages of calls with wrong input, by name."""
    x, weight, one = torch.zeros(4, 32).to(FP8), torch.zeros(6, 32).to(FP8), torch.ones(())
    gather, scatter, reduce = OPERATORS.values()
    calls = {
        "dtype": lambda: gather(x.float(), weight, one, one),
        "weight's dtype": lambda: gather(x, weight.bfloat16(), one, one),
        "e5m2": lambda: gather(x.to(torch.float8_e5m2), weight, one, one),
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


def find_empty():
    """What products without rows, columns or terms are."""
    one = torch.ones(())

    def make(*shape):
        return torch.zeros(*shape).to(FP8)

    bias = torch.arange(3.0).bfloat16()
    return [
        ops.all_gather_scaled_matmul(make(0, 32), make(3, 32), torch.ones(0, 1), one, bias=bias).shape,
        ops.scaled_matmul_all_reduce(make(2, 0), make(3, 0), one, one, bias=bias).tolist(),
        ops.scaled_matmul_reduce_scatter(make(4, 32), make(0, 32), one, one).shape,
    ]


def tune_gather(folder):
    """(how many plans were measured, whether a call by itself takes the fastest); folder: of the times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRETTO_CACHE", folder)
        return _tune_gather()


def _tune_gather():
    measured = ops.tune("all_gather_matmul", 16, 32, 32, dtype=FP8, device="cpu")
    x, weight, one = torch.zeros(8, 32).to(FP8), torch.zeros(32, 32).to(FP8), torch.ones(())
    call = dispatch.describe_problem("all_gather_matmul", 16, x, weight, dist.group.WORLD.group_name)
    plan = dispatch.choose_config(call, x, weight, dist.group.WORLD.group_name, "auto")
    ops.all_gather_scaled_matmul(x, weight, one, one)
    return len(measured), measured[plan] == min(measured.values())
