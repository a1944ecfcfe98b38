# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention: each rank has a part of the sequence, and keys and values travel while attention runs.

TileLink's AllGather KV + self-attention (sections 4.1 and 5, figure 6), here around the fastest library kernels: a rank
attends to its own keys while others' arrive, then to those, and merges both by log-sum-exp. From top to bottom: the
functions; checks; the two torch.library operators; what a rank does, forward and backward.

Backward, keys come again (they are not kept), during the own block's gradients of one half of the heads; gradients of
others' keys return during those of the other half.
"""

from itertools import pairwise
from math import gcd
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, get_args
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask

from stretto.ops.attention.block_mask import read_block_mask
from stretto.ops.attention.exchange import Peers, add_returned, gather_sequence, scatter_sequence
from stretto.ops.attention.kernels import Gradients, Part, attend, differentiate
from stretto.ops.attention.merge import add_parts, merge_parts
from stretto.ops.attention.plan import Layout, Mask, Plan, Range, make_plan, require_layout
from stretto.ops.moe.routes import CollectiveWrapper, call
from stretto.ops.operator import (
    Autograd,
    define_operator,
    find_group,
    find_name,
    is_traced,
    require_agreement,
    require_no_tangents,
)

Implementation = Literal["auto", "all_gather", "ring", "ulysses"]
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# "auto" gathers all keys and values where this many bytes hold a layer's: above it, a ring holds two ranks' of them.
_GATHERED_BYTES = 4 << 30


class AttentionOptions(TypedDict, total=False):
    """Options of `context_attention`."""

    causal: bool
    scale: float | None
    layout: Layout
    window: int | None
    documents: Tensor | None
    sinks: Tensor | None
    block_mask: BlockMask | None
    wrap_collective: CollectiveWrapper


def all_gather_attention(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup | None = None, **options: Unpack[AttentionOptions]
) -> Tensor:
    """`context_attention` that receives all keys that it needs at once, while it attends to its own: the fastest."""
    return context_attention(q, k, v, group, implementation="all_gather", **options)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup | None = None, **options: Unpack[AttentionOptions]
) -> Tensor:
    """`context_attention` that receives the next rank's keys while it attends to those of one: two ranks' in memory."""
    return context_attention(q, k, v, group, implementation="ring", **options)


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup | None = None, **options: Unpack[AttentionOptions]
) -> Tensor:
    """`context_attention` to the whole sequence, of a part of the heads: exchanges queries, keys, values and results.

    Of ranks that do not divide both q's and k's heads, as many neighbours as divide all three exchange heads, and these
    sets of ranks gather each other's keys. ValueError where that is one rank. DeepSpeed-Ulysses, section 3.
    """
    return context_attention(q, k, v, group, implementation="ulysses", **options)


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    layout: Layout = "contiguous",
    window: int | None = None,
    documents: Tensor | None = None,
    sinks: Tensor | None = None,
    block_mask: BlockMask | None = None,
    wrap_collective: CollectiveWrapper = call,
    implementation: Implementation = "auto",
) -> Tensor:
    """Attention over a sequence that the group's ranks share: q [b, heads, s / ranks, d] -> [b, heads, s / ranks, e].

    As `scaled_dot_product_attention` of the whole sequence: k is [b, KV heads, s / ranks, d] and v [b, KV heads,
    s / ranks, e], where the KV heads divide the heads (grouped queries: keys travel before they are repeated). bf16,
    fp16, fp32 or fp64; partial results are merged in fp32 (fp64 for fp64). group: None for all ranks. All ranks give
    the same shapes, options and documents.

    causal: a position sees those up to its own. scale: of scores (None: 1 / sqrt(d)). layout: a rank's part of the
    sequence: "contiguous", its r-th; "zigzag", chunks r and 2 * ranks - 1 - r of 2 * ranks equal ones, which makes
    causal attention equal work. window: a causal position sees the last so many, its own among them. documents: int32
    or int64 [documents + 1], where in the global sequence each begins, then the sequence's length: a position sees its
    own document. Keep it on the CPU: one on a GPU is read at each call, which waits for the GPU. sinks: [heads], a
    logit for each head that its softmax has in the denominator alone; its gradient is of this rank's positions, to be
    summed over the ranks as a replicated parameter's. block_mask: of flex_attention, for the global sequence, in place
    of causal, window and documents, if it is such a mask.

    A rank is sent only the keys that its positions see. wrap_collective: called in place of each collective, backward
    too, as wrap_collective("all_to_all", make); make() issues it. implementation: see `all_gather_attention`,
    `ring_attention` and `ulysses_attention`; "auto" gathers unless all keys and values would take 4 GiB, then rings.

    With torch.compile it is an operator of the graph; with `wrap_collective`, the graph breaks here. It cannot be
    differentiated twice. ValueError for other input, and on all ranks for ranks whose calls differ.
    """
    if block_mask is not None:
        if causal or window is not None or documents is not None:
            raise ValueError("context attention takes a block_mask in place of causal, window and documents: give one")
        causal, window, documents = read_block_mask(block_mask)
    members = find_group(find_name(group))
    _require_tensors(q, k, v, sinks)
    _require_mask(causal, window, documents, layout, q.shape[2], members.size())
    if implementation not in get_args(Implementation):
        raise ValueError(
            f"context attention: implementation is {', '.join(get_args(Implementation))}, not {implementation!r}"
        )
    chosen = _choose(k, v, members.size()) if implementation == "auto" else implementation
    degree = _find_degree(q.shape[1], k.shape[1], members.size()) if chosen == "ulysses" else 1
    settings = _Settings(
        find_name(group),
        degree,
        causal,
        q.shape[-1] ** -0.5 if scale is None else float(scale),
        layout,
        window,
        "ring" if chosen == "ring" else "all_gather",
    )
    run = _run_in_graph if wrap_collective is call else _run_apart
    return run(q, k, v, sinks, documents, settings, wrap_collective)


class _Settings(NamedTuple):
    """What the operators take beside tensors. degree: of neighbours that exchange heads."""

    group: str
    degree: int
    causal: bool
    scale: float
    layout: str
    window: int | None
    schedule: str

    def peers(self, wrap: CollectiveWrapper) -> Peers:
        return Peers(self.group, self.degree, wrap)


def _run_in_graph(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, documents: Tensor | None, settings: _Settings,
    wrap: CollectiveWrapper,
) -> Tensor:  # fmt: skip
    group, degree, layout = settings.group, settings.degree, settings.layout
    if degree > 1:
        q, k, v = (_exchange_heads(each, group, degree, layout, True, wrap) for each in (q, k, v))
        if sinks is not None:
            sinks = sinks.chunk(degree)[find_group(group).rank() % degree].contiguous()
    out = _attend(q, k, v, sinks, documents, settings, wrap)
    return out if degree == 1 else _exchange_heads(out, group, degree, layout, False, wrap)


_run_apart = torch.compiler.disable(_run_in_graph)  # a function, as wrap_collective is, is no operator's argument


def _choose(k: Tensor, v: Tensor, ranks: int) -> Implementation:
    return "ring" if ranks * (k.numel() + v.numel()) * k.element_size() > _GATHERED_BYTES else "all_gather"


def _find_degree(heads: int, kv_heads: int, ranks: int) -> int:
    degree = gcd(heads, kv_heads, ranks)
    if degree == 1 and ranks > 1:
        raise ValueError(
            f"ulysses_attention gives each of some ranks a part of the heads, and no number of {ranks} ranks divides "
            f"{heads} heads and {kv_heads} KV heads: use all_gather_attention or ring_attention, or a group of "
            f"{kv_heads} ranks or a multiple of it"
        )
    return degree


def _require_tensors(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    shapes = ", ".join(str(list(each.shape)) for each in (q, k, v))
    if any(each.dim() != 4 for each in (q, k, v)):
        raise ValueError(f"context attention takes q, k and v [batch, heads, positions, size], not {shapes}")
    same = {(each.shape[0], each.shape[2], each.dtype, each.device) for each in (q, k, v)}
    if len(same) > 1 or k.shape[1] != v.shape[1] or q.shape[3] != k.shape[3]:
        raise ValueError(
            "context attention takes q, k and v of one batch, number of positions, dtype and device, k and v of as "
            f"many heads, and q and k of one size, not {shapes} ({q.dtype}, {k.dtype}, {v.dtype})"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"context attention: {k.shape[1]} KV heads do not divide {q.shape[1]} heads")
    if not q.numel() or not v.numel():
        raise ValueError(f"context attention takes tensors that are not empty, not {shapes}")
    if q.dtype not in DTYPES:
        raise ValueError(f"context attention takes {', '.join(map(str, DTYPES))}, not {q.dtype}: convert q, k and v")
    if sinks is not None and (sinks.shape != q.shape[1:2] or sinks.device != q.device):
        raise ValueError(
            f"context attention: sinks are [{q.shape[1]}] on {q.device}, not {list(sinks.shape)} on {sinks.device}"
        )


def _require_mask(
    causal: bool, window: int | None, documents: Tensor | None, layout: str, length: int, ranks: int
) -> None:
    require_layout(layout, length)
    if window is not None and (not causal or window < 1):
        raise ValueError(
            f"context attention: a window is 1 or more positions and needs causal=True, not {window} with "
            f"causal={causal}"
        )
    if documents is not None and (
        documents.dim() != 1 or len(documents) < 2 or documents.dtype not in (torch.int32, torch.int64)
    ):
        raise ValueError(
            "context attention: documents are int32 or int64 [documents + 1], where each begins and the length "
            f"{length * ranks}, not {documents.dtype} {list(documents.shape)}"
        )


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


class _Work(NamedTuple):
    """A call of this rank: its mask and plan, and the ranks that it exchanges rows with."""

    mask: Mask
    plan: Plan
    peers: Peers
    scale: float

    @classmethod
    def of(cls, q: Tensor, mask: Mask, settings: _Settings, wrap: CollectiveWrapper) -> "_Work":
        peers = Peers(settings.group, settings.degree, wrap)
        plan = make_plan(settings.layout, peers.rank, peers.ranks, q.shape[2], mask, settings.schedule)
        return cls(mask, plan, peers, settings.scale)


def _agree(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, documents: Tensor | None, settings: _Settings
) -> Mask:
    """The mask, once all ranks are known to make this call. ValueError for documents that are none."""
    ranks = find_group(settings.group).size()
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


def _forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, work: _Work) -> tuple[Tensor, Tensor]:
    """(this rank's attention, its log-sum-exp with sinks)."""
    length, steps, peers = q.shape[2], work.plan.steps, work.peers
    rows = _pack(k, v) if steps else None
    arriving = _start(work, 0, rows)
    parts = attend(q, k, v, work.plan.own, work.scale)
    for number, step in enumerate(steps):
        assert arriving is not None
        arrived = peers.wait(arriving)
        arriving = _start(work, number + 1, rows)
        if step.blocks:
            parts += attend(q, *_unpack(arrived, k.shape[3]), step.blocks, work.scale)
        if arriving is not None and len(parts) > 1:  # or each step would keep a result
            parts = [Part(Range(0, length), *merge_parts(parts, length, parts[0].lse.dtype))]
    return merge_parts(parts, length, q.dtype, sinks)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, documents: Tensor | None, settings: _Settings,
    wrap: CollectiveWrapper,
) -> Tensor:  # fmt: skip
    # In a dispatch mode, too, calls go past torch.library unless torch compiles: so the mode sees the collectives.
    if is_traced(q, k, v, sinks, in_modes=False):
        require_no_tangents(q, k, v, sinks)
        return torch.ops.stretto.context_attention(q, k, v, sinks, documents, *settings)[0]
    out: Tensor = _ContextAttention.apply(q, k, v, sinks, documents, settings, wrap)
    return out


