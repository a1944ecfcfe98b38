# SPDX-License-Identifier: Apache-2.0
"""Shards as plain tensors, for modules that compute with them as they are: neither gathered nor cast.

To take a shard out of a DTensor, and to wrap its gradient, costs the host dozens of Python calls at each use, and a
compiled graph checks a DTensor by many more. So a module takes its shards once, and keeps them for all passes. The node
that autograd finds behind such a tensor saves nothing, so that any number of graphs may lead through it.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.parallel.comm.autograd import is_asked_for
from stretto.parallel.comm.gradient_reducer import GradientReducer
from stretto.parallel.layout import has_layout, place_like

TakeGradient = Callable[[nn.Parameter, Tensor], None]


class _Followed(NamedTuple):
    """The state of a parameter that a module has taken: its shard, and whether it is trained."""

    key: str
    parameter: nn.Parameter
    shard: Tensor | None
    requires_grad: bool


class LocalTensors:
    """The states of a module's parameters when it took them, and plain tensors of their shards if it computes with
    such.

    stream: on which autograd accumulates their gradients.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], stream: int | None) -> None:
        self.stream = stream
        self.of = tuple(
            _Followed(key, each, getattr(each, "_local_tensor", None), each.requires_grad)
            for key, each in parameters.items()
            if each is not None
        )
        self.tensors: tuple[Tensor | None, ...] | None = None

    def is_outdated(self, parameters: Mapping[str, nn.Parameter | None], stream: int | None) -> bool:
        """True if a parameter was replaced, frozen or unfrozen since, or the stream is another one."""
        if stream != self.stream:
            return True
        for key, parameter, shard, requires_grad in self.of:  # each call costs more than these comparisons
            if parameters.get(key) is not parameter or parameter.requires_grad != requires_grad:
                return True
            if shard is not None and parameter._local_tensor is not shard:  # type: ignore[attr-defined]
                return True
        return False

    def take(self, takes: Mapping[str, TakeGradient | None], gradients: GradientReducer) -> None:
        """Make the plain tensors of the parameters that `takes` names, with what takes the gradient of each: None for
        those of which autograd accumulates it."""
        found = {each.key: each.parameter for each in self.of}
        if not takes or not all(has_layout(each) for each in found.values()):
            return
        with torch.inference_mode(False), torch.enable_grad():
            self.tensors = tuple(
                _LocalTensor.apply(found[key], gradients, take) if key in found else None for key, take in takes.items()
            )


class _LocalTensor(torch.autograd.Function):
    """A parameter's shard. Its gradient goes to the reducer, as if autograd had accumulated it in the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, gradients: GradientReducer, take: TakeGradient | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.parameter, ctx.take = parameter, take
        ctx.scale = 1.0 if take is not None else gradients.forward_scale(parameter)
        ctx.is_watched = gradients.is_watched(parameter)
        ctx.take_accumulated = gradients.take if gradients.is_summed(parameter) else gradients.take_final
        assert isinstance(parameter, DTensor)
        # No view, whose node autograd replaces once the parameter has been written.
        return parameter.to_local().detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None]:
        parameter, take = ctx.parameter, ctx.take
        if gradient is None:
            return None, None, None
        if not gradient.is_contiguous():
            gradient = gradient.contiguous()
        if take is not None:
            if is_asked_for(ctx, 0):
                take(parameter, gradient)
            return None, None, None
        if ctx.scale != 1:
            gradient = gradient * ctx.scale
        if _is_hooked_or_returned(ctx, parameter):
            return place_like(gradient, parameter), None, None
        ctx.take_accumulated(parameter, gradient)
        return None, None, None


def _is_hooked_or_returned(ctx: Any, parameter: nn.Parameter) -> bool:
    """True if autograd has a use for the gradient: a user's hooks, `torch.autograd.grad`, or a graph of it."""
    if (parameter._backward_hooks and not ctx.is_watched) or torch.is_grad_enabled():
        return True
    try:
        return not is_asked_for(ctx, 0)
    except RuntimeError:
        return True
