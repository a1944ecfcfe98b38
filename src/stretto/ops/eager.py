"""Calls that torch only runs, which need not go through torch.library: its way takes the host 10 to 30 microseconds."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

_PLAIN = {Tensor, torch.nn.Parameter, type(None)}
_TENSORS = 3  # x, weight and bias, which come first

_P = ParamSpec("_P")
_R = TypeVar("_R")


def outside_autocast(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, in which no autocast casts: an operator's dtype is its operands', whatever runs it."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch._C._is_any_autocast_enabled():
            return function(*args, **kwargs)
        with torch._C._DisableAutocast():
            return function(*args, **kwargs)

    return run


def is_traced(*tensors: Tensor | None) -> bool:
    """Whether torch does more with a call than run it: traces, transforms or watches it, or has classes of its own."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None  # by torch.jit.trace
        or is_in_torch_dispatch_mode()
        or torch._C._are_functorch_transforms_active()
        or not _PLAIN.issuperset(map(type, tensors))
    )


def is_differentiated(*tensors: Tensor | None) -> bool:
    """Whether torch is to be told of a call: some of its tensors need gradients, or may have forward-mode tangents.

    No operator here has forward-mode derivatives, and torch says so of what it is told of.
    """
    return forward_ad._current_level >= 0 or needs_gradients(*tensors)


def needs_gradients(*tensors: Tensor | None) -> bool:
    """Whether some of a call's tensors need gradients."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def require_no_tangents(*tensors: Tensor | None) -> None:
    """NotImplementedError for forward-mode derivatives, of which torch.library would make zeros without a word."""
    if forward_ad._current_level < 0:
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                "stretto's operators have no forward-mode derivatives (jvp): differentiate them backward"
            )


def shorten(
    name: str,
    run: Callable[..., Any],
    operator: Callable[..., Any],
    save: Callable[[Any, tuple[Any, ...], Any], None],
    differentiate: Callable[..., Any],
) -> Callable[..., Any]:
    """The operator, which takes x, weight, bias and more, as a function that goes past torch.library where it can.

    name: in profiles. run: what the operator does; save, differentiate: as `register_autograd` takes them. Where torch
    does more with a call than run it, the operator itself is called.
    """

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = run(*inputs)
        save(ctx, inputs, output)  # here, since a setup_context has torch look at forward's signature at each call
        return output

    members = {"forward": staticmethod(forward), "backward": staticmethod(differentiate)}
    function: Any = type(name, (torch.autograd.Function,), members)

    def call(*inputs: Any) -> Any:
        tensors = inputs[:_TENSORS]
        if is_traced(*tensors):
            require_no_tangents(*tensors)
            return operator(*inputs)
        if is_differentiated(*tensors):
            return function.apply(*inputs)
        return run(*inputs)

    return call
