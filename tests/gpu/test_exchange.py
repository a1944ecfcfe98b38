# SPDX-License-Identifier: Apache-2.0
"""The exchange of tokens by kernels on GPUs: beside the library's, poisoned memory, captured graphs, no host waits."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from stretto import ops
from stretto.memory import shared_gpus
from stretto.ops import moe
from stretto.ops.moe.grouped.matmul import compute_product
from stretto.ops.moe.places import find_places
from stretto.ops.operator import close_workspaces, list_channels
from tests.differences import largest
from tests.gpu.sharing import GpuRanks
from tests.gpu.test_moe import BF16, no_host_waits, poison, relative_error, run_dense

HIDDEN, INNER, EXPERTS, K = 264, 128, 16, 4
pytestmark = pytest.mark.ranks(2, 4, own=(2, 4, 8), among=(2, 3, 5, 8))


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).bfloat16().cuda()


def poison_buffers(group: dist.ProcessGroup) -> None:
    """Fill the data of the group's symmetric memory with NaN, which no rank may be using."""
    torch.cuda.synchronize()
    dist.barrier(group)
    for purpose, channel in list_channels(group.group_name):
        if purpose in ("barrier", "moe counts"):
            channel.tensor((channel.num_bytes - channel._signal_bytes,), torch.uint8).fill_(0xFF)
    torch.cuda.synchronize()
    dist.barrier(group)
    poison()


