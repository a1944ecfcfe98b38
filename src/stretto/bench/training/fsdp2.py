# SPDX-License-Identifier: Apache-2.0
"""The peer of `stretto bench train`: torch's FSDP2 of Stretto's GPT, each block compiled by itself where asked."""

from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from stretto.bench.training.runs import MAX_NORM, Step, Stepped, local_batch, meta_gpt
from stretto.bench.training.settings import TrainingWorkload
from stretto.models import GPT
from stretto.parallel import checkpoint_activations


def build_fsdp2(
    workload: TrainingWorkload, mesh: DeviceMesh, device: torch.device, *, is_compiled: bool, frees_weights: bool
) -> Step:
    """Build a step over the ranks of a mesh of one dim. Raises ValueError where they do not divide the batch."""
    tokens, targets = local_batch(workload, mesh.get_local_rank(), mesh.size(), device)
    model = meta_gpt(workload.model)
    if workload.checkpointing:
        checkpoint_activations(model)
    for block in model.blocks if is_compiled else ():
        block.compile()
    _shard_fully(model, mesh, frees_weights=frees_weights)
    _draw_weights(model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.learning_rate, fused=True)

    def step() -> Stepped:
        loss = model(tokens, targets, targets.numel())
        loss.backward()
        norm = clip_sharded_grad_norm_(model, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return Stepped(loss.detach(), norm)

    return step


def _shard_fully(model: GPT, mesh: DeviceMesh, *, frees_weights: bool) -> None:
    """Shard the blocks, the embedding, and the last norm with the head, in torchtitan's manner; compute in bf16.

    frees_weights: gather weights again in the backward pass.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=frees_weights)
    if not model.config.tie_embeddings:  # a shared weight has to belong to the root module
        fully_shard(model.embedding, mesh=mesh, mp_policy=policy, reshard_after_forward=frees_weights)
        fully_shard([model.norm, model.head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=frees_weights)


def _draw_weights(model: GPT, device: torch.device) -> None:
    """Allocate the weights of a model on the meta device, and draw them as the model itself does."""
    model.to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        model.apply(model._init_weights)


@torch.no_grad()
def clip_sharded_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Clip sharded gradients in one collective: torch.nn.utils.clip_grad_norm_ without DTensor's dispatch.

    Stretto's own clip sends one message too, so that none of the runs loses time here. Returns the norm.
    """
    alike: dict[int, list[Tensor]] = {}
    for parameter in model.parameters():
        gradient = parameter.grad
        assert isinstance(parameter, DTensor)
        assert isinstance(gradient, DTensor)
        if gradient.placements != parameter.placements:  # of a replicated norm: partial sums
            parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
        replicas = prod(
            size
            for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True)
            if placement.is_replicate()
        )
        alike.setdefault(replicas, []).append(gradient.to_local())
    parts = [
        torch.stack(torch._foreach_norm(some, 2, dtype=torch.float32)).square().sum() / replicas
        for replicas, some in alike.items()
    ]
    total = torch.stack(parts).sum()
    dist.all_reduce(total)
    norm = total.sqrt()
    shards = [shard for some in alike.values() for shard in some]
    torch._foreach_mul_(shards, torch.clamp(max_norm / (norm + 1e-6), max=1.0).to(shards[0].dtype))
    return norm
