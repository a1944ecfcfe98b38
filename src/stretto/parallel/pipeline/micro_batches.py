# SPDX-License-Identifier: Apache-2.0
"""Cuts a rank's batch into micro-batches, and finds the factors of their losses in the loss of the batch."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from stretto.axes import LOSS
from stretto.execution import IGNORED_TARGET
from stretto.huggingface.loss import calls_loss_function, compares_with_next
from stretto.huggingface.pretrained_model import is_pretrained_model
from stretto.parallel.comm.collectives import all_reduce
from stretto.parallel.context.sequence_parts import SequenceParts, bind_by_name
from stretto.parallel.grid import Grid
from stretto.parallel.pipeline.actions import PipelineStep
from stretto.parallel.pipeline.activations import tensors_of

_TARGETS = ("labels", "targets")
_DIVISORS = ("num_items_in_batch", "num_targets")


class BatchCutter:
    """Cuts batches of a model into micro-batches of `size` rows.

    averages: whether a rank's loss covers its own rows, and gradients are averaged over the ranks. parts: what cuts
    the model's sequences, on a grid with context.
    """

    def __init__(
        self, model: nn.Module, grid: Grid, size: int, *, averages: bool, parts: SequenceParts | None = None
    ) -> None:
        self.model = model
        self.grid = grid
        self.size = size
        self._averages = averages
        self._parts = parts
        self._signature = inspect.signature(model.forward)

    def cut(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PipelineStep:
        """Cut the arguments of the model's forward, for this rank's rows. ValueError for rows that cannot be."""
        given = bind_by_name(self._signature, args, kwargs)
        rows = next((tensor.shape[0] for tensor in tensors_of(given) if tensor.dim()), None)
        if rows is None:
            raise ValueError("step takes the arguments of the model's forward, and none of them is a tensor with rows")
        size = self.size
        if rows == 0 or rows % size:
            near = max(size, round(rows / size) * size)
            raise ValueError(
                f"micro-batches of {size} rows do not divide the {rows} rows of this rank's batch; {near} would do"
            )

        def cut(first: int) -> Any:
            return tree_map(lambda leaf: leaf[first : first + size] if _has_rows(leaf, rows) else leaf, given)

        calls = [cut(first) for first in range(0, rows, size)]
        name = next((name for name in _TARGETS if _has_rows(given.get(name), rows)), None)
        targets = None if name is None else [call[name] for call in calls]
        has_divisor = any(given.get(name) is not None for name in _DIVISORS)
        return PipelineStep(calls, rows, size, targets, has_divisor, weights=[1 / len(calls)] * len(calls))

    def weigh(self, step: PipelineStep) -> None:
        """Find the factor of each micro-batch's loss in that of the batch.

        If the model's loss takes a divisor, it is the whole batch's number of valid targets, and factors
        are 1. Otherwise a micro-batch's loss is the mean over its own valid targets.
        """
        self._check_counts(step.micro_batches)
        if step.targets is None:
            return
        if step.has_divisor:
            step.weights = [1.0] * step.micro_batches
            return
        is_shifted = is_pretrained_model(self.model) and compares_with_next(self.model)
        if self._parts is not None:
            calls = zip(step.calls, step.targets, strict=True)
            step.targets = [self._parts.cut_targets_of(self.model, *each) for each in calls]
            is_shifted = False
        found = [((part[..., 1:] if is_shifted else part) != IGNORED_TARGET).sum() for part in step.targets]
        mine = torch.stack(found).to(self.grid.device)
        counts = all_reduce(mine.clone(), self.grid.communicator(LOSS))
        total = counts.sum()
        if self._averages:  # a rank's loss covers its own rows, and the mean over ranks is that of the batch
            counts, total = mine, total / self.grid.size(LOSS)
        if (name := self._divisor()) is not None:
            for call in step.calls:
                call[name] = total
            step.weights = [1.0] * step.micro_batches
        else:
            step.weights = list((counts.double() / total).unbind())

    def _check_counts(self, micro_batches: int) -> None:
        """Raise ValueError (on CUDA: fail the kernel that asserts it, later) unless ranks have as many micro-batches.

        With other rows on the ranks that share the loss they would wait for each other.
        """
        ranks = self.grid.size(LOSS)
        if ranks == 1:
            return
        sums = torch.tensor([micro_batches, micro_batches**2], dtype=torch.int64, device=self.grid.device)
        total, squares = all_reduce(sums, self.grid.communicator(LOSS)).unbind()
        differ = total * total != squares * ranks
        text = "all ranks of data, context and z have as many rows in a step"
        if sums.is_cuda:
            torch._assert_async(~differ, text)  # no .item() here: the host would wait for the device
        elif differ:
            raise ValueError(
                f"this rank has {micro_batches} micro-batches in this step, and others have {int(total) / ranks:g} in "
                f"the mean: {text}"
            )

    def _divisor(self) -> str | None:
        """The argument of the model's forward that divides a sum of losses; None if it has none."""
        parameters = self._signature.parameters
        if "num_targets" in parameters:
            return "num_targets"
        takes_others = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        knows = hasattr(getattr(self.model, "loss_function", None), "is_shifted") and calls_loss_function(self.model)
        return "num_items_in_batch" if "num_items_in_batch" in parameters or (takes_others and knows) else None


def _has_rows(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows
