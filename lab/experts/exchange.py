# SPDX-License-Identifier: Apache-2.0
"""`python -m lab exchange`: tokens to their experts' ranks and back, alone and around the experts' products.

`dispatch` and `combine` alone have so many tokens that a rank sends `--megabytes` to others, one row a token and rank.
Their peers send one row a choice: NCCL's all_to_all_single between rows that are sorted already, whose numbers the host
knows, also of as many bytes as Stretto sends; and torch's all_to_all_vdev_2d, in a job of its own, for it takes NVSHMEM
as the backend of torch's symmetric memory. `forward` and `step` are a layer's experts whole: the products alone, of
rows that are there; with NCCL's all-to-all in torchtitan's manner; and Stretto. "hidden" is Flux's equation 2, with
NCCL's all-to-alls of these rows, timed alone, as the communication. `tensor-gather`, `tensor-scatter`, `tensor-forward`
and `tensor-step` are those of tensor-parallel experts (`lab/experts/tensor_parallel.py`), at TileLink's 8192 tokens of
4 ranks with `--tokens 2048`. With `--cluster` rows are only predicted. Without GPUs rows are small, for a try of the
command.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lab.cases import Case, largest_difference, measure_cases, predict_cases, run_pass, time_milliseconds
from lab.experts import MODELS, ROUTINGS, TENSOR_KINDS, tensor_parallel
from lab.experts.grouped import list_products
from lab.experts.peers import exchange_experts
from lab.experts.routing import count_rows_sent, draw_routing, load_of
from lab.experts.tensor_parallel import Sizes
from lab.harness import Bench, Measured, column
from stretto.bench.operators.peers import world_name
from stretto.bench.settings import Needs, Option, Ranks, require_known
from stretto.cluster import Cluster
from stretto.ops import moe
from stretto.parallel import Grid, count_collectives
from stretto.planner.compute import Device

KINDS = ("dispatch", "combine", "forward", "step")
_ALL_KINDS = (*KINDS, *TENSOR_KINDS)
STORES = 0.78  # of NVLink's rate, as stores of all multiprocessors of an H200 to three peers reach: 351 of 450 GB/s
_TINY = (32, 48, 8, 2)


@dataclass(frozen=True)
class ExchangeSetting:
    """Settings of `python -m lab exchange`. Raises ValueError for an unknown model, routing or row."""

    only: Annotated[tuple[str, ...], Option(f"{', '.join(_ALL_KINDS)}, with commas.")] = KINDS
    models: Annotated[tuple[str, ...], Option("Whose shapes: those of `python -m lab grouped`.")] = ("qwen3-30b-a3b",)
    routing: Annotated[tuple[str, ...], Option(f"{', '.join(ROUTINGS)}, with commas.")] = ROUTINGS[:2]
    megabytes: Annotated[float, Option("Sent by a rank alone, one row a token and rank (MiB).", least=0.1)] = 32
    tokens: Annotated[int, Option("Tokens of a rank, around products.", least=1)] = 16384
    with_vdev: Annotated[bool, Option("Measure torch's all_to_all_vdev_2d, too.", "--vdev/--no-vdev")] = True
    ranks: Ranks = None
    cluster: Annotated[str | None, Option("Only predict, for this cluster: a file or a preset's name.")] = None

    def __post_init__(self) -> None:
        require_known("row", self.only, _ALL_KINDS)
        require_known("model", self.models, MODELS)
        require_known("routing", self.routing, ROUTINGS)


@dataclass(frozen=True)
class Row:
    """One exchange or pass: times on the slowest rank, and what rank 0 sends to others in one direction."""

    model: str = column("model")
    routing: str = column("routing")
    kind: str = column("what")
    tokens: int = column("tokens a rank")
    load: float | None = column("busiest expert / mean", "{:.1f}")
    choice_megabytes: float | None = column("a row a choice (MB)", "{:.1f}")
    megabytes: float | None = column("a row a rank (MB)", "{:.1f}")
    counted_megabytes: float | None = column("library, counted (MB)", "{:.1f}")
    products: float | None = column("products alone (ms)", "{:.3f}")
    nccl: float | None = column("NCCL (ms)", "{:.3f}")
    nccl_same: float | None = column("NCCL, as many bytes (ms)", "{:.3f}")
    vdev: float | None = column("all_to_all_vdev_2d (ms)", "{:.3f}")
    library: float | None = column("library (ms)", "{:.3f}")
    stretto: float | None = column("Stretto (ms)", "{:.3f}")
    fixed: float | None = column("with max_rows (ms)", "{:.3f}")
    predicted: float | None = column("predicted (ms)", "{:.3f}")
    nccl_rate: float | None = column("NCCL (GB/s)", "{:.0f}")
    vdev_rate: float | None = column("all_to_all_vdev_2d (GB/s)", "{:.0f}")
    rate: float | None = column("Stretto (GB/s)", "{:.0f}")
    hidden: float | None = column("hidden", "{:.0%}")
    difference: float | None = column("largest difference", "{:.0e}")
    failed: str | None = column("failed")


def run_exchange(setting: ExchangeSetting, out: Path) -> Measured:
    """Predict all rows, or measure them, those of all_to_all_vdev_2d last."""
    assert setting.ranks is not None
    cases, name, about = list_cases(setting), f"exchange-{setting.ranks}", {"ranks": setting.ranks}
    if setting.cluster is not None:
        return predict_cases(name, about, cases, setting.cluster, partial(_predict, setting.ranks))
    vdev = measure_vdev if setting.with_vdev else None
    return measure_cases(name, about, cases, setting.ranks, measure, row=Row, out=out, with_nvshmem=vdev)


def list_cases(setting: ExchangeSetting) -> list[Case]:
    """Each row's model, routing, kind and tokens of a rank, which are the same with each routing."""
    assert setting.ranks is not None
    tokens = {
        (model, kind): _count_tokens(setting, model) if kind in KINDS[:2] else setting.tokens
        for model in setting.models
        for kind in setting.only
    }
    return [
        {"model": model, "routing": routing, "kind": kind, "tokens": tokens[model, kind]}
        for model in setting.models
        for routing in setting.routing
        for kind in setting.only
    ]


