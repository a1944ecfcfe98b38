# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory of GPUs that dies while a CUDA graph is captured; the GPU suite does it with real memory."""

import gc

import pytest
import torch

from stretto.memory import cuda


@pytest.fixture
def capture(monkeypatch):
    """Switch for whether this thread's stream is reported as captured."""
    state = {"is_capturing": False}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["is_capturing"])
    return state


def make(storage):
    memory = object.__new__(cuda.CudaMemory)
    memory._storage, memory._handle, memory._peers = storage, None, {1: storage[:1]}
    memory.itself = memory  # which nothing but the garbage collector frees
    return memory


@pytest.mark.long
def test_it_is_kept_until_the_graph_is_captured(capture):
    storage = torch.zeros(3)
    memory = make(storage)
    capture["is_capturing"] = True
    del memory
    gc.collect()
    assert [kept[0] is storage for kept in cuda._postponed] == [True]
    capture["is_capturing"] = False
    other = make(torch.zeros(2))
    del other
    gc.collect()
    assert cuda._postponed == []


def test_closed_memory_has_nothing_to_keep(capture):
    memory = make(torch.zeros(3))
    memory.close()
    capture["is_capturing"] = True
    del memory
    gc.collect()
    assert cuda._postponed == []


def test_memory_that_is_closed_meanwhile_is_kept_too(capture):
    storage = torch.zeros(3)
    memory = make(storage)
    capture["is_capturing"] = True
    memory.close()
    memory.close()
    assert [kept[0] is storage for kept in cuda._postponed] == [True]
    assert memory.held_bytes() == 0
    capture["is_capturing"] = False
    make(torch.zeros(2)).close()
    assert cuda._postponed == []
