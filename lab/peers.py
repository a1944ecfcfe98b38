# SPDX-License-Identifier: Apache-2.0
"""Peers of several benches: Stretto's GPT under FSDP2, with accumulation and offload, and bf16 weights with masters."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from stretto.bench.training.fsdp2 import clip_sharded_grad_norm_
from stretto.bench.training.runs import MAX_NORM, Stepped
from stretto.models import GPT, GPTConfig
from stretto.parallel import checkpoint_activations
from stretto.train.optimizer import local_shard


class MasterWeights:
    """Fused AdamW on fp32 copies of a model's bf16 weights or shards of these."""

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        self._parameters = list(model.parameters())
        self._shards = [local_shard(parameter) for parameter in self._parameters]
        self._masters = [nn.Parameter(shard.float()) for shard in self._shards]
        is_gpu = self._masters[0].is_cuda
        self._optimizer = torch.optim.AdamW(self._masters, lr=learning_rate, fused=True, capturable=is_gpu)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            assert parameter.grad is not None
            master.grad = local_shard(parameter.grad).float()
        self._optimizer.step()
        self._optimizer.zero_grad()
        torch._foreach_copy_(self._shards, list(self._masters))

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


@dataclass(frozen=True)
class FsdpOptions:
    """Options with which FSDP2 trains a GPT over all ranks, with gradients reduced in `dtype`, that of the computation.

    frees_weights: gather weights again in the backward pass. recompute: checkpoint every block's activations.
    is_on_host: parameters, gradients and optimizer state are on the CPU (`CPUOffloadPolicy`).
    """

    dtype: torch.dtype = torch.bfloat16
    learning_rate: float = 1e-5
    frees_weights: bool = False
    recompute: bool = False
    is_on_host: bool = False


def build_accumulating(
    config: GPTConfig, tokens: Tensor, micro_batch: int, device: torch.device, options: FsdpOptions
) -> Callable[[], Stepped]:
    """Build a step over this rank's rows, int64 [rows, seq_len + 1], in micro-batches of `micro_batch` rows.

    Gradients accumulate, unreduced, until the last of them. The loss that a step returns is the mean over these rows.
    """
    if len(tokens) % micro_batch:
        raise ValueError(f"{len(tokens)} rows cannot be cut into micro-batches of {micro_batch}")
    model, optimizer = build_fsdp(config, device, options)
    inputs, targets = tokens[:, :-1].split(micro_batch), tokens[:, 1:].split(micro_batch)
    count = tokens.shape[0] * (tokens.shape[1] - 1)

    def step() -> Stepped:
        total = torch.zeros((), device=device)
        for number, (some, some_targets) in enumerate(zip(inputs, targets, strict=True)):
            model.set_requires_gradient_sync(number == len(inputs) - 1)  # type: ignore[operator]
            loss = model(some.contiguous(), some_targets.contiguous(), count)
            loss.backward()
            total += loss.detach()
        if options.is_on_host:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        else:
            norm = clip_sharded_grad_norm_(model, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return Stepped(total, norm)

    return step


def build_fsdp(
    config: GPTConfig, device: torch.device, options: FsdpOptions
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A GPT under FSDP2 over all ranks, with random weights, and torch's fused AdamW."""
    with torch.device("meta"):
        model = GPT(config)
    if options.recompute:
        checkpoint_activations(model)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    shard = partial(
        fully_shard,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(param_dtype=options.dtype, reduce_dtype=options.dtype),
        reshard_after_forward=options.frees_weights,
        **({"offload_policy": CPUOffloadPolicy()} if options.is_on_host else {}),
    )
    for block in model.blocks:
        shard(block)
    shard(model, reshard_after_forward=False)  # of embedding and head: the backward pass begins with them
    model.to_empty(device="cpu" if options.is_on_host else device)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # drawn on the device: a CPU draws them one by one
            own = local_shard(parameter)
            drawn = torch.empty(own.shape, device=device)
            own.copy_(drawn.normal_(std=0.02) if own.dim() >= 2 else drawn.fill_(1.0))
    return model, torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), fused=True)
