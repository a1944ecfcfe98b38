# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention: each rank has a part of the sequence, and keys and values travel while attention runs.

TileLink's AllGather KV + self-attention (sections 4.1 and 5, figure 6), here around the fastest library kernels: a rank
attends to its own keys while others' arrive, then to those, and merges both by log-sum-exp.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import gcd, isfinite, nan
from typing import Any, Literal, TypedDict, Unpack, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from stretto.collectives.schedule import Schedule
from stretto.ops.attention.choice import AttentionProblem, choose_way
from stretto.ops.attention.joint import OPERATOR
from stretto.ops.attention.operators import (
    ALONE,
    Settings,
    attend_by_heads,
    attend_to_context,
    attend_while_projecting,
)
from stretto.ops.attention.plan import Layout, require_layout
from stretto.ops.joint.registry import is_runnable, name_schedule
from stretto.ops.moe.routes import CollectiveWrapper
from stretto.ops.moe.routes import call as call_directly
from stretto.ops.operands import require_dense, takes_tensors
from stretto.ops.operator import find_group, find_name, is_traced
from stretto.quantities import to_whole

Implementation = Literal["auto", "all_gather", "ring", "ulysses"]
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class AttentionOptions(TypedDict, total=False):
    """Options of `context_attention`."""

    causal: bool
    scale: float | None
    layout: Layout
    window: int | None
    documents: Tensor | None
    sinks: Tensor | None
    wrap_collective: CollectiveWrapper


def all_gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule | None = None,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """`context_attention` that receives all keys that it needs at once, while it attends to its own: the fastest.

    schedule: how keys travel: an all-gather's algorithm by name, or any verified `Schedule` of one
    (docs/tutorial-kernel.md). Copy engines move its chunks, and a rank attends to each as it arrives. A chunk that no
    rank behind another needs, by causality or the window, does not travel. The backward pass has no schedule.
    """
    how = "all_gather" if schedule is None else _name_schedule(schedule, find_name(group))
    return context_attention(q, k, v, group, implementation=how, **options)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup | None = None, **options: Unpack[AttentionOptions]
) -> Tensor:
    """`context_attention`, with its options, that receives a rank's keys while it attends to another's: two ranks'."""
    return context_attention(q, k, v, group, implementation="ring", **options)


