# SPDX-License-Identifier: Apache-2.0
"""Launches that are known are those that Triton itself would make."""

import os
import random
import subprocess
import sys
import weakref
from collections.abc import Callable

import pytest

from stretto.tiles import Launches, kind_of

SEED = random.randrange(2**31)


@pytest.mark.usefixtures("forks_torch_processes")
@pytest.mark.parametrize("calls", [10, pytest.param(40, marks=pytest.mark.exhaustive)])
def test_known_launches_are_those_that_triton_would_make(calls: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.recorded", str(SEED), str(calls)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert ended.returncode == 0, (SEED, ended.stdout, ended.stderr[-3000:])


class Kernel:
    """Something to launch, which is "compiled" to itself."""

    def __init__(self) -> None:
        self.launched: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., "Kernel"]:
        def launch(*_: object, **_options: int) -> Kernel:
            self.launched.append(grid)
            return self

        return launch


def test_a_kernel_that_was_launched_is_kept_so_that_no_other_gets_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    launches, kernel, again = Launches(), Kernel(), []
    monkeypatch.setattr("stretto.tiles.launches.launch_compiled", lambda *call: again.append(call[1:]))
    for programs in (3, 4):
        launches(kernel, "key", programs, (1, 2), num_warps=4)
    assert kernel.launched == [(3,)]
    assert again == [(4, (1, 2))]  # past the look at arguments
    assert launches.knows(kernel, "key")
    assert not launches.knows(Kernel(), "key")
    known = weakref.ref(kernel)
    del kernel
    assert known() is not None
    launches.clear()
    assert known() is None


def test_what_triton_compiles_apart_is_of_another_kind() -> None:
    numbers = [1, 2, 16, 1 << 32, (1 << 32) + 1, 1 << 63, True, False, None]
    assert len({kind_of(number) for number in numbers}) == len(numbers)
    assert kind_of(2) == kind_of(3)
