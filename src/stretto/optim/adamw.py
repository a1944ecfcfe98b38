# SPDX-License-Identifier: Apache-2.0
"""AdamW with gradient scaling in its step: one kernel clips and updates, and reads and writes each number once."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.memory import failures
from stretto.optim.guard import skipping_after_failure
from stretto.parallel.comm.gradient_norm import scale_gradients
from stretto.parallel.layout import GRAD, TensorOnGrid, shard_of


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW whose `step` multiplies gradients by a factor, so that clipping needs no separate pass.

    The state has torch's names and shapes, and each can load the other's. On a GPU, contiguous fp32 parameters are
    updated by a Triton kernel, which moves 28 bytes a parameter, where scaling first moves 36. All others are scaled by
    `scale_gradients` and updated by torch, as are all where a group, or a state that was loaded, has `amsgrad` or
    `maximize`. On a GPU, a step after a failed wait for another rank updates nothing (`stretto.optim.guard`).

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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as torch does. Moments that were saved in channels_last get the layout of their parameter."""
        super().load_state_dict(state_dict)
        for parameter, held in self.state.items():
            if isinstance(parameter, Tensor) and local(parameter).is_contiguous():
                held |= {name: value.contiguous() for name, value in held.items() if isinstance(value, Tensor)}

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
        with torch._C.DisableTorchFunctionSubclass():  # 2.11 asks `ShardedParameter` for each attribute of a parameter
            groups = [  # the parameters that have gradients, each with this rank's parts of both
                [(p, local(p), local(gradient)) for p in group["params"] if (gradient := GRAD.__get__(p)) is not None]
                for group in self.param_groups
            ]
            gradients = [gradient for found in groups for _, _, gradient in found]
            parts = [*gradients, *(mine for found in groups for _, mine, _ in found)]
            is_plain = not any(group["amsgrad"] or group["maximize"] for group in self.param_groups)
            if gradients and is_plain and all(map(_suits_kernel, parts)):
                scale = None if scale is None else scale.float()
                for group, found in zip(self.param_groups, groups, strict=True):
                    self._update(group, found, scale, skip)
                return loss
        if skip is not None and not all(group["fused"] for group in self.param_groups):
            if bool(skip):
                return loss
            skip = None
        if scale is not None:
            scale_gradients(gradients, scale)
        with skipping_after_failure(self, skip):
            unhooked(torch.optim.AdamW.step)(self)
        for found in groups:
            _count_writes(found)
        return loss

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Collect what torch's step updates: shards, since DTensor would look at the placements of each, each time."""
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:  # `step` has taken the parameters' shards, once they were written
            tensors[:] = [each._local_tensor if isinstance(each, DTensor) else each for each in tensors]
        return has_complex

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, as torch does."""
        with torch._C.DisableTorchFunctionSubclass():
            super().zero_grad(set_to_none)

    def _update(
        self,
        group: dict[str, Any],
        found: list[tuple[nn.Parameter, Tensor, Tensor]],
        scale: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        from stretto.optim.adamw_kernel import AdamWTensors, launch  # imported here, since Triton comes with GPUs

        if not found:
            return
        steps, updates, copies = [], [], []
        for parameter, mine, gradient in found:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            elif state["step"].device != mine.device:  # loaded from an optimizer that was not fused
                state["step"] = state["step"].to(mine.device, torch.float32)
            copy = getattr(parameter, "low_precision_weight", None) if self.writes_copies else None
            copied = None if copy is None else copy.open(parameter)
            if copy is not None and copied is not None:
                copies.append((copy, parameter))
            steps.append(state["step"])
            updates.append(AdamWTensors(mine, gradient, local(state["exp_avg"]), local(state["exp_avg_sq"]), copied))
        failed = failures.find_flag(updates[0].parameter.device)
        if skip is not None:
            failed = (skip.view(1) if failed is None else skip | (failed != 0)).int()
        if failed is None:
            torch._foreach_add_(steps, 1)
        else:  # a list, since for one tensor torch would read the number from the GPU, which captured steps must not
            torch._foreach_add_(steps, [(failed[0] == 0).float()] * len(steps))
        # Those that one launch updates follow each other.
        order = sorted(range(len(updates)), key=lambda number: updates[number].kind)
        counts = torch.stack([steps[number] for number in order]).double()
        first_rest, second_rest = (1 - beta**counts for beta in group["betas"])
        # For each parameter: step size, factor of the second moment's root, and 1 - decay. The learning rate may be a
        # tensor on the GPU, as a captured step's is.
        left = torch.ones_like(counts) - group["lr"] * group["weight_decay"]
        corrections = torch.stack((group["lr"] / first_rest, second_rest.rsqrt(), left), dim=1).float()
        launch([updates[number] for number in order], corrections, scale, failed, group)
        _count_writes(found)
        for copy, parameter in copies:
            copy.close(parameter)


def _count_writes(found: list[tuple[nn.Parameter, Tensor, Tensor]]) -> None:
    """Have versions show a step, as torch's own writes do: the parameters', and the shards', which autograd saves."""
    torch.autograd.graph.increment_version([each for parameter, mine, _ in found for each in (parameter, mine)])


def call(closure: Callable[[], Any] | None, scale: Tensor | None) -> Any:
    """Call a step's closure, if it has one; returns its result."""
    if closure is None:
        return None
    if scale is not None:
        raise ValueError("a closure makes new gradients, for which no scale is known: give one of the two")
    with torch.enable_grad():
        return closure()


def unhooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a base class's `step` without the wrapper by which torch calls hooks: the subclass's step has called them.

    torch wraps a class's step when its first optimizer is made.
    """
    return inspect.unwrap(step, stop=lambda inner: not hasattr(inner, "hooked"))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, sharing its memory, outside of autograd; a plain tensor as it is."""
    if isinstance(tensor, TensorOnGrid):
        return shard_of(tensor)
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _suits_kernel(mine: Tensor) -> bool:
    return mine.is_cuda and mine.dtype == torch.float32 and mine.is_contiguous()
