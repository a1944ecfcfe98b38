# SPDX-License-Identifier: Apache-2.0
"""`stretto doctor --kernels`: operators and collectives called at random, with results known to the bit.

Operands are small whole numbers, so that every sum is exact in every dtype and order.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from stretto import ops
from stretto.bench.harness import run_ranks, shared_where_few
from stretto.cluster.detection import count_gpus
from stretto.collectives.executor.cuda.communicator import CudaCommunicator
from stretto.collectives.executor.host import run_on_host
from stretto.collectives.selection import CHOICES, AlgorithmChoice
from stretto.launch import changed_environment
from stretto.memory import exchange
from stretto.ops.operands import FP8
from stretto.parallel import Grid

_SIZES = ((64, 192, 128), (2, 512, 256), (50, 131, 77))  # rows, n and k of a rank; TMA does not take the last ones
_MOVES = (
    ops.KernelConfig(transfer="copies"),
    ops.KernelConfig(transfer="programs"),
)
_PACKETS = (ops.KernelConfig(exchange="packets"), ops.KernelConfig(exchange="packets", shots=2))
_CONFIGS = {
    "all_gather_matmul": ("kernel", *_MOVES),
    "matmul_reduce_scatter": ("kernel", _MOVES[0], _PACKETS[0]),
    "matmul_all_reduce": ("kernel", *_PACKETS),
}
_SCALED = {
    "all_gather_matmul": "all_gather_scaled_matmul",
    "matmul_reduce_scatter": "scaled_matmul_reduce_scatter",
    "matmul_all_reduce": "scaled_matmul_all_reduce",
}
_BLOCKS = (7, 1024, 300_000)  # elements of one rank's part
_CALLS = 20  # of one kind, back to back
_LIMIT = 300.0  # seconds until all ranks have compiled a kernel

Draw = Callable[..., list[Tensor]]
"""New whole numbers of a shape, of each rank."""
CheckedCall = Callable[[Draw], tuple[Tensor, Tensor]]
"""Makes a call: its result, and the right one."""


@dataclass(frozen=True)
class KernelReport:
    """The findings. device: the GPU's name, or cpu. results: calls of all ranks. wrong: those with a wrong bit."""

    seed: int
    ranks: int
    device: str
    results: int
    wrong: Mapping[str, int]


