# SPDX-License-Identifier: Apache-2.0
"""Weights' gradients that `no_sync` accumulates whole over z, until one pass reduce-scatters them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from stretto.parallel.comm.collectives import Pending
from stretto.parallel.comm.gradient_buckets import UnshardedGradient, accumulate, note_state
from stretto.parallel.layout import local
from stretto.parallel.precision import Precision


class UnshardedGradients:
    """Whole gradients by parameter, in one order on all ranks."""

    def __init__(self, precision: Precision) -> None:
        self._precision = precision
        self._kept: dict[nn.Parameter, UnshardedGradient] = {}

    def parameters(self) -> list[nn.Parameter]:
        """Those that have a gradient here."""
        return list(self._kept)

    def keep(self, parameter: nn.Parameter, gradient: Tensor, start: Callable[[Tensor], Pending]) -> None:
        """Add a whole gradient to the sum of earlier micro-batches. `.grad` is zeros until then, if it was None: code
        that drops it drops what is kept here, too. start: begins its reduce-scatter."""
        kept = self.take(parameter)
        if kept is None:
            if parameter.grad is None:
                accumulate(parameter, torch.zeros_like(local(parameter), requires_grad=False))
            sent = self._precision.reduce or gradient.dtype
            total = gradient.to(torch.promote_types(parameter.dtype, self._precision.reduce or parameter.dtype))
            kept = UnshardedGradient(total, sent, start, *note_state(parameter))
        else:
            kept.total.add_(gradient)
        self._kept[parameter] = kept

    def add_to(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        """A gradient with what earlier micro-batches kept whole, of which nothing is kept any more."""
        kept = self.take(parameter)
        return gradient if kept is None else kept.total.add_(gradient).to(kept.dtype)

    def take(self, parameter: nn.Parameter) -> UnshardedGradient | None:
        """Take what earlier micro-batches kept whole; None if nothing, or if `.grad` was dropped since.

        RuntimeError if `.grad` was written to: it does not say whether what is kept is to be changed in the same way.
        """
        kept = self._kept.pop(parameter, None)
        if kept is None or parameter.grad is None:
            return None
        shown, versions = note_state(parameter)
        if shown is not kept.shown or versions != kept.versions:
            raise RuntimeError(
                "a gradient was written to between micro-batches of no_sync(unsharded=True), which accumulates "
                "gradients outside of .grad: drop gradients with zero_grad(set_to_none=True), and change them after "
                "the last micro-batch"
            )
        return kept
