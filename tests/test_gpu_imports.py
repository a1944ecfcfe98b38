# SPDX-License-Identifier: Apache-2.0
"""The tests for GPUs can be imported where there is none: CI, which does not run them, so finds names that are gone."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.usefixtures("forks_processes")
def test_all_modules_of_gpu_tests_import():
    names = [f"tests.gpu.{path.stem}" for path in sorted((ROOT / "tests/gpu").glob("*.py"))]
    assert len(names) > 30
    # What is forked from pytest has its imports, that of tests included, and knows no marks of tests/gpu.
    program = (
        "import sys, pytest\n"
        "from importlib import import_module\n"
        "pytest.mark._config = None\n"
        "sys.meta_path[:] = [one for one in sys.meta_path if type(one).__name__ != 'AssertionRewritingHook']\n"
        f"for name in {names}:\n    import_module(name)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
