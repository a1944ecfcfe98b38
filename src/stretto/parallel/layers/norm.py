# SPDX-License-Identifier: Apache-2.0
"""LayerNorm and RMSNorm over features that y splits: ranks exchange (mean, M2) in fp32 (fp64 for fp64 input)."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.ops.rms_norm import rms_norm
from stretto.ops.row_sums.norm import invariant_norm
from stretto.parallel.comm.autograd import apply, once_differentiable, scale_gradient
from stretto.parallel.comm.collectives import NO_GROUP, all_reduce, gather_rows
from stretto.parallel.comm.gradient_reducer import GradientReducer
from stretto.parallel.comm.graph_functions import GraphCode
from stretto.parallel.comm.kept_outputs import keep_output
from stretto.parallel.layers.local_tensors import TakeGradient
from stretto.parallel.layers.sharded_module import ShardedModule, check_features, note_features, refuse_compiler
from stretto.parallel.layout import local
from stretto.parallel.precision import Precision


def statistics_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which statistics and losses of a tensor are computed."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _moments(x: Tensor, is_centred: bool, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Mean and mean square deviation of the last dim, which the group splits evenly; about 0 when not centred.

    Chan's rule for merging: M2 = sum of the parts' M2 + the spread of their means. It does not subtract large sums.
    """
    count, size = x.shape[-1], group.size()
    mean = x.mean(-1, keepdim=True) if is_centred else x.new_zeros(*x.shape[:-1], 1)
    m2 = (x - mean).square().sum(-1, keepdim=True)
    if is_centred:
        part = torch.stack((mean, m2))
        parts = gather_rows(part, 2 * size, group)
        means, m2s = parts[0::2], parts[1::2]
        mean = means.mean(0)
        m2 = m2s.sum(0) + count * (means - mean).square().sum(0)
    else:
        all_reduce(m2, group)
    return mean, m2 / (count * size)


class _SplitNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, is_centred: bool, group: Any
    ) -> Tensor:
        wide = x.to(statistics_dtype(x))
        mean, variance = keep_output("norm statistics", lambda: _moments(wide, is_centred, group))
        rstd = torch.rsqrt(variance + eps)
        y = (wide - mean) * rstd
        if weight is not None:
            y = y * weight
        if bias is not None:
            y = y + bias
        ctx.group, ctx.is_centred = group, is_centred
        ctx.save_for_backward(x, weight, mean, rstd)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        normalized = (x.to(mean.dtype) - mean) * rstd
        gradient = gradient.to(mean.dtype)
        leading = tuple(range(gradient.dim() - 1))
        grad_weight = (gradient * normalized).sum(leading) if ctx.needs_input_grad[1] else None
        grad_bias = gradient.sum(leading) if ctx.needs_input_grad[2] else None
        if weight is not None:
            gradient = gradient * weight
        # Both sums are over all features; this rank has only a part of them.
        sums = torch.stack((gradient.sum(-1, keepdim=True), (gradient * normalized).sum(-1, keepdim=True)))
        average, projection = all_reduce(sums, ctx.group) / (x.shape[-1] * ctx.group.size())
        grad_x = gradient - normalized * projection
        if ctx.is_centred:
            grad_x = grad_x - average
        return (grad_x * rstd).to(x.dtype), grad_weight, grad_bias, *[None] * 5


