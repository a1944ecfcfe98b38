# SPDX-License-Identifier: Apache-2.0
"""Descriptors are encoded once, and launched as Triton would launch them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch.torch_version import TorchVersion
from triton.backends.nvidia import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from stretto.tiles.launches import knows_launcher, remember_descriptors

BEFORE = getattr(driver, "_BASE_ARGS_FORMAT_LEN", None)
SIGNATURE = {0: "*fp32", 1: "tensordesc<fp32[32, 32]>", 2: "i32", 3: "tensordesc<fp32[32, 32]>", 4: "constexpr"}


def describe(matrix: torch.Tensor) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [32, 32])


def launch(run: Any, arguments: tuple[Any, ...]) -> None:
    """As Triton's launcher calls it: a kernel's arguments follow so many others, or are the last of them."""
    others = tuple(range(BEFORE or 13))
    run.launch(*others, arguments) if BEFORE is None else run.launch(*others, *arguments)


@pytest.mark.parametrize("metas", [[{"swizzle": 1}, {"swizzle": 2}], []])
def test_launches_are_those_of_triton_and_encode_once(monkeypatch: pytest.MonkeyPatch, metas: Any) -> None:
    made: list[int] = []

    def make(matrix: Any, meta: Any, *_: Any) -> list[Any]:
        made.append(matrix.base.data_ptr())
        return ["descriptor", matrix.base.data_ptr(), meta and meta["swizzle"], *matrix.shape, *matrix.strides]

    monkeypatch.setattr(driver, "make_tensordesc_arg", make)
    launched: list[tuple[Any, ...]] = []
    run = SimpleNamespace(launch=driver.wrap_handle_tensordesc(lambda *given: launched.append(given), SIGNATURE, metas))
    matrices = [torch.zeros(64, 64), torch.zeros(128, 32)]
    calls = [(7, describe(a), 3, describe(b), 4) for a in matrices for b in matrices] * 2
    for call in calls:
        launch(run, call)
    expected = list(launched)
    assert len(made) == 2 * len(calls)
    launched.clear()
    made.clear()
    is_known = knows_launcher(run.launch)
    assert is_known == (TorchVersion(triton.__version__) < "3.8")
    remember_descriptors(SimpleNamespace(run=run))
    for call in calls:
        launch(run, call)
    assert launched == expected
    assert len(made) == (4 if metas and is_known else 2 * len(calls))  # two matrices for each of two parameters


def test_one_matrix_filled_or_rounded_in_another_way_is_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(matrix: Any, meta: Any, *_: Any) -> list[Any]:
        return [matrix.padding, getattr(matrix, "round_f32_to_tf32", None)]

    monkeypatch.setattr(driver, "make_tensordesc_arg", make)
    launched: list[tuple[Any, ...]] = []
    metas = [{"swizzle": 1}, {"swizzle": 2}]
    run = SimpleNamespace(launch=driver.wrap_handle_tensordesc(lambda *given: launched.append(given), SIGNATURE, metas))
    matrix = torch.zeros(64, 64)
    plain, filled, rounded = describe(matrix), describe(matrix), describe(matrix)
    filled.padding = "nan"
    if hasattr(rounded, "round_f32_to_tf32"):
        rounded.round_f32_to_tf32 = True
    calls = [(7, one, 3, one, 4) for one in (plain, filled, rounded, plain)]
    for call in calls:
        launch(run, call)
    expected = list(launched)
    launched.clear()
    remember_descriptors(SimpleNamespace(run=run))
    for call in calls:
        launch(run, call)
    assert launched == expected


def test_a_kernel_without_descriptors_and_an_unknown_launcher_stay_as_they_are() -> None:
    def plain(*_: Any) -> None: ...

    for one in (plain, print, SimpleNamespace()):
        run = SimpleNamespace(launch=one)
        remember_descriptors(SimpleNamespace(run=run))
        assert run.launch is one
    remember_descriptors(SimpleNamespace())
    remember_descriptors(None)