@takes_tensors
def ulysses_attention(
    q: Tensor | Callable[[], Tensor],
    k: Tensor | Callable[[], Tensor],
    v: Tensor | Callable[[], Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    kv_heads: int | None = None,
    output: Tensor | None = None,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """`context_attention` to the whole sequence, of a part of the heads: exchanges queries, keys, values and results.

    Of ranks that do not divide both q's and k's heads, as many neighbours as divide all three exchange heads, and these
    sets of ranks gather each other's keys. ValueError where that is one rank. DeepSpeed-Ulysses, section 3.

    Given tensors, half of the heads travel while the other half attends. To have the exchange under the projections,
    give functions that make them, and the output projection's weight: q travels while k and v are made, k while v is,
    and half of the heads' results while the other half is projected; gradients likewise. kv_heads: of k and v, needed
    if both are functions. output: [n, heads * e]; returns [b, s / ranks, n], without a bias.
    """
    if isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor) and output is None:
        return context_attention(q, k, v, group, implementation="ulysses", **options)
    causal, layout, window = options.get("causal", False), options.get("layout", "contiguous"), options.get("window")
    sinks, documents = options.get("sinks"), options.get("documents")
    name, ranks = find_name(group), dist.get_world_size(group)
    q = q if isinstance(q, Tensor) else _make_dense("q", q)
    _require_tensors(q, q, q, sinks)
    _require_mask(causal, window, documents, layout, q.shape[2], ranks)
    kv_heads = next((each.shape[1] for each in (k, v) if isinstance(each, Tensor) and each.dim() == 4), kv_heads)
    if kv_heads is None or kv_heads < 1 or q.shape[1] % kv_heads:
        raise ValueError(
            f"ulysses_attention: kv_heads, of k and v, divide the {q.shape[1]} heads of q, and are not {kv_heads}"
        )
    heads = q.shape[1]

    def make(source: Tensor | Callable[[], Tensor], before: Sequence[Tensor]) -> Tensor:
        made = source if isinstance(source, Tensor) else _make_dense("k or v", source)
        _require_tensors(before[0], before[1] if len(before) == 2 else made, made, None)
        if made.shape[1] != kv_heads:
            raise ValueError(f"ulysses_attention: k and v have kv_heads={kv_heads} heads, not {made.shape[1]}")
        if len(before) == 2 and output is not None and output.shape[1:] != (heads * made.shape[3],):
            raise ValueError(
                f"ulysses_attention: output is a weight [n, {heads * made.shape[3]}], of {heads} heads' values, not "
                f"{list(output.shape)}"
            )
        return made

    makers = partial(make, k), partial(make, v)
    degree = _find_degree(q.shape[1], kv_heads, ranks)
    if degree > 1 and not is_traced(q, in_modes=False):
        q, scale = _fold_scale(q, options.get("scale"))
        settings = Settings(name, degree, causal, scale, layout, window, "all_gather")
        sinks, wrap = _cut_sinks(sinks, degree, group), options.get("wrap_collective", call_directly)
        return attend_while_projecting(q, makers, output, kv_heads, sinks, documents, settings, wrap)
    k = makers[0]([q])
    v = makers[1]([q, k])
    out = context_attention(q, k, v, group, implementation="ulysses", **options)
    return out if output is None else torch.nn.functional.linear(out.transpose(1, 2).flatten(2), output)


@takes_tensors
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
    wrap_collective: CollectiveWrapper = call_directly,
    implementation: Implementation | str = "auto",
) -> Tensor:
    """Attention over a sequence that the group's ranks share: q [b, heads, s / ranks, d] -> [b, heads, s / ranks, e].

    As `scaled_dot_product_attention` of the whole sequence: k is [b, KV heads, s / ranks, d] and v [b, KV heads,
    s / ranks, e], where the KV heads divide the heads (grouped queries: keys travel before they are repeated). bf16,
    fp16, fp32 or fp64; partial results are merged in fp32 (fp64 for fp64). group: None for all ranks. All ranks give
    the same shapes, options and documents.

    causal: a position sees those up to its own. scale: of scores (None: 1 / sqrt(d)). layout: a rank's part of the
    sequence: "contiguous", its r-th; "zigzag", chunks r and 2 * ranks - 1 - r of 2 * ranks equal ones, which makes
    causal attention equal work; "balanced", as `list_chunks` cuts these documents, so that causal attention to them is
    nearly equal work. window: a causal position sees the last so many, its own among them. documents: int32 or int64
    [documents + 1], where in the global sequence each begins, then the sequence's length: a position sees its own
    document. Keep it on the CPU: one on a GPU is read at each call, which waits for the GPU. sinks: [heads], a logit
    for each head that its softmax has in the denominator alone; its gradient is of this rank's positions, to be summed
    over the ranks as a replicated parameter's. Of flex_attention's BlockMask, `read_block_mask` makes options.

    A rank is sent only the keys that its positions see. wrap_collective: called in place of each collective, backward
    too, as wrap_collective("all_to_all", make); it returns what make() returns, which issues it, and keeps nothing.
    implementation: see `all_gather_attention` (which gives a schedule's name), `ring_attention` and
    `ulysses_attention`; "auto" takes the fastest measured (`tune_attention`), else the predicted one: mostly it
    gathers. It rings where all keys and values would take more than 4 GiB. Of documents, it measures and predicts
    nothing.

    With torch.compile it is an operator of the graph; with `wrap_collective`, the graph breaks here. It cannot be
    differentiated twice. ValueError for other input, and on all ranks for ranks whose calls differ.
    """
    name, ranks = find_name(group), dist.get_world_size(group)
    _require_tensors(q, k, v, sinks)
    _require_mask(causal, window, documents, layout, q.shape[2], ranks)
    q, scale = _fold_scale(q, scale)
    chosen: str = implementation
    if implementation not in get_args(Implementation) and not _is_schedule(implementation, name):
        raise ValueError(f"implementation must be one of {', '.join(get_args(Implementation))}, not {implementation!r}")
    if implementation == "auto":
        mask = {"causal": causal, "window": window, "layout": layout}
        chosen = _choose(q, k, v, group, documents, scale=scale, sinks=sinks, **mask)
    degree = _find_degree(q.shape[1], k.shape[1], ranks) if chosen == "ulysses" else 1
    settings = Settings(name, degree, causal, scale, layout, window, "all_gather" if chosen == "ulysses" else chosen)
    run = _run_in_graph if wrap_collective is call_directly else _run_apart
    return run(q, k, v, _cut_sinks(sinks, degree, group), documents, settings, wrap_collective)


