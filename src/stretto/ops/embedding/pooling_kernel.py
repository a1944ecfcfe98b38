"""Pooling rows of tables, on the device: what the fused kernel, the honest baseline and the backward pass share.

A tile is BAGS bags; in each step ROWS rows of each are in flight at once, and added in fp32. So the order of additions
depends on BAGS' width alone and not on who computes: the same input gives the same bits.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from stretto.ops.embedding.index_errors import BAD_INDEX, BAD_OFFSETS, record_index_error

META = tl.constexpr(4)  # words a table: see `KernelTables`


class KernelTables(NamedTuple):
    """What kernels are given of this rank's tables; one argument.

    meta: int64 [tables, 4]: address, rows, dim, first column in a row of the output. tables: how many. batch: samples
    of a rank. width: columns of a row of the output. total: number of indices. Compiled in: dim, if all tables have
    one, else 0; block, the power of two that holds every dim; multiple, of which every dim and every address, in
    elements, is one; out_multiple, of which the output's width and every column are one.
    """

    meta: Any
    tables: Any
    batch: Any
    width: Any
    total: Any
    dim: Any
    block: Any
    multiple: Any
    out_multiple: Any


class PoolingConfig(NamedTuple):
    """How a kernel pools: bags of a tile, rows of a bag in flight, bags of a slice (a multiple of `bags`), and whether
    it checks what it reads; compiled in."""

    bags: Any
    rows: Any
    slice: Any
    is_mean: Any
    checks: Any


@triton.jit
def find_table(lookup, table):  # type: ignore[no-untyped-def]
    """(address, rows, dim, column) of a table."""
    meta = lookup.meta + table * META
    dim = lookup.dim
    if lookup.dim == 0:
        dim = tl.multiple_of(tl.load(meta + 2), lookup.multiple)
    column = tl.multiple_of(tl.load(meta + 3), lookup.out_multiple)
    return tl.load(meta), tl.load(meta + 1), dim, column


@triton.jit
def read_bags(lookup, pooling, offsets, table, world, sample, inside, report):  # type: ignore[no-untyped-def]
    """Where the indices of each sample's bag in the table begin and end; sample: int32 [bags], of all ranks'."""
    bag = tl.cast(table, tl.int64) * (lookup.batch * world) + sample
    start = tl.load(offsets + bag, mask=inside, other=0)
    end = tl.load(offsets + bag + 1, mask=inside, other=0)
    if pooling.checks:
        is_bad = (start < 0) | (end < start) | (end > lookup.total)
        worst = tl.max(tl.where(is_bad, bag, -1), 0)
        if worst >= 0:
            first, last = tl.load(offsets + worst), tl.load(offsets + worst + 1)
            record_index_error(report, BAD_OFFSETS, tl.cast(table, tl.int64), worst, first, last)
        start = tl.where(is_bad, 0, start)
        end = tl.where(is_bad, 0, end)
    return start, end


@triton.jit
def pool_bags(lookup, pooling, address, rows, dim, indices, weights, start, end, dtype, table, report):  # type: ignore[no-untyped-def]
    """fp32 [bags, block]: the pooled rows of a tile of bags.

    The indices of the next step are loaded before the rows of this one, so that no row waits for its index.
    """
    columns = tl.arange(0, lookup.block)
    steps = tl.arange(0, pooling.rows)
    alignment: tl.constexpr = lookup.multiple * dtype.element_ty.primitive_bitwidth // 8
    base = tl.multiple_of(address.to(dtype), alignment)
    total = tl.zeros((pooling.bags, lookup.block), tl.float32)
    count = end - start
    longest = tl.max(count, 0)
    worst = tl.full((pooling.bags, pooling.rows), -1, tl.int64)
    at = start[:, None] + steps[None, :]
    row = tl.load(indices + at, mask=at < end[:, None], other=0)
    for _ in range(0, longest, pooling.rows):
        following = at + pooling.rows
        next_row = tl.load(indices + following, mask=following < end[:, None], other=0)
        inside = at < end[:, None]
        if pooling.checks:
            is_bad = inside & ((row < 0) | (row >= rows))
            worst = tl.where(is_bad, tl.cast(at, tl.int64), worst)
            inside = inside & (is_bad == 0)
        offset = row.to(tl.int64) * dim
        mask = inside[:, :, None]
        if lookup.dim != lookup.block:
            mask = mask & (columns < dim)[None, None, :]
        values = tl.load(base + (offset[:, :, None] + columns[None, None, :]), mask=mask, other=0.0).to(tl.float32)
        if weights is not None:
            weight = tl.load(weights + at, mask=inside, other=0.0).to(tl.float32)
            values *= weight[:, :, None]
        total += tl.sum(values, 1)
        at = following
        row = next_row
    if pooling.checks:
        position = tl.max(tl.max(worst, 1), 0)
        if position >= 0:
            record_index_error(report, BAD_INDEX, tl.cast(table, tl.int64), position, tl.load(indices + position), rows)
    if pooling.is_mean:
        total /= tl.maximum(count, 1).to(tl.float32)[:, None]
    return total


@triton.jit
def store_bags(lookup, out, sample, inside, dim, column, total):  # type: ignore[no-untyped-def]
    """Round a tile and store it: row `sample` (of the rank that `out` is of), columns from `column` on."""
    columns = tl.arange(0, lookup.block)
    mask = inside[:, None]
    if lookup.dim != lookup.block:
        mask = mask & (columns < dim)[None, :]
    offset = tl.multiple_of(sample.to(tl.int64) * lookup.width, lookup.out_multiple) + column
    tl.store(out + (offset[:, None] + columns[None, :]), total.to(out.dtype.element_ty), mask=mask)
