# SPDX-License-Identifier: Apache-2.0
"""Tensor operations of both phases: splitting large buffers into messages, and reducing what arrives.

No message, and no call of the library, exceeds a number of bytes (`part_bytes`). Backends count some things in 32 bits,
so single messages over 2 GiB are risky; the staging buffers inside a node need be no larger than that limit either.
Sums of narrow dtypes are made in fp32, in an order that the algorithm fixes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

DEFAULT_PART_BYTES = 2**30


@dataclass(frozen=True)
class SlotRange:
    """Elements `begin` to `end` of each of the slots `first` to `last` (both ends excluded)."""

    first: int
    last: int
    begin: int
    end: int

    @property
    def slots(self) -> int:
        return self.last - self.first

    @property
    def elements(self) -> int:
        return self.end - self.begin


def split_range(elements: int, limit: int) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of consecutive ranges of at most `limit` (and at least one) of `elements` elements."""
    limit = max(1, limit)
    for begin in range(0, elements, limit):
        yield begin, min(begin + limit, elements)


def split_slots(slots: int, elements: int, limit: int) -> Iterator[SlotRange]:
    """Split `slots` rows of `elements` into ranges of at most `limit` elements in total.

    Yields whole slots while one fits the limit, else ranges of one slot; a single range where everything fits.
    """
    if not elements:
        return
    if elements <= limit:
        for first, last in split_range(slots, limit // elements):
            yield SlotRange(first, last, 0, elements)
        return
    for slot in range(slots):
        for begin, end in split_range(elements, limit):
            yield SlotRange(slot, slot + 1, begin, end)


Reduction = Literal["sum", "avg", "max", "min"]
REDUCTIONS: tuple[Reduction, ...] = ("sum", "avg", "max", "min")
_OPS = (("sum", dist.ReduceOp.SUM), ("avg", dist.ReduceOp.AVG), ("max", dist.ReduceOp.MAX), ("min", dist.ReduceOp.MIN))
_LIBRARY = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_LIBRARY_DTYPES = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)
)


def check_reduction(op: object, dtype: torch.dtype) -> Reduction:
    """Normalize `op` (a name, or torch.distributed's op) to a name. ValueError where `dtype` does not support it."""
    name = op if isinstance(op, str) else next((known for known, same in _OPS if op == same), None)
    if name not in REDUCTIONS:
        raise ValueError(
            f"op is {op!r}: must be one of {', '.join(REDUCTIONS)}, or torch.distributed's op of that name"
        )
    if dtype == torch.bool:
        raise ValueError(f"op {name!r} of {dtype} is not defined; a uint8 tensor would do")
    if name == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"op 'avg' of {dtype} is no whole number; 'sum' would do")
    if name in ("max", "min") and dtype.is_complex:
        raise ValueError(f"op {name!r} of {dtype}: complex numbers have no order; 'sum' would do")
    return name


def library_op(name: Reduction) -> dist.ReduceOp.RedOpType:
    """The op to give the library. An average is a sum that is divided afterwards: gloo has no average."""
    return _LIBRARY[name]


def library_reduces(dtype: torch.dtype) -> bool:
    """Check whether both gloo and NCCL reduce this dtype."""
    return dtype in _LIBRARY_DTYPES


def accumulate(total: Tensor, incoming: Tensor, name: Reduction, divisor: int | None = None) -> None:
    """Reduce `incoming` into `total` (same shape and dtype), divide by `divisor` if given, and round once."""
    if name == "max":
        _compare(torch.maximum, total, incoming)
    elif name == "min":
        _compare(torch.minimum, total, incoming)
    elif (wide := _wider(total.dtype)) is not None or divisor is not None:
        summed = total.to(wide or total.dtype) + incoming.to(wide or total.dtype)
        total.copy_(summed if divisor is None else summed.div_(divisor))
    else:
        total.add_(incoming)


def reduce_rows(rows: Tensor, out: Tensor, name: Reduction, divisor: int | None = None) -> None:
    """Reduce `rows` [ranks, ...] into `out` [...] in rank order, and round once at the end."""
    total = rows[0].to(_wider(rows.dtype) or rows.dtype, copy=True)
    for row in rows[1:]:
        accumulate(total, row.to(total.dtype), name)
    if divisor is not None:
        total.div_(divisor)
    out.copy_(total)


def _compare(pick: Callable[..., Tensor], total: Tensor, incoming: Tensor) -> None:
    wide = _wider(total.dtype)
    if wide is None:
        pick(total, incoming, out=total)
    else:
        total.copy_(pick(total.to(wide), incoming.to(wide)))


def _wider(dtype: torch.dtype) -> torch.dtype | None:
    """The dtype in which sums of a narrow floating-point dtype are made; None for all other dtypes."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else None


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as flat uint8, which backends support for every dtype."""
    return tensor.view(-1).view(torch.uint8)