def make_leaves(tokens: list[int], columns: int, experts: int) -> tuple[list[Tensor], Tensor, list[list[int]]]:
    """(x, weights, gate_up, down of all ranks, ids, the parts of each that are a rank's)."""
    world, total = len(tokens), sum(tokens)
    leaves = [draw(1, total, columns), draw(2, total, K).float().abs()]
    leaves += [draw(3, experts, 2 * INNER, columns), draw(4, experts, columns, INNER)]
    generator = torch.Generator().manual_seed(5)
    ids = torch.rand(total, experts, generator=generator).topk(K).indices.cuda()
    return leaves, ids, [tokens, tokens, [experts // world] * world, [experts // world] * world]


def compare(tokens: list[int], columns: int, max_rows: int | None, reduce: str) -> list[float]:
    """Errors beside fp64 of outputs and gradients of a third call, after poisoned memory; NaN for other bits."""
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    experts = -(-EXPERTS // world) * world
    whole, ids, parts = make_leaves(tokens, columns, experts)
    mine = [one.split(sizes)[rank].clone().requires_grad_() for one, sizes in zip(whole, parts, strict=True)]
    own_ids = ids.split(tokens)[rank]
    results = []
    for turn in range(4):  # of two slots each is used twice
        if turn == 2:
            poison_buffers(group)
        x, weights, gate_up, down = mine
        sent = moe.dispatch(x, own_ids, experts, group, max_rows=max_rows, reduce=reduce, implementation="kernel")
        out = moe.combine(moe.experts_mlp(sent.rows, sent.offsets, gate_up, down), sent.handle, weights, group)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), mine)])
    moe.check_rows(group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.gpu.test_moe.EXPERTS", experts)
        expected = run_dense(whole, ids)
    wanted = [one.split(sizes)[rank] for one, sizes in zip(expected, [tokens, *parts], strict=True)]
    errors = [relative_error(one, right) for one, right in zip(results[-1], wanted, strict=True) if one.numel()]
    same = all(torch.equal(one, other) for again in results[1:] for one, other in zip(results[0], again, strict=True))
    return [*errors, 0.0 if same else torch.nan]


@pytest.mark.parametrize("columns", [264, 1537])
@pytest.mark.parametrize(("is_fixed", "reduce"), [(False, "rank"), (False, "choice"), (True, "rank"), (True, "choice")])
def test_a_layer_is_that_of_every_expert_on_every_token(
    gpu_pool: GpuRanks, world: int, columns: int, is_fixed: bool, reduce: str
) -> None:
    tokens = [160] * world if is_fixed else [0, 257, 96, 31, 160, 1, 64, 200][:world]
    for errors in gpu_pool.run(world, compare, tokens, columns, 160 * K * world if is_fixed else None, reduce):
        assert largest(errors) < BF16
        assert errors == errors  # no NaN


def compare_with_library(dtype: torch.dtype) -> bool:
    """True if kernels and the library's all-to-alls give the same bits of sent rows, sums and gradients."""
    rank, group, world = dist.get_rank(), dist.group.WORLD, dist.get_world_size()
    found = []
    for implementation in ("kernel", "library"):
        x = draw(rank, 100 + rank, HIDDEN).to(dtype).requires_grad_()
        weights = draw(100 + rank, 100 + rank, K).float().requires_grad_()
        generator = torch.Generator().manual_seed(rank)
        ids = torch.rand(100 + rank, 2 * world, generator=generator).topk(min(K, 2 * world)).indices.cuda()
        sent = moe.dispatch(x, ids, 2 * world, group, implementation=implementation)
        out = moe.combine(sent.rows * 2, sent.handle, weights[:, : ids.shape[1]], group)
        found.append([sent.rows, sent.offsets, out, *torch.autograd.grad(out.float().square().sum(), (x, weights))])
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_kernels_give_the_librarys_bits(gpu_pool: GpuRanks, world: int, dtype: torch.dtype) -> None:
    assert gpu_pool.run(world, compare_with_library, dtype) == [True] * world


def multiply_while_rows_arrive() -> list[bool]:
    """Whether products that begin on rows that have arrived have the bits of products of all of them, in many calls."""
    rank, group, world = dist.get_rank(), dist.group.WORLD, dist.get_world_size()
    tokens, same = 700 + 50 * rank, []
    generator = torch.Generator().manual_seed(rank)
    ids = torch.rand(tokens, 2 * world, generator=generator).topk(2).indices.cuda()
    x, weights, weight = draw(rank, tokens, HIDDEN), torch.ones(tokens, 2, device="cuda"), draw(9, 2, INNER, HIDDEN)
    arguments = x, ids, weights, 2 * world, group
    places = find_places(*arguments, implementation="kernel")
    sent, numbers = places.route.send(lambda: x, places.wrap_collective), places.index.places
    for turn in range(20):
        if turn == 2:
            poison_buffers(group)
        if turn % world == rank:
            torch.cuda._sleep(2_000_000)
        kept, arrivals = places.start(x * turn)
        assert arrivals is not None
        found = compute_product(arrivals.rows, weight, places.index.offsets, numbers, "kernel", arrivals)
        arrivals.wait()
        right = compute_product(sent * turn, weight, places.index.offsets, numbers, "kernel")
        same += [torch.equal(kept, sent * turn), torch.equal(found, right)]
    return same


def test_products_wait_for_the_rows_that_they_need(gpu_pool: GpuRanks, world: int) -> None:
    for same in gpu_pool.run(world, multiply_while_rows_arrive):
        assert all(same), same


def capture(reduce: str) -> list[bool]:
    """Whether replays of a captured layer have the bits of eager calls, on other tokens and routings each time.

    No call waits for the host.
    """
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    experts, tokens = 2 * world, 128
    k = min(K, experts)
    x = draw(rank, tokens, HIDDEN).requires_grad_()
    weights = torch.rand(tokens, k, device="cuda").requires_grad_()
    ids = torch.zeros(tokens, k, dtype=torch.int64, device="cuda")

    def draw_ids(turn: int) -> None:
        generator = torch.Generator().manual_seed(10 * turn + rank)
        ids.copy_(torch.rand(tokens, experts, generator=generator).topk(k).indices)
        with torch.no_grad():
            x.copy_(draw(turn + rank, tokens, HIDDEN))

    def run() -> list[Tensor]:
        options = {"max_rows": tokens * k * world, "reduce": reduce, "implementation": "kernel"}
        sent = moe.dispatch(x, ids, experts, group, **options)
        out = moe.combine(sent.rows * (rank + 1), sent.handle, weights, group)
        return [out, *torch.autograd.grad(out.float().square().sum(), (x, weights))]

    draw_ids(0)
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
        draw_ids(turn)
        eager = run()
        graph.replay()
        same.append(all(torch.equal(one, other) for one, other in zip(eager, replayed, strict=True)))
    moe.check_rows(group)
    del graph, replayed
    return same


@pytest.mark.parametrize("reduce", ["rank", "choice"])
def test_a_captured_layer_waits_for_no_host_and_replays(gpu_pool: GpuRanks, world: int, reduce: str) -> None:
    assert gpu_pool.run(world, capture, reduce) == [[True] * 5] * world


def share_experts(max_rows: int | None, reduce: str) -> list[bool]:
    """Whether outputs and gradients are right of identity experts of which two ranks have a third and two thirds."""
    rank, same = dist.get_rank(), []
    *pairs, first, second = (dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3]))
    group, gather_group = (first, second)[rank % 2], pairs[rank // 2]
    for turn in range(4):
        tokens = 100 if max_rows is not None else 60 * rank + turn
        x, weights = draw(turn, tokens, HIDDEN).requires_grad_(), torch.rand(tokens, K, device="cuda").requires_grad_()
        ids = torch.rand(tokens, EXPERTS, device="cuda").topk(K).indices
        options = {"gather_group": gather_group, "max_rows": max_rows, "reduce": reduce, "implementation": "kernel"}
        sent = moe.dispatch(x, ids, EXPERTS, group, topk_weights=weights, **options)
        out = moe.combine(sent.rows * (rank % 2 + 1), sent.handle, weights, group)
        found = [out, *torch.autograd.grad(out, (x, weights), torch.ones_like(out))]
        factor = 3 * weights.sum(1, keepdim=True)
        wanted = [x * factor, factor.expand_as(x), 3 * x.sum(1, keepdim=True).expand_as(weights)]
        same += [
            relative_error(one.detach(), right.detach().double()) < 4 * BF16
            for one, right in zip(found, wanted, strict=True)
            if one.numel()
        ]
    moe.check_rows(group)
    return same


@pytest.mark.ranks(4, own=(4,), among=(4,))
@pytest.mark.parametrize(
    ("max_rows", "reduce"),
    [
        (None, "rank"),
        (400 * K, "choice"),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ((None, "choice"), (400 * K, "rank"))),
    ],
)
def test_kernels_send_rows_to_all_ranks_that_share_an_expert(
    gpu_pool: GpuRanks, world: int, max_rows: int | None, reduce: str
) -> None:
    for same in gpu_pool.run(world, share_experts, max_rows, reduce):
        assert all(same), same


