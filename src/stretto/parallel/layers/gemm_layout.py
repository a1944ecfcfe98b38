# SPDX-License-Identifier: Apache-2.0
"""Chooses the layout of a GEMM's operands by timing, once for each product of a model (Singh, section 5.1.3).

A BLAS library has kernels for row-major and for transposed operands, and they differ in speed. Each of them can compute
a product: an operand is copied into the other layout, or the operands are swapped and the result transposed.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.tuning import TuningStore, machine_key, median_seconds, slowest_times, time_runs

REPEATS = 5
# A layout must take at most this part of the plain one's time to be chosen: the rest is noise of timing.
MARGIN = 0.98


@dataclass(frozen=True)
class GemmLayout:
    """A way to compute a @ b. `layout`: what a and b are copied into ("": neither is); N row-major, T column-major."""

    layout: str
    is_swapped: bool

    def multiply(self, a: Tensor, b: Tensor, *, out: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The product [m, n], contiguous; in `out` if that is given, in `dtype` if that is."""
        if self.layout:
            a, b = (_copy_into(tensor, kind == "T") for tensor, kind in zip((a, b), self.layout, strict=True))
        if not self.is_swapped:
            return _product(a, b, out, dtype)
        product = _product(b.t(), a.t(), None, dtype).t()
        return product.contiguous() if out is None else out.copy_(product)


PLAIN = GemmLayout("", False)
GEMM_LAYOUTS = (
    PLAIN,
    GemmLayout("", True),
    *(GemmLayout("".join(pair), False) for pair in itertools.product("NT", repeat=2)),
)


def _product(a: Tensor, b: Tensor, out: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    if out is not None:
        return torch.mm(a, b, out=out)
    if dtype is None or dtype == a.dtype:
        return a @ b
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16) and dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype)  # rounded once: the kernel's sums are fp32
    return (a @ b).to(dtype)


def _copy_into(tensor: Tensor, by_columns: bool) -> Tensor:
    return tensor.t().contiguous().t() if by_columns else tensor.contiguous()


@dataclass(frozen=True)
class Product:
    """The operands of a product: all that a kernel's speed depends on."""

    shapes: tuple[torch.Size, torch.Size]
    strides: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: torch.dtype

    @classmethod
    def of(cls, a: Tensor, b: Tensor) -> "Product":
        return cls((a.shape, b.shape), (a.stride(), b.stride()), a.dtype)

    @property
    def key(self) -> str:
        """Its name in the store of measured times."""
        sides = (
            f"{'x'.join(map(str, s))}/{','.join(map(str, t))}" for s, t in zip(self.shapes, self.strides, strict=True)
        )
        return f"matmul {' @ '.join(sides)} {self.dtype} {len(GEMM_LAYOUTS)} ways"

    def operands(self, device: torch.device) -> list[Tensor]:
        return [
            torch.empty_strided(tuple(shape), stride, dtype=self.dtype, device=device).normal_()
            for shape, stride in zip(self.shapes, self.strides, strict=True)
        ]


class MatmulTuner:
    """Computes each of a model's products in its fastest layout; they are timed at the end of the first backward pass.

    All ranks take the same layout: the one whose slowest rank is the fastest. Times are kept on disk by machine.
    """

    def __init__(self, is_on: bool, device: torch.device, world: dist.ProcessGroup) -> None:
        self.is_on = is_on
        self.device = device
        self.world = world
        self._seen: dict[tuple[int, str], Product] | None = {} if is_on else None
        self._chosen: dict[tuple[int, str], tuple[Product, GemmLayout]] = {}

    def multiply(
        self,
        linear_index: int,
        role: str,
        a: Tensor,
        b: Tensor,
        *,
        out: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """a [m, k] @ b [k, n], one of the products (`role`) of the linear that has number `linear_index`.

        Contiguous; in `out` if that is given, or in `dtype`.
        """
        layout = PLAIN
        if self._seen is not None:
            self._seen.setdefault((linear_index, role), Product.of(a, b))
        elif self.is_on:
            product, layout = self._chosen.get((linear_index, role), (None, PLAIN))
            # Shapes other than the first step's (of a last, smaller batch, say) were not timed.
            layout = layout if product == Product.of(a, b) else PLAIN
        return layout.multiply(a, b, out=out, dtype=dtype)

    def finish(self) -> None:
        """Time the products of the first step, and choose their layouts. Collective, once; later calls do nothing."""
        if self._seen is None or not self._seen:
            return
        seen, self._seen = self._seen, None
        store = TuningStore()
        machine = machine_key(self.device)
        known = store.read(machine)
        fresh: dict[str, Sequence[float]] = {}
        for product in seen.values():
            if len(known.get(product.key, ())) != len(GEMM_LAYOUTS):
                fresh[product.key] = known[product.key] = tuple(
                    _time(layout, product, self.device) for layout in GEMM_LAYOUTS
                )
        keys = sorted(seen)  # (linear_index, role)
        times = slowest_times([known[seen[key].key] for key in keys], self.device, self.world)
        if fresh and dist.get_node_local_rank(0) == 0:  # by now every rank has read the store
            store.add(machine, fresh)
        for key, row in zip(keys, times, strict=True):
            fastest = min(range(len(GEMM_LAYOUTS)), key=lambda number: row[number])
            self._chosen[key] = (seen[key], GEMM_LAYOUTS[fastest] if row[fastest] < MARGIN * row[0] else PLAIN)

    def chosen(self) -> dict[tuple[int, str], GemmLayout]:
        """The chosen layouts, by linear and product; {} before `finish`."""
        return {key: layout for key, (_, layout) in self._chosen.items()}


def _time(layout: GemmLayout, product: Product, device: torch.device) -> float:
    run = functools.partial(layout.multiply, *product.operands(device))
    return median_seconds(time_runs(run, device, warmups=1, repeats=REPEATS))
