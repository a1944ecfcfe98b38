# SPDX-License-Identifier: Apache-2.0
"""`embedding_all_to_all`: the public function, its torch.library operators, and its gradients.

A call checks its input, agrees with the other ranks on the placement of tables (once for each set of tables), and then
takes one of three paths, which give the same bits:

    traced (torch.compile, export, modes)    torch.ops.stretto.embedding_all_to_all; backward: ..._gradients
    eager, gradients are needed              `_LookUp`, an autograd function: the dispatch of torch.library takes the
                                             host longer, the more tables there are
    eager, no gradients                      `look_up_and_send` itself

`tune_embedding` and `check_indices` stand at the end; `fused_optimizer` has the update without gradients.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.collectives.schedule import Schedule
from stretto.ops.embedding.autotune import measure_launch_configs
from stretto.ops.embedding.backward import LookupInput, find_gradients
from stretto.ops.embedding.forward import find_shape, look_up_and_send
from stretto.ops.embedding.launch_config import LaunchConfig, choose_launch_config, list_launch_configs
from stretto.ops.embedding.output_ring import find_output_rings
from stretto.ops.embedding.placement import EmbeddingPlacement, find_placement, require_input
from stretto.ops.embedding.table_set import TableSet, accept_tables, find_tables
from stretto.ops.joint.registry import name_schedule
from stretto.ops.operands import is_differentiated, takes_tensors
from stretto.ops.operator import find_group, find_name, is_traced, register_fake


@takes_tensors
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
    schedule: str | Schedule | None = None,
) -> Tensor:
    """Look up and pool this rank's tables for the global batch, and exchange the vectors with an all-to-all.

    tables: this rank's, each [rows, dim], contiguous; any number (a rank may have none), any rows, dims that are
    multiples of 4, up to 2048. All ranks' tables have one dtype: fp32, fp16 or bf16. indices: [total], int32 or int64.
    offsets: [tables x global batch + 1], feature-major: sample s has the indices from offsets[t * batch + s] to
    offsets[t * batch + s + 1] - 1 in table t; an empty bag gives zeros. weights: [total], a factor for each index,
    without a gradient. mode: "sum", or "mean", which divides by the number of indices, weighted or not. batch: the
    global one; a rank without tables must give it. group: None for all ranks. name: must differ for each set of tables
    of a group: at the first call with these dims (of this rank), batch and name, the ranks exchange descriptions of
    their tables, on which later calls rely.

    Returns the vectors of all tables for this rank's samples: [global batch / world, sum of all ranks' dims], in the
    tables' dtype, with columns ordered by rank, then table; sums are fp32. The output is in symmetric memory, which
    peers write: see docs/embedding.md.

    The tables get dense gradients, or, with sparse=True, coalesced sparse tensors, for which the host synchronizes
    once. In each call, either all ranks' tables or none must need gradients; `EmbeddingAllToAll` can update its tables
    without gradient tensors. If gradients are enabled, the output of a rank without tables requires a gradient.

    schedule: a verified all-to-all by whose messages the vectors move, as soon as those for a rank are pooled: an
    algorithm's name ("direct-all-to-all"), or a compiled `Schedule` of as many ranks, such as a two-step one. The bits
    are those without; the output is in memory of its own, and gradients return by the kernels' own exchange. Between
    nodes vectors and gradients always move by one: a two-step one, or a direct one of nodes that are not alike.

    checks: check every index and offset on the device. A bad one is read as zeros (an empty bag), and raises a
    ValueError with table, position and rank: on CPUs here, on GPUs at the next call or `check_indices`. That call
    stores nothing, and the other ranks raise an error, too. With checks=False a bad index reads arbitrary memory.
    ValueError immediately for other invalid input (a batch that the group does not divide, tables that disagree between
    ranks, ...), and on a rank outside of the group; PeerError if a rank does not arrive. Punniyamurthy et al., section
    3.
    """
    if sparse and torch.is_grad_enabled() and torch.compiler.is_dynamo_compiling():
        options = {"weights": weights, "mode": mode, "batch": batch, "name": name, "checks": checks, "sparse": True}
        return _look_up_outside_of_graphs(indices, offsets, tables, group, schedule=schedule, **options)
    if is_traced(indices, offsets, weights, *tables):
        group_name, device, world = find_name(group), offsets.device, dist.get_world_size(group)
        known = accept_tables(tables, device)
        # Ranks agree on each batch size: torch.compile traces each one separately.
        count = operator.index(require_input(indices, offsets, len(tables), weights, mode, batch, world))
        by = _name_schedule(schedule, world)
        agreed = group_name, device, name, known.dims, known.dtype, count, known.needs_grad(), indices.dtype, by
        width, dtype = agree_on_placement(*agreed)
        needs_grad = torch.is_grad_enabled() and (not known.dims or known.needs_grad())
        anchor = _anchors[device] if _needs_anchor(known) else None
        rest = mode, count, width, dtype, checks, sparse, needs_grad, name, group_name, by
        return torch.ops.stretto.embedding_all_to_all(indices, offsets, list(tables), weights, anchor, *rest)
    call = find_call(
        indices, offsets, tables, group, weights, mode, batch, name, checks=checks, sparse=sparse, schedule=schedule
    )
    anchor = _find_anchor(offsets.device) if _needs_anchor(call.tables) else None
    if is_differentiated(anchor, *tables[:1]):  # all tables need gradients, or none
        return _LookUp.apply(call, indices, offsets, weights, anchor, *tables)
    return call.look_up(indices, offsets, weights)


def _name_schedule(schedule: str | Schedule | None, world: int) -> str:
    return "" if schedule is None else name_schedule("embedding_all_to_all", schedule, "kernel", world)


# Traced look-ups have dense gradients only.
_look_up_outside_of_graphs = torch.compiler.disable(
    embedding_all_to_all, reason="a look-up with sparse gradients is no part of a graph"
)

_anchors: dict[torch.device, Tensor] = {}


def _needs_anchor(tables: TableSet) -> bool:
    """Return whether this rank, without tables, needs an anchor: its output must depend on something with a gradient.

    Otherwise autograd would skip its backward pass, in which it pushes gradients to the other ranks. Whether their
    tables get gradients may change from call to call, and the device is notified (`begin_pooling`), so it decides then.
    """
    return not tables.dims and torch.is_grad_enabled()


def _find_anchor(device: torch.device) -> Tensor:
    """Return the device's anchor, an empty tensor that needs a gradient. torch.compile cannot make one itself."""
    if device not in _anchors:
        with torch.inference_mode(False):
            _anchors[device] = torch.empty(0, dtype=torch.float32, device=device, requires_grad=True)
    return _anchors[device]


