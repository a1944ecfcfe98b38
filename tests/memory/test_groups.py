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
import os
import sys
import torch
import torch.distributed as dist
import stretto.memory.groups
for attempt in range(4):
    ranks = [os.fork()]
    if ranks[0]:
        ranks.append(os.fork())
    if 0 in ranks:  # it ends as scripts do
        store = dist.FileStore(f"{sys.argv[1]}/{attempt}", 2)
        dist.init_process_group("gloo", store=store, rank=len(ranks) - 1, world_size=2)
        groups = [dist.new_group() for _ in range(8)]
        kept = [torch.ones(1 << 16) for _ in range(64)]
        sys.setswitchinterval(100)  # gloo's threads do not get the GIL before the script lets it go
        works = [dist.all_reduce(each, group=groups[at % 8], async_op=True) for at, each in enumerate(kept)]
        for work in works:
            work.wait()
        del work, works  # as those of collectives that wait by themselves
        break
    print(*[os.waitpid(rank, 0)[1] for rank in ranks], flush=True)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="threads are no longer ended there, but sleep")
def test_scripts_that_end_right_after_a_collective_are_not_aborted(tmp_path):
    # Without the wait at exit, about every other pair has a rank that is aborted.
    command = [sys.executable, "-X", "faulthandler", "-c", ENDING, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "0 0\n" * 4), ended
