# SPDX-License-Identifier: Apache-2.0
"""Pools the global batch's rows of this rank's tables and sends each rank its vectors: the second all-to-all of DLRM.

`pool_and_exchange` runs stretto.ops' fused operator ("kernel") or plain PyTorch's functions ("library"). Nothing else
in training knows of the operator, except what has its backward pass update the tables (`FusedUpdate`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from stretto.parallel.comm.collectives import all_to_all, collective
from stretto.parallel.comm.kept_outputs import keep_output

Implementation = Literal["auto", "kernel", "library"]


@dataclass(frozen=True)
class TableLookups:
    """The look-ups in a rank's tables: bags of the global batch, feature-major.

    indices: [total], rows of the rank's first table for all samples, then of its second. offsets: [tables x global
    batch + 1], where each bag begins. ends: offsets[::global batch] on the host, where each table's begin. batch: the
    global batch. replicated: this rank's samples' look-ups in the tables that every rank has, if there are any.
    """

    indices: Tensor
    offsets: Tensor
    ends: tuple[int, ...]
    batch: int
    replicated: "TableLookups | None" = None

    def pool(self, number: int, table: Tensor, *, sparse: bool = False) -> Tensor:
        """Add up the bags' rows of the `number`th table by PyTorch's function: [batch, dim]."""
        start, stop = self.ends[number : number + 2]
        bags = self.offsets[number * self.batch : (number + 1) * self.batch + 1] - start
        return F.embedding_bag(
            self.indices[start:stop], table, bags, mode="sum", sparse=sparse, include_last_offset=True
        )


@dataclass(frozen=True)
class FusedUpdate:
    """Update of the looked-up rows by the operator's backward pass, in place of gradients; made by `TableOptimizer`.

    The arguments of `embedding_all_to_all_update` of these names.
    """

    optimizer: str
    settings: Tensor
    states: tuple[Tensor, ...] = ()
    clock: Tensor | None = None
    blocks: tuple[Any, ...] = ()
    is_stochastic: bool = False


def pool_and_exchange(
    lookups: TableLookups,
    tables: Sequence[Tensor],
    dims: Sequence[int],
    group: dist.ProcessGroup,
    *,
    dtype: torch.dtype,
    operators: Any | None = None,
    name: str = "",
    update: FusedUpdate | None = None,
) -> Tensor:
    """Add up every bag's rows of its table, and return the local batch's vectors from all ranks' tables.

    tables: this rank's, [rows, dim] each, of `dtype`; it may have none. dims: how wide the vectors of each rank's
    tables are together. operators: what `choose_operators` has chosen. name: another one for each set of tables of a
    group. Returns [global batch / ranks, sum of dims] in order of rank, then table. Differentiable with respect to the
    tables, with sparse gradients; with `update`, which takes the operator, the backward pass changes the tables
    instead. Collective, forward and backward, also for a rank without a table.
    """
    if operators is not None:
        if update is None or not torch.is_grad_enabled():
            return _look_up(operators, lookups, tables, group, name)
        how = operators.TableUpdate(**vars(update))
        with collective("embedding_all_to_all", group):
            return operators.embedding_all_to_all_updating(
                lookups.indices, lookups.offsets, list(tables), group, how, batch=lookups.batch, name=name
            )
    if update is not None:
        raise ValueError("the library's path makes gradients, and updates no table by itself: update must be None")
    pooled = _pool(lookups, tables, dtype)
    if group.size() == 1:
        return pooled
    return _ExchangePooled.apply(pooled, tuple(dims), group)


def choose_operators(
    implementation: Implementation, dtype: torch.dtype, device: torch.device, dims: Sequence[int]
) -> Any | None:
    """The module whose operators look up in tables of these dtype and dims; None for the library's path.

    "auto" takes the operator on a GPU, where it is there and knows dtype and dims. The same on every rank. ValueError
    for "kernel" where it cannot run. dims: of all tables.
    """
    if implementation not in get_args(Implementation):
        known = ", ".join(get_args(Implementation))
        raise ValueError(f"implementation is {implementation!r}, but must be one of {known}")
    if implementation == "library" or (implementation == "auto" and device.type != "cuda"):
        return None
    operators = _find_operators()
    missing = "there is no stretto.ops.embedding_all_to_all here"
    reason = missing if operators is None else _find_obstacle(dtype, dims)
    if implementation == "kernel" and reason is not None:
        raise ValueError(f"implementation is 'kernel', but {reason}; implementation='library' would do")
    return operators if reason is None else None


def _find_operators() -> Any | None:
    try:
        return import_module("stretto.ops")  # takes Triton, which is not everywhere
    except ImportError:
        return None


def _find_obstacle(dtype: torch.dtype, dims: Sequence[int]) -> str | None:
    """Why the operator takes no tables of these; None if it does."""
    from stretto.ops.embedding.table_set import require_shape

    try:
        for table, dim in enumerate(dims):
            require_shape(table, 1, dim, dtype)
    except ValueError as error:
        return str(error)
    return None


def _look_up(
    operators: Any, lookups: TableLookups, tables: Sequence[Tensor], group: dist.ProcessGroup, name: str
) -> Tensor:
    with collective("embedding_all_to_all", group):
        return operators.embedding_all_to_all(
            lookups.indices, lookups.offsets, list(tables), group, batch=lookups.batch, name=name, sparse=True
        )


def _pool(lookups: TableLookups, tables: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """[global batch, dims of this rank's tables], table by table."""
    if not tables:
        # It has an empty gradient: its backward pass participates in the exchange for which the others wait.
        return torch.zeros(
            lookups.batch, 0, dtype=dtype, device=lookups.indices.device, requires_grad=torch.is_grad_enabled()
        )
    pooled = [lookups.pool(number, table, sparse=True) for number, table in enumerate(tables)]
    return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)


class _ExchangePooled(torch.autograd.Function):
    """All-to-all of pooled vectors: [global batch, own dims] to [local batch, all ranks' dims] and back."""

    @staticmethod
    def forward(ctx: Any, pooled: Tensor, dims: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        ctx.dims, ctx.group, ctx.own_dim = dims, group, pooled.shape[1]
        world = group.size()
        batch = len(pooled) // world

        def exchange() -> Tensor:
            arrived, receives = pooled.new_empty(batch * sum(dims)), [batch * dim for dim in dims]
            all_to_all(arrived, pooled.reshape(-1), receives, [batch * pooled.shape[1]] * world, group)
            parts = arrived.split(receives)
            return torch.cat([part.view(batch, dim) for part, dim in zip(parts, dims, strict=True)], dim=1)

        return keep_output("pooled exchange", exchange)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        world, batch = ctx.group.size(), len(gradient)
        leaving = torch.cat([part.reshape(-1) for part in gradient.split(ctx.dims, dim=1)])
        arrived = gradient.new_empty(world * batch * ctx.own_dim)
        all_to_all(arrived, leaving, [batch * ctx.own_dim] * world, [batch * dim for dim in ctx.dims], ctx.group)
        return arrived.view(world * batch, ctx.own_dim), None, None
