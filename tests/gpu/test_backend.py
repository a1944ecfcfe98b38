# SPDX-License-Identifier: Apache-2.0
"""The backend `stretto` on GPUs: frameworks train as on NCCL, and the counter shows schedules at work."""

import json
import os
import random
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import stretto  # noqa: F401  (makes the backend's name known)
from stretto.collectives import call_counts, install
from stretto.collectives.algorithms import find
from stretto.collectives.backend.dispatcher import Dispatcher
from stretto.memory import shared_gpus
from tests.gpu.watched import run_watched

SEED = 20261126


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).cuda()


def ddp() -> nn.Module:
    return DistributedDataParallel(mlp(), device_ids=[torch.cuda.current_device()], bucket_cap_mb=0.25)


def fsdp2() -> nn.Module:
    model = mlp()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return model


def dtensor() -> nn.Module:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    # All ranks make the same weights, so that none are sent: on a shared GPU the backend has no scatter.
    return parallelize_module(mlp(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}, src_data_rank=None)


MODELS: dict[str, Callable[[], nn.Module]] = {"ddp": ddp, "fsdp2": fsdp2, "dtensor": dtensor}


def train(model: nn.Module, *, shares_batch: bool) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator("cuda").manual_seed(0 if shares_batch else dist.get_rank())
    losses = []
    for _ in range(5):
        x = torch.randn(32, 256, device="cuda", generator=generator)
        loss = (model(x) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def train_all(folder: Path, backend: str) -> None:
    torch.cuda.set_device(shared_gpus.choose_gpu(int(os.environ["LOCAL_RANK"])))
    dist.init_process_group("stretto" if backend == "stretto" else shared_gpus.default_backend("cuda"))
    found = {}
    for name, make in MODELS.items():
        before = dict(call_counts()) if backend == "stretto" else {}
        losses = train(make(), shares_batch=name == "dtensor")
        ran = {}
        if backend == "stretto":
            ran = {" ".join(key): number - before.get(key, 0) for key, number in call_counts().items()}
        found[name] = {"losses": losses, "ran": ran}
    (folder / f"{backend}-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def check_operations(folder: Path, nodes: str = "") -> None:
    if nodes:
        os.environ["STRETTO_NODES"] = nodes
    torch.cuda.set_device(shared_gpus.choose_gpu(int(os.environ["LOCAL_RANK"])))
    dist.init_process_group("stretto")
    rank, size = dist.get_rank(), dist.get_world_size()
    wrong = []
    install(find("ring-all-reduce").compile(ranks=size), max_bytes=4096, dtypes=[torch.int32])
    for elements in (1, 3, 1000, 100_000):
        ones = torch.full((elements,), rank + 1, dtype=torch.int32, device="cuda")
        total = size * (size + 1) // 2
        work = dist.all_reduce(ones, async_op=True)
        work.wait()
        if not (ones == total).all():
            wrong.append(f"all_reduce of {elements}")
        out = torch.empty(size * elements, dtype=torch.float32, device="cuda")
        dist.all_gather_into_tensor(out, torch.full((elements,), float(rank), device="cuda"))
        if not torch.equal(out.view(size, -1)[:, 0], torch.arange(size, device="cuda", dtype=torch.float32)):
            wrong.append(f"all_gather of {elements}")
        part = torch.empty(elements, device="cuda")
        dist.reduce_scatter_tensor(part, torch.ones(size * elements, device="cuda"), op=dist.ReduceOp.AVG)
        if not (part == 1).all():
            wrong.append(f"reduce_scatter of {elements}")
        listed = [torch.empty(elements, device="cuda") for _ in range(size)]
        dist.all_gather(listed, torch.full((elements,), float(rank), device="cuda"))
        if [float(one[0]) for one in listed] != [float(one) for one in range(size)]:
            wrong.append(f"all_gather of {elements} into a list")
        sent = torch.arange(size * elements, device="cuda", dtype=torch.float32)
        taken = torch.empty_like(sent)
        dist.all_to_all_single(taken, sent)
        if not torch.equal(taken.view(size, -1), sent.view(size, -1)[rank].expand(size, -1)):
            wrong.append(f"all_to_all of {elements}")
    side = torch.cuda.Stream()
    x = torch.ones(5000, device="cuda")
    for call in range(50):  # on two streams in turn: they share a workspace
        with torch.cuda.stream(side if call % 2 else torch.cuda.current_stream()):
            side.wait_stream(torch.cuda.default_stream())
            dist.all_reduce(x, op=dist.ReduceOp.AVG)
            torch.cuda.default_stream().wait_stream(side)
    if not (x == 1).all():
        wrong.append("all_reduce on two streams")
    found = {"wrong": wrong, "ran": {" ".join(key): number for key, number in call_counts().items()}}
    (folder / f"operations-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def exchange_among_some(folder: Path, before: str) -> None:
    """Rank 0 alone sends itself a message, after something that all ranks did."""
    torch.cuda.set_device(shared_gpus.choose_gpu(int(os.environ["LOCAL_RANK"])))
    dist.init_process_group("stretto")
    if before == "barrier":
        torch.ones(1, device="cuda")
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(4, device="cuda"))
        assert any("schedule" in ran for _, ran in call_counts()), call_counts()
    if dist.get_rank() == 0:
        sent, taken = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, taken, 0), dist.P2POp(dist.isend, sent, 0)]):
            work.wait()
        assert torch.equal(sent, taken)
    dist.barrier()
    (folder / f"some-{dist.get_rank()}").write_text("done")
    dist.destroy_process_group()


