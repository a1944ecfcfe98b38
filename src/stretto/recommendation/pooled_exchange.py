# SPDX-License-Identifier: Apache-2.0
"""Pools the global batch's rows of this rank's tables and sends each rank its vectors: the second all-to-all of DLRM.

`pool_and_exchange` runs stretto.ops' fused operator ("kernel") or plain PyTorch's functions ("library"). Nothing else
in training knows of the operator, except what has its backward pass update the tables (`FusedUpdate`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from stretto.parallel.comm.collectives import all_to_all, collective
from stretto.parallel.comm.kept_outputs import keep_output

if TYPE_CHECKING:
    from stretto.recommendation.table_cache import CachedLookups

Implementation = Literal["auto", "kernel", "library"]
PoolingMode = Literal["sum", "mean"]


@dataclass(frozen=True)
class TableLookups:
    """The look-ups in a rank's tables: bags of the global batch, feature-major.

    indices: [total], rows of the rank's first table for all samples, then of its second. offsets: [tables x global
    batch + 1], where each bag begins. ends: offsets[::global batch] on the host, where each table's begin. batch: the
    global batch. weights: [total], a factor for each index. counts: how many indices each rank has sent for each table,
    [rank][table]. sizes: how many this rank has sent, for each table of all ranks. replicated: this rank's samples'
    look-ups in the tables that every rank has, if there are any. cached: what `table_cache` has fetched for them.
    """

    indices: Tensor
    offsets: Tensor
    ends: tuple[int, ...]
    batch: int
    weights: Tensor | None = None
    counts: tuple[tuple[int, ...], ...] = ()
    sizes: tuple[int, ...] = ()
    replicated: "TableLookups | None" = None
    cached: "CachedLookups | None" = None

    def pool(self, number: int, table: Tensor, mode: PoolingMode = "sum", *, sparse: bool = False) -> Tensor:
        """Pool the bags' rows of the `number`th table by PyTorch's function: [batch, dim]."""
        own = self.of_tables(number, number + 1)
        weights = own.weights
        if weights is not None:
            if mode == "mean":  # which PyTorch's function refuses with weights
                counts = own.offsets.diff()
                weights = weights / counts.repeat_interleave(counts, output_size=len(weights))
            mode, weights = "sum", weights.to(table.dtype)
        return F.embedding_bag(
            own.indices,
            table,
            own.offsets,
            mode=mode,
            sparse=sparse,
            per_sample_weights=weights,
            include_last_offset=True,
        )

    def record_stream(self, stream: "torch.cuda.Stream") -> None:
        """Keep the tensors' memory until the stream's work so far has ended."""
        for tensor in (self.indices, self.offsets, self.weights):
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(stream)
        if self.replicated is not None:
            self.replicated.record_stream(stream)

    def of_tables(self, first: int, last: int) -> "TableLookups":
        """The look-ups in the tables from `first` to before `last`."""
        if (first, last) == (0, len(self.ends) - 1):
            return self
        start, stop = self.ends[first], self.ends[last]
        return TableLookups(
            self.indices[start:stop],
            self.offsets[first * self.batch : last * self.batch + 1] - start,
            tuple(end - start for end in self.ends[first : last + 1]),
            self.batch,
            None if self.weights is None else self.weights[start:stop],
            tuple(of_rank[first:last] for of_rank in self.counts),
        )


@dataclass(frozen=True)
class FusedUpdate:
    """Update of the looked-up rows by the operator's backward pass, in place of gradients; made by `TableOptimizer`.

    The arguments of `embedding_all_to_all_update` of these names, and of one call `cached` (`table_cache`).
    """

    optimizer: str
    settings: Tensor
    states: tuple[Tensor, ...] = ()
    clock: Tensor | None = None
    blocks: tuple[Any, ...] = ()
    is_stochastic: bool = False
    cached: Any = None

    def of_tables(self, places: Sequence[int], count: int) -> "FusedUpdate":
        """The update of these of the `count` tables; one may come several times."""
        if [*places] == [*range(count)]:
            return self
        each = len(self.states) // count
        states = tuple(state for place in places for state in self.states[place * each : (place + 1) * each])
        settings = self.settings if self.settings.dim() == 1 else self.settings[[*places]]
        return replace(self, settings=settings, states=states, blocks=tuple(self.blocks[place] for place in places))


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
    mode: PoolingMode = "sum",
    sparse: bool = True,
) -> Tensor:
    """Pool every bag's rows of its table, each times its weight if there are any, and return the local batch's vectors
    from all ranks' tables.

    tables: this rank's, [rows, dim] each, of `dtype`; it may have none. dims: how wide the vectors of each rank's
    tables are together. operators: what `choose_operators` has chosen. name: another one for each set of tables of a
    group. mode: "mean" divides by the number of indices, weighted or not. Returns [global batch / ranks, sum of dims]
    in order of rank, then table. Differentiable with respect to the weights and the tables, whose gradients are sparse
    unless sparse=False; with `update`, which takes the operator, the backward pass changes the tables instead. The
    operator gives weights no gradient: theirs takes one more exchange of the vectors' gradients. Collective, forward
    and backward, also for a rank without a table.
    """
    if operators is not None:
        weights = None if lookups.weights is None else lookups.weights.detach()
        if update is not None:
            tables = [table.detach() for table in tables]  # some may be frozen, and others not
        arguments = lookups.indices, lookups.offsets, list(tables), group
        options: dict[str, Any] = {"weights": weights, "mode": mode, "batch": lookups.batch, "name": name}
        with collective("embedding_all_to_all", group):
            if update is None or not torch.is_grad_enabled():
                pooled = operators.embedding_all_to_all(*arguments, sparse=sparse, **options)
            else:
                how = operators.TableUpdate(**vars(update))
                pooled = operators.embedding_all_to_all_updating(*arguments, how, **options)
        if lookups.weights is not None and lookups.weights.requires_grad:
            pooled = _WeightGradients.apply(pooled, lookups.weights, lookups, tables, dims, group, mode)
        return pooled
    if update is not None:
        raise ValueError("the library's path makes gradients, and updates no table by itself: update must be None")
    pooled = _pool(lookups, tables, dtype, mode, sparse)
    if group.size() == 1:
        return pooled
    # Frozen tables, or none, get a backward pass, too: all ranks make the exchange of the vectors' gradients.
    batch, world = len(pooled) // group.size(), group.size()
    receives = [batch * dim for dim in dims]
    arrived = exchange_parts(pooled.reshape(-1), receives, [batch * pooled.shape[1]] * world, group, needs_grad=True)
    parts = [part.view(batch, dim) for part, dim in zip(arrived.split(receives), dims, strict=True)]
    return torch.cat(parts, dim=1)


def choose_operators(
    implementation: Implementation,
    dtype: torch.dtype,
    device: torch.device,
    dims: Sequence[int],
    group: dist.ProcessGroup | None = None,
) -> Any | None:
    """The module whose operators look up in tables of these dtype and dims; None for the library's path.

    "auto" takes the operator on a GPU, where it is there and knows dtype and dims, and in one node: between nodes it
    puts through the host, and nobody has timed that beside NCCL. The same on every rank. ValueError for "kernel" where
    it cannot run. dims: of all tables. group: of the ranks, if it is known; collective at its first call.
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
    if reason is not None:
        return None
    return None if implementation == "auto" and group is not None and _has_nodes(group, device) else operators


