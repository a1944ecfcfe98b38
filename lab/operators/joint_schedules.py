# SPDX-License-Identifier: Apache-2.0
"""`python -m lab joint-schedules`: operators by joint schedules beside today's default, measured and simulated.

A row is a shape: the product alone, by the library and by the kernel that operators have (a gather of one rank), the
operator by default, and by each algorithm that a tuner tries, timed in turn; and each algorithm simulated, on the links
of a cluster file and with the speed that the kernel alone had in this run. `--variants` adds TileLink's ablations
(section 5) and Flux's figure 8: the direct algorithm by other resources (copy engines that pull, 16 or 20 programs) and
in other pieces, or with tiles in the order of rows on all ranks in place of the order in which chunks arrive or are
needed, which on a direct algorithm is Flux's shift; a ring by 20 programs (TileLink, figure 4); and the operator's own
exchange by programs (of an all-reduce the direct algorithm's). The last
lines say the simulation's median error, how often what it picks is the fastest or within 2% of it (of 2 ranks all
algorithms move the same rows), and at how many shapes the fastest is within 2% of the default. 3 operators at 4 sizes
take 90 s on 4 GPUs.
"""

import statistics
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lab.cases import Case, measure_cases, predict_cases
from lab.harness import Bench, Measured
from stretto.bench.harness import FAILURES, Column, in_one_line
from stretto.bench.interleaved import TimingEffort, time_interleaved
from stretto.bench.operators.peers import Runs
from stretto.bench.operators.settings import OPERATORS, local_shape
from stretto.bench.settings import Needs, Option, Ranks, require_known
from stretto.cluster import Cluster
from stretto.collectives.joint.schedule import is_gather
from stretto.memory.gpus import count_processors
from stretto.ops import all_gather_matmul
from stretto.ops.config import GemmProblem, KernelConfig, Machine, default_blocks
from stretto.ops.joint.launch import count_piece_rows, find_joint
from stretto.ops.joint.registry import CANDIDATES, name_schedule
from stretto.ops.tuning import RotatingOperands
from stretto.parallel import Grid
from stretto.simulator.network import of_cluster
from stretto.simulator.schedules.joint import LATENCY, ProductCosts, simulate_joint

KINDS = ("gather", "scatter", "reduce")
CASE = "llama-3.1-8b"  # of `stretto bench ops`: the model whose shapes are taken
SHORT = ("direct", "ring", "recursive")
"""The order of `CANDIDATES`."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("direct", {"is_shifted": False}),
    "pieces": ("direct", {"piece_bytes": 2 << 20}),
    "whole": ("direct", {"piece_bytes": 1 << 30}),
    "pulled": ("direct", {"transfer": "copies", "direction": "pull"}),
    "movers": ("direct", {"transfer": "programs"}),
    "programs": ("direct", {"transfer": "programs", "movers": 20}),
    "ring_programs": ("ring", {"transfer": "programs", "movers": 20}),
}
"""Other configurations by `--variants`, of an algorithm."""
CLOSE = 1.02
_TILE_ROWS = 128  # of the simulated product


@dataclass(frozen=True)
class JointSchedulesSetting:
    """Settings of `python -m lab joint-schedules`. Raises ValueError for an unknown operator."""

    operators: Annotated[tuple[str, ...], Option("gather, scatter, reduce, with commas.", "--only")] = KINDS
    ms: Annotated[tuple[int, ...], Option("Rows of the whole.")] = (2048, 4096, 8192, 16384)
    ranks: Ranks = None
    variants: Annotated[bool, Option("Also other orders of tiles and resources.", "--variants/--no-variants")] = False
    predicts: Annotated[bool, Option("Only simulate, with the cluster file's speeds.", "--predict/--no-predict")] = (
        False
    )
    cluster: Annotated[str, Option("Links of the simulation: a cluster file, or a preset's name.")] = "dgx-h200"

    def __post_init__(self) -> None:
        require_known("operator", self.operators, KINDS)


NAMES = {
    **{short: short for short in SHORT},
    "plain": "direct, tiles by rows",
    "pieces": "direct, pieces of 2 MB",
    "whole": "direct, whole chunks",
    "pulled": "direct, pulled",
    "movers": "direct, 16 programs",
    "programs": "direct, 20 programs",
    "ring_programs": "ring, 20 programs",
}
ROW = (
    Column("operator", "operator"),
    Column("m", "m"),
    Column("gemm", "product alone (ms)", "{:.4f}"),
    Column("kernel", "by our kernel (ms)", "{:.4f}"),
    Column("default", "by default (ms)", "{:.4f}"),
    *(Column(key, f"{name} (ms)", "{:.4f}") for key, name in NAMES.items()),
    *(Column(f"{key}_simulated", f"simulated: {name}", "{:.4f}") for key, name in NAMES.items()),
    Column("to_default", "fastest schedule / default", "{:.3f}"),
    Column("is_picked", "picked is fastest, or within 2%"),
    Column("failed", "failed"),
)
"""An operator's times at one shape, on the slowest rank."""


