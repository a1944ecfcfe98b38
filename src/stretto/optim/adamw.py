# SPDX-License-Identifier: Apache-2.0
"""AdamW with gradient scaling in its step: one kernel clips and updates, and reads and writes each number once."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.memory import failures
from stretto.optim.guard import skipping_after_failure


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW whose `step` multiplies gradients by a factor, so that clipping needs no separate pass.

    The state has torch's names and shapes, and each can load the other's. On a GPU, contiguous fp32 parameters are
    updated by a Triton kernel, which moves 28 bytes a parameter, where scaling first moves 36. All others are scaled by
    `_foreach_mul_` and updated by torch. On a GPU, a step after a failed wait for another rank updates nothing
    (`stretto.optim.guard`).

    lr: a number, or a 0-dim tensor on the device, as captured steps need; in fp64 it gives the number's bits.

    writes_copies: the kernel also writes the weights of a parallelized model's linears in the compute dtype, so that
    the next forward pass need not cast them. Of weights that copy engines gather over z they are written where they
    are sent from; of those that z does not shard they take memory between steps: 2 bytes per parameter in bf16. Only
    for weights that are kept gathered for the backward pass (`parallelize`), and not in CUDA graphs other than
    `CapturedStep`'s. Passes without gradients cast weights as they are. For others a weight that
    was changed is cast again if torch counts the change or an optimizer made it. Through `.data`, the local tensor of a
    detached DTensor, NumPy, custom kernels or torch._foreach functions of DTensors it is neither: call
    torch.autograd.graph.increment_version(weight) then, or training continues with the old weight until the next step.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        writes_copies: bool = False,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.writes_copies = writes_copies
        # Step counts are on the parameters' device, as with torch's fused kernels (`load_state_dict` reads "fused").
        is_cuda = all(parameter.is_cuda for group in self.param_groups for parameter in group["params"])
        for group in self.param_groups:
            group["fused"] = is_cuda

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"writes_copies": self.writes_copies}  # of a copied or pickled optimizer

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, scale: Tensor | None = None, skip: Tensor | None = None
    ) -> Any:
        """Update the parameters by their gradients times `scale` (0-dim, on the parameters' device; None: 1).

        Gradients may be left scaled or unscaled: drop them afterwards. Returns `closure`'s result. skip: bool, 0-dim,
        on the parameters' device; if it is true, weights, moments and step counts are not changed. On a GPU that is
        decided on the device, and the host does not wait.
        """
        loss = call(closure, scale)
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if parameters and all(_suits_kernel(t) for p in parameters for t in (p, p.grad)):
            scale = None if scale is None else scale.float()
            for group in self.param_groups:
                self._update(group, scale, skip)
            return loss
        if skip is not None and not all(group["fused"] for group in self.param_groups):
            if bool(skip):
                return loss
            skip = None
        if scale is not None and parameters:
            gradients = [local(p.grad) for p in parameters]
            torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))
        with skipping_after_failure(self, skip):
            super().step()
        return loss

    def _update(self, group: dict[str, Any], scale: Tensor | None, skip: Tensor | None) -> None:
        from stretto.optim.adamw_kernel import launch  # imported here, since Triton comes with GPUs

        parameters = [p for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            elif state["step"].device != parameter.device:  # loaded from an optimizer that was not fused
                state["step"] = state["step"].to(parameter.device, torch.float32)
        states = [self.state[parameter] for parameter in parameters]
        steps = [state["step"] for state in states]
        failed = failures.find_flag(parameters[0].device)
        if skip is not None:
            failed = (skip.view(1) if failed is None else skip | (failed != 0)).int()
        if failed is None:
            torch._foreach_add_(steps, 1)
        else:  # a list, since for one tensor torch would read the number from the GPU, which captured steps must not
            torch._foreach_add_(steps, [(failed[0] == 0).float()] * len(steps))
        counts = torch.stack(steps).double()
        first_rest, second_rest = (1 - beta**counts for beta in group["betas"])
        # For each parameter: step size, factor of the second moment's root, and 1 - decay. The learning rate may be a
        # tensor on the GPU, as a captured step's is.
        left = torch.ones_like(counts) - group["lr"] * group["weight_decay"]
        corrections = torch.stack((group["lr"] / first_rest, second_rest.rsqrt(), left), dim=1).float()
        for number, (parameter, state) in enumerate(zip(parameters, states, strict=True)):
            first, second = local(state["exp_avg"]), local(state["exp_avg_sq"])
            copy = getattr(parameter, "low_precision_weight", None) if self.writes_copies else None
            copied = None if copy is None else copy.open(parameter)
            launch(
                local(parameter),
                local(parameter.grad),
                first,
                second,
                corrections[number],
                scale,
                failed,
                copied,
                group,
            )
            torch.autograd.graph.increment_version(parameter)  # as torch's own writes do
            if copy is not None and copied is not None:
                copy.close(parameter)


def call(closure: Callable[[], Any] | None, scale: Tensor | None) -> Any:
    """Call a step's closure, if it has one; returns its result."""
    if closure is None:
        return None
    if scale is not None:
        raise ValueError("a closure makes new gradients, for which no scale is known: give one of the two")
    with torch.enable_grad():
        return closure()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, sharing its memory; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _suits_kernel(tensor: Tensor) -> bool:
    mine = local(tensor)
    return mine.is_cuda and mine.dtype == torch.float32 and mine.is_contiguous()
