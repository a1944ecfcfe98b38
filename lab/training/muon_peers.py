# SPDX-License-Identifier: Apache-2.0
"""Muon of FSDP2's shards, as plain loops: each matrix gathered by all ranks in turn, or by groups of as many as ranks.

Both keep momentum sharded and send bf16, as Stretto's does, and iterate by torch.optim.Muon's own function. Nothing
overlaps: all follows the backward pass.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim._muon import _zeropower_via_newtonschulz

from stretto.optim import hidden_matrices

MOMENTUM, DECAY = 0.95, 0.1
Orthogonalize = Callable[[Sequence[Tensor], dist.ProcessGroup], list[Tensor]]
"""Takes this rank's rows of each matrix, in bf16, and returns those of the orthogonalized ones."""


class ShardedMuon:
    """Muon of a model's hidden matrices, whose rows all ranks of `group` hold equal parts of; fused AdamW of the rest.

    ValueError for a matrix whose rows the ranks do not divide.
    """

    def __init__(
        self, model: nn.Module, learning_rate: float, group: dist.ProcessGroup, orthogonalize: Orthogonalize
    ) -> None:
        found = hidden_matrices(model)
        for name, matrix in found.items():
            if len(matrix) % group.size():
                raise ValueError(f"{name} has {len(matrix)} rows, which {group.size()} ranks do not divide")
        self._matrices = list(found.values())
        self._rate, self._group, self._orthogonalize = learning_rate, group, orthogonalize
        others: list[Any] = [parameter for name, parameter in model.named_parameters() if name not in found]
        self._adamw = torch.optim.AdamW(others, lr=learning_rate, fused=True, capturable=others[0].is_cuda)
        self._momenta = [torch.zeros_like(_local(matrix)) for matrix in self._matrices]

    @torch.no_grad()
    def step(self) -> None:
        self._adamw.step()
        gradients = [_local(matrix.grad) for matrix in self._matrices]
        torch._foreach_lerp_(self._momenta, gradients, 1 - MOMENTUM)
        directions = torch._foreach_lerp(gradients, self._momenta, MOMENTUM)
        updates = self._orthogonalize([each.bfloat16() for each in directions], self._group)
        for matrix, update in zip(self._matrices, updates, strict=True):
            shard = _local(matrix)
            shard.mul_(1 - self._rate * DECAY)
            shard.add_(update, alpha=-self._rate * 0.2 * max(matrix.shape) ** 0.5)

    def zero_grad(self) -> None:
        self._adamw.zero_grad()
        for matrix in self._matrices:
            matrix.grad = None


def orthogonalize_gathered(shards: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Gather each matrix to all ranks in turn, as torch.optim.Muon on whole matrices needs: all compute the same."""
    found = []
    for shard in shards:
        whole = shard.new_empty(len(shard) * group.size(), shard.shape[1])
        dist.all_gather_into_tensor(whole, shard, group=group)
        found.append(_iterate(whole).chunk(group.size())[group.rank()].clone())
    return found


def orthogonalize_exchanged(shards: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Bring matrices of one shape together by groups of as many as ranks, one a rank, by one all-to-all each way."""
    ranks, by_shape = group.size(), dict[torch.Size, list[int]]()
    for number, shard in enumerate(shards):
        by_shape.setdefault(shard.shape, []).append(number)
    found = list(shards)
    for shape, numbers in by_shape.items():
        for first in range(0, len(numbers), ranks):
            some = numbers[first : first + ranks]
            sent = [shards[number] for number in some]
            sent += [sent[0].new_zeros(shape)] * (ranks - len(some))  # no matrix for the last ranks
            whole = sent[0].new_empty(ranks, *shape)
            dist.all_to_all_single(whole, torch.stack(sent), group=group)
            if group.rank() < len(some):
                whole = _iterate(whole.flatten(0, 1)).contiguous().view_as(whole)
            taken = torch.empty_like(whole)
            dist.all_to_all_single(taken, whole, group=group)
            for number, update in zip(some, taken, strict=False):
                found[number] = update
    return found


def _iterate(matrix: Tensor) -> Tensor:
    return _zeropower_via_newtonschulz(matrix, (3.4445, -4.775, 2.0315), 5, 1e-7)


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()
