# SPDX-License-Identifier: Apache-2.0
"""Row-wise Adagrad for embedding tables: one number of state for each row (Mudigere et al., 2022, as in FBGEMM)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from stretto.memory import failures


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one sum of squares for each row: the mean of its gradient's squares, added up over the steps.

        sum[row] += mean(grad[row]^2);   weight[row] -= lr * grad[row] / (sqrt(sum[row]) + eps)

    Parameters are [rows, dim], with dense gradients or sparse ones, which touch only the rows that were looked up.
    `state[parameter]["sum"]` is [rows]. Repeated rows of a sparse gradient are added up first, in their order. Sums of
    fp16 and bf16 tables are fp32, and so are their steps, which are rounded at the end. A rank without a table gives no
    parameters.
    """

    def __init__(
        self, params: Iterable[nn.Parameter] | Iterable[dict[str, Any]], lr: float = 1e-2, *, eps: float = 1e-8
    ) -> None:
        if not (lr >= 0 and eps >= 0):
            raise ValueError(f"lr is {lr} and eps is {eps}, but both must be at least 0")
        groups: list[Any] = list(params)
        super().__init__(groups or [{"params": []}], {"lr": lr, "eps": eps})  # torch refuses an empty list
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if parameter.dim() != 2:
                raise ValueError(f"a parameter has shape {list(parameter.shape)}, but must be a table, [rows, dim]")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the tables by their gradients. Returns `closure`'s result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group["lr"], group["eps"])
        return loss

    def _update(self, table: Tensor, gradient: Tensor, lr: float | Tensor, eps: float) -> None:
        sums = self.sums(table)
        if not gradient.is_sparse:
            gradient = failures.unless_failed(gradient.to(sums.dtype), 0.0)
            sums += gradient.square().mean(dim=1)
            table.copy_(table.to(sums.dtype) - lr * gradient / _find_divisors(sums, eps).unsqueeze(1))
            return
        gradient = gradient.to(sums.dtype).coalesce()
        rows, values = gradient.indices()[0], failures.unless_failed(gradient.values(), 0.0)
        seen = sums.index_select(0, rows) + values.square().mean(dim=1)
        sums.index_copy_(0, rows, seen)
        changed = table.index_select(0, rows) + values * (-lr / _find_divisors(seen, eps)).unsqueeze(1)
        table.index_copy_(0, rows, changed.to(table.dtype))

    def sums(self, table: Tensor) -> Tensor:
        """Return a table's state, [rows]; the first call makes it."""
        state = self.state[table]
        if "sum" not in state:
            state["sum"] = table.new_zeros(len(table), dtype=torch.promote_types(table.dtype, torch.float32))
        return state["sum"]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but keep fp32 sums, which torch would cast to their tables' dtype."""
        super().load_state_dict(state_dict)
        places = [place for group in state_dict["param_groups"] for place in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for place, table in zip(places, parameters, strict=True):
            if place in state_dict["state"] and table.dtype.itemsize < torch.float32.itemsize:
                self.state[table]["sum"] = state_dict["state"][place]["sum"].to(table.device, torch.float32, copy=True)


def _find_divisors(sums: Tensor, eps: float) -> Tensor:
    """Return sqrt(sum) + eps of each row; 1 where that is 0, since all of the row's gradients were zeros then."""
    divisors = sums.sqrt() + eps
    return divisors.masked_fill_(divisors == 0, 1.0)
