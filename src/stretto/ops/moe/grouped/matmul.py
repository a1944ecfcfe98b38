# SPDX-License-Identifier: Apache-2.0
"""Grouped products: each expert's rows times its own weight, in one call.

On Hopper, `kernels` multiply bf16 and fp16 where they are estimated to be faster than torch's grouped GEMM (`config`),
which multiplies bf16 on GPUs, and reads the offsets there, or quack's (Dao-AILab), of fp16 too and with rows gathered
inside, where it is installed. Other dtypes and places take a loop over the experts, for which the host reads the
offsets: torch's GEMM does the same for them, and supports fewer shapes. It leaves what was in memory in rows of
padding, and, on some GPUs, in the gradient of an expert without rows. Kernels write zeros there. Only the device knows
where that is; programs without anything to clear end immediately.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.ops.moe.grouped import kernels
from stretto.ops.moe.grouped.config import choose_config, require_implementation
from stretto.ops.moe.grouped.tile_order import Arrivals
from stretto.ops.moe.permutation import DTYPES, sum_copies
from stretto.ops.operands import needs_gradients, takes_tensors
from stretto.ops.operator import Autograd, define_operator, is_traced, without_autocast
from stretto.quantities import require_whole
from stretto.tiles.launches import launch_cached

_grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
_ALIGNMENT = 16  # bytes, of addresses and of strides
_CAPABILITIES = (9, 10)  # major ones of the GPUs for which torch 2.11 has a grouped GEMM that reads the offsets there
_ROWS = 16
_PARTS = 32
_BLOCK = 1024


@takes_tensors
def grouped_matmul(
    rows: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    tokens: Tensor | None = None,
    positions: Tensor | None = None,
    implementation: str = "auto",
    room: int = 0,
) -> Tensor:
    """Each expert's rows times its weight's transpose: rows [n, a], weight [e, b, a], offsets [e + 1] -> [n, b].

    rows and weight are of one dtype: bf16, fp16, fp32 or fp64; sums are fp32 for 16-bit dtypes. offsets is int32 and
    begins with 0: expert i has rows offsets[i] to offsets[i + 1], which may be none. Rows from offsets[-1] on are
    padding; their result is zeros, and so is their gradient. The gradient of the weight of an expert without rows is
    zeros.

    tokens: int32 [n]; rows is [t, a] then, and row i is rows[tokens[i]]: kernels gather while they load. positions:
    int64 [t, k], the rows of each token (`Permuted`), which the gradient of rows needs: it adds them in this order.

    implementation: "kernel" is Triton, for bf16 and fp16 with a and b multiples of 8 on GPUs of compute capability 9.0;
    "library" is quack's grouped GEMM where it is installed, for bf16 and fp16, or torch's, for bf16, on GPUs of compute
    capability 9 or 10 with a and b multiples of 8, and otherwise a loop, for which the host reads the offsets. "auto"
    takes the kernel where it is estimated to be faster, and for fp16. room: multiprocessors that it leaves free, for
    kernels beside it. ValueError for other shapes and dtypes, and for "kernel" where it cannot run.
    """
    require_operands("grouped_matmul", rows, weight, offsets)
    require_implementation(implementation)
    require_whole("grouped_matmul: room", room, 0)
    require_places("grouped_matmul", offsets, tokens, rows)
    if tokens is not None and needs_gradients(rows):
        _require_positions(positions, tokens, len(rows))
    return _multiply(rows, weight, offsets, tokens, positions, implementation, room)


@takes_tensors
def grouped_weight_gradient(
    grad: Tensor,
    rows: Tensor,
    offsets: Tensor,
    *,
    tokens: Tensor | None = None,
    implementation: str = "auto",
    room: int = 0,
    dtype: torch.dtype | None = None,
    factor: float = 1.0,
) -> Tensor:
    """The weight's gradient of `grouped_matmul`: grad [n, b], rows [n, a], offsets [e + 1] -> [e, b, a].

    For layers that have a backward pass of their own. Expert i's is its rows' grad.T @ rows, and zeros without rows;
    padding is left out. Dtypes, tokens (of rows, which are [t, a] then), implementations and room are those of
    `grouped_matmul`. dtype: of the result, the operands' by default, or torch.float32, to which sums of 16-bit operands
    are not rounded by kernels. factor: by which sums are multiplied. It has no gradient. ValueError for other shapes
    and dtypes.
    """
    if grad.dim() != 2 or rows.dim() != 2 or grad.shape[0] != (rows if tokens is None else tokens).shape[0]:
        raise ValueError(
            "grouped_weight_gradient takes grad [n, b], and rows [n, a] or rows [t, a] with tokens [n], not "
            f"{list(grad.shape)} and {list(rows.shape)}{'' if tokens is None else f' with {list(tokens.shape)}'}"
        )
    _require_alike("grouped_weight_gradient", ("grad", grad), ("rows", rows), offsets)
    if offsets.dim() != 1 or not len(offsets):
        raise ValueError(f"grouped_weight_gradient: offsets must be [experts + 1], not {list(offsets.shape)}")
    require_implementation(implementation)
    require_whole("grouped_weight_gradient: room", room, 0)
    require_places("grouped_weight_gradient", offsets, tokens, rows)
    if needs_gradients(grad, rows):
        raise ValueError("grouped_weight_gradient has no gradients: call it under torch.no_grad()")
    if dtype not in (None, rows.dtype) and (rows.itemsize > 2 or dtype is not torch.float32):
        raise ValueError(f"grouped_weight_gradient: dtype is {rows.dtype} or torch.float32, not {dtype}")
    return _weight_gradient(grad, rows, offsets, None, tokens, implementation, room, dtype, factor)


def _run(
    rows: Tensor,
    weight: Tensor,
    offsets: Tensor,
    tokens: Tensor | None,
    positions: Tensor | None,
    implementation: str,
    room: int,
) -> Tensor:
    return compute_product(rows, weight, offsets, tokens, implementation, room=room)


def compute_product(
    rows: Tensor,
    weight: Tensor,
    offsets: Tensor,
    tokens: Tensor | None,
    implementation: str,
    arrivals: Arrivals | None = None,
    room: int = 0,
) -> Tensor:
    """Compute `grouped_matmul`, without checks and autograd. arrivals: of `rows` that are on their way."""
    n = rows.shape[0] if tokens is None else tokens.shape[0]
    if n == 0 or rows.numel() == 0 or weight.numel() == 0:
        return rows.new_zeros(n, weight.shape[1])
    if implementation != "library":
        rows = rows.contiguous()
        if not (weight[0].is_contiguous() or weight[0].t().is_contiguous()):
            weight = weight.contiguous()
        config = choose_config(implementation, "product", n, weight.shape[0], (rows, weight), room=room)
        if config is not None:
            with torch.cuda.device_of(rows):
                return kernels.multiply(config, rows, weight, offsets, tokens, arrivals)
    if arrivals is not None:
        arrivals.wait()
    if (gemm := _find_quack(rows, weight)) is not None:
        out = gemm(rows, weight.transpose(1, 2), cu_seqlens_m=offsets, A_idx=tokens, tuned=False)
        clear_padding(out, offsets)
        return out
    rows = take_rows(rows, tokens)
    if _takes_grouped_gemm(rows, weight):
        with _leave_room(room):
            out = _grouped_mm(rows, weight.transpose(1, 2), offs=offsets[1:])
        clear_padding(out, offsets)
        return out
    out = rows.new_zeros(rows.shape[0], weight.shape[1])
    if _is_captured(rows):
        for expert, its_own in enumerate(_select_rows(rows, offsets)):
            out = torch.where(its_own, rows @ weight[expert].t(), out)
        return out
    for expert, (begin, end) in enumerate(pairwise(offsets.tolist())):
        if end > begin:
            torch.mm(rows[begin:end], weight[expert].t(), out=out[begin:end])
    return out


def multiply_arriving(
    rows: Tensor, weight: Tensor, offsets: Tensor, tokens: Tensor, arrivals: Arrivals | None
) -> Tensor:
    """`grouped_matmul` of rows that may be on their way, of which each expert's are multiplied as they arrive.

    It has no gradient. Where torch must see the product, whose schema has no arrivals, it begins when all are there.
    """
    if arrivals is not None and not is_traced(rows, weight):
        return without_autocast(compute_product)(rows, weight, offsets, tokens, "auto", arrivals)
    if arrivals is not None:
        arrivals.wait()
    return grouped_matmul(rows, weight, offsets, tokens=tokens)


def compute_weight_gradient(
    grad: Tensor,
    rows: Tensor,
    offsets: Tensor,
    grad_tokens: Tensor | None,
    row_tokens: Tensor | None,
    implementation: str,
    room: int = 0,
    dtype: torch.dtype | None = None,
    factor: float = 1.0,
) -> Tensor:
    """Compute `grouped_weight_gradient`, without checks; grad_tokens: of grad, as row_tokens of rows.

    A pass of its own gathers rows: loads by index in the kernel were slower, by up to 10% on H200.
    """
    experts = offsets.shape[0] - 1
    if grad.numel() == 0 or rows.numel() == 0:
        return rows.new_zeros(experts, grad.shape[1], rows.shape[1], dtype=dtype)
    grad, rows = take_rows(grad, grad_tokens), take_rows(rows, row_tokens)
    if implementation != "library":
        grad, rows = grad.contiguous(), rows.contiguous()
        config = choose_config(implementation, "weight gradient", len(grad), experts, (grad, rows), room=room)
        if config is not None:
            with torch.cuda.device_of(rows):
                return kernels.multiply_transposed(config, grad, rows, offsets, dtype, factor)
    if (gemm := _find_quack(grad, rows)) is not None:
        out = gemm(grad.t(), rows, cu_seqlens_k=offsets, tuned=False)
        clear_empty(out, offsets)
    elif _takes_grouped_gemm(grad, rows):
        with _leave_room(room):
            out = _grouped_mm(grad.t(), rows, offs=offsets[1:])
        clear_empty(out, offsets)
    else:
        grad, rows = (one if dtype is None else one.to(dtype) for one in (grad, rows))
        out = rows.new_zeros(experts, grad.shape[1], rows.shape[1])
        if _is_captured(rows):
            for expert, its_own in enumerate(_select_rows(rows, offsets)):
                torch.mm(grad.where(its_own, 0).t(), rows.where(its_own, 0), out=out[expert])
        else:
            for expert, (begin, end) in enumerate(pairwise(offsets.tolist())):
                if end > begin:
                    torch.mm(grad[begin:end].t(), rows[begin:end], out=out[expert])
    out = out if dtype is None else out.to(dtype)
    return out if factor == 1 else out.mul_(factor)


@contextmanager
def _leave_room(room: int) -> Iterator[None]:
    """Have torch's grouped GEMM leave so many multiprocessors free, where torch can be told.

    Its programs divide the tiles before they run: one that would have to wait for another kernel's end delays all.
    """
    if not room or not hasattr(torch._C, "_set_sm_carveout_experimental"):
        yield
        return
    before = torch._C._get_sm_carveout_experimental()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Setting the SM carveout")
        torch._C._set_sm_carveout_experimental(room)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(before)


def _is_captured(rows: Tensor) -> bool:
    """True while a CUDA graph is recorded: the host cannot read the offsets, so each expert multiplies all rows."""
    return rows.is_cuda and torch.cuda.is_current_stream_capturing()


def _select_rows(rows: Tensor, offsets: Tensor) -> Iterator[Tensor]:
    """Yield for each expert which of rows [n, a] are its own: bool [n, 1]."""
    places = torch.arange(len(rows), device=rows.device)[:, None]
    return ((places >= begin) & (places < end) for begin, end in pairwise(offsets))


def take_rows(rows: Tensor, tokens: Tensor | None) -> Tensor:
    return rows if tokens is None else rows.index_select(0, tokens)


def _find_quack(*operands: Tensor) -> Callable[..., Tensor] | None:
    """quack's GEMM, None where it is not installed or does not take these operands."""
    takes = _takes_grouped_gemm(*operands, dtypes=(torch.bfloat16, torch.float16))
    return _import_quack() if takes else None


