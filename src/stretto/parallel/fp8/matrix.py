# SPDX-License-Identifier: Apache-2.0
"""The products of a linear in fp8: the output, and the gradients of the input and of the weight.

Each takes operands that are contiguous along the dim that it sums over, and have one scale for each row, or one for
all. torchao (Float8Linear): tensorwise scales have e4m3 activations and weights and e5m2 gradients; rowwise ones are
powers of two, and all is e4m3. What is not gathered in fp8 is cast from bf16 for each of its two products.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.execution import HALVED_BYTES, HALVED_INPUTS, Fp8Recipe
from stretto.ops.fp8_casts import (
    E4M3,
    E5M2,
    GRAIN,
    ScaledMatrix,
    cast_both,
    cast_scaled,
    find_largest,
    find_scale,
    multiply,
)
from stretto.ops.operator import define_operator
from stretto.parallel.comm.collectives import all_reduce, collective, start_all_reduce
from stretto.parallel.comm.weight_gathering import GatheredWeight
from stretto.parallel.layers.linear_plan import LinearPlan, ShardedTokens

COMPUTE = torch.bfloat16  # what is not in fp8; outputs and gradients


def _dtype_of(recipe: Fp8Recipe, *, is_gradient: bool) -> torch.dtype:
    return E5M2 if is_gradient and recipe == "tensorwise" else E4M3


class ScaledOperand:
    """A matrix [m, k], bf16 or in fp8 already, as an operand of products that sum over k or over m.

    x may have more dims before the last. dtype: in which it is cast. group: ranks that share the m rows, and one scale.
    scale: that one, if it is known.
    """

    def __init__(
        self,
        x: Tensor | ScaledMatrix,
        recipe: Fp8Recipe,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
        scale: Tensor | None = None,
    ) -> None:
        self.scale: Tensor | None
        self.x, self.scale = x if isinstance(x, ScaledMatrix) else (x.flatten(0, -2), None)
        self.shape = self.x.shape if isinstance(x, ScaledMatrix) else x.shape
        self.recipe, self.dtype, self.group = recipe, dtype, group
        self._rows = x if isinstance(x, ScaledMatrix) else None
        self._columns: ScaledMatrix | None = None
        self._one_scale = scale if self.scale is None else self.scale if recipe == "tensorwise" else None

    @property
    def rows(self) -> ScaledMatrix:
        """[m, k], scales by rows."""
        if self._rows is None:
            scale = self._scale_over(-1)
            data, _ = cast_scaled(self.x, scale, None, self.dtype)
            self._rows = ScaledMatrix(cast(Tensor, data), scale)
        return self._rows

    @property
    def columns(self) -> ScaledMatrix:
        """[k, m], m padded with zeros to a multiple of 16, scales by k."""
        if self._columns is None:
            scale = self._scale_over(-2)
            _, data = cast_scaled(self.x, None, scale, self.dtype, scale=self.scale)
            self._columns = ScaledMatrix(cast(Tensor, data), scale.mT)
        return self._columns

    @classmethod
    def of(
        cls, shape: torch.Size, rows: ScaledMatrix | None, columns: ScaledMatrix | None, recipe: Fp8Recipe
    ) -> "ScaledOperand":
        """Make the operand of an x of this shape that was cast before, to rows, columns or both."""
        known = rows or columns
        assert known is not None
        found = cls(known, recipe, known.data.dtype)
        found.shape, found._rows, found._columns = shape, rows, columns
        return found

    def cast_both(self) -> None:
        """Make rows and columns in one pass, after one that measures both."""
        if self._rows is None and self._columns is None:
            if (scale := self._one_scale) is None:
                self._rows, self._columns = cast_both(self.x, self.dtype, has_one_scale=self.recipe == "tensorwise")
            else:
                data, transposed = cast_scaled(self.x, scale, scale, self.dtype)
                self._rows = ScaledMatrix(cast(Tensor, data), scale)
                self._columns = ScaledMatrix(cast(Tensor, transposed), scale)
            self.x = self.x.new_empty(0)

    @property
    def has_columns(self) -> bool:
        """True if the columns are made."""
        return self._columns is not None

    def free_rows(self) -> None:
        """Keep the columns alone, if they are made."""
        if self._columns is not None:
            self.x, self._rows = self.x.new_empty(0), None

    def _scale_over(self, dim: int) -> Tensor:
        """Factors [m, 1] or [1, k], each of the numbers along `dim`; [1, 1] for all."""
        if self.recipe == "rowwise":
            return find_scale(find_largest(self.x, (dim,), self.scale), self.dtype, is_power_of_two=True)
        if self._one_scale is None:
            largest = find_largest(self.x, (-2, -1))
            if self.group is not None:
                all_reduce(largest, self.group, dist.ReduceOp.MAX)
            self._one_scale = find_scale(largest, self.dtype, is_power_of_two=False)
        return self._one_scale


def _cast_matrix(x: Tensor, scale: Tensor | None, is_gradient: bool, wants_columns: bool) -> list[Tensor]:
    """x [m, k] as fp8 rows and, with wants_columns, columns: by this scale; None: by rows, each with their scales."""
    recipe: Fp8Recipe = "rowwise" if scale is None else "tensorwise"
    operand = ScaledOperand(x, recipe, _dtype_of(recipe, is_gradient=is_gradient), scale=scale)
    if wants_columns:
        operand.cast_both()
    found = [operand.rows, operand.columns] if wants_columns else [operand.rows]
    return [each for matrix in found for each in (matrix if scale is None else matrix[:1])]


def _fake_cast_matrix(x: Tensor, scale: Tensor | None, is_gradient: bool, wants_columns: bool) -> list[Tensor]:
    dtype, (m, k) = _dtype_of("rowwise" if scale is None else "tensorwise", is_gradient=is_gradient), x.shape
    shapes = [(m, k), (k, -(-m // GRAIN) * GRAIN)][: 1 + wants_columns]
    found = [[x.new_empty(shape, dtype=dtype), x.new_empty(shape[0], 1, dtype=torch.float32)] for shape in shapes]
    return [each for matrix in found for each in (matrix if scale is None else matrix[:1])]


_cast_in_graph = define_operator("cast_matrix_to_fp8", _cast_matrix, fake=_fake_cast_matrix)


def cast_in_graph(x: Tensor, recipe: Fp8Recipe, *, is_gradient: bool, wants_columns: bool) -> list[Tensor]:
    """Cast x [..., k] to fp8 in a graph that is being traced; returns rows, then columns, each followed by its scales,
    or both by their single scale.

    With a single scale the compiler fuses the search for the largest number with the code that makes x. It merges equal
    calls, such as those of queries, keys and values.
    """
    x = x.detach().flatten(0, -2)
    if recipe == "rowwise":
        return _cast_in_graph(x, None, is_gradient, wants_columns)
    largest = x.abs().amax(-1, keepdim=True).amax(-2, keepdim=True)  # of rows first, as norms and products are made
    scale = find_scale(largest, _dtype_of(recipe, is_gradient=is_gradient), is_power_of_two=False)
    return [*_cast_in_graph(x, scale, is_gradient, wants_columns), scale]


def take_casts(casts: Sequence[Tensor], recipe: Fp8Recipe) -> tuple[ScaledMatrix, ScaledMatrix | None]:
    """Split what `cast_in_graph` has made into rows, and columns if there are some."""
    rows = ScaledMatrix(casts[0], casts[1 if recipe == "rowwise" else -1])
    return rows, ScaledMatrix(*casts[-2:]) if len(casts) > 2 else None


class OperandCache:
    """The input that a model's linears have cast last: queries, keys and values take one."""

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Tensor], int, ScaledOperand] | None = None

    def find(self, x: Tensor, recipe: Fp8Recipe) -> ScaledOperand:
        """The operand of x as it is now. Not for tensors of compiled graphs, whose memory is written unseen."""
        if x.is_inference():
            return ScaledOperand(x, recipe, E4M3)
        if self._last is None or self._last[0]() is not x or self._last[1] != x._version:
            self._last = weakref.ref(x), x._version, ScaledOperand(x, recipe, E4M3)
        return self._last[2]