def run_joint_schedules(setting: JointSchedulesSetting, out: Path) -> Measured:
    assert setting.ranks is not None
    name = f"joint-schedules-{setting.ranks}" + "-variants" * setting.variants
    cases = [{"operator": kind, "m": m} for kind in setting.operators for m in setting.ms]
    about = {"ranks": setting.ranks, "case": CASE, "cluster": setting.cluster}
    if setting.predicts:
        return predict_cases(name, about, cases, setting.cluster, partial(_predict, setting))
    found = measure_cases(name, about, cases, setting.ranks, partial(measure, setting), row=ROW, out=out)
    return Measured(found.rows, found.about, summarize(found.rows), name=name)  # type: ignore[arg-type]


def measure(setting: JointSchedulesSetting, grid: Grid, operator: str, m: int) -> Case:
    name, world, device = OPERATORS[operator], dist.get_world_size(), grid.device
    m, n, k = local_shape(operator, CASE, m, world) if device.type == "cuda" else (4 * world, 16, 16)
    operands = RotatingOperands.make(name, m, n, k, None, torch.bfloat16, device)
    whole = torch.randn(m, k, device=device).to(torch.bfloat16)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    processors = count_processors(device.index) if device.type == "cuda" else 0
    problem = GemmProblem(name, m, n, k, torch.bfloat16, False, world)
    plan = KernelConfig(blocks=default_blocks(problem, Machine(processors, True, True)))

    def multiply() -> Tensor:
        return all_gather_matmul(whole, operands.next_weight(), alone, implementation=plan)

    runs: Runs = {"gemm": lambda: torch.mm(whole, operands.next_weight().t()), "default": operands.call}
    configs: dict[str, KernelConfig] = {}
    failed = []
    for key, config in list_configs(setting, name, world).items():
        try:
            operands.call(config)
            configs[key], runs[key] = config, partial(operands.call, config)
        except FAILURES as error:
            failed.append(f"{key}: {in_one_line(error)[:80]}")
    try:
        multiply()
        runs["kernel"] = multiply
    except FAILURES as error:
        failed.append(f"kernel: {in_one_line(error)[:80]}")
    timed = time_interleaved(runs, 64 << 20, is_graph=True, effort=TimingEffort(rounds=5, replays=2), rests=False)
    row: Case = {one: found.seconds * 1e3 for one, found in timed.items()}
    cluster, speed = (
        Cluster.find(setting.cluster),
        2.0 * m * n * k / timed["kernel" if "kernel" in timed else "gemm"].seconds,
    )
    memory = cluster.gpu.measured_memory_bandwidth or cluster.gpu.memory_bandwidth
    assert memory is not None
    costs = ProductCosts(speed, memory, n, k, latency=LATENCY)
    joints = {key: config for key, config in configs.items() if config.schedule}
    row |= {
        f"{key}_simulated": _simulate(name, one, world, m, cluster, costs, processors) for key, one in joints.items()
    }
    if measured := {key: row[f"{key}_simulated"] for key in joints}:
        fastest, picked = min(row[key] for key in measured), min(measured, key=measured.__getitem__)
        row["to_default"] = fastest / row["default"]
        row["is_picked"] = row[picked] <= CLOSE * fastest
    return row | {"failed": "; ".join(failed) or None}


