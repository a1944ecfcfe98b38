# SPDX-License-Identifier: Apache-2.0
"""Overlapped operators on real GPUs: random shapes past stragglers and poison, graphs, and gradients."""

import json
import os
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from stretto import ops
from stretto.memory import PeerError, compilation, shared_gpus
from stretto.ops import choices, confirmation
from stretto.ops.operands import FP8
from stretto.ops.operator import _caches
from stretto.parallel import Grid
from tests.differences import largest

Run = Callable[..., list[Any]]
SEED = random.randrange(2**31)
# Of sums of up to 1500 terms, one after another, and of partial sums that are rounded once a rank.
ROUNDING = {torch.float32: 5e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
RAGGED = (4091, 5120, 1024)


BLOCKS = ops.Blocks(64, 128, 64, 2, 4, 3, 132)
WIDE = BLOCKS._replace(m=128, n=256, num_warps=8)  # too large for fp32's loads
SPLIT = WIDE._replace(programs=5)  # whose last wave's tiles are split
ODD = ops.Blocks(32, 96, 64, 1, 4, 3, 132)  # of three parts
PLANS: dict[str, list[str | ops.KernelConfig]] = {
    "gather": [
        "auto",
        "kernel",
        ops.KernelConfig(transfer="programs", movers=132),
        ops.KernelConfig(transfer="programs", movers=8, blocks=BLOCKS),
        ops.KernelConfig(transfer="programs", blocks=ODD),
        ops.KernelConfig(transfer="copies", piece_bytes=1 << 16),
        ops.KernelConfig(transfer="copies", blocks=BLOCKS),
    ],
    "scatter": [
        "auto",
        "kernel",
        ops.KernelConfig(exchange="packets"),
        ops.KernelConfig(exchange="packets", blocks=ODD),
        ops.KernelConfig(blocks=WIDE),
        ops.KernelConfig(blocks=SPLIT),
        ops.KernelConfig(transfer="copies", blocks=BLOCKS, piece_bytes=1 << 18),
        ops.KernelConfig(transfer="copies", is_shifted=False, piece_bytes=1 << 18),
    ],
    "reduce": [
        "auto",
        "kernel",
        *(
            ops.KernelConfig(exchange="packets", shots=shots, blocks=blocks)
            for shots in (1, 2)
            for blocks in (None, ODD)
        ),
    ],
}
MOVES: dict[str, list[ops.KernelConfig]] = {
    "gather": [
        ops.KernelConfig(transfer="programs", movers=132),
        ops.KernelConfig(transfer="copies", piece_bytes=1 << 16),
    ],
    "scatter": [ops.KernelConfig(transfer="copies", piece_bytes=1 << 18)],
    "reduce": [ops.KernelConfig(exchange="packets", shots=shots) for shots in (1, 2)],
}
"""Ways for rows and sums of fp8."""

SCALED = {
    "gather": ops.all_gather_scaled_matmul,
    "scatter": ops.scaled_matmul_reduce_scatter,
    "reduce": ops.scaled_matmul_all_reduce,
}
OPERATORS = {"gather": ops.all_gather_matmul, "scatter": ops.matmul_reduce_scatter, "reduce": ops.matmul_all_reduce}


def poison() -> None:
    """Fill the workspaces, while no rank is in a call; those of packets must be empty."""
    torch.cuda.synchronize()
    dist.barrier()
    for cache in _caches.values():
        for (purpose, size, _), found in cache.workspaces.items():
            memory = found.channel.tensor((found.slots * size,), torch.uint8)
            if purpose == "packets":
                assert not memory.any(), "packets were left"
            else:
                memory.fill_(0xFF)
    torch.cuda.synchronize()
    dist.barrier()


def gather(x: torch.Tensor) -> torch.Tensor:
    world = dist.get_world_size()
    every = x.new_empty(world * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(every, x)
    return every


def scatter(x: torch.Tensor) -> torch.Tensor:
    world = dist.get_world_size()
    own = x.new_empty(x.shape[0] // world, *x.shape[1:])
    dist.reduce_scatter_tensor(own, x)
    return own


def count_library(name: str) -> int:
    """Return how many of this rank's calls NCCL has added up, which rounds at every rank."""
    return ops.counts().get((OPERATORS[name].__name__, "library"), 0)


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return ((result.double() - expected).abs().max() / (expected.abs().max() or 1)).item()


def takes(plan: ops.KernelConfig, operand: torch.Tensor) -> bool:
    """True if a plan is for so many rows, and fits into shared memory."""
    return not (plan.exchange == "packets" and operand.shape[0] > 256) and not (
        plan.blocks in (WIDE, SPLIT) and operand.dtype == torch.float32
    )


def confirm_first_calls(folder: Path) -> tuple[dict[str, dict[str, float]], dict[str, str], int]:
    """(seconds by problem and configuration, choices, how often calls were timed again, or with a switch off)."""
    world, rank = dist.get_world_size(), dist.get_rank()
    device, group = Grid(data=world, device="cuda").device, dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRETTO_CACHE", str(folder / str(rank)))
        patch.setattr(confirmation, "_budget", confirmation._Budget())  # of which earlier tests took
        choices.restore_choices({})
        x = torch.randn(1024 // world, 2048, device=device, dtype=torch.bfloat16)
        weight = torch.randn(1024, 2048, device=device, dtype=torch.bfloat16) / 45
        expected = gather(x).double() @ weight.double().t()
        product, rows = ops.all_gather_matmul_gathered(x, weight)
        assert torch.equal(rows, gather(x))
        assert error(product, expected) < 1e-2
        ops.matmul_reduce_scatter(rows, weight)
        known = choices._groups[group.group_name]
        confirmed = {name: dict(times) for name, times in known.confirmed.items()}
        timed = []
        patch.setattr(confirmation, "time_calls", lambda runs, *others: timed.append(runs))
        ops.all_gather_matmul_gathered(x, weight)
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = ops.all_gather_matmul_gathered(x, weight)[0]
        graph.replay()
        ops.check()
        assert torch.equal(captured, product)
        patch.setenv("STRETTO_CONFIRM", "0")
        ops.matmul_reduce_scatter(rows[: rows.shape[0] // 2], weight)  # of so few rows the first
        chosen = {choices._name_choice(*asked): one.encode() for asked, (one, _) in known.choices.items()}
        choices.restore_choices({})
        return confirmed, chosen, len(timed)


@pytest.mark.own_gpus("it times calls")
@pytest.mark.ranks(2, own=(2, 4))
def test_first_calls_are_timed_and_all_ranks_make_one_choice(run_ranks: Run, world: int, tmp_path: Path) -> None:
    results = run_ranks(world, confirm_first_calls, tmp_path)
    for confirmed, chosen, timed in results:
        assert (confirmed, chosen) == results[0][:2]
        assert timed == 0
        assert len(confirmed) == 2
        for times in confirmed.values():
            assert "library" in times
            assert len(times) == 2
            assert min(times.values()) > 0


def time_first_calls_anywhere(folder: Path) -> dict[str, tuple[float, int]]:
    """(relative error beside calls that are not timed, calls timed) by where the first call is."""
    world, rank = dist.get_world_size(), dist.get_rank()
    device = Grid(data=world, device="cuda").device
    found: dict[str, tuple[float, int]] = {}
    timed: list[Any] = []
    time_calls, stream = confirmation.time_calls, torch.cuda.Stream()
    groups = [dist.new_group(range(world)) for _ in range(2)]

    def count(runs: Any, *others: Any) -> Any:
        timed.append(runs)
        return time_calls(runs, *others)

    def differentiate(call: Callable[..., torch.Tensor], rows: int) -> list[torch.Tensor]:
        torch.manual_seed(rank)
        x, weight = (torch.randn(m, 2048, device=device).bfloat16().requires_grad_() for m in (rows, 1024))
        call(x, weight / 45).float().square().sum().backward()
        assert x.grad is not None
        assert weight.grad is not None
        return [x.grad, weight.grad]

    def on_stream(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            product = ops.all_gather_matmul(x, weight)
        torch.cuda.current_stream().wait_stream(stream)
        return product

    def in_two_groups(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # the first's calls are still under way
        one, other = (ops.all_gather_matmul(x, weight, group) for group in groups)
        return (one + other) / 2

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRETTO_CACHE", str(folder / str(rank)))
        patch.setattr(confirmation, "_budget", confirmation._Budget())  # of which earlier tests took
        patch.setattr(confirmation, "time_calls", count)
        choices.restore_choices({})
        places: dict[str, Callable[..., torch.Tensor]] = {
            "forward": ops.all_gather_matmul,
            "stream": on_stream,
            "groups": in_two_groups,
        }
        for reentrant in (False, True):
            places[f"recomputation {reentrant}"] = partial(checkpoint, ops.all_gather_matmul, use_reentrant=reentrant)
        places["without memory"] = ops.all_gather_matmul
        for number, (place, call) in enumerate(places.items()):
            if place == "without memory":
                patch.setattr(confirmation, "HEADROOM", 1 << 60)
            before, rows = len(timed), 128 << number
            own = differentiate(call, rows)
            expected = differentiate(partial(ops.all_gather_matmul, implementation="library"), rows)
            worst = largest(error(*pair) for pair in zip(own, (one.double() for one in expected), strict=True))
            found[place] = worst, len(timed) - before
        choices.restore_choices({})
    return found


@pytest.mark.own_gpus("it times calls")
@pytest.mark.ranks(2, own=(2,))
def test_first_calls_are_timed_wherever_they_are(run_ranks: Run, world: int, tmp_path: Path) -> None:
    for found in run_ranks(world, time_first_calls_anywhere, tmp_path):
        for place, (worst, timed) in found.items():
            assert worst < 2e-2, place
            assert (timed > 0) == (place != "without memory"), place


def multiply_in_random_shapes(folder: Path, seed: int, calls: int) -> None:
    world = dist.get_world_size()
    Grid(data=world, device="cuda")
    rng, rank = random.Random(seed), dist.get_rank()
    torch.manual_seed(seed + rank)
    wrong = []
    for call in range(calls):
        dtype = rng.choice(list(ROUNDING))
        rows, n, k = RAGGED if call == 0 else (rng.randint(1, 700), rng.randint(1, 1500), rng.randint(1, 1500))
        if rng.random() < 0.5:
            n, k = n + -n % 8, k + -k % 8  # what TMA takes
        x, whole = torch.randn(rows, k, device="cuda"), torch.randn(rows * world, k, device="cuda")
        weight = torch.randn(n, k, device="cuda") * (1 + rank)
        bias = torch.randn(n, device="cuda") if rng.random() < 0.5 else None
        x, whole, weight = x.to(dtype), whole.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        if rng.random() < 0.5:
            weight = weight.t().contiguous().t()
        late, cycles = rng.randrange(world), rng.choice([0, 100_000, 2_000_000])
        few = whole[: rng.randint(1, min(80, whole.shape[0]))].contiguous()
        for name, operand in (("gather", x), ("scatter", whole), ("reduce", few)):
            plan = rng.choice(PLANS[name])
            if isinstance(plan, ops.KernelConfig) and not takes(plan, operand):
                plan = "kernel"
            own_bias = bias
            if bias is not None and name == "reduce":
                own_bias = bias.clone()
                dist.broadcast(own_bias, 0)
            poison()
            if late == rank:
                torch.cuda._sleep(cycles)
            by_library = count_library(name)
            more = {"reduce_dtype": rng.choice([None, torch.float32])} if name == "scatter" else {}
            out, *others = (
                OPERATORS[name](operand, weight, bias=own_bias, implementation=plan, **more) for _ in range(4)
            )
            product = (gather(x) if name == "gather" else operand).double() @ weight.double().T
            if name == "scatter":
                product = scatter(product)
            elif name == "reduce":
                dist.all_reduce(product)
                first = out.clone()
                dist.broadcast(first, 0)
                others.append(first)  # all ranks have the same bits
            expected = product if own_bias is None else product + own_bias.double()
            is_same = all(torch.equal(out, one) for one in others)
            bound = ROUNDING[dtype] * (2 if count_library(name) > by_library else 1)
            if not is_same or not error(out, expected) <= bound:
                wrong.append((call, name, str(plan), rows, n, k, str(dtype), error(out, expected), is_same))
    torch.cuda.synchronize()
    (folder / f"wrong-{rank}.json").write_text(json.dumps(wrong))


def call_often(folder: Path, seed: int, calls: int, device: str) -> None:
    """A few shapes over and over, plan after plan, past stragglers and poison, alone and in graphs: known bits.

    x is scaled by powers of two, call by call and in all-gathers rank by rank, which scales sums without rounding.
    """
    world = dist.get_world_size()
    Grid(data=world, device=device)
    rng, rank, is_gpu = random.Random(seed), dist.get_rank(), device == "cuda"
    torch.manual_seed(seed + rank)
    # Each is compiled, for longer than hundreds of calls take.
    makes = [make_case(rng, device) for _ in range(2 if not is_gpu else 3 if calls < 1000 else 5)]
    busy = torch.randn(2048, 2048, device=device) if is_gpu else None
    side, wrong = torch.cuda.Stream() if is_gpu else None, []

    def draw() -> tuple[str, torch.Tensor, Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
        name, x, expected, run = rng.choice(rng.choice(makes))
        powers = [2.0 ** rng.randint(-3, 3) for _ in range(world)]
        if name == "gather":
            scales = torch.tensor(powers, device=device).repeat_interleave(x.shape[0])[:, None]
            return name, x * powers[rank], run, expected * scales.to(expected.dtype)
        return name, x * powers[0], run, expected * powers[0]

    call = 0
    while call < calls:
        if call % 100 == 0:
            poison()
        late, cycles = rng.randrange(world), rng.choice([0, 0, 50_000, 1_000_000])
        drawn = [draw() for _ in range(10)]
        call += len(drawn)
        if is_gpu and late == rank:
            torch.cuda._sleep(cycles)
        if side is not None and busy is not None and rng.random() < 0.3:  # every rank draws, so that all draw alike
            with torch.cuda.stream(side):
                torch.mm(busy, busy)
        if is_gpu and call % 200 == 0:
            inputs = [x.clone() for _, x, _, _ in drawn]
            torch.cuda.synchronize()
            dist.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outs = [run(x) for (_, _, run, _), x in zip(drawn, inputs, strict=True)]
            for _ in range(10):
                for out in outs:
                    out.fill_(float("nan"))
                graph.replay()
                call += len(drawn)
        else:
            outs = [run(x) for _, x, run, _ in drawn]
        for (name, _, _, expected), out in zip(drawn, outs, strict=True):
            if not torch.equal(out, expected):
                wrong.append((call, name, list(out.shape), error(out, expected.double())))
    if is_gpu:
        torch.cuda.synchronize()
    dist.barrier()
    (folder / f"wrong-{rank}.json").write_text(json.dumps(wrong))


def make_case(rng: random.Random, device: str) -> list[tuple[str, torch.Tensor, torch.Tensor, Any]]:
    """Of one shape, for each operator: its name, x, what it gives (checked against fp64), and the call."""
    world = dist.get_world_size()
    most = 1500 if device == "cuda" else 60
    rows, n, k = rng.randint(1, most // 2), rng.randint(1, most), rng.randint(1, most)
    if rng.random() < 0.7:
        rows, n, k = rows + -rows % 8, n + -n % 8, k + -k % 8
    rank, dtype = dist.get_rank(), rng.choice([torch.bfloat16, torch.float32, FP8])
    if dtype == FP8:
        return make_scaled_case(rng, device, rows, n, k + -k % 16)
    x, whole = (torch.randn(rows, k, device=device).to(dtype), torch.randn(rows * world, k, device=device).to(dtype))
    weight = (torch.randn(n, k, device=device) * (1 + rank)).to(dtype)
    made = []
    for name, operand in (("gather", x), ("scatter", whole), ("reduce", whole[: rng.randint(1, 64)].contiguous())):
        plan = rng.choice(PLANS[name])
        if isinstance(plan, ops.KernelConfig) and not takes(plan, operand):
            plan = "kernel"
        plan = keep_to_kernels(plan, name, device)

        def run(x: torch.Tensor, name: str = name, plan: Any = plan) -> torch.Tensor:
            return OPERATORS[name](x, weight, implementation=plan)

        by_library = count_library(name)
        out = run(operand)
        bound = ROUNDING[dtype] * (2 if count_library(name) > by_library else 1)
        product = (gather(x) if name == "gather" else operand).double() @ weight.double().T
        if name == "scatter":
            product = scatter(product)
        elif name == "reduce":
            dist.all_reduce(product)
        far = error(out, product)
        assert far <= bound, (far, name, plan, rows, n, k, dtype)
        made.append((name, operand, out, run))
    return made


def keep_to_kernels(plan: str | ops.KernelConfig, name: str, device: str) -> str | ops.KernelConfig:
    """A plan without the library's collectives, which go by way of the host on a shared GPU: no graph holds that.

    An all-reduce by tiles, which "kernel" may be, ends with the library's all-gather.
    """
    if device == "cpu":
        return "kernel"
    if shared_gpus.is_enabled() and not isinstance(plan, ops.KernelConfig):
        return MOVES["reduce"][0] if name == "reduce" else "kernel"
    return plan


def make_scaled_case(
    rng: random.Random, device: str, rows: int, n: int, k: int
) -> list[tuple[str, torch.Tensor, torch.Tensor, Any]]:
    """As `make_case`, of fp8: what is scaled from call to call are x's scales."""
    world = dist.get_world_size()
    rank, made = dist.get_rank(), []
    x, whole, weight = (torch.randn(size, k, device=device).to(FP8) for size in (rows, rows * world, n))
    columns = torch.rand(n, device=device) * (1 + rank)
    for name, operand in (("gather", x), ("scatter", whole), ("reduce", whole[: rng.randint(1, 64)].contiguous())):
        plan = rng.choice(["auto", "kernel", *MOVES[name]])
        plan = keep_to_kernels(plan, name, device)
        factors = torch.rand(operand.shape[0], device=device) + 0.1

        def run(factors: torch.Tensor, name: str = name, plan: Any = plan, operand: torch.Tensor = operand) -> Any:
            return SCALED[name](operand, weight, factors, columns, implementation=plan)

        out = run(factors)
        left = operand.double() * factors.double()[:, None]
        product = (gather(left) if name == "gather" else left) @ (weight.double() * columns.double()[:, None]).T
        if name == "scatter":
            product = scatter(product)
        elif name == "reduce":
            dist.all_reduce(product)
        far = error(out, product)
        assert far <= 2 * ROUNDING[torch.bfloat16], (far, name, plan, rows, n, k)
        made.append((name, factors, out, run))
    return made


def fill_the_gpu(folder: Path, sizes: tuple[int, ...]) -> None:
    """Kernels that leave no multiprocessor to copies, with rows that tiles do and do not divide, and shared tiles."""
    world = dist.get_world_size()
    device = Grid(data=world, device="cuda").device
    rank, (n, k) = dist.get_rank(), (8192, 4096)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    plan, wrong = ops.KernelConfig(blocks=ops.Blocks(128, 256, 64, 8, 8, 4, processors)), []
    for rows in sizes:
        x, weight = torch.randn(rows, k, device=device).bfloat16(), torch.randn(n, k, device=device).bfloat16()
        for _ in range(3):
            out = ops.all_gather_matmul(x, weight, implementation=plan)
            same = ops.all_gather_matmul(x, weight, implementation=plan._replace(is_shifted=False))
        every = gather(x)
        summed = ops.matmul_reduce_scatter(every, weight, implementation=plan)
        alike = ops.matmul_reduce_scatter(every, weight, implementation=plan._replace(is_shifted=False))
        product = every.float() @ weight.float().T
        wrong += [[rows, "gather"]] * (not largest(error(out, product), error(same, product)) < 2**-7)
        wrong += [[rows, "scatter"]] * (
            not largest(error(summed, scatter(product)), error(alike, scatter(product))) < 2**-6
        )
    dist.barrier()
    (folder / f"wrong-{rank}.json").write_text(json.dumps(wrong))


def replay(folder: Path) -> None:
    world = dist.get_world_size()
    Grid(data=world, device="cuda")
    rank, rows, n, k = dist.get_rank(), 256, 1024, 512
    x, up, down = (torch.randn(*size, device="cuda").bfloat16() for size in ((rows, k), (n, k), (k, n)))

    few = torch.randn(4, k, device="cuda").bfloat16()

    def mlp() -> torch.Tensor:
        outs = [ops.matmul_all_reduce(few, up, implementation="kernel").flatten()]
        for gathers in PLANS["gather"][shared_gpus.is_enabled() :]:  # "auto" may be the library's
            hidden = torch.relu(ops.all_gather_matmul(x, up, implementation=gathers))
            outs.append(ops.matmul_reduce_scatter(hidden, down, implementation="kernel").flatten())
        return torch.cat(outs)

    mlp()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mlp()
    wrong = []
    for call in range(50):
        x.normal_()
        few.normal_()
        out.fill_(float("nan"))
        graph.replay()
        replayed = out.clone()
        if not torch.equal(replayed, mlp()):
            wrong.append(call)
    torch.cuda.synchronize()
    dist.barrier()
    (folder / f"wrong-{rank}.json").write_text(json.dumps(wrong))


def differentiate(folder: Path) -> None:
    world = dist.get_world_size()
    Grid(data=world, device="cuda")
    rank, rows, n, k = dist.get_rank(), 384, 1024, 512
    sizes = ((rows, k), (n, k), (k, n), (rows, k))
    x, up, down, factor = (torch.randn(*size, device="cuda").bfloat16() for size in sizes)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, up, down)]
    ops.matmul_reduce_scatter(ops.all_gather_matmul(leaves[0], leaves[1]), leaves[2]).backward(factor)
    whole, factors = gather(x).double(), gather(factor).double()
    hidden, between = whole @ up.double().T, factors @ down.double()
    expected = [scatter(between @ up.double()), between.T @ whole, factors.T @ hidden]
    errors = [error(leaf.grad, grad) for leaf, grad in zip(leaves, expected, strict=True)]
    dist.barrier()
    (folder / f"wrong-{rank}.json").write_text(json.dumps([value for value in errors if not value < 2e-2]))


def lose_a_rank(folder: Path, name: str) -> None:
    """Rank 1 makes no second call of an operator; the errors of the others."""
    world = dist.get_world_size()
    Grid(data=world, device="cuda")
    rank, wrong = dist.get_rank(), []
    x, weight = (
        torch.randn(128 * world, 512, device="cuda").bfloat16(),
        torch.randn(1024, 512, device="cuda").bfloat16(),
    )
    runs = {
        "all_gather_matmul": lambda: ops.all_gather_matmul(
            x, weight, implementation=ops.KernelConfig(transfer="copies")
        ),
        "matmul_reduce_scatter": lambda: ops.matmul_reduce_scatter(x, weight, implementation="kernel"),
        "matmul_all_reduce": lambda: ops.matmul_all_reduce(x[:4], weight, implementation="kernel"),
    }
    run = runs[name]
    compilation.ALLOWANCE = 0.0
    run()
    torch.cuda.synchronize()
    for cache in _caches.values():
        for found in cache.workspaces.values():
            found.channel.limit.seconds = 2.0
    dist.barrier()
    if rank != 1:
        run()
        torch.cuda.synchronize()
        # By whichever operator is called next: failures are the process's.
        for later in runs.values():
            with pytest.raises(PeerError) as caught:
                later()
            if not re.search(rf"{name}, call 2: waited in vain for rank 1, (tile|packets)", str(caught.value)):
                wrong.append(str(caught.value))
    dist.barrier()
    (folder / f"wrong-{rank}.json").write_text(json.dumps(wrong))


def tune(folder: Path, operators: int) -> None:
    world = dist.get_world_size()
    os.environ["STRETTO_CACHE"] = str(folder / "cache")
    Grid(data=world, device="cuda")
    wrong = []
    calls = ("matmul_all_reduce", 4), ("matmul_reduce_scatter", 64), ("all_gather_matmul", 128 * world)
    for operator, m in calls[:operators]:
        measured = ops.tune(operator, m, 1024, 512)
        if len(measured) < 4 or not all(0 < seconds < 1 for seconds in measured.values()):
            wrong.append((operator, len(measured)))
    (folder / f"wrong-{dist.get_rank()}.json").write_text(json.dumps(wrong))


def read(folder: Path) -> list[object]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("wrong-*.json"))]


@pytest.mark.ranks(3)
# A hundred in four parts: nearly every call compiles, which takes three seconds.
@pytest.mark.parametrize(
    ("calls", "part"), [(2, 0), *(pytest.param(25, part, marks=pytest.mark.exhaustive) for part in range(1, 5))]
)
def test_random_shapes_are_right_and_the_same_twice(
    run_ranks: Run, tmp_path: Path, calls: int, part: int, world: int
) -> None:
    run_ranks(world, multiply_in_random_shapes, tmp_path, SEED + part, calls, timeout=100.0 + 5 * calls)
    assert read(tmp_path) == [[]] * world, SEED + part


@pytest.mark.ranks(8)
@pytest.mark.exhaustive
@pytest.mark.parametrize("calls", [2000])
def test_thousands_of_calls_have_the_bits_of_the_first(run_ranks: Run, tmp_path: Path, calls: int, world: int) -> None:
    run_ranks(world, call_often, tmp_path, SEED, calls, "cuda", timeout=200.0)
    assert read(tmp_path) == [[]] * world, SEED


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sizes", [(1024, 1100), pytest.param((1000, 2048), marks=pytest.mark.exhaustive)], ids=str)
def test_kernels_that_fill_the_gpu_starve_no_copy(
    run_ranks: Run, tmp_path: Path, sizes: tuple[int, ...], world: int
) -> None:
    run_ranks(world, fill_the_gpu, tmp_path, sizes)
    assert read(tmp_path) == [[]] * world


@pytest.mark.ranks(4)
def test_a_captured_graph_replays_both_operators(run_ranks: Run, tmp_path: Path, world: int) -> None:
    run_ranks(world, replay, tmp_path)
    assert read(tmp_path) == [[]] * world


@pytest.mark.ranks(3)
def test_gradients_are_those_of_the_unfused_layers(run_ranks: Run, tmp_path: Path, world: int) -> None:
    run_ranks(world, differentiate, tmp_path)
    assert read(tmp_path) == [[]] * world


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    "name",
    [
        "all_gather_matmul",
        pytest.param("matmul_reduce_scatter", marks=pytest.mark.exhaustive),
        pytest.param("matmul_all_reduce", marks=pytest.mark.exhaustive),
    ],
)
def test_a_missing_rank_is_named(run_ranks: Run, tmp_path: Path, world: int, name: str) -> None:
    run_ranks(world, lose_a_rank, tmp_path, name)
    assert read(tmp_path) == [[]] * world


@pytest.mark.own_gpus("it times plans, and captures the library's, which is NCCL then")
@pytest.mark.parametrize("operators", [1, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_plans_are_measured_and_kept(run_ranks: Run, tmp_path: Path, operators: int, world: int) -> None:
    run_ranks(world, tune, tmp_path, operators)
    assert read(tmp_path) == [[]] * world
    assert "matmul_all_reduce m=4 n=1024" in (tmp_path / "cache" / "tuning.json").read_text()
