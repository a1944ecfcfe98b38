# SPDX-License-Identifier: Apache-2.0
"""Embedding look-ups on real GPUs: random jagged batches past stragglers, graphs, gradients, updates and faults."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stretto import ops
from stretto.ops.embedding import forward
from stretto.ops.embedding.forward_kernel import ORDERS
from stretto.ops.embedding.launch_config import LaunchConfig
from stretto.parallel import Grid
from tests.ops.embedding.jagged import Case, Kind, fill_case, is_close

Run = Callable[..., list[Any]]
SEED = random.randrange(2**31)

F32, F16, BF16, I32, I64 = torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64
SHAPES = {
    "alike": [[(1000, 128)] * 3] * 4,
    # 348 columns before rank 1's: in 16 bits, its own would be stored by 16 bytes, and theirs are no multiple of that.
    "unequal": [[(1, 4), (300, 92), (50, 252)], [(5000, 64)], [], [(3, 8), (70, 32), (9, 12), (11, 260)]],
    "wide": [[(100, 256), (200, 256)]] * 4,
}


def make_kinds() -> list[Kind]:
    """Few, since each is compiled: their batches differ."""
    world = dist.get_world_size()

    def cut(name: str) -> list[list[tuple[int, int]]]:
        """Each rank's tables; more than four ranks have them in turn."""
        return [SHAPES[name][rank % len(SHAPES[name])] for rank in range(world)]

    return [
        Kind(cut("alike"), 64 * world, F32, I64, "sum", False, 90),
        Kind(cut("unequal"), 48 * world, F32, I64, "mean", True, 20),
        Kind(cut("wide"), 32 * world, BF16, I32, "sum", False, 70),
        Kind(cut("unequal"), 16 * world, F16, I32, "mean", False, 3),
    ]


def call(case: Case, tables: list[torch.Tensor] | None = None, **options: object) -> torch.Tensor:
    own = case.owners[dist.get_rank()]
    return ops.embedding_all_to_all(
        own.indices,
        own.offsets,
        own.tables if tables is None else tables,
        weights=own.weights,
        mode=case.mode,
        batch=case.batch,
        name=str((case.batch, case.mode, case.grad.dtype)),
        **options,
    )


def own_rows(case: Case, whole: torch.Tensor) -> torch.Tensor:
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def write(folder: Path, wrong: list[object]) -> None:
    torch.cuda.synchronize()
    ops.check_indices()
    dist.barrier()
    (folder / f"wrong-{dist.get_rank()}.json").write_text(json.dumps(wrong))


def read(folder: Path) -> list[object]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("wrong-*.json"))]


def look_up_random_batches(folder: Path, seed: int, calls: int) -> None:
    """Every batch once or twice, some ranks late, in every order, and now and then holding on to outputs."""
    world = dist.get_world_size()
    device = Grid(data=world, device="cuda").device
    rank, rng, kinds = dist.get_rank(), random.Random(seed), make_kinds()
    chosen = forward.choose_launch_config
    wrong: list[object] = []
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number in range(calls):
        kind = number % len(kinds)
        case = fill_case(kinds[kind], seed + number, device)
        late, cycles = rng.randrange(world), rng.choice([0, 0, 100_000, 2_000_000])
        order, size = rng.choice(ORDERS), 8
        if number % 3 == 0 and kind == 1:
            forward.choose_launch_config = lambda *_, order=order, size=size: LaunchConfig(1, 8, size, 1, 4, order)  # type: ignore[assignment]
        if late == rank:
            torch.cuda._sleep(cycles)
        out = call(case)
        expected = own_rows(case, case.expected())
        if not is_close(out, expected, out.dtype):
            wrong.append((number, kind, (out.double() - expected).abs().max().item()))
        if number % 5 == 0 and not torch.equal(out, call(case)):
            wrong.append((number, kind, "another time"))
        forward.choose_launch_config = chosen
        if number % 7 == rank:
            held = [*held[-3:], (out, out.clone())]
        wrong += [(number, "written over") for kept, copy in held if not torch.equal(kept, copy)]
    write(folder, wrong)


def differentiate(folder: Path, seed: int, calls: int) -> None:
    world = dist.get_world_size()
    device = Grid(data=world, device="cuda").device
    rank, kinds = dist.get_rank(), make_kinds()[1:3]  # each takes its time to compile
    wrong: list[object] = []
    for number in range(calls):
        case = fill_case(kinds[number % len(kinds)], seed + number, device)
        expected = case.expected_gradients(rank)
        drawn: list[Any] = [None] * world
        parts = [case.grad, *(part for own in case.owners for part in (own.indices, own.offsets, own.weights))]
        dist.all_gather_object(drawn, [float(part.double().sum()) for part in parts if part is not None])
        if any(each != drawn[0] for each in drawn):
            wrong.append((number, "the ranks have drawn other batches", drawn))
        first: list[torch.Tensor] = []
        for sparse in (False, True):
            tables = [table.clone().requires_grad_() for table in case.owners[rank].tables]
            if number % world == rank:
                torch.cuda._sleep(1_000_000)
            out = call(case, tables, sparse=sparse)
            out.backward(own_rows(case, case.grad))
            grads = [table.grad.to_dense() if sparse else table.grad for table in tables]
            first = first or grads
            for place, (grad, right) in enumerate(zip(grads, expected, strict=True)):
                if not is_close(grad, right, grad.dtype) or not torch.equal(grad, first[place]):
                    errors, is_first = (grad.double() - right).abs().amax(1), torch.equal(grad, first[place])
                    rows = errors.topk(min(4, len(errors))).indices.tolist()
                    wrong.append((number, sparse, place, errors.max().item(), rows, is_first))
    write(folder, wrong)


