# SPDX-License-Identifier: Apache-2.0
"""What ranks run whose kernels are interpreted. Only they import this: see conftest."""

import importlib
import json
import os
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import triton.language as tl
from torch.distributed.distributed_c10d import _get_process_group_store

from stretto import ops, tiles
from stretto.bench.interleaved import Timed
from stretto.ops import dispatch, workspace
from stretto.ops import matmul_reduce_scatter_copies as copies_module
from stretto.ops.gemm import config, defaults, stream_k, tile
from stretto.tuning import TuningStore

# As attributes of the package these are the functions.
gather_module = importlib.import_module("stretto.ops.all_gather_matmul")
scatter_module = importlib.import_module("stretto.ops.matmul_reduce_scatter")

assert tiles.INTERPRETED.value, "tests.ops.programs is for processes that interpret their kernels"


def random_of(rank, *shape, dtype=torch.float32, seed=0):
    """The same numbers on whichever rank asks for them."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * seed + rank)).to(dtype)


def lie(weight, by_columns):
    """The same weight, or one that is the transpose of a contiguous tensor."""
    return weight.t().contiguous().t() if by_columns else weight


def error(result, expected):
    """The largest error, relative to the largest number."""
    return ((result.double() - expected).abs().max() / expected.abs().max()).item()


BLOCKS = ops.Blocks(32, 32, 32, 2, 4, 2, 3)
PLANS = {
    "copies": ops.KernelConfig(blocks=BLOCKS, transfer="copies", piece_bytes=512),
    "pushes": ops.KernelConfig(blocks=BLOCKS, transfer="programs", movers=2, piece_bytes=512),
    "pulls": ops.KernelConfig(blocks=BLOCKS, transfer="programs", direction="pull", movers=2, piece_bytes=512),
    "unshifted": ops.KernelConfig(blocks=BLOCKS, transfer="programs", movers=3, is_shifted=False),
    "tiles": ops.KernelConfig(blocks=BLOCKS, transfer="programs"),
    "tiles, unshifted": ops.KernelConfig(blocks=BLOCKS, transfer="programs", is_shifted=False),
    "copies, unshifted": ops.KernelConfig(blocks=BLOCKS, transfer="copies", piece_bytes=512, is_shifted=False),
    "packets": ops.KernelConfig(blocks=BLOCKS, exchange="packets"),
    "one shot": ops.KernelConfig(blocks=BLOCKS, exchange="packets", shots=1),
    "two shots": ops.KernelConfig(blocks=BLOCKS, exchange="packets", shots=2),
    "odd tiles": ops.KernelConfig(blocks=BLOCKS._replace(n=48, k=16), exchange="packets"),
    "odd tiles, two shots": ops.KernelConfig(blocks=BLOCKS._replace(n=80), exchange="packets", shots=2),
    "odd tiles, pushes": ops.KernelConfig(blocks=BLOCKS._replace(n=48), transfer="programs", movers=2, piece_bytes=512),
    "odd tiles, copies": ops.KernelConfig(blocks=BLOCKS._replace(n=48), piece_bytes=512),
    "shared steps": ops.KernelConfig(blocks=BLOCKS._replace(k=16, programs=5), exchange="packets"),
}
"""Small pieces and tiles, so that there are several, of each way to do a call."""


def find_plan(name):
    return PLANS.get(name, name)


def gather_and_multiply(shape, dtype, by_columns, has_bias, plan):
    """(error of the product, whether the gathered x and other calls' products are right to the last bit, what ran)."""
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
    is_same = all(torch.equal(out, one) for one in again)
    return error(out, expected), torch.equal(gathered, torch.cat(shards)), is_same, ran


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
    return error(out, expected), all(torch.equal(out, one) for one in again), ran


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
    return error(out, expected), out.float().flatten().tolist(), all(torch.equal(out, one) for one in again), ran


def share(what, shape, plan):
    """(how many shares there are, less tiles, at most; what `what` returns)."""
    more, deal = [], stream_k.split_last_wave.__wrapped__

    def see(count, *arguments):
        dealt = deal(count, *arguments)
        more.append(dealt[1] - count)
        return dealt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_k, "_FIX_UP_STEPS", 1)  # so that it is worth it for few steps
        patch.setattr(stream_k, "split_last_wave", see)
        patch.setattr(scatter_module, "split_last_wave", see)
        result = globals()[what](shape, torch.bfloat16, False, True, plan)
    return max(more), *result


