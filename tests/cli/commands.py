"""Commands of `stretto` as processes of their own, to be waited for and interrupted."""

import os
import subprocess
import sys
import time
from pathlib import Path


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "stretto", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=240)
    return process.returncode, output, errors


def wait_for_step(out: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Wait until a run has written that step's metrics."""
    file, deadline = out / "metrics.jsonl", time.monotonic() + 120
    while not file.exists() or len(file.read_text().splitlines()) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def children(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
