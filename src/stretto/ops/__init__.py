"""Overlapped operators: a GEMM with its collective hidden inside, as torch.library operators with gradients."""

from stretto.ops.all_gather_matmul import all_gather_matmul, all_gather_matmul_gathered
from stretto.ops.matmul_reduce_scatter import matmul_reduce_scatter

__all__ = ["all_gather_matmul", "all_gather_matmul_gathered", "matmul_reduce_scatter"]
