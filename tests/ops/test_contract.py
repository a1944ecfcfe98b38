# SPDX-License-Identifier: Apache-2.0
"""Tests of what PyTorch's users take for granted of any operator, asked of the overlapped ones."""

import random
import warnings

import pytest
import torch
import torch.distributed as dist
from tests.differences import largest
from tests.ops.leaves import OPERATORS, make_leaves, multiply
from tests.ops.operands import random_of
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from stretto import ops
from stretto.ops.mlp import ACTIVATIONS

ROUNDOFF = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def measure_errors(calls, seed):
    """Random calls by kernels, whose every element's error is at most its bound; those that are not.

    A product of k terms in fp32 is within (k + 1) units of roundoff of |x| @ |weight|.T, whatever the order; then a
    partial sum is rounded to the dtype that it travels in, and so is the result.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(seed)
    wrong = []
    for call in range(calls):
        operator = OPERATORS[call % len(OPERATORS)]
        rows, n, k = (1 << int(torch.randint(0, 6, (), generator=generator)) for _ in range(3))
        rows, n, k = (max(1, size + int(torch.randint(-1, 2, (), generator=generator))) for size in (rows, n, k))
        dtype = list(ROUNDOFF)[int(torch.randint(3, (), generator=generator))]
        is_gather, is_scatter = "gather" in operator.__name__, "scatter" in operator.__name__
        m = rows * world if is_scatter else rows
        xs = [random_of(peer, m, k, dtype=dtype, seed=call) for peer in range(world)]
        weights = [random_of(10 + peer, n, k, dtype=dtype, seed=call) for peer in range(world)]
        bias = random_of(20, n, dtype=dtype, seed=call)
        out = multiply(operator, xs[rank], weights[rank], bias=bias, implementation="kernel").double()
        if is_gather:
            pairs = [(torch.cat(xs).double(), weights[rank].double())]
        else:
            pairs = [(x.double(), weight.double()) for x, weight in zip(xs, weights, strict=True)]
        own = slice(rank * rows, (rank + 1) * rows) if is_scatter else slice(None)
        expected = sum((x @ weight.T)[own] for x, weight in pairs) + bias.double()
        size = sum((x.abs() @ weight.abs().T)[own] for x, weight in pairs) + bias.double().abs()
        sent = 0.0 if is_gather else sum((x @ weight.T).abs()[own] for x, weight in pairs)
        bound = ROUNDOFF[dtype] * (expected.abs() + sent) + (k + world + 2) * 2**-23 * size
        if not ((out - expected).abs() <= 1.01 * bound).all():
            wrong.append((operator.__name__, rows, n, k, dtype))
    return wrong


@pytest.mark.parametrize("calls", [4, pytest.param(24, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3])
def test_every_elements_error_is_within_its_bound(interpret, ranks, calls):
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    assert interpret(ranks, measure_errors, calls, seed) == [[]] * ranks


def keep_rows_apart():
    """A NaN and an infinity in one row reach no other row, past all padding."""
    rank = dist.get_rank()
    for operator in OPERATORS:
        rows = 34 if operator is ops.matmul_reduce_scatter else 17
        x, weight = random_of(rank, rows, 19), random_of(10 + rank, 33, 19)
        spoilt = x.clone()
        if rank == 0:
            spoilt[1, 3:5] = torch.tensor([torch.nan, torch.inf])
        out, clean = multiply(operator, spoilt, weight), multiply(operator, x, weight)
        is_spoilt = [1] if operator is not ops.matmul_reduce_scatter or rank == 0 else []
        assert (~out.isfinite()).any(1).nonzero().flatten().tolist() == is_spoilt, operator.__name__
        others = [row for row in range(len(out)) if row not in is_spoilt]
        assert torch.equal(out[others], clean[others]), operator.__name__


def test_nonfinite_values_do_not_leave_their_row(interpret):
    interpret(2, keep_rows_apart)


def save_for_backward(needs):
    """{operator: the shapes that it keeps for its backward pass}."""
    kept = {}
    for operator in OPERATORS:
        shapes = []

        def pack(tensor, shapes=shapes):
            shapes.append(tuple(tensor.shape))
            return tensor

        x, weight, bias = make_leaves(needs)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = multiply(operator, x, weight, bias=bias)
        out.sum().backward()
        kept[operator.__name__] = shapes
    return kept


@pytest.mark.parametrize(
    ("needs", "rows", "weights"), [("xwb", True, True), ("x", False, True), ("w", True, False), ("b", False, False)]
)
def test_only_what_a_gradient_takes_is_kept_for_it(interpret, needs, rows, weights):
    for kept in interpret(2, save_for_backward, needs):
        for operator, shapes in kept.items():
            of_x = [(8, 8)] if "gather" in operator else [(4, 8)]
            assert shapes == of_x * rows + [(6, 8)] * weights, operator


def modify_in_place():
    """Check that what the backward pass needs may not be modified before it; anything else may."""
    for operator in OPERATORS:
        is_gathered = operator in OPERATORS[:2]
        for needs, change, is_refused in (
            ("xw", 0, not is_gathered),  # of which the gathered copy is kept
            ("xw", 1, True),
            ("x", 0, False),
            ("w", 1, False),
            ("b", 0, False),
            ("b", 1, False),
        ):
            leaves = make_leaves(needs)
            operands = [leaf * 1 for leaf in leaves]
            out = multiply(operator, operands[0], operands[1], bias=operands[2])
            with torch.no_grad():
                operands[change].add_(1)
            if is_refused:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    out.sum().backward()
            else:
                out.sum().backward()


@pytest.mark.long
def test_only_what_is_kept_may_not_be_modified(interpret):
    interpret(2, modify_in_place)


def differentiate_twice():
    """Errors of gradients of gradients, against the unfused layer's of all ranks in fp64."""
    rank, world, errors = dist.get_rank(), dist.get_world_size(), {}
    for operator in OPERATORS:
        rows = 2 * world if operator is ops.matmul_reduce_scatter else 2
        xs = [random_of(peer, rows, 4).double().requires_grad_() for peer in range(world)]
        weights = [random_of(10 + peer, 3, 4).double().requires_grad_() for peer in range(world)]
        own = [tensors[rank].detach().clone().requires_grad_() for tensors in (xs, weights)]
        out = operator(*own, implementation="library")
        outs = out if isinstance(out, tuple) else (out,)
        gradients = torch.autograd.grad(sum((out**3).sum() for out in outs), own, create_graph=True)
        twice = torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), own)
        if operator in OPERATORS[:2]:
            whole = torch.cat(xs)
            loss = sum(((whole @ weight.T) ** 3).sum() for weight in weights)
            if len(outs) == 2:
                loss = loss + world * (whole**3).sum()
        else:
            total = sum(x @ weight.T for x, weight in zip(xs, weights, strict=True))
            loss = (total**3).sum() * (world if operator is ops.matmul_all_reduce else 1)
        gradients = torch.autograd.grad(loss, xs + weights, create_graph=True)
        expected = torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), xs + weights)
        pairs = zip(twice, (expected[rank], expected[world + rank]), strict=True)
        errors[operator.__name__] = largest(
            ((one - other).abs().max() / other.abs().max()).item() for one, other in pairs
        )
    return errors


