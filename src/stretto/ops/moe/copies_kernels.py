# SPDX-License-Identifier: Apache-2.0
"""Kernels that sum, weigh and multiply copies of tokens, each in one pass over memory.

`permutation` calls them for CUDA tensors. The same by torch's operators is a loop over a token's k experts, which reads
and writes a [t, h] intermediate in fp32 several times for each of them.

`sum_rows` and `weigh_rows` give the bits that torch's operators give: they add in the same order, and are compiled
without fused multiply-adds, so that products are rounded as well. `multiply_rows` adds a scalar product's terms in
another order than torch's sum, and in the same order in every run. No kernel here has atomics.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.ops.operator import define_operator, needs_gradients
from stretto.tiles.launches import launch_cached

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_UNROLLED = 8  # copies whose loads are in flight at once
_SLOTS = 8  # of a token, in one program of `multiply_rows`
_TILE = 4096  # elements of the tile of `multiply_rows`
_LANE = 8  # elements a thread: 16 bytes in 16 bits
_WARP = 32


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of numbers of this dtype are formed."""
    return dtype if dtype == torch.float64 else torch.float32


def suits_kernels(*tensors: Tensor | None) -> bool:
    """Whether these kernels support a call: floating tensors on a GPU, and no gradient is required.

    Kernels are called in forward and backward passes of autograd functions, where torch records nothing. It does with
    `create_graph=True`; torch's operators are taken then, so that gradients of gradients are right.
    """
    there = [tensor for tensor in tensors if tensor is not None]
    return all(one.is_cuda and one.dtype in DTYPES for one in there) and not needs_gradients(*there)


def choose_block(columns: int) -> tuple[int, int]:
    """(columns of a program's block, warps): the largest block of which few columns lie beyond the last one."""
    for block in (1024, 512):
        if triton.cdiv(columns, block) * block * 8 <= columns * 9:
            return block, block // (_LANE * _WARP)
    return 256, 1