def _cut_sinks(sinks: Tensor | None, degree: int, group: dist.ProcessGroup | None) -> Tensor | None:
    """The sinks of this rank's part of the heads."""
    if degree == 1 or sinks is None:
        return sinks
    return sinks.chunk(degree)[dist.get_rank(group) % degree].contiguous()


@takes_tensors
def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of this process alone to rows of packed documents: q [b, heads, s, d] -> [b, heads, s, e].

    Tensors and options are `context_attention`'s, of whole rows; it needs no process group. documents: int32 or int64
    [documents + 1], where those of all rows begin, one row after another, then b * s (`find_starts`). Every row begins
    a document. Memory is linear in s: on GPUs, flash attention takes all documents in one call.
    """
    _require_tensors(q, k, v, sinks)
    rows, length = q.shape[0], q.shape[2]
    _require_mask(causal, window, documents, "contiguous", rows * length, 1)
    if rows > 1 and not torch.compiler.is_compiling():
        _require_row_starts(documents, rows, length)
    q, scale = _fold_scale(q, scale)
    settings = Settings(ALONE, 1, causal, scale, "contiguous", window, "all_gather")
    one = [each.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0) for each in (q, k, v)]  # rows as one
    out = attend_to_context(one[0], one[1], one[2], sinks, documents, settings, call_directly)
    return out[0].transpose(0, 1).unflatten(0, (rows, length)).transpose(1, 2)


@torch.compiler.disable
def find_starts(places: Tensor) -> Tensor:
    """Find where documents begin in packed rows, row after row, and the end of the last: int32 [documents + 1] on the
    CPU. places: of tokens in their documents, [rows, seq]; every row begins one."""
    firsts = (places == 0).cpu()
    firsts[:, 0] = True
    return torch.nn.functional.pad(firsts.view(-1).nonzero().flatten(), (0, 1), value=places.numel()).int()


@torch.compiler.assume_constant_result
def _name_schedule(schedule: str | Schedule, group: str) -> str:
    return name_schedule(OPERATOR, schedule, "kernel", find_group(group).size())


@torch.compiler.assume_constant_result
def _is_schedule(name: str, group: str) -> bool:
    return isinstance(name, str) and is_runnable(OPERATOR, name, find_group(group).size())


def _run_in_graph(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, documents: Tensor | None, settings: Settings,
    wrap: CollectiveWrapper,
) -> Tensor:  # fmt: skip
    attend = attend_to_context if settings.degree == 1 else attend_by_heads
    return attend(q, k, v, sinks, documents, settings, wrap)


_run_apart = torch.compiler.disable(_run_in_graph)  # a function, as wrap_collective is, is no operator's argument


def describe_call(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup | None, causal: bool, window: int | None
) -> AttentionProblem:
    """The call, as its way is chosen by."""
    (batch, heads, length, size), (kv_heads, value_size) = q.shape, (v.shape[1], v.shape[3])
    trains = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    shape = batch, heads, kv_heads, length, size, value_size
    return AttentionProblem(*shape, q.dtype, causal, window, trains, dist.get_world_size(group))


def prepare_run(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup | None, *, trains: bool, **options: Any
) -> Callable[[str], None]:
    """A function that computes a call a way, with gradients if it `trains`, of tensors that share memory with these.

    It saves tensors past the caller's hooks, as those of recomputation, which count them.
    """
    leaves = [each.detach().requires_grad_(trains) for each in (q, k, v)]

    def keep(saved: Tensor) -> Tensor:
        return saved

    def run(way: str) -> None:
        with torch.set_grad_enabled(trains), saved_tensors_hooks(keep, keep):
            out = context_attention(leaves[0], leaves[1], leaves[2], group, implementation=way, **options)
            if trains:
                torch.autograd.grad(out, leaves, out.detach())

    return run


def _choose(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup | None, documents: Tensor | None, **options: Any
) -> str:
    call = describe_call(q, k, v, group, options["causal"], options["window"])
    if documents is not None:  # of which few keys travel
        return call.list_ways()[0]
    if torch.compiler.is_compiling():
        return _choose_in_graph(find_name(group), q.device, *call)
    prepare = partial(prepare_run, q, k, v, group, trains=call.trains, **options)
    # A dispatch mode would record what is timed: selective recomputation would take it for the call's own.
    return choose_way(call, find_name(group), q.device, prepare, can_time=not is_traced(q, k, v))


@torch.compiler.assume_constant_result
def _choose_in_graph(group: str, device: torch.device, *call: Any) -> str:
    return choose_way(AttentionProblem(*call), group, device)


def _find_degree(heads: int, kv_heads: int, ranks: int) -> int:
    degree = gcd(heads, kv_heads, ranks)
    if degree == 1 and ranks > 1:
        raise ValueError(
            f"ulysses_attention gives each of some ranks a part of the heads, and no number of {ranks} ranks divides "
            f"{heads} heads and {kv_heads} KV heads: use all_gather_attention or ring_attention, or a group of "
            f"{kv_heads} ranks or a multiple of it"
        )
    return degree


def _fold_scale(q: Tensor, scale: float | None) -> tuple[Tensor, float]:
    """Queries and a scale above 0 that give the same scores: torch's kernels scale masked scores, -inf, too."""
    is_other = isinstance(scale, bool | str | Tensor)  # a tensor may want a gradient
    number = nan if is_other else q.shape[-1] ** -0.5 if scale is None else float(scale)
    if not isfinite(number):
        raise ValueError(f"context attention: scale must be a finite number, or None for 1 / sqrt(size), not {scale!r}")
    if number > 0:
        return q, number
    return (-q, -number) if number < 0 else (q * 0, 1.0)


