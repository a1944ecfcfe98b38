# SPDX-License-Identifier: Apache-2.0
"""Launches fix what Triton's versions do differently, and those that are known are those that Triton would make."""

import ast
import os
import random
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.ops.test_embedding_machine_code import backward_launches, forward_arguments
from tests.test_structure import SOURCE

from stretto.ops.embedding.backward_kernel import reduce_chunks
from stretto.ops.embedding.forward_kernel import pool_and_send
from stretto.tiles import Launches, kind_of
from stretto.tiles.compile_only import compile_kernel
from stretto.tiles.launches import launch_cached, launch_kernel, pass_addresses

SEED = random.randrange(2**31)


@pytest.mark.usefixtures("forks_torch_processes")
@pytest.mark.parametrize(
    ("calls", "seed"),  # in CI the same kernels each time, which Triton's cache keeps
    [pytest.param(1, 0, marks=pytest.mark.long), pytest.param(40, SEED, marks=pytest.mark.exhaustive)],
)
def test_known_launches_are_those_that_triton_would_make(calls: int, seed: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.recorded", str(seed), str(calls)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, (seed, ended.stdout, ended.stderr[-3000:])


class Kernel:
    """Something to launch, which is "compiled" to itself."""

    def __init__(self) -> None:
        self.launched: list[tuple[int, ...]] = []
        self.options: list[dict[str, int]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., "Kernel"]:
        def launch(*_: object, **options: int) -> Kernel:
            self.launched.append(grid)
            self.options.append(options)
            return self

        return launch


def test_a_kernel_that_was_launched_is_kept_so_that_no_other_gets_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    launches, kernel, again = Launches(), Kernel(), []
    monkeypatch.setattr("stretto.tiles.launches.launch_compiled", lambda *call: again.append(call[1:]))
    for programs in (3, 4):
        launches(kernel, "key", programs, (1, 2), num_warps=4)
    assert kernel.launched == [(3,)]
    assert again == [(4, [1, 2])]  # past the look at arguments
    assert launches.knows(kernel, "key")
    assert not launches.knows(Kernel(), "key")
    known = weakref.ref(kernel)
    del kernel
    assert known() is not None
    launches.clear()
    assert known() is None


def test_launches_that_triton_specializes_separately_have_different_keys() -> None:
    numbers = [1, 2, 16, 1 << 32, (1 << 32) + 1, 1 << 63, True, False, None]
    assert len({kind_of(number) for number in numbers}) == len(numbers)
    assert kind_of(2) == kind_of(3)
    words, halves = torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16)
    assert len({kind_of((words, 2)), kind_of((words, 1)), kind_of((halves, 2)), kind_of((words[1:], 2))}) == 4
    assert kind_of((words, 2)) == kind_of((torch.ones(9), 3))


def test_every_launch_states_whether_products_and_sums_are_fused() -> None:
    launches, kernel = Launches(), Kernel()
    launches(kernel, "key", 3, (1, 2), num_warps=4)
    launch_kernel(kernel, 3, 1, 2, num_warps=4)
    launch_cached(kernel, 3, 1, 2, num_warps=4)  # is not Triton's, and so interpreted
    assert kernel.options == [{"num_warps": 4, "enable_fp_fusion": True}] * 3


def contains_any(path: Path, words: list[str]) -> bool:
    """Such a file is worth parsing; to parse all of them takes seconds."""
    text = path.read_text()
    return any(word in text for word in words)


@pytest.mark.long
def test_no_module_of_the_library_launches_a_kernel_past_launch_kernel() -> None:
    """That is, none has kernel[grid](...) with one of the library's kernels. Benches have kernels of their own."""
    kernel = re.compile(r"^@triton\.jit.*\ndef (\w+)", re.MULTILINE)  # device functions as well
    names = {name for path in SOURCE.rglob("*.py") for name in kernel.findall(path.read_text())}
    launched = [
        f"{path}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        if not {"bench", "cli"} & set(path.parts) and contains_any(path, [f"{name}[" for name in names])
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and ast.unparse(node.func.value).rpartition(".")[2] in names
    ]
    assert len(names) > 20
    assert launched == []


def test_a_known_launch_passes_the_addresses_of_tensors_wherever_they_stand() -> None:
    tensor, weight = torch.zeros(4), torch.nn.Parameter(torch.zeros(4))
    at = tensor.data_ptr(), weight.data_ptr()
    assert pass_addresses((tensor, (weight, None, 3), True, "p2p", tensor[2:])) == (
        at[0],
        (at[1], None, 3),
        True,
        "p2p",
        at[0] + 8,
    )


@pytest.mark.long
@pytest.mark.parametrize("default", ["0", "1"])
def test_products_and_sums_are_fused_whatever_tritons_default_is(monkeypatch: pytest.MonkeyPatch, default: str) -> None:
    """The variable stands for versions of Triton whose default is another."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", default)
    options = {"num_warps": 1, "num_stages": 1}
    for kernel, arguments in (
        (pool_and_send, forward_arguments(weighted=True)),
        (reduce_chunks, backward_launches("adagrad")["reduce_chunks"]),
    ):
        assert "fma.rn.f32" in compile_kernel(kernel, arguments, options, "sm_90")["ptx"]
        apart = compile_kernel(kernel, arguments, options | {"enable_fp_fusion": False}, "sm_90")["ptx"]
        assert "fma.rn.f32" not in apart
        assert "mul.rn.f32" in apart