def _exchange_heads(x: Tensor, group: str, degree: int, layout: str, gathers: bool, wrap: CollectiveWrapper) -> Tensor:
    if is_traced(x, in_modes=False):
        return torch.ops.stretto.exchange_heads(x, group, degree, layout, gathers)
    found: Tensor = _ExchangeHeads.apply(x, group, degree, layout, gathers, wrap)
    return found


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None, work: _Work
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and the sinks: of the keys by all ranks' queries, of sinks by this rank's."""
    grad = grad if grad.stride(-1) == 1 and 0 not in grad.stride() else grad.contiguous()
    steps, peers, size, each = work.plan.steps, work.peers, k.shape[3], q.shape[1] // k.shape[1]
    wide = torch.promote_types(k.dtype, torch.float32) if steps else k.dtype
    of_q, of_rows = torch.empty_like(q), _new_rows(k, v, k.shape[2], wide)
    of_k, of_v = _unpack(of_rows, size)
    theirs: list[tuple[Range, Tensor]] = []

    def differentiate_own(kv_heads: range) -> Gradients:
        heads, few = slice(kv_heads.start * each, kv_heads.stop * each), slice(kv_heads.start, kv_heads.stop)
        found = differentiate(
            grad[:, heads], q[:, heads], k[:, few], v[:, few], out[:, heads], lse[:, heads], work.plan.own, work.scale
        )
        add_parts(found.k, of_k[:, few])
        add_parts(found.v, of_v[:, few])
        return found

    def finish(found: Gradients, kv_heads: range) -> None:
        heads = slice(kv_heads.start * each, kv_heads.stop * each)
        add_parts([*found.q, *((rows, part[:, heads]) for rows, part in theirs)], of_q[:, heads])

    rows = _pack(k, v) if steps else None
    arriving, returning = _start(work, 0, rows), []
    middle = k.shape[1] // 2 if steps else k.shape[1]
    first, second = range(middle), range(middle, k.shape[1])
    own = differentiate_own(first) if first else None  # while keys come
    for number, step in enumerate(steps):
        assert arriving is not None
        arrived = peers.wait(arriving)
        arriving = _start(work, number + 1, rows)
        returned = _new_rows(k, v, len(arrived), k.dtype)
        if step.blocks:
            found = differentiate(grad, q, *_unpack(arrived, size), out, lse, step.blocks, work.scale)
            theirs += found.q
            for parts, target in zip((found.k, found.v), _unpack(returned, size), strict=True):
                add_parts(parts, target)
        returning.append(peers.start_back(step, returned))
    if own is not None:
        finish(own, first)
    if second:  # while their gradients return
        finish(differentiate_own(second), second)
    for step, coming in zip(steps, returning, strict=True):
        add_returned(of_rows, step, peers.wait(coming))
    of_sinks = None
    if sinks is not None:
        mean = (grad * out).sum(-1, dtype=lse.dtype)
        of_sinks = -((sinks.to(lse.dtype)[:, None] - lse).exp() * mean).sum((0, 2)).to(sinks.dtype)
    return of_q, of_k.to(k.dtype), of_v.to(v.dtype), of_sinks


def _start(work: _Work, number: int, rows: Tensor | None) -> Tensor | None:
    """Start a step's exchange of keys and values, if there is such a step."""
    return (
        work.peers.start(work.plan.steps[number], rows) if rows is not None and number < len(work.plan.steps) else None
    )


