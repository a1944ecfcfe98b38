# SPDX-License-Identifier: Apache-2.0
"""The products of experts in fp8: outputs, and the gradients of tokens and of weights.

torch's grouped product takes e4m3 alone, with a scale for each row of its operands, so tokens and their gradients are
scaled by rows in both recipes, and by each expert's columns where they are summed over its tokens; a weight has a scale
for each expert, or for each of an expert's outputs. The gradient of a weight sums over an expert's tokens, of which
there may be any number, while sums of fp8 take multiples of 16: zeros are added to each expert's.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from stretto.execution import Fp8Recipe
from stretto.ops.fp8_casts import E4M3, ScaledMatrix, cast_groups, cast_scaled, multiply, place_groups
from stretto.ops.moe import ReplicaPlacement
from stretto.ops.moe.grouped.matmul import clear_padding
from stretto.ops.scaled import align_scales
from stretto.parallel.experts.products import ExpertProduct
from stretto.parallel.fp8.matrix import COMPUTE, ScaledOperand


@dataclass(frozen=True)
class Fp8ExpertProduct(ExpertProduct):
    """One of the two products of experts' MLPs, in fp8. Weights are `ScaledMatrix` [experts here, out, in]."""

    recipe: Fp8Recipe = "tensorwise"

    def gather(self, parameter: Tensor, placement: ReplicaPlacement | None, *, is_recorded: bool = False) -> Any:
        found = self.shard.gather(parameter, is_recorded=is_recorded)
        data, scale = found.rows, cast(Tensor, found.scale)
        if self.is_transposed:  # [experts, in, out], scales by outputs
            _, transposed = cast_scaled(data, None, scale, E4M3, scale=scale)
            data, scale = cast(Tensor, transposed), scale.mT
        if placement is not None and self.replicas is not None:
            data = self.replicas.hold(data.view(torch.uint8), placement).view(E4M3)
            scale = self.replicas.hold(scale.contiguous(), placement)
        return ScaledMatrix(data, scale)

    def orient(self, parameter: Any) -> Any:
        return parameter

    def pack(self, weight: Any) -> tuple[Tensor | None, Tensor | None]:
        return weight if self.keeps_weights else (None, None)

    def unpack(self, data: Tensor, scale: Tensor | None) -> Any:
        return ScaledMatrix(data, cast(Tensor, scale))

    def outputs(self, weight: Any) -> int:
        return int(weight.data.shape[1])

    def product(self, rows: Tensor, weight: Any, offsets: Tensor) -> Tensor:
        return _multiply_groups(ScaledOperand(rows, "rowwise", E4M3).rows, weight, offsets, is_fast=True)

    def differentiate_rows(self, gradient: Tensor, weight: Any, offsets: Tensor) -> Tensor:
        columns = ScaledOperand(weight, self.recipe, E4M3).columns
        return _multiply_groups(ScaledOperand(gradient, "rowwise", E4M3).rows, columns, offsets, is_fast=False)

    def differentiate_weights(
        self, left: Tensor, right: Tensor, offsets: Tensor, room: int, form: tuple[torch.dtype, float] | None = None
    ) -> Tensor:
        dtype, factor = (COMPUTE, 1.0) if form is None else form
        found = multiply_columns(left, right, offsets).to(dtype)
        return found if factor == 1 else found.mul_(factor)


def multiply_columns(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """Each expert's left [its rows, b].T @ right [its rows, a] in fp8: [experts, b, a]; zeros without rows."""
    if _takes_groups(left):
        places = place_groups(offsets)
        a, b = (cast_groups(each, offsets, places) for each in (left, right))
        product: Tensor = torch._scaled_grouped_mm(
            a.data, b.data.t(), a.scale, b.scale, offs=places[1:], out_dtype=COMPUTE, use_fast_accum=False
        )
        return product
    found = torch.zeros(offsets.shape[0] - 1, left.shape[1], right.shape[1], dtype=COMPUTE, device=left.device)
    for expert, (begin, end) in enumerate(pairwise(offsets.tolist() if left.shape[0] else ())):
        if end > begin:
            a, b = (ScaledOperand(each[begin:end], "rowwise", E4M3).columns for each in (left, right))
            found[expert] = multiply(a, b, COMPUTE, is_fast=False)
    return found


def _takes_groups(rows: Tensor) -> bool:
    """True if torch's grouped product of fp8 multiplies these rows: on Hopper."""
    return rows.is_cuda and torch.cuda.get_device_capability(rows.device) == (9, 0) and rows.shape[0] > 0


def _multiply_groups(x: ScaledMatrix, weight: ScaledMatrix, offsets: Tensor, *, is_fast: bool) -> Tensor:
    """Each expert's rows of x [n, k] times its weight [e, m, k] transposed; offsets as in `grouped_matmul`."""
    experts, out, _ = weight.data.shape
    n = x.data.shape[0]
    if _takes_groups(x.data):
        columns = align_scales(weight.scale.expand(experts, out, 1).reshape(experts, out))
        rows = align_scales(x.scale.reshape(-1))
        found: Tensor = torch._scaled_grouped_mm(
            x.data, weight.data.mT, rows, columns, offs=offsets[1:], out_dtype=COMPUTE, use_fast_accum=is_fast
        )
        clear_padding(found, offsets)
        return found
    found = torch.zeros(n, out, dtype=COMPUTE, device=x.data.device)
    for expert, (begin, end) in enumerate(pairwise(offsets.tolist())):
        if end > begin:
            own = ScaledMatrix(x.data[begin:end], x.scale[begin:end])
            of_expert = ScaledMatrix(weight.data[expert], weight.scale[expert])
            found[begin:end] = multiply(own, of_expert, COMPUTE, is_fast=is_fast)
    return found