@torch.compiler.assume_constant_result
def agree_on_placement(group: str, device: torch.device, *agreed: Any) -> tuple[int, torch.dtype]:
    """Agree with all ranks on the placement; returns (output's columns, dtype). agreed: further arguments of
    `find_placement`. torch.compile takes the result for a constant.
    """
    placement = find_placement(group, device, *agreed)
    _find_anchor(device)
    return placement.width, placement.dtype


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
    needs_grad: bool,
    name: str,
    group: str,
    schedule: str,
) -> Tensor:
    known = find_tables(tables, offsets.device)
    placement = find_placement_again(group, offsets.device, known.dims, dtype, batch, name)
    return look_up_and_send(
        indices, offsets, known, weights, placement, group, mode, checks=checks, needs_grad=needs_grad,
        schedule=schedule,
    )  # fmt: skip


def _fake(offsets: Tensor, batch: int, width: int, dtype: torch.dtype, group: str) -> Tensor:
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
    """Return the dense gradients of this rank's tables.

    Without tables, return the anchor's, since compilers drop a call without results.
    """
    lookups = LookupInput(indices, offsets, weights, mode, tuple(rows), tuple(dims))
    placement = find_placement_again(group, offsets.device, lookups.dims, grad.dtype, batch, name)
    return find_gradients(grad, lookups, placement, group, sparse=False) or [_empty_anchor_gradient(grad)]


def _fake_gradients(grad: Tensor, rows: Sequence[int], dims: Sequence[int]) -> list[Tensor]:
    return [grad.new_empty(shape) for shape in zip(rows, dims, strict=True)] or [_empty_anchor_gradient(grad)]


def _empty_anchor_gradient(grad: Tensor) -> Tensor:
    return grad.new_empty(0, dtype=torch.float32)  # an anchor's dtype


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    indices, offsets, tables, weights, _, mode, batch, *_, sparse, _, name, group, _ = inputs
    ctx.save_for_backward(indices, offsets, weights)
    ctx.shapes = [table.shape[0] for table in tables], [table.shape[1] for table in tables]
    ctx.mode, ctx.batch, ctx.sparse, ctx.name, ctx.group = mode, batch, sparse, name, group


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    indices, offsets, weights = ctx.saved_tensors
    rows, dims = ctx.shapes
    lookups = LookupInput(indices, offsets, weights, ctx.mode, tuple(rows), tuple(dims))
    anchor = None
    if ctx.sparse:
        placement = find_placement_again(ctx.group, offsets.device, lookups.dims, grad.dtype, ctx.batch, ctx.name)
        grads = find_gradients(grad, lookups, placement, ctx.group, sparse=True)
    else:
        grads = _call_gradients(grad, lookups, ctx.batch, ctx.name, ctx.group)
        if not dims:
            (anchor,), grads = grads, []
    return None, None, grads, None, anchor, *[None] * 10


def _call_gradients(grad: Tensor, lookups: LookupInput, batch: int, name: str, group: str) -> list[Tensor]:
    return torch.ops.stretto.embedding_all_to_all_gradients(grad, *lookups[:4], batch, *lookups[4:], name, group)


