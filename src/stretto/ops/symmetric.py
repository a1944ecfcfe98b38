# SPDX-License-Identifier: Apache-2.0
"""The symmetric product alpha * a @ a.T + beta * c, whose tiles on and below the diagonal alone are computed.

Newton-Schulz iterations (`stretto.optim.Muon`) have two such products of their three, of which a library computes both
halves. On an H200 (30 November 2026, Triton 3.6), [4096, 14336] times its transpose takes 0.36 ms, by cuBLAS 0.72.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.memory.gpus import find_capability
from stretto.ops.gemm import Blocks, describe_gemm, divide_up, multiply_tile, specialization_key
from stretto.tiles.launches import find_launches

_LEAST_ROWS = 3072  # below it, half of the tiles do not fill a GPU: at 2048 an H200 is as fast by cuBLAS
BLOCKS = Blocks(m=128, n=128, k=64, group_rows=1, num_warps=8, num_stages=4, programs=0)


def suits_symmetric(matrix: Tensor) -> bool:
    """Return True where `symmetric_product` is faster than a library: 16 bits, at least 3,072 rows, on Hopper."""
    is_large = matrix.dim() == 2 and len(matrix) >= _LEAST_ROWS and matrix.dtype in (torch.bfloat16, torch.float16)
    return is_large and matrix.is_cuda and find_capability(matrix.device.index) == (9, 0)


def symmetric_product(
    a: Tensor, *, alpha: float = 1.0, added: Tensor | None = None, beta: float = 1.0, blocks: Blocks = BLOCKS
) -> Tensor:
    """alpha * a @ a.T + beta * added, of a's dtype, by a kernel: [m, k] (and a symmetric [m, m]) -> [m, m].

    Sums are fp32, and rounded once. blocks: of square tiles.
    """
    a, m = a.contiguous(), a.shape[0]
    out = a.new_empty(m, m)
    added = None if added is None else added.contiguous()
    gemm, left, right, _ = describe_gemm(a, a, None, blocks)
    rows = divide_up(m, blocks.m)
    with torch.cuda.device_of(a):
        find_launches(a.device)(
            multiply_triangle,
            specialization_key(blocks, a, a, gemm, out, added),
            rows * (rows + 1) // 2,
            (gemm, left, right, out, added, float(alpha), float(beta)),
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
        )
    return out


@triton.jit
def multiply_triangle(gemm, a, b, out, added, alpha, beta):  # type: ignore[no-untyped-def]
    """A square tile of alpha * a @ b.T + beta * added, for b = a, stored with its mirror image.

    Synchronization: none: a program owns its tile and the image. Tiles are numbered along rows of the triangle.
    """
    index = tl.program_id(0)
    row_tile = ((tl.sqrt(8.0 * index + 1.0) - 1.0) * 0.5).to(tl.int32)
    row_tile -= (row_tile * (row_tile + 1) // 2 > index).to(tl.int32)  # roots are rounded
    row_tile += ((row_tile + 1) * (row_tile + 2) // 2 <= index).to(tl.int32)
    column_tile = index - row_tile * (row_tile + 1) // 2
    row, column = row_tile * gemm.block_m, column_tile * gemm.block_n
    total = multiply_tile(gemm, a, b, row, column, 0) * alpha
    rows = (row + tl.arange(0, gemm.block_m))[:, None]
    columns = (column + tl.arange(0, gemm.block_n))[None, :]
    there = (rows < gemm.m) & (columns < gemm.m)
    at = rows.to(tl.int64) * gemm.m + columns
    if added is not None:
        total += beta * tl.load(added + at, mask=there, other=0).to(tl.float32)
    found = total.to(out.dtype.element_ty)
    tl.store(out + at, found, mask=there)
    if row_tile != column_tile:
        image = columns.T.to(tl.int64) * gemm.m + rows.T
        tl.store(out + image, found.T, mask=there.T)