def call_from_elsewhere(folder: Path) -> None:
    """Call on this rank's GPU while another is the current one, and last on the next rank's."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("stretto")
    torch.cuda.set_device((rank + 1) % torch.cuda.device_count())
    sums = []
    for call in range(4):
        x = torch.full((1000,), rank + 1.0, device=torch.device("cuda", (rank + call // 3) % torch.cuda.device_count()))
        dist.all_reduce(x)
        sums.append(x.max().item())
    written = {"sums": sums, "ran": {" ".join(key): number for key, number in call_counts().items()}}
    (folder / f"elsewhere-{rank}.json").write_text(json.dumps(written))
    dist.destroy_process_group()


def profile_calls(folder: Path) -> None:
    """Return what a profile of one all-reduce and of one all-gather shows of them."""
    torch.cuda.set_device(shared_gpus.choose_gpu(int(os.environ["LOCAL_RANK"])))
    dist.init_process_group("stretto")
    x, gathered = torch.ones(64, device="cuda"), torch.ones(64 * dist.get_world_size(), device="cuda")
    for _ in range(2):
        with torch.profiler.profile(record_shapes=True) as profile:
            dist.all_reduce(x)
            dist.all_gather_into_tensor(gathered, x)
            torch.cuda.synchronize()
    ranges = [(e.name, e.is_async, e.input_shapes) for e in profile.events() if e.name.startswith("stretto:")]
    (folder / f"profile-{dist.get_rank()}.json").write_text(json.dumps(ranges))
    dist.destroy_process_group()


def becomes_true(condition: Callable[[], bool]) -> bool:
    """True if it does within 20 seconds: the collectives of these tests end at a rank's signal, and not by time."""
    limit = time.monotonic() + 20
    while not condition() and time.monotonic() < limit:
        time.sleep(0.001)
    return condition()


