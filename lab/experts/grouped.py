# SPDX-License-Identifier: Apache-2.0
"""`python -m lab grouped`: products of experts on one GPU, beside torch's grouped GEMM and a dense one.

Each row is a part of a gated MLP's training step: a product alone, both gradients by rows or by weights, the forward
pass (rows gathered, two products with the activation between, the weighted sum of a token's rows), or a whole step.
"gathered" reads the rows by index from the tokens, all else has them contiguous; "waiting" waits for them as well, in
the order in which they would arrive, of signals that are all set beforehand. The dense GEMM has as many FLOPs, with
one weight for all rows; of whole passes it has the products alone. Activations are the bytes that autograd saves,
weights aside, beside SonicMoE's formula, 2 d T + 4 T K n bytes in bf16: inputs and the gate and up once (Guo et al.,
arXiv 2512.14080). With `--cluster` rows are only predicted.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lab.cases import Case, largest_difference, measure_cases, predict_cases, run_pass
from lab.experts import MODELS, ROUTINGS
from lab.experts.peers import grouped_mm, torch_experts
from lab.experts.routing import draw_routing, load_of
from lab.harness import Bench, Measured, column
from stretto import tiles
from stretto.bench.interleaved import TimingEffort, time_interleaved
from stretto.bench.settings import Needs, Option, require_known
from stretto.cluster import Cluster
from stretto.ops import moe
from stretto.ops.moe.grouped.matmul import compute_product
from stretto.ops.moe.grouped.tile_order import Arrivals
from stretto.ops.moe.permutation import sort_by_expert
from stretto.ops.operator import CHANNELS
from stretto.parallel import Grid
from stretto.planner.compute import Device

PARTS = ("gate and up", "down", "gradients by rows", "gradients by weights", "forward", "step")
_TINY = (32, 48, 4, 2)
Results = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class GroupedSetting:
    """Settings of `python -m lab grouped`. Raises ValueError for an unknown model, part or routing."""

    models: Annotated[tuple[str, ...], Option("Whose shapes: mixtral-8x7b, qwen1.5-moe, deepseek-moe and others.")] = (
        tuple(MODELS)
    )
    tokens: Annotated[tuple[int, ...], Option("Tokens of a call, with commas.")] = (8192, 1024)
    routing: Annotated[tuple[str, ...], Option(f"{', '.join(ROUTINGS)}, with commas.")] = ROUTINGS[:2]
    only: Annotated[tuple[str, ...], Option("Only this part; may be given several times.", is_repeated=True)] = ()
    cluster: Annotated[str | None, Option("Only predict, for this cluster: a file or a preset's name.")] = None
    on_cpu: Annotated[bool, Option("Tiny sizes on the CPU, to try the command.", "--cpu")] = False

    def __post_init__(self) -> None:
        require_known("model", self.models, MODELS)
        require_known("part", self.only, PARTS)
        require_known("routing", self.routing, ROUTINGS)

    def cases(self) -> list[dict[str, Any]]:
        """Model, tokens, routing and part of each row."""
        keys = itertools.product(self.tokens, self.models, self.routing, self.only or PARTS)
        return [
            {"model": model, "tokens": tokens, "routing": routing, "part": part}
            for tokens, model, routing, part in keys
        ]


@dataclass(frozen=True)
class Row:
    """A part's rates at one shape."""

    model: str = column("model")
    tokens: int = column("tokens")
    routing: str = column("routing")
    load: float | None = column("busiest expert / mean", "{:.1f}")
    part: str = column("part")
    dense: float | None = column("dense (TFLOP/s)", "{:.0f}")
    torch: float | None = column("torch (TFLOP/s)", "{:.0f}")
    stretto: float | None = column("Stretto (TFLOP/s)", "{:.0f}")
    gathered: float | None = column("gathered (TFLOP/s)", "{:.0f}")
    predicted: float | None = column("predicted (TFLOP/s)", "{:.0f}")
    of_dense: float | None = column("Stretto / dense", "{:.0%}")
    to_torch: float | None = column("Stretto / torch", "{:.2f}")
    gathering: float | None = column("time of gathering", "{:.1%}")
    waiting: float | None = column("time of waiting", "{:.1%}")
    torch_megabytes: float | None = column("activations, torch (MB)", "{:,.0f}")
    megabytes: float | None = column("Stretto (MB)", "{:,.0f}")
    formula_megabytes: float | None = column("SonicMoE's formula (MB)", "{:,.0f}")
    difference: float | None = column("largest difference", "{:.0e}")
    failed: str | None = column("failed")


def run_grouped(setting: GroupedSetting, out: Path) -> Measured:
    """Predict all rows, or measure them in one process."""
    cases = setting.cases()
    if setting.cluster is not None:
        return predict_cases("grouped", {}, cases, setting.cluster, _predict)
    if not setting.on_cpu and not torch.cuda.is_available():
        raise ValueError("this bench takes a GPU, and torch finds none here: --cpu tries the command without one")
    device = "cpu" if setting.on_cpu else None
    return measure_cases("grouped", {}, cases, 1, measure, row=Row, out=out, device=device)


