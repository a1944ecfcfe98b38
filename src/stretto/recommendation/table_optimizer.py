# SPDX-License-Identifier: Apache-2.0
"""Row-wise Adagrad or SGD of embedding tables, by the fused operator's backward pass or after it."""

from typing import Literal

import torch
from torch import Tensor

from stretto.optim import RowWiseAdagrad
from stretto.recommendation.pooled_exchange import FusedUpdate
from stretto.recommendation.tables import ShardedTables

TableOptimizerKind = Literal["rowwise-adagrad", "sgd"]


class TableOptimizer:
    """Updates this rank's embedding tables: in the fused operator's backward pass, or in `step` after it.

    Call `set_lr` before the backward pass, and `step` after it. Every rank has one, also a rank without tables. states:
    row-wise Adagrad's sums, [rows] of each table in order of table number; empty for SGD.
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
        """Set the learning rate of the next updates."""
        if self._settings is not None:
            self._settings[0].fill_(lr)
        if self._inner is not None:
            for group in self._inner.param_groups:
                group["lr"] = lr

    def step(self) -> None:
        """Update the tables and drop their gradients, unless the backward pass has updated them."""
        if self._inner is not None:
            self._inner.step()
            self._inner.zero_grad()