def overlap_calls(folder: Path) -> None:
    """Asynchronous calls whose last rank comes when all others have looked at theirs; saves what was wrong."""
    torch.cuda.set_device(shared_gpus.choose_gpu(int(os.environ["LOCAL_RANK"])))
    dist.init_process_group("stretto")
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.FileStore(str(folder / "store"), size)
    store.set_timeout(timedelta(seconds=60))
    early, is_late = range(size - 1), rank == size - 1
    total = size * (size + 1) / 2
    wrong = []

    def make() -> torch.Tensor:
        return torch.full((1000,), rank + 1.0, device="cuda")

    def expect(holds: bool, what: str) -> None:
        if not holds:
            wrong.append(what)

    def come_last(step: str) -> None:
        """On the last rank: wait until all others have called `let_come`."""
        store.wait([f"{step}-{other}" for other in early])

    def let_come(step: str) -> None:
        store.set(f"{step}-{rank}", "1")

    # On any links: without NVLink, NCCL would run calls of this size.
    install(find("two-shot-all-reduce").compile(ranks=size))

    # Everything runs once: CUDA loads a kernel at its first launch, and may wait for all that runs before it does.
    first = make()
    dist.all_reduce(first, async_op=True).wait()
    dist.all_reduce(first)
    expect(bool((torch.ones(1000, device="cuda").add_(1) == 2).all()), "a kernel was wrong before all collectives")
    expect(bool((first.clone() == size * total).all()), "two calls one after another had another result")
    torch.cuda.synchronize()
    dist.barrier()

    x, y = make(), make()
    if is_late:
        come_last("first")
        works = [dist.all_reduce(x, async_op=True)]
        come_last("second")
        works.append(dist.all_reduce(y, async_op=True))
    else:
        works = [dist.all_reduce(tensor, async_op=True) for tensor in (x, y)]
        expect(not works[0].is_completed(), "a call was completed before its peer had come")
        beside = torch.ones(1000, device="cuda").add_(1)
        expect(becomes_true(torch.cuda.current_stream().record_event().query), "no kernel ran beside a collective")
        expect(bool((beside == 2).all()), "what ran beside a collective was wrong")
        let_come("first")
        works[0].wait()
        copy = x.clone()
        expect(becomes_true(torch.cuda.current_stream().record_event().query), "wait waited for a later call too")
        expect(bool((copy == total).all()), "wait did not wait for its call")
        expect(works[0].is_completed(), "a call was not completed after its wait")
        expect(not works[1].is_completed(), "a call was completed before its peer had come, the second")
        with pytest.raises(dist.DistBackendError, match="has not ended within 50 ms"):
            works[1].wait(timedelta(milliseconds=50))
        let_come("second")
    works[1].wait()
    expect(bool((y == total).all()), "the second wait did not wait for its call")
    expect(works[1].is_completed(), "the second call was not completed after its wait")

    # A tensor that is dropped at once, and with it the Work.
    if is_late:
        come_last("dropped")
    kept = make()
    del x
    dropped = make()
    dist.all_reduce(dropped, async_op=True)
    del dropped
    others = [torch.full((1000,), 7.0, device="cuda") for _ in range(20)]
    if not is_late:
        let_come("dropped")
    dist.all_reduce(kept)  # comes after it
    torch.cuda.synchronize()
    expect(all(bool((other == 7).all()) for other in others), "a collective wrote to memory that was used again")
    expect(bool((kept == total).all()), "a call that was not asynchronous after one that was had another result")

    # A barrier, whose ranks all come at once, while the last one's GPU is late by a second or so.
    for is_async in (True, False):
        if is_late:
            torch.cuda._sleep(2_000_000_000)
        work = dist.all_reduce(make(), async_op=True)
        barrier = dist.barrier(async_op=is_async)
        if is_async:
            barrier.wait()
        expect(work.is_completed(), f"a barrier with async_op={is_async} ended before a call that preceded it")

    # A graph, whose calls are ordered, on whichever stream.
    given, graph = make(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = given * 1
        work = dist.all_reduce(first, async_op=True)
        second = given * 2
        dist.all_reduce(second)
        work.wait()
        summed = first + second
    for _ in range(3):
        summed.zero_()
        graph.replay()
        torch.cuda.synchronize()
        expect(bool((summed == 3 * total).all()), "a replayed graph had another result")
    dist.all_reduce(given)
    expect(bool((given == total).all()), "a call after a graph had another result")
    ran = {" ".join(key): number for key, number in call_counts().items()}
    (folder / f"overlap-{rank}.json").write_text(json.dumps({"wrong": wrong, "ran": ran}))
    dist.destroy_process_group()


def trace_ddp(folder: Path) -> None:
    """Save a trace of a few steps of DDP, which chrome://tracing and ui.perfetto.dev show."""
    torch.cuda.set_device(shared_gpus.choose_gpu(int(os.environ["LOCAL_RANK"])))
    dist.init_process_group("stretto")
    # On any links: without NVLink, NCCL would run calls of this size.
    install(find("two-shot-all-reduce").compile(ranks=dist.get_world_size()))
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers).cuda(), bucket_cap_mb=8)  # a bucket for half a layer
    x = torch.randn(2048, 2048, device="cuda")
    for _ in range(3):
        model(x).square().mean().backward()
    torch.cuda.synchronize()
    dist.barrier()
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        for _ in range(3):
            model(x).square().mean().backward()
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(folder / f"ddp-{dist.get_rank()}.json"))
    dist.destroy_process_group()


