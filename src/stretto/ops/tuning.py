# SPDX-License-Identifier: Apache-2.0
"""Autotuning: `tune` measures configurations of a call and stores their times, so that "auto" takes the fastest."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from stretto.collectives.joint.schedule import is_gather
from stretto.memory import PeerError
from stretto.memory.plain_data import all_gather_data
from stretto.ops.all_gather_matmul import all_gather_matmul, all_gather_matmul_gathered
from stretto.ops.choices import autotuner, clear_choices, describe_problem, find_agreed, find_machine
from stretto.ops.config import (
    DIRECTIONS,
    LIBRARY,
    GemmProblem,
    KernelConfig,
    Machine,
    count_grouped_rows,
    count_usable,
    deepen_for_fp8,
    default_blocks,
    default_kernel,
    encode_implementation,
    find_width,
    fit_blocks,
    is_pushed,
)
from stretto.ops.gemm import Blocks
from stretto.ops.joint.registry import CANDIDATES, list_candidates, list_rings, name_between_nodes
from stretto.ops.matmul_all_reduce import matmul_all_reduce
from stretto.ops.matmul_reduce_scatter import matmul_reduce_scatter
from stretto.ops.moe.tensor_parallel import describe_product, gather_multiply, gather_routing, multiply_scatter
from stretto.ops.moe.tensor_parallel_kernels import Routed
from stretto.ops.operands import DTYPES, FP8
from stretto.ops.operator import find_name
from stretto.ops.prediction import FEW_ROWS
from stretto.ops.scaled import (
    all_gather_scaled_matmul,
    require_scaled,
    scaled_matmul_all_reduce,
    scaled_matmul_reduce_scatter,
)
from stretto.quantities import to_whole
from stretto.tuning import TuningStore, median_seconds, slowest_times, time_runs

logger = logging.getLogger("stretto.ops")

GATHERED = "all_gather_matmul_gathered"
OPERATORS: dict[str, Callable[..., Any]] = {
    "all_gather_matmul": all_gather_matmul,
    "matmul_reduce_scatter": matmul_reduce_scatter,
    "matmul_all_reduce": matmul_all_reduce,
    GATHERED: all_gather_matmul_gathered,
}
EXPERTS = ("all_gather_moe", "moe_reduce_scatter")
"""Operators of tensor-parallel experts (`ops.moe`)."""
_SCALED: dict[str, Callable[..., Tensor]] = {
    "all_gather_matmul": all_gather_scaled_matmul,
    "matmul_reduce_scatter": scaled_matmul_reduce_scatter,
    "matmul_all_reduce": scaled_matmul_all_reduce,
}
_COLD_BYTES = 256 << 20  # weights rotate through so many bytes, so that no cache holds one
_MAX_WEIGHTS = 64


def tune(
    operator: str,
    m: int,
    n: int,
    k: int,
    group: dist.ProcessGroup | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    transposed: bool = False,
    experts: int = 0,
    top_k: int = 0,
    store: TuningStore | None = None,
) -> dict[KernelConfig, float]:
    """Autotune an operator: measure configurations on the slowest rank, and store the times for later runs.

    Collective. operator: "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", or
    "all_gather_matmul_gathered", which training calls, and which has a choice of its own. m: rows of the whole; n, k:
    of a rank's weight [n, k] (transposed: the transpose of a contiguous [k, n]). dtype: of operands; with fp8 the
    operator's scaled form is measured. Tile sizes are varied first, then, with the fastest tiles, the transfer of rows,
    and finally the order of tiles. Later calls with implementation="auto" use the fastest configuration at the nearest
    m. ValueError for an unknown operator, for sizes and dtypes that it does not take, and for rows that the ranks do
    not divide.

    "all_gather_moe" and "moe_reduce_scatter" of `ops.moe`: m are all ranks' tokens, each of which takes top_k of the
    experts, chosen evenly; a rank's weight is [experts, n, k].
    """
    if operator not in (*OPERATORS, *EXPERTS):
        raise ValueError(f"the operators are {', '.join((*OPERATORS, *EXPERTS))}, not {operator!r}")
    if (experts > 0) != (operator in EXPERTS) or not min(experts, 1) <= top_k <= experts:
        raise ValueError(
            f"{' and '.join(EXPERTS)} take experts, and top_k of up to so many, 1 or more, and others neither: not "
            f"{operator} with experts={experts}, top_k={top_k}"
        )
    m, n, k = map(to_whole, (m, n, k))
    if not all(isinstance(size, int) and size > 0 for size in (m, n, k)):
        raise ValueError(f"m, n and k must be whole numbers, 1 or more, not {m!r}, {n!r} and {k!r}")
    if dtype not in (*DTYPES, FP8):
        raise ValueError(f"kernels take {', '.join(map(str, (*DTYPES, FP8)))}, not {dtype}")
    if dtype == FP8 and operator not in _SCALED:
        raise ValueError(f"{operator} has no fp8 form: {', '.join(_SCALED)} have one")
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    operands = RotatingOperands.make(operator, m, n, k, group, dtype, device, experts, top_k, transposed=transposed)
    if dtype == FP8:  # otherwise invalid arguments would be mistaken for configurations that do not run
        require_scaled(_SCALED[operator].__name__, operands.x, operands.weights[0], None, torch.bfloat16)
    problem = operands.describe(m)
    weight = None if experts else operands.weights[0]
    machine = find_machine(operands.x, weight, find_agreed(find_name(group), device).speeds)
    measured = _search(problem, machine, operands, group)
    if dist.get_rank(group) == 0:
        autotuner(device, store).keep(problem.name, measured)
    dist.barrier(group)
    clear_choices()
    return measured


class RotatingOperands:
    """Operands for timed calls of an operator: x, and weights in turn, so that none is in a cache.

    scales: factors of the rows of fp8 x and weight, which make the product's numbers about 1.
    """

    def __init__(self, operator: str, x: Tensor, weights: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
        self.operator, self.x, self.weights, self.group = operator, x, weights, group
        self._turns = self._rotate()
        self.scales: tuple[Tensor, Tensor] | None = None
        if x.dtype == FP8:
            n, k = weights[0].shape
            self.scales = torch.ones(x.shape[0], device=x.device), torch.full((n,), k**-0.5, device=x.device)

    @classmethod
    def make(
        cls,
        operator: str,
        m: int,
        n: int,
        k: int,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        device: torch.device,
        experts: int = 0,
        top_k: int = 0,
        *,
        transposed: bool = False,
    ) -> "RotatingOperands":
        """Make random operands. ValueError for rows that the ranks do not divide."""
        world = dist.get_world_size(group)
        if operator != "matmul_all_reduce" and m % world:
            raise ValueError(f"{world} ranks do not divide {m} rows: {-(-m // world) * world} rows will do")
        size = max(experts, 1) * n * k * dtype.itemsize
        count = 1 if device.type == "cpu" else max(1, min(_COLD_BYTES // size, _MAX_WEIGHTS))
        rows = m * top_k if operator == "moe_reduce_scatter" else m
        rows = m // world if operator in ("all_gather_matmul", GATHERED, "all_gather_moe") else rows
        x = torch.randn(rows, k, device=device).to(dtype)
        sizes = (*(experts,) * bool(experts), *((k, n) if transposed else (n, k)))
        factor = 1.0 if dtype == FP8 else k**-0.5
        weights = [torch.randn(sizes, device=device).mul_(factor).to(dtype) for _ in range(count)]
        weights = [weight.mT if transposed else weight for weight in weights]
        if not experts:
            return cls(operator, x, weights, group)
        return _ExpertOperands(operator, x, weights, group, m // world, top_k)

    def next_weight(self) -> Tensor:
        """The least recently used weight."""
        return next(self._turns)

    def restart(self) -> None:
        """Begin again with the first weight."""
        self._turns = self._rotate()

    def describe(self, m: int) -> GemmProblem:
        """The problem that a call computes; m: rows of the whole."""
        returns_gathered = self.operator == GATHERED
        operator = "all_gather_matmul" if returns_gathered else self.operator
        name = find_name(self.group)
        return describe_problem(operator, m, self.x, self.weights[0], name, returns_gathered=returns_gathered)

    def call(self, implementation: str | KernelConfig = "auto") -> Tensor:
        operands = self.x, self.next_weight()
        if self.scales is not None:
            return _SCALED[self.operator](*operands, *self.scales, self.group, implementation=implementation)
        product = OPERATORS[self.operator](*operands, self.group, implementation=implementation)
        return product[0] if self.operator == GATHERED else product

    def _rotate(self) -> Iterator[Tensor]:
        while True:
            yield from self.weights


class _ExpertOperands(RotatingOperands):
    """Operands of experts that tokens take evenly: t tokens of each rank."""

    def __init__(
        self, operator: str, x: Tensor, weights: Sequence[Tensor], group: dist.ProcessGroup | None, t: int, top_k: int
    ) -> None:
        super().__init__(operator, x, weights, group)
        self._name, experts = find_name(group), weights[0].shape[0]
        ids = torch.rand(t, experts, device=x.device).topk(top_k).indices
        self._routed = Routed(*gather_routing(ids, experts, self._name, "library"))
        self._topk_weights = torch.full((t, top_k), 1 / top_k, device=x.device)

    def describe(self, m: int) -> GemmProblem:
        """The problem that a call computes; m: tokens of all ranks."""
        weight = self.weights[0]
        return describe_product(
            self.operator, self.x.dtype, weight.shape, self._routed.positions, self._name,
            is_transposed=not weight.is_contiguous(),
        )  # fmt: skip

    def call(self, implementation: str | KernelConfig = "auto") -> Tensor:
        weight, how = self.next_weight(), encode_implementation(implementation)
        if self.operator == "all_gather_moe":
            return gather_multiply(self.x, weight, *self._routed, self._name, how, True)[0]
        return multiply_scatter(self.x, weight, self._topk_weights, *self._routed, self._name, how)[0]


def _search(
    problem: GemmProblem, machine: Machine, operands: RotatingOperands, group: dist.ProcessGroup | None
) -> dict[KernelConfig, float]:
    name, device = find_name(group), operands.x.device
    agreed = find_agreed(name, device)
    takes_schedule = problem.operator in CANDIDATES and problem.dtype != FP8
    if agreed.signals_by_copies and takes_schedule:
        return _measure((LIBRARY, *vary_copies(problem, machine, agreed.order)), operands, group)
    if agreed.nodes:
        puts = vary_puts(problem, machine, agreed.nodes) if takes_schedule else ()
        return _measure((LIBRARY, *puts), operands, group)
    measured = _measure((LIBRARY, *vary_blocks(problem, machine)), operands, group)
    kernels = {config: seconds for config, seconds in measured.items() if config != LIBRARY}
    if not kernels:
        return measured
    best = min(kernels, key=kernels.__getitem__)
    # The leaders are measured again in each round: clocks drift between rounds.
    measured |= _measure((LIBRARY, best, *vary_transfers(problem, machine, best)), operands, group)
    kernels = {config: seconds for config, seconds in measured.items() if config != LIBRARY}
    best = min(kernels, key=kernels.__getitem__)
    # Where all ranks begin with the same rows, they meet at one rank's links, but may share its cache.
    orders: tuple[KernelConfig, ...] = ()
    if problem.operator not in ("matmul_all_reduce", *EXPERTS) and problem.m > FEW_ROWS:
        orders = (best._replace(is_shifted=not best.is_shifted),)
    return measured | _measure((LIBRARY, best, *orders), operands, group) if orders else measured


def vary_blocks(problem: GemmProblem, machine: Machine) -> Iterator[KernelConfig]:
    """Configurations with other tiles, the default's first, which a tuner measures first."""
    default = default_kernel(problem, machine)
    yield default
    for blocks in _vary_blocks(problem, machine) if machine.processors else ():
        if blocks != default.blocks:
            yield default._replace(blocks=blocks)


