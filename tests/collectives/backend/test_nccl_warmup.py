# SPDX-License-Identifier: Apache-2.0
"""NCCL connects a group's ranks when they first come together, since its first messages may be those of a few."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensorMode

from stretto.collectives.backend import native
from stretto.collectives.backend.dispatcher import Dispatcher, find_dispatcher
from stretto.collectives.backend.nccl_warmup import NcclWarmup
from stretto.collectives.backend.runner import FastestRun, Member
from stretto.memory import PeerError


class Recorder:
    """An NCCL that counts its calls."""

    def __init__(self):
        self.calls = 0
        self.bound_device_id = None

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
    """Connects by a tensor on the host, and keeps the GPU that it should be on."""

    device = None

    def warm_up(self, device):
        super().warm_up(torch.device("cpu"))
        self.device = self.device or device


def wait_at_barriers(used, uuids):
    """Return the GPU that NCCL connects, if any, at two barriers. used: by rank, the GPU in use, or None."""
    rank = dist.get_rank()
    dispatcher = find_dispatcher(dist.new_group(backend="stretto"))
    nccl = Recorder()
    dispatcher._nccl_warmup = OnHost(nccl, dispatcher.member)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "is_initialized", lambda: used[rank] is not None)
        patch.setattr(torch.cuda, "current_device", lambda: used[rank])
        patch.setattr(torch.cuda, "device_count", lambda: len(uuids))
        patch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index]))
        for _ in range(2):
            dispatcher.warm_up_nccl_if_ready()  # as the C++ part does on machines with GPUs
    assert nccl.calls == (dispatcher._nccl_warmup.device is not None)
    return nccl.calls and dispatcher._nccl_warmup.device.index


@pytest.mark.parametrize(
    ("used", "uuids", "connected"),
    [
        ((1, 0), "ab", [1, 0]),  # chosen
        ((0, None), "ab", [0, 1]),
        ((None, None), "ab", [0, 1]),  # as NCCL's own barriers take it
        ((0, 0), "ab", [0, 1]),  # nobody has called set_device
        ((0, None), "a", [0, 0]),  # more ranks than GPUs
    ],
)
def test_it_connects_at_a_barrier_where_every_rank_has_a_gpu_of_its_own(ranks, used, uuids, connected):
    assert ranks(2).run(wait_at_barriers, used, uuids) == connected


def send_within_a_subset(group_call, all_come):
    """A batch of messages that reaches the dispatcher on rank 0, or on all. group_call: what NCCL has run before."""
    member = Member(dist.get_rank(), 2, dist.group.WORLD.group_name)
    dispatcher = Dispatcher(member, {"cpu": "gloo", "cuda": "nccl"}, NcclWarmup(Recorder(), member))
    dispatcher._runners["cuda"] = FastestRunner()
    with FakeTensorMode():
        tensors = [torch.zeros(5, device="cuda")]
        if group_call:
            dispatcher(group_call, tensors, tensors, "sum", 0, 1000, "")
        if all_come:
            dispatcher("send", tensors, tensors, "", 0, 60_000, "coalescing")
        if dist.get_rank() == 0:
            dispatcher("send", tensors, tensors, "", 0, 100, "")  # alone it needs no other ranks
            dispatcher("recv", tensors, tensors, "", 0, 100, "coalescing")


@pytest.mark.parametrize(("group_call", "all_come"), [("gather", False), ("allreduce", False), (None, True)])
def test_some_ranks_send_once_nccl_has_connected_all(ranks, group_call, all_come):
    ranks(2).run(send_within_a_subset, group_call, all_come)


def send_too_early():
    if dist.get_rank() == 0:
        with pytest.raises(PeerError, match=r"and rank 1 has not within 0.1 s.*call torch.distributed.barrier\(\)"):
            send_within_a_subset(None, False)
    else:
        send_within_a_subset(None, False)


@pytest.mark.long
def test_messages_that_nccl_would_wait_for_raise_within_the_limit(ranks):
    ranks(2).run(send_too_early)


def exchange_a_batch():
    """A coalesced batch of messages that gloo runs, beside an NCCL that does nothing."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("batch", store), rank, 2, timedelta(seconds=60))
    nccl = c10d.FakeProcessGroup._create_internal(rank, 2)
    backend = native.make_backend(rank, 2, gloo, nccl, Dispatcher(Member(rank, 2, "g"), {"cpu": "gloo"}), None, 60_000)
    group, cpu = dist.ProcessGroup(store, rank, 2), torch.device("cpu")
    group._register_backend(cpu, dist.ProcessGroup.BackendType.CUSTOM, backend)
    received = torch.zeros(3)
    group._start_coalescing(cpu)
    group.recv([received], 1 - rank, 0)
    if rank == 0:
        store.wait(["rank 1 waits"])
    group.send([torch.full((3,), rank + 1.0)], 1 - rank, 0)
    work = group._end_coalescing(cpu)
    if rank == 1:
        assert not work.is_completed()  # rank 0 has not sent anything
        store.set("rank 1 waits", "")
    work.wait()
    return received.tolist()


def test_a_coalesced_batch_waits_for_messages_that_gloo_carries(ranks):
    assert ranks(2).run(exchange_a_batch) == [[2.0] * 3, [1.0] * 3]
