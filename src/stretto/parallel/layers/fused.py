# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding and SwiGLU: one kernel each on GPUs, and few saved tensors everywhere.

The same by PyTorch's operators takes some forty kernels a block, most of them on strided halves of heads, and saves
activations that a backward pass can do without. Where PyTorch itself has to differentiate or trace the operators
(`torch.compile`, `make_fx`, `torch.func`, forward-mode derivatives, tensor subclasses), they are used instead. Dispatch
modes other than Stretto's own see operators in place of a kernel, but the same tensors are saved: a block's forward
pass may run under a mode, and its recomputation without it, or the other way round.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, is_in_torch_dispatch_mode

from stretto.parallel.comm.autograd import SelectiveMode

Angles = tuple[Tensor, Tensor]
"""Cosines and sines, fp32 [seq_len, head_dim / 2], or [batch, seq_len, head_dim / 2] of rows apart."""

_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def rotary_angles(positions: Tensor, head_dim: int) -> Angles:
    """Compute cosines and sines [..., seq_len, head_dim / 2] of rotary position embedding, fp32 (base 10,000).

    positions: of a sequence's tokens, int64 [seq_len]; or of each row's, [batch, seq_len].
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions.float().unsqueeze(-1) * 10_000.0**-exponents
    return angles.cos(), angles.sin()


def rotate_heads(qkv: Tensor, angles: Angles, queries_per_group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split the outputs of attention's linear, and rotate queries and keys by their positions' angles.

    qkv [batch, seq, groups, queries_per_group + 2, head_dim]: each KV head's queries, its key and its value. Returns
    queries [batch, seq, groups * queries_per_group, head_dim], keys and values [batch, seq, groups, head_dim]. Feature
    i of a head is rotated with feature i + head_dim / 2 (Su et al., RoFormer, section 3.4, in the order of GPT-NeoX).

    On a GPU this is one kernel forward and one backward. It computes in fp32 for 16-bit dtypes and rounds once, so that
    its bits differ from those of PyTorch's operators, which round angles and products as well.

    Raises ValueError if the shapes do not fit.
    """
    if qkv.dim() != 5 or qkv.shape[3] != queries_per_group + 2 or qkv.shape[4] % 2:
        raise ValueError(
            f"qkv must be [batch, seq, groups, {queries_per_group} + 2, head_dim], head_dim even, not {list(qkv.shape)}"
        )
    if angles[0].dim() == 3 and angles[0].shape[:2] == angles[1].shape[:2] == qkv.shape[:2]:  # as of one row
        rows = rotate_heads(
            qkv.flatten(0, 1)[None], (angles[0].flatten(0, 1), angles[1].flatten(0, 1)), queries_per_group
        )
        query, key, value = (each[0].unflatten(0, qkv.shape[:2]) for each in rows)
        return query, key, value
    if not angles[0].shape == angles[1].shape == (qkv.shape[1], qkv.shape[4] // 2):
        raise ValueError(
            f"angles of {qkv.shape[1]} positions and heads of {qkv.shape[4]} features are two tensors "
            f"{[qkv.shape[1], qkv.shape[4] // 2]}, not {list(angles[0].shape)} and {list(angles[1].shape)}"
        )
    if _needs_operators(qkv, *angles) or any(angle.requires_grad for angle in angles) or not qkv.numel():
        query, key, value = qkv.split((queries_per_group, 1, 1), dim=-2)
        query, key = _rotate(query, angles), _rotate(key, angles)
        return _flatten(query), _flatten(key), _flatten(value)
    return _RotateHeads.apply(qkv, *angles, queries_per_group)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of two tensors of one shape and dtype (Shazeer, GLU Variants Improve Transformer).

    Only gate and up are saved for the backward pass. On a GPU it is one kernel forward and one backward, which compute
    in fp32 for 16-bit dtypes and round once.
    """
    if _needs_operators(gate, up) or gate.shape != up.shape or gate.dtype != up.dtype:
        return F.silu(gate) * up
    return _SwiGLU.apply(gate, up)


def _needs_operators(*tensors: Tensor) -> bool:
    """Check whether PyTorch must differentiate or trace operators, as `stretto.ops.operator`, which imports Triton."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or (is_in_torch_dispatch_mode() and any(mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack()))
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or any(type(tensor) is not Tensor or _is_batched(tensor) for tensor in tensors)
    )


