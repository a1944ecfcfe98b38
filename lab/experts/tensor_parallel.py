# SPDX-License-Identifier: Apache-2.0
"""Rows of `python -m lab exchange` of tensor-parallel experts: the two halves of a layer, and the layer whole.

Each rank has columns of all experts and its part of the tokens. Peers: NCCL's all-gather and reduce-scatter around
torch's grouped GEMM. "hidden" is Flux's equation 2, with NCCL's two collectives as the communication.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lab.cases import Case, largest_difference, run_pass, time_milliseconds
from lab.experts import TENSOR_KINDS
from lab.experts.peers import gather_experts, grouped_mm
from lab.experts.routing import draw_routing, load_of
from stretto.cluster import Cluster
from stretto.ops import moe
from stretto.planner.compute import Device

Sizes = tuple[int, int, int, int, int]  # tokens of a rank, hidden, intermediate, experts, top-k
Run = Callable[..., Any]


class TensorParallel:
    """The tokens, weights and routing of this rank, in bf16."""

    def __init__(self, sizes: Sizes, routing: str, device: torch.device) -> None:
        t, hidden, inner, self.experts, k = sizes
        assert dist.group.WORLD is not None
        self.group, self.ranks = dist.group.WORLD, dist.get_world_size()
        torch.manual_seed(dist.get_rank())
        make = partial(torch.randn, device=device, dtype=torch.bfloat16)
        self.x = make(t, hidden)
        width = inner // self.ranks
        self.gate_up = make(self.experts, 2 * width, hidden) * hidden**-0.5
        self.down = make(self.experts, hidden, width) * inner**-0.5
        self.ids, self.weights = draw_routing(t, self.experts, k, routing, device, dist.get_rank())

    def measure(self, kind: str) -> Case:
        """Times of a row: products alone, NCCL, the operators by the library and by kernels."""
        gathered, sums = (self.x.repeat(self.ranks, 1) for _ in range(2))
        part = torch.empty_like(self.x)
        by_gather, by_scatter = kind != "tensor-scatter", kind != "tensor-gather"
        times = 2 if kind == "tensor-step" else 1

        def exchange() -> None:
            for _ in range(times):
                if by_gather:
                    dist.all_gather_into_tensor(gathered, self.x)
                if by_scatter:
                    dist.reduce_scatter_tensor(part, sums)

        list_runs = {"tensor-gather": self._gather, "tensor-scatter": self._scatter}.get(
            kind, partial(self._layer, kind)
        )
        products, nccl, operator = list_runs(gathered)
        runs: dict[str, Run] = {"exchange": exchange, "products": products, "nccl": nccl}
        # Without GPUs kernels are interpreted, which is no speed to measure.
        for name, how in (("library", "library"), ("stretto", "kernel" if self.x.is_cuda else "library")):
            runs[name] = partial(operator, implementation=how)
        row: Case = {}
        if kind in TENSOR_KINDS[2:]:
            row["difference"] = largest_difference(runs["stretto"](), runs["nccl"]())
        row |= time_milliseconds(runs, never_captured=tuple(runs))
        row["hidden"] = 1 - (row["stretto"] - row["products"]) / row.pop("exchange")
        sent = times * (by_gather + by_scatter) * (self.ranks - 1) * self.x.nbytes
        return row | {"tokens": len(self.x), "load": load_of(self.ids, self.experts), "megabytes": sent / 1e6}

    def _gather(self, gathered: Tensor) -> tuple[Run, Run, Run]:
        """Products alone, with NCCL's all-gather, and the operator, which takes `implementation`."""
        handle = moe.all_gather_moe(self.x, self.gate_up, self.ids, self.group).handle
        tokens, ends = handle.tokens.long(), handle.offsets[1:]

        def with_nccl() -> Tensor:
            dist.all_gather_into_tensor(gathered, self.x)
            return grouped_mm(gathered[tokens], self.gate_up.transpose(1, 2), offs=ends)

        multiply = partial(moe.grouped_matmul, gathered, self.gate_up, handle.offsets, tokens=handle.tokens)
        return multiply, with_nccl, partial(moe.all_gather_moe, self.x, self.gate_up, self.ids, self.group)

    def _scatter(self, gathered: Tensor) -> tuple[Run, Run, Run]:
        """The same of the reduce-scatter."""
        found = moe.all_gather_moe(self.x, self.gate_up, self.ids, self.group)
        gated, handle = moe.gated_activation(found.rows), found.handle
        part, weights = torch.empty_like(self.x), self.weights.repeat(self.ranks, 1)

        def with_nccl() -> Tensor:
            rows = grouped_mm(gated, self.down.transpose(1, 2), offs=handle.offsets[1:])
            copies = rows[handle.positions] * weights.unsqueeze(-1).to(rows.dtype)
            dist.reduce_scatter_tensor(part, copies.sum(1))
            return part

        operator = partial(moe.moe_reduce_scatter, gated, self.down, handle, self.weights, self.group)
        return partial(moe.grouped_matmul, gated, self.down, handle.offsets), with_nccl, operator

    def _layer(self, kind: str, gathered: Tensor) -> tuple[Run, Run, Run]:
        """The same of a pass of the layer whole."""
        everyones = torch.randint(self.experts, (len(gathered), self.ids.shape[1]), device=self.x.device)
        layer = partial(run_pass, has_gradients=kind == "tensor-step")
        operands = self.x, self.gate_up, self.down, self.weights

        def multiply(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
            return moe.routed_experts(x, everyones, weights, gate_up, down)

        def by_nccl(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
            return gather_experts(x, self.ids, weights, gate_up, down, self.group)

        def by_stretto(implementation: Any) -> list[Tensor]:
            def run(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
                return moe.moe_mlp(x, self.ids, weights, gate_up, down, self.group, implementation=implementation)

            return layer(run, operands)

        products = partial(layer, multiply, (gathered, self.gate_up, self.down, self.weights.repeat(self.ranks, 1)))
        return products, partial(layer, by_nccl, operands), by_stretto


def predict(sizes: Sizes, kind: str, routing: str, ranks: int, cluster: Cluster) -> Case:
    """Products, and of each collective what the products of other ranks' tokens do not cover: a lower bound."""
    t, hidden, inner, experts, k = sizes
    ids, _ = draw_routing(t, experts, k, routing, torch.device("cpu"))
    sent = (ranks - 1) * t * hidden * 2
    link = cluster.require("in_node.bandwidth")
    by_nccl = sent / (cluster.measured_in_node_bandwidth(1, ranks) or link)
    device, rows = Device(cluster, "bf16"), ranks * t * k / experts
    width = inner // ranks
    up, down = (device.grouped_matmul(experts, rows, *size) for size in ((2 * width, hidden), (hidden, width)))
    passes = 2 if kind == "tensor-step" else 1
    halves = {"tensor-gather": (up,), "tensor-scatter": (down,)}.get(kind, (up, down))
    products = sum(halves) * (3 if passes == 2 else 1)
    stretto = products + passes * sum(max(sent / link - half * (ranks - 1) / ranks, 0) for half in halves)
    nccl = products + passes * len(halves) * by_nccl
    row = {"products": products * 1e3, "nccl": nccl * 1e3, "predicted": stretto * 1e3}
    row |= {"hidden": 1 - (stretto - products) / (nccl - products)}
    return row | {"load": load_of(ids, experts), "megabytes": passes * len(halves) * sent / 1e6}
