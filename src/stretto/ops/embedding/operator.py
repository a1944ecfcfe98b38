"""`embedding_all_to_all`, its torch.library operators and gradients."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.ops.checks import find_name
from stretto.ops.embedding.forward import look_up_and_send
from stretto.ops.embedding.placement import Placement, find_placement, require_input
from stretto.ops.workspace import find_group


def embedding_all_to_all(
    indices: Tensor,
    offsets: Tensor,
    tables: Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    weights: Tensor | None = None,
    mode: str = "sum",
    batch: int | None = None,
    checks: bool = True,
) -> Tensor:
    """Pool rows of this rank's tables for the global batch; returns all ranks' tables' vectors for the local batch.

    tables: this rank's, each [rows, dim], contiguous, of any number (a rank may have none), rows and dims (multiples of
    4, up to 2048); all ranks' are of one dtype, fp32, fp16 or bf16. indices: [total], int32 or int64. offsets:
    [tables x global batch + 1], feature-major: the indices of sample s in table t are those from offsets[t * batch + s]
    to offsets[t * batch + s + 1] - 1; none is a bag of zeros. weights: [total], a factor for each index, without a
    gradient. mode: "sum", or "mean", which divides by the number of indices, weighted or not. batch: the global one,
    which a rank without tables must say. group: None for all ranks.

    Returns [global batch / world, sum of all ranks' dims], of the tables' dtype, columns in order of rank, then table;
    sums are fp32. It lies in memory that peers store into: see docs/embedding.md.

    checks: look at every index and offset on the device. A bad one is read as zeros (an empty bag), and raises a
    ValueError, with table, position and rank, here on CPUs and at the next call or `check_indices` on GPUs; with
    checks=False it reads whatever lies there. ValueError at once for other input that cannot be (a batch that the group
    does not divide, tables that disagree between ranks, ...), and for a rank outside of the group; PeerError for a rank
    that does not come. Paper 002, section 3.
    """
    name = find_name(group)
    count = require_input(indices, offsets, tables, weights, mode, batch, find_group(name).size())
    width, dtype, needs_grad = _agree(
        name,
        offsets.device,
        tuple(table.shape[1] for table in tables),
        tables[0].dtype if tables else None,
        count,
        any(table.requires_grad for table in tables),
    )
    # A rank without tables takes part in the backward pass too: its output needs a gradient for something.
    anchor = None
    if not tables and needs_grad and torch.is_grad_enabled():
        anchor = torch.empty(0, device=offsets.device, requires_grad=True)
    return torch.ops.stretto.embedding_all_to_all(
        indices, offsets, list(tables), weights, anchor, mode, count, width, dtype, checks, name
    )


@torch.compiler.assume_constant_result
def _agree(
    group: str, device: torch.device, dims: tuple[int, ...], dtype: torch.dtype | None, batch: int, needs_grad: bool
) -> tuple[int, torch.dtype, bool]:
    placement = find_placement(group, device, dims, dtype, batch, needs_grad)
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
    group: str,
) -> Tensor:
    placement = _find_again(group, offsets.device, [table.shape[1] for table in tables], dtype, batch)
    return look_up_and_send(indices, offsets, tables, weights, placement, group, mode, checks=checks)


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
    group: str,
) -> Tensor:
    return offsets.new_empty(batch // find_group(group).size(), width, dtype=dtype)


def _find_again(group: str, device: torch.device, dims: Sequence[int], dtype: torch.dtype, batch: int) -> Placement:
    """The placement that the call has agreed on before; where torch calls an operator by itself, it is agreed on now."""
    return find_placement(group, device, tuple(dims), dtype if dims else None, batch, needs_grad=False)
