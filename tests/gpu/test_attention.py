# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention on GPUs: beside fp64, other calls' rows left in memory, captured graphs, memory."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from stretto import ops
from stretto.memory import shared_gpus
from stretto.ops import choices, confirmation
from stretto.ops.attention import kernels
from stretto.ops.attention.choice import find_times
from stretto.ops.operator import list_channels
from tests.differences import largest
from tests.gpu.sharing import GpuRanks, sampled
from tests.gpu.test_moe import poison, relative_error
from tests.ops.attention import test_gathered
from tests.ops.attention.whole import Case, draw_whole, list_pairs

pytestmark = pytest.mark.ranks(4, own=(2, 4, 8), among=(2, 3, 4, 8))
IMPLEMENTATIONS = "all_gather", "ring", "ulysses"
SCHEDULES = "direct-all-gather", "ring-all-gather", "recursive-doubling-all-gather"
LIMIT = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-4}


def list_cases(world: int) -> list[Case]:
    length, total = 264, 264 * world
    documents = (0, 3, 300, 301, 301 + 130, total)
    plain = Case(length, heads=4 * world, kv_heads=2 * world, sizes=(128, 128))
    return [
        replace(plain, causal=False, layout="contiguous"),
        plain,
        replace(plain, has_sinks=True, documents=documents),
        replace(plain, layout="contiguous", documents=documents, causal=False),
        replace(plain, layout="balanced", documents=documents),
        replace(plain, window=100),
        replace(plain, layout="contiguous", window=300, documents=documents, has_sinks=True),
        replace(plain, sizes=(64, 64), kv_heads=4 * world, scale=0.2),
        replace(plain, sizes=(192, 128)),
    ]


def poison_buffers() -> None:
    """Fill the data of the group's symmetric memory with NaN, which no rank may be using."""
    torch.cuda.synchronize()
    dist.barrier()
    for purpose, channel in list_channels(dist.group.WORLD.group_name):
        if purpose in ("barrier", "copy_engine"):
            channel.tensor((channel.num_bytes - channel._signal_bytes,), torch.uint8).fill_(0xFF)
    torch.cuda.synchronize()
    dist.barrier()
    poison()


def compare(world: int, implementation: str, dtype: torch.dtype) -> list[list[float]]:
    found = []
    for case in list_cases(world):
        list_pairs(case, implementation, dtype, "cuda")
        poison_buffers()
        pairs = list_pairs(case, implementation, dtype, "cuda")
        found.append([relative_error(one, right) for one, right in pairs])
    return found


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    sampled(
        [*((implementation, torch.bfloat16) for implementation in IMPLEMENTATIONS), ("ring", torch.float32)],
        list(itertools.product(IMPLEMENTATIONS, LIMIT)),
    ),
    ids=str,
)
def test_it_is_attention_of_the_whole_sequence(
    gpu_pool: GpuRanks, world: int, implementation: str, dtype: torch.dtype
) -> None:
    for rank, found in enumerate(gpu_pool.run(world, compare, world, implementation, dtype)):
        for number, errors in enumerate(found):
            assert all(error < LIMIT[dtype] for error in errors), (rank, number, errors)  # NaN is not less


