# SPDX-License-Identifier: Apache-2.0
"""Copies chosen rows of one tensor to chosen rows of another; on GPUs either may be in pinned host memory.

`look_up_rows` takes rows of a table that ranks share from where they are, so that no rank gathers the table.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.memory.gpus import count_multiprocessors
from stretto.ops.embedding.launch_config import round_up_to_power
from stretto.tiles.launches import launch_cached, launch_kernel

_BLOCK = 1024  # numbers that a program moves at once
_PROGRAMS = 4  # on each multiprocessor: enough bytes in flight for a host link, and room for other kernels


@triton.jit
def move_tiles(source, target, rows, places, count, dim, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """target[places[i]] = source[rows[i]] for i < count, of contiguous [*, dim]; places differ from each other.

    No signals and no waits: the launch is in order with what wrote the source and what will read the target on its
    stream. A row in host memory is read or written once, in pieces as wide as a warp.
    """
    columns = tl.arange(0, BLOCK)
    for tile in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        at = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = at < count
        there = tl.load(rows + at, mask=mask, other=0).to(tl.int64) * dim
        here = tl.load(places + at, mask=mask, other=0).to(tl.int64) * dim
        for start in range(0, dim, BLOCK):
            column = start + columns
            known = mask[:, None] & (column < dim)[None, :]
            values = tl.load(source + (there[:, None] + column[None, :]), mask=known)
            tl.store(target + (here[:, None] + column[None, :]), values, mask=known)


def move_rows(source: Tensor, target: Tensor, rows: Tensor, places: Tensor) -> None:
    """target[places] = source[rows], of [*, dim] or [*] of one dtype; rows, places: int64 [count], on the GPU if any.

    On a GPU its kernel reads and writes pinned host memory itself: the host neither waits nor copies.
    """
    dim = source[0].numel()
    block = min(round_up_to_power(dim), _BLOCK)
    tile = max(_BLOCK // block, 1)
    programs = max(min(-(-len(rows) // tile), _PROGRAMS * count_multiprocessors(rows.device)), 1)
    launch_kernel(move_tiles, programs, source, target, rows, places, len(rows), dim, tile, block, num_warps=4)


def look_up_rows(ids: Tensor, parts: Tensor, first_row: int, rows: int, like: Tensor) -> Tensor:
    """[..., columns], of like's dtype: the rows ids - first_row of a table [rows, columns]; zeros for all other ids.

    parts: int64 [ranks], on the device, the addresses of the ranks' parts, which this GPU reads: contiguous, of
    ceil(rows / ranks) rows each; the last ones may have fewer. like: this rank's part, [..., columns].
    """
    columns, ids = like.shape[-1], ids.contiguous()
    found = like.new_empty(*ids.shape, columns)
    if found.numel():
        chunk = -(-rows // len(parts))
        arguments = ids, parts, found, first_row, rows, chunk, columns
        launch_cached(copy_rows_of_ranks, ids.numel(), *arguments, BLOCK=_BLOCK, num_warps=4)
    return found


@triton.jit
def copy_rows_of_ranks(  # type: ignore[no-untyped-def]
    ids, parts, found, first_row, rows, chunk, columns, BLOCK: tl.constexpr
):
    """Copy a row for each program, from whichever rank has it.

    Synchronization: none here. Before it on the stream a wait for all ranks' signals that their parts are written; they
    write them again only once this rank has begun the next forward pass.
    """
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + token) - first_row
    is_here = (row >= 0) & (row < rows)
    row = tl.where(is_here, row, 0).to(tl.int64)
    part = tl.load(parts + row // chunk).to(tl.pointer_type(found.dtype.element_ty))
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(part + row % chunk * columns + column, mask=(column < columns) & is_here, other=0)
        tl.store(found + token * columns + column, value, mask=column < columns)


def find_addresses(parts: list[Tensor], device: torch.device) -> Tensor:
    """Return the addresses of parts as `look_up_rows` takes them: int64 [ranks] on the device."""
    return torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64, device=device)
