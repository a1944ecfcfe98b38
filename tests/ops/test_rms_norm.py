# SPDX-License-Identifier: Apache-2.0
"""RMSNorm's kernels, and those that turn queries and keys, in Triton's interpreter beside formulas in fp64."""

import pytest
import torch
from tests.differences import largest
from tests.parallel.layers.test_fused import draw, far_from
from tests.tiles.machine_code import compile_to_ptx, find_spills

from stretto.ops import rms_norm, rotary

DTYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
]
"""Of the input, and of the weight."""


def norm_errors():
    """Errors of results and gradients, in units of one rounding: rows of several tiles, and a row that fills none."""
    errors = []
    for shape in ((3, 40), (2, 3, 128), (2, 2100), (70, 33)):
        for dtype, weight_dtype in DTYPES:
            x, grad = (draw(seed, *shape, dtype=dtype) for seed in (1, 2))
            weight = draw(3, shape[-1], dtype=weight_dtype)
            wide = [one.double().requires_grad_() for one in (x, weight)]
            right = wide[0] / (wide[0].square().mean(-1, keepdim=True) + 0.1).sqrt() * (wide[1] + 1)
            rights = right.detach(), *torch.autograd.grad(right, wide, grad.double())
            out = rms_norm.rms_norm_on_gpu(x.requires_grad_(), weight.requires_grad_(), 0.1, 1.0)[0]
            found = out.detach(), *torch.autograd.grad(out, (x, weight), grad)
            sizes = 16.0, 16.0, 8 * grad[..., 0].numel()
            errors += [far_from(*triple) for triple in zip(found, rights, sizes, strict=True)]
    return errors


def turn_errors():
    errors = []
    for batch, heads, groups, seq, dim, angles in ((2, 5, 2, 5, 16, 1), (3, 1, 1, 3, 10, 3), (1, 33, 3, 2, 128, 1)):
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            query = draw(1, batch, seq, heads, dim, dtype=dtype).transpose(1, 2)
            inputs = query, draw(2, batch, groups, seq, dim, dtype=dtype)
            cos, sin = (draw(seed, angles, seq, dim, dtype=dtype) for seed in (3, 4))
            grads = [draw(seed, *one.shape, dtype=dtype) for seed, one in enumerate(inputs)]
            wide = [one.double().requires_grad_() for one in inputs]
            halves = [one.chunk(2, -1) for one in wide]
            rights = [
                one * cos[:, None].double() + torch.cat((-second, first), -1) * sin[:, None].double()
                for one, (first, second) in zip(wide, halves, strict=True)
            ]
            of_rights = torch.autograd.grad(rights, wide, [one.double() for one in grads])
            found = rotary.turn_on_gpu(*(one.requires_grad_() for one in inputs), cos, sin, False)
            of_found = torch.autograd.grad(found, inputs, grads)
            pairs = zip((*found, *of_found), (*rights, *of_rights), strict=True)
            errors += [far_from(one.detach(), other.detach(), 32.0) for one, other in pairs]
    return errors


def test_kernels_round_once(interpret):
    (errors,), (turned,) = interpret(1, norm_errors), interpret(1, turn_errors)
    assert (len(errors), len(turned)) == (48, 36)
    assert largest(errors) <= 1.0
    assert largest(turned) <= 1.0


def far_from_derivatives():
    """Gradients of gradients, which are torch's own, beside differences of gradients."""
    x, weight = draw(1, 3, 8).requires_grad_(), draw(2, 8).requires_grad_()
    return torch.autograd.gradgradcheck(lambda x, weight: rms_norm.rms_norm_on_gpu(x, weight, 0.1, 1.0)[0], (x, weight))


def test_gradients_of_gradients(interpret):
    assert interpret(1, far_from_derivatives) == [True]


def test_a_weight_of_another_length_is_refused():
    with pytest.raises(ValueError, match=r"takes a weight \[n\], not \[2, 8\] and \[4\]"):
        rms_norm.rms_norm(torch.ones(2, 8), torch.ones(4), 1e-6)


@pytest.mark.long
def test_kernels_compile_to_wide_accesses_without_spills(tmp_path):
    half, numbers = [torch.zeros(256, dtype=torch.bfloat16) for _ in range(6)], torch.zeros(256)
    calls = {
        rms_norm.normalize_rows: (*half[:3], numbers, 4096, 8192, 1e-6, 0.0, 1, 8192),
        rms_norm.differentiate_norm: (
            half[0], half[1], numbers, half[2], half[3], numbers.clone(), 4096, 8192, 528, 0.0, 1, 8192
        ),
        rotary.turn_heads: (*half, 4096, 32, 8, True, 64, 64),
    }  # fmt: skip
    for kernel, arguments in calls.items():
        warps = 4 if kernel is rotary.turn_heads else 16
        lines = compile_to_ptx(kernel, arguments, num_warps=warps)
        assert find_spills(lines, tmp_path) == 0
        assert any("ld.global.v4" in line for line in lines)
