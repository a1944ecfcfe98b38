# SPDX-License-Identifier: Apache-2.0
"""Groups that only their members make."""

import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from stretto.memory.groups import make_local_group, next_group_number

LIMIT = timedelta(seconds=20)


def make_and_destroy() -> list[float]:
    """Sums over groups that some ranks make while others have been destroyed, and over one of all ranks."""
    rank, found = dist.get_rank(), []
    others = [make_local_group([rank], "gloo", LIMIT, next_group_number()) for _ in range(2 + rank)]
    alone = make_local_group([rank], "gloo", LIMIT, next_group_number())
    for group in others:
        dist.destroy_process_group(group)
    again = [make_local_group([rank], "gloo", LIMIT, next_group_number()) for _ in range(3)]
    numbers = [torch.tensor(0) for _ in range(dist.get_world_size())]
    for pair in ([0, 1], [0, 1], [1, 2]):
        dist.all_gather(numbers, torch.tensor(next_group_number()))
        if rank in pair:
            group = make_local_group(pair, "gloo", LIMIT, max(int(numbers[member]) for member in pair))
            dist.all_reduce(value := torch.tensor(float(rank)), group=group)
            found.append(value.item())
            dist.barrier(group)
            dist.destroy_process_group(group)
    dist.all_reduce(value := torch.tensor(1.0), group=dist.new_group(timeout=LIMIT))
    assert len({group.group_name for group in (alone, *again)}) == 4
    return [*found, value.item()]


def test_groups_of_some_ranks_have_names_of_their_own(ranks):
    assert ranks(3).run(make_and_destroy) == [[1, 1, 3], [1, 1, 3, 3], [3, 3]]


ENDING = """
import sys
import torch
import torch.distributed as dist
import stretto.memory.groups
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=int(sys.argv[2]), world_size=2)
groups = [dist.new_group() for _ in range(8)]
kept = [torch.ones(1 << 16) for _ in range(64)]
sys.setswitchinterval(100)  # gloo's threads do not get the GIL before the script lets it go
for work in [dist.all_reduce(each, group=groups[number % 8], async_op=True) for number, each in enumerate(kept)]:
    work.wait()
"""


@pytest.mark.long
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="threads are no longer ended there, but sleep")
def test_scripts_that_end_right_after_a_collective_are_not_aborted(tmp_path):
    for attempt in range(2):  # without the wait at exit, each is aborted in most runs
        command = [sys.executable, "-X", "faulthandler", "-c", ENDING, str(tmp_path / str(attempt))]
        ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2)]
        ended = [(rank.communicate()[1], rank.returncode) for rank in ranks]
        assert [code for _, code in ended] == [0, 0], ended
