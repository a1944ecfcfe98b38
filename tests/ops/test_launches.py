"""Launches that are known are those that Triton itself would make."""

import os
import random
import subprocess
import sys

SEED = random.randrange(2**31)


def test_known_launches_are_those_that_triton_would_make() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.recorded", str(SEED), "40"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert ended.returncode == 0, (SEED, ended.stdout, ended.stderr[-3000:])