@dataclass(frozen=True, eq=False)
class Fp8Matrix:
    """A gathered weight in fp8 as the right operand of a product: [in, out], or [out, in] if it is flipped.

    weight: [out, in], scales by outputs. Output gradients are multiplied with the flipped one.
    """

    weight: ScaledMatrix
    recipe: Fp8Recipe
    is_flipped: bool = False

    def t(self) -> "Fp8Matrix":
        """The transposed matrix."""
        return replace(self, is_flipped=not self.is_flipped)

    @property
    def shape(self) -> tuple[int, int]:
        """The matrix's shape."""
        out, inputs = self.weight.data.shape
        return (out, inputs) if self.is_flipped else (inputs, out)

    def operand(self) -> ScaledMatrix:
        """The transposed matrix, contiguous along what a product with it sums over, scales by its rows."""
        return ScaledOperand(self.weight, self.recipe, E4M3).columns if self.is_flipped else self.weight


def multiply_fp8(x: ScaledMatrix, matrix: Fp8Matrix, bias: Tensor | None = None) -> Tensor:
    """x [m, k] @ matrix [k, n], + bias."""
    is_fast = not matrix.is_flipped or matrix.recipe == "rowwise"
    return multiply(x, matrix.operand(), COMPUTE, bias=bias, is_fast=is_fast)


