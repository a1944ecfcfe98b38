"""`embedding_all_to_all`, its torch.library operators and gradients."""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.ops.checks import find_name
from stretto.ops.dispatch import is_differentiated, is_traced
from stretto.ops.embedding.autotune import measure_launch_configs
from stretto.ops.embedding.backward import LookupInput, find_gradients, update_tables
from stretto.ops.embedding.forward import find_shape, look_up_and_send
from stretto.ops.embedding.launch_config import LaunchConfig, choose_launch_config, list_launch_configs
from stretto.ops.embedding.output_ring import find_output_rings
from stretto.ops.embedding.placement import EmbeddingPlacement, find_placement, require_input
from stretto.ops.embedding.put.operator import find_put_slots
from stretto.ops.embedding.table_set import TableSet, accept_tables, find_tables
from stretto.ops.workspace import find_group

OPTIMIZERS = ("sgd", "adagrad")


def embedding_all_to_all(
    indices: Tensor,
    offsets: Tensor,
    tables: Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    weights: Tensor | None = None,
    mode: str = "sum",
    batch: int | None = None,
    name: str = "",
    checks: bool = True,
    sparse: bool = False,
) -> Tensor:
    """Pool rows of this rank's tables for the global batch; returns all ranks' tables' vectors for the local batch.

    tables: this rank's, each [rows, dim], contiguous, of any number (a rank may have none), rows and dims (multiples of
    4, up to 2048); all ranks' are of one dtype, fp32, fp16 or bf16. indices: [total], int32 or int64. offsets:
    [tables x global batch + 1], feature-major: the indices of sample s in table t are those from offsets[t * batch + s]
    to offsets[t * batch + s + 1] - 1; none is a bag of zeros. weights: [total], a factor for each index, without a
    gradient. mode: "sum", or "mean", which divides by the number of indices, weighted or not. batch: the global one,
    which a rank without tables must say. group: None for all ranks. name: another one for each set of tables that a
    group has, since at the first call with these dims (of this rank), batch and name the ranks tell each other theirs.

    Returns [global batch / world, sum of all ranks' dims], of the tables' dtype, columns in order of rank, then table;
    sums are fp32. It lies in memory that peers store into: see docs/embedding.md.

    Gradients go to the tables: dense ones, or with sparse=True coalesced sparse tensors, for which the host waits once.
    All ranks' tables need gradients, or none; `EmbeddingAllToAll` updates its tables without making any.

    checks: look at every index and offset on the device. A bad one is read as zeros (an empty bag), and raises a
    ValueError, with table, position and rank, here on CPUs and at the next call or `check_indices` on GPUs; with
    checks=False it reads whatever lies there. ValueError at once for other input that cannot be (a batch that the group
    does not divide, tables that disagree between ranks, ...), and for a rank outside of the group; PeerError for a rank
    that does not come. Punniyamurthy et al., section 3.
    """
    if sparse and torch.is_grad_enabled() and torch.compiler.is_dynamo_compiling():
        options = {"weights": weights, "mode": mode, "batch": batch, "name": name, "checks": checks, "sparse": True}
        return _look_up_outside_of_graphs(indices, offsets, tables, group, **options)
    group_name, device = find_name(group), offsets.device
    traces = is_traced(indices, offsets, weights, *tables)
    known = (accept_tables if traces else find_tables)(tables, device)
    count = require_input(indices, offsets, len(tables), weights, mode, batch, dist.get_world_size(group))
    if traces:
        count = operator.index(count)  # ranks agree on each batch: torch.compile traces another one anew
    agreed = group_name, device, name, known.dims, known.dtype, count, known.needs_grad()
    if traces:
        width, dtype, needs_grad = _agree(*agreed)
        anchor = _anchors[device] if _needs_anchor(known, needs_grad) else None
        return torch.ops.stretto.embedding_all_to_all(
            indices, offsets, list(tables), weights, anchor, mode, count, width, dtype, checks, sparse, name, group_name
        )
    call = _EagerLookup(known, find_placement(*agreed), name, group_name, mode, checks, sparse)
    anchor = _find_anchor(device) if _needs_anchor(known, call.placement.needs_grad) else None
    if is_differentiated(anchor, *tables[:1]):  # all tables need gradients, or none
        return _LookUp.apply(call, indices, offsets, weights, anchor, *tables)
    return look_up_and_send(indices, offsets, known, weights, call.placement, group_name, mode, checks=checks)


# What torch.compile traces has dense gradients only.
_look_up_outside_of_graphs = torch.compiler.disable(
    embedding_all_to_all, reason="a look-up with sparse gradients is no part of a graph"
)

_anchors: dict[torch.device, Tensor] = {}


def _needs_anchor(tables: TableSet, needs_grad: bool) -> bool:
    """A rank without tables takes part in the backward pass too: its output needs a gradient for something."""
    return not tables.dims and needs_grad and torch.is_grad_enabled()