def _make_dense(name: str, make: Callable[[], Tensor]) -> Tensor:
    made = make()
    require_dense("ulysses_attention", f"what makes {name}: its result", made)
    return made


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
    if not q.numel() or not v.numel():
        raise ValueError(f"context attention takes tensors that are not empty, not {shapes}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"context attention: {k.shape[1]} KV heads do not divide {q.shape[1]} heads")
    if q.dtype not in DTYPES:
        raise ValueError(f"context attention takes {', '.join(map(str, DTYPES))}, not {q.dtype}: convert q, k and v")
    if sinks is not None and (sinks.shape != q.shape[1:2] or sinks.device != q.device or not sinks.is_floating_point()):
        raise ValueError(
            f"context attention: sinks must be [{q.shape[1]}] floating-point numbers on {q.device}, not {sinks.dtype} "
            f"{list(sinks.shape)} on {sinks.device}"
        )


def _require_row_starts(documents: Tensor, rows: int, length: int) -> None:
    begun = set(documents.tolist())
    if missing := [row * length for row in range(rows) if row * length not in begun]:
        raise ValueError(
            f"packed attention: {rows} rows of {length} positions begin documents of their own, but none begins at "
            f"{missing[0]}: find_starts makes such documents of the tokens' places"
        )


def _require_mask(
    causal: bool, window: int | None, documents: Tensor | None, layout: str, length: int, ranks: int
) -> None:
    require_layout(layout, length)
    if layout == "balanced" and not causal:
        raise ValueError(
            'context attention: layout="balanced" is of causal attention: give causal=True, or layout="contiguous"'
        )
    if not isinstance(causal, bool):
        raise ValueError(f"context attention: causal must be True or False, not {causal!r:.40}")
    is_whole = isinstance(to_whole(window), int) and not isinstance(window, bool)
    if window is not None and (not causal or not is_whole or window < 1):
        raise ValueError(
            f"context attention: a window must be 1 or more positions and needs causal=True, not {window} with "
            f"causal={causal}"
        )
    if documents is not None and (
        documents.dim() != 1 or len(documents) < 2 or documents.dtype not in (torch.int32, torch.int64)
    ):
        raise ValueError(
            "context attention: documents are int32 or int64 [documents + 1], where each begins and the length "
            f"{length * ranks}, not {documents.dtype} {list(documents.shape)}"
        )
