# SPDX-License-Identifier: Apache-2.0
"""`python -m lab operators-between-nodes`: operators that put between declared nodes, beside the library and NCCL.

NCCL is told of the same nodes (NCCL_HOSTID), so that it sends by sockets between them, too, over loopback. What could
be gained is the library's time less the longer one of its product and its collective; the last column is the share of
that which the kernels gain (the papers' figures: Flux 1.32 to 1.57 times the library between nodes).
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lab.harness import Bench, column
from stretto.bench.operators.settings import CASES, OPERATORS, local_shape
from stretto.bench.settings import Needs, Option, Ranks, require_known

KINDS = ("gather", "scatter", "reduce", "experts", "embedding")
CASE = "llama-3.1-8b"  # of `stretto bench ops`: the model whose shapes are taken
_EXPERTS, _TOP_K = 16, 4


@dataclass(frozen=True)
class OperatorsBetweenNodesSetting:
    """The operators, shapes and nodes to measure. ValueError for what there is not."""

    operators: Annotated[tuple[str, ...], Option(f"{', '.join(KINDS)}, with commas.", "--only")] = KINDS
    ms: Annotated[tuple[int, ...], Option("Rows of the whole; samples of a look-up.")] = (2048, 8192)
    nodes: Annotated[str, Option("The declared nodes, as 2x2 or 4x1.")] = "2x2"
    ranks: Ranks = None

    def __post_init__(self) -> None:
        require_known("operator", self.operators, KINDS)


@dataclass(frozen=True)
class Row:
    """An operator's times at one shape, on the slowest rank, in ms."""

    operator: str = column("operator")
    m: int = column("m")
    product: float = column("product alone (ms)", "{:.3f}")
    collective: float = column("collective alone (ms)", "{:.3f}")
    library: float = column("library (ms)", "{:.3f}")
    kernel: float = column("kernel (ms)", "{:.3f}")
    speedup: float = column("library / kernel", "{:.2f}")
    gained: float = column("of the possible gain", "{:.0%}")


def measure_operators(setting: OperatorsBetweenNodesSetting) -> list[Row]:
    from stretto.bench.harness import run_ranks

    assert setting.ranks is not None
    found: list[dict[str, Any]] = run_ranks(setting.ranks, _measure_all, setting, trains=False)
    return [Row(**row) for row in found]


def _measure_all(setting: OperatorsBetweenNodesSetting) -> list[dict[str, Any]]:
    from stretto.bench.harness import print_row, time_steps
    from stretto.cluster.local_ranks import name_node

    os.environ["STRETTO_NODES"] = setting.nodes
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["NCCL_HOSTID"] = name_node(rank, world)
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if is_cuda else "gloo", timeout=timedelta(seconds=120))
    rows = []
    for kind in setting.operators:
        for m in setting.ms if is_cuda else (4 * world,):
            match kind:
                case "experts":
                    runs = _make_experts(m, device)
                case "embedding":
                    runs = _make_embedding(m, device)
                case _:
                    runs = _make_dense(kind, m, device)
            times = {name: time_steps(run, warm_up=2, repeats=5) * 1e3 for name, run in runs.items()}
            possible = times["library"] - max(times["product"], times["collective"])
            gained = (times["library"] - times["kernel"]) / possible
            speedup = times["library"] / times["kernel"]
            rows.append({"operator": kind, "m": m, **times, "speedup": speedup, "gained": gained})
            print_row(rows[-1])  # what follows may take longer than there is
    return rows


def _make_dense(kind: str, m: int, device: torch.device) -> dict[str, Any]:
    """The calls whose times are a row's, of a dense operator."""
    from stretto.ops.tuning import RotatingOperands

    world, name = dist.get_world_size(), OPERATORS[kind]
    m, n, k = local_shape(kind, CASE, m, world) if device.type == "cuda" else (m, 16, 16)
    operands = RotatingOperands.make(name, m, n, k, None, torch.bfloat16, device)
    whole = torch.randn(m, k, device=device).to(torch.bfloat16)
    sums = whole.new_empty(m, n)

    def collective() -> None:
        match kind:
            case "gather":
                dist.all_gather_into_tensor(whole, operands.x)
            case "scatter":
                dist.reduce_scatter_tensor(sums[: m // world], sums)
            case _:
                dist.all_reduce(sums)

    return {
        "product": lambda: torch.mm(whole, operands.next_weight().t()),
        "collective": collective,
        "library": lambda: operands.call("library"),
        "kernel": lambda: operands.call("kernel"),
    }


def _make_experts(m: int, device: torch.device) -> dict[str, Any]:
    """As `_make_dense`, of experts: m tokens of all ranks are sent, multiplied twice, and summed where they were."""
    from stretto.ops import moe

    world, hidden = dist.get_world_size(), CASES[CASE][1] if device.type == "cuda" else 16
    tokens, local = m // world, -(-_EXPERTS // world)
    x = torch.randn(tokens, hidden, device=device).to(torch.bfloat16)
    ids = torch.rand(tokens, local * world, device=device).topk(_TOP_K).indices
    weights = torch.rand(tokens, _TOP_K, device=device)
    weight = torch.randn(local, hidden, hidden, device=device).to(torch.bfloat16)
    sent = x.repeat(_TOP_K, 1)[: len(x) * _TOP_K // world * world].contiguous()
    received = torch.empty_like(sent)

    def multiply(implementation: str) -> Tensor:
        inner, handle = moe.dispatch_grouped_matmul(
            x, ids, weight, dist.group.WORLD, topk_weights=weights, implementation=implementation
        )
        return moe.grouped_matmul_combine(inner, weight, handle, weights, dist.group.WORLD)

    def collective() -> None:
        for _ in range(2):
            dist.all_to_all_single(received, sent)

    return {
        "product": lambda: [torch.mm(sent, each.t()) for each in weight[:2]],
        "collective": collective,
        "library": partial(multiply, "library"),
        "kernel": partial(multiply, "kernel"),
    }


def _make_embedding(m: int, device: torch.device) -> dict[str, Any]:
    """As `_make_dense`, of tables on each rank: in place of the product, this rank's are looked up for all samples."""
    from stretto import ops
    from stretto.bench.embedding.peers import Batched, exchange_alone
    from stretto.bench.embedding.run import make_batch
    from stretto.bench.embedding.settings import LookupShape, LookupShapes

    shape = f"{m}x64x256x70" if device.type == "cuda" else f"{m}x2x8x2"
    batch = make_batch(LookupShape.parse(shape), LookupShapes(rows=10_000 if device.type == "cuda" else 9), device)
    batched = Batched(batch)
    return {
        "product": batched.look_up,
        "collective": exchange_alone(batch),
        "library": batched.forward,
        "kernel": lambda: ops.embedding_all_to_all(batch.indices, batch.offsets, batch.tables),
    }


BENCH = Bench(
    "operators-between-nodes",
    "Operators that put between declared nodes, beside the library and NCCL told of the same nodes.",
    OperatorsBetweenNodesSetting,
    measure_operators,
    Row,
    title=lambda setting: f"Operators between nodes ({setting.nodes}), {CASE}",
    needs=Needs.RANKS,
)