@cache
def _import_quack() -> Callable[..., Tensor] | None:
    if find_spec("quack") is None:
        return None
    try:
        gemm: Callable[..., Tensor] | None = getattr(import_module("quack.gemm_interface"), "gemm", None)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:  # of CUTLASS's Python too
        warnings.warn(f"grouped products take torch's GEMM, since quack cannot be imported: {error}", stacklevel=2)
        return None
    return gemm


def _takes_grouped_gemm(*operands: Tensor, dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)) -> bool:
    """True if a library's grouped GEMM takes these operands without the host, and writes a contiguous output."""
    first = operands[0]
    if not first.is_cuda or first.dtype not in dtypes or torch.version.cuda is None:
        return False
    major, _ = torch.cuda.get_device_capability(first.device)
    return major in _CAPABILITIES and all(map(_is_aligned, operands))


def _is_aligned(operand: Tensor) -> bool:
    """True if rows [n, a], or a weight [e, b, a] or its transpose, have a layout that torch's grouped GEMM supports."""
    grain = _ALIGNMENT // operand.element_size()
    (*_, m, k), (*outer, row, column) = operand.shape, operand.stride()
    if k % grain or (outer and m % grain):
        return False
    is_by_rows = column == 1 and row >= k and row % grain == 0
    is_by_columns = bool(outer) and row == 1 and column >= m and column % grain == 0
    return (is_by_rows or is_by_columns) and not any(one % grain for one in (*outer, operand.storage_offset()))


