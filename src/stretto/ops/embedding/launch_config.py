# SPDX-License-Identifier: Apache-2.0
"""Launch configs of the look-up kernels, and their arguments in device memory.

`LaunchConfig` is what may be tuned: tile, slice, order, warps, programs. `describe_tables` and `describe_pooling` make
the arguments that kernels take, and cache those in device memory.
"""

import functools
import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from stretto.memory.gpus import count_multiprocessors
from stretto.ops.embedding.forward_kernel import ORDERS
from stretto.ops.embedding.placement import common_multiple
from stretto.ops.embedding.pooling_kernel import KernelTables, PoolingConfig
from stretto.ops.embedding.table_set import TableSet
from stretto.tiles import kind_of

_LONG_BAGS = 16  # average indices of a bag; from here on a tile is one bag
_MAX_TABLES_KEPT = 256


class LaunchConfig(NamedTuple):
    """Launch parameters of a look-up kernel. All give right results; only `bags` and `rows` may change their bits.

    bags, rows: of a tile, as in `PoolingConfig`. slice: samples of a task, a multiple of bags. order: one of `ORDERS`.
    programs: on each multiprocessor.
    """

    bags: int
    rows: int
    slice: int
    num_warps: int
    programs: int
    order: str

    def check(self) -> "LaunchConfig":
        """Return the config itself. ValueError for one that no kernel can be launched with."""
        for name, value in (("bags", self.bags), ("rows", self.rows), ("slice", self.slice)):
            if value < 1 or value & (value - 1):
                raise ValueError(f"a launch config's {name} must be a power of two, not {value}")
        if self.slice < self.bags:
            raise ValueError(
                f"a launch config's slice is of whole tiles: {self.slice} samples are fewer than {self.bags} bags"
            )
        if self.programs < 1 or self.num_warps not in (1, 2, 4, 8):
            raise ValueError(
                f"a launch config has 1 program or more of 1, 2, 4 or 8 warps, not {self.programs}, {self.num_warps}"
            )
        if self.order not in ORDERS:
            raise ValueError(f"a launch config's order must be one of {', '.join(ORDERS)}, not {self.order!r}")
        return self


class LookupSize(NamedTuple):
    """Sizes on which a look-up's speed depends.

    world: ranks. block_bytes: of the longest row, rounded up to a power of two. tables: this rank's. batch: global.
    total: number of indices.
    """

    world: int
    block_bytes: int
    tables: int
    batch: int
    total: int

    @property
    def pooling(self) -> float:
        """Return the average number of indices of a bag."""
        return self.total / max(self.tables * self.batch, 1)


@functools.lru_cache(maxsize=4096)
def choose_launch_config(shape: LookupSize, device: torch.device) -> LaunchConfig:
    """Choose a launch config by a table, without measuring.

    Long bags are pooled one at a time, with several rows in flight, and all programs work on one table after another,
    so that repeated rows are still in the L2 cache; a slice is a program's part of a table's batch. Short bags are
    pooled many at a time, all tables in turn, so that tables with many indices hide the sends of those with few; a
    slice is as large as leaves each program several, up to 32. Interpreted programs take turns on one core: there are a
    few.
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
    """List the configs that tuning measures, the chosen one first: other tiles, orders, slices, numbers of programs.

    Their number does not depend on the chosen one, since all ranks must measure equally many. On CPUs, where tuning
    gains nothing, there are two.
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
    """Round up to a power of two. Triton's own function, made for kernels too, costs the host microseconds."""
    return 1 << max(number - 1, 0).bit_length()


_kept: dict[tuple[object, ...], Tensor] = {}
_captured: dict[int, Tensor] = {}  # by address: tensors that replays of CUDA graphs read or copy from


def cache_on_device(words: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Return int64 numbers in device memory, copied there at the first call with these numbers.

    ValueError while a CUDA graph is captured, if they are not in device memory yet.
    """
    key = (device, words)
    if key not in _kept:
        if _is_capturing(device):
            raise ValueError("a CUDA graph takes tables that a call has had before: call the operator once with these")
        while len(_kept) >= _MAX_TABLES_KEPT:
            del _kept[next(iter(_kept))]
        _kept[key] = torch.tensor(words, dtype=torch.int64, device=device)
    return hold_for_replays(_kept[key])


def hold_for_replays(kept: Tensor) -> Tensor:
    """Return the tensor itself; while a CUDA graph is captured, also keep it alive for good.

    Replays read it, and there is no notification when a graph is destroyed, so it must outlive the caches. Calls
    outside of a capture keep nothing.
    """
    if _is_capturing(kept.device):
        _captured[kept.data_ptr()] = kept
    return kept


def copy_to_device(words: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Copy int64 numbers to device memory, for one call. The host does not wait, and a CUDA graph repeats the copy."""
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
    """Make the kernel argument for these tables; table 0's columns begin at first_column of a row of the output."""
    described = _describe_tables(tables, first_column, width)
    hold_for_replays(described.meta)
    return described._replace(batch=batch, width=width, total=total)


@functools.lru_cache(maxsize=_MAX_TABLES_KEPT)
def _describe_tables(tables: TableSet, first_column: int, width: int) -> KernelTables:
    shapes = tuple(zip(tables.addresses, tables.rows, tables.dims, strict=True))
    itemsize = tables.dtype.itemsize if tables.dtype else 4
    return describe_shapes(shapes, itemsize, first_column, width, tables.device)


def describe_shapes(
    shapes: Sequence[tuple[int, int, int]], itemsize: int, first_column: int, width: int, device: torch.device
) -> KernelTables:
    """Make the kernel argument for tables of (address, rows, dim); the sizes of a call are left at 0.

    itemsize: bytes of an element. Kernels read rows as wide as the tables' addresses and dims allow, and store them as
    wide as the output's columns allow: peers' dims decide where in the output this rank's columns begin.
    """
    dims = tuple(dim for _, _, dim in shapes)
    places = tuple(address // itemsize for address, _, _ in shapes)
    words, column = [], first_column
    for address, rows, dim in shapes:
        words.append((address, rows, dim, column))
        column += dim
    return KernelTables(
        cache_on_device(tuple(words) or ((0, 0, 0, 0),), device),
        len(dims),
        0,
        0,
        0,
        tl.constexpr(dims[0] if len(set(dims)) == 1 else 0),
        tl.constexpr(round_up_to_power(max(dims, default=4))),
        tl.constexpr(common_multiple((*dims, *places), itemsize) if dims else 4),
        tl.constexpr(common_multiple((*dims, first_column, width), itemsize) if dims else 4),
    )


def find_kind(tables: KernelTables) -> tuple[Hashable, ...]:
    """Return all of this argument that Triton compiles a kernel for: part of a key of `stretto.tiles.Launches`."""
    numbers = tables.count, tables.batch, tables.width, tables.total
    constants = tables.dim, tables.block, tables.multiple, tables.out_multiple
    return *map(kind_of, (tables.meta, *numbers)), *(constant.value for constant in constants)


@functools.lru_cache
def describe_pooling(config: LaunchConfig, mode: str, checks: bool) -> PoolingConfig:
    """Make the kernel argument of a config."""
    constants = (config.bags, config.rows, config.slice, mode == "mean", checks)
    return PoolingConfig(*(tl.constexpr(value) for value in constants))
