"""Look up the global batch in this rank's tables and hand every rank its rows: the one place where that is chosen.

`pool_and_exchange` runs stretto.ops' fused operator ("kernel") or what plain PyTorch has for it ("library").
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

Implementation = Literal["auto", "kernel", "library"]
OPERATOR = "embedding_all_to_all"  # of stretto.ops
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Lookups:
    """What a rank's tables are asked for: bags of the global batch, feature-major.

    indices: [total], rows of the rank's first table for all samples, then of its second. offsets: [tables x global
    batch + 1], where each bag begins. ends: offsets[::global batch] on the host, where each table's begin. batch: the
    global batch.
    """

    indices: Tensor
    offsets: Tensor
    ends: tuple[int, ...]
    batch: int


def pool_and_exchange(
    lookups: Lookups,
    tables: Sequence[Tensor],
    dims: Sequence[int],
    group: dist.ProcessGroup,
    *,
    dtype: torch.dtype,
    implementation: Implementation = "auto",
) -> Tensor:
    """Add up every bag's rows of its table, and return the local batch's vectors from all ranks' tables.

    tables: this rank's, [rows, dim] each, of `dtype`; it may have none. dims: how wide the vectors of each rank's
    tables are together. Returns [global batch / ranks, sum of dims] in order of rank, then table. Differentiable with
    respect to the tables, with sparse gradients. Collective, forward and backward, also for a rank without a table.

    "auto" takes the operator where it is there and knows the dtype and device; "kernel" raises ValueError elsewhere.
    """
    if (operator := choose_operator(implementation, dtype, lookups.indices.device)) is not None:
        return operator(lookups.indices, lookups.offsets, list(tables), group, mode="sum")
    pooled = _pool(lookups, tables, dtype)
    if group.size() == 1:
        return pooled
    return _HandOut.apply(pooled, tuple(dims), group)


def choose_operator(
    implementation: Implementation, dtype: torch.dtype, device: torch.device
) -> Callable[..., Tensor] | None:
    """The operator that runs; None for the library's path. The same on every rank. ValueError where it must and cannot.

    This is where stretto.ops' operator is switched in: it is found by its name.
    """
    if implementation not in get_args(Implementation):
        known = ", ".join(get_args(Implementation))
        raise ValueError(f"implementation is {implementation!r}, but must be one of {known}")
    if implementation == "library" or (implementation == "auto" and device.type != "cuda"):
        return None
    operator, reason = _find_operator(), None
    if operator is None:
        reason = f"there is no stretto.ops.{OPERATOR} here"
    elif dtype not in KERNEL_DTYPES:
        reason = f"the kernel does not know {str(dtype).removeprefix('torch.')}"
    if implementation == "kernel" and reason is not None:
        raise ValueError(f"implementation is 'kernel', but {reason}; implementation='library' would do")
    return operator if reason is None else None


def _find_operator() -> Callable[..., Tensor] | None:
    try:
        operators = import_module("stretto.ops")  # takes Triton, which is not everywhere
    except ImportError:
        return None
    return getattr(operators, OPERATOR, None)


def _pool(lookups: Lookups, tables: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """[global batch, dims of this rank's tables], table by table."""
    if not tables:
        # It has a gradient, of no number: its backward pass takes part in the exchange that the others wait for.
        return torch.zeros(
            lookups.batch, 0, dtype=dtype, device=lookups.indices.device, requires_grad=torch.is_grad_enabled()
        )
    pooled = []
    for number, table in enumerate(tables):
        start, stop = lookups.ends[number : number + 2]
        bags = lookups.offsets[number * lookups.batch : (number + 1) * lookups.batch + 1] - start
        pooled.append(
            F.embedding_bag(lookups.indices[start:stop], table, bags, mode="sum", sparse=True, include_last_offset=True)
        )
    return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)


class _HandOut(torch.autograd.Function):
    """[global batch, own dims] -> [local batch, all ranks' dims]: rows to their ranks. Backward: the way back."""

    @staticmethod
    def forward(ctx: Any, pooled: Tensor, dims: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        ctx.dims, ctx.group, ctx.own_dim = dims, group, pooled.shape[1]
        world = group.size()
        batch = len(pooled) // world
        arrived = pooled.new_empty(batch * sum(dims))
        dist.all_to_all_single(
            arrived, pooled.reshape(-1), [batch * dim for dim in dims], [batch * pooled.shape[1]] * world, group=group
        )
        parts = arrived.split([batch * dim for dim in dims])
        return torch.cat([part.view(batch, dim) for part, dim in zip(parts, dims, strict=True)], dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        world, batch = ctx.group.size(), len(gradient)
        leaving = torch.cat([part.reshape(-1) for part in gradient.split(ctx.dims, dim=1)])
        arrived = gradient.new_empty(world * batch * ctx.own_dim)
        dist.all_to_all_single(
            arrived, leaving, [batch * ctx.own_dim] * world, [batch * dim for dim in ctx.dims], group=ctx.group
        )
        return arrived.view(world * batch, ctx.own_dim), None, None