def check_kernels(ranks: int, seconds: float) -> KernelReport:
    """Call kernels on ranks of this machine, which share its GPUs if there are fewer; interpreted if there are none.

    No call begins after `seconds`. Raises RanksFailed if a call raised on a rank.
    """
    seed = random.SystemRandom().randrange(2**31)
    interpreted = {} if count_gpus() else {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    with changed_environment(interpreted), shared_where_few(ranks):
        report: KernelReport = run_ranks(ranks, check_rank, ranks, seconds, seed, trains=False)
    return report


def check_rank(ranks: int, seconds: float, seed: int) -> KernelReport:
    """The job of each rank: all make the same calls in the same order."""
    device = Grid(data=ranks).device
    calls = list_calls(device)
    is_cuda, names, shared = device.type == "cuda", list(calls), random.Random(seed)
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> list[Tensor]:
        return list(torch.randint(-1, 2, (ranks, *shape), generator=generator, device=device).float())

    results, wrong = 0, Counter[str]()
    end = time.monotonic() + seconds
    is_over = False
    while not is_over:
        name = shared.choice(names)
        differing = torch.zeros((), dtype=torch.int64, device=device)
        for _ in range(_CALLS if is_cuda else 1):
            found, expected = calls[name](draw)
            differing += (found != expected).any()
            results += ranks
        wrong[name] += sum(exchange(int(differing), None, _LIMIT, int))
        is_over = any(exchange(time.monotonic() > end, None, _LIMIT, bool))
    ops.check()
    about = torch.cuda.get_device_name(device) if is_cuda else "cpu"
    return KernelReport(seed, ranks, about, results, +wrong)


def list_calls(device: torch.device) -> dict[str, CheckedCall]:
    return dict([*_list_operators(device), *_list_collectives(device)])


def _list_operators(device: torch.device) -> Iterator[tuple[str, CheckedCall]]:
    """Each operator's kernels, for many and few rows, in fp8 too."""
    has_fp8 = device.type == "cpu" or torch.cuda.get_device_capability(device) >= (9, 0)
    for operator, configs in _CONFIGS.items():
        for config in configs:
            how = config if isinstance(config, str) else config.encode()
            # A few rows travel as packets; defaults take any number.
            for sizes in _SIZES if config == "kernel" else _SIZES[1:2] if config in _PACKETS else _SIZES[::2]:
                for dtype in (torch.bfloat16, torch.float32):
                    name = f"{operator} of {sizes} {dtype} by {how}"
                    yield name, partial(_call_operator, operator, config, sizes, dtype)
        for sizes in _SIZES[:2] if has_fp8 else ():
            yield f"{_SCALED[operator]} of {sizes}", partial(_call_operator, operator, "kernel", sizes, FP8)


def _call_operator(
    operator: str, config: str | ops.KernelConfig, sizes: tuple[int, int, int], dtype: torch.dtype, draw: Draw
) -> tuple[Tensor, Tensor]:
    (rows, n, k), world, rank = sizes, dist.get_world_size(), dist.get_rank()
    is_scatter = operator == "matmul_reduce_scatter"
    xs, weights = draw(rows * world if is_scatter else rows, k), draw(n, k)
    if operator == "all_gather_matmul":
        expected = torch.cat(xs) @ weights[rank].t()
    else:
        expected = torch.stack([x @ weight.t() for x, weight in zip(xs, weights, strict=True)]).sum(0)
    if is_scatter:
        expected = expected[rank * rows : (rank + 1) * rows]
    operands = [xs[rank].to(dtype), weights[rank].to(dtype)]
    if dtype == FP8:
        operator = _SCALED[operator]
        operands += [torch.ones(len(operand), device=operand.device) for operand in operands]
    found = getattr(ops, operator)(*operands, implementation=config)
    return found, expected.to(found.dtype)


def _list_collectives(device: torch.device) -> Iterator[tuple[str, CheckedCall]]:
    """The schedules among which calls choose; CPUs run them by the host executor."""
    communicator = CudaCommunicator() if device.type == "cuda" else None
    load = None if communicator is None else cache(communicator.kernel)
    for collective, choices in CHOICES.items():
        for choice in choices:
            if choice.algorithm is None or (load is None and (choice.protocol, choice.unroll) != ("LL", 1)):
                continue
            try:
                schedule = choice.compile(dist.get_world_size(), in_place=False)
            except ValueError:  # it is for other numbers of ranks
                continue
            run: Callable[[Tensor, Tensor], object]
            if load is None:
                run = partial(run_on_host, schedule, reduction="sum")
            else:
                run = partial(_run_kernel, load, choice)
            for elements in _BLOCKS if load else _BLOCKS[:2]:
                name = f"{collective} of {elements} by {choice.name}"
                yield name, partial(_call_collective, run, collective, elements)


def _run_kernel(load: Callable[..., Callable[..., None]], choice: AlgorithmChoice, x: Tensor, out: Tensor) -> None:
    """Run a choice's kernel, which is loaded at the first call."""
    load(choice, "float32", in_place=False)(x, out)


def _call_collective(
    run: Callable[[Tensor, Tensor], object], collective: str, elements: int, draw: Draw
) -> tuple[Tensor, Tensor]:
    world, rank = dist.get_world_size(), dist.get_rank()
    xs = draw(elements if collective == "allgather" else elements * world)
    own = slice(rank * elements, (rank + 1) * elements)
    match collective:
        case "allreduce":
            expected = torch.stack(xs).sum(0)
        case "allgather":
            expected = torch.cat(xs)
        case "reducescatter":
            expected = torch.stack(xs).sum(0)[own]
        case _:
            expected = torch.cat([x[own] for x in xs])
    found = torch.full_like(expected, float("nan"))
    run(xs[rank].clone(), found)
    return found, expected