def _count_tokens(setting: ExchangeSetting, model: str) -> int:
    """Tokens of which a rank sends so many megabytes, where routing is uniform."""
    hidden, _, experts, k = MODELS[model]
    assert setting.ranks is not None
    few = draw_routing(4096, experts, k, "uniform", torch.device("cpu"))[0]
    rows = count_rows_sent(few, experts, setting.ranks, 0)[1] / 4096
    return round(setting.megabytes * 2**20 / (2 * hidden * rows))


def _predict(ranks: int, cluster: Cluster, model: str, routing: str, kind: str, tokens: int) -> Case:
    """Bytes over NVLink's rate; around products, each exchange under a product of which one part in `ranks` is bare."""
    hidden, inner, experts, k = MODELS[model]
    if kind in TENSOR_KINDS:
        return tensor_parallel.predict((tokens, *MODELS[model]), kind, routing, ranks, cluster)
    ids, _ = draw_routing(tokens, experts, k, routing, torch.device("cpu"))
    choices, rows = (count * 2 * hidden for count in count_rows_sent(ids, experts, ranks, 0))
    link = cluster.require("in_node.bandwidth")
    busiest = load_of(ids // (experts // ranks), ranks)  # of the ranks, for which all others wait
    by_nccl = busiest * choices / (cluster.measured_in_node_bandwidth(1, ranks) or link)
    by_stores = busiest * rows / (STORES * link)
    row: Case = {"load": load_of(ids, experts), "choice_megabytes": choices / 1e6, "megabytes": rows / 1e6}
    if kind in KINDS[:2]:
        times = {"nccl": by_nccl * 1e3, "predicted": by_stores * 1e3}
        return row | times | {"nccl_rate": choices / by_nccl / 1e9, "rate": rows / by_stores / 1e9}
    device, n = Device(cluster, "bf16"), round(tokens * k * busiest)
    up, down = (
        device.grouped_matmul(experts / ranks, n * ranks / experts, width, depth)
        for part in ("gate and up", "down")
        for _, width, depth, _ in list_products(part, n, hidden, inner)
    )
    passes = 1 if kind == "forward" else 2
    products = (up + down) * (1 if passes == 1 else 3)
    stretto = products + passes * sum(
        max(by_stores - product, 0) + min(by_stores, product) / ranks for product in (up, down)
    )
    hidden_share = 1 - (stretto - products) / (2 * passes * by_nccl)
    times = {"products": products, "nccl": products + 2 * passes * by_nccl, "predicted": stretto}
    return row | {name: seconds * 1e3 for name, seconds in times.items()} | {"hidden": hidden_share}


def measure(grid: Grid, model: str, routing: str, kind: str, tokens: int) -> Case:
    sizes = _sizes(grid, model, tokens)
    if kind in TENSOR_KINDS:
        return tensor_parallel.TensorParallel(sizes, routing, grid.device).measure(kind)
    case = _Exchange(sizes, routing, grid)
    return case.about() | (case.measure_alone(kind) if kind in KINDS[:2] else case.measure_layer(kind))


def _sizes(grid: Grid, model: str, tokens: int) -> Sizes:
    return (tokens, *MODELS[model]) if grid.device.type == "cuda" else (64, *_TINY)


class _Exchange:
    """The tokens, weights and routing of this rank, in bf16."""

    def __init__(self, sizes: Sizes, routing: str, grid: Grid) -> None:
        t, hidden, inner, self.experts, k = sizes
        self.grid, self.rank, self.ranks = grid, dist.get_rank(), dist.get_world_size()
        assert dist.group.WORLD is not None
        self.group = dist.group.WORLD
        device, local = grid.device, self.experts // self.ranks
        torch.manual_seed(self.rank)
        make = partial(torch.randn, device=device, dtype=torch.bfloat16)
        self.x = make(t, hidden)
        self.gate_up, self.down = (
            make(local, 2 * inner, hidden) * hidden**-0.5,
            make(local, hidden, inner) * inner**-0.5,
        )
        self.ids, self.weights = draw_routing(t, self.experts, k, routing, device, self.rank)
        counts = torch.bincount(self.ids.flatten(), minlength=self.experts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        self.sends, self.receives = torch.stack((counts, theirs)).view(2, self.ranks, local).sum(2).tolist()
        self.sorted = self.x[self.ids.flatten().argsort(stable=True) // k]
        ends = theirs.view(self.ranks, local).sum(0).cumsum(0, dtype=torch.int32)
        self.received, self.offsets = make(sum(self.receives), hidden), torch.nn.functional.pad(ends, (1, 0))
        sent = count_rows_sent(self.ids, self.experts, self.ranks, self.rank)
        self.choice_bytes, self.bytes = (count * hidden * self.x.element_size() for count in sent)
        most = torch.tensor([sum(self.receives), self.bytes], device=device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        self.max_rows, self.most_bytes = most.tolist()

    def about(self) -> Case:
        load = load_of(self.ids, self.experts)
        sent = {"choice_megabytes": self.choice_bytes / 1e6, "megabytes": self.bytes / 1e6}
        return {"tokens": len(self.x), "load": load, **sent}

    def measure_alone(self, kind: str) -> Case:
        """Times and rates of one exchange."""
        part = self.x.new_empty(self.ranks, self.most_bytes // self.x.element_size() // max(1, self.ranks - 1))
        other, back = torch.empty_like(part), torch.empty_like(self.sorted)
        with count_collectives(self.grid) as counts:
            found = self._dispatch(how="library")
            if kind == "combine":
                counts.calls.clear()
                moe.combine(found.rows, found.handle, self.weights, self.group)
        counted = sum(call.bytes_sent for call in counts.calls)
        hows: dict[str, dict[str, Any]] = {
            "library": {"how": "library"}, "stretto": {}, "fixed": {"max_rows": self.max_rows}
        }  # fmt: skip
        runs: dict[str, Callable[[], Any]] = {
            "nccl_same": lambda: dist.all_to_all_single(other, part),
            "nccl": lambda: dist.all_to_all_single(self.received, self.sorted, self.receives, self.sends),
        }
        if kind == "combine":
            runs["nccl"] = lambda: dist.all_to_all_single(back, self.received, self.sends, self.receives)
            for name, options in hows.items():
                found = self._dispatch(**options)
                runs[name] = partial(moe.combine, found.rows, found.handle, self.weights, self.group)
        else:
            runs |= {name: partial(self._dispatch, **options) for name, options in hows.items()}
        row: Case = {"counted_megabytes": counted / 1e6} | time_milliseconds(
            runs, never_captured=("library", "stretto")
        )
        best = min(row["stretto"], row["fixed"])
        return row | {"nccl_rate": self.choice_bytes / row["nccl"] / 1e6, "rate": self.bytes / best / 1e6}

    def _dispatch(self, how: str = "auto", max_rows: int | None = None) -> moe.Dispatched:
        return moe.dispatch(self.x, self.ids, self.experts, self.group, max_rows=max_rows, implementation=how)

    def measure_layer(self, kind: str) -> Case:
        """Times of the experts' forward pass, or of a step, and how much of the communication is hidden."""
        back = torch.empty_like(self.sorted)

        def exchange() -> None:  # forward, and the same in the backward pass
            for _ in range(1 if kind == "forward" else 2):
                dist.all_to_all_single(self.received, self.sorted, self.receives, self.sends)
                dist.all_to_all_single(back, self.received, self.sends, self.receives)

        def by_stretto(
            x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, max_rows: int | None = None
        ) -> Tensor:
            inner, sent = moe.dispatch_grouped_matmul(
                x, self.ids, gate_up, self.group, topk_weights=weights, max_rows=max_rows
            )
            return moe.grouped_matmul_combine(moe.gated_activation(inner), down, sent, weights, self.group)

        def by_nccl(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
            return exchange_experts(x, self.ids, weights, gate_up, down, self.group)

        def multiply(rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
            return moe.experts_mlp(rows, self.offsets, gate_up, down)

        step = partial(run_pass, has_gradients=kind == "step")
        operands = (self.x, self.gate_up, self.down, self.weights)
        runs: dict[str, Callable[[], Any]] = {
            "products": partial(step, multiply, (self.received, self.gate_up, self.down)),
            "exchange": exchange,
            "nccl": partial(step, by_nccl, operands),
            "stretto": partial(step, by_stretto, operands),
            "fixed": partial(step, partial(by_stretto, max_rows=self.max_rows), operands),
        }
        difference = largest_difference(runs["stretto"](), runs["nccl"]())
        row: Case = time_milliseconds(runs, never_captured=tuple(runs))
        hidden = 1 - (min(row["stretto"], row["fixed"]) - row["products"]) / row.pop("exchange")
        return row | {"hidden": hidden, "difference": difference}


def measure_vdev(grid: Grid, model: str, routing: str, kind: str, tokens: int) -> Case:
    """Torch's all_to_all_vdev_2d, or its way back."""
    import torch.distributed._symmetric_memory as symmetric

    if kind not in KINDS[:2]:
        return {}
    name, case = world_name(), _Exchange(_sizes(grid, model, tokens), routing, grid)
    make = partial(symmetric.empty, device=grid.device)
    rows = make(case.sorted.shape, dtype=torch.bfloat16).copy_(case.sorted)
    received = make((case.max_rows, rows.shape[1]), dtype=torch.bfloat16)
    splits, places, returned = (make((n, case.experts), dtype=torch.int64) for n in (1, 2, 2))
    splits[0].copy_(torch.bincount(case.ids.flatten(), minlength=case.experts))
    send = partial(torch.ops.symm_mem.all_to_all_vdev_2d, rows, received, splits[0], places, name)
    send()
    back = partial(torch.ops.symm_mem.all_to_all_vdev_2d_offset, received, rows, places, returned, name)
    row = time_milliseconds({"vdev": send if kind == "dispatch" else back}, never_captured=("vdev",))
    return row | {"vdev_rate": case.choice_bytes / row["vdev"] / 1e6}


BENCH = Bench(
    "exchange",
    "Tokens to their experts' ranks and back, alone and around products, with NCCL and all_to_all_vdev_2d.",
    ExchangeSetting,
    run_exchange,
    Row,
    title=lambda setting: f"Dispatch and combine, bf16, {setting.ranks} ranks",
    needs=Needs.RANKS,
    about=lambda setting: {},
)
