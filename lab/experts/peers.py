# SPDX-License-Identifier: Apache-2.0
"""The public ways of the experts' benches: torch's grouped GEMM, and NCCL's all-to-all around it."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_gather_tensor_autograd,
    all_to_all_single_autograd,
    reduce_scatter_tensor_autograd,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

grouped_mm: Callable[..., Tensor] = getattr(F, "grouped_mm", None) or torch._grouped_mm


def torch_mlp(rows: Tensor, gate_up: Tensor, down: Tensor, ends: Tensor) -> Tensor:
    """Experts' gated MLPs on rows sorted by expert, whose last rows are at `ends`, int32 [experts]."""
    gate, up = grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    return grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)


def torch_experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Experts of one rank as transformers' `grouped_mm` has them: sort, gather, multiply, and sum the weighted rows."""
    order = ids.flatten().argsort(stable=True)
    ends = _count(ids, len(down)).cumsum(0, dtype=torch.int32)
    rows = torch_mlp(x[order // ids.shape[1]], gate_up, down, ends)
    return _sum_weighted(rows, order, weights)


def exchange_experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """Experts divided among a group's ranks as torchtitan's: the host reads the counts, and a row a choice is sent.

    gate_up and down are this rank's experts'.
    """
    ranks, local = group.size(), len(down)
    order = ids.flatten().argsort(stable=True)
    counts = _count(ids, ranks * local)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)
    sends, receives = torch.stack((counts, theirs)).view(2, ranks, local).sum(2).tolist()
    rows = all_to_all_single_autograd(x[order // ids.shape[1]], receives, sends, group)
    experts = torch.arange(local, device=x.device).repeat(ranks)
    by_expert = experts.repeat_interleave(theirs, output_size=sum(receives)).argsort(stable=True)
    ends = theirs.view(ranks, local).sum(0).cumsum(0, dtype=torch.int32)
    rows = torch_mlp(rows[by_expert], gate_up, down, ends)[by_expert.argsort()]
    return _sum_weighted(all_to_all_single_autograd(rows, sends, receives, group), order, weights)


def gather_experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """Experts of which each rank has columns, and its own tokens: NCCL's all-gather and reduce-scatter around them.

    gate_up and down are this rank's columns of all experts.
    """
    everyones, factors = (all_gather_tensor_autograd(one, 0, group) for one in (x, weights))
    sums = torch_experts(everyones, all_gather_tensor(ids, 0, group), factors, gate_up, down)
    return reduce_scatter_tensor_autograd(sums, "sum", 0, group)


def _count(ids: Tensor, experts: int) -> Tensor:
    """Rows of each expert; bincount would wait for the device."""
    flat = ids.flatten()
    return flat.new_zeros(experts).scatter_add_(0, flat, torch.ones_like(flat))


def _sum_weighted(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    copies = rows[order.argsort()].view(*weights.shape, rows.shape[1])
    return (copies * weights.unsqueeze(-1).to(rows.dtype)).sum(1)


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


class ExchangedExperts(nn.Module):
    """`exchange_experts` in place of a transformers model's experts, whose shards are fp32 DTensors beside FSDP2's."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        self._group = mesh.get_group()
        for name in ("gate_up_proj", "down_proj"):
            own = module.get_parameter(name).detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
            self.register_parameter(name, nn.Parameter(DTensor.from_local(own, mesh, [Shard(0)])))

    @torch.compiler.disable  # the host reads the counts
    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        weights = [_local(parameter).to(hidden.dtype) for parameter in self.parameters()]
        if torch.is_grad_enabled():
            for weight in weights:  # the mean over ranks, as FSDP2's of all other gradients
                weight.register_hook(partial(torch.mul, other=1 / self._group.size()))
        return exchange_experts(hidden, top_k_index, top_k_weights, weights[0], weights[1], self._group)


class CutExperts(nn.Module):
    """`gather_experts` in place of a transformers model's experts: each rank of a mesh of one dim has its columns.

    Takes this rank's tokens, and choices and weights as DTensors of all ranks'.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        self._group = mesh.get_group()
        ranks, rank = mesh.size(), mesh.get_local_rank()
        for name, dim in (("gate_up_proj", 1), ("down_proj", 2)):
            whole = module.get_parameter(name).detach()
            if whole.shape[dim] % (2 * ranks if dim == 1 else ranks):
                raise ValueError(f"{ranks} ranks do not divide the columns of experts of {list(whole.shape)}")
            parts = whole.chunk(2, 1) if dim == 1 else [whole]  # a rank's gates, and what they gate
            own = torch.cat([part.chunk(ranks, dim)[rank] for part in parts], dim)
            self.register_parameter(name, nn.Parameter(DTensor.from_local(own, mesh, [Shard(dim)])))

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        gate_up, down = (_local(parameter).to(hidden.dtype) for parameter in self.parameters())
        ids, weights = _local(top_k_index), _local(top_k_weights)
        return gather_experts(hidden, ids, weights, gate_up, down, self._group)


def exchange_model(model: nn.Module, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Replace the model's experts by `ExchangedExperts`. Returns their parameters, which FSDP2 has to leave alone."""
    found = [(name, each) for name, each in model.named_modules() if "gate_up_proj" in each._parameters]
    for name, module in found:
        if len(module.get_parameter("down_proj")) % mesh.size():
            raise ValueError(f"{name}: {mesh.size()} ranks do not divide its experts")
        model.set_submodule(name, ExchangedExperts(module, mesh))
    return {parameter for name, _ in found for parameter in model.get_submodule(name).parameters()}
