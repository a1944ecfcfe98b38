# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of few tokens, as in decoding: a launch each, by packets, whose time is one message's.

`dispatch` stores rows where the ranks' counts say, so counts go first, and its results are complete after several
launches. Here every token has its place in every rank's memory, and its rows carry their own signals. The price is
memory, and packets that are emptied again: for up to 128 tokens a rank.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from stretto import tiles
from stretto.memory.gpus import find_capability, limit_waiting
from stretto.ops.gemm import align
from stretto.ops.moe.call_route import check_call
from stretto.ops.moe.few_kernels import FewLayout, ReceivedRows, SentChoices, combine_sums, dispatch_tokens
from stretto.ops.moe.fixed_rows import find_fixed_route
from stretto.ops.moe.permutation import sort_by_expert, sum_copies
from stretto.ops.moe.routes import call
from stretto.ops.operands import DTYPES, FP8, needs_gradients, takes_tensors
from stretto.ops.operator import abandon, find_group, find_kept, find_name, require_agreement, scatter_sum
from stretto.ops.scaled import quantize_rows
from stretto.ops.small_m import THREADS_OF_A_WARP

MAX_TOKENS = 128
"""The most tokens of a rank."""

_PACKET_BYTES = 4
_GRAIN = 16  # bytes, of which a row is a multiple: packets are stored four at a time
_MAX_PLACES = 1024  # counts of a rank: for each of its experts, and tokens, from each rank
_MAX_RANKS = 32  # a bit each: `SentChoices.holders`
_MAX_COMPARED = 1 << 15  # pairs of a choice and a count in a program at once
_FP8_CAPABILITY = (8, 9)  # the first with conversions to e4m3
_ALIGNMENT = 128
_HOPPER = (9, 0)


