"""The optimizer of a run. AdamW and SGD work number by number: each rank updates its own shards, as plain tensors."""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

from stretto.optim import AdamW, RowWiseAdagrad
from stretto.parallel import ShardedTables
from stretto.parallel.low_precision_weights import share_copy
from stretto.parallel.recsys.pooled_exchange import FusedUpdate
from stretto.train.config.options import RunOptions


class ShardOptimizer:
    """A torch.optim.Optimizer over this rank's shards of a model's parameters.

    Over the DTensors themselves every operation would be dispatched through their placements, at a cost that
    a small model feels in each step and any model in its first. `make` is given the parameter groups, and
    returns an optimizer that treats each number on its own (AdamW, SGD, not Muon). Matrices are decayed by
    `weight_decay`; vectors, which are norms and biases, are not.
    """

    def __init__(
        self, model: nn.Module, make: Callable[[list[dict[str, Any]]], Optimizer], *, weight_decay: float
    ) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # A shard shares its parameter's memory: what the optimizer writes, the model has.
        self._shards = {name: nn.Parameter(local_shard(p)) for name, p in self.parameters.items()}
        for name, parameter in self.parameters.items():
            share_copy(parameter, self._shards[name])
        groups = [
            {"params": [s for s in self._shards.values() if s.dim() >= 2], "weight_decay": weight_decay},
            {"params": [s for s in self._shards.values() if s.dim() < 2], "weight_decay": 0.0},
        ]
        self.inner = make([group for group in groups if group["params"]])

    @property
    def name(self) -> str:
        """What configurations and checkpoints call it: "adamw" or "sgd"."""
        return type(self.inner).__name__.lower()

    def step(self, lr: float | Tensor, scale: Tensor | None = None) -> None:
        """Update the parameters by their gradients times `scale`, at learning rate `lr`, and drop the gradients.

        Both may be 0-dim tensors on the parameters' device. ValueError if the model was converted since.
        """
        for group in self.inner.param_groups:
            group["lr"] = lr
        for name, parameter in self.parameters.items():
            if self._shards[name].data_ptr() != local_shard(parameter).data_ptr():
                raise ValueError(
                    f"{name} was converted or moved (model.to, .double) after its optimizer was made, which would "
                    "update the old numbers: make the optimizer afterwards"
                )
            self._shards[name].grad = None if parameter.grad is None else local_shard(parameter.grad)
        if isinstance(self.inner, AdamW):
            self.inner.step(scale=scale)
        else:
            gradients = [shard.grad for shard in self._shards.values() if shard.grad is not None]
            if scale is not None and gradients:
                torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))
            self.inner.step()
        self.inner.zero_grad(set_to_none=True)
        for parameter in self.parameters.values():
            parameter.grad = None

    def state(self, name: str) -> dict[str, Tensor]:
        """The state of one parameter, by key: shards like its own, and 0-dim counts of steps."""
        return self.inner.state[self._shards[name]]

    def make_slot(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A zeroed place for state of a whole `shape`: a shard like the parameter's, or for () a count of steps.

        `dtype` is the count's. A shard has the parameter's, whatever a checkpoint has: the optimizer mixes none.
        """
        shard = self._shards[name]
        if shape:
            return torch.zeros_like(shard, requires_grad=False)
        # The count lives on the host unless a fused kernel reads it.
        is_fused = any(group.get("fused") for group in self.inner.param_groups)
        return torch.zeros((), dtype=dtype, device=shard.device if is_fused else "cpu")


def build_optimizer(model: nn.Module, options: RunOptions, *, writes_copies: bool = False) -> ShardOptimizer:
    """The optimizer that a run's options name: AdamW, or SGD with momentum; fused kernels on a GPU.

    writes_copies: see AdamW.
    """
    is_cuda = any(parameter.is_cuda for parameter in model.parameters())

    def make(groups: list[dict[str, Any]]) -> Optimizer:
        if options.optimizer == "sgd":
            return SGD(groups, lr=options.lr, momentum=options.momentum, fused=is_cuda)
        betas = (options.beta1, options.beta2)
        return AdamW(groups, lr=options.lr, betas=betas, eps=options.eps, writes_copies=writes_copies)

    return ShardOptimizer(model, make, weight_decay=options.weight_decay)


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing its memory; a plain tensor as it is. Detached."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


TableOptimizerKind = Literal["rowwise-adagrad", "sgd"]


class TableOptimizer:
    """Updates this rank's tables. A rank without tables has one too.

    `set_lr` comes before the backward pass, which may already be what updates; `step` after it. `states` are row-wise
    Adagrad's sums, [rows] of each table in order of number, wherever they are kept; none for SGD.
    """

    def __init__(self, tables: ShardedTables, kind: TableOptimizerKind, *, eps: float, device: torch.device) -> None:
        self._weights = [table.get_parameter("weight") for table in tables.values()]
        self._inner: torch.optim.Optimizer | None = None
        self._settings: Tensor | None = None
        self.states: list[Tensor] = []
        if tables.is_fused:
            self._settings = torch.tensor([0.0, eps], dtype=torch.float32, device=device)
            if kind == "rowwise-adagrad":
                self.states = [torch.zeros(len(w), dtype=torch.float32, device=device) for w in self._weights]
            name: Literal["sgd", "adagrad"] = "sgd" if kind == "sgd" else "adagrad"
            tables.fuse_update(FusedUpdate(name, self._settings, tuple(self.states)))
        elif self._weights and kind == "rowwise-adagrad":
            adagrad = self._inner = RowWiseAdagrad(self._weights, eps=eps)
            self.states = [adagrad.sums(weight) for weight in self._weights]
        elif self._weights:
            self._inner = torch.optim.SGD(self._weights)

    def set_lr(self, lr: float) -> None:
        """The learning rate of the updates that follow."""
        if self._settings is not None:
            self._settings[0].fill_(lr)
        if self._inner is not None:
            for group in self._inner.param_groups:
                group["lr"] = lr

    def step(self) -> None:
        """Update the tables, if the backward pass has not, and drop their gradients."""
        if self._inner is not None:
            self._inner.step()
            self._inner.zero_grad()


def learning_rate(step: int, *, lr: float, min_lr: float, warmup_steps: int, steps: int) -> float:
    """The learning rate of `step` (1 is the first): linear warm-up to `lr`, then a cosine down to `min_lr`.

    The last step of the warm-up and the first after it take `lr` itself. The cosine reaches `min_lr` when
    training ends, after `steps`: no step is spent at a rate of zero.
    """
    if step <= warmup_steps:
        return lr * (step / warmup_steps)
    progress = min((step - 1 - warmup_steps) / max(steps - warmup_steps, 1), 1.0)
    share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return lr * share + min_lr * (1.0 - share)
