# SPDX-License-Identifier: Apache-2.0
"""Tile-centric primitives on real GPUs: right tiles past stragglers and poison, copy engines in graphs, lost peers."""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stretto import tiles
from stretto.memory import PeerError, compilation
from stretto.parallel import Grid
from tests.tiles import example, kernels

Run = Callable[..., list[Any]]
SEED = random.randrange(2**31)
COLUMNS, BLOCK = 200, 256


def gather_all(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's new rows, and all ranks'."""
    world = dist.get_world_size()
    own = torch.randn(rows, COLUMNS, device="cuda").to(dtype)
    every = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(every, own)
    return own, torch.cat(every)


def make_mappings(rows: int) -> tuple[tiles.StaticMapping, tiles.StaticMapping]:
    world = dist.get_world_size()
    producer = tiles.shard_tiles(rows, world, 16, channels=2)
    return producer, tiles.whole_tiles(rows, world, 32, channels=2, channel_rows=producer.channel_rows)


def gather_in_many_calls(folder: Path, seed: int) -> None:
    world = dist.get_world_size()
    Grid(data=world, device="cuda")
    rng, rank = random.Random(seed), dist.get_rank()
    torch.manual_seed(seed + rank)
    wrong = []
    half = 1 << 20
    few = [rng.randint(1, 300) for _ in range(6)]  # for each kind of number that Triton knows, kernels are compiled
    with tiles.BlockChannel.allocate(channels=2 * world, data_bytes=2 * half, timeout=20.0) as channel:
        for call in range(200):
            rows, push, dtype = rng.choice(few), rng.random() < 0.5, rng.choice([torch.float32, torch.bfloat16])
            x, expected = gather_all(rows, dtype)
            producer, consumer = make_mappings(rows)
            count = tiles.count_tiles(consumer)
            out = torch.full_like(expected, float("nan"))
            late, cycles = rng.randrange(world), rng.choice([0, 100_000, 1_000_000])
            if push:
                gathered = channel.tensor((rows * world, COLUMNS), dtype)
                device = channel.begin("push", producer, consumer, "broadcast")
                gathered[rank * rows : (rank + 1) * rows] = float("nan")
            else:
                own = channel.tensor((rows, COLUMNS), dtype, offset=call % 2 * half)
                own.copy_(x)
                device = channel.begin("pull", producer, consumer, "local")
                gathered = torch.full_like(expected, float("nan"))
            if late == rank:
                torch.cuda._sleep(cycles)
            if push:
                kernels.push_tiles[(4,)](device, producer, x, gathered, COLUMNS, 4, BLOCK)
            else:
                pieces = tiles.count_tiles(producer)
                kernels.pull_tiles[(4,)](device, producer, own, gathered, COLUMNS, pieces, 4, BLOCK)
            kernels.copy_tiles[(count,)](device, consumer, gathered, out, COLUMNS, count, 32, BLOCK)
            if not torch.equal(out, expected):
                wrong.append((call, rows, push, str(dtype)))
        torch.cuda.synchronize()
        channel.check()
        dist.barrier()
    (folder / f"wrong-{rank}.json").write_text(json.dumps(wrong))


def multiply_beside_pushes(folder: Path) -> None:
    world = dist.get_world_size()
    Grid(data=world, device="cuda")
    rank, k, n = dist.get_rank(), 512, 768
    errors = []
    with tiles.BlockChannel.allocate(channels=2 * world, data_bytes=world * 1000 * k * 2, timeout=20.0) as channel:
        for rows in (1000, 256, 33):
            x = torch.randn(rows, k, device="cuda").bfloat16()
            weight = torch.randn(n, k, device="cuda").bfloat16()
            every = [torch.empty_like(x) for _ in range(world)]
            dist.all_gather(every, x)
            out = torch.full((rows * world, n), float("nan"), device="cuda", dtype=torch.bfloat16)
            gathered = channel.tensor((rows * world, k), torch.bfloat16)
            example.launch(
                channel, x, gathered, weight, out, pushes=8, multiplies=100, push_rows=64, bm=128, bn=128, bk=64
            )
            expected = torch.cat(every).float() @ weight.float().T
            errors.append(((out.float() - expected).norm() / expected.norm()).item())
        torch.cuda.synchronize()
        channel.check()
        dist.barrier()
    (folder / f"wrong-{rank}.json").write_text(json.dumps([error for error in errors if not error < 1e-2]))


def replay_copies(folder: Path) -> None:
    world = dist.get_world_size()
    Grid(data=world, device="cuda")
    rank, rows = dist.get_rank(), 256
    producer, consumer = make_mappings(rows)
    count = tiles.count_tiles(consumer)
    wrong = []
    with tiles.BlockChannel.allocate(channels=2 * world, data_bytes=1 << 20, timeout=20.0) as channel:
        gathered = channel.tensor((rows * world, COLUMNS), torch.float32)
        x = torch.zeros(rows, COLUMNS, device="cuda")
        out = torch.zeros(rows * world, COLUMNS, device="cuda")

        def call() -> None:
            device = channel.begin("copy", producer, consumer, "broadcast")
            with tiles.copy_engine(channel):
                for distance in range(world):
                    peer = (rank + distance) % world
                    there = channel.tensor((rows * world, COLUMNS), torch.float32, rank=peer)
                    tiles.rank_copy_data(there[rank * rows : (rank + 1) * rows], x)
                    for index in (2 * rank, 2 * rank + 1):
                        tiles.rank_notify(channel, index, peer)
            kernels.copy_tiles[(count,)](device, consumer, gathered, out, COLUMNS, count, 32, BLOCK)
            tiles.rank_wait(channel, 2 * rank, rank)
            tiles.join_copies(channel)

        call()
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        for replay in range(50):
            own, expected = gather_all(rows, torch.float32)
            x.copy_(own)
            out.fill_(float("nan"))
            graph.replay()
            if not torch.equal(out, expected):
                wrong.append(replay)
        torch.cuda.synchronize()
        channel.check()
        dist.barrier()
    (folder / f"wrong-{rank}.json").write_text(json.dumps(wrong))


def lose_a_peer(folder: Path) -> None:
    world = dist.get_world_size()
    Grid(data=world, device="cuda")
    rank, rows = dist.get_rank(), 64
    compilation.ALLOWANCE = 0.0
    producer, consumer = make_mappings(rows)
    count = tiles.count_tiles(consumer)
    channel = tiles.BlockChannel.allocate(channels=2 * world, data_bytes=1 << 20, timeout=2.0)
    gathered = channel.tensor((rows * world, COLUMNS), torch.float32)
    device = channel.begin("lost", producer, consumer, "broadcast")
    if rank != 1:
        x = torch.zeros(rows, COLUMNS, device="cuda")
        kernels.push_tiles[(4,)](device, producer, x, gathered, COLUMNS, 4, BLOCK)
    out = torch.zeros_like(gathered)
    started = time.monotonic()
    kernels.copy_tiles[(count,)](device, consumer, gathered, out, COLUMNS, count, 32, BLOCK)
    torch.cuda.synchronize()
    seconds = time.monotonic() - started
    wrong = []
    try:
        channel.begin("next", producer, consumer, "broadcast")
        wrong.append("nothing was raised")
    except PeerError as error:
        if not str(error).startswith(f"rank {rank} of {world}: lost, call 1: waited in vain for rank 1, tile "):
            wrong.append(str(error))
    if not 1 < seconds < 15:
        wrong.append(f"it took {seconds} s")
    dist.barrier()
    (folder / f"wrong-{rank}.json").write_text(json.dumps(wrong))


def read(folder: Path) -> list[object]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("wrong-*.json"))]


@pytest.mark.ranks(3)
def test_tiles_are_right_by_push_and_by_pull_past_stragglers(run_ranks: Run, tmp_path: Path, world: int) -> None:
    run_ranks(world, gather_in_many_calls, tmp_path, SEED)
    assert read(tmp_path) == [[]] * world, SEED


@pytest.mark.ranks(4)
def test_the_example_multiplies_what_it_gathers(run_ranks: Run, tmp_path: Path, world: int) -> None:
    run_ranks(world, multiply_beside_pushes, tmp_path)
    assert read(tmp_path) == [[]] * world


@pytest.mark.ranks(3)
def test_copies_and_their_signals_replay_in_a_graph(run_ranks: Run, tmp_path: Path, world: int) -> None:
    run_ranks(world, replay_copies, tmp_path)
    assert read(tmp_path) == [[]] * world


@pytest.mark.ranks(4)
def test_a_rank_that_signals_nothing_is_named(run_ranks: Run, tmp_path: Path, world: int) -> None:
    run_ranks(world, lose_a_peer, tmp_path)
    assert read(tmp_path) == [[]] * world
