# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel experts by kernels on GPUs: beside fp64, past stragglers and poison, and in captured graphs."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from stretto.ops import moe
from stretto.ops.operator import list_channels
from tests.differences import largest
from tests.gpu.sharing import GpuRanks
from tests.gpu.test_moe import BF16, EXPERTS, no_host_waits, poison, relative_error, run_dense

K = 3
pytestmark = pytest.mark.ranks(4, own=(2, 4), among=(2, 3, 4))


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).bfloat16().cuda()


def poison_buffers(group: dist.ProcessGroup) -> None:
    """Fill the data of the group's symmetric memory with NaN, which no rank may be using."""
    torch.cuda.synchronize()
    dist.barrier(group)
    for purpose, channel in list_channels(group.group_name):
        if purpose == "copy_engine":
            channel.tensor((channel.num_bytes - channel._signal_bytes,), torch.uint8).fill_(0xFF)
    torch.cuda.synchronize()
    dist.barrier(group)
    poison()


def cut(one: Tensor, dim: int, parts: int = 1) -> Tensor:
    """This rank's part of a dim, or of each of a dim's parts."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return torch.cat([part.chunk(world, dim)[rank] for part in one.chunk(parts, dim)], dim).contiguous()


def make_layer(tokens: int, columns: int, routing: str) -> tuple[list[Tensor], Tensor]:
    """(x, weights, gate_up, down, ids) of all ranks."""
    total, inner = tokens * dist.get_world_size(), 64 * dist.get_world_size()
    whole = [draw(1, total, columns), draw(2, total, K).float().abs()]
    whole += [draw(3, EXPERTS, 2 * inner, columns), draw(4, EXPERTS, columns, inner)]
    scores = torch.rand(total, EXPERTS, generator=torch.Generator().manual_seed(5))
    if routing == "skewed":
        scores *= torch.arange(1, EXPERTS + 1) ** 2
    elif routing == "few":
        scores[:, K:] = -1
    return whole, scores.topk(K).indices.cuda()


def take_parts(whole: list[Tensor]) -> list[Tensor]:
    """This rank's parts of x, weights, gate_up and down, or of their gradients."""
    x, weights, gate_up, down = whole
    return [cut(x, 0), cut(weights, 0), cut(gate_up, 1, 2), cut(down, 2)]


def compare(tokens: int, columns: int, routing: str) -> list[float]:
    """Errors beside fp64 of the output and gradients of a call after poisoned memory; NaN for other bits in others."""
    group, generator = dist.group.WORLD, torch.Generator().manual_seed(dist.get_rank())
    assert group is not None
    whole, ids = make_layer(tokens, columns, routing)
    mine, own_ids = [one.clone().requires_grad_() for one in take_parts(whole)], cut(ids, 0)
    x, weights, gate_up, down = mine
    results = []
    for turn in range(5):  # of two slots each is used twice
        if turn == 2:
            poison_buffers(group)
        torch.cuda._sleep(int(torch.randint(0, 4_000_000, (), generator=generator)))
        out = moe.moe_mlp(x, own_ids, weights, gate_up, down, group, implementation="kernel")
        torch.cuda._sleep(int(torch.randint(0, 4_000_000, (), generator=generator)))
        results.append([out, *torch.autograd.grad(out.float().square().sum(), mine)])
    expected_out, *expected = run_dense(whole, ids)
    wanted = [cut(expected_out, 0), *take_parts(expected)]
    errors = [relative_error(one, right) for one, right in zip(results[-1], wanted, strict=True)]
    same = all(torch.equal(one, other) for again in results[1:] for one, other in zip(results[0], again, strict=True))
    return [*errors, 0.0 if same else torch.nan]


@pytest.mark.parametrize(
    ("tokens", "columns", "routing"),
    [
        (257, 264, "uniform"),
        (96, 1544, "skewed"),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ((1, 264, "uniform"), (200, 264, "few"))),
    ],
)
def test_a_layer_is_that_of_every_expert_on_every_token(
    gpu_pool: GpuRanks, world: int, tokens: int, columns: int, routing: str
) -> None:
    for errors in gpu_pool.run(world, compare, tokens, columns, routing):
        assert largest(errors) < BF16
        assert errors == errors  # no NaN


def capture() -> list[bool]:
    """Whether replays of a captured layer have the bits of eager calls, on other tokens and routings each time.

    No call waits for the host.
    """
    group = dist.group.WORLD
    assert group is not None
    whole, ids = make_layer(128, 264, "uniform")
    mine, own_ids = [one.clone().requires_grad_() for one in take_parts(whole)], cut(ids, 0)
    x, weights, gate_up, down = mine

    def change(turn: int) -> None:
        generator = torch.Generator().manual_seed(10 * turn + dist.get_rank())
        own_ids.copy_(torch.rand(len(own_ids), EXPERTS, generator=generator).topk(K).indices)
        with torch.no_grad():
            x.copy_(draw(turn + dist.get_rank(), *x.shape))

    def run() -> list[Tensor]:
        out = moe.moe_mlp(x, own_ids, weights, gate_up, down, group, implementation="kernel")
        return [out, *torch.autograd.grad(out.float().square().sum(), mine)]

    for _ in range(3):  # kernels are compiled, and workspaces allocated
        run()
    torch.cuda.synchronize()
    with no_host_waits():
        run()
    torch.cuda.synchronize()
    dist.barrier(group)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run()
    same = []
    for turn in range(5):
        change(turn)
        eager = run()
        graph.replay()
        same.append(all(torch.equal(one, other) for one, other in zip(eager, replayed, strict=True)))
    torch.cuda.synchronize()
    del graph, replayed
    return same


def test_a_captured_layer_waits_for_no_host_and_replays(gpu_pool: GpuRanks, world: int) -> None:
    assert gpu_pool.run(world, capture) == [[True] * 5] * world
