# SPDX-License-Identifier: Apache-2.0
"""Tells whether a backward pass is running and which gradients it asks for, calls back at its end, sums gradients.

Also the base class of this package's dispatch modes.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import function as of_torch
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.parallel.comm.collectives import all_reduce

REFUSED_GRAD = (
    "torch.autograd.grad was called for a parameter of a model that stretto.parallelize has sharded, whose gradient is "
    "reduced and written to .grad outside of autograd: call backward(), or backward(inputs=[...])"
)


def in_backward() -> bool:
    """True if this thread is inside a backward pass, also in a forward pass that is recomputed for it."""
    return torch._C._current_graph_task_id() != -1


Backward = TypeVar("Backward", bound=Callable[..., Any])
Function = TypeVar("Function", bound=torch.autograd.Function)


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply`, without its dozen calls that only torch.func needs."""
    if torch.compiler.is_dynamo_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def directly_called(function: type[Function]) -> type[Function]:
    """Class decorator: have autograd's engine call `backward` itself. torch's would look for it in two more calls."""
    function._backward_cls.apply = function.backward
    return function


def once_differentiable(backward: Backward) -> Backward:
    """torch's, without its contexts where no graph of the gradients is made."""
    checked = of_torch.once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Tensor | None) -> Any:
        return checked(ctx, *gradients) if torch.is_grad_enabled() else backward(ctx, *gradients)

    return run  # type: ignore[return-value]


def not_compiled(function: Backward) -> Backward:
    """`torch.compiler.disable` of a function, whose twenty calls are left out where no compiler runs."""
    disabled = torch.compiler.disable(function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        may_be_compiled = torch.compiler.is_dynamo_compiling() or _get_compiler() is not None  # it, or what it calls
        return (disabled if may_be_compiled else function)(*args, **kwargs)

    return run  # type: ignore[return-value]


_get_compiler = torch._C._dynamo.eval_frame.get_eval_frame_callback
# Sets what compiles frames from now on, None for nothing, and returns what did before.
set_compiler = torch._C._dynamo.eval_frame.set_eval_frame


def compiled_within(function: Backward) -> Backward:
    """Have a compiler compile what `function` calls, and not itself, as `torch.compiler.disable(recursive=False)` does.

    That has a wrapper around it, and looks at its frame anew in every call: 300 calls of Python.
    """
    from torch._dynamo.eval_frame import skip_code  # here: it takes a second to import

    skip_code(function.__code__)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


class SelectiveMode(TorchDispatchMode):
    """Base class of dispatch modes that look for some operators only, and call all others unchanged.

    Under other modes `stretto.parallel.layers.fused` uses PyTorch's operators in place of its kernels, whose results
    have other last bits on GPUs. Under these it keeps its kernels, so that a step that is counted has the bits of all
    others.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def at_end_of_backward(function: Callable[[], None], *, also_if_it_raises: bool = False) -> None:
    """Call `function` at the end of this thread's current backward pass.

    also_if_it_raises: also once that has raised.
    """
    queued = _CalledOrDropped(function) if also_if_it_raises else function
    torch.autograd.Variable._execution_engine.queue_callback(queued)


class _CalledOrDropped:
    """Calls a function when it is called, or else when it is dropped, as by autograd after a pass that has raised."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function

    def __call__(self) -> None:
        function, self._function = self._function, None
        if function is not None:
            function()

    __del__ = __call__


def is_asked_for(ctx: Any, place: int) -> bool:
    """True if the running backward pass asks for the gradient of a Function's tensor input number `place`.

    For weights, whose gradients autograd does not see: its own flags say only that they are trainable, but
    `torch.autograd.grad(loss, activation)` and `backward(inputs=...)` ask for no weight's. Raises RuntimeError where
    `torch.autograd.grad` asks for a weight's.
    """
    node, _ = ctx.next_functions[place]
    # Frozen before the forward pass, or since.
    if node is None or not getattr(node, "variable", ctx).requires_grad:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError as error:
        if "autograd.grad" not in str(error):
            raise
        raise RuntimeError(REFUSED_GRAD) from error


class _InputChain(threading.local):
    """Leads a tensor that several linears take in a row through their nodes: each passes it on to the next, as a view.

    So a linear's backward pass is given the sum of the input's gradients of those after it, and adds its own within the
    product that makes it. Autograd would add them by kernels, of which each reads two gradients and writes one.
    """

    _last: tuple[Tensor, int, Tensor] | None = None

    def follow(self, x: Tensor) -> Tensor:
        """Return what the linear before passed on, if it took this tensor, not written since; else x."""
        if self._last is None or self._last[0] is not x or self._last[1] != x._version:
            return x
        return self._last[2]

    def note(self, x: Tensor, passed_on: Tensor) -> None:
        self._last = x, x._version, passed_on

    def forget(self) -> None:
        """Free the tensors, at the end of a forward pass, and at both ends of code that is computed again."""
        self._last = None


input_chain = _InputChain()


def with_gradient_of_its_own(tensor: Tensor) -> Tensor:
    """The same tensor, whose gradient shares its memory with no other one.

    Autograd adds to a DTensor's gradient in place, though what is in it may be another parameter's, too: a batch of one
    row gives one tensor to both of `x + positions` and `torch.cat((token, x), 1)` for parameters with a dim 0 of 1.
    """
    return apply(_WithOwnGradient, tensor)


class _WithOwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()


def scale_gradient(tensor: Tensor, scale: float) -> Tensor:
    """The same tensor, whose gradient is multiplied by `scale`."""
    return tensor if scale == 1 else apply(_ScaleGradient, tensor, scale)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.scale, None


def sum_gradient(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same, of which each rank of the group will have a part of the gradient."""
    return apply(_SumGradient, tensor, group)


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient.clone(memory_format=torch.contiguous_format), ctx.group), None
