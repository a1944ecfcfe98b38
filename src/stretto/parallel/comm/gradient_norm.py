# SPDX-License-Identifier: Apache-2.0
"""The global norm of gradients, and clipping by it."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from stretto.parallel.comm.collectives import all_reduce, gather_rows
from stretto.parallel.grid import Grid
from stretto.parallel.layout import GRAD, ParameterLayout, layout_of
from stretto.suggestions import require_type


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float | None,
    grid: Grid,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients in place so that their global norm is at most `max_norm`; returns the norm before that.

    The norm is 0-dim, in fp32, or in fp64 if a gradient is. `max_norm=None` only measures. `gradient_norm` and
    `clip_scale` are its two halves, for an optimizer that applies the factor in its own kernel
    (`stretto.optim.AdamW`). norm_type: as of `gradient_norm`. error_if_nonfinite: raise RuntimeError, on all ranks, if
    the norm is not finite; the host then waits for the device. ValueError for a max_norm that is not positive.
    """
    require_type(grid, Grid, "grid")
    if max_norm is not None:
        _check_max_norm(max_norm)
    found = _gradients(parameters)
    norm = _norm_of(found, grid, norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the {norm_type}-norm of the gradients is {float(norm)}, so they cannot be clipped: "
            "error_if_nonfinite=False scales them all the same"
        )
    if max_norm is not None:
        scale_gradients([shard for _, shard in found], clip_scale(norm, max_norm))
    return norm if any(shard.dtype == torch.float64 for _, shard in found) else norm.float()


def _gradients(parameters: Tensor | Iterable[Tensor]) -> list[tuple[ParameterLayout, Tensor]]:
    """The layouts of parameters that have gradients, and this rank's shards of these.

    A single one is not iterated over: its rows have none. ValueError for what is no parameter of a parallelized model.
    """
    found = []
    with torch._C.DisableTorchFunctionSubclass():  # 2.11 calls Python for each attribute of a parameter
        try:
            for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
                if (gradient := GRAD.__get__(parameter)) is None:
                    continue
                if not isinstance(gradient, DTensor):
                    raise ValueError(
                        "clip_grad_norm_ takes the parameters of a model that stretto.parallelize has returned, and "
                        f"one of shape {list(parameter.shape)} is none. Of tables that ranks share out, "
                        "fuse_update(max_norm=) clips each row: leave them out here"
                    )
                found.append((layout_of(parameter), gradient._local_tensor))
        except TypeError as error:
            raise TypeError(
                f"parameters must be tensors, of model.parameters(), not {parameters!r:.60}: {error}"
            ) from error
    return found


def clip_scale(norm: Tensor, max_norm: float) -> Tensor:
    """The factor by which gradients of global norm `norm` (0-dim) are multiplied to have at most `max_norm`.

    It is 0-dim, on norm's device. ValueError for a max_norm that is not positive.
    """
    _check_max_norm(max_norm)
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def scale_gradients(gradients: Iterable[Tensor], scale: Tensor) -> None:
    """Multiply plain gradients in place by a factor, 0-dim, on their device, as `scale_by`."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for dtype, some in by_dtype.items():
        if torch.promote_types(dtype, torch.float32) == dtype:
            torch._foreach_mul_(some, scale.to(dtype.to_real()))
        else:
            wide = scale.float()  # once, where the norm is fp64
            for gradient in some:
                scale_by(gradient, wide, out=gradient)


def scale_by(tensor: Tensor, factor: Tensor, *, out: Tensor | None = None) -> Tensor:
    """A tensor times a factor, 0-dim, on its device; in `out` if that is given. Outside of autograd.

    Rounded to bf16, the factor would be wrong by up to 0.4%, the same way for every number; and without dims, torch's
    kernels on GPUs would round it to the tensor's dtype.
    """
    factor = factor.to(torch.promote_types(tensor.dtype, torch.float32)).view((1,) * tensor.dim())
    return torch.mul(tensor, factor, out=torch.empty_like(tensor) if out is None else out)


def _check_max_norm(max_norm: float) -> None:
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}, but must be positive (None only measures)")


@torch.no_grad()
def gradient_norm(parameters: Tensor | Iterable[Tensor], grid: Grid, norm_type: float = 2.0) -> Tensor:
    """The global norm of the gradients, fp64, 0-dim. Collective.

    norm_type: a positive power, or infinity for the largest absolute value; ValueError for others. Every number is
    counted once, whatever the grid: a shard's powers are divided by the number of its replicas, and summed over all
    ranks in fp64. The host never waits for the device.
    """
    require_type(grid, Grid, "grid")
    return _norm_of(_gradients(parameters), grid, norm_type)


def _norm_of(gradients: Iterable[tuple[ParameterLayout, Tensor]], grid: Grid, norm_type: float) -> Tensor:
    require_type(norm_type, float, "norm_type")
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}, but must be positive: 2, say, or math.inf")
    # A handful of kernels for all of them: a large model has hundreds of parameters.
    alike: dict[tuple[torch.dtype, int], list[Tensor]] = {}
    sizes = grid.layout_sizes
    for layout, shard in gradients:
        if shard.numel():
            dtype = torch.float64 if shard.dtype == torch.float64 else torch.float32
            alike.setdefault((dtype, layout.replicas(sizes)), []).append(shard)
    is_largest = norm_type == math.inf
    total = torch.zeros((), dtype=torch.float64, device=grid.device)
    for (dtype, replicas), some in alike.items():
        norms = torch.stack(torch._foreach_norm(some, norm_type, dtype=dtype)).double()
        total = torch.maximum(total, norms.max()) if is_largest else total + norms.pow(norm_type).sum() / replicas
    world = grid.group("world")
    if is_largest:  # gathered, since a backend's maximum may lose NaN
        return gather_rows(total.view(1), world.size(), world).max()
    return all_reduce(total, world).pow(1 / norm_type)
