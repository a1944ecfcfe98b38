"""The look-up whose own backward pass changes the tables: no gradient of a table is ever made."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.ops.embedding.operator import embedding_all_to_all, embedding_all_to_all_update


class TableUpdate(NamedTuple):
    """The optimizer's part of `embedding_all_to_all_update`'s arguments."""

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
    """`embedding_all_to_all`, whose backward pass is `embedding_all_to_all_update`.

    The tables need no gradients. options: weights, mode, batch, name and checks, as there. All ranks call it.
    """
    # The output needs a gradient for something, though no table has one.
    anchor = torch.empty(0, device=offsets.device, requires_grad=True)
    return _LookUpAndUpdate.apply(anchor, indices, offsets, tuple(tables), group, update, options)


class _LookUpAndUpdate(torch.autograd.Function):
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