def _fake(rows: Tensor, weight: Tensor, tokens: Tensor | None) -> Tensor:
    return rows.new_empty(rows.shape[0] if tokens is None else tokens.shape[0], weight.shape[1])


def _fake_weight_gradient(grad: Tensor, rows: Tensor, offsets: Tensor, dtype: torch.dtype | None) -> Tensor:
    return rows.new_empty(offsets.shape[0] - 1, grad.shape[1], rows.shape[1], dtype=dtype)


def _count_flops(rows: torch.Size, weight: torch.Size, tokens: torch.Size | None) -> int:
    return 2 * (rows if tokens is None else tokens)[0] * weight[1] * weight[2]


def _count_gradient_flops(grad: torch.Size, rows: torch.Size) -> int:
    return 2 * prod(grad) * rows[1]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    rows, weight, offsets, tokens, positions, ctx.implementation, _ = inputs
    needs_rows, needs_weight, *_ = ctx.needs_input_grad
    of_rows = weight, positions
    ctx.save_for_backward(rows if needs_weight else None, *(of_rows if needs_rows else (None, None)), offsets, tokens)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """C = R @ W.T: dR is dC @ W, and dW is dC.T @ R, for each expert."""
    rows, weight, positions, offsets, tokens = ctx.saved_tensors
    grad = grad.contiguous()
    grad_rows = grad_weight = None
    if weight is not None:
        grad_rows = _multiply(grad, weight.transpose(1, 2), offsets, None, None, ctx.implementation, 0)
        grad_rows = grad_rows if tokens is None else sum_copies(grad_rows, positions)
    if rows is not None:
        grad_weight = _weight_gradient(grad, rows, offsets, None, tokens, ctx.implementation)
    return grad_rows, grad_weight, None, None, None, None, None


