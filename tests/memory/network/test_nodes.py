# SPDX-License-Identifier: Apache-2.0
"""Ranks of one machine that are declared to be several nodes put to each other, and run schedules so."""

import os
import random
import re
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.collectives.executor.simulation import simulate
from tests.collectives.random_programs import random_program
from tests.memory.network.relay import Relay

from stretto.cluster.nics import pinned_near
from stretto.collectives import compile_program
from stretto.collectives.executor import run_on_host
from stretto.collectives.two_level import exchange_hosts, name_nodes
from stretto.memory import PeerError, Reach, allocate
from stretto.memory.groups import find_nodes
from stretto.memory.network import endpoint, interfaces
from stretto.memory.network.endpoint import choose_proxy
from stretto.memory.network.native import NativeProxy
from stretto.memory.network.proxy import Proxy
from stretto.ops import choices
from stretto.parallel.pipeline.transports import _share_memory

SEED = 63


def put_around():
    """Each rank puts to the ranks of other nodes, and stores to those of its own; what arrived from each."""
    rank, world = dist.get_rank(), dist.get_world_size()
    size, found = 100_000, []
    with allocate(world * size, signals=2, timeout=60.0) as memory:
        own = memory.buffer()
        for call in range(3):
            own[rank * size : (rank + 1) * size] = 10 * call + rank + 1
            for peer in range(world):
                if memory.reach[peer] is Reach.PUTS:
                    memory.put(peer, rank * size, rank * size, size, 0)
                elif peer != rank:
                    memory.buffer(peer)[rank * size : (rank + 1) * size] = own[rank * size : (rank + 1) * size]
                    memory.signal(peer, 0)
            for peer in set(range(world)) - {rank}:
                memory.wait(peer, 0, call + 1, 60.0)
            found.append([int(part.unique()) for part in own.view(world, size)])
            for peer in set(range(world)) - {rank}:  # it has been read
                memory.signal(peer, 1)
            for peer in set(range(world)) - {rank}:
                memory.wait(peer, 1, call + 1, 60.0)
        return [reach.name for reach in memory.reach], found


def on_nodes(nodes, proxy, function, *arguments):
    with mock.patch.dict(os.environ, {"STRETTO_NODES": nodes, "STRETTO_PROXY": proxy}):
        return function(*arguments)


def find_pinned_threads(folder):
    """How many of this process's threads are pinned to CPU 0, which is near lo in a tree of sysfs: of two lanes."""
    (folder / "class/net/lo/device").mkdir(parents=True, exist_ok=True)
    (folder / "class/net/lo/device/local_cpulist").write_text("0,4096-4098\n")
    near = mock.patch.object(endpoint, "pinned_near", partial(pinned_near, sysfs=folder))
    with near, mock.patch.object(NativeProxy, "count_lanes", return_value=2), allocate(64, signals=1):
        threads = [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]
    return threads.count({0}), os.sched_getaffinity(0)


@pytest.mark.skipif(
    os.cpu_count() == 1 or len(os.sched_getaffinity(0)) != os.cpu_count(), reason="this process is pinned"
)
@pytest.mark.parametrize("proxy", ["python", "native"])
def test_a_proxys_thread_is_pinned_near_its_interface(ranks, tmp_path, proxy):
    for count, own in ranks(2).run(on_nodes, "2x1", proxy, find_pinned_threads, tmp_path):
        assert count == (2 + 2 * NativeProxy.SENDS_APART if proxy == "native" else 1)
        assert own == os.sched_getaffinity(0)


@pytest.mark.parametrize("proxy", ["python", "native"])
def test_ranks_reach_other_nodes_by_puts(ranks, proxy):
    for rank, (reach, found) in enumerate(ranks(3).run(on_nodes, "2,1", proxy, put_around)):
        near = (rank == 2,) * 2 + (rank < 2,)
        assert reach == ["PUTS" if is_far else "LOADS_AND_STORES" for is_far in near]
        assert found == [[10 * call + peer + 1 for peer in range(3)] for call in range(3)]