def trace():
    """The operators in what torch.jit.trace sees of two calls."""
    x, up, down = torch.randn(4, 8), torch.randn(6, 8), torch.randn(8, 6)

    def layer(x):
        return ops.matmul_reduce_scatter(ops.all_gather_matmul(x, up), down)

    traced = torch.jit.trace(layer, (x,))
    assert torch.equal(traced(x), layer(x))
    return [node.kind() for node in traced.graph.nodes() if node.kind().startswith("stretto::")]


def random_operands(m, n, k, dtype, has_bias):
    """All ranks' x and weight, and this one's bias."""
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs = [random_of(peer, m, k, dtype=dtype) for peer in range(world)]
    weights = [random_of(10 + peer, n, k, dtype=dtype) for peer in range(world)]
    return inputs, weights, random_of(20 + rank, n, dtype=dtype) if has_bias else None


def add_in_order(operator, plan):
    """Of 4 ranks: fp32 sums of 2^24, 1, -2^24 and 1, which depend on their order."""
    weight = torch.tensor([2.0**24, 1.0, -(2.0**24), 1.0])[dist.get_rank()].repeat(3, 1)
    return getattr(ops, operator)(torch.ones(8, 1), weight, implementation=find_plan(plan)).unique().tolist()


def cancel(reduce_dtype, plan):
    """257 - 256 by two ranks in bf16, of which 257 is no number; (the sum, and of what kind it is)."""
    weight = torch.tensor([[256.0, 1.0], [-256.0, 0.0]][dist.get_rank()]).repeat(3, 1).bfloat16()
    x, how = torch.ones(4, 2).bfloat16(), find_plan(plan)
    out = ops.matmul_reduce_scatter(x, weight, reduce_dtype=reduce_dtype, implementation=how)
    return out.unique().tolist(), out.dtype


def scatter_in_halves(transfer):
    """Whether sums of small whole numbers are right where tiles are stored by pointers half by half, as large ones."""
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = [(random_of(peer, 8, 67, dtype=torch.float32), random_of(9 + peer, 300, 67)) for peer in range(world)]
    pairs = [tuple((4 * one).round().bfloat16() for one in pair) for pair in pairs]
    plan = ops.KernelConfig(blocks=ops.Blocks(16, 64, 32, 1, 4, 3, 2), transfer=transfer)
    with mock.patch.object(tile, "_CONVERTED_BYTES", tl.constexpr(1 << 10)):
        out = ops.matmul_reduce_scatter(*pairs[rank], reduce_dtype=torch.float32, implementation=plan)
    expected = sum(x.float() @ weight.float().T for x, weight in pairs).chunk(world)[rank]
    return torch.equal(out, expected.bfloat16())


def make_layer(shape, rows_of_x, dtype, needs):
    """All ranks' x, weight and bias in fp64 with gradients, for the unfused layer, and this rank's own in `dtype`."""
    rank, world, (_, n, k) = dist.get_rank(), dist.get_world_size(), shape
    sizes = {"x": (rows_of_x, k), "weight": (n, k), "bias": (n,)}
    every, own = {}, {}
    for place, (name, size) in enumerate(sizes.items()):
        values = [random_of(10 * place + peer, *size, dtype=dtype) for peer in range(world)]
        every[name] = [value.double().requires_grad_() for value in values]
        own[name] = values[rank].clone().requires_grad_(name in needs)
    return every, own


def compare_gradients(every, own, needs):
    """The error of each gradient that is needed; the others must be None."""
    rank = dist.get_rank()
    assert all(own[name].grad is None for name in own if name not in needs)
    return {name: error(own[name].grad, every[name][rank].grad) for name in needs}


def differentiate_gather(shape, dtype, needs, saves_gathered, uses_gathered):
    """Errors of the gradients of all-gather + GEMM; uses_gathered: the loss takes the gathered x too."""
    rank, world, (rows, n, k) = dist.get_rank(), dist.get_world_size(), shape
    every, own = make_layer(shape, rows, dtype, needs)
    factors = [random_of(40 + peer, rows * world, n, dtype=dtype) for peer in range(world)]
    others = [random_of(50 + peer, rows * world, k, dtype=dtype) for peer in range(world)]
    x, weight, bias = own.values()
    if uses_gathered:
        out, gathered = ops.all_gather_matmul_gathered(x, weight, bias=bias)
        torch.autograd.backward([out, gathered], [factors[rank], others[rank]])
    else:
        ops.all_gather_matmul(x, weight, bias=bias, saves_gathered=saves_gathered).backward(factors[rank])
    whole = torch.cat(every["x"])
    for weight, bias, factor, other in zip(every["weight"], every["bias"], factors, others, strict=True):
        loss = ((whole @ weight.T + bias) * factor.double()).sum()
        if uses_gathered:
            loss = loss + (whole * other.double()).sum()
        loss.backward(retain_graph=True)
    return compare_gradients(every, own, needs)