def _new_rows(k: Tensor, v: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Memory for keys and values of positions, which lie together: [length, b, KV heads, d + e]."""
    return k.new_empty(length, k.shape[0], k.shape[1], k.shape[3] + v.shape[3], dtype=dtype)


def _pack(k: Tensor, v: Tensor) -> Tensor:
    rows = _new_rows(k, v, k.shape[2], k.dtype)
    for target, source in zip(_unpack(rows, k.shape[3]), (k, v), strict=True):
        target.copy_(source)
    return rows


def _unpack(rows: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Views of the keys and of the values, [b, KV heads, length, .]."""
    tensor = rows.permute(1, 2, 0, 3)
    return tensor[..., :size], tensor[..., size:]


class _ContextAttention(torch.autograd.Function):
    """Calls past torch.library."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, documents: Tensor | None, settings: _Settings,
        wrap: CollectiveWrapper,
    ) -> Tensor:  # fmt: skip
        mask = _agree(q, k, v, sinks, documents, settings)
        q, k, v = (_align(each) for each in (q, k, v))
        ctx.work = _Work.of(q, mask, settings, wrap)
        out, lse = _forward(q, k, v, sinks, ctx.work)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch._C._DisableAutocast():
            q, k, v, out, lse, sinks = ctx.saved_tensors
            return *_backward(grad, q, k, v, out, lse, sinks, ctx.work), None, None, None


def _align(tensor: Tensor) -> Tensor:
    """The tensor, with positions' numbers next to each other, as kernels take them."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _run_operator(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, documents: Tensor | None, group: str, degree: int,
    causal: bool, scale: float, layout: str, window: int | None, schedule: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    settings = _Settings(group, degree, causal, scale, layout, window, schedule)
    mask = _agree(q, k, v, sinks, documents, settings)
    q, k, v = (_align(each) for each in (q, k, v))
    out, lse = _forward(q, k, v, sinks, _Work.of(q, mask, settings, call))
    return _by_position(out), lse.contiguous()


def _fake_operator(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, documents: Tensor | None, *settings: Any
) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = q.shape
    out = q.new_empty(batch, length, heads, v.shape[3]).transpose(1, 2)
    wide = torch.promote_types(q.dtype, torch.float32)
    return out, q.new_empty(batch, heads, length, dtype=wide)


def _by_position(tensor: Tensor) -> Tensor:
    """The same, contiguous as [b, length, h, size], as a fake result is."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _run_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None,
    documents: Tensor | None, group: str, degree: int, causal: bool, scale: float, layout: str, window: int | None,
    schedule: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    settings = _Settings(group, degree, causal, scale, layout, window, schedule)
    total = q.shape[2] * find_group(group).size() // degree
    mask = Mask(causal, window, _read_documents(documents, total))
    q, k, v = (_align(each) for each in (q, k, v))
    of_q, of_k, of_v, of_sinks = _backward(grad, q, k, v, out, lse, sinks, _Work.of(q, mask, settings, call))
    of_q, of_k, of_v = (_by_position(each) for each in (of_q, of_k, of_v))
    return of_q, of_k, of_v, q.new_empty(0) if of_sinks is None else of_sinks


def _fake_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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


def _count_flops(q: torch.Size, k: torch.Size, v: torch.Size, *others: Any, **_: Any) -> int:
    """Two products for each pair of positions, masked ones too, as torch counts attention."""
    group, degree = others[2:4]
    ranks = find_group(group).size() // degree
    return 2 * q[0] * q[1] * q[2] * k[2] * ranks * (q[3] + v[3])


def _count_gradient_flops(_: torch.Size, q: torch.Size, k: torch.Size, v: torch.Size, *others: Any, **__: Any) -> int:
    """Five products, as torch counts them: scores again, and the gradients of both products' operands."""
    group, degree = others[4:6]
    ranks = find_group(group).size() // degree
    return 2 * q[0] * q[1] * q[2] * k[2] * ranks * (3 * q[3] + 2 * v[3])


define_operator(
    "context_attention",
    _run_operator,
    fake=_fake_operator,
    count_flops=_count_flops,
    autograd=Autograd(_save, _differentiate),
)
define_operator("context_attention_backward", _run_gradient, fake=_fake_gradient, count_flops=_count_gradient_flops)


class _ExchangeHeads(torch.autograd.Function):
    """`gather_sequence`, or its inverse, whose gradients are each other."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: str, degree: int, layout: Layout, gathers: bool, wrap: CollectiveWrapper
    ) -> Tensor:
        ctx.settings = group, degree, layout, not gathers, wrap
        return (gather_sequence if gathers else scatter_sequence)(x, group, degree, layout, wrap)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _ExchangeHeads.apply(grad, *ctx.settings), None, None, None, None, None


def _run_exchange(x: Tensor, group: str, degree: int, layout: str, gathers: bool) -> Tensor:
    exchange = gather_sequence if gathers else scatter_sequence
    return exchange(x, group, degree, layout, call).contiguous()


def _fake_exchange(x: Tensor, group: str, degree: int, layout: str, gathers: bool) -> Tensor:
    batch, heads, length, size = x.shape
    shape = (heads // degree, length * degree) if gathers else (heads * degree, length // degree)
    return x.new_empty(batch, *shape, size)


def _save_exchange(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.settings = inputs[1:]


def _differentiate_exchange(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *place, gathers = ctx.settings
    return torch.ops.stretto.exchange_heads(grad, *place, not gathers), None, None, None, None


define_operator(
    "exchange_heads", _run_exchange, fake=_fake_exchange, autograd=Autograd(_save_exchange, _differentiate_exchange)
)
