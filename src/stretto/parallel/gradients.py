"""Gradients: summed where ranks saw different tokens, deferred while micro-batches accumulate, clipped by one norm."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.parallel.communication import all_reduce
from stretto.parallel.grid import Grid
from stretto.parallel.layout import layout_of
from stretto.parallel.linear import Precision


class GradientSum:
    """Sums each parameter's gradient over the axes along which ranks saw different tokens (or heads).

    The hook runs once a backward pass and parameter, on all that this pass adds to the gradient, before it is added.
    While `is_deferred`, gradients accumulate unsummed; the next pass sums them with its own.
    """

    def __init__(self, grid: Grid, precision: Precision) -> None:
        self.grid = grid
        self.precision = precision
        self.is_deferred = False
        self._unsummed: set[nn.Parameter] = set()

    def watch(self, parameter: nn.Parameter, axes: Sequence[str]) -> None:
        """Sum this parameter's gradients over `axes` from now on."""
        groups = [self.grid.group(axis) for axis in axes if self.grid.size(axis) > 1]
        if groups and parameter.requires_grad:
            parameter.register_hook(lambda gradient: self._sum(parameter, gradient, groups))

    def _sum(self, parameter: nn.Parameter, gradient: Tensor, groups: list[dist.ProcessGroup]) -> Tensor:
        if self.is_deferred:
            if parameter not in self._unsummed and parameter.grad is not None:
                raise RuntimeError("deferred_reduction: zero the gradients before the first micro-batch of a step")
            self._unsummed.add(parameter)
            return gradient
        assert isinstance(gradient, DTensor)
        mine = gradient.to_local()
        if parameter in self._unsummed:
            self._unsummed.remove(parameter)
            assert isinstance(parameter.grad, DTensor)
            mine = mine + parameter.grad.to_local()
            parameter.grad = None
        wire = self.precision.reduce or self.precision.compute or mine.dtype
        total = mine.to(wire, copy=True, memory_format=torch.contiguous_format)
        for group in groups:
            all_reduce(total, group)
        return DTensor.from_local(
            total.to(parameter.dtype),
            gradient.device_mesh,
            gradient.placements,
            run_check=False,
            shape=gradient.shape,
            stride=gradient.stride(),
        )


@contextmanager
def deferred_reduction(model: nn.Module) -> Iterator[None]:
    """For all but the last micro-batch of a step: gradients stay on each rank until the last backward sums them.

    Without it every backward pass sums its own, which is right as well, and sends more.
    """
    gradient_sum = getattr(model, "gradient_sum", None)
    if not isinstance(gradient_sum, GradientSum):
        raise ValueError("deferred_reduction takes a model that stretto.parallelize has returned")
    before, gradient_sum.is_deferred = gradient_sum.is_deferred, True
    try:
        yield
    finally:
        gradient_sum.is_deferred = before


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float | None, grid: Grid) -> Tensor:
    """Scale the gradients in place so that their global 2-norm is at most `max_norm`; returns the norm before that.

    Every number is counted once, whatever the grid: a shard's squares are divided by the number of its replicas, and
    summed over all ranks in fp64. `max_norm=None` only measures. The host never waits for the device.
    """
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}, but must be positive (None only measures)")
    with_gradient = [p for p in parameters if p.grad is not None]
    squares = torch.zeros((), dtype=torch.float64, device=grid.device)
    shards = [p.grad.to_local() for p in with_gradient if isinstance(p.grad, DTensor)]
    if len(shards) != len(with_gradient):
        raise ValueError("clip_grad_norm_ takes the parameters of a model that stretto.parallelize has returned")
    for parameter, shard in zip(with_gradient, shards, strict=True):
        square = torch.linalg.vector_norm(shard, dtype=_wide(shard)).double().square()
        squares += square / layout_of(parameter).replicas(grid.sizes)
    norm = all_reduce(squares, grid.group("world")).sqrt()
    if max_norm is not None and shards:
        torch._foreach_mul_(shards, torch.clamp(max_norm / (norm + 1e-6), max=1.0).to(shards[0].dtype))
    return norm


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
