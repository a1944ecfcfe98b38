# SPDX-License-Identifier: Apache-2.0
"""Collectives by way of the host, on CPU tensors: kernels for the device CPU, which "CUDA", also gloo here, serves."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from stretto.collectives.backend import host_fallback
from stretto.collectives.backend.dispatcher import Dispatcher
from stretto.collectives.backend.runner import Member
from stretto.memory import shared_gpus

RANKS = 3
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.uint8)
MOVED = (*DTYPES, torch.float8_e4m3fn, torch.bool, torch.complex64)


@contextmanager
def installed() -> Iterator[list[str]]:
    """The kernels on CPU tensors, and the names of the operators that went by way of the host."""
    ran: list[str] = []
    is_staged = shared_gpus._HostStagingKernels._is_staged

    def note(self, op, group):
        answer = is_staged(self, op, group)
        ran.append(op._schema.name.split("::")[1] if answer else "left alone")
        return answer

    with mock.patch.object(shared_gpus._HostStagingKernels, "_is_staged", note):
        shared_gpus.install("CPU", "CUDA")
        try:
            yield ran
        finally:
            shared_gpus.uninstall()


def fill(value: float, size: int, dtype: torch.dtype) -> Tensor:
    return torch.full((size,), value).to(dtype)


def expect(found: Tensor, rows: list[float], size: int) -> None:
    """The tensor holds each of these numbers `size` times."""
    expected = torch.tensor(rows).repeat_interleave(size).to(found.dtype)
    assert torch.equal(found.flatten().view(torch.uint8), expected.view(torch.uint8)), (found, expected)


def reduce_everything() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    total = sum(range(1, world + 1))
    with installed() as ran:
        for dtype in DTYPES:
            mine = fill(rank + 1, 4, dtype)
            dist.all_reduce(mine)
            expect(mine, [total], 4)
            part = fill(0, 2, dtype)
            dist.reduce_scatter_tensor(part, fill(rank + 1, 2 * world, dtype))
            expect(part, [total], 2)
            dist.reduce_scatter(part, [fill((rank + 1) * index, 2, dtype) for index in range(world)])
            expect(part, [total * rank], 2)
            most = fill(rank + 1, 4, dtype)
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            expect(most, [world], 4)
            at_root = fill(rank + 1, 4, dtype)
            dist.reduce(at_root, 1)
            if rank == 1:
                expect(at_root, [total], 4)
    assert set(ran) == {"allreduce_", "_reduce_scatter_base_", "reduce_scatter_", "reduce_"}


def move_everything() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    numbers = [float(index % 2) for index in range(world)]
    with installed() as ran:
        for dtype in MOVED:
            mine = fill(numbers[rank], 3, dtype)
            whole = fill(0, 3 * world, dtype)
            dist.all_gather_into_tensor(whole, mine)
            expect(whole, numbers, 3)
            listed = [fill(0, 3, dtype) for _ in range(world)]
            dist.all_gather(listed, mine)
            expect(torch.cat(listed), numbers, 3)
            sent = fill(1, 1, dtype).reshape(())  # a tensor without dims
            if rank != 1:
                sent.zero_()
            dist.broadcast(sent, 1)
            expect(sent.reshape(1), [1], 1)
            taken = fill(0, 3 * world, dtype)
            dist.all_to_all_single(taken, fill(numbers[rank], 3 * world, dtype))
            expect(taken, numbers, 3)
            uneven = fill(0, sum(range(1, world + 1)), dtype)  # rank r sends r + 1 numbers to each
            counts = [index + 1 for index in range(world)]
            dist.all_to_all_single(uneven, fill(numbers[rank], (rank + 1) * world, dtype), counts, [rank + 1] * world)
            expect(uneven, [numbers[i] for i in range(world) for _ in range(i + 1)], 1)
            lists = [fill(0, index + 1, dtype) for index in range(world)]
            dist.all_to_all(lists, [fill(numbers[rank], rank + 1, dtype) for _ in range(world)])
            expect(torch.cat(lists), [numbers[i] for i in range(world) for _ in range(i + 1)], 1)
            gathered = [fill(0, 3, dtype) for _ in range(world)] if rank == 0 else None
            dist.gather(mine, gathered)
            if gathered is not None:
                expect(torch.cat(gathered), numbers, 3)
            own = fill(0, 3, dtype)
            dist.scatter(own, [fill(number, 3, dtype) for number in numbers] if rank == 0 else None)
            expect(own, [numbers[rank]], 3)
    assert "left alone" not in ran
    assert set(ran) == {
        "_allgather_base_", "allgather_", "broadcast_", "alltoall_base_", "alltoall_", "gather_", "scatter_"
    }  # fmt: skip


def call_functional_collectives() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    group, total = dist.group.WORLD, sum(range(1, world + 1))
    ops = torch.ops._c10d_functional
    with installed() as ran:
        name = group.group_name
        for dtype in DTYPES:
            mine = fill(rank + 1, 2, dtype)
            expect(ops.wait_tensor(ops.all_reduce(mine, "sum", name)), [total], 2)
            expect(mine, [rank + 1], 2)
            expect(ops.wait_tensor(ops.all_gather_into_tensor(mine, world, name)), list(range(1, world + 1)), 2)
            out = fill(0, 2 * world, dtype)
            assert ops.wait_tensor(ops.all_gather_into_tensor_out(mine, world, name, out=out)) is out
            expect(out, list(range(1, world + 1)), 2)
            expect(ops.wait_tensor(ops.reduce_scatter_tensor(out, "sum", world, name)), [world * (rank + 1)], 2)
            expect(ops.wait_tensor(ops.broadcast(mine, 1, name)), [2], 2)
            sizes = [2] * world
            expect(ops.wait_tensor(ops.all_to_all_single(out, sizes, sizes, name)), [rank + 1] * world, 2)
            both = ops.all_reduce_coalesced([mine, fill(1, 3, dtype)], "sum", name)
            expect(ops.wait_tensor(both[0]), [total], 2)
            expect(ops.wait_tensor(both[1]), [world], 3)
            assert ops.wait_tensor(ops.all_reduce_(mine, "sum", name)) is mine
            expect(mine, [total], 2)
        expect(functional.all_reduce(torch.ones(2), "avg", group) + 0, [1], 2)

        compiled = torch.compile(lambda x: ops.wait_tensor(ops.all_reduce(x * 2, "sum", name)) + 1, backend="aot_eager")
        expect(compiled(torch.ones(2)), [2 * world + 1], 2)
        mesh = init_device_mesh("cpu", (world,))
        matrix = torch.arange(36.0).view(6, 6)
        cut = distribute_tensor(matrix, mesh, [Shard(0)])
        assert torch.equal(cut.redistribute(placements=[Shard(1)]).full_tensor(), matrix)
        assert torch.equal((cut @ cut).full_tensor(), matrix @ matrix)
    assert "left alone" not in ran


def exchange_messages() -> None:
    """Receives are posted before sends, so a receive that blocked would wait for ever."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with installed() as ran:
        for dtype in (torch.float32, torch.int16):
            sent, taken = fill(rank + 1, 3, dtype), fill(0, 3, dtype)
            following, preceding = (rank + 1) % world, (rank - 1) % world
            receive = dist.P2POp(dist.irecv, taken, preceding)
            for work in dist.batch_isend_irecv([receive, dist.P2POp(dist.isend, sent, following)]):
                work.wait()
            expect(taken, [preceding + 1], 3)
    assert sorted(set(ran)) == ["recv_", "send"]


