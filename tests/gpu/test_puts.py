# SPDX-License-Identifier: Apache-2.0
"""Slices that kernels put through pinned memory and the proxy, between ranks that are declared to be several nodes."""

import os
import random
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

from stretto import ops
from stretto.collectives.executor.cuda import CollectiveWorkspace, InterpretedSchedule, Variant
from stretto.memory import PeerError
from stretto.ops.operator import close_workspaces, list_put_channels
from stretto.tiles.put_channel import PutChannel
from tests.collectives.executor.simulation import simulate
from tests.collectives.joint.random_algorithms import COLLECTIVES, random_all_to_all, random_schedule
from tests.gpu.test_joint import (
    HIDDEN,
    INNER,
    LOCAL,
    SHAPES,
    K,
    draw,
    make_kinds,
    make_routing,
    multiply_plainly,
    run_experts,
)
from tests.ops.embedding.jagged import fill_case, look_up_case

Run = Callable[..., list[Any]]
SEED = random.randrange(2**31)
CALLS = 200


def make_shard(size: int, rank: int, call: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.int32, device="cuda") * 7 + 1000 * rank + call


def gather_in_many_calls(nodes: str, proxy: str, seed: int) -> list[tuple[Any, ...]]:
    """Random sizes, late ranks, broken connections, then a CUDA graph's replays; the calls that were wrong."""
    rng, rank, world = random.Random(seed), dist.get_rank(), dist.get_world_size()
    wrong: list[tuple[Any, ...]] = []
    variables = {"STRETTO_NODES": nodes, "STRETTO_PROXY": proxy}
    with (
        mock.patch.dict(os.environ, variables),
        PutChannel.allocate(slots=4, slot_bytes=16384, timeout=60.0) as channel,
    ):
        for call in range(CALLS):
            size, late, peer = rng.choice((1, 5, 4096, 70_001)), rng.randrange(world), rng.randrange(world)
            cycles = rng.choice((0, 100_000, 1_000_000))  # drawn by all ranks, or their sizes would differ from here on
            if late == rank:
                torch.cuda._sleep(cycles)
            if call % 20 == 7 and peer != rank:
                channel.break_connection(peer)
            out = torch.full((world, size), -1, dtype=torch.int32, device="cuda")
            channel.all_gather(make_shard(size, rank, call), out)
            right = torch.stack([make_shard(size, other, call) for other in range(world)])
            if not torch.equal(out, right):
                wrong.append((call, size))
        shard, out = make_shard(5000, rank, 0), torch.zeros(world, 5000, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            channel.all_gather(shard, out)
        for replay in range(20):
            shard.copy_(make_shard(5000, rank, replay))
            out.zero_()
            graph.replay()
            if not torch.equal(out, torch.stack([make_shard(5000, other, replay) for other in range(world)])):
                wrong.append(("replay", replay))
        torch.cuda.synchronize()
        channel.check()
        dist.barrier()
        del graph
    return wrong


@pytest.mark.parametrize("proxy", ["native", pytest.param("python", marks=pytest.mark.exhaustive)])
@pytest.mark.ranks(2, among=(2, 4, 8), own=(2, 4))
def test_slices_arrive_whole_past_late_ranks_broken_connections_and_graphs(run_ranks: Run, world: int, proxy: str):
    print(f"seed {SEED}")
    nodes = f"2x{world // 2}"
    assert run_ranks(world, gather_in_many_calls, nodes, proxy, SEED, timeout=300.0) == [[]] * world


@triton.jit
def double(x, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at) * 2)


