# SPDX-License-Identifier: Apache-2.0
"""The fused optimizer: row updates of the tables inside of the backward pass, without making their gradients.

embedding_all_to_all_update      one step on the rows that a forward call has looked up, given its output's gradient
embedding_all_to_all_updating    a look-up whose backward pass calls it
"""

import operator
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.ops.embedding.backward import (
    LookupInput,
    SortedLookups,
    TableBlock,
    TableUpdate,
    sort_ahead,
    update_tables,
)
from stretto.ops.embedding.backward_kernel import SETTINGS
from stretto.ops.embedding.operator import (
    EagerLookup,
    agree_on_placement,
    embedding_all_to_all,
    find_call,
    find_placement_again,
)
from stretto.ops.embedding.placement import require_input
from stretto.ops.embedding.table_set import SeenTensors, accept_tables, find_tables
from stretto.ops.operands import require_dense, require_like, takes_tensors
from stretto.ops.operator import find_name, is_traced
from stretto.suggestions import require_one_of

STATES = {"sgd": 0, "adagrad": 1, "full-adagrad": 1, "adam": 2}
"""The number of states that each optimizer has of a table."""

OPTIMIZERS = tuple(STATES)
_OPERATOR = "embedding_all_to_all_update"
_seen_states = SeenTensors()


