"""The optimizer of embedding tables: in the fused operator's backward pass, or one of torch's kind after it."""

from typing import Literal

import torch
from torch import Tensor

from stretto.optim import RowWiseAdagrad
from stretto.parallel import ShardedTables
from stretto.parallel.recsys.pooled_exchange import FusedUpdate

TableOptimizerKind = Literal["rowwise-adagrad", "sgd"]


class TableOptimizer:
    """Updates this rank's tables. A rank without tables has one too.

    `set_lr` comes before the backward pass, which may already be what updates; `step` after it. `states` are row-wise
    Adagrad's sums, [rows] of each table in order of number, wherever they are kept; none for SGD.
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
        """The learning rate of the updates that follow."""
        if self._settings is not None:
            self._settings[0].fill_(lr)
        if self._inner is not None:
            for group in self._inner.param_groups:
                group["lr"] = lr

    def step(self) -> None:
        """Update the tables, if the backward pass has not, and drop their gradients."""
        if self._inner is not None:
            self._inner.step()
            self._inner.zero_grad()
