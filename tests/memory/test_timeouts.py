# SPDX-License-Identifier: Apache-2.0
"""Time limits that ranks of a group know of it, and of each other."""

import subprocess
import sys

import pytest
import torch.distributed as dist

from stretto.memory import group_timeout

GROUPS = """
import sys
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from stretto.memory import group_timeout

store = dist.FileStore(sys.argv[1], 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=77))
short = dist.new_group([0], timeout=timedelta(seconds=5.5))
both = dist.new_group([0], backend="cpu:gloo", timeout=timedelta(minutes=2))
default = dist.new_group([0])
print([group_timeout(group) for group in (None, short, both, default)])
distributed_c10d._set_pg_timeout(timedelta(seconds=3), short)
print(group_timeout(short))
dist.destroy_process_group()
"""


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("forks_torch_processes")
@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_a_groups_time_limit_is_the_one_that_it_was_made_with(debug, tmp_path, monkeypatch):
    if debug != "OFF":  # else the process may be forked
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", debug)
    command = [sys.executable, "-c", GROUPS, str(tmp_path / "store")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split("\n")[0] == "[77.0, 5.5, 120.0, 1800.0]"
    if debug == "OFF":
        assert ended.stdout.split("\n")[1] == "3.0"


def test_there_is_no_time_limit_without_a_group():
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="there is no process group"):
        group_timeout(None)
