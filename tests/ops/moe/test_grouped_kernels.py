# SPDX-License-Identifier: Apache-2.0
"""Kernels of the grouped GEMM in Triton's interpreter, beside products in fp64, and compiled for Hopper."""

import re
from itertools import pairwise
from unittest import mock

import pytest
import torch
from tests.differences import largest
from tests.ops.moe.oracle import draw
from tests.tiles.machine_code import Ptx, find_spills
from torch.nn.functional import silu

from stretto.ops import moe
from stretto.ops.gemm import Blocks
from stretto.ops.moe.grouped import kernels
from stretto.ops.moe.grouped.config import TABLE, GroupedConfig, find_config
from stretto.ops.moe.grouped.kernels import differentiate_gate, multiply, multiply_gated, multiply_transposed

SEED = 590
BLOCKS = Blocks(16, 16, 16, 2, 4, 2, 3)
CONFIGS = [GroupedConfig(BLOCKS, halves=True), GroupedConfig(BLOCKS, is_flattened=True)]
MANY_ROWS = find_config("weight gradient", 4096, 1)
SIZES = {  # rows of each expert, rows of padding; a and b
    "ragged": ([5, 0, 33, 16, 1], 4, 24, 40),
    "all to one": ([0, 37, 0], 0, 16, 16),
    "one row": ([0, 0, 1], 0, 40, 8),
    "padding alone": ([0, 0], 9, 8, 24),
}


def make_offsets(sizes):
    return torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def experts_of(sizes):
    return [expert for expert, size in enumerate(sizes) for _ in range(size)]


def multiply_exactly(rows, weight, sizes, padding):
    """Row by row, in fp64; zeros for padding."""
    products = [weight[expert].double() @ row.double() for row, expert in zip(rows, experts_of(sizes), strict=False)]
    return torch.stack([*products, *[torch.zeros(weight.shape[1], dtype=torch.float64)] * padding])


def close(found, expected, scale=1.0):
    """True if results differ from exact ones by a rounding to their dtype and the sums' in fp32."""
    assert found.shape == expected.shape
    allowed = expected.abs() * torch.finfo(found.dtype).eps * scale + 2e-3 * scale
    return bool(((found.double() - expected).abs() <= allowed).all())


def multiply_everything(dtype):
    """Which products were right, by their names."""
    right = {}
    for name, (sizes, padding, a, b) in SIZES.items():
        n, experts, offsets = sum(sizes) + padding, len(sizes), make_offsets(sizes)
        x = draw(SEED, 7, a).to(dtype)
        tokens = torch.randint(7, (n,), generator=torch.Generator().manual_seed(SEED), dtype=torch.int32)
        tokens[sum(sizes) :] = 1 << 30  # of padding, is not read
        rows = x[tokens.clamp(max=6).long()]
        rows[sum(sizes) :] = torch.nan
        weight = (draw(SEED + 1, experts, b, a) / 4).to(dtype)
        grad = draw(SEED + 2, n, b).to(dtype)
        for expert, size in enumerate(sizes):
            if size == 0:
                weight[expert] = torch.nan  # and so is this
        weights = {"": weight, "transposed ": weight.mT.contiguous().mT}
        exact = multiply_exactly(rows, weight, sizes, padding)
        for index, config in enumerate(CONFIGS):
            for order, given in weights.items():
                key = f"{name}, {order}{index}"
                right[key] = close(multiply(config, rows, given, offsets), exact)
                right[key + " by tokens"] = close(multiply(config, x, given, offsets, tokens), exact)
            found = multiply_transposed(config, grad, rows, offsets)
            expected = torch.stack(
                [grad[begin:end].double().T @ rows[begin:end].double() for begin, end in pairwise(offsets)]
            )
            right[f"{name}, gradient {index}"] = close(found, expected)
            halved = multiply_transposed(config, grad, rows, offsets, torch.float32, 0.5)
            right[f"{name}, half a gradient in fp32 {index}"] = halved.dtype is torch.float32 and torch.equal(
                (2 * halved).to(dtype), found
            )
    return right


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.exhaustive)])
def test_kernels_multiply_ragged_rows(interpret, dtype):
    [right] = interpret(1, multiply_everything, dtype)
    assert not [name for name, is_right in right.items() if not is_right]


