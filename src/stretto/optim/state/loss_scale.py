# SPDX-License-Identifier: Apache-2.0
"""Dynamic loss scaling for fp16: the loss is multiplied before the backward pass, and gradients divided in the step."""

from dataclasses import dataclass

import torch
from torch import Tensor

GROWTH = 2.0
BACKOFF = 0.5


@dataclass(frozen=True)
class LossScaleOptions:
    """initial: of the scale, a power of two. interval: steps without an overflow after which the scale is doubled."""

    initial: float = 65536.0
    interval: int = 2000

    def __post_init__(self) -> None:
        if not self.initial >= 1:
            raise ValueError(f"the initial loss scale is {self.initial}, but must be at least 1")
        if self.interval < 1:
            raise ValueError(f"the loss scale grows every {self.interval} steps, but must be every 1 or more")


class LossScale:
    """The scale, which adapts on the device: halved after an overflow, doubled after `interval` steps without one.

    All ranks see the same norm of the gradient, and so the same overflows, and keep the same scale. value: fp32 [1].
    steps: fp32 [1], steps since the last change.
    """

    def __init__(self, options: LossScaleOptions, device: torch.device) -> None:
        self.options = options
        self.value = torch.tensor([options.initial], dtype=torch.float32, device=device)
        self.steps = torch.zeros(1, dtype=torch.float32, device=device)

    def apply(self, loss: Tensor) -> Tensor:
        """The loss times the scale, for the backward pass. fp32, since scaled losses exceed fp16's range."""
        return loss.float() * self.value[0]

    @torch.no_grad()
    def update(self, is_overflow: Tensor) -> None:
        """Adapt the scale after a step. is_overflow: bool, 0-dim, on the device."""
        steps = torch.where(is_overflow, 0, self.steps + 1)
        grows = steps >= self.options.interval
        factor = torch.where(is_overflow, BACKOFF, torch.where(grows, GROWTH, 1.0))
        self.value.mul_(factor).clamp_(min=1.0, max=2.0**120)
        self.steps.copy_(torch.where(grows, 0, steps))
