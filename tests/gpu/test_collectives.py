# SPDX-License-Identifier: Apache-2.0
"""Schedules as kernels on real GPUs: right numbers, same bits, any size and place, stragglers, graphs, lost peers."""

import itertools
import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stretto.collectives.algorithms import ALGORITHMS
from stretto.collectives.collective import Collective
from stretto.collectives.executor.cuda.communicator import CudaCommunicator
from stretto.collectives.executor.cuda.interpreter import InterpretedSchedule
from stretto.collectives.executor.cuda.variant import Variant
from stretto.collectives.selection import AlgorithmChoice, Table
from stretto.memory import PeerError, shared_gpus
from stretto.parallel import Grid
from tests.gpu.sharing import sampled

Run = Callable[..., list[Any]]
SEED = random.randrange(2**31)
PROTOCOLS = ("LL", "LL128", "Simple")
BY_COPIES = ("direct-all-gather", "direct-reduce-scatter", "direct-all-to-all", "two-shot-all-reduce")
DTYPES = ("bfloat16", "float32", "float16", "float64", "int32", "int64", "uint8", "int8", "int16")
LIMIT = 60.0  # seconds of a wait: some rank may compile meanwhile, on a machine that is busy
SHORT = [*((protocol, "int8") for protocol in PROTOCOLS), ("LL", "int64"), ("LL128", "int16"), ("Simple", "float32")]
SIZES = (1, 2, 3, 7, 31, 64, 255, 1000, 4097, 30_011, 100_003, 1_500_000)
TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 1e-5, "float64": 1e-13}