def train_in_two_ways(folder: Path, seed: int) -> None:
    """The fused updates beside SGD on dense gradients, and row-wise Adagrad by its definition."""
    world = dist.get_world_size()
    device = Grid(data=world, device="cuda").device
    rank = dist.get_rank()
    case = fill_case(make_kinds()[0], seed, device)
    own = case.owners[rank]
    shapes = [tuple(table.shape) for table in own.tables]
    wrong: list[object] = []
    for optimizer in ("sgd", "adagrad"):
        fused = ops.EmbeddingAllToAll(shapes, optimizer=optimizer, learning_rate=0.05, device=device)
        plain = ops.EmbeddingAllToAll(shapes, device=device)
        plain.load_state_dict({name: value for name, value in fused.state_dict().items() if "table" in name})
        squares = [torch.zeros(rows, device=device) for rows, _ in shapes]
        for _ in range(3):
            for module in (fused, plain):
                module(own.indices, own.offsets, batch=case.batch).backward(own_rows(case, case.grad))
            for table, square in zip(plain.tables, squares, strict=True):
                square += table.grad.square().mean(1)
                scale = (square.sqrt() + 1e-8)[:, None] if optimizer == "adagrad" else 1.0
                table.data -= 0.05 * table.grad / scale
                table.grad = None
        for place, (ours, theirs) in enumerate(zip(fused.tables, plain.tables, strict=True)):
            if not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5):
                wrong.append((optimizer, place, (ours - theirs).abs().max().item()))
    write(folder, wrong)


def replay(folder: Path) -> None:
    """A look-up and its update in a CUDA graph, replayed with other indices, beside eager calls."""
    world = dist.get_world_size()
    device = Grid(data=world, device="cuda").device
    rank, count, dim, rows = dist.get_rank(), 32 * world, 64, 100
    tables = [torch.randn(rows, dim, device=device) for _ in range(2)]
    offsets = torch.arange(2 * count + 1, device=device) * 5
    indices = torch.randint(0, rows, (10 * count,), device=device)
    settings = torch.tensor([0.1, 1e-8], device=device)
    grad = torch.randn(count // world, 2 * world * dim, device=device)

    def step() -> torch.Tensor:
        out = ops.embedding_all_to_all(indices, offsets, tables)
        ops.embedding_all_to_all_update(grad, indices, offsets, tables, update=ops.TableUpdate("sgd", settings))
        return out

    step()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    wrong: list[object] = []
    for number in range(20):
        indices.random_(0, rows)
        before = [table.clone() for table in tables]
        graph.replay()
        replayed, after = out.clone(), [table.clone() for table in tables]
        for table, value in zip(tables, before, strict=True):
            table.copy_(value)
        if not torch.equal(replayed, step()):
            wrong.append((number, "output"))
        if not all(torch.equal(one, other) for one, other in zip(tables, after, strict=True)):
            wrong.append((number, "tables"))
    del rank
    write(folder, wrong)


def look_up_with_faults(folder: Path) -> None:
    """A bad index raises on its rank, at the next look, and all calls come to their end."""
    world = dist.get_world_size()
    device = Grid(data=world, device="cuda").device
    rank, count = dist.get_rank(), 8 * world
    tables = [torch.ones(10, 32, device=device)]
    offsets = torch.arange(count + 1, device=device)
    indices = torch.zeros(count, dtype=torch.int64, device=device)
    ops.embedding_all_to_all(indices, offsets, tables)
    wrong: list[object] = []
    if rank == world - 1:
        indices[3] = 10
    ops.embedding_all_to_all(indices, offsets, tables)
    try:
        ops.check_indices()
        message = ""
    except ValueError as error:
        message = str(error)
    if (f"rank {rank}: indices[3] is 10, but table 0" in message) != (rank == world - 1):
        wrong.append(message)
    indices.zero_()
    if not torch.equal(ops.embedding_all_to_all(indices, offsets, tables), torch.ones(8, 32 * world, device=device)):
        wrong.append("after")
    write(folder, wrong)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("calls", [60, pytest.param(500, marks=pytest.mark.exhaustive)])
def test_random_jagged_batches_are_right_past_stragglers(
    run_ranks: Run, tmp_path: Path, calls: int, world: int
) -> None:
    run_ranks(world, look_up_random_batches, tmp_path, SEED, calls)
    assert read(tmp_path) == [[]] * world, SEED


@pytest.mark.ranks(3)
@pytest.mark.parametrize("calls", [12, pytest.param(24, marks=pytest.mark.exhaustive)])
def test_gradients_dense_and_sparse_are_right_and_the_same_twice(
    run_ranks: Run, tmp_path: Path, calls: int, world: int
) -> None:
    run_ranks(world, differentiate, tmp_path, SEED, calls)
    assert read(tmp_path) == [[]] * world, SEED


@pytest.mark.ranks(4)
def test_fused_updates_are_the_unfused_ones(run_ranks: Run, tmp_path: Path, world: int) -> None:
    run_ranks(world, train_in_two_ways, tmp_path, SEED)
    assert read(tmp_path) == [[]] * world, SEED


@pytest.mark.ranks(2)
def test_a_captured_graph_replays_look_up_and_update(run_ranks: Run, tmp_path: Path, world: int) -> None:
    run_ranks(world, replay, tmp_path)
    assert read(tmp_path) == [[]] * world


@pytest.mark.ranks(3)
def test_a_bad_index_is_named_and_hangs_no_rank(run_ranks: Run, tmp_path: Path, world: int) -> None:
    run_ranks(world, look_up_with_faults, tmp_path)
    assert read(tmp_path) == [[]] * world
