# SPDX-License-Identifier: Apache-2.0
"""Tests of how long waits of a call may take if this rank, or one that it waits for, may be compiling."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.usefixtures("forks_torch_processes")
def test_the_call_after_a_kernel_was_loaded_has_time_for_a_peer_that_compiles_it(tmp_path: Path) -> None:
    """With an empty cache on disk, and with a warm one, as the rank has that waits."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    for _ in range(2):
        command = [sys.executable, "-m", "tests.tiles.limits"]
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert ended.returncode == 0, ended.stderr[-3000:]