@dataclass(frozen=True)
class Fp8LinearPlan(LinearPlan):
    """A linear whose products are in fp8, of a weight that `WeightScaling` casts. cache: of all linears of a model."""

    recipe: Fp8Recipe = "tensorwise"
    cache: OperandCache = field(default_factory=OperandCache)

    @property
    def gathers_as(self) -> str:
        return "scaled"

    def matrix(self, weight: GatheredWeight, dtype: torch.dtype) -> Any:
        data, scale = weight.rows, cast(Tensor, weight.scale)
        if self.is_transposed:  # scales by outputs are those of its columns
            _, transposed = cast_scaled(data, None, scale, E4M3, scale=scale)
            data, scale = cast(Tensor, transposed)[:, : data.shape[0]].contiguous(), scale.t()
        if self.used_rows:
            data = self.used(data.view(torch.uint8)).view(E4M3)
            scale = scale if scale.shape[0] == 1 else self.used(scale)
        return Fp8Matrix(ScaledMatrix(data, scale), self.recipe)

    def cast_in_graph(self, x: Tensor, *, wants_columns: bool) -> Sequence[Tensor]:
        return cast_in_graph(x, self.recipe, is_gradient=False, wants_columns=wants_columns)

    def take_from_graph(self, x: Tensor, casts: Sequence[Tensor]) -> Any:
        return ScaledOperand.of(x.shape, *take_casts(casts, self.recipe), self.recipe)

    def left_operand(self, x: Any, *, may_share: bool, wants_columns: bool) -> Any:
        if isinstance(x, ScaledOperand):
            return x
        operand = self.cache.find(x, self.recipe) if may_share else ScaledOperand(x, self.recipe, E4M3)
        if wants_columns:
            operand.cast_both()
        return operand

    def saved_input(self, x: Any, left: Any) -> Any:
        return left.columns if isinstance(left, ScaledOperand) and left.has_columns else x

    def gradient_operand(self, gradient: Tensor, *, needs_both: bool) -> Any:
        operand = ScaledOperand(gradient, self.recipe, _dtype_of(self.recipe, is_gradient=True))
        if needs_both:
            operand.cast_both()
        return operand

    def restore(self, x: Tensor, scale: Tensor | None) -> Any:
        if scale is None:
            return x
        saved = ScaledMatrix(x, scale)
        return saved if self.tokens is not None else ScaledOperand.of(x.shape, None, saved, self.recipe)

    def gather(self, edge: ShardedTokens, part: Tensor, matrix: Any) -> Any:
        rows = self._part(edge, part, matrix).rows
        data = edge.gather(rows.data.view(torch.uint8)).view(rows.data.dtype)
        return ScaledMatrix(data, rows.scale if self.recipe == "tensorwise" else edge.gather(rows.scale))

    def gather_and_multiply(self, edge: ShardedTokens, part: Tensor, matrix: Any) -> tuple[Tensor, Any]:
        if not edge.has_kernel(part):
            gathered = self.gather(edge, part, matrix)
            return multiply_fp8(gathered, matrix), gathered
        from stretto.ops.scaled import all_gather_scaled_matmul_gathered

        x, weight = self._part(edge, part, matrix).rows, matrix.operand()
        with collective("all_gather_matmul", edge.group):
            product, data = all_gather_scaled_matmul_gathered(
                x.data, weight.data, x.scale, weight.scale, edge.group, has_one_scale=self.recipe == "tensorwise"
            )
        return product, ScaledMatrix(data, x.scale if self.recipe == "tensorwise" else edge.gather(x.scale))

    def multiply_and_scatter(self, edge: ShardedTokens, x: Any, matrix: Any) -> Tensor:
        left = self._rows(x)
        if not edge.has_kernel(left.data):
            return edge.scatter(multiply_fp8(left, matrix))
        from stretto.ops.scaled import scaled_matmul_reduce_scatter

        weight = matrix.operand()
        with collective("matmul_reduce_scatter", edge.group):
            return scaled_matmul_reduce_scatter(left.data, weight.data, left.scale, weight.scale, edge.group)

    def multiply(self, role: str, a: Any, b: Any, dtype: torch.dtype | None = None) -> Tensor:
        product = self.multiply_and_add(a, b, None)
        if role == "input":
            a.free_rows()  # a weight's gradient may be made much later
        return product

    def multiply_and_add(self, x: Any, matrix: Any, bias: Tensor | None) -> Tensor:
        product = multiply_fp8(self._rows(x), matrix, bias)
        return product if isinstance(x, ScaledMatrix) else _shaped(product, x.shape)

    def multiply_and_sum(self, x: Any, matrix: Any) -> Tensor:
        left, group = self._rows(x), self.output_reduce_group
        (inputs, columns), rows = matrix.shape, left.data.shape[0]
        if group.size() == 1 or rows * columns * COMPUTE.itemsize < HALVED_BYTES or inputs < HALVED_INPUTS:
            return _shaped(all_reduce(multiply_fp8(left, matrix), group), x.shape)
        y, pending = torch.empty(rows, columns, dtype=COMPUTE, device=left.data.device), []
        for data, scale, out in zip(left.data.chunk(2), left.scale.expand(rows, 1).chunk(2), y.chunk(2), strict=True):
            out.copy_(multiply_fp8(ScaledMatrix(data, scale), matrix))
            pending.append(start_all_reduce(out, group))
            if not self.hides_all_reduce:
                pending[-1].wait()
        for half in pending:
            half.wait()
        return _shaped(y, x.shape)

    def multiply_weight_gradient(self, x: Any, gradient: Any, dtype: torch.dtype | None) -> Tensor:
        right = x if isinstance(x, ScaledOperand) else ScaledOperand(x, self.recipe, E4M3)
        if not isinstance(gradient, ScaledOperand):
            gradient = self.gradient_operand(gradient, needs_both=False)
        left, right = (right, gradient) if self.is_transposed else (gradient, right)
        return multiply(left.columns, right.columns, dtype or COMPUTE, is_fast=self.recipe == "rowwise")

    def multiply_traced(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        is_on = torch.is_grad_enabled()
        wants_columns = is_on and weight.requires_grad, is_on and x.requires_grad
        weight = weight.t() if self.is_transposed else weight
        y = _TracedProduct.apply(x.to(COMPUTE).flatten(0, -2), weight, self.recipe, wants_columns)
        y = y.view(*x.shape[:-1], y.shape[-1])
        return y if bias is None else y + bias.to(COMPUTE)

    def _rows(self, x: Any) -> ScaledMatrix:
        return x if isinstance(x, ScaledMatrix) else x.rows

    def _part(self, edge: ShardedTokens, part: Tensor, matrix: Any) -> ScaledOperand:
        """This rank's tokens of those that an edge gathers."""
        return ScaledOperand(part, self.recipe, _dtype_of(self.recipe, is_gradient=matrix.is_flipped), edge.group)


def _shaped(rows: Tensor, shape: torch.Size) -> Tensor:
    """Rows with the dims of what they were made from. No view, to which autograd would forbid writes."""
    if len(shape) == 2:
        return rows
    whole: Tensor = torch.ops.aten._unsafe_view(rows, (*shape[:-1], rows.shape[-1]))
    return whole


class _TracedProduct(torch.autograd.Function):
    """x [m, in] @ weight [out, in].T in fp8, of a model on one rank. wants_columns: of x and of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Fp8Recipe, wants_columns: tuple[bool, bool]) -> Tensor:
        ctx.recipe, ctx.dtype = recipe, weight.dtype
        (left, x_columns), (right, weight_columns) = (
            take_casts(cast_in_graph(each.to(COMPUTE), recipe, is_gradient=False, wants_columns=wants), recipe)
            for each, wants in zip((x, weight), wants_columns, strict=True)
        )
        ctx.save_for_backward(*(x_columns or (None, None)), *(weight_columns or (None, None)))
        return multiply(left, right, COMPUTE)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        is_fast, of_x, of_weight = ctx.recipe == "rowwise", None, None
        casts = cast_in_graph(gradient, ctx.recipe, is_gradient=True, wants_columns=x is not None)
        rows, columns = take_casts(casts, ctx.recipe)
        if weight is not None:
            of_x = multiply(rows, ScaledMatrix(weight, weight_scale), COMPUTE, is_fast=is_fast)
        if columns is not None:
            of_weight = multiply(columns, ScaledMatrix(x, x_scale), ctx.dtype, is_fast=is_fast)
        return of_x, of_weight, None, None
