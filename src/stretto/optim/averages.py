# SPDX-License-Identifier: Apache-2.0
"""Exponential moving averages of weights, which steps that change nothing leave as they are."""

from collections.abc import Mapping

import torch
from torch import Tensor

from stretto.memory import failures
from stretto.optim.state.updates import AVERAGE, History, StepSettings, Update, open_master


def move_averages(averages: list[Tensor], weights: list[Tensor], decay: float, skip: Tensor | None) -> None:
    """average += (1 - decay) * (weight - average), in place, for each average and its weight, of one device.

    Nothing changes where skip (0-dim or [1], on the device; None: never) is not 0, whatever the weights are, nor once a
    wait for another rank has failed: the step has left the weights as they were then, too (`stretto.optim.guard`).
    """
    if not averages:
        return
    failed = failures.find_flag(averages[0].device)
    flags = [(flag != 0).reshape(()) for flag in (skip, failed) if flag is not None]
    if not flags:
        torch._foreach_lerp_(averages, weights, 1 - decay)
        return
    is_kept = torch.stack(flags).any()
    for average, weight in zip(averages, weights, strict=True):
        # Not by a share of 0, which would make NaN of a weight that is not finite.
        average.lerp_(torch.where(is_kept, average, weight), 1 - decay)


class AveragedUpdate(Update):
    """Another update, and a moving average of each fp32 weight, which the store begins with the weight itself."""

    def __init__(self, inner: Update, decay: float) -> None:
        self.inner, self.decay = inner, decay
        self.slots = {**inner.slots, AVERAGE: torch.float32}
        self._skip: Tensor | None = None

    def begin(self, settings: StepSettings, histories: Mapping[int, History], weight_decays: tuple[float, ...]) -> None:
        self.inner.begin(settings, histories, weight_decays)
        self._skip = settings.skip
        for history in histories.values():
            history.has_state |= not self.inner.slots  # of SGD without momentum, whose state are the averages

    def apply(
        self, weight: Tensor, gradient: Tensor, state: Mapping[str, Tensor], *, history: int, segment: int
    ) -> None:
        self.inner.apply(weight, gradient, state, history=history, segment=segment)
        move_averages([state[AVERAGE]], [open_master(weight, state)], self.decay, self._skip)

    def end(self) -> None:
        self.inner.end()