def _find_anchor(device: torch.device) -> Tensor:
    """What the output of a rank without tables has a gradient for: nothing. torch.compile cannot make one itself."""
    if device not in _anchors:
        with torch.inference_mode(False):
            _anchors[device] = torch.empty(0, dtype=torch.float32, device=device, requires_grad=True)
    return _anchors[device]


@torch.compiler.assume_constant_result
def _agree(
    group: str,
    device: torch.device,
    name: str,
    dims: tuple[int, ...],
    dtype: torch.dtype | None,
    batch: int,
    needs_grad: bool,
) -> tuple[int, torch.dtype, bool]:
    placement = find_placement(group, device, name, dims, dtype, batch, needs_grad)
    _find_anchor(device)
    return placement.width, placement.dtype, placement.needs_grad


@torch.library.custom_op("stretto::embedding_all_to_all", mutates_args=())
def _embedding_all_to_all(
    indices: Tensor,
    offsets: Tensor,
    tables: Sequence[Tensor],
    weights: Tensor | None,
    anchor: Tensor | None,
    mode: str,
    batch: int,
    width: int,
    dtype: torch.dtype,
    checks: bool,
    sparse: bool,
    name: str,
    group: str,
) -> Tensor:
    known = find_tables(tables, offsets.device)
    placement = _find_again(group, offsets.device, known.dims, dtype, batch, name)
    return look_up_and_send(indices, offsets, known, weights, placement, group, mode, checks=checks)