def differentiate_all_reduce(shape, dtype, needs):
    """Errors of the gradients of GEMM + all-reduce."""
    rank, world, (rows, n, _) = dist.get_rank(), dist.get_world_size(), shape
    every, own = make_layer(shape, rows, dtype, needs)
    factors = [random_of(40 + peer, rows, n, dtype=dtype) for peer in range(world)]
    x, weight, bias = own.values()
    ops.matmul_all_reduce(x, weight, bias=bias).backward(factors[rank])
    total = sum(x @ weight.T for x, weight in zip(every["x"], every["weight"], strict=True))
    for bias, factor in zip(every["bias"], factors, strict=True):
        ((total + bias) * factor.double()).sum().backward(retain_graph=True)
    return compare_gradients(every, own, needs)


def differentiate_scatter(shape, dtype, needs):
    """Errors of the gradients of GEMM + reduce-scatter."""
    rank, world, (rows, n, _) = dist.get_rank(), dist.get_world_size(), shape
    every, own = make_layer(shape, rows * world, dtype, needs)
    factors = [random_of(40 + peer, rows, n, dtype=dtype) for peer in range(world)]
    x, weight, bias = own.values()
    ops.matmul_reduce_scatter(x, weight, bias=bias).backward(factors[rank])
    total = sum(x @ weight.T for x, weight in zip(every["x"], every["weight"], strict=True))
    for part, bias, factor in zip(total.split(rows), every["bias"], factors, strict=True):
        ((part + bias) * factor.double()).sum().backward(retain_graph=True)
    return compare_gradients(every, own, needs)


def poison(group):
    """Fill this rank's workspaces with NaN, between two barriers; those of packets must be empty."""
    dist.barrier(group)
    for cache in workspace._caches.values():
        for (purpose, size, _), found in cache.workspaces.items():
            memory = found.channel.tensor((found.slots * size,), torch.uint8)
            if purpose == "packets":
                assert not memory.any(), "packets were left"
            else:
                memory.fill_(0xFF)
    dist.barrier(group)