@dataclass(frozen=True)
class FewHandle:
    """The record of a `dispatch_few` that `combine_few` needs.

    shape, dtype: of the rows. tokens: of this rank. group: None for one rank. sent: of kernels, with max_tokens and k;
    or of the library.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    tokens: int
    group: dist.ProcessGroup | None
    sent: "_SentByKernel | _SentByLibrary"


@dataclass(frozen=True)
class DispatchedFew:
    """Rows for this rank's experts, sorted by expert.

    rows: [n, h]. offsets: int32 [local experts + 1], on the device; the rows of this rank's expert e are offsets[e] to
    offsets[e + 1], and what stands from offsets[-1] on is arbitrary. handle: for `combine_few`.
    """

    rows: Tensor
    offsets: Tensor
    handle: FewHandle


@dataclass(frozen=True)
class FewWorkspace:
    """A channel whose buffer has two slots: numbered int64 [2, slot] and packets int32 [2, 2 * slot] are views of it.

    first: the place in a slot of packets before which there are numbered words, and from which on packets, which are 0
    between calls.
    """

    channel: tiles.BlockChannel
    numbered: Tensor
    packets: Tensor
    first: int


@dataclass(frozen=True)
class _SentByKernel:
    """sizes: max_tokens, k, experts of a rank, bytes of a row."""

    choices: SentChoices
    sizes: tuple[int, int, int, int]


@dataclass(frozen=True)
class _SentByLibrary:
    """positions: int64 [places, k], the row of each choice of each token here; is_here, weights: of the same shape."""

    positions: Tensor
    is_here: Tensor | None
    weights: Tensor


@takes_tensors
def dispatch_few(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    group: dist.ProcessGroup | None = None,
    *,
    max_tokens: int = MAX_TOKENS,
    payload: torch.dtype | None = None,
    implementation: str = "auto",
) -> DispatchedFew:
    """Send each of few tokens, with its weights, to the ranks of its experts: x [t, h], topk_ids, topk_weights [t, k].

    For inference: `dispatch` for up to 128 tokens a rank, with the least latency, a fixed number of rows, no host wait
    and no gradients; a CUDA graph can hold it. t is at most max_tokens, may differ between ranks, and may be 0; all
    else is the same on all ranks. rows is [ranks * max_tokens * k, h] (of one rank, [t * k, h]), and only offsets, on
    the device, tell how many of them there are: sorted by expert, then source rank, then token. `grouped_matmul` and
    `experts_mlp` take them. A token is sent once to each rank that has experts of it, and copied there. On CPUs ids are
    checked; on several GPUs those that are no experts belong to no rank, and add nothing to their token's sum.

    payload: None to send rows in x's dtype, as they are but for zeros, which may lose their sign; or
    torch.float8_e4m3fn to send fp8 with one fp32 scale a row, which makes its largest number 448 (`quantize_rows`):
    numbers are rounded to the nearest of 3 bits of mantissa, ties to even, and the received ones are multiplied by the
    scale in fp32 and rounded to x's dtype. A row with an infinity or a NaN arrives as NaN. Rows that stay on their rank
    are rounded, too.

    implementation: "kernel" is one launch, by packets in symmetric memory, for bf16, fp16 and fp32 whose rows (of what
    is sent, too) are a multiple of 16 bytes; fp8 takes GPUs of compute capability 8.9. "library" gathers all tokens in
    x's dtype, rounded as payload says. "auto": the kernel between GPUs that NVLink connects, else the library. Results
    have the same bits but for the signs of zeros. ValueError for other shapes, dtypes and numbers, where gradients
    would be needed, and if ranks make different calls.
    """
    operator = "dispatch_few"
    route_call = check_call(operator, x, topk_ids, topk_weights, num_experts, group, None, None, call, implementation)
    t, k = topk_ids.shape
    if needs_gradients(x, topk_weights):
        raise ValueError(
            "dispatch_few has no gradients: call it under torch.no_grad(), detach its operands, or take dispatch"
        )
    if type(max_tokens) is not int or not 1 <= max_tokens <= MAX_TOKENS:
        raise ValueError(f"dispatch_few: max_tokens must be 1 to {MAX_TOKENS}, not {max_tokens!r}; dispatch takes more")
    if t > max_tokens:
        advice = f"give max_tokens={t} on all ranks" if t <= MAX_TOKENS else "take dispatch, which has no limit"
        raise ValueError(f"dispatch_few: this rank has {t} tokens, more than max_tokens={max_tokens}: {advice}")
    if payload not in (None, FP8):
        raise ValueError(f"dispatch_few: payload must be None, for x's dtype, or {FP8}, not {payload}")
    if route_call.group is None:
        rows = _round(x, payload)
        order = sort_by_expert(topk_ids, num_experts)
        rows, sent = rows.index_select(0, order.tokens), _SentByLibrary(order.positions, None, topk_weights)
        return DispatchedFew(rows, order.offsets, FewHandle((t * k, x.shape[1]), x.dtype, t, None, sent))
    obstacle = _find_obstacle(x, num_experts, route_call.group.size(), payload) if route_call.runs_kernels else ""
    if obstacle and implementation == "kernel":
        raise ValueError(f'dispatch_few: no kernel can run: {obstacle}; implementation="library" will do')
    runs_kernel = route_call.runs_kernels and not obstacle
    return _dispatch(x, topk_ids, topk_weights, num_experts, route_call.group, max_tokens, payload, runs_kernel)


@takes_tensors
def combine_few(rows: Tensor, handle: FewHandle) -> Tensor:
    """Return rows to their tokens' ranks, and sum each token's, weighted: rows [n, h] -> [t, h] of rows' dtype.

    rows: the experts' outputs for the rows of `dispatch_few`, in its order, shape and dtype. Each rank sums a token's
    rows times their weights in fp32, in the order of topk_ids, rounds to rows' dtype, and sends one row; the token's
    rank adds those of all ranks in fp32, in the order of ranks, and rounds. So do `dispatch` and `combine`, whose bits
    these are: the same in each run, whatever the implementation. All ranks call it, after each `dispatch_few`, in the
    same order. ValueError for other shapes and dtypes, and where gradients would be needed.
    """
    if rows.shape != handle.shape or rows.dtype != handle.dtype:
        raise ValueError(
            f"combine_few: dispatch_few returned rows {list(handle.shape)} of {handle.dtype} with this handle, not "
            f"{list(rows.shape)} of {rows.dtype}"
        )
    if needs_gradients(rows):
        raise ValueError("combine_few has no gradients: call it under torch.no_grad(), detach rows, or take combine")
    if handle.group is None:
        assert isinstance(handle.sent, _SentByLibrary)
        return sum_copies(rows, handle.sent.positions, handle.sent.weights)
    return _combine(rows, handle, handle.group)


@torch.compiler.disable  # a graph break, as in `dispatch`
def _dispatch(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    group: dist.ProcessGroup,
    max_tokens: int,
    payload: torch.dtype | None,
    runs_kernel: bool,
) -> DispatchedFew:
    k, columns = topk_ids.shape[1], x.shape[1]
    require_agreement(
        f"moe.dispatch_few of {x.dtype} [., {columns}], k={k}, {num_experts} experts, max_tokens={max_tokens}, "
        f"payload={payload}, {topk_ids.dtype}, {topk_weights.dtype}, {'kernel' if runs_kernel else 'library'}",
        False,
        find_name(group),
        x.device,
    )
    capacity = group.size() * max_tokens * k
    if runs_kernel:
        local = num_experts // group.size()
        sizes = max_tokens, k, local, columns * x.element_size()
        offsets, counts, holders = (
            torch.empty(size, dtype=torch.int32, device=x.device) for size in (local + 1, group.size(), max_tokens)
        )
        rows = x.new_empty(capacity, columns)
        positions = torch.empty(group.size() * max_tokens, k, dtype=torch.int32, device=x.device)
        choices = SentChoices(positions, torch.empty_like(positions, dtype=torch.float32), counts, holders)
        words = (sizes[3] if payload is None else columns) // _PACKET_BYTES
        operands = align(x.contiguous()), topk_ids.contiguous(), topk_weights.contiguous()
        received = ReceivedRows(rows, offsets, capacity)
        _launch(
            "moe.dispatch_few", dispatch_tokens, group, sizes, words, choices, (received, *operands), len(x),
            payload is not None,
        )  # fmt: skip
        sent: _SentByKernel | _SentByLibrary = _SentByKernel(choices, sizes)
    else:  # by all ranks' tokens, which are gathered: fixed shapes for CUDA graphs
        missing = max_tokens - len(x)
        ids = pad(topk_ids, (0, 0, 0, missing), value=num_experts)
        with torch.no_grad():
            x = _round(x, payload)
            route = find_fixed_route(ids, num_experts, capacity, (group,), group.size(), group.rank(), call)
            tokens = route.send(lambda: pad(x, (0, 0, 0, missing)), call)
            everyones = route.send(lambda: pad(topk_weights, (0, 0, 0, missing)), call)
            rows, offsets = tokens.index_select(0, route.index.places), route.index.offsets
        sent = _SentByLibrary(route.index.positions, route.index.is_here, everyones)
    return DispatchedFew(rows, offsets, FewHandle((capacity, columns), x.dtype, len(x), group, sent))


@torch.compiler.disable
def _combine(rows: Tensor, handle: FewHandle, group: dist.ProcessGroup) -> Tensor:
    match handle.sent:
        case _SentByKernel(choices, sizes):
            operands = align(rows.contiguous()), rows.new_empty(handle.tokens, rows.shape[1])
            words = sizes[3] // _PACKET_BYTES
            _launch("moe.combine_few", combine_sums, group, sizes, words, choices, operands, handle.tokens)
            return operands[1]
        case _SentByLibrary(positions, is_here, weights):
            sums = sum_copies(rows, positions, weights, is_here)
            return scatter_sum(sums, find_name(group))[: handle.tokens].clone()


def _round(x: Tensor, payload: torch.dtype | None) -> Tensor:
    if payload is None:
        return x
    quantized, scale = quantize_rows(x)
    return (quantized.float() * scale[:, None]).to(x.dtype)


def _find_obstacle(x: Tensor, num_experts: int, world: int, payload: torch.dtype | None) -> str:
    """Say why no kernel can send these rows; empty if one can."""
    columns, size = x.shape[1], x.element_size() if payload is None else 1
    if x.dtype not in DTYPES:
        return f"it takes {', '.join(map(str, DTYPES))}, not {x.dtype}"
    if not columns or columns * size % _GRAIN:
        nearest = max(round(columns * size / _GRAIN), 1) * _GRAIN // size
        return f"it takes rows of a multiple of {_GRAIN} bytes, such as {nearest} columns, not {columns}"
    if world > _MAX_RANKS:
        return f"it takes up to {_MAX_RANKS} ranks, not {world}"
    if num_experts + world > _MAX_PLACES:
        return f"it takes up to {_MAX_PLACES - world} experts on {world} ranks, not {num_experts}"
    if payload is not None and x.is_cuda and (torch.version.hip or find_capability(x.device.index) < _FP8_CAPABILITY):
        return "it takes fp8 on NVIDIA GPUs of compute capability 8.9 or newer"
    return ""


def _launch(
    operator: str,
    kernel: Any,
    group: dist.ProcessGroup,
    sizes: tuple[int, int, int, int],
    words: int,
    choices: SentChoices,
    operands: tuple[Any, ...],
    tokens: int,
    *constants: bool,
) -> None:
    """Launch a call's only kernel: channel, layout, choices, numbered words, packets, operands, tokens, constants."""
    name, device, world = find_name(group), choices.counts.device, group.size()

    def make() -> FewWorkspace:
        *_, first, slot_bytes = _arrange(world, *sizes)
        backend = "cuda" if device.type == "cuda" else "host"
        channel = tiles.BlockChannel.allocate(find_group(name), channels=1, data_bytes=2 * slot_bytes, backend=backend)
        numbered, packets = (channel.tensor((2, slot_bytes // one.itemsize), one) for one in (torch.int64, torch.int32))
        return FewWorkspace(channel, numbered, packets, first)

    programs, rows, block, warps = _divide(device, world, *sizes[:3], words, tokens)
    # A launch that follows another kernel saves half a microsecond of its latency so.
    is_dependent = device.type == "cuda" and not torch.version.hip and find_capability(device.index) >= _HOPPER
    layout = _describe(world, sizes, words, rows, block, warps * THREADS_OF_A_WARP, is_dependent)
    options = {"num_warps": warps, "enable_fp_fusion": False} | ({"launch_pdl": True} if is_dependent else {})
    workspace = find_kept(name, device, ("moe few", *sizes), make)
    try:
        channel = workspace.channel.enter(operator, "p2p")
        # What was allocated for the call is of x's dtype, and aligned.
        kinds = [tiles.kind_of(one) for one in operands if isinstance(one, Tensor)]
        key = sizes, words, rows, block, warps, *kinds, *constants
        arguments = channel, layout, choices, workspace.numbered, workspace.packets, *operands, tokens, *constants
        workspace.channel.launch(kernel, key, programs, arguments, **options)
    except BaseException:
        abandon(name, workspace.channel)
        raise


def _arrange(world: int, max_tokens: int, k: int, local: int, row_bytes: int) -> tuple[int, int, int, int]:
    """(int64 words before those of the beginnings, before choices, packets before the rows, bytes of a slot)."""
    begun = world * (local + 1)
    choices = begun + world
    numbered = choices + world * max_tokens * 4 * triton.next_power_of_2(k)
    first = triton.cdiv(8 * numbered, _ALIGNMENT) * _ALIGNMENT
    slot = triton.cdiv(first + world * max_tokens * row_bytes, _ALIGNMENT) * _ALIGNMENT
    return begun, choices, first // _PACKET_BYTES, slot


@lru_cache(maxsize=1024)
def _describe(
    world: int, sizes: tuple[int, int, int, int], words: int, rows: int, block: int, threads: int, is_dependent: bool
) -> FewLayout:
    max_tokens, k, local, row_bytes = sizes
    begun, choices, packets, slot = _arrange(world, *sizes)
    places = max(triton.next_power_of_2(world * (local + 1)), threads)
    bins = max(triton.next_power_of_2(local + 1), 64)  # Triton's histograms have a warp's threads or more
    numbers = (
        slot // 8, begun, choices, packets, max_tokens, k, local, row_bytes // _PACKET_BYTES, words, rows, block,
        places, bins, threads, is_dependent,
    )  # fmt: skip
    return FewLayout(*map(tl.constexpr, numbers))


@lru_cache(maxsize=1024)
def _divide(
    device: torch.device, world: int, max_tokens: int, k: int, local: int, words: int, tokens: int
) -> tuple[int, int, int, int]:
    """(programs, tokens and packets of a unit of work, warps), for ranks that have about as many tokens as this one.

    Few tokens are divided among many programs; with more, a program polls more packets at once, since it may wait for
    memory at each unit.
    """
    if device.type != "cuda":
        return 2, 2, triton.next_power_of_2(min(words, 16)), 1
    parts = triton.cdiv(words, 512)
    programs = limit_waiting(world * (max_tokens * parts + 1) + max_tokens, device)  # at least a unit each
    block = max(min(triton.next_power_of_2(words), 512), 4 * THREADS_OF_A_WARP * 2)
    if world * tokens * triton.cdiv(words, block) > programs and words > block:
        block *= 2
    compared = triton.next_power_of_2(k) * triton.next_power_of_2(world * (local + 1))
    rows = 1
    while (
        rows < 8
        and world * triton.cdiv(tokens, rows) * triton.cdiv(words, block) > programs
        and 2 * rows * compared <= _MAX_COMPARED
    ):
        rows *= 2
    warps = min(max(rows * block // (4 * THREADS_OF_A_WARP), 4), 1024 // THREADS_OF_A_WARP // 2)
    return programs, rows, block, 1 << (warps.bit_length() - 1)