def load_while_a_kernel_waits(nodes: str) -> tuple[bool, bool]:
    """A kernel waits for the last rank, which comes a second later; meanwhile another one is launched for the first
    time, for which CUDA may wait for all that runs. Whether the slices, and that kernel's output, are right."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with (
        mock.patch.dict(os.environ, {"STRETTO_NODES": nodes}),
        PutChannel.allocate(slots=4, slot_bytes=16384, timeout=60.0) as channel,
    ):
        shard, out = make_shard(5000, rank, 0), torch.zeros(world, 5000, dtype=torch.int32, device="cuda")
        x = torch.ones(256, device="cuda")
        channel.all_gather(shard, out)
        torch.cuda.synchronize()
        if rank == world - 1:
            time.sleep(1.0)
        shard.add_(1)
        channel.all_gather(shard, out)
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            double[(1,)](x, 256)
            is_doubled = bool((x == 2).all()) and bool((torch.special.airy_ai(x) > 0).all())
        right = torch.stack([make_shard(5000, peer, 1) for peer in range(world)])
        is_gathered = torch.equal(out, right)
        channel.check()
        dist.barrier()
    return is_gathered, is_doubled


@pytest.mark.ranks(2, among=(2,), own=(2, 4))
def test_a_kernels_first_launch_while_another_waits_for_a_put_ends(run_ranks: Run, world: int):
    found = run_ranks(world, load_while_a_kernel_waits, f"2x{world // 2}", timeout=120.0)
    assert found == [(True, True)] * world


def run_schedules_between_nodes(nodes: str, seed: int) -> list[tuple[Any, ...]]:
    """Random verified schedules, by each protocol inside nodes, past late ranks and broken connections, then a CUDA
    graph's replays; the calls whose bits are not the simulation's."""
    rng, rank, world, wrong = random.Random(seed), dist.get_rank(), dist.get_world_size(), []
    with mock.patch.dict(os.environ, {"STRETTO_NODES": nodes}):
        workspace = CollectiveWorkspace(dist.new_group(), timeout=60.0)
        for protocol in ("LL", "Simple", *(["LL128"] if workspace.has_nvlink else [])):
            schedule = random_schedule(rng, rng.choice(sorted(COLLECTIVES)), world, 2)
            variant, in_place = Variant("float32", "sum", protocol), schedule.in_place
            kernel = InterpretedSchedule(schedule, workspace, variant, in_place=in_place, tile_bytes=4800, threads=128)
            for call in range(20):
                elements, late = rng.choice((1, 700, 5000)), rng.randrange(world)
                cycles, is_broken = rng.choice((0, 100_000, 1_000_000)), call % 8 == 5
                size = elements * schedule.collective.input_chunks
                seeds = [torch.Generator().manual_seed(peer + call) for peer in range(world)]
                given = [torch.rand(size, generator=one) for one in seeds]
                right = simulate(schedule, given)[rank]
                begin, end = schedule.collective.starts(rank) if in_place else (0, 0)
                whole = torch.zeros(elements * schedule.collective.chunks_per_loop, device="cuda")
                output = torch.zeros_like(right, device="cuda")
                if in_place:
                    output = whole[elements * end :][: right.numel()]
                source = whole[elements * begin :][:size].copy_(given[rank])
                if late == rank:
                    torch.cuda._sleep(cycles)
                if is_broken and rank == 0:
                    kernel._puts.break_connection(world - 1)
                kernel(*((whole,) if in_place else (source, output)))
                if not torch.equal(output.cpu(), right):
                    wrong.append((schedule.name, protocol, call))
        mine, graph = given[rank].cuda(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        dist.barrier()
        with torch.cuda.graph(graph):
            source.copy_(mine)
            kernel(*((whole,) if in_place else (source, output)))
        for replay in range(20):
            graph.replay()
            if not torch.equal(output.cpu(), right):
                wrong.append(("replay", protocol, replay))
        workspace.check()
        dist.barrier()
        del graph, kernel, mine
        workspace.close()
    return wrong


@pytest.mark.ranks(4, among=(2, 4, 8), own=(2, 4))
def test_schedules_between_nodes_have_the_host_executors_bits(run_ranks: Run, world: int):
    print(f"seed {SEED}")
    assert run_ranks(world, run_schedules_between_nodes, f"2x{world // 2}", SEED, timeout=300.0) == [[]] * world


def lose_a_rank() -> str:
    """Rank 0 never calls: the others' waits end, and name it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    message = ""
    with mock.patch.dict(os.environ, {"STRETTO_NODES": f"{world}x1"}):
        channel = PutChannel.allocate(slots=2, slot_bytes=4096, timeout=3.0)
    out = torch.zeros(world, 100, dtype=torch.int32, device="cuda")
    channel.all_gather(make_shard(100, rank, 0), out)  # a call that loads a kernel may wait for longer
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 0:
        time.sleep(5.0)
    else:
        channel.all_gather(make_shard(100, rank, 0), out)
        torch.cuda.synchronize()
        with pytest.raises(PeerError) as lost:
            channel.check()
        message = str(lost.value)
    dist.barrier()
    channel.close()
    return message


@pytest.mark.ranks(2)
def test_a_wait_for_a_slice_that_never_comes_names_rank_node_nic_and_operator(run_ranks: Run, world: int):
    first, *others = run_ranks(world, lose_a_rank, timeout=120.0)
    assert first == ""
    for message in others:
        assert "all_gather_by_puts: waited in vain for a slice with signal" in message
        assert f"rank 0 of {world} (node 0, NIC lo)" in message


