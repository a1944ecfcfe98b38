# SPDX-License-Identifier: Apache-2.0
"""GEMMs whose exchange is a schedule, on GPUs: whole numbers, past stragglers and poison, and in captured graphs."""

import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from stretto import ops
from stretto.ops import choices
from stretto.ops.operator import list_channels
from tests.collectives.joint.random_algorithms import random_schedule
from tests.gpu.sharing import GpuRanks

SEED = random.randrange(2**31)
pytestmark = pytest.mark.ranks(2, 4, own=(2, 4), among=(2, 3, 4, 8))
NAMED = {
    "all_gather_matmul": ("direct-all-gather", "ring-all-gather", "recursive-doubling-all-gather"),
    "matmul_reduce_scatter": ("direct-reduce-scatter", "ring-reduce-scatter", "recursive-halving-reduce-scatter"),
    "matmul_all_reduce": ("two-shot-all-reduce", "ring-all-reduce", "recursive-halving-all-reduce"),
}
SHAPES = [(256, 384, 512), (200, 264, 136), (33, 131, 77)]  # rows of a rank, n, k; the last by pointers


def draw(seed: int, *shape: int) -> Tensor:
    """Few whole numbers, of which bf16 holds all sums."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(shape, generator=generator) < 0.1
    return (torch.randint(-2, 3, shape, generator=generator) * kept).bfloat16().cuda()


def multiply_plainly(operator: str, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """(x, weight, the product), of this rank."""
    rank, world, (rows, n, k) = dist.get_rank(), dist.get_world_size(), shape
    rows *= world if operator == "matmul_reduce_scatter" else 1
    xs = [draw(peer, rows, k) for peer in range(world)]
    weights = [draw(100 + peer, n, k) for peer in range(world)]
    if operator == "all_gather_matmul":
        return xs[rank], weights[rank], torch.cat(xs) @ weights[rank].t()
    total = sum((x.float() @ weight.float().t() for x, weight in zip(xs, weights, strict=True)), torch.zeros(()).cuda())
    wanted = total.chunk(world)[rank] if operator == "matmul_reduce_scatter" else total
    return xs[rank], weights[rank], wanted.bfloat16()


def poison() -> None:
    """Fill the memory that moves land in with NaN."""
    torch.cuda.synchronize()
    dist.barrier()
    for purpose, channel in list_channels(dist.group.WORLD.group_name):  # type: ignore[union-attr]
        if purpose == "copy_engine":
            channel.tensor((channel.num_bytes - channel._signal_bytes,), torch.uint8).fill_(0xFF)
    torch.cuda.synchronize()
    dist.barrier()


def count_wrong(operator: str, schedules: tuple[str, ...], seed: int | None = None, is_slow: bool = False) -> int:
    """The number of wrong results, of named schedules, or of random ones. is_slow: as on GPUs that PCIe connects."""
    with pytest.MonkeyPatch.context() as patch:
        if is_slow:
            patch.setenv(choices.COPIES_VARIABLE, "1")
        found = _count_wrong(operator, schedules, seed)
        name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        assert choices.signals_by_copies(name, torch.device("cuda", torch.cuda.current_device())) == is_slow
    return found


def _count_wrong(operator: str, schedules: tuple[str, ...], seed: int | None) -> int:
    generator, wrong = torch.Generator().manual_seed(dist.get_rank()), 0
    rng = random.Random(seed)
    for shape in SHAPES:
        x, weight, wanted = multiply_plainly(operator, shape)
        chosen = list(schedules)
        if seed is not None:
            world = dist.get_world_size()
            chosen = [random_schedule(rng, operator, world, rng.choice([1, 2, 3])) for _ in range(2)]  # type: ignore[misc]
        for schedule in chosen:
            for turn in range(8):  # of two slots each is used in both ways
                if turn == 4:
                    poison()
                torch.cuda._sleep(int(torch.randint(0, 2_000_000, (), generator=generator)))
                transfer = "programs" if turn % 2 else "copies"
                direction = "pull" if turn % 4 == 2 and operator == "all_gather_matmul" else "push"
                how = ops.KernelConfig(transfer=transfer, direction=direction)
                out = getattr(ops, operator)(x, weight, schedule=schedule, implementation=how)
                wrong += not torch.equal(out, wanted)
    return wrong


@pytest.mark.parametrize("operator", list(NAMED))
def test_named_schedules_give_exact_products(gpu_pool: GpuRanks, world: int, operator: str) -> None:
    assert gpu_pool.run(world, count_wrong, operator, NAMED[operator]) == [0] * world


@pytest.mark.parametrize("operator", list(NAMED))
def test_random_schedules_give_exact_products(gpu_pool: GpuRanks, world: int, operator: str) -> None:
    print(f"seed {SEED}")
    assert gpu_pool.run(world, count_wrong, operator, (), SEED) == [0] * world


@pytest.mark.parametrize("operator", list(NAMED))
def test_products_without_atomic_operations_between_gpus_are_exact(
    gpu_pool: GpuRanks, world: int, operator: str
) -> None:
    print(f"seed {SEED}")
    assert gpu_pool.run(world, count_wrong, operator, NAMED[operator], None, True) == [0] * world
    assert gpu_pool.run(world, count_wrong, operator, (), SEED, True) == [0] * world


def replay(operator: str, schedule: str, how: ops.KernelConfig) -> list[bool]:
    """Whether replays of a captured product are right, on other rows each time."""
    x, weight, _ = multiply_plainly(operator, SHAPES[0])

    def run() -> Tensor:
        found: Tensor = getattr(ops, operator)(x, weight, schedule=schedule, implementation=how)
        return found

    for _ in range(3):  # the kernel is compiled, and the workspace allocated
        run()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run()
    same = []
    for turn in range(5):
        x.copy_(draw(1000 * turn + dist.get_rank(), *x.shape))
        eager = run().clone()
        graph.replay()
        same.append(torch.equal(eager, replayed))
    torch.cuda.synchronize()
    del graph, replayed
    return same


@pytest.mark.parametrize(
    ("operator", "schedule", "how"),
    [
        ("matmul_reduce_scatter", "ring-reduce-scatter", ops.KernelConfig(transfer="programs")),
        ("matmul_reduce_scatter", "ring-reduce-scatter", ops.KernelConfig(transfer="copies")),
        ("matmul_all_reduce", "two-shot-all-reduce", ops.KernelConfig(transfer="copies")),
        ("all_gather_matmul", "ring-all-gather", ops.KernelConfig(direction="pull")),
    ],
)
def test_captured_products_replay(
    gpu_pool: GpuRanks, world: int, operator: str, schedule: str, how: ops.KernelConfig
) -> None:
    assert gpu_pool.run(world, replay, operator, schedule, how) == [[True] * 5] * world
