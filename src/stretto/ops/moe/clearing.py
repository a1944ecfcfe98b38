# SPDX-License-Identifier: Apache-2.0
"""Writes zeros where torch's grouped GEMM leaves what was in memory: rows of padding, and experts without rows.

Which these are only the device knows. Programs that find nothing to clear end at once, so that a call without padding
costs no more than a launch.
"""

import triton
import triton.language as tl
from torch import Tensor

from stretto.tiles.launches import launch_kernel

_ROWS = 16
_PARTS = 32
_BLOCK = 1024


def clear_padding(out: Tensor, offsets: Tensor) -> None:
    """Write zeros to the rows of out [n, .] from offsets[-1] on; both contiguous, on a GPU."""
    programs = triton.cdiv(out.shape[0], _ROWS)
    launch_kernel(_clear_padding, programs, out, offsets, len(offsets) - 1, *out.shape, ROWS=_ROWS, BLOCK=_BLOCK)


def clear_empty(out: Tensor, offsets: Tensor) -> None:
    """Write zeros to out[expert], of out [e, b, a], for each expert without rows; both contiguous, on a GPU."""
    programs, numbers = len(out) * _PARTS, out.shape[1] * out.shape[2]
    launch_kernel(_clear_empty, programs, out, offsets, numbers, PARTS=_PARTS, BLOCK=_BLOCK)


@triton.jit
def _clear_padding(  # type: ignore[no-untyped-def]
    out, offsets, experts, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Each program has ROWS rows, and clears those from offsets[experts] on. No synchronization: rows are its own."""
    begin = tl.program_id(0) * ROWS
    first = tl.maximum(tl.load(offsets + experts), begin)
    for row in range(first, tl.minimum(begin + ROWS, rows)):
        for column in range(0, columns, BLOCK):
            at = column + tl.arange(0, BLOCK)
            tl.store(out + tl.cast(row, tl.int64) * columns + at, 0.0, mask=at < columns)


@triton.jit
def _clear_empty(out, offsets, numbers, PARTS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """PARTS programs an expert clear its numbers if it has no rows. No synchronization: blocks are a program's own."""
    expert = tl.program_id(0) // PARTS
    if tl.load(offsets + expert) == tl.load(offsets + expert + 1):
        for begin in range(tl.program_id(0) % PARTS * BLOCK, numbers, PARTS * BLOCK):
            at = begin + tl.arange(0, BLOCK)
            tl.store(out + tl.cast(expert, tl.int64) * numbers + at, 0.0, mask=at < numbers)