def sizes_of(name: str, ranks: int) -> list[dict[str, int]]:
    if name == "dgx1-all-gather":
        return [{"ranks": 8}] if ranks == 8 else []
    if "nodes" not in ALGORITHMS[name].parameters:
        return [{"ranks": ranks}]
    return [{"nodes": nodes, "gpus": ranks // nodes} for nodes in range(1, ranks + 1) if ranks % nodes == 0]


def make_input(elements: int, dtype: torch.dtype, offset: int) -> torch.Tensor:
    count = elements + offset
    made = (
        torch.randn(count, device="cuda") if dtype.is_floating_point else torch.randint(0, 20, (count,), device="cuda")
    )
    return made.to(dtype)[offset:]


def expect(collective: Collective, x: torch.Tensor, block_chunks: int, reduction: str) -> list[torch.Tensor | None]:
    """Return what each block of the output must be, in fp64 or int64, None where it may be anything."""
    wide = x.to(torch.float64 if x.dtype.is_floating_point else torch.int64)
    every = [torch.empty_like(wide) for _ in range(collective.ranks)]
    dist.all_gather(every, wide)
    blocks = [one.view(max(collective.input_chunks // block_chunks, 1), -1) for one in every]
    found: list[torch.Tensor | None] = []
    for block in range(collective.output_chunks // block_chunks):
        expected = collective.expected(dist.get_rank(), block * block_chunks)
        if expected is None:
            found.append(None)
            continue
        parts = torch.stack([blocks[rank][index // block_chunks] for rank, index in expected])
        if len(expected) == 1:
            found.append(parts[0])
            continue
        match reduction:
            case "sum":
                found.append(parts.sum(0))
            case "avg":
                found.append(parts.sum(0) / len(expected))
            case "max":
                found.append(parts.amax(0))
            case _:
                found.append(parts.amin(0))
    return found


def check_everything(folder: Path, seed: int, protocols: int) -> None:
    """Every algorithm, by so many of the protocols, which the seed draws."""
    world = dist.get_world_size()
    Grid(data=world, device="cuda")
    communicator = CudaCommunicator(timeout=LIMIT)
    rng, rank = random.Random(seed), dist.get_rank()
    sizes = SIZES[:-1] if shared_gpus.is_enabled() else SIZES  # what is right goes by way of the host, in fp64
    torch.manual_seed(seed + rank)
    wrong: list[str] = []
    runs = 0
    cases = [(name, protocol) for name in ALGORITHMS for protocol in rng.sample(PROTOCOLS, protocols)]
    for name, protocol in cases + [(name, "Copy") for name in BY_COPIES]:
        for size in sizes_of(name, world):
            in_place = name != "all-to-next" and rng.random() < 0.5
            options = size if name == "all-to-next" else {**size, "in_place": in_place}
            schedule = ALGORITHMS[name].compile(**options, instances=rng.choice([1, 2]))
            dtype = rng.choice(DTYPES)
            reduction = rng.choice(["sum", "max", "min"] + (["avg"] if getattr(torch, dtype).is_floating_point else []))
            variant = Variant(dtype, reduction, protocol, rng.choice([1, 2, 4]))
            if protocol == "Copy" or rng.random() < 0.5:
                kernel = communicator.load(schedule, variant, in_place=in_place)
            else:
                options = {"tile_bytes": rng.choice([480, 4096, 65536]), "threads": rng.choice([128, 512])}
                if max(len(one.thread_blocks) for one in schedule.ranks) > communicator.workspace.max_blocks:
                    options["threads"] = 128  # all blocks are resident at once, and one of 512 takes a multiprocessor
                kernel = InterpretedSchedule(schedule, communicator.workspace, variant, in_place=in_place, **options)
            for _ in range(6):
                runs += 1
                problem = run_once(kernel, rng, sizes, dtype, reduction, in_place)
                if problem:
                    wrong.append(
                        f"rank {rank} {type(kernel).__name__} {name} {size} {variant} in_place={in_place}: {problem}"
                    )
    communicator.workspace.check()
    (folder / f"wrong-{rank}.json").write_text(json.dumps({"runs": runs, "wrong": wrong}))
    dist.destroy_process_group()


def run_once(
    kernel: Any, rng: random.Random, sizes: tuple[int, ...], dtype: str, reduction: str, in_place: bool
) -> str | None:
    """One call on tensors of any size at any offset, one rank late; returns what was wrong."""
    world = dist.get_world_size()
    collective, kind = kernel.collective, getattr(torch, dtype)
    block_chunks = kernel.block_chunks
    in_blocks, out_blocks = collective.input_chunks // block_chunks, collective.output_chunks // block_chunks
    # Chunks that move to places of another length need even ones.
    elements, offset = rng.choice(sizes) * (block_chunks if kernel.needs_even else 1), rng.choice([0, 0, 1, 3, 5])
    x = make_input(in_blocks * elements, kind, offset)
    expected = expect(collective, x, block_chunks, reduction)
    poison, border = 77, 9
    whole_blocks = max(in_blocks, out_blocks)
    length = (whole_blocks if in_place else out_blocks) * elements
    memory = torch.full((offset + length + border,), poison, dtype=kind, device="cuda")
    target, before = memory[offset : offset + length], x.clone()
    late, cycles = rng.randrange(world), rng.choice([0, 100_000, 1_000_000])  # drawn alike on all ranks
    if late == dist.get_rank():
        torch.cuda._sleep(cycles)
    if in_place:
        start_in, start_out = (start // block_chunks for start in collective.starts(dist.get_rank()))
        target[start_in * elements : start_in * elements + x.numel()] = x
        kernel(target)
        result = target[start_out * elements : (start_out + out_blocks) * elements]
    else:
        kernel(x, target)
        result = target
        if not torch.equal(x, before):
            return "the input was changed"
    if not (memory[:offset] == poison).all() or not (memory[offset + length :] == poison).all():
        return "something outside the output was written"
    for found, right in zip(result.view(out_blocks, -1), expected, strict=True):
        if right is None:
            continue
        error = (found.to(right.dtype) - right.to(kind).to(right.dtype)).abs()
        is_wrong = ~(error <= TOLERANCE.get(dtype, 0) * max(float(right.abs().max()), 1))
        if is_wrong.any():
            places = is_wrong.nonzero().flatten()
            shown = [(at, found[at].item(), right[at].item()) for at in (*places[:6].tolist(), *places[-2:].tolist())]
            return (
                f"{elements} elements from {offset}: {len(places)} are wrong, from {int(places[0])} to "
                f"{int(places[-1])} of {len(found)}, rank {late} was late by {cycles} cycles, call "
                f"{int(kernel.workspace.state[0])}; place, found, right: {shown}"
            )
    return None


def reduce_short_tensors(folder: Path, seed: int, kinds: list[tuple[str, str]]) -> None:
    """Tensors of few elements, by (protocol, dtype): their ends are read element by element, four vectors a thread."""
    world, rank = dist.get_world_size(), dist.get_rank()
    Grid(data=world, device="cuda")
    communicator = CudaCommunicator(timeout=LIMIT)
    rng, wrong = random.Random(seed), []
    torch.manual_seed(seed + rank)
    for protocol, dtype in kinds:
        schedule = ALGORITHMS["ring-all-reduce"].compile(ranks=world, in_place=False)
        kernel = communicator.load(schedule, Variant(dtype, "sum", protocol, 4), in_place=False)
        for _ in range(10):
            problem = run_once(kernel, rng, (1, 2, 3, 7, 31), dtype, "sum", in_place=False)
            if problem:
                wrong.append(f"rank {rank} {protocol} {dtype}: {problem}")
    communicator.workspace.check()
    (folder / f"wrong-{rank}.json").write_text(json.dumps(wrong))
    dist.destroy_process_group()


def same_bits_and_graphs(folder: Path, seed: int) -> None:
    world = dist.get_world_size()
    Grid(data=world, device="cuda")
    communicator = CudaCommunicator(timeout=LIMIT)
    rank = dist.get_rank()
    torch.manual_seed(seed + rank)
    differ: list[str] = []
    for algorithm in ("one-shot-all-reduce", "two-shot-all-reduce", "ring-all-reduce"):
        for protocol in (*PROTOCOLS, "Copy") if algorithm in BY_COPIES else PROTOCOLS:
            kernel = communicator.kernel(AlgorithmChoice(algorithm, protocol), "bfloat16", in_place=False)
            x = torch.randn(100_003 if protocol != "Copy" else 10_000_003, device="cuda").bfloat16()
            outputs = [torch.empty_like(x) for _ in range(3)]
            for output in outputs:
                kernel(x, output)
            every = [torch.empty_like(x) for _ in range(world)]
            dist.all_gather(every, outputs[0])
            if not all(torch.equal(one.view(torch.int16), outputs[0].view(torch.int16)) for one in [*every, *outputs]):
                differ.append(f"{algorithm} {protocol}")
            graph, output = torch.cuda.CUDAGraph(), torch.empty_like(x)
            with torch.cuda.graph(graph):
                for _ in range(3):
                    kernel(x, output)
            for scale in range(1, 5):
                x.fill_(scale * (rank + 1))
                graph.replay()
                if not (output == scale * world * (world + 1) / 2).all():
                    differ.append(f"{algorithm} {protocol} in a graph")
    communicator.workspace.check()
    (folder / f"bits-{rank}.json").write_text(json.dumps(differ))
    dist.destroy_process_group()


def stress(folder: Path, seed: int) -> None:
    """Thousands of calls without a pause, of random collectives and sizes; integers, so that every bit is known."""
    world = dist.get_world_size()
    Grid(data=world, device="cuda")
    communicator = CudaCommunicator(timeout=20.0)
    # The default choice, whatever was measured here.
    communicator.table = Table(has_nvlink=communicator.workspace.has_nvlink)
    rng, rank = random.Random(seed), dist.get_rank()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    ran: dict[str, int] = {}
    total = world * (world + 1) // 2
    for call in range(10_000):
        collective = rng.choice(["allreduce", "allgather", "reducescatter", "alltoall"])
        part = rng.choice([1, 5, 128, 1000, 4096, 20_001])
        late, cycles = rng.randrange(40 * world), rng.choice([10_000, 300_000])  # drawn alike on all ranks
        if late == rank:
            torch.cuda._sleep(cycles)
        count = part * world
        base = torch.arange(count, dtype=torch.int32, device="cuda") + call
        match collective:
            case "allreduce":
                x, out = base * (rank + 1), torch.full_like(base, -1)
                right = base * total
            case "allgather":
                x, out = base[rank * part : (rank + 1) * part].clone(), torch.full_like(base, -1)
                right = base
            case "reducescatter":
                x, out = base * (rank + 1), torch.full((part,), -1, dtype=torch.int32, device="cuda")
                right = base[rank * part : (rank + 1) * part] * total
            case _:
                x, out = base + 1_000_000 * rank, torch.full_like(base, -1)
                ranks = torch.arange(world, dtype=torch.int32, device="cuda").repeat_interleave(part)
                right = base[rank * part : (rank + 1) * part].repeat(world) + 1_000_000 * ranks
        way = communicator.run(collective, x, out)
        assert way is not None
        ran[way] = ran.get(way, 0) + 1
        wrong += (out != right).any()
    torch.cuda.synchronize()
    communicator.workspace.check()
    (folder / f"stress-{rank}.json").write_text(json.dumps({"wrong": int(wrong), "ran": ran}))
    dist.destroy_process_group()


def lose_peers(folder: Path) -> None:
    """The last rank never comes to a third call, by any protocol: each has a group of its own, which breaks."""
    world = dist.get_world_size()
    Grid(data=world, device="cuda")
    rank, x = dist.get_rank(), torch.ones(1000, device="cuda")
    for protocol in (*PROTOCOLS, "Copy"):
        communicator = CudaCommunicator(dist.new_group(list(range(world))), timeout=1.0)
        kernel = communicator.kernel(AlgorithmChoice("two-shot-all-reduce", protocol), "float32", in_place=True)
        kernel(x)
        kernel(x)
        torch.cuda.synchronize()
        message = ""
        if rank != world - 1:
            began = time.monotonic()
            kernel(x)
            torch.cuda.synchronize()
            waited = time.monotonic() - began
            try:
                kernel(x)
            except PeerError as error:
                message = f"{waited:.1f} s: {error}"
        (folder / f"lost-{protocol}-{rank}.txt").write_text(message)
        dist.barrier()
    dist.destroy_process_group()


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    "kinds", sampled([SHORT], [SHORT, list(itertools.product(PROTOCOLS, ("int8", "int16", "float32", "int64")))])
)
def test_short_tensors_of_every_size_of_element_are_summed_right(
    run_ranks: Run, tmp_path: Path, world: int, kinds: list[tuple[str, str]]
) -> None:
    run_ranks(world, reduce_short_tensors, tmp_path, SEED, kinds)
    found = [json.loads((tmp_path / f"wrong-{rank}.json").read_text()) for rank in range(world)]
    assert found == [[]] * world, SEED


@pytest.mark.ranks(3)
@pytest.mark.parametrize("protocols", sampled([1], [1, len(PROTOCOLS)]))
def test_every_algorithm_and_protocol_gives_the_right_numbers_anywhere_in_memory(
    run_ranks: Run, tmp_path: Path, world: int, protocols: int
) -> None:
    print(f"seed {SEED}")
    run_ranks(world, check_everything, tmp_path, SEED, protocols)
    found = [json.loads((tmp_path / f"wrong-{rank}.json").read_text()) for rank in range(world)]
    wrong = [one for each in found for one in each["wrong"]]
    assert not wrong, "\n".join([f"seed {SEED}, {len(wrong)} wrong", *wrong[:40]])
    assert found[0]["runs"] >= 6 * (len(BY_COPIES) + protocols * (len(ALGORITHMS) - 1))  # one is for 8 ranks


@pytest.mark.ranks(2)
def test_all_ranks_get_the_same_bits_every_time_and_graphs_replay(run_ranks: Run, tmp_path: Path, world: int) -> None:
    run_ranks(world, same_bits_and_graphs, tmp_path, SEED)
    assert [json.loads((tmp_path / f"bits-{rank}.json").read_text()) for rank in range(world)] == [[]] * world


@pytest.mark.ranks(4)
def test_ten_thousand_calls_with_stragglers_are_all_right(run_ranks: Run, tmp_path: Path, world: int) -> None:
    print(f"seed {SEED}")
    run_ranks(world, stress, tmp_path, SEED)
    found = [json.loads((tmp_path / f"stress-{rank}.json").read_text()) for rank in range(world)]
    assert [one["wrong"] for one in found] == [0] * world, SEED
    assert sum(found[0]["ran"].values()) == 10_000
    assert len(found[0]["ran"]) >= 5


@pytest.fixture(scope="module")
def lost(run_ranks: Run, tmp_path_factory: pytest.TempPathFactory, world: int) -> Path:
    folder = tmp_path_factory.mktemp("lost")
    run_ranks(world, lose_peers, folder)
    return folder


@pytest.mark.ranks(3)
@pytest.mark.parametrize("protocol", [*PROTOCOLS, "Copy"])
def test_a_missing_peer_is_named_after_the_time_limit(lost: Path, protocol: str, world: int) -> None:
    for rank in range(world - 1):
        message = (lost / f"lost-{protocol}-{rank}.txt").read_text()
        assert f"rank {rank} of {world}: two-shot-all-reduce, call 3, thread block" in message
        # By copy engines calls begin with a barrier, before they send.
        what = "to begin" if protocol == "Copy" else "message"
        assert re.search(f"waited in vain for rank {world - 1}('s)? {what}", message)
        assert float(message.split(" s:")[0]) < 10
