# SPDX-License-Identifier: Apache-2.0
"""`python -m lab joint-schedules`: operators by joint schedules beside today's default, measured and simulated.

A row is a shape: the product alone, the operator by default, and by each algorithm that a tuner tries, timed in turn;
and each algorithm simulated, on the links of a cluster file and with the speed that the product alone had in this run.
The last lines say the simulation's median error, how often it picks the fastest schedule, and at how many shapes the
fastest is within 2% of the default. 3 operators at 4 sizes take 90 s on 4 GPUs.
"""

import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist

from lab.cases import Case, measure_cases
from lab.harness import Bench, Measured, column
from stretto.bench.harness import FAILURES, in_one_line
from stretto.bench.interleaved import TimingEffort, time_interleaved
from stretto.bench.operators.peers import Runs, world_name
from stretto.bench.operators.settings import CASES, OPERATORS, local_shape
from stretto.bench.settings import Needs, Option, Ranks, require_known
from stretto.cluster import Cluster
from stretto.memory.gpus import count_processors
from stretto.ops.config import decode
from stretto.ops.joint.kernel import find_joint
from stretto.ops.joint.registry import CANDIDATES, encode_schedule
from stretto.ops.tuning import RotatingOperands
from stretto.parallel import Grid
from stretto.simulator.network import of_cluster
from stretto.simulator.schedules.joint import ProductCosts, simulate_joint

KINDS = ("gather", "scatter", "reduce")
SHORT = ("direct", "ring", "recursive")
"""The order of `CANDIDATES`."""
CLOSE = 1.02
_TILE_ROWS = 128  # of the simulated product


@dataclass(frozen=True)
class JointSchedulesSetting:
    """Settings of `python -m lab joint-schedules`. Raises ValueError for an unknown operator or case."""

    operators: Annotated[tuple[str, ...], Option("gather, scatter, reduce, with commas.", "--only")] = KINDS
    case: Annotated[str, Option("The model whose shapes are taken: `stretto bench ops`'.")] = "llama-3.1-8b"
    ms: Annotated[tuple[int, ...], Option("Rows of the whole.")] = (2048, 4096, 8192, 16384)
    ranks: Ranks = None
    cluster: Annotated[str, Option("Links of the simulation: a cluster file, or a preset's name.")] = "dgx-h200"

    def __post_init__(self) -> None:
        require_known("operator", self.operators, KINDS)
        require_known("case", (self.case,), CASES)


@dataclass(frozen=True)
class Row:
    """An operator's times at one shape, on the slowest rank."""

    operator: str = column("operator")
    m: int = column("m")
    gemm: float | None = column("product alone (ms)", "{:.4f}")
    default: float | None = column("by default (ms)", "{:.4f}")
    direct: float | None = column("direct (ms)", "{:.4f}")
    ring: float | None = column("ring (ms)", "{:.4f}")
    recursive: float | None = column("recursive (ms)", "{:.4f}")
    direct_simulated: float | None = column("simulated: direct", "{:.4f}")
    ring_simulated: float | None = column("ring", "{:.4f}")
    recursive_simulated: float | None = column("recursive", "{:.4f}")
    to_default: float | None = column("fastest schedule / default", "{:.3f}")
    is_picked: bool | None = column("fastest is picked")
    failed: str | None = column("failed")


def run_joint_schedules(setting: JointSchedulesSetting, out: Path) -> Measured:
    assert setting.ranks is not None
    name = f"joint-schedules-{setting.ranks}"
    cases = [{"operator": kind, "m": m} for kind in setting.operators for m in setting.ms]
    about = {"ranks": setting.ranks, "case": setting.case, "cluster": setting.cluster}
    found = measure_cases(name, about, cases, setting.ranks, partial(measure, setting), row=Row, out=out)
    return Measured(found.rows, found.about, summarize(found.rows), name=name)  # type: ignore[arg-type]


def measure(setting: JointSchedulesSetting, grid: Grid, operator: str, m: int) -> Case:
    name, world, device = OPERATORS[operator], dist.get_world_size(), grid.device
    m, n, k = local_shape(operator, setting.case, m, world) if device.type == "cuda" else (4 * world, 16, 16)
    operands = RotatingOperands.make(name, m, n, k, None, torch.bfloat16, device)
    whole = torch.randn(m, k, device=device).to(torch.bfloat16)
    runs: Runs = {"gemm": lambda: torch.mm(whole, operands.next_weight().t()), "default": operands.call}
    configs, failed = {}, []
    for short, algorithm in zip(SHORT, CANDIDATES[name], strict=True):
        try:
            config = decode(encode_schedule(name, algorithm, "kernel", world_name()))
            operands.call(config)
            configs[short], runs[short] = config, partial(operands.call, config)
        except FAILURES as error:
            failed.append(f"{short}: {in_one_line(error)[:80]}")
    timed = time_interleaved(runs, 64 << 20, is_graph=True, effort=TimingEffort(rounds=5, replays=2), rests=False)
    row: Case = {one: found.seconds * 1e3 for one, found in timed.items()}
    cluster, speed = Cluster.find(setting.cluster), 2.0 * m * n * k / timed["gemm"].seconds
    memory = cluster.gpu.measured_memory_bandwidth or cluster.gpu.memory_bandwidth
    assert memory is not None
    for short, config in configs.items():
        by_programs = device.type == "cuda" and config.transfer == "programs"
        movers = config.movers / count_processors(device.index) if by_programs else 0.0
        joint = find_joint(name, config.schedule, world, operands.x.shape[0], _TILE_ROWS)
        time = simulate_joint(joint, of_cluster(cluster, world), ProductCosts(speed, memory, n, k, movers=movers))
        row[f"{short}_simulated"] = time.seconds * 1e3
    measured = [short for short in SHORT if short in row]
    if measured:
        fastest = min(measured, key=row.__getitem__)
        row["to_default"] = row[fastest] / row["default"]
        row["is_picked"] = fastest == min(measured, key=lambda short: row[f"{short}_simulated"])
    return row | {"failed": "; ".join(failed) or None}


def summarize(rows: "list[Case]") -> tuple[str, ...]:
    """The median error of the simulation, how often it picks the fastest, and how often the default is matched."""
    pairs = [(row[short], row[f"{short}_simulated"]) for row in rows for short in SHORT if row.get(short) is not None]
    known = [row for row in rows if row.get("to_default") is not None]
    if not pairs:
        return ()
    error = statistics.median(abs(simulated / measured - 1) for measured, simulated in pairs)
    picked, matched = sum(row["is_picked"] for row in known), sum(row["to_default"] <= CLOSE for row in known)
    return (
        f"{len(pairs)} joint schedules, simulated: median error {error:.0%}; the fastest is picked at {picked} of "
        f"{len(known)} shapes",
        f"the fastest joint schedule is within 2% of the default, or faster, at {matched} of {len(known)} shapes",
    )


BENCH = Bench(
    "joint-schedules",
    "Operators by joint schedules beside today's default, measured and simulated.",
    JointSchedulesSetting,
    run_joint_schedules,
    Row,
    title=lambda setting: f"Joint schedules, {setting.case}, {setting.ranks} ranks",
    needs=Needs.RANKS,
    about=lambda setting: {},
)
