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

from stretto.parallel.comm.autograd import apply, directly_called, is_asked_for
from stretto.parallel.comm.gradient_reducer import GradientReducer
from stretto.parallel.layout import TensorOnGrid, place_like, shard_of

_AT_ONCE = 2**64 - 1
TakeGradient = Callable[[nn.Parameter, Tensor], None]


class _Followed(NamedTuple):
    """The state of a parameter that a module has taken: its shard, and whether it is trained."""

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
        self.states = {
            key: _Followed(each, getattr(each, "_local_tensor", None), each.requires_grad)
            for key, each in parameters.items()
            if each is not None
        }
        self.tensors: tuple[Any, ...] | None = None

    def is_outdated(self, parameters: Mapping[str, nn.Parameter | None]) -> bool:
        """True if a parameter was replaced, frozen or unfrozen since (`begin_forward` compares the same)."""
        for key, (parameter, shard, requires_grad) in self.states.items():  # a call costs more than comparisons
            if parameters.get(key) is not parameter or parameter.requires_grad != requires_grad:
                return True
            if shard is not None and parameter._local_tensor is not shard:  # type: ignore[attr-defined]
                return True
        return False

    def take(self, takes: Mapping[str, TakeGradient | None], gradients: GradientReducer) -> None:
        """Make the plain tensors of the parameters that `takes` names, with what takes the gradient of each: None for
        those of which autograd accumulates it."""
        found = {key: state.parameter for key, state in self.states.items()}
        if not takes:
            return
        with torch.inference_mode(False), torch.enable_grad():
            self.tensors = tuple(
                local_tensor(found[key], gradients, take) if key in found else None for key, take in takes.items()
            )
        for tensor in self.tensors:
            if tensor is not None and tensor.grad_fn is not None:
                # Autograd runs the youngest nodes first, and this one is old: have it run at once, as those that
                # accumulate, so that sums over ranks begin during the backward pass.
                tensor.grad_fn._set_sequence_nr(_AT_ONCE)


def local_tensor(parameter: nn.Parameter, gradients: GradientReducer, take: TakeGradient | None = None) -> Tensor:
    """A parameter's shard as a plain tensor, with what takes its gradient; None: as if autograd had accumulated it."""
    found: Tensor = apply(_LocalTensor, parameter, gradients, take)
    return found


@directly_called
class _LocalTensor(torch.autograd.Function):
    """A parameter's shard. Its gradient goes to the reducer, as if autograd had accumulated it in the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, gradients: GradientReducer, take: TakeGradient | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.parameter, ctx.is_weight, ctx.scale = parameter, take is not None, 1.0
        ctx.is_watched = gradients.is_watched(parameter)
        if take is None:
            take = gradients.take if gradients.is_summed(parameter) else gradients.take_final
            ctx.scale = gradients.forward_scale(parameter)
        ctx.take = take
        assert isinstance(parameter, TensorOnGrid)
        # No view, whose node autograd replaces once the parameter has been written.
        return shard_of(parameter).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None]:
        parameter = ctx.parameter
        if gradient is None:
            return None, None, None
        if not gradient.is_contiguous():
            gradient = gradient.contiguous()
        if ctx.scale != 1:
            gradient = gradient * ctx.scale
        with torch._C.DisableTorchFunctionSubclass():  # 2.11 calls Python for each attribute of a parameter
            is_hooked = not ctx.is_watched and parameter._backward_hooks
        if not ctx.is_weight and (is_hooked or torch.is_grad_enabled()):  # autograd has a use for it
            return place_like(gradient, parameter), None, None
        with torch._C.DisableTorchFunctionSubclass():
            try:
                is_asked = parameter.requires_grad and torch._C._will_engine_execute_node(ctx.next_functions[0][0])
            except RuntimeError:  # of torch.autograd.grad
                if ctx.is_weight:
                    is_asked_for(ctx, 0)  # raises, and says why
                return place_like(gradient, parameter), None, None
            if is_asked:
                ctx.take(parameter, gradient)
        return None, None, None