def call_in_other_ways() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    with installed():
        scattered = torch.zeros(4, world).t()  # not contiguous
        scattered[rank] = 1
        dist.all_reduce(scattered)
        assert scattered.eq(1).all()
        work = dist.all_reduce(scattered, async_op=True)
        work.wait()
        assert work.is_completed()
        assert scattered.eq(world).all()
        dist.barrier()
        shared_gpus.barrier(None, torch.device("cpu"))
        with torch.inference_mode():
            x = torch.ones(2)
            dist.all_reduce(x)
            assert x.eq(world).all()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2, bias=False))
        model(torch.full((1, 2), float(rank))).sum().backward()
        assert model.module.weight.grad.eq((world - 1) / 2).all()
    before = torch.ones(2)
    dist.all_reduce(before)  # what was installed is gone
    assert before.eq(world).all()


def refuse_another_backend() -> None:
    with installed():
        other = SimpleNamespace(name=lambda: "nccl")
        group = SimpleNamespace(_get_backend=lambda device: other if device.type == "cpu" else SimpleNamespace())
        kernels = shared_gpus._HostStagingKernels("CPU", "CUDA")
        group = SimpleNamespace(
            _get_backend=lambda device: (
                other if device == torch.device("cuda") else SimpleNamespace(name=lambda: "gloo")
            )
        )
        kernels.device = torch.device("cuda")
        with pytest.raises(RuntimeError, match="backend for cuda is nccl: use cpu:gloo,cuda:"):
            shared_gpus._HostStagingKernels._is_staged(kernels, "c10d::allreduce_", group)


