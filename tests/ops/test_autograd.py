# SPDX-License-Identifier: Apache-2.0
"""The operators' gradients against the unfused layers' in fp64, and how torch traces, compiles and checks them."""

import importlib

import pytest
import torch
import torch.distributed as dist
from tests.differences import largest
from tests.ops.operands import random_of, relative_error

from stretto import ops
from stretto.ops.operator import define_operator

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


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
    return {name: relative_error(own[name].grad, every[name][rank].grad) for name in needs}


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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("needs", [("x", "weight", "bias"), ("x",), ("weight",)])
@pytest.mark.parametrize("way", ["saved", "gathered again", "both outputs used"])
def test_gradients_of_all_gather_matmul_are_the_unfused_layers(interpret, way, needs, dtype):
    arguments = ((21, 40, 24), dtype, needs, way == "saved", way == "both outputs used")
    for errors in interpret(3, differentiate_gather, *arguments):
        assert largest(errors.values()) <= 3 * ROUNDING[dtype]


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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("needs", [("x", "weight", "bias"), ("x",), ("weight",)])
def test_gradients_of_matmul_reduce_scatter_are_the_unfused_layers(interpret, needs, dtype):
    for errors in interpret(3, differentiate_scatter, (21, 40, 24), dtype, needs):
        assert largest(errors.values()) <= 3 * ROUNDING[dtype]


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


@pytest.mark.parametrize("needs", [("x", "weight", "bias"), ("x",), ("weight",)])
def test_gradients_of_matmul_all_reduce_are_the_unfused_layers(interpret, needs):
    for errors in interpret(3, differentiate_all_reduce, (5, 40, 24), torch.float32, needs):
        assert largest(errors.values()) <= 3 * ROUNDING[torch.float32]


def differentiate_a_replicated_loss(shape):
    """Gradients of a loss that all ranks compute alike, by each convention, beside one process's whole layer."""
    rank, world, (rows, n, k) = dist.get_rank(), dist.get_world_size(), shape
    whole = [random_of(0, *size).double().requires_grad_() for size in ((rows, k * world), (n, k * world), (n,))]
    x, weight, bias = whole
    factor = random_of(9, rows, n)
    ((x @ weight.T + bias).square() * factor).sum().backward()
    expected = [x.grad.chunk(world, 1)[rank], weight.grad.chunk(world, 1)[rank], bias.grad]

    def differentiate(layer, **options):
        mine = [x.detach().chunk(world, 1)[rank], weight.detach().chunk(world, 1)[rank], bias.detach()]
        mine = [one.float().contiguous().requires_grad_() for one in mine]
        (layer(*mine, **options).square() * factor).sum().backward()
        return [one.grad for one in mine]

    def reduce(x, weight, bias, **options):
        return ops.matmul_all_reduce(x, weight, bias=bias, **options)

    compiled = torch.compile(reduce, backend="aot_eager", fullgraph=True)
    replicated = {"grad_convention": "replicated-loss"}
    for given in (differentiate(reduce, **replicated), differentiate(compiled, **replicated)):
        assert largest(map(relative_error, given, expected)) < 1e-5
    summed = differentiate(reduce)
    assert largest(map(relative_error, summed, [world * expected[0], world * expected[1], expected[2]])) < 1e-5


def test_a_loss_that_all_ranks_replicate_counts_once_if_that_is_asked_for(interpret):
    interpret(2, differentiate_a_replicated_loss, (5, 7, 8), timeout=200.0)


def misuse_conventions():
    x, weight = torch.ones(2, 4, requires_grad=True), torch.ones(3, 4)
    with pytest.raises(
        ValueError, match="grad_convention is 'megatron', but must be one of sum-of-losses, replicated-loss"
    ):
        ops.matmul_all_reduce(x, weight, grad_convention="megatron")
    with pytest.raises(ValueError, match=r"ranks of a group make the same calls.*replicated-loss"):
        ops.matmul_all_reduce(x, weight, grad_convention=("sum-of-losses", "replicated-loss")[dist.get_rank()])
    for invariant in (False, True):
        out = ops.matmul_all_reduce(x, weight, grad_convention="replicated-loss", invariant=invariant)
        with pytest.raises(NotImplementedError, match="no second derivatives"):
            torch.autograd.grad(out.square().sum(), x, create_graph=True)


def test_conventions_that_there_are_not_or_that_ranks_mix_are_refused(interpret):
    interpret(2, misuse_conventions)


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
    errors = {"out": relative_error(out.detach(), parts[rank].detach())}
    if needs_gradients:
        out.square().sum().backward()
        sum(part.square().sum() for part in parts).backward()
        for name, tensor in own.items():
            if tensor is not None:
                errors[name] = relative_error(tensor.grad, every[name][rank].grad)
    return errors


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("activation", "is_gated"), [("gelu", False), ("silu", True), ("relu-squared", False)])
@pytest.mark.parametrize("needs_gradients", [True, False])
def test_an_mlp_is_the_whole_ones_rows(interpret, activation, is_gated, needs_gradients):
    for errors in interpret(2, differentiate_an_mlp, (20, 32, 24), activation, is_gated, needs_gradients):
        assert largest(errors.values()) <= 5e-6, errors


def check_registration(shape):
    """torch's own checks: schema, fake implementation, autograd and ahead-of-time dispatch."""
    rows, n, k = shape
    name = dist.group.WORLD.group_name
    x, weight, bias = (random_of(0, *size).requires_grad_() for size in ((rows * 2, k), (n, k), (n,)))
    with_bias, without = (x, weight, bias, name), (x, weight, None, name)
    torch.library.opcheck(torch.ops.stretto.all_gather_matmul.default, (*with_bias, "auto"))
    torch.library.opcheck(torch.ops.stretto.all_gather_matmul_gathered.default, (*without, "kernel"))
    torch.library.opcheck(torch.ops.stretto.matmul_reduce_scatter.default, (*without, None, "kernel"))
    torch.library.opcheck(torch.ops.stretto.matmul_all_reduce.default, (*with_bias, "kernel"))
    torch.library.opcheck(torch.ops.stretto.matmul_all_reduce.default, (*without, "kernel", "replicated-loss"))


@pytest.mark.long
def test_the_operators_are_registered_as_torch_asks(interpret):
    interpret(2, check_registration, (8, 16, 16), timeout=200.0)


def trace():
    """The operators in what torch.jit.trace sees of two calls."""
    x, up, down = torch.randn(4, 8), torch.randn(6, 8), torch.randn(8, 6)

    def layer(x):
        return ops.matmul_reduce_scatter(ops.all_gather_matmul(x, up), down)

    traced = torch.jit.trace(layer, (x,))
    assert torch.equal(traced(x), layer(x))
    return [node.kind() for node in traced.graph.nodes() if node.kind().startswith("stretto::")]


@pytest.mark.long
def test_a_trace_has_the_operators_and_not_what_they_do(interpret):
    assert interpret(2, trace) == [["stretto::all_gather_matmul", "stretto::matmul_reduce_scatter"]] * 2


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


@pytest.mark.long
def test_torch_compile_takes_them_without_a_graph_break(interpret):
    assert interpret(2, compile_an_mlp, (16, 32, 16), timeout=200.0) == [[True] * 4] * 2


def test_what_has_no_gradients_is_not_detached_in_silence():
    """As a kernel's results are: gradients of experts under `create_graph=True`, for one."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return x.detach() * 2

    double = define_operator("tests_double", run, fake=lambda x: torch.empty_like(x))
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        double(x).sum().backward()
    assert not double(x.detach()).requires_grad
    with torch.no_grad():
        assert not double(x).requires_grad
