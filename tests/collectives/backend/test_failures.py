# SPDX-License-Identifier: Apache-2.0
"""The backend after a wait on a device has failed: every use of a result of the process raises."""

import contextlib
import time

import pytest
import torch
import torch.distributed as dist
from tests.processes import LIMIT
from tests.train.failure_runs import Workspace

from stretto.collectives import install
from stretto.collectives.algorithms import find
from stretto.memory import PeerError

WORDS = "waited in vain for rank 3"


def use_after_failure(use):
    """A collective ends well, then a wait of the process fails. Returns the error that this rank's next use raises."""
    group = dist.new_group(backend="stretto")
    install(find("ring-all-reduce").compile(ranks=2), group)
    work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
    deadline = time.monotonic() + LIMIT
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.01)
    workspace = Workspace()
    workspace.record.mark([1, 3])
    try:
        uses = {
            "wait": work.wait,
            "is_completed": work.is_completed,
            "call": lambda: dist.all_reduce(torch.ones(4), group=group),
            "destroy": lambda: dist.destroy_process_group(group),
        }
        with pytest.raises(PeerError) as error:
            uses[use]()
        return str(error.value)
    finally:
        dist.barrier()
        workspace.record.close()
        if use != "destroy":
            again = torch.ones(4)
            dist.all_reduce(again, group=group)
            assert again.tolist() == [2.0] * 4, "a failure that is over harms no call"
        with contextlib.suppress(PeerError, ValueError):
            dist.destroy_process_group(group)


@pytest.mark.parametrize("use", ["wait", "is_completed", "call", "destroy"])
def test_after_a_failed_wait_of_the_process_every_use_of_the_backend_raises(ranks, use):
    for message in ranks(2).run(use_after_failure, use):
        assert WORDS in message
