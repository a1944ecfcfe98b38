# SPDX-License-Identifier: Apache-2.0
"""Groups that only their members make."""

from datetime import timedelta

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
