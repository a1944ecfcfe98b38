# SPDX-License-Identifier: Apache-2.0
"""Casts to fp8: kernels against torch's operators in bits, and both against the definition."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from stretto.ops import fp8_casts
from stretto.ops.fp8_casts import (
    E4M3,
    E5M2,
    ScaledMatrix,
    cast_both,
    cast_groups,
    cast_scaled,
    find_largest,
    find_scale,
    multiply,
    place_groups,
)

DIMS = ((-2, -1), (-1,), (-2,))


def compare_kernels() -> list[str]:
    """Where interpreted kernels differ from torch's operators, in e4m3: e5m2 is not rounded to nearest there."""
    torch.manual_seed(0)
    wrong = []
    for shape in ((3, 70, 130), (1, 1), (70, 130)):
        x = torch.randn(shape).bfloat16()
        x[..., 0, 0] = 0
        for dims in DIMS:
            found = []
            for by_kernel in (False, True):
                with mock.patch.object(fp8_casts, "_suits_kernel", lambda _, by_kernel=by_kernel: by_kernel):
                    scale = find_scale(find_largest(x, dims), E4M3, is_power_of_two=len(dims) == 1)
                    rows, columns = cast_scaled(x, scale, scale, E4M3)
                    both = cast_both(x, E4M3, has_one_scale=len(dims) == 2) if x.dim() == 2 else ()
                    again = find_scale(find_largest(rows, (-2,), scale), E4M3, is_power_of_two=True)
                    _, cast_again = cast_scaled(rows, None, again, E4M3, scale=scale)
                    casts = [rows, columns, cast_again, *(each for matrix in both for each in matrix)]
                    found.append([scale, again, *(each.view(torch.uint8) for each in casts)])
            wrong += [
                f"{shape} {dims} {n}" for n, (a, b) in enumerate(zip(*found, strict=True)) if not torch.equal(a, b)
            ]
        x[..., -1, 0] = torch.nan
        with mock.patch.object(fp8_casts, "_suits_kernel", return_value=True):
            largest = find_largest(x, (-2, -1))
            rows, _ = cast_scaled(x, torch.ones(1, 1), None, E4M3) if x.dim() == 2 else (x, None)
        if not largest.isnan().all() or not rows[..., -1, 0].float().isnan().all():
            wrong.append(f"{shape}: NaN is lost")
    return wrong


def compare_scales() -> list[str]:
    """Where scales by the kernel have other bits: of any magnitudes, and of those that are none."""
    largest = torch.cat([torch.logspace(-44, 38, 3000), torch.tensor([0.0, 448.0, 449.0, torch.inf, torch.nan])])
    wrong = []
    for dtype in (E4M3, E5M2):
        for is_power in (False, True):
            expected = find_scale(largest, dtype, is_power_of_two=is_power)
            with mock.patch.object(fp8_casts, "_suits_kernel", return_value=True):
                found = find_scale(largest, dtype, is_power_of_two=is_power)
            differs = found.view(torch.int32) != expected.view(torch.int32)
            wrong += [f"{dtype} {is_power} {value}" for value in largest[differs & ~expected.isnan()].tolist()]
            wrong += [f"{dtype} {is_power}: NaN is lost"] * (not torch.equal(found.isnan(), expected.isnan()))
    return wrong


def compare_groups() -> list[str]:
    """Where groups of rows, some of them empty, are cast otherwise than each by itself; rows of padding are not."""
    torch.manual_seed(0)
    wrong = []
    for counts, n in (((70, 0, 64, 1, 130), 144), ((0,), 16), ((5, 0), 32), ((0, 200, 3), 16)):
        offsets = torch.tensor([0, *counts]).cumsum(0).int()
        x = torch.randn(sum(counts) + 7, n).bfloat16()
        places = place_groups(offsets)
        data, scale = cast_groups(x, offsets, places)
        scales, where = scale.view(len(counts), n), places.tolist()
        for group, count in enumerate(counts):
            own = x[offsets[group] : offsets[group + 1]]
            found = data[:, where[group] : where[group + 1]].float()
            size = max(-(-count // 64), 1) * 64
            if found.shape != (n, size) or found[:, count:].any():
                wrong.append(f"{counts} {n} {group}: {found.shape}")
            if count:
                expected = find_scale(find_largest(own, (-2,)), E4M3, is_power_of_two=True)
                _, columns = cast_scaled(own, None, expected, E4M3)
                same = torch.equal(scales[group], expected[0]) and torch.equal(
                    found[:, :count], columns[:, :count].float()
                )
                wrong += [f"{counts} {n} {group}"] * (not same)
    return wrong


def test_kernels_have_the_bits_of_torchs_operators(interpret: Callable[..., list[Any]]) -> None:
    assert interpret(1, compare_kernels) == [[]]
    assert interpret(1, compare_groups) == [[]]
    assert interpret(1, compare_scales) == [[]]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_cast_is_the_nearest_fp8_number_of_the_scaled_one(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = torch.randn(50, 33) * torch.logspace(-6, 6, 50)[:, None]
    for dims in DIMS:
        scale = find_scale(find_largest(x, dims), dtype, is_power_of_two=False)
        rows, columns = cast_scaled(x, scale, scale, dtype)
        assert rows.float().abs().amax(dims).eq(torch.finfo(dtype).max).all()
        assert torch.equal(columns[:, :50].float(), rows.t().float())
        assert columns.shape == (33, 64)
        assert not columns[:, 50:].float().any()
        every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        every = every[every.isfinite()].unique()
        nearest = (x[:, :, None] / scale[..., None] - every).abs().amin(2)
        assert torch.allclose((x / scale - rows.float()).abs(), nearest, rtol=1e-3, atol=1e-6)


def test_powers_of_two_are_rounded_up_and_exact_ones_kept() -> None:
    largest = torch.tensor([448.0, 449.0, 224.0, 1e-30, 0.0, torch.inf])
    scale = find_scale(largest, E4M3, is_power_of_two=True)
    assert scale.log2().frac().eq(0)[:4].all()
    assert scale[:3].tolist() == [1.0, 2.0, 0.5]
    assert scale[4] == torch.finfo(torch.float32).tiny
    assert scale[5] == torch.inf


def test_a_product_is_that_of_the_dequantized_numbers() -> None:
    torch.manual_seed(2)
    left, right = torch.randn(20, 32), torch.randn(48, 32)
    for dims, kinds in (((-2, -1), (E5M2, E4M3)), ((-1,), (E4M3, E4M3))):
        operands = []
        for x, dtype in zip((left, right), kinds, strict=True):
            scale = find_scale(find_largest(x, dims), dtype, is_power_of_two=False)
            operands.append(ScaledMatrix(cast_scaled(x, scale, None, dtype)[0], scale))
        a, b = (each.data.double() * each.scale for each in operands)
        bias = torch.randn(48)
        torch.testing.assert_close(multiply(*operands, torch.float32, bias=bias), (a @ b.t() + bias).float())
