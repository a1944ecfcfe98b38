# SPDX-License-Identifier: Apache-2.0
"""Functions of ranks whose first calls are timed, by a clock that a test sets."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tests.ops.operands import random_of

from stretto import ops
from stretto.memory.plain_data import broadcast_data
from stretto.ops import choices, confirmation
from stretto.tuning import TuningStore, machine_key


@contextlib.contextmanager
def timed_by(seconds, folder, can_time=True):
    """First calls run a kernel and the library, and take so many seconds on this rank; yields how often they ran."""
    timed = SimpleNamespace(count=0)

    def time_calls(runs, device):
        timed.count += 1
        for run in runs:
            run()
        return seconds

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRETTO_CACHE", str(folder))
        patch.setattr(choices, "can_time_calls", lambda device: can_time)
        patch.setattr(confirmation, "time_calls", time_calls)
        choices.restore_choices({})
        try:
            yield timed
        finally:
            choices.restore_choices({})


def call_all(m=8, group=None):
    """Each operator's product of rows that all ranks can compute, and what it should be."""
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs = [random_of(peer, m, 32) for peer in range(world)]
    weights = [random_of(10 + peer, 16, 32) for peer in range(world)]
    gathered, weight = torch.cat(inputs), weights[rank]
    total = sum(x @ w.t() for x, w in zip(inputs, weights, strict=True))
    product, rows = ops.all_gather_matmul_gathered(inputs[rank], weight, group)
    assert torch.equal(rows, gathered)
    results = [
        ops.all_gather_matmul(inputs[rank], weight, group),
        product,
        ops.matmul_reduce_scatter(inputs[rank], weight, group),
        ops.matmul_all_reduce(inputs[rank], weight, group),
    ]
    own = total[rank * m // world : (rank + 1) * m // world]
    for result, right in zip(results, (gathered @ weight.t(), gathered @ weight.t(), own, total), strict=True):
        torch.testing.assert_close(result, right, atol=1e-4, rtol=1e-5)
    return results


def choose_by_times(folder, times):
    """(implementations that ran, how often calls were timed first and again, problems in rank 0's store)."""
    rank = dist.get_rank()
    with timed_by(times[rank], Path(folder) / str(rank)) as timed:
        before = dict(ops.counts())
        call_all()
        first = timed.count
        call_all()
        ran = {how for (_, how), count in ops.counts().items() if count > before.get((_, how), 0)}
        kept = {key.split()[1] for key in TuningStore().read(machine_key(torch.device("cpu")))}
        choices.clear_choices()
        call_all()  # by the store, which has measured them
        return ran, first, timed.count, kept


def choose_where_one_rank_cannot(folder):
    """(how often calls were timed, what ran) where the last rank captures a graph, say."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    with timed_by([2.0, 1.0], folder, can_time=not is_last) as timed:
        call_all()
        return timed.count, {how for _, how in ops.counts()}


def stop_and_resume(folder, times):
    """(bits of a run and of one that resumes from its choices are equal, choices, how often the latter timed)."""
    rank = dist.get_rank()
    with timed_by(times, Path(folder) / str(rank)):
        expected = call_all()
        kept = broadcast_data(choices.list_choices(), None, dict[str, choices.SavedChoices])
    others = [2.0, 1.0] if times is None else times[::-1]
    with timed_by(others, Path(folder) / f"elsewhere {rank}") as timed:  # another cache, where others are faster
        choices.restore_choices(kept)
        group = dist.new_group(range(dist.get_world_size()))  # whose first calls could be timed
        resumed = call_all(group=group)
        again = choices.list_choices() if rank == 0 else kept
        is_same = all(torch.equal(*pair) for pair in zip(expected, resumed, strict=True))
        if times is not None:
            call_all(m=10, group=group)  # nearly as many rows as were measured
        return is_same, again == kept, timed.count, set(next(iter(kept.values())).choices.values())