def list_configs(setting: JointSchedulesSetting, operator: str, ranks: int) -> dict[str, KernelConfig]:
    """The configurations of a row by their columns, each once."""
    configs: dict[str, KernelConfig] = {}
    algorithms = dict(zip(SHORT, CANDIDATES[operator], strict=True))
    ways: dict[str, tuple[str, dict[str, Any]]] = {short: (short, {}) for short in SHORT}
    for key, (short, changes) in (ways | (VARIANTS if setting.variants else {})).items():
        name = name_schedule(operator, algorithms[short], "kernel", ranks)
        config = KernelConfig(schedule=name)._replace(**changes)
        if config not in configs.values() and (config.direction == "push" or is_gather(operator)):
            configs[key] = config
    return configs


def _simulate(
    operator: str, config: KernelConfig, ranks: int, m: int, cluster: Cluster, costs: ProductCosts, processors: int
) -> float:
    """Milliseconds of a call; m: rows of the whole. processors: of a GPU; programs that move rows take some of them."""
    gathers = is_gather(operator)
    width, rows = (costs.depth, m // ranks) if gathers else (costs.columns, m)
    by_copies = config.transfer == "copies"
    joint = find_joint(
        operator, config.schedule, ranks, rows, _TILE_ROWS, pulls=config.direction == "pull",
        is_shifted=config.is_shifted, piece_rows=count_piece_rows(config, width * costs.itemsize) * by_copies,
        reads_own=gathers and by_copies and config.direction == "push" and config.is_shifted,
    )  # fmt: skip
    movers = config.movers / processors if processors and config.transfer == "programs" else 0.0
    return simulate_joint(joint, of_cluster(cluster, ranks), replace(costs, movers=movers)).seconds * 1e3


def _predict(setting: JointSchedulesSetting, cluster: Cluster, operator: str, m: int) -> Case:
    """The simulated columns, with the speeds that the cluster file has, of GPUs of 132 multiprocessors."""
    assert setting.ranks is not None
    name, (m, n, k) = OPERATORS[operator], local_shape(operator, CASE, m, setting.ranks)
    costs = ProductCosts.of_gpu(cluster.gpu, n, k, LATENCY)
    joints = {key: one for key, one in list_configs(setting, name, setting.ranks).items() if one.schedule}
    simulated = {key: _simulate(name, one, setting.ranks, m, cluster, costs, 132) for key, one in joints.items()}
    row = {"gemm": 2e3 * m * n * k / costs.flops, "predicted": simulated["direct"]}
    return row | {f"{key}_simulated": time for key, time in simulated.items()}


def summarize(rows: "list[Case]") -> tuple[str, ...]:
    """The median error of the simulation, how often it picks the fastest, and how often the default is matched."""
    found = [(row.get(key), row.get(f"{key}_simulated")) for row in rows for key in (*SHORT, *VARIANTS)]
    pairs = [(one, other) for one, other in found if one is not None and other is not None]
    known = [row for row in rows if row.get("to_default") is not None]
    if not pairs:
        return ()
    error = statistics.median(abs(simulated / measured - 1) for measured, simulated in pairs)
    picked, matched = sum(row["is_picked"] for row in known), sum(row["to_default"] <= CLOSE for row in known)
    return (
        f"{len(pairs)} joint schedules, simulated: median error {error:.0%}; what is picked is the fastest, or "
        f"within 2% of it, at {picked} of {len(known)} shapes",
        f"the fastest joint schedule is within 2% of the default, or faster, at {matched} of {len(known)} shapes",
    )


BENCH = Bench(
    "joint-schedules",
    "Operators by joint schedules beside today's default, measured and simulated.",
    JointSchedulesSetting,
    run_joint_schedules,
    ROW,
    title=lambda setting: f"Joint schedules, {CASE}, {setting.ranks} ranks",
    needs=Needs.RANKS,
    about=lambda setting: {},
)
