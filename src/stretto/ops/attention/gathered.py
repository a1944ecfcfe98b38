# SPDX-License-Identifier: Apache-2.0
"""Attention to keys and values that a rank makes itself, of rows that it has gathered: of latents, which are smaller.

`gather_rows` brings what other ranks have that this rank's positions see, and `attend_to_gathered` takes the keys and
values that its caller has made of it, in that order. Their gradients are this rank's, and those of the rows return.
"""

from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.ops.attention.exchange import Peers, can_copy, list_returned
from stretto.ops.attention.kernels import attend, differentiate, lay_out_by_position
from stretto.ops.attention.merge import add_parts, merge_parts
from stretto.ops.attention.plan import Block, Mask, Plan, Range, make_plan
from stretto.ops.moe.routes import CollectiveWrapper, call
from stretto.ops.operator import find_name, require_agreement


@torch.compiler.disable
def gather_rows(
    x: Tensor, group: dist.ProcessGroup | None, mask: Mask, *, layout: str, wrap_collective: CollectiveWrapper = call
) -> Tensor:
    """Rows of x [b, h, s / ranks, d], then those of other ranks that this rank's positions see: [b, h, rows, d].

    mask, layout: of the attention, the same on all ranks. Differentiable.
    """
    name = find_name(group)
    text = f"gather_rows {list(x.shape)} {x.dtype} {layout} {crc32(repr(mask).encode()):x}"
    require_agreement(text, False, name, x.device)
    plan = _find_plan(x.shape[2], group, mask, layout)
    if not plan.steps:
        return x
    peers = Peers(name, 1, wrap_collective, can_copy(name, x.device), 1, plan.steps[0].room)
    return _GatherRows.apply(x, plan, peers)


@torch.compiler.disable
def attend_to_gathered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None,
    mask: Mask,
    *,
    layout: str,
    scale: float | None = None,
) -> Tensor:
    """Attention of q [b, heads, s / ranks, d] to k [b, KV heads, rows, d] and v [b, KV heads, rows, e].

    rows: those of `gather_rows`, of the same mask and layout. Sends nothing.
    """
    plan, length = _find_plan(q.shape[2], group, mask, layout), q.shape[2]
    blocks = [*plan.own]
    for block in (block for step in plan.steps for block in step.blocks):
        blocks.append(block._replace(keys=Range(block.keys.start + length, block.keys.stop + length)))
    return _AttendToGathered.apply(
        q, k, v, blocks, q.shape[-1] ** -0.5 if scale is None else scale, mask.documents is not None
    )


def _find_plan(length: int, group: dist.ProcessGroup | None, mask: Mask, layout: str) -> Plan:
    return make_plan(layout, dist.get_rank(group), dist.get_world_size(group), length, mask, "all_gather")


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan, peers: Peers) -> Tensor:
        ctx.call, ctx.length = (plan.steps[0], peers), x.shape[2]
        rows = x.permute(2, 0, 1, 3).contiguous()
        arrived = peers.start(plan.steps[0], rows, 0).wait()
        return torch.cat((rows, arrived)).permute(1, 2, 0, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        step, peers = ctx.call
        rows = grad.permute(2, 0, 1, 3)
        returned = peers.start_back(step, rows[ctx.length :].contiguous()).wait()
        own, found = grad[:, :, : ctx.length], torch.empty_like(rows[: ctx.length]).permute(1, 2, 0, 3)
        others = [(part, tensor.permute(1, 2, 0, 3)) for part, tensor in list_returned(step, returned)]
        add_parts([(Range(0, ctx.length), own), *others], found)
        return found, None, None


class _AttendToGathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: list[Block], scale: float, varies: bool) -> Tensor:
        with torch._C._DisableAutocast():
            q, k, v = (each if each.stride(-1) == 1 else each.contiguous() for each in (q, k, v))
            out, lse = merge_parts(attend(q, k, v, blocks, scale, varies), q.shape[2], q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = blocks, scale, varies
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        with torch._C._DisableAutocast():
            results = lay_out_by_position(grad), q, k, v, lay_out_by_position(out), lse
            found = differentiate(*results, *ctx.settings)
            gradients = tuple(torch.empty_like(each) for each in (q, k, v))
            for parts, target in zip(found, gradients, strict=True):
                add_parts(parts, target)
        return *gradients, None, None, None
