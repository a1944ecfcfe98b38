# SPDX-License-Identifier: Apache-2.0
"""The optimizer of a model's shards (AdamW, SGD), and the learning-rate schedule."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

from stretto.huggingface.fused_weights import fused_matrices
from stretto.models import GPTConfig
from stretto.optim import AdamW
from stretto.optim.averages import move_averages
from stretto.optim.guard import skipping_after_failure
from stretto.optim.muon import DEFAULT_MOMENTUM, Muon, RowParts, hidden_matrices
from stretto.optim.state.updates import AVERAGE
from stretto.parallel.comm.gradient_norm import scale_gradients
from stretto.parallel.grid import Grid
from stretto.parallel.layout import GRAD, TensorOnGrid, check_is_sharded, has_layout, layout_of, shard_of
from stretto.parallel.low_precision_weights import share_copy
from stretto.parallel.sharded_parameter import ParameterShard
from stretto.parallel.state import state_of
from stretto.train.config.options import RunOptions

logger = logging.getLogger(__name__)


class ShardOptimizer:
    """A torch.optim.Optimizer over this rank's shards of a model's parameters, as plain tensors.

    On DTensors every operation would be dispatched through their placements, which slows each step of a small model and
    the first step of any. `make` takes the parameter groups and returns an elementwise optimizer (AdamW, SGD), so that
    each rank can update its own shards: a pipeline stage may have none; or `stretto.optim.Muon` over `matrices`, names
    of parameters with their row parts, which are a group that names their layouts. `weight_decay` applies to matrices,
    and not to vectors (norms and biases). Frozen parameters are in it, too: they are updated once they have
    gradients, and have no state before. `average`: decay of the parameters' exponential moving averages, which are
    state, too, from the first step on; None keeps none.
    """

    def __init__(
        self,
        model: nn.Module,
        make: Callable[[list[dict[str, Any]]], Optimizer],
        *,
        weight_decay: float,
        matrices: Mapping[str, Sequence[RowParts]] | None = None,
        average: float | None = None,
    ) -> None:
        self.average = average
        parameters = dict(model.named_parameters())
        if any(isinstance(parameter, DTensor) for parameter in parameters.values()):
            for name, parameter in parameters.items():
                if parameter.requires_grad:
                    check_is_sharded(name, parameter)
        # Those of integers (quantized ones) can never have a gradient.
        self.parameters = {n: p for n, p in parameters.items() if p.is_floating_point() or p.is_complex()}
        # A shard shares its parameter's memory, so the optimizer updates the model.
        self._shards = {name: ParameterShard(local_shard(p)) for name, p in self.parameters.items()}
        for name, parameter in self.parameters.items():
            share_copy(parameter, self._shards[name])
        others = [shard for name, shard in self._shards.items() if name not in (matrices or {})]
        groups: list[dict[str, Any]] = [
            {"params": [s for s in others if s.dim() >= 2], "weight_decay": weight_decay},
            {"params": [s for s in others if s.dim() < 2], "weight_decay": 0.0},
        ]
        if matrices:
            wholes = (self.parameters[name] for name in matrices)
            groups.append(
                {
                    "params": [self._shards[name] for name in matrices],
                    "weight_decay": weight_decay,
                    "use_muon": True,
                    "row_parts": list(matrices.values()),
                    "layouts": [layout_of(each) if has_layout(each) else None for each in wholes],
                }
            )
        # Torch refuses an empty list.
        nothing = {"params": [nn.Parameter(torch.empty(0, device="cpu"))], "weight_decay": 0.0}
        self.inner = make([group for group in groups if group["params"]] or [nothing])
        state = state_of(model)
        if matrices and isinstance(self.inner, Muon) and state is not None and state.grid.size("pipe") == 1:
            self.inner.overlap_with(model, [self.parameters[name] for name in matrices])

    @property
    def name(self) -> str:
        """The optimizer's name in configurations and checkpoints: "adamw", "muon" or "sgd"."""
        return type(self.inner).__name__.lower()

    def step(self, lr: float | Tensor, scale: Tensor | None = None, skip: Tensor | None = None) -> None:
        """Update the parameters from their gradients times `scale`, at learning rate `lr`, and drop the gradients.

        Both may be 0-dim tensors on the parameters' device. skip: bool, 0-dim, on the device; where it is true, nothing
        but the gradients changes. Fused optimizers decide that on the device. Raises ValueError if the model was
        converted after this optimizer was made.
        """
        if isinstance(lr, Tensor) and isinstance(self.inner, SGD):
            lr = lr.float()  # torch's fused kernel reads nothing else
        for group in self.inner.param_groups:
            group["lr"] = lr
        for name, parameter in self.parameters.items():
            shard, gradient = self._shards[name], GRAD.__get__(parameter)
            shard.requires_grad_(parameter.requires_grad)
            shard.grad = None if gradient is None else local_shard(gradient)
            if gradient is not None and shard.data_ptr() != local_shard(parameter).data_ptr():
                raise ValueError(
                    f"{name} was converted or moved (model.to, .double) after its optimizer was made, which would "
                    "update the old numbers: make the optimizer afterwards"
                )
        if skip is not None and not self._is_fused():
            if bool(skip):
                self._drop_gradients()
                return
            skip = None
        shards = [shard for shard in self._shards.values() if shard.grad is not None] if self.average else []
        before = {shard: shard.detach().clone() for shard in shards if AVERAGE not in self.inner.state[shard]}
        if isinstance(self.inner, AdamW):
            self.inner.step(scale=scale, skip=skip)
        else:
            if skip is not None:
                self._make_momenta()
            if scale is not None:
                scale_gradients((shard.grad for shard in self._shards.values() if shard.grad is not None), scale)
            with skipping_after_failure(self.inner, skip):
                self.inner.step()
        for shard, weight in before.items():  # now that the optimizer, which looks for any, has made its own state
            self.inner.state[shard][AVERAGE] = weight
        if shards and isinstance(self.inner, Muon):
            self.inner.synchronize()
        if shards and self.average is not None:
            averages, weights = [self.inner.state[shard][AVERAGE] for shard in shards], [s.detach() for s in shards]
            move_averages(averages, weights, self.average, skip)
        self._drop_gradients()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Have the parameters be their averages, where there are any. It takes the memory of one more shard."""
        self._exchange_averages()
        try:
            yield
        finally:
            self._exchange_averages()

    @torch.no_grad()
    def _exchange_averages(self) -> None:
        if isinstance(self.inner, Muon):
            self.inner.synchronize()
        for shard in self._shards.values():
            if (average := self.inner.state[shard].get(AVERAGE)) is not None:
                weight = shard.detach().clone()
                shard.detach().copy_(average)
                average.copy_(weight)

    def _drop_gradients(self) -> None:
        self.inner.zero_grad(set_to_none=True)
        for parameter in self.parameters.values():
            parameter.grad = None

    def _is_fused(self) -> bool:
        return all(group.get("fused") for group in self.inner.param_groups)

    def _make_momenta(self) -> None:
        """Make SGD's momenta, of zeros: torch allocates them in the first step, and leaves them unset if it skips."""
        for group in self.inner.param_groups:
            for shard in group["params"] if group.get("momentum") else ():
                if shard.grad is not None and self.inner.state[shard].get("momentum_buffer") is None:
                    self.inner.state[shard]["momentum_buffer"] = torch.zeros_like(shard, requires_grad=False)

    def state(self, name: str) -> dict[str, Tensor]:
        """The state of one parameter, by key: tensors sharded like the parameter, and 0-dim step counts."""
        return self.inner.state[self._shards[name]]

    def make_slot(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate a zeroed state tensor of the whole shape `shape`: a shard like the parameter's, or a count for ().

        dtype: of a count. A shard has its parameter's dtype, even if a checkpoint has another: the optimizer does not
        mix dtypes.
        """
        shard = self._shards[name]
        if shape:
            return torch.zeros_like(shard, requires_grad=False)
        # The count is on the host, unless a fused kernel reads it.
        return torch.zeros((), dtype=dtype, device=shard.device if self._is_fused() else "cpu")


def build_optimizer(
    model: nn.Module,
    options: RunOptions,
    *,
    writes_copies: bool = False,
    average: float | None = None,
    grid: Grid | None = None,
) -> ShardOptimizer:
    """Build the optimizer that a run's options name: AdamW, SGD with momentum, or Muon for the hidden matrices.

    writes_copies: AdamW also writes the weights' low-precision copies (`stretto.optim.AdamW`). average:
    decay of the weights' moving averages. grid: the model's, for Muon.
    """
    is_cuda = any(parameter.is_cuda for parameter in model.parameters())
    matrices = None
    if options.optimizer == "muon":
        matrices = {name: find_row_parts(model, name) for name in hidden_matrices(model)}

    def make(groups: list[dict[str, Any]]) -> Optimizer:
        if options.optimizer == "sgd":
            return SGD(groups, lr=options.lr, momentum=options.momentum, fused=is_cuda)
        betas = (options.beta1, options.beta2)
        if matrices is not None:
            momentum = options.momentum or DEFAULT_MOMENTUM
            return Muon(groups, lr=options.lr, momentum=momentum, betas=betas, eps=options.eps, grid=grid)
        return AdamW(groups, lr=options.lr, betas=betas, eps=options.eps, writes_copies=writes_copies)

    return ShardOptimizer(model, make, weight_decay=options.weight_decay, matrices=matrices, average=average)


def find_row_parts(model: nn.Module, name: str) -> tuple[RowParts, ...]:
    """The matrices that a weight fuses: queries, keys and values, of a GPT or a known family; gate and up.

    Of a weight that is stored [in, out], parts of its columns. Warns of one whose name says that it is fused, and
    nothing how: it is one matrix.
    """
    config, parameter = getattr(model, "config", None), model.get_parameter(name)
    if isinstance(config, GPTConfig) and name.endswith(".qkv.weight"):
        queries, dim = config.heads // config.num_kv_heads, config.head_dim
        edges = 0, queries * dim, (queries + 1) * dim, (queries + 2) * dim
        return tuple(RowParts(start, stop, edges[-1]) for start, stop in pairwise(edges))
    found = fused_matrices(model, name, parameter.shape)
    if not found.is_known:
        logger.warning("Muon takes %s %s for one matrix: how it fuses several is not known", name, [*parameter.shape])
    if not found.is_transposed:
        return tuple(RowParts(*each) for each in found.ranges)
    columns = parameter.shape[-1]
    return tuple(RowParts(*each, dim=-1) for each in found.ranges or ((0, columns, columns),))


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, which shares its memory, or a plain tensor itself. Detached."""
    if isinstance(tensor, TensorOnGrid):
        return shard_of(tensor)
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def learning_rate(step: int, options: RunOptions) -> float:
    """The learning rate of `step` (the first is 1): linear warm-up to `lr`, then the schedule.

    schedule: "cosine" and "linear" decay to `min_lr` over all remaining steps; "wsd" (warm-up, stable, decay) keeps
    `lr` and decays linearly over the last `decay_steps` (None: a tenth of all steps); "constant" keeps `lr`.

    The last warm-up step and the first step after it use `lr` itself. A decay reaches `min_lr` after the last of
    `steps`, so no step is wasted at a rate of zero.
    """
    lr, begin, steps = options.lr, options.warmup_steps, options.steps
    if step <= begin:
        return lr * (step / begin)
    if options.schedule == "constant":
        return lr
    if options.schedule == "wsd":
        begin = max(steps - (-(-steps // 10) if options.decay_steps is None else options.decay_steps), begin)
    progress = min(max(step - 1 - begin, 0) / max(steps - begin, 1), 1.0)
    weight = 0.5 * (1.0 + math.cos(math.pi * progress)) if options.schedule == "cosine" else 1.0 - progress
    return lr * weight + options.min_lr * (1.0 - weight)
