# SPDX-License-Identifier: Apache-2.0
"""One rank's attention, forward and backward: to its own keys while others' travel, then to those.

Backward, keys come again (they are not kept), and gradients of others' keys return to their ranks, both during the own
keys' gradients. On GPUs whose copy engines bring all keys at once, kernels of these run on a stream of their own
(`Peers.fork`), beside those of own keys; elsewhere between those of one half of the heads and those of the other.
Forward, nothing is sent back, and two streams took 1% to 2% longer (two H200).
"""

from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.ops.attention.exchange import Arriving, Peers, list_returned
from stretto.ops.attention.kernels import Gradients, Part, attend, differentiate, lay_out_by_position
from stretto.ops.attention.merge import add_parts, merge_parts
from stretto.ops.attention.plan import ExchangeStep, Plan, Range


class ContextCall(NamedTuple):
    """A call of this rank: its plan, the ranks that it exchanges rows with, and the scale of scores.

    varies: whether the plan is another one for the next batch, as with documents.
    """

    plan: Plan
    peers: Peers
    scale: float
    varies: bool


def forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: ContextCall) -> tuple[Tensor, Tensor]:
    """(this rank's attention, its log-sum-exp with sinks)."""
    length, steps = q.shape[2], call.plan.steps
    rows, arriving = _start(k, v, call)
    parts = attend(q, k, v, call.plan.own, call.scale, call.varies)
    for number, step in enumerate(steps):
        assert arriving is not None
        arrived = arriving.wait()
        arriving = _go_on(call, number + 1, rows)
        if step.blocks:
            parts += attend(q, *unpack(arrived, k.shape[3]), step.blocks, call.scale, call.varies)
        if arriving is not None and len(parts) > 1:  # or each step would keep a result
            parts = [Part(Range(0, length), *merge_parts(parts, length, parts[0].lse.dtype))]
    return merge_parts(parts, length, q.dtype, sinks)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None, call: ContextCall
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and the sinks: of the keys by all ranks' queries, of sinks by this rank's."""
    grad, out = lay_out_by_position(grad), lay_out_by_position(out)
    steps, length, size, each = call.plan.steps, q.shape[2], k.shape[3], q.shape[1] // k.shape[1]
    rows, arriving = _start(k, v, call)
    side = call.peers.fork(len(steps), q.device)

    def differentiate_own(kv_heads: slice) -> Gradients:
        heads = slice(kv_heads.start * each, kv_heads.stop * each)
        operands = grad[:, heads], q[:, heads], k[:, kv_heads], v[:, kv_heads]
        return differentiate(*operands, out[:, heads], lse[:, heads], call.plan.own, call.scale, call.varies)

    middle = 0 if not steps else k.shape[1] // 2 if side is None else k.shape[1]
    first, second = slice(0, middle), slice(middle, k.shape[1])
    own = [(first, differentiate_own(first))] if middle else []  # while keys come
    theirs: list[tuple[Range, Tensor]] = []
    sums = None
    if rows is not None and (len(steps) > 1 or call.varies):  # of steps, or of many documents, whose parts are short
        sums = torch.zeros_like(rows, dtype=torch.promote_types(k.dtype, torch.float32))
    returning: list[tuple[ExchangeStep, Arriving]] = []
    with side or nullcontext():
        for number, step in enumerate(steps):
            assert arriving is not None
            arrived = arriving.wait()
            arriving = _go_on(call, number + 1, rows)
            returned = _new_rows(k, v, len(arrived), k.dtype)
            if step.blocks:
                found = differentiate(grad, q, *unpack(arrived, size), out, lse, step.blocks, call.scale, call.varies)
                theirs = _add_steps(theirs, found.q, q) if len(steps) > 1 else found.q
                for parts, target in zip((found.k, found.v), unpack(returned, size), strict=True):
                    add_parts(parts, target)
            _add_returned(sums, returning)
            returning.append((step, call.peers.start_back(step, returned)))
    if middle < k.shape[1]:
        own.append((second, differentiate_own(second)))  # while gradients return
    if side is not None:
        side.join()
    _add_returned(sums, returning)
    others = [(Range(0, length), sums)] if sums is not None else []
    for step, arriving in returning:
        others = list_returned(step, arriving.wait())
    if not steps and len(own[0][1].q) == 1:
        of_q, of_k, of_v = (parts[0][1] for parts in own[0][1])
    else:
        of_q, of_k, of_v = (torch.empty_like(tensor) for tensor in (q, k, v))
        of_keys, of_values = ([(part, unpack(tensor, size)[at]) for part, tensor in others] for at in (0, 1))
        for kv_heads, found in own:
            heads = slice(kv_heads.start * each, kv_heads.stop * each)
            add_parts([*found.q, *((part, tensor[:, heads]) for part, tensor in theirs)], of_q[:, heads])
            for parts, returns, target in ((found.k, of_keys, of_k), (found.v, of_values, of_v)):
                add_parts([*parts, *((part, tensor[:, kv_heads]) for part, tensor in returns)], target[:, kv_heads])
    of_sinks = None
    if sinks is not None:
        mean = (grad * out).sum(-1, dtype=lse.dtype)
        of_sinks = -((sinks.to(lse.dtype)[:, None] - lse).exp() * mean).sum((0, 2)).to(sinks.dtype)
    return of_q, of_k, of_v, of_sinks


def _start(k: Tensor, v: Tensor, call: ContextCall) -> tuple[Tensor | None, Arriving | None]:
    """Start the first step's exchange, if there is one; returns the rows of keys and values, too."""
    if not call.plan.steps:
        return None, None
    rows = _new_rows(k, v, k.shape[2], k.dtype)
    return rows, call.peers.start(call.plan.steps[0], rows, 0, partial(_fill, rows, k, v))


def _go_on(call: ContextCall, number: int, rows: Tensor | None) -> Arriving | None:
    """Start a further step's exchange, if there is such a step."""
    steps = call.plan.steps
    return call.peers.start(steps[number], rows, number) if rows is not None and number < len(steps) else None


def _add_returned(sums: Tensor | None, returning: list[tuple[ExchangeStep, Arriving]]) -> None:
    """Add the gradients that were sent last, if any, before others come in their place."""
    if returning and sums is not None:
        step, arriving = returning.pop()
        for part, returned in list_returned(step, arriving.wait()):
            sums[part.start : part.stop] += returned


def _add_steps(
    sums: list[tuple[Range, Tensor]], parts: list[tuple[Range, Tensor]], q: Tensor
) -> list[tuple[Range, Tensor]]:
    """Queries' gradients of all steps so far, as one sum: each step's own would be kept to the end."""
    if not sums:
        sums = [(Range(0, q.shape[2]), torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32)))]
    for rows, part in parts:
        sums[0][1][:, :, rows.start : rows.stop] += part
    return sums


def _new_rows(k: Tensor, v: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Memory for keys and values of positions, which lie together: [length, b, KV heads, d + e]."""
    return k.new_empty(length, k.shape[0], k.shape[1], k.shape[3] + v.shape[3], dtype=dtype)


def pack(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values of positions, next to each other: [length, b, KV heads, d + e]."""
    rows = _new_rows(k, v, k.shape[2], k.dtype)
    _fill(rows, k, v)
    return rows


def _fill(rows: Tensor, k: Tensor, v: Tensor) -> None:
    for target, source in zip(unpack(rows, k.shape[3]), (k, v), strict=True):
        target.copy_(source)


def unpack(rows: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Views of the keys and of the values, [b, KV heads, length, .]."""
    tensor = rows.permute(1, 2, 0, 3)
    return tensor[..., :size], tensor[..., size:]
