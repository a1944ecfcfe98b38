# SPDX-License-Identifier: Apache-2.0
"""Commands of `stretto` as processes of their own, to be waited for and interrupted.

They are forked, and their ranks too (tests.processes); tests of the launcher start some that are not.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.processes import LIMIT, shared_server


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [shared_server().python, "-m", "stretto", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = process.communicate()
    return process.returncode, output, errors


def wait_for_step(out: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Wait until a run has written that step's metrics."""
    file, deadline = out / "metrics.jsonl", time.monotonic() + LIMIT
    while not file.exists() or len(file.read_text().splitlines()) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def children(process: subprocess.Popen[str]) -> list[int]:
    pid = shared_server().process_of(process.pid)
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in found if b"\0RANK=" in Path(f"/proc/{child}/environ").read_bytes()]