# Of `torch.autograd.grad(is_grads_batched=True)`.
_is_batched = torch._C._functorch.is_legacy_batchedtensor


def _suits_kernel(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dim() > 0 and tensor.dtype in _KERNEL_DTYPES and not _is_watched()


def _is_watched() -> bool:
    """Check whether a dispatch mode that is not Stretto's own has to see operators."""
    return is_in_torch_dispatch_mode() and not all(
        isinstance(mode, SelectiveMode) for mode in _get_current_dispatch_mode_stack()
    )


def _rotate(x: Tensor, angles: Angles) -> Tensor:
    """Rotate the two halves of each head of `x` [batch, seq, groups, heads, head_dim] by the position's angles."""
    cos, sin = (angle.to(x.dtype)[:, None, None] for angle in angles)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def _flatten(heads: Tensor) -> Tensor:
    """Merge groups and their heads: [batch, seq, groups, heads, head_dim] -> [batch, seq, groups * heads, head_dim].

    Not by `Tensor.flatten`, which `torch.autograd.grad(is_grads_batched=True)` does not support.
    """
    return heads.reshape(_flat_shape(heads))


def _flat_shape(heads: Tensor) -> tuple[int, int, int, int]:
    batch, seq, groups, heads_of_group, dim = heads.shape
    return batch, seq, groups * heads_of_group, dim


def _join(query: Tensor, key: Tensor, value: Tensor, angles: Angles) -> Tensor:
    """Rotate queries and keys by the negative angles, and join them with the values, by PyTorch's operators."""
    batch, seq, groups, dim = key.shape
    query, key, value = (part.reshape(batch, seq, groups, -1, dim) for part in (query, key, value))
    back = angles[0], -angles[1]
    return torch.cat((_rotate(query, back), _rotate(key, back), value), dim=-2)


class _RotateHeads(torch.autograd.Function):
    """`rotate_heads`; its gradient is `_JoinHeads`, and the other way round, to any order."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, queries: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        if _suits_kernel(qkv):
            from stretto.ops.rotary import rotate_and_split

            return rotate_and_split(qkv, cos, sin, queries)
        query, key, value = qkv.split((queries, 1, 1), dim=-2)
        query, key = _rotate(query, (cos, sin)), _rotate(key, (cos, sin))
        # The values are copied so that they do not keep the linear's whole output alive.
        value = value.clone(memory_format=torch.contiguous_format)
        # No views, which could not be modified in place.
        return tuple(torch.ops.aten._unsafe_view(part, _flat_shape(part)) for part in (query, key, value))

    @staticmethod
    def backward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        if _needs_operators(query, key, value, cos, sin):
            return _join(query, key, value, (cos, sin)), None, None, None
        return _JoinHeads.apply(query, key, value, cos, sin), None, None, None


class _JoinHeads(torch.autograd.Function):
    """Rotate queries and keys back, and join them with the values: the gradient of `rotate_heads`."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        groups = key.shape[2]
        ctx.queries = query.shape[2] // groups
        if _suits_kernel(query):
            from stretto.ops.rotary import rotate_back_and_join

            return rotate_back_and_join(query, key, value, cos, sin)
        return _join(query, key, value, (cos, sin))

    @staticmethod
    def backward(ctx: Any, qkv: Tensor) -> tuple[Tensor | None, ...]:
        return *rotate_heads(qkv, ctx.saved_tensors, ctx.queries), None, None


class _SwiGLU(torch.autograd.Function):
    """`swiglu`, which computes silu(gate) again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        if _suits_kernel(gate):
            from stretto.ops.moe.activation import multiply_by_silu

            return multiply_by_silu(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        if torch.is_grad_enabled() or _needs_operators(gate, up, grad):  # for gradients of gradients
            share = gate.sigmoid()
            return grad * up * (share * (1 + gate * (1 - share))), grad * (gate * share)
        if _suits_kernel(gate):
            from stretto.ops.moe.activation import differentiate_swiglu

            return differentiate_swiglu(gate, up, grad)
        return torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)