@contextmanager
def reordered(kind, seed):
    """Have every proxy of a kind reach its peers through relays that reorder frames; the relays."""
    relays, connect = [], kind.connect

    def connect_through_relays(proxy, far):
        made = {peer: Relay(address, seed + peer, window=3) for peer, address in far.items()}
        relays.extend(made.values())
        connect(proxy, {peer: relay.address for peer, relay in made.items()})

    with mock.patch.object(kind, "connect", connect_through_relays):
        yield relays


def run_reordered(kind, count, seed):
    """The schedules whose bits differ, and whether frames from or to this rank were reordered."""
    with reordered(kind, seed) as relays:
        wrong = run_schedules(count, seed)
    return wrong, sum(relay.reordered for relay in relays) > 0


def run_schedules(count, seed):
    """Random verified programs, against the simulation of their ranks in one process; those whose bits differ."""
    rank, world, wrong = dist.get_rank(), dist.get_world_size(), []
    rng = random.Random(seed)
    while count:
        program = random_program(rng)
        if program.collective.ranks != world:
            continue
        count -= 1
        instances, slots, elements = rng.choice((1, 2)), rng.choice((None, 1, 2)), rng.choice((1, 24, 1000))
        schedule = compile_program(program, name="random", instances=instances, slots=slots)
        collective = schedule.collective
        size = elements * collective.input_chunks
        inputs = [torch.arange(size, dtype=torch.int32) + 1000 * peer + count for peer in range(world)]
        options = {"tile_bytes": rng.choice((64, 1 << 18)), "slots": slots}
        right = simulate(schedule, inputs, **options)[rank]
        if schedule.in_place:
            output = run_on_host(schedule, inputs[rank].clone(), None, **options)
        else:
            output = run_on_host(schedule, inputs[rank], torch.empty_like(right), **options)
        known = [at for at in range(collective.output_chunks) if collective.expected(rank, at) is not None]
        parts = [one.view(collective.output_chunks, -1)[known] for one in (output, right)]
        if not torch.equal(*parts):
            wrong.append(count)
    return wrong


@pytest.mark.long
@pytest.mark.parametrize(
    ("count", "nodes", "proxy", "runs"),
    [
        (4, "2x2", "native", 8),
        (3, "2,1", "python", 8),
        pytest.param(2, "2x1", "native", 100, marks=pytest.mark.exhaustive),
        pytest.param(3, "3x1", "native", 100, marks=pytest.mark.exhaustive),
        pytest.param(4, "4x1", "python", 100, marks=pytest.mark.exhaustive),
        pytest.param(4, "2x2", "native", 200, marks=pytest.mark.exhaustive),
    ],
)
def test_schedules_have_the_same_bits_on_several_nodes(ranks, count, nodes, proxy, runs):
    print(f"seed {SEED}")
    kind = {"native": NativeProxy, "python": Proxy}[proxy]
    found = ranks(count).run(on_nodes, nodes, proxy, run_reordered, kind, runs, SEED)
    assert [wrong for wrong, _ in found] == [[]] * count
    assert any(is_reordered for _, is_reordered in found)


def lose_a_rank():
    """Rank 1 leaves its node without a word; what rank 0's put, and its wait, say."""
    group = dist.new_group(timeout=timedelta(seconds=1.5))
    with mock.patch.dict(os.environ, {"STRETTO_NODES": "2x1"}):
        memory = allocate(64, group, signals=1, timeout=60.0)
        with pytest.raises(ValueError, match=r"rank . is on another node"):
            memory.buffer(1 - memory.rank)
        for wrong in ({"size": 65}, {"offset": 60}, {"source": -1}, {"index": 1}):
            with pytest.raises(ValueError):
                memory.put(1 - memory.rank, **({"source": 0, "offset": 0, "size": 8, "index": 0} | wrong))
        memory.signal(1 - memory.rank, 0)
        memory.wait(1 - memory.rank, 0, 1, timeout=60.0)  # both have met: a peer that never came may still come
        if memory.rank == 1:
            memory.endpoint.close()
            return ""
        with pytest.raises(PeerError) as lost:
            memory.wait(1, 0, 2, timeout=60.0)
        with pytest.raises(PeerError, match="it has closed the group"):
            memory.put(1, 0, 0, 8, 0)
        return str(lost.value)


