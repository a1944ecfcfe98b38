# SPDX-License-Identifier: Apache-2.0
"""Checks before anything is allocated or launched: a call's arguments, and that all ranks make the same call."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.memory import failures, find_own_rank, group_timeout, is_debugging, store_all_gather
from stretto.ops.gemm.config import FP8
from stretto.ops.gemm.tile import Scales
from stretto.ops.workspace import find_group, find_known

_FP8_GRAIN = 16  # elements: rows of fp8 are multiples of 16 bytes, as TMA and torch's own products require
_MAX_KNOWN = 4096
_BY_TMA = ", by TMA"

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def find_name(group: dist.ProcessGroup | None) -> str:
    """The group's name (None: all ranks), as operators' schemas take it. ValueError for a rank outside of it."""
    if not (group is None or isinstance(group, dist.ProcessGroup) or group == dist.GroupMember.NON_GROUP_MEMBER):
        raise ValueError(
            f"group is a torch.distributed.ProcessGroup, or None for all ranks, not {group!r}: of a mesh's axis, give "
            "mesh.get_group(axis)"
        )
    if not isinstance(group, dist.ProcessGroup):  # of a group, only its ranks have an object
        find_own_rank(group)
        group = dist.group.WORLD
        assert group is not None
    return group.group_name


def require_operands(
    operator: str, x: Tensor, weight: Tensor, bias: Tensor | None, implementation: str = "auto"
) -> None:
    """ValueError unless x [., k], weight [n, k] and bias [n] have one dtype and device, and a supported layout.

    weight may also be the transpose of a contiguous tensor. fp64 is for implementation="library" alone.
    """
    _require_matrices(operator, x, weight)
    if x.dtype == FP8:
        raise ValueError(
            f"{operator} does not support fp8; use the operators with scales: all_gather_scaled_matmul, "
            "scaled_matmul_reduce_scatter and scaled_matmul_all_reduce"
        )
    if x.dtype not in DTYPES and not (x.dtype == torch.float64 and implementation == "library"):
        names = ", ".join(str(dtype) for dtype in DTYPES)
        rest = ', or give implementation="library"' if x.dtype == torch.float64 else ""
        raise ValueError(f"{operator} takes {names}, not {x.dtype}: convert x, weight and bias{rest}")
    require_weight(operator, x, weight, bias)
    _require_place(operator, x)


def require_scaled(operator: str, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
    """ValueError unless x [., k] and weight [n, k] are fp8 and contiguous, and bias [n] is of `dtype`, the output's."""
    _require_matrices(operator, x, weight)
    for name, one in (("x", x), ("weight", weight)):
        if one.dtype != FP8:
            raise ValueError(f"{operator}: {name} is of {FP8}, not {one.dtype}: see quantize_rows")
    if dtype not in DTYPES:
        raise ValueError(f"{operator} returns {', '.join(map(str, DTYPES))}, not {dtype}")
    if x.shape[1] % _FP8_GRAIN:
        raise ValueError(f"{operator}: k of fp8 operands is a multiple of {_FP8_GRAIN}, not {x.shape[1]}: pad both")
    if not weight.is_contiguous():
        raise ValueError(
            f"{operator} takes a contiguous fp8 weight [n, k], not strides {weight.stride()}: tensor cores require "
            "fp8 operands to be contiguous along k"
        )
    if weight.device != x.device:
        raise ValueError(f"{operator}: x is on {x.device} and weight on {weight.device}: move one of them")
    if bias is not None:
        if bias.shape != weight.shape[:1] or bias.dtype != dtype or bias.device != x.device:
            raise ValueError(
                f"{operator}: a bias is [{weight.shape[0]}] of {dtype} on {x.device}, not {_show(bias)} of "
                f"{bias.dtype} on {bias.device}"
            )
        if not bias.is_contiguous():
            raise ValueError(
                f"{operator} takes a contiguous bias, not strides {bias.stride()}: call contiguous() on it"
            )
    _require_place(operator, x)


