# SPDX-License-Identifier: Apache-2.0
"""Functions of ranks whose first calls are timed, by a clock that a test sets."""

import contextlib
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tests.ops.operands import random_of
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from stretto import ops
from stretto.memory import PeerError
from stretto.memory.plain_data import broadcast_data
from stretto.ops import choices, confirmation
from stretto.tuning import TuningStore, machine_key


@contextlib.contextmanager
def timed_by(seconds, folder, can_time=True):
    """First calls run a kernel and the library, and take so many seconds on this rank; yields how often they ran."""
    timed = SimpleNamespace(count=0, error=None, runs_calls=True, after=lambda: None)

    def time_calls(runs, device, turns):
        timed.count += 1
        if timed.error is not None:
            raise timed.error
        for run in runs * timed.runs_calls:
            run()
        timed.after()
        return seconds

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRETTO_CACHE", str(folder))
        patch.setattr(confirmation, "can_time_calls", lambda device, size: can_time and confirmation._budget.kinds > 0)
        patch.setattr(confirmation, "_budget", confirmation._Budget())
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


def meet_hazards(folder):
    """What first calls that are timed did to what is around them, by the hazard's name: True is well."""
    rank, found = dist.get_rank(), {}
    x, weight = random_of(rank, 8, 32), random_of(20 + rank, 16, 32)
    with timed_by([2.0, 1.0], Path(folder) / str(rank)) as timed:
        out = torch.full((16, 16), 7.0)
        touched = []
        timed.after = lambda: touched.append(bool((out != 7.0).any()))
        ops.all_gather_matmul(x, weight, out=out)
        found["out"] = touched == [False] and bool((out != 7.0).all())

        def is_right(call, rows):
            """True if calls are timed, and gradients are those of a call that is not, each leaf's once."""
            results, before = [], timed.count
            for by in (call, partial(ops.all_gather_matmul, implementation="library")):
                leaves, hooks = [each.clone().requires_grad_() for each in (random_of(rank, rows, 32), weight)], []
                leaves[0].register_post_accumulate_grad_hook(hooks.append)
                by(*leaves).square().sum().backward()
                results.append([leaf.grad for leaf in leaves])
            torch.testing.assert_close(*results, atol=1e-4, rtol=1e-5)
            return timed.count >= before + 2 and len(hooks) == 1  # forward, and the reduce-scatter of its backward pass

        found["gradients"] = is_right(ops.all_gather_matmul, 20)
        for rows, reentrant in ((3, False), (1, True)):
            recomputed = partial(checkpoint, ops.all_gather_matmul, use_reentrant=reentrant)
            found[f"recomputation, reentrant {reentrant}"] = is_right(recomputed, rows)
        with FlopCounterMode(display=False) as counter:
            ops.all_gather_matmul(random_of(rank, 50, 32), weight)
        found["dispatch mode"] = counter.get_total_flops() == 2 * 100 * 16 * 32
        thread = threading.Thread(target=lambda: ops.matmul_reduce_scatter(x, weight))
        thread.start()
        thread.join()
        before = timed.count
        ops.matmul_reduce_scatter(x, weight)
        ops.matmul_all_reduce(x[:5], weight, invariant=True)
        ops.all_gather_matmul(random_of(rank, 200, 32), weight, implementation="library")
        found["another thread, and no choice"] = timed.count == before

    with timed_by([2.0, 1.0], Path(folder) / f"few {rank}") as timed:
        confirmation._budget.kinds = 2 + rank  # another group's calls took one of rank 0's
        for rows in (1, 2, 4, 8, 16):
            ops.all_gather_matmul(random_of(rank, rows, 32), weight)
        ran = ops.counts()
        found["ever new shapes"] = timed.count == 2
        found["which run as predicted"] = [ran["all_gather_matmul", how] for how in ("library", "kernel")] == [2, 3]
    with timed_by(None if rank else [2.0, 1.0], Path(folder) / f"late {rank}") as timed:
        for call in (ops.all_gather_matmul, ops.matmul_reduce_scatter):
            call(x, weight, dist.new_group([0, 1]))
        found["a wait in vain"] = timed.count == 1
    for failing in ([0, 1], [1]):  # all ranks, as where no kernel can be compiled, and one, which has no memory
        with timed_by([2.0, 1.0], Path(folder) / f"failing {failing} {rank}") as timed:
            timed.runs_calls = False  # a rank's would wait for the other's
            timed.error = torch.OutOfMemoryError("of GPU 1") if rank in failing else None
            try:
                ops.all_gather_matmul(x, weight, dist.new_group([0, 1]))
                found["failing on all"] = True
            except PeerError as error:
                found["failing on one"] = "failed on rank 1" in str(error) and "STRETTO_CONFIRM=0" in str(error)
    return found
