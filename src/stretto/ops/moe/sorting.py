# SPDX-License-Identifier: Apache-2.0
"""Sorts copies of tokens by expert: on GPUs a counting sort by two kernels, elsewhere torch's stable sort.

A sort by torch's operators is some twenty launches, of which the host and the GPU need longer than the exchange of the
tokens does.

Synchronization: none. A copy's row follows from numbers that programs of the kernel before have counted apart, so every
program writes its own. There are no atomics, and no other order than that of the copies.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.ops.operator import define_operator
from stretto.tiles.launches import launch_cached

_BLOCKS = 256  # programs at most
_READ = tl.constexpr(64)  # whose numbers are read at once
_COPIES = tl.constexpr(128)  # sorted at once
_EXPERTS = tl.constexpr(32)


def sort_copies(
    ids: Tensor, experts: int, rows: int | None = None, known: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sort copies by expert, then by token and slot: (slots, tokens, positions, is_here, offsets) of ids [t, k].

    slots: int64 [rows], the copy (token * k + slot) of each row, and 0 from the last copy on. tokens: int32 [rows], its
    token. positions: int64 [t, k], the row of each copy, or an expert's last one for copies behind it. is_here: bool
    [t, k], whether it has an expert. offsets: int32 [experts + 1]; expert e's rows are offsets[e] to offsets[e + 1].

    ids: int32 or int64. Copies whose id is none of the experts come last. rows: t * k by default. known: one integer on
    the ids' device; tokens from that one on have no experts, whatever their ids. Nothing waits for the device.
    """
    rows = ids.numel() if rows is None else rows
    return sort_on_gpu(ids, experts, rows, known) if ids.is_cuda else sort_by_torch(ids, experts, rows, known)