@pytest.mark.long
def test_a_lost_rank_is_named_with_its_node_and_interface(ranks):
    message, _ = ranks(2).run(lose_a_rank)
    assert message == ("rank 0 of 2 (node 0, NIC lo) has lost rank 1 of 2 (node 1, NIC lo): it has closed the group")


@pytest.mark.parametrize(
    ("version", "header", "device", "words"),
    [
        (None, False, False, "this torch has no NCCL"),
        ((2, 27, 3), True, True, "NCCL 2.27.3 has no device API for networks: 2.28 is the first that has"),
        ((2, 28, 9), False, True, "its header nccl_device.h is in none of "),
        ((2, 28, 9), True, False, "over RDMA alone (over sockets from 2.32 on), and there is no RDMA device"),
        ((2, 32, 1), True, False, "NCCL 2.32.1 could, and Stretto has no transport by it"),
    ],
)
def test_nccls_device_api_is_refused_with_the_reason(monkeypatch, tmp_path, version, header, device, words):
    (tmp_path / "infiniband").mkdir()
    if device:
        (tmp_path / "infiniband" / "mlx5_0").touch()
    if header:
        (tmp_path / "nccl_device.h").touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: version is not None)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    monkeypatch.setattr(interfaces, "_RDMA_DEVICES", tmp_path / "infiniband")
    monkeypatch.setattr(interfaces, "_list_nccl_includes", lambda: [tmp_path])
    monkeypatch.setenv("STRETTO_PROXY", "gin")
    with pytest.raises(ValueError, match=f"STRETTO_PROXY=gin: .*{re.escape(words)}.*; auto, native, python would do"):
        choose_proxy()


def put_with_gin_on_one_rank():
    proxy = "gin" if dist.get_rank() == 1 else "python"
    with pytest.raises(ValueError, match="rank 1 cannot put to other nodes: STRETTO_PROXY=gin"):
        on_nodes("2x1", proxy, allocate, 64)


def test_a_proxy_that_one_rank_alone_asks_for_in_vain_is_named_on_all(ranks):
    ranks(2).run(put_with_gin_on_one_rank)


def declare_on_one_rank_otherwise():
    def name_two_levels():
        return name_nodes([host for _, host in exchange_hosts(dist.group.WORLD, 60.0)])

    for theirs in ("", "1,1"):
        for call in (partial(allocate, 64), partial(find_nodes, None), name_two_levels):
            words = f"STRETTO_NODES is '2x1' on rank 0 and '{theirs}' on rank 1 of the same machine"
            with pytest.raises(ValueError, match=words):
                on_nodes(theirs if dist.get_rank() else "2x1", "python", call)
    for call in (partial(allocate, 64), partial(find_nodes, None), name_two_levels, partial(_share_memory, None)):
        with pytest.raises(ValueError, match=r"'2x2', which declares nodes for 4 ranks, .* has 2.* \(rank 1\)"):
            on_nodes("2x2" if dist.get_rank() else "2x1", "python", call)  # on both: none waits for the other


def set_a_switch_wrongly_on_one_rank():
    with mock.patch.dict(os.environ, {choices.COPIES_VARIABLE: "yes" if dist.get_rank() else "1"}):
        with pytest.raises(ValueError, match=f"{choices.COPIES_VARIABLE} is 'yes', but must be 0 or 1"):
            choices._agree(dist.group.WORLD, torch.device("cpu"))


def test_a_switch_that_one_rank_alone_has_wrong_is_refused_on_all(ranks):
    ranks(2).run(set_a_switch_wrongly_on_one_rank)


def test_nodes_that_ranks_of_a_machine_declare_in_different_ways_are_refused_on_all(ranks):
    ranks(2).run(declare_on_one_rank_otherwise)
