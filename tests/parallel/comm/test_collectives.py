# SPDX-License-Identifier: Apache-2.0
"""Whatever a layer sends is marked as a collective, for recomputation to spare and for traces to name."""

import re
import time
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, checkpoint_activations, clip_grad_norm_, parallelize
from stretto.parallel.comm import collectives
from stretto.parallel.comm.collectives import COLLECTIVE_MARK, Started, collective, running_collective
from tests.parallel.training import Sizes, my_rows

BATCH, SEQ_LEN = 8, 8
CONFIG = GPTConfig(layers=2, hidden=32, heads=4, vocab=61, max_seq_len=SEQ_LEN)


class MarkedCalls(TorchDispatchMode):
    """Lists each collective that is dispatched, with the mark that it is issued under."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, str | None]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.found.add((func._schema.name, running_collective()))
        return func(*args, **(kwargs or {}))


def train(sizes: Sizes, shards_sequence: bool) -> tuple[set[tuple[str, str | None]], set[str]]:
    """Return what two steps send, with its marks; and the marks in a trace of the second."""
    data, x, y, z = sizes
    grid = Grid(data=data, x=x, y=y, z=z)
    torch.manual_seed(3)
    model = parallelize(GPT(CONFIG), grid, shard_sequence=shards_sequence)
    checkpoint_activations(model)
    text = torch.randint(CONFIG.vocab, (BATCH, SEQ_LEN + 1))[my_rows(grid, BATCH)]

    def step() -> None:
        model(text[:, :-1], text[:, 1:]).backward()
        clip_grad_norm_(model.parameters(), 1.0, grid)
        model.zero_grad()

    with MarkedCalls() as calls:
        step()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        step()
    names = {event.name for event in trace.events() if event.name.startswith(COLLECTIVE_MARK)}
    return calls.found, {name.removeprefix(COLLECTIVE_MARK) for name in names}


class SlowWork:
    """A Work of gloo that ends, or fails, in the third wait for it."""

    def __init__(self, *, fails: bool) -> None:
        self._fails, self.limits = fails, []

    def is_completed(self) -> bool:
        raise AssertionError("it takes the Work's lock with the interpreter's, and deadlocks under a profiler")

    def wait(self, limit: timedelta | None = None) -> None:
        self.limits.append(limit)
        if len(self.limits) > 2:
            if self._fails:
                raise RuntimeError("Connection closed by peer")
            return
        assert limit is not None
        time.sleep(limit.total_seconds())
        raise RuntimeError("Operation timed out!")


@pytest.mark.parametrize("fails", [False, True])
def test_a_wait_looks_at_others_until_its_work_ends_and_never_asks_whether_it_has(fails, monkeypatch):
    looks = []
    monkeypatch.setattr(collectives, "LOOKS_EVERY", 0.2)
    monkeypatch.setattr(collectives, "look_at_others", lambda: looks.append(True))
    work = SlowWork(fails=fails)
    with pytest.raises(RuntimeError, match="closed by peer") if fails else nullcontext():
        Started(work, "all_gather", 0, 1, waits_on_host=True).wait()
    assert (work.limits[:3], len(looks)) == ([timedelta(seconds=0.2)] * 3, 3 if fails else 2)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("shards_sequence", [False, True])
def test_all_that_a_step_sends_is_marked_and_named_in_a_trace(ranks, shards_sequence):
    sizes = (1, 2, 1, 2) if shards_sequence else (1, 1, 2, 2)
    expected = {
        "c10d::allreduce_": "all_reduce",
        "c10d::_allgather_base_": "all_gather",
        "c10d::_reduce_scatter_base_": "reduce_scatter",
    }
    for found, traced in ranks(4).run(train, sizes, shards_sequence):
        assert found == set(expected.items())
        assert traced == set(expected.values())


def test_a_mark_inside_another_ends_with_its_own_block():
    assert running_collective() is None
    with collective("all_gather_matmul"):
        with suppress(ZeroDivisionError), collective("all_gather"):
            assert running_collective() == "all_gather"
            raise ZeroDivisionError
        assert running_collective() == "all_gather_matmul"
    assert running_collective() is None


def notes_of_a_rank_alone() -> list[str]:
    group = Grid(data=2, timeout=2).group("data")
    if group.rank() == 1:
        return []
    with pytest.raises(RuntimeError) as caught:
        collectives.all_reduce(torch.ones(3), group)
    return caught.value.__notes__


def test_a_collective_that_a_rank_does_not_call_is_named_with_its_ranks(ranks):
    (note,), others = ranks(2).run(notes_of_a_rank_alone)
    assert re.search(r"in all_reduce number \d+ of group world \(ranks 0, 1\)", note), note
    assert others == []