def call_in_many_shapes(calls, seed):
    """The operators in turn, in subgroups as well, past stragglers; what is wrong, of numbers that are exact."""
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([first, (first + 1) % world]) for first in range(0, world - 1, 2)]
    generator = torch.Generator().manual_seed(seed)
    wrong = []
    for call in range(calls):
        rows, n, k = (int(size) for size in torch.randint(1, 70, (3,), generator=generator))
        gathers, scatters, reduces = (
            names[int(torch.randint(len(names), (1,), generator=generator))]
            for names in (
                ("copies", "pushes", "pulls"),
                ("tiles", "packets"),
                ("one shot", "two shots"),
            )
        )
        group = pairs[rank // 2] if call % 2 and rank // 2 < len(pairs) else None
        if call % 2 and group is None:
            continue
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        place = members.index(rank)
        xs = [random_of(peer, rows, k, seed=call).round() for peer in members]
        inputs = [random_of(peer, rows * len(members), k, seed=call).round() for peer in members]
        weights = [random_of(10 + peer, n, k, seed=call).round() for peer in members]
        poison(group)
        time.sleep(0.02 * ((call + rank) % world))
        out = ops.all_gather_matmul(xs[place], weights[place], group, implementation=PLANS[gathers])
        if not torch.equal(out, torch.cat(xs) @ weights[place].T):
            wrong.append((gathers, call, rows, n, k))
        summed = sum(x @ weight.T for x, weight in zip(inputs, weights, strict=True))
        out = ops.matmul_reduce_scatter(inputs[place], weights[place], group, implementation=PLANS[scatters])
        if not torch.equal(out, summed[place * rows : (place + 1) * rows]):
            wrong.append((scatters, call, rows, n, k))
        poison(group)
        out = ops.matmul_all_reduce(inputs[place], weights[place], group, implementation=PLANS[reduces])
        if not torch.equal(out, summed):
            wrong.append((reduces, call, rows, n, k))
    return wrong


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


def ask_wrongly():
    x, weight = torch.zeros(4, 8), torch.zeros(6, 8)
    for operator in (ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce):
        name = operator.__name__
        for arguments, words in (
            ((x[None], weight), f"{name} takes x .* of two dims each, not .1, 4, 8. and .6, 8."),
            ((x, weight[:, :7]), r"x \[4, 8\] and weight \[6, 7\] differ in k"),
            ((x, weight.bfloat16()), "x is torch.float32 and weight torch.bfloat16"),
            ((x.double(), weight.double()), "takes torch.bfloat16, torch.float16, torch.float32, not torch.float64"),
            ((x.double(), weight.double()), 'float64: convert x, weight and bias, or give implementation="library"'),
            ((x, weight.to("meta")), "x is on cpu and weight on meta"),
            ((torch.zeros(8, 4).t(), weight), r"takes a contiguous x, not strides \(1, 4\): call contiguous\(\)"),
            ((x, torch.zeros(6, 16)[:, ::2]), r"takes a contiguous weight, or the transpose of one, not strides \(16"),
        ):
            with pytest.raises(ValueError, match=words):
                operator(*arguments)
        with pytest.raises(ValueError, match=r"a bias for weight \[6, 8\] is \[6\], not \[5\]"):
            operator(x, weight, bias=torch.zeros(5))
    with pytest.raises(ValueError, match="2 ranks do not divide x's 3 rows: 4 rows will do"):
        ops.matmul_reduce_scatter(x[:3], weight)
    with pytest.raises(ValueError, match=r"travel in torch.float32 or torch.float32, not torch.bfloat16"):
        ops.matmul_reduce_scatter(x, weight, reduce_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"an mlp's activation is one of gelu, .*, not 'tanh'"):
        ops.mlp(x, weight, weight.t(), activation="tanh")
    with pytest.raises(ValueError, match=r"an mlp's gate is of up's shape, \[6, 8\], not \[4, 8\]"):
        ops.mlp(x, weight, weight.t(), gate=x)
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match=r"this process \(rank 1\) is not in the group"):
            ops.all_gather_matmul(x, weight, group)


def check_registration(shape):
    """torch's own checks: schema, fake implementation, autograd and ahead-of-time dispatch."""
    rows, n, k = shape
    name = dist.group.WORLD.group_name
    x, weight, bias = (random_of(0, *size).requires_grad_() for size in ((rows * 2, k), (n, k), (n,)))
    for given in (bias, None):
        arguments = (x, weight, given, name)
        torch.library.opcheck(torch.ops.stretto.all_gather_matmul.default, (*arguments, "auto"))
        torch.library.opcheck(torch.ops.stretto.all_gather_matmul_gathered.default, (*arguments, "kernel"))
        torch.library.opcheck(torch.ops.stretto.matmul_reduce_scatter.default, (*arguments, None, "kernel"))
        torch.library.opcheck(torch.ops.stretto.matmul_all_reduce.default, (*arguments, "kernel"))


def differentiate_an_mlp(shape, activation, is_gated, needs_gradients):
    """Errors of an MLP's output and of all gradients that it has, against the whole MLP in fp64."""
    rank, world, (rows, hidden, k) = dist.get_rank(), dist.get_world_size(), shape
    act = importlib.import_module("stretto.ops.mlp").ACTIVATIONS[activation]
    sizes = {"x": (rows, k), "up": (hidden, k), "gate": (hidden, k), "down": (k, hidden)}
    sizes |= {"up_bias": (hidden,), "gate_bias": (hidden,), "down_bias": (k,)}
    every = {
        name: [random_of(10 * place + peer, *size).double().requires_grad_() for peer in range(world)]
        for place, (name, size) in enumerate(sizes.items())
    }
    own = {name: values[rank].detach().float().requires_grad_(needs_gradients) for name, values in every.items()}
    if not is_gated:
        own["gate"] = own["gate_bias"] = None
    out = ops.mlp(**own, activation=activation)
    whole, total = torch.cat(every["x"]), 0.0
    for peer in range(world):
        part = whole @ every["up"][peer].T + every["up_bias"][peer]
        gate = whole @ every["gate"][peer].T + every["gate_bias"][peer]
        total = total + (act(gate) * part if is_gated else act(part)) @ every["down"][peer].T
    parts = [part + bias for part, bias in zip(total.split(rows), every["down_bias"], strict=True)]
    errors = {"out": error(out.detach(), parts[rank].detach())}
    if needs_gradients:
        out.square().sum().backward()
        sum(part.square().sum() for part in parts).backward()
        for name, tensor in own.items():
            if tensor is not None:
                errors[name] = error(tensor.grad, every[name][rank].grad)
    return errors