def compare_scheduled(world: int, schedule: str, is_slow: bool) -> list[list[float]]:
    """Errors of attention to keys that a schedule gathers, in both slots. is_slow: as on GPUs that PCIe connects."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        if is_slow:
            patch.setenv(choices.COPIES_VARIABLE, "1")
        for case in list_cases(world):
            for _ in range(2):
                poison_buffers()
                pairs = list_pairs(case, "all_gather", torch.bfloat16, "cuda", schedule=schedule)
                found.append([relative_error(one, right) for one, right in pairs])
    return found


@pytest.mark.parametrize(
    ("schedule", "is_slow"),
    sampled(
        [("ring-all-gather", False), ("recursive-doubling-all-gather", True)],
        list(itertools.product(SCHEDULES, (False, True))),
    ),
)
def test_it_is_the_same_by_a_schedule(gpu_pool: GpuRanks, world: int, schedule: str, is_slow: bool) -> None:
    for rank, found in enumerate(gpu_pool.run(world, compare_scheduled, world, schedule, is_slow)):
        for number, errors in enumerate(found):
            assert all(error < LIMIT[torch.bfloat16] for error in errors), (rank, number, errors)  # NaN is not less


def compare_few_heads(world: int) -> list[float]:
    """One KV head for every two ranks, which Ulysses combines with the gather; one alone, which it refuses."""
    case = Case(256, heads=2 * world, kv_heads=world // 2, sizes=(128, 128))
    found = [relative_error(*pair) for pair in list_pairs(case, "ulysses", torch.bfloat16, "cuda")]
    q, k = (torch.zeros(1, heads, 256, 128, device="cuda", dtype=torch.bfloat16) for heads in (world, 1))
    with pytest.raises(ValueError, match="use all_gather_attention"):
        ops.ulysses_attention(q, k, k)
    return found


@pytest.mark.ranks(4, own=(4, 8), among=(4, 8))
def test_fewer_kv_heads_than_ranks(gpu_pool: GpuRanks, world: int) -> None:
    for errors in gpu_pool.run(world, compare_few_heads, world):
        assert all(error < LIMIT[torch.bfloat16] for error in errors)


def capture(world: int) -> list[bool]:
    """Whether replays of a captured call, and of its gradients, are near eager calls on other numbers."""
    same = []
    for implementation in IMPLEMENTATIONS[: 2 if shared_gpus.is_enabled() else 3]:  # the host exchanges heads there
        case = list_cases(world)[2]
        *inputs, _ = draw_whole(case, case.length, torch.bfloat16, "cuda")
        leaves = [each.requires_grad_() for each in inputs]

        def run(case=case, implementation=implementation, leaves=leaves):  # type: ignore[no-untyped-def]
            *parts, sinks = leaves
            out = ops.context_attention(*parts, sinks=sinks, implementation=implementation, **case.options())
            return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]

        for _ in range(3):  # kernels are compiled, and workspaces allocated
            run()
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = run()
        for turn in range(3):
            with torch.no_grad():
                for leaf in leaves:
                    leaf.mul_(1 + turn / 4)
            graph.replay()
            found = [each.clone() for each in replayed]
            same.append(all(relative_error(one, two) < 1e-2 for one, two in zip(found, run(), strict=True)))
        dist.barrier()
    return same


def test_captured_calls_replay(gpu_pool: GpuRanks, world: int) -> None:
    for found in gpu_pool.run(world, capture, world):
        assert found
        assert all(found)


def list_kernels() -> list[str]:
    """The kernels of a causal block, of a window, and of fp32."""
    q = torch.zeros(1, 8, 4096, 128, device="cuda", dtype=torch.bfloat16)
    whole = kernels.Range(0, 4096)
    found = []
    for tensor, left in ((q, None), (q, 100), (q.float(), None)):
        block = kernels.Block(whole, whole, True, left)
        ((kernel, *_),) = kernels._list_runs(tensor, tensor[:, :2], tensor[:, :2], [block], False)
        found.append(kernel.__name__)
    return found


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="cuDNN's kernel is for Hopper"
)
@pytest.mark.ranks(2, own=(2,), among=(2,))
def test_hopper_takes_the_fastest_kernels(gpu_pool: GpuRanks, world: int) -> None:
    assert gpu_pool.run(1, list_kernels) == [["_Cudnn", "_Flash", "_Plain"]]


def measure_memory(world: int) -> dict[str, int]:
    """The most bytes that a forward pass allocates, beside operands; symmetric memory is apart."""
    q, k = (torch.randn(1, heads, 4096, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 8))
    found = {}
    for implementation in ("all_gather", "ring"):
        with torch.no_grad():
            for _ in range(2):
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                ops.context_attention(q, k, k, implementation=implementation, causal=True, layout="zigzag")
        found[implementation] = torch.cuda.max_memory_allocated() - before
    return found


def test_memory_does_not_grow_with_the_scores(gpu_pool: GpuRanks, world: int) -> None:
    operand = 8 * 4096 * 128 * 2
    for found in gpu_pool.run(world, measure_memory, world):
        assert largest(found.values()) < 16 * operand  # one block's scores would take 64 of them in fp32


def confirm(world: int, folder: Path) -> tuple[list[float], list[dict[str, float]]]:
    """Errors of calls that choose by measured times, and the times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRETTO_CACHE", str(folder / str(dist.get_rank())))
        patch.setattr(confirmation, "_budget", confirmation._Budget())  # of which earlier tests took
        choices.restore_choices({})
        pairs = list_pairs(list_cases(world)[1], "auto", torch.bfloat16, "cuda")
        times = find_times(dist.group.WORLD.group_name, torch.device("cuda", torch.cuda.current_device()))
        choices.restore_choices({})
        return [relative_error(*pair) for pair in pairs], list(times.values())


@pytest.mark.own_gpus("it times calls")
@pytest.mark.ranks(2, own=(2, 4))
def test_auto_is_the_fastest_of_a_first_call(gpu_pool: GpuRanks, world: int, tmp_path: Path) -> None:
    results = gpu_pool.run(world, confirm, world, tmp_path)
    for errors, times in results:
        assert largest(errors) < LIMIT[torch.bfloat16], (errors, times)
        assert times == results[0][1]
        assert all(set(each) == set(IMPLEMENTATIONS) and min(each.values()) > 0 for each in times)
        assert times


def test_keys_are_made_of_gathered_latents(gpu_pool: GpuRanks, world: int) -> None:
    for found in gpu_pool.run(world, test_gathered.differ, test_gathered.list_cases(world), "cuda"):
        assert found < 1e-10
