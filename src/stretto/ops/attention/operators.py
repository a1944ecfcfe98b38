# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention as torch.library operators, and as autograd functions that go past them.

Eager calls take the functions, in which dispatch modes see the collectives, and which can wrap them; compiled graphs
have the operators, with their fakes, gradients and FLOP formulas.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.ops.attention.exchange import HeadExchange, Peers, can_copy
from stretto.ops.attention.joint import ScheduledCall, forward_by_schedule
from stretto.ops.attention.kernels import lay_out_by_position
from stretto.ops.attention.one_rank import ContextCall, backward, forward
from stretto.ops.attention.plan import Mask, list_chunks_together, make_plan
from stretto.ops.moe.routes import CollectiveWrapper, call
from stretto.ops.operands import require_no_tangents
from stretto.ops.operator import Autograd, define_operator, find_group, is_traced, require_agreement

ALONE = ""
"""In place of a group's name: this process, whose sequences are whole."""


class Settings(NamedTuple):
    """Options of the operators, which take them beside tensors. degree: of neighbours that exchange heads.

    schedule: "all_gather", "ring", or the name of a collective's schedule that gathers keys (forward).
    """

    group: str
    degree: int
    causal: bool
    scale: float
    layout: str
    window: int | None
    schedule: str


def attend_to_context(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, documents: Tensor | None, settings: Settings,
    wrap: CollectiveWrapper,
) -> Tensor:  # fmt: skip
    """This rank's part of the attention: q [b, heads, l, d] -> [b, heads, l, e]."""
    if is_traced(q, k, v, sinks, in_modes=False):
        require_no_tangents(q, k, v, sinks)
        return torch.ops.stretto.context_attention(q, k, v, sinks, documents, *settings)[0]
    return _ContextAttention.apply(q, k, v, sinks, documents, settings, wrap)


