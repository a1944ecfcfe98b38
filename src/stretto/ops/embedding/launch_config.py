"""How a look-up is launched: sizes of tiles and slices, order, and how many programs."""

import functools
import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from stretto.ops.embedding.forward_kernel import ORDERS
from stretto.ops.embedding.placement import common_multiple
from stretto.ops.embedding.pooling_kernel import KernelTables, PoolingConfig
from stretto.ops.embedding.table_set import TableSet
from stretto.tiles import kind_of

_LONG_BAGS = 16  # average indices of a bag from which on one bag fills a tile
_MOST_TABLES_KEPT = 256


class LaunchConfig(NamedTuple):
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

    def check(self) -> "LaunchConfig":
        """Itself. ValueError for what no kernel can be launched with."""
        for name, value in (("bags", self.bags), ("rows", self.rows), ("slice", self.slice)):
            if value < 1 or value & (value - 1):
                raise ValueError(f"a launch config's {name} is a power of two, not {value}")
        if self.slice < self.bags:
            raise ValueError(
                f"a launch config's slice is of whole tiles: {self.slice} samples are fewer than {self.bags} bags"
            )
        if self.programs < 1 or self.num_warps not in (1, 2, 4, 8):
            raise ValueError(
                f"a launch config has 1 program or more of 1, 2, 4 or 8 warps, not {self.programs}, {self.num_warps}"
            )
        if self.order not in ORDERS:
            raise ValueError(f"a launch config's order is one of {', '.join(ORDERS)}, not {self.order!r}")
        return self


class LookupSize(NamedTuple):
    """What a look-up's speed depends on: ranks, bytes of the longest row, tables, global batch, indices."""

    world: int
    block_bytes: int
    tables: int
    batch: int
    total: int

    @property
    def pooling(self) -> float:
        """Average indices of a bag."""
        return self.total / max(self.tables * self.batch, 1)