def test_gradients_of_gradients_are_the_unfused_layers(interpret):
    for errors in interpret(2, differentiate_twice):
        assert largest(errors.values()) <= 1e-13, errors


def checkpoint_layers():
    """Gradients of a layer that is computed again are those of one that is not."""
    for operator in OPERATORS:

        def layer(x, weight, bias, operator=operator):
            return multiply(operator, x, weight, bias=bias).square()

        found = []
        for run in (
            layer,
            lambda *leaves, layer=layer: checkpoint(layer, *leaves, use_reentrant=True),
            lambda *leaves, layer=layer: checkpoint(layer, *leaves, use_reentrant=False),
        ):
            leaves = make_leaves()
            run(*leaves).sum().backward()
            found.append([leaf.grad for leaf in leaves])
        for other in found[1:]:
            assert all(map(torch.equal, found[0], other)), operator.__name__


@pytest.mark.long
def test_layers_that_are_computed_again_have_the_same_gradients(interpret):
    interpret(2, checkpoint_layers)


def cast_nothing(implementation):
    """Under autocast an operator's numbers are those without it, forward and backward."""
    for operator in OPERATORS:
        found = []
        for is_enabled in (False, True):
            x, weight, bias = (leaf.detach().div(3).requires_grad_() for leaf in make_leaves())
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_enabled):
                out = multiply(operator, x, weight, bias=bias, implementation=implementation)
                plain = multiply(operator, x.detach(), weight.detach(), implementation=implementation)
                assert out.dtype == plain.dtype == torch.float32
                (out * out).sum().backward()
            found.append([out, plain, x.grad, weight.grad, bias.grad])
        assert all(map(torch.equal, *found)), operator.__name__
    x, up, _ = make_leaves("")
    found = []
    for is_enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_enabled):
            found.append(ops.mlp(x / 3, up / 3, up.T / 3, gate=up / 7, implementation=implementation))
    assert torch.equal(*found)
    if implementation == "library":
        x, up, bias = (leaf.detach().double().requires_grad_() for leaf in make_leaves())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert ops.mlp(x, up, up.T, gate=up, up_bias=bias, implementation="library").dtype == torch.float64


@pytest.mark.parametrize("implementation", ["kernel", "library"])
def test_autocast_casts_nothing_inside(interpret, implementation):
    interpret(2, cast_nothing, implementation)


def derive_forward():
    """Forward-mode derivatives are refused, however they are asked for: not made zeros of."""
    x, weight, _ = make_leaves("")
    for operator in OPERATORS:
        with pytest.raises(NotImplementedError, match="forward-mode derivatives"):
            torch.func.jvp(lambda x, operator=operator: multiply(operator, x, weight), (x,), (x,))
        with forward_ad.dual_level():
            with pytest.raises(NotImplementedError, match="jvp"):
                operator(forward_ad.make_dual(x, x), weight)
            assert torch.equal(multiply(operator, x, weight), multiply(operator, x, weight))


