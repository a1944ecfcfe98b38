# SPDX-License-Identifier: Apache-2.0
"""Calls autograd functions as single operators of torch.compile's graphs, which do not look into them.

Functions of parallel modules gather weights ahead, keep them for the backward pass, and start to reduce gradients that
autograd does not see. A compiler could trace none of that, and would break its graph at each module. It traces
`stretto::call_function` and `stretto::differentiate_function` instead, which run such a function's `forward` and
`backward` as they are.

Of which module they run it, a tensor says: the module's key. Layers of one kind then share a graph, where a number
would be a constant of it, and each layer have its own. The key's graph leads to the weight, so that `backward(inputs=)`
finds it; and the key's gradient, zero, keeps a compiler from dropping a call that makes the weight's gradient alone.

Compilers write to a tensor's memory after its last use in a graph. So a function keeps none of its inputs and outputs
from its forward pass: the graph saves the inputs. What else it saves is in its `_GraphCall`, for as long as the graph
saves the call's token.
"""

import itertools
import struct
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from stretto.parallel.comm.kept_outputs import is_recomputed

_functions: "WeakValueDictionary[int, GraphFunction]" = WeakValueDictionary()
_calls: "WeakValueDictionary[int, _GraphCall]" = WeakValueDictionary()
_numbers = itertools.count(1)  # float64 holds them exactly


def current_stream(device: torch.device) -> int | None:
    """The CUDA stream on which work is enqueued now; None on other devices."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


class GraphFunction:
    """An autograd function of a module that compiled graphs call as one operator.

    It takes `arrange(x, other)`: x, the weight (a parameter whose gradient the function makes itself, or None), the
    tensor `other` or None, and constants. It returns one tensor of x's shape and dtype, but for the last dim.
    keeps_inputs: tells whether a backward pass now keeps what it is given for later.
    """

    def __init__(
        self,
        function: type[torch.autograd.Function],
        arrange: Callable[[Tensor, Tensor | None], tuple[Any, ...]],
        weight: Tensor | None = None,
        keeps_inputs: Callable[[], bool] = lambda: False,
    ) -> None:
        self.function: Any = function
        self.arrange = arrange
        self.keeps_inputs = keeps_inputs
        self._number = next(_numbers)
        _functions[self._number] = self
        self.follow(weight)

    def follow(self, weight: Tensor | None) -> None:
        """Take this weight from now on: a conversion has replaced it, or it was frozen or unfrozen, or the stream has
        changed: what autograd accumulates in a weight, it does on the stream on which its node was made."""
        self.key = torch.empty(0)  # frees the weight's node, which this may be all that keeps
        self.stream = None if weight is None else current_stream(weight.device)
        with torch.inference_mode(False), torch.enable_grad():
            self.key = _WeightKey.apply(weight, float(self._number))

    def __call__(self, features: int, x: Tensor, other: Tensor | None = None) -> Tensor:
        """Call the function, which returns [..., features], in the graph that is being traced."""
        needs = x.requires_grad or self.key.requires_grad or (other is not None and other.requires_grad)
        # Compilers make one call of two that are alike, but for what is empty: a new number is in no other call.
        this = torch.empty(1, dtype=torch.float64, device="cpu")
        y, _ = torch.ops.stretto.call_function(this, self.key, x, other, features, needs and torch.is_grad_enabled())
        found: Tensor = y
        return found


class _WeightKey(torch.autograd.Function):
    """A number as a tensor whose graph leads to a weight, to which it passes no gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor | None, number: float) -> Tensor:
        ctx.set_materialize_grads(False)
        return torch.tensor([number], dtype=torch.float64)  # a compiler makes a constant of one without dims

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None]:
        return None, None