_multiply = define_operator(
    "grouped_matmul", _run, fake=_fake, count_flops=_count_flops, autograd=Autograd(_save, _differentiate)
)
_weight_gradient = define_operator(
    "grouped_matmul_weight_gradient",
    compute_weight_gradient,
    fake=_fake_weight_gradient,
    count_flops=_count_gradient_flops,
)


def require_places(operator: str, offsets: Tensor, tokens: Tensor | None, rows: Tensor) -> None:
    """ValueError for tokens that are not int32 [n], on the rows' device; on CPUs, for offsets and tokens outside."""
    if tokens is not None and (tokens.dtype != torch.int32 or tokens.dim() != 1 or tokens.device != rows.device):
        raise ValueError(
            f"{operator}: tokens must be torch.int32 [n] on {rows.device}, not {tokens.dtype} {list(tokens.shape)} on "
            f"{tokens.device}"
        )
    if offsets.device.type != "cpu" or is_traced(offsets, tokens, rows):
        return
    begins, n = offsets.tolist(), len(rows if tokens is None else tokens)
    if begins[0] != 0 or begins[-1] > n or any(one > other for one, other in pairwise(begins)):
        raise ValueError(f"{operator}: offsets begin at 0, in ascending order, and end by the {n} rows, not {begins}")
    used = tokens if tokens is None or len(rows) else tokens[: begins[-1]]  # of no rows all may be padding
    if used is not None and len(used) and not 0 <= int(used.min()) <= int(used.max()) < len(rows):
        raise ValueError(
            f"{operator}: tokens number the {len(rows)} rows from 0 on, not {int(used.min())} to {int(used.max())}"
        )


