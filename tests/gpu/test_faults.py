# SPDX-License-Identifier: Apache-2.0
"""Tests of what happens to a run on GPUs, when it is interrupted or loses a rank in mid-step."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.commands import children, finish, start, wait_for_step

pytestmark = pytest.mark.ranks(2, own=(2, 4), among=(2, 4))
CONFIG = """
out = "{folder}/out"
ranks = {ranks}
device = "cuda"
[grid]
z = {ranks}
[model]
layers = 2
hidden = 256
heads = 4
[data]
path = "{folder}/text.txt"
[train]
steps = 1000000
batch = {batch}
seq_len = 128
checkpoint_every = 50
"""


@pytest.fixture
def running(tmp_path: Path, world: int) -> subprocess.Popen[str]:
    """A run on all GPUs, past its first checkpoint."""
    (tmp_path / "text.txt").write_text("It was a bright cold day in April. " * 2_000)
    (tmp_path / "run.toml").write_text(CONFIG.format(folder=tmp_path, ranks=world, batch=2 * world))
    process = start("train", tmp_path / "run.toml", "--json")
    wait_for_step(tmp_path / "out", 60, process)
    return process


def test_a_rank_that_is_killed_ends_the_job_with_its_name_and_the_last_checkpoint(
    running: subprocess.Popen[str], tmp_path: Path, world: int
) -> None:
    ranks = children(running)
    assert len(ranks) == world
    os.kill(ranks[1], signal.SIGKILL)
    killed_at = time.monotonic()
    status, _, errors = finish(running)
    assert time.monotonic() - killed_at < 30
    assert status == 1
    assert f"rank 1 of {world} failed: it was killed by SIGKILL" in errors
    assert f"the last checkpoint is {tmp_path / 'out' / 'checkpoints' / 'step-0000'}" in errors
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


@pytest.mark.exhaustive
def test_sigterm_writes_a_checkpoint_and_ends_the_run(running: subprocess.Popen[str], tmp_path: Path) -> None:
    running.send_signal(signal.SIGTERM)
    status, output, errors = finish(running)
    assert status == 128 + signal.SIGTERM, errors
    stopped = json.loads(output)
    assert stopped["stopped_by"] == "SIGTERM"
    assert stopped["checkpoint"] == str(tmp_path / "out" / "checkpoints" / f"step-{stopped['step']:08d}")
