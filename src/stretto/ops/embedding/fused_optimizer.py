# SPDX-License-Identifier: Apache-2.0
"""The fused optimizer: row updates of the tables inside of the backward pass, without making their gradients.

embedding_all_to_all_update      one step on the rows that a forward call has looked up, given its output's gradient
embedding_all_to_all_updating    a look-up whose backward pass calls it
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.ops.embedding.backward import LookupInput, update_tables
from stretto.ops.embedding.operator import agree_on_placement, embedding_all_to_all, find_placement_again
from stretto.ops.embedding.placement import require_input
from stretto.ops.embedding.table_set import accept_tables, find_tables
from stretto.ops.operator import find_name, is_traced

OPTIMIZERS = ("sgd", "adagrad")


def embedding_all_to_all_update(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    tables: Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    optimizer: str,
    settings: Tensor,
    states: Sequence[Tensor] = (),
    weights: Tensor | None = None,
    mode: str = "sum",
    batch: int | None = None,
    name: str = "",
) -> None:
    """Make an optimizer's step on the rows that `embedding_all_to_all` has looked up, without making their gradients.

    grad: [global batch / world, sum of all ranks' dims], of the output. indices to name: as in the forward call, which
    has checked them.
    optimizer: "sgd", or "adagrad", row-wise: a row's state grows by the mean of its gradient's squares, and the row
    changes by -learning rate x gradient / (sqrt(state) + epsilon). settings: fp32 [2] on the device, learning rate and
    epsilon. states: for adagrad, fp32 [rows] of each table. Sums and updates are fp32, then rounded to the table's
    dtype. A table may be given several times, for several features: a row gets one step, of all its lookups.

    All ranks call it, also those without tables. ValueError for other input.
    """
    group_name = find_name(group)
    device, world = offsets.device, dist.get_world_size(group)
    traces = is_traced(grad, indices, offsets, weights, settings, *tables, *states)
    known = (accept_tables if traces else find_tables)(tables, device)
    count = require_input(indices, offsets, len(tables), weights, mode, batch, world)
    if traces:
        count = operator.index(count)
    agreed = known.dims, known.dtype, count, False, indices.dtype
    width, dtype = agree_on_placement(group_name, device, name, *agreed)
    if grad.shape != (count // world, width) or grad.dtype != dtype or grad.device != device:
        raise ValueError(
            f"embedding_all_to_all_update: the output's gradient is {dtype} [{count // world}, {width}] on "
            f"{device}, not {grad.dtype} {list(grad.shape)} on {grad.device}"
        )
    require_optimizer(optimizer, settings, known.rows, states, device)
    if traces:
        detached = [table.detach() for table in tables]
        torch.ops.stretto.embedding_all_to_all_update(
            grad, indices, offsets, detached, list(states), settings, weights, optimizer, mode, count, name, group_name
        )
        return
    lookups = LookupInput(indices, offsets, weights, mode, known.rows, known.dims)
    placement = find_placement_again(group_name, device, known.dims, dtype, count, name)
    with torch.no_grad():
        update_tables(grad, lookups, placement, group_name, known, states, optimizer, settings)
    torch.autograd.graph.increment_version([*tables, *states])


@torch.library.custom_op("stretto::embedding_all_to_all_update", mutates_args=("tables", "states"))
def _embedding_all_to_all_update(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    tables: Sequence[Tensor],
    states: Sequence[Tensor],
    settings: Tensor,
    weights: Tensor | None,
    optimizer: str,
    pooling: str,
    batch: int,
    name: str,
    group: str,
) -> None:
    # pooling is the mode: torch's functionalization has its own argument called `mode`.
    known = find_tables(tables, offsets.device)
    placement = find_placement_again(group, offsets.device, known.dims, grad.dtype, batch, name)
    lookups = LookupInput(indices, offsets, weights, pooling, known.rows, known.dims)
    update_tables(grad, lookups, placement, group, known, states, optimizer, settings)


def require_optimizer(
    optimizer: str, settings: Tensor, rows: Sequence[int], states: Sequence[Tensor], device: torch.device
) -> None:
    """ValueError for an unknown optimizer, or for settings or states that do not fit tables of these rows."""
    name = "embedding_all_to_all_update"
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"{name}: optimizer is one of {', '.join(OPTIMIZERS)}, not {optimizer!r}")
    if settings.shape != (2,) or not _suits(settings, device):
        raise ValueError(
            f"{name}: settings are fp32 [2], contiguous, on {device}: learning rate and epsilon; "
            f"not {_describe(settings)}"
        )
    expected = len(rows) if optimizer == "adagrad" else 0
    if len(states) != expected:
        raise ValueError(f"{name}: {optimizer} of {len(rows)} tables has {expected} states, not {len(states)}")
    for place, (state, count) in enumerate(zip(states, rows, strict=False)):
        if state.shape != (count,) or not _suits(state, device):
            raise ValueError(
                f"{name}: the state of table {place} is fp32 [{count}], contiguous, on {device}, not {_describe(state)}"
            )


def _suits(tensor: Tensor, device: torch.device) -> bool:
    return tensor.dtype == torch.float32 and tensor.device == device and tensor.is_contiguous()


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"


class TableUpdate(NamedTuple):
    """The optimizer's arguments of `embedding_all_to_all_update`."""

    optimizer: str
    settings: Tensor
    states: Sequence[Tensor] = ()


def embedding_all_to_all_updating(
    indices: Tensor,
    offsets: Tensor,
    tables: Sequence[Tensor],
    group: dist.ProcessGroup | None,
    update: TableUpdate,
    **options: Any,
) -> Tensor:
    """Look up as `embedding_all_to_all` does; the backward pass is `embedding_all_to_all_update`. All ranks call it.

    The tables need no gradients. options: weights, mode, batch, name and checks of `embedding_all_to_all`.
    """
    # Autograd must call the backward pass although no table needs a gradient: the output depends on this tensor.
    anchor = torch.empty(0, device=offsets.device, requires_grad=True)
    return _LookUpAndUpdate.apply(anchor, indices, offsets, tuple(tables), group, update, options)


class _LookUpAndUpdate(torch.autograd.Function):
    """Forward: a look-up without gradients. Backward: the update of its tables, which returns no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        indices: Tensor,
        offsets: Tensor,
        tables: tuple[Tensor, ...],
        group: dist.ProcessGroup | None,
        update: TableUpdate,
        options: dict[str, Any],
    ) -> Tensor:
        ctx.tables, ctx.group, ctx.update = tables, group, update
        ctx.options = {key: value for key, value in options.items() if key in ("mode", "batch", "name")}
        ctx.save_for_backward(indices, offsets, options.get("weights"))
        return embedding_all_to_all(indices, offsets, list(tables), group, **options)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        indices, offsets, weights = ctx.saved_tensors
        update: TableUpdate = ctx.update
        embedding_all_to_all_update(
            gradients[0],
            indices,
            offsets,
            list(ctx.tables),
            ctx.group,
            optimizer=update.optimizer,
            settings=update.settings,
            states=list(update.states),
            weights=weights,
            **ctx.options,
        )
        return (None,) * 7
