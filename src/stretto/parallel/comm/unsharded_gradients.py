# SPDX-License-Identifier: Apache-2.0
"""Weights' gradients that `no_sync` accumulates whole over z, until one pass reduce-scatters them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stretto.parallel.comm.collectives import Pending
from stretto.parallel.comm.gradient_buckets import accumulate, local_gradient
from stretto.parallel.layout import local
from stretto.parallel.precision import Precision


@dataclass(frozen=True)
class _UnshardedGradient:
    """A weight's whole gradient over several micro-batches, before the reduce-scatter over z.

    total: in the parameter's dtype, or a wider one in which gradients are reduced. dtype: in which it is sent. start:
    begins the reduce-scatter. shown, versions: see `_note_state`.
    """

    total: Tensor
    dtype: torch.dtype
    start: Callable[[Tensor, float], Pending]
    shown: Tensor
    versions: tuple[int, int]


class UnshardedGradients:
    """Whole gradients by parameter, in one order on all ranks."""

    def __init__(self, precision: Precision) -> None:
        self._precision = precision
        self._kept: dict[nn.Parameter, _UnshardedGradient] = {}

    def parameters(self) -> list[nn.Parameter]:
        """Those that have a gradient here."""
        return list(self._kept)

    def keep(self, parameter: nn.Parameter, gradient: Tensor, start: Callable[[Tensor, float], Pending]) -> None:
        """Add a whole gradient to the sum of earlier micro-batches. `.grad` is zeros until then, if it was None: code
        that drops it drops what is kept here, too. start: begins its reduce-scatter."""
        kept = self.take(parameter)
        if kept is None:
            if parameter.grad is None:
                accumulate(parameter, torch.zeros_like(local(parameter), requires_grad=False))
            sent = self._precision.reduce or gradient.dtype
            total = gradient.to(torch.promote_types(parameter.dtype, self._precision.reduce or parameter.dtype))
            kept = _UnshardedGradient(total, sent, start, *_note_state(parameter))
        else:
            kept.total.add_(gradient)
        self._kept[parameter] = kept

    def add_to(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        """A gradient with what earlier micro-batches kept whole, of which nothing is kept any more."""
        kept = self.take(parameter)
        return gradient if kept is None else kept.total.add_(gradient).to(kept.dtype)

    def take(self, parameter: nn.Parameter) -> _UnshardedGradient | None:
        """Take what earlier micro-batches kept whole; None if nothing, or if `.grad` was dropped since.

        RuntimeError if `.grad` was written to: it does not say whether what is kept is to be changed in the same way.
        """
        kept = self._kept.pop(parameter, None)
        if kept is None or parameter.grad is None:
            return None
        shown, versions = _note_state(parameter)
        if shown is not kept.shown or versions != kept.versions:
            raise RuntimeError(
                "a gradient was written to between micro-batches of no_sync(unsharded=True), which accumulates "
                "gradients outside of .grad: drop gradients with zero_grad(set_to_none=True), and change them after "
                "the last micro-batch"
            )
        return kept


def _note_state(parameter: nn.Parameter) -> tuple[Tensor, tuple[int, int]]:
    """`.grad`, and numbers that change when it is written to: as a DTensor, and as this rank's shard."""
    gradient = parameter.grad
    assert gradient is not None
    return gradient, (gradient._version, local_gradient(parameter)._version)
