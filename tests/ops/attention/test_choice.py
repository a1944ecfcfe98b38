# SPDX-License-Identifier: Apache-2.0
"""What `implementation="auto"` is: the fastest measured, else the predicted, within the memory for keys."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tests.ops.test_prediction import H200
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from stretto import ops
from stretto.memory.plain_data import broadcast_data
from stretto.ops import choices, confirmation
from stretto.ops.attention import choice
from stretto.ops.attention.choice import AttentionProblem
from stretto.tuning import TuningStore

LENGTH = 16
CALL = AttentionProblem(1, 32, 8, 8192, 128, 128, torch.bfloat16, True, None, False, 8)


def make(length=LENGTH):
    return torch.randn(3, 1, 2, length, 8).unbind()


def count_exchanges(q, k, v, **options):
    """Between two ranks a ring or a gather takes one exchange, and Ulysses two: of queries, keys and values, and of the
    output."""
    kinds = []

    def wrap(kind, make):
        kinds.append(kind)
        return make()

    ops.context_attention(q, k, v, causal=True, wrap_collective=wrap, **options)
    return len(kinds)


def choose_by_times(folder):
    """(default exchanges, ways measured, times stored, exchanges by times that say Ulysses, and of a resumed run)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRETTO_CACHE", f"{folder}/{dist.get_rank()}")  # all ranks take rank 0's
        default = count_exchanges(*make())
        measured = ops.tune_attention(*make(), causal=True)
        ((machine, times),) = TuningStore()._load().items() if dist.get_rank() == 0 else [("", {})]
        TuningStore().add(machine, {key: [2.0 - ("ulysses" in key)] for key in times})
        group = dist.new_group([0, 1])  # reads what is known now
        found = [count_exchanges(*make(length), group=group) for length in (LENGTH, LENGTH + 6, 2 * LENGTH)]
        q, k, v = make()
        documents = torch.tensor([0, 9, 2 * LENGTH])
        found.append(count_exchanges(q, k, v, group=group, documents=documents))
        found.append(count_exchanges(q, k, v.requires_grad_(), group=group))  # a training call was not measured
        kept = broadcast_data(choices.list_choices(), None, dict[str, choices.SavedChoices])
        choices.restore_choices(kept)
        patch.setenv("STRETTO_CACHE", f"{folder}/elsewhere {dist.get_rank()}")
        TuningStore().add(machine, {key: [2.0 - ("ring" in key)] for key in times})
        resumed = count_exchanges(*make(), group=dist.new_group([0, 1]))
        choices.restore_choices({})
        return default, sorted(measured), len(times), found, resumed


def test_auto_is_the_fastest_measured(ranks, tmp_path):
    for rank, found in enumerate(ranks(2).run(choose_by_times, str(tmp_path))):
        default, ways, stored, chosen, resumed = found
        assert default == 1
        assert ways == ["all_gather", "ring", "ulysses"]
        assert stored == 3 * (rank == 0)
        assert chosen == [2, 2, 1, 1, 1]
        assert resumed == 2


def count_in_graph(folder):
    """Exchanges of heads in a graph, by times that say Ulysses."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRETTO_CACHE", f"{folder}/{dist.get_rank()}")
        patch.setattr(choice, "find_way", lambda name, ways, *others: ways[-1])
        patch.setattr(choice, "find_times", lambda group, device: {("", 1): {}})
        torch.compile(lambda *each: ops.context_attention(*each, causal=True), backend=keep, fullgraph=True)(*make())
    return sum("exchange_heads" in str(node.target) for node in graphs[0].graph.nodes)


@pytest.mark.long
def test_a_graph_is_of_the_chosen_way(ranks, tmp_path):
    assert ranks(2).run(count_in_graph, str(tmp_path)) == [4, 4]


def confirm(folder):
    """(exchanges of a first call that is timed, how often it was timed, exchanges of the next, how often it was; how
    often with calls that are recomputed, and under a mode)."""
    timed = []

    def time_calls(runs, device, turns):
        timed.append(len(runs))
        for run in runs:
            run()
        return [3.0, 2.0, 1.0][: len(runs)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRETTO_CACHE", f"{folder}/{dist.get_rank()}")
        patch.setattr(confirmation, "can_time_calls", lambda device, size: True)
        patch.setattr(confirmation, "time_calls", time_calls)
        patch.setattr(choice, "find_times", lambda group, device, times={("", 1): {}}: times)
        q, k, v = make()
        q.requires_grad_()
        found = count_exchanges(q, k, v), list(timed), count_exchanges(q, k, v), list(timed)
        longer = [each.requires_grad_() for each in make(4 * LENGTH)]
        attend = partial(ops.context_attention, causal=True)
        checkpoint(attend, *longer, use_reentrant=False).sum().backward()  # counts what is saved
        with FlopCounterMode(display=False):  # as any dispatch mode, which would see what is timed
            attend(*make(16 * LENGTH))
        return *found, len(timed)


def test_a_first_call_confirms(ranks, tmp_path):
    assert ranks(2).run(confirm, str(tmp_path)) == [(2, [3], 2, [3], 2)] * 2


@pytest.mark.parametrize(
    ("changes", "speeds", "expected"),
    [
        ({}, H200, "all_gather"),
        ({"trains": True}, H200, "all_gather"),
        ({"length": 131072, "heads": 128, "kv_heads": 16}, H200, "ring"),  # 8 GiB of keys and values
        ({"heads": 16, "kv_heads": 16}, H200._replace(link=10e9), "ulysses"),  # of slow links
        ({"heads": 9, "kv_heads": 9}, H200._replace(link=10e9), "all_gather"),  # whose heads cannot be exchanged
        ({"window": 1024}, H200._replace(link=10e9), "all_gather"),
        ({}, None, "all_gather"),
    ],
)
def test_without_times_speeds_and_memory_decide(changes, speeds, expected, monkeypatch):
    monkeypatch.setattr(choice, "find_way", lambda name, ways, choose, group, device: choose())
    monkeypatch.setattr(choice, "find_times", lambda group, device: {})
    monkeypatch.setattr(choice, "find_agreed", lambda group, device: SimpleNamespace(speeds=speeds))
    assert choice.choose_way(CALL._replace(**changes), "any", torch.device("cuda")) == expected


def test_documents_are_not_measured():
    with pytest.raises(ValueError, match="tune_attention takes no documents"):
        ops.tune_attention(*make(), documents=torch.tensor([0, LENGTH]))