def gate_everything(dtype):
    """Which results of gated products and their gradients were right, by their names."""
    right = {}
    for name, (sizes, padding, a, columns) in SIZES.items():
        n, experts, total, offsets = sum(sizes) + padding, len(sizes), sum(sizes), make_offsets(sizes)
        x, grad = draw(SEED, 7, a).to(dtype), draw(SEED + 2, 7, a).to(dtype)
        tokens = torch.randint(7, (n,), generator=torch.Generator().manual_seed(SEED), dtype=torch.int32)
        factors = draw(SEED + 3, n).abs().float()
        gate_up = (draw(SEED + 1, experts, 2 * columns, a) / 4).to(dtype)
        down = (draw(SEED + 4, experts, a, columns) / 4).to(dtype)
        exact = multiply_exactly(x[tokens.long()][:total], gate_up, sizes, 0) if total else torch.zeros(0, 2 * columns)
        for index, config in enumerate(CONFIGS):
            key = f"{name}, {index} "
            out, inner = multiply_gated(config, x, gate_up, offsets, tokens)
            right[key + "inner"] = close(inner[:total], exact)
            gate, up = (one.requires_grad_() for one in inner[:total].double().chunk(2, 1))
            gated = silu(gate) * up
            right[key + "gated"] = close(out[:total], gated.detach()) and not out[total:].any()
            again, nothing = multiply_gated(config, x[tokens.long()], gate_up, offsets, keeps_inner=False)
            right[key + "rows"] = torch.equal(again, out) and nothing.numel() == 0
            if not total:
                continue
            # Of factors * gated @ down.T: each row of it has the gradient of its token.
            of_gated = multiply_exactly(grad[tokens.long()][:total], down.mT, sizes, 0)
            for weighs in (True, False):
                times = factors[:total, None].double() if weighs else 1
                expected = torch.cat(torch.autograd.grad(gated, (gate, up), of_gated * times, retain_graph=True), 1)
                found = differentiate_gate(config, grad, down, offsets, inner, tokens, factors if weighs else None)
                right[f"{key}gradient {weighs}"] = (
                    close(found.inner[:total], expected, 2) and not found.inner[total:].any()
                )
                right[f"{key}activated {weighs}"] = close(found.activated[:total], gated.detach() * times, 2)
                if weighs:
                    products = (of_gated * gated.detach()).sum(1)
                    right[key + "products"] = close(found.products.sum(0)[:total], products)
    return right


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.exhaustive)])
def test_kernels_multiply_gates_and_differentiate_them(interpret, dtype):
    [right] = interpret(1, gate_everything, dtype)
    assert not [name for name, is_right in right.items() if not is_right]


def route_by_kernels(dtype):
    """Errors of routed experts and their gradients by kernels, relative to each result's largest number, in fp64."""
    x, weights = draw(SEED, 21, 40), draw(SEED + 1, 21, 2).abs()
    gate_up, down, grad = draw(SEED + 2, 5, 48, 40) / 5, draw(SEED + 3, 5, 40, 24) / 5, draw(SEED + 4, 21, 40)
    ids = torch.rand(21, 4, generator=torch.Generator().manual_seed(SEED)).topk(2).indices  # the last has no tokens
    found, expected = [], []
    for results, implementation, kind in ((found, "kernel", dtype), (expected, "library", torch.float64)):
        leaves = [one.to(dtype).to(kind).requires_grad_() for one in (x, gate_up, down)]
        factors = weights.float().to(torch.float32 if kind == dtype else kind).requires_grad_()
        out = moe.routed_experts(leaves[0], ids, factors, *leaves[1:], implementation=implementation)
        results += [out, *torch.autograd.grad(out, [*leaves, factors], grad.to(kind))]
    assert [one.dtype for one in found] == [dtype] * 4 + [torch.float32]
    errors = [
        (one.double() - right).abs().max() / right.abs().max() for one, right in zip(found, expected, strict=True)
    ]
    with pytest.raises(ValueError, match=r"multiples of 8, not \[21, 39\]"):
        moe.grouped_matmul(
            x[:, :39].to(dtype), gate_up[:, :, :39].to(dtype), make_offsets([21, 0, 0, 0, 0]), implementation="kernel"
        )
    return [float(error) for error in errors]


