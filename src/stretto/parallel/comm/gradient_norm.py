# SPDX-License-Identifier: Apache-2.0
"""The global norm of gradients, and clipping by it."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from stretto.parallel.comm.collectives import all_reduce
from stretto.parallel.comm.gradient_buckets import local_gradient
from stretto.parallel.grid import Grid
from stretto.parallel.layout import layout_of


@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float | None, grid: Grid) -> Tensor:
    """Scale the gradients in place so that their global 2-norm is at most `max_norm`; returns the norm before that.

    `max_norm=None` only measures. `gradient_norm` and `clip_scale` are its two halves, for an optimizer that applies
    the factor in its own kernel (`stretto.optim.AdamW`). ValueError for a max_norm that is not positive.
    """
    if max_norm is not None:
        _check_max_norm(max_norm)
    with_gradient = _with_gradient(parameters)
    norm = gradient_norm(with_gradient, grid)
    if max_norm is not None:
        scale = clip_scale(norm, max_norm)
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in with_gradient:
            shard = local_gradient(parameter)
            by_dtype.setdefault(shard.dtype, []).append(shard)
        for shards in by_dtype.values():
            # Rounded to bf16, the factor would be wrong by up to 0.4%: the same way for every gradient.
            torch._foreach_mul_(shards, scale.to(_wide(shards[0])))
    return norm


def _with_gradient(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """The parameters that have a gradient. A single one is not iterated over: its rows have no gradients."""
    return [p for p in ([parameters] if isinstance(parameters, Tensor) else parameters) if p.grad is not None]


def clip_scale(norm: Tensor, max_norm: float) -> Tensor:
    """The factor by which gradients of global norm `norm` (0-dim) are multiplied to have at most `max_norm`.

    It is 0-dim, on norm's device. ValueError for a max_norm that is not positive.
    """
    _check_max_norm(max_norm)
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def _check_max_norm(max_norm: float) -> None:
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}, but must be positive (None only measures)")


@torch.no_grad()
def gradient_norm(parameters: Tensor | Iterable[Tensor], grid: Grid) -> Tensor:
    """The global 2-norm of the gradients, fp64, 0-dim. Collective.

    Every number is counted once, whatever the grid: a shard's squares are divided by the number of its replicas, and
    summed over all ranks in fp64. The host never waits for the device.
    """
    with_gradient = _with_gradient(parameters)
    shards = [p.grad.to_local() for p in with_gradient if isinstance(p.grad, DTensor)]
    if len(shards) != len(with_gradient):
        raise ValueError("clip_grad_norm_ takes the parameters of a model that stretto.parallelize has returned")
    # A handful of kernels for all of them: a large model has hundreds of parameters.
    alike: dict[tuple[torch.dtype, int], list[Tensor]] = {}
    for parameter, shard in zip(with_gradient, shards, strict=True):
        alike.setdefault((_wide(shard), layout_of(parameter).replicas(grid.layout_sizes)), []).append(shard)
    squares = torch.zeros((), dtype=torch.float64, device=grid.device)
    for (dtype, replicas), some in alike.items():
        norms = torch.stack(torch._foreach_norm(some, 2, dtype=dtype))
        squares += norms.double().square().sum() / replicas
    return all_reduce(squares, grid.group("world")).sqrt()


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
