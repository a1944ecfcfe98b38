"""All-gather + GEMM as an operator; `gather_gemm` has its kernel."""

from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from stretto.ops import library
from stretto.ops.checks import find_name, require_operands
from stretto.ops.choosing import choose, describe_call, identify, recall
from stretto.ops.eager import outside_autocast, shorten
from stretto.ops.gather_gemm import launch_gather
from stretto.ops.gradients import differentiate_gather, save_gather
from stretto.ops.plans import LIBRARY, Plan, name_implementation
from stretto.ops.workspace import find_group


def all_gather_matmul(
    x: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | None = None,
    saves_gathered: bool = True,
    implementation: str | Plan = "auto",
) -> Tensor:
    """The group's x, gathered along dim 0, times weight's transpose: [m / world, k], [n, k] -> [m, n].

    bf16, fp16 or fp32, all of one dtype; sums are fp32. bias: [n]. group: None for all ranks. x is of one shape on all
    ranks, and contiguous; weight is, or its transpose. x's gradient is a `matmul_reduce_scatter`; weight's needs the
    gathered x, which is kept for it, or, with saves_gathered=False, gathered again in the backward pass.
    implementation: "auto" (what was measured to be the fastest, or a default), "kernel" (ours, or it raises), "library"
    (an all-gather, then a GEMM) or a `Plan`. ValueError for other input and for a rank outside of the group; PeerError
    for a rank that does not come. Flux, sections 3.3 and 4.
    """
    name, how = find_name(group), name_implementation(implementation)
    if saves_gathered and torch.is_grad_enabled() and weight.requires_grad:
        return _gathered(x, weight, bias, name, how)[0]
    return _plain(x, weight, bias, name, how)


def all_gather_matmul_gathered(
    x: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | None = None,
    implementation: str | Plan = "auto",
) -> tuple[Tensor, Tensor]:
    """As `all_gather_matmul`; returns [m, n] and the gathered x [m, k] too."""
    how = name_implementation(implementation)
    return _gathered(x, weight, bias, find_name(group), how)


def _run_plain(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, implementation: str) -> Tensor:
    return _run(x, weight, bias, group, implementation, returns_gathered=False)[0]


def _run_gathered(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, implementation: str
) -> tuple[Tensor, Tensor]:
    return _run(x, weight, bias, group, implementation, returns_gathered=True)


_all_gather_matmul = torch.library.custom_op("stretto::all_gather_matmul", _run_plain, mutates_args=())
_all_gather_matmul_gathered = torch.library.custom_op(
    "stretto::all_gather_matmul_gathered", _run_gathered, mutates_args=()
)
_plain, _gathered = (
    shorten(name, run, operator, save_gather, differentiate_gather)
    for name, run, operator in (
        ("AllGatherMatmul", _run_plain, torch.ops.stretto.all_gather_matmul),
        ("AllGatherMatmulGathered", _run_gathered, torch.ops.stretto.all_gather_matmul_gathered),
    )
)


@_all_gather_matmul.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, implementation: str) -> Tensor:
    require_operands("all_gather_matmul", x, weight, bias, implementation)
    return x.new_empty(x.shape[0] * find_group(group).size(), weight.shape[0])


@_all_gather_matmul_gathered.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, implementation: str) -> tuple[Tensor, Tensor]:
    require_operands("all_gather_matmul", x, weight, bias, implementation)
    rows = x.shape[0] * find_group(group).size()
    return x.new_empty(rows, weight.shape[0]), x.new_empty(rows, x.shape[1])


for _operator in (_all_gather_matmul, _all_gather_matmul_gathered):
    _operator.register_autograd(differentiate_gather, setup_context=save_gather)


@register_flop_formula([torch.ops.stretto.all_gather_matmul, torch.ops.stretto.all_gather_matmul_gathered])
def _(x: torch.Size, weight: torch.Size, bias: object, group: str, *_: object, **__: object) -> int:
    return 2 * x[0] * find_group(group).size() * prod(weight)


@outside_autocast
def _run(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, implementation: str, *, returns_gathered: bool
) -> tuple[Tensor, Tensor]:
    """(product, gathered x); the latter is x where it was not asked for."""
    key = identify("all_gather_matmul", x, weight, bias, implementation, "gathered" if returns_gathered else "")
    plan = recall(group, key)
    if plan is None:
        require_operands("all_gather_matmul", x, weight, bias, implementation)
    (rows, k), n, world = x.shape, weight.shape[0], find_group(group).size()
    if plan is None:
        call = describe_call("all_gather_matmul", rows * world, x, weight, group)
        plan = choose(call, x, weight, group, implementation, key)
    if rows == 0 or n == 0 or k == 0:  # nothing to wait for
        out, gathered = x.new_zeros(rows * world, n), x.new_empty(rows * world, k)
        if returns_gathered and n == 0:
            gathered = library.gather_rows(x, group)
        return out if bias is None else out + bias, gathered
    if plan == LIBRARY:
        return library.all_gather_matmul(x, weight, bias, group)
    if returns_gathered:  # a program cannot tell the host which slot it has gathered into
        plan = plan._replace(transfer="copies", direction="push")
    out = x.new_empty(rows * world, n)
    returned = x.new_empty(rows * world, k) if returns_gathered else None
    launch_gather(plan, x, weight, bias, out, group, returned=returned)
    return out, x if returned is None else returned
