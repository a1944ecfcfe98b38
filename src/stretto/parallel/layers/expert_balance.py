# SPDX-License-Identifier: Apache-2.0
"""Balances the loads of ranks that hold different experts, from step to step."""

from collections.abc import Mapping

import torch
from torch import nn

from stretto.parallel.layers.experts import ParallelExperts


def balance_experts(model: nn.Module, replicas: int = 1) -> Mapping[str, float]:
    """Replicate hot experts in the next steps, by their loads since the last call; call it after each optimizer step.

    model: of `parallelize`, with experts divided among ranks (expert > 1). replicas: how many experts of other ranks
    each rank may hold beside its own; 0 ends it. The first call begins to measure. In each forward pass the weights of
    replicas are sent to their ranks, and in the backward pass their gradients home; parameters, their gradients and the
    optimizer's states stay as they are. Losses differ by rounding alone, and with expert_reduce="choice" a token's
    outputs are added in the same order. The host waits for the device once. All ranks call it.

    Returns, of each module, the load of the busiest rank over the mean with these replicas, for the measured loads.
    ValueError for fewer than 0 replicas, and for experts with biases.
    """
    if replicas < 0:
        raise ValueError(f"balance_experts: a rank holds 0 or more replicas, not {replicas}")
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, ParallelExperts) and module.replicas is not None
    }
    for name, module in found.items():
        if module.has_biases:
            raise ValueError(f"balance_experts: {name} has biases, of which there are no replicas")
    measured = {
        name: module.replicas
        for name, module in found.items()
        if module.replicas is not None and module.replicas.counts is not None and module.replicas.counts.numel()
    }
    loads = torch.stack([each.sum_counts() for each in measured.values()]).tolist() if measured and replicas else []
    busiest = {}
    for (name, each), load in zip(measured.items(), loads, strict=False):
        of_ranks = each.place(load, replicas).loads(load)
        busiest[name] = max(of_ranks) * len(of_ranks) / max(sum(of_ranks), 1)
    for name, module in found.items():
        if module.replicas is not None and name not in busiest:
            module.replicas.placement = None
            module.replicas.counts = torch.empty(0) if replicas else None
    return busiest