def test_routed_experts_by_kernels_are_those_of_the_library(interpret):
    [errors] = interpret(1, route_by_kernels, torch.bfloat16)
    assert largest(errors) < 2**-6


def launch(kind, by_tokens, arrivals=None):
    """A launch of this kind of product with its configuration of the table: kernel, arguments and options.

    arrivals: notes the launch itself.
    """
    launches = []

    def note(kernel, programs, *arguments, **options):
        names = [one.name for one in kernel.params[len(arguments) :]]
        launches.append((kernel, (*arguments, *(options.pop(name) for name in names)), options))

    def make(*shape):
        return torch.empty(*shape, dtype=torch.bfloat16)

    offsets, tokens = make_offsets([64] * 4), torch.zeros(256, dtype=torch.int32) if by_tokens else None
    config, wide = TABLE.get(kind, MANY_ROWS), make(4, 512, 256)
    with mock.patch.object(kernels, "launch_cached", note):
        match kind:
            case "product":
                multiply(config, make(256, 256), wide, offsets, tokens, arrivals)
            case "gate":
                multiply_gated(config, make(256, 256), wide, offsets, tokens, arrivals=arrivals)
            case "gate gradient":
                factors = torch.empty(256) if by_tokens else None
                differentiate_gate(config, make(256, 512), wide, offsets, make(256, 512), tokens, factors, arrivals)
            case _:
                multiply_transposed(config, make(256, 512), make(256, 256), offsets)
    return launches[0] if launches else None


@pytest.mark.long
@pytest.mark.parametrize("by_tokens", [pytest.param(False, marks=pytest.mark.exhaustive), True])
@pytest.mark.parametrize("kind", [*TABLE, "weight gradient of many rows"])
def test_kernels_are_compiled_to_tensor_core_loops_without_spills(kind, by_tokens, tmp_path):
    from stretto.tiles.compile_only import compile_kernel, count_shared_bytes

    kernel, arguments, options = launch(kind, by_tokens)
    forms = compile_kernel(kernel, arguments, options, "sm_90")
    lines = Ptx(line.strip() for line in forms["ptx"].splitlines())
    lines.cubin = forms["cubin"]
    assert re.search(r"wgmma\.mma_async\S*\.m64n(128|256)k16", forms["ptx"])
    assert "cp.async.bulk.tensor.3d.shared" in forms["ptx"] or "cp.async.bulk.tensor.4d.shared" in forms["ptx"]
    wide = r"cp\.async\.cg\.shared\.global \[ *%r\d+ *\+ *\d+ *\], \[ *%rd\d+ *\+ *\d+ *\], 0x10"
    if "weight gradient" not in kind:
        assert bool(re.search(wide, forms["ptx"])) == by_tokens
    else:  # one loop over the steps of all tiles, whose loads are as many steps ahead as there are stages
        assert sum("Loop Header" in line for line in lines) == 1
        loads = sum(bool(re.search(r"cp\.async\.bulk\.tensor\.4d\.shared", line)) for line in lines)
        assert loads == 2 * options["num_stages"]
    assert find_spills(lines, tmp_path) == 0
    assert count_shared_bytes(kernel, arguments, options, "sm_90") <= 227 << 10
