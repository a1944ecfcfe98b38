# SPDX-License-Identifier: Apache-2.0
"""`EmbeddingAllToAll`: this rank's tables as a module, trained by a torch optimizer or by a fused one in backward."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.ops.checks import find_name
from stretto.ops.embedding.fused_optimizer import OPTIMIZERS, TableUpdate, embedding_all_to_all_updating
from stretto.ops.embedding.operator import embedding_all_to_all
from stretto.ops.embedding.placement import require_mode
from stretto.ops.embedding.table_set import require_shape
from stretto.ops.workspace import find_kept


class EmbeddingAllToAll(nn.Module):
    """This rank's tables, looked up for the global batch by `embedding_all_to_all`.

    shapes: (rows, dim) of each table; a rank may have none. All ranks of the group make their modules in one order.
    optimizer: with None, `tables` are parameters with gradients (sparse ones with sparse=True). With "sgd" or "adagrad"
    (row-wise; see `embedding_all_to_all_update`), the backward pass itself updates the rows that were looked up: then
    `tables` need no gradients, and no other optimizer should have them. learning_rate, epsilon: the fused optimizer's;
    `set_learning_rate` changes the learning rate, also for a captured CUDA graph. mode, checks: as in
    `embedding_all_to_all`.

    Rows start uniformly distributed within +-1 / sqrt(rows) (`reset_parameters`; call it after `to_empty` if the module
    was made on the meta device). dtype is the tables': settings and states are fp32, and stay so when the module is
    moved to another dtype. ValueError for invalid tables or optimizers.
    """

    settings: Tensor

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        group: dist.ProcessGroup | None = None,
        *,
        mode: str = "sum",
        optimizer: str | None = None,
        learning_rate: float = 0.01,
        epsilon: float = 1e-8,
        sparse: bool = False,
        checks: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if optimizer is not None and optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer is None or one of {', '.join(OPTIMIZERS)}, not {optimizer!r}")
        if optimizer is not None and sparse:
            raise ValueError(f"optimizer={optimizer!r} makes no gradients, so none can be sparse: leave sparse out")
        if not (learning_rate >= 0 and epsilon >= 0):
            raise ValueError(f"learning_rate is {learning_rate} and epsilon {epsilon}, but both must be at least 0")
        require_mode(mode)
        for place, (rows, dim) in enumerate(shapes):
            require_shape(place, rows, dim, dtype or torch.get_default_dtype())
        self.name = _find_new_name(group)
        self.group, self.mode, self.optimizer = group, mode, optimizer
        self.sparse, self.checks = sparse, checks
        self._rates = learning_rate, epsilon
        self.tables = nn.ParameterList(
            nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=optimizer is None)
            for shape in shapes
        )
        self.register_buffer("settings", torch.empty(2, dtype=torch.float32, device=device), persistent=False)
        for place, (rows, _) in enumerate(shapes if optimizer == "adagrad" else ()):
            self.register_buffer(f"state_{place}", torch.empty(rows, dtype=torch.float32, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new rows, zero the states, and restore the learning rate that the module was made with."""
        for table in self.tables:
            nn.init.uniform_(table, -(len(table) ** -0.5), len(table) ** -0.5)
        for state in self.states:
            nn.init.zeros_(state)
        for place, rate in enumerate(self._rates):
            nn.init.constant_(self.settings[place], rate)

    @property
    def states(self) -> list[Tensor]:
        """Return adagrad's row-wise states, fp32 [rows] each."""
        count = len(self.tables) if self.optimizer == "adagrad" else 0
        return [getattr(self, f"state_{place}") for place in range(count)]

    def set_learning_rate(self, rate: float) -> None:
        """Set the fused optimizer's learning rate, for the backward passes from now on."""
        self.settings[0] = rate

    def forward(
        self, indices: Tensor, offsets: Tensor, *, weights: Tensor | None = None, batch: int | None = None
    ) -> Tensor:
        """Look up; returns [global batch / world, sum of all ranks' dims]. Arguments as in `embedding_all_to_all`."""
        options: dict[str, Any] = {
            "weights": weights,
            "mode": self.mode,
            "batch": batch,
            "name": self.name,
            "checks": self.checks,
        }
        # The same as list(self.tables), which takes microseconds for each table.
        tables = [table for table in self.tables._parameters.values() if table is not None]
        if self.optimizer is None or not torch.is_grad_enabled():
            return embedding_all_to_all(indices, offsets, tables, self.group, sparse=self.sparse, **options)
        update = TableUpdate(self.optimizer, self.settings, self.states)
        return embedding_all_to_all_updating(indices, offsets, tables, self.group, update, **options)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move as `nn.Module` does (`to`, `half`, ...), but keep settings and states in fp32, which updates take."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self

    def extra_repr(self) -> str:
        """Return the mode and the optimizer."""
        return f"mode={self.mode!r}, optimizer={self.optimizer!r}"


def _find_new_name(group: dist.ProcessGroup | None) -> str:
    """Return a name that no other module of the group has; equal on all ranks, which make modules in one order."""
    return f"module {next(find_kept(find_name(group), torch.device('cpu'), 'embedding modules', itertools.count))}"