def find_scales(operator: str, x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Scales:
    """The factors of x's rows [m] and of weight's rows [n]. ValueError unless there is one for each, or one for all."""
    return Scales(
        _find_factors(operator, "x_scale", x_scale, x), _find_factors(operator, "weight_scale", weight_scale, weight)
    )


def _find_factors(operator: str, name: str, scale: Tensor, matrix: Tensor) -> Tensor:
    rows = matrix.shape[0]
    if scale.numel() not in (1, rows) or sum(size != 1 for size in scale.shape) > 1:
        raise ValueError(
            f"{operator}: {name} is one number, or one for each of {rows} rows, not {_show(scale)}: there are no "
            "scales of smaller blocks"
        )
    if scale.dtype != torch.float32 or scale.device != matrix.device:
        raise ValueError(
            f"{operator}: {name} is of torch.float32 on {matrix.device}, not of {scale.dtype} on {scale.device}"
        )
    factors = scale.reshape(-1).expand(rows)
    # Kernels compute offsets into the factors in 32 bits.
    return factors if rows * factors.stride(0) < 1 << 31 else factors.contiguous()


def flatten_rows(operator: str, x: Tensor) -> Tensor:
    """A view of x [..., k] as rows [rows, k]. ValueError for fewer than two dims, and where x is not contiguous."""
    if x.dim() == 2:
        return x
    if x.dim() < 2:
        raise ValueError(f"{operator} takes x [..., k], of two dims or more, not {_show(x)}")
    _require_contiguous(operator, x)
    return x.flatten(0, -2)


def restore_dims(rows: Tensor, x: Tensor, first: int) -> Tensor:
    """A view of a product's rows [., n] as [first, ..., n], with x's dims between the first and the last."""
    return rows if x.dim() == 2 else rows.view(first, *x.shape[1:-1], rows.shape[-1])


def require_out(operator: str, out: object, shape: tuple[int, ...], dtype: torch.dtype, *others: Tensor | None) -> None:
    """ValueError unless a call can write its output to `out`.

    others: the call's operands and other outputs, whose first determines the device; none may share memory with it.
    """
    if not isinstance(out, Tensor):
        raise ValueError(f"{operator}: out is a tensor, not {out!r}")
    device = next(one.device for one in others if one is not None)
    if tuple(out.shape) != shape or out.dtype != dtype or out.device != device:
        raise ValueError(
            f"{operator}: out is {list(shape)} of {dtype} on {device}, not {_show(out)} of {out.dtype} on {out.device}"
        )
    if not out.is_contiguous():
        raise ValueError(f"{operator} writes to a contiguous out, not to strides {out.stride()}")
    if out.requires_grad or (torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in others)):
        raise ValueError(
            f"{operator} with out= has no gradients, as torch's functions have none: call it under torch.no_grad() "
            "with an out that requires none, or without out="
        )
    if not torch.compiler.is_compiling() and any(one is not None and _share_memory(out, one) for one in others):
        raise ValueError(f"{operator}: out shares memory with an operand or another out: give it memory of its own")


def _share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether the memory of two tensors overlaps, each of which has no gaps."""
    if type(one) is not Tensor or type(other) not in (Tensor, torch.nn.Parameter):
        return False  # subclasses, fake tensors among them, may have no address
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes


def _require_matrices(operator: str, x: Tensor, weight: Tensor) -> None:
    if x.dim() != 2 or weight.dim() != 2:
        raise ValueError(
            f"{operator} takes x [..., k] and weight [n, k], which has two dims, not {_show(x)} and {_show(weight)}"
        )
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"{operator}: x {_show(x)} and weight {_show(weight)} differ in k, their last dim")


def _require_contiguous(operator: str, x: Tensor) -> None:
    if not x.is_contiguous():
        raise ValueError(f"{operator} takes a contiguous x, not strides {x.stride()}: call contiguous() on it")


def _require_place(operator: str, x: Tensor) -> None:
    _require_contiguous(operator, x)
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{operator} takes tensors on devices of type cpu or cuda, not {x.device}")
    if x.device.type == "cuda" and x.device.index != torch.cuda.current_device():
        raise ValueError(
            f"{operator}: x is on {x.device}, and this rank's current GPU is {torch.cuda.current_device()}: call "
            "torch.cuda.set_device first"
        )


def require_weight(operator: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """ValueError unless weight [n, k] and bias [n] have x's dtype and device, and a supported layout."""
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{operator}: a bias for weight {_show(weight)} is [{weight.shape[0]}], not {_show(bias)}")
    for name, other in (("weight", weight), ("bias", bias)):
        if other is None:
            continue
        if other.dtype != x.dtype:
            raise ValueError(f"{operator}: x is {x.dtype} and {name} {other.dtype}: convert one of them")
        if other.device != x.device:
            raise ValueError(f"{operator}: x is on {x.device} and {name} on {other.device}: move one of them")
    if bias is not None and not bias.is_contiguous():
        raise ValueError(f"{operator} takes a contiguous bias, not strides {bias.stride()}: call contiguous() on it")
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        raise ValueError(
            f"{operator} takes a contiguous weight, or the transpose of one, not strides {weight.stride()}: call "
            "contiguous() on it"
        )


def _show(tensor: Tensor) -> str:
    return str(list(tensor.shape))


@dataclass
class _ComparedCalls:
    """A group's comparisons: their number, and the calls that agreed, with whether TMA takes all ranks' operands."""

    count: int = 0
    known: dict[str, bool] = field(default_factory=dict)


def require_agreement(call: str, by_tma: bool, group: str, device: torch.device) -> bool:
    """Compare a description of this rank's call with the other ranks', through the group's store.

    Ranks compare a call that is new to the group; with STRETTO_DEBUG=1, every call. Kernels that wait for each other
    could not find out that their ranks disagree. by_tma: whether TMA takes this rank's operands, whose addresses may
    differ from other ranks'; returns whether it took all ranks', at the first call of this kind. ValueError where
    another rank makes a different call, PeerError if one makes none within the group's time limit.
    """
    compared = find_known(group, device, "calls", _ComparedCalls)
    if call in compared.known and not is_debugging():
        return compared.known[call]
    failures.check()  # before this rank waits for ranks that may never come
    members = find_group(group)
    sent = call + _BY_TMA if by_tma else call
    prefix = f"stretto ops {device.type}"
    received = store_all_gather(sent, members, prefix, compared.count + 1, group_timeout(members))
    compared.count += 1
    rank = dist.get_rank(members)
    for peer, other in enumerate(received):
        if other.removesuffix(_BY_TMA) != call:
            raise ValueError(
                f"ranks of a group make the same calls, with the same shapes and in the same order: rank {rank} calls "
                f"{sent}; rank {peer} calls {other}"
            )
    if len(compared.known) >= _MAX_KNOWN:
        compared.known.clear()
    compared.known[call] = all(other.endswith(_BY_TMA) for other in received)
    return compared.known[call]
