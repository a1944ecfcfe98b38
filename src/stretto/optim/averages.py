# SPDX-License-Identifier: Apache-2.0
"""Exponential moving averages of weights, which steps that change nothing leave as they are."""

import torch
from torch import Tensor

from stretto.memory import failures

AVERAGE = "average"  # the key of a parameter's moving average in its state


def move_averages(averages: list[Tensor], weights: list[Tensor], decay: float, skip: Tensor | None) -> None:
    """average += (1 - decay) * (weight - average), in place, for each average and its weight, of one device.

    Nothing changes where skip (0-dim or [1], on the device; None: never) is not 0, whatever the weights are, nor once a
    wait for another rank has failed: the step has left the weights as they were then, too (`stretto.optim.guard`).
    """
    if not averages:
        return
    failed = failures.find_flag(averages[0].device)
    if failed is not None:
        skip = failed != 0 if skip is None else (failed != 0) | (skip != 0)
    if skip is None:
        torch._foreach_lerp_(averages, weights, 1 - decay)
        return
    for average, weight in zip(averages, weights, strict=True):
        # Not by a share of 0, which would make NaN of a weight that is not finite.
        average.lerp_(torch.where(skip != 0, average, weight), 1 - decay)
