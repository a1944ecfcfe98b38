# SPDX-License-Identifier: Apache-2.0
"""What ranks run for test_contract: calls as PyTorch's own operators may be called. Only they import this."""

import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from tests.ops.programs import find_plan, random_of
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from stretto import ops
from stretto.memory import PeerError
from stretto.ops import checks, dispatch
from stretto.ops.gemm import config
from stretto.ops.mlp import ACTIVATIONS

OPERATORS = (
    ops.all_gather_matmul,
    ops.all_gather_matmul_gathered,
    ops.matmul_reduce_scatter,
    ops.matmul_all_reduce,
)

ROUNDOFF = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def multiply(operator, *operands, **options):
    """An operator's product, without the gathered x that one of them returns as well."""
    out = operator(*operands, **options)
    return out[0] if isinstance(out, tuple) else out


def make_leaves(needs="xwb", rows=4, n=6, k=8):
    """This rank's x, weight and bias, of whole numbers, of which those in `needs` take gradients."""
    rank = dist.get_rank()
    sizes = {"x": (rows, k), "w": (n, k), "b": (n,)}
    return [
        random_of(10 * place + rank, *size).round().requires_grad_(name in needs)
        for place, (name, size) in enumerate(sizes.items())
    ]


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


def modify_in_place():
    """What the backward pass needs may not be modified before it; anything else may."""
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
        errors[operator.__name__] = max(((one - other).abs().max() / other.abs().max()).item() for one, other in pairs)
    return errors


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


def infer_then_train(plan):
    """A group whose first calls are in inference mode has the same products and gradients as one that only trains."""
    for operator in OPERATORS:
        found = []
        for infers in (False, True):
            group = dist.new_group([0, 1])
            if infers:
                with torch.inference_mode():
                    x, weight, bias = make_leaves("", rows=18)
                    multiply(operator, x, weight, group, bias=bias, implementation=find_plan(plan))
            leaves = make_leaves(rows=18)
            out = multiply(operator, *leaves[:2], group, bias=leaves[2], implementation=find_plan(plan))
            out.sum().backward()
            found.append([out, *(leaf.grad for leaf in leaves)])
        assert all(map(torch.equal, *found)), operator.__name__


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


def refuse_options():
    """What is no implementation, and what is no group, is named as such."""
    x, weight, _ = make_leaves("")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    for operator in OPERATORS:
        for given in ("kernels", "KERNEL", "", None, 3, True):
            with pytest.raises(
                ValueError, match=r'implementation is "auto", "kernel", "library" or a KernelConfig, not'
            ):
                operator(x, weight, implementation=given)
        for group in (mesh, dist.group.WORLD.group_name, 0, [0, 1]):
            with pytest.raises(ValueError, match=r"group is a torch.distributed.ProcessGroup, or None .*get_group"):
                operator(x, weight, group)
        assert len(operator(x, weight, mesh.get_group("tensor"))) > 0
        for bias in (torch.ones(12)[::2], torch.ones(1).expand(6)):
            with pytest.raises(ValueError, match=r"takes a contiguous bias, not strides \([20],\)"):
                operator(x, weight, bias=bias)


def refuse_to_tune():
    for wrong, words in (
        (("all_gather_matmul", 0, 8, 8), "m, n and k are whole numbers, 1 or more, not 0, 8 and 8"),
        (("all_gather_matmul", 8, -8, 8), "m, n and k are whole numbers"),
        (("matmul_all_reduce", 8.0, 8, 8), "m, n and k are whole numbers"),
        (("matmul_all_gather", 8, 8, 8), "the operators are all_gather_matmul, .*, not 'matmul_all_gather'"),
    ):
        with pytest.raises(ValueError, match=words):
            ops.tune(*wrong, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match=r"kernels take torch.bfloat16, .*, not torch.int8"):
        ops.tune("all_gather_matmul", 8, 8, 8, dtype=torch.int8, device="cpu")


def refuse_mlps():
    """What any product of an MLP would refuse is refused before the first, with gradients and without."""
    x, up, _ = make_leaves("")
    down, ran = up.T.contiguous(), dict(ops.counts())
    wrong = [
        ({"up_bias": torch.ones(1)}, r"mlp's up: a bias for weight \[6, 8\] is \[6\], not \[1\]"),
        ({"up_bias": torch.tensor(1.0)}, r"mlp's up: a bias .* not \[\]"),
        ({"up_bias": torch.ones(7), "gate_bias": torch.ones(5)}, "mlp's (up|gate): a bias"),
        ({"up_bias": torch.ones(6).half()}, "mlp's up: x is torch.float32 and bias torch.float16"),
        ({"gate_bias": torch.ones(6).half()}, "mlp's gate: x is torch.float32 and bias torch.float16"),
        ({"gate": up.half()}, "mlp's gate: x is torch.float32 and weight torch.float16"),
        ({"up": up.half()}, "mlp's up: x is torch.float32 and weight torch.float16"),
        ({"up": up.to("meta")}, "mlp's up: x is on cpu and weight on meta"),
        ({"up": torch.ones(6, 16)[:, ::2]}, "mlp's up takes a contiguous weight"),
        ({"up": up[:, :7], "gate": up[:, :7]}, r"mlp's up .*contiguous weight|differ in k"),
        ({"down": down[:, :5]}, r"its down \[n, hidden\], not \[6, 8\] and \[8, 5\]"),
        ({"down": down.half()}, "mlp's down: x is torch.float32 and weight torch.float16"),
        ({"down": torch.ones(8, 12)[:, ::2]}, "mlp's down takes a contiguous weight"),
        ({"down_bias": torch.ones(6)}, r"mlp's down: a bias for weight \[8, 6\] is \[8\]"),
    ]
    for given, words in wrong:
        for needs_gradients in (False, True):
            operands = {"x": x.clone().requires_grad_(needs_gradients), "up": up, "down": down, "gate": up, **given}
            with pytest.raises(ValueError, match=words):
                ops.mlp(**operands)
    assert ops.counts() == ran


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


