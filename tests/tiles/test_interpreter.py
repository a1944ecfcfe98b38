# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter does what kernels that wait for each other, in bf16, need of it."""

import os
import subprocess
import sys

import pytest
from tests.tiles import interpreted


@pytest.mark.parametrize(
    "check",
    [
        interpreted.let_programs_wait_for_each_other,
        interpreted.compute_in_bf16,
        interpreted.give_a_row_of_a_product_the_same_bits_anywhere,
        interpreted.end_all_when_one_fails,
        interpreted.launch_from_two_threads,
        interpreted.refuse_what_is_wrong,
        interpreted.count_with_scalars,
    ],
)
def test_the_interpreter_can(interpret, check):
    interpret(1, check)


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=False
    )


def test_stretto_needs_no_triton():
    ran = run("import sys; sys.modules['triton'] = None; import stretto; print(stretto.__version__)")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.usefixtures("forks_torch_processes")
def test_a_variable_that_is_set_too_late_is_refused():
    ran = run("import os, triton; os.environ['TRITON_INTERPRET'] = '1'; import stretto.tiles")
    assert "set it before anything imports triton" in ran.stderr


@pytest.mark.usefixtures("forks_torch_processes")
def test_compiled_kernels_leave_the_interpreter_alone():
    ran = run("import stretto.tiles, sys; print('stretto.tiles.interpreter' in sys.modules)", TRITON_INTERPRET="0")
    assert ran.stdout.strip() == "False", ran.stderr
