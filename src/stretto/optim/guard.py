# SPDX-License-Identifier: Apache-2.0
"""`guard`: optimizer steps that update nothing once a wait for another rank has failed.

A kernel whose wait reaches its time limit runs to its end with wrong data, and the host learns of it at its next check
(`stretto.memory.failures`). By then gradients may be wrong, and the optimizer's step may have been launched already, or
be part of a CUDA graph. So the step itself reads the failure flag on the device: `stretto.optim.AdamW` in its kernel,
torch's fused optimizers through `found_inf`, the tensor by which gradient scalers make them skip a step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stretto.memory import failures
from stretto.suggestions import require_type


def guard(optimizer: Optimizer) -> Optimizer:
    """Make a torch optimizer's `step` update nothing once a wait for another rank has failed; returns the optimizer.

    optimizer: one of torch's with `fused=True` on CUDA parameters (Adam, AdamW, SGD, Adagrad), which skips the step on
    the device, in CUDA graphs too. `stretto.optim.AdamW` needs no guard. If the failure is known to the host by then,
    the step raises `PeerError`. ValueError for an optimizer that cannot skip a step on the device.
    """
    require_type(optimizer, Optimizer, "optimizer")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    if any(parameter.is_cuda for parameter in parameters) and not is_fused:
        raise ValueError(
            f"{type(optimizer).__name__} cannot skip a step on the device: make it with fused=True, or take "
            "stretto.optim.AdamW"
        )
    given: Tensor | None = None  # the found_inf that a gradient scaler has set
    ours: Tensor | None = None

    def restore(optimizer: Any) -> None:
        nonlocal ours
        if ours is not None and getattr(optimizer, "found_inf", None) is ours:
            optimizer.found_inf = given
        ours = None

    def before(optimizer: Any, arguments: Any, options: Any) -> None:
        nonlocal given, ours
        restore(optimizer)  # in case the last step raised
        failures.check()
        given = getattr(optimizer, "found_inf", None)
        _set_found_inf(optimizer, given)
        ours = getattr(optimizer, "found_inf", None)

    def after(optimizer: Any, arguments: Any, options: Any) -> None:
        restore(optimizer)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return optimizer


@contextmanager
def skipping_after_failure(optimizer: Any, skip: Tensor | None = None) -> Iterator[None]:
    """Inside, a fused optimizer's step on CUDA parameters updates nothing once a wait for another rank has failed.

    Nor where `skip` (bool, 0-dim, on the device) is true; only fused optimizers take it.
    """
    before = found = getattr(optimizer, "found_inf", None)
    if skip is not None:
        found = optimizer.found_inf = skip.float() if found is None else torch.maximum(skip.float(), found)
    _set_found_inf(optimizer, found)
    try:
        yield
    finally:
        optimizer.found_inf = before


def _set_found_inf(optimizer: Any, before: Tensor | None) -> None:
    """Set `found_inf`, which makes fused kernels skip a step: the failure flag, combined with a gradient scaler's."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not parameters or not all(group.get("fused") for group in optimizer.param_groups):
        return
    failed = failures.find_flag(parameters[0].device)
    if failed is not None:
        found = (failed[0] != 0).float()
        optimizer.found_inf = found if before is None else torch.maximum(found, before)
