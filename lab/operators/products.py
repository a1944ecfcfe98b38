# SPDX-License-Identifier: Apache-2.0
"""`python -m lab products`: overlapped products with the defaults and tuned, in both forms, and whole MLPs, with peers.

A row has, timed in turn: the products alone, products and NCCL, torch's async tensor parallelism, Stretto's library
path, and Stretto by default, tuned in this run, and in the form that training calls (the all-gather that also returns
the gathered rows). `mlp` is `ops.mlp` whole, beside the same module by DTensor, compiled (TileLink's figure 8). With
`--cluster` rows are only predicted. Each row is written at once. Without GPUs rows are small, for a try of the command.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from lab.cases import Case, measure_cases, predict_cases
from lab.harness import Bench, Measured, column
from stretto import ops
from stretto.bench.harness import FAILURES, in_one_line
from stretto.bench.interleaved import TimingEffort, time_interleaved
from stretto.bench.operators.peers import Runs, peers, world_name
from stretto.bench.operators.settings import CASES, FLUX_ROWS, OPERATORS, local_shape
from stretto.bench.settings import Needs, Option, Ranks, require_known
from stretto.cluster import Cluster
from stretto.ops import KernelConfig, tuning
from stretto.ops.operands import FP8
from stretto.ops.tuning import RotatingOperands
from stretto.parallel import Grid
from stretto.planner.compute import Device
from stretto.train.optimizer import local_shard
from stretto.tuning import TuningStore

# (intermediate, hidden) of the models that TileLink names; the shapes of its table 4 are lost in the paper's text.
MLPS: Mapping[str, tuple[int, int]] = {
    **{name: CASES[name] for name in ("llama-7b", "llama-3.1-8b")},
    "gemma-2-9b": (14336, 3584),
    "gemma-2-27b": (36864, 4608),
    **{name: CASES[name] for name in ("llama-3.1-70b", "qwen2-72b")},
}
HBM = 3e12  # bytes/s, of a cluster that does not say
GATHERED = "all_gather_matmul_gathered"
KINDS = (*OPERATORS, "mlp")
MLP_ROWS = (8192,)


@dataclass(frozen=True)
class ProductsSetting:
    """Settings of `python -m lab products`. Raises ValueError for an unknown operator, case or dtype."""

    operators: Annotated[tuple[str, ...], Option("gather, scatter, reduce, mlp, with commas.", "--only")] = (
        "gather",
        "scatter",
        "mlp",
    )
    cases: Annotated[tuple[str, ...], Option("Models whose shapes are taken, of operators: `stretto bench ops`'.")] = (
        "flux",
    )
    ms: Annotated[tuple[int, ...], Option("Rows of the whole (default: 64 to 8192, of an MLP 8192).")] = ()
    dtype: Annotated[str, Option("Dtype of operands: bf16, or fp8 with a scale a row.")] = "bf16"
    tunes: Annotated[bool, Option("Tune each operator in this run, too.", "--tune/--no-tune")] = True
    ranks: Ranks = None
    cluster: Annotated[str | None, Option("Only predict, for this cluster: a file or a preset's name.")] = None

    def __post_init__(self) -> None:
        require_known("operator", self.operators, KINDS)
        require_known("case", self.cases, CASES)
        require_known("dtype", (self.dtype,), ("bf16", "fp8"))


@dataclass(frozen=True)
class Row:
    """An operator's times at one shape, on the slowest rank."""

    operator: str = column("operator")
    case: str = column("case")
    m: int = column("m")
    gemm: float | None = column("products alone (ms)", "{:.4f}")
    nccl: float | None = column("products + NCCL (ms)", "{:.4f}")
    torch_tp: float | None = column("DTensor, compiled (ms)", "{:.4f}")
    async_tp: float | None = column("async-TP (ms)", "{:.4f}")
    library: float | None = column("library path (ms)", "{:.4f}")
    stretto: float | None = column("Stretto (ms)", "{:.4f}")
    predicted: float | None = column("predicted (ms)", "{:.4f}")
    tuned: float | None = column("tuned (ms)", "{:.4f}")
    gathered: float | None = column("with the gathered rows (ms)", "{:.4f}")
    gathered_tuned: float | None = column("the same, tuned (ms)", "{:.4f}")
    hidden: float | None = column("hidden", "{:.0%}")
    hidden_tuned: float | None = column("tuned", "{:.0%}")
    hidden_gathered: float | None = column("with the rows", "{:.0%}")
    to_best: float | None = column("better of NCCL, library / Stretto", "{:.2f}")
    to_async_tp: float | None = column("async-TP / Stretto", "{:.2f}")
    difference: float | None = column("largest difference", "{:.0e}")
    best: str | None = column("tuned choice")
    failed: str | None = column("failed")


