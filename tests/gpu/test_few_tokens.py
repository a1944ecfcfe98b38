# SPDX-License-Identifier: Apache-2.0
"""Few tokens to their experts' ranks and back by packets on GPUs: beside dispatch and combine, poison, graphs."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from stretto.ops import moe, quantize_rows
from stretto.ops.moe.few_tokens import FewWorkspace
from stretto.ops.operator import list_kept
from tests.gpu.sharing import GpuRanks
from tests.gpu.test_moe import no_host_waits, poison

FP8 = torch.float8_e4m3fn
K = 4
pytestmark = pytest.mark.ranks(2, 4, own=(2, 4, 8), among=(2, 3, 5, 8))


def make_call(turn: int, tokens: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's x, ids and weights; every third turn's tokens go to the experts of one rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(100 * turn + rank)
    numbers = torch.rand(tokens, 4 * world, generator=generator)
    if turn % 3 == 2:
        numbers[:, turn % world * 4 :][:, :4] += 1
    x = torch.randn(tokens * columns + 1, generator=generator).to("cuda", dtype)
    x = x[turn % 2 :][: tokens * columns].view(tokens, columns)  # in every second call unaligned
    ids, weights = numbers.topk(K).indices, torch.rand(tokens, K, generator=generator)
    return x, ids.cuda(), weights.cuda()


def multiply(rows: Tensor, offsets: Tensor) -> Tensor:
    """Each row times the number of its expert on this rank, plus 1."""
    numbers = torch.arange(len(rows), dtype=torch.int32, device="cuda")
    return rows * (torch.searchsorted(offsets[1:], numbers, right=True) + 1)[:, None].to(rows.dtype)


def run_few(
    call: tuple[Tensor, Tensor, Tensor], payload: torch.dtype | None, implementation: str = "kernel"
) -> tuple[Tensor, Tensor, Tensor]:
    experts = 4 * dist.get_world_size()
    with torch.no_grad():
        sent = moe.dispatch_few(*call, experts, dist.group.WORLD, payload=payload, implementation=implementation)
        return sent.rows, sent.offsets, moe.combine_few(multiply(sent.rows, sent.offsets), sent.handle)


def run_plain(call: tuple[Tensor, Tensor, Tensor], payload: torch.dtype | None) -> tuple[Tensor, Tensor, Tensor]:
    (x, ids, weights), group = call, dist.group.WORLD
    if payload is not None:
        quantized, scales = quantize_rows(x)
        x = (quantized.float() * scales[:, None]).to(x.dtype)
    sent = moe.dispatch(x, ids, 4 * dist.get_world_size(), group, implementation="library")
    return sent.rows, sent.offsets, moe.combine(multiply(sent.rows, sent.offsets), sent.handle, weights, group)


def same_bits(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> list[bool]:
    """For rows without padding, offsets and sums."""
    pairs = zip((found[0][: len(expected[0])], *found[1:]), expected, strict=True)
    return [torch.equal(one, other) for one, other in pairs]


def poison_words() -> None:
    """Fill what may hold anything between calls, after a look at what may not."""
    group = dist.group.WORLD
    assert group is not None
    torch.cuda.synchronize()
    dist.barrier(group)
    for kept in list_kept(group.group_name):
        if isinstance(kept, FewWorkspace):
            assert not kept.packets[:, kept.first :].any(), "packets were left behind"
            kept.packets[:, : kept.first] = -1
    torch.cuda.synchronize()
    dist.barrier(group)
    poison()


def compare(tokens: list[int], columns: int, dtype: torch.dtype, payload: torch.dtype | None, turns: int) -> set[int]:
    """The turns of which a result has other bits than by dispatch and combine; ranks are late in turn."""
    rank, world, wrong = dist.get_rank(), dist.get_world_size(), set()
    calls = [make_call(turn, tokens[(rank + turn) % world], columns, dtype) for turn in range(turns)]
    expected = [run_plain(call, payload) for call in calls]
    found = []
    for turn, call in enumerate(calls):
        if turn % 4 == 3:
            poison_words()
        if turn % world == rank:
            torch.cuda._sleep(200_000)
        found.append(run_few(call, payload))
    for turn in range(turns):
        if not all(same_bits(found[turn], expected[turn])):
            wrong.add(turn)
    poison_words()
    return wrong


@pytest.mark.parametrize(
    ("tokens", "columns", "dtype", "payload"),
    [
        ([1, 1, 2, 0, 3, 1, 0, 1], 7168, torch.bfloat16, None),
        ([17, 32, 1, 8, 0, 30, 4, 2], 1008, torch.float16, FP8),
        ([32, 40, 8, 5, 0, 64, 2, 1], 100, torch.float32, None),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ([128, 96, 0, 127, 128, 1, 64, 33], 2048, torch.bfloat16, None),
                ([128, 5, 70, 128, 0, 9, 12, 128], 4096, torch.bfloat16, FP8),
            )
        ),
    ],
    ids=str,
)
def test_results_have_the_bits_of_dispatch_and_combine(
    gpu_pool: GpuRanks, world: int, tokens: list[int], columns: int, dtype: torch.dtype, payload: torch.dtype | None
) -> None:
    assert gpu_pool.run(world, compare, tokens[:world], columns, dtype, payload, 12) == [set()] * world


def capture(payload: torch.dtype | None, implementation: str) -> list[bool]:
    """Whether replays of two captured layers have the bits of eager calls, on other tokens and routings each time."""
    static = make_call(0, 40, 2048, torch.bfloat16)
    _, ids, weights = static

    def run() -> tuple[Tensor, Tensor, Tensor]:
        rows, offsets, out = run_few(static, payload, implementation)
        return rows, offsets, run_few((out, ids, weights), payload, implementation)[2]

    for _ in range(3):  # kernels are compiled, and memory allocated
        run()
    torch.cuda.synchronize()
    with no_host_waits():
        run()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run()
    same = []
    for turn in range(6):
        for one, other in zip(static, make_call(turn, 40, 2048, torch.bfloat16), strict=True):
            one.copy_(other)
        rows, offsets, out = run()
        number = int(offsets[-1])
        graph.replay()
        same += same_bits(replayed, (rows[:number], offsets, out))
    del graph, replayed
    return same


@pytest.mark.parametrize("payload", [None, FP8], ids=str)
def test_captured_calls_wait_for_no_host_and_replay(
    gpu_pool: GpuRanks, world: int, payload: torch.dtype | None
) -> None:
    for same in gpu_pool.run(world, capture, payload, "kernel"):
        assert all(same), same


@pytest.mark.own_gpus("gloo gathers no tensors on GPUs by torch's functional collectives")
def test_the_library_is_captured_too(gpu_pool: GpuRanks, world: int) -> None:
    for same in gpu_pool.run(world, capture, None, "library"):
        assert all(same), same


def choose() -> bool:
    """True if "auto" runs the kernels."""
    group = dist.group.WORLD
    assert group is not None
    run_few(make_call(0, 2, 256, torch.bfloat16), None, "auto")
    return any(isinstance(kept, FewWorkspace) for kept in list_kept(group.group_name))


@pytest.mark.own_gpus("NVLink is between GPUs")
def test_auto_takes_the_kernels_between_gpus_that_nvlink_connects(gpu_pool: GpuRanks, world: int) -> None:
    assert gpu_pool.run(world, choose) == [True] * world
