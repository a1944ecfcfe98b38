# SPDX-License-Identifier: Apache-2.0
"""The routers of a mixture of experts in a step, as numbers for the log and the screen."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stretto.models.moe import RoutingStatistics

NUMBERS_OF_ROUTER = 5


@dataclass(frozen=True)
class ExpertMetrics:
    """A step's routing, over all its micro-batches and ranks. Lists have a number for each block that has experts.

    loads: the tokens of the fullest expert, as a multiple of the mean expert. dropped: choices that found no slot.
    bias_ranges: the largest bias minus the smallest. balance_loss, z_loss: with their coefficients, of all blocks
    together; they are not in the step's loss.
    """

    loads: tuple[float, ...]
    dropped: tuple[int, ...]
    bias_ranges: tuple[float, ...]
    balance_loss: float
    z_loss: float

    @classmethod
    def of(cls, numbers: list[list[float]]) -> "ExpertMetrics":
        """Read the rows of `pack`."""
        loads, dropped, ranges, balance, z = zip(*numbers, strict=True)
        return cls(loads, tuple(map(int, dropped)), ranges, sum(balance), sum(z))

    def as_line(self) -> dict[str, Any]:
        """The step's entries in metrics.jsonl."""
        return {
            "expert_load": list(self.loads),
            "dropped_tokens": list(self.dropped),
            "bias_range": list(self.bias_ranges),
            "balance_loss": self.balance_loss,
            "z_loss": self.z_loss,
        }

    def as_scalars(self) -> dict[str, float]:
        """The step's numbers for TensorBoard and Weights & Biases; blocks are numbered among those with experts."""
        loads = {f"experts/load_{number}": load for number, load in enumerate(self.loads)}
        return loads | {
            "experts/dropped_tokens": sum(self.dropped),
            "experts/bias_range": max(self.bias_ranges),
            "experts/balance_loss": self.balance_loss,
            "experts/z_loss": self.z_loss,
        }

    def __str__(self) -> str:
        """Describe in a line the highest load of any block, and the dropped tokens if there are any."""
        dropped = sum(self.dropped)
        return f"load {max(self.loads):.2f}  " + (f"dropped {dropped:,}  " if dropped else "")


def pack(statistics: RoutingStatistics) -> Tensor:
    """The numbers of `ExpertMetrics`, fp64 [routers, NUMBERS_OF_ROUTER], on the device."""
    counts, biases = statistics.counts, statistics.biases.double()
    loads = counts.amax(1) / counts.mean(1).clamp(min=torch.finfo(torch.float64).tiny)
    ranges = biases.amax(1) - biases.amin(1)
    return torch.cat((torch.stack((loads, statistics.dropped.sum(1), ranges), dim=1), statistics.losses), dim=1)