def choose_launch_config(shape: LookupSize, device: torch.device) -> LaunchConfig:
    """A table, not a measurement.

    Long bags are pooled one at a time, with rows in flight, and table after table by all programs at once, so that rows
    that come again are still in the L2 cache: a slice is a program's share of a table's batch. Short bags are pooled
    many at a time, all tables in turn, so that those with many indices hide what those with few send; a slice is as
    large as leaves each program several, up to 32. Interpreted programs run in turns: a few.
    """
    is_long = shape.pooling >= _LONG_BAGS
    order = "by_table" if is_long else "mixed"
    if device.type == "cpu":
        return LaunchConfig(2, 2, 4, 1, 3, order)
    num_warps = min(max(shape.block_bytes // 1024, 1), 8)
    programs = max(16 // num_warps, 2)
    count = programs * count_multiprocessors(device)
    if is_long:
        return LaunchConfig(1, 8, min(round_up_to_power(-(-shape.batch // count)), 32), num_warps, programs, order)
    size = 1 << (max(shape.tables * shape.batch // (4 * count), 1).bit_length() - 1)
    return LaunchConfig(8, 1, min(max(size, 8), 32), num_warps, programs, order)


def list_launch_configs(chosen: LaunchConfig, device: torch.device) -> list[LaunchConfig]:
    """The configs that tuning measures beside a chosen one, equally many for each: tiles, orders, slices, programs.

    On CPUs, where nothing is worth one, a few.
    """
    if device.type == "cpu":
        return [chosen, chosen._replace(order="remote_first")]
    configs = [chosen]
    for bags, rows in ((1, 8), (1, 16), (2, 8), (4, 2), (8, 1)):
        for size in (1, 4, 16):
            for order in ("by_table", "mixed"):
                configs.append(chosen._replace(bags=bags, rows=rows, slice=max(size, bags), order=order))
    for programs in (8, 12, 24, 32):
        configs.append(chosen._replace(programs=max(programs // chosen.num_warps, 1)))
    return configs


def round_up_to_power(number: int) -> int:
    """Of two. Triton's own function may be called in kernels too, for which its host waits microseconds."""
    return 1 << max(number - 1, 0).bit_length()


@functools.lru_cache
def count_multiprocessors(device: torch.device) -> int:
    """Of a GPU; 1 for a CPU."""
    return 1 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


_kept: dict[tuple[object, ...], Tensor] = {}
_captured: dict[int, Tensor] = {}  # by address: what replays of CUDA graphs read or copy from


def keep_words(words: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """int64 numbers in device memory, put there at the first call with these.

    ValueError while a CUDA graph is captured, if they are not there yet.
    """
    key = (device, words)
    if key not in _kept:
        if _is_capturing(device):
            raise ValueError("a CUDA graph takes tables that a call has had before: call the operator once with these")
        while len(_kept) >= _MOST_TABLES_KEPT:
            del _kept[next(iter(_kept))]
        _kept[key] = torch.tensor(words, dtype=torch.int64, device=device)
    return hold_for_replays(_kept[key])


def hold_for_replays(kept: Tensor) -> Tensor:
    """The tensor itself; while a CUDA graph is captured, it is never freed from then on, whatever caches let go of.

    Replays read it, and nobody says when a graph is gone. Calls outside of graphs hold nothing.
    """
    if _is_capturing(kept.device):
        _captured[kept.data_ptr()] = kept
    return kept


def send_words(words: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """int64 numbers in device memory, for one call. The host does not wait, and a CUDA graph repeats the copy."""
    staged = torch.from_numpy(np.fromiter(itertools.chain.from_iterable(words), np.int64))
    if device.type == "cpu":
        return staged
    staged = staged.pin_memory()
    if _is_capturing(device):
        _captured[staged.data_ptr()] = staged
    return staged.to(device, non_blocking=True)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def describe_tables(tables: TableSet, first_column: int, batch: int, width: int, total: int) -> KernelTables:
    """What kernels take of these tables; columns of a row of the output begin at first_column with table 0."""
    lookup = _describe_tables(tables, first_column, width)
    hold_for_replays(lookup.meta)
    return lookup._replace(batch=batch, width=width, total=total)


@functools.lru_cache(maxsize=_MOST_TABLES_KEPT)
def _describe_tables(tables: TableSet, first_column: int, width: int) -> KernelTables:
    shapes = tuple(zip(tables.addresses, tables.rows, tables.dims, strict=True))
    itemsize = tables.dtype.itemsize if tables.dtype else 4
    return describe_shapes(shapes, itemsize, first_column, width, tables.device)


def describe_shapes(
    shapes: Sequence[tuple[int, int, int]], itemsize: int, first_column: int, width: int, device: torch.device
) -> KernelTables:
    """`describe_tables` for tables of (address, rows, dim) and elements of so many bytes; the call's sizes are 0.

    Rows are read as wide as tables' addresses and dims allow, and stored as wide as all ranks' columns do: peers' dims
    say where in the output this rank's columns begin.
    """
    dims = tuple(dim for _, _, dim in shapes)
    places = tuple(address // itemsize for address, _, _ in shapes)
    words, column = [], first_column
    for address, rows, dim in shapes:
        words.append((address, rows, dim, column))
        column += dim
    return KernelTables(
        keep_words(tuple(words) or ((0, 0, 0, 0),), device),
        len(dims),
        0,
        0,
        0,
        tl.constexpr(dims[0] if len(set(dims)) == 1 else 0),
        tl.constexpr(round_up_to_power(max(dims, default=4))),
        tl.constexpr(common_multiple((*dims, *places), itemsize) if dims else 4),
        tl.constexpr(common_multiple((*dims, first_column, width), itemsize) if dims else 4),
    )


def find_kind(lookup: KernelTables) -> tuple[Hashable, ...]:
    """All that decides for what Triton compiles a kernel that is given these tables: see `stretto.tiles.Launches`."""
    numbers = lookup.tables, lookup.batch, lookup.width, lookup.total
    constants = lookup.dim, lookup.block, lookup.multiple, lookup.out_multiple
    return *map(kind_of, (lookup.meta, *numbers)), *(constant.value for constant in constants)


@functools.lru_cache
def describe_pooling(config: LaunchConfig, mode: str, checks: bool) -> PoolingConfig:
    """What kernels take of a config."""
    constants = (config.bags, config.rows, config.slice, mode == "mean", checks)
    return PoolingConfig(*(tl.constexpr(value) for value in constants))
