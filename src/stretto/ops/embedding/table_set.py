# SPDX-License-Identifier: Apache-2.0
"""This rank's tables: checked once, and remembered by their addresses and shapes, since a call may have hundreds."""

import functools
import itertools
import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor

from stretto.ops.operands import DTYPES, require_dense

MAX_DIM = 2048
_MAX_KEPT = 256
_T = TypeVar("_T")
_OPERATOR = "embedding_all_to_all"


@dataclass(frozen=True, eq=False)
class TableSet:
    """Checked tables. Hashing hundreds of them takes too long, so two sets are equal only if they are one object.

    addresses: of each table's first element; empty while torch traces. dtype: None without tables.
    """

    device: torch.device
    addresses: tuple[int, ...]
    rows: tuple[int, ...]
    dims: tuple[int, ...]
    dtype: torch.dtype | None
    have_gradients: tuple[bool, ...]

    def needs_grad(self) -> bool:
        """Return whether the tables need gradients. ValueError if some do and others do not."""
        if len(set(self.have_gradients)) > 1:
            place = self.have_gradients.index(not self.have_gradients[0])
            raise ValueError(
                f"{_OPERATOR}: table 0 and table {place} differ in requires_grad: all tables get gradients, or none"
            )
        return any(self.have_gradients)

    @functools.cached_property
    def firsts(self) -> tuple[int, ...]:
        """Return, for each table, the first table with the same memory: itself, unless a table is given several times.

        ValueError for tables that share only a part of their memory: no update can be right for both.
        """
        itemsize = self.dtype.itemsize if self.dtype else 0
        first_of: dict[tuple[int, int, int], int] = {}
        shapes = zip(self.addresses, self.rows, self.dims, strict=True)
        firsts = tuple(first_of.setdefault(shape, place) for place, shape in enumerate(shapes))
        for (before, one), (after, other) in itertools.pairwise(sorted(first_of.items())):
            if before[0] + before[1] * before[2] * itemsize > after[0]:
                raise ValueError(
                    f"{_OPERATOR}_update: tables {min(one, other)} and {max(one, other)} share memory partially: pass "
                    "the whole table each time, or parts that do not overlap"
                )
        return firsts

    @functools.cached_property
    def repeated(self) -> tuple[tuple[int, int], ...]:
        """Return (table, first table with the same memory) of those that are given several times."""
        return tuple((place, first) for place, first in enumerate(self.firsts) if place != first)


class SeenTensors:
    """Keeps what was found for tensors that were checked one by one, which takes longer than a look-up.

    They are the same while they are the same objects, at the same addresses, of the same shapes. (Their dtypes and
    strides are as those of the first: conversions are of all.)
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, tuple[object, Any, list[ref[Tensor]]]] = {}

    def find(self, tensors: Sequence[Tensor], key: Hashable, make: Callable[[tuple[int, ...]], _T]) -> _T:
        """Return what `make` has returned for these tensors and this key; it is given the addresses."""
        addresses = tuple(map(Tensor.data_ptr, tensors))
        first = [(one.dtype, one.is_contiguous()) for one in tensors[:1]]
        looks, ids = (addresses, tuple(map(_shape_of, tensors)), first), (key, *map(id, tensors))
        seen = self._found.get(ids)
        if seen is not None and seen[0] == looks:
            found: _T = seen[1]
            return found
        found = make(addresses)
        if len(self._found) >= _MAX_KEPT:
            self._found.clear()

        def forget(_: object, known: dict[Hashable, Any] = self._found) -> None:
            known.pop(ids, None)  # another tensor may get the id of one that is gone

        self._found[ids] = looks, found, [ref(tensor, forget) for tensor in tensors]
        return found


_shape_of, _needs_grad = operator.attrgetter("shape"), operator.attrgetter("requires_grad")
_looks_of = operator.attrgetter("shape", "dtype", "device", "requires_grad")
_seen = SeenTensors()
_found: dict[tuple[object, ...], TableSet] = {}


def find_tables(tables: Sequence[Tensor], device: torch.device) -> TableSet:
    """Return the set of these tables, checked. ValueError for tables that no kernel takes.

    device: the offsets', which all tables must be on. Other objects, such as new views of the same tables, are the same
    set.
    """

    def find(addresses: tuple[int, ...]) -> TableSet:
        looks = (device, addresses, tuple(map(_looks_of, tables)), tuple(map(Tensor.is_contiguous, tables)))
        if looks not in _found:
            if len(_found) >= _MAX_KEPT:
                _found.clear()
            _found[looks] = accept_tables(tables, device, addresses)
        return _found[looks]

    try:
        return _seen.find(tables, (device, tuple(map(_needs_grad, tables))), find)
    except (AttributeError, RuntimeError, TypeError):  # of what has no address: each call checking all would be slow
        accept_tables(tables, device)
        raise


def accept_tables(tables: Sequence[Tensor], device: torch.device, addresses: tuple[int, ...] = ()) -> TableSet:
    """Check the tables one by one and return their set; reads no address, so that traced tables may be checked."""
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
    require_dense(name, f"tables[{place}]", table)
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
        raise ValueError(f"{name} takes tables of {', '.join(map(str, DTYPES))}, and table {place} is {dtype}")
