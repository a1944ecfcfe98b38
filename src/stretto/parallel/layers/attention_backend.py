# SPDX-License-Identifier: Apache-2.0
"""Chooses by timing which of torch's kernels computes attention: cuDNN's, flash or memory-efficient."""

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from stretto.tuning import median_seconds, slowest_times, time_runs

BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
REPEATS = 5
# A kernel must take at most this part of the time of torch's choice to replace it: they round differently, and the
# noise of timing must not decide on a run's bits.
MARGIN = 0.9
_OTHER_LENGTH = 128  # positions by which timed calls are shorter than the model's, or longer than short ones


@dataclass(frozen=True)
class AttentionCall:
    """Queries, keys and values without a mask: all that a kernel's speed depends on."""

    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    is_causal: bool


class AttentionTuner:
    """Has all attention without a mask computed by one kernel; they are timed at the end of the first backward pass.

    All ranks take the same: the one whose slowest rank is the fastest on what it has seen. For a shape that this one
    does not take, torch goes on to the next.
    """

    def __init__(self, is_on: bool, device: torch.device, world: dist.ProcessGroup) -> None:
        self.device = device
        self.world = world
        self.order: list[SDPBackend] | None = None  # None: torch's own
        self._seen: dict[AttentionCall, None] | None = {} if is_on else None

    def select(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> AbstractContextManager[None]:
        """A context in which torch computes a call by the kernel that was chosen, or by its own choice before that."""
        if self._seen is not None:
            three = query, key, value
            call = AttentionCall(
                tuple(one.shape for one in three), tuple(one.stride() for one in three), query.dtype, is_causal
            )
            self._seen[call] = None
        return nullcontext() if self.order is None else sdpa_kernel(self.order, set_priority=True)

    def finish(self) -> None:
        """Time what the first step has called, and choose. Collective, once; later calls do nothing."""
        if self._seen is None:
            return
        seen, self._seen = self._seen, None
        choices = (None, *BACKENDS)
        own = [sum(_time(call, choice, self.device) for call in seen) for choice in choices]
        times = slowest_times(own, self.device, self.world)
        fastest = min(range(1, len(choices)), key=lambda number: times[number])
        if times[fastest] < MARGIN * times[0]:
            chosen = BACKENDS[fastest - 1]
            self.order = [chosen, *(one for one in (*BACKENDS, SDPBackend.MATH) if one is not chosen)]


def _time(call: AttentionCall, backend: SDPBackend | None, device: torch.device) -> float:
    """The median seconds of a forward and a backward pass; infinite where the kernel does not take the call.

    torch keeps cuDNN's graph of a backward pass by shapes and the strides of queries, keys and values, and would
    compute a model's own gradients by it, in silence, were they laid out otherwise than these. So these are laid out as
    models' are, [b, s, heads, d], and the lengths are somewhat other ones.
    """
    more = -_OTHER_LENGTH if min(shape[-2] for shape in call.shapes) > 2 * _OTHER_LENGTH else _OTHER_LENGTH
    query, key, value = (
        _make_operand((*shape[:-2], shape[-2] + more, shape[-1]), stride, call.dtype, device).requires_grad_()
        for shape, stride in zip(call.shapes, call.strides, strict=True)
    )

    def run() -> None:
        shares_keys = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(query, key, value, is_causal=call.is_causal, enable_gqa=shares_keys)
        gradient = out.new_empty([out.shape[dim] for dim in (0, 2, 1, 3)]).transpose(1, 2)
        torch.autograd.grad(out, (query, key, value), gradient)

    with torch.enable_grad(), warnings.catch_warnings(), nullcontext() if backend is None else sdpa_kernel(backend):
        warnings.simplefilter("ignore")  # torch says why a kernel does not take a call
        try:
            return median_seconds(time_runs(run, device, warmups=1, repeats=REPEATS))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return float("inf")


def _make_operand(shape: Sequence[int], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Draw numbers whose dimensions are in the order of the strides."""
    order = sorted(range(len(shape)), key=strides.__getitem__, reverse=True)
    dense = torch.randn([shape[dim] for dim in order], dtype=dtype, device=device)
    return dense.permute([order.index(dim) for dim in range(len(shape))])