def compile_an_mlp(shape):
    """A layer of both operators, traced whole by torch.compile, has the bits of the eager one, forward and backward."""
    rank, (rows, n, k) = dist.get_rank(), shape
    tensors = [random_of(10 * place + rank, *size) for place, size in enumerate(((rows, k), (n, k), (k, n)))]

    group = dist.group.WORLD

    def mlp(x, up, down):
        return ops.matmul_reduce_scatter(torch.relu(ops.all_gather_matmul(x, up, group)), down, group)

    outcomes = []
    for layer in (mlp, torch.compile(mlp, backend="aot_eager", fullgraph=True)):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        out = layer(*leaves)
        out.square().sum().backward()
        outcomes.append([out, *(leaf.grad for leaf in leaves)])
    return [torch.equal(eager, compiled) for eager, compiled in zip(*outcomes, strict=True)]


def tune_and_choose(folder):
    """Plans' times, and what auto takes: there, at nearly as many rows, at many more, and for another weight."""
    os.environ["STRETTO_CACHE"] = folder
    try:
        measured = ops.tune("all_gather_matmul", 48, 40, 32, dtype=torch.float32, device="cpu")
        name = dist.group.WORLD.group_name

        def chosen(rows, n):
            x, weight = torch.zeros(rows, 32), torch.zeros(n, 32)
            call = dispatch.describe_problem("all_gather_matmul", 2 * rows, x, weight, name)
            plan = dispatch.choose_config(call, x, weight, name, "auto")
            default, _ = defaults.default_config(call, dispatch.find_machine(x, weight))
            return plan.encode() if plan in measured and (rows, n) in ((24, 40), (30, 40)) else plan == default

        texts = {plan.encode(): seconds for plan, seconds in measured.items()}
        far, other = ("default" if chosen(*shape) else "measured" for shape in ((96, 40), (24, 48)))
        return texts, chosen(24, 40), chosen(30, 40), far, other
    finally:
        del os.environ["STRETTO_CACHE"]


def choose_by_different_stores(folders):
    """What runs where rank 0's store says the library, and the other's says nothing."""
    os.environ["STRETTO_CACHE"] = folders[dist.get_rank()]
    try:
        x, weight = torch.ones(8, 16), torch.ones(24, 16)
        name = dist.group.WORLD.group_name
        call = dispatch.describe_problem("all_gather_matmul", 16, x, weight, name)
        if dist.get_rank() == 0:
            keys = {dispatch.time_key(call, config.LIBRARY): [1e-6], "ops nonsense by nothing": [1.0]}
            TuningStore().add(dispatch.machine_name(x.device), keys)
        ops.all_gather_matmul(x, weight)
        return dispatch.choose_config(call, x, weight, name, "auto").encode()
    finally:
        del os.environ["STRETTO_CACHE"]


def bench_dryly(folder, ablations, dtype="bf16"):
    """The bench of operators in tiny shapes, its timing left out; rank 0's rows."""
    module = importlib.import_module(
        "stretto.bench.operators.ablations" if ablations else "stretto.bench.operators.run"
    )
    shapes = importlib.import_module("stretto.bench.operators.settings")

    def time_nothing(runs, size, **options):
        for name, run in runs.items():
            if name != "async_tp":
                run()
        return {name: Timed(1e-3 * (1 + place), 1e-5) for place, name in enumerate(runs)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "time_interleaved", time_nothing)
        patch.setattr(shapes, "CASES", {"flux": (64, 32)})
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        setting = shapes.OperatorsSetting(cases=("flux",), ms=(16,), implementation="kernel", dtype=dtype)
        module.measure_all(dist.get_world_size(), Path(folder), setting)
    dist.barrier()
    name = "operator-ablations" if ablations else setting.file_name
    return json.loads((Path(folder) / f"{name}.json").read_text())["rows"]


