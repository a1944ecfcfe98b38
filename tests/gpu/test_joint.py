# SPDX-License-Identifier: Apache-2.0
"""Products whose exchange is a schedule, on GPUs: whole numbers, past stragglers and poison, and in captured graphs."""

import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from stretto import ops
from stretto.collectives import Schedule
from stretto.collectives.algorithms import find
from stretto.ops import choices, moe
from stretto.ops.embedding.output_ring import find_output_rings
from stretto.ops.operator import list_channels
from tests.collectives.joint.random_algorithms import random_all_to_all, random_schedule
from tests.gpu.sharing import GpuRanks
from tests.gpu.test_moe import no_host_waits
from tests.ops.embedding.jagged import Kind, fill_case, look_up_case

SEED = random.randrange(2**31)
pytestmark = pytest.mark.ranks(4, own=(2, 4), among=(2, 3, 4, 8))
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
    for ring in find_output_rings(dist.group.WORLD.group_name):  # type: ignore[union-attr]
        if not ring.outputs:
            ring.slots.fill_(0xFF)
    torch.cuda.synchronize()
    dist.barrier()


def count_wrong(operator: str, schedules: tuple[str, ...], seed: int | None = None, is_slow: bool = False) -> int:
    """The number of wrong results, of named schedules, or of random ones. is_slow: as on GPUs that PCIe connects."""
    with pytest.MonkeyPatch.context() as patch:
        if is_slow:
            patch.setenv(choices.COPIES_VARIABLE, "1")
        found = _count_wrong(operator, schedules, seed)
        name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        device = torch.device("cuda", torch.cuda.current_device())
        assert choices.find_agreed(name, device).signals_by_copies == is_slow
    return found


def _count_wrong(operator: str, schedules: tuple[str, ...], seed: int | None) -> int:
    generator, wrong = torch.Generator().manual_seed(dist.get_rank()), 0
    rng = random.Random(seed)
    for shape in SHAPES:
        x, weight, wanted = multiply_plainly(operator, shape)
        chosen = list(schedules)
        if seed is not None:
            world = dist.get_world_size()
            chosen = [random_schedule(rng, operator, world, rng.choice([1, 2, 3]))]  # type: ignore[list-item]
        for schedule in chosen:
            for turn in range(8):  # of two slots each is used in both ways
                if turn == 4:
                    poison()
                torch.cuda._sleep(int(torch.randint(0, 2_000_000, (), generator=generator)))
                transfer = "programs" if turn % 2 else "copies"
                direction = "pull" if turn % 4 == 2 and operator == "all_gather_matmul" else "push"
                how = ops.KernelConfig(transfer=transfer, direction=direction, piece_bytes=1 << 15)
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


HIDDEN, INNER, LOCAL, K = 264, 136, 4, 3