def run_products(setting: ProductsSetting, out: Path) -> Measured:
    assert setting.ranks is not None
    cases, dtype = list_cases(setting), setting.dtype
    name = f"products-{setting.ranks}" + ("" if dtype == "bf16" else f"-{dtype}")
    about = {"ranks": setting.ranks, "dtype": dtype}
    if setting.cluster is not None:
        return predict_cases(name, about, cases, setting.cluster, partial(_predict, setting.ranks, dtype))
    return measure_cases(name, about, cases, setting.ranks, partial(measure, setting), row=Row, out=out)


def list_cases(setting: ProductsSetting) -> list[Case]:
    """Each row's operator, case and rows of the whole."""
    return [
        {"operator": kind, "case": case, "m": m}
        for kind in setting.operators
        for case in (tuple(MLPS) if kind == "mlp" else setting.cases)
        for m in setting.ms or (MLP_ROWS if kind == "mlp" else FLUX_ROWS)
    ]


def _sizes(kind: str, case: str, m: int, ranks: int) -> tuple[int, int, int]:
    if kind != "mlp":
        return local_shape(kind, case, m, ranks)
    inner, hidden = MLPS[case]
    return m, inner // ranks // 16 * 16, hidden


def _predict(ranks: int, dtype: str, cluster: Cluster, operator: str, case: str, m: int) -> Case:
    """A perfect pipeline's time, of which one part in `ranks` of what is shorter is exposed."""
    device, size = Device(cluster, dtype), 1 if dtype == "fp8" else 2
    rows, n, k = _sizes(operator, case, m, ranks)
    products = [(n, k), (n, k), (k, n)] if operator == "mlp" else [(n, k)]
    rate = cluster.gpu.measured_memory_bandwidth or cluster.gpu.memory_bandwidth or HBM
    gemm = sum(max(device.matmul(rows, n, k, "NT"), n * k * size / rate) for n, k in products)
    moved = {"gather": m * k * size, "scatter": m * n * 2, "reduce": 2 * m * n * 2, "mlp": 2 * m * k * 2}[operator]
    latency = 0.0 if cluster.in_node is None else cluster.in_node.latency or 0.0
    sent = moved * (ranks - 1) / ranks / cluster.require("in_node.bandwidth") + latency
    stretto = max(gemm, sent) + min(gemm, sent) / ranks
    times = {"gemm": gemm * 1e3, "nccl": (gemm + sent) * 1e3, "predicted": stretto * 1e3}
    return times | {"hidden": (gemm + sent - stretto) / sent}


def measure(setting: ProductsSetting, grid: Grid, operator: str, case: str, m: int) -> Case:
    sizes = _sizes(operator, case, m, dist.get_world_size())
    if grid.device.type == "cpu":
        sizes = (64, 32, 32)
    return (_measure_mlp if operator == "mlp" else partial(_measure_product, operator))(*sizes, setting, grid.device)


def _measure_product(kind: str, m: int, n: int, k: int, setting: ProductsSetting, device: torch.device) -> Case:
    operator, dtype = OPERATORS[kind], FP8 if setting.dtype == "fp8" else torch.bfloat16
    operands = RotatingOperands.make(operator, m, n, k, None, dtype, device)
    runs: Runs = peers(operands, m)
    runs["library"] = partial(operands.call, "library")
    runs["stretto"] = operands.call
    best = _tune(operator, m, n, k, dtype, device) if setting.tunes else None
    if best is not None:
        runs["tuned"] = partial(operands.call, best)
    if kind == "gather" and dtype != FP8:
        runs["gathered"] = partial(_call_gathered, operands, "auto")
        if best is not None:  # where this form has no choice of its own, it takes the other's tiles, with copies
            own = _tune(GATHERED, m, n, k, dtype, device) if GATHERED in tuning.OPERATORS else best
            runs["gathered_tuned"] = partial(_call_gathered, operands, own)
    return _time(runs, m, operands.restart) | {"best": None if best is None else best.encode()}


