# SPDX-License-Identifier: Apache-2.0
"""Executors of an optimizer step: they run the forward and backward passes of its micro-batches, then the update.

A task (`train.task`) gives the pieces of a step as `StepFunctions`; an executor decides when each of them runs:

- `AccumulatingExecutor` runs one micro-batch after another and accumulates gradients.
- `PipelineExecutor` runs them through pipeline stages (`stretto.parallel.Pipeline`).
- `CudaGraphExecutor` replays another executor's whole step as one CUDA graph.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stretto.models.moe import routers, scale_losses
from stretto.parallel import CapturedStep, Pipeline, gather_once, micro_batch_of, no_sync


@dataclass(frozen=True)
class StepFunctions:
    """The functions of a step.

    compute_loss: takes the tensors of a micro-batch and returns its part of the step's loss, a 0-dim tensor with a
    graph. update: takes the learning rate and the step's loss (0-dim, unscaled), updates the parameters from their
    gradients, drops the gradients, and returns the gradient's norm, a 0-dim tensor. Neither may wait for the GPU.
    scale_loss: multiplies a loss before its backward pass.
    """

    model: nn.Module
    compute_loss: Callable[..., Tensor]
    update: Callable[[float | Tensor, Tensor], Tensor]
    scale_loss: Callable[[Tensor], Tensor] | None = None


class StepExecutor(ABC):
    """Runs optimizer steps. All ranks call it equally often, with tensors of the same shapes."""

    @abstractmethod
    def run(
        self, batch: Sequence[Tensor], lr: float | Tensor, dropout_seed: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run one step on this rank's part of the batch, whose rows are dim 0 of the first tensor.

        Returns the sum of the micro-batches' losses (float64) and the gradient's norm, 0-dim, on the device.
        dropout_seed: seeds torch before each micro-batch; None for a model without dropout.
        """

    @abstractmethod
    def close(self) -> None:
        """Free what must not outlive the process group. The executor cannot run afterwards."""


class AccumulatingExecutor(StepExecutor):
    """Runs micro-batches in order and accumulates their gradients, which the last backward pass sums over the ranks.

    micro_batch: rows of a micro-batch; the tensors of a batch are then split along dim 0. None: the batch is not split,
    and its tensors may have any shapes. gathers_once: weights are gathered over z once, for all micro-batches.
    """

    def __init__(self, functions: StepFunctions, *, micro_batch: int | None = None, gathers_once: bool = False) -> None:
        self._functions: StepFunctions | None = functions
        self._micro_batch = micro_batch
        self._gathers_once = gathers_once

    def run(
        self, batch: Sequence[Tensor], lr: float | Tensor, dropout_seed: int | None = None
    ) -> tuple[Tensor, Tensor]:
        functions = self._functions
        if functions is None:
            raise ValueError("this executor was closed")
        model, rows, device = functions.model, len(batch[0]), batch[0].device
        has_routers = any(True for _ in routers(model))
        total = torch.zeros((), dtype=torch.float64, device=device)
        with gather_once(model) if self._gathers_once else nullcontext():
            for first, micro_batch in self._micro_batches(batch):
                is_last = first + len(micro_batch[0]) == rows
                # All ranks draw the same seeds, and those of a resumed run are those of an uninterrupted one. Masks of
                # micro-batches differ because they depend on the rows of the global batch.
                if dropout_seed is not None:
                    torch.manual_seed(dropout_seed)
                if has_routers:
                    share = torch.full((), len(micro_batch[0]) / rows, dtype=torch.float64, device=device)
                    scale_losses(model, share if functions.scale_loss is None else functions.scale_loss(share))
                with nullcontext() if is_last else no_sync(model), micro_batch_of(model, rows, first):
                    loss = functions.compute_loss(*micro_batch)
                    (loss if functions.scale_loss is None else functions.scale_loss(loss)).backward()
                total += loss.detach()
        return total, functions.update(lr, total)

    def close(self) -> None:
        self._functions = None  # they usually refer to the executor's owner: no cycle keeps the model in memory

    def _micro_batches(self, batch: Sequence[Tensor]) -> Iterator[tuple[int, Sequence[Tensor]]]:
        """The first row of each micro-batch, and its tensors."""
        if self._micro_batch is None:
            yield 0, batch
            return
        parts = zip(*(tensor.split(self._micro_batch) for tensor in batch), strict=True)
        for number, micro_batch in enumerate(parts):
            yield number * self._micro_batch, micro_batch


class PipelineExecutor(StepExecutor):
    """Runs micro-batches through the stages of a pipeline.

    arguments: takes the tensors of a batch, and returns the arguments of the model's forward for it.
    """

    def __init__(
        self, functions: StepFunctions, pipeline: Pipeline, arguments: Callable[..., Mapping[str, Any]]
    ) -> None:
        self._functions: StepFunctions | None = functions
        self._pipeline = pipeline
        self._arguments = arguments

    def run(
        self, batch: Sequence[Tensor], lr: float | Tensor, dropout_seed: int | None = None
    ) -> tuple[Tensor, Tensor]:
        functions = self._functions
        if functions is None:
            raise ValueError("this executor was closed")
        call = self._arguments(*batch)
        loss = self._pipeline.step(seed=dropout_seed, scale_loss=functions.scale_loss, **call)
        return loss, functions.update(lr, loss)

    def close(self) -> None:
        self._functions = None
        self._pipeline.close()


class CudaGraphExecutor(StepExecutor):
    """Captures another executor's step in a CUDA graph and replays it (`stretto.parallel.CapturedStep`).

    It takes no dropout seed: a graph would draw the same masks in every step.
    """

    def __init__(self, inner: StepExecutor) -> None:
        self._captured = CapturedStep(lambda *tensors: inner.run(tensors[:-1], tensors[-1]))

    def run(
        self, batch: Sequence[Tensor], lr: float | Tensor, dropout_seed: int | None = None
    ) -> tuple[Tensor, Tensor]:
        if dropout_seed is not None:
            raise ValueError("a CUDA graph draws the same dropout masks in every step: pass no dropout_seed")
        if not isinstance(lr, Tensor):  # a number would be captured as a constant; fp64, which Python's numbers are
            lr = torch.tensor(lr, dtype=torch.float64, device="cpu").pin_memory().to(batch[0].device, non_blocking=True)
        loss, grad_norm = self._captured(*batch, lr)
        return loss, grad_norm

    def close(self) -> None:
        self._captured.close()


def build_executor(
    functions: StepFunctions, *, micro_batch: int | None = None, cuda_graph: bool = False, gathers_once: bool = False
) -> StepExecutor:
    """Build the executor that a run's options ask for."""
    executor = AccumulatingExecutor(functions, micro_batch=micro_batch, gathers_once=gathers_once)
    return CudaGraphExecutor(executor) if cuda_graph else executor
