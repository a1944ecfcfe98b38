# SPDX-License-Identifier: Apache-2.0
"""Device functions that pool embedding rows, an EmbeddingBag by tiles: for the forward, baseline and backward kernels.

A tile is `PoolingConfig.bags` bags. Each step loads `PoolingConfig.rows` rows of each bag at once and adds them in
fp32. So the order of additions depends on the tile's sizes alone, not on which program computes it: the same input
gives the same bits.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from stretto.ops.embedding.index_errors import BAD_INDEX, BAD_OFFSETS, record_index_error

META = tl.constexpr(4)  # words of `KernelTables.meta` for each table


class KernelTables(NamedTuple):
    """Kernel argument: this rank's tables and the sizes of a call.

    meta: int64 [count, 4]: address, rows, dim, first column in a row of the output. count: of tables. batch: samples of
    each rank. width: columns of a row of the output. total: number of indices.
    Compiled in: dim, if all tables have the same one, else 0; block, the power of two that holds every dim; multiple,
    which divides every dim and every address (in elements); out_multiple, which divides the output's width and every
    table's first column.
    """

    meta: Any
    count: Any
    batch: Any
    width: Any
    total: Any
    dim: Any
    block: Any
    multiple: Any
    out_multiple: Any


class PoolingConfig(NamedTuple):
    """Kernel argument, compiled in: how a kernel pools.

    bags: of a tile. rows: of each bag, loaded at once. slice: bags of a slice, a multiple of `bags`. is_mean: divide by
    the number of indices. checks: check every index and offset.
    """

    bags: Any
    rows: Any
    slice: Any
    is_mean: Any
    checks: Any


class Bags(NamedTuple):
    """Kernel argument: the input of a call, as in `embedding_all_to_all`. weights: None for factors of 1."""

    indices: Any
    offsets: Any
    weights: Any


@triton.jit
def find_table(tables, table):  # type: ignore[no-untyped-def]
    """Return (address, rows, dim, first column in the output) of a table."""
    meta = tables.meta + table * META
    dim = tables.dim
    if tables.dim == 0:
        dim = tl.multiple_of(tl.load(meta + 2), tables.multiple)
    column = tl.multiple_of(tl.load(meta + 3), tables.out_multiple)
    return tl.load(meta), tl.load(meta + 1), dim, column


@triton.jit
def read_bags(tables, pooling, bags, table, world, sample, mask, report):  # type: ignore[no-untyped-def]
    """Return (start, end) of each sample's indices in the table; sample: int32 [bags], of the global batch.

    Offsets that are out of range are recorded in `report` and read as an empty bag.
    """
    bag = tl.cast(table, tl.int64) * (tables.batch * world) + sample
    start = tl.load(bags.offsets + bag, mask=mask, other=0)
    end = tl.load(bags.offsets + bag + 1, mask=mask, other=0)
    if pooling.checks:
        is_bad = (start < 0) | (end < start) | (end > tables.total)
        worst = tl.max(tl.where(is_bad, bag, -1), 0)
        if worst >= 0:
            first, last = tl.load(bags.offsets + worst), tl.load(bags.offsets + worst + 1)
            record_index_error(report, BAD_OFFSETS, tl.cast(table, tl.int64), worst, first, last)
        start = tl.where(is_bad, 0, start)
        end = tl.where(is_bad, 0, end)
    return start, end


@triton.jit
def pool_bags(tables, pooling, bags, address, rows, dim, dtype, table, start, end, report):  # type: ignore[no-untyped-def]
    """Return the pooled vectors of a tile of bags: fp32 [bags, block].

    address, rows, dim: the table's; dtype: a pointer's to its elements; table: its number, for `report`. The indices of
    the next step are loaded before the rows of this one, so that no row waits for its index. An index out of range is
    recorded in `report` and read as a row of zeros.
    """
    columns = tl.arange(0, tables.block)
    steps = tl.arange(0, pooling.rows)
    alignment: tl.constexpr = tables.multiple * dtype.element_ty.primitive_bitwidth // 8
    base = tl.multiple_of(address.to(dtype), alignment)
    total = tl.zeros((pooling.bags, tables.block), tl.float32)
    count = end - start
    longest = tl.max(count, 0)
    worst = tl.full((pooling.bags, pooling.rows), -1, tl.int64)
    at = start[:, None] + steps[None, :]
    row = tl.load(bags.indices + at, mask=at < end[:, None], other=0)
    for _ in range(0, longest, pooling.rows):
        following = at + pooling.rows
        next_row = tl.load(bags.indices + following, mask=following < end[:, None], other=0)
        lookup_mask = at < end[:, None]
        if pooling.checks:
            is_bad = lookup_mask & ((row < 0) | (row >= rows))
            worst = tl.where(is_bad, tl.cast(at, tl.int64), worst)
            lookup_mask = lookup_mask & (is_bad == 0)
        offset = row.to(tl.int64) * dim
        mask = lookup_mask[:, :, None]
        if tables.dim != tables.block:
            mask = mask & (columns < dim)[None, None, :]
        values = tl.load(base + (offset[:, :, None] + columns[None, None, :]), mask=mask, other=0.0).to(tl.float32)
        if bags.weights is not None:
            weight = tl.load(bags.weights + at, mask=lookup_mask, other=0.0).to(tl.float32)
            values *= weight[:, :, None]
        total += tl.sum(values, 1)
        at = following
        row = next_row
    if pooling.checks:
        position = tl.max(tl.max(worst, 1), 0)
        if position >= 0:
            record_index_error(
                report, BAD_INDEX, tl.cast(table, tl.int64), position, tl.load(bags.indices + position), rows
            )
    if pooling.is_mean:
        total /= tl.maximum(count, 1).to(tl.float32)[:, None]
    return total


@triton.jit
def store_bags(tables, out, sample, sample_mask, dim, width, column, total):  # type: ignore[no-untyped-def]
    """Round a tile to the output's dtype and store it: rows `sample`, of `width`, of `out`, from `column` on."""
    columns = tl.arange(0, tables.block)
    mask = sample_mask[:, None]
    if tables.dim != tables.block:
        mask = mask & (columns < dim)[None, :]
    offset = tl.multiple_of(sample.to(tl.int64) * width, tables.out_multiple) + column
    tl.store(out + (offset[:, None] + columns[None, :]), total.to(out.dtype.element_ty), mask=mask)