def list_products(part: str, n: int, hidden: int, inner: int) -> list[tuple[int, int, int, Literal["NT", "NN", "TN"]]]:
    """The products (m, n, k, layout) of a part, if one expert had all rows."""
    up, down = (n, 2 * inner, hidden), (n, hidden, inner)
    found: dict[str, list[Any]] = {
        "gate and up": [(*up, "NT")],
        "down": [(*down, "NT")],
        "gradients by rows": [(n, inner, hidden, "NN"), (n, hidden, 2 * inner, "NN")],
        "gradients by weights": [(2 * inner, hidden, n, "TN"), (hidden, inner, n, "TN")],
    }
    if part == "step":
        return [each for some in found.values() for each in some]
    return found["gate and up"] + found["down"] if part == "forward" else found[part]


def _predict(cluster: Cluster, model: str, tokens: int, routing: str, part: str) -> Case:
    """The planner's grouped and dense products, with one read and write more of what whole passes touch beside them."""
    device, (hidden, inner, experts, k) = Device(cluster, "bf16"), MODELS[model]
    n = tokens * k
    products = list_products(part, n, hidden, inner)
    flops = sum(2.0 * a * b * c for a, b, c, _ in products)
    dense = sum(device.matmul(*product) for product in products)
    grouped = {"forward": 1, "step": 3}.get(part, 0) * device.traffic(2 * n * (hidden + 3 * inner))
    for rows, columns, depth, layout in products:
        sizes = (columns, depth) if layout != "TN" else (rows, columns)  # gradients by weights sum over rows
        grouped += device.grouped_matmul(experts, n / experts, *sizes)
    memory = _formula(tokens, *MODELS[model]) / 1e6 if part == "step" else None
    return {"dense": flops / dense / 1e12, "predicted": flops / grouped / 1e12, "formula_megabytes": memory}


def _formula(tokens: int, hidden: int, inner: int, experts: int, k: int, size: int = 2) -> int:
    return size * (hidden * tokens + 2 * tokens * k * inner)


def measure(grid: Grid, model: str, tokens: int, routing: str, part: str) -> Case:
    """The columns of a row."""
    case = _make_case(model, tokens, routing, grid.device)
    return {"load": case.load} | case.measure(part)


@lru_cache(maxsize=1)
def _make_case(model: str, tokens: int, routing: str, device: torch.device) -> "ExpertsCase":
    sizes = (tokens, *MODELS[model]) if device.type == "cuda" else (16, *_TINY)
    return ExpertsCase(*sizes, routing, device)