def make_all_to_alls(seed: int) -> list[str | Schedule]:
    """The direct one in two pieces, the two-step one of two nodes where there can be (of 2 ranks, the direct one), and
    a random one."""
    world = dist.get_world_size()
    nodes = 2 if world % 2 == 0 else world
    return [
        find("direct-all-to-all").compile(ranks=world, instances=2),
        find("two-step-all-to-all").compile(nodes=nodes, gpus=world // nodes),
        random_all_to_all(random.Random(seed), world, 2),
    ]


def make_routing(turn: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """(x, ids, weights) of this rank: whole numbers, and in every third turn experts of one rank."""
    rank, experts = dist.get_rank(), LOCAL * dist.get_world_size()
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    numbers = torch.rand(tokens, experts, generator=generator)
    if turn % 3 == 2:
        numbers[:, :LOCAL] += 1
    ids = numbers.topk(K).indices.cuda()
    return draw(turn + rank, tokens, HIDDEN), ids, torch.randint(3, ids.shape, generator=generator).float().cuda()


def run_experts(
    routing: tuple[Tensor, Tensor, Tensor],
    weight: Tensor,
    max_rows: int | None,
    group: dist.ProcessGroup | None = None,
    **options: object,
) -> list[Tensor]:
    """Products, sums and gradients of experts."""
    x, ids, weights = routing
    group, leaves = group or dist.group.WORLD, (x.requires_grad_(), weights.requires_grad_())
    inner, sent = moe.dispatch_grouped_matmul(
        x,
        ids,
        weight,
        group,
        topk_weights=weights,
        max_rows=max_rows,
        **options,  # type: ignore[arg-type]
    )
    out = moe.grouped_matmul_combine(inner, weight.transpose(1, 2), sent, weights, group)
    return [inner, sent.offsets, out, *torch.autograd.grad(out.float().sum(), leaves)]


def count_wrong_experts(seed: int, is_fixed: bool) -> int:
    """The number of calls by schedules whose bits are not those of the kernels' own exchange."""
    rank, world, wrong = dist.get_rank(), dist.get_world_size(), 0
    generator = torch.Generator().manual_seed(rank)
    weight = draw(100 + rank, LOCAL, INNER, HIDDEN)
    for schedule in make_all_to_alls(seed):
        for turn in range(4):  # of two slots each is used again
            tokens = 160 if is_fixed else [0, 257, 96, 31, 160, 1, 64, 200][(rank + turn) % 8]
            max_rows = tokens * K * world if is_fixed else None
            routing = make_routing(turn, tokens)
            wanted = run_experts(routing, weight, max_rows, implementation="kernel")
            if turn == 2:
                poison()
            torch.cuda._sleep(int(torch.randint(0, 2_000_000, (), generator=generator)))
            found = run_experts(routing, weight, max_rows, schedule=schedule)
            wrong += not all(torch.equal(one, right) for one, right in zip(found, wanted, strict=True))
    moe.check_rows(dist.group.WORLD)
    return wrong


@pytest.mark.parametrize("is_fixed", [False, True])
def test_experts_whose_tokens_move_by_a_schedule_are_exact(gpu_pool: GpuRanks, world: int, is_fixed: bool) -> None:
    print(f"seed {SEED}")
    assert gpu_pool.run(world, count_wrong_experts, SEED, is_fixed) == [0] * world


def replay_experts(seed: int) -> list[bool]:
    """Whether replays of captured experts are right, on other tokens and routings each time. No call waits for the
    host."""
    world, tokens = dist.get_world_size(), 128
    weight, routing = draw(100 + dist.get_rank(), LOCAL, INNER, HIDDEN), make_routing(0, tokens)
    same = []
    for schedule in make_all_to_alls(seed):

        def run() -> list[Tensor]:
            return run_experts(routing, weight, tokens * K * world, schedule=schedule)  # noqa: B023

        for _ in range(3):  # kernels are compiled, and workspaces allocated
            run()
        torch.cuda.synchronize()
        with no_host_waits():
            run()
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = run()
        for turn in range(4):
            with torch.no_grad():
                for one, other in zip(routing, make_routing(turn, tokens), strict=True):
                    one.copy_(other)
            wanted = run_experts(routing, weight, tokens * K * world, implementation="kernel")
            graph.replay()
            same.append(all(torch.equal(one, right) for one, right in zip(replayed, wanted, strict=True)))
        torch.cuda.synchronize()
        del graph, replayed
    return same


def test_captured_experts_wait_for_no_host_and_replay(gpu_pool: GpuRanks, world: int) -> None:
    print(f"seed {SEED}")
    for same in gpu_pool.run(world, replay_experts, SEED):
        assert all(same), same


def make_kinds() -> list[Kind]:
    """Look-ups of tables of unequal and of equal dims, and of ranks without any."""
    world = dist.get_world_size()
    unequal: list[list[tuple[int, int]]] = [[(1, 4), (300, 92), (50, 252)], [(5000, 64)], [], [(3, 8), (70, 32)]]
    return [
        Kind([unequal[rank % 4] for rank in range(world)], 48 * world, torch.float32, torch.int64, "mean", True, 20),
        Kind([[(1000, 128)] * 3] * world, 64 * world, torch.bfloat16, torch.int32, "sum", False, 70),
    ]


def count_wrong_look_ups(seed: int) -> int:
    """The number of look-ups by schedules whose bits, or gradients, are not those of the kernels' own exchange."""
    rank, wrong = dist.get_rank(), 0
    generator = torch.Generator().manual_seed(rank)
    for kind in make_kinds():
        for schedule in make_all_to_alls(seed):
            for turn in range(3):
                case = fill_case(kind, turn, "cuda")
                case.seed = kind.batch  # one name for a kind's tables
                found = []
                if turn == 1:
                    poison()
                for options in ({"schedule": schedule}, {}):
                    torch.cuda._sleep(int(torch.randint(0, 2_000_000, (), generator=generator)))
                    tables = [table.clone().requires_grad_() for table in case.owners[rank].tables]
                    out = look_up_case(case, tables, **options)
                    out.backward(case.grad.chunk(dist.get_world_size())[rank].to(out.dtype))
                    found.append([out.detach().clone(), *(table.grad for table in tables)])
                wrong += not all(torch.equal(*pair) for pair in zip(*found, strict=True))
    ops.check_indices()
    return wrong


def test_vectors_that_move_by_a_schedule_are_exact(gpu_pool: GpuRanks, world: int) -> None:
    print(f"seed {SEED}")
    assert gpu_pool.run(world, count_wrong_look_ups, SEED) == [0] * world


def replay_look_ups(seed: int) -> list[bool]:
    """Whether replays of captured look-ups are right, of other rows each time."""
    same, kind = [], make_kinds()[1]
    for number, schedule in enumerate(make_all_to_alls(seed)):
        case = fill_case(kind, number, "cuda")
        case.seed = kind.batch
        own = case.owners[dist.get_rank()]
        with torch.no_grad():
            for _ in range(3):  # kernels are compiled, and memory allocated
                look_up_case(case, schedule=schedule)
            torch.cuda.synchronize()
            dist.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                replayed = look_up_case(case, schedule=schedule)
            for _ in range(4):
                own.indices.random_(0, 1000)
                wanted = look_up_case(case).clone()
                graph.replay()
                same.append(torch.equal(replayed, wanted))
        torch.cuda.synchronize()
        del graph, replayed
    ops.check_indices()
    return same


def test_captured_look_ups_replay(gpu_pool: GpuRanks, world: int) -> None:
    print(f"seed {SEED}")
    for same in gpu_pool.run(world, replay_look_ups, SEED):
        assert all(same), same
