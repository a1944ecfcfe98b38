"""How a look-up is launched: sizes of tiles and slices, order, and how many programs."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.ops.embedding.forward_kernel import ORDERS
from stretto.ops.embedding.lookup import Lookup, Pooling
from stretto.ops.embedding.placement import common_multiple

_LONG_BAGS = 16  # average indices of a bag from which on one bag fills a tile
_MOST_TABLES_KEPT = 256


class Way(NamedTuple):
    """How a kernel is launched; every choice gives right results, and `bags` and `rows` alone may change their bits.

    bags, rows: of a tile. slice: samples of a task, a multiple of bags. order: one of `ORDERS`. programs: on each
    multiprocessor.
    """

    bags: int
    rows: int
    slice: int
    num_warps: int
    programs: int
    order: str

    def check(self) -> "Way":
        """Itself. ValueError for what no kernel can be launched with."""
        for name, value in (("bags", self.bags), ("rows", self.rows), ("slice", self.slice)):
            if value < 1 or value & (value - 1):
                raise ValueError(f"a way's {name} is a power of two, not {value}")
        if self.slice < self.bags:
            raise ValueError(f"a way's slice is of whole tiles: {self.slice} samples are fewer than {self.bags} bags")
        if self.programs < 1 or self.num_warps not in (1, 2, 4, 8):
            raise ValueError(
                f"a way has 1 program or more of 1, 2, 4 or 8 warps, not {self.programs}, {self.num_warps}"
            )
        if self.order not in ORDERS:
            raise ValueError(f"a way's order is one of {', '.join(ORDERS)}, not {self.order!r}")
        return self


def choose_way(block_bytes: int, tables: int, batch: int, total: int, device: torch.device) -> Way:
    """A table, not a measurement, for rows of so many bytes, global batch and indices.

    Long bags are pooled one at a time, rows in flight; short ones many at a time. Slices are as large as leaves each
    program several, up to 32. Interpreted programs run in turns: a few.
    """
    bags = tables * batch
    is_long = total >= _LONG_BAGS * bags
    if device.type == "cpu":
        return Way(2, 2, 4, 1, 3, "by_table" if is_long else "mixed")
    num_warps = min(max(block_bytes // 1024, 1), 8)
    programs = max(16 // num_warps, 2)
    tile = (1, 8) if is_long else (8, 1)
    count = programs * count_multiprocessors(device)
    largest = max(bags // (4 * count), 1)
    size = max(min(1 << (largest.bit_length() - 1), 32), tile[0])
    return Way(*tile, size, num_warps, programs, "by_table" if is_long else "mixed")


@functools.lru_cache
def count_multiprocessors(device: torch.device) -> int:
    """Of a GPU; 1 for a CPU."""
    return 1 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


_kept: dict[tuple[object, ...], Tensor] = {}
_captured: list[Tensor] = []  # what replays of CUDA graphs copy from


def keep_words(words: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """int64 numbers in device memory, put there at the first call with these.

    ValueError while a CUDA graph is captured, if they are not there yet.
    """
    key = (device, words)
    if key not in _kept:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError("a CUDA graph takes tables that a call has had before: call the operator once with these")
        while len(_kept) >= _MOST_TABLES_KEPT:
            del _kept[next(iter(_kept))]
        _kept[key] = torch.tensor(words, dtype=torch.int64, device=device)
    return _kept[key]


def send_words(words: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """int64 numbers in device memory, for one call. The host does not wait, and a CUDA graph repeats the copy."""
    if device.type == "cpu":
        return torch.tensor(words, dtype=torch.int64)
    staged = torch.tensor(words, dtype=torch.int64).pin_memory()
    if torch.cuda.is_current_stream_capturing():
        _captured.append(staged)
    return staged.to(device, non_blocking=True)


def describe_tables(
    tables: Sequence[Tensor], first_column: int, batch: int, width: int, total: int, device: torch.device
) -> Lookup:
    """What kernels take of these tables; columns of a row of the output begin at first_column with table 0."""
    shapes = [(table.data_ptr(), table.shape[0], table.shape[1]) for table in tables]
    itemsize = tables[0].element_size() if tables else 4
    return describe_shapes(shapes, itemsize, first_column, batch, width, total, device)


def describe_shapes(
    shapes: Sequence[tuple[int, int, int]],
    itemsize: int,
    first_column: int,
    batch: int,
    width: int,
    total: int,
    device: torch.device,
) -> Lookup:
    """`describe_tables` for tables of (address, rows, dim) and elements of so many bytes."""
    dims = tuple(dim for _, _, dim in shapes)
    words, column = [], first_column
    for address, rows, dim in shapes:
        words.append((address, rows, dim, column))
        column += dim
    return Lookup(
        keep_words(tuple(words) or ((0, 0, 0, 0),), device),
        len(dims),
        batch,
        width,
        total,
        tl.constexpr(dims[0] if len(set(dims)) == 1 else 0),
        tl.constexpr(triton.next_power_of_2(max(dims, default=4))),
        tl.constexpr(common_multiple(dims, itemsize) if dims else 4),
    )


def describe_pooling(way: Way, mode: str, checks: bool) -> Pooling:
    """What kernels take of a way."""
    constants = (way.bags, way.rows, way.slice, mode == "mean", checks)
    return Pooling(*(tl.constexpr(value) for value in constants))
