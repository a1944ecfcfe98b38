# SPDX-License-Identifier: Apache-2.0
"""fp8 weights as they are gathered over z: each rank casts its shard by scales of the whole weight.

A weight's largest magnitude is that of all ranks' shards, so that its fp8 numbers do not depend on z. All magnitudes of
a model are reduced by one small all-reduce at the beginning of a forward pass; those of a weight that has changed since
are reduced with its gather. (torchao's precompute_float8_dynamic_scale_for_fsdp does so after the optimizer's step.)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.execution import Fp8Recipe
from stretto.ops.fp8_casts import E4M3, cast_scaled, find_scale
from stretto.parallel.comm.collectives import all_reduce
from stretto.parallel.layout import Version, local, version_of
from stretto.parallel.low_precision_weights import cast

# Each weight's scales begin at a multiple of so many: `align_scales` would copy others in each product.
_SCALE_GRAIN = 4


@dataclass(eq=False)
class WeightScaling:
    """The scales of one weight [..., out, in], or [..., in, out] if it is transposed: of the whole, or of each output.

    parameter: the registered one. rows: of `dim`, of the whole that is gathered over `group`. compute: the dtype of the
    numbers that are cast. Where the weight has three dims, each expert has scales of its own.
    """

    recipe: Fp8Recipe
    parameter: Tensor
    rows: int
    group: dist.ProcessGroup
    dim: int
    compute: torch.dtype
    is_transposed: bool
    _scale: tuple[Version, Tensor] | None = field(default=None, init=False)

    @property
    def summed(self) -> tuple[int, ...]:
        """The dims that have one scale."""
        inputs = -2 if self.is_transposed else -1
        return (-2, -1) if self.recipe == "tensorwise" else (inputs,)

    def cast(self, current: Tensor, out: Tensor | None = None, *, is_recorded: bool = True) -> tuple[Tensor, Tensor]:
        """This rank's shard of the parameter, or of what has replaced it, in fp8; and the whole weight's scales.

        Collective where the magnitudes are not known. is_recorded: as in `WeightShard.gather`.
        """
        shard = cast(current, self.compute) if is_recorded else local(current).to(self.compute)
        shard = shard.detach()
        version = version_of(current)
        if self._scale is None or self._scale[0] != version or self.group.size() == 1:
            self.note(version, self.scale_of(all_reduce(self.measure(shard), self.group, dist.ReduceOp.MAX)))
        assert self._scale is not None
        scale = self._scale[1]
        own, _ = cast_scaled(shard, self._own(scale, shard.shape[self.dim]), None, E4M3, out=out)
        assert own is not None
        return own, scale

    def measure(self, shard: Tensor) -> Tensor:
        """The largest magnitudes [whole sizes, 1 of summed dims] of this rank's shard, zeros elsewhere."""
        shape = list(shard.shape)
        shape[self.dim] = self.rows
        for dim in self.summed:
            shape[dim] = 1
        whole = torch.zeros(shape, dtype=torch.float32, device=shard.device)
        if shard.numel():
            found = torch.linalg.vector_norm(shard, torch.inf, self.summed, keepdim=True)
            # The largest rounded number is the largest number, rounded.
            self._own(whole, shard.shape[self.dim]).copy_(found.to(self.compute))
        return whole

    def scale_of(self, largest: Tensor) -> Tensor:
        """The scales for these largest magnitudes."""
        return find_scale(largest, E4M3, is_power_of_two=self.recipe == "rowwise")

    def note(self, version: Version, scale: Tensor) -> None:
        """Remember the whole weight's scales, for as long as the shard has this version."""
        self._scale = version, scale

    def _own(self, whole: Tensor, rows: int) -> Tensor:
        """This shard's part of scales or magnitudes."""
        if whole.shape[self.dim] == 1:
            return whole
        chunk = -(-self.rows // self.group.size())
        return whole.narrow(self.dim, min(self.group.rank() * chunk, self.rows), rows)


class WeightScales:
    """The scales of one model's weights that ranks of z gather in fp8."""

    def __init__(self) -> None:
        self._weights: list[WeightScaling] = []
        self._is_step = self._is_measured = False

    def register(self, weight: WeightScaling) -> None:
        """Measure this weight from the next forward pass on."""
        self._weights.append(weight)

    def measure(self) -> None:
        """Measure all weights, by one all-reduce for each group of ranks. Collective, at the beginning of a pass.

        Between `begin_step` and `end_step`, in which weights do not change, the first pass alone measures.
        """
        if not self._weights or (self._is_step and self._is_measured):
            return
        self._is_measured = True
        by_group: dict[Any, list[WeightScaling]] = {}
        for weight in self._weights:
            by_group.setdefault(weight.group, []).append(weight)
        with torch.no_grad():
            for group, weights in by_group.items():
                largest = _measure_all(weights)
                gaps = [largest[0].new_zeros(-each.numel() % _SCALE_GRAIN) for each in largest]
                pieces = [piece for each in zip(largest, gaps, strict=True) for piece in each]
                total = all_reduce(torch.cat([piece.flatten() for piece in pieces]), group, dist.ReduceOp.MAX)
                parts = weights[0].scale_of(total).split([piece.numel() for piece in pieces])[::2]
                for weight, own, part in zip(weights, largest, parts, strict=True):
                    weight.note(version_of(weight.parameter), part.view(own.shape))

    def begin_step(self) -> None:
        """Weights do not change from now on."""
        self._is_step, self._is_measured = True, False

    def end_step(self) -> None:
        """Weights may change again."""
        self._is_step = False


def _measure_all(weights: Sequence[WeightScaling]) -> list[Tensor]:
    """The largest magnitudes of all these weights' shards: of matrices with one scale by few kernels."""
    shards = [local(weight.parameter) for weight in weights]
    if all(
        weight.recipe == "tensorwise" and shard.dim() == 2 and shard.numel()
        for weight, shard in zip(weights, shards, strict=True)
    ):
        found = torch.stack(torch._foreach_norm(shards, torch.inf)).to(weights[0].compute).float()
        return [each.view(1, 1) for each in found]
    return [weight.measure(shard) for weight, shard in zip(weights, shards, strict=True)]