def sort_by_torch(
    ids: Tensor, experts: int, rows: int, known: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`sort_copies` by torch's operators."""
    is_here = (ids >= 0) & (ids < experts)
    if known is not None:
        is_here &= (torch.arange(len(ids), device=ids.device) < known)[:, None]
    in_order, slots = torch.sort(torch.where(is_here, ids, experts).reshape(-1), stable=True)
    bounds = torch.arange(experts + 1, device=ids.device, dtype=ids.dtype)
    offsets = torch.searchsorted(in_order, bounds, out_int32=True).clamp(max=rows)
    numbers = torch.arange(len(slots), device=ids.device)
    last = (offsets[-1] - 1).clamp(min=0).to(torch.int64)
    positions = torch.empty_like(numbers).scatter_(0, slots, numbers.minimum(last))
    slots = torch.cat((slots[:rows], slots.new_zeros(max(rows - len(slots), 0))))
    return slots, (slots // ids.shape[1]).to(torch.int32), positions.view(ids.shape), is_here, offsets


def _sort_by_kernels(
    ids: Tensor, experts: int, rows: int, known: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (t, k), device = ids.shape, ids.device
    ids = ids if ids.stride(1) == 1 else ids.contiguous()
    make = torch.zeros if rows > t * k else torch.empty
    slots, tokens = (make(rows, dtype=dtype, device=device) for dtype in (torch.int64, torch.int32))
    positions, is_here = _empty((t, k), device), torch.empty(t, k, dtype=torch.bool, device=device)
    if not t * k:
        return slots, tokens, positions, is_here, torch.zeros(experts + 1, dtype=torch.int32, device=device)
    blocks = min(triton.cdiv(t * k, _COPIES.value), _BLOCKS)
    of_blocks = torch.empty(blocks + 1, experts + 1, dtype=torch.int32, device=device)
    copies = ids, ids.stride(0), t * k, k, known
    found = slots, tokens, positions, is_here.view(torch.uint8)
    with torch.cuda.device_of(ids):
        launch_cached(count_copies, blocks, *copies, of_blocks, experts, num_warps=4)
        launch_cached(place_copies, blocks, *copies, of_blocks, *found, rows, experts, num_warps=4)
    return slots, tokens, positions, is_here, of_blocks[0]


def _empty(shape: int | tuple[int, int], device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device=device)


def _fake(ids: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    slots, positions = ids.new_empty(rows, dtype=torch.int64), ids.new_empty(ids.shape, dtype=torch.int64)
    tokens, is_here = ids.new_empty(rows, dtype=torch.int32), ids.new_empty(ids.shape, dtype=torch.bool)
    return slots, tokens, positions, is_here, ids.new_empty(experts + 1, dtype=torch.int32)


sort_on_gpu = define_operator("moe_sort_copies", _sort_by_kernels, fake=_fake)


@triton.jit
def _load_experts(ids, stride, copies, k, known, start, experts):  # type: ignore[no-untyped-def]
    """(copies from `start` on, whether there are so many, their experts; `experts` for none) of this program."""
    copy = start + tl.arange(0, _COPIES)
    is_copy = copy < copies
    token = copy // k
    found = tl.load(ids + token.to(tl.int64) * stride + copy % k, mask=is_copy, other=-1).to(tl.int64)
    is_here = (found >= 0) & (found < experts)
    if known is not None:
        is_here = is_here & (token < tl.load(known))
    return copy, is_copy, tl.where(is_here, found, experts).to(tl.int32)


@triton.jit
def _find_share(copies):  # type: ignore[no-untyped-def]
    """The first copy of this program, and the one after its last."""
    length = tl.cdiv(copies, tl.num_programs(0) * _COPIES) * _COPIES
    begin = tl.program_id(0) * length
    return begin, begin + tl.minimum(length, copies - begin)  # no sum beyond 2^31


@triton.jit
def count_copies(ids, stride, copies, k, known, of_blocks, experts):  # type: ignore[no-untyped-def]
    """of_blocks [1 + programs, experts + 1]: how many of its copies each expert has, and none, last."""
    begin, end = _find_share(copies)
    for first in range(0, experts + 1, _EXPERTS):
        expert = first + tl.arange(0, _EXPERTS)
        number = tl.zeros([_EXPERTS], tl.int32)
        for start in range(begin, end, _COPIES):
            _, is_copy, found = _load_experts(ids, stride, copies, k, known, start, experts)
            hits = (found[:, None] == expert[None, :]) & is_copy[:, None]
            number += tl.sum(hits.to(tl.int32), 0)
        tl.store(of_blocks + (1 + tl.program_id(0)) * (experts + 1) + expert, number, mask=expert <= experts)


@triton.jit
def place_copies(  # type: ignore[no-untyped-def]
    ids, stride, copies, k, known, of_blocks, slots, tokens, positions, is_here, rows, experts
):
    """Write what `sort_copies` returns for a program's copies, from `count_copies`' numbers; before these, offsets."""
    begin, end = _find_share(copies)
    smaller = tl.program_id(0) * 0  # copies of experts before `first`
    for first in range(0, experts + 1, _EXPERTS):
        expert = first + tl.arange(0, _EXPERTS)
        is_expert = expert <= experts
        numbers = tl.zeros([_READ, _EXPERTS], tl.int32)
        before = tl.zeros([_READ, _EXPERTS], tl.int32)
        for start in range(0, tl.num_programs(0), _READ):
            block = (start + tl.arange(0, _READ))[:, None]
            mask = (block < tl.num_programs(0)) & is_expert[None, :]
            number = tl.load(of_blocks + (1 + block) * (experts + 1) + expert[None, :], mask=mask, other=0)
            numbers += number
            before += tl.where(block < tl.program_id(0), number, 0)
        total = tl.sum(numbers, 0)
        of_expert = smaller + tl.cumsum(total, 0) - total
        if tl.program_id(0) == 0:
            tl.store(of_blocks + expert, tl.minimum(of_expert, rows), mask=is_expert)
        here = tl.sum(tl.where(expert == experts, of_expert, 0), 0)  # copies of any expert, if none's are sorted now
        row = of_expert + tl.sum(before, 0)
        for start in range(begin, end, _COPIES):
            copy, is_copy, found = _load_experts(ids, stride, copies, k, known, start, experts)
            hits = ((found[:, None] == expert[None, :]) & is_copy[:, None]).to(tl.int32)
            position = tl.sum(hits * (row[None, :] + tl.cumsum(hits, 0) - 1), 1)
            is_own = is_copy & (tl.sum(hits, 1) > 0)
            at = tl.minimum(position, tl.where(found < experts, rows, tl.minimum(here, rows)) - 1)
            tl.store(positions + copy, tl.maximum(at, 0).to(tl.int64), mask=is_own)
            tl.store(slots + position, copy.to(tl.int64), mask=is_own & (position < rows))
            tl.store(tokens + position, copy // k, mask=is_own & (position < rows))
            tl.store(is_here + copy, (found < experts).to(tl.uint8), mask=is_own)
            row += tl.sum(hits, 0)
        smaller += tl.sum(total, 0)