def repeat_calls(folder: Path) -> None:
    """Calls of few kinds in random order, on several streams, of which one rank or another is late."""
    torch.cuda.set_device(shared_gpus.choose_gpu(int(os.environ["LOCAL_RANK"])))
    dist.init_process_group("stretto")
    rank, world = dist.get_rank(), dist.get_world_size()
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    same, own = random.Random(SEED), random.Random(SEED + 1 + rank)
    results: list[tuple[str, Tensor, Tensor]] = []
    numbers = torch.arange(world * 512, device="cuda", dtype=torch.float32)
    torch.cuda.synchronize()  # which all streams read

    def call(number: int, is_async: bool) -> None:
        operation, size = same.choice(("all_reduce", "gather", "scatter", "exchange")), same.choice((96, 512))
        x = numbers[: world * size] * (rank + 1) + number
        whole = numbers[: world * size]
        if operation == "all_reduce":
            work = dist.all_reduce(x, async_op=is_async)
            y, right = x, whole * sum(range(1, world + 1)) + number * world
        elif operation == "gather":
            y = torch.empty_like(x)
            work = dist.all_gather_into_tensor(y, x[:size], async_op=is_async)
            right = torch.cat([whole[:size] * (each + 1) + number for each in range(world)])
        elif operation == "scatter":
            y = torch.empty_like(x[:size])
            work = dist.reduce_scatter_tensor(y, x, async_op=is_async)
            right = whole[rank * size : (rank + 1) * size] * sum(range(1, world + 1)) + number * world
        else:
            y = torch.empty_like(x)
            work = dist.all_to_all_single(y, x, async_op=is_async)
            part = whole[rank * size : (rank + 1) * size]
            right = torch.cat([part * (each + 1) + number for each in range(world)])
        if work is not None:
            work.wait()
        results.append((f"call {number}, {operation} of {size}, async {is_async}", y, right))

    def call_all(numbers_of_calls: range) -> None:
        for number in numbers_of_calls:
            if own.random() < 0.1:
                torch.cuda._sleep(own.randrange(200_000))
            with torch.cuda.stream(same.choice(streams)):
                call(number, same.random() < 0.5)

    call_all(range(60))
    install(find("ring-all-reduce").compile(ranks=world), max_bytes=world * 96 * 4)
    call_all(range(60, 120))
    before = sum(call_counts().values())
    with mock.patch.object(Dispatcher, "start", autospec=True, side_effect=Dispatcher.start) as through_python:
        call_all(range(120, 240))
    torch.cuda.synchronize()
    wrong = [name for name, y, right in results if not torch.equal(y, right)]
    counted = {" ".join(key): number for key, number in call_counts().items()}
    written = {
        "wrong": wrong,
        "counted": counted,
        "calls": sum(counted.values()) - before,
        "through_python": through_python.call_count,
    }
    (folder / f"repeated-{rank}.json").write_text(json.dumps(written))
    dist.destroy_process_group()


@pytest.mark.ranks(3)
def test_repeated_calls_are_launched_without_python_and_keep_their_order(tmp_path: Path, world: int) -> None:
    run_watched(world, repeat_calls, tmp_path)
    for rank in range(world):
        found = json.loads((tmp_path / f"repeated-{rank}.json").read_text())
        assert found["wrong"] == [], f"seed {SEED}"
        assert found["calls"] == 120
        assert found["counted"]["allreduce schedule ring-all-reduce"] > 5, found
        assert found["through_python"] <= 8, found  # a kind or two that had not come before


@pytest.mark.ranks(2)
def test_ddp_reduces_its_buckets_during_the_backward_pass(tmp_path: Path, world: int) -> None:
    run_watched(world, trace_ddp, tmp_path)
    for rank in range(world):
        events = json.loads((tmp_path / f"ddp-{rank}.json").read_text())["traceEvents"]
        kernels = [event for event in events if event.get("cat") == "kernel"]
        collectives = [event for event in kernels if event["name"] == "run"]  # as all of Stretto's collectives' kernels
        assert collectives, {event["name"] for event in kernels}
        streams = {event["args"]["stream"] for event in collectives}
        beside = [
            (collective["name"], other["name"])
            for collective in collectives
            for other in kernels
            if other["args"]["stream"] not in streams
            and other["ts"] < collective["ts"] + collective["dur"]
            and collective["ts"] < other["ts"] + other["dur"]
        ]
        assert beside, f"no kernel of the backward pass ran beside an all-reduce on rank {rank}"


