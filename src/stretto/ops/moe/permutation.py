# SPDX-License-Identifier: Apache-2.0
"""Sorts copies of tokens by their experts, and sums them back, with gradients that are gathers.

The gradient of a gather of rows is a scatter with additions, which GPUs do by atomic additions in any order. Here each
token knows the rows of its copies, so that gradients gather, too, and are added in the order of a token's experts: the
bits are the same in every run.

On GPUs copies are summed, weighed and multiplied by kernels, each in one pass over memory. The same by torch's
operators is a loop over a token's k experts, which reads and writes a [t, h] intermediate in fp32 several times for
each of them. `sum_rows` and `spread_rows` give the bits that torch's operators give: they add in the same order, and
are compiled without fused multiply-adds, so that products are rounded as well. `multiply_rows` adds a scalar product's
terms in another order than torch's sum, and in the same order in every run. No kernel here has atomics.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.ops.moe.sorting import sort_copies
from stretto.ops.operands import needs_gradients, takes_tensors
from stretto.ops.operator import define_operator, is_traced
from stretto.quantities import to_whole
from stretto.tiles.launches import launch_cached

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_UNROLLED = 8  # copies whose loads are in flight at once
_SLOTS = 8  # of a token, in one program of `multiply_rows`
_ROWS = tl.constexpr(4)  # whose loads are in flight at once, of a program of `spread_rows`
_TILE = 4096  # elements of the tile of `multiply_rows`
_LANE = 8  # elements a thread: 16 bytes in 16 bits
_WARP = 32


class Permuted(NamedTuple):
    """Tokens sorted by expert: what `permute` returns.

    rows: [t * k, h], the rows of an expert in the order of their tokens. offsets: int32 [num_experts + 1]; expert e's
    rows are offsets[e] to offsets[e + 1]. positions: int64 [t, k], the row of each token's copy.
    """

    rows: Tensor
    offsets: Tensor
    positions: Tensor


class CopyOrder(NamedTuple):
    """The order of copies of tokens by expert.

    slots: int64 [t * k], for each row the copy that it is (token * k + slot, of the token's k); tokens: int32 [t * k],
    its token. positions and offsets: those of `Permuted`.
    """

    slots: Tensor
    tokens: Tensor
    positions: Tensor
    offsets: Tensor


@takes_tensors
def permute(x: Tensor, topk_ids: Tensor, num_experts: int) -> Permuted:
    """Copy each token once for each of its experts, sorted by expert: x [t, h], topk_ids [t, k] -> rows [t * k, h].

    bf16, fp16, fp32 or fp64; topk_ids is int64 or int32, with 0 <= id < num_experts. Nothing waits for the device. On
    CPUs an id out of range is a ValueError; on GPUs, where a check would wait, its copy lies outside of all experts'
    rows and its result is undefined. x's gradient adds a token's copies in the order of topk_ids, in fp32 for 16-bit
    dtypes. ValueError for other shapes and dtypes, and for k > num_experts.
    """
    require_tokens("permute", x, topk_ids, num_experts)
    order = sort_by_expert(topk_ids, num_experts)
    return Permuted(copy_tokens(x, order), order.offsets, order.positions)


@takes_tensors
def unpermute(rows: Tensor, positions: Tensor, topk_weights: Tensor) -> Tensor:
    """Sum each token's rows, weighted: rows [n, h], positions [t, k], topk_weights [t, k] -> [t, h].

    The reverse of `permute`, which gives the positions. Each occurs once, n >= t * k, and rows that no position names
    have no influence. The sum is fp32 for 16-bit rows, in the order of a token's experts, and rounded once to rows'
    dtype. topk_weights may be of another floating dtype than rows (fp32 beside bf16, as a rule); its gradient is of its
    own. ValueError for other shapes and dtypes.
    """
    is_2d = positions.dim() == 2 and positions.shape[1] > 0
    if not is_2d or positions.dtype not in (torch.int64, torch.int32) or positions.device != rows.device:
        raise ValueError(
            f"unpermute: positions must be int64 or int32 [t, k], k of 1 or more, on {rows.device}, not "
            f"{positions.dtype} {list(positions.shape)} on {positions.device}"
        )
    require_weighted("unpermute", rows, topk_weights, positions.shape)
    if rows.shape[0] < positions.numel():
        raise ValueError(f"unpermute: {positions.numel()} positions need as many rows or more, not {rows.shape[0]}")
    return _Unpermute.apply(rows, positions, topk_weights)


def sort_by_expert(topk_ids: Tensor, num_experts: int) -> CopyOrder:
    """The order of the copies, on the ids' device, which nothing waits for."""
    slots, tokens, positions, _, offsets = sort_copies(topk_ids, num_experts)
    return CopyOrder(slots, tokens, positions, offsets)


def copy_tokens(x: Tensor, order: CopyOrder) -> Tensor:
    """The copies of x's tokens in this order, with a gradient."""
    return _Permute.apply(x, order.positions)


def sum_copies(
    rows: Tensor, positions: Tensor, weights: Tensor | None = None, is_valid: Tensor | None = None
) -> Tensor:
    """Sum each token's rows, times `weights` [t, k]: rows [n, h], positions [t, k] -> [t, h] of rows' dtype.

    is_valid: bool [t, k], False for positions that name no row: their copies count as zeros, whatever is read there.
    """
    if suits_kernels(rows, weights):
        return sum_on_gpu(rows, positions, weights, is_valid)
    dtype = sum_dtype(rows.dtype)
    total = None
    for slot in range(positions.shape[1]):  # not one gather [t, k, h], which needs k times the memory
        copies = rows.index_select(0, positions[:, slot]).to(dtype)
        if weights is not None:
            copies = copies * weights[:, slot, None].to(dtype)
        if is_valid is not None:
            copies = copies.masked_fill(~is_valid[:, slot, None], 0)  # no product: it may be NaN
        total = copies if total is None else total + copies
    assert total is not None
    return total.to(rows.dtype)


def spread_tokens(
    tokens: Tensor,
    positions: Tensor | None = None,
    weights: Tensor | None = None,
    is_valid: Tensor | None = None,
    rows: int | None = None,
    needed: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Copy each token, times `weights` [t, k], to each of its positions [t, k]: tokens [t, h] -> [rows, h].

    positions: None for a copy of the tokens as they are. rows: t * k by default; no two valid copies have one position.
    is_valid: bool [t, k], False for positions that name no row. Rows that no position names are zeros; with is_valid
    each has a name, except those from `needed` on, one integer on the device, which are zeros. Where it is more than
    `rows`, all are NaN. out: where the result is written.
    """
    if rows is None:
        rows = len(tokens) if positions is None else positions.numel()
    if suits_kernels(tokens, weights):
        return spread_on_gpu(tokens, positions, weights, is_valid, rows, needed, out=out)
    if out is not None:
        return out.copy_(spread_tokens(tokens, positions, weights, is_valid, rows, needed))
    if positions is None:
        return tokens.clone()
    dtype = sum_dtype(tokens.dtype)
    spread = tokens.new_zeros(rows + 1, tokens.shape[1])  # the last one is for positions that name no row
    for slot in range(positions.shape[1]):
        named, copies = positions[:, slot], tokens
        if is_valid is not None:
            named = torch.where(is_valid[:, slot], named, rows)
        if weights is not None:
            copies = (tokens.to(dtype) * weights[:, slot, None].to(dtype)).to(tokens.dtype)
        spread.index_copy_(0, named, copies)
    spread = spread[:rows]
    if needed is None:
        return spread
    is_row = torch.arange(rows, device=needed.device) < torch.where(needed > rows, 0, needed)
    return torch.where(is_row[:, None], spread, torch.where(needed > rows, torch.nan, 0.0).to(spread.dtype))


def multiply_copies(tokens: Tensor, rows: Tensor, positions: Tensor, is_valid: Tensor | None = None) -> Tensor:
    """The scalar product of each token with each of its rows: [t, h], [n, h], [t, k] -> [t, k] of `sum_dtype`."""
    if suits_kernels(tokens, rows):
        return multiply_on_gpu(tokens, rows, positions, is_valid)
    dtype = sum_dtype(rows.dtype)
    factor = tokens.to(dtype)
    products = []
    for slot in range(positions.shape[1]):
        copies = rows.index_select(0, positions[:, slot]).to(dtype)
        if is_valid is not None:
            copies = copies.masked_fill(~is_valid[:, slot, None], 0)
        products.append((factor * copies).sum(1))
    return torch.stack(products, 1)


def weigh_and_multiply(tokens: Tensor, rows: Tensor, positions: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `sum_copies` for a gradient `tokens` [t, h] of its result: of rows [n, h], of weights [t, k].

    No two copies have one position; gradients of rows that no position names are zeros. The second is of `sum_dtype`.
    """
    if suits_kernels(tokens, rows, weights):
        return weigh_and_multiply_on_gpu(tokens, rows, positions, weights)
    of_rows = spread_tokens(tokens, positions, weights, rows=rows.shape[0])
    return of_rows, multiply_copies(tokens, rows, positions)


class _Permute(torch.autograd.Function):
    """rows[i] = x[token of copy i]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        return spread_tokens(x, positions)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (positions,) = ctx.saved_tensors
        return sum_copies(grad, positions), None


class _Unpermute(torch.autograd.Function):
    """out[t] = sum over a token's copies of weight * row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
        needs_rows, _, needs_weights = ctx.needs_input_grad
        ctx.rows, ctx.weights_dtype = rows.shape[0], weights.dtype
        ctx.save_for_backward(positions, weights if needs_rows else None, rows if needs_weights else None)
        total = sum_copies(rows, positions, weights)
        # torch.compile of 2.11 takes an output that is also an earlier result, as of a conversion to its own dtype, for
        # that one, and gives it no gradient.
        return total.view_as(total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        positions, weights, rows = ctx.saved_tensors
        needs_rows, _, needs_weights = ctx.needs_input_grad
        grad_rows = grad_weights = None
        if needs_rows and needs_weights:
            grad_rows, grad_weights = weigh_and_multiply(grad, rows, positions, weights)
        elif needs_rows:
            grad_rows = spread_tokens(grad, positions, weights, rows=ctx.rows)
        elif needs_weights:
            grad_weights = multiply_copies(grad, rows, positions)
        if grad_weights is not None:
            grad_weights = grad_weights.to(ctx.weights_dtype)
        return grad_rows, None, grad_weights


def require_tokens(operator: str, x: Tensor, topk_ids: Tensor, num_experts: int) -> None:
    """ValueError unless x is [t, h] of a floating dtype and topk_ids [t, k] of ids of experts on its device."""
    if x.dim() != 2 or topk_ids.dim() != 2 or x.shape[0] != topk_ids.shape[0]:
        raise ValueError(
            f"{operator} takes x [t, h] and topk_ids [t, k] of as many tokens, not {list(x.shape)} and "
            f"{list(topk_ids.shape)}"
        )
    if x.dtype not in DTYPES:
        raise ValueError(f"{operator} takes x of {', '.join(map(str, DTYPES))}, not {x.dtype}")
    if topk_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{operator}: topk_ids must be torch.int64 or torch.int32, not {topk_ids.dtype}: convert it")
    if topk_ids.device != x.device:
        raise ValueError(f"{operator}: x is on {x.device} and topk_ids on {topk_ids.device}: move one of them")
    if not isinstance(to_whole(num_experts), int | torch.SymInt):
        raise ValueError(f"{operator}: num_experts must be a whole number, not {num_experts!r}")
    if not 1 <= topk_ids.shape[1] <= num_experts:
        raise ValueError(
            f"{operator}: topk_ids has {topk_ids.shape[1]} experts a token (its second dim), and there are "
            f"{num_experts}: 1 to {num_experts} will do"
        )
    if topk_ids.device.type == "cpu" and topk_ids.numel() and not is_traced(topk_ids):
        low, high = (int(bound) for bound in torch.aminmax(topk_ids))
        if low < 0 or high >= num_experts:
            raise ValueError(
                f"{operator}: topk_ids has {low if low < 0 else high}, but experts are numbered 0 to {num_experts - 1}"
            )


def require_weighted(operator: str, rows: Tensor, topk_weights: Tensor, shape: tuple[int, ...]) -> None:
    """ValueError unless rows is [n, h] and topk_weights of this shape [t, k], both floating and on one device."""
    if rows.dim() != 2 or topk_weights.shape != shape:
        raise ValueError(
            f"{operator} takes rows [n, h] and, for these tokens, topk_weights {list(shape)}, not {list(rows.shape)} "
            f"and {list(topk_weights.shape)}"
        )
    for name, one in (("rows", rows), ("topk_weights", topk_weights)):
        if one.dtype not in DTYPES:
            raise ValueError(f"{operator} takes {name} of {', '.join(map(str, DTYPES))}, not {one.dtype}")
    if rows.device != topk_weights.device:
        raise ValueError(
            f"{operator}: rows is on {rows.device} and topk_weights on {topk_weights.device}: move one of them"
        )


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of numbers of this dtype are formed."""
    return dtype if dtype == torch.float64 else torch.float32


def suits_kernels(*tensors: Tensor | None) -> bool:
    """True if these kernels support a call: floating tensors on a GPU, and no gradient is required.

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
            if is_valid is not None:
                row = tl.where(there, row, 0.0)  # 0 x an infinite weight is NaN
        total += row
    tl.store(out + token * columns + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def spread_rows(  # type: ignore[no-untyped-def]
    tokens, positions, weights, is_valid, needed, out, count, rows, columns, K: tl.constexpr, BLOCK: tl.constexpr
):
    """out[positions[t, slot]] = tokens[t] * weights[t, slot], rounded once; weights may be None (for 1).

    A program has BLOCK columns of _ROWS of the `count` tokens or, after those, of as many of the `rows` rows of out,
    which it writes where they are padding: from needed[0] on with zeros, and all with NaN if that is more than rows.
    Bytes: the tokens are read once, and the rows written once. Synchronization: none: no two copies have one position.
    """
    dtype = tl.float64 if tokens.dtype.element_ty == tl.float64 else tl.float32
    parts = tl.cdiv(columns, BLOCK)
    block = tl.program_id(0) // parts
    at = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)[None, :]
    blocks = tl.cdiv(count, _ROWS)
    number = rows
    if needed is not None:
        number = tl.load(needed).to(tl.int32)
    if block < blocks:
        token = block.to(tl.int64) * _ROWS + tl.arange(0, _ROWS)
        is_token = (token < count) & (number <= rows)
        mask = is_token[:, None] & (at < columns)
        value = tl.load(tokens + token[:, None] * columns + at, mask=mask, other=0.0)
        for slot in tl.static_range(K):
            copy = token * K + slot
            row = token
            if positions is not None:
                row = tl.load(positions + copy, mask=is_token, other=0)
            stored = mask
            if is_valid is not None:
                stored = mask & (tl.load(is_valid + copy, mask=is_token, other=0) != 0)[:, None]
            scaled = value
            if weights is not None:
                scaled = value.to(dtype) * tl.load(weights + copy, mask=is_token, other=0.0).to(dtype)[:, None]
            tl.store(out + row[:, None] * columns + at, scaled.to(out.dtype.element_ty), mask=stored)
    else:
        row = (block - blocks).to(tl.int64) * _ROWS + tl.arange(0, _ROWS)
        is_padding = (row < rows) & ((row >= number) | (number > rows))
        fill = tl.where(number > rows, float("nan"), 0.0)
        padding = tl.full([_ROWS, BLOCK], 0.0, tl.float32) + fill
        tl.store(
            out + row[:, None] * columns + at,
            padding.to(out.dtype.element_ty),
            mask=is_padding[:, None] & (at < columns),
        )


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


def _run_spread(
    tokens: Tensor,
    positions: Tensor | None,
    weights: Tensor | None,
    is_valid: Tensor | None,
    rows: int,
    needed: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    (t, h), k = tokens.shape, 1 if positions is None else positions.shape[1]
    has_gaps = needed is None and is_valid is None and rows > t * k
    if out is None:
        out = tokens.new_empty(rows, h)
    if has_gaps:
        out.zero_()
    if out.numel():
        block, warps = choose_block(h)
        blocks = triton.cdiv(t, _ROWS.value) + (0 if needed is None else triton.cdiv(rows, _ROWS.value))
        arguments = (
            _contiguous(tokens), _contiguous(positions), _contiguous(weights), _as_bytes(is_valid), needed, out, t,
            rows, h,
        )  # fmt: skip
        _launch(spread_rows, blocks * triton.cdiv(h, block), *arguments, K=k, BLOCK=block, num_warps=warps)
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


def _fake_sum(rows: Tensor, positions: Tensor) -> Tensor:
    return rows.new_empty(positions.shape[0], rows.shape[1])


def _fake_spread(tokens: Tensor, rows: int) -> Tensor:
    return tokens.new_empty(rows, tokens.shape[1])


def _fake_multiply(rows: Tensor, positions: Tensor) -> Tensor:
    return rows.new_empty(positions.shape, dtype=sum_dtype(rows.dtype))


def _fake_both(rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), _fake_multiply(rows, positions)


sum_on_gpu = define_operator("moe_sum_copies", _run_sum, fake=_fake_sum)
spread_on_gpu = define_operator("moe_spread_tokens", _run_spread, fake=_fake_spread)
multiply_on_gpu = define_operator("moe_multiply_copies", _run_multiply, fake=_fake_multiply)
weigh_and_multiply_on_gpu = define_operator("moe_weigh_and_multiply", _run_both, fake=_fake_both)