def refuse_conversion(convert: Callable[[Tensor], Tensor], dtypes: Iterable[torch.dtype], device: torch.device) -> None:
    """ValueError if `convert`, which a module is to apply to its tables, gives these dtypes or the device others.

    Ranks exchange what they agreed on when tables were distributed, also those that have none.
    """
    for dtype in dtypes:
        made = convert(torch.empty(0, dtype=dtype, device=device))
        if made.dtype != dtype or made.device.type != device.type:
            raise ValueError(
                f"these tables are {dtype} on {device.type}, on all ranks, and cannot become {made.dtype} on "
                f"{made.device.type}: convert the model before its tables are distributed, or other modules alone"
            )


def _has_nodes(group: dist.ProcessGroup, device: torch.device) -> bool:
    from stretto.ops.choices import find_agreed
    from stretto.ops.operator import find_name

    return bool(find_agreed(find_name(group), device).nodes)


def _find_operators() -> Any | None:
    try:
        return import_module("stretto.ops")  # takes Triton, which is not everywhere
    except ImportError:
        return None


def _find_obstacle(dtype: torch.dtype, dims: Sequence[int]) -> str | None:
    """Say why the operator takes no tables of these; None if it does."""
    from stretto.ops.embedding.table_set import require_shape

    try:
        for table, dim in enumerate(dims):
            require_shape(table, 1, dim, dtype)
    except ValueError as error:
        return str(error)
    return None