def gather_after_interrupted_exchanges() -> list[bool]:
    """Whether another operator on the workspace of exchanges that nobody has awaited, and that are late, is right."""
    rank, group, world, same = dist.get_rank(), dist.group.WORLD, dist.get_world_size(), []
    assert group is not None
    x, weight, ids = draw(rank, 128, HIDDEN), draw(9, 128, HIDDEN), torch.arange(128, device="cuda")[:, None] % world
    copies = ops.KernelConfig(blocks=ops.Blocks(64, 64, 64, 2, 4, 3, 12), transfer="copies")
    expected = torch.cat([draw(other, 128, HIDDEN) for other in range(world)]).double() @ weight.double().t()
    places = find_places(x, ids, torch.ones(128, 1, device="cuda"), world, group, implementation="kernel")
    for _ in range(4):
        for purpose, channel in list_channels(group.group_name):
            side = channel.side_stream(0) if purpose == "barrier" else None
            if side is not None:
                with side:
                    torch.cuda._sleep(20_000_000)
        places.start(x)  # as if an error came next
        found = ops.all_gather_matmul(x, weight, group, implementation=copies)
        same.append(relative_error(found, expected) < BF16)
    return same


def test_an_operator_waits_for_an_exchange_that_an_error_has_interrupted(gpu_pool: GpuRanks, world: int) -> None:
    assert gpu_pool.run(world, gather_after_interrupted_exchanges) == [[True] * 4] * world


def exceed_by_kernels() -> str:
    """The message of the error for too many rows, after rows of NaN."""
    group, world = dist.group.WORLD, dist.get_world_size()
    x, ids = draw(1, 64, HIDDEN), torch.zeros(64, 1, dtype=torch.int64, device="cuda")
    sent = moe.dispatch(x, ids, EXPERTS * world, group, max_rows=64 * world - 1, implementation="kernel")
    assert sent.rows.isnan().all() == (dist.get_rank() == 0)
    out = moe.combine(sent.rows, sent.handle, torch.ones(64, 1, device="cuda"), group)
    assert out.isnan().all()
    with pytest.raises(ValueError, match=f"needs {64 * world} rows") as caught:
        moe.check_rows(group)
    return str(caught.value)


def test_too_many_rows_are_an_error_at_the_next_look(gpu_pool: GpuRanks, world: int) -> None:
    for message in gpu_pool.run(world, exceed_by_kernels):
        assert "rank 0 of the group" in message


def choose() -> bool:
    """True if "auto" runs the kernels, and frees their memory."""
    group = dist.group.WORLD
    assert group is not None
    x, ids = draw(1, 8, HIDDEN), torch.zeros(8, 1, dtype=torch.int64, device="cuda")
    sent = moe.dispatch(x, ids, dist.get_world_size(), group)
    torch.cuda.synchronize()
    dist.barrier(group)
    name = type(sent.handle.route).__name__
    close_workspaces(group.group_name)
    return name == "KernelRoute"


@pytest.mark.own_gpus("NVLink is between GPUs")
def test_auto_takes_the_kernels_between_gpus_that_nvlink_connects(gpu_pool: GpuRanks, world: int) -> None:
    assert not shared_gpus.is_enabled()
    assert gpu_pool.run(world, choose) == [True] * world
