# SPDX-License-Identifier: Apache-2.0
"""Peers of several benches: DTensor tensor parallelism, FSDP2 with accumulation and offload, torch's pipelining.

All train Stretto's GPT, parallelized in torchtitan's manner: sequence-parallel norms, the vocabulary sharded in the
embedding, the head and the loss, each block compiled by itself, and FSDP2 as `stretto bench train` has it.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from stretto.bench.training.fsdp2 import clip_sharded_grad_norm_, draw_weights, shard_fully
from stretto.bench.training.runs import MAX_NORM, Step, Stepped, compile_blocks, fused_adamw, local_batch
from stretto.bench.training.settings import TrainingWorkload
from stretto.models import GPT, GPTConfig
from stretto.parallel import checkpoint_activations
from stretto.parallel.layers.fused import rotary_angles
from stretto.train.optimizer import local_shard


@dataclass(frozen=True)
class TorchSetup:
    """Options with which torch runs the model.

    frees_weights: reshard_after_forward. reduce_dtype: of FSDP2's gradients on the wire.
    precision: what makes the compute dtype bf16. "fsdp2": FSDP2's mixed precision (on one rank it only casts). For
        tensor parallelism alone also "autocast", and "masters": bf16 weights with fp32 copies in the optimizer.
    is_async: torch's async tensor parallelism, where Inductor fuses a product and its collective into one operator over
        symmetric memory (for compiled models on GPUs).
    """

    is_compiled: bool = False
    frees_weights: bool = False
    reduce_dtype: torch.dtype = torch.float32
    precision: Literal["fsdp2", "autocast", "masters"] = "fsdp2"
    is_async: bool = False


def build_torch(
    workload: TrainingWorkload, model: GPT, mesh: DeviceMesh, device: torch.device, setup: TorchSetup
) -> Step:
    """Build a step of `model`, on `device` or meta, over a mesh of dims ("dp", "tp"), of which either may be 1.

    Raises ValueError where the mesh cannot hold the model or the batch.
    """
    dp, tp = mesh["dp"], mesh["tp"]
    batch = local_batch(workload, dp.get_local_rank(), dp.size(), device)
    if setup.precision == "masters":
        model.to(torch.bfloat16)
    if tp.size() > 1:
        _shard_tensors(model, tp, workload.seq_len)
    if workload.checkpointing:
        checkpoint_activations(model)
    if setup.is_async:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        enable_symm_mem_for_group(tp.get_group().group_name)
    if setup.is_compiled:
        compile_blocks(model, {"_micro_pipeline_tp": True} if setup.is_async else None)
    if setup.precision == "fsdp2":
        shard_fully(model, dp, frees_weights=setup.frees_weights, reduce_dtype=setup.reduce_dtype)
    if any(parameter.is_meta for parameter in model.parameters()):
        draw_weights(model, device)
    is_master = setup.precision == "masters"
    optimizer: Any = (
        MasterWeights(model, workload.learning_rate) if is_master else fused_adamw(model.parameters(), workload)
    )
    cast = partial(torch.autocast, device.type, torch.bfloat16, enabled=setup.precision == "autocast")
    around = loss_parallel if tp.size() > 1 else nullcontext
    tokens, targets = batch

    def step() -> Stepped:
        with around():
            with cast():
                loss = model(tokens, targets, targets.numel())
            loss.backward()
        norm = clip_sharded_grad_norm_(model, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        return Stepped(loss.full_tensor() if isinstance(loss, DTensor) else loss, norm)

    return step


def _shard_tensors(model: GPT, mesh: DeviceMesh, seq_len: int) -> None:
    config, ranks = model.config, mesh.size()
    if config.positions != "rotary" or config.tie_embeddings:
        raise ValueError("the tensor-parallel peer takes rotary positions and untied embeddings")
    for what, count in (("KV heads", config.num_kv_heads), ("tokens of a sequence", seq_len)):
        if count % ranks:
            raise ValueError(f"{count} {what} cannot be cut into {ranks} parts")
    model_plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    block_plan = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None),
            desired_input_layouts=(Replicate(), None),  # rotary angles are replicated
        ),
        "attention.qkv": ColwiseParallel(),  # the fused product is cut between groups of a KV head
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "mlp_norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    if config.activation == "swiglu":
        block_plan["mlp.gate"] = ColwiseParallel()
    # The embedding's output is an AsyncCollectiveTensor. A compiled block silently loses the gradient of such an input
    # (torch 2.13), so the copy makes it a plain tensor.
    model.dropout.register_forward_pre_hook(lambda _, inputs: (inputs[0].clone(),))
    # src_data_rank=None: all ranks hold the same weights, and each takes its shard of its own copy
    parallelize_module(model, mesh, model_plan, src_data_rank=None)
    for block in model.blocks:
        parallelize_module(block, mesh, block_plan, src_data_rank=None)


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


def build_offloaded(
    config: GPTConfig, device: torch.device, *, learning_rate: float
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A GPT under FSDP2 with `CPUOffloadPolicy`, blocks checkpointed, weights freed after use; and AdamW."""
    options = FsdpOptions(learning_rate=learning_rate, frees_weights=True, recompute=True, is_on_host=True)
    return build_fsdp(config, device, options)


class _TorchStage(nn.Module):
    """A part of a GPT's blocks, as the module of a stage of torch.distributed.pipelining."""

    def __init__(self, model: GPT, blocks: range, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(model.blocks[index] for index in blocks)
        self.embedding = model.embedding if is_first else None
        self.norm = model.norm if is_last else None
        self.head = model.head if is_last else None
        self.head_dim = model.config.head_dim

    def forward(self, x: Tensor) -> Tensor:
        angles = rotary_angles(torch.arange(x.shape[1], device=x.device), self.head_dim)
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x, angles)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def build_torch_pipeline(model: GPT, count: int, tokens: Tensor, targets: Tensor) -> Step:
    """A step of all of `count` virtual stages on this rank, a row of tokens [rows, length] a micro-batch."""
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

    share = len(model.blocks) // count
    parts = [
        _TorchStage(model, range(index * share, (index + 1) * share), is_first=index == 0, is_last=index == count - 1)
        for index in range(count)
    ]
    stages = [
        PipelineStage(part, index, count, tokens.device, group=dist.group.WORLD) for index, part in enumerate(parts)
    ]

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    schedule = ScheduleInterleaved1F1B(stages, len(tokens), loss_fn=loss_of)  # type: ignore[arg-type]

    def step() -> Stepped:
        for part in parts:
            part.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        schedule.step(tokens, target=targets, losses=losses)
        norms = torch._foreach_norm([p.grad for part in parts for p in part.parameters() if p.grad is not None])
        return Stepped(torch.stack(losses).mean().detach(), torch.linalg.vector_norm(torch.stack(norms)))

    return step