def test_forward_mode_is_refused(interpret):
    interpret(2, derive_forward)


def call_in_every_mode():
    """Inference mode, no_grad, Parameters, fake tensors and vmap give what a plain call does, or its shape."""
    x, weight, bias = make_leaves("")
    for operator in OPERATORS:
        plain = multiply(operator, x, weight, bias=bias)
        with torch.no_grad():
            out = multiply(operator, *(leaf.clone().requires_grad_() for leaf in (x, weight)), bias=bias)
        assert torch.equal(out, plain)
        assert not out.requires_grad
        with torch.inference_mode():
            assert torch.equal(multiply(operator, x, weight, bias=bias), plain)
            made = [leaf.clone() for leaf in (x, weight, bias)]
        assert torch.equal(multiply(operator, *made[:2], bias=made[2]), plain)
        out = multiply(operator, x, torch.nn.Parameter(weight), bias=torch.nn.Parameter(bias))
        assert torch.equal(out, plain)
        assert type(out) is torch.Tensor
        with torch._subclasses.FakeTensorMode() as mode:
            fake = multiply(operator, *map(mode.from_tensor, (x, weight)), bias=mode.from_tensor(bias))
        assert (fake.shape, fake.dtype) == (plain.shape, plain.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vmap calls an operator without a batching rule once for each
            both = torch.func.vmap(lambda x, operator=operator: multiply(operator, x, weight))(torch.stack((x, 2 * x)))
        one = multiply(operator, x, weight)
        assert torch.equal(both, torch.stack((one, 2 * one)))


@pytest.mark.long
def test_modes_change_no_number(interpret):
    interpret(2, call_in_every_mode)


def compile_with_a_plan():
    """A plan is a constant to torch.compile, and shapes may change."""
    group, plan = dist.group.WORLD, ops.KernelConfig(blocks=ops.Blocks(32, 32, 32, 2, 4, 2, 3))
    for operator in OPERATORS:

        def layer(x, weight, bias, operator=operator):
            return multiply(operator, x, weight, group, bias=bias, implementation=plan).relu()

        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
        for rows in (4, 6):
            found = []
            for run in (layer, compiled):
                leaves = make_leaves(rows=rows)
                out = run(*leaves)
                out.sum().backward()
                found.append([out, *(leaf.grad for leaf in leaves)])
            assert all(map(torch.equal, *found)), operator.__name__


@pytest.mark.long
def test_a_plan_is_compiled_without_a_graph_break(interpret):
    interpret(1, compile_with_a_plan)


def train_biases():
    """Gradients of an MLP's biases where nothing else has any."""
    for activation, act in ACTIVATIONS.items():
        x, up, bias = make_leaves("", rows=2)
        gate_bias = bias + 0.25  # so that no product is at relu's corner
        gate, up_bias, down = up.flip(0).contiguous(), gate_bias.flip(0), up.T.contiguous()
        for name in ("up_bias", "gate_bias"):
            biases = {"up_bias": up_bias.clone(), "gate_bias": gate_bias.clone()}
            biases[name].requires_grad_()
            ops.mlp(x, up, down, gate=gate, activation=activation, **biases).sum().backward()
            gathered = [torch.empty_like(x) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, x)
            whole, alone = torch.cat(gathered), {key: bias.detach().requires_grad_() for key, bias in biases.items()}
            hidden = act(functional.linear(whole, gate, alone["gate_bias"]))
            ((hidden * functional.linear(whole, up, alone["up_bias"])) @ down.T).sum().backward()
            torch.testing.assert_close(biases[name].grad, alone[name].grad)


@pytest.mark.long
def test_an_mlps_biases_may_be_all_that_is_trained(interpret):
    interpret(2, train_biases)


def count_flops():
    """Check that what torch counts of each operator, forward and backward,
    is what it counts of the unfused layer's products.
    """
    world, rows, n, k = dist.get_world_size(), 4, 6, 8
    for operator in OPERATORS:
        x, weight, bias = make_leaves(rows=rows, n=n, k=k)
        whole = torch.randn(rows * world if "gather" in operator.__name__ else rows, k, requires_grad=True)
        with FlopCounterMode(display=False) as expected:
            functional.linear(whole, weight, bias).sum().backward()
        x.grad = weight.grad = bias.grad = None
        with FlopCounterMode(display=False) as counted:
            multiply(operator, x, weight, bias=bias).sum().backward()
        assert counted.get_total_flops() == expected.get_total_flops() > 0, operator.__name__

    x, weight = (ops.quantize_rows(torch.randn(rows, 16))[0] for _ in range(2))
    one = torch.ones(1)
    for operator, times in (
        (ops.all_gather_scaled_matmul, world),
        (ops.scaled_matmul_reduce_scatter, 1),
        (ops.scaled_matmul_all_reduce, 1),
    ):
        with FlopCounterMode(display=False) as counted:
            operator(x, weight, one, one)
        assert counted.get_total_flops() == times * 2 * rows * rows * 16, operator.__name__


def test_flops_are_counted_as_the_unfused_layers(interpret):
    interpret(2, count_flops)