def disagree(debugs):
    """What each rank is told where rank 1 calls with another shape, or, if it `debugs`, in another order."""
    rank = dist.get_rank()
    weight, calls = random_of(0, 16, 16), [random_of(1, rows, 16) for rows in (4, 8)]
    if debugs:
        for x in calls:
            ops.all_gather_matmul(x, weight)
    else:
        calls = [random_of(1, 5 if rank == 1 else 6, 16)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRETTO_DEBUG", str(int(debugs)))
        with pytest.raises(ValueError, match="same shapes") as error:
            ops.all_gather_matmul(calls[-1 if rank == 1 else 0], weight)
    after = ops.all_gather_matmul(calls[0] if debugs else calls[0][:4], weight)
    store = _get_process_group_store(dist.group.WORLD)
    left = sum(store.check([f"stretto ops cpu {number} {rank}"]) for number in range(1, 20))
    return str(error.value), list(after.shape), left


def fall_behind(name, plan, calls):
    """Rank 1 launches its kernels late, when others are in their next call; the calls whose product is wrong."""
    rank, world, wrong = dist.get_rank(), dist.get_world_size(), []
    module, kernel = {
        "gather": (gather_module, f"all_gather_gemm_by_{'copies' if plan == 'copies' else 'programs'}"),
        "scatter": (copies_module, "add_tiles") if plan == "copies" else (scatter_module, "gemm_reduce_scatter"),
    }[name]
    launch = getattr(module, kernel)

    class Late:
        def __getitem__(self, grid):
            time.sleep(0.3)
            return launch[grid]

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(module, kernel, Late())
        for call in range(calls):
            shards = [random_of(100 * call + peer, 32, 32) for peer in range(world)]
            weight = random_of(call, 32, 32)
            if name == "gather":
                out = ops.all_gather_matmul(shards[rank], weight, implementation=find_plan(plan))
                expected = torch.cat(shards).double() @ weight.double().T
            else:
                whole = torch.cat([shards[rank]] * world)
                out = ops.matmul_reduce_scatter(whole, weight, implementation=find_plan(plan))
                expected = sum(shard.double() for shard in shards) @ weight.double().T
            if not error(out, expected) < 1e-5:
                wrong.append(call)
    return wrong


class _Unlaunchable:
    """A kernel that takes more than the GPU has, which its launch says."""

    def __getitem__(self, grid):
        raise RuntimeError("out of resources")


def call_after_a_failed_launch(operator, plan):
    """Whether a call is what it was after one whose kernel could be launched on no rank."""
    module, kernel = {
        ("all_gather_matmul", "copies"): (gather_module, "all_gather_gemm_by_copies"),
        ("all_gather_matmul", "pushes"): (gather_module, "all_gather_gemm_by_programs"),
        ("matmul_reduce_scatter", "copies"): (copies_module, "multiply_tiles"),
        ("matmul_reduce_scatter", "tiles"): (scatter_module, "gemm_reduce_scatter"),
    }[operator, plan]
    rank, call = dist.get_rank(), getattr(ops, operator)
    x, weight = random_of(rank, 40, 32), random_of(10 + rank, 24, 32)
    before = call(x, weight, implementation=find_plan(plan))
    with mock.patch.object(module, kernel, _Unlaunchable()), pytest.raises(RuntimeError, match="out of resources"):
        call(x, weight, implementation=find_plan(plan))
    return torch.equal(before, call(x, weight, implementation=find_plan(plan)))


def list_modules_of_a_launch(plan):
    """The modules of Stretto on the stack when a warm call launches its kernel."""
    name = f"all_gather_gemm_by_{'copies' if plan == 'copies' else 'programs'}"
    kernel, found = getattr(gather_module, name), []

    class Noting:
        def __getitem__(self, grid):
            frame = sys._getframe()
            while frame is not None:
                module = frame.f_globals["__name__"]
                if module.startswith("stretto.") and module not in found:
                    found.insert(0, module)
                frame = frame.f_back
            return kernel[grid]

    x, weight = random_of(dist.get_rank(), 40, 32), random_of(10, 24, 32)
    for _ in range(2):
        ops.all_gather_matmul(x, weight, implementation=find_plan(plan))
    with mock.patch.object(gather_module, name, Noting()):
        ops.all_gather_matmul(x, weight, implementation=find_plan(plan))
    return found