class _GraphCall(bytearray):
    """A call's context, as autograd gives one to a function; its bytes are its number, and the memory of its token."""

    function: GraphFunction
    next_functions: tuple[tuple[Any, int], ...] = ()
    _inputs: tuple[Tensor | None, Tensor | None] = (None, None)
    needs_input_grad: tuple[bool, ...] = ()

    @classmethod
    def of(cls, key: Tensor, is_recorded: bool) -> "_GraphCall":
        number = next(_numbers)
        call = cls(struct.pack("d", number))
        call.function = _functions[int(key)]
        if is_recorded:
            node = call.function.key.grad_fn
            call.next_functions = ((None, 0), (None, 0) if node is None else node.next_functions[0])
            weight = call.function.arrange(key, None)[1]
            if node is None and weight is not None and weight.requires_grad:
                raise RuntimeError(
                    "a weight of a compiled module was unfrozen after the last forward pass of the whole model, which "
                    "sees that: call the model that stretto.parallelize has returned before you call a part of it"
                )
        _calls[number] = call
        return call

    def run(self, name: str, x: Tensor, other: Tensor | None, *gradients: Tensor) -> Any:
        """Run the function's `forward`, or its `backward` with gradients, on inputs that are kept for so long."""
        self._inputs = (x, other)
        try:
            with torch.no_grad():
                return getattr(self.function.function, name)(self, *(gradients or self.function.arrange(x, other)))
        finally:
            self._inputs = (None, None)

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Save tensors: of inputs, which the graph saves, only which they are."""
        self._saved = [0 if each is self._inputs[0] else each for each in tensors]
        self._versions = [_version_of(each) for each in self._saved]

    @property
    def saved_tensors(self) -> tuple[Tensor | None, ...]:
        """The saved tensors, until a backward pass frees the graph."""
        if len(self._saved) < len(self._versions):
            raise RuntimeError(
                "a second backward pass goes through a compiled module, whose first one has freed what it saved: pass "
                "retain_graph=True to the first"
            )
        if [_version_of(each) for each in self._saved] != self._versions:
            raise RuntimeError(
                "a weight of a compiled module has been modified by an inplace operation between its forward and its "
                "backward pass: take the backward pass first"
            )
        found = tuple(self._inputs[0] if isinstance(each, int) else each for each in self._saved)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self._saved = []
        return found


def _version_of(saved: Tensor | int | None) -> int | None:
    return saved._version if isinstance(saved, Tensor) and not saved.is_inference() else None


@torch.library.custom_op("stretto::call_function", mutates_args=())
def _call_function(
    this: Tensor, key: Tensor, x: Tensor, other: Tensor | None, features: int, is_recorded: bool
) -> tuple[Tensor, Tensor]:
    call = _GraphCall.of(key, is_recorded)
    y = call.run("forward", x, other)
    # A block's recomputation may keep y, whose memory the graph may use for another tensor.
    return y.clone() if is_recomputed() else y.contiguous(), torch.frombuffer(call, dtype=torch.float64)


@_call_function.register_fake
def _(
    this: Tensor, key: Tensor, x: Tensor, other: Tensor | None, features: int, is_recorded: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(*x.shape[:-1], features), torch.empty(1, dtype=torch.float64)


@torch.library.custom_op("stretto::differentiate_function", mutates_args=())
def _differentiate_function(
    key: Tensor, token: Tensor, x: Tensor, other: Tensor | None, gradient: Tensor, needs_x: bool, needs_other: bool
) -> tuple[Tensor, Tensor, Tensor]:
    call = _calls[int(token)]
    call.needs_input_grad = (needs_x, False, needs_other)
    if call.function.keeps_inputs():
        x, gradient = x.clone(), gradient.clone()
    of_x, _, of_other, *_ = call.run("backward", x, other, gradient)
    of_x, of_other = (x.new_empty(0) if each is None else each.contiguous() for each in (of_x, of_other))
    return torch.zeros_like(key), of_x, of_other


@_differentiate_function.register_fake
def _(
    key: Tensor, token: Tensor, x: Tensor, other: Tensor | None, gradient: Tensor, needs_x: bool, needs_other: bool
) -> tuple[Tensor, Tensor, Tensor]:
    of_other = x.new_empty(0) if other is None or not needs_other else other.new_empty(other.shape)
    return torch.empty_like(key), x.new_empty(x.shape if needs_x else 0), of_other


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, key, x, other, _, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(key, output[1], x, other)


def _differentiate(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    _, needs_key, needs_x, needs_other, *_ = ctx.needs_input_grad
    if gradient is None:
        return (None,) * 6
    found = torch.ops.stretto.differentiate_function(*ctx.saved_tensors, gradient, needs_x, needs_other)
    of_key, of_x, of_other = found
    return None, of_key if needs_key else None, of_x if needs_x else None, of_other if needs_other else None, None, None


_call_function.register_autograd(_differentiate, setup_context=_save)
