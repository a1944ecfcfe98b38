# SPDX-License-Identifier: Apache-2.0
"""Replicas of a module's hot experts for a step, by loads measured in the steps before (`balance_experts`)."""

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.ops.moe import ReplicaPlacement
from stretto.ops.moe.replicas import hold_replicas, place_replicas, return_gradients
from stretto.parallel.comm.collectives import all_reduce, collective
from stretto.parallel.comm.kept_outputs import run_once


class ExpertReplicas:
    """The placement of replicas among a group's ranks, and choices of each expert since it was made.

    over_x: ranks that have other tokens of the same experts, and so need the same placement; or None. counts: int64
    [experts], on the device; None while nothing is measured.
    """

    def __init__(self, group: dist.ProcessGroup, over_x: dist.ProcessGroup | None) -> None:
        self._group, self._over_x = group, over_x
        self.placement: ReplicaPlacement | None = None
        self.counts: Tensor | None = None

    def note(self, ids: Tensor, experts: int) -> None:
        """Count this rank's choices, once where a block is computed again."""
        if self.counts is not None:
            run_once(self._add, ids.flatten().long(), experts)

    def _add(self, ids: Tensor, experts: int) -> None:
        assert self.counts is not None
        if not self.counts.numel():
            self.counts = ids.new_zeros(experts)
        self.counts.scatter_add_(0, ids, torch.ones_like(ids))

    def hold(self, weight: Tensor, placement: ReplicaPlacement) -> Tensor:
        """The weights of this rank's experts and replicas."""
        with collective("all_to_all"):
            return hold_replicas(weight, placement, self._group)

    def return_home(self, gradient: Tensor, placement: ReplicaPlacement) -> Tensor:
        """The gradient of this rank's experts, with those of their replicas."""
        with collective("all_to_all"):
            return return_gradients(gradient, placement, self._group)

    def sum_counts(self) -> Tensor:
        """The choices of all ranks that share the placement, on the device."""
        assert self.counts is not None
        total = all_reduce(self.counts.clone(), self._group)
        return total if self._over_x is None else all_reduce(total, self._over_x)

    def place(self, loads: list[int], spare: int) -> ReplicaPlacement:
        """Place replicas for these loads, and begin to count anew."""
        self.placement, self.counts = place_replicas(loads, self._group.size(), spare), torch.empty(0)
        return self.placement
