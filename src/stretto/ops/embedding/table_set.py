"""This rank's tables as calls know them: what is refused, and what follows from how they look, found once."""

import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.ops.checks import DTYPES

MAX_DIM = 2048
_MOST_KEPT = 256
_OPERATOR = "embedding_all_to_all"


@dataclass(frozen=True, eq=False)
class TableSet:
    """Tables that kernels take. Hundreds are read quickly, but not hashed: two of these are equal if they are one.

    addresses: of each table's first element; none where there is none, since torch traces. dtype: None without tables.
    """

    device: torch.device
    addresses: tuple[int, ...]
    rows: tuple[int, ...]
    dims: tuple[int, ...]
    dtype: torch.dtype | None
    have_gradients: tuple[bool, ...]

    def needs_grad(self) -> bool:
        """Whether the tables need gradients. ValueError where some do and others do not."""
        if len(set(self.have_gradients)) > 1:
            place = self.have_gradients.index(not self.have_gradients[0])
            raise ValueError(
                f"{_OPERATOR}: table 0 and table {place} differ in requires_grad: all tables get gradients, or none"
            )
        return any(self.have_gradients)

    @functools.cached_property
    def firsts(self) -> tuple[int, ...]:
        """The first table that is the same memory as each: itself, unless a table is there several times.

        ValueError for tables that have only a part of their memory in common: nothing can change them together.
        """
        itemsize = self.dtype.itemsize if self.dtype else 0
        first_of: dict[tuple[int, int, int], int] = {}
        shapes = zip(self.addresses, self.rows, self.dims, strict=True)
        firsts = tuple(first_of.setdefault(shape, place) for place, shape in enumerate(shapes))
        for (before, one), (after, other) in itertools.pairwise(sorted(first_of.items())):
            if before[0] + before[1] * before[2] * itemsize > after[0]:
                raise ValueError(
                    f"{_OPERATOR}_update: tables {min(one, other)} and {max(one, other)} have a part of their memory "
                    "in common: give the whole table each time, or parts that are apart"
                )
        return firsts


_looks_of = operator.attrgetter("shape", "dtype", "device", "requires_grad")
_found: dict[tuple[object, ...], TableSet] = {}


def find_tables(tables: Sequence[Tensor], device: torch.device) -> TableSet:
    """The set of these tables. ValueError for what no kernel takes; device: of the offsets, and so of all.

    Tables that look as others did are not looked at one by one: that would take longer than a look-up.
    """
    addresses = tuple(map(Tensor.data_ptr, tables))
    looks = (device, addresses, tuple(map(_looks_of, tables)), tuple(map(Tensor.is_contiguous, tables)))
    found = _found.get(looks)
    if found is None:
        found = accept_tables(tables, device, addresses)
        if len(_found) >= _MOST_KEPT:
            _found.clear()
        _found[looks] = found
    return found


def accept_tables(tables: Sequence[Tensor], device: torch.device, addresses: tuple[int, ...] = ()) -> TableSet:
    """As `find_tables`, looking at one after another; no address is read."""
    for place, table in enumerate(tables):
        _require_table(place, table, tables[0], device)
    return TableSet(
        device,
        addresses,
        tuple(table.shape[0] for table in tables),
        tuple(table.shape[1] for table in tables),
        tables[0].dtype if tables else None,
        tuple(table.requires_grad for table in tables),
    )


def _require_table(place: int, table: Tensor, first: Tensor, device: torch.device) -> None:
    name = _OPERATOR
    if table.dim() != 2 or not table.is_contiguous():
        raise ValueError(
            f"{name}: table {place} is no contiguous tensor [rows, dim]: it is {list(table.shape)} with strides "
            f"{table.stride()}"
        )
    rows, dim = table.shape
    require_shape(place, rows, dim, table.dtype)
    if table.dtype != first.dtype:
        raise ValueError(f"{name}: table 0 is {first.dtype} and table {place} {table.dtype}: convert one of them")
    if table.device != device:
        raise ValueError(f"{name}: table {place} is on {table.device} and offsets on {device}: move one of them")


def require_shape(place: int, rows: int, dim: int, dtype: torch.dtype) -> None:
    """ValueError unless kernels take a table [rows, dim] of this dtype."""
    name = _OPERATOR
    if rows < 1:
        raise ValueError(f"{name}: table {place} has no rows")
    if dim < 4 or dim % 4 or dim > MAX_DIM:
        nearest = min(max(-(-dim // 4) * 4, 4), MAX_DIM)
        raise ValueError(
            f"{name}: a table's dim is a multiple of 4 up to {MAX_DIM}, and table {place} has {dim}: {nearest} will do"
        )
    if dtype not in DTYPES:
        raise ValueError(f"{name} takes tables of {name_dtypes()}, and table {place} is {dtype}")


def name_dtypes() -> str:
    """What tables and weights may be of."""
    return ", ".join(str(dtype) for dtype in DTYPES)
