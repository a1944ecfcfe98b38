"""The operators unfused: a library's GEMM, and a collective of the group's own backend before or after it.

Numbers are as the kernels' up to rounding: products are added in fp32 (fp64 for fp64), a rank's partial sums rounded to
the dtype that they travel in. On CPUs ranks' sums are then added in fp32 in rank order, as in kernels; NCCL adds in its
own order, and rounds whenever it sends on.
"""

import torch
from torch import Tensor

from stretto.ops.workspace import find_group


def all_gather_matmul(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> tuple[Tensor, Tensor]:
    """(product, gathered x)."""
    gathered = gather_rows(x, group)
    return torch.nn.functional.linear(gathered, weight, bias), gathered


def matmul_reduce_scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, reduce_dtype: torch.dtype | None
) -> Tensor:
    """This rank's rows of the sum."""
    dtype = reduce_dtype or x.dtype
    if dtype == x.dtype:
        partial = x @ weight.t()
    elif x.is_cuda:
        partial = torch.mm(x, weight.t(), out_dtype=dtype)
    else:
        partial = x.to(dtype) @ weight.t().to(dtype)
    total = scatter_sum(partial, group) if x.device.type == "cpu" else _reduce_scatter(partial, group)
    return (total if bias is None else total + bias.to(dtype)).to(x.dtype)


def matmul_all_reduce(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> Tensor:
    """The sum, on all ranks."""
    total = all_reduce(x @ weight.t(), group)
    return total if bias is None else total + bias


def gather_rows(x: Tensor, group: str) -> Tensor:
    """All ranks' x [rows, k], as [world * rows, k], by the group's own backend."""
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_gather_into_tensor(x, find_group(group).size(), group))


def all_reduce(x: Tensor, group: str) -> Tensor:
    """The sum of all ranks' x, by the group's own backend."""
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_reduce(x, "sum", group))


def scatter_sum(x: Tensor, group: str) -> Tensor:
    """This rank's rows of the sum of all ranks' x [m, k], added in fp32 in rank order, by the group's own backend."""
    world = find_group(group).size()
    sizes = [x.shape[0] // world] * world
    functional = torch.ops._c10d_functional
    parts = functional.wait_tensor(functional.all_to_all_single(x, sizes, sizes, group)).view(world, -1, x.shape[1])
    total = parts[0] if x.dtype == torch.float64 else parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(x.dtype)


def _reduce_scatter(x: Tensor, group: str) -> Tensor:
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.reduce_scatter_tensor(x, "sum", find_group(group).size(), group))