def vary_transfers(problem: GemmProblem, machine: Machine, config: KernelConfig) -> Iterator[KernelConfig]:
    """Configurations with the same tiles but other transfers of rows or sums, which a tuner measures next."""
    others: list[KernelConfig] = []
    match problem.operator:
        case "all_gather_matmul" if is_pushed(problem):
            movers = (8, 16, 32, count_usable(problem, machine)) if machine.processors else (1, 2)
            others = [config._replace(transfer="programs", movers=count) for count in movers]
            others += [config._replace(transfer="copies")] * (problem.m > FEW_ROWS)
        case "all_gather_matmul":
            others = [config._replace(piece_bytes=size << 20) for size in (1, 2, 8)]
        case "matmul_reduce_scatter" | "matmul_all_reduce":
            reduces, tiles = problem.operator == "matmul_all_reduce", config._replace(exchange="tiles")
            if problem.m <= 4 * FEW_ROWS:
                packets = config._replace(exchange="packets")
                others = [packets, packets._replace(shots=2)] if reduces else [tiles, packets]
            if problem.m > FEW_ROWS:
                others += [tiles._replace(piece_bytes=size << 20) for size in (3, 6, 12)]
    yield from (other for other in others if other != config)
    if problem.operator in CANDIDATES and problem.m > FEW_ROWS and problem.dtype != FP8:
        for number, schedule in enumerate(list_candidates(problem.operator, problem.world)):
            joint = config._replace(exchange="tiles", direction="push", schedule=schedule)
            if not problem.returns_gathered:
                for count in (16, 32) if machine.processors else (1,):
                    yield joint._replace(transfer="programs", movers=count)
            if number:  # by copy engines the first one is the operator's own
                yield joint._replace(transfer="copies")