class _InvariantSplitNorm(_SplitNorm):
    """The same with the bits of `invariant_norm` on one rank: of all features, each once, which the ranks exchange.

    features: how many there are; several ranks may have the same (of copied KV heads).
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, is_centred: bool, group: Any,
        features: int, offset: float,
    ) -> Tensor:  # fmt: skip
        size, part = group.size(), x.shape[-1]
        copies = size * part // features
        rows = torch.cat([x.reshape(-1, part), *(each[None] for each in (weight, bias) if each is not None)])
        gathered = gather_rows(rows.t().contiguous(), size * part, group).view(size, part, -1)
        whole = gathered[::copies].flatten(0, 1).t().contiguous()
        hidden, (weights, *biases) = whole[: x[..., 0].numel()], whole[x[..., 0].numel() :]
        bias_of_all, kind = biases[0] if biases else None, "layer" if is_centred else "rms"
        y = invariant_norm(hidden, weights, eps=eps, norm=kind, bias=bias_of_all, offset=offset)
        mean, variance = _moments(hidden.to(statistics_dtype(x)), is_centred, NO_GROUP)
        mean, rstd = (each.view(*x.shape[:-1], 1) for each in (mean, torch.rsqrt(variance + eps)))
        ctx.group, ctx.is_centred = group, is_centred
        ctx.save_for_backward(x, weight + offset, mean, rstd)
        return y.view(*x.shape[:-1], -1, part)[..., group.rank() // copies, :].contiguous()


class ParallelNorm(ShardedModule):
    """LayerNorm (`is_centred`) or RMSNorm of activations [..., hidden / Y] over all `hidden` features.

    `weight` and `bias` [hidden] are split over y too. `axis` x: the features are those that a colwise linear makes,
    [..., features / X], and `group` is that of x. Without a group the features are all here. `weight_offset` is
    added to the weight (1 in Gemma's norms). Statistics are taken in fp32, or fp64 for fp64 input. is_fused: an RMSNorm
    whose features are all here is one kernel (`ops.rms_norm`), except where torch.compile traces it. The
    attribute is_invariant: a row's bits depend on no other row, nor on the number of ranks (`ops.invariant_norm`).
    """

    def __init__(
        self,
        weight: nn.Parameter | None,
        bias: nn.Parameter | None,
        *,
        eps: float | None,
        is_centred: bool,
        weight_offset: float,
        precision: Precision,
        group: dist.ProcessGroup | None,
        gradients: GradientReducer,
        name: str,
        axis: str = "y",
        is_fused: bool = False,
    ) -> None:
        super().__init__(gradients)
        self._scales = [1.0 if each is None else gradients.forward_scale(each) for each in (weight, bias)]
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)
        self.eps = eps
        self.is_centred = is_centred
        self.weight_offset = weight_offset
        self.precision = precision
        self.group = group
        self._is_split = group is not None and group.size() > 1
        self.name = name
        self.axis = axis
        self.is_fused = is_fused and not is_centred and weight is not None and bias is None
        self.is_invariant = False
        self.in_graphs: GraphCode = GraphCode(self._normalize)

    def forward(self, x: Tensor) -> Tensor:
        is_split = self._is_split
        if is_split:
            check_features(x, self.axis, self.name)
        if self.precision.compute is not None:
            x = self.precision.cast(x)
        elif torch.is_autocast_enabled(x.device.type) and isinstance(own := self.weight, Tensor):
            x = x.to(torch.promote_types(x.dtype, own.dtype))  # autocast rounds no norm's weights
        weight, bias = (self.local_tensors() if x.ndim > 1 else None) or self._parts()
        eps = self.eps if self.eps is not None else self._eps_of(x)
        if self.is_invariant:
            refuse_compiler()
            weight = x.new_ones(x.shape[-1]) if weight is None else weight.to(x.dtype)
            bias = None if bias is None else bias.to(x.dtype)
            kind = "layer" if self.is_centred else "rms"
            if not is_split:
                return invariant_norm(x, weight, eps=eps, norm=kind, bias=bias, offset=self.weight_offset)
            all_weights, group = self.weight, self.group
            assert group is not None
            features = len(all_weights) if isinstance(all_weights, Tensor) else x.shape[-1] * group.size()
            options = eps, self.is_centred, group, features, self.weight_offset
            return note_features(apply(_InvariantSplitNorm, x, weight, bias, *options), self.axis)
        if self.is_fused and weight is not None and not is_split and not torch.compiler.is_compiling():
            return rms_norm(x, weight, eps, self.weight_offset)
        if weight is not None and self.weight_offset:
            weight = weight + self.weight_offset
        if is_split:
            present = [each for each in (weight, bias) if each is not None]
            return note_features(self.in_graphs.run(x.shape, x, *present), self.axis)
        shape = x.shape[-1:]
        weight = None if weight is None else weight.to(x.dtype)
        bias = None if bias is None else bias.to(x.dtype)
        if self.is_centred:
            return F.layer_norm(x, shape, weight, bias, eps)
        y = torch.rms_norm(x, shape, weight, eps)
        return y if bias is None else y + bias

    def _parts(self) -> tuple[Tensor | None, Tensor | None]:
        weight, bias = (
            None if each is None else scale_gradient(local(each), scale)
            for each, scale in zip((self.weight, self.bias), self._scales, strict=True)
        )
        return weight, bias

    def gradients_of_shards(self) -> Mapping[str, TakeGradient | None]:
        return {"weight": None, "bias": None}

    def _eps_of(self, x: Tensor) -> float:
        return torch.finfo(x.dtype).eps if self.eps is None else self.eps  # nn.RMSNorm's default

    def _normalize(self, x: Tensor, *present: Tensor) -> Tensor:
        """Normalize features that the group splits. present: of weight and bias those that this norm has."""
        weight = None if self.weight is None else present[0]
        bias = None if self.bias is None else present[-1]
        return apply(_SplitNorm, x, weight, bias, self._eps_of(x), self.is_centred, self.group)
