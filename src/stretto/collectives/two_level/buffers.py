"""Adding up what ranks send: in fp32 where the dtype is narrow, in an order that the algorithm fixes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

DEFAULT_PART_BYTES = 2**30


@dataclass(frozen=True)
class SlotRange:
    """Elements `begin` to `end` of each of the slots `first` to `last` (both ends not included)."""

    first: int
    last: int
    begin: int
    end: int

    @property
    def slots(self) -> int:
        """How many slots it has a part of."""
        return self.last - self.first

    @property
    def elements(self) -> int:
        """How many elements of each."""
        return self.end - self.begin


def cut_ranges(elements: int, limit: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of consecutive ranges of at most `limit` elements, at least one of them each; none for none."""
    limit = max(1, limit)
    for begin in range(0, elements, limit):
        yield begin, min(begin + limit, elements)


def cut_slots(slots: int, elements: int, limit: int) -> Iterator[SlotRange]:
    """Pieces of `slots` rows of `elements`, each piece of at most `limit` elements together.

    Whole slots while one fits into the limit, else ranges of one slot; one piece where everything fits.
    """
    if not elements:
        return
    if elements <= limit:
        for first, last in cut_ranges(slots, limit // elements):
            yield SlotRange(first, last, 0, elements)
        return
    for slot in range(slots):
        for begin, end in cut_ranges(elements, limit):
            yield SlotRange(slot, slot + 1, begin, end)


Reduction = Literal["sum", "avg", "max", "min"]
REDUCTIONS: tuple[Reduction, ...] = ("sum", "avg", "max", "min")
_OPS = (
    ("sum", dist.ReduceOp.SUM),
    ("avg", dist.ReduceOp.AVG),
    ("max", dist.ReduceOp.MAX),
    ("min", dist.ReduceOp.MIN),
)
_LIBRARY = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_LIBRARY_DTYPES = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)
)


def check_reduction(op: object, dtype: torch.dtype) -> Reduction:
    """The reduction's name, for a name or torch.distributed's op. ValueError for what `dtype` cannot be reduced by."""
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
    """What the library is asked for; an average is its sum, divided afterwards: gloo has none."""
    return _LIBRARY[name]


def library_reduces(dtype: torch.dtype) -> bool:
    """Whether gloo and NCCL both reduce this dtype."""
    return dtype in _LIBRARY_DTYPES


def accumulate(total: Tensor, incoming: Tensor, name: Reduction, divisor: int | None = None) -> None:
    """Reduce `incoming` into `total` (same shape and dtype), then divide where a divisor is given; rounds once."""
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
    """Reduce `rows` [ranks, ...] into `out` [...], rank after rank, and round once at the end."""
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
    """What sums of a narrow floating-point dtype are made in."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else None


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, flat, as a view: backends carry every dtype so."""
    return tensor.view(-1).view(torch.uint8)
