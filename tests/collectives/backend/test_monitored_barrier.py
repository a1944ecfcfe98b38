# SPDX-License-Identifier: Apache-2.0
"""`monitored_barrier` names the ranks that have not come, on every rank, whichever they are."""

from datetime import timedelta

import pytest
import torch.distributed as dist
from tests.processes import LIMIT

from stretto.collectives import monitored_barrier
from stretto.memory import PeerError


def miss_a_rank(late, wait_all_ranks):
    """Return the barrier's error on each rank where `late` ranks come once it has failed; then all meet in another."""
    rank = dist.get_rank()
    group = dist.new_group(backend="stretto", timeout=timedelta(seconds=LIMIT))
    part = dist.new_group([0], backend="stretto")
    monitored_barrier(part)  # of rank 0 alone: the others return at once
    monitored_barrier(group, timedelta(seconds=LIMIT))
    store = dist.distributed_c10d._get_default_store()
    if rank in late:
        store.wait(["failed"])
    with pytest.raises(PeerError) as raised:
        monitored_barrier(group, 0.1, wait_all_ranks)
    store.set("failed", "")
    monitored_barrier(group)
    return str(raised.value).removeprefix(f"[Rank {rank}]: ")


@pytest.mark.long
@pytest.mark.parametrize(
    ("late", "wait_all_ranks", "named"),
    [([0, 1], False, "Rank 0"), ([0, 2], True, "Ranks 0, 2"), ([1, 2], False, "Rank 1")],
)
def test_all_ranks_are_told_the_same_of_those_that_have_not_come(ranks, late, wait_all_ranks, named):
    told = f"{named} failed to pass monitoredBarrier in 100 ms"
    assert ranks(3).run(miss_a_rank, late, wait_all_ranks) == [told] * 3


def ask_wrongly():
    with pytest.raises(ValueError, match=r"backend is .*gloo, not stretto"):
        monitored_barrier()
    group = dist.new_group(backend="stretto")
    with pytest.raises(ValueError, match=r"timeout is 0 s, but must be at least 0\.001 s"):
        monitored_barrier(group, 0)


def test_groups_of_other_backends_and_limits_that_are_none_are_refused(ranks):
    ranks(1).run(ask_wrongly)