def _pool(
    lookups: TableLookups, tables: Sequence[Tensor], dtype: torch.dtype, mode: PoolingMode, sparse: bool
) -> Tensor:
    """[global batch, dims of this rank's tables], table by table."""
    if not tables:
        nothing = torch.zeros(lookups.batch, 0, dtype=dtype, device=lookups.indices.device)
        # The backward pass goes on to the exchange of the weights, which all ranks make.
        return nothing if lookups.weights is None else nothing + lookups.weights.sum().to(dtype)
    pooled = [lookups.pool(number, table, mode, sparse=sparse) for number, table in enumerate(tables)]
    return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)


def exchange_parts(
    parts: Tensor, receives: Sequence[int], sends: Sequence[int], group: dist.ProcessGroup, needs_grad: bool
) -> Tensor:
    """All-to-all of numbers [sum of sends] to [sum of receives], whose gradients return; the latter on all ranks.

    needs_grad: whether there will be a backward pass, on all ranks: also of one whose `parts` need no gradient.
    """
    needs_grad = needs_grad and torch.is_grad_enabled()
    if not needs_grad or not parts.requires_grad:
        parts = parts.detach().requires_grad_(needs_grad)
    exchanged: Tensor = _ExchangeParts.apply(parts, tuple(receives), tuple(sends), group)
    return exchanged


class _ExchangeParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, parts: Tensor, receives: tuple[int, ...], sends: tuple[int, ...], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.receives, ctx.sends, ctx.group = receives, sends, group
        exchange = partial(all_to_all, parts.new_empty(sum(receives)), parts, receives, sends, group)
        return keep_output("pooled exchange", exchange)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        returned = gradient.new_empty(sum(ctx.sends))
        return all_to_all(returned, gradient.contiguous(), ctx.sends, ctx.receives, ctx.group), None, None, None


class _WeightGradients(torch.autograd.Function):
    """The operator's output, whose gradient is also sent to the owners of the tables for that of the weights.

    Its backward pass comes before the operator's, which may change the tables.
    """

    @staticmethod
    def forward(
        ctx: Any,
        pooled: Tensor,
        weights: Tensor,
        lookups: TableLookups,
        tables: Sequence[Tensor],
        dims: Sequence[int],
        group: dist.ProcessGroup,
        mode: PoolingMode,
    ) -> Tensor:
        ctx.lookups, ctx.tables, ctx.mode = lookups, [table.detach() for table in tables], mode
        ctx.dims, ctx.group, ctx.own_dim = tuple(dims), group, dims[group.rank()]
        return pooled.view_as(pooled)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        vectors = _return_gradients(ctx, gradients[0])
        parts, column = [gradients[0].new_empty(0)], 0
        for number, table in enumerate(ctx.tables):
            own = ctx.lookups.of_tables(number, number + 1)
            counts = own.offsets.diff()
            bags = torch.arange(len(counts), dtype=own.indices.dtype, device=counts.device)
            bag_of = bags.repeat_interleave(counts, output_size=len(own.indices))
            columns = vectors[:, column : column + table.shape[1]].contiguous()
            if ctx.mode == "mean":
                columns = columns / counts.clamp(min=1).unsqueeze(1)
            # That of embedding_bag: the products of gradients and rows are not stored.
            parts.append(
                torch.ops.aten._embedding_bag_per_sample_weights_backward(
                    columns.to(table.dtype), table, own.indices, own.offsets[:-1], bag_of, 0
                )
            )
            column += table.shape[1]
        return gradients[0], torch.cat(parts), *[None] * 5


def _return_gradients(ctx: Any, gradient: Tensor) -> Tensor:
    """The gradient of this rank's tables' vectors, [global batch, own dims], of all ranks' [local batch, all dims]."""
    world, batch = ctx.group.size(), len(gradient)
    leaving = torch.cat([part.reshape(-1) for part in gradient.split(ctx.dims, dim=1)])
    arrived = gradient.new_empty(world * batch * ctx.own_dim)
    all_to_all(arrived, leaving, [batch * ctx.own_dim] * world, [batch * dim for dim in ctx.dims], ctx.group)
    return arrived.view(world * batch, ctx.own_dim)