@_embedding_all_to_all.register_fake
def _(
    indices: Tensor,
    offsets: Tensor,
    tables: Sequence[Tensor],
    weights: Tensor | None,
    anchor: Tensor | None,
    mode: str,
    batch: int,
    width: int,
    dtype: torch.dtype,
    checks: bool,
    sparse: bool,
    name: str,
    group: str,
) -> Tensor:
    return offsets.new_empty(batch // find_group(group).size(), width, dtype=dtype)


@torch.library.custom_op("stretto::embedding_all_to_all_gradients", mutates_args=())
def _embedding_all_to_all_gradients(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    mode: str,
    batch: int,
    rows: Sequence[int],
    dims: Sequence[int],
    name: str,
    group: str,
) -> list[Tensor]:
    """The dense gradients of this rank's tables; without tables its anchor's, or compilers would leave the call out."""
    lookups = LookupInput(indices, offsets, weights, mode, tuple(rows), tuple(dims))
    placement = _find_again(group, offsets.device, lookups.dims, grad.dtype, batch, name)
    return find_gradients(grad, lookups, placement, group, sparse=False) or [_make_nothing(grad)]


@_embedding_all_to_all_gradients.register_fake
def _(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    mode: str,
    batch: int,
    rows: Sequence[int],
    dims: Sequence[int],
    name: str,
    group: str,
) -> list[Tensor]:
    return [grad.new_empty(shape) for shape in zip(rows, dims, strict=True)] or [_make_nothing(grad)]


def _make_nothing(grad: Tensor) -> Tensor:
    return grad.new_empty(0, dtype=torch.float32)  # an anchor's dtype


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    indices, offsets, tables, weights, _, mode, batch, *_, sparse, name, group = inputs
    ctx.save_for_backward(indices, offsets, weights)
    ctx.shapes = [table.shape[0] for table in tables], [table.shape[1] for table in tables]
    ctx.mode, ctx.batch, ctx.sparse, ctx.name, ctx.group = mode, batch, sparse, name, group


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    indices, offsets, weights = ctx.saved_tensors
    rows, dims = ctx.shapes
    lookups = LookupInput(indices, offsets, weights, ctx.mode, tuple(rows), tuple(dims))
    anchor = None
    if ctx.sparse:
        placement = _find_again(ctx.group, offsets.device, lookups.dims, grad.dtype, ctx.batch, ctx.name)
        grads = find_gradients(grad, lookups, placement, ctx.group, sparse=True)
    else:
        grads = _call_gradients(grad, lookups, ctx.batch, ctx.name, ctx.group)
        if not dims:
            (anchor,), grads = grads, []
    return None, None, grads, None, anchor, *[None] * 8


def _call_gradients(grad: Tensor, lookups: LookupInput, batch: int, name: str, group: str) -> list[Tensor]:
    return torch.ops.stretto.embedding_all_to_all_gradients(grad, *lookups[:4], batch, *lookups[4:], name, group)


_embedding_all_to_all.register_autograd(_differentiate, setup_context=_save)


class _EagerLookup(NamedTuple):
    """An eager call, but for its tensors."""

    tables: TableSet
    placement: EmbeddingPlacement
    name: str
    group: str
    mode: str
    checks: bool
    sparse: bool


class _LookUp(torch.autograd.Function):
    """The operator where torch does no more than run it: a torch.library one takes longer for its many tables."""

    @staticmethod
    def forward(
        ctx: Any,
        call: _EagerLookup,
        indices: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        anchor: Tensor | None,
        *tables: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(indices, offsets, weights)
        ctx.call = call
        return look_up_and_send(
            indices, offsets, call.tables, weights, call.placement, call.group, call.mode, checks=call.checks
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _EagerLookup = ctx.call
        indices, offsets, weights = ctx.saved_tensors
        lookups = LookupInput(indices, offsets, weights, call.mode, call.tables.rows, call.tables.dims)
        if is_traced(grad) and not call.sparse:
            grads = _call_gradients(grad, lookups, call.placement.batch, call.name, call.group)[: len(lookups.dims)]
        else:
            grads = find_gradients(grad, lookups, call.placement, call.group, sparse=call.sparse)
        return *[None] * 5, *grads


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
    # pooling: the mode, by which name torch's functionalization calls something else.
    known = find_tables(tables, offsets.device)
    placement = _find_again(group, offsets.device, known.dims, grad.dtype, batch, name)
    lookups = LookupInput(indices, offsets, weights, pooling, known.rows, known.dims)
    update_tables(grad, lookups, placement, group, known, states, optimizer, settings)


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
    """A step of an optimizer on the rows that `embedding_all_to_all` has looked up, without making their gradients.

    grad: [global batch / world, sum of all ranks' dims], of its output. The others are those of the forward call, which
    has checked them. optimizer: "sgd", or "adagrad", row-wise: a row's state grows by the mean of its gradient's
    squares, and the row changes by -learning rate x gradient / (sqrt(state) + epsilon). settings: fp32 [2] on the
    device, learning rate and epsilon. states: for adagrad, fp32 [rows] of each table. Sums and updates are fp32, then
    rounded to the table's dtype. A table may be there several times, for several features: a row gets one step, of all
    its lookups. All ranks call it, also those without tables. ValueError for other input.
    """
    group_name = find_name(group)
    device, world = offsets.device, dist.get_world_size(group)
    traces = is_traced(grad, indices, offsets, weights, settings, *tables, *states)
    known = (accept_tables if traces else find_tables)(tables, device)
    count = require_input(indices, offsets, len(tables), weights, mode, batch, world)
    if traces:
        count = operator.index(count)
    width, dtype, _ = _agree(group_name, device, name, known.dims, known.dtype, count, False)
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
    placement = _find_again(group_name, device, known.dims, dtype, count, name)
    with torch.no_grad():
        update_tables(grad, lookups, placement, group_name, known, states, optimizer, settings)
    torch.autograd.graph.increment_version([*tables, *states])


def require_optimizer(
    optimizer: str, settings: Tensor, rows: Sequence[int], states: Sequence[Tensor], device: torch.device
) -> None:
    """ValueError for what is no optimizer, or not what one of tables with so many rows takes."""
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


def tune_embedding(
    indices: Tensor,
    offsets: Tensor,
    tables: Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    weights: Tensor | None = None,
    mode: str = "sum",
    batch: int | None = None,
    name: str = "",
) -> LaunchConfig:
    """Measure configs to launch `embedding_all_to_all` with such input; later calls of its shape take the fastest.

    The arguments are those of the operator, and all ranks call it. Times are kept on this machine (`stretto.tuning`),
    for later runs too. What it chooses may change the order in which a bag's rows are added, and so the last bits. It
    takes about 30 x 9 calls. Returns this rank's config.
    """
    group_name = find_name(group)
    device = offsets.device
    known = find_tables(tables, device)
    count = require_input(indices, offsets, len(tables), weights, mode, batch, dist.get_world_size(group))
    placement = find_placement(group_name, device, name, known.dims, known.dtype, count, needs_grad=False)
    shape = find_shape(placement, len(tables), indices.numel())

    def run(config: LaunchConfig) -> Tensor:
        return look_up_and_send(indices, offsets, known, weights, placement, group_name, mode, config=config)

    return measure_launch_configs(
        list_launch_configs(choose_launch_config(shape, device), device), run, shape, find_group(group_name), device
    )


def check_indices(group: dist.ProcessGroup | None = None) -> None:
    """Wait for the device, and raise what its look-ups in this group have found wrong, or waited for in vain."""
    for ring in find_output_rings(find_name(group)):
        if ring.channel.device.type == "cuda":
            torch.cuda.synchronize(ring.channel.device)
        ring.index_errors.check()
        ring.channel.check()
    for slots in find_put_slots(find_name(group)):
        torch.cuda.synchronize(slots.device)
        slots.check()


def _find_again(
    group: str, device: torch.device, dims: tuple[int, ...], dtype: torch.dtype, batch: int, name: str
) -> EmbeddingPlacement:
    """The placement that the call has agreed on before; where torch calls an operator itself, it is agreed on now."""
    return find_placement(group, device, name, dims, dtype if dims else None, batch, needs_grad=False)