register_fake(_embedding_all_to_all, _fake)
register_fake(_embedding_all_to_all_gradients, _fake_gradients)
_embedding_all_to_all.register_autograd(_differentiate, setup_context=_save)


class EagerLookup(NamedTuple):
    """The state of an eager call that its backward pass needs, except for tensors."""

    tables: TableSet
    placement: EmbeddingPlacement
    name: str
    group: str
    mode: str
    checks: bool
    sparse: bool
    schedule: str

    def look_up(self, indices: Tensor, offsets: Tensor, weights: Tensor | None, **options: Any) -> Tensor:
        """Make the call."""
        given = indices, offsets, self.tables, weights, self.placement, self.group, self.mode
        return look_up_and_send(*given, checks=self.checks, schedule=self.schedule, **options)

    def describe(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> LookupInput:
        """Return what the backward pass needs of the input."""
        return LookupInput(indices, offsets, weights, self.mode, self.tables.rows, self.tables.dims)


def find_call(
    indices: Tensor,
    offsets: Tensor,
    tables: Sequence[Tensor],
    group: dist.ProcessGroup | None,
    weights: Tensor | None = None,
    mode: str = "sum",
    batch: int | None = None,
    name: str = "",
    *,
    checks: bool = True,
    sparse: bool = False,
    schedule: str | Schedule | None = None,
    is_update: bool = False,
) -> EagerLookup:
    """Check an eager call, and agree on the placement; the arguments are those of `embedding_all_to_all`.

    is_update: no gradients are made of the tables, whatever they say.
    """
    group_name, device = find_name(group), offsets.device
    known = find_tables(tables, device)
    world = find_group(group_name).size()
    count = require_input(indices, offsets, len(tables), weights, mode, batch, world)
    by, needs_grad = _name_schedule(schedule, world), not is_update and known.needs_grad()
    agreed = group_name, device, name, known.dims, known.dtype, count, needs_grad, indices.dtype, by
    return EagerLookup(known, find_placement(*agreed), name, group_name, mode, checks, sparse, by)


class _LookUp(torch.autograd.Function):
    """The eager path with gradients: cheaper on the host than torch.library's dispatch of hundreds of tables."""

    @staticmethod
    def forward(
        ctx: Any,
        call: EagerLookup,
        indices: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        anchor: Tensor | None,
        *tables: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(indices, offsets, weights)
        ctx.call, ctx.permit = call, torch.empty(1, dtype=torch.int32, device=offsets.device)
        return call.look_up(indices, offsets, weights, needs_grad=True, call_permit=ctx.permit)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: EagerLookup = ctx.call
        lookups = call.describe(*ctx.saved_tensors)
        if is_traced(grad) and not call.sparse:
            grads = _call_gradients(grad, lookups, call.placement.batch, call.name, call.group)[: len(lookups.dims)]
        else:
            grads = find_gradients(grad, lookups, call.placement, call.group, sparse=call.sparse, permit=ctx.permit)
        return *[None] * 5, *grads


@takes_tensors
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
    """Autotune `embedding_all_to_all` for such input: measure launch configs; later calls of its size take the fastest.

    The arguments are those of the operator, and all ranks call it. Times are kept on this machine (`stretto.tuning`),
    for later runs too. The chosen config may change the order in which a bag's rows are added, and so the last bits. It
    takes about 30 x 9 calls. Returns this rank's config.
    """
    group_name = find_name(group)
    device = offsets.device
    known = find_tables(tables, device)
    count = require_input(indices, offsets, len(tables), weights, mode, batch, find_group(group_name).size())
    agreed = known.dims, known.dtype, count, known.needs_grad(), indices.dtype
    placement = find_placement(group_name, device, name, *agreed)
    shape = find_shape(placement, len(tables), indices.numel())

    def run(config: LaunchConfig) -> Tensor:
        return look_up_and_send(indices, offsets, known, weights, placement, group_name, mode, config=config)

    return measure_launch_configs(
        list_launch_configs(choose_launch_config(shape, device), device), run, shape, find_group(group_name), device
    )


def check_indices(group: dist.ProcessGroup | None = None) -> None:
    """Wait for the device, and raise the errors of the group's look-ups.

    ValueError for bad indices or offsets, PeerError if a kernel's wait for another rank has timed out.
    """
    for ring in find_output_rings(find_name(group)):
        if ring.channel.device.type == "cuda":
            torch.cuda.synchronize(ring.channel.device)
        ring.index_errors.check()
        ring.channel.check()


def find_placement_again(
    group: str, device: torch.device, dims: tuple[int, ...], dtype: torch.dtype, batch: int, name: str
) -> EmbeddingPlacement:
    """Return the placement that the call has agreed on; where torch calls an operator directly, agree on it now."""
    return find_placement(group, device, name, dims, dtype if dims else None, batch, needs_grad=False)