@pytest.mark.ranks(2)
def test_frameworks_train_as_on_the_library_by_schedules(tmp_path: Path, world: int) -> None:
    run_watched(world, train_all, tmp_path, "library")
    run_watched(world, train_all, tmp_path, "stretto")
    for rank in range(world):
        right, found = (json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for name in ("library", "stretto"))
        for name in MODELS:
            assert found[name]["losses"] == pytest.approx(right[name]["losses"], rel=1e-4), name
            assert any("schedule" in key and number > 0 for key, number in found[name]["ran"].items()), name


@pytest.mark.ranks(3)
def test_operations_are_right_by_the_schedules_that_were_chosen_or_installed(tmp_path: Path, world: int) -> None:
    run_watched(world, check_operations, tmp_path)
    for rank in range(world):
        found = json.loads((tmp_path / f"operations-{rank}.json").read_text())
        assert found["wrong"] == []
        ran = found["ran"]
        assert ran["allreduce schedule ring-all-reduce"] == 3
        for operation in ("allreduce", "_allgather_base", "_reduce_scatter_base", "alltoall_base"):
            assert any(key.startswith(f"{operation} schedule") for key in ran), (operation, ran)


@pytest.mark.ranks(4)
def test_on_declared_nodes_an_installed_schedule_puts_and_the_library_runs_the_rest(tmp_path: Path, world: int) -> None:
    run_watched(world, check_operations, tmp_path, f"2x{world // 2}")
    for rank in range(world):
        found = json.loads((tmp_path / f"operations-{rank}.json").read_text())
        assert found["wrong"] == []
        by_schedules = {key: number for key, number in found["ran"].items() if "schedule" in key}
        assert by_schedules == {"allreduce schedule ring-all-reduce": 3}


@pytest.mark.ranks(4)
def test_asynchronous_calls_run_beside_other_kernels_and_are_waited_for_alone(tmp_path: Path, world: int) -> None:
    run_watched(world, overlap_calls, tmp_path)
    for rank in range(world):
        found = json.loads((tmp_path / f"overlap-{rank}.json").read_text())
        assert found["wrong"] == []
        assert not any(key.startswith("allreduce ") and "schedule" not in key for key in found["ran"]), found["ran"]


@pytest.mark.own_gpus("NCCL connects when all ranks have come together")
@pytest.mark.parametrize("before", ["barrier", "all-reduce"])
def test_some_ranks_exchange_messages_after_a_first_collective_of_all(tmp_path: Path, before: str, world: int) -> None:
    run_watched(world, exchange_among_some, tmp_path, before)
    assert {path.name for path in tmp_path.glob("some-*")} == {f"some-{rank}" for rank in range(world)}


@pytest.mark.own_gpus("the current GPU is another rank's")
def test_calls_on_gpus_that_are_not_the_current_ones_are_right_and_run_by_schedules(tmp_path: Path, world: int) -> None:
    run_watched(world, call_from_elsewhere, tmp_path)
    for rank in range(world):
        found = json.loads((tmp_path / f"elsewhere-{rank}.json").read_text())
        assert found["sums"] == [world * (world + 1) / 2] * 4
        assert any(key.startswith("allreduce schedule") for key in found["ran"]), found


@pytest.mark.ranks(2)
def test_profiles_show_schedules_by_the_names_of_their_operations(tmp_path: Path, world: int) -> None:
    run_watched(world, profile_calls, tmp_path)
    for rank in range(world):
        found = json.loads((tmp_path / f"profile-{rank}.json").read_text())
        # A range is shown on the host, and where its kernels ran.
        assert {name for name, *_ in found} == {"stretto:all_reduce", "stretto:_all_gather_base"}, found
        assert ["stretto:all_reduce", True, [[64]]] in found, found
