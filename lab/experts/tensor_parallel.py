# SPDX-License-Identifier: Apache-2.0
"""Rows of `python -m lab exchange` of tensor-parallel experts: the two halves of a layer, and the layer whole.

Each rank has columns of all experts and its part of the tokens. Peers: NCCL's all-gather and reduce-scatter around
torch's grouped GEMM. "hidden" is Flux's equation 2, with NCCL's two collectives as the communication.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lab.experts import TENSOR_KINDS
from lab.experts.peers import gather_experts, grouped_mm
from lab.experts.routing import draw_routing, load_of
from stretto.cluster import Cluster
from stretto.ops import moe
from stretto.planner.compute import Device

Sizes = tuple[int, int, int, int, int]  # tokens of a rank, hidden, intermediate, experts, top-k


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

    def measure(
        self,
        kind: str,
        run_pass: Callable[..., list[Tensor]],
        time: Callable[[Mapping[str, Callable[[], Any]], tuple[str, ...]], dict[str, float]],
    ) -> dict[str, Any]:
        """Times of a row: products alone, NCCL, the operators by the library and by kernels."""
        found = moe.all_gather_moe(self.x, self.gate_up, self.ids, self.group)
        gated, handle = moe.gated_activation(found.rows), found.handle
        gathered, sums = (self.x.repeat(self.ranks, 1) for _ in range(2))
        part, ends = torch.empty_like(self.x), handle.offsets[1:]

        def gather() -> None:
            dist.all_gather_into_tensor(gathered, self.x)

        def scatter() -> None:
            dist.reduce_scatter_tensor(part, sums)

        by_gather, by_scatter = kind != "tensor-scatter", kind != "tensor-gather"
        times = 2 if kind == "tensor-step" else 1

        def exchange() -> None:
            for _ in range(times):
                if by_gather:
                    gather()
                if by_scatter:
                    scatter()

        runs: dict[str, Callable[[], Any]] = {"exchange": exchange}
        if kind == "tensor-gather":
            tokens = handle.tokens.long()

            def gather_and_multiply() -> Tensor:
                gather()
                return grouped_mm(gathered[tokens], self.gate_up.transpose(1, 2), offs=ends)

            runs["products"] = lambda: moe.grouped_matmul(gathered, self.gate_up, handle.offsets, tokens=handle.tokens)
            runs["nccl"] = gather_and_multiply
            runs |= {
                name: partial(moe.all_gather_moe, self.x, self.gate_up, self.ids, self.group, implementation=how)
                for name, how in self._implementations()
            }
        elif kind == "tensor-scatter":
            weights = self.weights.repeat(self.ranks, 1)

            def multiply_and_scatter() -> None:
                rows = grouped_mm(gated, self.down.transpose(1, 2), offs=ends)
                copies = rows[handle.positions] * weights.unsqueeze(-1).to(rows.dtype)
                dist.reduce_scatter_tensor(part, copies.sum(1))

            runs["products"] = lambda: moe.grouped_matmul(gated, self.down, handle.offsets)
            runs["nccl"] = multiply_and_scatter
            runs |= {
                name: partial(
                    moe.moe_reduce_scatter, gated, self.down, handle, self.weights, self.group, implementation=how
                )
                for name, how in self._implementations()
            }
        else:
            everyones = torch.randint(self.experts, (len(gathered), self.ids.shape[1]), device=self.x.device)
            layer = partial(run_pass, has_gradients=kind == "tensor-step")
            operands = self.x, self.gate_up, self.down, self.weights
            runs["products"] = partial(
                layer,
                lambda x, gate_up, down, weights: moe.routed_experts(x, everyones, weights, gate_up, down),
                (gathered, self.gate_up, self.down, self.weights.repeat(self.ranks, 1)),
            )
            runs["nccl"] = partial(
                layer,
                lambda x, gate_up, down, weights: gather_experts(x, self.ids, weights, gate_up, down, self.group),
                operands,
            )
            runs |= {
                name: partial(layer, partial(self._run_layer, how), operands) for name, how in self._implementations()
            }
            pairs = zip(runs["stretto"](), runs["nccl"](), strict=True)
            difference = max(float((one.float() - other.float()).norm() / other.float().norm()) for one, other in pairs)
        row: dict[str, Any] = time(runs, tuple(runs))
        hidden = 1 - (row["stretto"] - row["products"]) / row.pop("exchange")
        sent = times * (by_gather + by_scatter) * (self.ranks - 1) * self.x.nbytes
        row |= {"tokens": len(self.x), "load": load_of(self.ids, self.experts), "megabytes": sent / 1e6}
        return row | {"hidden": hidden} | ({"difference": difference} if kind in TENSOR_KINDS[2:] else {})

    def _run_layer(self, how: str, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
        return moe.moe_mlp(x, self.ids, weights, gate_up, down, self.group, implementation=how)

    def _implementations(self) -> list[tuple[str, str]]:
        """(column, implementation); without GPUs kernels are interpreted, which is no speed to measure."""
        return [("library", "library"), ("stretto", "kernel" if self.x.is_cuda else "library")]


def predict(sizes: Sizes, kind: str, routing: str, ranks: int, cluster: Cluster) -> dict[str, Any]:
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
    return row | {"tokens": t, "load": load_of(ids, experts), "megabytes": passes * len(halves) * sent / 1e6}
