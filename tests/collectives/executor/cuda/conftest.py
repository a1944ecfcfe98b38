# SPDX-License-Identifier: Apache-2.0
"""Where kernels that the C++ compiler has compiled are kept, for all tests, workers and sessions."""

import hashlib
import subprocess
from pathlib import Path

import pytest
from tests.collectives.executor.cuda.emulated import COMPILER, HERE, OPTIONS

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="session")
def folder():
    """A folder of kernels by their source, for this compiler and this emulation."""
    assert COMPILER is not None  # who has none skips these tests
    version = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout
    emulation = [(HERE / name).read_text() for name in ("emulation.h", "emulation.cpp")]
    key = hashlib.sha256(repr((version, emulation, OPTIONS)).encode()).hexdigest()[:16]
    path = ROOT / "build" / "emulated" / key
    path.mkdir(parents=True, exist_ok=True)
    return path
