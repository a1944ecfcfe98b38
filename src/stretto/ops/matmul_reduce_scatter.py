"""GEMM + reduce-scatter as an operator; `gemm_scatter` has its kernel."""

from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from stretto.ops import library
from stretto.ops.checks import find_name, require_operands
from stretto.ops.choosing import choose, describe_call, identify, recall
from stretto.ops.eager import outside_autocast, shorten
from stretto.ops.gemm import divide_up
from stretto.ops.gemm_scatter import launch_scatter
from stretto.ops.gradients import differentiate_scatter, save_scatter
from stretto.ops.plans import LIBRARY, Plan, name_implementation
from stretto.ops.workspace import find_group


def matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | None = None,
    reduce_dtype: torch.dtype | None = None,
    implementation: str | Plan = "auto",
) -> Tensor:
    """x times weight's transpose, summed over the group; this rank's rows of it: [m, k], [n, k] -> [m / world, n].

    bf16, fp16 or fp32, all of one dtype. A rank's partial sums are fp32, travel in x's dtype or, if reduce_dtype is
    torch.float32, in that, are added in fp32 in rank order, and rounded. bias: [n], added once, by the row's owner; its
    gradient is of these rows. group: None for all ranks. x is contiguous; weight is, or its transpose. x's gradient is
    an `all_gather_matmul`, which gathers what weight's gradient needs. implementation: "auto" (what was measured to be
    the fastest, or a default), "kernel" (ours, or it raises), "library" (a GEMM, then a reduce-scatter) or a `Plan`.
    ValueError for other input (m that the group does not divide, say) and for a rank outside of the group; PeerError
    for a rank that does not come. Flux, sections 3.2 and 4.
    """
    how = name_implementation(implementation)
    return _call(x, weight, bias, find_name(group), reduce_dtype, how)


@outside_autocast
def _run(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, reduce_dtype: torch.dtype | None, implementation: str
) -> Tensor:
    key = identify("matmul_reduce_scatter", x, weight, bias, implementation, reduce_dtype)
    plan = recall(group, key)
    if plan is None:
        _require(x, weight, bias, group, reduce_dtype, implementation)
    rows, (n, k) = x.shape[0] // find_group(group).size(), weight.shape
    if plan is None:
        call = describe_call("matmul_reduce_scatter", x.shape[0], x, weight, group)
        plan = choose(call, x, weight, group, implementation, key)
    if rows == 0 or n == 0 or k == 0:  # nothing to wait for
        return x.new_zeros(rows, n) if bias is None else x.new_zeros(rows, n) + bias
    if plan == LIBRARY:
        return library.matmul_reduce_scatter(x, weight, bias, group, reduce_dtype)
    out, dtype = x.new_empty(rows, n), reduce_dtype or x.dtype
    launch_scatter(plan, x, weight, bias, out, dtype, group)
    return out


_matmul_reduce_scatter = torch.library.custom_op("stretto::matmul_reduce_scatter", _run, mutates_args=())
_call = shorten(
    "MatmulReduceScatter", _run, torch.ops.stretto.matmul_reduce_scatter, save_scatter, differentiate_scatter
)


@_matmul_reduce_scatter.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, reduce_dtype: torch.dtype | None, implementation: str
) -> Tensor:
    return x.new_empty(_require(x, weight, bias, group, reduce_dtype, implementation), weight.shape[0])


_matmul_reduce_scatter.register_autograd(differentiate_scatter, setup_context=save_scatter)


@register_flop_formula(torch.ops.stretto.matmul_reduce_scatter)
def _(x: torch.Size, weight: torch.Size, *_: object, **__: object) -> int:
    return 2 * x[0] * prod(weight)


def _require(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, reduce_dtype: torch.dtype | None, implementation: str
) -> int:
    """This rank's number of rows. ValueError for what cannot be computed."""
    require_operands("matmul_reduce_scatter", x, weight, bias, implementation)
    return require_rows("matmul_reduce_scatter", x, x.dtype, reduce_dtype, group)


def require_rows(operator: str, x: Tensor, dtype: torch.dtype, reduce_dtype: torch.dtype | None, group: str) -> int:
    """This rank's number of x's rows. ValueError unless ranks divide them, and sums of `dtype` travel in a dtype."""
    world = find_group(group).size()
    if x.shape[0] % world:
        more = divide_up(x.shape[0], world) * world
        raise ValueError(f"{operator}: {world} ranks do not divide x's {x.shape[0]} rows: {more} rows will do")
    if reduce_dtype not in (None, dtype, torch.float32):
        raise ValueError(f"{operator}: partial sums of {dtype} travel in {dtype} or torch.float32, not {reduce_dtype}")
    return x.shape[0] // world