@takes_tensors
def embedding_all_to_all_update(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    tables: Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    update: TableUpdate,
    weights: Tensor | None = None,
    mode: str = "sum",
    batch: int | None = None,
    name: str = "",
    ahead: SortedLookups | None = None,
) -> None:
    """Make an optimizer's step on the rows that `embedding_all_to_all` has looked up, without making their gradients.

    grad: [global batch / world, sum of all ranks' dims], of the output. indices to name: as in the forward call, which
    has checked them. update: the optimizer. ahead: these lookups, if they were sorted already.
    Sums and updates are fp32, then rounded to the table's dtype. A table may be given several times, for several
    features: a row gets one step, of all its lookups.

    All ranks call it, also those without tables. ValueError for other input.
    """
    given = grad, indices, offsets, weights, update.settings, update.clock, *tables, *update.states
    if is_traced(*given):
        group_name, device, world = find_name(group), offsets.device, dist.get_world_size(group)
        known = accept_tables(tables, device)
        count = operator.index(require_input(indices, offsets, len(tables), weights, mode, batch, world))
        agreed = known.dims, known.dtype, count, False, indices.dtype
        width, dtype = agree_on_placement(group_name, device, name, *agreed)
        _require_gradient(grad, count // world, width, dtype, device)
        require_step(update, known.rows, known.dims, known.dtype, device)
        detached = [table.detach() for table in tables]
        if update.cached is not None:
            raise ValueError(f"{_OPERATOR}: caches are not updated under torch.compile: leave them out of its graphs")
        optimizer, settings, states, clock, blocks, is_stochastic, _ = update
        rest = list(chain.from_iterable(blocks)), is_stochastic, mode, count, name, group_name
        torch.ops.stretto.embedding_all_to_all_update(
            grad, indices, offsets, detached, list(states), settings, clock, weights, optimizer, *rest
        )
        return
    call = find_call(indices, offsets, tables, group, weights, mode, batch, name, is_update=True)
    _update(call, grad, call.describe(indices, offsets, weights), tables, update, ahead)


def _update(
    call: EagerLookup,
    grad: Tensor,
    lookups: LookupInput,
    tables: Sequence[Tensor],
    update: TableUpdate,
    ahead: SortedLookups | None,
) -> None:
    """Make the step of an eager call."""
    known, placement, device = call.tables, call.placement, lookups.offsets.device
    _require_gradient(grad, placement.local_batch, placement.width, placement.dtype, device)
    require_step(update, known.rows, known.dims, known.dtype, device)
    with torch.no_grad():
        update_tables(grad, lookups, placement, call.group, known, update, ahead)
    torch.autograd.graph.increment_version([*tables, *update.states])


def _require_gradient(grad: Tensor, batch: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    require_like(_OPERATOR, "grad", grad, (batch, width), dtype, device, may_have_gaps=True)


@torch.library.custom_op("stretto::embedding_all_to_all_update", mutates_args=("tables", "states", "clock"))
def _embedding_all_to_all_update(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    tables: Sequence[Tensor],
    states: Sequence[Tensor],
    settings: Tensor,
    clock: Tensor | None,
    weights: Tensor | None,
    optimizer: str,
    blocks: Sequence[int],
    is_stochastic: bool,
    pooling: str,
    batch: int,
    name: str,
    group: str,
) -> None:
    # pooling is the mode: torch's functionalization has its own argument called `mode`.
    known = find_tables(tables, offsets.device)
    placement = find_placement_again(group, offsets.device, known.dims, grad.dtype, batch, name)
    lookups = LookupInput(indices, offsets, weights, pooling, known.rows, known.dims)
    whole = [TableBlock(*blocks[at : at + 3]) for at in range(0, len(blocks), 3)]
    update_tables(
        grad, lookups, placement, group, known, TableUpdate(optimizer, settings, states, clock, whole, is_stochastic)
    )


def table_settings(
    tables: int,
    *,
    learning_rate: float | Sequence[float] = 0.01,
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
    max_norm: float = float("inf"),
    betas: tuple[float, float] = (0.9, 0.999),
    device: torch.device | str | None = None,
) -> Tensor:
    """Make settings [tables, 6] of `embedding_all_to_all_update`: columns as the arguments are, the last two 1 - beta.

    learning_rate: of all tables, or of each. max_norm: of a row's gradient. ValueError for negative numbers, and betas
    outside of [0, 1).
    """
    rates = [float(learning_rate)] * tables if isinstance(learning_rate, (int, float)) else list(learning_rate)
    if len(rates) != tables:
        raise ValueError(f"learning_rate has {len(rates)} numbers, but there are {tables} tables: give one for each")
    named = {"epsilon": epsilon, "weight_decay": weight_decay, "max_norm": max_norm}
    for key, value in (*(("learning_rate", rate) for rate in rates), *named.items()):
        if not value >= 0:
            raise ValueError(f"{key} is {value}, but must be at least 0")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas are {betas}, but must be at least 0 and below 1; (0.9, 0.999) would do")
    rest = [epsilon, weight_decay, max_norm, 1 - betas[0], 1 - betas[1]]
    return torch.tensor([[rate, *rest] for rate in rates], dtype=torch.float32, device=device).view(-1, SETTINGS.value)


def require_step(
    step: TableUpdate,
    rows: tuple[int, ...],
    dims: tuple[int, ...],
    dtype: torch.dtype | None,
    device: torch.device,
) -> None:
    """ValueError for an unknown optimizer, or for a step's tensors that do not fit tables of these shapes and dtype."""
    optimizer, settings, states, clock = step[:4]
    require_dense(_OPERATOR, "update.settings", settings)
    if clock is not None:
        require_dense(_OPERATOR, "update.clock", clock)
    require_one_of(OPTIMIZERS, f"{_OPERATOR}: ", optimizer=optimizer)
    shapes = [(len(rows), SETTINGS.value)] if optimizer == "adam" else [(2,), (len(rows), SETTINGS.value)]
    if settings.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(
            f"{_OPERATOR}: settings of {optimizer} are {wanted}: learning rate and epsilon, or what table_settings "
            f"makes; not {list(settings.shape)}"
        )
    require_like(_OPERATOR, "settings", settings, settings.shape, torch.float32, device)
    count = STATES[optimizer]
    if len(states) != count * len(rows):
        raise ValueError(
            f"{_OPERATOR}: {optimizer} of {len(rows)} tables has {count * len(rows)} states, not {len(states)}"
        )

    def check(_: tuple[int, ...]) -> bool:
        for place, state in enumerate(states):
            table = place // count
            shape = (rows[table],) if optimizer == "adagrad" else (rows[table], dims[table])
            require_like(_OPERATOR, f"the state of table {table}", state, shape, torch.float32, device)
        return True

    if is_traced(*states):
        check(())
    elif states:
        _seen_states.find(states, (optimizer, rows, dims, device), check)
    if clock is None and (optimizer == "adam" or step.is_stochastic):
        raise ValueError(
            f"{_OPERATOR}: adam and stochastic rounding count steps: pass clock=, int64 [2], steps and seed"
        )
    if clock is not None:
        require_like(_OPERATOR, "clock (steps and seed)", clock, (2,), torch.int64, device, may_have_gaps=True)
    if step.is_stochastic and dtype == torch.float32:
        raise ValueError(f"{_OPERATOR}: fp32 tables are not rounded: leave is_stochastic out")
    if step.cached is not None and len(step.cached.slots) != len(rows):
        raise ValueError(f"{_OPERATOR}: there are {len(step.cached.slots)} slots of {len(rows)} tables: one for each")
    if step.blocks and len(step.blocks) != len(rows):
        raise ValueError(f"{_OPERATOR}: there are {len(step.blocks)} blocks of {len(rows)} tables: give one for each")


@takes_tensors
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
        weights = options.get("weights")
        ctx.save_for_backward(indices, offsets, weights)
        ctx.call = ctx.ahead = None
        if is_traced(indices, offsets, weights, *tables):
            return embedding_all_to_all(indices, offsets, list(tables), group, **options)
        ctx.call = call = find_call(indices, offsets, tables, group, **options)
        pooled = call.look_up(indices, offsets, weights)
        lookups = call.describe(indices, offsets, weights)
        ctx.ahead = sort_ahead(update.find_rows(lookups), call.placement, call.group, call.tables.firsts)
        return pooled

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        indices, offsets, weights = ctx.saved_tensors
        options = ctx.options | {"update": ctx.update, "weights": weights, "ahead": ctx.ahead}
        call, (grad,), update = ctx.call, gradients, ctx.update
        ctx.call = ctx.ahead = None
        is_plain = call is not None and not is_traced(grad, update.settings, update.clock, *update.states)
        if is_plain and call.tables.addresses == tuple(map(Tensor.data_ptr, ctx.tables)):
            _update(call, grad, call.describe(indices, offsets, weights), ctx.tables, update, options["ahead"])
        else:
            embedding_all_to_all_update(grad, indices, offsets, list(ctx.tables), ctx.group, **options)
        return (None,) * 7