def call_from_threads():
    """Two threads, each with a group of its own; how many of their products are right."""
    rank, world = dist.get_rank(), dist.get_world_size()
    groups, right = [dist.new_group(list(range(world))) for _ in range(2)], []

    def call(number):
        for rows in (3, 4, 5):
            xs = [random_of(peer, rows, 8 + number).round() for peer in range(world)]
            weight = random_of(10 + rank, 6, 8 + number).round()
            out = ops.all_gather_matmul(xs[rank], weight, groups[number], implementation="library")
            right.append(torch.equal(out, torch.cat(xs) @ weight.T))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return right.count(True)


def leave_groups(count):
    """Groups that are gone, and that operators still know."""
    for _ in range(count):
        group = dist.new_group([0, 1])
        x, weight, _ = make_leaves("")
        ops.matmul_all_reduce(x, weight, group)
        dist.destroy_process_group(group)
        del group
    return len(dispatch._groups) - 1


def disagree_about_nothing():
    """Rank 1 has no rows, or no columns; what each rank is told."""
    rank, told = dist.get_rank(), []
    for place, operator in enumerate(OPERATORS):
        x, weight, _ = make_leaves("", n=6 + place)  # so that each call is the first of its kind
        for operands in ((x[: 0 if rank else 4], weight), (x, weight[: 0 if rank else 6 + place])):
            with pytest.raises(ValueError, match="ranks of a group make the same calls") as error:
                operator(*operands)
            told.append("=0 " in str(error.value))
        assert multiply(operator, x[:0], weight).shape == (0, 6 + place)  # as on all ranks
        assert len(multiply(operator, x, weight)) > 0
    return all(told)


def disagree_about_biases():
    """Rank 1 alone has a bias, or asks for the gathered x too."""
    x, weight, bias = make_leaves("")
    rank = dist.get_rank()
    for operator in (ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce):
        with pytest.raises(ValueError, match=r"ranks of a group make the same calls.* with a bias"):
            operator(x, weight, bias=bias if rank else None)
    with pytest.raises(ValueError, match=r"ranks of a group make the same calls.*'gathered'"):
        OPERATORS[rank](x, weight)


def miss_a_call():
    """Rank 1 refuses what it is given, so rank 0 waits in vain; then both call the same."""
    rank = dist.get_rank()
    x, weight, _ = make_leaves("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "group_timeout", lambda group: 0.5)
        ops.all_gather_matmul(x, weight)
        dist.barrier()
        for _ in range(2):
            if rank == 0:
                with pytest.raises(PeerError, match="rank 1 has called nothing like it"):
                    ops.all_gather_matmul(x[:2], weight)
            else:
                with pytest.raises(ValueError, match="contiguous x"):
                    ops.all_gather_matmul(torch.ones(8, 2).t(), weight)
            dist.barrier()
    return list(ops.all_gather_matmul(x[:2], weight).shape), list(ops.all_gather_matmul(x[:3], weight).shape)


def align_apart(plan):
    """Rank 1's operands lie where TMA does not take them, in turn with rank 0's; what each call ran as."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def lie(tensor, is_aligned):
        room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)  # whose address is a multiple of 64
        return room[0 if is_aligned else 1 :][: tensor.numel()].view(tensor.shape).copy_(tensor)

    for operator in OPERATORS[1:] if plan in ("tiles", "packets") else OPERATORS:
        for far in range(world + 1):  # `world`: none, of a kind that is known by now
            is_scatter = operator is ops.matmul_reduce_scatter
            xs = [random_of(peer, 34 * (world if is_scatter else 1), 24).round() for peer in range(world)]
            weights = [random_of(10 + peer, 40 + far % world, 24).round() for peer in range(world)]
            x, weight = (lie(tensors[rank], rank != far) for tensors in (xs, weights))
            out = multiply(operator, x, weight, implementation=find_plan(plan))
            if "gather" in operator.__name__:
                expected = torch.cat(xs) @ weights[rank].T
            else:
                expected = sum(x @ weight.T for x, weight in zip(xs, weights, strict=True))
            if is_scatter:
                expected = expected[34 * rank : 34 * (rank + 1)]
            assert torch.equal(out, expected), (operator.__name__, far)


def choose_apart():
    """Whether ranks, of which one has operands that TMA does not take, choose as if none had."""
    rank, name = dist.get_rank(), dist.group.WORLD.group_name
    weight, room, seen = torch.zeros(32, 16), torch.zeros(32 * 16 + 1), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dispatch, "_choose", lambda known, call, machine, how: seen.append(machine) or (config.LIBRARY, "")
        )
        for n, places in ((32, (0, 0)), (31, (0, 1)), (31, (0, 0)), (32, (1, 0))):
            x = room[places[rank] :][: 32 * 16].view(32, 16)
            call = dispatch.describe_problem("all_gather_matmul", 64, x, weight[:n], name)
            dispatch.choose_config(call, x, weight[:n], name, "auto")
    return [machine.by_tma for machine in seen]


def count_flops():
    """What torch counts of each operator, forward and backward, is what it counts of the unfused layer's products."""
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
