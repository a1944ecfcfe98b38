# SPDX-License-Identifier: Apache-2.0
"""Training steps of Stretto's GPT by torch's FSDP2, in torchtitan's manner: block by block."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from stretto.bench.training.runs import MAX_NORM, Step, Stepped, compile_blocks, fused_adamw, local_batch
from stretto.bench.training.settings import TrainingWorkload
from stretto.models import GPT
from stretto.parallel import checkpoint_activations

Context = Callable[[], AbstractContextManager[object]]


def build_fsdp2(
    workload: TrainingWorkload,
    model: GPT,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    is_compiled: bool,
    frees_weights: bool,
) -> Step:
    """Build a step of `model`, on `device` or meta. frees_weights: reshard_after_forward.

    Raises ValueError where the mesh cannot cut the batch.
    """
    batch = local_batch(workload, mesh.get_local_rank(), mesh.size(), device)
    if workload.checkpointing:
        checkpoint_activations(model)
    if is_compiled:
        compile_blocks(model)
    shard_fully(model, mesh, frees_weights=frees_weights, reduce_dtype=torch.float32)
    draw_weights(model, device)
    return step_of_torch(model, batch, fused_adamw(model.parameters(), workload))


def draw_weights(model: GPT, device: torch.device) -> None:
    """Draw the weights of a model on the meta device; others stay."""
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=device)
        torch.manual_seed(0)
        with torch.no_grad():
            model.apply(model._init_weights)


def step_of_torch(
    model: GPT,
    batch: tuple[Tensor, Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    around: Context = nullcontext,
    around_forward: Context = nullcontext,
) -> Step:
    """A step over tokens and targets, with gradients clipped. around: of both passes; around_forward: of the first."""
    tokens, targets = batch

    def step() -> Stepped:
        with around():
            with around_forward():
                loss = model(tokens, targets, targets.numel())
            loss.backward()
        norm = clip_sharded_grad_norm_(model, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        return Stepped(loss.full_tensor() if isinstance(loss, DTensor) else loss, norm)

    return step


def shard_fully(model: GPT, mesh: DeviceMesh, *, frees_weights: bool, reduce_dtype: torch.dtype) -> None:
    """FSDP2 over each block, the embedding, and the last norm with the head; it computes in bf16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=frees_weights)
    if not model.config.tie_embeddings:  # a shared weight has to belong to the root module
        fully_shard(model.embedding, mesh=mesh, mp_policy=policy, reshard_after_forward=frees_weights)
        fully_shard([model.norm, model.head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=frees_weights)


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