@triton.jit
def find_block(columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """(row, columns, which of these there are) of this program, of ceil(columns / BLOCK) programs a row."""
    parts = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // parts).to(tl.int64)
    at = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    return row, at, at < columns


@triton.jit
def sum_rows(  # type: ignore[no-untyped-def]
    rows, positions, weights, is_valid, out, columns, K: tl.constexpr, UNROLL: tl.constexpr, BLOCK: tl.constexpr
):
    """out[t] = sum over slots of weights[t, slot] * rows[positions[t, slot]], in the order of slots, rounded once.

    A program has BLOCK columns of one token. weights may be None (for 1), and is_valid (for True; rows that are not
    valid are not read). Bytes: t * k rows are read, and t written; beside them 8 t k of positions, and weights.
    Synchronization: none: programs own their part of out.
    """
    dtype = tl.float64 if rows.dtype.element_ty == tl.float64 else tl.float32
    token, at, mask = find_block(columns, BLOCK)
    total = tl.full([BLOCK], -0.0, dtype)  # -0 + x is x, also for -0
    for slot in tl.range(0, K, loop_unroll_factor=UNROLL):
        copy = token * K + slot
        there = mask
        if is_valid is not None:
            there = mask & (tl.load(is_valid + copy) != 0)
        row = tl.load(rows + tl.load(positions + copy) * columns + at, mask=there, other=0.0).to(dtype)
        if weights is not None:
            row *= tl.load(weights + copy).to(dtype)
        total += row
    tl.store(out + token * columns + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def weigh_rows(  # type: ignore[no-untyped-def]
    tokens, weights, slots, out, columns, K: tl.constexpr, BLOCK: tl.constexpr
):
    """out[n] = tokens[slots[n] // K] * weights[slots[n]], rounded once; weights is flat.

    A program has BLOCK columns of one row. Bytes: n rows are written, and n read, of which caches may hold those that
    were read for another copy: t at least. Synchronization: none: programs own their part of out.
    """
    dtype = tl.float64 if tokens.dtype.element_ty == tl.float64 else tl.float32
    row, at, mask = find_block(columns, BLOCK)
    copy = tl.load(slots + row)
    token = tl.load(tokens + copy // K * columns + at, mask=mask, other=0.0).to(dtype)
    weighed = token * tl.load(weights + copy).to(dtype)
    tl.store(out + row * columns + at, weighed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def multiply_rows(  # type: ignore[no-untyped-def]
    tokens, rows, positions, is_valid, products, weights, weighed, columns, K: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """products[t, slot] = tokens[t] . rows[positions[t, slot]]; and, unless `weighed` is None, in the same pass

    weighed[positions[t, slot]] = tokens[t] * weights[t, slot], rounded once: no two slots have one position then. A
    program has SLOTS slots of one token, and all columns. is_valid may be None (for True); a product with a row that is
    not valid is with zeros, and the row is not read. Bytes: t * k rows are read, t tokens for every SLOTS slots, and
    with `weighed` t * k rows written. Synchronization: none: programs own their products, and the rows of their slots.
    """
    dtype = tl.float64 if rows.dtype.element_ty == tl.float64 else tl.float32
    chunks: tl.constexpr = (K + SLOTS - 1) // SLOTS
    token = (tl.program_id(0) // chunks).to(tl.int64)
    slot = tl.program_id(0) % chunks * SLOTS + tl.arange(0, SLOTS)
    is_slot = slot < K
    copies = token * K + slot
    begins = tl.load(positions + copies, mask=is_slot, other=0) * columns
    is_read = is_slot
    if is_valid is not None:
        is_read = is_slot & (tl.load(is_valid + copies, mask=is_slot, other=0) != 0)
    factors = tl.zeros([SLOTS], dtype)
    if weighed is not None:
        factors = tl.load(weights + copies, mask=is_slot, other=0.0).to(dtype)
    total = tl.zeros([SLOTS, BLOCK], dtype)
    for begin in range(0, columns, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        mask = at < columns
        numbers = tl.load(tokens + token * columns + at, mask=mask, other=0.0).to(dtype)[None, :]
        places = begins[:, None] + at[None, :]
        total += numbers * tl.load(rows + places, mask=is_read[:, None] & mask[None, :], other=0.0).to(dtype)
        if weighed is not None:
            scaled = (numbers * factors[:, None]).to(weighed.dtype.element_ty)
            tl.store(weighed + places, scaled, mask=is_slot[:, None] & mask[None, :])
    tl.store(products + copies, tl.sum(total, axis=1), mask=is_slot)


def _run_sum(rows: Tensor, positions: Tensor, weights: Tensor | None, is_valid: Tensor | None) -> Tensor:
    (t, k), h = positions.shape, rows.shape[1]
    out = rows.new_empty(t, h)
    if out.numel():
        block, warps = choose_block(h)
        programs = t * triton.cdiv(h, block)
        arguments = _contiguous(rows), _contiguous(positions), _contiguous(weights), _as_bytes(is_valid), out, h
        _launch(sum_rows, programs, *arguments, K=k, UNROLL=min(k, _UNROLLED), BLOCK=block, num_warps=warps)
    return out


def _run_weigh(tokens: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    n, h = slots.shape[0], tokens.shape[1]
    out = tokens.new_empty(n, h)
    if out.numel():
        block, warps = choose_block(h)
        arguments = _contiguous(tokens), _contiguous(weights), _contiguous(slots), out, h
        programs = n * triton.cdiv(h, block)
        _launch(weigh_rows, programs, *arguments, K=weights.shape[1], BLOCK=block, num_warps=warps)
    return out


def _run_multiply(tokens: Tensor, rows: Tensor, positions: Tensor, is_valid: Tensor | None) -> Tensor:
    products = torch.empty(positions.shape, dtype=sum_dtype(rows.dtype), device=rows.device)
    _launch_products(tokens, rows, positions, is_valid, products, None, None)
    return products


def _run_both(tokens: Tensor, rows: Tensor, positions: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    # A backward pass: rows that no position names have no influence, and zeros for a gradient.
    is_whole = len(rows) == positions.numel()
    weighed = rows.new_empty(rows.shape) if is_whole else rows.new_zeros(rows.shape)
    products = torch.empty(positions.shape, dtype=sum_dtype(rows.dtype), device=rows.device)
    _launch_products(tokens, rows, positions, None, products, weights, weighed)
    return weighed, products


def _launch_products(
    tokens: Tensor,
    rows: Tensor,
    positions: Tensor,
    is_valid: Tensor | None,
    products: Tensor,
    weights: Tensor | None,
    weighed: Tensor | None,
) -> None:
    (t, k), h = positions.shape, rows.shape[1]
    if not t:
        return
    slots = min(triton.next_power_of_2(k), _SLOTS)
    block = min(_TILE // slots, 1024, max(triton.next_power_of_2(h), 16))
    arguments = (
        _contiguous(tokens), _contiguous(rows), _contiguous(positions), _as_bytes(is_valid), products,
        _contiguous(weights), weighed, h,
    )  # fmt: skip
    _launch(multiply_rows, t * triton.cdiv(k, slots), *arguments, K=k, SLOTS=slots, BLOCK=block, num_warps=4)


def _launch(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
    """Launch a kernel on the device of its first argument, with products that are rounded as torch rounds them."""
    with torch.cuda.device_of(arguments[0]):
        launch_cached(kernel, programs, *arguments, enable_fp_fusion=False, **options)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _as_bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)


def _fake_sum(rows: Tensor, positions: Tensor, weights: Tensor | None, is_valid: Tensor | None) -> Tensor:
    return rows.new_empty(positions.shape[0], rows.shape[1])


def _fake_weigh(tokens: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    return tokens.new_empty(slots.shape[0], tokens.shape[1])


def _fake_multiply(tokens: Tensor, rows: Tensor, positions: Tensor, is_valid: Tensor | None) -> Tensor:
    return rows.new_empty(positions.shape, dtype=sum_dtype(rows.dtype))


def _fake_both(tokens: Tensor, rows: Tensor, positions: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), rows.new_empty(positions.shape, dtype=sum_dtype(rows.dtype))


def _count_flops(*_: object, **__: object) -> int:
    """None, as torch counts those of products of matrices alone."""
    return 0


sum_on_gpu = define_operator("moe_sum_copies", _run_sum, fake=_fake_sum, count_flops=_count_flops, tensors=slice(4))
weigh_on_gpu = define_operator("moe_weigh_tokens", _run_weigh, fake=_fake_weigh, count_flops=_count_flops)
multiply_on_gpu = define_operator(
    "moe_multiply_copies", _run_multiply, fake=_fake_multiply, count_flops=_count_flops, tensors=slice(4)
)
weigh_and_multiply_on_gpu = define_operator(
    "moe_weigh_and_multiply", _run_both, fake=_fake_both, count_flops=_count_flops, tensors=slice(4)
)