def multiply_between_nodes(operator: str, nodes: str, seed: int) -> list[tuple[Any, ...]]:
    """Products past late ranks, poison and broken connections, then a CUDA graph's replays; those that were wrong."""
    rng, rank, wrong = random.Random(seed), dist.get_rank(), []
    with mock.patch.dict(os.environ, {"STRETTO_NODES": nodes}):
        group = dist.new_group()
    run = getattr(ops, operator)
    for shape in SHAPES:
        x, weight, wanted = multiply_plainly(operator, shape)
        schedules = [None, random_schedule(random.Random(seed), operator, dist.get_world_size(), 2)]
        for turn in range(10):
            with mock.patch.dict(os.environ, {"STRETTO_NODES": nodes}):
                out = run(x, weight, group, implementation="kernel", schedule=schedules[turn % 2])
            if not torch.equal(out, wanted):
                wrong.append((shape, turn))
            torch.cuda.synchronize()
            dist.barrier()
            (puts,) = list_put_channels(group.group_name)
            if turn == 4:
                puts.slot_memory().fill_(0xFF)
                dist.barrier()
            if turn == 6 and rank < dist.get_world_size() // 2:
                puts.break_connection(dist.get_world_size() - 1 - rank)
            if rng.randrange(dist.get_world_size()) == rank:
                torch.cuda._sleep(rng.choice((0, 100_000, 1_000_000)))
    x, weight, wanted = multiply_plainly(operator, SHAPES[0])
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    dist.barrier()
    with torch.cuda.graph(graph):
        replayed = run(x, weight, group, implementation="kernel")
    for replay in range(5):
        replayed.fill_(7)
        graph.replay()
        if not torch.equal(replayed, wanted):
            wrong.append(("replay", replay))
    torch.cuda.synchronize()
    dist.barrier()
    del graph, replayed
    close_workspaces(group.group_name)
    return wrong


@pytest.mark.parametrize("operator", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
@pytest.mark.ranks(4, among=(2, 4, 8), own=(2, 4))
def test_products_between_nodes_are_exact(run_ranks: Run, world: int, operator: str):
    print(f"seed {SEED}")
    found = run_ranks(world, multiply_between_nodes, operator, f"2x{world // 2}", SEED, timeout=300.0)
    assert found == [[]] * world


def route_between_nodes(nodes: str, seed: int) -> list[tuple[Any, ...]]:
    """Look-ups and experts, with their gradients, past late ranks and broken connections; those with other bits than in
    one node."""
    rank, world, wrong = dist.get_rank(), dist.get_world_size(), []
    group, late = dist.new_group(), torch.Generator().manual_seed(seed + rank)
    weight, kind = draw(100 + rank, LOCAL, INNER, HIDDEN), make_kinds()[1]
    for turn in range(6):
        schedule = random_all_to_all(random.Random(seed), world, 2) if turn % 2 else None
        routing, max_rows = make_routing(turn, 64 + 32 * turn), (64 + 32 * turn) * K * world if turn > 2 else None
        case = fill_case(kind, turn, "cuda")
        case.seed = kind.batch
        found = []
        for of, declared in ((group, nodes), (None, "")):  # a group's ranks are on the nodes of its first call
            with mock.patch.dict(os.environ, {"STRETTO_NODES": declared} if declared else {}):
                torch.cuda._sleep(int(torch.randint(0, 2_000_000, (), generator=late)))
                tables = [table.clone().requires_grad_() for table in case.owners[rank].tables]
                out = look_up_case(case, tables, group=of, schedule=schedule)
                out.backward(case.grad.chunk(world)[rank].to(out.dtype))
                how = {"implementation": "kernel"} if schedule is None or not declared else {"schedule": schedule}
                experts = run_experts(routing, weight, max_rows, group=of, **how)
            found.append([out.detach().clone(), *(table.grad for table in tables), *experts])
        if not all(torch.equal(*pair) for pair in zip(*found, strict=True)):
            wrong.append((turn, [int((one != other).sum()) for one, other in zip(*found, strict=True)]))
        torch.cuda.synchronize()
        dist.barrier()
        if turn == 3 and rank < world // 2:
            list_put_channels(group.group_name)[0].break_connection(world - 1 - rank)
    ops.check_indices(group)
    assert list_put_channels(group.group_name)
    close_workspaces(group.group_name)
    return wrong


@pytest.mark.ranks(4, among=(2, 4, 8), own=(2, 4))
def test_look_ups_and_experts_between_nodes_have_the_bits_of_one_node(run_ranks: Run, world: int):
    print(f"seed {SEED}")
    assert run_ranks(world, route_between_nodes, f"2x{world // 2}", SEED, timeout=300.0) == [[]] * world