def _tune(operator: str, m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> KernelConfig:
    """The fastest configuration on the slowest rank, in a store of this run: defaults stay what they are."""
    with tempfile.TemporaryDirectory() as folder:
        store = TuningStore(Path(folder) / "times.json")
        times = tuning.tune(operator, m, n, k, dtype=dtype, device=device, store=store)
    found = [min(times, key=times.__getitem__)]
    dist.broadcast_object_list(found, 0)
    return found[0]


def _call_gathered(operands: RotatingOperands, how: Any) -> Tensor:
    return ops.all_gather_matmul_gathered(operands.x, operands.next_weight(), implementation=how)[0]


def _measure_mlp(m: int, n: int, k: int, setting: ProductsSetting, device: torch.device) -> Case:
    """`ops.mlp` with a gate, without gradients: x [m / world, k], gate and up [n, k], down [k, n]."""
    ranks, name = dist.get_world_size(), world_name()
    shapes = ((m // ranks, k), (n, k), (n, k), (k, n))
    x, gate, up, down = (torch.randn(shape, device=device, dtype=torch.bfloat16) * shape[1] ** -0.5 for shape in shapes)
    whole, own = x.new_empty(m, k), x.new_empty(m // ranks, k)

    def multiply() -> Tensor:
        return F.linear(F.silu(F.linear(whole, gate)).mul_(F.linear(whole, up)), down)

    def with_nccl() -> Tensor:
        dist.all_gather_into_tensor(whole, x)
        dist.reduce_scatter_tensor(own, multiply())
        return own

    def with_async_tp() -> Tensor:
        fused = torch.ops.symm_mem
        _, (left, right) = fused.fused_all_gather_matmul(x, [gate.t(), up.t()], 0, name)
        return fused.fused_matmul_reduce_scatter(F.silu(left).mul_(right), down.t(), "sum", 0, name)

    runs: Runs = {"gemm": multiply, "nccl": with_nccl, "async_tp": with_async_tp}
    runs["torch_tp"] = _make_dtensor_mlp(x, gate, up, down)
    for column_name, how in (("library", "library"), ("stretto", "auto")):
        runs[column_name] = partial(ops.mlp, x, up, down, gate=gate, activation="silu", implementation=how)
    with torch.no_grad():
        return _time(runs, m)


class _Gated(nn.Module):
    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((k, n), (k, n), (n, k)))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def _make_dtensor_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Callable[[], Tensor]:
    """The same MLP by torch's tensor parallelism with rows sharded between, compiled."""
    ranks = dist.get_world_size()
    with x.device:
        module = _Gated(up.shape[0] * ranks, up.shape[1]).to(x.dtype)
    mesh = init_device_mesh(x.device.type, (ranks,))
    rows = RowwiseParallel(output_layouts=Shard(0))
    entry = PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),))
    plan = {"": entry, "gate": ColwiseParallel(), "up": ColwiseParallel(), "down": rows}
    parallelize_module(module, mesh, plan, src_data_rank=None)
    for linear, weight in ((module.gate, gate), (module.up, up), (module.down, down)):
        local_shard(linear.weight).copy_(weight)
    if x.is_cuda:
        module.compile()
    return partial(module, x)


def _time(runs: Runs, m: int, restart: Callable[[], None] = lambda: None) -> Case:
    """Milliseconds of each run that works, the shares that are hidden, ratios, and the largest difference to NCCL's."""
    failed: dict[str, str] = {}
    results: dict[str, Tensor] = {}
    for name, run in list(runs.items()):
        restart()  # with the first weight
        try:
            results[name] = run().float()
        except FAILURES as error:
            failed[name] = in_one_line(error)[:60]
            del runs[name]
    right = results["nccl"]
    compared = [result for name, result in results.items() if name != "gemm"]  # whose rows may be more
    differences = [(result - right).norm() / right.norm() for result in compared]
    del results, compared
    size = 0 if m <= 1024 else 64 << 20  # from 2048 rows on, one call a graph takes long enough
    effort = TimingEffort(rounds=2 * len(runs), replays=3)
    captured_never = ("async_tp", "torch_tp")
    found = time_interleaved(runs, size, is_graph=True, effort=effort, never_captured=captured_never, rests=False)
    times = {name: timed.seconds * 1e3 for name, timed in found.items()}
    gemm, exposed = times["gemm"], times["nccl"] - times["gemm"]
    shares = {"hidden": "stretto", "hidden_tuned": "tuned", "hidden_gathered": "gathered"}
    row: Case = dict(times)
    row |= {share: 1 - (times[name] - gemm) / exposed for share, name in shares.items() if name in times}
    row["to_best"] = min(times["nccl"], times["library"]) / times["stretto"]
    if "async_tp" in times:
        row["to_async_tp"] = times["async_tp"] / times["stretto"]
    failures = "; ".join(f"{name}: {why}" for name, why in failed.items())
    return row | {"difference": torch.stack(differences).max().item(), "failed": failures or None}


BENCH = Bench(
    "products",
    "Overlapped products by default and tuned, in both forms, and whole MLPs, with NCCL, async-TP and DTensor.",
    ProductsSetting,
    run_products,
    Row,
    title=lambda setting: f"Overlapped products, {setting.dtype}, {setting.ranks} ranks",
    needs=Needs.RANKS,
    about=lambda setting: {},
)
