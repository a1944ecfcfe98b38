# SPDX-License-Identifier: Apache-2.0
"""Replicas of hot experts for a step, by loads measured in the steps before: `balance_experts`."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.ops.moe import ReplicaPlacement
from stretto.ops.moe.replicas import hold_replicas, place_replicas, return_gradients, send_replicas
from stretto.parallel.comm.collectives import all_reduce, collective
from stretto.parallel.comm.kept_outputs import run_once
from stretto.parallel.layers.weight_shard import WeightShard
from stretto.parallel.layout import Version, version_of
from stretto.suggestions import require_type


class ExpertReplicas:
    """The placement of replicas among a group's ranks, and choices of each expert since it was made.

    over_x: ranks that have other tokens of the same experts, and so need the same placement; or None. placed: for
    passes from now on. counts: int64 [experts], on the device; None while nothing is measured. following: those of the
    next layer's experts, which begin to travel where this layer's weights have come, and so do under its attention.
    weights: of the products.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        over_x: dist.ProcessGroup | None,
        weights: Sequence[tuple[WeightShard, Tensor]] = (),
    ) -> None:
        self._group, self._over_x, self._weights = group, over_x, weights
        self.placed: ReplicaPlacement | None = None
        self.counts: Tensor | None = None
        self.following: ExpertReplicas | None = None
        self._sent: dict[Tensor | None, tuple[ReplicaPlacement, Version, Tensor]] = {}

    @property
    def placement(self) -> ReplicaPlacement | None:
        """The placement; while a block is computed again, that of its forward pass."""
        return run_once(lambda: self.placed)

    def note(self, ids: Tensor, experts: int) -> None:
        """Count this rank's choices, if any are counted now, and once where a block is computed again."""
        run_once(self._add, ids, experts)

    def _add(self, ids: Tensor, experts: int) -> None:
        if self.counts is None:
            return
        ids = ids.flatten().long()
        if not self.counts.numel():
            self.counts = ids.new_zeros(experts)
        self.counts.scatter_add_(0, ids, torch.ones_like(ids))

    def hold(self, weight: Tensor, placement: ReplicaPlacement, parameter: Tensor | None = None) -> Tensor:
        """The weights of this rank's experts and replicas. parameter: whose, in a forward pass that has a backward one:
        then the same weight of the next layer is sent, too."""
        sent_for, version, sent = self._sent.pop(parameter, (None, None, None))
        if parameter is None or sent_for is not placement or version != version_of(parameter):
            with collective("all_to_all"):
                sent = send_replicas(weight, placement, self._group)
        held = hold_replicas(weight, placement, self._group, sent)
        if self.following is not None:
            for (_, own), of_next in zip(self._weights, self.following._weights, strict=False):
                if own is parameter:
                    run_once(self.following._send, *of_next)
        return held

    def _send(self, shard: WeightShard, parameter: Tensor) -> None:
        """Begin to send replicas of a weight that this rank has whole, and not in fp8: else they go when it is used."""
        if self.placed is not None and shard.group.size() == 1 and shard.scaling is None:
            rows, placement = shard.gather(parameter).rows, self.placed
            with collective("all_to_all"):
                sent = send_replicas(rows, placement, self._group)
            self._sent[parameter] = placement, version_of(parameter), sent

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
        placement = place_replicas(loads, self._group.size(), spare)
        self.placed, self.counts = placement, torch.empty(0, device="cpu")
        return placement


def balance_experts(model: nn.Module, replicas: int = 1) -> Mapping[str, float]:
    """Replicate hot experts in the next steps, by their loads since the last call; call it after each optimizer step.

    model: of `parallelize`, with experts divided among ranks (expert > 1). replicas: how many experts of other ranks
    each rank may hold beside its own; 0 ends it. The first call begins to measure. In each forward pass the weights of
    replicas are sent to their ranks (under the attention before them, but for the first layer's, and those that z
    shards or that are in fp8), and in the backward pass their gradients home; parameters, their gradients and the
    optimizer's states stay as they are. With expert_reduce="choice" a token's outputs are added in the same order;
    gradients of replicated experts are added in parts, so that they, and losses after the step, differ by rounding. The
    host waits for the device once. All ranks call it.

    Returns, of each module, the load of the busiest rank over the mean with these replicas, for the measured loads.
    ValueError for fewer than 0 replicas, and for experts that have biases, or are not divided.
    """
    require_type(model, nn.Module, "model")
    if type(replicas) is not int or replicas < 0:
        raise ValueError(f"balance_experts: a rank holds 0 or more replicas, not {replicas!r}")
    found: dict[str, ExpertReplicas] = {}
    for name, module in model.named_modules():
        held = getattr(module, "replicas", module)
        if held is None and replicas:
            raise ValueError(
                f"balance_experts: each rank has all experts of {name}: replicas need a grid of expert > 1"
            )
        if isinstance(held, ExpertReplicas):
            if module.has_biases:
                raise ValueError(f"balance_experts: {name} has biases, of which there are no replicas")
            found[name] = held
    measured = {name: each for name, each in found.items() if each.counts is not None and each.counts.numel()}
    loads = torch.stack([each.sum_counts() for each in measured.values()]).tolist() if measured and replicas else []
    busiest = {}
    for (name, each), load in zip(measured.items(), loads, strict=False):
        of_ranks = each.place(load, replicas).loads(load)
        busiest[name] = max(of_ranks) * len(of_ranks) / max(sum(of_ranks), 1)
    for earlier, later in pairwise(found.values()):
        earlier.following = later
    for name, each in found.items():
        if name not in busiest:
            each.placed, each.counts = None, torch.empty(0, device="cpu") if replicas else None
    return busiest