def fall_back_by_host() -> None:
    """The backend stretto leaves calls to a backend inside, while there is none for GPUs."""
    rank, world = dist.get_rank(), dist.get_world_size()
    member = Member(rank, world, "a group")
    gloo = dist.group.WORLD._get_backend(torch.device("cpu"))
    total = sum(range(1, world + 1))
    with installed() as ran:
        call = host_fallback.HostFallback(
            Dispatcher(member, {"cpu": "gloo"}), gloo, dist.HashStore(), member, device_type="cpu"
        )

        def run(operation, outputs, inputs, reduction="", root=0, note=""):
            work = call(operation, outputs, inputs, reduction, root, 60_000, note)
            assert work is not None
            work.wait()

        mine, whole = torch.full((2,), rank + 1.0), torch.zeros(2 * world)
        run("_allgather_base", [whole], [mine])
        expect(whole, list(range(1, world + 1)), 2)
        part = torch.zeros(2)
        run("_reduce_scatter_base", [part], [whole], "avg")
        expect(part, [rank + 1], 2)
        run("allreduce", [mine], [mine], "sum")
        expect(mine, [total], 2)
        run("allreduce_coalesced", [mine, part], [mine, part], "max")
        expect(part, [world], 2)
        sent = torch.full((2,), float(rank))
        run("broadcast", [sent], [sent], root=2)
        expect(sent, [2], 2)
        taken = torch.zeros(2 * world)
        run("alltoall_base", [taken], [whole], note="even sizes")
        expect(taken, [rank + 1] * world, 2)
        listed = [torch.zeros(2) for _ in range(world)]
        run("allgather", listed, [sent])
        run("reduce_scatter", [part], listed, "min")
        expect(part, [2], 2)
        run("alltoall", listed, [torch.full((2,), float(rank)) for _ in range(world)])
        expect(torch.cat(listed), list(range(world)), 2)
        run("reduce", [sent], [sent], "sum", root=0)
        with pytest.raises(RuntimeError, match=r"alltoall_base \(uneven sizes\) on GPUs .* STRETTO_SHARE_GPUS"):
            run("alltoall_base", [taken], [whole], note="uneven sizes")
        assert call("barrier", [], [], "", 0, 60_000, "") is None
        assert call.member is member
    assert "left alone" not in ran


@pytest.mark.parametrize(
    "check",
    [
        reduce_everything,
        move_everything,
        call_functional_collectives,
        exchange_messages,
        call_in_other_ways,
        fall_back_by_host,
    ],
)
def test_collectives_that_go_by_way_of_the_host_give_what_they_give_on_it(ranks, check):
    ranks(RANKS).run(check)


def test_a_group_of_nccl_is_refused_while_gpus_are_shared(ranks):
    ranks(1).run(refuse_another_backend)


@pytest.mark.parametrize(("value", "is_on"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_the_switch_is_an_environment_variable(monkeypatch, value, is_on):
    monkeypatch.delenv(shared_gpus.SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv(shared_gpus.SWITCH, value)
    assert shared_gpus.is_enabled() == is_on


def test_without_the_switch_nccl_carries_gpu_tensors_and_each_rank_has_a_gpu(monkeypatch):
    monkeypatch.delenv(shared_gpus.SWITCH, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert shared_gpus.default_backend("cuda") == "cpu:gloo,cuda:nccl"
    assert shared_gpus.default_backend("cpu") == "gloo"
    assert [shared_gpus.choose_gpu(rank) for rank in range(2)] == [0, 1]
    with pytest.raises(ValueError, match=r"local rank 2, but the machine has 2 GPUs.*STRETTO_SHARE_GPUS=1"):
        shared_gpus.choose_gpu(2)
    assert shared_gpus.suffix() == ""


def test_with_the_switch_gloo_carries_gpu_tensors_and_ranks_take_gpus_in_turn(monkeypatch):
    monkeypatch.setenv(shared_gpus.SWITCH, "1")
    monkeypatch.delenv(shared_gpus.OVERLAPPING, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    try:
        assert shared_gpus.default_backend("cuda") == "cpu:gloo,cuda:gloo"
        assert shared_gpus.os.environ[shared_gpus.OVERLAPPING] == "1"  # torch reads it at the first rendezvous
    finally:
        shared_gpus.uninstall()
    assert [shared_gpus.choose_gpu(rank) for rank in range(5)] == [0, 1, 0, 1, 0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="the machine has 0 GPUs"):
        shared_gpus.choose_gpu(0)
    assert "shared" in shared_gpus.suffix()