def _require_positions(positions: Tensor | None, tokens: Tensor, count: int) -> None:
    """ValueError unless positions can be the rows of so many tokens' copies; on CPUs, unless they are."""
    shown = None if positions is None else f"{positions.dtype} {list(positions.shape)}"
    if positions is None or positions.is_floating_point() or positions.dim() != 2 or len(positions) != count:
        raise ValueError(
            f"grouped_matmul: the gradient of rows by tokens needs positions, int64 [{count}, k], as `permute` gives "
            f"them, not {shown}"
        )
    if positions.device.type == "cpu" and positions.numel() and not is_traced(positions, tokens):
        own = torch.arange(count, device="cpu")[:, None]
        if not 0 <= int(positions.min()) <= int(positions.max()) < len(tokens) or (tokens[positions] != own).any():
            raise ValueError("grouped_matmul: positions[i] are rows of token i, those at which tokens is i")


def require_operands(operator: str, rows: Tensor, weight: Tensor, offsets: Tensor) -> None:
    """ValueError unless a grouped product has these operands."""
    if rows.dim() != 2 or weight.dim() != 3 or rows.shape[1] != weight.shape[2]:
        raise ValueError(
            f"{operator} takes rows [n, a] and weight [experts, b, a], not {list(rows.shape)} and {list(weight.shape)}"
        )
    _require_alike(operator, ("rows", rows), ("weight", weight), offsets)
    if offsets.shape != (weight.shape[0] + 1,):
        raise ValueError(f"{operator}: offsets must be [{weight.shape[0]} experts + 1], not {list(offsets.shape)}")


def _require_alike(operator: str, first: tuple[str, Tensor], second: tuple[str, Tensor], offsets: Tensor) -> None:
    """ValueError unless both operands are of one dtype, the offsets int32, and all on one device."""
    (name, one), (other_name, other) = first, second
    if one.dtype not in DTYPES or other.dtype != one.dtype:
        raise ValueError(
            f"{operator} takes {name} and {other_name} of one of {', '.join(map(str, DTYPES))}, not {one.dtype} and "
            f"{other.dtype}: convert one of them"
        )
    if offsets.dtype != torch.int32:
        raise ValueError(f"{operator}: offsets must be torch.int32, not {offsets.dtype}: convert it")
    if not one.device == other.device == offsets.device:
        raise ValueError(
            f"{operator}: {name} is on {one.device}, {other_name} on {other.device} and offsets on {offsets.device}: "
            "move them to one"
        )


def clear_padding(out: Tensor, offsets: Tensor) -> None:
    """Write zeros to the rows of out [n, .] from offsets[-1] on; both contiguous, on a GPU."""
    programs = triton.cdiv(out.shape[0], _ROWS)
    launch_cached(clear_padding_rows, programs, out, offsets, len(offsets) - 1, *out.shape, ROWS=_ROWS, BLOCK=_BLOCK)


def clear_empty(out: Tensor, offsets: Tensor) -> None:
    """Write zeros to out[expert], of out [e, b, a], for each expert without rows; both contiguous, on a GPU."""
    programs, numbers = len(out) * _PARTS, out.shape[1] * out.shape[2]
    launch_cached(clear_empty_experts, programs, out, offsets, numbers, PARTS=_PARTS, BLOCK=_BLOCK)


@triton.jit
def clear_padding_rows(  # type: ignore[no-untyped-def]
    out, offsets, experts, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Each program has ROWS rows, and clears those from offsets[experts] on. No synchronization: rows are its own."""
    begin = tl.program_id(0) * ROWS
    first = tl.maximum(tl.load(offsets + experts), begin)
    for row in range(first, tl.minimum(begin + ROWS, rows)):
        for column in range(0, columns, BLOCK):
            at = column + tl.arange(0, BLOCK)
            tl.store(out + tl.cast(row, tl.int64) * columns + at, 0.0, mask=at < columns)


@triton.jit
def clear_empty_experts(out, offsets, numbers, PARTS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """PARTS programs an expert clear its numbers if it has no rows. No synchronization: blocks are a program's own."""
    expert = tl.program_id(0) // PARTS
    if tl.load(offsets + expert) == tl.load(offsets + expert + 1):
        for begin in range(tl.program_id(0) % PARTS * BLOCK, numbers, PARTS * BLOCK):
            at = begin + tl.arange(0, BLOCK)
            tl.store(out + tl.cast(expert, tl.int64) * numbers + at, 0.0, mask=at < numbers)
