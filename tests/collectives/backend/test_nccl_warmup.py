# SPDX-License-Identifier: Apache-2.0
"""NCCL connects a group's ranks when they first come together, since its first messages may be those of a few."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from stretto.collectives.backend.dispatcher import Dispatcher
from stretto.collectives.backend.factory import find_dispatcher
from stretto.collectives.backend.nccl_warmup import NcclWarmup
from stretto.collectives.backend.runner import FastestRun, Member


class Recorder:
    """An NCCL that counts its calls."""

    def __init__(self):
        self.calls = 0

    def allreduce(self, tensors):
        self.calls += 1
        return SimpleNamespace(wait=lambda: None)


class FastestRunner:
    """Runs what has 4 elements."""

    def start_fastest(self, call):
        return FastestRun("a Work" if call.inputs[0].numel() == 4 else None, "magic", "")


@pytest.fixture
def not_capturing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.mark.usefixtures("not_capturing")
@pytest.mark.parametrize(
    ("device", "operation", "elements", "connects"),
    [
        ("cuda", "allreduce", 4, 1),
        ("cuda", "allreduce", 5, 0),  # NCCL runs it, and connects
        ("cuda", "send", 4, 0),  # of some ranks
        ("cpu", "allreduce", 4, 0),
    ],
)
def test_it_connects_once_where_a_schedule_runs_on_gpus(device, operation, elements, connects):
    nccl, member = Recorder(), Member(0, 2, "g")
    dispatcher = Dispatcher(member, {"cpu": "gloo", "cuda": "nccl"}, NcclWarmup(nccl, member))
    dispatcher._runners[device] = FastestRunner()
    with FakeTensorMode():
        tensors = [torch.zeros(elements, device=device)]
        for _ in range(3):
            dispatcher(operation, tensors, tensors, "sum", 0, 1000, "")
    assert nccl.calls == connects


def test_it_connects_after_a_graph_is_captured(monkeypatch):
    nccl = Recorder()
    warmup = NcclWarmup(nccl, Member(0, 2, "g"))
    for is_capturing, calls in ((True, 0), (False, 1), (False, 1)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=is_capturing: now)
        warmup.warm_up(torch.device("cpu"))
        assert nccl.calls == calls


class OnHost(NcclWarmup):
    """Connects by a tensor on the host."""

    def warm_up(self, device):
        assert device == torch.device("cuda", 0)
        super().warm_up(torch.device("cpu"))


def wait_at_barriers(gpus):
    """How often NCCL was called after each of these barriers; gpus: by rank, the GPU that it uses then, or None."""
    rank = dist.get_rank()
    dispatcher = find_dispatcher(dist.new_group(backend="stretto"))
    nccl = Recorder()
    dispatcher._nccl_warmup = OnHost(nccl, dispatcher.member)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        for used in gpus:
            gpu = SimpleNamespace(uuid=str(used[rank]))
            patch.setattr(torch.cuda, "is_initialized", lambda now=used[rank] is not None: now)
            patch.setattr(torch.cuda, "get_device_properties", lambda device, now=gpu: now)
            dispatcher.warm_up_nccl_if_ready()  # as the C++ part does on machines with GPUs
            found.append(nccl.calls)
    return found


def test_it_connects_at_a_barrier_where_every_rank_uses_a_gpu_of_its_own(ranks):
    gpus = [("a", None), ("a", "a"), ("a", "b"), ("a", "b")]
    assert ranks(2).run(wait_at_barriers, gpus) == [[0, 0, 1, 1]] * 2