def vary_copies(problem: GemmProblem, machine: Machine, order: tuple[int, ...]) -> Iterator[KernelConfig]:
    """Configurations for GPUs that signal by copies alone: schedules by copy engines. order: of a ring of the ranks."""
    config = KernelConfig(blocks=default_blocks(problem, machine))
    for schedule in list_rings(problem.operator, order):
        for direction in DIRECTIONS if is_gather(problem.operator) else DIRECTIONS[:1]:
            yield config._replace(schedule=schedule, direction=direction)


def vary_puts(problem: GemmProblem, machine: Machine, nodes: tuple[int, ...]) -> Iterator[KernelConfig]:
    """Configurations for ranks of several nodes, which put to each other: in two levels, and by other schedules."""
    config = KernelConfig(blocks=default_blocks(problem, machine), transfer="programs")
    first = name_between_nodes(problem.operator, nodes)
    for schedule in dict.fromkeys((first, *list_candidates(problem.operator, len(nodes)))):
        yield config._replace(schedule=schedule)


def _vary_blocks(problem: GemmProblem, machine: Machine) -> Iterator[Blocks]:
    if problem.experts:
        yield Blocks(128, 128, 64, 8, 8, 4, machine.processors)  # for experts with few columns
        return
    if problem.m <= FEW_ROWS:
        rows = max(16, triton.next_power_of_2(problem.m))
        processors = count_usable(problem, machine)
        widths = dict.fromkeys((find_width(rows, problem.n, processors) or 32, 32, 64, 128))
        for columns, depth in ((columns, depth) for columns in widths for depth in (256, 128, 64)):
            blocks = fit_blocks(rows, columns, depth, processors)
            if blocks.k == depth:
                yield deepen_for_fp8(blocks, problem.dtype.itemsize)
        return
    rows = count_grouped_rows(problem)
    # Two programs with small tiles on a multiprocessor: one stores while the other multiplies.
    for m, n, depth, warps, stages, programs in (
        (128, 256, 64, 8, 4, 1),
        (128, 256, 64, 8, 3, 1),
        (256, 128, 64, 8, 4, 1),  # a tenth faster than 128 x 256 on a cool GPU, 4% slower at the power limit (one H200)
        (128, 128, 128, 8, 3, 1),
        (128, 128, 64, 4, 3, 2),
        (64, 256, 64, 4, 4, 1),
    ):
        for group in sorted({min(group, max(1, rows // m)) for group in (2, 4, 8)}, reverse=True):
            blocks = Blocks(m, n, depth, group, warps, stages, programs * machine.processors)
            yield deepen_for_fp8(blocks, problem.dtype.itemsize)


def _measure(
    configs: Iterable[KernelConfig], operands: RotatingOperands, group: dist.ProcessGroup | None
) -> dict[KernelConfig, float]:
    """Median seconds of a call on the slowest rank, for configurations that run on all ranks."""
    runs: dict[KernelConfig, Callable[[], None]] = {}
    for config in configs:
        run = _prepare(config, operands, group)
        if run is not None:
            runs[config] = run
    times: dict[KernelConfig, list[float]] = {config: [] for config in runs}
    for _ in range(2 if operands.x.is_cuda else 1):
        for config, run in runs.items():
            times[config] += _time(run, operands.x.device, group)
    seconds = slowest_times([median_seconds(row) for row in times.values()], operands.x.device, group)
    return dict(zip(runs, seconds, strict=True))


_CALLS = 8  # timed together, in a CUDA graph
_CALLS_ON_CPU = 1


def _prepare(
    config: KernelConfig, operands: RotatingOperands, group: dist.ProcessGroup | None
) -> Callable[[], None] | None:
    """A function that runs `_CALLS` calls; None where some rank cannot (they take too much shared memory, say)."""
    problem = ""
    try:
        operands.call(config)
    except PeerError:
        raise
    except Exception as error:  # noqa: BLE001  (Triton's and the driver's are of many kinds)
        problem = f"{type(error).__name__}: {error}"
        logger.debug("%s does not run: %s", config.encode(), problem)
    if any(all_gather_data(problem, group, str)):
        return None

    def run() -> None:
        for _ in range(_CALLS if operands.x.is_cuda else _CALLS_ON_CPU):
            operands.call(config)

    if not operands.x.is_cuda:
        return run
    operands.call(config)
    torch.cuda.synchronize()
    dist.barrier(group)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    return graph.replay


def _time(run: Callable[[], None], device: torch.device, group: dist.ProcessGroup | None) -> list[float]:
    """The seconds of a call in each of several runs."""
    if device.type != "cuda":
        return time_runs(run, device, repeats=1, calls=_CALLS_ON_CPU)
    return time_runs(run, device, repeats=4, calls=_CALLS, group=group or dist.group.WORLD)