class ExpertsCase:
    """Operands of one shape and routing in bf16, and the runs of each part."""

    def __init__(self, t: int, h: int, inner: int, experts: int, k: int, routing: str, device: torch.device) -> None:
        torch.manual_seed(0)
        make = partial(torch.randn, device=device, dtype=torch.bfloat16)
        self.sizes = (t, h, inner, experts, k)
        self.x = make(t, h)
        self.gate_up, self.down = make(experts, 2 * inner, h) * h**-0.5, make(experts, h, inner) * inner**-0.5
        self.ids, self.weights = draw_routing(t, experts, k, routing, device)
        self.load = load_of(self.ids, experts)
        self.inner, self.grad_up, self.grad = make(t * k, inner), make(t * k, 2 * inner), make(t * k, h)
        order = sort_by_expert(self.ids, experts)
        self.tokens, self.offsets = order.tokens, order.offsets
        self.ends = order.offsets[1:].contiguous()
        self.rows = self.x[self.tokens]
        self._operands = self.x, self.gate_up, self.down
        self.arrivals = arrive_beforehand(self.x) if device.type == "cuda" else None

    def measure(self, part: str) -> Case:
        """A row: the rates of a part's runs, and how far their results are from torch's."""
        runs = self.runs(part)
        right = runs["torch"]()
        others = [run for name, run in runs.items() if name not in ("torch", "dense")]
        difference = torch.tensor([largest_difference(run(), right) for run in others]).max().item()  # NaN if one is
        del right
        t, h, inner, _, k = self.sizes
        flops = sum(2.0 * a * b * c for a, b, c, _ in list_products(part, t * k, h, inner))
        is_step = part == "step"
        found = time_interleaved(
            runs, 64 << 20 if t > 1024 else 0, is_graph=not is_step, effort=TimingEffort(4, 3), rests=False
        )
        seconds = {name: timed.seconds for name, timed in found.items()}
        row: Case = {name: flops / time / 1e12 for name, time in seconds.items() if name != "waiting"}
        row |= {"difference": difference, "to_torch": seconds["torch"] / seconds["stretto"]}
        if "dense" in seconds:
            row["of_dense"] = seconds["dense"] / seconds["stretto"]
        if "gathered" in seconds:
            row["gathering"] = seconds["gathered"] / seconds["stretto"] - 1
        if "waiting" in seconds:
            row["waiting"] = seconds["waiting"] / seconds["gathered"] - 1
        if is_step:
            row["torch_megabytes"], row["megabytes"] = (self._count_saved(each) / 1e6 for each in self._passes())
            row["formula_megabytes"] = _formula(*self.sizes) / 1e6
        return row

    def runs(self, part: str) -> dict[str, Results]:
        """The runs of a part by name."""
        multiply, by_weight, ends, offsets = moe.grouped_matmul, moe.grouped_weight_gradient, self.ends, self.offsets
        gate_up, down, rows, inner, grad, grad_up = (
            self.gate_up, self.down, self.rows, self.inner, self.grad, self.grad_up
        )  # fmt: skip
        up_rows, down_rows = gate_up.transpose(1, 2), down.transpose(1, 2)
        match part:
            case "gate and up":
                waiting = {} if self.arrivals is None else {"waiting": self._wait_and_multiply}
                return waiting | {
                    "dense": lambda: [rows @ gate_up[0].t()],
                    "torch": lambda: [grouped_mm(rows, up_rows, offs=ends)],
                    "stretto": lambda: [multiply(rows, gate_up, offsets)],
                    "gathered": lambda: [multiply(self.x, gate_up, offsets, tokens=self.tokens)],
                }
            case "down":
                return {
                    "dense": lambda: [inner @ down[0].t()],
                    "torch": lambda: [grouped_mm(inner, down_rows, offs=ends)],
                    "stretto": lambda: [multiply(inner, down, offsets)],
                }
            case "gradients by rows":
                return {
                    "dense": lambda: [grad @ down[0], grad_up @ gate_up[0]],
                    "torch": lambda: [grouped_mm(grad, down, offs=ends), grouped_mm(grad_up, gate_up, offs=ends)],
                    "stretto": lambda: [multiply(grad, down_rows, offsets), multiply(grad_up, up_rows, offsets)],
                }
            case "gradients by weights":
                return {
                    "dense": lambda: [grad_up.t() @ rows, grad.t() @ inner],
                    "torch": lambda: [grouped_mm(grad_up.t(), rows, offs=ends), grouped_mm(grad.t(), inner, offs=ends)],
                    "stretto": lambda: [by_weight(grad_up, rows, offsets), by_weight(grad, inner, offsets)],
                    "gathered": lambda: [
                        by_weight(grad_up, self.x, offsets, tokens=self.tokens),
                        by_weight(grad, inner, offsets),
                    ],
                }
            case "forward":
                by_torch, by_stretto = self._passes()
                return {
                    "dense": lambda: [rows @ gate_up[0].t(), inner @ down[0].t()],
                    "torch": lambda: [by_torch(self.x, gate_up, down)],
                    "stretto": lambda: [by_stretto(self.x, gate_up, down)],
                }
        passes = zip(("torch", "stretto"), self._passes(), strict=True)
        return {name: partial(run_pass, each, self._operands, True) for name, each in passes}

    def _wait_and_multiply(self) -> list[Tensor]:
        """The product of gathered rows by the kernel that waits for them."""
        return [compute_product(self.x, self.gate_up, self.offsets, self.tokens, "kernel", self.arrivals)]

    def _passes(self) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        def by_stretto(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
            return moe.routed_experts(x, self.ids, self.weights, gate_up, down)

        def by_torch(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
            return torch_experts(x, self.ids, self.weights, gate_up, down)

        return by_torch, by_stretto

    def _count_saved(self, forward: Callable[..., Tensor]) -> int:
        """Bytes that autograd saves for the backward pass, each memory once, without the weights'."""
        leaves, kept = [each.detach().requires_grad_() for each in self._operands], {}

        def keep(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes(), tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            forward(*leaves)
        weights = {weight.untyped_storage().data_ptr() for weight in leaves[1:]}
        return sum(size for place, (size, _) in kept.items() if place not in weights)


def arrive_beforehand(rows: Tensor) -> Arrivals:
    """Rows of this rank alone, whose signals are all set."""
    block_channel = tiles.BlockChannel.allocate(dist.group.WORLD, channels=CHANNELS)
    channel = block_channel.describe("waiting")  # of no call: all counters are at their targets, 0
    mapping = tiles.shard_tiles(CHANNELS, 1, 1, channels=CHANNELS, fixed=True)
    table = torch.tensor([[[len(rows), 0]]], dtype=torch.int32, device=rows.device)
    return Arrivals(rows, block_channel, channel, mapping, 64, table, None)


BENCH = Bench(
    "grouped",
    "Grouped products of experts on one GPU, gradients and whole steps, with torch's grouped GEMM and a dense one.",
    GroupedSetting,
    run_grouped,
    Row,
    title="Products of experts on one GPU, bf16",
    needs=Needs.ONE_GPU,
    about=lambda setting: {},
)