def attend_by_heads(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, documents: Tensor | None, settings: Settings,
    wrap: CollectiveWrapper,
) -> Tensor:  # fmt: skip
    """`attend_to_context` of a part of the heads, between exchanges of heads. sinks: of this rank's heads.

    Half of the heads travel while the other half attends: of k and v too, if a rank gets more than one of their heads.
    """
    degree = settings.degree
    if is_traced(q, k, v, in_modes=False):
        place = documents if settings.layout == "balanced" else None, settings.group, degree, settings.layout
        q, k, v = (torch.ops.stretto.exchange_heads(each, *place, True) for each in (q, k, v))
        out = attend_to_context(q, k, v, sinks, documents, settings, wrap)
        return torch.ops.stretto.exchange_heads(out, *place, False)
    pieces, of_kv = _count_pieces(q.shape[1] // degree, k.shape[1] // degree)
    exchange = _find_exchange(documents, q.shape[2], settings.group, degree, settings.layout, wrap)

    def cut(tensor: Tensor, count: int) -> tuple[Tensor, ...]:
        return tensor.unflatten(1, (degree, -1)).tensor_split(count, 2)

    travelling = []
    for tensors in zip_longest(cut(q, pieces), cut(k, of_kv), cut(v, of_kv)):
        sent = [each for each in tensors if each is not None]  # one head of k and v serves both halves
        travelling.append(_start_heads(exchange, sent))
    results = []
    for number, (rows, sizes) in enumerate(travelling):
        q, *others = _FinishHeads.apply(rows, exchange, True, sizes)
        k, v = others or (k, v)
        results.append(_attend_piece((q, k, v), number, pieces, sinks, documents, settings, exchange))
    return torch.cat([_finish_piece(each, exchange) for each in results], 3).flatten(2, 3).transpose(1, 2)


def attend_while_projecting(
    q: Tensor, makers: Sequence[Callable[[Sequence[Tensor]], Tensor]], output: Tensor | None, kv_heads: int,
    sinks: Tensor | None, documents: Tensor | None, settings: Settings, wrap: CollectiveWrapper,
) -> Tensor:  # fmt: skip
    """`attend_by_heads` that sends q while `makers` make k, and then v, of the tensors before them. output: None, or
    the output projection's weight [n, heads * e], by which half of the heads is multiplied while the other half's
    results travel; returns [b, l, n] then."""
    degree, heads = settings.degree, q.shape[1]
    pieces, of_kv = _count_pieces(heads // degree, kv_heads // degree)
    exchange = _find_exchange(documents, q.shape[2], settings.group, degree, settings.layout, wrap)
    tensors, travelling = [q], [_start_heads(exchange, [q.unflatten(1, (degree, -1))])]
    for make in makers:
        tensors.append(make(tensors))
        travelling.append(_start_heads(exchange, [tensors[-1].unflatten(1, (degree, -1))]))
    q, k, v = (_FinishHeads.apply(rows, exchange, True, sizes)[0] for rows, sizes in travelling)
    ks, vs = ((each.chunk(of_kv, 1) * pieces)[:pieces] for each in (k, v))
    results = [
        _attend_piece(each, number, pieces, sinks, documents, settings, exchange)
        for number, each in enumerate(zip(q.chunk(pieces, 1), ks, vs, strict=True))
    ]
    if output is None:
        return torch.cat([_finish_piece(each, exchange) for each in results], 3).flatten(2, 3).transpose(1, 2)
    weights = output.unflatten(1, (degree, heads // degree, -1)).chunk(pieces, 2)
    products = (
        torch.nn.functional.linear(_finish_piece(each, exchange).flatten(2), weight.flatten(1))
        for each, weight in zip(results, weights, strict=True)
    )
    return sum(products, start=next(products))


_Travelling = tuple[Tensor, list[tuple[int, int]]]
"""Rows that `HeadExchange` has started to send, and the heads and numbers of each tensor in them."""


def _count_pieces(heads: int, kv_heads: int) -> tuple[int, int]:
    """Choose in how many parts a rank's heads travel and attend, and in how many those of k and v."""
    pieces = 2 if heads % 2 == 0 and (kv_heads == 1 or kv_heads % 2 == 0) else 1
    return pieces, 1 if kv_heads == 1 else pieces


def _start_heads(exchange: HeadExchange, tensors: Sequence[Tensor]) -> _Travelling:
    """Send heads [b, degree, h, l, d] to their ranks."""
    return _StartHeads.apply(exchange, True, *tensors), [(each.shape[2], each.shape[4]) for each in tensors]


def _attend_piece(
    tensors: tuple[Tensor, Tensor, Tensor], number: int, pieces: int, sinks: Tensor | None, documents: Tensor | None,
    settings: Settings, exchange: HeadExchange,
) -> _Travelling:  # fmt: skip
    """Attend with one part of this rank's heads, and send the results to the ranks of their positions."""
    of_these = None if sinks is None else sinks.chunk(pieces)[number].contiguous()
    out = attend_to_context(*tensors, of_these, documents, settings, exchange.wrap)
    return _StartHeads.apply(exchange, False, out), [(out.shape[1], out.shape[3])]


def _finish_piece(travelling: _Travelling, exchange: HeadExchange) -> Tensor:
    """This rank's positions of one part of all ranks' heads: [b, l, degree, h, e]."""
    rows, sizes = travelling
    return _FinishHeads.apply(rows, exchange, False, sizes)[0].permute(0, 3, 1, 2, 4)


def _agree(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, documents: Tensor | None, settings: Settings) -> Mask:
    """The mask, once all ranks are known to make this call. ValueError for documents that are none."""
    ranks = _find_place(settings.group)[1]
    mask = Mask(settings.causal, settings.window, _read_documents(documents, q.shape[2] * ranks // settings.degree))
    if ranks > 1:
        shapes = " x ".join(str(list(each.shape)) for each in (q, k, v))
        starts = "none" if mask.documents is None else f"{len(mask.documents)}:{crc32(repr(mask.documents).encode()):x}"
        text = (
            f"context_attention {shapes} {q.dtype} {settings[1:]} documents={starts} "
            f"sinks={None if sinks is None else sinks.dtype}"
        )
        require_agreement(text, False, settings.group, q.device)
    return mask


def _read_documents(documents: Tensor | None, total: int) -> tuple[int, ...] | None:
    """The documents' starts, those of empty ones left out; None for a single document. ValueError for others."""
    if documents is None:
        return None
    starts = documents.tolist()
    if starts[0] != 0 or starts[-1] != total or any(one > other for one, other in pairwise(starts)):
        shown = f"{starts[:4]} ... {starts[-2:]}" if len(starts) > 6 else starts
        raise ValueError(
            f"context attention: documents begin at 0, in ascending order, and end with the length {total} of the "
            f"global sequence, not {shown}"
        )
    known = tuple(dict.fromkeys(starts))
    return known if len(known) > 2 else None


def _find_place(group: str) -> tuple[int, int]:
    """(rank, ranks)"""
    if group == ALONE:
        return 0, 1
    members = find_group(group)
    return members.rank(), members.size()


def _find_call(q: Tensor, mask: Mask, settings: Settings, wrap: CollectiveWrapper) -> ContextCall:
    degree, (rank, ranks) = settings.degree, _find_place(settings.group)
    place = rank // degree, ranks // degree
    plan = make_plan(settings.layout, *place, q.shape[2], mask, settings.schedule, degree)
    areas, room = 3 if len(plan.steps) > 1 else 1, max((step.room for step in plan.steps), default=0)
    by_copies = bool(plan.steps) and can_copy(settings.group, q.device)
    peers = Peers(settings.group, degree, wrap, by_copies, areas, room)
    return ContextCall(plan, peers, settings.scale, varies=mask.documents is not None)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Mask, settings: Settings, context_call: ContextCall
) -> tuple[Tensor, Tensor]:
    if settings.schedule in ("all_gather", "ring"):
        return forward(q, k, v, sinks, context_call)
    wrap = context_call.peers.wrap
    scheduled = ScheduledCall(settings.group, settings.schedule, settings.layout, mask, settings.scale, wrap)
    return forward_by_schedule(q, k, v, sinks, scheduled)


class _ContextAttention(torch.autograd.Function):
    """Calls past torch.library."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, documents: Tensor | None, settings: Settings,
        wrap: CollectiveWrapper,
    ) -> Tensor:  # fmt: skip
        mask = _agree(q, k, v, sinks, documents, settings)
        q, k, v = (_align(each) for each in (q, k, v))
        ctx.call = _find_call(q, mask, settings, wrap)
        with torch._C._DisableAutocast():
            out, lse = _forward(q, k, v, sinks, mask, settings, ctx.call)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch._C._DisableAutocast():
            q, k, v, out, lse, sinks = ctx.saved_tensors
            return *backward(grad, q, k, v, out, lse, sinks, ctx.call), None, None, None


def _align(tensor: Tensor) -> Tensor:
    """The tensor, with positions' numbers next to each other, as kernels take them."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _run_operator(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, documents: Tensor | None, group: str, degree: int,
    causal: bool, scale: float, layout: str, window: int | None, schedule: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    settings = Settings(group, degree, causal, scale, layout, window, schedule)
    mask = _agree(q, k, v, sinks, documents, settings)
    q, k, v = (_align(each) for each in (q, k, v))
    out, lse = _forward(q, k, v, sinks, mask, settings, _find_call(q, mask, settings, call))
    return lay_out_by_position(out), lse.contiguous()


def _fake_operator(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = q.shape
    out = q.new_empty(batch, length, heads, v.shape[3]).transpose(1, 2)
    wide = torch.promote_types(q.dtype, torch.float32)
    return out, q.new_empty(batch, heads, length, dtype=wide)


def _run_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Tensor, lse: Tensor, sinks: Tensor | None,
    documents: Tensor | None, group: str, degree: int, causal: bool, scale: float, layout: str, window: int | None,
    schedule: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    settings = Settings(group, degree, causal, scale, layout, window, schedule)
    total = q.shape[2] * _find_place(group)[1] // degree
    mask = Mask(causal, window, _read_documents(documents, total))
    q, k, v = (_align(each) for each in (q, k, v))
    of_q, of_k, of_v, of_sinks = backward(grad, q, k, v, attended, lse, sinks, _find_call(q, mask, settings, call))
    of_q, of_k, of_v = (lay_out_by_position(each) for each in (of_q, of_k, of_v))
    return of_q, of_k, of_v, q.new_empty(0) if of_sinks is None else of_sinks


def _fake_gradient(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_q, of_k, of_v = (
        each.transpose(1, 2).new_empty(each.transpose(1, 2).shape).transpose(1, 2) for each in (q, k, v)
    )
    return of_q, of_k, of_v, q.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, sinks, documents, *ctx.settings = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, sinks, documents)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 12
    *found, of_sinks = torch.ops.stretto.context_attention_backward(grad, *ctx.saved_tensors, *ctx.settings)
    return *found, of_sinks if ctx.needs_input_grad[3] else None, *(None,) * 8


def _count_flops(q: torch.Size, k: torch.Size, v: torch.Size, group: str, degree: int) -> int:
    """Two products for each pair of positions, masked ones too, as torch counts attention."""
    ranks = _find_place(group)[1] // degree
    return 2 * q[0] * q[1] * q[2] * k[2] * ranks * (q[3] + v[3])


def _count_gradient_flops(q: torch.Size, k: torch.Size, v: torch.Size, group: str, degree: int) -> int:
    """Five products, as torch counts them: scores again, and the gradients of both products' operands."""
    ranks = _find_place(group)[1] // degree
    return 2 * q[0] * q[1] * q[2] * k[2] * ranks * (3 * q[3] + 2 * v[3])


define_operator(
    "context_attention",
    _run_operator,
    fake=_fake_operator,
    count_flops=_count_flops,
    autograd=Autograd(_save, _differentiate),
)
define_operator("context_attention_backward", _run_gradient, fake=_fake_gradient, count_flops=_count_gradient_flops)


class _StartHeads(torch.autograd.Function):
    """`HeadExchange.start`; the gradient of what it sends comes back."""

    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, gathers: bool, *tensors: Tensor) -> Tensor:
        ctx.settings = [(each.shape[2 if gathers else 1], each.shape[-1]) for each in tensors], not gathers
        ctx.exchange = exchange
        return exchange.start(tensors, gathers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, *ctx.exchange.finish(grad, *ctx.settings)


class _FinishHeads(torch.autograd.Function):
    """`HeadExchange.finish`; gradients are sent back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, exchange: HeadExchange, gathers: bool, sizes: Sequence[tuple[int, int]]
    ) -> tuple[Tensor, ...]:
        ctx.settings = exchange, not gathers
        ctx.save_for_backward(rows.new_empty(0))  # recomputation ends at the last saved tensor: not before this awaits
        return tuple(exchange.finish(rows, sizes, gathers))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        exchange, gathers = ctx.settings
        return exchange.start(grads, gathers), None, None, None


def _find_exchange(
    documents: Tensor | None, length: int, group: str, degree: int, layout: str, wrap: CollectiveWrapper
) -> HeadExchange:
    """length: of a rank's positions."""
    members = find_group(group)
    known = _read_documents(documents, length * members.size()) if layout == "balanced" else None
    chunks = list_chunks_together(layout, members.rank() // degree, degree, members.size(), length, known)
    return HeadExchange(group, degree, chunks, wrap)


def _run_exchange(x: Tensor, documents: Tensor | None, group: str, degree: int, layout: str, gathers: bool) -> Tensor:
    length = x.shape[2] if gathers else x.shape[2] // degree
    exchange = _find_exchange(documents, length, group, degree, layout, call)
    tensor = x.unflatten(1, (degree, -1)) if gathers else x
    size = tensor.shape[2 if gathers else 1], x.shape[3]
    (found,) = exchange.finish(exchange.start([tensor], gathers), [size], gathers)
    return (found if gathers else found.flatten(1, 2)).contiguous()


def _fake_exchange(x: Tensor, degree: int, gathers: bool) -> Tensor:
    batch, heads, length, size = x.shape
    shape = (heads // degree, length * degree) if gathers else (heads * degree, length // degree)
    return x.new_empty(batch, *shape, size)


def _save_exchange(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.settings = inputs[2:]


def _differentiate_exchange(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *place, gathers = ctx.settings
    exchanged = torch.ops.stretto.exchange_heads(grad, *ctx.saved_tensors, *place, not gathers)
    return exchanged, None, None, None, None, None


define_operator(
    "exchange_heads", _run_exchange, fake=_fake_exchange, autograd=Autograd(_save_exchange, _differentiate_exchange)
)
