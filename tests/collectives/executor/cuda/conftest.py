# SPDX-License-Identifier: Apache-2.0
"""Where kernels that the C++ compiler has compiled are kept, for all tests, workers, sessions and checkouts."""

import hashlib
import subprocess

import pytest
from tests.collectives.executor.cuda.emulated import COMPILER, HERE, OPTIONS

from stretto.native_code import cache_folder


@pytest.fixture(scope="session")
def folder():
    """A folder of kernels by their source, for this compiler and this emulation: that of all checkouts."""
    assert COMPILER is not None  # who has none skips these tests
    version = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout
    emulation = [(HERE / name).read_text() for name in ("emulation.h", "emulation.cpp")]
    key = hashlib.sha256(repr((version, emulation, OPTIONS)).encode()).hexdigest()[:16]
    path = cache_folder() / "emulated" / key
    path.mkdir(parents=True, exist_ok=True)
    return path
